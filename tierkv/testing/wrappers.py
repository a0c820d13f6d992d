"""Tiers around tiers: counting, and adding latency. Faults are in `faults`.

A wrapper passes everything on, so wrappers nest. Thread safety: any thread may call, as the seam demands.
Each wrapper owns the tier it wraps: closing the wrapper closes the tier.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from tierkv.jobs import Job
from tierkv.keys import Keyspace
from tierkv.tiers.base import Batch, Residents, Tier, TierInfo
from tierkv.types import BlockStatus, BoolArray, HashArray, SlotArray


class TierWrapper:
    """Passes every call on to `inner`. Subclasses override what they change."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner

    @property
    def info(self) -> TierInfo:
        return self.inner.info

    def allocate(self, space: Keyspace, count: int) -> SlotArray | None:
        return self.inner.allocate(space, count)

    def available(self, space: Keyspace) -> int:
        return self.inner.available(space)

    def give_back(self, space: Keyspace, slots: SlotArray) -> None:
        self.inner.give_back(space, slots)

    def slab_of(self, slot: int) -> SlotArray:
        return self.inner.slab_of(slot)

    def free(self, space: Keyspace, hashes: HashArray, slots: SlotArray) -> None:
        self.inner.free(space, hashes, slots)

    def forget(self, space: Keyspace, hashes: HashArray | None) -> None:
        self.inner.forget(space, hashes)

    def submit_write(self, batch: Batch) -> Job:
        return self.inner.submit_write(batch)

    def submit_read(self, batch: Batch) -> Job:
        return self.inner.submit_read(batch)

    def recover(self) -> Iterator[Residents]:
        return self.inner.recover()

    def probe(self, space: Keyspace, hashes: HashArray) -> BoolArray:
        return self.inner.probe(space, hashes)

    def used_bytes(self) -> int:
        return self.inner.used_bytes()

    def healthy(self) -> bool:
        return self.inner.healthy()

    def close(self) -> None:
        self.inner.close()


class CountingTier(TierWrapper):
    """Counts what passes: `calls` by method, and for reads and writes the blocks, bytes and outcomes.

    Keys of `counts`: 'write_blocks', 'write_bytes', 'write_OK', 'write_IO_ERROR', ..., the same with 'read_',
    and 'calls_<method>'. `in_flight` jobs are those that have not ended.
    """

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.counts: Counter[str] = Counter()
        self.in_flight = 0
        self.most_in_flight = 0
        self._lock = threading.Lock()

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self.counts[name] += number

    def _watched(self, kind: str, batch: Batch, submit: Callable[[Batch], Job]) -> Job:
        with self._lock:
            self.counts[f"calls_submit_{kind}"] += 1
            self.counts[f"{kind}_blocks"] += batch.count
            self.counts[f"{kind}_bytes"] += int(batch.lengths.sum())
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)

        def ended(job: Job) -> None:
            statuses = Counter(job.status.tolist())
            with self._lock:
                self.in_flight -= 1
                for status, number in statuses.items():
                    self.counts[f"{kind}_{BlockStatus(status).name}"] += number

        try:
            job = submit(batch)
        except BaseException:
            with self._lock:
                self.in_flight -= 1
            raise
        job.add_done_callback(ended)
        return job

    def allocate(self, space: Keyspace, count: int) -> SlotArray | None:
        slots = self.inner.allocate(space, count)
        self._count("calls_allocate")
        self._count("allocate_refused" if slots is None else "allocate_slots", 1 if slots is None else count)
        return slots

    def free(self, space: Keyspace, hashes: HashArray, slots: SlotArray) -> None:
        self._count("calls_free")
        self._count("free_slots", len(slots))
        self.inner.free(space, hashes, slots)

    def forget(self, space: Keyspace, hashes: HashArray | None) -> None:
        self._count("calls_forget")
        self.inner.forget(space, hashes)

    def submit_write(self, batch: Batch) -> Job:
        return self._watched("write", batch, self.inner.submit_write)

    def submit_read(self, batch: Batch) -> Job:
        return self._watched("read", batch, self.inner.submit_read)

    def probe(self, space: Keyspace, hashes: HashArray) -> BoolArray:
        self._count("calls_probe")
        self._count("probe_blocks", len(hashes))
        return self.inner.probe(space, hashes)


class LatencyTier(TierWrapper):
    """Makes every read and write settle `latency_s` later than the tier does, as a slow medium would."""

    def __init__(self, inner: Tier, latency_s: float) -> None:
        super().__init__(inner)
        self.latency_s = latency_s
        self._order = itertools.count()
        self._waiting: list[tuple[float, int, Job, Job]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tierkv-testing-latency", daemon=True)
        self._thread.start()

    def _delayed(self, inner_job: Job) -> Job:
        outer = Job(inner_job.count)

        def ended(job: Job) -> None:
            with self._changed:
                if not self._closed:
                    due_s = time.monotonic() + self.latency_s
                    heapq.heappush(self._waiting, (due_s, next(self._order), outer, job))
                    self._changed.notify()
                    return
            outer.settle(slice(None), job.status)

        inner_job.add_done_callback(ended)
        return outer

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed:
                    now_s = time.monotonic()
                    if self._waiting and self._waiting[0][0] <= now_s:
                        break
                    self._changed.wait(self._waiting[0][0] - now_s if self._waiting else 60.0)
                if self._closed and not self._waiting:
                    return
                _, _, outer, job = heapq.heappop(self._waiting)
            outer.settle(slice(None), job.status)

    def submit_write(self, batch: Batch) -> Job:
        return self._delayed(self.inner.submit_write(batch))

    def submit_read(self, batch: Batch) -> Job:
        return self._delayed(self.inner.submit_read(batch))

    def close(self) -> None:
        self.inner.close()
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(60.0)


def positions_of(mask: BoolArray) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The positions at which `mask` is true, (k,) int64: what Job.settle takes."""
    return np.flatnonzero(mask).astype(np.int64)
