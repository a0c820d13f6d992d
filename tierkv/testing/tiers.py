"""TierConformance: what every tier must do. A back end's own test is a subclass of some 25 lines.

    class TestMyTier(TierConformance):
        durable = True

        def make_tier(self, directory: Path) -> MyTier:
            return MyTier(directory / "cache", capacity_bytes=self.capacity_bytes)

Every wait has a timeout; nothing here sleeps. The tier's own faults (ENOSPC, EIO, stuck media) are tested
beside the back end, where the real means are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from tierkv.errors import ClosedError
from tierkv.jobs import Job
from tierkv.keys import Keyspace
from tierkv.testing.buffers import BlockBuffer, block_payload, make_space, random_hashes
from tierkv.tiers.base import Batch, Tier
from tierkv.types import NO_SLOT, BlockStatus, HashArray, Int64Array, SlotArray

TIMEOUT_S = 30.0
ODD_SIZES = (1, 511, 4095, 4096, 4097, 65_536, (1 << 20) + 3)


class TierConformance:
    """Subclass it as a Test* class. The flags say what the medium is; make_tier() opens it in a directory."""

    capacity_bytes: ClassVar[int] = 8 << 20
    """What make_tier() must give the tier; with slabs of 2 MiB, where it has slabs."""
    durable: ClassVar[bool] = False
    """A tier that make_tier() opens again in the same directory finds what was OK."""
    content_addressed: ClassVar[bool] = False
    """Slot numbers mean nothing; blocks are found by keyspace and hash."""
    shared: ClassVar[bool] = False
    """Several tiers may be open in one directory, and see each other's blocks."""
    verifies: ClassVar[bool] = True
    """Reads of what is not there are MISS. (DRAM leaves that to the store's generations.)"""

    def make_tier(self, directory: Path) -> Tier:
        """Opens the tier on `directory`, with capacity_bytes; a second call on it reopens what was closed."""
        raise NotImplementedError

    def damage(self, tier: Tier, space: Keyspace, block_hash: bytes, slot: int) -> None:
        """Changes a byte of a stored block on the medium. Overridden where the medium can be reached."""
        pytest.skip("this back end's test does not say how to damage its medium")

    def payload(self, space: Keyspace, block_hash: bytes) -> bytes:
        """A block's bytes; a tier that compresses overrides it with bytes that shrink."""
        return block_payload(space, block_hash)

    # Help for the tests below; back ends' own tests may use it too.

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        """A fresh tier, closed after the test."""
        tier = self.make_tier(tmp_path)
        yield tier
        tier.close()

    def need(self, flag: str) -> None:
        """Skips the test for tiers that do not claim `flag`."""
        if not getattr(self, flag):
            pytest.skip(
                f"this tier is not {flag.replace('_', ' ')}" if flag != "verifies" else "memory cannot lie"
            )

    @staticmethod
    def batch(
        space: Keyspace,
        hashes: HashArray,
        slots: SlotArray,
        buffer: BlockBuffer,
        lengths: Int64Array | None = None,
    ) -> Batch:
        """A batch over the first blocks of `buffer`; lengths default to whole blocks."""
        count = len(hashes)
        if lengths is None:
            lengths = np.full(count, space.block_bytes, np.int64)
        return Batch(space, hashes, slots, buffer.addresses[:count], lengths)

    @staticmethod
    def ended(job: Job) -> list[int]:
        """The statuses of a job, which must end in time."""
        assert job.wait(TIMEOUT_S), f"the job did not end within {TIMEOUT_S} s: {job}"
        return [int(status) for status in job.status]

    def write(self, tier: Tier, space: Keyspace, hashes: HashArray) -> SlotArray:
        """Allocates and writes the payloads of `hashes`; all must be OK."""
        slots = tier.allocate(space, len(hashes))
        assert slots is not None, f"no room for {len(hashes)} blocks of {space.block_bytes} bytes"
        assert slots.dtype == np.uint32
        assert len(slots) == len(hashes)
        assert self.write_at(tier, space, hashes, slots) == [BlockStatus.OK] * len(hashes)
        return slots

    def write_at(self, tier: Tier, space: Keyspace, hashes: HashArray, slots: SlotArray) -> list[int]:
        buffer = BlockBuffer(max(1, len(hashes)), space.block_bytes)
        for position, row in enumerate(hashes):
            buffer.put(position, self.payload(space, row.tobytes()))
        return self.ended(tier.submit_write(self.batch(space, hashes, slots, buffer)))

    def read(self, tier: Tier, space: Keyspace, hashes: HashArray, slots: SlotArray) -> list[int]:
        """The statuses of reading; whatever is OK must be the payload, and no byte beyond a block's room may
        change."""
        buffer = BlockBuffer(max(1, len(hashes)), space.block_bytes)
        statuses = self.ended(tier.submit_read(self.batch(space, hashes, slots, buffer)))
        for position, status in enumerate(statuses):
            if status == BlockStatus.OK:
                assert buffer.get(position) == self.payload(space, hashes[position].tobytes()), "wrong bytes"
        assert buffer.guards_intact(), "the tier wrote beyond the block"
        return statuses

    def fill(self, tier: Tier, space: Keyspace) -> SlotArray:
        """Allocates one by one until the tier refuses."""
        taken: list[int] = []
        limit = self.capacity_bytes // space.block_bytes + 1
        while (slots := tier.allocate(space, 1)) is not None:
            taken.extend(slots.tolist())
            assert len(taken) <= limit, "the tier granted more than its capacity"
        return np.array(taken, np.uint32)

    # What a tier says of itself.

    def test_info_is_plausible(self, tier: Tier) -> None:
        info = tier.info
        assert info.capacity_bytes > 0
        assert info.alignment_bytes >= 1
        assert 4096 % info.alignment_bytes == 0
        assert info.shared == self.shared
        assert info.name
        assert tier.healthy()
        assert tier.used_bytes() == 0

    # Slots and capacity.

    @pytest.mark.parametrize("block_bytes", [4096, 5000, 1 << 20])
    def test_the_capacity_is_never_passed(self, tier: Tier, block_bytes: int) -> None:
        space = make_space(block_bytes)
        offered = tier.available(space)
        slots = self.fill(tier, space)
        assert len(slots) == offered > 0
        assert tier.available(space) == 0
        assert len(slots) * block_bytes <= tier.info.capacity_bytes
        assert block_bytes * len(slots) <= tier.used_bytes() <= tier.info.capacity_bytes
        if not self.content_addressed:
            offsets = np.sort(slots.astype(np.int64)) * 4096
            assert (np.diff(offsets) >= block_bytes).all(), "slots overlap"
            assert offsets[-1] + block_bytes <= tier.info.capacity_bytes
            assert NO_SLOT not in slots

    def test_a_refused_allocation_changes_nothing(self, tier: Tier) -> None:
        space = make_space(8192)
        offered, used = tier.available(space), tier.used_bytes()
        assert tier.allocate(space, offered + 1) is None
        assert (tier.available(space), tier.used_bytes()) == (offered, used)
        slots = tier.allocate(space, offered)
        assert slots is not None
        assert len(slots) == offered
        if not self.content_addressed:
            assert len(np.unique(slots)) == offered
        assert tier.allocate(space, 1) is None

    def test_no_slots_are_always_granted(self, tier: Tier) -> None:
        space = make_space()
        self.fill(tier, space)
        slots = tier.allocate(space, 0)
        assert slots is not None
        assert len(slots) == 0

    def test_freed_slots_are_granted_again(self, tier: Tier) -> None:
        space = make_space(4096 * 3)
        hashes = random_hashes(tier.available(space), 1)
        for _ in range(3):
            slots = self.write(tier, space, hashes)
            assert tier.allocate(space, 1) is None
            tier.free(space, hashes, slots)
            assert tier.used_bytes() == 0
            assert tier.available(space) == len(hashes)

    def test_slots_never_written_are_simply_made_free(self, tier: Tier) -> None:
        space = make_space()
        slots = self.fill(tier, space)
        tier.free(space, random_hashes(len(slots), 2), slots)
        assert tier.available(space) == len(slots)

    def test_slots_that_were_granted_can_be_given_back(self, tier: Tier) -> None:
        space, hashes = make_space(5000), random_hashes(3, 70)
        kept = self.write(tier, space, hashes)
        slots = self.fill(tier, space)
        tier.give_back(space, slots)
        assert tier.available(space) == len(slots)
        assert len(self.fill(tier, space)) == len(slots)
        assert self.read(tier, space, hashes, kept) == [BlockStatus.OK] * 3

    def test_a_slab_that_was_emptied_serves_another_block_size(self, tier: Tier) -> None:
        small, large = make_space(4096, 1), make_space(1 << 20, 2)
        slots = self.fill(tier, small)
        assert tier.available(large) == 0
        slab = tier.slab_of(int(slots[len(slots) // 2]))
        if not len(slab):
            pytest.skip("block sizes do not compete for slabs here")
        assert slots[len(slots) // 2] in slab
        assert (np.diff(slab.astype(np.int64)) > 0).all()
        assert set(slab.tolist()) <= set(slots.tolist())
        tier.free(small, random_hashes(len(slab), 71), slab)
        assert tier.available(large) > 0
        self.write(tier, large, random_hashes(1, 72))

    def test_one_capacity_serves_several_block_sizes(self, tier: Tier) -> None:
        small, large = make_space(4096, 1), make_space(1 << 20, 2)
        fit = tier.available(large)
        of_small, of_large = random_hashes(4, 3), random_hashes(1, 4)
        small_slots, large_slots = self.write(tier, small, of_small), self.write(tier, large, of_large)
        assert self.read(tier, small, of_small, small_slots) == [BlockStatus.OK] * 4
        assert self.read(tier, large, of_large, large_slots) == [BlockStatus.OK]
        tier.free(small, of_small, small_slots)
        assert self.read(tier, large, of_large, large_slots) == [BlockStatus.OK]
        tier.free(large, of_large, large_slots)
        assert len(self.fill(tier, large)) == fit

    # Round trips.

    @pytest.mark.parametrize("block_bytes", ODD_SIZES)
    def test_blocks_of_any_size_come_back_whole(self, tier: Tier, block_bytes: int) -> None:
        space = make_space(block_bytes)
        hashes = random_hashes(3, block_bytes)
        slots = self.write(tier, space, hashes)
        assert self.read(tier, space, hashes, slots) == [BlockStatus.OK] * 3
        assert self.read(tier, space, hashes[::-1].copy(), slots[::-1].copy()) == [BlockStatus.OK] * 3

    @pytest.mark.parametrize("count", [1, 2, 31, 33, 130])
    def test_batches_of_any_count_come_back_whole(self, tier: Tier, count: int) -> None:
        space = make_space(5001)
        hashes = random_hashes(count, count)
        slots = self.write(tier, space, hashes)
        order = np.random.default_rng(count).permutation(count)
        assert self.read(tier, space, hashes[order], slots[order]) == [BlockStatus.OK] * count

    def test_blocks_shorter_than_their_slot_come_back_at_their_length(self, tier: Tier) -> None:
        space = make_space(10_000)
        lengths = np.array([1, 4095, 4096, 4097, 9999, 10_000], np.int64)
        hashes = random_hashes(len(lengths), 5)
        slots = tier.allocate(space, len(lengths))
        assert slots is not None
        buffer = BlockBuffer(len(lengths), space.block_bytes)
        for position, length in enumerate(lengths.tolist()):
            buffer.put(position, self.payload(space, hashes[position].tobytes())[:length])
        job = tier.submit_write(self.batch(space, hashes, slots, buffer, lengths))
        assert self.ended(job) == [BlockStatus.OK] * len(lengths)
        found = BlockBuffer(len(lengths), space.block_bytes)
        job = tier.submit_read(self.batch(space, hashes, slots, found, lengths))
        assert self.ended(job) == [BlockStatus.OK] * len(lengths)
        for position, length in enumerate(lengths.tolist()):
            assert found.get(position, length) == self.payload(space, hashes[position].tobytes())[:length]
        assert found.guards_intact()

    def test_an_empty_batch_is_done(self, tier: Tier) -> None:
        space, none = make_space(), random_hashes(0)
        batch = Batch(space, none, np.zeros(0, np.uint32), np.zeros(0, np.int64), np.zeros(0, np.int64))
        assert tier.submit_write(batch).wait(TIMEOUT_S)
        assert tier.submit_read(batch).wait(TIMEOUT_S)
        tier.free(space, none, np.zeros(0, np.uint32))
        tier.forget(space, none)

    def test_hashes_that_nearly_agree_are_kept_apart(self, tier: Tier) -> None:
        space = make_space(600)
        hashes = np.zeros((33, 32), np.uint8)
        hashes[np.arange(32), np.arange(32)] = 1  # row k differs from zeros (row 32) in byte k only
        slots = self.write(tier, space, hashes)
        assert self.read(tier, space, hashes, slots) == [BlockStatus.OK] * 33

    def test_what_is_written_is_the_memory_at_the_time_of_the_write(self, tier: Tier) -> None:
        """The caller may reuse its memory once the job is done."""
        space, hashes = make_space(20_000), random_hashes(2, 6)
        slots = tier.allocate(space, 2)
        assert slots is not None
        buffer = BlockBuffer(2, space.block_bytes)
        for position in range(2):
            buffer.put(position, self.payload(space, hashes[position].tobytes()))
        assert self.ended(tier.submit_write(self.batch(space, hashes, slots, buffer))) == [BlockStatus.OK] * 2
        buffer.memory[:] = 0
        assert self.read(tier, space, hashes, slots) == [BlockStatus.OK] * 2

    # What is not there is a miss.

    def test_blocks_never_written_are_misses(self, tier: Tier) -> None:
        self.need("verifies")
        space, hashes = make_space(), random_hashes(5, 7)
        slots = tier.allocate(space, 5)
        assert slots is not None
        assert self.read(tier, space, hashes, slots) == [BlockStatus.MISS] * 5

    def test_freed_blocks_are_misses(self, tier: Tier) -> None:
        self.need("verifies")
        space, hashes = make_space(), random_hashes(6, 8)
        slots = self.write(tier, space, hashes)
        tier.free(space, hashes[:3], slots[:3])
        expected = [BlockStatus.MISS] * 3 + [BlockStatus.OK] * 3
        assert self.read(tier, space, hashes, slots) == expected

    def test_forgotten_blocks_are_misses_and_their_slots_stay_taken(self, tier: Tier) -> None:
        self.need("verifies")
        space, hashes = make_space(), random_hashes(6, 9)
        slots = self.write(tier, space, hashes)
        used = tier.used_bytes()
        tier.forget(space, hashes[1:4])
        expected = [BlockStatus.OK, *[BlockStatus.MISS] * 3, *[BlockStatus.OK] * 2]
        assert self.read(tier, space, hashes, slots) == expected
        if not self.content_addressed:
            assert tier.used_bytes() == used
        tier.free(space, hashes, slots)
        assert tier.used_bytes() == 0

    def test_a_whole_keyspace_is_forgotten_and_no_other(self, tier: Tier) -> None:
        self.need("verifies")
        first, second = make_space(number=1), make_space(number=2, model="other")
        hashes = random_hashes(4, 10)
        first_slots, second_slots = self.write(tier, first, hashes), self.write(tier, second, hashes)
        tier.forget(first, None)
        assert self.read(tier, first, hashes, first_slots) == [BlockStatus.MISS] * 4
        assert self.read(tier, second, hashes, second_slots) == [BlockStatus.OK] * 4

    def test_a_block_is_found_only_under_its_keyspace(self, tier: Tier) -> None:
        self.need("verifies")
        space, other = make_space(number=1), make_space(number=2, revision="r2")
        hashes = random_hashes(3, 11)
        slots = self.write(tier, space, hashes)
        assert self.read(tier, other, hashes, slots) == [BlockStatus.MISS] * 3
        assert self.read(tier, space, hashes, slots) == [BlockStatus.OK] * 3

    def test_another_hash_in_a_written_slot_is_a_miss(self, tier: Tier) -> None:
        self.need("verifies")
        space, hashes = make_space(), random_hashes(2, 12)
        slots = self.write(tier, space, hashes)
        others = hashes.copy()
        others[:, 31] ^= 1
        assert self.read(tier, space, others, slots) == [BlockStatus.MISS] * 2
        if not self.content_addressed:
            assert self.read(tier, space, hashes, slots[::-1].copy()) == [BlockStatus.MISS] * 2

    def test_a_reused_slot_holds_the_new_block_only(self, tier: Tier) -> None:
        self.need("verifies")
        space = make_space(4096 * 2)
        old = random_hashes(tier.available(space), 13)
        old_slots = self.write(tier, space, old)
        tier.free(space, old, old_slots)
        new = random_hashes(len(old), 14)
        new_slots = self.write(tier, space, new)
        assert self.read(tier, space, old, old_slots) == [BlockStatus.MISS] * len(old)
        assert self.read(tier, space, new, new_slots) == [BlockStatus.OK] * len(new)

    def test_each_block_of_a_batch_succeeds_or_fails_alone(self, tier: Tier) -> None:
        self.need("verifies")
        space, hashes = make_space(3000), random_hashes(9, 15)
        slots = self.write(tier, space, hashes)
        tier.free(space, hashes[[0, 4]], slots[[0, 4]])
        tier.forget(space, hashes[[8]])
        expected = [BlockStatus.MISS if k in {0, 4, 8} else BlockStatus.OK for k in range(9)]
        assert self.read(tier, space, hashes, slots) == expected

    def test_a_damaged_block_is_never_given_out(self, tier: Tier) -> None:
        space, hashes = make_space(9000), random_hashes(3, 16)
        slots = self.write(tier, space, hashes)
        self.damage(tier, space, hashes[1].tobytes(), int(slots[1]))
        first = self.read(tier, space, hashes, slots)
        assert first[0] == first[2] == BlockStatus.OK
        assert first[1] == BlockStatus.CORRUPT
        assert self.read(tier, space, hashes, slots) == [BlockStatus.OK, BlockStatus.MISS, BlockStatus.OK]
        tier.free(space, hashes, slots)
        assert tier.used_bytes() == 0

    def test_a_block_may_be_written_again_after_its_loss(self, tier: Tier) -> None:
        space, hashes = make_space(), random_hashes(2, 17)
        slots = self.write(tier, space, hashes)
        tier.free(space, hashes, slots)
        slots = self.write(tier, space, hashes)
        assert self.read(tier, space, hashes, slots) == [BlockStatus.OK] * 2

    # Reopening.

    def residents(self, tier: Tier) -> dict[tuple[bytes, bytes], int]:
        """(keyspace digest, hash) -> slot of everything that recover() names."""
        found: dict[tuple[bytes, bytes], int] = {}
        for group in tier.recover():
            assert len(group.hashes) == len(group.slots)
            for row, slot in zip(group.hashes, group.slots.tolist(), strict=True):
                key = (group.space.digest(), row.tobytes())
                assert key not in found, "recover() named a block twice"
                found[key] = slot
        return found

    def test_a_fresh_tier_holds_nothing(self, tier: Tier) -> None:
        assert self.residents(tier) == {}

    def test_a_reopened_tier_finds_exactly_what_was_ok(self, tmp_path: Path) -> None:
        self.need("durable")
        spaces = [make_space(4096, 1), make_space(7001, 2, model="other"), make_space(7001, 3, group="swa")]
        tier = self.make_tier(tmp_path)
        expected: dict[tuple[bytes, bytes], int] = {}
        kept: list[tuple[Keyspace, HashArray, SlotArray]] = []
        for number, space in enumerate(spaces):
            hashes = random_hashes(8, 20 + number)
            slots = self.write(tier, space, hashes)
            tier.free(space, hashes[:2], slots[:2])
            tier.forget(space, hashes[2:3])
            assert tier.allocate(space, 1) is not None  # taken, never written
            kept.append((space, hashes, slots))
            for row, slot in zip(hashes[3:], slots[3:].tolist(), strict=True):
                expected[space.digest, row.tobytes()] = slot
        tier.close()

        tier = self.make_tier(tmp_path)
        found = self.residents(tier)
        assert found.keys() == expected.keys()
        if not self.content_addressed:
            assert found == expected
        for space, hashes, slots in kept:
            wanted = [BlockStatus.MISS] * 3 + [BlockStatus.OK] * 5
            assert self.read(tier, space, hashes, slots) == wanted
        tier.close()

    def test_recovered_slots_are_taken_until_they_are_freed(self, tmp_path: Path) -> None:
        self.need("durable")
        space = make_space(1 << 16)
        tier = self.make_tier(tmp_path)
        total = tier.available(space)
        hashes = random_hashes(total // 2, 21)
        self.write(tier, space, hashes)
        tier.close()

        tier = self.make_tier(tmp_path)
        found = self.residents(tier)
        slots = np.array([found[space.digest, row.tobytes()] for row in hashes], np.uint32)
        fresh = self.fill(tier, space)
        assert len(fresh) == total - len(hashes)
        if not self.content_addressed:
            assert not set(fresh.tolist()) & set(slots.tolist())
        assert self.read(tier, space, hashes, slots) == [BlockStatus.OK] * len(hashes)
        tier.free(space, hashes, slots)
        assert len(self.fill(tier, space)) == len(hashes)
        tier.close()

    def test_least_recently_written_blocks_are_recovered_first(self, tmp_path: Path) -> None:
        """Where the medium keeps an order, it is the order of writing; the store evicts from its front."""
        self.need("durable")
        if self.content_addressed:
            pytest.skip("files have no order that another node must agree on")
        space, tier = make_space(), self.make_tier(tmp_path)
        batches = [random_hashes(4, 30 + number) for number in range(3)]
        for hashes in batches:
            self.write(tier, space, hashes)
        tier.close()
        tier = self.make_tier(tmp_path)
        order = [key[1] for key in self.residents(tier)]
        tier.close()
        groups = [{row.tobytes() for row in hashes} for hashes in batches]
        assert [set(order[k * 4 : k * 4 + 4]) for k in range(3)] == groups

    # Sharing.

    def test_what_one_node_wrote_another_finds(self, tmp_path: Path) -> None:
        self.need("shared")
        space, hashes = make_space(30_000), random_hashes(5, 40)
        first, second = self.make_tier(tmp_path), self.make_tier(tmp_path)
        slots = self.write(first, space, hashes[:4])
        assert second.probe(space, hashes).tolist() == [True] * 4 + [False]
        anything = np.zeros(5, np.uint32)
        assert self.read(second, space, hashes, anything) == [BlockStatus.OK] * 4 + [BlockStatus.MISS]
        first.free(space, hashes[:4], slots)
        assert self.read(first, space, hashes[:4], slots) == [BlockStatus.MISS] * 4
        first.close()
        second.close()

    def test_losing_the_race_to_write_a_block_is_success(self, tmp_path: Path) -> None:
        self.need("shared")
        space, hashes = make_space(70_000), random_hashes(4, 41)
        tiers = [self.make_tier(tmp_path) for _ in range(2)]
        start = threading.Barrier(2)
        statuses: list[list[int]] = [[], []]

        def race(number: int) -> None:
            slots = tiers[number].allocate(space, 4)
            assert slots is not None
            start.wait(TIMEOUT_S)
            statuses[number] = self.write_at(tiers[number], space, hashes, slots)

        run_threads([lambda: race(0), lambda: race(1)])
        assert statuses == [[BlockStatus.OK] * 4] * 2
        for tier in tiers:
            assert self.read(tier, space, hashes, np.zeros(4, np.uint32)) == [BlockStatus.OK] * 4
            tier.close()

    # Many at once.

    def test_threads_with_blocks_of_their_own_do_not_disturb_each_other(self, tier: Tier) -> None:
        def work(number: int) -> None:
            space = make_space(3000 + 4096 * number, number + 1, group=f"group-{number}")
            rng = np.random.default_rng(number)
            held: list[tuple[HashArray, SlotArray]] = []
            for _ in range(12):
                hashes = random_hashes(int(rng.integers(1, 6)), rng)
                slots = tier.allocate(space, len(hashes))
                if slots is None:
                    continue
                assert self.write_at(tier, space, hashes, slots) == [BlockStatus.OK] * len(hashes)
                held.append((hashes, slots))
                hashes, slots = held[int(rng.integers(0, len(held)))]
                assert self.read(tier, space, hashes, slots) == [BlockStatus.OK] * len(hashes)
                if rng.random() < 0.4:
                    hashes, slots = held.pop(int(rng.integers(0, len(held))))
                    tier.free(space, hashes, slots)
            for hashes, slots in held:
                assert self.read(tier, space, hashes, slots) == [BlockStatus.OK] * len(hashes)
                tier.free(space, hashes, slots)

        run_threads([lambda number=number: work(number) for number in range(4)])  # type: ignore[misc]
        assert tier.used_bytes() == 0

    def test_many_jobs_at_once_all_end(self, tier: Tier) -> None:
        space = make_space(2048)
        hashes = random_hashes(96, 50)
        slots = tier.allocate(space, 96)
        assert slots is not None
        buffer = BlockBuffer(96, space.block_bytes)
        for position, row in enumerate(hashes):
            buffer.put(position, self.payload(space, row.tobytes()))
        whole = self.batch(space, hashes, slots, buffer)
        jobs = [tier.submit_write(whole.select(slice(at, at + 3))) for at in range(0, 96, 3)]
        assert [self.ended(job) for job in jobs] == [[BlockStatus.OK] * 3] * 32
        found = BlockBuffer(96, space.block_bytes)
        whole = self.batch(space, hashes, slots, found)
        jobs = [tier.submit_read(whole.select(slice(at, at + 3))) for at in range(0, 96, 3)]
        assert [self.ended(job) for job in jobs] == [[BlockStatus.OK] * 3] * 32
        assert (found.memory == buffer.memory).all()

    # The end.

    def test_close_is_idempotent_and_settles_everything(self, tmp_path: Path) -> None:
        space, hashes = make_space(50_000), random_hashes(40, 60)
        tier = self.make_tier(tmp_path)
        slots = tier.allocate(space, 40)
        assert slots is not None
        buffer = BlockBuffer(40, space.block_bytes)
        whole = self.batch(space, hashes, slots, buffer)
        jobs = [tier.submit_write(whole.select(slice(at, at + 4))) for at in range(0, 40, 4)]
        closer = threading.Thread(target=tier.close)
        closer.start()
        tier.close()
        closer.join(TIMEOUT_S)
        assert not closer.is_alive()
        tier.close()
        for job in jobs:
            assert set(self.ended(job)) <= {BlockStatus.OK, BlockStatus.CANCELLED}

    def test_what_is_asked_after_close_ends_at_once(self, tmp_path: Path) -> None:
        space, hashes = make_space(), random_hashes(2, 61)
        tier = self.make_tier(tmp_path)
        slots = self.write(tier, space, hashes)
        tier.close()
        batch = self.batch(space, hashes, slots, BlockBuffer(2, space.block_bytes))
        for submit in (tier.submit_write, tier.submit_read):
            try:
                job = submit(batch)
            except ClosedError:
                continue
            assert self.ended(job) == [BlockStatus.CANCELLED] * 2

    def test_what_was_ok_before_close_is_there_after_it(self, tmp_path: Path) -> None:
        """Close may cancel, but what it let end as OK counts, and nothing else does."""
        self.need("durable")
        space, hashes = make_space(40_000), random_hashes(60, 62)
        tier = self.make_tier(tmp_path)
        slots = tier.allocate(space, 60)
        assert slots is not None
        buffer = BlockBuffer(60, space.block_bytes)
        for position, row in enumerate(hashes):
            buffer.put(position, self.payload(space, row.tobytes()))
        whole = self.batch(space, hashes, slots, buffer)
        jobs = [tier.submit_write(whole.select(slice(at, at + 5))) for at in range(0, 60, 5)]
        tier.close()
        statuses = [status for job in jobs for status in self.ended(job)]
        tier = self.make_tier(tmp_path)
        found = self.residents(tier)
        for row, status in zip(hashes, statuses, strict=True):
            present = (space.digest, row.tobytes()) in found
            assert present or status != BlockStatus.OK
            assert not present or status == BlockStatus.OK or self.content_addressed
        assert BlockStatus.CORRUPT not in self.read(tier, space, hashes, slots)
        tier.close()


def run_threads(works: list[Callable[[], Any]], timeout_s: float = 60.0) -> None:
    """Runs each on a thread of its own and raises the first error; AssertionError if one does not end."""
    errors: list[BaseException] = []

    def run(work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), f"a thread did not end within {timeout_s} s"
