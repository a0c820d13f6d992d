"""The tier's options: its entry in `secondary_tiers`, typed. Unknown keys are refused.

Sizes may be written as integers or as text such as "64GiB". What finds or starts the agent goes by the same keys as
in the tierkv connector, and means the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from tierkv.adapters.vllm.settings import ConnectorSettings
from tierkv.config import validate
from tierkv.errors import ConfigError

WHERE = "secondary_tiers, type TierKVTier"
"""What stands before an option in messages."""
Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]
_STORE_KEYS = ("dram_bytes", "nvme_directory", "nvme_bytes", "dfs_directory")


class TierOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every option, with its default."""

    agent: str = ""
    """The node agent's socket, as unix:PATH. Empty: a path of this user's, the same for all engines of the host."""
    start_agent: bool = True
    """Start an agent at that socket if none is there, also when it went away. It goes on when the engine ends."""
    agent_idle_s: Annotated[float, msgspec.Meta(ge=0)] = 900.0
    """How long an agent that was started here stays without clients. 0: for ever."""
    agent_wait_s: Seconds = 30.0
    """How long to wait for the agent when the engine starts. After that the engine goes on without it, and takes it
    up when it is there."""
    dram_bytes: int | str = "4GiB"
    """DRAM of an agent that is started here. It is beside the CPU tier of vLLM, and needs no more than what is on its
    way to or from a lower tier."""
    nvme_directory: str | None = None
    """Its directory on a local disk. None: no NVMe tier."""
    nvme_bytes: int | str = "64GiB"
    """Its size."""
    dfs_directory: str | None = None
    """Its directory on a shared file system. None: no such tier."""
    model: str | None = None
    """The model's name in the keyspace, where engines that share blocks spell it differently. None: as vLLM does."""
    model_revision: str | None = None
    """The weights' revision in the keyspace. None: the hub's commit; for a local directory its files' names, sizes,
    times and settings."""
    extra_identity: dict[str, str] = {}
    """Whatever else tells this engine's blocks from those of others, such as a weights' version of your own."""
    save: bool = True
    """Whether blocks are saved."""
    load: bool = True
    """Whether blocks are looked up and loaded."""
    lookup_timeout_s: Seconds = 1.0
    """A look-up that takes longer counts as a miss."""
    lookup_keep_s: Seconds = 5.0
    """How long the answer to a look-up stands for other requests; after that the agent is asked again."""
    max_lookup_blocks: Annotated[int, msgspec.Meta(ge=1)] = 1 << 18
    """Blocks whose look-ups may be under way at a time; more are misses."""
    load_timeout_s: Seconds = 30.0
    """A load that takes longer has failed; its blocks are computed."""
    save_timeout_s: Seconds = 60.0
    """A save that takes longer is dropped."""
    max_saving_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    """The share of vLLM's CPU tier that saves may hold until they are read; more are dropped. A batch of blocks that
    comes when no other is being saved is always taken."""
    copy_threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    """Threads that copy blocks between vLLM's CPU tier and the agent's memory."""
    clear_on_reset: bool = True
    """Whether a reset of the connector's cache (sleep, pause with clear_cache, a weight update, reset_prefix_cache with
    reset_connector) also removes this model's blocks from the agent. Off: only if the weights never change under one
    revision."""
    shutdown_wait_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 5.0
    """How long the end of the engine waits for saves under way."""
    locality: Literal["LOCAL", "REMOTE"] | None = None
    """What KV cache events, vLLM's filters by tier and its default water marks of back-pressure take this tier for."""
    enable_kv_events: bool = False
    """Publish BlockStored events of saved blocks, where KV cache events are on at all."""
    allow_untested_vllm: bool = False
    """Start with a version of vLLM outside the supported range."""

    def attach_settings(self, wait_s: float | None = None) -> ConnectorSettings:
        """What finds or starts the agent. `wait_s`: instead of agent_wait_s."""
        return ConnectorSettings(
            agent=self.agent,
            start_agent=self.start_agent,
            agent_idle_s=self.agent_idle_s,
            agent_wait_s=self.agent_wait_s if wait_s is None else wait_s,
            dram_bytes=self.dram_bytes,
            nvme_directory=self.nvme_directory,
            nvme_bytes=self.nvme_bytes,
            dfs_directory=self.dfs_directory,
        )


def read_options(given: Mapping[str, Any]) -> TierOptions:
    """Reads the tier's entry, without what vLLM takes out of it; ConfigError names the wrong key."""
    try:
        options = msgspec.convert(dict(given), type=TierOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{WHERE}: {error}; docs/vllm-offloading.md lists the options") from error
    if options.start_agent:
        validate(options.attach_settings().store(), WHERE)
        return options
    useless = [key for key in _STORE_KEYS if key in given]
    if useless:
        raise ConfigError(
            f"{WHERE}: {', '.join(useless)} would only matter for an agent that is started here, but start_agent is "
            f"false: set them where the agent is started"
        )
    return options
