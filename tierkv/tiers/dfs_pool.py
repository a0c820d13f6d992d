"""OperationPool: threads for file operations that may never return.

Each operation has a deadline. One that is overdue is ended with TIMEOUT by a watchdog; its thread is written
off and replaced, up to MAX_THREADS_FACTOR times the wanted number. Beyond that everything queued is ended
with TIMEOUT at once, until threads come back. A thread that comes back late finds its operation no longer
live and touches nothing of the caller's: whoever hands bytes over does it in Operation.deliver(), under the
operation's lock.

Thread safety: all methods may be called from any thread. Works are run position by position, possibly on
several threads at once; lower lanes come first, and the background lanes leave a thread free for loads.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from tierkv.clock import Clock
from tierkv.memory import Scratch
from tierkv.types import BlockStatus

_log = logging.getLogger(__name__)

MAX_THREADS_FACTOR = 4
MAX_QUEUED = 65536
_IDLE_WAIT_S = 60.0
_SHORTEST_WAIT_S = 0.001


class Lane(IntEnum):
    """What goes first: loads and probes, then writes and unlinks, then listings."""

    LOAD = 0
    WRITE = 1
    SCAN = 2


class Work(Protocol):
    """`count` operations of one kind. run() may raise nothing; settle() is called once for each position."""

    @property
    def count(self) -> int: ...

    @property
    def lane(self) -> Lane: ...

    def run(self, position: int, operation: Operation) -> int:
        """Does one operation and returns its BlockStatus."""
        ...

    def settle(self, position: int, status: int) -> None:
        """Told the outcome, on any thread and without any lock held."""
        ...


class Operation:
    """One position of a work under way on one thread."""

    __slots__ = ("_clock", "_live", "_lock", "position", "scratch", "started_s", "work", "written_off")

    def __init__(self, work: Work, position: int, scratch: Scratch, clock: Clock) -> None:
        self.work = work
        self.position = position
        self.scratch = scratch
        """Memory of this thread alone."""
        self.started_s = clock.monotonic_s()
        self.written_off = False
        self._clock = clock
        self._live = True
        self._lock = threading.Lock()

    @property
    def live(self) -> bool:
        """False once it was ended from outside; then its effects should be undone."""
        return self._live

    def renew(self) -> None:
        """Starts the deadline again: for operations made of many file operations."""
        self.started_s = self._clock.monotonic_s()

    def deliver(self, action: Callable[[], None]) -> bool:
        """Runs `action`, which touches the caller's memory, if the caller still waits for it."""
        with self._lock:
            if self._live:
                action()
            return self._live

    def end(self, status: int) -> None:
        """Settles the position, unless it was settled already."""
        with self._lock:
            first, self._live = self._live, False
        if first:
            self.work.settle(self.position, status)


@dataclass(slots=True, eq=False)
class _Queued:
    work: Work
    next_position: int = 0


