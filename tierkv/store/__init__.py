"""The store: the only place that joins index, tiers and placement. See facade.py for what callers use."""

from tierkv.store.changes import CHANGES_KEPT, ChangePlace, Changes
from tierkv.store.facade import Lease, Match, Query, Store
from tierkv.store.saving import Reservation
from tierkv.store.statistics import LATENCY_BOUNDS_S, OPERATIONS, LatencyStats, StoreStats, TierStats

__all__ = [
    "CHANGES_KEPT", "LATENCY_BOUNDS_S", "OPERATIONS", "ChangePlace", "Changes", "LatencyStats", "Lease", "Match",
    "Query", "Reservation", "Store", "StoreStats", "TierStats",
]  # fmt: skip
