"""SlotMap beside a plain model, and the sizes that its helpers compute."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tierkv.errors import ArgumentError
from tierkv.memory import SlotMap, capacity_for, slot_bytes_for
from tierkv.types import SLOT_GRANULE_BYTES as GRANULE

SIZES = [1, 2, 3, 5, 8]


class SlotMapMachine(RuleBasedStateMachine):
    """A dict of slot -> granules is all that the map may mean."""

    @initialize(capacity=st.integers(1, 60), slab=st.integers(1, 12))
    def start(self, capacity: int, slab: int) -> None:
        self.capacity, self.slab = capacity, min(slab, capacity)
        self.map = SlotMap(capacity * GRANULE, slab * GRANULE)
        self.taken: dict[int, int] = {}

    # The model.

    def slab_length(self, slab: int) -> int:
        return min(self.slab, self.capacity - slab * self.slab)

    def slabs(self) -> range:
        return range(-(-self.capacity // self.slab))

    def owner(self, slab: int) -> int:
        """Granules of the slots in use in a slab, 0 for an empty one."""
        return next((size for slot, size in self.taken.items() if slot // self.slab == slab), 0)

    def room(self, size: int) -> int:
        used = sum(1 for granules in self.taken.values() if granules == size)
        return sum(self.slab_length(s) // size for s in self.slabs() if self.owner(s) in (0, size)) - used

    # What is done.

    @rule(size=st.sampled_from(SIZES), count=st.integers(0, 30))
    def allocate(self, size: int, count: int) -> None:
        if size > self.slab:
            with pytest.raises(ArgumentError, match=r"slab_bytes|capacity_bytes"):
                self.map.allocate(size * GRANULE, count)
            return
        room = self.room(size)
        assert self.map.available(size * GRANULE) == room
        slots = self.map.allocate(size * GRANULE, count)
        if count > room:
            assert slots is None
            return
        assert slots is not None
        assert slots.dtype == np.uint32
        assert len(slots) == count
        for slot in slots.tolist():
            assert slot not in self.taken
            self.taken[slot] = size

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.taken)), unique=True)) if self.taken else []
        self.map.free(np.array(chosen, np.uint32))
        for slot in chosen:
            del self.taken[slot]

    @rule(data=st.data())
    def free_wrongly(self, data: st.DataObject) -> None:
        foreign = data.draw(st.integers(0, self.capacity + 5).filter(lambda slot: slot not in self.taken))
        good = sorted(self.taken)[:2]
        for slots in ([*good, foreign], [*good, *good] or [foreign]):
            with pytest.raises(ArgumentError, match="free"):
                self.map.free(np.array(slots, np.uint32))

    @rule(size=st.sampled_from(SIZES), slots=st.lists(st.integers(0, 70), max_size=8))
    def adopt(self, size: int, slots: list[int]) -> None:
        if size > self.slab:
            return
        adopted = self.map.adopt(size * GRANULE, np.array(slots, np.uint32))
        for slot, got in zip(slots, adopted.tolist(), strict=True):
            slab, within = divmod(slot, self.slab)
            fits = slot < self.capacity and within % size == 0 and within + size <= self.slab_length(slab)
            expected = fits and slot not in self.taken and self.owner(slab) in (0, size)
            assert got == expected, (slot, size)
            if expected:
                self.taken[slot] = size

    # What must hold.

    @invariant()
    def slots_stay_apart_and_inside(self) -> None:
        end = 0
        for slot, size in sorted(self.taken.items()):
            assert slot >= end
            end = slot + size
            assert slot // self.slab == (end - 1) // self.slab
        assert end <= self.capacity

    @invariant()
    def figures_agree(self) -> None:
        assert self.map.used_slots == len(self.taken)
        assert self.map.used_bytes == sum(self.taken.values()) * GRANULE
        for size in SIZES:
            if size <= self.slab:
                assert self.map.available(size * GRANULE) == self.room(size)

    @invariant()
    def slabs_know_their_slots(self) -> None:
        for slab in self.slabs():
            inside = sorted(slot for slot in self.taken if slot // self.slab == slab)
            assert self.map.slab_slots(slab * self.slab).tolist() == inside
        slots = np.array(sorted(self.taken), np.uint32)
        assert self.map.slot_bytes_of(slots).tolist() == [self.taken[s] * GRANULE for s in slots.tolist()]


TestSlotMap = SlotMapMachine.TestCase
TestSlotMap.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@given(size=st.sampled_from(SIZES), capacity=st.integers(1, 60), slab=st.integers(8, 12))
def test_all_of_the_capacity_is_usable(size: int, capacity: int, slab: int) -> None:
    capacity = max(capacity, size)
    slots = SlotMap(capacity * GRANULE, slab * GRANULE)
    expected = slots.capacity_slots(size * GRANULE)
    assert expected == capacity // slab * (slab // size) + capacity % slab // size
    got = slots.allocate(size * GRANULE, expected)
    assert got is not None
    assert slots.allocate(size * GRANULE, 1) is None
    assert slots.available(size * GRANULE) == 0


@given(blocks=st.integers(1, 300), block_bytes=st.integers(1, 40 * GRANULE), slab=st.integers(40, 90))
def test_capacity_for_holds_exactly_the_blocks(blocks: int, block_bytes: int, slab: int) -> None:
    capacity = capacity_for(blocks, block_bytes, slab * GRANULE)
    slots = SlotMap(capacity, slab * GRANULE)
    assert slots.capacity_slots(slot_bytes_for(block_bytes)) == blocks


def test_low_slabs_are_filled_first_so_that_high_ones_empty_out() -> None:
    slots = SlotMap(8 * 4 * GRANULE, 4 * GRANULE)
    first = slots.allocate(GRANULE, 32)
    assert first is not None
    assert first.tolist() == list(range(32))
    slots.free(np.array([1, 5, 30], np.uint32))
    again = slots.allocate(GRANULE, 2)
    assert again is not None
    assert again.tolist() == [1, 5]
    slots.free(np.array([28, 29, 31], np.uint32))  # slab 7 is empty now, and may serve another size
    assert slots.available(4 * GRANULE) == 1
    big = slots.allocate(4 * GRANULE, 1)
    assert big is not None
    assert big.tolist() == [28]


def test_sizes_that_cannot_fit_name_the_setting() -> None:
    with pytest.raises(ArgumentError, match="raise slab_bytes to 8192"):
        SlotMap(100 * GRANULE, GRANULE).allocate(2 * GRANULE, 1)
    with pytest.raises(ArgumentError, match="raise capacity_bytes to 8192"):
        SlotMap(GRANULE, 4 * GRANULE).allocate(2 * GRANULE, 1)
    with pytest.raises(ArgumentError, match="multiple of 4096"):
        SlotMap(100 * GRANULE, GRANULE).allocate(100, 1)
    with pytest.raises(ArgumentError, match="capacity_bytes is 5000"):
        SlotMap(5000)
    with pytest.raises(ArgumentError, match="slab_bytes"):
        capacity_for(1, 5000, GRANULE)


def test_the_largest_tier_has_valid_slot_numbers() -> None:
    slots = SlotMap(0xFFFF_FFFF * GRANULE, 1 << 34)
    last = slots.capacity_bytes // GRANULE - 1
    assert slots.adopt(GRANULE, np.array([last], np.uint32)).tolist() == [True]
    assert slots.slab_slots(last).tolist() == [last]
    slots.free(np.array([last], np.uint32))
    assert slots.used_slots == 0


def test_threads_never_share_a_slot() -> None:
    slots = SlotMap(64 * 16 * GRANULE, 16 * GRANULE)
    owned = np.zeros(64 * 16, np.int64)
    failures: list[str] = []

    def work(size: int) -> None:
        for _ in range(200):
            got = slots.allocate(size * GRANULE, 7)
            if got is None:
                continue
            wide = (got[:, None] + np.arange(size)).ravel()
            owned[wide] += 1
            if (owned[wide] != 1).any():
                failures.append(f"{size}: {got.tolist()}")
            owned[wide] -= 1
            slots.free(got)

    threads = [threading.Thread(target=work, args=(size,)) for size in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert slots.used_slots == 0
    assert slots.available(16 * GRANULE) == 64
