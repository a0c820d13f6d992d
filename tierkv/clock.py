"""Injectable time, so that deadlines are tested by moving a clock and not by sleeping.

Thread safety: both clocks may be read and advanced from any thread.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Where the store reads the time. Only deadlines use it, never waiting itself."""

    def monotonic_s(self) -> float:
        """Seconds that never run backwards; the zero is arbitrary."""
        ...

    def wall_s(self) -> float:
        """Seconds since 1970-01-01 UTC, for what is stored."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()


class VirtualClock:
    """A clock that moves only when told to. For tests and replay."""

    def __init__(self, start_s: float = 1_000_000.0) -> None:
        self._now_s = start_s
        self._lock = threading.Lock()

    def monotonic_s(self) -> float:
        with self._lock:
            return self._now_s

    def wall_s(self) -> float:
        return self.monotonic_s()

    def advance(self, seconds: float) -> None:
        """Moves the clock forward by `seconds` (>= 0)."""
        if seconds < 0:
            raise ValueError(f"a clock cannot run backwards: {seconds} s")
        with self._lock:
            self._now_s += seconds
