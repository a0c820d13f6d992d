"""What to keep where: decisions over arrays. Nothing here moves bytes or waits.

Each function is judged by replaying traces; another order or admission plugs in here and nowhere else.
"""

from __future__ import annotations

import numpy as np

from tierkv._native import FLAG_REUSED
from tierkv.config import Admission
from tierkv.types import NO_TIER, TIER_COUNT, BoolArray, HashArray, TierKind, UInt8Array, UInt32Array

STEAL_FACTOR = 2
"""A block size gives a slab up to another one when its oldest block is this many times older. More than 1, so that
sizes which are used alike do not swap slabs to and fro, which costs each time a slab of blocks of all ages."""

_MIX = np.uint64(0x9E3779B97F4A7C15)
_FASTEST = np.full(1 << TIER_COUNT, NO_TIER, np.uint8)
for _mask in range(1, 1 << TIER_COUNT):
    _FASTEST[_mask] = (_mask & -_mask).bit_length() - 1


def fastest(masks: UInt8Array) -> UInt8Array:
    """(n,) masks of tiers -> (n,) the fastest tier of each, NO_TIER for 0."""
    tiers: UInt8Array = _FASTEST[masks]
    return tiers


def bit(tier: TierKind) -> int:
    """The tier's bit in a mask of tiers."""
    return 1 << int(tier)


def admitted_on_eviction(
    admission: Admission, target: TierKind, masks: UInt8Array, flags: UInt8Array
) -> BoolArray:
    """Which evicted blocks are written to `target`: (n,) bool from their masks of tiers and flags."""
    wanted: BoolArray = (masks & bit(target)) == 0
    if admission == "second-touch":
        wanted &= (flags & FLAG_REUSED) != 0
    return wanted


class History:
    """Which blocks were saved lately, whether or not the store still has them: the memory of second-touch admission.

    A direct-mapped table of 32-bit fingerprints: a new block may overwrite the memory of an old one, and one in four
    billion is taken for another. Not thread-safe: one thread saves.
    """

    def __init__(self, blocks: int = 1 << 20) -> None:
        self._marks = np.zeros(blocks, np.uint32)

    def seen(self, space: int, hashes: HashArray) -> BoolArray:
        """(n,) bool: saved before, as far as is remembered; all of them are remembered from now on."""
        words = np.ascontiguousarray(hashes).view(np.uint64)
        mixed = words[:, 0] ^ (words[:, 1] + words[:, 2] + words[:, 3] + np.uint64(space)) * _MIX
        mixed ^= mixed >> np.uint64(29)
        mixed *= _MIX
        places = (mixed >> np.uint64(32)) % np.uint64(len(self._marks))
        marks = mixed.astype(np.uint32) | np.uint32(1)  # 0 is an empty place
        seen: BoolArray = self._marks[places] == marks
        self._marks[places] = marks
        return seen


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
