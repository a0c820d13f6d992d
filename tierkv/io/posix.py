"""The thread-pool engine: preadv and pwritev on a few threads, for where io_uring is blocked.

The system calls release the GIL. Thread safety: as base.py says. The threads are daemons: one that hangs
in the kernel does not keep the process from ending.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time

from tierkv.io.base import PIECE_BYTES, QUEUE_BLOCKS, Operation, status_of, sync_file, usable_progress
from tierkv.io.queue import Piece, RequestQueue
from tierkv.jobs import Job
from tierkv.types import BlockStatus, Int64Array

_log = logging.getLogger(__name__)
MAX_THREADS = 16


class PosixBlockIO:
    """At most min(queue_depth, 16) operations at once, one a thread."""

    name = "threads"

    def __init__(
        self, queue_depth: int = 32, *, queue_blocks: int = QUEUE_BLOCKS, piece_bytes: int = PIECE_BYTES
    ) -> None:
        depth = min(queue_depth, MAX_THREADS)
        self._queue = RequestQueue(depth, queue_blocks, piece_bytes)
        self._threads = [
            threading.Thread(target=self._run, name=f"tierkv-io-{number}", daemon=True)
            for number in range(depth)
        ]
        self._busy: dict[int, Piece] = {}
        for thread in self._threads:
            thread.start()

    def submit(
        self, operation: Operation, fd: int, offsets: Int64Array, addresses: Int64Array, lengths: Int64Array
    ) -> Job:
        return self._queue.add(operation, fd, offsets, addresses, lengths)

    def sync(self, fd: int) -> BlockStatus:
        return sync_file(fd)

    def waiting(self) -> int:
        return self._queue.waiting()

    def close(self, timeout_s: float = 10.0) -> bool:
        deadline = time.monotonic() + timeout_s
        for request in self._queue.close():
            request.cut(BlockStatus.CANCELLED)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            return True
        with self._queue.condition:
            stuck = list(self._busy.values())
        _log.warning("%d I/O operations had not ended %.0f s after close: left behind", len(stuck), timeout_s)
        for piece in stuck:
            piece.request.abandon(BlockStatus.CANCELLED)
        return False

    def _run(self) -> None:
        queue, me = self._queue, threading.get_ident()
        while True:
            with queue.condition:
                while not (taken := queue.take(1)):
                    if queue.closed:
                        return
                    queue.condition.wait(60.0)
                piece = self._busy[me] = taken[0]
            request, number = piece
            try:
                status = move_piece(
                    request.operation,
                    request.fd,
                    request.offsets[number],
                    request.addresses[number],
                    request.lengths[number],
                )
            except Exception:
                _log.exception("the I/O engine failed on an operation")
                status = BlockStatus.IO_ERROR
            with queue.condition:
                queue.ended(request.operation)
                del self._busy[me]
                queue.condition.notify()
            request.end_piece(number, status)


def move_piece(operation: Operation, fd: int, offset: int, address: int, length: int) -> BlockStatus:
    """Moves one piece on this thread, going on after short transfers."""
    view = memoryview((ctypes.c_char * length).from_address(address)).cast("B")
    call = os.preadv if operation == Operation.READ else os.pwritev
    done = 0
    while done < length:
        try:
            moved = call(fd, [view[done:]], offset + done)
        except OSError as error:
            return status_of(error.errno or 0)
        progress = usable_progress(moved, done, length)
        if progress == 0:
            return BlockStatus.IO_ERROR
        done += progress
    return BlockStatus.OK
