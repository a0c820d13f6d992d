"""The connector's settings: `kv_connector_extra_config`, typed. Unknown keys are refused.

Sizes may be written as integers or as text such as "64GiB".
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from tierkv.config import DfsConfig, DramConfig, NvmeConfig, StoreConfig, parse_bytes, validate
from tierkv.errors import ConfigError

StorePolicy = Literal["all", "periodic", "boundary"]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]
_LEAST_STAGING_BYTES = 1 << 20
_STORE_KEYS = ("dram_bytes", "nvme_directory", "nvme_bytes", "dfs_directory")


class ConnectorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every key of kv_connector_extra_config, with its default."""

    agent: str = ""
    """The node agent's socket, as unix:PATH. Empty: a path of this user's, the same for all engines of the host."""
    start_agent: bool = True
    """Start an agent at that socket if none is there. It goes on when the engine ends, so that the next engine finds
    the cache, until no engine was attached for agent_idle_s."""
    agent_idle_s: Annotated[float, msgspec.Meta(ge=0)] = 900.0
    """How long an agent that was started here stays without clients. 0: for ever."""
    agent_wait_s: Seconds = 30.0
    """How long to wait for the agent when the engine starts. After that the engine does not start."""
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
    """The weights' revision in the keyspace. None: the hub's commit; for a local directory its files' names, sizes,
    times and settings."""
    save: bool | None = None
    """Whether this engine saves blocks. None: if its kv_role is kv_producer or kv_both."""
    load: bool | None = None
    """Whether this engine loads blocks. None: if its kv_role is kv_consumer or kv_both."""
    load_async: bool = True
    """Load while other requests run. Off, a request's load holds up the engine's step; models with anything but full
    attention load asynchronously in any case."""
    min_load_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Hits that save fewer tokens than this are computed instead."""
    sliding_window: StorePolicy = "periodic"
    """What is kept of sliding-window groups: every block (all), what resumes at every period_tokens and at the ends of
    prompts and requests need (periodic), or only the latter (boundary)."""
    chunked_local: StorePolicy = "periodic"
    """The same for chunked local attention."""
    period_tokens: Annotated[int, msgspec.Meta(ge=1)] = 2048
    """The distance of the boundaries of `periodic`; rounded up to what all groups share."""
    lookup_wait_s: Annotated[float, msgspec.Meta(ge=0, le=0.1)] = 0.002
    """How long look-ups may hold up one engine step, all together. What takes longer is asked for again in the next."""
    lookup_timeout_s: Seconds = 1.0
    """A look-up that takes longer counts as a miss."""
    lease_s: Annotated[float, msgspec.Meta(ge=1, le=300)] = 20.0
    """How long blocks of a hit stay promised without the engine asking for them again."""
    load_timeout_s: Seconds = 30.0
    """A load that takes longer has failed; its blocks are computed."""
    save_timeout_s: Seconds = 30.0
    """A save that takes longer is dropped."""
    max_held_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    """The share of the engine's blocks that saves may hold until they are read; more wait, and are dropped when their
    request ends."""
    copy_threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    """Threads that copy blocks between the engine and the agent's memory, in each worker."""
    staging_bytes: int | str = "256MiB"
    """Page-locked host memory, and as much of the accelerator's, that blocks pass through, in each worker. Only for
    caches on an accelerator. A block must fit in an eighth of it."""
    allow_untested_vllm: bool = False
    """Start with a version of vLLM outside the supported range."""

    def socket(self) -> str:
        """The agent's address for tierkv.connect()."""
        if self.agent:
            return self.agent if self.agent.startswith("unix:") else f"unix:{self.agent}"
        return f"unix:{default_directory() / 'agent.sock'}"

    def staging(self) -> int:
        """staging_bytes as a number."""
        return parse_bytes(self.staging_bytes, "kv_connector_extra_config.staging_bytes")

    def store(self) -> StoreConfig:
        """The tiers of an agent that is started here."""
        nvme = dfs = None
        if self.nvme_directory is not None:
            nvme = NvmeConfig(
                directory=self.nvme_directory, capacity_bytes=_rounded(self.nvme_bytes, "nvme_bytes")
            )
        if self.dfs_directory is not None:
            dfs = DfsConfig(directory=self.dfs_directory)
        return StoreConfig(
            dram=DramConfig(capacity_bytes=_rounded(self.dram_bytes, "dram_bytes"), shared=True),
            nvme=nvme, dfs=dfs,
        )  # fmt: skip


def _rounded(value: int | str, where: str) -> int:
    return parse_bytes(value, f"kv_connector_extra_config.{where}") // 4096 * 4096


def default_directory() -> Path:
    """Where this user's agent has its socket, unless it is told otherwise."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        return Path(runtime) / "tierkv"
    return Path(tempfile.gettempdir()) / f"tierkv-{os.getuid()}"


def read_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Reads kv_connector_extra_config; ConfigError names the wrong key."""
    try:
        settings = msgspec.convert(dict(extra), type=ConnectorSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"kv_connector_extra_config: {error}; docs/vllm.md lists the keys of the tierkv connector"
        ) from error
    if settings.staging() < _LEAST_STAGING_BYTES:
        raise ConfigError(
            f"kv_connector_extra_config: staging_bytes is {settings.staging_bytes!r}: "
            f"{_LEAST_STAGING_BYTES} or more is needed"
        )
    if not settings.start_agent:
        given = [key for key in _STORE_KEYS if key in extra]
        if given:
            raise ConfigError(
                f"kv_connector_extra_config: {', '.join(given)} would only matter for an agent that is started here, "
                f"but start_agent is false: set them where the agent is started"
            )
    else:
        validate(settings.store(), "kv_connector_extra_config")
    return settings
