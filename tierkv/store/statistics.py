"""Counters of a store, and the snapshot that stats() returns.

Thread safety: Counters has one lock; every method may be called from any thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np

from tierkv.types import BlockStatus, TierKind, UInt8Array


class TierStats(msgspec.Struct, kw_only=True):
    """One tier. Bytes are of blocks, not of slots. Times are wall time in which at least one transfer was under way."""

    capacity_bytes: int
    used_bytes: int
    blocks: int
    hit_blocks: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    written_blocks: int = 0
    written_bytes: int = 0
    write_s: float = 0.0
    evicted_blocks: int = 0
    healthy: bool = True


class StoreStats(msgspec.Struct, kw_only=True):
    """What a store did since it was opened, and what it holds now."""

    tiers: dict[str, TierStats]
    saved_blocks: int
    known_blocks: int
    dropped_blocks: int
    load_misses: dict[str, int]
    """Blocks that a load did not deliver, by reason (miss, corrupt, timeout, io_error, ...)."""
    corrupt_blocks: int
    """Damaged copies that were found and dropped, also where another tier could deliver the block."""
    pins: int
    pending_blocks: int
    leases: int
    save_queue_blocks: int
    write_queue_blocks: int
    index_entries: int
    index_bytes: int


class _Busy:
    """Wall time in which at least one of possibly many transfers was under way."""

    __slots__ = ("active", "since_s", "total_s")

    def __init__(self) -> None:
        self.active = 0
        self.since_s = 0.0
        self.total_s = 0.0

    def enter(self) -> None:
        if self.active == 0:
            self.since_s = time.perf_counter()
        self.active += 1

    def leave(self) -> None:
        self.active -= 1
        if self.active == 0:
            self.total_s += time.perf_counter() - self.since_s


class Counters:
    """All counters of a store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._tiers: dict[tuple[TierKind, str], int] = Counter()
        self._misses: Counter[str] = Counter()
        self._busy = {(kind, way): _Busy() for kind in TierKind for way in ("read", "write")}

    def add(self, name: str, amount: int) -> None:
        """saved, known, dropped, corrupt."""
        with self._lock:
            self._counts[name] += amount

    def add_tier(self, kind: TierKind, **amounts: int) -> None:
        """hit_blocks, read_bytes, written_blocks, written_bytes, evicted_blocks."""
        with self._lock:
            for name, amount in amounts.items():
                self._tiers[kind, name] += amount

    def add_misses(self, status: UInt8Array) -> None:
        """Counts every status but OK under its name."""
        values, counts = np.unique(status, return_counts=True)
        with self._lock:
            for value, count in zip(values.tolist(), counts.tolist(), strict=True):
                if value != BlockStatus.OK:
                    self._misses[BlockStatus(value).name.lower()] += count

    def begin(self, kind: TierKind, way: str) -> None:
        """A transfer ('read' or 'write') of a tier starts."""
        with self._lock:
            self._busy[kind, way].enter()

    def end(self, kind: TierKind, way: str) -> None:
        with self._lock:
            self._busy[kind, way].leave()

    @contextmanager
    def busy(self, kind: TierKind, way: str) -> Iterator[None]:
        self.begin(kind, way)
        try:
            yield
        finally:
            self.end(kind, way)

    def total(self, name: str) -> int:
        with self._lock:
            return self._counts[name]

    def misses(self) -> dict[str, int]:
        with self._lock:
            return dict(self._misses)

    def tier(
        self, kind: TierKind, *, capacity_bytes: int, used_bytes: int, blocks: int, healthy: bool
    ) -> TierStats:
        """The snapshot of one tier."""
        names = ("hit_blocks", "read_bytes", "written_blocks", "written_bytes", "evicted_blocks")
        with self._lock:
            amounts = {name: self._tiers[kind, name] for name in names}
            read_s, write_s = self._busy[kind, "read"].total_s, self._busy[kind, "write"].total_s
        return TierStats(
            capacity_bytes=capacity_bytes, used_bytes=used_bytes, blocks=blocks, healthy=healthy,
            read_s=read_s, write_s=write_s, **amounts,
        )  # fmt: skip
