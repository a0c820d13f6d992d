"""Capacity: no tier grows past it, bursts are stored, and what goes first is exactly what an LRU says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_harness import (
    MISS,
    OK,
    TIMEOUT_S,
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

from tierkv.testing.buffers import chain_hashes, make_spec, random_hashes
from tierkv.testing.faults import FaultKind
from tierkv.testing.model import LruModel, keys_of
from tierkv.types import BlockStatus, TierKind

# Bursts.


@pytest.mark.parametrize("batch", [1, 7, 40])
def test_a_burst_five_times_dram_is_stored_whole(tmp_path: Path, batch: int) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=64) as rig:
        space, hashes = rig.space(), random_hashes(40, 1)
        jobs = [
            submit_save(rig.store, space, rows(hashes, slice(at, at + batch))) for at in range(0, 40, batch)
        ]
        assert [status for job in jobs for status in statuses_of(job)] == [OK] * 40
        rig.check_capacities()
        assert rig.store.match(space, hashes).length == 40
        assert load(rig.store, space, hashes) == [OK] * 40
        assert rig.store.stats().dropped_blocks == 0
        rig.settled()


def test_a_burst_into_a_full_nvme_evicts_the_oldest(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=16) as rig:
        space = rig.space()
        for seed in range(10):
            assert save(rig.store, space, random_hashes(8, seed)) == [OK] * 8
            rig.check_capacities()
        newest = np.concatenate([random_hashes(8, seed) for seed in (8, 9)])
        assert load(rig.store, space, newest) == [OK] * 16
        oldest = np.concatenate([random_hashes(8, seed) for seed in range(5)])
        assert load(rig.store, space, oldest) == [MISS] * 40
        stats = rig.store.stats()
        assert stats.dropped_blocks == 0
        assert stats.tiers["nvme"].evicted_blocks > 0
        rig.settled()


def test_what_nvme_evicts_goes_on_to_the_shared_tier(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=16, dfs_blocks=None, dfs={"admission": "on-evict"}) as rig:
        space, hashes = rig.space(), random_hashes(80, 2)
        for at in range(0, 80, 8):
            assert save(rig.store, space, rows(hashes, slice(at, at + 8))) == [OK] * 8
            rig.check_capacities()
        assert rig.store.match(space, hashes).length == 80
        assert load(rig.store, space, hashes) == [OK] * 80
        rig.settled()


def test_write_through_stores_below_without_eviction(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=16, nvme_blocks=16, nvme={"admission": "write-through"}) as rig:
        space, hashes = rig.space(), random_hashes(8, 3)
        assert save(rig.store, space, hashes) == [OK] * 8
        eventually(
            lambda: in_tier(TierKind.NVME, masks(rig.store, space, hashes)) == [True] * 8, "write-through"
        )
        assert rig.store.stats().tiers["dram"].evicted_blocks == 0


def test_second_touch_keeps_out_what_was_used_once(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=32, nvme={"admission": "second-touch"}) as rig:
        space, hashes = rig.space(), random_hashes(8, 4)
        assert save(rig.store, space, hashes) == [OK] * 8
        assert load(rig.store, space, rows(hashes, [0, 1, 2])) == [OK] * 3
        assert save(rig.store, space, random_hashes(8, 5)) == [OK] * 8
        expected = [position in {0, 1, 2} for position in range(8)]
        assert in_tier(TierKind.NVME, masks(rig.store, space, hashes)) == expected


# The order of eviction.


EVERYTHING = np.concatenate([chain_hashes(number, 7, common=2) for number in range(4)])
histories = st.lists(
    st.tuples(
        st.sampled_from(["save", "save", "save", "touch", "load", "remove", "lease", "release"]),
        st.integers(0, 3),
        st.integers(0, 4),
        st.integers(1, 7),
    ),
    max_size=25,
)


@given(histories)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_tier_holds_exactly_what_the_lru_model_says(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, int, int, int]]
) -> None:
    with Rig(tmp_path_factory.mktemp("lru"), dram_blocks=6, slab_blocks=6) as rig:
        space, model = rig.space(), LruModel(6)
        leases = []
        for kind, chain, start, length in history:
            hashes = rows(chain_hashes(chain, 7, common=2), slice(start, start + length))
            keys = keys_of(space, hashes)
            if kind == "save":
                # A chain longer than what is not leased would have to push its own head out.
                room = model.capacity - len({key for _, held in leases for key in held} - set(keys))
                hashes, keys = rows(hashes, slice(room)), keys[:room]
                statuses = save(rig.store, space, hashes)
                assert [status == OK for status in statuses] == model.save(keys)
            elif kind == "touch":
                rig.store.touch(space, hashes)
                model.touch(keys)
            elif kind == "load":
                statuses = load(rig.store, space, hashes)
                assert [status == OK for status in statuses] == [key in model for key in keys]
                model.touch(keys)
            elif kind == "remove" and not leases:
                assert rig.store.remove(space, hashes) == model.remove(keys)
            elif kind == "lease":
                lease = rig.store.lease([(space, hashes)], 10.0)
                held = model.pin(keys)
                assert lease.held[0].tolist() == [key in set(held) for key in keys]
                leases.append((lease, held))
            elif leases:
                lease, held = leases.pop()
                assert lease.release()
                model.unpin(held)
            found = masks(rig.store, space, EVERYTHING)
            expected = [key in model for key in keys_of(space, EVERYTHING)]
            assert [mask != 0 for mask in found] == expected, (
                f"after {kind} {chain}[{start}:{start + length}]"
            )
        for lease, _ in leases:
            lease.release()
        assert rig.store.stats().tiers["dram"].evicted_blocks == model.evicted
        rig.settled()


def test_a_chain_loses_its_tail_before_its_head(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8) as rig:
        space, chain = rig.space(), chain_hashes(1, 6)
        save(rig.store, space, chain)
        for extra, expected in ((2, 6), (1, 5), (2, 3), (3, 0)):
            save(rig.store, space, random_hashes(extra, 100 + expected))
            assert rig.store.match(space, chain).length == expected
            present = [mask != 0 for mask in masks(rig.store, space, chain)]
            assert present == [True] * expected + [False] * (6 - expected)


def test_a_chain_longer_than_the_store_keeps_its_head(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8) as rig:
        space, chain = rig.space(), chain_hashes(1, 20)
        assert save(rig.store, space, chain) == [OK] * 8 + [BlockStatus.DROPPED] * 12
        assert rig.store.match(space, chain).length == 8


@pytest.mark.parametrize(
    ("eviction", "survivors"), [("lru", [0, 1]), ("lru-in-order", [4, 5]), ("fifo", [4, 5])]
)
def test_other_orders_of_eviction(tmp_path: Path, eviction: str, survivors: list[int]) -> None:
    with Rig(tmp_path, dram_blocks=6, slab_blocks=6, eviction=eviction) as rig:
        space, chain = rig.space(), chain_hashes(1, 6)
        for position in range(6):
            save(rig.store, space, rows(chain, [position]))
        rig.store.touch(space, chain)
        save(rig.store, space, random_hashes(4, 9))
        found = [position for position, mask in enumerate(masks(rig.store, space, chain)) if mask]
        assert found == survivors


# Block sizes share one capacity.


def test_two_block_sizes_share_the_capacity_slab_by_slab(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=32, slab_blocks=8) as rig:
        small = rig.space(model="small")
        large = rig.store.open(make_spec(4 * 4096, model="large"))
        assert save(rig.store, small, random_hashes(32, 1)) == [OK] * 32
        # All of it is the small blocks'; the large ones take slab after slab.
        for seed in range(2, 10):
            assert save(rig.store, large, random_hashes(2, seed)) == [OK] * 2
            rig.check_capacities()
        assert load(rig.store, large, random_hashes(2, 9)) == [OK] * 2
        # And back again.
        for seed in range(20, 30):
            assert save(rig.store, small, random_hashes(8, seed)) == [OK] * 8
            rig.check_capacities()
        assert load(rig.store, small, random_hashes(8, 29)) == [OK] * 8
        rig.settled()


def test_a_leased_block_keeps_its_slab(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=16, slab_blocks=8) as rig:
        small, large = rig.space(model="small"), rig.store.open(make_spec(4 * 4096, model="large"))
        hashes = random_hashes(16, 1)
        save(rig.store, small, hashes)
        with rig.store.lease([(small, rows(hashes, [0, 15]))], 10.0):
            statuses = save(rig.store, large, random_hashes(2, 2))
            assert set(statuses) <= {OK, BlockStatus.DROPPED}
            assert load(rig.store, small, rows(hashes, [0, 15])) == [OK] * 2
        assert save(rig.store, large, random_hashes(2, 2)) == [OK] * 2
        rig.settled()


def test_block_sizes_move_between_slabs_of_nvme_too(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=16, nvme_blocks=32, slab_blocks=8) as rig:
        small, large = rig.space(model="small"), rig.store.open(make_spec(4 * 4096, model="large"))
        for seed in range(6):
            assert save(rig.store, small, random_hashes(8, seed)) == [OK] * 8
        for seed in range(10, 20):
            assert save(rig.store, large, random_hashes(2, seed)) == [OK] * 2
            rig.check_capacities()
        newest = np.concatenate([random_hashes(2, seed) for seed in range(16, 20)])
        assert load(rig.store, large, newest) == [OK] * 8
        rig.settled()


# Full queues and full media.


def test_a_full_save_queue_drops_the_rest_at_once(tmp_path: Path) -> None:
    with Rig(
        tmp_path, dram_blocks=8, nvme_blocks=64, save_queue_blocks=16, nvme={"admission": "on-evict"}
    ) as rig:
        space = rig.space()
        save(rig.store, space, random_hashes(8, 1))
        assert rig.nvme is not None
        rig.nvme.plan.fail_always("write", FaultKind.STALL)
        first = submit_save(
            rig.store, space, random_hashes(8, 2), timeout_s=TIMEOUT_S
        )  # evicts, so it stalls
        assert rig.nvme.gate.wait_held()
        second = submit_save(rig.store, space, random_hashes(12, 3), timeout_s=TIMEOUT_S)
        assert second.status.tolist() == [BlockStatus.PENDING] * 8 + [BlockStatus.DROPPED] * 4
        third = submit_save(rig.store, space, random_hashes(3, 4))
        assert third.done()
        assert third.status.tolist() == [BlockStatus.DROPPED] * 3
        assert rig.store.stats().save_queue_blocks == 16
        rig.nvme.plan.heal()
        while not (first.done() and second.done()):
            rig.nvme.gate.release()
            first.wait(0.01)
        assert statuses_of(first) == [OK] * 8
        assert statuses_of(second)[:8] == [OK] * 8
        assert rig.store.stats().dropped_blocks == 7
        rig.settled()


def test_a_byte_bound_of_the_save_queue_holds_too(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, save_queue_bytes=3 * 4096) as rig:
        space = rig.space()
        statuses = save(rig.store, space, random_hashes(8, 1))
        assert statuses == [OK] * 3 + [BlockStatus.DROPPED] * 5


@pytest.mark.parametrize("kind", [FaultKind.NO_SPACE, FaultKind.IO_ERROR, FaultKind.REFUSE])
def test_a_tier_that_refuses_writes_costs_no_save_and_heals(tmp_path: Path, kind: FaultKind) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=32) as rig:
        space, first = rig.space(), random_hashes(8, 1)
        save(rig.store, space, first)
        assert rig.store.flush(TIMEOUT_S)
        assert rig.nvme is not None
        rig.nvme.plan.fail_always("allocate" if kind is FaultKind.REFUSE else "write", kind)
        for seed in range(2, 8):
            assert save(rig.store, space, random_hashes(8, seed)) == [OK] * 8
            rig.check_capacities()
        assert load(rig.store, space, random_hashes(8, 7)) == [OK] * 8
        if kind is not FaultKind.REFUSE:  # the store cannot know a refusal from a full tier, so it evicted
            assert load(rig.store, space, first) == [OK] * 8, "what is below stays readable"
        rig.settled()
        rig.nvme.plan.heal()
        burst = random_hashes(24, 9)
        for at in range(0, 24, 8):
            assert save(rig.store, space, rows(burst, slice(at, at + 8))) == [OK] * 8
        assert rig.store.match(space, burst).length == 24
        rig.settled()


def test_an_unhealthy_tier_is_not_written(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=32) as rig:
        space = rig.space()
        assert rig.nvme is not None
        rig.nvme.unhealthy = True
        for seed in range(4):
            assert save(rig.store, space, random_hashes(8, seed)) == [OK] * 8
        stats = rig.store.stats()
        assert not stats.tiers["nvme"].healthy
        assert stats.tiers["nvme"].written_blocks == 0
        rig.nvme.unhealthy = False
        save(rig.store, space, random_hashes(8, 9))
        assert rig.store.stats().tiers["nvme"].written_blocks == 8


def test_one_bad_write_of_a_batch_loses_one_block(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=32) as rig:
        space, hashes = rig.space(), random_hashes(8, 1)
        save(rig.store, space, hashes)
        assert rig.nvme is not None
        rig.nvme.plan.fail_next("write", FaultKind.IO_ERROR, blocks=[2])
        assert save(rig.store, space, random_hashes(8, 2)) == [OK] * 8
        assert sorted(load(rig.store, space, hashes)) == [OK] * 7 + [MISS]
        rig.settled()
        assert rig.store.stats().tiers["nvme"].used_bytes <= 15 * 4096


def test_few_slabs_for_several_sizes_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Rig(tmp_path, dram_blocks=256, nvme_blocks=32, slab_blocks=8) as rig:
        rig.space()
        rig.store.open(make_spec(4096, group="of the same size"))
        assert "different sizes" not in caplog.text
        rig.store.open(make_spec(8192, group="of another size"))
        (line,) = [
            record.getMessage() for record in caplog.records if "different sizes" in record.getMessage()
        ]
        assert line.startswith("nvme: 4 slabs of 32768 bytes for 2 different sizes of block")
