"""Leases: what is held stays, and nothing is held for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
)

from tierkv.testing.buffers import chain_hashes, random_hashes
from tierkv.testing.faults import FaultKind
from tierkv.types import BlockStatus, TierKind


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """8 blocks of DRAM and nothing below: eviction loses blocks."""
    with Rig(tmp_path, dram_blocks=8) as rig:
        yield rig


def test_leased_blocks_outlive_any_pressure(rig: Rig) -> None:
    space, hashes = rig.space(), random_hashes(8, 1)
    save(rig.store, space, hashes)
    held = rows(hashes, [0, 3, 5])
    lease = rig.store.lease([(space, held)], 10.0)
    assert lease.held[0].tolist() == [True] * 3
    for seed in range(2, 8):
        save(rig.store, space, random_hashes(5, seed))
    assert load(rig.store, space, held) == [OK] * 3
    assert load(rig.store, space, rows(hashes, [1, 2, 4])) == [MISS] * 3
    assert lease.release()
    for seed in range(8, 12):
        save(rig.store, space, random_hashes(8, seed))
    assert load(rig.store, space, held) == [MISS] * 3
    rig.settled()


def test_a_store_full_of_leases_drops_saves_and_goes_on(rig: Rig) -> None:
    space, hashes = rig.space(), random_hashes(8, 1)
    save(rig.store, space, hashes)
    with rig.store.lease([(space, hashes)], 10.0):
        assert save(rig.store, space, random_hashes(3, 2)) == [BlockStatus.DROPPED] * 3
        assert save(rig.store, space, hashes) == [OK] * 8  # what is known needs no room
        assert rig.store.stats().dropped_blocks == 3
    assert save(rig.store, space, random_hashes(3, 2)) == [OK] * 3


def test_a_lease_ends_by_itself(rig: Rig) -> None:
    space, hashes = rig.space(), random_hashes(8, 1)
    save(rig.store, space, hashes)
    lease = rig.store.lease([(space, hashes)], 10.0)
    rig.clock.advance(9.9)
    assert rig.store.stats().leases == 1
    assert save(rig.store, space, random_hashes(1, 2)) == [BlockStatus.DROPPED]
    rig.clock.advance(0.2)
    assert rig.store.stats().leases == 0
    assert rig.store.stats().pins == 0
    assert save(rig.store, space, random_hashes(8, 2)) == [OK] * 8
    assert not lease.extend(10.0)
    assert not lease.release()


def test_a_lease_is_extended_from_now_on(rig: Rig) -> None:
    space, hashes = rig.space(), random_hashes(8, 1)
    save(rig.store, space, hashes)
    lease = rig.store.lease([(space, hashes)], 10.0)
    for _ in range(5):
        rig.clock.advance(8.0)
        assert lease.extend(10.0)
    assert save(rig.store, space, random_hashes(1, 2)) == [BlockStatus.DROPPED]
    rig.clock.advance(10.0)
    assert not lease.extend(10.0)
    rig.settled()


def test_a_lease_holds_what_is_there_and_says_what(rig: Rig) -> None:
    space, other = rig.space(), rig.space(group="swa")
    hashes = chain_hashes(1, 6)
    save(rig.store, space, rows(hashes, [0, 2]))
    save(rig.store, other, rows(hashes, [5]))
    lease = rig.store.lease([(space, hashes), (other, hashes)], 10.0)
    assert lease.held[0].tolist() == [True, False, True, False, False, False]
    assert lease.held[1].tolist() == [False] * 5 + [True]
    assert lease.release()
    assert not lease.release()


def test_two_leases_on_one_block_are_two_promises(rig: Rig) -> None:
    space, hashes = rig.space(), random_hashes(8, 1)
    save(rig.store, space, hashes)
    first = rig.store.lease([(space, hashes)], 10.0)
    second = rig.store.lease([(space, hashes)], 100.0)
    assert first.release()
    assert save(rig.store, space, random_hashes(2, 2)) == [BlockStatus.DROPPED] * 2
    assert second.release()
    assert save(rig.store, space, random_hashes(2, 2)) == [OK] * 2
    rig.settled()


def test_a_leased_block_that_is_removed_is_not_found_and_its_slot_comes_back(rig: Rig) -> None:
    space, hashes = rig.space(), random_hashes(8, 1)
    save(rig.store, space, hashes)
    lease = rig.store.lease([(space, hashes)], 10.0)
    assert rig.store.remove(space, hashes) == 8
    assert load(rig.store, space, hashes) == [MISS] * 8
    # The bytes may still be in use by whoever holds the lease: their slots are not given out.
    assert save(rig.store, space, random_hashes(1, 2)) == [BlockStatus.DROPPED]
    lease.release()
    assert save(rig.store, space, random_hashes(8, 2)) == [OK] * 8
    rig.settled()


def test_a_lease_below_dram_keeps_that_copy(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=16) as rig:
        space, hashes = rig.space(), random_hashes(8, 1)
        save(rig.store, space, hashes)
        save(rig.store, space, random_hashes(8, 2))
        assert in_tier(TierKind.NVME, masks(rig.store, space, hashes)) == [True] * 8
        with rig.store.lease([(space, hashes)], 10.0) as lease:
            assert lease.held[0].all()
            for seed in range(3, 9):
                save(rig.store, space, random_hashes(8, seed))
                rig.check_capacities()
            assert load(rig.store, space, hashes) == [OK] * 8
        rig.settled()


# Staging.


def test_staging_brings_blocks_to_dram_and_holds_them_there(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=16, nvme_blocks=32) as rig:
        space, hashes = rig.space(), random_hashes(8, 1)
        save(rig.store, space, hashes)
        assert rig.store.flush(TIMEOUT_S)
        rig.reopen()
        space = rig.space()
        assert in_tier(TierKind.DRAM, masks(rig.store, space, hashes)) == [False] * 8
        with rig.store.lease([(space, hashes)], 10.0) as lease:
            assert statuses_of(rig.store.stage(lease)) == [OK] * 8
            assert in_tier(TierKind.DRAM, masks(rig.store, space, hashes)) == [True] * 8
            for seed in range(2, 6):
                save(rig.store, space, random_hashes(8, seed))
            assert in_tier(TierKind.DRAM, masks(rig.store, space, hashes)) == [True] * 8
            assert load(rig.store, space, hashes) == [OK] * 8
        rig.settled()
        assert rig.store.stats().tiers["nvme"].hit_blocks == 0, "staged blocks were read again"


def test_staging_what_is_not_there_is_a_miss(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=8) as rig:
        space, hashes = rig.space(), random_hashes(4, 1)
        save(rig.store, space, rows(hashes, [0, 2]))
        with rig.store.lease([(space, hashes)], 10.0) as lease:
            assert statuses_of(rig.store.stage(lease)) == [OK, MISS, OK, MISS]
        rig.settled()


def test_staging_without_room_leaves_blocks_where_they_are(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=32) as rig:
        space, below, above = rig.space(), random_hashes(8, 1), random_hashes(8, 2)
        save(rig.store, space, below)
        rig.store.flush(TIMEOUT_S)
        rig.reopen()
        space = rig.space()
        save(rig.store, space, above)
        with (
            rig.store.lease([(space, above)], 10.0) as lease_above,
            rig.store.lease([(space, below)], 10.0) as lease_below,
        ):
            assert lease_above.held[0].all()
            assert lease_below.held[0].all()
            assert statuses_of(rig.store.stage(lease_below)) == [BlockStatus.NO_SPACE] * 8
            assert load(rig.store, space, below) == [OK] * 8  # by way of staging memory
        rig.settled()


def test_equal_stagings_share_one_transfer(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=16, nvme_blocks=32) as rig:
        space, hashes = rig.space(), random_hashes(8, 1)
        save(rig.store, space, hashes)
        rig.reopen()
        space = rig.space()
        assert rig.nvme is not None
        rig.nvme.plan.fail_next("read", FaultKind.STALL)
        with (
            rig.store.lease([(space, hashes)], 10.0) as first,
            rig.store.lease([(space, hashes)], 10.0) as second,
        ):
            one = rig.store.stage(first)
            assert rig.nvme.gate.wait_held()
            two = rig.store.stage(second)
            rig.nvme.gate.release()
            assert statuses_of(one) == [OK] * 8
            assert statuses_of(two) == [OK] * 8
        assert rig.store.stats().tiers["nvme"].read_bytes == 8 * 4096
        rig.settled()


# What moves is held as well.


def test_a_block_that_is_being_loaded_is_not_evicted(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=8) as rig:
        space, hashes = rig.space(), random_hashes(4, 1)
        save(rig.store, space, hashes)
        rig.reopen()
        space = rig.space()
        assert rig.nvme is not None
        rig.nvme.plan.fail_next("read", FaultKind.STALL)
        under_way = Load(rig.store, space, hashes)
        assert rig.nvme.gate.wait_held()
        for seed in range(2, 9):
            save(rig.store, space, random_hashes(4, seed), timeout_s=0.2)
        rig.nvme.gate.release()
        assert under_way.statuses() == [OK] * 4
        rig.settled()


def test_a_lease_that_ends_during_its_load_harms_nothing(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=8) as rig:
        space, hashes = rig.space(), random_hashes(4, 1)
        save(rig.store, space, hashes)
        rig.reopen()
        space = rig.space()
        assert rig.nvme is not None
        rig.nvme.plan.fail_next("read", FaultKind.LATE)
        lease = rig.store.lease([(space, hashes)], 10.0)
        under_way = Load(rig.store, space, hashes)
        assert rig.nvme.gate.wait_held()
        rig.clock.advance(11.0)
        assert not lease.release()
        save(rig.store, space, random_hashes(8, 2), timeout_s=0.2)
        rig.nvme.gate.release()
        assert under_way.statuses() == [OK] * 4
        rig.settled()


def test_leases_from_many_threads_leave_nothing_behind(rig: Rig) -> None:
    space, hashes = rig.space(), random_hashes(8, 1)
    save(rig.store, space, hashes)

    def work(number: int) -> None:
        for turn in range(50):
            lease = rig.store.lease([(space, rows(hashes, slice(turn % 8, None)))], 10.0)
            if (turn + number) % 3:
                lease.release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert rig.store.stats().leases > 0
    rig.clock.advance(11.0)
    eventually(lambda: rig.store.stats().pins == 0, "expired leases give up their pins")
    assert rig.store.stats().leases == 0


def test_what_is_leased_after_it_was_chosen_to_go_stays(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    space, leases, drop = rig.space(), [], rig.store._room._drop
    save(rig.store, space, random_hashes(8, 1))

    def leased_first(kind: TierKind, victims: Any) -> int:
        if not leases:
            leases.append(rig.store.lease([(space, victims.hashes)], 60.0))
        return drop(kind, victims)

    monkeypatch.setattr(rig.store._room, "_drop", leased_first)
    save(rig.store, space, random_hashes(2, 2))
    ((_, hashes),) = leases[0].queries
    assert leases[0].held[0].all()
    assert load(rig.store, space, hashes) == [OK] * len(hashes)
    assert leases[0].release()
    rig.settled()
