"""Benchmarks of tiers that keep blocks in files: writing and reading batches through the Tier seam, in turn
with a limit. The tier's queue is kept full: the next batch is submitted before the last one is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from tierkv.benchmarks.common import (
    Names,
    Sample,
    bench_space,
    block_addresses,
    finish,
    timed,
    whole_blocks,
)
from tierkv.errors import StorageError
from tierkv.jobs import Job
from tierkv.memory import Arena
from tierkv.tiers.base import Tier
from tierkv.types import HashArray, SlotArray

BATCHES_IN_FLIGHT = 4


def finish_all(jobs: Iterable[Job]) -> None:
    """Waits for jobs that are submitted as the iterator goes on, at most BATCHES_IN_FLIGHT at once."""
    open_jobs: deque[Job] = deque()
    for job in jobs:
        open_jobs.append(job)
        if len(open_jobs) == BATCHES_IN_FLIGHT:
            finish(open_jobs.popleft())
    for job in open_jobs:
        finish(job)


class FileTierRuns:
    """Writes `count` blocks to a tier and reads them back in random order, again and again."""

    def __init__(self, tier: Tier, source: Arena, block_bytes: int, count: int, batch: int) -> None:
        self._tier, self._source = tier, source
        self._count, self._batch = count, batch
        self._space = bench_space(block_bytes)
        self._names = Names()
        self._random = np.random.default_rng(3)
        self._held: tuple[HashArray, SlotArray] | None = None

    def write(self) -> Sample:
        """Writes fresh blocks. The ones before are given up first, which does not count."""
        self.clear()
        hashes = self._names.take(self._count)
        slots = self._tier.allocate(self._space, self._count)
        if slots is None:
            raise StorageError(f"{self._tier.info.name} has no room for {self._count} blocks")
        self._held = hashes, slots
        order = np.arange(self._count)
        return self._timed(lambda: finish_all(self._jobs(hashes, slots, order, write=True)))

    def read(self) -> Sample:
        """Reads every block once, in random order."""
        assert self._held is not None  # write() came first
        hashes, slots = self._held
        order = self._random.permutation(self._count)
        return self._timed(lambda: finish_all(self._jobs(hashes, slots, order, write=False)))

    def clear(self) -> None:
        """Gives the blocks up."""
        if self._held is not None:
            self._tier.free(self._space, *self._held)
            self._held = None

    def _timed(self, work: object) -> Sample:
        return timed(self._count * self._space.block_bytes, work)  # type: ignore[arg-type]

    def _jobs(self, hashes: HashArray, slots: SlotArray, order: np.ndarray, *, write: bool) -> Iterable[Job]:
        submit = self._tier.submit_write if write else self._tier.submit_read
        addresses = block_addresses(self._source, self._space.block_bytes, self._batch * BATCHES_IN_FLIGHT)
        for number, first in enumerate(range(0, self._count, self._batch)):
            part = order[first : first + self._batch]
            place = number % BATCHES_IN_FLIGHT * self._batch
            yield submit(
                whole_blocks(
                    self._space,
                    np.ascontiguousarray(hashes[part]),
                    np.ascontiguousarray(slots[part]),
                    addresses[place : place + len(part)],
                )
            )
