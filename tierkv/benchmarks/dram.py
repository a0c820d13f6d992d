"""DRAM: saves and loads through the store, and the tier alone, beside a native copy of the same blocks.

The limit copies the same number of blocks between memory of the same kind of pages with the same threads. The
store is in its steady state: its arena is full, so every save evicts an older batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from tierkv._native import CopyPool
from tierkv.benchmarks.common import (
    KIB,
    MIB,
    BenchOptions,
    Measurement,
    Names,
    Sample,
    against,
    bench_space,
    bench_spec,
    block_addresses,
    finish,
    in_turn,
    memory,
    timed,
    whole_blocks,
)
from tierkv.config import DramConfig, StoreConfig
from tierkv.fragments import Fragments
from tierkv.jobs import Job
from tierkv.memory import DEFAULT_SLAB_BYTES, Arena, capacity_for, slot_bytes_for
from tierkv.store import Store
from tierkv.tiers.base import Batch
from tierkv.tiers.dram import DramTier
from tierkv.types import Int64Array

SIZES = (64 * KIB, 256 * KIB, MIB, 2 * MIB, 4 * MIB)
QUICK_SIZES = (64 * KIB, 256 * KIB)
BATCH = 128
QUICK_BATCH = 16
_BATCHES_HELD = 2
_SAMPLE_BYTES = 256 * MIB


def run(options: BenchOptions) -> list[Measurement]:
    """Measures every block size."""
    sizes = options.block_bytes or (QUICK_SIZES if options.quick else SIZES)
    return [result for size in sizes for result in measure(size, options)]


def measure(block_bytes: int, options: BenchOptions) -> list[Measurement]:
    """Store and tier, saving and loading, for one block size."""
    batch = QUICK_BATCH if options.quick else BATCH
    batch_bytes = batch * block_bytes
    repeats = max(1, options.bytes_per_sample(_SAMPLE_BYTES) // batch_bytes)
    slab_bytes = max(DEFAULT_SLAB_BYTES, slot_bytes_for(block_bytes))
    config = DramConfig(
        capacity_bytes=capacity_for(_BATCHES_HELD * batch, block_bytes, slab_bytes),
        slab_bytes=slab_bytes,
        first_touch="now",
    )
    with ExitStack() as stack:
        engine = stack.enter_context(memory(batch * slot_bytes_for(block_bytes)))
        other = stack.enter_context(memory(_BATCHES_HELD * batch * slot_bytes_for(block_bytes)))
        store = stack.enter_context(Store(StoreConfig(dram=config, copy_threads=options.threads)))
        pool = CopyPool(options.threads)
        stack.callback(pool.close)
        tier = DramTier(config, copy_pool=pool)
        stack.callback(tier.close)
        saves, loads = _store_runs(store, engine, block_bytes, batch, repeats)
        writes, reads = _tier_runs(tier, engine, block_bytes, batch, repeats)
        copies_in, copies_out = _copy_runs(pool, engine, other, block_bytes, batch, repeats)
        plain = _plain_copy_run(engine, other, block_bytes, batch, repeats)
        runs = (saves, writes, copies_in, loads, reads, copies_out, plain)
        save, write, copy_in, load, read, copy_out, memcpy = in_turn(options.round_count(), runs)
        pages = engine.pages
    limit = f"copy of the same blocks, {options.threads} threads"
    results = [
        against("save through the store", block_bytes, save, copy_in, limit),
        against("load through the store", block_bytes, load, copy_out, limit),
        against("write, tier alone", block_bytes, write, copy_in, limit),
        against("read, tier alone", block_bytes, read, copy_out, limit),
        against("memcpy, one thread", block_bytes, memcpy, [], "none: for comparison"),
    ]
    for result in results:
        result.batch = batch
        result.pages = pages
    return results


def _store_runs(
    store: Store, engine: Arena, block_bytes: int, batch: int, repeats: int
) -> tuple[Callable[[], Sample], Callable[[], Sample]]:
    space = store.open(bench_spec(block_bytes))
    fragments = Fragments(
        np.array([engine.address], np.int64), np.array([slot_bytes_for(block_bytes)], np.int64),
        np.array([block_bytes], np.int64), np.arange(batch, dtype=np.int64), (engine,),
    )  # fmt: skip
    names = Names()
    saved = names.take(batch)
    finish(store.save(space, saved, fragments))

    def save() -> Sample:
        nonlocal saved
        fresh = [names.take(batch) for _ in range(repeats)]

        def work() -> None:
            for hashes in fresh:
                finish(store.save(space, hashes, fragments))

        saved = fresh[-1]
        return timed(repeats * batch * block_bytes, work)

    def load() -> Sample:
        def work() -> None:
            for _ in range(repeats):
                finish(store.load(space, saved, fragments))

        return timed(repeats * batch * block_bytes, work)

    return save, load


def _tier_runs(
    tier: DramTier, engine: Arena, block_bytes: int, batch: int, repeats: int
) -> tuple[Callable[[], Sample], Callable[[], Sample]]:
    space = bench_space(block_bytes)
    slots = tier.allocate(space, _BATCHES_HELD * batch)
    assert slots is not None  # the tier was made for as many
    hashes = Names().take(batch)
    addresses = block_addresses(engine, block_bytes, batch)
    batches = [
        whole_blocks(space, hashes, slots[first : first + batch], addresses)
        for first in range(0, len(slots), batch)
    ]

    def through(submit: Callable[[Batch], Job]) -> Sample:
        def work() -> None:
            for number in range(repeats):
                finish(submit(batches[number % len(batches)]))

        return timed(repeats * batch * block_bytes, work)

    return lambda: through(tier.submit_write), lambda: through(tier.submit_read)


def _copy_runs(
    pool: CopyPool, engine: Arena, other: Arena, block_bytes: int, batch: int, repeats: int
) -> tuple[Callable[[], Sample], Callable[[], Sample]]:
    near = block_addresses(engine, block_bytes, batch)
    far = [block_addresses(other, block_bytes, batch, part * batch) for part in range(_BATCHES_HELD)]
    lengths = np.full(batch, block_bytes, np.int64)

    def copy(pairs: list[tuple[Int64Array, Int64Array]]) -> Sample:
        def work() -> None:
            for to, start in pairs:
                pool.copy(to, start, lengths)

        return timed(repeats * batch * block_bytes, work)

    return (
        lambda: copy([(far[number % len(far)], near) for number in range(repeats)]),
        lambda: copy([(near, far[number % len(far)]) for number in range(repeats)]),
    )


def _plain_copy_run(
    engine: Arena, other: Arena, block_bytes: int, batch: int, repeats: int
) -> Callable[[], Sample]:
    pairs = list(
        zip(
            block_addresses(other, block_bytes, batch).tolist(),
            block_addresses(engine, block_bytes, batch).tolist(),
            strict=True,
        )
    )

    def copy() -> None:
        for _ in range(repeats):
            for to, start in pairs:
                ctypes.memmove(to, start, block_bytes)

    return lambda: timed(repeats * batch * block_bytes, copy)
