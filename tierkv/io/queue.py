"""What the engines share: the bounded queue of requests, cut into pieces, reads first.

Thread safety: RequestQueue locks itself; a Request's pieces are ended under its own lock.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

import numpy as np

from tierkv.errors import ArgumentError, ClosedError
from tierkv.io.base import PIECE_BYTES, QUEUE_BLOCKS, Operation
from tierkv.jobs import Job
from tierkv.types import BlockStatus, Int64Array

_OK = int(BlockStatus.OK)


class Request:
    """One submitted batch: its blocks cut into pieces of at most `piece_bytes`."""

    __slots__ = ("_lock", "_open", "_pieces_left", "_status", "addresses", "blocks", "count", "direct", "fd",
                 "job", "lengths", "next", "offsets", "operation")  # fmt: skip

    def __init__(
        self,
        operation: Operation,
        fd: int,
        offsets: Int64Array,
        addresses: Int64Array,
        lengths: Int64Array,
        *,
        piece_bytes: int,
    ) -> None:
        self.operation = operation
        self.fd = fd
        self.job = Job(len(offsets))
        self._status = [_OK] * len(offsets)
        self._lock = threading.Lock()
        pieces = -(-lengths // piece_bytes)
        self._pieces_left: list[int] = pieces.tolist()
        blocks = np.repeat(np.arange(len(offsets)), pieces)
        if len(blocks) > len(offsets):
            within = (np.arange(len(blocks)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * piece_bytes
            offsets, addresses = offsets[blocks] + within, addresses[blocks] + within
            lengths = np.minimum(lengths[blocks] - within, piece_bytes)
        self.count = len(blocks)
        self.blocks: list[int] = blocks.tolist()
        self.offsets: list[int] = offsets.tolist()
        self.addresses: list[int] = addresses.tolist()
        self.lengths: list[int] = lengths.tolist()
        self.next = 0
        """The first piece that was not handed out yet."""
        self.direct: bool | None = None
        """Whether the file is open for O_DIRECT, once the engine has looked."""
        self._open = len(self._pieces_left)

    def end_piece(self, index: int, status: int) -> None:
        """Ends piece `index`; a block takes the first status that is not OK. Settles the job with its
        last block."""
        block = self.blocks[index]
        with self._lock:
            if status != _OK and self._status[block] == _OK:
                self._status[block] = status
            self._pieces_left[block] -= 1
            if self._pieces_left[block]:
                return
            self._open -= 1
            if self._open:
                return
        self.job.settle(slice(None), np.array(self._status, np.uint8))

    def cut(self, status: int) -> None:
        """Ends the pieces that were never handed out; the request must have left the queue."""
        for index in range(self.next, self.count):
            self.end_piece(index, status)

    def abandon(self, status: int) -> None:
        """Settles the job now: blocks that have wholly ended keep their outcome, the others get `status`."""
        with self._lock:
            unfinished = np.asarray(self._pieces_left) > 0
            outcome = np.array(self._status, np.uint8)
            outcome[unfinished] = status
        self.job.settle(slice(None), outcome)


class Piece(NamedTuple):
    """One operation that may be begun now."""

    request: Request
    number: int


class RequestQueue:
    """Requests that wait, and how many operations are in flight."""

    def __init__(self, depth: int, queue_blocks: int = QUEUE_BLOCKS, piece_bytes: int = PIECE_BYTES) -> None:
        self.depth = depth
        self._queue_blocks = queue_blocks
        self._piece_bytes = piece_bytes
        self.condition = threading.Condition()
        self._waiting: tuple[deque[Request], deque[Request]] = (deque(), deque())
        self._waiting_blocks = [0, 0]
        self._waiting_pieces = [0, 0]
        self._in_flight = [0, 0]
        self.closed = False

    def add(
        self, operation: Operation, fd: int, offsets: Int64Array, addresses: Int64Array, lengths: Int64Array
    ) -> Job:
        """Queues a batch and returns its job; blocks that find no room are DROPPED."""
        count = len(offsets)
        if not len(addresses) == len(lengths) == count:
            raise ArgumentError(f"{count} offsets need as many addresses and lengths")
        if count == 0:
            return Job(0)
        if int(lengths.min()) < 1 or int(offsets.min()) < 0 or int(addresses.min()) <= 0:
            raise ArgumentError(
                "every block needs an offset >= 0, an address, and a length of one byte or more"
            )
        with self.condition:
            if self._refused():
                raise ClosedError("the I/O engine is closed")
            room = min(count, self._queue_blocks - self._waiting_blocks[operation])
            self._waiting_blocks[operation] += room  # reserved before the lock is let go
        if room == 0:
            dropped = Job(count)
            dropped.settle_rest(BlockStatus.DROPPED)
            return dropped
        request = Request(
            operation, fd, offsets[:room], addresses[:room], lengths[:room], piece_bytes=self._piece_bytes
        )
        job = request.job
        if room < count:
            job = _extended(request.job, count)
        with self.condition:
            refused = self._refused()  # closed meanwhile
            if not refused:
                self._waiting[operation].append(request)
                self._waiting_pieces[operation] += request.count
                self.condition.notify(request.count)
        if refused:
            request.abandon(BlockStatus.CANCELLED)
        return job

    def take(self, limit: int) -> list[Piece]:
        """Up to `limit` pieces that may be begun now, reads first. The caller holds `condition` and calls
        ended() later."""
        taken: list[Piece] = []
        while len(taken) < limit:
            operation = self._choose()
            if operation is None:
                break
            requests = self._waiting[operation]
            request = requests[0]
            taken.append(Piece(request, request.next))
            request.next += 1
            self._waiting_pieces[operation] -= 1
            self._in_flight[operation] += 1
            if request.next == request.count:
                requests.popleft()
                self._waiting_blocks[operation] -= request.job.count
        return taken

    def _refused(self) -> bool:
        return self.closed

    def can_take(self) -> bool:
        """True when take() would hand something out. The caller holds `condition`."""
        return self._choose() is not None

    def _choose(self) -> Operation | None:
        """Which kind may begin an operation: reads, but one place is the writes' and an eighth is kept
        free of them."""
        reads, writes = self._in_flight
        if reads + writes >= self.depth:
            return None
        writes_wait = bool(self._waiting[Operation.WRITE])
        reserved = 1 if writes_wait and writes == 0 and self.depth > 1 else 0
        if self._waiting[Operation.READ] and reads + writes < self.depth - reserved:
            return Operation.READ
        if writes_wait and writes < max(1, self.depth - self.depth // 8):
            return Operation.WRITE
        return None

    def ended(self, operation: Operation, count: int = 1) -> None:
        """Operations that take() handed out have ended. The caller holds `condition`."""
        self._in_flight[operation] -= count

    def waiting(self) -> int:
        with self.condition:
            return sum(self._waiting_pieces) + sum(self._in_flight)

    def in_flight(self) -> int:
        """Operations handed out and not ended. The caller holds `condition`."""
        return self._in_flight[0] + self._in_flight[1]

    def close(self) -> list[Request]:
        """Refuses more and returns the requests that still have pieces waiting, for the engine to cut()."""
        with self.condition:
            self.closed = True
            left = [request for requests in self._waiting for request in requests]
            for requests in self._waiting:
                requests.clear()
            self._waiting_blocks = [0, 0]
            self._waiting_pieces = [0, 0]
            self.condition.notify_all()
        return left


def _extended(first: Job, count: int) -> Job:
    """A job of `count` blocks of which those of `first` are its beginning and the others are DROPPED
    already."""
    job = Job(count)
    job.settle(slice(first.count, None), int(BlockStatus.DROPPED))
    first.add_done_callback(lambda done: job.settle(slice(0, done.count), done.status))
    return job
