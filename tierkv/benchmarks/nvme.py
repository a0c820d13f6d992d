"""NVMe: writes and reads through the tier, beside fio with io_uring and O_DIRECT at the same size and depth.

Both write a preallocated file in order and read its blocks in random order; both have written it once before.
The tier also checksums every block and commits it to its catalog; with sync=power it flushes the disk before.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from tierkv.benchmarks.common import (
    KIB,
    MIB,
    BenchOptions,
    Measurement,
    against,
    in_turn,
    memory,
    need_directory,
)
from tierkv.benchmarks.files import BATCHES_IN_FLIGHT, FileTierRuns
from tierkv.benchmarks.fio import MISSING_NOTE, Fio, available
from tierkv.config import NvmeConfig
from tierkv.memory import DEFAULT_SLAB_BYTES, capacity_for, slot_bytes_for
from tierkv.tiers.nvme import NvmeTier

SIZES = (64 * KIB, 256 * KIB, MIB, 2 * MIB)
QUICK_SIZES = (64 * KIB, 256 * KIB)
QUEUE_DEPTH = 32
BATCH = 128
_SAMPLE_BYTES = 512 * MIB
_SYNCS: tuple[Literal["power", "process"], ...] = ("power", "process")


def run(options: BenchOptions) -> list[Measurement]:
    """Measures every block size, in a directory of its own that is removed."""
    need_directory(options)
    sizes = options.block_bytes or (QUICK_SIZES if options.quick else SIZES)
    return [result for size in sizes for result in measure(size, options)]


def measure(block_bytes: int, options: BenchOptions) -> list[Measurement]:
    """Writing with both kinds of sync, and reading, for one block size."""
    count = max(
        BATCH // 4 if options.quick else BATCH, options.bytes_per_sample(_SAMPLE_BYTES) // block_bytes
    )
    slab_bytes = max(DEFAULT_SLAB_BYTES, slot_bytes_for(block_bytes))
    capacity_bytes = capacity_for(count, block_bytes, slab_bytes)
    with ExitStack() as stack:
        directory = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="tierkv-bench-", dir=need_directory(options))
        )
        source = stack.enter_context(memory(BATCHES_IN_FLIGHT * BATCH * slot_bytes_for(block_bytes)))
        runs = {}
        for sync in _SYNCS:
            config = NvmeConfig(
                directory=str(Path(directory) / sync),
                capacity_bytes=capacity_bytes,
                slab_bytes=slab_bytes,
                queue_depth=QUEUE_DEPTH,
                sync=sync,
            )
            tier = NvmeTier(config)
            stack.callback(tier.close)
            runs[sync] = FileTierRuns(tier, source, block_bytes, count, BATCH)
        steps = [runs["power"].write, runs["process"].write, runs["power"].read]
        with_fio = available()
        if with_fio:
            fio = Fio(directory, block_bytes, count * block_bytes, QUEUE_DEPTH)
            stack.callback(fio.remove)
            steps += [fio.write, fio.read]
        write, write_process, read, *limits = in_turn(options.round_count(), steps)
    fio_write, fio_read = limits if with_fio else ([], [])
    limit = f"fio io_uring O_DIRECT, depth {QUEUE_DEPTH}"
    results = [
        against("write", block_bytes, write, fio_write, limit),
        against("write, sync=process", block_bytes, write_process, fio_write, limit),
        against("read", block_bytes, read, fio_read, limit),
    ]
    for result in results:
        result.queue_depth = QUEUE_DEPTH
        result.pages = source.pages
        if not with_fio:
            result.note = MISSING_NOTE
    return results
