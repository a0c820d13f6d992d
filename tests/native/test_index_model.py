"""The native index beside a plain model of dictionaries and lists, with check() after each step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tierkv import _native as native
from tierkv.types import HASH_BYTES, NO_SLOT, NO_TIER, HashArray

NAMES = 10
SPACES = (1, 2)
TIERS = range(4)
U32 = np.uint32


def pack(names: list[int]) -> HashArray:
    """Hashes that differ in their last byte only, as a weak hash function would make them."""
    hashes = np.zeros((len(names), HASH_BYTES), np.uint8)
    hashes[:, -1] = names
    return hashes


def u32(values: list[int]) -> np.ndarray:
    return np.array(values, U32)


@dataclass(eq=False)
class Residency:
    space: int
    name: int
    tier: int
    slot: int
    size_class: int
    state: str
    handle: int = NO_SLOT
    generation: int = 0
    pins: int = 0
    reused: bool = False
    used_call: int = 0
    part_count: int = 1
    written: set[int] = field(default_factory=set)
    writing: set[int] = field(default_factory=set)
    deadline: float = 0.0


spaces = st.sampled_from(SPACES)
names = st.lists(st.integers(0, NAMES - 1), max_size=6)
distinct = st.lists(st.integers(0, NAMES - 1), max_size=6, unique=True)
tiers = st.integers(0, 3)
masks = st.integers(0, 15)
orders = st.lists(tiers, max_size=3).map(bytes)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.living: dict[tuple[int, int, int], Residency] = {}  # (space, name, tier), ready and pending
        self.doomed: list[Residency] = []
        self.use: defaultdict[tuple[int, int], list[Residency]] = defaultdict(list)  # oldest first
        self.freed: defaultdict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
        self.pinned: list[Residency] = []  # pins that the caller holds
        self.writes: list[tuple[Residency, int]] = []  # reservations: (residency, part)
        self.leases: dict[int, tuple[float, list[Residency]]] = {}
        self.generations: set[int] = set()
        self.calls = 0
        self.now = 0.0
        self.next_slot = 0

    @initialize(
        seed=st.integers(0, 2**64 - 1),
        log=st.sampled_from([4, 16, 1024]),
        followed=st.sampled_from([(), SPACES[:1]]),
    )
    def create(self, seed: int, log: int, followed: tuple[int, ...]) -> None:
        self.index = native.Index(seed)
        self.index.log_changes(log)
        self.log_size = log
        self.followed = followed
        self.next_change = 0
        self.seen: dict[tuple[int, int], int] = {}

    # The model's own steps.

    def slots(self, count: int) -> list[int]:
        self.next_slot += count
        return list(range(self.next_slot - count, self.next_slot))

    def ready(self, space: int, name: int, tier: int) -> Residency | None:
        found = self.living.get((space, name, tier))
        return found if found is not None and found.state == "ready" else None

    def mask(self, space: int, name: int) -> int:
        return sum(1 << tier for tier in TIERS if self.ready(space, name, tier))

    def all_ready(self, tier: int) -> list[Residency]:
        """In order of record number."""
        found = [r for r in self.living.values() if r.tier == tier and r.state == "ready"]
        return sorted(found, key=lambda r: r.handle)

    def use_now(self, residency: Residency) -> None:
        order = self.use[residency.tier, residency.size_class]
        if residency in order:
            order.remove(residency)
        order.append(residency)
        residency.used_call = self.calls

    def discover(self, residency: Residency) -> None:
        """Asks the index for the handle and generation of a residency that it made ready just now."""
        _, slot, generation, handle = self.index.acquire(
            residency.space, pack([residency.name]), bytes([residency.tier])
        )
        self.index.release(handle)
        assert slot[0] == residency.slot
        assert generation[0] != 0
        if residency.handle != NO_SLOT:
            assert handle[0] == residency.handle
        residency.handle, residency.generation = int(handle[0]), int(generation[0])
        assert residency.generation not in self.generations
        self.generations.add(residency.generation)

    def free(self, residency: Residency) -> None:
        self.freed[residency.tier].append(
            (residency.slot, residency.space, residency.name, residency.size_class)
        )

    def doom(self, residency: Residency) -> None:
        del self.living[residency.space, residency.name, residency.tier]
        if residency.state == "ready":
            self.use[residency.tier, residency.size_class].remove(residency)
        residency.state = "doomed" if residency.state == "ready" else "doomed writing"
        if residency.pins:
            self.doomed.append(residency)
        else:
            self.free(residency)

    def unpin(self, residency: Residency) -> None:
        residency.pins -= 1
        if residency.pins == 0 and residency in self.doomed:
            self.doomed.remove(residency)
            self.free(residency)

    def first_of(self, space: int, name: int, order: bytes) -> Residency | None:
        return next((r for tier in order if (r := self.ready(space, name, tier))), None)

    def expect_chosen(self, chosen: tuple[np.ndarray, ...], expected: list[Residency]) -> None:
        handles, slots, numbers, hashes, flags, mask = chosen
        assert handles.tolist() == [r.handle for r in expected]
        assert slots.tolist() == [r.slot for r in expected]
        assert numbers.tolist() == [r.space for r in expected]
        assert hashes.shape == (len(expected), HASH_BYTES)
        assert (hashes == pack([r.name for r in expected])).all()
        assert flags.tolist() == [native.FLAG_REUSED * r.reused for r in expected]
        assert mask.tolist() == [self.mask(r.space, r.name) for r in expected]
        for residency in expected:
            residency.pins += 1
        self.pinned += expected

    # Adding.

    @rule(space=spaces, names=names, tier=tiers)
    def insert(self, space: int, names: list[int], tier: int) -> None:
        slots = self.slots(len(names))
        added = self.index.insert(space, pack(names), tier, u32(slots), space)
        self.calls += 1
        made = []
        for name, slot, was_added in zip(names, slots, added, strict=True):
            assert was_added == ((space, name, tier) not in self.living)
            if was_added:
                made.append(Residency(space, name, tier, slot, space, "ready"))
                self.living[space, name, tier] = made[-1]
        for residency in reversed(made):
            self.use_now(residency)
            self.discover(residency)

    @rule(
        space=spaces,
        names=names,
        tier=st.integers(1, 3),
        slot_count=st.integers(0, 6),
        part=st.integers(0, 2),
        part_count=st.sampled_from([1, 2, 2, 2, 3]),
        wait=st.integers(1, 20),
    )
    def reserve(
        self, space: int, names: list[int], tier: int, slot_count: int, part: int, part_count: int, wait: int
    ) -> None:
        slots = self.slots(slot_count)
        deadline = self.now + wait
        arguments = (space, pack(names), tier, u32(slots), space, part, part_count, deadline)
        if part >= part_count:
            with pytest.raises(ValueError, match="part"):
                self.index.reserve(*arguments)
            return
        outcome, slot, handle, used = self.index.reserve(*arguments)
        taken = 0
        for position, name in enumerate(names):
            residency = self.living.get((space, name, tier))
            if residency is None and taken == len(slots):
                expected = native.RESERVE_NO_SLOT
            elif residency is None:
                expected = native.RESERVE_NEW
                residency = Residency(
                    space, name, tier, slots[taken], space, "pending", int(handle[position])
                )
                residency.part_count = part_count
                self.living[space, name, tier] = residency
                taken += 1
            elif residency.state == "ready":
                expected = native.RESERVE_KNOWN
            elif part_count != residency.part_count or part in residency.written | residency.writing:
                expected = native.RESERVE_BUSY
            else:
                expected = native.RESERVE_JOINED
            assert outcome[position] == expected
            if expected in (native.RESERVE_NEW, native.RESERVE_JOINED):
                assert residency is not None
                assert (slot[position], handle[position]) == (residency.slot, residency.handle)
                residency.writing.add(part)
                residency.pins += 1
                residency.deadline = max(residency.deadline, deadline)
                self.writes.append((residency, part))
            else:
                assert (slot[position], handle[position]) == (NO_SLOT, NO_SLOT)
        assert used == taken

    def take_writes(self, data: st.DataObject, one_part: bool) -> list[tuple[Residency, int]]:
        part = data.draw(st.integers(0, 2))
        possible = [write for write in self.writes if not one_part or write[1] == part]
        if not possible:
            return []
        chosen = data.draw(st.lists(st.sampled_from(possible), unique=True, max_size=5))
        for write in chosen:
            self.writes.remove(write)
        return chosen

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        chosen = self.take_writes(data, one_part=True)
        part = chosen[0][1] if chosen else 0
        completed = self.index.commit(u32([r.handle for r, _ in chosen]), part)
        self.calls += 1
        made = []
        for (residency, _), complete in zip(chosen, completed, strict=True):
            if residency.state == "pending":
                residency.writing.remove(part)
                residency.written.add(part)
                if len(residency.written) == residency.part_count:
                    residency.state = "ready"
                    made.append(residency)
            assert complete == (residency.state == "ready")
            self.unpin(residency)
        for residency in reversed(made):
            self.use_now(residency)
            self.discover(residency)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        chosen = self.take_writes(data, one_part=False)
        self.index.abort(u32([r.handle for r, _ in chosen]))
        for residency, _ in chosen:
            if residency.state == "pending":
                self.doom(residency)
            self.unpin(residency)

    @rule(data=st.data(), tier=tiers)
    def attach(self, data: st.DataObject, tier: int) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.pinned), max_size=5)) if self.pinned else []
        slots = self.slots(len(chosen))
        added = self.index.attach(u32([r.handle for r in chosen]), tier, u32(slots), 7)
        self.calls += 1
        made = []
        for source, slot, was_added in zip(chosen, slots, added, strict=True):
            assert was_added == (
                source.state == "ready" and (source.space, source.name, tier) not in self.living
            )
            if was_added:
                made.append(
                    Residency(source.space, source.name, tier, slot, 7, "ready", reused=source.reused)
                )
                self.living[source.space, source.name, tier] = made[-1]
        for residency in reversed(made):
            self.use_now(residency)
            self.discover(residency)

    @rule(data=st.data(), tier=tiers, wait=st.integers(1, 20))
    def attach_pending(self, data: st.DataObject, tier: int, wait: int) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.pinned), max_size=5)) if self.pinned else []
        slots = self.slots(len(chosen))
        handles = u32([r.handle for r in chosen])
        reserved = self.index.attach_pending(handles, tier, u32(slots), 7, self.now + wait)
        for source, slot, handle in zip(chosen, slots, reserved.tolist(), strict=True):
            key = (source.space, source.name, tier)
            assert (handle != NO_SLOT) == (source.state == "ready" and key not in self.living)
            if handle != NO_SLOT:
                made = Residency(*key, slot, 7, "pending", handle, reused=source.reused)
                made.pins, made.writing, made.deadline = 1, {0}, self.now + wait
                self.living[key] = made
                self.writes.append((made, 0))

    # Pins.

    @rule(space=spaces, names=names, order=orders)
    def acquire(self, space: int, names: list[int], order: bytes) -> None:
        tier, slot, generation, handle = self.index.acquire(space, pack(names), order)
        for position, name in enumerate(names):
            residency = self.first_of(space, name, order)
            got = (tier[position], slot[position], generation[position], handle[position])
            if residency is None:
                assert got == (NO_TIER, NO_SLOT, 0, NO_SLOT)
                continue
            assert got == (residency.tier, residency.slot, residency.generation, residency.handle)
            residency.pins += 1
            self.pinned.append(residency)

    def take_pins(self, data: st.DataObject) -> list[Residency]:
        if not self.pinned:
            return []
        positions = data.draw(st.lists(st.integers(0, len(self.pinned) - 1), unique=True, max_size=8))
        chosen = [self.pinned[position] for position in positions]
        self.pinned = [r for position, r in enumerate(self.pinned) if position not in positions]
        return chosen

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chosen = self.take_pins(data)
        self.index.release(u32([NO_SLOT, *(r.handle for r in chosen)]))
        for residency in chosen:
            self.unpin(residency)

    @rule(data=st.data())
    def erase(self, data: st.DataObject) -> None:
        chosen = self.take_pins(data)
        self.index.erase(u32([r.handle for r in chosen]))
        for residency in chosen:
            if residency.state == "ready":
                self.doom(residency)
            self.unpin(residency)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        chosen = self.take_pins(data)
        evicted = 0
        for residency in chosen:
            if residency.state == "ready" and residency.pins == 1:
                evicted += 1
                self.doom(residency)
            self.unpin(residency)
        assert self.index.evict(u32([r.handle for r in chosen])) == evicted

    @rule(
        data=st.data(),
        call=st.sampled_from(["release", "erase", "evict", "abort", "commit", "attach", "attach_pending"]),
    )
    def refuse(self, data: st.DataObject, call: str) -> None:
        """A batch with one bad handle is refused whole; the invariants compare that nothing has changed."""
        good = (
            data.draw(st.lists(st.sampled_from(self.pinned), max_size=3, unique=True)) if self.pinned else []
        )
        handles = [r.handle for r in good]
        held = {r.handle for r in [*self.pinned, *(r for r, _ in self.writes)]}
        held |= {r.handle for _, members in self.leases.values() for r in members}
        bad = data.draw(st.integers(0, 40).filter(lambda handle: handle not in held) | st.just(2**28))
        handles.insert(data.draw(st.integers(0, len(handles))), bad)
        slots = u32(self.slots(len(handles)))
        calls = {
            "release": lambda: self.index.release(u32(handles)),
            "erase": lambda: self.index.erase(u32(handles)),
            "evict": lambda: self.index.evict(u32(handles)),
            "abort": lambda: self.index.abort(u32(handles)),
            "commit": lambda: self.index.commit(u32(handles), 0),
            "attach": lambda: self.index.attach(u32(handles), 1, slots, 0),
            "attach_pending": lambda: self.index.attach_pending(u32(handles), 1, slots, 0, 1e9),
        }
        with pytest.raises(ValueError, match="handle"):
            calls[call]()

    @rule(data=st.data())
    def refuse_writers_pin(self, data: st.DataObject) -> None:
        """A reservation ends by commit() or abort() only."""
        pending = [r for r, _ in self.writes if r.state == "pending"]
        if pending:
            handle = u32([data.draw(st.sampled_from(pending)).handle])
            for call in (self.index.release, self.index.erase, self.index.evict):
                with pytest.raises(ValueError, match="reservation"):
                    call(handle)
            with pytest.raises(ValueError, match="handle"):
                self.index.commit(handle, 63)

    # Order of use.

    @rule(
        space=spaces,
        names=names,
        mask=masks,
        suffix=st.booleans(),
        mark=st.booleans(),
        move=st.booleans(),
        fastest=st.booleans(),
    )
    def touch(
        self, space: int, names: list[int], mask: int, suffix: bool, mark: bool, move: bool, fastest: bool
    ) -> None:
        self.index.touch(space, pack(names), mask, suffix, mark, move, fastest)
        self.calls += move
        for name in reversed(names) if suffix else names:
            held = [r for tier in TIERS if mask >> tier & 1 and (r := self.ready(space, name, tier))]
            for residency in held[:1] if fastest else held:
                residency.reused |= mark
                if move:
                    self.use_now(residency)

    @rule(tier=tiers, size_class=st.sampled_from([0, *SPACES, 7]), count=st.integers(0, 6))
    def victims(self, tier: int, size_class: int, count: int) -> None:
        expected = [r for r in self.use[tier, size_class] if r.pins == 0][:count]
        self.expect_chosen(self.index.victims(tier, size_class, count), expected)

    @rule(tier=tiers, data=st.data())
    def in_slots(self, tier: int, data: st.DataObject) -> None:
        slots = sorted(data.draw(st.sets(st.integers(0, max(0, self.next_slot)), max_size=8)))
        expected = [r for r in self.all_ready(tier) if r.slot in slots and r.pins == 0]
        self.expect_chosen(self.index.in_slots(tier, u32(slots)), expected)

    @rule(tier=tiers, other=tiers, count=st.integers(0, 4), after=st.integers(0, 20) | st.just(NO_SLOT))
    def lacking(self, tier: int, other: int, count: int, after: int) -> None:
        expected = [
            r
            for r in self.all_ready(tier)
            if not self.ready(r.space, r.name, other) and (after == NO_SLOT or r.handle > after)
        ]
        self.expect_chosen(self.index.lacking(tier, other, count, after), expected[:count])

    @rule(tier=tiers)
    def oldest(self, tier: int) -> None:
        classes, ages, slots = self.index.oldest(tier)
        expected = []
        for size_class in range(256) if len(self.use) else ():
            unpinned = [r for r in self.use.get((tier, size_class), ()) if r.pins == 0]
            if unpinned:
                expected.append((size_class, self.calls - unpinned[0].used_call, unpinned[0].slot))
        assert list(zip(classes.tolist(), ages.tolist(), slots.tolist(), strict=True)) == expected

    # Removing.

    @rule(space=spaces, names=names, mask=masks)
    def remove(self, space: int, names: list[int], mask: int) -> None:
        gone = {
            r for r in self.living.values() if r.space == space and r.name in names and mask >> r.tier & 1
        }
        assert self.index.remove(space, pack(names), mask) == len(gone)
        for residency in gone:
            self.doom(residency)

    @rule(space=spaces, really=st.integers(0, 3))
    def clear(self, space: int, really: int) -> None:
        if really:  # mostly an unknown keyspace, or little would ever be in the index
            assert self.index.clear(99) == 0
            return
        gone = [r for r in self.living.values() if r.space == space]
        assert self.index.clear(space) == len(gone)
        for residency in gone:
            self.doom(residency)

    @rule(tier=tiers)
    def take_freed(self, tier: int) -> None:
        slots, numbers, hashes, classes = self.index.take_freed(tier)
        assert hashes.shape == (len(slots), HASH_BYTES)
        assert not hashes[:, :-1].any()
        got = zip(slots.tolist(), numbers.tolist(), hashes[:, -1].tolist(), classes.tolist(), strict=True)
        assert sorted(got) == sorted(self.freed.pop(tier, []))

    # Leases and time.

    @rule(space=spaces, names=names, order=orders, wait=st.integers(0, 20))
    def lease(self, space: int, names: list[int], order: bytes, wait: int) -> None:
        number = self.index.lease(self.now + wait)
        assert number >= 1
        assert number not in self.leases
        self.leases[number] = (self.now + wait, [])
        self.lease_add(number, space, names, order)

    def lease_add(self, number: int, space: int, names: list[int], order: bytes) -> None:
        tier = self.index.lease_add(number, space, pack(names), order)
        for position, name in enumerate(names):
            residency = self.first_of(space, name, order) if number in self.leases else None
            assert tier[position] == (NO_TIER if residency is None else residency.tier)
            if residency is not None:
                residency.pins += 1
                self.leases[number][1].append(residency)

    @rule(number=st.integers(0, 8), space=spaces, names=names, order=orders)
    def add_to_lease(self, number: int, space: int, names: list[int], order: bytes) -> None:
        self.lease_add(number, space, names, order)

    @rule(number=st.integers(0, 8), wait=st.integers(0, 20))
    def lease_extend(self, number: int, wait: int) -> None:
        assert self.index.lease_extend(number, self.now + wait) == (number in self.leases)
        if number in self.leases:
            self.leases[number] = (self.now + wait, self.leases[number][1])

    @rule(number=st.integers(0, 8))
    def lease_release(self, number: int) -> None:
        assert self.index.lease_release(number) == (number in self.leases)
        self.end_lease(number)

    def end_lease(self, number: int) -> None:
        for residency in self.leases.pop(number, (0.0, []))[1]:
            self.unpin(residency)

    @rule(later=st.integers(0, 12))
    def expire(self, later: int) -> None:
        self.now += later
        leases = [number for number, (deadline, _) in self.leases.items() if deadline <= self.now]
        pending = [r for r in self.living.values() if r.state == "pending" and r.deadline <= self.now]
        assert self.index.expire(self.now) == (len(leases), len(pending))
        for number in leases:
            self.end_lease(number)
        for residency in pending:
            self.doom(residency)

    # Looking up, which must not change anything.

    @rule(space=st.sampled_from([*SPACES, 99]), names=names, mask=masks)
    def look(self, space: int, names: list[int], mask: int) -> None:
        hashes = pack(names)
        held = [self.mask(space, name) for name in names]
        assert self.index.lookup(space, hashes).tolist() == held
        length = next((k for k, tiers in enumerate(held) if not tiers & mask), len(held))
        assert self.index.match(space, hashes, mask) == length
        assert self.index.prefix(space, hashes, mask).tolist() == [tiers & mask for tiers in held[:length]]

    @rule(space=spaces, names=names, tier=tiers, wrong=st.sampled_from([None, "slot", "generation"]))
    def resolve(self, space: int, names: list[int], tier: int, wrong: str | None) -> None:
        hashes = pack(names)
        slots, generations = self.index.resolve(space, hashes, tier)
        found = [self.ready(space, name, tier) for name in names]
        assert slots.tolist() == [r.slot if r else NO_SLOT for r in found]
        assert generations.tolist() == [r.generation if r else 0 for r in found]
        slots = slots ^ U32(wrong == "slot")
        generations = generations ^ U32(wrong == "generation")
        valid = self.index.valid(space, hashes, tier, slots, generations)
        assert valid.dtype == np.bool_
        assert valid.tolist() == [r is not None and wrong is None for r in found]

    @rule(space=spaces, tier=tiers, count=st.integers(1, 5))
    def export(self, space: int, tier: int, count: int) -> None:
        expected = [r for r in self.all_ready(tier) if r.space == space]
        got: list[tuple[int, int, int]] = []
        cursor = NO_SLOT
        while True:
            hashes, slots, generations, cursor = self.index.export(space, tier, cursor, count)
            assert len(slots) <= count
            got += zip(hashes[:, -1].tolist(), slots.tolist(), generations.tolist(), strict=True)
            if cursor == NO_SLOT:
                break
        assert got == [(r.name, r.slot, r.generation) for r in expected]

    # Following the changes.

    @rule(count=st.integers(1, 6))
    def follow(self, count: int) -> None:
        self.read_changes(count)

    def read_changes(self, count: int) -> None:
        """A follower's copy, by the log alone, or from a look-up where it was overtaken."""
        spaces, hashes, tiers, following, lost = self.index.changes(
            self.next_change, count, u32(list(self.followed))
        )
        assert len(spaces) == len(hashes) == len(tiers) <= following - self.next_change - lost <= count
        assert not self.followed or set(spaces.tolist()) <= set(self.followed)
        self.next_change = following
        if lost:
            self.seen = {(r.space, r.name): self.mask(r.space, r.name) for r in self.living.values()}
        for space, name, mask in zip(spaces.tolist(), hashes[:, -1].tolist(), tiers.tolist(), strict=True):
            self.seen[space, name] = mask

    @rule()
    def catch_up(self) -> None:
        self.read_changes(self.log_size + 10_000)
        assert not len(self.index.changes(self.next_change, 1, u32([]))[0])
        for space in self.followed or SPACES:
            for name in range(NAMES):
                assert self.seen.get((space, name), 0) == self.mask(space, name)

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        stats = self.index.stats()
        living = self.living.values()
        names = {(r.space, r.name) for r in [*living, *self.doomed]}
        pins = len(self.pinned) + len(self.writes) + sum(len(held) for _, held in self.leases.values())
        assert sum(r.pins for r in [*living, *self.doomed]) == pins
        del stats["bytes"]
        assert stats == {
            "entries": len(names),
            "residencies": len(living) + len(self.doomed),
            "ready_hbm": len(self.all_ready(0)),
            "ready_dram": len(self.all_ready(1)),
            "ready_nvme": len(self.all_ready(2)),
            "ready_dfs": len(self.all_ready(3)),
            "pending": sum(r.state == "pending" for r in living),
            "doomed": len(self.doomed),
            "pins": pins,
            "leases": len(self.leases),
        }
        everything = pack(list(range(NAMES)))
        for space in SPACES:
            held = [self.mask(space, name) for name in range(NAMES)]
            assert self.index.lookup(space, everything).tolist() == held

    def teardown(self) -> None:
        """When every pin has gone, nothing is left but what is ready or pending; cleared, nothing at all."""
        if not hasattr(self, "index"):
            return
        for _ in range(21):  # past the last deadline, a step at a time
            self.expire(1)
        assert not self.leases
        self.index.release(u32([r.handle for r in self.pinned]))
        for residency in self.pinned:
            self.unpin(residency)
        self.index.abort(u32([r.handle for r, _ in self.writes]))
        for residency, _ in self.writes:
            self.unpin(residency)
        self.index.check()
        for (tier, size_class), order in self.use.items():
            for _ in range(2):  # the second time they have been pinned and released, and keep their order
                handles = self.index.victims(tier, size_class, 1000)[0]
                assert handles.tolist() == [r.handle for r in order]
                self.index.release(handles)
        stats = self.index.stats()
        assert (stats["pins"], stats["doomed"], stats["leases"]) == (0, 0, 0)
        for space in SPACES:
            self.index.clear(space)
        self.index.check()
        stats = self.index.stats()
        assert (stats["entries"], stats["residencies"]) == (0, 0)
        freed = sum(len(self.index.take_freed(tier)[0]) for tier in TIERS)
        assert freed == sum(map(len, self.freed.values())) + len(self.living) + len(self.doomed)


IndexMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestIndexModel = IndexMachine.TestCase