class OperationPool:
    """See the module. `on_stall` is told how many operations were written off, without locks held and
    before anything is done about it."""

    def __init__(
        self, threads: int, deadline_s: float, clock: Clock, name: str, on_stall: Callable[[int], None]
    ) -> None:
        self._wanted = threads
        self._deadline_s = deadline_s
        self._clock = clock
        self._name = name
        self._on_stall = on_stall
        self._background_limit = max(1, threads - max(1, threads // 4))
        self._scan_limit = max(1, threads // 4)
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._watch_wake = threading.Condition(self._lock)
        self._idle_reached = threading.Condition(self._lock)
        self._queues: tuple[deque[_Queued], ...] = (deque(), deque(), deque())
        self._queued = [0, 0, 0]
        self._running = [0, 0, 0]
        self._operations: set[Operation] = set()
        self._workers = 0
        self._idle = 0
        self._lost = 0
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._watchdog = threading.Thread(target=self._watch, name=f"{name}-watchdog", daemon=True)
        self._watchdog.start()

    # For the owner.

    @property
    def lost_threads(self) -> int:
        """Threads written off that have not come back."""
        return self._lost

    def exhausted(self) -> bool:
        """True when no more threads may be made and all that exist are stuck."""
        return self._workers == 0 and self._lost >= MAX_THREADS_FACTOR * self._wanted

    def submit(self, work: Work) -> bool:
        """Queues a work of one position or more. False when the queue is full; then nothing is settled. A
        closed pool settles it CANCELLED, an exhausted one TIMEOUT, at once."""
        lane = work.lane
        with self._lock:
            if self._closed:
                refusal = BlockStatus.CANCELLED
            elif self.exhausted():
                refusal = BlockStatus.TIMEOUT
            elif self._queued[lane] + work.count > MAX_QUEUED and self._queued[lane]:
                return False
            else:
                queued = _Queued(work)
                self._queues[lane].append(queued)
                self._queued[lane] += work.count
                while sum(self._queued) > self._idle and self._spawn():
                    pass
                if self._workers:
                    self._wake.notify(min(work.count, self._wanted))
                    return True
                self._queues[lane].remove(queued)  # not one thread can be had
                self._queued[lane] -= work.count
                refusal = BlockStatus.TIMEOUT
        for position in range(work.count):
            work.settle(position, refusal)
        return True

    def check_deadlines(self) -> None:
        """Ends what is overdue. The watchdog calls it; so do tests that move a virtual clock."""
        with self._lock:
            now = self._clock.monotonic_s()
            overdue = [
                operation
                for operation in self._operations
                if not operation.written_off and now - operation.started_s >= self._deadline_s
            ]
            for operation in overdue:
                operation.written_off = True
                self._running[operation.work.lane] -= 1
                self._workers -= 1
                self._lost += 1
        if not overdue:
            return
        _log.warning("%s: %d file operations took over %g s", self._name, len(overdue), self._deadline_s)
        self._on_stall(len(overdue))  # before other threads run into the same
        with self._lock:
            while sum(self._queued) > self._idle and self._spawn():
                pass
            self._wake.notify_all()
            abandoned = [] if self._workers else self._take_all()
        for operation in overdue:
            operation.end(BlockStatus.TIMEOUT)
        _settle_all(abandoned, BlockStatus.TIMEOUT)

    def close(self, timeout_s: float) -> None:
        """Cancels what is queued, gives what runs `timeout_s` to end, cancels the rest. Stuck threads stay
        behind and touch nothing any more. Idempotent."""
        with self._lock:
            self._closed = True
            abandoned = self._take_all()
            self._wake.notify_all()
            self._watch_wake.notify_all()
        _settle_all(abandoned, BlockStatus.CANCELLED)
        with self._lock:
            self._idle_reached.wait_for(lambda: self._workers == 0, timeout_s)
            running = list(self._operations)
            stuck = {operation for operation in running if not operation.written_off}
            threads = [] if stuck else list(self._threads)
        for operation in running:
            operation.end(BlockStatus.CANCELLED)
        if not stuck and not self._lost:
            for thread in threads:
                thread.join(timeout_s)
        self._watchdog.join(timeout_s)

    # Inside.

    def _take_all(self) -> list[_Queued]:
        taken = [queued for queue in self._queues for queued in queue]
        for queue in self._queues:
            queue.clear()
        self._queued = [0, 0, 0]
        return taken

    def _spawn(self) -> bool:
        """Starts a worker if one more is allowed. Under the lock."""
        if self._workers >= self._wanted or self._workers + self._lost >= MAX_THREADS_FACTOR * self._wanted:
            return False
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=self._work, name=f"{self._name}-io", daemon=True)
        self._workers += 1
        try:
            thread.start()
        except RuntimeError:  # the process may start no more threads: those that exist go on
            self._workers -= 1
            return False
        self._threads.append(thread)
        return True

    def _next(self, scratch: Scratch) -> Operation | None:
        """The next operation, or None when the pool is closed. Under the lock."""
        while not self._closed:
            lane = self._open_lane()
            if lane is not None:
                queue = self._queues[lane]
                queued = queue[0]
                position = queued.next_position
                queued.next_position += 1
                if queued.next_position == queued.work.count:
                    queue.popleft()
                self._queued[lane] -= 1
                operation = Operation(queued.work, position, scratch, self._clock)
                if not any(self._running):
                    self._watch_wake.notify()
                self._running[lane] += 1
                self._operations.add(operation)
                return operation
            self._idle += 1
            self._wake.wait(_IDLE_WAIT_S)
            self._idle -= 1
        return None

    def _open_lane(self) -> Lane | None:
        if self._queues[Lane.LOAD]:
            return Lane.LOAD
        background = self._running[Lane.WRITE] + self._running[Lane.SCAN]
        if background >= self._background_limit:
            return None
        if self._queues[Lane.WRITE]:
            return Lane.WRITE
        if self._queues[Lane.SCAN] and self._running[Lane.SCAN] < self._scan_limit:
            return Lane.SCAN
        return None

    def _work(self) -> None:
        scratch = Scratch()
        while True:
            with self._lock:
                operation = self._next(scratch)
                if operation is None:
                    self._workers -= 1
                    self._idle_reached.notify_all()
                    return
            try:
                status = operation.work.run(operation.position, operation)
            except Exception:  # one operation's fault must not take the thread with it
                _log.exception("%s: an operation failed", self._name)
                status = BlockStatus.IO_ERROR
            operation.end(status)
            with self._lock:
                self._operations.discard(operation)
                if not operation.written_off:
                    self._running[operation.work.lane] -= 1
                    if operation.work.lane != Lane.LOAD:
                        self._wake.notify()
                    continue
                self._lost -= 1
                if self._closed or self._workers >= self._wanted:
                    return
                self._workers += 1

    def _watch(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                starts = [o.started_s for o in self._operations if not o.written_off]
                if starts:
                    left_s = min(starts) + self._deadline_s - self._clock.monotonic_s()
                    wait_s = max(_SHORTEST_WAIT_S, min(left_s, _IDLE_WAIT_S))
                else:
                    wait_s = _IDLE_WAIT_S
                self._watch_wake.wait(wait_s)
            self.check_deadlines()


def _settle_all(abandoned: list[_Queued], status: BlockStatus) -> None:
    for queued in abandoned:
        for position in range(queued.next_position, queued.work.count):
            queued.work.settle(position, status)
