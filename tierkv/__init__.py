"""tierkv: a tiered storage engine that keeps the KV cache of LLM serving alive beyond one GPU."""

from typing import TYPE_CHECKING

from tierkv.clock import Clock, SystemClock, VirtualClock
from tierkv.config import DfsConfig, DramConfig, NvmeConfig, StoreConfig, load_config
from tierkv.errors import (
    ArgumentError,
    ClosedError,
    ConfigError,
    FormatError,
    KeyspaceError,
    LockedError,
    StorageError,
    TierKVError,
)
from tierkv.fragments import Fragments
from tierkv.jobs import Job
from tierkv.keys import Keyspace, KeyspaceSpec, pack_hashes
from tierkv.store import Lease, Match, Store, StoreStats, TierStats
from tierkv.types import BlockStatus, TierKind

if TYPE_CHECKING:
    from tierkv.agent.aio import AsyncAgentStore
    from tierkv.agent.client import AgentStore

__version__ = "0.1.0"

__all__ = [
    "ArgumentError", "BlockStatus", "ClosedError", "Clock", "ConfigError", "DfsConfig", "DramConfig", "FormatError",
    "Fragments", "Job", "Keyspace", "KeyspaceError", "KeyspaceSpec", "Lease", "LockedError", "Match", "NvmeConfig",
    "StorageError", "Store", "StoreConfig", "StoreStats", "SystemClock", "TierKVError", "TierKind", "TierStats",
    "VirtualClock", "connect", "connect_async", "load_config", "pack_hashes",
]  # fmt: skip


def connect(
    address: str | None = None,
    *,
    config: StoreConfig | None = None,
    timeout_s: float = 30.0,
    name: str = "",
    call_timeout_s: float = 1.0,
    copy_threads: int = 2,
    load_timeout_s: float = 30.0,
    save_timeout_s: float = 60.0,
) -> "AgentStore":
    """A client of a node agent, with the calls of Store.

    `address` is "unix:PATH" (or PATH), the socket of an agent that runs; AgentUnavailable if none answers. Without it
    an agent is started for this process alone, with `config` (default: 1 GiB of DRAM), and ends with close() or with
    the process, however that dies; StorageError with its last log lines if it is not up within `timeout_s`.

    `call_timeout_s` bounds look-ups and leases; `load_timeout_s` and `save_timeout_s` are the defaults of jobs.
    """
    from tierkv.agent.embedded import connect as connect_agent  # an in-process Store needs nothing of it

    return connect_agent(
        address,
        config=config,
        timeout_s=timeout_s,
        name=name,
        call_timeout_s=call_timeout_s,
        copy_threads=copy_threads,
        load_timeout_s=load_timeout_s,
        save_timeout_s=save_timeout_s,
    )


async def connect_async(
    address: str | None = None,
    *,
    config: StoreConfig | None = None,
    timeout_s: float = 30.0,
    **options: object,
) -> "AsyncAgentStore":
    """As connect(), with the same options, for asyncio: the calls are awaited."""
    from tierkv.agent.aio import connect_async as connect_agent

    return await connect_agent(address, config=config, timeout_s=timeout_s, **options)
