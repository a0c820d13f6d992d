"""tierkv: a tiered storage engine that keeps the KV cache of LLM serving alive beyond one GPU."""

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

__version__ = "0.1.0"

__all__ = [
    "ArgumentError", "BlockStatus", "ClosedError", "Clock", "ConfigError", "DfsConfig", "DramConfig", "FormatError",
    "Fragments", "Job", "Keyspace", "KeyspaceError", "KeyspaceSpec", "Lease", "LockedError", "Match", "NvmeConfig",
    "StorageError", "Store", "StoreConfig", "StoreStats", "SystemClock", "TierKVError", "TierKind", "TierStats",
    "VirtualClock", "load_config", "pack_hashes",
]  # fmt: skip
