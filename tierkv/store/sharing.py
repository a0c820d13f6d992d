"""Sharing: learns which blocks other nodes have put into a shared tier, without making look-ups wait for it.

Two ways: a listing of the whole tier, when the store opens and every rescan_s; and a probe of just the blocks that a
look-up missed, starting where its prefix ended. A look-up may wait a short, bounded time for a probe; the answer is
in the index for the next one in any case. What was found missing is not asked for again for a while.

Thread safety: one thread does all the asking; probe() may be called from any thread.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tierkv import placement
from tierkv.errors import StorageError, TierKVError
from tierkv.keys import Keyspace
from tierkv.store.core import Core, log
from tierkv.tiers.base import Residents, Tier
from tierkv.types import NO_SLOT, HashArray, TierKind

_FIRST_PROBE = 16
_LONGEST_PROBE = 512
_QUEUED_PROBES = 64
_REMEMBERED = 4096
_MISSING_FOR_S = 1.0
_AGAIN_S = 5.0
_EXPORT = 65536


@dataclass(slots=True, eq=False)
class _Probe:
    space: Keyspace
    hashes: HashArray
    done: threading.Event = field(default_factory=threading.Event)


class Sharing:
    """The discovery of one shared tier's blocks."""

    def __init__(self, core: Core, kind: TierKind, rescan_s: float) -> None:
        self._core = core
        self._kind = kind
        self._tier: Tier = core.tiers[kind]
        self._rescan_s = rescan_s
        self._condition = threading.Condition()
        self._queue: deque[_Probe] = deque()
        self._missing: OrderedDict[tuple[int, bytes], float] = OrderedDict()
        self.scanned = threading.Event()
        """Set after the first listing."""
        self._thread = threading.Thread(target=self._run, name="tierkv-share", daemon=True)
        self._thread.start()

    def probe(self, space: Keyspace, hashes: HashArray, timeout_s: float) -> bool:
        """Asks the tier for the leading blocks of `hashes`; True if the answer came within `timeout_s`."""
        if not len(hashes) or not self._tier.healthy():
            return False
        key = (space.number, hashes[0].tobytes())
        with self._condition:
            if self._core.clock.monotonic_s() < self._missing.get(key, 0.0):
                return False
            if self._core.closing.is_set() or len(self._queue) >= _QUEUED_PROBES:
                return False
            request = _Probe(space, hashes)
            self._queue.append(request)
            self._condition.notify_all()
        return request.done.wait(timeout_s) if timeout_s > 0 else False

    def _run(self) -> None:
        rescan_at_s = time.monotonic()
        while not self._core.closing.is_set():
            with self._condition:
                if not self._queue:
                    self._condition.wait(max(0.0, min(1.0, rescan_at_s - time.monotonic())))
                request = self._queue.popleft() if self._queue else None
            try:
                if request is not None:
                    self._ask(request)
                elif time.monotonic() >= rescan_at_s:
                    rescan_at_s = time.monotonic() + self._rescan_s
                    if not self._rescan():
                        rescan_at_s = min(rescan_at_s, time.monotonic() + _AGAIN_S)
            except Exception:  # the thread must survive; what it did not learn are misses
                log.exception("asking %s failed", self._tier.info.name)
            finally:
                if request is not None:
                    request.done.set()
                if rescan_at_s > time.monotonic() or request is None:
                    self.scanned.set()

    def _ask(self, request: _Probe) -> None:
        """Probes in growing steps until a block is missing."""
        space, hashes, start, step = request.space, request.hashes, 0, _FIRST_PROBE
        while start < len(hashes) and not self._core.closing.is_set():
            piece = np.ascontiguousarray(hashes[start : start + step])
            removals = self._core.removals(space)
            found = self._tier.probe(space, piece)
            if found.any() and not self._core.learn(
                self._kind, space, np.ascontiguousarray(piece[found]), removals
            ):
                return  # some were removed meanwhile: the next look-up asks again
            if not found.all():
                self._remember_missing(space, piece[int(np.argmin(found))].tobytes())
                return
            start, step = start + step, min(_LONGEST_PROBE, 4 * step)

    def _remember_missing(self, space: Keyspace, block: bytes) -> None:
        with self._condition:
            self._missing[space.number, block] = self._core.clock.monotonic_s() + _MISSING_FOR_S
            self._missing.move_to_end((space.number, block))
            while len(self._missing) > _REMEMBERED:
                self._missing.popitem(last=False)

    def _rescan(self) -> bool:
        """Lists the tier: what is new is added, what is gone is removed. False if it must be listed again soon."""
        core = self._core
        known = {space.number: self._held(space) for space in core.spaces()}
        removals = {space.number: core.removals(space) for space in core.spaces()}
        listed: dict[int, list[HashArray]] = {}
        complete = True
        for residents in self._listing():
            if residents is None:
                return False  # what was not listed is not gone
            if core.closing.is_set():
                return True
            try:
                space = core.register(residents.space)
            except TierKVError as error:
                log.warning("%s holds a keyspace that cannot be used here: %s", self._tier.info.name, error)
                continue
            listed.setdefault(space.number, []).append(residents.hashes)
            # The listing has the oldest first, the index takes the most recent first.
            newest_first = np.ascontiguousarray(residents.hashes[::-1])
            complete &= core.learn(self._kind, space, newest_first, removals.get(space.number, 0))
        for number, hashes in known.items():
            if len(hashes):
                seen = np.concatenate([np.empty((0, 32), np.uint8), *listed.get(number, [])])
                gone = ~np.isin(_as_keys(hashes), _as_keys(seen))
                if gone.any():
                    core.index.remove(number, np.ascontiguousarray(hashes[gone]), placement.bit(self._kind))
        return complete

    def _listing(self) -> Iterator[Residents | None]:
        """The tier's blocks; None at the end if it could not be listed whole."""
        try:
            yield from self._tier.recover()
        except StorageError as error:
            log.warning("%s", error)
            yield None

    def _held(self, space: Keyspace) -> HashArray:
        """All blocks that the index has in the tier now."""
        found, after = [np.empty((0, 32), np.uint8)], NO_SLOT
        while True:
            hashes, _, _, after = self._core.index.export(space.number, self._kind, after, _EXPORT)
            found.append(hashes)
            if after == NO_SLOT:
                return np.concatenate(found)

    def close(self, timeout_s: float) -> None:
        """Ends the thread; core.closing must be set."""
        with self._condition:
            for request in self._queue:
                request.done.set()
            self._queue.clear()
            self._condition.notify_all()
        self._thread.join(timeout_s)


def _as_keys(hashes: HashArray) -> np.ndarray:
    """(n, 32) uint8 -> (n,) of 32-byte strings, which numpy can sort (it ignores trailing zeros, all being as long)."""
    return np.ascontiguousarray(hashes).view("S32").ravel()
