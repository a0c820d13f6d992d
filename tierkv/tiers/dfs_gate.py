"""WriteGate: stops writes to a medium that refuses them, and lets one through now and then to see whether it
heals.

The pause starts at FIRST_PAUSE_S and doubles to LONGEST_PAUSE_S with each failure, until a block was written
again. Thread safety: one lock.
"""

from __future__ import annotations

import threading

from tierkv.clock import Clock
from tierkv.types import BlockStatus

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class WriteGate:
    """Open, or stopped with the status that writes get meanwhile."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._stopped: BlockStatus | None = None
        self._pause_s = 0.0
        self._retry_at_s = 0.0
        self._size_bytes = 0

    @property
    def open(self) -> bool:
        return self._stopped is None

    def refusal(self) -> BlockStatus | None:
        """None: write (as the trial, if the pause is over). Else the status to give instead."""
        with self._lock:
            if self._stopped is not None and not self._due():
                return self._stopped
            return None

    def trial(self) -> int:
        """Bytes of the trial write that is due now, or 0. The caller must make it."""
        with self._lock:
            return self._size_bytes if self._stopped is not None and self._due() else 0

    def failed(self, status: BlockStatus, size_bytes: int) -> None:
        """A write of `size_bytes` failed: stops writes, or prolongs the pause when the trial itself
        failed."""
        with self._lock:
            now = self._clock.monotonic_s()
            self._size_bytes = max(size_bytes, 1)
            if self._stopped is None:
                self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2) if self._pause_s else FIRST_PAUSE_S
                self._retry_at_s = now + self._pause_s
            self._stopped = status

    def passed(self) -> None:
        """A trial went through: writes go on, but another failure is paused for longer."""
        with self._lock:
            self._stopped = None

    def succeeded(self) -> None:
        """A block was written: all is well."""
        if self._stopped is None and not self._pause_s:
            return  # the usual case, without the lock
        with self._lock:
            self._stopped = None
            self._pause_s = 0.0

    def _due(self) -> bool:
        """Whether the pause is over; then the next one, twice as long, has begun. Under the lock."""
        now = self._clock.monotonic_s()
        if now < self._retry_at_s:
            return False
        self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2)
        self._retry_at_s = now + self._pause_s
        return True
