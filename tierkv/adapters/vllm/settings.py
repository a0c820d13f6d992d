"""The connector's settings: `kv_connector_extra_config`, typed. Unknown keys are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from tierkv.adapters.vllm.agent_options import AgentOptions, Seconds, read_options_as
from tierkv.errors import ConfigError

StorePolicy = Literal["all", "periodic", "boundary"]
_LEAST_STAGING_BYTES = 1 << 20


class ConnectorSettings(AgentOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every key of kv_connector_extra_config, with its default."""

    where: ClassVar[str] = "kv_connector_extra_config"

    agent_wait_s: Seconds = 30.0
    """How long to wait for the agent when the engine starts. After that the engine does not start."""
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
    lease_s: Annotated[float, msgspec.Meta(ge=1, le=300)] = 20.0
    """How long blocks of a hit stay promised without the engine asking for them again."""
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

    def staging(self) -> int:
        """staging_bytes as a number."""
        return self.size("staging_bytes")


def read_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Reads kv_connector_extra_config; ConfigError names the wrong key."""
    settings = read_options_as(ConnectorSettings, extra)
    if settings.staging() < _LEAST_STAGING_BYTES:
        raise ConfigError(
            f"{settings.where}: staging_bytes is {settings.staging_bytes!r}: {_LEAST_STAGING_BYTES} or more is needed"
        )
    return settings
