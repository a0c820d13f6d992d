"""NvmeTier: blocks in one preallocated slot file, their names in an LMDB catalog beside it.

What holds, whatever happens: a block is found only when its bytes were on the medium before its catalog
entry; an entry is gone from the catalog before its slot is given away; what is read is checked by length
and crc32c, and its slot's generation is compared before and after. FORMAT.md shows the bytes.

Memory behind a batch's addresses: with O_DIRECT an operation moves the length rounded up to 4096, so
every address must be a multiple of 4096 with room up to the next multiple behind the block. Reads may
fill that room.

Threads: the engine's, one that computes checksums, and the committer. Thread safety: every method may be
called from any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from tierkv._native import CopyPool
from tierkv.catalog import Catalog
from tierkv.clock import Clock, SystemClock
from tierkv.config import NvmeConfig
from tierkv.errors import ArgumentError, ClosedError
from tierkv.io import BlockIO, Operation, open_engine
from tierkv.jobs import Job, finished_job
from tierkv.keys import Keyspace
from tierkv.memory import SlotMap, slot_bytes_for
from tierkv.tiers.base import Batch, Residents, TierInfo, slot_offsets
from tierkv.tiers.nvme_breaker import WriteBreaker
from tierkv.tiers.nvme_check import (
    InspectReport,
    inspect_directory,
    verify_directory,
)
from tierkv.tiers.nvme_commit import Committer, Deletion, WriteChunk
from tierkv.tiers.nvme_directory import CATALOG_NAME, DirectoryLock, SlotFile, make_directory
from tierkv.tiers.nvme_recovery import Recovery
from tierkv.tiers.nvme_table import Found, SlotTable, names_of
from tierkv.tiers.reports import KeyspaceReport, VerifyReport
from tierkv.types import (
    NO_SLOT,
    SLOT_GRANULE_BYTES,
    BlockStatus,
    BoolArray,
    HashArray,
    Int64Array,
    SlotArray,
    TierKind,
    UInt8Array,
)

__all__ = [
    "InspectReport",
    "KeyspaceReport",
    "NvmeTier",
    "VerifyReport",
    "inspect_directory",
    "verify_directory",
]

_log = logging.getLogger(__name__)
CHUNK_BYTES = 8 << 20
CHUNK_BLOCKS = 256
"""Batches are cut into chunks of at most this much, so that checking one overlaps with reading the next."""
STALL_S = 30.0
DELETE_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 10.0


class NvmeTier:
    """One directory on a local disk. Raises ConfigError, StorageError, LockedError or FormatError when it
    cannot be opened; afterwards faults of the medium are statuses."""

    def __init__(
        self, config: NvmeConfig, *, clock: Clock | None = None, engine: BlockIO | None = None
    ) -> None:
        """engine: another block I/O engine than the configured one; the tier closes it."""
        self._clock = clock or SystemClock()
        self._directory = Path(config.directory)
        self._closed = False
        self._close_lock = threading.Lock()
        self._flights_lock = threading.Lock()
        self._writes: dict[WriteChunk, None] = {}
        self._reads: dict[_ReadChunk, None] = {}
        make_directory(self._directory)
        undo: list[Callable[[], object]] = []
        try:
            lock = DirectoryLock(self._directory)
            undo.append(lock.release)
            self._file = SlotFile(self._directory, config.capacity_bytes, config.direct)
            undo.append(self._file.close)
            self._catalog = Catalog(
                self._directory / CATALOG_NAME,
                sync_power=config.sync == "power",
                created_s=self._clock.wall_s(),
            )
            undo.append(self._catalog.close)
            self._slots = SlotMap(config.capacity_bytes, config.slab_bytes)
            self._table = SlotTable(config.capacity_bytes, config.slab_bytes)
            self._recovery = Recovery(self._catalog, self._slots, self._table, self._file.kept_bytes)
            self._file.resize()
            if engine is None:
                self._engine, reason = open_engine(config.engine, config.queue_depth)
            else:
                self._engine, reason = engine, "an engine was handed in"
            undo.append(self._engine.close)
        except BaseException:
            for step in reversed(undo):
                step()
            raise
        self._lock_file = lock
        self.notes = [f"engine {self._engine.name}: {reason}", *self._file.notes, *self._recovery.notes]
        """Why it runs as it does, and what recovery dropped: for doctor and the log."""
        self.dropped_entries = dict(self._recovery.dropped)
        """reason -> catalog entries that recovery deleted."""
        self._breaker = WriteBreaker(self._clock)
        self._worker = _Worker()
        sync = (lambda: self._engine.sync(self._file.fd)) if config.sync == "power" else None
        self._committer = Committer(
            self._catalog,
            self._table,
            self._clock,
            sync=sync,
            ended=self._write_ended,
            release=self._slots.free,
        )
        self._info = TierInfo(
            TierKind.NVME,
            config.capacity_bytes,
            SLOT_GRANULE_BYTES,
            shared=False,
            name=f"nvme {self._directory}",
        )

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

    def used_bytes(self) -> int:
        return self._slots.used_bytes

    def free(self, space: Keyspace, hashes: HashArray, slots: SlotArray) -> None:
        """Blocks until the deletion is committed, 30 s at most; on a failing medium the slots stay taken
        until a later commit succeeds."""
        if not len(slots) or self._closed:
            return
        slot_bytes = slot_bytes_for(space.block_bytes)
        held = self._table.drop(slot_bytes, slots, names_of(space.digest, hashes))
        if self._committer.owes():
            held[:] = True  # the catalog may still name blocks that the table has dropped
        if not held.all():
            self._slots.free(slots[~held])
        if held.any():
            self._delete(Deletion(space, slot_bytes, hashes[held], slots[held], slots[held]))

    def forget(self, space: Keyspace, hashes: HashArray | None) -> None:
        """Writes under way of these blocks end as CANCELLED. Blocks until committed, 30 s at most."""
        if self._closed:
            return
        names = None if hashes is None else names_of(space.digest, hashes)
        with self._flights_lock:
            flights = [chunk for chunk in self._writes if chunk.space.digest == space.digest]
        for chunk in flights:
            chunk.cancel(None if names is None else np.isin(names_of(space.digest, chunk.hashes), names))
        self._delete(Deletion(space, slot_bytes_for(space.block_bytes), hashes, None, None))

    def _delete(self, deletion: Deletion) -> None:
        self._committer.delete(deletion)
        if not deletion.done.wait(DELETE_TIMEOUT_S):
            _log.warning("%s: a deletion was not committed within %.0f s", self._info.name, DELETE_TIMEOUT_S)

    # Writing.

    def submit_write(self, batch: Batch) -> Job:
        job = Job(batch.count)
        if not batch.count:
            return job
        offsets, lengths = self._placed(batch)
        if self._closed:
            job.settle_rest(BlockStatus.CANCELLED)
            return job
        admitted, trial = (BlockStatus.IO_ERROR, False) if self._stalled() else self._breaker.admit()
        if admitted != BlockStatus.OK:
            job.settle_rest(admitted)
            return job
        slot_bytes = slot_bytes_for(batch.space.block_bytes)
        for start, end in _chunks(lengths):
            part = slice(start, end)
            chunk = WriteChunk(
                batch.space,
                slot_bytes,
                batch.hashes[part],
                batch.slots[part],
                batch.lengths[part],
                batch.addresses[part],
                job,
                start,
                trial and start == 0,
                self._clock.monotonic_s(),
                np.full(end - start, BlockStatus.PENDING, np.uint8),
            )
            with self._flights_lock:
                self._writes[chunk] = None
            self._worker.add(partial(self._checksum, chunk))
            moved = self._submit(Operation.WRITE, offsets[part], batch.addresses[part], lengths[part])
            moved.add_done_callback(partial(self._moved, chunk))
        return job

    def _checksum(self, chunk: WriteChunk) -> None:
        try:
            chunk.checksums = self._worker.pool.crc32c(chunk.addresses, chunk.lengths)
        except Exception:
            _log.exception("a checksum failed")
            chunk.checksums = np.zeros(len(chunk.hashes), np.uint32)
            chunk.cancel(None)
        self._step(chunk)

    def _moved(self, chunk: WriteChunk, moved: Job) -> None:
        with chunk.lock:
            chunk.status = moved.status.copy()
        self._step(chunk)

    def _step(self, chunk: WriteChunk) -> None:
        """One of the two things a chunk waits for is there: its bytes on the medium, or its checksums."""
        with chunk.lock:
            chunk.steps_left -= 1
            if chunk.steps_left:
                return
        with self._flights_lock:
            last = not any(other.job is chunk.job and other.steps_left for other in self._writes)
        self._committer.add(chunk, urgent=last)

    def _write_ended(self, chunk: WriteChunk, outcome: UInt8Array) -> None:
        with self._flights_lock:
            self._writes.pop(chunk, None)
        worst = int(outcome.max())
        for failure in (BlockStatus.NO_SPACE, BlockStatus.IO_ERROR):
            if (outcome == failure).any():
                worst = failure
        self._breaker.ended(BlockStatus(worst), chunk.trial)
        chunk.job.settle(slice(chunk.start, chunk.start + len(outcome)), outcome)

    # Reading.

    def submit_read(self, batch: Batch) -> Job:
        job = Job(batch.count)
        if not batch.count:
            return job
        offsets, lengths = self._placed(batch)
        if self._closed:
            job.settle_rest(BlockStatus.CANCELLED)
            return job
        slot_bytes = slot_bytes_for(batch.space.block_bytes)
        names = names_of(batch.space.digest, batch.hashes)
        found = self._table.get(slot_bytes, batch.slots, names)
        there = found.generations != 0
        if not there.all():
            job.settle(np.flatnonzero(~there), BlockStatus.MISS)
        wrong = there & (found.lengths != batch.lengths)
        if wrong.any():
            self._drop_corrupt(batch.space, batch.hashes[wrong], batch.slots[wrong], found.generations[wrong])
            job.settle(np.flatnonzero(wrong), BlockStatus.CORRUPT)
        positions = np.flatnonzero(there & ~wrong)
        for start, end in _chunks(lengths[positions]):
            part = positions[start:end]
            expected = Found(found.generations[part], found.checksums[part], found.lengths[part])
            chunk = _ReadChunk(batch.select(part), names[part], expected, job, part)
            with self._flights_lock:
                self._reads[chunk] = None
            moved = self._submit(Operation.READ, offsets[part], batch.addresses[part], lengths[part])
            moved.add_done_callback(partial(self._arrived, chunk))
        return job

    def _arrived(self, chunk: _ReadChunk, moved: Job) -> None:
        self._worker.add(partial(self._verify, chunk, moved.status))

    def _verify(self, chunk: _ReadChunk, moved: UInt8Array) -> None:
        try:
            status = self._verified(chunk, moved)
        except Exception:
            _log.exception("checking blocks failed")
            status = np.full(len(moved), BlockStatus.IO_ERROR, np.uint8)
        with self._flights_lock:
            self._reads.pop(chunk, None)
        chunk.job.settle(chunk.positions, status)

    def _verified(self, chunk: _ReadChunk, moved: UInt8Array) -> UInt8Array:
        batch, expected = chunk.batch, chunk.expected
        status = moved.copy()
        status[moved == BlockStatus.DROPPED] = BlockStatus.TIMEOUT  # no room to wait: too late, not gone
        status[moved == BlockStatus.NO_SPACE] = BlockStatus.IO_ERROR
        good = np.flatnonzero(moved == BlockStatus.OK)
        sums = self._worker.pool.crc32c(batch.addresses[good], batch.lengths[good])
        damaged = good[sums != expected.checksums[good]]
        status[damaged] = BlockStatus.CORRUPT
        now = self._table.get(slot_bytes_for(batch.space.block_bytes), batch.slots, chunk.names)
        changed = now.generations != expected.generations
        status[changed & ((status == BlockStatus.OK) | (status == BlockStatus.CORRUPT))] = BlockStatus.MISS
        corrupt = np.flatnonzero(status == BlockStatus.CORRUPT)
        if len(corrupt):
            self._drop_corrupt(
                batch.space, batch.hashes[corrupt], batch.slots[corrupt], expected.generations[corrupt]
            )
        return status

    def _drop_corrupt(
        self,
        space: Keyspace,
        hashes: HashArray,
        slots: SlotArray,
        generations: np.ndarray[tuple[int], np.dtype[np.uint64]],
    ) -> None:
        """Makes damaged blocks unfindable, now in memory and soon in the catalog; their slots stay the
        caller's."""
        _log.warning("%s: %d damaged blocks of %s are dropped", self._info.name, len(slots), space)
        slot_bytes = slot_bytes_for(space.block_bytes)
        self._table.drop(slot_bytes, slots, names_of(space.digest, hashes), generations)
        self._committer.delete(Deletion(space, slot_bytes, hashes, slots, None, generations))

    def _submit(
        self, operation: Operation, offsets: Int64Array, addresses: Int64Array, lengths: Int64Array
    ) -> Job:
        try:
            return self._engine.submit(operation, self._file.fd, offsets, addresses, lengths)
        except ClosedError:  # close() came between
            return finished_job(np.full(len(offsets), BlockStatus.CANCELLED, np.uint8))

    def _placed(self, batch: Batch) -> tuple[Int64Array, Int64Array]:
        """(offsets in the file, lengths of the operations); ArgumentError for what lies outside or is
        misaligned."""
        offsets = slot_offsets(batch.slots, SLOT_GRANULE_BYTES)
        if int(offsets.max()) + slot_bytes_for(batch.space.block_bytes) > self._info.capacity_bytes:
            raise ArgumentError(
                f"{self._info.name}: a slot lies beyond the capacity: slots come from allocate()"
            )
        if not self._file.direct:
            return offsets, batch.lengths
        if (batch.addresses % SLOT_GRANULE_BYTES).any():
            raise ArgumentError(
                f"{self._info.name}: every address must be a multiple of {SLOT_GRANULE_BYTES}"
            )
        return offsets, -(-batch.lengths // SLOT_GRANULE_BYTES) * SLOT_GRANULE_BYTES

    # The rest of the seam.

    def recover(self) -> Iterator[Residents]:
        """What was there at opening, per keyspace, least recently written first; the second call asks the
        catalog."""
        return self._recovery.residents()

    def probe(self, space: Keyspace, hashes: HashArray) -> BoolArray:
        """Asks the catalog itself."""
        there: BoolArray = self._catalog.get(space.digest, hashes)["slot"] != NO_SLOT
        return there

    def healthy(self) -> bool:
        return not self._stalled() and self._breaker.healthy()

    def _stalled(self) -> bool:
        with self._flights_lock:
            oldest = next(iter(self._writes), None)
        return oldest is not None and self._clock.monotonic_s() - oldest.submitted_s > STALL_S

    def close(self) -> None:
        """Lets I/O under way end (10 s at most), commits what was written whole, and gives the directory
        up."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        ended = self._engine.close(CLOSE_TIMEOUT_S)
        self._worker.close(max(1.0, deadline - time.monotonic()))
        committed = self._committer.close(max(2.0, deadline - time.monotonic()))
        with self._flights_lock:
            left = [write.job for write in self._writes] + [read.job for read in self._reads]
        for job in left:
            job.settle_rest(BlockStatus.CANCELLED)
        if not (ended and committed):
            _log.error(
                "%s: the medium hangs: the directory stays locked until this process ends", self._info.name
            )
            return
        self._catalog.close()
        self._file.close()
        self._lock_file.release()


class _ReadChunk:
    """Blocks of one read job that are moved and verified together."""

    __slots__ = ("batch", "expected", "job", "names", "positions")

    def __init__(
        self,
        batch: Batch,
        names: np.ndarray[tuple[int], np.dtype[np.uint64]],
        expected: Found,
        job: Job,
        positions: Int64Array,
    ) -> None:
        self.batch = batch
        self.names = names
        self.expected = expected
        self.job = job
        self.positions = positions


class _Worker:
    """One thread that computes checksums, so that the ring's thread never waits for them. Its queue is
    bounded by what the engine accepts."""

    def __init__(self) -> None:
        self.pool = CopyPool(1)
        self._condition = threading.Condition()
        self._queue: deque[Callable[[], None]] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tierkv-nvme-check", daemon=True)
        self._thread.start()

    def add(self, task: Callable[[], None]) -> None:
        with self._condition:
            self._queue.append(task)
            self._condition.notify()

    def close(self, timeout_s: float) -> None:
        """Does what is queued and ends."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join(timeout_s)
        self.pool.close()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._queue:
                    if self._closed:
                        return
                    self._condition.wait(60.0)
                task = self._queue.popleft()
            task()


def _chunks(lengths: Int64Array) -> Iterator[tuple[int, int]]:
    """(start, end) of runs of at most CHUNK_BYTES (one block at least) and CHUNK_BLOCKS."""
    if not len(lengths):
        return
    ends = np.cumsum(lengths)
    start = 0
    while start < len(lengths):
        before = int(ends[start - 1]) if start else 0
        end = int(np.searchsorted(ends, before + CHUNK_BYTES, side="right"))
        end = min(max(end, start + 1), start + CHUNK_BLOCKS)
        yield start, end
        start = end
