"""What a store counts: latencies, hits of loads that others copy, drops with their reason, matches."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observe_harness import BLOCK_BYTES, SLAB_BYTES, TIMEOUT_S, eventually, some_blocks, some_hashes

from tierkv.agent.statistics import AgentStats
from tierkv.clock import VirtualClock
from tierkv.config import DfsConfig, DramConfig, NvmeConfig, StoreConfig
from tierkv.fragments import Fragments
from tierkv.keys import Keyspace
from tierkv.store import LATENCY_BOUNDS_S, Store, StoreStats
from tierkv.store.statistics import OPERATIONS, Counters
from tierkv.testing.buffers import make_spec
from tierkv.types import BlockStatus, HashArray, TierKind


def small_store(
    directory: Path,
    *,
    dram_blocks: int = 32,
    nvme_blocks: int = 0,
    dfs: bool = False,
    clock: VirtualClock | None = None,
) -> Store:
    dram = DramConfig(
        capacity_bytes=dram_blocks * BLOCK_BYTES, slab_bytes=SLAB_BYTES, huge_pages="off", lock_memory="off",
        first_touch="never", free_ahead=0.0,
    )  # fmt: skip
    nvme = NvmeConfig(
        directory=str(directory / "nvme"), capacity_bytes=max(8, nvme_blocks) * BLOCK_BYTES, slab_bytes=SLAB_BYTES,
        sync="process",
    )  # fmt: skip
    (directory / "dfs").mkdir(exist_ok=True)
    shared = DfsConfig(directory=str(directory / "dfs"), sync=False, admission="on-evict")
    return Store(
        StoreConfig(
            dram=dram,
            nvme=nvme if nvme_blocks else None,
            dfs=shared if dfs else None,
            staging_bytes=8 * BLOCK_BYTES,
        ),
        clock=clock,
    )


def save(store: Store, space: Keyspace, hashes: HashArray) -> None:
    job = store.save(space, hashes, some_blocks(len(hashes))[1])
    assert job.wait(TIMEOUT_S)
    assert job.ok()


def operations(store: Store) -> dict[str, int]:
    """How often each was observed. A job is counted a moment after whoever waits for it goes on."""
    return {name: latency.count for name, latency in store.stats().latency.items()}


@given(took_s=st.floats(0, 1000))
def test_a_latency_falls_into_the_first_bucket_whose_bound_it_does_not_exceed(took_s: float) -> None:
    counters = Counters()
    counters.begin(TierKind.NVME, "read")
    since_s = time.perf_counter() - took_s
    counters.end(TierKind.NVME, "read", since_s)
    took = counters.tier(TierKind.NVME, capacity_bytes=0, used_bytes=0, blocks=0, healthy=True).read_latency
    assert took.count == 1
    bucket = took.counts.index(1)
    assert took_s <= took.sum_s
    assert bucket == len(LATENCY_BOUNDS_S) or took.sum_s <= LATENCY_BOUNDS_S[bucket]
    assert bucket == 0 or took.sum_s > LATENCY_BOUNDS_S[bucket - 1]


def test_bounds_ascend_and_every_operation_has_a_histogram() -> None:
    assert list(LATENCY_BOUNDS_S) == sorted(set(LATENCY_BOUNDS_S))
    assert set(Counters().latency()) == set(OPERATIONS)


def test_transfers_that_overlap_are_busy_once_and_timed_each() -> None:
    counters = Counters()
    first = counters.begin(TierKind.DFS, "write")
    second = counters.begin(TierKind.DFS, "write")
    counters.end(TierKind.DFS, "write", first)
    counters.end(TierKind.DFS, "write", second)
    tier = counters.tier(TierKind.DFS, capacity_bytes=0, used_bytes=0, blocks=0, healthy=True)
    assert tier.write_latency.count == 2
    assert tier.write_s <= tier.write_latency.sum_s
    assert tier.read_latency.count == 0


def test_each_operation_is_counted_once_a_call_or_job(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        space, hashes = store.open(make_spec(part_bytes=(BLOCK_BYTES,))), some_hashes(8)
        save(store, space, hashes)
        save(store, space, hashes)  # known already, and a save all the same
        for _ in range(3):
            store.match(space, hashes)
        store.match(space, some_hashes(5, seed=7))
        store.lookup([(space, hashes), (space, hashes)])
        memory, blocks = some_blocks(8)
        assert store.load(space, hashes, blocks).wait(TIMEOUT_S)
        with store.lease([(space, hashes)], 60.0) as lease:
            assert store.stage(lease).wait(TIMEOUT_S)
        expected = {"match": 4, "lookup": 1, "load": 1, "stage": 1, "save": 2}
        eventually(lambda: operations(store) == expected, "every operation is counted")
        stats = store.stats()
        assert (stats.match_requested_blocks, stats.match_found_blocks) == (29, 24)
        assert stats.tiers["dram"].hit_blocks == 8
        assert stats.tiers["dram"].read_latency.count == 1
        assert stats.tiers["dram"].write_latency.count == 1
        assert stats.load_queue_blocks == 0
        assert len(memory) == 8


def test_a_load_that_the_caller_copies_counts_as_a_load(tmp_path: Path) -> None:
    with small_store(tmp_path, dram_blocks=8, nvme_blocks=64) as store:
        space, hashes = store.open(make_spec(part_bytes=(BLOCK_BYTES,))), some_hashes(16)
        save(store, space, hashes)
        asked = np.concatenate([hashes[:4], some_hashes(2, seed=5)])
        with store.lease([(space, asked)], 60.0) as lease:
            job = store.stage(lease, load_part=0, make_room=True)
            assert job.wait(TIMEOUT_S)
            assert job.status.tolist() == [BlockStatus.OK] * 4 + [BlockStatus.MISS] * 2
        eventually(lambda: operations(store)["load"] == 1, "the load is counted")
        stats = store.stats()
        assert sum(tier.hit_blocks for tier in stats.tiers.values()) == 4
        assert stats.load_misses == {"miss": 2}
        assert stats.latency["stage"].count == 0
        assert stats.tiers["dram"].read_bytes == stats.tiers["dram"].hit_blocks * BLOCK_BYTES
        with store.lease([(space, hashes[:4])], 60.0) as lease:
            assert store.stage(lease, make_room=True).wait(TIMEOUT_S)
        eventually(lambda: operations(store)["stage"] == 1, "the staging is counted")
        again = store.stats()
        assert sum(tier.hit_blocks for tier in again.tiers.values()) == 4, "a staging alone hits nothing"
        assert again.latency["load"].count == 1


def test_a_save_that_the_caller_copies_lasts_until_its_commit(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        space = store.open(make_spec(part_bytes=(BLOCK_BYTES,)))
        first, second = store.reserve(space, some_hashes(2)), store.reserve(space, some_hashes(2, seed=3))
        assert first.job.wait(TIMEOUT_S)
        assert second.job.wait(TIMEOUT_S)
        assert store.stats().latency["save"].count == 0
        first.commit()
        second.abort()
        assert store.stats().latency["save"].count == 1


def test_drops_have_their_reason(tmp_path: Path) -> None:
    clock = VirtualClock()
    with small_store(tmp_path, dram_blocks=8, clock=clock) as store:
        whole = store.open(make_spec(part_bytes=(BLOCK_BYTES,)))
        assert store.save(whole, some_hashes(12), some_blocks(12)[1]).wait(TIMEOUT_S)
        assert store.stats().drops == {"no_room": 4}
        store.clear(whole)
        halves = store.open(make_spec(part_bytes=(BLOCK_BYTES // 2, BLOCK_BYTES // 2)))
        memory = np.zeros((3, BLOCK_BYTES // 2), np.uint8)
        assert store.save(halves, some_hashes(3, seed=2), Fragments.from_blocks(memory)).wait(TIMEOUT_S)
        clock.advance(1000.0)
        stats = store.stats()
        assert stats.drops == {"no_room": 4, "incomplete": 3}
        assert stats.dropped_blocks == 7


def test_blocks_that_a_full_queue_refuses_are_counted_there(tmp_path: Path) -> None:
    dram = DramConfig(
        capacity_bytes=32 * BLOCK_BYTES, slab_bytes=SLAB_BYTES, huge_pages="off", lock_memory="off"
    )
    with Store(StoreConfig(dram=dram, save_queue_blocks=5, staging_bytes=8 * BLOCK_BYTES)) as store:
        space = store.open(make_spec(part_bytes=(BLOCK_BYTES,)))
        assert store.save(space, some_hashes(9), some_blocks(9)[1]).wait(TIMEOUT_S)
        assert store.stats().drops == {"queue_full": 4}


def test_reads_that_move_blocks_further_down_count_as_reads(tmp_path: Path) -> None:
    with small_store(tmp_path, dram_blocks=8, nvme_blocks=16, dfs=True) as store:
        space = store.open(make_spec(part_bytes=(BLOCK_BYTES,)))
        for seed in range(6):
            save(store, space, some_hashes(8, seed=seed))
        stats = store.stats()
        assert stats.tiers["dfs"].written_blocks > 0, (
            "the NVMe tier has not overflowed: the test shows nothing"
        )
        assert stats.tiers["nvme"].hit_blocks == 0
        assert stats.tiers["nvme"].read_bytes == stats.tiers["dfs"].written_bytes
        assert stats.tiers["nvme"].read_latency.count > 0
        assert stats.tiers["dfs"].write_latency.count > 0


@pytest.mark.parametrize("kind", [StoreStats, AgentStats])
def test_statistics_of_an_older_agent_are_understood(tmp_path: Path, kind: type[StoreStats]) -> None:
    with small_store(tmp_path) as store:
        fields = msgspec.to_builtins(store.stats())
    for name in ("load_queue_blocks", "drops", "match_requested_blocks", "match_found_blocks", "latency"):
        del fields[name]
    for tier in fields["tiers"].values():
        del tier["read_latency"], tier["write_latency"]
    fields["from_a_newer_one"] = [1, 2]
    stats = msgspec.convert(fields, kind)
    assert stats.drops == {}
    assert stats.tiers["dram"].read_latency.count == 0
