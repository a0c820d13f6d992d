"""Finder: looks up, on a thread of its own, what of a request the store has, and promises it by a lease.

The engine's thread hands a search in and picks its result up, now or in a later step; it never waits longer than it
says. A search looks all groups of all pipeline stages up in one message, finds the longest boundary that every group
serves, takes a lease on just the blocks to be loaded, and has those below DRAM staged while the request still waits.

Thread safety: every method may be called from any thread. One thread, one bounded queue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from tierkv.adapters.vllm.groups import Group, longest_hit, to_load
from tierkv.errors import TierKVError
from tierkv.keys import Keyspace
from tierkv.store.calls import Attachable, LeaseCalls, LookupCalls
from tierkv.types import BoolArray, HashArray, TierKind, UInt8Array

log = logging.getLogger("tierkv.vllm")

MAX_QUEUED = 1024
_TRIES = 3
"""Times a hit is sought again after blocks went between look-up and lease."""
_OPEN_AGAIN_S = 1.0
_DRAM = np.uint8(1 << TierKind.DRAM)

Spaces = Sequence[Sequence[Keyspace | None]]
"""For each pipeline stage, for each group: its keyspace; None where the stage has no layers of the group."""


class LookupClient(LookupCalls, Attachable, Protocol):
    """What a finder needs of the store."""


@dataclass(slots=True, eq=False)
class Search:
    """One request's look-up. The fields below `done` are valid once it is set."""

    hashes: Sequence[HashArray]
    """For each group (n, 32): the hashes of the request's whole blocks."""
    above_tokens: int
    """What the engine has itself."""
    limit_tokens: int
    done: threading.Event = field(default_factory=threading.Event)
    begun_s: float = field(default_factory=time.monotonic)
    hit_tokens: int = 0
    """The boundary to resume at; above_tokens if the store adds nothing."""
    stored: list[BoolArray] = field(default_factory=list)
    """For each group (n,) bool: what the store has. Empty if it could not be asked."""
    tiers: list[UInt8Array] = field(default_factory=list)
    """For each group (n,) uint8: the mask of tiers, of those stages that have the group all in common."""
    lease: LeaseCalls | None = None
    wanted_s: float = 0.0
    """When the engine last asked for it (time.monotonic())."""
    loading: bool = False
    """Whether its blocks are being loaded: the lease is kept until close()."""
    closed: bool = False

    took_s: float = 0.0
    """How long it took, waiting included."""

    @property
    def age_s(self) -> float:
        """How long ago it began."""
        return time.monotonic() - self.begun_s


