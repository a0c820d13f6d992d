"""Announcer: tells routers, through the engine's events, which blocks of this engine the store holds, and where.

A block is described when this engine saves it, or finds it stored: then its tokens are known. From then on the store's
changes say into which tier it came and which it left, whoever moved or evicted it: demotion to NVMe is a store there
and a removal from DRAM. With pipeline stages a block is where all of them have it. While the agent is away nothing is
anywhere.

A thread of its own asks the store; the engine's thread only hands runs over. What the engine's stream is told follows
the store within about _POLL_S, and is published with the engine's next step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from tierkv.adapters.vllm.announced import Announced, Removed
from tierkv.adapters.vllm.groups import Group
from tierkv.errors import TierKVError
from tierkv.keys import Keyspace
from tierkv.store import ChangePlace, Changes
from tierkv.store.calls import Attachable
from tierkv.types import NO_SLOT, BoolArray, HashArray, TierKind, UInt8Array, UInt32Array

log = logging.getLogger("tierkv.vllm")

MAX_ANNOUNCED = 1 << 17
"""Blocks of all groups that are followed; older ones are taken back and forgotten."""
MAX_WAITING = 1 << 16
"""Blocks that wait to be taken in; what comes when there are more is not announced."""
_POLL_S = 0.25
_PIECE = 1 << 13
"""Changes that are read, and blocks that are looked up, in one message."""
_TOLD_AT_ONCE = 1024
"""Rows that are told of before the engine's thread may go on with a reset."""

Spaces = Sequence[Sequence[Keyspace | None]]
Run = tuple[int, HashArray, Any]
"""(group's position, names in the store (n, 32), the description by Log.describe())."""


class Log(Protocol):
    """Where events go; see events.py."""

    dropped_blocks: int

    def describe(
        self, request: Any, group: int, hashes: HashArray, first_block: int, parent: bytes | None
    ) -> Any: ...

    def stored(self, run: Any, tier: TierKind, kept: BoolArray | None = None) -> None: ...

    def removed(self, group: int, hashes: HashArray, tier: TierKind) -> None: ...

    def cleared(self) -> None: ...


class FollowedStore(Attachable, Protocol):
    """What an announcer needs of the store."""

    def lookup(self, queries: Sequence[tuple[Keyspace, HashArray]]) -> list[UInt8Array]: ...

    def changes(
        self, spaces: Sequence[Keyspace], after: ChangePlace | None = None, count: int = ...
    ) -> Changes: ...


class Announcer:
    """See the module."""

    def __init__(
        self, log: Log, groups: Sequence[Group], store: FollowedStore, max_blocks: int = MAX_ANNOUNCED
    ) -> None:
        self._log = log
        self._groups = groups
        self._store = store
        self._max_blocks = max_blocks
        self._lock = threading.Condition()
        self._spaces: Spaces = ()
        self._table: Announced | None = None
        """Of the keyspaces in use; another one after each clear."""
        self._waiting: list[Run] = []
        self._waiting_blocks = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tierkv-events", daemon=True)
        self._thread.start()

    # On the engine's thread

    def describe(
        self, request: Any, position: int, hashes: HashArray, names: HashArray, indices: Sequence[int]
    ) -> list[Run]:
        """Those blocks of a request that are not known yet, as descriptions for stored(): one a gapless stretch.

        hashes, names: (n, 32) of all the group's blocks, as the engine and as the store calls them; indices: ascending.
        """
        table = self._table
        if table is None or not len(indices):
            return []
        known = table.known(position, np.ascontiguousarray(names[indices]))
        indices = [index for index, there in zip(indices, known.tolist(), strict=True) if not there]
        cuts = [0, *(place for place, (a, b) in enumerate(pairwise(indices), 1) if b != a + 1), len(indices)]
        runs: list[Run] = []
        for begin, end in pairwise(cuts if indices else []):
            first, last = indices[begin], indices[end - 1] + 1
            parent = hashes[first - 1].tobytes() if first else None
            run = self._log.describe(request, self._groups[position].index, hashes[first:last], first, parent)
            if run is not None:
                runs.append((position, np.array(names[first:last]), run))
        return runs

    def stored(self, runs: Sequence[Run]) -> None:
        """What describe() described is in the store."""
        with self._lock:
            for run in runs:
                if self._waiting_blocks + len(run[1]) > MAX_WAITING:
                    self._log.dropped_blocks += len(run[1])
                    continue
                self._waiting.append(run)
                self._waiting_blocks += len(run[1])
            self._lock.notify_all()

    def cleared(self) -> None:
        """Nothing is there any more, until serve() says in which keyspaces."""
        with self._lock:
            self._spaces, self._table = (), None
            self._waiting, self._waiting_blocks = [], 0
            self._log.cleared()

    # On any thread

    def serve(self, spaces: Spaces) -> None:
        """The keyspaces that blocks are saved to from now on: for each stage, for each group."""
        with self._lock:
            self._spaces = spaces
            has = [[space is not None for space in stage] for stage in spaces]
            self._table = Announced(has, self._max_blocks)

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread. Idempotent."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._thread.join(timeout_s)

    # The thread

    def _run(self) -> None:
        follower: _Follower | None = None
        while True:
            with self._lock:
                if not self._waiting and not self._closing:
                    self._lock.wait(_POLL_S)
                if self._closing:
                    return
                spaces, table = self._spaces, self._table
                runs, self._waiting, self._waiting_blocks = self._waiting, [], 0
            if table is None:
                continue
            if follower is None or follower.table is not table:
                follower = _Follower(self._store, spaces, table)
            try:
                self._tell(follower, follower.follow(runs, partial(self._forgotten, table)))
            except Exception:  # the thread must go on; what was missed is looked up again
                log.exception("what the store holds could not be followed")
                follower.place = None

    def _tell(self, follower: _Follower, rows: UInt32Array) -> None:
        for begin in range(0, len(rows), _TOLD_AT_ONCE):
            with self._lock:
                if self._table is not follower.table:
                    return  # all was cleared meanwhile
                follower.table.settle(rows[begin : begin + _TOLD_AT_ONCE], self._log.stored, self._removed)

    def _forgotten(self, table: Announced, position: int, hashes: HashArray, tier: TierKind) -> None:
        with self._lock:
            if self._table is table:
                self._removed(position, hashes, tier)

    def _removed(self, position: int, hashes: HashArray, tier: TierKind) -> None:
        self._log.removed(self._groups[position].index, hashes, tier)


