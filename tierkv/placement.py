"""What to keep where: pure decisions over arrays. Nothing here moves bytes, waits or holds state.

Each function is judged by replaying traces; another order or admission plugs in here and nowhere else.
"""

from __future__ import annotations

import numpy as np

from tierkv._native import FLAG_REUSED
from tierkv.config import Admission
from tierkv.types import NO_TIER, TIER_COUNT, BoolArray, TierKind, UInt8Array, UInt32Array

STEAL_FACTOR = 2
"""A block size gives a slab up to another one when its oldest block is this many times older. More than 1, so that sizes
which are used alike do not swap slabs to and fro, which costs each time a slab of blocks of all ages."""

_FASTEST = np.full(1 << TIER_COUNT, NO_TIER, np.uint8)
for _mask in range(1, 1 << TIER_COUNT):
    _FASTEST[_mask] = (_mask & -_mask).bit_length() - 1


def fastest(masks: UInt8Array) -> UInt8Array:
    """(n,) masks of tiers -> (n,) the fastest tier of each, NO_TIER for 0."""
    return _FASTEST[masks]


def bit(tier: TierKind) -> int:
    """The tier's bit in a mask of tiers."""
    return 1 << int(tier)


def admitted_on_eviction(
    admission: Admission, target: TierKind, masks: UInt8Array, flags: UInt8Array
) -> BoolArray:
    """Which evicted blocks are written to `target`: (n,) bool from their masks of tiers and flags."""
    missing = (masks & bit(target)) == 0
    if admission == "second-touch":
        return missing & ((flags & FLAG_REUSED) != 0)
    return missing


def slab_to_steal(own_class: int, classes: UInt8Array, ages: UInt32Array, can_evict_own: bool) -> int | None:
    """The position in `classes` of the block size that should give up a slab to `own_class`, or None.

    classes, ages: (k,) the sizes that have unpinned blocks and the age of their oldest one, in index calls.
    """
    others = classes != own_class
    if not others.any():
        return None
    position = int(np.where(others, ages.astype(np.int64), -1).argmax())
    if not can_evict_own:
        return position
    own = ages[~others]
    own_age = int(own[0]) if len(own) else 0
    return position if int(ages[position]) > STEAL_FACTOR * own_age else None
