"""The DRAM tier: blocks in one arena, written and read by memcpy.

Nothing is verified here: memory does not lie, and the store checks generations. Thread safety: all methods
may be called from any thread; two users of one slot are kept apart by the store's pins. Batches are copied on
the calling thread and the copy pool's workers, without the GIL, and are done when the call returns.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from tierkv.config import DramConfig
from tierkv.errors import ArgumentError
from tierkv.jobs import Job
from tierkv.keys import Keyspace
from tierkv.memory import Arena, Roster, SlotMap, slot_bytes_for
from tierkv.memory.roster import LeftSlots
from tierkv.tiers.base import Batch, Residents, TierInfo
from tierkv.types import (
    SLOT_GRANULE_BYTES,
    BlockStatus,
    BoolArray,
    HashArray,
    Int64Array,
    SlotArray,
    TierKind,
)

if TYPE_CHECKING:
    from tierkv._native import CopyPool

_CLOSE_TIMEOUT_S = 10.0


class DramTier:
    """A Tier in memory. `copy_pool` stays the caller's; without one, blocks are copied one after the
    other."""

    def __init__(
        self,
        config: DramConfig,
        *,
        copy_pool: CopyPool | None = None,
        name: str = "tierkv-dram",
        roster: Roster | None = None,
    ) -> None:
        """Maps the arena. ConfigError and StorageError as Arena.create.

        With a `roster`, the arena that belongs to it, and what lies there is known again by recover(). The roster is
        this tier's from now on.
        """
        self._copy_pool = copy_pool
        self.slot_map = SlotMap(config.capacity_bytes, config.slab_bytes)
        toucher = copy_pool.touch if copy_pool is not None else None
        self.roster = roster
        if roster is not None:
            self.arena = Arena.adopt(
                roster.arena_fd,
                config.capacity_bytes,
                lock_memory=config.lock_memory,
                first_touch=config.first_touch,
                toucher=toucher,
            )
        else:
            self.arena = Arena.create(
                config.capacity_bytes,
                shared=config.shared,
                huge_pages=config.huge_pages,
                lock_memory=config.lock_memory,
                first_touch=config.first_touch,
                name=name,
                toucher=toucher,
            )
        self._left_lock = threading.Lock()
        self._left: LeftSlots | None = None
        self._idle = threading.Condition()
        self._busy = 0
        self._closed = False
        self._info = TierInfo(
            kind=TierKind.DRAM,
            capacity_bytes=config.capacity_bytes,
            alignment_bytes=1,
            shared=False,
            name=f"dram ({self.arena.pages})",
        )

    @property
    def info(self) -> TierInfo:
        return self._info

    # Slots.

    def allocate(self, space: Keyspace, count: int) -> SlotArray | None:
        """As Tier.allocate; ArgumentError where a block of `space` does not fit into a slab."""
        slot_bytes = slot_bytes_for(space.block_bytes)
        slots = self.slot_map.allocate(slot_bytes, count)
        if slots is not None and self.roster is not None:
            self.roster.taken(slots, slot_bytes)
        return slots

    def available(self, space: Keyspace) -> int:
        return self.slot_map.available(slot_bytes_for(space.block_bytes))

    def give_back(self, space: Keyspace, slots: SlotArray) -> None:
        """As Tier.give_back; ArgumentError, and nothing changed, for slots that are not in use."""
        self.free_slots(slots)

    def slab_of(self, slot: int) -> SlotArray:
        return self.slot_map.slab_slots(slot)

    def used_bytes(self) -> int:
        return self.slot_map.used_bytes

    def free(self, space: Keyspace, hashes: HashArray, slots: SlotArray) -> None:
        """As Tier.free; ArgumentError, and nothing changed, for slots that are not in use."""
        self.free_slots(slots)

    def free_slots(self, slots: SlotArray) -> None:
        """free(), whatever lies there."""
        if self.roster is not None:
            with self.roster.lock:
                self.roster.freed(slots)  # first: from the next line on they are granted again
        self.slot_map.free(slots)

    def addresses(self, slots: SlotArray) -> Int64Array:
        """(n,) int64: where the slots start, in this process."""
        return self.arena.addresses(slots)

    def slots_at(self, addresses: Int64Array) -> SlotArray:
        """(n,) uint32: the slots that start at addresses(): its inverse."""
        slots: SlotArray = ((addresses - self.arena.address) // SLOT_GRANULE_BYTES).astype(np.uint32)
        return slots

    # Bytes.

    def submit_write(self, batch: Batch) -> Job:
        """Copies from batch.addresses into the slots; done on return. CANCELLED after close()."""
        with self._using() as open_:
            if not open_:
                return self._settled(batch.count, BlockStatus.CANCELLED)
            self._copy(self._checked(batch), batch.addresses, batch.lengths)
            return self._settled(batch.count, BlockStatus.OK)

    def submit_read(self, batch: Batch) -> Job:
        """Copies out of the slots to batch.addresses; done on return. CANCELLED after close()."""
        with self._using() as open_:
            if not open_:
                return self._settled(batch.count, BlockStatus.CANCELLED)
            self._copy(batch.addresses, self._checked(batch), batch.lengths)
            return self._settled(batch.count, BlockStatus.OK)

    # The rest of the seam: memory starts empty, and nobody else writes it.

    def forget(self, space: Keyspace, hashes: HashArray | None) -> None:
        """Nothing to forget: memory does not outlive the process."""

    def recover(self) -> Iterator[Residents]:
        """What the roster knows; nothing without one. Slots in which clients of the process before may still write
        stay taken until they cannot any more: see release_left()."""
        if self.roster is None:
            return
        kept, left = self.roster.recover()
        known = []
        for blocks in kept:
            adopted = self.slot_map.adopt(slot_bytes_for(blocks.space.block_bytes), blocks.slots)
            self.roster.freed(blocks.slots[~adopted])
            known.append(Residents(blocks.space, blocks.hashes[adopted], blocks.slots[adopted]))
        taken = np.zeros(len(left.slots), np.bool_)
        for granules in np.unique(left.granules).tolist():
            chosen = np.flatnonzero(left.granules == granules)
            taken[chosen] = self.slot_map.adopt(granules * SLOT_GRANULE_BYTES, left.slots[chosen])
        self.roster.freed(left.slots[~taken])
        self._left = LeftSlots(left.slots[taken], left.granules[taken], left.owners[taken])
        self.release_left()
        yield from known

    def release_left(self) -> bool:
        """Frees the slots that were being written when the process before ended, as far as their writers are gone;
        True if that made room."""
        with self._left_lock:
            left = self._left
            if left is None or self.roster is None:
                return False
            writing = self.roster.writers_left(left.owners)
            self._left = None
            if writing.any():
                self._left = LeftSlots(left.slots[writing], left.granules[writing], left.owners[writing])
            gone = left.slots[~writing]
            if len(gone):
                self.free_slots(gone)
            return bool(len(gone))

    def probe(self, space: Keyspace, hashes: HashArray) -> BoolArray:
        """None of them: only this process writes here, and it knows what it wrote."""
        return np.zeros(len(hashes), np.bool_)

    def healthy(self) -> bool:
        return True

    def close(self) -> None:
        """Waits for copies under way and unmaps the arena. Idempotent."""
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: self._busy == 0, _CLOSE_TIMEOUT_S)
        self.arena.close()
        if self.roster is not None:
            self.roster.close()

    # Inside.

    @contextmanager
    def _using(self) -> Iterator[bool]:
        """Keeps the arena mapped meanwhile; yields False when the tier is closed."""
        with self._idle:
            if self._closed:
                held = None
            else:
                held = self.arena.view()  # even if close() loses patience, the mapping stays
                self._busy += 1
        if held is None:
            yield False
            return
        try:
            yield True
        finally:
            held.release()
            with self._idle:
                self._busy -= 1
                if not self._busy:
                    self._idle.notify_all()

    def _checked(self, batch: Batch) -> Int64Array:
        """Addresses of the batch's slots; ArgumentError where a block would pass the arena's end."""
        offsets = batch.slots.astype(np.int64) * SLOT_GRANULE_BYTES
        if batch.count and int((offsets + batch.lengths).max()) > self.arena.size_bytes:
            raise ArgumentError(f"a slot lies beyond the arena of {self.arena.size_bytes} bytes")
        return offsets + self.arena.address

    def _copy(self, destinations: Int64Array, sources: Int64Array, lengths: Int64Array) -> None:
        if self._copy_pool is not None:
            self._copy_pool.copy(destinations, sources, lengths)
            return
        for to, start, length in zip(destinations.tolist(), sources.tolist(), lengths.tolist(), strict=True):
            ctypes.memmove(to, start, length)

    @staticmethod
    def _settled(count: int, status: BlockStatus) -> Job:
        job = Job(count)
        job.settle_rest(status)
        return job
