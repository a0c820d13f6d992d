"""Counters of a store, and the snapshot that stats() returns.

Thread safety: Counters has one lock; every method may be called from any thread.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np

from tierkv.types import BlockStatus, TierKind, UInt8Array

LATENCY_BOUNDS_S = (
    10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6,
    1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
"""The upper bounds of the buckets of every latency histogram; a last bucket takes what is slower."""
OPERATIONS = ("match", "lookup", "load", "stage", "save")


class LatencyStats(msgspec.Struct, kw_only=True):
    """How long something took, as a histogram over LATENCY_BOUNDS_S."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))
    """One for each bucket: at most its bound, above the one before. Not cumulative."""
    sum_s: float = 0.0

    @property
    def count(self) -> int:
        """How many were observed."""
        return sum(self.counts)


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
    read_latency: LatencyStats = msgspec.field(default_factory=LatencyStats)
    """Of each transfer, a batch of blocks, from its submission to its end."""
    write_latency: LatencyStats = msgspec.field(default_factory=LatencyStats)


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
    load_queue_blocks: int = 0
    drops: dict[str, int] = msgspec.field(default_factory=dict)
    """dropped_blocks by reason: queue_full, no_room, timeout, incomplete (not all parts came in time), failed."""
    match_requested_blocks: int = 0
    match_found_blocks: int = 0
    """Blocks that match() was asked for, and the lengths of the prefixes that it found."""
    latency: dict[str, LatencyStats] = msgspec.field(default_factory=dict)
    """By operation (OPERATIONS): match and lookup as called, jobs from their submission to their end."""


class _Busy:
    """Wall time in which at least one of possibly many transfers was under way."""

    __slots__ = ("active", "since_s", "total_s")

    def __init__(self) -> None:
        self.active = 0
        self.since_s = 0.0
        self.total_s = 0.0

    def enter(self, now_s: float) -> None:
        if self.active == 0:
            self.since_s = now_s
        self.active += 1

    def leave(self, now_s: float) -> None:
        self.active -= 1
        if self.active == 0:
            self.total_s += max(0.0, now_s - self.since_s)


class _Latency:
    """A histogram that is being filled; under its owner's lock."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def snapshot(self) -> LatencyStats:
        return LatencyStats(counts=list(self.counts), sum_s=self.sum_s)


class Counters:
    """All counters of a store. Called once a batch or a job, never once a block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._drops: Counter[str] = Counter()
        self._tiers: dict[tuple[TierKind, str], int] = Counter()
        self._misses: Counter[str] = Counter()
        self._busy = {(kind, way): _Busy() for kind in TierKind for way in ("read", "write")}
        self._transfers = {key: _Latency() for key in self._busy}
        self._operations = {name: _Latency() for name in OPERATIONS}

    def add(self, name: str, amount: int) -> None:
        """saved, known, corrupt."""
        with self._lock:
            self._counts[name] += amount

    def add_dropped(self, reason: str, amount: int) -> None:
        """Blocks that were not saved; the reasons are those of StoreStats.drops."""
        if amount:
            with self._lock:
                self._drops[reason] += amount

    def add_match(self, requested: int, found: int, since_s: float) -> None:
        """A match() that began at `since_s` (time.perf_counter())."""
        took_s = time.perf_counter() - since_s
        with self._lock:
            self._counts["match_requested"] += requested
            self._counts["match_found"] += found
            self._operations["match"].observe(took_s)

    def observe(self, operation: str, since_s: float) -> None:
        """An operation (OPERATIONS) that began at `since_s` (time.perf_counter()) has ended."""
        took_s = time.perf_counter() - since_s
        with self._lock:
            self._operations[operation].observe(took_s)

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

    def begin(self, kind: TierKind, way: str, since_s: float | None = None) -> float:
        """A transfer ('read' or 'write') of a tier starts, or did at `since_s`; returns what end() wants to know."""
        since_s = time.perf_counter() if since_s is None else since_s
        with self._lock:
            self._busy[kind, way].enter(since_s)
        return since_s

    def end(self, kind: TierKind, way: str, since_s: float) -> None:
        """The transfer that began at `since_s` has ended."""
        now_s = time.perf_counter()
        with self._lock:
            self._busy[kind, way].leave(now_s)
            self._transfers[kind, way].observe(now_s - since_s)

    @contextmanager
    def busy(self, kind: TierKind, way: str) -> Iterator[None]:
        since_s = self.begin(kind, way)
        try:
            yield
        finally:
            self.end(kind, way, since_s)

    def total(self, name: str) -> int:
        with self._lock:
            return self._counts[name]

    def misses(self) -> dict[str, int]:
        with self._lock:
            return dict(self._misses)

    def drops(self) -> dict[str, int]:
        with self._lock:
            return dict(self._drops)

    def latency(self) -> dict[str, LatencyStats]:
        with self._lock:
            return {name: latency.snapshot() for name, latency in self._operations.items()}

    def tier(
        self, kind: TierKind, *, capacity_bytes: int, used_bytes: int, blocks: int, healthy: bool
    ) -> TierStats:
        """The snapshot of one tier."""
        names = ("hit_blocks", "read_bytes", "written_blocks", "written_bytes", "evicted_blocks")
        with self._lock:
            amounts = {name: self._tiers[kind, name] for name in names}
            read_s, write_s = self._busy[kind, "read"].total_s, self._busy[kind, "write"].total_s
            read, write = (self._transfers[kind, way].snapshot() for way in ("read", "write"))
        return TierStats(
            capacity_bytes=capacity_bytes, used_bytes=used_bytes, blocks=blocks, healthy=healthy,
            read_s=read_s, write_s=write_s, read_latency=read, write_latency=write, **amounts,
        )  # fmt: skip
