"""Announced: the blocks that an announcer knows how to describe, and which tiers it has told of each.

A table of fixed size, found by hash natively: what the store tells of other engines' blocks is passed over without a
Python object each. When it is full, the oldest are forgotten, and taken back if they had been announced.

Thread safety: known() may be called from any thread; all else from one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tierkv._native import Index
from tierkv.types import HASH_BYTES, NO_SLOT, BoolArray, HashArray, TierKind, UInt8Array, UInt32Array

TOLD_TIERS = (TierKind.DRAM, TierKind.NVME, TierKind.DFS)
_TOLD_MASK = np.uint8(sum(1 << kind for kind in TOLD_TIERS))
_TABLE = 0
"""The tier of the native index that the table's rows stand in."""

Stored = Callable[[Any, TierKind, BoolArray], None]
"""Of a run's blocks, those (n,) that came into a tier."""
Removed = Callable[[int, HashArray, TierKind], None]
"""Of the group at a position, the blocks (n, 32) that left a tier."""


class Announced:
    """See the module. A row is the place of a block in the table."""

    def __init__(self, has: Sequence[Sequence[bool]], capacity: int) -> None:
        """has: for each pipeline stage, for each group: whether the stage has layers of the group."""
        self._index = Index()
        self.capacity = capacity
        self._next = 0
        self._names = np.zeros((capacity, HASH_BYTES), np.uint8)
        self._group = np.zeros(capacity, np.uint8)
        self._used = np.zeros(capacity, np.bool_)
        self._run: list[Any] = [None] * capacity
        """The run that describes a row's block."""
        self._place = np.zeros(capacity, np.uint32)
        """Which block of its run that is."""
        self._held = np.zeros((len(has), capacity), np.uint8)
        """For each stage: the mask of the tiers that hold the block. All ones where a stage does not have its group."""
        self._told = np.zeros(capacity, np.uint8)
        """The mask of the tiers that were told of."""
        lacks = ~np.array(has, np.bool_).reshape(len(has), -1)
        self._at_first = np.where(lacks, np.uint8(0xFF), np.uint8(0))
        """(stages, groups) the mask of a new row."""

    def known(self, group: int, names: HashArray) -> BoolArray:
        """(n,) whether the blocks with these names in the store can be described."""
        found: BoolArray = self._index.lookup(group, names) != 0
        return found

    def find(self, group: int, names: HashArray) -> UInt32Array:
        """(n,) their rows; NO_SLOT where there is none."""
        return self._index.resolve(group, names, _TABLE)[0]

    def add(self, group: int, names: HashArray, run: Any, removed: Removed) -> UInt32Array:
        """Takes in blocks that `run` describes, the first as its block 0; returns all their rows."""
        new = np.flatnonzero(~self.known(group, names))[: self.capacity]
        if len(new):
            rows = ((self._next + np.arange(len(new))) % self.capacity).astype(np.uint32)
            self._next = (self._next + len(new)) % self.capacity
            self._forget(rows, removed)
            # A block that is in the list twice leaves a row unused.
            added = self._index.insert(group, np.ascontiguousarray(names[new]), _TABLE, rows, 0)
            rows, new = rows[added], new[added]
            self._names[rows] = names[new]
            self._group[rows] = group
            self._place[rows] = new
            self._held[:, rows] = self._at_first[:, group, np.newaxis]
            self._told[rows] = 0
            self._used[rows] = True
            for row in rows.tolist():
                self._run[row] = run
        found = self.find(group, names)
        there: UInt32Array = found[found != NO_SLOT]
        return there

    def _forget(self, rows: UInt32Array, removed: Removed) -> None:
        rows = rows[self._used[rows]]
        self._tell_removed(rows, self._told[rows], removed)
        for group in np.unique(self._group[rows]).tolist():
            self._index.remove(group, self._names[rows[self._group[rows] == group]])
        self._index.take_freed(_TABLE)
        self._used[rows] = False
        for row in rows.tolist():
            self._run[row] = None

    def rows(self, group: int) -> UInt32Array:
        """The rows of all blocks of a group."""
        return np.flatnonzero(self._used & (self._group == group)).astype(np.uint32)

    def used(self) -> UInt32Array:
        """All rows that are in use."""
        return np.flatnonzero(self._used).astype(np.uint32)

    def names(self, rows: UInt32Array) -> HashArray:
        """(n, 32) what the store calls the blocks of these rows."""
        return self._names[rows]

    def hold(self, stage: int, rows: UInt32Array, masks: UInt8Array) -> None:
        """A stage's parts of these blocks are in these tiers; where a row is named twice, the last mask counts."""
        self._held[stage, rows] = masks

    def lose_all(self) -> None:
        """Nothing is held by any tier, as far as is known."""
        self._held[self._held != 0xFF] = 0

    def untell(self) -> None:
        """Whoever was told has forgotten all."""
        self._told[:] = 0

    def settle(self, rows: UInt32Array, stored: Stored, removed: Removed) -> None:
        """Tells what has changed of these rows since it was last told: what came first, then what went."""
        rows = np.unique(rows)
        now = np.bitwise_and.reduce(self._held[:, rows], axis=0) & _TOLD_MASK
        before = self._told[rows]
        self._told[rows] = now
        came, went = now & ~before, before & ~now
        for tier in TOLD_TIERS:
            for run, there in self._runs(rows[(came >> tier & 1) != 0]):
                stored(run, tier, there)
        self._tell_removed(rows, went, removed)

    def _runs(self, rows: UInt32Array) -> Iterator[tuple[Any, BoolArray]]:
        """The runs that describe these rows' blocks, and which of their blocks these are."""
        by_run: dict[int, list[int]] = {}
        for row in rows.tolist():
            by_run.setdefault(id(self._run[row]), []).append(row)
        for members in by_run.values():
            run = self._run[members[0]]
            there = np.zeros(len(run.hashes), np.bool_)
            there[self._place[members]] = True
            yield run, there

    def _tell_removed(self, rows: UInt32Array, masks: UInt8Array, removed: Removed) -> None:
        for tier in TOLD_TIERS:
            gone = rows[(masks >> tier & 1) != 0]
            for group in np.unique(self._group[gone]).tolist():
                hashes = [
                    self._run[row].hashes[self._place[row]]
                    for row in gone[self._group[gone] == group].tolist()
                ]
                removed(group, np.array(hashes, np.uint8), tier)