class Finder:
    """See the module."""

    def __init__(
        self, store: LookupClient, groups: Sequence[Group], lease_s: float, min_load_tokens: int = 0
    ) -> None:
        self._store = store
        self._groups = groups
        self._lease_s = lease_s
        self._min_load_tokens = min_load_tokens
        self._spaces: Spaces | None = None
        self._open_spaces: Callable[[], Spaces] | None = None
        self._open_at_s = 0.0
        self._condition = threading.Condition()
        self._queue: deque[Search] = deque()
        self._ended: deque[LeaseCalls] = deque()
        self._leased: set[Search] = set()
        self._extend_at_s = time.monotonic() + lease_s / 3
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tierkv-finder", daemon=True)
        self._thread.start()

    def serve(self, open_spaces: Callable[[], Spaces]) -> None:
        """From now on searches look in the keyspaces that open_spaces() opens; before, they find nothing.

        It is called on the finder's thread, again and again until the store can be asked.
        """
        with self._condition:
            self._open_spaces, self._spaces = open_spaces, None
            self._open_at_s = 0.0
            self._condition.notify()

    @property
    def ready(self) -> bool:
        """Whether a search could find anything now. The keyspaces that wait to be opened are before it is begun."""
        known = self._spaces is not None or self._open_spaces is not None
        return known and self._store.attached

    def submit(self, search: Search) -> bool:
        """Queues a search; False, and it is done without a result, when there is no place."""
        search.wanted_s = time.monotonic()
        search.hit_tokens = search.above_tokens
        with self._condition:
            if not self._closing and len(self._queue) < MAX_QUEUED:
                self._queue.append(search)
                self._condition.notify()
                return True
        search.done.set()
        return False

    def want(self, search: Search) -> bool:
        """Says that the result is still wanted; False if its lease has been given up meanwhile."""
        with self._condition:
            search.wanted_s = time.monotonic()
            return not search.closed

    def keep(self, search: Search) -> None:
        """Its blocks are being loaded: the lease is renewed until close()."""
        with self._condition:
            search.loading = True

    def close(self, search: Search) -> None:
        """Ends a search, whatever its state, and its lease."""
        with self._condition:
            self._close(search)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the thread and all leases. Idempotent."""
        with self._condition:
            self._closing = True
            for search in [*self._queue, *self._leased]:
                self._close(search)
                search.done.set()
            self._queue.clear()
            self._condition.notify()
        self._thread.join(timeout_s)

    def _close(self, search: Search) -> None:
        search.closed = True
        self._leased.discard(search)
        if search.lease is not None:
            self._ended.append(search.lease)
            search.lease = None
            self._condition.notify()

    # The thread

    def _run(self) -> None:
        while True:
            with self._condition:
                wake_s = min(self._extend_at_s, self._open_at_s or self._extend_at_s)
                self._condition.wait_for(
                    lambda: self._queue or self._ended or self._closing or self._open_now(),
                    max(0.01, wake_s - time.monotonic()),
                )
                if self._closing and not self._ended:
                    return
                search = self._queue.popleft() if self._queue else None
                ended = list(self._ended)
                self._ended.clear()
            if self._open_now():
                self._guarded(self._open)
            for lease in ended:
                self._guarded(lease.release)
            if search is not None:
                if not search.closed:
                    self._guarded(partial(self._find, search))
                search.took_s = search.age_s
                search.done.set()
            if time.monotonic() >= self._extend_at_s:
                self._extend_at_s = time.monotonic() + self._lease_s / 3
                self._extend()

    def _open_now(self) -> bool:
        return self._open_spaces is not None and time.monotonic() >= self._open_at_s

    def _open(self) -> None:
        self._open_at_s = time.monotonic() + _OPEN_AGAIN_S
        opening = self._open_spaces
        if opening is not None:
            spaces = opening()
            with self._condition:
                if self._open_spaces is opening:  # and nothing else is to be opened by now
                    self._spaces, self._open_spaces, self._open_at_s = spaces, None, 0.0

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except TierKVError as error:
            log.info("%s", error)
        except Exception:  # the thread must go on; a search that failed has found nothing
            log.exception("a look-up failed")

    def _find(self, search: Search) -> None:
        spaces = self._spaces
        if spaces is None:
            return
        queries = [
            (space, search.hashes[position])
            for stage in spaces
            for position, space in enumerate(stage)
            if space is not None
        ]
        answers = iter(self._store.lookup(queries))
        if not self._store.attached:
            return  # zeros then mean that nobody was asked
        tiers = [np.full(len(hashes), 0xFF, np.uint8) for hashes in search.hashes]
        stored = [np.ones(len(hashes), np.bool_) for hashes in search.hashes]
        for stage in spaces:
            for position, space in enumerate(stage):
                if space is not None:
                    masks = next(answers)
                    stored[position] &= masks != 0
                    tiers[position] &= masks
        search.tiers, search.stored = tiers, stored
        for _ in range(_TRIES):
            hit = longest_hit(self._groups, stored, search.above_tokens, search.limit_tokens)
            if hit - search.above_tokens < max(1, self._min_load_tokens):
                break
            if self._promise(search, spaces, hit):
                search.hit_tokens = hit
                break
        self._touch(search, spaces)

    def _promise(self, search: Search, spaces: Spaces, hit: int) -> bool:
        """Leases what a resume at `hit` loads; False, and stored is corrected, if some of it has gone."""
        ranges = [to_load(group, search.above_tokens, hit) for group in self._groups]
        asked = [
            (position, space)
            for stage in spaces
            for position, space in enumerate(stage)
            if space is not None and len(ranges[position])
        ]
        queries = [
            (space, search.hashes[position][ranges[position].start : ranges[position].stop])
            for position, space in asked
        ]
        lease = self._store.lease(queries, self._lease_s)
        whole = True
        for (position, _), held in zip(asked, lease.held, strict=True):
            if not held.all():
                whole = False
                search.stored[position][ranges[position].start : ranges[position].stop] &= held
        if not whole:
            lease.release()
            return False
        with self._condition:
            if search.closed or self._closing:
                self._ended.append(lease)
                return False
            search.lease = lease
            self._leased.add(search)
        if any(
            not (search.tiers[position][ranges[position].start : ranges[position].stop] & _DRAM).all()
            for position, _ in asked
        ):
            self._store.stage(lease)
        return True

    def _touch(self, search: Search, spaces: Spaces) -> None:
        """What the engine serves from its own cache is in use here too: it must not age to the end of the order."""
        for stage in spaces:
            for position, space in enumerate(stage):
                if space is None:
                    continue
                blocks = search.above_tokens // self._groups[position].block_tokens
                if blocks:
                    known = search.stored[position][:blocks]
                    self._store.touch(space, search.hashes[position][:blocks][known])

    def _extend(self) -> None:
        """Renews the leases that are still wanted, and gives up the others."""
        now_s = time.monotonic()
        with self._condition:
            for search in [search for search in self._leased if not search.loading]:
                if now_s - search.wanted_s > self._lease_s:
                    self._close(search)
            leased = [search.lease for search in self._leased if search.lease is not None]
        for lease in leased:
            self._guarded(partial(lease.extend, self._lease_s))
