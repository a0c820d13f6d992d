"""StoreConformance: what every store must do, in this process or behind an agent. A test of one is a small subclass.

    class TestMyStore(StoreConformance):
        @contextmanager
        def make_store(self, config: StoreConfig, clock: VirtualClock) -> Iterator[StoreCalls]:
            with Store(config, clock=clock) as store:
                yield store

Every wait has a timeout. Time for deadlines of leases and parts is the virtual clock's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tierkv.clock import VirtualClock
from tierkv.config import DramConfig, NvmeConfig, StoreConfig
from tierkv.errors import ArgumentError, ClosedError, ConfigError, KeyspaceError
from tierkv.fragments import Fragments
from tierkv.jobs import Job
from tierkv.keys import Keyspace, pack_hashes
from tierkv.memory import capacity_for, slot_bytes_for
from tierkv.store import StoreStats
from tierkv.store.calls import Attachable, StoreCalls
from tierkv.testing.buffers import PagedCache, chain_hashes, make_spec, part_payload, random_hashes
from tierkv.types import BlockStatus, HashArray, TierKind

if TYPE_CHECKING:
    from tierkv.agent.client import AgentStore
    from tierkv.store import Store

    def _have_the_calls(here: Store, client: AgentStore) -> tuple[StoreCalls, StoreCalls, Attachable]:
        """Holds both to the protocols: where a signature goes its own way, the types do not fit."""
        return here, client, client


TIMEOUT_S = 30.0
BLOCK_BYTES = 4096
OK, MISS, DROPPED = int(BlockStatus.OK), int(BlockStatus.MISS), int(BlockStatus.DROPPED)
_WIPED = 0xEE


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Waits for what other threads or processes bring about without telling anyone; AssertionError otherwise."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"did not happen within {timeout_s} s: {what}"
        time.sleep(0.002)


def ended(job: Job, timeout_s: float = TIMEOUT_S) -> list[int]:
    """The statuses of a job, which must end in time."""
    assert job.wait(timeout_s), f"the job did not end within {timeout_s} s: {job}"
    return [int(status) for status in job.status]


def empty_cache(space: Keyspace, count: int, part: int = 0) -> PagedCache:
    """A paged cache for `count` blocks: two layers with gaps."""
    size = space.part_bytes[part]
    pieces = [size // 3, size - size // 3] if size >= 3 else [size]
    return PagedCache(max(1, count), pieces, 32)


def filled(space: Keyspace, hashes: HashArray, part: int = 0) -> Fragments:
    """Memory with the blocks' right bytes."""
    cache = empty_cache(space, len(hashes), part)
    for position, row in enumerate(hashes):
        cache.put(position, part_payload(space, row.tobytes(), part))
    return cache.fragments(range(len(hashes)))


def save(
    store: StoreCalls,
    space: Keyspace,
    hashes: HashArray,
    part: int | None = None,
    timeout_s: float | None = None,
) -> list[int]:
    """Saves the right bytes (part None: all parts); the worst status of each block."""
    worst = [OK] * len(hashes)
    for number in range(len(space.part_bytes)) if part is None else [part]:
        found = ended(store.save(space, hashes, filled(space, hashes, number), number, timeout_s))
        worst = [max(pair) for pair in zip(worst, found, strict=True)]
    return worst


def load(
    store: StoreCalls,
    space: Keyspace,
    hashes: HashArray,
    part: int | None = None,
    timeout_s: float | None = None,
) -> list[int]:
    """Loads (part None: all parts) and checks every byte; the worst status of each block."""
    worst = [OK] * len(hashes)
    for number in range(len(space.part_bytes)) if part is None else [part]:
        cache = empty_cache(space, len(hashes), number)
        cache.wipe(_WIPED)
        found = ended(store.load(space, hashes, cache.fragments(range(len(hashes))), number, timeout_s))
        for position, status in enumerate(found):
            if status == OK:
                expected = part_payload(space, hashes[position].tobytes(), number)
                assert cache.get(position) == expected, f"wrong bytes in block {position}"
        assert cache.guards_intact(), "the store wrote beside the pieces"
        worst = [max(pair) for pair in zip(worst, found, strict=True)]
    return worst


