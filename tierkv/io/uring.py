"""The io_uring engine: one thread owns the ring, keeps `queue_depth` operations in flight and refills as
they end.

The bindings' own waiting calls keep the GIL, so the thread never uses them: the ring signals an eventfd,
new work signals another, and the thread sleeps in poll(), which releases the GIL. Operations on files
without O_DIRECT are handed to the kernel's workers (IOSQE_ASYNC), since the submitting call would else
copy their bytes under the GIL.

Thread safety: as base.py says; the ring itself is touched by its thread alone.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import select
import threading
from typing import Any

from tierkv.errors import StorageError
from tierkv.io.base import PIECE_BYTES, QUEUE_BLOCKS, Operation, status_of, sync_file, usable_progress
from tierkv.io.queue import Request, RequestQueue
from tierkv.jobs import Job
from tierkv.types import BlockStatus, Int64Array

_log = logging.getLogger(__name__)
_MAX_RETRIES = 64
_OK, _PENDING = int(BlockStatus.OK), int(BlockStatus.PENDING)  # plain integers: this is the hot path
_RETRY = frozenset({errno.EINTR, errno.EAGAIN})
_BUSY = frozenset({errno.EINTR, errno.EAGAIN, errno.EBUSY})


def io_uring_available() -> tuple[bool, str]:
    """(True or False, why): makes a small ring and asks for the operations that are needed."""
    try:
        import liburing
    except ImportError as error:
        return False, f"the liburing package cannot be imported ({error})"
    ring = liburing.Ring()
    try:
        liburing.io_uring_queue_init(2, ring, 0)
    except OSError as error:
        hint = {
            errno.EPERM: "a seccomp profile or kernel.io_uring_disabled blocks it",
            errno.ENOSYS: "the kernel has no io_uring",
            errno.ENOMEM: "the limit of locked memory is too low",
        }.get(error.errno or 0, "see the errno")
        return False, f"io_uring is refused: {error.strerror} ({hint})"
    except Exception as error:
        return False, f"io_uring cannot be set up: {error}"
    try:
        supported = liburing.probe()
        missing = [name for name in ("IORING_OP_READV", "IORING_OP_WRITEV") if not supported.get(name)]
        if missing:
            return False, f"the kernel's io_uring lacks {', '.join(missing)}"
    except Exception as error:
        return False, f"io_uring cannot be asked for its operations: {error}"
    finally:
        liburing.io_uring_queue_exit(ring)
    return True, "io_uring is available"


class _Flight:
    """An operation in the ring: the piece and how far it is; `iovec` and `view` keep its memory described."""

    __slots__ = ("done", "index", "iovec", "request", "tries")

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self.done = 0
        self.tries = 0
        self.iovec: Any = None


class UringBlockIO:
    """At most `queue_depth` operations in the ring at once."""

    name = "io_uring"

    def __init__(
        self, queue_depth: int = 32, *, queue_blocks: int = QUEUE_BLOCKS, piece_bytes: int = PIECE_BYTES
    ) -> None:
        """Raises StorageError where io_uring cannot be used."""
        available, reason = io_uring_available()
        if not available:
            raise StorageError(f"the io_uring engine cannot start: {reason}; use engine = auto or threads")
        import liburing

        self._uring = liburing
        self._queue = RequestQueue(queue_depth, queue_blocks, piece_bytes)
        self._flights: dict[int, _Flight] = {}
        self._next_id = 1
        self._sleeping = False
        self._ended = threading.Event()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="tierkv-io-uring", daemon=True)
        self._thread.start()
        self._started.wait(60.0)
        if self._failure is not None:
            raise StorageError(f"the io_uring engine cannot start: {self._failure}") from self._failure

    def submit(
        self, operation: Operation, fd: int, offsets: Int64Array, addresses: Int64Array, lengths: Int64Array
    ) -> Job:
        job = self._queue.add(operation, fd, offsets, addresses, lengths)
        self._wake()
        return job

    def sync(self, fd: int) -> BlockStatus:
        return sync_file(fd)

    def waiting(self) -> int:
        return self._queue.waiting()

    def close(self, timeout_s: float = 10.0) -> bool:
        for request in self._queue.close():
            request.cut(BlockStatus.CANCELLED)
        self._wake(always=True)
        if not self._ended.wait(timeout_s):
            stuck = list(self._flights.values())
            _log.warning(
                "%d I/O operations had not ended %.0f s after close: left behind", len(stuck), timeout_s
            )
            for flight in stuck:
                flight.request.abandon(BlockStatus.CANCELLED)
            return False
        self._thread.join(timeout_s)
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1
        return True

    def _wake(self, always: bool = False) -> None:
        if not self._sleeping and not always:
            return
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    # The ring's thread.

    def _run(self) -> None:
        ring, event_fd = self._uring.Ring(), -1
        try:
            event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._uring.io_uring_queue_init(max(2, self._queue.depth), ring, 0)
            self._uring.io_uring_register_eventfd(ring, event_fd)
        except BaseException as error:
            self._failure = error
            if ring.ring_fd > 0:
                self._uring.io_uring_queue_exit(ring)
            if event_fd >= 0:
                os.close(event_fd)
            os.close(self._wake_fd)
            self._wake_fd = -1
            self._ended.set()
            self._started.set()
            return
        self._started.set()
        try:
            self._loop(ring, event_fd)
        except BaseException as error:
            _log.exception("the io_uring engine's thread failed: all its operations end as IO_ERROR")
            self._failure = error
            for request in {flight.request for flight in self._flights.values()} | set(self._queue.close()):
                request.abandon(BlockStatus.IO_ERROR)
        finally:
            self._uring.io_uring_queue_exit(ring)
            os.close(event_fd)
            self._ended.set()

    def _loop(self, ring: Any, event_fd: int) -> None:
        uring, queue = self._uring, self._queue
        poll = select.poll()
        poll.register(event_fd, select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        again: list[_Flight] = []
        while True:
            with queue.condition:
                pieces = queue.take(queue.depth)
                finished = queue.closed and not pieces and queue.in_flight() == 0
            if finished:
                return
            for flight in again:
                self._prepare(ring, flight)
            again.clear()
            for request, index in pieces:
                self._prepare(ring, _Flight(request, index))
            unsent = uring.io_uring_sq_ready(ring)
            if unsent:
                try:
                    unsent -= uring.io_uring_submit(ring)
                except OSError as error:
                    if error.errno not in _BUSY:
                        raise
            if self._drain(ring, again) or again:
                continue
            self._sleeping = True
            with queue.condition:
                idle = not queue.can_take()
            if idle and (not queue.closed or self._flights):
                # What could not be sent (EBUSY, EAGAIN) is tried again soon; else an eventfd wakes us.
                poll.poll(10 if unsent else 60_000)
            self._sleeping = False
            for fd in (event_fd, self._wake_fd):
                try:
                    os.eventfd_read(fd)
                except BlockingIOError:
                    pass

    def _prepare(self, ring: Any, flight: _Flight) -> None:
        """Puts one operation into the submission queue, which has room for queue_depth of them."""
        request, index, uring = flight.request, flight.index, self._uring
        left = request.lengths[index] - flight.done
        address = request.addresses[index] + flight.done
        flight.iovec = uring.Iovec([memoryview((ctypes.c_char * left).from_address(address))])
        entry = uring.io_uring_get_sqe(ring)
        prepare = (
            uring.io_uring_prep_readv if request.operation == Operation.READ else uring.io_uring_prep_writev
        )
        prepare(entry, request.fd, flight.iovec, request.offsets[index] + flight.done)
        if not self._is_direct(request):
            entry.flags = uring.IOSQE_ASYNC
        entry.user_data = self._next_id
        self._flights[self._next_id] = flight
        self._next_id += 1

    def _is_direct(self, request: Request) -> bool:
        if request.direct is None:
            try:
                request.direct = bool(fcntl.fcntl(request.fd, fcntl.F_GETFL) & os.O_DIRECT)
            except OSError:
                request.direct = False  # a bad descriptor: the operation itself will say so
        return request.direct

    def _drain(self, ring: Any, again: list[_Flight]) -> int:
        """Ends what has completed; returns how many completions there were. Short transfers go to `again`."""
        uring = self._uring
        ready: int = uring.io_uring_cq_ready(ring)
        if not ready:
            return 0
        entries = uring.Cqe()
        ended = [0, 0]
        outcomes: list[tuple[_Flight, int]] = []
        for _ in range(ready):
            uring.io_uring_peek_cqe(ring, entries)
            entry = entries[0]
            flight = self._flights.pop(entry.user_data)
            try:
                outcome = self._outcome(flight, entry.res)
            except OSError as error:
                outcome = self._failed(flight, error.errno or 0)
            uring.io_uring_cq_advance(ring, 1)
            if outcome == _PENDING:
                again.append(flight)
            else:
                ended[flight.request.operation] += 1
                outcomes.append((flight, outcome))
        with self._queue.condition:
            for operation in Operation:
                self._queue.ended(operation, ended[operation])
        for flight, outcome in outcomes:
            flight.iovec = None
            flight.request.end_piece(flight.index, outcome)
        return ready

    def _outcome(self, flight: _Flight, moved: int) -> int:
        length = flight.request.lengths[flight.index]
        progress = usable_progress(moved, flight.done, length)
        if progress == 0:
            return BlockStatus.IO_ERROR
        flight.done += progress
        return _OK if flight.done >= length else _PENDING

    def _failed(self, flight: _Flight, error_number: int) -> int:
        flight.tries += 1
        if error_number in _RETRY and flight.tries < _MAX_RETRIES:
            return BlockStatus.PENDING
        return status_of(error_number)
