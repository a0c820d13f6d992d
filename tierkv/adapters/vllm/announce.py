"""Announcer: tells routers, through the engine's events, which blocks of this engine the store holds, and where.

A block is described when this engine saves it, or finds it stored: then its tokens are known. From then on the store's
changes say into which tier it came and which it left, whoever moved or evicted it: demotion to NVMe is a store there
and a removal from DRAM. With pipeline stages a block is where all of them have it. While the agent is away nothing is
anywhere.

A thread of its own asks the store and tells; the engine's thread only hands over. What is told follows the store within
about _POLL_S, as far as the log has room, and is published with the engine's next step.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
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
_TOLD_AT_ONCE = 256
"""Rows that are told of before the log's room is looked at again."""
_EVENTS_A_ROW = 6
"""Blocks that a row's events name at most: it comes into and leaves each of three tiers."""

Spaces = Sequence[Sequence[Keyspace | None]]
Run = tuple[Announced, int, HashArray, Any]
"""(the table it belongs to, the group's position, names in the store (n, 32), the description by Log.describe())."""


class Log(Protocol):
    """Where events go; see events.py."""

    def describe(
        self, request: Any, group: int, hashes: HashArray, first_block: int, parent: bytes | None
    ) -> Any: ...

    def stored(self, run: Any, tier: TierKind, kept: BoolArray | None = None) -> None: ...

    def removed(self, group: int, hashes: HashArray, tier: TierKind) -> None: ...

    def room(self) -> int: ...

    def drop(self) -> None: ...


