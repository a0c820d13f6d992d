"""SlotMap: which parts of an arena or file are taken.

The capacity is cut into slabs, and each slab is given to one slot size at a time, so that models of unequal
block size share one capacity. The map knows nothing of what is stored. Thread safety: one lock, every call is
short.
"""

from __future__ import annotations

import heapq
import threading
from dataclasses import dataclass

import numpy as np

from tierkv.errors import ArgumentError
from tierkv.types import SLOT_GRANULE_BYTES, BoolArray, Int64Array, SlotArray

DEFAULT_SLAB_BYTES = 64 << 20
_MAX_CAPACITY_BYTES = 0xFFFF_FFFF * SLOT_GRANULE_BYTES


def slot_bytes_for(block_bytes: int) -> int:
    """Bytes of the slot that a block of `block_bytes` takes: rounded up to SLOT_GRANULE_BYTES."""
    if block_bytes < 1:
        raise ArgumentError(f"a block of {block_bytes} bytes: it must have 1 byte or more")
    return -(-block_bytes // SLOT_GRANULE_BYTES) * SLOT_GRANULE_BYTES


def capacity_for(blocks: int, block_bytes: int, slab_bytes: int = DEFAULT_SLAB_BYTES) -> int:
    """Bytes of capacity that hold exactly `blocks` slots for blocks of `block_bytes`."""
    slot_bytes = slot_bytes_for(block_bytes)
    if blocks < 1:
        raise ArgumentError(f"capacity for {blocks} blocks: 1 or more are needed")
    per_slab = slab_bytes // slot_bytes
    if not per_slab:
        raise ArgumentError(
            f"a block of {block_bytes} bytes does not fit into a slab: raise slab_bytes ({slab_bytes})"
        )
    return blocks // per_slab * slab_bytes + blocks % per_slab * slot_bytes


@dataclass(slots=True)
class _SizeClass:
    """One slot size. Row r of `free` belongs to slab `slab_of_row[r]`; True where the slot is free."""

    granules: int
    per_slab: int
    free: BoolArray
    free_rows: list[int]
    free_slots: int = 0


class SlotMap:
    """Which slots of `capacity_bytes` are taken. A slot's number is its byte offset / SLOT_GRANULE_BYTES.

    A slab holds floor(slab / slot_bytes) slots from its start and serves one slot size as long as any of its
    slots is in use; an empty slab belongs to nobody. Low slabs are filled first, so that high ones empty out.
    """

    def __init__(self, capacity_bytes: int, slab_bytes: int = DEFAULT_SLAB_BYTES) -> None:
        for name, value in (("capacity_bytes", capacity_bytes), ("slab_bytes", slab_bytes)):
            if value < SLOT_GRANULE_BYTES or value % SLOT_GRANULE_BYTES or value > _MAX_CAPACITY_BYTES:
                raise ArgumentError(
                    f"{name} is {value}: it must be a multiple of {SLOT_GRANULE_BYTES}, at most "
                    f"{_MAX_CAPACITY_BYTES}"
                )
        self.capacity_bytes = capacity_bytes
        self.slab_bytes = min(slab_bytes, capacity_bytes)
        self._slab_setting_bytes = slab_bytes
        self._slab_granules = self.slab_bytes // SLOT_GRANULE_BYTES
        self._slabs = -(-capacity_bytes // self.slab_bytes)
        self._last_granules = capacity_bytes // SLOT_GRANULE_BYTES - (self._slabs - 1) * self._slab_granules
        # By slab: granules of its slots (0: the slab is nobody's), its row in the class's table, free and
        # used slots.
        self._granules_of = np.zeros(self._slabs, np.int64)
        self._row_of = np.zeros(self._slabs, np.int64)
        self._free_in = np.zeros(self._slabs, np.int64)
        self._used_in = np.zeros(self._slabs, np.int64)
        # Granules of the slots of slabs that have free ones, else 0: one scan finds where to allocate.
        self._open_for = np.zeros(self._slabs, np.int32)
        # A heap of idle slabs; entries that adopt() took meanwhile are skipped when they come up.
        self._idle = list(range(self._slabs))
        self._idle_slabs = self._slabs
        self._classes: dict[int, _SizeClass] = {}
        self._used_slots = 0
        self._used_bytes = 0
        self._lock = threading.Lock()

    # Insight.

    @property
    def used_slots(self) -> int:
        return self._used_slots

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots in use; what slabs lose to rounding is not counted."""
        return self._used_bytes

    def capacity_slots(self, slot_bytes: int) -> int:
        """Slots of that size that fit when nothing else is stored."""
        granules = self._check_size(slot_bytes)
        return (self._slabs - 1) * (self._slab_granules // granules) + self._last_granules // granules

    def available(self, slot_bytes: int) -> int:
        """Slots of that size that allocate() could give now."""
        granules = self._check_size(slot_bytes)
        with self._lock:
            return self._available(granules)

    def slot_bytes_of(self, slots: SlotArray) -> Int64Array:
        """(n,) int64: the size of each slot; ArgumentError for slots in slabs that hold nothing."""
        slabs = slots.astype(np.int64) // self._slab_granules
        with self._lock:
            if len(slabs) and (int(slabs.max()) >= self._slabs or not self._granules_of[slabs].all()):
                raise ArgumentError("slot_bytes_of: some of the slots are not in use")
            return self._granules_of[slabs] * SLOT_GRANULE_BYTES

    def slab_slots(self, slot: int) -> SlotArray:
        """All slots in use in the slab that contains `slot`, ascending; empty if there is none."""
        slab = int(slot) // self._slab_granules
        if not 0 <= slab < self._slabs:
            raise ArgumentError(f"slot {slot} lies beyond the capacity of {self.capacity_bytes} bytes")
        with self._lock:
            granules = int(self._granules_of[slab])
            if not granules:
                return np.empty(0, np.uint32)
            count = self._slots_in(slab, granules)
            taken = np.flatnonzero(~self._classes[granules].free[self._row_of[slab], :count])
            return (taken * granules + slab * self._slab_granules).astype(np.uint32)

    # Taking and giving back.

    def allocate(self, slot_bytes: int, count: int) -> SlotArray | None:
        """`count` slots, ascending slab by slab, or None when there are not as many; then nothing changed."""
        granules = self._check_size(slot_bytes)
        if count < 0:
            raise ArgumentError(f"allocate: {count} slots")
        with self._lock:
            if count > self._available(granules):
                return None
            size = self._class(granules)
            if size.free_slots < count:
                self._assign_idle(size, count - size.free_slots)
            slots = self._take(size, count)
            self._used_slots += count
            self._used_bytes += count * slot_bytes
            return slots

    def free(self, slots: SlotArray) -> None:
        """Makes slots free. ArgumentError, and nothing changed, when one of them is not in use or stands
        twice."""
        wide = np.asarray(slots, np.int64)
        if not len(wide):
            return
        if len(wide) > 1:
            ordered = np.sort(wide)
            if (ordered[1:] == ordered[:-1]).any():
                raise ArgumentError("free: a slot stands twice in one call")
        slabs, within = np.divmod(wide, self._slab_granules)
        with self._lock:
            if int(slabs.min()) < 0 or int(slabs.max()) >= self._slabs:
                raise ArgumentError("free: a slot lies beyond the capacity")
            granules_of = self._granules_of[slabs]
            first = int(granules_of[0])
            if first and bool((granules_of == first).all()):
                groups = [(first, slabs, within)]
            else:
                groups = []
                for granules in np.unique(granules_of).tolist():
                    chosen = granules_of == granules
                    groups.append((granules, slabs[chosen], within[chosen]))
            checked = [(self._classes.get(g), s, *self._locate(g, s, w, in_use=True)) for g, s, w in groups]
            if any(size is None or not bool(good.all()) for size, _, _, _, good in checked):
                raise ArgumentError("free: a slot is not in use (freed twice, or never allocated)")
            for size, group_slabs, rows, positions, _ in checked:
                assert size is not None
                size.free[rows, positions] = True
                self._count(size, group_slabs, taken=False)

    def adopt(self, slot_bytes: int, slots: SlotArray) -> BoolArray:
        """Takes slots that a recovered catalog names: (n,) bool, False where a slot cannot be one of that
        size (beyond the capacity, misplaced, in a slab of another size, in use already, named twice)."""
        granules = self._check_size(slot_bytes)
        wide = np.asarray(slots, np.int64)
        adopted = np.zeros(len(wide), np.bool_)
        slabs, within = np.divmod(wide, self._slab_granules)
        with self._lock:
            size = self._class(granules)
            good = (slabs >= 0) & (slabs < self._slabs)
            good[good] = np.isin(self._granules_of[slabs[good]], (0, granules))
            room = np.where(slabs == self._slabs - 1, self._last_granules, self._slab_granules)
            good &= (within % granules == 0) & (within + granules <= room)
            good[good] = _first_of_each(wide[good])
            for slab in np.unique(slabs[good]).tolist():
                if not self._granules_of[slab]:
                    self._assign(size, slab)
            where = np.flatnonzero(good)
            rows, positions, free = self._locate(granules, slabs[where], within[where], in_use=False)
            taken = where[free]
            size.free[rows[free], positions[free]] = False
            self._count(size, slabs[taken], taken=True)
            adopted[taken] = True
            self._used_slots += len(taken)
            self._used_bytes += len(taken) * slot_bytes
        return adopted

    # Inside, under the lock.

    def _check_size(self, slot_bytes: int) -> int:
        if slot_bytes < SLOT_GRANULE_BYTES or slot_bytes % SLOT_GRANULE_BYTES:
            raise ArgumentError(
                f"a slot of {slot_bytes} bytes: it must be a multiple of {SLOT_GRANULE_BYTES}"
            )
        if slot_bytes > self.slab_bytes:
            setting = "slab_bytes" if slot_bytes > self._slab_setting_bytes else "capacity_bytes"
            raise ArgumentError(
                f"a slot of {slot_bytes} bytes does not fit into a slab of {self.slab_bytes} bytes: "
                f"raise {setting} to {slot_bytes} or more"
            )
        return slot_bytes // SLOT_GRANULE_BYTES

    def _slots_in(self, slab: int, granules: int) -> int:
        length = self._last_granules if slab == self._slabs - 1 else self._slab_granules
        return length // granules

    def _available(self, granules: int) -> int:
        size = self._classes.get(granules)
        free = size.free_slots if size is not None else 0
        last_idle = not self._granules_of[-1]
        full_idle = self._idle_slabs - int(last_idle)
        idle = full_idle * (self._slab_granules // granules) + (
            self._last_granules // granules if last_idle else 0
        )
        return free + idle

    def _class(self, granules: int) -> _SizeClass:
        size = self._classes.get(granules)
        if size is None:
            per_slab = self._slab_granules // granules
            size = _SizeClass(granules, per_slab, np.zeros((0, per_slab), np.bool_), [])
            self._classes[granules] = size
        return size

    def _assign(self, size: _SizeClass, slab: int) -> int:
        """Gives an idle slab to a size; returns how many slots that adds."""
        if not size.free_rows:
            rows = len(size.free)
            grown = np.zeros((max(4, rows * 2), size.per_slab), np.bool_)
            grown[:rows] = size.free
            size.free = grown
            size.free_rows = list(range(len(grown) - 1, rows - 1, -1))
        row = size.free_rows.pop()
        count = self._slots_in(slab, size.granules)
        size.free[row] = False
        size.free[row, :count] = True
        self._granules_of[slab] = size.granules
        self._open_for[slab] = size.granules
        self._row_of[slab] = row
        self._free_in[slab] = count
        self._used_in[slab] = 0
        size.free_slots += count
        self._idle_slabs -= 1
        return count

    def _assign_idle(self, size: _SizeClass, missing: int) -> None:
        too_short = None
        while missing > 0:
            slab = heapq.heappop(self._idle)
            if self._granules_of[slab]:
                continue
            if self._slots_in(slab, size.granules):
                missing -= self._assign(size, slab)
            else:  # only the last slab can be
                too_short = slab
        if too_short is not None:
            heapq.heappush(self._idle, too_short)

    def _take(self, size: _SizeClass, count: int) -> SlotArray:
        if not count:
            return np.empty(0, np.uint32)
        slabs = np.flatnonzero(self._open_for == size.granules)
        needed = int(np.searchsorted(np.cumsum(self._free_in[slabs]), count)) + 1
        slabs = slabs[:needed]
        rows = self._row_of[slabs]
        found = np.flatnonzero(size.free[rows])[:count]
        order, positions = np.divmod(found, size.per_slab)
        size.free[rows[order], positions] = False
        of_each = slabs[order]
        self._count(size, of_each, taken=True)
        slots: SlotArray = (of_each * self._slab_granules + positions * size.granules).astype(np.uint32)
        return slots

    def _locate(
        self, granules: int, slabs: Int64Array, within: Int64Array, *, in_use: bool
    ) -> tuple[Int64Array, Int64Array, BoolArray]:
        """Rows and positions in the class's table, and where a slot really is there and in use (or free)."""
        if not granules:
            nothing = np.zeros(len(slabs), np.int64)
            return nothing, nothing, np.zeros(len(slabs), np.bool_)
        rows = self._row_of[slabs]
        positions, rest = np.divmod(within, granules)
        lengths = np.where(slabs == self._slabs - 1, self._last_granules, self._slab_granules)
        good = (rest == 0) & (positions < lengths // granules)
        positions = np.where(good, positions, 0)
        good &= self._classes[granules].free[rows, positions] != in_use
        return rows, positions, good

    def _count(self, size: _SizeClass, slabs: Int64Array, *, taken: bool) -> None:
        """Books one slot for each entry of `slabs`; slabs that became empty are nobody's again."""
        touched, times = np.unique(slabs, return_counts=True)
        if taken:
            left = self._free_in[touched] - times
            self._free_in[touched] = left
            self._open_for[touched] = np.where(left > 0, size.granules, 0)
            self._used_in[touched] += times
            size.free_slots -= len(slabs)
            return
        self._free_in[touched] += times
        self._open_for[touched] = size.granules
        self._used_in[touched] -= times
        size.free_slots += len(slabs)
        self._used_slots -= len(slabs)
        self._used_bytes -= len(slabs) * size.granules * SLOT_GRANULE_BYTES
        for slab in touched[self._used_in[touched] == 0].tolist():
            size.free_rows.append(int(self._row_of[slab]))
            size.free[self._row_of[slab]] = False
            size.free_slots -= int(self._free_in[slab])
            self._free_in[slab] = 0
            self._granules_of[slab] = 0
            self._open_for[slab] = 0
            self._idle_slabs += 1
            heapq.heappush(self._idle, slab)


def _first_of_each(values: Int64Array) -> BoolArray:
    first = np.zeros(len(values), np.bool_)
    first[np.unique(values, return_index=True)[1]] = True
    return first
