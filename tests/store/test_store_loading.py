"""Loading from below: order against saves, deadlines, damage, faults, and sharing of transfers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from store_harness import (
    MISS,
    OK,
    TIMEOUT_S,
    Load,
    Rig,
    eventually,
    in_tier,
    load,
    masks,
    rows,
    save,
    statuses_of,
    submit_save,
)

from tierkv.keys import Keyspace
from tierkv.testing.buffers import random_hashes
from tierkv.testing.faults import FaultKind
from tierkv.types import BlockStatus, HashArray, TierKind

CORRUPT, TIMEOUT, IO_ERROR = (
    int(s) for s in (BlockStatus.CORRUPT, BlockStatus.TIMEOUT, BlockStatus.IO_ERROR)
)


def with_blocks_below(rig: Rig, count: int = 8, seed: int = 1) -> tuple[Keyspace, HashArray]:
    """Saves blocks and reopens the store, so that only the lower tiers hold them."""
    space, hashes = rig.space(), random_hashes(count, seed)
    assert save(rig.store, space, hashes) == [OK] * count
    assert rig.store.flush(TIMEOUT_S)
    rig.reopen()
    space = rig.space()
    assert rig.store.match(space, hashes).length == count
    assert not any(in_tier(TierKind.DRAM, masks(rig.store, space, hashes)))
    return space, hashes


# Loads and saves.


def test_a_load_from_dram_does_not_wait_for_a_stalled_write(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=64) as rig:
        space, hashes = rig.space(), random_hashes(8, 1)
        save(rig.store, space, hashes)
        assert rig.nvme is not None
        rig.nvme.plan.fail_always("write", FaultKind.STALL)
        saving = submit_save(rig.store, space, random_hashes(4, 2))
        assert rig.nvme.gate.wait_held()
        assert load(rig.store, space, hashes) == [OK] * 8, "also what is on its way down"
        assert not saving.done()
        rig.nvme.plan.heal()
        while not saving.wait(0.01):
            rig.nvme.gate.release()
        assert statuses_of(saving) == [OK] * 4
        rig.settled()


def test_a_load_from_nvme_does_not_wait_for_a_stalled_write(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=64) as rig:
        space, below = with_blocks_below(rig)
        save(rig.store, space, random_hashes(8, 2))
        assert rig.nvme is not None
        rig.nvme.plan.fail_always("write", FaultKind.STALL)
        saving = submit_save(rig.store, space, random_hashes(8, 3))
        assert rig.nvme.gate.wait_held()
        assert load(rig.store, space, below) == [OK] * 8
        assert not saving.done()
        rig.nvme.plan.heal()
        while not saving.wait(0.01):
            rig.nvme.gate.release()
        rig.settled()


def test_a_stalled_load_from_below_does_not_hold_up_one_from_dram(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=16, nvme_blocks=64) as rig:
        space, below = with_blocks_below(rig)
        above = random_hashes(4, 2)
        save(rig.store, space, above)
        assert rig.nvme is not None
        rig.nvme.plan.fail_always("read", FaultKind.STALL)
        stuck = [Load(rig.store, space, rows(below, [k])) for k in range(4)]
        assert rig.nvme.gate.wait_held(2)
        assert load(rig.store, space, above) == [OK] * 4
        rig.nvme.plan.heal()
        while not all(one.job.done() for one in stuck):
            rig.nvme.gate.release()
            stuck[0].job.wait(0.01)
        assert [one.statuses() for one in stuck] == [[OK]] * 4
        rig.settled()


# Deadlines.


@pytest.mark.parametrize("kind", [FaultKind.STALL, FaultKind.LATE])
def test_a_load_ends_at_its_deadline_and_its_memory_is_left_alone_after(
    tmp_path: Path, kind: FaultKind
) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=16) as rig:
        space, hashes = with_blocks_below(rig)
        assert rig.nvme is not None
        rig.nvme.plan.fail_next("read", kind)
        late = Load(rig.store, space, hashes, timeout_s=0.1)
        assert late.statuses() == [TIMEOUT] * 8
        before = [late.cache.get(position) for position in range(8)]
        assert rig.nvme.gate.wait_held()
        assert rig.store.stats().pins > 0, "the transfer keeps its blocks until it ends"
        rig.nvme.gate.release()
        rig.settled()
        assert [late.cache.get(position) for position in range(8)] == before
        assert load(rig.store, space, hashes) == [OK] * 8
        rig.check_misses(timeout=8)


def test_a_read_that_never_answers_ends_with_the_store(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=16) as rig:
        space, hashes = with_blocks_below(rig)
        assert rig.nvme is not None
        rig.nvme.plan.fail_next("read", FaultKind.LOST)
        under_way = Load(rig.store, space, hashes)
        assert rig.nvme.gate.wait_held()
        rig.store.close(0)
        assert set(under_way.statuses()) <= {BlockStatus.CANCELLED, TIMEOUT}


# Damage and faults.


def test_a_corrupt_block_is_reported_once_then_it_is_a_miss(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=16) as rig:
        space, hashes = rig.space(), random_hashes(8, 1)
        save(rig.store, space, hashes)
        assert rig.nvme is not None
        rig.nvme.plan.fail_always("write", FaultKind.FLIPPED)
        assert rig.store.flush(TIMEOUT_S)
        rig.nvme.plan.heal()
        rig.reopen(0)
        space = rig.space()
        assert load(rig.store, space, hashes) == [CORRUPT] * 8
        assert load(rig.store, space, hashes) == [MISS] * 8
        assert masks(rig.store, space, hashes) == [0] * 8
        stats = rig.store.stats()
        assert stats.corrupt_blocks == 8
        rig.check_misses(corrupt=8, miss=8)
        rig.settled()
        eventually(lambda: rig.store.stats().tiers["nvme"].used_bytes == 0, "bad copies give up their slots")
        assert save(rig.store, space, hashes) == [OK] * 8
        assert load(rig.store, space, hashes) == [OK] * 8


@pytest.mark.parametrize("kind", [FaultKind.TORN, FaultKind.FLIPPED])
def test_a_damaged_block_harms_no_other(tmp_path: Path, kind: FaultKind) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=16) as rig:
        space, hashes = rig.space(), random_hashes(8, 1)
        save(rig.store, space, hashes)
        assert rig.nvme is not None
        rig.nvme.plan.fail_next("write", kind, blocks=[3])
        assert rig.store.flush(TIMEOUT_S)
        rig.reopen(0)
        space = rig.space()
        assert sorted(load(rig.store, space, hashes)) == [OK] * 7 + [CORRUPT]
        rig.settled()


def test_a_corrupt_copy_is_replaced_by_a_good_one_from_the_next_tier(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=16, dfs_blocks=None) as rig:
        space, hashes = rig.space(), random_hashes(8, 1)
        assert rig.nvme is not None
        rig.nvme.plan.fail_always("write", FaultKind.FLIPPED)
        save(rig.store, space, hashes)
        assert rig.store.flush(TIMEOUT_S)
        eventually(
            lambda: in_tier(TierKind.DFS, masks(rig.store, space, hashes)) == [True] * 8,
            "write-through to dfs",
        )
        rig.reopen(0)
        space = rig.space()
        assert rig.store.match(space, hashes).length == 8
        eventually(
            lambda: in_tier(TierKind.DFS, masks(rig.store, space, hashes)) == [True] * 8, "dfs is listed"
        )
        assert load(rig.store, space, hashes) == [OK] * 8
        stats = rig.store.stats()
        assert stats.corrupt_blocks == 8
        rig.check_misses()
        rig.settled()


def test_a_read_error_is_that_block_s_alone(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=16) as rig:
        space, hashes = with_blocks_below(rig)
        assert rig.nvme is not None
        rig.nvme.plan.fail_next("read", FaultKind.IO_ERROR, blocks=[0, 5])
        assert load(rig.store, space, hashes) == [IO_ERROR if k in {0, 5} else OK for k in range(8)]
        rig.check_misses(io_error=2)
        # The same copy would fail again: it is not offered twice.
        assert load(rig.store, space, hashes) == [MISS if k in {0, 5} else OK for k in range(8)]
        rig.settled()


def test_a_read_error_is_made_good_by_another_tier(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=16, dfs_blocks=None) as rig:
        space, hashes = with_blocks_below(rig)
        eventually(
            lambda: in_tier(TierKind.DFS, masks(rig.store, space, hashes)) == [True] * 8, "dfs is listed"
        )
        assert rig.nvme is not None
        rig.nvme.plan.fail_always("read", FaultKind.IO_ERROR)
        assert load(rig.store, space, hashes) == [OK] * 8
        rig.settled()


# Promotion.


def test_a_loaded_block_is_kept_in_dram(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=16) as rig:
        space, hashes = with_blocks_below(rig)
        assert load(rig.store, space, hashes) == [OK] * 8
        assert in_tier(TierKind.DRAM, masks(rig.store, space, hashes)) == [True] * 8
        assert load(rig.store, space, hashes) == [OK] * 8
        tiers = rig.store.stats().tiers
        assert tiers["nvme"].hit_blocks == 8
        assert tiers["dram"].hit_blocks == 8


def test_promotion_can_be_turned_off(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=16, promote="never") as rig:
        space, hashes = with_blocks_below(rig)
        for _ in range(2):
            assert load(rig.store, space, hashes) == [OK] * 8
        assert not any(in_tier(TierKind.DRAM, masks(rig.store, space, hashes)))
        assert rig.store.stats().tiers["nvme"].hit_blocks == 16


def test_more_than_dram_and_staging_hold_is_loaded_all_the_same(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=64, staging_bytes=4 * 4096) as rig:
        space, hashes = rig.space(), random_hashes(60, 1)
        for at in range(0, 60, 6):
            save(rig.store, space, rows(hashes, slice(at, at + 6)))
        rig.reopen()
        space = rig.space()
        assert load(rig.store, space, hashes) == [OK] * 60
        rig.settled()


def test_loads_go_through_staging_when_dram_is_leased(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=64, staging_bytes=2 * 4096) as rig:
        space, below = with_blocks_below(rig)
        above = random_hashes(8, 2)
        save(rig.store, space, above)
        with rig.store.lease([(space, above)], 60.0):
            assert load(rig.store, space, below) == [OK] * 8
            assert load(rig.store, space, np.concatenate([above, below])) == [OK] * 16
        rig.settled()


def test_equal_loads_share_one_read(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=16) as rig:
        space, hashes = with_blocks_below(rig)
        assert rig.nvme is not None
        rig.nvme.plan.fail_next("read", FaultKind.STALL)
        loads = [Load(rig.store, space, hashes)]
        assert rig.nvme.gate.wait_held()
        loads += [Load(rig.store, space, hashes) for _ in range(3)]
        rig.nvme.gate.release()
        assert [one.statuses() for one in loads] == [[OK] * 8] * 4
        assert rig.store.stats().tiers["nvme"].read_bytes == 8 * 4096
        rig.settled()


def test_a_failed_shared_read_fails_or_is_repeated_for_those_who_follow(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=16, dfs_blocks=None) as rig:
        space, hashes = with_blocks_below(rig)
        eventually(
            lambda: in_tier(TierKind.DFS, masks(rig.store, space, hashes)) == [True] * 8, "dfs is listed"
        )
        assert rig.nvme is not None
        rig.nvme.plan.fail_next("read", FaultKind.LATE)
        rig.nvme.plan.fail_always("read", FaultKind.IO_ERROR)
        first = Load(rig.store, space, hashes, timeout_s=0.5)
        assert rig.nvme.gate.wait_held()
        second = Load(rig.store, space, hashes)
        assert first.statuses() == [TIMEOUT] * 8
        assert second.statuses() == [OK] * 8, "a follower must not wait for ever, and reads for itself"
        rig.nvme.gate.release()
        rig.settled()


def test_mixed_sources_in_one_load(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=16, dfs_blocks=None, dfs={"admission": "on-evict"}) as rig:
        space, hashes = rig.space(), random_hashes(32, 1)
        for at in range(0, 32, 8):
            assert save(rig.store, space, rows(hashes, slice(at, at + 8))) == [OK] * 8
        found = masks(rig.store, space, hashes)
        assert all(found)
        assert len({mask & -mask for mask in found}) == 3, "all three tiers are the fastest of some block"
        assert load(rig.store, space, hashes) == [OK] * 32
        tiers = rig.store.stats().tiers
        assert sum(tier.hit_blocks for tier in tiers.values()) == 32
        rig.settled()


def test_one_part_of_a_block_from_below(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=16) as rig:
        space, hashes = rig.space(parts=(96, 4000)), random_hashes(4, 1)
        save(rig.store, space, hashes)
        rig.reopen()
        space = rig.space(parts=(96, 4000))
        assert Load(rig.store, space, hashes, 1).statuses() == [OK] * 4
        assert Load(rig.store, space, hashes, 0).statuses() == [OK] * 4