class FollowedStore(Attachable, Protocol):
    """What an announcer needs of the store."""

    def lookup(
        self, queries: Sequence[tuple[Keyspace, HashArray]], *, strict: bool = ...
    ) -> list[UInt8Array]: ...

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
        self.dropped_blocks = 0
        """Blocks that were never announced because too many waited."""
        self._lock = threading.Condition()
        self._table: Announced | None = None
        """Of the keyspaces in use; None between a clear and serve()."""
        self._generation = 0
        self._waiting: list[Callable[[], None]] = []
        """What the thread is to do, in order."""
        self._waiting_blocks = 0
        self._closing = False
        # The thread's own:
        self._follower: _Follower | None = None
        self._untold: deque[tuple[Announced, UInt32Array]] = deque()
        """Tables, and rows of them that may have changed since they were told of."""
        self._new: list[Run] = []
        self._thread = threading.Thread(target=self._run, name="tierkv-events", daemon=True)
        self._thread.start()

    # On the engine's thread: nothing here waits for the other one

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
                runs.append((table, position, np.array(names[first:last]), run))
        return runs

    def stored(self, runs: Sequence[Run]) -> None:
        """What describe() described is in the store."""
        with self._lock:
            for run in runs:
                count = len(run[2])
                if self._waiting_blocks + count > MAX_WAITING:
                    self.dropped_blocks += count
                    continue
                self._waiting_blocks += count
                self._waiting.append(partial(self._take_in, run))
            self._lock.notify_all()

    def cleared(self) -> int:
        """The keyspaces are given up: what was told of them is taken back. Returns what serve() is to be given."""
        with self._lock:
            self._table = None
            self._generation += 1
            self._waiting.append(self._give_up)
            self._lock.notify_all()
            return self._generation

    def engine_cleared(self) -> None:
        """The engine publishes that all blocks are gone, from which routers conclude that ours are too: all that is
        still there is told again."""
        self._log.drop()  # it would be published after the engine's event, which says more
        with self._lock:
            self._waiting.append(self._tell_again)
            self._lock.notify_all()

    # On any thread

    def serve(self, spaces: Spaces, generation: int) -> None:
        """The keyspaces that blocks are saved to from now on: for each stage, for each group. Unless there was another
        clear since `generation`, which is 0 before the first."""
        table = Announced([[space is not None for space in stage] for stage in spaces], self._max_blocks)
        with self._lock:
            if generation == self._generation and self._table is None:
                self._table = table
                self._waiting.append(partial(self._follow, _Follower(self._store, spaces, table)))
                self._lock.notify_all()

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread. Idempotent."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._thread.join(timeout_s)

    # The thread

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting and not self._closing:
                    self._lock.wait(_POLL_S)
                if self._closing:
                    return
                waiting, self._waiting, self._waiting_blocks = self._waiting, [], 0
            try:
                for work in waiting:
                    work()
                if self._follower is not None:
                    new, self._new = self._new, []
                    self._untold += [
                        (self._follower.table, rows) for rows in self._follower.look(new, self._removed)
                    ]
                self._tell()
            except Exception:  # the thread must go on; what was missed is looked up again
                log.exception("what the store holds could not be followed")
                if self._follower is not None:
                    self._follower.place = None

    def _take_in(self, run: Run) -> None:
        if self._follower is not None and run[0] is self._follower.table:  # else it was cleared meanwhile
            self._new.append(run)

    def _follow(self, follower: _Follower) -> None:
        self._follower = follower

    def _give_up(self) -> None:
        follower, self._follower, self._new = self._follower, None, []
        if follower is not None:
            follower.table.lose_all()
            self._untold.append((follower.table, follower.table.used()))

    def _tell_again(self) -> None:
        tables = {id(table): table for table, _ in self._untold}
        if self._follower is not None:
            tables[id(self._follower.table)] = self._follower.table
        self._untold.clear()
        for table in tables.values():
            table.untell()
            self._untold.append((table, table.used()))

    def _tell(self) -> None:
        """Tells as much as the log has room for now; the engine takes it with its next step."""
        while self._untold:
            table, rows = self._untold.popleft()
            for begin in range(0, len(rows), _TOLD_AT_ONCE):
                some = rows[begin : begin + _TOLD_AT_ONCE]
                if self._log.room() < _EVENTS_A_ROW * len(some):
                    self._untold.appendleft((table, rows[begin:]))
                    return
                table.settle(some, self._log.stored, self._removed)

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

    def look(self, runs: Sequence[Run], removed: Removed) -> list[UInt32Array]:
        """Takes in new blocks and whatever has changed; returns the rows that it touched."""
        new = [(position, self.table.add(position, names, run, removed)) for _, position, names, run in runs]
        touched = [rows for _, rows in new]
        try:
            if self._store.attached:
                self._away = False
                if self.place is None or not self._read_on(new, touched):
                    self._look_all_up(touched)
                return touched
        except TierKVError as error:  # it is late, say: what is told stays so until all is looked up
            log.debug("events: %s", error)
        self.place = None
        if not self._away and not self._store.attached:
            self._away = True
            self.table.lose_all()
            touched.append(self.table.used())
        return touched

    def _look_all_up(self, touched: list[UInt32Array]) -> None:
        place = self._store.changes([space for _, _, space in self._asked], None, 1).place
        for position in dict.fromkeys(position for _, position, _ in self._asked):
            rows = self.table.rows(position)
            self._look_up(position, rows)
            touched.append(rows)
        self.place = place

    def _look_up(self, position: int, rows: UInt32Array) -> None:
        asked = [(stage, space) for stage, where, space in self._asked if where == position]
        for begin in range(0, len(rows), _PIECE):
            some = rows[begin : begin + _PIECE]
            names = np.ascontiguousarray(self.table.names(some))
            masks = self._store.lookup([(space, names) for _, space in asked], strict=True)
            for (stage, _), found in zip(asked, masks, strict=True):
                self.table.hold(stage, some, found)

    def _read_on(self, new: Sequence[tuple[int, UInt32Array]], touched: list[UInt32Array]) -> bool:
        """Looks new rows up and applies the store's changes up to now; False where some were lost."""
        for position, rows in new:
            self._look_up(position, rows)
        spaces = [space for _, _, space in self._asked]
        while True:
            before = self.place
            assert before is not None
            changes = self._store.changes(spaces, before, _PIECE)
            if not changes.complete:
                return False
            for number, (stage, position, _) in enumerate(self._asked):
                chosen = changes.spaces == number
                if not chosen.any():
                    continue
                rows = self.table.find(position, np.ascontiguousarray(changes.hashes[chosen]))
                ours = rows != NO_SLOT
                self.table.hold(stage, rows[ours], changes.tiers[chosen][ours])
                touched.append(rows[ours])
            self.place = changes.place
            if changes.place.number - before.number < _PIECE:
                return True
