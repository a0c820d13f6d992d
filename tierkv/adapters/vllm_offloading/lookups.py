"""Look-ups off the engine's thread: what is not known is asked for by a thread, one message for all that came up.

An answer, and the wait for one, has a deadline. An answer is kept until it was heard once, however late that is, and
for `keep_s`: a slow engine cannot ask for ever, and a fast one does not go by what was true long ago. Entries belong
to the requests that asked and go with the last one of them.

Thread safety: all methods but close() belong to the engine's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from enum import Enum

import numpy as np

from tierkv.types import BoolArray

log = logging.getLogger("tierkv.vllm")

_CLOSE_TIMEOUT_S = 10.0
_LONGEST_WAIT_S = 5.0
MAX_TOUCHED = 1 << 16
"""Keys of one step that are made most recently used; the order of use is a hint."""


class Answer(Enum):
    """What lookup() says."""

    MISS = "miss"
    HIT = "hit"
    RETRY = "retry"
    """Asked for; it is known in one of the next steps."""


class _Entry:
    """A key that somebody asked for. `answer` is None until it is there."""

    __slots__ = ("answer", "heard", "requests", "since_s")

    def __init__(self, since_s: float) -> None:
        self.answer: Answer | None = None
        self.since_s = since_s
        """When it was asked for; once it is answered, when that was."""
        self.heard = False
        self.requests = 0
        """How many have asked."""


_Batch = list[tuple[bytes, _Entry]]


class Lookups:
    """`ask(keys)` answers (n,) bool on this object's thread, within its own timeout; what it raises counts as misses.

    `touched(keys)` is told on the same thread what was used.
    """

    def __init__(
        self,
        ask: Callable[[Sequence[bytes]], BoolArray],
        touched: Callable[[Sequence[bytes]], None],
        *,
        timeout_s: float,
        keep_s: float,
        max_blocks: int,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._touched = touched
        self._timeout_s = timeout_s
        self._keep_s = keep_s
        self._max_blocks = max_blocks
        self._now_s = now_s
        self._entries: dict[bytes, _Entry] = {}
        self._of_request: dict[str, set[bytes]] = {}
        self._batch: _Batch = []
        self._touches: list[bytes] = []
        self._under_way = 0
        """Keys in the batch, with the thread, or among the answers."""
        self._answers: deque[tuple[_Batch, BoolArray]] = deque()
        self._condition = threading.Condition()
        self._waiting: _Batch = []
        self._waiting_touches: list[bytes] = []
        self._closing = False
        self.late = 0
        """Look-ups that were not answered in time."""
        self.refused = 0
        """Look-ups beyond max_blocks."""
        self._thread = threading.Thread(target=self._run, name="tierkv-tier-lookup", daemon=True)
        self._thread.start()

    def find(self, key: bytes, request: str) -> Answer:
        """What is known of `key`; it is asked for with the next end_step() if need be."""
        if self._answers:
            self._take_answers()
        now_s = self._now_s()
        entry = self._entries.get(key)
        if entry is None or self._stale(entry, now_s):
            if self._under_way >= self._max_blocks:
                self.refused += 1
                return Answer.MISS
            old, entry = entry, _Entry(now_s)
            if old is not None:
                entry.requests = old.requests
            self._entries[key] = entry
            self._batch.append((key, entry))
            self._under_way += 1
        asked = self._of_request.get(request)
        if asked is None:
            asked = self._of_request[request] = set()
        if key not in asked:
            asked.add(key)
            entry.requests += 1
        if entry.answer is None:
            if now_s - entry.since_s <= self._timeout_s:
                return Answer.RETRY
            self.late += 1
            entry.answer, entry.since_s = Answer.MISS, now_s
        entry.heard = True
        return entry.answer

    def _stale(self, entry: _Entry, now_s: float) -> bool:
        return entry.answer is not None and entry.heard and now_s - entry.since_s > self._keep_s

    def touch(self, keys: Collection[bytes]) -> None:
        """Tells with the next end_step() that `keys` were used."""
        room = MAX_TOUCHED - len(self._touches)
        if len(keys) <= room:
            self._touches.extend(keys)

    def end_step(self) -> None:
        """Hands over what this step asked for."""
        if self._answers:
            self._take_answers()
        if not (self._batch or self._touches):
            return
        batch, self._batch = self._batch, []
        touches, self._touches = self._touches, []
        with self._condition:
            self._waiting += batch
            if len(self._waiting_touches) + len(touches) <= MAX_TOUCHED:
                self._waiting_touches += touches
            self._condition.notify_all()

    def miss(self, keys: Collection[bytes]) -> None:
        """These were promised and could not be loaded: the requests that wait for them must hear of it."""
        now_s = self._now_s()
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                entry.answer, entry.since_s, entry.heard = Answer.MISS, now_s, False

    def forget(self, request: str) -> None:
        """The request has ended."""
        for key in self._of_request.pop(request, ()):
            entry = self._entries[key]
            entry.requests -= 1
            if not entry.requests:
                del self._entries[key]

    def forget_answers(self) -> None:
        """All was removed from the store: what is known, and what is being asked, holds no more."""
        now_s = self._now_s()
        for key, old in list(self._entries.items()):
            entry = self._entries[key] = _Entry(now_s)
            entry.requests, entry.answer = old.requests, Answer.MISS
        self._under_way -= len(self._batch)
        self._batch = []

    def _take_answers(self) -> None:
        while self._answers:
            batch, found = self._answers.popleft()
            self._under_way -= len(batch)
            now_s = self._now_s()
            for (_, entry), there in zip(batch, found.tolist(), strict=True):
                if entry.answer is None:
                    entry.answer, entry.since_s = (Answer.HIT if there else Answer.MISS), now_s

    def _run(self) -> None:
        while True:
            with self._condition:
                while not (self._waiting or self._waiting_touches):
                    if self._closing:
                        return
                    self._condition.wait(_LONGEST_WAIT_S)
                batch, self._waiting = self._waiting, []
                touches, self._waiting_touches = self._waiting_touches, []
                closing = self._closing
            found = np.zeros(len(batch), np.bool_)
            try:
                if batch and not closing:
                    found = self._ask([key for key, _ in batch])
                if touches and not closing:
                    self._touched(touches)
            except Exception:  # the thread must survive: a look-up that fails is a miss
                log.exception("looking blocks up failed")
            if batch:
                self._answers.append((batch, found))

    @property
    def size(self) -> int:
        """Keys that are known or asked for."""
        return len(self._entries)

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(_CLOSE_TIMEOUT_S)
