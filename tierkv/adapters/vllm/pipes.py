"""Pipes: blocks on their way between a device and the store, through few staging slots, a chunk a slot.

A load's chunk is loaded into its slot by the store and then copied into the engine's blocks; a save's is copied out of
them and then saved from its slot. While one chunk is with the store, others are with the device. Loads and saves have a
pipe each, so that loads never wait behind saves.

What holds:
- Nothing is written into the engine's blocks before the engine's work that was ordered when the load was, nor after the
  load's job has settled the block: while a copy into them is under way its blocks stay open, past the deadline if need
  be.
- What was read from the engine's blocks is saved only if the job was still open when the reading had ended.
- A slot is used again only when neither the store nor the device can touch it any more. The store's jobs end by
  themselves; a slot whose job does not, stays out of use.

Thread safety: submit() and close() may be called from any thread; each pipe has a thread that does the rest.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tierkv.adapters.vllm.device import Device, Lane
from tierkv.errors import TierKVError
from tierkv.jobs import Job
from tierkv.types import BlockStatus, HashArray, Int64Array

log = logging.getLogger("tierkv.vllm")

MAX_QUEUED_BLOCKS = 65536
MAX_QUEUED_REQUESTS = 4096
MAX_CHUNK_BLOCKS = 4096
_GRACE_S = 1.0
"""How much longer than the deadline, which the store was told, its answer is waited for."""
_LONGEST_WAIT_S = 5.0

Runs = list[tuple[int, int]]
"""[first, last + 1) of rows that follow each other."""


class Slot:
    """A piece of staging memory, and as much of the device's. ids, device_ids: for the block ids of one chunk."""

    def __init__(self, device: Device, size_bytes: int) -> None:
        import torch

        self.host = device.staging(size_bytes)
        self.scratch = device.scratch(size_bytes)
        self.ids = device.staging(8 * MAX_CHUNK_BLOCKS).view(torch.int64)
        self.device_ids = device.scratch(8 * MAX_CHUNK_BLOCKS).view(torch.int64)
        self.address = int(self.host.data_ptr())


class Route(Protocol):
    """Where a request's blocks come from and go to: the engine's blocks of one group, and a keyspace of the store."""

    @property
    def chunk_blocks(self) -> int:
        """How many blocks a slot takes."""
        ...

    def store_load(self, hashes: HashArray, slot: Slot, timeout_s: float) -> Job: ...

    def store_save(self, hashes: HashArray, slot: Slot, timeout_s: float) -> Job: ...

    def copy_out(self, slot: Slot, block_ids: Int64Array) -> None:
        """Orders the copies from the engine's blocks to the slot, on the current stream."""
        ...

    def copy_in(self, slot: Slot, block_ids: Int64Array, runs: Runs) -> None:
        """Orders the copies from these rows of the slot to the engine's blocks, on the current stream."""
        ...


@dataclass(slots=True, eq=False)
class _Request:
    route: Route
    hashes: HashArray
    block_ids: Int64Array
    job: Job
    mark: Any
    deadline_s: float
    begun: int = 0
    """So many of its blocks are in chunks, or have been."""


@dataclass(slots=True, eq=False)
class _Chunk:
    request: _Request
    where: slice
    """Its blocks among the request's."""
    slot: Slot
    stored: Job | None = None
    """The store's job, while the chunk is with the store or after; None: it was not there yet."""
    with_device: bool = False
    given_up: bool = False
    """It was settled at the deadline; only its slot is waited for."""
    late: bool = False

    @property
    def hashes(self) -> HashArray:
        return self.request.hashes[self.where]

    @property
    def block_ids(self) -> Int64Array:
        return self.request.block_ids[self.where]

    def settle(self, status: Any) -> None:
        self.request.job.settle(self.where, status)

    def left_s(self) -> float:
        return self.request.deadline_s - time.monotonic()


