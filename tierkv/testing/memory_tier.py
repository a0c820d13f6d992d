"""MemoryTier: the smallest complete tier, a dict. Copy its shape for a new medium.

It shows what the seam asks of a tier and nothing else: refusals that change nothing, blocks that fail alone,
a commit that follows the last byte, verification on the way back, a bounded queue, and a close that settles
everything. Thread safety: one lock around the books; one worker thread does the copying and settles the jobs.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tierkv.errors import ClosedError
from tierkv.jobs import Job
from tierkv.keys import Keyspace, KeyspaceSpec
from tierkv.memory import SlotMap, slot_bytes_for
from tierkv.tiers.base import Batch, Residents, TierInfo
from tierkv.types import (
    HASH_BYTES,
    BlockStatus,
    BoolArray,
    HashArray,
    SlotArray,
    TierKind,
)

QUEUE_JOBS = 1024
CLOSE_TIMEOUT_S = 10.0


@dataclass(slots=True)
class StoredBlock:
    """What the medium keeps of a block: `checksum` is of the bytes as written; tests may damage `data`."""

    slot: int
    data: bytes
    checksum: int


@dataclass(slots=True)
class MemoryMedium:
    """What survives closing a MemoryTier: the blocks by (keyspace digest, hash) and the specs by digest."""

    blocks: dict[tuple[bytes, bytes], StoredBlock] = field(default_factory=dict)
    specs: dict[bytes, KeyspaceSpec] = field(default_factory=dict)


class MemoryTier:
    """A tier in a dict. `medium`: given again after close(), the new tier finds what the old one held."""

    def __init__(
        self,
        capacity_bytes: int,
        medium: MemoryMedium | None = None,
        kind: TierKind = TierKind.NVME,
        name: str = "memory",
        slab_bytes: int = 2 << 20,
    ) -> None:
        self.medium = MemoryMedium() if medium is None else medium
        self._info = TierInfo(kind, capacity_bytes, 1, False, name)
        self._lock = threading.Lock()
        self._closed = False
        self._slots = SlotMap(capacity_bytes, slab_bytes)
        for (digest, _), block in self.medium.blocks.items():
            slot_bytes = slot_bytes_for(self.medium.specs[digest].block_bytes)
            self._slots.adopt(slot_bytes, np.array([block.slot], np.uint32))
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUE_JOBS)
        self._open_jobs: set[Job] = set()
        self._thread = threading.Thread(target=self._run, name="tierkv-memory-tier", daemon=True)
        self._thread.start()

    @property
    def info(self) -> TierInfo:
        return self._info

    # Slots.

    def allocate(self, space: Keyspace, count: int) -> SlotArray | None:
        return self._slots.allocate(slot_bytes_for(space.block_bytes), count)

    def available(self, space: Keyspace) -> int:
        return self._slots.available(slot_bytes_for(space.block_bytes))

    def give_back(self, space: Keyspace, slots: SlotArray) -> None:
        self._slots.free(slots)

    def slab_of(self, slot: int) -> SlotArray:
        return self._slots.slab_slots(slot)

    def free(self, space: Keyspace, hashes: HashArray, slots: SlotArray) -> None:
        with self._lock:
            self._forget(space, hashes, slots)
        self._slots.free(slots)

    def forget(self, space: Keyspace, hashes: HashArray | None) -> None:
        with self._lock:
            if hashes is None:
                for key in [key for key in self.medium.blocks if key[0] == space.digest]:
                    del self.medium.blocks[key]
            else:
                self._forget(space, hashes, None)

    def used_bytes(self) -> int:
        return self._slots.used_bytes

    # Moving bytes.

    def submit_write(self, batch: Batch) -> Job:
        return self._submit(batch, self._write_one)

    def submit_read(self, batch: Batch) -> Job:
        return self._submit(batch, self._read_one)

    def _write_one(self, batch: Batch, position: int) -> BlockStatus:
        slot, block_hash = int(batch.slots[position]), batch.hashes[position].tobytes()
        data = ctypes.string_at(int(batch.addresses[position]), int(batch.lengths[position]))
        with self._lock:
            self.medium.specs[batch.space.digest] = batch.space.spec
            self.medium.blocks[batch.space.digest, block_hash] = StoredBlock(slot, data, zlib.crc32(data))
        return BlockStatus.OK

    def _read_one(self, batch: Batch, position: int) -> BlockStatus:
        key = (batch.space.digest, batch.hashes[position].tobytes())
        length = int(batch.lengths[position])
        with self._lock:
            block = self.medium.blocks.get(key)
            if block is None or block.slot != int(batch.slots[position]):
                return BlockStatus.MISS
            if len(block.data) != length or zlib.crc32(block.data) != block.checksum:
                del self.medium.blocks[key]
                return BlockStatus.CORRUPT
            data = block.data
        ctypes.memmove(int(batch.addresses[position]), data, length)
        return BlockStatus.OK

    def _submit(self, batch: Batch, one: Callable[[Batch, int], BlockStatus]) -> Job:
        job = Job(batch.count)
        with self._lock:
            self._check_open()
            if job.done():
                return job
            self._open_jobs.add(job)

        def work() -> None:
            for position in range(batch.count):
                if self._closed:
                    break
                status = one(batch, position)
                job.settle(slice(position, position + 1), status)
            job.settle_rest(BlockStatus.CANCELLED)
            with self._lock:
                self._open_jobs.discard(job)

        try:
            self._queue.put_nowait(work)
        except queue.Full:
            with self._lock:
                self._open_jobs.discard(job)
            job.settle_rest(BlockStatus.DROPPED)
        return job

    def _run(self) -> None:
        while True:
            try:
                work = self._queue.get(timeout=60.0)
            except queue.Empty:
                continue
            if work is None:
                return
            work()
            if self._closed and self._queue.empty():
                return  # close() found no room for its None

    # What is there.

    def recover(self) -> Iterator[Residents]:
        with self._lock:
            found = sorted(self.medium.blocks.items(), key=lambda item: item[0][0])
        for digest, group in itertools.groupby(found, key=lambda item: item[0][0]):
            rows = list(group)
            joined = b"".join(key[1] for key, _ in rows)
            hashes = np.frombuffer(joined, np.uint8).reshape(len(rows), HASH_BYTES)
            slots = np.array([block.slot for _, block in rows], np.uint32)
            yield Residents(self.medium.specs[digest], hashes, slots)

    def probe(self, space: Keyspace, hashes: HashArray) -> BoolArray:
        with self._lock:
            present = [(space.digest, row.tobytes()) in self.medium.blocks for row in hashes]
        return np.array(present, np.bool_)

    def healthy(self) -> bool:
        return not self._closed

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            open_jobs = list(self._open_jobs)
        try:
            self._queue.put(None, timeout=CLOSE_TIMEOUT_S)
        except queue.Full:
            pass  # the worker finds the tier closed after each job
        self._thread.join(CLOSE_TIMEOUT_S)
        for job in open_jobs:
            job.settle_rest(BlockStatus.CANCELLED)

    # Inside, under the lock.

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self._info.name} is closed")

    def _forget(self, space: Keyspace, hashes: HashArray, slots: SlotArray | None) -> None:
        for position, row in enumerate(hashes):
            key = (space.digest, row.tobytes())
            block = self.medium.blocks.get(key)
            # Another slot may hold the same block by now: freeing the old one must not lose it.
            if block is not None and (slots is None or block.slot == int(slots[position])):
                del self.medium.blocks[key]
