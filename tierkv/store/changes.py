"""Changes: what came into the tiers of a store and what went, for those who tell others (routers, a cluster's index).

The index logs changes from the first time that somebody asks for them, and keeps the latest CHANGES_KEPT. Readers keep
their place themselves. A reader that was overtaken, or whose place is another store's (an agent that was restarted),
is told so, and looks up again what it wants to know about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tierkv.errors import ArgumentError
from tierkv.keys import Keyspace
from tierkv.store.core import Core
from tierkv.types import HashArray, UInt8Array, UInt32Array

CHANGES_KEPT = 1 << 16
"""Changes that a store remembers, and that one call returns at most; 40 bytes each."""


@dataclass(frozen=True, slots=True)
class ChangePlace:
    """Where a reader has got to: valid for the store that it comes from."""

    feed: int
    """Names the store, of this and other processes: random, never 0."""
    number: int
    """The change to be read next."""


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """What changed, oldest first. A block's last entry says what holds it now."""

    spaces: UInt32Array
    """(k,) the keyspace of each: its position in the list that was asked about."""
    hashes: HashArray
    """(k, 32)"""
    tiers: UInt8Array
    """(k,) the mask of the tiers (bit TierKind) that hold the block since; 0: it is gone."""
    place: ChangePlace
    """Where to go on."""
    complete: bool
    """Whether nothing was lost between the place that was asked for and the first entry here."""


def read_changes(core: Core, spaces: Sequence[Keyspace], after: ChangePlace | None, count: int) -> Changes:
    """See Store.changes()."""
    if not 1 <= count <= CHANGES_KEPT:
        raise ArgumentError(f"changes: count is {count}: it must be within 1..{CHANGES_KEPT}")
    for space in spaces:
        core.check_space(space)
    core.index.log_changes(CHANGES_KEPT)
    feed = core.feed
    numbers = np.array([space.number for space in spaces], np.uint32)
    order = np.argsort(numbers, kind="stable")
    ours = after is not None and after.feed == feed
    # Another's place, or none: from the end on. No store gets to change 2**63.
    start = after.number if after is not None and ours else (1 << 63) - 1
    found, hashes, tiers, following, lost = core.index.changes(start, count, numbers[order])
    if not len(spaces):  # natively, none is all
        found, hashes, tiers = found[:0], hashes[:0], tiers[:0]
    where = order[np.searchsorted(numbers[order], found)].astype(np.uint32)
    return Changes(
        where, hashes, tiers, ChangePlace(feed, following), complete=(after is None or ours) and not lost
    )