class Pipe:
    """What loads and saves share. `refused`: what becomes of blocks that the queue has no place for."""

    _name = ""
    _refused = BlockStatus.DROPPED
    _broken = BlockStatus.DROPPED

    def __init__(self, lane: Lane, slots: list[Slot]) -> None:
        self._lane = lane
        self._free = list(slots)
        self._condition = threading.Condition()
        self._queue: deque[_Request] = deque()
        self._queued_blocks = 0
        self._ended: deque[tuple[_Chunk, Exception | None]] = deque()
        """Chunks that the store or the device is done with, and how it ended."""
        self._under_way: list[_Chunk] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"tierkv-vllm-{self._name}", daemon=True)
        self._thread.start()

    def submit(
        self, route: Route, hashes: HashArray, block_ids: Int64Array, mark: Any, timeout_s: float
    ) -> Job:
        """Queues (n,) blocks, to be moved after the mark; what the queue has no place for ends at once."""
        job = Job(len(hashes))
        if job.done():
            return job
        with self._condition:
            closing = self._closing
            full = (
                len(self._queue) >= MAX_QUEUED_REQUESTS
                or self._queued_blocks + len(hashes) > MAX_QUEUED_BLOCKS
            )
            if not full and not closing:
                deadline_s = time.monotonic() + timeout_s
                self._queue.append(_Request(route, hashes, block_ids, job, mark, deadline_s))
                self._queued_blocks += len(hashes)
                self._condition.notify_all()
        if full or closing:
            job.settle_rest(BlockStatus.CANCELLED if closing else self._refused)
        return job

    def close(self, timeout_s: float) -> bool:
        """Ends the pipe: what is not with the device is CANCELLED, what is there is waited for; False if it did not end
        in time."""
        with self._condition:
            self._closing = True
            abandoned, self._queue = list(self._queue), deque()
            self._condition.notify_all()
        for request in abandoned:
            _settle_unbegun(request, BlockStatus.CANCELLED)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # The thread

    def _run(self) -> None:
        while True:
            with self._condition:
                if not self._ended and not self._closing and not (self._queue and self._free):
                    self._condition.wait(self._wait_s())
                elif not self._ended and self._closing:
                    self._leave_store()
                    if not self._under_way:
                        return
                    self._condition.wait(_LONGEST_WAIT_S)
                ended, self._ended = self._ended, deque()
                late = self._take_late()
                chunks = self._take_chunks()
            for request in late:
                _settle_unbegun(request, BlockStatus.TIMEOUT)
            for chunk, error in ended:
                self._step(chunk, error)
            for chunk in chunks:
                self._step(chunk, None)
            self._give_up_late()

    def _wait_s(self) -> float:
        """How long nothing has to be looked after. Under the lock."""
        times_s = [request.deadline_s for request in self._queue]
        times_s += [self._patience_end_s(chunk) for chunk in self._under_way if not chunk.late]
        return max(0.001, min([_LONGEST_WAIT_S, *(at_s - time.monotonic() for at_s in times_s)]))

    def _patience_end_s(self, chunk: _Chunk) -> float:
        return chunk.request.deadline_s + (0.0 if chunk.with_device else _GRACE_S)

    def _take_late(self) -> list[_Request]:
        """The queued requests whose deadline has passed. Under the lock."""
        now_s = time.monotonic()
        late = [request for request in self._queue if request.deadline_s <= now_s]
        for request in late:
            self._queue.remove(request)
            self._queued_blocks -= len(request.hashes) - request.begun
        return late

    def _take_chunks(self) -> list[_Chunk]:
        """As many chunks as there are free slots. Under the lock."""
        chunks = []
        while self._queue and self._free:
            request = self._queue[0]
            begin = request.begun
            request.begun = min(begin + request.route.chunk_blocks, len(request.hashes))
            self._queued_blocks -= request.begun - begin
            if request.begun == len(request.hashes):
                self._queue.popleft()
            chunks.append(_Chunk(request, slice(begin, request.begun), self._free.pop()))
        self._under_way += chunks
        return chunks

    def _step(self, chunk: _Chunk, error: Exception | None) -> None:
        """Brings a chunk on its way, after its last stop has ended."""
        try:
            self._go_on(chunk, error)
        except (
            Exception
        ):  # the thread must survive; who still uses the slot is not known: it stays out of use
            log.exception("a %s of %d blocks failed", self._name, len(chunk.hashes))
            if not chunk.with_device:
                chunk.settle(self._broken)
            chunk.late = True

    def _go_on(self, chunk: _Chunk, error: Exception | None) -> None:
        raise NotImplementedError

    def _ask_store(self, chunk: _Chunk) -> None:
        """Hands the chunk to the store."""
        chunk.with_device = False
        try:
            chunk.stored = self._asked(chunk)
        except Exception as error:
            log.warning(
                "the store refuses a %s of %d blocks: %s", self._name, len(chunk.hashes), error,
                exc_info=not isinstance(error, TierKVError),
            )  # fmt: skip
            self._end(chunk, self._broken)
            return
        chunk.stored.add_done_callback(lambda _: self._tell(chunk, None))

    def _asked(self, chunk: _Chunk) -> Job:
        raise NotImplementedError

    def _tell(self, chunk: _Chunk, error: Exception | None) -> None:
        """Any thread tells that the store or the device is done with a chunk."""
        with self._condition:
            self._ended.append((chunk, error))
            self._condition.notify_all()

    def _end(self, chunk: _Chunk, status: Any) -> None:
        """Nobody uses the chunk's slot any more; what is open of it is settled."""
        self._under_way.remove(chunk)
        self._free.append(chunk.slot)
        chunk.settle(status)

    def _give_up_late(self) -> None:
        for chunk in self._under_way:
            if chunk.late or time.monotonic() < self._patience_end_s(chunk):
                continue
            chunk.late = True
            if self._may_give_up(chunk):
                chunk.given_up = True
                chunk.settle(BlockStatus.TIMEOUT)
            else:
                log.error("the device has not copied %d loaded blocks by their deadline", len(chunk.hashes))

    def _may_give_up(self, chunk: _Chunk) -> bool:
        raise NotImplementedError

    def _leave_store(self) -> None:
        """Closing: chunks that are with the store are left to it; the store's job keeps their memory."""
        for chunk in [chunk for chunk in self._under_way if not chunk.with_device]:
            self._under_way.remove(chunk)
            chunk.settle(BlockStatus.CANCELLED)


