"""Look-ups: how long the index, and the store above it, take to match a long prefix among many blocks.

The limit is what memory alone takes: fetching as many 64-byte records from random places of as large a table.
The ratio is the limit's time by the call's, so that 1 is as fast as memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from tierkv._native import Index
from tierkv.benchmarks.common import (
    BenchOptions,
    Measurement,
    bench_spec,
)
from tierkv.config import DramConfig, StoreConfig
from tierkv.memory import capacity_for
from tierkv.store import Store
from tierkv.types import HashArray, TierKind
from tierkv.workload.payload import hashes_of

ENTRIES = 1_000_000
QUICK_ENTRIES = 20_000
HASHES = 5_000
QUICK_HASHES = 1_000
CALLS = 300
QUICK_CALLS = 20
_INSERT_BATCH = 1 << 16
_SPACE = 1
_BLOCK_BYTES = 4096
_RECORD_BYTES = 64
_ORDER = bytes([TierKind.DRAM, TierKind.NVME, TierKind.DFS])


def run(options: BenchOptions) -> list[Measurement]:
    """Every call of the index and the store's match."""
    entries = options.entries or (QUICK_ENTRIES if options.quick else ENTRIES)
    hashes = min(entries, QUICK_HASHES if options.quick else HASHES)
    calls = QUICK_CALLS if options.quick else CALLS
    return [*measure_index(entries, hashes, calls), measure_store(entries, hashes, calls)]


def measure_index(entries: int, hashes: int, calls: int) -> list[Measurement]:
    """Index.match, lookup and acquire with release, of blocks in random order: nothing is in the CPU's
    cache."""
    index = Index()
    for known, first in batches(entries):
        slots = np.arange(first, first + len(known), dtype=np.uint32)
        index.insert(_SPACE, known, TierKind.DRAM, slots, 0)

    def acquire(query: HashArray) -> None:
        index.release(index.acquire(_SPACE, query, _ORDER)[3])

    workload = Workload(entries, hashes, calls)
    results = [
        workload.measure("index match", lambda query: index.match(_SPACE, query)),
        workload.measure("index lookup", lambda query: index.lookup(_SPACE, query)),
        workload.measure("index acquire and release", acquire),
    ]
    stats = index.stats()
    for result in results:
        result.bytes_per_entry = stats["bytes"] / stats["entries"]
    return results


def measure_store(entries: int, hashes: int, calls: int) -> Measurement:
    """Store.match, with the tier of each block. The store's index is filled without its bytes: saving a
    million blocks would need as many slots of memory, and the look-up does not see them."""
    config = DramConfig(
        capacity_bytes=capacity_for(entries, _BLOCK_BYTES),
        first_touch="never",
        lock_memory="off",
        huge_pages="off",
    )
    with Store(StoreConfig(dram=config)) as store:
        space = store.open(bench_spec(_BLOCK_BYTES))
        core = store._core
        for known, _ in batches(entries):
            slots = core.dram.allocate(space, len(known))
            assert slots is not None  # the arena was made for as many
            core.index.insert(space.number, known, TierKind.DRAM, slots, core.size_class(space))
        workload = Workload(entries, hashes, calls)
        result = workload.measure("store match", lambda query: store.match(space, query))
        stats = store.stats()
        result.bytes_per_entry = stats.index_bytes / stats.index_entries
        return result


def batches(entries: int) -> Iterator[tuple[HashArray, int]]:
    """The hashes of all entries, (n, 32) at a time, and the number of the first."""
    for first in range(0, entries, _INSERT_BATCH):
        yield hashes_of(np.arange(first, min(entries, first + _INSERT_BATCH), dtype=np.int64)), first


class Workload:
    """Queries of known blocks in random order, and the memory to compare with."""

    def __init__(self, entries: int, hashes: int, calls: int) -> None:
        random = np.random.default_rng(7)
        self._entries, self._hashes = entries, hashes
        self._picks = [random.choice(entries, hashes, replace=False) for _ in range(calls)]
        self._table = np.zeros((entries, _RECORD_BYTES // 8), np.uint64)
        self._table[:] = 1
        self._fetched = np.zeros((hashes, _RECORD_BYTES // 8), np.uint64)

    def measure(self, name: str, call: Callable[[HashArray], object]) -> Measurement:
        """Times `call` on every query, in turn with the fetch from memory."""
        call_s, fetch_s = [], []
        for pick in self._picks:
            query = hashes_of(pick.astype(np.int64))
            begun_s = time.perf_counter()
            call(query)
            ended_s = time.perf_counter()
            np.take(self._table, pick, axis=0, out=self._fetched, mode="clip")
            fetch_s.append(time.perf_counter() - ended_s)
            call_s.append(ended_s - begun_s)
        p50_ms, p99_ms = (float(value) * 1000 for value in np.percentile(call_s, [50, 99]))
        limit_ms = float(np.median(fetch_s)) * 1000
        return Measurement(
            name=name,
            block_bytes=None,
            value=p50_ms,
            limit=limit_ms,
            ratio=limit_ms / p50_ms,
            unit="ms",
            cpu_s_per_gb=None,
            limit_name=f"fetch of {self._hashes:,} random 64-byte records",
            batch=self._hashes,
            rounds=len(self._picks),
            p50_ms=p50_ms,
            p99_ms=p99_ms,
            entries=self._entries,
            hashes=self._hashes,
        )
