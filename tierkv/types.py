"""Words that every floor shares: the tiers, what can become of a block, and the array types.

Nothing here decides or moves anything. The numbers are part of the native ABI and of stored formats, so they
never change meaning.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

HashArray: TypeAlias = npt.NDArray[np.uint8]
"""(n, 32) uint8, C-contiguous: one block hash a row."""
SlotArray: TypeAlias = npt.NDArray[np.uint32]
"""(n,) uint32: a slot's number is its byte offset in the arena or file divided by SLOT_GRANULE_BYTES."""
Int64Array: TypeAlias = npt.NDArray[np.int64]
UInt32Array: TypeAlias = npt.NDArray[np.uint32]
UInt8Array: TypeAlias = npt.NDArray[np.uint8]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

HASH_BYTES = 32
SLOT_GRANULE_BYTES = 4096
"""Slots start at multiples of this (O_DIRECT's alignment), so 32 bits address 16 TiB in a tier."""
NO_SLOT = 0xFFFF_FFFF
NO_TIER = 0xFF


class TierKind(IntEnum):
    """The media, fastest first. The number is the tier's number in the native index."""

    HBM = 0
    DRAM = 1
    NVME = 2
    DFS = 3


TIER_COUNT = 4
ALL_TIERS = (1 << TIER_COUNT) - 1
"""The mask of all tiers."""


class BlockStatus(IntEnum):
    """What became of one block of a batch. Stored as uint8 in a job's status array."""

    OK = 0
    MISS = 1
    """Not there (any more)."""
    CORRUPT = 2
    """There, but its length or checksum is wrong; the copy was dropped."""
    TIMEOUT = 3
    """Not finished by the deadline."""
    IO_ERROR = 4
    """The medium refused (EIO, EMFILE, ...)."""
    NO_SPACE = 5
    """The medium is full (ENOSPC, quota)."""
    DROPPED = 6
    """Not attempted: a queue or a tier was full. Only saves are dropped."""
    CANCELLED = 7
    """Given up because the store closed or the keyspace was cleared."""
    PENDING = 255
    """Not decided yet."""