class LoadPipe(Pipe):
    """From the store, by a slot, into the engine's blocks."""

    _name = "load"
    _refused = BlockStatus.TIMEOUT
    _broken = BlockStatus.IO_ERROR

    def _go_on(self, chunk: _Chunk, error: Exception | None) -> None:
        if chunk.with_device:
            if error is not None:
                log.error("%d loaded blocks were not copied to the device: %s", len(chunk.hashes), error)
            self._end(chunk, BlockStatus.OK if error is None else BlockStatus.IO_ERROR)
        elif chunk.stored is None:
            self._ask_store(chunk)
        elif chunk.given_up or self._closing or chunk.left_s() <= 0:
            self._end(chunk, BlockStatus.CANCELLED if self._closing else BlockStatus.TIMEOUT)
        else:
            self._copy(chunk, chunk.stored.status)

    def _copy(self, chunk: _Chunk, status: np.ndarray) -> None:
        runs = _runs(status == BlockStatus.OK)
        if not runs:
            self._end(chunk, status)
            return
        chunk.settle(np.where(status == BlockStatus.OK, np.uint8(BlockStatus.PENDING), status))
        chunk.with_device = True
        request, slot, block_ids = chunk.request, chunk.slot, chunk.block_ids
        self._lane.run(
            request.mark,
            lambda: request.route.copy_in(slot, block_ids, runs),
            lambda error: self._tell(chunk, error),
        )

    def _asked(self, chunk: _Chunk) -> Job:
        return chunk.request.route.store_load(chunk.hashes, chunk.slot, max(0.001, chunk.left_s()))

    def _may_give_up(self, chunk: _Chunk) -> bool:
        return not chunk.with_device  # else the device may still write


class SavePipe(Pipe):
    """From the engine's blocks, by a slot, to the store."""

    _name = "save"

    def _go_on(self, chunk: _Chunk, error: Exception | None) -> None:
        if chunk.stored is not None:
            self._end(chunk, chunk.stored.status)
        elif not chunk.with_device:
            self._copy(chunk)
        elif error is not None:
            log.error("%d blocks were not copied from the device: %s", len(chunk.hashes), error)
            self._end(chunk, BlockStatus.DROPPED)
        elif chunk.given_up or self._closing or chunk.left_s() <= 0:
            # The engine may have been told that its blocks are its own again before they were read.
            self._end(chunk, BlockStatus.CANCELLED if self._closing else BlockStatus.TIMEOUT)
        else:
            self._ask_store(chunk)

    def _copy(self, chunk: _Chunk) -> None:
        chunk.with_device = True
        request, slot, block_ids = chunk.request, chunk.slot, chunk.block_ids
        self._lane.run(
            request.mark,
            lambda: request.route.copy_out(slot, block_ids),
            lambda error: self._tell(chunk, error),
        )

    def _asked(self, chunk: _Chunk) -> Job:
        return chunk.request.route.store_save(chunk.hashes, chunk.slot, max(0.001, chunk.left_s()))

    def _may_give_up(self, chunk: _Chunk) -> bool:
        return True


def _settle_unbegun(request: _Request, status: BlockStatus) -> None:
    request.job.settle(slice(request.begun, len(request.hashes)), status)


def _runs(good: np.ndarray) -> Runs:
    """The runs of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], good, [False])).astype(np.int8)))
    return [(int(first), int(end)) for first, end in edges.reshape(-1, 2)]
