"""Clearer: removes keyspaces from the store after a reset, on a thread of its own, however often that must be tried.

Nothing depends on it: after a reset the engine uses other keyspaces (identity.renewed()). It frees their room, and
keeps engines that still use the old ones from finding what may have been computed with other weights.

Thread safety: every method may be called from any thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tierkv.errors import TierKVError
from tierkv.keys import Keyspace
from tierkv.store.calls import Attachable

log = logging.getLogger("tierkv.vllm")

MAX_WAITING = 16
"""Resets whose keyspaces wait to be cleared; of more, the oldest are given up."""
_AGAIN_S = 1.0
_CLEAR_TIMEOUT_S = 30.0


class ClearingStore(Attachable, Protocol):
    """What a clearer needs of the store."""

    def clear(self, space: Keyspace, timeout_s: float = 30.0) -> int: ...


@dataclass(slots=True, eq=False)
class _Reset:
    left: list[Keyspace]
    """What is still to be cleared."""
    then: Callable[[], None] | None
    done: threading.Event = field(default_factory=threading.Event)


class Clearer:
    """See the module. The thread is there from the first clear() on."""

    def __init__(self, store: ClearingStore) -> None:
        self._store = store
        self._condition = threading.Condition()
        self._waiting: deque[_Reset] = deque()
        self._told = False
        self._closing = False
        self._thread: threading.Thread | None = None

    def clear(
        self, spaces: Sequence[Keyspace], then: Callable[[], None] | None = None, wait_s: float = 0.0
    ) -> bool:
        """Has keyspaces cleared; False if the store has not confirmed it within `wait_s`.

        then: called on this thread when it has, however late that is.
        """
        reset = _Reset(list(spaces), then)
        with self._condition:
            if self._closing:
                return False
            self._waiting.append(reset)
            if len(self._waiting) > MAX_WAITING:
                gone = self._waiting.popleft()
                log.warning("%s: never cleared, too many others wait for that", _names(gone.left))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tierkv-clear", daemon=True)
                self._thread.start()
            self._condition.notify_all()
        return reset.done.wait(wait_s)

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._closing, 60.0)
                if self._closing:
                    return
                reset = self._waiting[0] if self._waiting else None
            if reset is None:
                continue
            done = self._try(reset)
            with self._condition:
                if done:
                    if self._waiting and self._waiting[0] is reset:
                        self._waiting.popleft()
                else:
                    self._condition.wait_for(lambda: self._closing, _AGAIN_S)

    def _try(self, reset: _Reset) -> bool:
        """Whether the store has confirmed that the keyspaces are empty."""
        reason = "the agent is away"
        try:
            while reset.left and self._store.attached:
                removed = self._store.clear(reset.left[-1], _CLEAR_TIMEOUT_S)
                log.info("%s: cleared, %d copies of blocks", _names(reset.left[-1:]), removed)
                reset.left.pop()
            if not reset.left:
                self._told = False
                if reset.then is not None:
                    reset.then()
                reset.done.set()
                return True
        except TierKVError as error:
            reason = str(error)
        except Exception:  # the thread must go on
            log.exception("clearing failed")
        level = logging.DEBUG if self._told else logging.WARNING
        log.log(level, "%s: not cleared yet, it is tried on: %s", _names(reset.left), reason)
        self._told = True
        return False

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the thread; what waits is not cleared. Idempotent."""
        with self._condition:
            self._closing = True
            waiting = sum(len(reset.left) for reset in self._waiting)
            self._condition.notify_all()
        if waiting:
            log.warning("%d keyspaces were never cleared: the agent did not confirm it", waiting)
        if self._thread is not None:
            self._thread.join(timeout_s)


def _names(spaces: Sequence[Keyspace]) -> str:
    """How keyspaces are called in the log."""
    return ", ".join(f"{space.spec.model}/{space.spec.group} ({space.digest.hex()[:8]})" for space in spaces)