def rows(hashes: HashArray, positions: Any) -> HashArray:
    """Some rows, C-contiguous."""
    return np.ascontiguousarray(hashes[positions])


def settled(store: StoreCalls) -> StoreStats:
    """Waits until nothing is held, pending or queued, and checks that slots and blocks are as many."""

    def still() -> bool:
        stats = store.stats()
        return not (stats.pins or stats.pending_blocks or stats.save_queue_blocks or stats.write_queue_blocks)

    eventually(still, "pins, pending blocks and queues become empty")
    return store.stats()


class StoreConformance:
    """Subclass it as a Test* class and say how to make a store."""

    def make_store(self, config: StoreConfig, clock: VirtualClock) -> AbstractContextManager[StoreCalls]:
        """A store of these tiers that reads `clock`; closed at the context's end."""
        raise NotImplementedError

    # Help.

    def config(
        self, directory: Path, dram_blocks: int = 32, nvme_blocks: int = 0, block_bytes: int = BLOCK_BYTES
    ) -> StoreConfig:
        """Tiers with room for so many blocks."""
        slab_bytes = 8 * slot_bytes_for(block_bytes)
        return StoreConfig(
            dram=DramConfig(
                capacity_bytes=capacity_for(dram_blocks, block_bytes, slab_bytes),
                slab_bytes=slab_bytes,
                huge_pages="off",
                lock_memory="off",
                first_touch="never",
                free_ahead=0.0,
            ),
            nvme=NvmeConfig(
                directory=str(directory / "nvme"),
                capacity_bytes=capacity_for(nvme_blocks, block_bytes, slab_bytes),
                slab_bytes=slab_bytes,
                sync="process",
            )
            if nvme_blocks
            else None,
            staging_bytes=slab_bytes,
        )

    @pytest.fixture
    def clock(self) -> VirtualClock:
        """The time that leases and parts see."""
        return VirtualClock()

    @pytest.fixture
    def store(self, tmp_path: Path, clock: VirtualClock) -> Iterator[StoreCalls]:
        """32 blocks of DRAM and nothing below."""
        with self.make_store(self.config(tmp_path), clock) as store:
            yield store

    @pytest.fixture
    def tiered(self, tmp_path: Path, clock: VirtualClock) -> Iterator[StoreCalls]:
        """16 blocks of DRAM above 256 of NVMe."""
        with self.make_store(self.config(tmp_path, 16, 256), clock) as store:
            yield store

    # Round trips.

    def test_what_is_saved_is_loaded(self, store: StoreCalls) -> None:
        space, hashes = store.open(make_spec(BLOCK_BYTES)), random_hashes(20, 1)
        assert load(store, space, hashes) == [MISS] * 20
        assert save(store, space, hashes) == [OK] * 20
        assert load(store, space, hashes) == [OK] * 20
        settled(store)

    @pytest.mark.parametrize("block_bytes", [1, 4095, 4097, 300_000])
    def test_blocks_of_odd_sizes(self, tmp_path: Path, clock: VirtualClock, block_bytes: int) -> None:
        with self.make_store(self.config(tmp_path, 8, block_bytes=block_bytes), clock) as store:
            space, hashes = store.open(make_spec(block_bytes)), random_hashes(8, 2)
            assert save(store, space, hashes) == [OK] * 8
            assert load(store, space, hashes) == [OK] * 8

    def test_nothing_is_an_answer_too(self, store: StoreCalls) -> None:
        space, none = store.open(make_spec(BLOCK_BYTES)), pack_hashes([])
        assert store.match(space, none).length == 0
        assert store.lookup([]) == []
        assert [len(found) for found in store.lookup([(space, none)])] == [0]
        assert store.load(space, none, empty_cache(space, 1).fragments([])).ok()
        assert store.save(space, none, empty_cache(space, 1).fragments([])).ok()
        assert store.remove(space, none) == 0
        assert store.clear(space) == 0
        store.touch(space, none)
        lease = store.lease([(space, none)], 1.0)
        assert [len(held) for held in lease.held] == [0]
        assert store.stage(lease).wait(TIMEOUT_S)
        assert lease.release()
        assert store.flush(TIMEOUT_S)

    def test_memory_is_free_for_reuse_once_a_save_is_done(self, store: StoreCalls) -> None:
        space, hashes = store.open(make_spec(BLOCK_BYTES)), random_hashes(4, 3)
        cache = PagedCache(4, [BLOCK_BYTES])
        for position, row in enumerate(hashes):
            cache.put(position, part_payload(space, row.tobytes(), 0))
        assert ended(store.save(space, hashes, cache.fragments(range(4)))) == [OK] * 4
        cache.wipe(0)
        assert load(store, space, hashes) == [OK] * 4

    def test_blocks_of_the_cache_may_lie_in_any_order(self, store: StoreCalls) -> None:
        space, hashes = store.open(make_spec(BLOCK_BYTES)), random_hashes(6, 4)
        assert save(store, space, hashes) == [OK] * 6
        cache, ids = empty_cache(space, 9), [7, 0, 8, 3, 1, 5]
        cache.wipe(_WIPED)
        assert ended(store.load(space, hashes, cache.fragments(ids))) == [OK] * 6
        for block_id, row in zip(ids, hashes, strict=True):
            assert cache.get(block_id) == part_payload(space, row.tobytes(), 0)
        assert all(set(cache.get(block_id)) == {_WIPED} for block_id in (2, 4, 6))
        assert cache.guards_intact()

    # Identity.

    def test_a_block_is_found_only_under_its_keyspace(self, store: StoreCalls) -> None:
        space = store.open(make_spec(BLOCK_BYTES))
        others = [store.open(make_spec(revision="r2")), store.open(make_spec(group="swa"))]
        hashes = random_hashes(4, 5)
        assert save(store, space, hashes) == [OK] * 4
        for other in others:
            assert store.match(other, hashes).length == 0
            assert load(store, other, hashes) == [MISS] * 4
            assert store.remove(other, hashes) == 0
        assert load(store, space, hashes) == [OK] * 4

    def test_the_same_spec_is_the_same_keyspace(self, store: StoreCalls) -> None:
        assert store.open(make_spec(BLOCK_BYTES)) is store.open(make_spec(BLOCK_BYTES))
        assert store.open(make_spec(model="a")) is not store.open(make_spec(model="b"))

    def test_a_known_block_keeps_its_first_bytes(self, store: StoreCalls) -> None:
        space, hashes = store.open(make_spec(BLOCK_BYTES)), random_hashes(2, 6)
        assert save(store, space, hashes) == [OK] * 2
        other = PagedCache(2, [BLOCK_BYTES])
        other.wipe(0x77)
        assert ended(store.save(space, hashes, other.fragments([0, 1]))) == [OK] * 2
        assert load(store, space, hashes) == [OK] * 2
        assert store.stats().known_blocks == 2

    # Looking up.

    def test_match_is_the_longest_prefix_and_lookup_is_any_subset(self, store: StoreCalls) -> None:
        space, hashes = store.open(make_spec(BLOCK_BYTES)), chain_hashes(1, 10)
        assert save(store, space, rows(hashes, [0, 1, 2, 4, 7])) == [OK] * 5
        found = store.match(space, hashes)
        assert (found.length, found.tiers.tolist()) == (3, [TierKind.DRAM] * 3)
        (masks,) = store.lookup([(space, hashes)])
        assert [int(mask) >> TierKind.DRAM & 1 for mask in masks] == [1, 1, 1, 0, 1, 0, 0, 1, 0, 0]
        assert store.match(space, rows(hashes, slice(3, None))).length == 0

    def test_one_lookup_serves_several_groups(self, store: StoreCalls) -> None:
        full, window = store.open(make_spec(group="full")), store.open(make_spec(group="swa"))
        hashes = chain_hashes(2, 6)
        save(store, full, hashes)
        save(store, window, rows(hashes, [4, 5]))
        first, second = store.lookup([(full, hashes), (window, rows(hashes, slice(3, None)))])
        assert [mask != 0 for mask in first.tolist()] == [True] * 6
        assert [mask != 0 for mask in second.tolist()] == [False, True, True]

    def test_each_block_of_a_load_succeeds_or_fails_alone(self, store: StoreCalls) -> None:
        space, hashes = store.open(make_spec(BLOCK_BYTES)), random_hashes(9, 7)
        assert save(store, space, rows(hashes, [1, 3, 8])) == [OK] * 3
        assert load(store, space, hashes) == [OK if at in {1, 3, 8} else MISS for at in range(9)]

    def test_one_hash_twice_in_a_batch(self, store: StoreCalls) -> None:
        space = store.open(make_spec(BLOCK_BYTES))
        hashes = rows(random_hashes(3, 8), [0, 1, 0, 2, 2])
        assert save(store, space, hashes) == [OK] * 5
        assert store.stats().tiers["dram"].blocks == 3
        assert load(store, space, hashes) == [OK] * 5
        settled(store)

    def test_a_touched_block_outlives_others(self, tmp_path: Path, clock: VirtualClock) -> None:
        with self.make_store(self.config(tmp_path, 8), clock) as store:
            space, hashes = store.open(make_spec(BLOCK_BYTES)), random_hashes(8, 9)
            for position in range(8):
                save(store, space, rows(hashes, [position]))
            store.touch(space, rows(hashes, [0]))
            for position in range(4):
                save(store, space, random_hashes(1, 100 + position))
            found = [int(mask) != 0 for mask in store.lookup([(space, hashes)])[0]]
            assert found == [True, False, False, False, False, True, True, True]

    def test_a_chain_loses_its_tail_before_its_head(self, tmp_path: Path, clock: VirtualClock) -> None:
        with self.make_store(self.config(tmp_path, 16), clock) as store:
            space, hashes = store.open(make_spec(BLOCK_BYTES)), chain_hashes(5, 12)
            assert save(store, space, hashes) == [OK] * 12
            save(store, space, random_hashes(8, 26))
            present = [int(mask) != 0 for mask in store.lookup([(space, hashes)])[0]]
            assert present == [True] * 8 + [False] * 4

    def test_a_chain_longer_than_dram_keeps_its_head(self, tmp_path: Path, clock: VirtualClock) -> None:
        with self.make_store(self.config(tmp_path, 16), clock) as store:
            space, hashes = store.open(make_spec(BLOCK_BYTES)), chain_hashes(6, 40)
            save(store, space, hashes)
            assert store.match(space, hashes).length >= 12

    # Parts.

    def test_a_block_is_visible_when_its_last_part_is_in(self, store: StoreCalls) -> None:
        space, hashes = store.open(make_spec(BLOCK_BYTES, parts=3)), random_hashes(5, 10)
        for part in (2, 0):
            assert save(store, space, hashes, part) == [OK] * 5
            assert store.match(space, hashes).length == 0
            assert load(store, space, hashes) == [MISS] * 5
            assert store.stats().pending_blocks == 5
        assert save(store, space, hashes, 1) == [OK] * 5
        assert store.match(space, hashes).length == 5
        for part in (1, 2, 0):
            assert load(store, space, hashes, part) == [OK] * 5
        settled(store)

    def test_ranks_that_save_at_once_make_whole_blocks(self, store: StoreCalls) -> None:
        space, hashes = store.open(make_spec(BLOCK_BYTES, parts=4)), random_hashes(32, 11)
        start, found = threading.Barrier(4), {}

        def rank(part: int) -> None:
            memory = filled(space, hashes, part)
            start.wait(TIMEOUT_S)
            jobs = [
                store.save(space, rows(hashes, slice(at, at + 8)), memory.select(slice(at, at + 8)), part)
                for at in range(0, 32, 8)
            ]
            found[part] = [status for job in jobs for status in ended(job)]

        in_threads(rank, range(4))
        assert found == {part: [OK] * 32 for part in range(4)}
        assert load(store, space, hashes) == [OK] * 32
        settled(store)

    def test_parts_that_do_not_all_come_are_dropped_at_the_deadline(
        self, store: StoreCalls, clock: VirtualClock
    ) -> None:
        space, hashes = store.open(make_spec(BLOCK_BYTES, parts=2)), random_hashes(8, 12)
        assert save(store, space, hashes, 0) == [OK] * 8
        clock.advance(59.0)
        assert store.stats().pending_blocks == 8
        clock.advance(2.0)
        stats = settled(store)
        assert (stats.pending_blocks, stats.dropped_blocks, stats.tiers["dram"].used_bytes) == (0, 8, 0)
        assert save(store, space, hashes, 1) == [OK] * 8
        assert store.match(space, hashes).length == 0
        assert save(store, space, hashes, 0) == [OK] * 8
        assert load(store, space, hashes) == [OK] * 8

    # Leases.

    def test_leased_blocks_outlive_any_pressure(self, tmp_path: Path, clock: VirtualClock) -> None:
        with self.make_store(self.config(tmp_path, 8), clock) as store:
            space, hashes = store.open(make_spec(BLOCK_BYTES)), random_hashes(8, 13)
            save(store, space, hashes)
            held = rows(hashes, [0, 3, 5])
            lease = store.lease([(space, held)], 10.0)
            assert lease.held[0].tolist() == [True] * 3
            for seed in range(100, 106):
                save(store, space, random_hashes(5, seed))
            assert load(store, space, held) == [OK] * 3
            assert load(store, space, rows(hashes, [1, 2, 4])) == [MISS] * 3
            assert lease.release()
            assert not lease.release()
            for seed in range(106, 110):
                save(store, space, random_hashes(8, seed))
            assert load(store, space, held) == [MISS] * 3
            settled(store)

    def test_a_lease_ends_by_itself(self, store: StoreCalls, clock: VirtualClock) -> None:
        space, hashes = store.open(make_spec(BLOCK_BYTES)), random_hashes(8, 14)
        save(store, space, hashes)
        lease = store.lease([(space, hashes)], 10.0)
        for _ in range(3):
            clock.advance(8.0)
            assert lease.extend(10.0)
        assert store.stats().leases == 1
        clock.advance(10.5)
        assert settled(store).leases == 0
        assert not lease.extend(10.0)
        assert not lease.release()

    def test_a_lease_says_what_it_holds(self, store: StoreCalls) -> None:
        space, other = store.open(make_spec(BLOCK_BYTES)), store.open(make_spec(group="swa"))
        hashes = chain_hashes(3, 6)
        save(store, space, rows(hashes, [0, 2]))
        save(store, other, rows(hashes, [5]))
        lease = store.lease([(space, hashes), (other, rows(hashes, slice(4, None)))], 10.0)
        assert lease.held[0].tolist() == [True, False, True, False, False, False]
        assert lease.held[1].tolist() == [False, True]
        assert lease.release()

    def test_a_leased_block_that_is_removed_is_not_found(self, store: StoreCalls) -> None:
        space, hashes = store.open(make_spec(BLOCK_BYTES)), random_hashes(8, 15)
        save(store, space, hashes)
        lease = store.lease([(space, hashes)], 10.0)
        assert store.remove(space, hashes) == 8
        assert load(store, space, hashes) == [MISS] * 8
        assert lease.release()
        assert settled(store).tiers["dram"].used_bytes == 0

    # Tiers.

    def test_a_burst_larger_than_dram_is_all_found_again(self, tiered: StoreCalls) -> None:
        space, hashes = tiered.open(make_spec(BLOCK_BYTES)), chain_hashes(4, 100)
        assert save(tiered, space, hashes) == [OK] * 100
        assert tiered.match(space, hashes).length == 100
        assert load(tiered, space, hashes) == [OK] * 100
        stats = settled(tiered)
        assert all(tier.used_bytes <= tier.capacity_bytes for tier in stats.tiers.values())
        assert stats.tiers["nvme"].blocks >= 84
        assert stats.dropped_blocks == 0

    def test_bursts_of_several_threads_at_once(self, tiered: StoreCalls) -> None:
        space = tiered.open(make_spec(BLOCK_BYTES))

        def work(number: int) -> None:
            for turn in range(4):
                hashes = chain_hashes(10 * number + turn, 12)
                assert save(tiered, space, hashes) == [OK] * 12
                assert load(tiered, space, hashes) == [OK] * 12

        in_threads(work, range(1, 5))
        settled(tiered)

    def test_flushed_blocks_are_below_and_staged_ones_are_back(self, tiered: StoreCalls) -> None:
        space, hashes = tiered.open(make_spec(BLOCK_BYTES)), random_hashes(6, 16)
        save(tiered, space, hashes)
        assert tiered.flush(TIMEOUT_S)
        assert all(int(mask) >> TierKind.NVME & 1 for mask in tiered.lookup([(space, hashes)])[0])
        for seed in range(200, 204):
            save(tiered, space, random_hashes(16, seed))
        assert tiered.flush(TIMEOUT_S)  # so that room is made without writing
        assert not any(int(mask) >> TierKind.DRAM & 1 for mask in tiered.lookup([(space, hashes)])[0])
        lease = tiered.lease([(space, hashes), (space, random_hashes(2, 17))], 10.0)
        assert ended(tiered.stage(lease)) == [OK] * 6 + [MISS] * 2
        assert all(int(mask) >> TierKind.DRAM & 1 for mask in tiered.lookup([(space, hashes)])[0])
        for seed in range(204, 207):
            save(tiered, space, random_hashes(8, seed))
        assert all(int(mask) >> TierKind.DRAM & 1 for mask in tiered.lookup([(space, hashes)])[0])
        assert load(tiered, space, hashes) == [OK] * 6
        assert lease.release()
        settled(tiered)

    @pytest.mark.parametrize("parts", [1, 2])
    def test_blocks_are_loaded_while_all_of_dram_is_held(self, tiered: StoreCalls, parts: int) -> None:
        space = tiered.open(make_spec(BLOCK_BYTES, parts=parts))
        hashes, others = chain_hashes(11, 40), chain_hashes(12, 16)
        for chain in (hashes, others):
            for at in range(0, len(chain), 8):
                assert save(tiered, space, rows(chain, slice(at, at + 8))) == [OK] * 8
            assert tiered.flush(TIMEOUT_S)
        leases = [tiered.lease([(space, rows(others, slice(at, at + 4)))], 100.0) for at in range(0, 16, 4)]
        assert all(lease.held[0].all() for lease in leases)
        (masks,) = tiered.lookup([(space, others)])
        if not all(int(mask) >> TierKind.DRAM & 1 for mask in masks):
            pytest.fail("not all of DRAM is held: the test shows nothing")
        assert load(tiered, space, hashes) == [OK] * 40
        assert not any(int(mask) >> TierKind.DRAM & 1 for mask in tiered.lookup([(space, hashes)])[0])
        for lease in leases:
            assert lease.release()
        assert load(tiered, space, hashes) == [OK] * 40
        settled(tiered)

    # Removing.

    def test_removed_blocks_are_gone_and_others_are_not(self, tiered: StoreCalls) -> None:
        space, hashes = tiered.open(make_spec(BLOCK_BYTES)), random_hashes(6, 18)
        save(tiered, space, hashes)
        assert tiered.flush(TIMEOUT_S)
        assert tiered.remove(space, rows(hashes, [1, 4])) == 4
        assert tiered.remove(space, rows(hashes, [1, 4])) == 0
        assert load(tiered, space, hashes) == [OK, MISS, OK, OK, MISS, OK]
        assert save(tiered, space, hashes) == [OK] * 6
        assert load(tiered, space, hashes) == [OK] * 6

    def test_clearing_empties_one_keyspace_only(self, store: StoreCalls) -> None:
        first, second = store.open(make_spec(model="a")), store.open(make_spec(model="b", parts=2))
        hashes = random_hashes(5, 19)
        save(store, first, hashes)
        save(store, second, hashes)
        save(store, second, random_hashes(3, 20), part=0)
        assert store.clear(first) == 5
        assert load(store, first, hashes) == [MISS] * 5
        assert load(store, second, hashes) == [OK] * 5
        assert store.clear(second) >= 5
        assert settled(store).tiers["dram"].used_bytes == 0

    # Refusals.

    def test_wrong_arguments_are_refused_before_anything_happens(self, store: StoreCalls) -> None:
        space, hashes = store.open(make_spec(BLOCK_BYTES, parts=2)), random_hashes(3, 21)
        memory = filled(space, hashes)
        with pytest.raises(ArgumentError, match="pack_hashes"):
            store.match(space, [b"x"])  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="part"):
            store.save(space, hashes, memory, part=2)
        with pytest.raises(ArgumentError, match="part"):
            store.load(space, hashes, memory, part=-1)
        with pytest.raises(ArgumentError, match="3 hashes but 2"):
            store.save(space, hashes, memory.select(slice(2)))
        with pytest.raises(ArgumentError, match="bytes a block"):
            store.save(space, hashes, PagedCache(3, [100]).fragments(range(3)))
        with pytest.raises(ArgumentError, match="Fragments"):
            store.load(space, hashes, np.zeros((3, 4096), np.uint8))  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="timeout_s"):
            store.load(space, hashes, memory, timeout_s=0)
        with pytest.raises(ArgumentError, match="ttl_s"):
            store.lease([(space, hashes)], 0)
        with pytest.raises(KeyspaceError):
            store.open(make_spec(kv_dtype="auto"))
        with pytest.raises(ConfigError, match=r"dram\.slab_bytes"):
            store.open(make_spec(1 << 20))
        stats = store.stats()
        assert (stats.pins, stats.tiers["dram"].blocks) == (0, 0)

    def test_a_keyspace_of_another_store_is_refused(self, store: StoreCalls) -> None:
        store.open(make_spec(BLOCK_BYTES))
        spec, hashes = make_spec(BLOCK_BYTES), random_hashes(1, 22)
        stranger = Keyspace(spec, spec.digest(), 1)
        for call in (
            lambda: store.match(stranger, hashes),
            lambda: store.lookup([(stranger, hashes)]),
            lambda: store.lease([(stranger, hashes)], 1.0),
            lambda: store.touch(stranger, hashes),
            lambda: store.remove(stranger, hashes),
            lambda: store.clear(stranger),
            lambda: store.save(stranger, hashes, filled(stranger, hashes)),
        ):
            with pytest.raises(KeyspaceError, match="open"):
                call()

    def test_extreme_times_are_taken_as_the_longest_there_is(self, store: StoreCalls) -> None:
        space, hashes = store.open(make_spec(BLOCK_BYTES)), random_hashes(2, 23)
        assert save(store, space, hashes, timeout_s=1e7) == [OK] * 2
        assert load(store, space, hashes, timeout_s=1e7) == [OK] * 2
        lease = store.lease([(space, hashes)], 1e8)
        assert lease.extend(1e8)
        assert ended(store.stage(lease, 1e7)) == [OK] * 2
        assert lease.release()
        assert store.flush(1e7)

    # Ending.

    def test_closing_settles_every_job(self, tmp_path: Path, clock: VirtualClock) -> None:
        with self.make_store(self.config(tmp_path, 16, 256), clock) as store:
            space = store.open(make_spec(BLOCK_BYTES))
            jobs = []
            for seed in range(30, 40):
                hashes = random_hashes(20, seed)
                jobs.append(store.save(space, hashes, filled(space, hashes)))
                jobs.append(store.load(space, hashes, empty_cache(space, 20).fragments(range(20))))
            store.close()
            for job in jobs:
                assert BlockStatus.PENDING not in ended(job)

    def test_a_closed_store_says_so(self, tmp_path: Path, clock: VirtualClock) -> None:
        with self.make_store(self.config(tmp_path), clock) as store:
            space, hashes = store.open(make_spec(BLOCK_BYTES)), random_hashes(1, 24)
            memory = filled(space, hashes)
            store.close()
            store.close()
            for call in (
                lambda: store.open(make_spec()),
                lambda: store.match(space, hashes),
                lambda: store.lookup([(space, hashes)]),
                lambda: store.save(space, hashes, memory),
                lambda: store.load(space, hashes, memory),
                lambda: store.lease([(space, hashes)], 1.0),
                lambda: store.clear(space),
                store.flush,
            ):
                with pytest.raises(ClosedError):
                    call()

    # Counting, and many at once.

    def test_the_counters_add_up(self, store: StoreCalls) -> None:
        space, hashes = store.open(make_spec(BLOCK_BYTES)), random_hashes(10, 25)
        save(store, space, rows(hashes, slice(0, 6)))
        save(store, space, rows(hashes, slice(4, 8)))
        load(store, space, hashes)
        eventually(lambda: sum(store.stats().load_misses.values()) == 2, "two misses are counted")
        stats = settled(store)
        assert (stats.saved_blocks, stats.known_blocks, stats.dropped_blocks) == (8, 2, 0)
        dram = stats.tiers["dram"]
        assert (dram.blocks, dram.written_blocks, dram.hit_blocks, dram.evicted_blocks) == (8, 8, 8, 0)
        assert dram.written_bytes == dram.read_bytes == dram.used_bytes == 8 * BLOCK_BYTES

    def test_threads_that_do_everything_at_once(self, tiered: StoreCalls) -> None:
        spaces = [tiered.open(make_spec(BLOCK_BYTES)), tiered.open(make_spec(BLOCK_BYTES, parts=2))]

        def work(number: int) -> None:
            random = np.random.default_rng(number)
            for _ in range(12):
                space = spaces[int(random.integers(2))]
                hashes = chain_hashes(int(random.integers(1, 5)), int(random.integers(1, 10)))
                match int(random.integers(6)):
                    case 0 | 1:
                        assert set(save(tiered, space, hashes)) <= {OK, DROPPED, BlockStatus.CANCELLED}
                    case 2 | 3:
                        assert set(load(tiered, space, hashes)) <= {OK, MISS}
                    case 4:
                        lease = tiered.lease([(space, hashes)], 5.0)
                        tiered.stage(lease).wait(TIMEOUT_S)
                        lease.release()
                    case _:
                        tiered.remove(space, rows(hashes, slice(-2, None)))

        in_threads(work, range(4))
        stats = settled(tiered)
        assert stats.tiers["dram"].used_bytes == stats.tiers["dram"].blocks * BLOCK_BYTES


def in_threads(work: Callable[[int], None], numbers: Sequence[int]) -> None:
    """Runs work(number) on a thread each and raises what one of them raised."""
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # reported by the caller's thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads), "a thread did not end"
    if failures:
        raise failures[0]
