"""When to stop writing to a medium that fails, and when to try again: pure state over an injected clock.

Thread safety: one lock, every call is short.
"""

from __future__ import annotations

import threading

from tierkv.clock import Clock
from tierkv.types import BlockStatus

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class WriteBreaker:
    """After a failure writes are refused for a pause that doubles from 1 to 60 s; then one batch is let
    through as a trial, and its outcome decides."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failed: BlockStatus | None = None
        self._pause_s = FIRST_PAUSE_S
        self._until_s = 0.0
        self._trial = False

    def healthy(self) -> bool:
        """True when a write would be let through."""
        with self._lock:
            return self._failed is None or (not self._trial and self._clock.monotonic_s() >= self._until_s)

    def admit(self) -> tuple[BlockStatus, bool]:
        """(OK, is it the trial) or (what the medium last said, False). A trial must be reported to
        ended()."""
        with self._lock:
            if self._failed is None:
                return BlockStatus.OK, False
            if self._trial or self._clock.monotonic_s() < self._until_s:
                return self._failed, False
            self._trial = True
            return BlockStatus.OK, True

    def ended(self, status: BlockStatus, trial: bool) -> None:
        """What became of a write: OK, the failure, or anything else (cancelled) that says nothing."""
        failed = status in (BlockStatus.NO_SPACE, BlockStatus.IO_ERROR)
        with self._lock:
            if trial:
                self._trial = False
            if failed and (self._failed is None or trial):
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if trial else FIRST_PAUSE_S
                self._until_s = self._clock.monotonic_s() + self._pause_s
                self._failed = status
            elif status == BlockStatus.OK and trial:
                self._failed = None
