"""Job: the one kind of future that tiers and stores return for a batch of blocks.

Thread safety: any thread may wait; the owner's threads settle. A job settles each block once, and finishes when
the last block is settled; callbacks then run on the settling thread, so they must be short and must not block.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tierkv.types import BlockStatus, UInt8Array

_log = logging.getLogger(__name__)
Indices = slice | npt.NDArray[np.int64]


class Job:
    """A batch of `count` blocks under way."""

    __slots__ = ("_callbacks", "_event", "_lock", "_open", "count", "status")

    def __init__(self, count: int) -> None:
        self.count = count
        self.status: UInt8Array = np.full(count, BlockStatus.PENDING, np.uint8)
        """(count,) uint8 of BlockStatus. A settled entry never changes again."""
        self._open = count
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._callbacks: list[Callable[[Job], None]] = []
        if count == 0:
            self._event.set()

    def done(self) -> bool:
        """True when every block is settled."""
        return self._event.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until every block is settled; False when `timeout_s` passed first (nothing is cancelled)."""
        return self._event.wait(timeout_s)

    def ok(self) -> bool:
        """True when the job is done and every block is OK."""
        return self.done() and not self.status.any()

    def settle(self, indices: Indices, status: int | UInt8Array) -> None:
        """Settles the blocks at `indices` (a slice, or unique positions). Already settled ones stay as they are."""
        with self._lock:
            current = self.status[indices]
            still_open = current == BlockStatus.PENDING
            settled = int(np.count_nonzero(still_open & (np.asarray(status) != BlockStatus.PENDING)))
            self.status[indices] = np.where(still_open, np.asarray(status, np.uint8), current)
            self._open -= settled
            finished = settled > 0 and self._open == 0
        if finished:
            self._finish()

    def settle_rest(self, status: int) -> None:
        """Settles every block that is still open."""
        with self._lock:
            untouched = 0 < self._open == self.count and status != BlockStatus.PENDING
            if untouched:  # the common case by far
                self.status.fill(status)
                self._open = 0
        if untouched:
            self._finish()
        else:
            self.settle(slice(None), status)

    def add_done_callback(self, callback: Callable[[Job], None]) -> None:
        """Calls `callback(job)` once, when the job is done: on the settling thread, or now if it is done already."""
        with self._lock:
            if not self._event.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def _finish(self) -> None:
        with self._lock:
            self._event.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # a callback's fault must not take the mover's thread with it
                _log.exception("a job's callback failed")

    def __repr__(self) -> str:
        return f"<Job {self.count - self._open}/{self.count}>"


def finished_job(status: UInt8Array) -> Job:
    """A job that is done already, with the given (n,) statuses."""
    job = Job(len(status))
    job.settle(slice(None), status)
    return job
