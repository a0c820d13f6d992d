"""The whole store over two tiers: a prefix that lies in DRAM, in NVMe, or half in each, loaded as an engine
loads it.

The limit of what comes from DRAM is a native copy, the limit of what comes from NVMe fio with io_uring and
O_DIRECT; a mixed load's limit is the slower of its two shares, since both could go at once.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from typing import Literal

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
    bench_spec,
    block_addresses,
    cpu_s_per_gb,
    finish,
    in_turn,
    memory,
    need_directory,
    rate,
    timed,
)
from tierkv.benchmarks.fio import MISSING_NOTE, Fio, available
from tierkv.config import DramConfig, NvmeConfig, StoreConfig
from tierkv.errors import StorageError
from tierkv.fragments import Fragments
from tierkv.keys import Keyspace
from tierkv.memory import DEFAULT_SLAB_BYTES, Arena, capacity_for, slot_bytes_for
from tierkv.store import Store
from tierkv.types import HashArray, TierKind

SIZES = (256 * KIB, 2 * MIB)
QUICK_SIZES = (256 * KIB,)
QUEUE_DEPTH = 32
_SAMPLE_BYTES = 256 * MIB
_FLUSH_TIMEOUT_S = 120.0
Where = Literal["dram", "nvme", "half"]


def run(options: BenchOptions) -> list[Measurement]:
    """Measures every block size, in a directory of its own that is removed."""
    need_directory(options)
    sizes = options.block_bytes or (QUICK_SIZES if options.quick else SIZES)
    return [result for size in sizes for result in measure(size, options)]


def measure(block_bytes: int, options: BenchOptions) -> list[Measurement]:
    """Loads from DRAM, from NVMe and from both, of one block size."""
    count = max(16, options.bytes_per_sample(_SAMPLE_BYTES) // block_bytes)
    slab_bytes = max(DEFAULT_SLAB_BYTES, slot_bytes_for(block_bytes))
    with ExitStack() as stack:
        directory = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="tierkv-bench-", dir=need_directory(options))
        )
        engine = stack.enter_context(memory(count * slot_bytes_for(block_bytes)))
        other = stack.enter_context(memory(count * slot_bytes_for(block_bytes)))
        config = StoreConfig(
            dram=DramConfig(
                capacity_bytes=capacity_for(count + count // 4, block_bytes, slab_bytes),
                slab_bytes=slab_bytes, first_touch="now",
            ),
            nvme=NvmeConfig(
                directory=f"{directory}/store", capacity_bytes=capacity_for(6 * count, block_bytes, slab_bytes),
                slab_bytes=slab_bytes, queue_depth=QUEUE_DEPTH, sync="process",
            ),
            promote="never",
            copy_threads=options.threads,
        )  # fmt: skip
        store = Store(config)
        stack.callback(store.close, 0)
        prefix = Prefix(store, engine, block_bytes, count)
        pool = CopyPool(options.threads)
        stack.callback(pool.close)
        lengths = np.full(count, block_bytes, np.int64)
        near, far = block_addresses(engine, block_bytes, count), block_addresses(other, block_bytes, count)

        def copy() -> Sample:
            return timed(count * block_bytes, lambda: pool.copy(near, far, lengths))

        with_fio = available()
        steps = [prefix.load_dram, prefix.load_nvme, prefix.load_half, copy]
        if with_fio:
            fio = Fio(directory, block_bytes, count * block_bytes, QUEUE_DEPTH)
            stack.callback(fio.remove)
            fio.write()
            steps.append(fio.read)
        dram, nvme, half, copied, *rest = in_turn(options.round_count(), steps)
    fio_read = rest[0] if with_fio else []
    fio_name = f"fio io_uring O_DIRECT, depth {QUEUE_DEPTH}"
    results = [
        against("load from DRAM", block_bytes, dram, copied, f"copy, {options.threads} threads"),
        against("load from NVMe", block_bytes, nvme, fio_read, fio_name),
        _mixed(block_bytes, half, copied, fio_read),
    ]
    for result in results:
        result.batch = count
        if not with_fio and result.limit is None:
            result.note = MISSING_NOTE
    return results


def _mixed(block_bytes: int, half: list[Sample], copied: list[Sample], fio_read: list[Sample]) -> Measurement:
    """Half of the bytes from each: twice the slower source's rate is the limit."""
    limit = 2 * min(rate(copied), rate(fio_read)) if fio_read else None
    value = rate(half)
    return Measurement(
        name="load, half from each", block_bytes=block_bytes, value=value, limit=limit,
        ratio=value / limit if limit else None, unit="GB/s", cpu_s_per_gb=cpu_s_per_gb(half),
        limit_name="twice the slower source, both at once", rounds=len(half),
    )  # fmt: skip


class Prefix:
    """Blocks of which each load finds a fresh set in the tier it asks for."""

    def __init__(self, store: Store, engine: Arena, block_bytes: int, count: int) -> None:
        self._store, self._count = store, count
        self._space: Keyspace = store.open(bench_spec(block_bytes))
        self._names = Names()
        self._fragments = Fragments(
            np.array([engine.address], np.int64), np.array([slot_bytes_for(block_bytes)], np.int64),
            np.array([block_bytes], np.int64), np.arange(count, dtype=np.int64), (engine,),
        )  # fmt: skip

    def load_dram(self) -> Sample:
        """Loads blocks that were just saved."""
        hashes = self._save(self._count)
        return self._load(hashes, TierKind.DRAM, self._count)

    def load_nvme(self) -> Sample:
        """Loads blocks that were pushed out by as many others."""
        hashes = self._save(self._count)
        self._push_out()
        return self._load(hashes, TierKind.NVME, self._count)

    def load_half(self) -> Sample:
        """Loads a prefix whose first half lies in DRAM, the rest in NVMe."""
        lower = self._save(self._count - self._count // 2)
        self._push_out()
        upper = self._save(self._count // 2)
        return self._load(np.concatenate([upper, lower]), TierKind.DRAM, self._count // 2)

    def _save(self, count: int) -> HashArray:
        hashes = self._names.take(count)
        finish(self._store.save(self._space, hashes, self._fragments.select(slice(0, count))))
        return hashes

    def _push_out(self) -> None:
        """Saves more other blocks than DRAM holds."""
        self._flush()
        for _ in range(2):
            self._save(self._count)

    def _flush(self) -> None:
        if not self._store.flush(_FLUSH_TIMEOUT_S):
            raise StorageError("the store could not write all its blocks to NVMe")

    def _load(self, hashes: HashArray, first: TierKind, first_count: int) -> Sample:
        """Times one load, after a check that the blocks are where they are said to be."""
        self._flush()
        tiers = self._store.match(self._space, hashes).tiers
        if len(tiers) < len(hashes) or (tiers[:first_count] != first).any():
            raise StorageError(
                f"the blocks to load are not in {first.name}: the benchmark measures something else"
            )
        return timed(
            len(hashes) * self._space.block_bytes,
            lambda: finish(self._store.load(self._space, hashes, self._fragments)),
        )
