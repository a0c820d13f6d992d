"""AgentOptions: what every adapter is told about the agent, typed. Each adapter's own settings extend it.

Sizes may be written as integers or as text such as "64GiB". Unknown keys are refused.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from tierkv.config import DfsConfig, DramConfig, NvmeConfig, StoreConfig, parse_bytes, validate
from tierkv.errors import ConfigError

Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]
_STORE_KEYS = ("dram_bytes", "nvme_directory", "nvme_bytes", "dfs_directory")


class AgentOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What finds or starts the agent, names the model to it, and bounds its answers.

    Where an option means more to one adapter, that one declares it again and says so.
    """

    where: ClassVar[str] = "options"
    """Where users write them: it stands before an option in messages."""

    agent: str = ""
    """The node agent's socket, as unix:PATH. Empty: a path of this user's, the same for all engines of the host."""
    start_agent: bool = True
    """Start an agent at that socket if none is there, also when it went away while the engine runs. It goes on when the
    engine ends, so that the next engine finds the cache, until no engine was attached for agent_idle_s."""
    agent_idle_s: Annotated[float, msgspec.Meta(ge=0)] = 900.0
    """How long an agent that was started here stays without clients. 0: for ever."""
    agent_wait_s: Seconds = 30.0
    """How long to wait for the agent when the engine starts."""
    dram_bytes: int | str = "4GiB"
    """DRAM of an agent that is started here."""
    nvme_directory: str | None = None
    """Its directory on a local disk. None: no NVMe tier."""
    nvme_bytes: int | str = "64GiB"
    """Its size."""
    dfs_directory: str | None = None
    """Its directory on a shared file system. None: no such tier."""
    model: str | None = None
    """The model's name in the keyspace, where engines that share blocks spell it differently. None: as vLLM does."""
    model_revision: str | None = None
    """The revision of the weights, a draft model's included, in the keyspace. None: the hub's commit; for a local
    directory its files' names, sizes and times, its settings and code."""
    lookup_timeout_s: Seconds = 1.0
    """A look-up that takes longer counts as a miss."""
    on_reset: Literal["renew", "clear", "keep"] = "renew"
    """What a reset of the connector's cache (a weight update, sleep, pause with clear_cache, reset_prefix_cache with
    reset_connector) does to the store. renew: this engine's blocks are removed, and from then on it saves and finds
    blocks under a name of its own until it is restarted, since nobody tells which weights it has. clear: they are
    removed. keep: nothing. The latter two only if weights never change under one revision."""
    load_timeout_s: Seconds = 30.0
    """A load that takes longer has failed; its blocks are computed."""
    allow_untested_vllm: bool = False
    """Start with a version of vLLM outside the supported range."""

    def socket(self) -> str:
        """The agent's address for tierkv.connect()."""
        if self.agent:
            return self.agent if self.agent.startswith("unix:") else f"unix:{self.agent}"
        return f"unix:{default_directory() / 'agent.sock'}"

    def store(self) -> StoreConfig:
        """The tiers of an agent that is started here. ConfigError where a size is none."""
        nvme = dfs = None
        if self.nvme_directory is not None:
            nvme = NvmeConfig(directory=self.nvme_directory, capacity_bytes=self._pages("nvme_bytes"))
        if self.dfs_directory is not None:
            dfs = DfsConfig(directory=self.dfs_directory)
        dram = DramConfig(capacity_bytes=self._pages("dram_bytes"), shared=True)
        return StoreConfig(dram=dram, nvme=nvme, dfs=dfs)

    def size(self, name: str) -> int:
        """An option in bytes, as a number. ConfigError names it where it is no size."""
        return parse_bytes(getattr(self, name), f"{self.where}: {name}")

    def _pages(self, name: str) -> int:
        return self.size(name) // 4096 * 4096


Options = TypeVar("Options", bound=AgentOptions)


def read_options_as(kind: type[Options], given: Mapping[str, Any]) -> Options:
    """What a user wrote as an adapter's options; ConfigError names the wrong key."""
    try:
        options = msgspec.convert(dict(given), type=kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{kind.where}: {error}; docs/configuration.md lists the keys") from error
    if options.start_agent:
        validate(options.store(), kind.where)
        return options
    useless = [key for key in _STORE_KEYS if key in given]
    if useless:
        raise ConfigError(
            f"{kind.where}: {', '.join(useless)} would only matter for an agent that is started here, but start_agent "
            f"is false: set them where the agent is started"
        )
    return options


def default_directory() -> Path:
    """Where this user's agent has its socket, unless it is told otherwise."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        return Path(runtime) / "tierkv"
    return Path(tempfile.gettempdir()) / f"tierkv-{os.getuid()}"