class _Follower:
    """Keeps a table's rows as the store has their blocks."""

    def __init__(self, store: FollowedStore, spaces: Spaces, table: Announced) -> None:
        self.table = table
        self.place: ChangePlace | None = None
        """Up to where the store's changes are in the table; None: everything must be looked up."""
        self._away = True
        """Whether the table says so by now."""
        self._store = store
        self._asked = [
            (stage, position, space)
            for stage, of_stage in enumerate(spaces)
            for position, space in enumerate(of_stage)
            if space is not None
        ]

    def follow(self, runs: Sequence[Run], removed: Removed) -> UInt32Array:
        """Takes in new blocks and whatever has changed; returns the rows that it touched."""
        touched = [np.empty(0, np.uint32)]
        new = [(position, self.table.add(position, names, run, removed)) for position, names, run in runs]
        touched += [rows for _, rows in new]
        try:
            if not self._store.attached:
                raise TierKVError("the agent is away")
            if self.place is None:
                self.place = self._place(None)
                positions = dict.fromkeys(position for _, position, _ in self._asked)
                new = [(position, self.table.rows(position)) for position in positions]
            touched += [rows for _, rows in new]
            for position, rows in new:
                self._look_up(position, rows)
            touched += self._read_on()
            self._away = False
        except TierKVError as error:
            log.debug("events: %s", error)
            self.place = None
            if not self._away:
                self._away = True
                self.table.lose_all()
                touched += [self.table.rows(position) for _, position, _ in self._asked]
        return np.unique(np.concatenate(touched))

    def _place(self, after: ChangePlace | None) -> ChangePlace:
        return self._store.changes([space for _, _, space in self._asked], after, 1).place

    def _look_up(self, position: int, rows: UInt32Array) -> None:
        for begin in range(0, len(rows), _PIECE):
            some = rows[begin : begin + _PIECE]
            names = np.ascontiguousarray(self.table.names(some))
            asked = [(stage, space) for stage, where, space in self._asked if where == position]
            masks = self._store.lookup([(space, names) for _, space in asked])
            for (stage, _), found in zip(asked, masks, strict=True):
                self.table.hold(stage, some, found)

    def _read_on(self) -> list[UInt32Array]:
        """Applies the store's changes up to now; the rows that they are about."""
        touched: list[UInt32Array] = []
        spaces = [space for _, _, space in self._asked]
        while True:
            before = self.place
            changes = self._store.changes(spaces, before, _PIECE)
            if not changes.complete:
                raise TierKVError("changes were lost: all is looked up again")
            for number, (stage, position, _) in enumerate(self._asked):
                chosen = changes.spaces == number
                if not chosen.any():
                    continue
                rows = self.table.find(position, np.ascontiguousarray(changes.hashes[chosen]))
                ours = rows != NO_SLOT
                self.table.hold(stage, rows[ours], changes.tiers[chosen][ours])
                touched.append(rows[ours])
            self.place = changes.place
            if before is None or changes.place.number - before.number < _PIECE:
                return touched
