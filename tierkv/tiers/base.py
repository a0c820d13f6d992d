"""The Tier seam: what a medium must offer so that the store can use it.

A tier is batched and asynchronous, and works into and out of the caller's memory. It verifies what it returns
(length and checksum, where the medium can lie) and never decides what to keep: the store does that.

Thread safety: every method may be called from any thread. A tier owns its threads, files and catalog; the caller
owns the memory of a batch and keeps it valid until the job is done, or, where the job was abandoned at a
deadline, until the tier is closed (a tier that may be left with stuck I/O must not touch the caller's memory after
the job is settled).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tierkv.errors import ArgumentError
from tierkv.jobs import Job
from tierkv.keys import Keyspace, KeyspaceSpec
from tierkv.types import BoolArray, HashArray, Int64Array, SlotArray, TierKind


@dataclass(frozen=True, slots=True)
class TierInfo:
    """What a tier is. `capacity_bytes` is what slots may fill; `shared` tells that other nodes see the blocks."""

    kind: TierKind
    capacity_bytes: int
    alignment_bytes: int
    shared: bool
    name: str
    """For messages and metrics, with the place: 'nvme /var/cache/tierkv'."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Blocks of one keyspace and where their bytes are in memory.

    hashes: (n, 32) uint8. slots: (n,) uint32 (ignored by content-addressed tiers). addresses: (n,) int64 in this
    process, aligned to alignment_bytes. lengths: (n,) int64, at most the keyspace's block_bytes.
    """

    space: Keyspace
    hashes: HashArray
    slots: SlotArray
    addresses: Int64Array
    lengths: Int64Array

    def __post_init__(self) -> None:
        count = len(self.hashes)
        if not len(self.slots) == len(self.addresses) == len(self.lengths) == count:
            raise ArgumentError(f"a batch of {count} hashes needs as many slots, addresses and lengths")
        if count and (int(self.lengths.max()) > self.space.block_bytes or int(self.lengths.min()) < 1):
            raise ArgumentError(
                f"lengths must be within 1..{self.space.block_bytes} (block_bytes of {self.space})"
            )

    @property
    def count(self) -> int:
        return len(self.hashes)

    def select(self, positions: Any) -> Batch:
        """The blocks at `positions` (a slice, a mask or indices)."""
        p = positions
        return Batch(self.space, self.hashes[p], self.slots[p], self.addresses[p], self.lengths[p])


@dataclass(frozen=True, slots=True, eq=False)
class Residents:
    """Blocks that a tier holds already, least recently used first: hashes (n, 32), slots (n,)."""

    space: KeyspaceSpec
    hashes: HashArray
    slots: SlotArray


class Tier(Protocol):
    """One medium. A refusal is atomic: None (or a status) means that nothing changed."""

    @property
    def info(self) -> TierInfo: ...

    def allocate(self, space: Keyspace, count: int) -> SlotArray | None:
        """`count` free slots for blocks of `space`, or None when there are not as many; then nothing changed.

        A content-addressed tier returns any `count` numbers, and None when its capacity would be passed.
        """
        ...

    def available(self, space: Keyspace) -> int:
        """How many slots allocate() could grant for blocks of `space` now."""
        ...

    def give_back(self, space: Keyspace, slots: SlotArray) -> None:
        """Makes slots free again that allocate() granted and nothing was written to."""
        ...

    def slab_of(self, slot: int) -> SlotArray:
        """All slots in use that must be free before the space of `slot` can serve another block size, ascending; empty
        where sizes do not compete for space."""
        ...

    def free(self, space: Keyspace, hashes: HashArray, slots: SlotArray) -> None:
        """Forgets the blocks, durably where the medium is durable, and only then makes their slots free.

        Slots whose block was never written are simply made free. Never raises for a medium's fault.
        """
        ...

    def forget(self, space: Keyspace, hashes: HashArray | None) -> None:
        """Durably forgets the blocks (None: all of `space`) while their slots stay taken until `free`."""
        ...

    def submit_write(self, batch: Batch) -> Job:
        """Writes the batch; a block is OK once a reopened tier would find it (its commit follows its last byte).

        A failed block leaves nothing behind; its slot stays the caller's, to free.
        """
        ...

    def submit_read(self, batch: Batch) -> Job:
        """Reads and verifies the batch. OK means the exact bytes that were written under this keyspace and hash.

        MISS: not (or no longer) there. CORRUPT: there but damaged; the tier has already made it unfindable.
        """
        ...

    def recover(self) -> Iterator[Residents]:
        """What the medium held when it was opened (or, if shared, holds now), keyspace by keyspace, in batches.

        A shared tier that cannot be listed whole yields what it can and then raises StorageError.
        """
        ...

    def probe(self, space: Keyspace, hashes: HashArray) -> BoolArray:
        """Which blocks the medium holds now, by asking it. May be slow; only shared tiers are asked."""
        ...

    def used_bytes(self) -> int:
        """Bytes of the slots (or files) that are taken."""
        ...

    def healthy(self) -> bool:
        """False while writes are stopped after ENOSPC, EIO or a stall; heals by itself."""
        ...

    def close(self) -> None:
        """Ends I/O and threads within bounded time and releases the directory. Idempotent."""
        ...


def slot_offsets(slots: SlotArray, granule_bytes: int) -> Int64Array:
    """Byte offsets of slots, (n,) int64."""
    return slots.astype(np.int64) * granule_bytes
