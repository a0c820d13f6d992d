"""What the benchmarks share: options, one measurement's shape, measuring in turn, memory and keyspaces."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import numpy as np

from tierkv.errors import StorageError
from tierkv.jobs import Job
from tierkv.keys import Keyspace, KeyspaceSpec
from tierkv.memory import Arena, slot_bytes_for
from tierkv.tiers.base import Batch
from tierkv.types import HashArray, Int64Array, SlotArray
from tierkv.workload.payload import hashes_of

JOB_TIMEOUT_S = 120.0
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to measure. None: the benchmark's own choice, smaller with `quick`."""

    directory: str | None = None
    """Where files go; needed by the tiers that have some."""
    quick: bool = False
    """Seconds instead of minutes, with figures that only show that the program works."""
    block_bytes: tuple[int, ...] | None = None
    rounds: int | None = None
    threads: int = 2
    """Threads of the copy pool, in the store and in its limit."""
    entries: int | None = None
    """Entries of the index (match only)."""

    def round_count(self) -> int:
        return self.rounds or (2 if self.quick else 9)

    def bytes_per_sample(self, thorough: int) -> int:
        """Bytes that one sample moves."""
        return min(thorough, 8 * MIB) if self.quick else thorough


class Measurement(msgspec.Struct, kw_only=True):
    """One figure beside its limit. `limit` and `ratio` are None where there is none; `note` says why."""

    name: str
    block_bytes: int | None
    value: float | None
    limit: float | None
    ratio: float | None
    unit: str
    cpu_s_per_gb: float | None
    limit_name: str | None = None
    batch: int | msgspec.UnsetType = msgspec.UNSET
    queue_depth: int | msgspec.UnsetType = msgspec.UNSET
    rounds: int | msgspec.UnsetType = msgspec.UNSET
    pages: str | msgspec.UnsetType = msgspec.UNSET
    p50_ms: float | msgspec.UnsetType = msgspec.UNSET
    p99_ms: float | msgspec.UnsetType = msgspec.UNSET
    entries: int | msgspec.UnsetType = msgspec.UNSET
    hashes: int | msgspec.UnsetType = msgspec.UNSET
    bytes_per_entry: float | msgspec.UnsetType = msgspec.UNSET
    note: str | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes moved in some time. cpu_s: of this process, all threads."""

    size_bytes: int
    wall_s: float
    cpu_s: float

    @property
    def gb_s(self) -> float:
        return self.size_bytes / self.wall_s / 1e9


def timed(size_bytes: int, work: Callable[[], object]) -> Sample:
    """Runs `work`, which moves `size_bytes`."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    work()
    wall_s = time.perf_counter() - wall_s
    return Sample(size_bytes, wall_s, time.process_time() - cpu_s)


def in_turn(rounds: int, runs: Sequence[Callable[[], Sample]]) -> list[list[Sample]]:
    """Runs all of `runs` in each round, in turning order, so that the machine's moods hit all alike.

    Returns the samples of each. One round before the first warms up and does not count.
    """
    samples: list[list[Sample]] = [[] for _ in runs]
    for number in range(-1, rounds):
        order = range(len(runs)) if number % 2 else reversed(range(len(runs)))
        for position in order:
            sample = runs[position]()
            if number >= 0:
                samples[position].append(sample)
    return samples


def rate(samples: Sequence[Sample]) -> float:
    """The median rate in GB/s."""
    return statistics.median(sample.gb_s for sample in samples)


def cpu_s_per_gb(samples: Sequence[Sample]) -> float:
    """CPU seconds of this process for each 10^9 bytes."""
    return sum(sample.cpu_s for sample in samples) / sum(sample.size_bytes for sample in samples) * 1e9


def against(
    name: str, block_bytes: int, samples: Sequence[Sample], limit: Sequence[Sample], limit_name: str
) -> Measurement:
    """The measurement of `samples` beside `limit` (no samples: no limit)."""
    value, bound = rate(samples), rate(limit) if limit else None
    return Measurement(
        name=name,
        block_bytes=block_bytes,
        value=value,
        limit=bound,
        ratio=value / bound if bound else None,
        unit="GB/s",
        cpu_s_per_gb=cpu_s_per_gb(samples),
        limit_name=limit_name,
        rounds=len(samples),
    )


def bench_spec(block_bytes: int) -> KeyspaceSpec:
    """A keyspace for blocks of one part."""
    return KeyspaceSpec(
        model="tierkv-bench", revision="1", kv_dtype="uint8", block_tokens=16, part_bytes=(block_bytes,),
        layout="flat", group="all", pipeline_stage="0/1", hash_algorithm="splitmix64", hash_seed="0",
    )  # fmt: skip


def bench_space(block_bytes: int) -> Keyspace:
    """The same, opened for a tier that stands alone."""
    spec = bench_spec(block_bytes)
    return Keyspace(spec, spec.digest(), 1)


class Names:
    """Hands out hashes that were never used before."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> HashArray:
        """(count, 32) uint8."""
        first, self._next = self._next, self._next + count
        return hashes_of(np.arange(first, first + count, dtype=np.int64))


@contextmanager
def memory(size_bytes: int) -> Iterator[Arena]:
    """Memory of the DRAM tier's kind, all of it mapped and written to."""
    arena = Arena.create(
        slot_bytes_for(size_bytes),
        shared=False,
        huge_pages="auto",
        lock_memory="off",
        first_touch="now",
        name="bench",
    )
    try:
        view = np.frombuffer(arena.view(), np.uint8)
        view[:] = np.resize(np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8), len(view))
        del view
        yield arena
    finally:
        arena.close()


def block_addresses(arena: Arena, block_bytes: int, count: int, first: int = 0) -> Int64Array:
    """(count,) int64: blocks side by side in `arena`, from block `first` on."""
    step = slot_bytes_for(block_bytes)
    return arena.address + np.arange(first, first + count, dtype=np.int64) * step


def whole_blocks(space: Keyspace, hashes: HashArray, slots: SlotArray, addresses: Int64Array) -> Batch:
    """A batch of blocks of full length."""
    return Batch(space, hashes, slots, addresses, np.full(len(hashes), space.block_bytes, np.int64))


def finish(job: Job) -> None:
    """Waits for a job; StorageError when it failed: a benchmark of failures measures nothing."""
    if not job.wait(JOB_TIMEOUT_S):
        raise StorageError(f"a job of {job.count} blocks did not finish within {JOB_TIMEOUT_S:g} s")
    if job.status.any():
        raise StorageError(
            f"{np.count_nonzero(job.status)} of {job.count} blocks failed: {np.unique(job.status)}"
        )


def need_directory(options: BenchOptions) -> str:
    """The directory for files; StorageError when none was given."""
    if options.directory is None:
        raise StorageError("this benchmark needs a directory on the medium to measure: give --dir DIR")
    return options.directory
