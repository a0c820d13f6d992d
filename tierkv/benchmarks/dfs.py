"""Shared filesystem: writes and reads through the tier, beside plain O_DIRECT files written by as many
threads.

The limit writes a temporary name, flushes it and renames it, as anything must that publishes files to other
hosts.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from tierkv.benchmarks.common import (
    KIB,
    MIB,
    BenchOptions,
    Measurement,
    Sample,
    against,
    in_turn,
    memory,
    need_directory,
    timed,
)
from tierkv.benchmarks.files import BATCHES_IN_FLIGHT, FileTierRuns
from tierkv.config import DfsConfig
from tierkv.memory import slot_bytes_for
from tierkv.tiers.dfs import DfsTier

SIZES = (256 * KIB, MIB, 4 * MIB)
QUICK_SIZES = (256 * KIB,)
BATCH = 64
_SAMPLE_BYTES = 256 * MIB
_FILE_TIMEOUT_S = 120.0


def run(options: BenchOptions) -> list[Measurement]:
    """Measures every block size, in a directory of its own that is removed."""
    need_directory(options)
    sizes = options.block_bytes or (QUICK_SIZES if options.quick else SIZES)
    return [result for size in sizes for result in measure(size, options)]


def measure(block_bytes: int, options: BenchOptions) -> list[Measurement]:
    """Writing and reading of one block size."""
    count = max(16, options.bytes_per_sample(_SAMPLE_BYTES) // block_bytes)
    with ExitStack() as stack:
        directory = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="tierkv-bench-", dir=need_directory(options))
            )
        )
        (directory / "tier").mkdir()
        config = DfsConfig(directory=str(directory / "tier"))
        source = stack.enter_context(memory(BATCHES_IN_FLIGHT * BATCH * slot_bytes_for(block_bytes)))
        tier = DfsTier(config)
        stack.callback(tier.close)
        runs = FileTierRuns(tier, source, block_bytes, count, BATCH)
        plain = stack.enter_context(PlainFiles(directory / "plain", block_bytes, count, config.threads))
        steps = [runs.write, runs.read, plain.write, plain.read]
        write, read, plain_write, plain_read = in_turn(options.round_count(), steps)
        direct = plain.direct
    limit = f"{'O_DIRECT' if direct else 'buffered'} files, {config.threads} threads"
    results = [
        against("write", block_bytes, write, plain_write, limit),
        against("read", block_bytes, read, plain_read, limit),
    ]
    for result in results:
        result.batch = BATCH
        if not direct:
            result.note = "this filesystem refuses O_DIRECT: the limit's reads may come from the page cache"
    return results


class PlainFiles:
    """One file a block, written and read by threads without any of our code."""

    def __init__(self, directory: Path, block_bytes: int, count: int, threads: int) -> None:
        directory.mkdir()
        self._directory = directory
        self._block_bytes, self._count, self._threads = block_bytes, count, threads
        self._size_bytes = slot_bytes_for(block_bytes)
        self._pool = ThreadPoolExecutor(threads)
        self._buffers = [mmap.mmap(-1, self._size_bytes) for _ in range(threads)]
        fill = np.random.default_rng(5).integers(0, 256, self._size_bytes, np.uint8).tobytes()
        for buffer in self._buffers:
            buffer[:] = fill
        self._generation = 0
        self._direct_flag = os.O_DIRECT
        try:
            os.close(os.open(directory / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600))
        except OSError:
            self._direct_flag = 0

    def __enter__(self) -> PlainFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        for buffer in self._buffers:
            buffer.close()

    @property
    def direct(self) -> bool:
        return self._direct_flag != 0

    def write(self) -> Sample:
        """Writes every file anew. The ones before are removed first, which does not count."""
        for number in range(self._count):
            self._path(number).unlink(missing_ok=True)
        self._generation += 1
        return self._timed(self._write_share)

    def read(self) -> Sample:
        """Reads every file once."""
        return self._timed(self._read_share)

    def _timed(self, share: object) -> Sample:
        def work() -> None:
            list(self._pool.map(share, range(self._threads), timeout=_FILE_TIMEOUT_S))  # type: ignore[arg-type]

        return timed(self._count * self._block_bytes, work)

    def _path(self, number: int) -> Path:
        return self._directory / f"{self._generation}-{number}"

    def _write_share(self, thread: int) -> None:
        for number in range(thread, self._count, self._threads):
            temporary = self._directory / f"{thread}.tmp"
            fd = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | self._direct_flag, 0o600)
            try:
                os.pwrite(fd, self._buffers[thread], 0)
                os.fsync(fd)
            finally:
                os.close(fd)
            temporary.rename(self._path(number))

    def _read_share(self, thread: int) -> None:
        for number in range(thread, self._count, self._threads):
            fd = os.open(self._path(number), os.O_RDONLY | self._direct_flag)
            try:
                os.preadv(fd, [self._buffers[thread]], 0)
            finally:
                os.close(fd)
