"""StopSignals: waits for SIGTERM, SIGINT, or the end of another process, in one place and without polling.

While the process is starting a signal unwinds it (there is nothing to drain yet); afterwards it only ends wait().
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """A context manager for the main thread; puts the handlers back as they were."""

    def __enter__(self) -> StopSignals:
        self._starting = True
        self._stopped = False
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Python's own handlers run between two bytecodes of the main thread; the byte in the pipe ends its poll.
        self._old_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._old: list[Callable[[int, FrameType | None], object] | int | None] = [
            signal.signal(number, self._handle) for number in _SIGNALS
        ]
        return self

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._stopped = True
        if self._starting:
            raise SystemExit(0)

    @property
    def stopped(self) -> bool:
        """Whether a signal has asked for the end."""
        return self._stopped

    def started(self) -> None:
        """From now on a signal does not interrupt what the process is doing."""
        self._starting = False

    def wait(self, fds: Sequence[int] = (), timeout_s: float | None = None) -> list[int]:
        """Waits for a signal, or for one of `fds` to be readable or closed at its other end: those of them.

        With a signal `stopped` is true on return. Without any, [] after timeout_s.
        """
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        for fd in fds:
            poll.register(fd, select.POLLIN)
        if self._stopped:
            timeout_s = 0.0
        ready = [fd for fd, _ in poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000)]
        if self._reader in ready:
            os.read(self._reader, 4096)
            ready.remove(self._reader)
        return ready

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in zip(_SIGNALS, self._old, strict=True):
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._reader)
        os.close(self._writer)


def open_self() -> int:
    """A descriptor of this process that becomes readable when it ends, however it ends (Linux 5.3)."""
    return os.pidfd_open(os.getpid())
