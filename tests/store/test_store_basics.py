"""Saving, finding and loading: identity, truth, parts, and each block of a batch by itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_harness import (
    MISS,
    OK,
    TIMEOUT_S,
    Load,
    Rig,
    empty_cache,
    filled_cache,
    in_tier,
    load,
    masks,
    rows,
    save,
    statuses_of,
    submit_save,
)

from tierkv.errors import ArgumentError, ClosedError, ConfigError, KeyspaceError
from tierkv.fragments import Fragments
from tierkv.keys import Keyspace, pack_hashes
from tierkv.testing.buffers import PagedCache, chain_hashes, make_spec, part_payload, random_hashes
from tierkv.testing.strategies import CacheCase, caches
from tierkv.types import BlockStatus, TierKind


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Rig(tmp_path, dram_blocks=32) as rig:
        yield rig


# Round trips.


@given(source=caches(5003, min_ids=1), target=caches(5003, max_blocks=16, min_ids=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_saved_from_one_layout_loads_into_another(
    rig: Rig, source: CacheCase, target: CacheCase
) -> None:
    space = rig.space(block_bytes=4096) if rig.block_bytes == 5003 else rig.store.open(make_spec(5003))
    rig.store.clear(space)
    hashes = random_hashes(len(source.block_ids), 1)
    for block_id, row in zip(source.block_ids, hashes, strict=True):
        source.cache.put(block_id, part_payload(space, row.tobytes(), 0))
    job = rig.store.save(space, hashes, source.cache.fragments(source.block_ids))
    assert statuses_of(job) == [OK] * len(hashes)
    assert source.cache.guards_intact()

    ids = target.block_ids[: len(hashes)]
    target.cache.wipe()
    job = rig.store.load(space, rows(hashes, slice(len(ids))), target.cache.fragments(ids))
    assert statuses_of(job) == [OK] * len(ids)
    for block_id, row in zip(ids, hashes, strict=False):
        assert target.cache.get(block_id) == part_payload(space, row.tobytes(), 0)
    untouched = set(range(target.cache.blocks)) - set(ids)
    assert all(not any(target.cache.get(block_id)) for block_id in untouched)
    assert target.cache.guards_intact()


@pytest.mark.parametrize("block_bytes", [1, 4095, 4096, 4097, 300_000])
def test_blocks_of_odd_sizes(tmp_path: Path, block_bytes: int) -> None:
    with Rig(tmp_path, dram_blocks=8, block_bytes=block_bytes) as rig:
        space, hashes = rig.space(), random_hashes(8, 2)
        assert save(rig.store, space, hashes) == [OK] * 8
        assert load(rig.store, space, hashes) == [OK] * 8


def test_nothing_is_an_answer_too(rig: Rig) -> None:
    space, none = rig.space(), pack_hashes([])
    assert rig.store.match(space, none).length == 0
    assert rig.store.lookup([]) == []
    assert [len(found) for found in rig.store.lookup([(space, none)])] == [0]
    assert rig.store.load(space, none, empty_cache(space, 1).fragments([])).ok()
    assert rig.store.save(space, none, empty_cache(space, 1).fragments([])).ok()
    assert rig.store.remove(space, none) == 0
    assert rig.store.clear(space) == 0
    with rig.store.lease([(space, none)], 1.0) as lease:
        assert [len(held) for held in lease.held] == [0]
        assert rig.store.stage(lease).wait(TIMEOUT_S)
    assert rig.store.flush(TIMEOUT_S)


# Identity.


def test_a_block_is_found_only_under_its_keyspace(rig: Rig) -> None:
    space = rig.space()
    others = [rig.space(revision="r2"), rig.space(group="swa"), rig.space(extra={"rope": "yarn"})]
    hashes = random_hashes(4, 3)
    assert save(rig.store, space, hashes) == [OK] * 4
    for other in others:
        assert rig.store.match(other, hashes).length == 0
        assert masks(rig.store, other, hashes) == [0] * 4
        assert load(rig.store, other, hashes) == [MISS] * 4
        assert rig.store.remove(other, hashes) == 0
    assert load(rig.store, space, hashes) == [OK] * 4


def test_the_same_spec_is_the_same_keyspace(rig: Rig) -> None:
    assert rig.space() is rig.space()
    assert rig.space(model="a") is not rig.space(model="b")


def test_the_same_hash_in_two_keyspaces_is_two_blocks(rig: Rig) -> None:
    first, second = rig.space(model="a"), rig.space(model="b")
    hashes = random_hashes(3, 4)
    assert save(rig.store, first, hashes) == [OK] * 3
    assert save(rig.store, second, hashes) == [OK] * 3
    rig.store.remove(first, hashes)
    assert load(rig.store, second, hashes) == [OK] * 3
    assert load(rig.store, first, hashes) == [MISS] * 3


def test_hashes_that_nearly_agree_are_kept_apart(rig: Rig) -> None:
    space = rig.space()
    hashes = np.zeros((32, 32), np.uint8)
    hashes[np.arange(31), np.arange(31)] = 0x80
    assert save(rig.store, space, rows(hashes, slice(0, 32, 2))) == [OK] * 16
    expected = [OK if position % 2 == 0 else MISS for position in range(32)]
    assert load(rig.store, space, hashes) == expected


def test_a_known_block_keeps_its_first_bytes(rig: Rig) -> None:
    space, hashes = rig.space(), random_hashes(2, 5)
    assert save(rig.store, space, hashes) == [OK] * 2
    other = PagedCache(2, [rig.block_bytes])
    other.wipe(0x77)
    assert statuses_of(rig.store.save(space, hashes, other.fragments([0, 1]))) == [OK] * 2
    assert load(rig.store, space, hashes) == [OK] * 2
    assert rig.store.stats().known_blocks == 2


# Looking up.


def test_match_is_the_longest_prefix_and_lookup_is_any_subset(rig: Rig) -> None:
    space, hashes = rig.space(), chain_hashes(1, 10)
    assert save(rig.store, space, rows(hashes, [0, 1, 2, 4, 7])) == [OK] * 5
    found = rig.store.match(space, hashes)
    assert found.length == 3
    assert found.tiers.tolist() == [TierKind.DRAM] * 3
    present = [position in {0, 1, 2, 4, 7} for position in range(10)]
    assert in_tier(TierKind.DRAM, masks(rig.store, space, hashes)) == present
    assert rig.store.match(space, rows(hashes, slice(3, None))).length == 0


def test_one_lookup_serves_several_groups(rig: Rig) -> None:
    full, window = rig.space(group="full"), rig.space(group="swa")
    hashes = chain_hashes(2, 6)
    save(rig.store, full, hashes)
    save(rig.store, window, rows(hashes, [4, 5]))
    first, second = rig.store.lookup([(full, hashes), (window, hashes)])
    assert [mask != 0 for mask in first.tolist()] == [True] * 6
    assert [mask != 0 for mask in second.tolist()] == [False] * 4 + [True] * 2


def test_each_block_of_a_load_succeeds_or_fails_alone(rig: Rig) -> None:
    space, hashes = rig.space(), random_hashes(9, 6)
    assert save(rig.store, space, rows(hashes, [1, 3, 8])) == [OK] * 3
    expected = [OK if position in {1, 3, 8} else MISS for position in range(9)]
    under_way = Load(rig.store, space, hashes)
    assert under_way.statuses() == expected
    for position, status in enumerate(expected):
        if status == MISS:
            assert set(under_way.cache.get(position)) == {0xEE}, "a missed block's memory was written"
    rig.check_misses(miss=6)


def test_one_hash_twice_in_a_batch(rig: Rig) -> None:
    space = rig.space()
    hashes = rows(random_hashes(3, 7), [0, 1, 0, 2, 2])
    assert save(rig.store, space, hashes) == [OK] * 5
    assert rig.store.stats().tiers["dram"].blocks == 3
    assert load(rig.store, space, hashes) == [OK] * 5
    assert rig.store.stats().pins == 0


# Parts.


def test_a_block_is_visible_when_its_last_part_is_in(rig: Rig) -> None:
    space, hashes = rig.space(parts=3), random_hashes(5, 8)
    for part in (2, 0):
        assert save(rig.store, space, hashes, part) == [OK] * 5
        assert rig.store.match(space, hashes).length == 0
        assert masks(rig.store, space, hashes) == [0] * 5
        assert load(rig.store, space, hashes) == [MISS] * 5
        assert rig.store.lease([(space, hashes)], 1.0).held[0].any() is np.False_
        assert rig.store.stats().pending_blocks == 5
    assert save(rig.store, space, hashes, 1) == [OK] * 5
    assert rig.store.match(space, hashes).length == 5
    assert load(rig.store, space, hashes) == [OK] * 5
    assert rig.store.stats().pending_blocks == 0


@given(st.permutations(range(3)), st.permutations(range(3)))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parts_may_come_in_any_order_for_each_block(rig: Rig, first: list[int], second: list[int]) -> None:
    space = rig.space(parts=(100, 3000, 996))
    rig.store.clear(space)
    hashes = random_hashes(2, 9)
    for step in range(3):
        assert rig.store.match(space, hashes).length == 0
        assert save(rig.store, space, rows(hashes, [0]), first[step]) == [OK]
        assert save(rig.store, space, rows(hashes, [1]), second[step]) == [OK]
    assert load(rig.store, space, hashes) == [OK] * 2


def test_ranks_that_save_at_once_make_whole_blocks(rig: Rig) -> None:
    space, hashes = rig.space(parts=4), random_hashes(32, 10)
    start = threading.Barrier(4)
    found: dict[int, list[int]] = {}

    def rank(part: int) -> None:
        memory = filled_cache(space, hashes, part)
        start.wait(TIMEOUT_S)
        jobs = [
            rig.store.save(space, rows(hashes, slice(at, at + 8)), memory.select(slice(at, at + 8)), part)
            for at in range(0, 32, 8)
        ]
        found[part] = [status for job in jobs for status in statuses_of(job)]

    threads = [threading.Thread(target=rank, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert found == {part: [OK] * 32 for part in range(4)}
    assert rig.store.match(space, hashes).length == 32
    assert load(rig.store, space, hashes) == [OK] * 32
    rig.settled()


def test_a_part_that_comes_twice_is_taken_once(rig: Rig) -> None:
    space, hashes = rig.space(parts=2), random_hashes(2, 11)
    assert save(rig.store, space, hashes, 0) == [OK] * 2
    assert save(rig.store, space, hashes, 0) == [OK] * 2
    assert rig.store.match(space, hashes).length == 0
    assert save(rig.store, space, hashes, 1) == [OK] * 2
    assert load(rig.store, space, hashes) == [OK] * 2


def test_parts_that_do_not_all_come_are_dropped_at_the_deadline(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, save_timeout_s=60.0) as rig:
        space, hashes = rig.space(parts=2), random_hashes(8, 12)
        assert save(rig.store, space, hashes, 0) == [OK] * 8
        rig.clock.advance(59.0)
        assert rig.store.stats().pending_blocks == 8
        rig.clock.advance(2.0)
        stats = rig.store.stats()
        assert stats.pending_blocks == 0
        assert stats.dropped_blocks == 8
        assert stats.pins == 0
        # Their slots are free again, and the part that came first does not count any more.
        assert save(rig.store, space, hashes, 1) == [OK] * 8
        assert rig.store.match(space, hashes).length == 0
        assert save(rig.store, space, hashes, 0) == [OK] * 8
        assert load(rig.store, space, hashes) == [OK] * 8


def test_each_part_loads_by_itself(rig: Rig) -> None:
    space, hashes = rig.space(parts=(4000, 96)), random_hashes(3, 13)
    assert save(rig.store, space, hashes) == [OK] * 3
    for part in (1, 0):
        assert Load(rig.store, space, hashes, part).statuses() == [OK] * 3


# Removing.


def test_removed_blocks_are_gone_and_others_are_not(rig: Rig) -> None:
    space, hashes = rig.space(), random_hashes(6, 14)
    save(rig.store, space, hashes)
    assert rig.store.remove(space, rows(hashes, [1, 4])) == 2
    assert rig.store.remove(space, rows(hashes, [1, 4])) == 0
    assert load(rig.store, space, hashes) == [OK, MISS, OK, OK, MISS, OK]
    assert save(rig.store, space, hashes) == [OK] * 6
    assert load(rig.store, space, hashes) == [OK] * 6


def test_clearing_empties_one_keyspace_only(rig: Rig) -> None:
    first, second = rig.space(model="a"), rig.space(model="b", parts=2)
    hashes = random_hashes(5, 15)
    save(rig.store, first, hashes)
    save(rig.store, second, hashes)
    assert rig.store.clear(first) == 5
    assert load(rig.store, first, hashes) == [MISS] * 5
    assert load(rig.store, second, hashes) == [OK] * 5
    assert rig.store.stats().tiers["dram"].blocks == 5


def test_clearing_ends_what_is_not_whole(rig: Rig) -> None:
    space, hashes = rig.space(parts=2), random_hashes(3, 16)
    save(rig.store, space, hashes, 0)
    rig.store.clear(space)
    assert rig.store.stats().pending_blocks == 0
    assert save(rig.store, space, hashes, 1) == [OK] * 3
    assert rig.store.match(space, hashes).length == 0


# Refusals.


def test_wrong_arguments_are_refused_before_anything_happens(rig: Rig) -> None:
    space, hashes = rig.space(parts=2), random_hashes(3, 17)
    memory = filled_cache(space, hashes)
    with pytest.raises(ArgumentError, match="pack_hashes"):
        rig.store.match(space, [b"x"])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="part"):
        rig.store.save(space, hashes, memory, part=2)
    with pytest.raises(ArgumentError, match="part"):
        rig.store.load(space, hashes, memory, part=-1)
    with pytest.raises(ArgumentError, match="3 hashes but 2"):
        rig.store.save(space, hashes, memory.select(slice(2)))
    with pytest.raises(ArgumentError, match="bytes a block"):
        rig.store.save(space, hashes, PagedCache(3, [100]).fragments(range(3)))
    with pytest.raises(ArgumentError, match="Fragments"):
        rig.store.load(space, hashes, np.zeros((3, 4096), np.uint8))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="timeout_s"):
        rig.store.load(space, hashes, memory, timeout_s=0)
    with pytest.raises(ArgumentError, match="ttl_s"):
        rig.store.lease([(space, hashes)], 0)
    with pytest.raises(KeyspaceError):
        rig.store.open(make_spec(kv_dtype="auto"))
    assert rig.store.stats().pins == 0
    assert rig.store.stats().tiers["dram"].blocks == 0


def test_a_keyspace_of_another_store_is_refused(rig: Rig) -> None:
    spec = make_spec()
    stranger = Keyspace(spec, spec.digest(), 1)
    hashes = random_hashes(1, 18)
    rig.space()
    with pytest.raises(KeyspaceError, match=r"Store\.open"):
        rig.store.match(stranger, hashes)
    with pytest.raises(KeyspaceError, match=r"Store\.open"):
        rig.store.clear(stranger)


def test_a_block_that_fits_nowhere_is_refused_at_open(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=4) as rig, pytest.raises(ConfigError, match=r"dram\.slab_bytes"):
        rig.store.open(make_spec(1 << 20))


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    rig = Rig(tmp_path, dram_blocks=4)
    space, hashes = rig.space(), random_hashes(1, 19)
    memory = filled_cache(space, hashes)
    rig.store.close()
    rig.store.close()
    for call in (
        lambda: rig.store.open(make_spec()),
        lambda: rig.store.match(space, hashes),
        lambda: rig.store.save(space, hashes, memory),
        lambda: rig.store.load(space, hashes, memory),
        lambda: rig.store.lease([(space, hashes)], 1.0),
        lambda: rig.store.clear(space),
        rig.store.flush,
    ):
        with pytest.raises(ClosedError):
            call()


# Counting.


def test_the_counters_add_up(rig: Rig) -> None:
    space, hashes = rig.space(), random_hashes(10, 20)
    save(rig.store, space, rows(hashes, slice(0, 6)))
    save(rig.store, space, rows(hashes, slice(4, 8)))
    load(rig.store, space, hashes)
    stats = rig.store.stats()
    assert (stats.saved_blocks, stats.known_blocks, stats.dropped_blocks) == (8, 2, 0)
    rig.check_misses(miss=2)
    dram = stats.tiers["dram"]
    assert (dram.blocks, dram.written_blocks, dram.hit_blocks, dram.evicted_blocks) == (8, 8, 8, 0)
    assert dram.written_bytes == dram.read_bytes == 8 * 4096
    assert dram.used_bytes == 8 * 4096
    assert dram.write_s > 0
    assert dram.read_s > 0
    assert (stats.pins, stats.pending_blocks, stats.leases) == (0, 0, 0)


def test_memory_is_free_for_reuse_once_a_save_is_done(rig: Rig) -> None:
    space, hashes = rig.space(), random_hashes(4, 21)
    cache = PagedCache(4, [rig.block_bytes])
    for position, row in enumerate(hashes):
        cache.put(position, part_payload(space, row.tobytes(), 0))
    assert statuses_of(rig.store.save(space, hashes, cache.fragments(range(4)))) == [OK] * 4
    cache.wipe(0)
    assert load(rig.store, space, hashes) == [OK] * 4


def test_plain_arrays_are_enough(rig: Rig) -> None:
    space = rig.space()
    blocks = np.random.default_rng(0).integers(0, 256, (3, 4096), dtype=np.uint8)
    hashes = pack_hashes([b"one", b"two", b"three"])
    assert statuses_of(rig.store.save(space, hashes, Fragments.from_blocks(blocks))) == [OK] * 3
    found = np.zeros_like(blocks)
    assert statuses_of(rig.store.load(space, hashes, Fragments.from_blocks(found))) == [OK] * 3
    assert (found == blocks).all()


def test_statuses_are_of_the_documented_kind(rig: Rig) -> None:
    space, hashes = rig.space(), random_hashes(2, 22)
    job = submit_save(rig.store, space, hashes)
    statuses_of(job)
    assert job.status.dtype == np.uint8
    assert job.status.shape == (2,)
    assert {BlockStatus(int(status)) for status in job.status} == {BlockStatus.OK}
