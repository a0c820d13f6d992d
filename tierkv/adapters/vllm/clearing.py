"""Clearer: removes keyspaces from the store after a reset, on a thread of its own, however often that must be tried.

Nothing depends on it: after a reset the engine uses other keyspaces (identity.renewed()). It frees their room, and
keeps engines that still use the old ones from finding what may have been computed with other weights.

Thread safety: every method may be called from any thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from tierkv.errors import TierKVError
from tierkv.keys import Keyspace
from tierkv.store.calls import Attachable

log = logging.getLogger("tierkv.vllm")

MAX_WAITING = 64
"""Keyspaces that wait to be cleared; of more, the oldest are given up."""
_AGAIN_S = 1.0
_CLEAR_TIMEOUT_S = 30.0


class ClearingStore(Attachable, Protocol):
    """What a clearer needs of the store."""

    def clear(self, space: Keyspace, timeout_s: float = 30.0) -> int: ...


class Clearer:
    """See the module. The thread is there from the first clear() on."""

    def __init__(self, store: ClearingStore) -> None:
        self._store = store
        self._condition = threading.Condition()
        self._waiting: deque[Keyspace] = deque()
        self._told = False
        self._closing = False
        self._thread: threading.Thread | None = None

    def clear(self, spaces: Sequence[Keyspace], wait_s: float) -> bool:
        """Has keyspaces cleared; False if the store has not confirmed them and all before within `wait_s`."""
        with self._condition:
            if self._closing:
                return False
            self._waiting.extend(spaces)
            while len(self._waiting) > MAX_WAITING:
                log.warning("%s is never cleared: too many others wait for that", self._waiting.popleft())
            if self._thread is None and spaces:
                self._thread = threading.Thread(target=self._run, name="tierkv-clear", daemon=True)
                self._thread.start()
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._waiting or self._closing, wait_s)
            return not self._waiting

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._closing, 60.0)
                if self._closing:
                    return
                space = self._waiting[0] if self._waiting else None
            if space is None:
                continue
            done = self._try(space)
            with self._condition:
                if done and self._waiting and self._waiting[0] is space:
                    self._waiting.popleft()
                    self._condition.notify_all()
                elif not done:
                    self._condition.wait_for(lambda: self._closing, _AGAIN_S)

    def _try(self, space: Keyspace) -> bool:
        """Whether the store has confirmed that the keyspace is empty."""
        reason = "the agent is away"
        try:
            if self._store.attached:
                removed = self._store.clear(space, _CLEAR_TIMEOUT_S)
                log.info("%s: cleared, %d copies of blocks", space, removed)
                self._told = False
                return True
        except TierKVError as error:
            reason = str(error)
        except Exception:  # the thread must go on
            log.exception("clearing failed")
        log.log(
            logging.DEBUG if self._told else logging.WARNING,
            "%s is not cleared yet, it is tried on: %s",
            space,
            reason,
        )
        self._told = True
        return False

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the thread; what waits is not cleared. Idempotent."""
        with self._condition:
            self._closing = True
            waiting = len(self._waiting)
            self._condition.notify_all()
        if waiting:
            log.warning("%d keyspaces were never cleared: the agent did not confirm it", waiting)
        if self._thread is not None:
            self._thread.join(timeout_s)
