"""Replay: counts exactly what an independent LRU counts, and notices every wrong byte.

Most tests run on a dictionary in the store's place, which can be told to fail; the last ones on a real store.
"""

from __future__ import annotations

import ctypes
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierkv.config import DramConfig, NvmeConfig, StoreConfig
from tierkv.errors import ArgumentError, StorageError
from tierkv.fragments import Fragments
from tierkv.jobs import Job, finished_job
from tierkv.keys import Keyspace
from tierkv.memory import capacity_for
from tierkv.store import Match, Store, StoreStats, TierStats
from tierkv.types import BlockStatus, HashArray, TierKind
from tierkv.workload.replay import Progress, Replayer, ReplayOptions, replay_spec
from tierkv.workload.result import ReplayResult
from tierkv.workload.sessions import SessionSpec, generate_sessions
from tierkv.workload.traces import Request, read_trace

REAL_TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
BLOCK_BYTES = 64


def requests_of(chains: Sequence[Sequence[int]]) -> list[Request]:
    return [
        Request(float(number), 512 * len(ids), 10, np.array(ids, np.int64))
        for number, ids in enumerate(chains)
    ]


def lru_hits(chains: Sequence[Sequence[int]], capacity: int) -> int:
    """Suffix-first LRU over all references; hits are counted up to each request's first miss."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for ids in chains:
        for block in ids:
            if block not in held:
                break
            hits += 1
        for block in reversed(ids):
            held[block] = None
            held.move_to_end(block)
            if len(held) > capacity:
                held.popitem(last=False)
    return hits


@st.composite
def workloads(draw: st.DrawFn) -> list[list[int]]:
    """Chains out of a growing tree: each request goes on from a known prefix, or starts anew."""
    chains: list[list[int]] = []
    fresh = 0
    for _ in range(draw(st.integers(1, 25))):
        prefix: list[int] = []
        if chains and draw(st.booleans()):
            parent = draw(st.sampled_from(chains))
            prefix = parent[: draw(st.integers(0, len(parent)))]
        more = draw(st.integers(0, 8))
        chains.append([*prefix, *range(fresh, fresh + more)])
        fresh += more
    return chains


class DictStore:
    """A store without limits in a dictionary. `broken` maps a load's number to what goes wrong in it."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.broken: dict[int, str] = {}
        self.save_status: dict[int, BlockStatus] = {}
        self.loads = 0
        self.saves: list[int] = []

    def match(self, space: Keyspace, hashes: HashArray) -> Match:
        length = 0
        while length < len(hashes) and hashes[length].tobytes() in self.blocks:
            length += 1
        return Match(length, np.where(np.arange(length) % 2, TierKind.NVME, TierKind.DRAM).astype(np.uint8))

    def load(self, space: Keyspace, hashes: HashArray, into: Fragments) -> Job:
        what = self.broken.get(self.loads, "")
        self.loads += 1
        status = np.zeros(len(hashes), np.uint8)
        if what == "stuck":
            return Job(len(hashes))
        for position, block in enumerate(hashes):
            content = bytearray(self.blocks[block.tobytes()])
            last = position == len(hashes) - 1
            if last and what == "flipped bit":
                content[-1] ^= 0x10
            if last and what == "other block":
                content = bytearray(self.blocks[hashes[0].tobytes()])
            if last and what == "miss":
                status[position] = BlockStatus.MISS
            if last and what in ("miss", "nothing"):
                continue
            for piece, address in enumerate(addresses_of(into, position)):
                size = int(into.lengths[piece])
                ctypes.memmove(address, bytes(content[piece * size : (piece + 1) * size]), size)
        return finished_job(status)

    def save(self, space: Keyspace, hashes: HashArray, from_: Fragments) -> Job:
        self.saves.append(len(hashes))
        status = np.zeros(len(hashes), np.uint8)
        for position, block in enumerate(hashes):
            if position in self.save_status:
                status[position] = self.save_status[position]
                continue
            content = b"".join(
                ctypes.string_at(address, int(size))
                for address, size in zip(addresses_of(from_, position), from_.lengths, strict=True)
            )
            known = self.blocks.setdefault(block.tobytes(), content)
            assert known == content, "a block was saved with other bytes than before"
        return finished_job(status)

    def wait_idle(self, timeout_s: float = 60.0) -> bool:
        return True

    def stats(self) -> StoreStats:
        tiers = {
            name: TierStats(capacity_bytes=1 << 20, used_bytes=0, blocks=len(self.blocks))
            for name in ("dram", "nvme")
        }
        return StoreStats(
            tiers=tiers, saved_blocks=len(self.blocks), known_blocks=0, dropped_blocks=0, load_misses={},
            corrupt_blocks=0, pins=0, pending_blocks=0, leases=0, save_queue_blocks=0, write_queue_blocks=0,
            index_entries=0, index_bytes=0,
        )  # fmt: skip


def addresses_of(fragments: Fragments, position: int) -> list[int]:
    block = int(fragments.block_ids[position])
    return (fragments.bases + block * fragments.strides).tolist()


def replay(store: Any, chains: Sequence[Sequence[int]], **options: Any) -> ReplayResult:
    spec = replay_spec("test", BLOCK_BYTES, layers=options.get("layers", 4))
    space = store.open(spec) if isinstance(store, Store) else Keyspace(spec, spec.digest(), 1)
    with Replayer(store, space, ReplayOptions(**options)) as replayer:
        return replayer.run(requests_of(chains), trace="test")


@given(workloads(), st.sampled_from([1, 2, 4]))
def test_everything_known_is_hit_verified_and_saved_again_with_the_same_bytes(
    chains: list[list[int]], layers: int
) -> None:
    store = DictStore()
    result = replay(store, chains, layers=layers, samples=5)
    assert result.hit_blocks == lru_hits(chains, 1 << 30) == sum(result.hits.values())
    assert result.verified_blocks == result.hit_blocks
    assert result.wrong_blocks == 0
    assert result.requests == len(chains)
    assert result.blocks == sum(map(len, chains)) == sum(store.saves)
    assert (
        result.unique_blocks
        == len({i for ids in chains for i in ids})
        == result.saved_blocks
        == len(store.blocks)
    )
    assert result.prefix_hit_rate == (result.hit_blocks / result.blocks if result.blocks else None)
    assert result.loaded_bytes == result.hit_blocks * BLOCK_BYTES
    assert result.failed_loads == result.failed_saves == {}
    series = result.series
    assert series.request[-1] == len(chains)
    assert series.referenced_blocks[-1] == result.blocks
    assert sum(values[-1] for values in series.hits.values()) == result.hit_blocks
    assert series.prefix_hit_rate[-1] == result.prefix_hit_rate
    lengths = {len(series.request), len(series.seconds), *(len(v) for v in series.hits.values())}
    assert len(lengths) == 1


@pytest.mark.parametrize("damage", ["flipped bit", "other block", "nothing"])
@pytest.mark.parametrize("layers", [1, 4])
def test_a_block_with_wrong_bytes_is_counted_and_is_no_hit(damage: str, layers: int) -> None:
    store = DictStore()
    store.broken[1] = damage
    result = replay(store, [[1, 2, 3]] * 4, layers=layers)
    assert result.wrong_blocks == 1
    assert result.hit_blocks == 3 + 2 + 3
    assert result.verified_blocks == 9


def test_without_verification_nothing_is_claimed() -> None:
    store = DictStore()
    store.broken[0] = "nothing"
    with pytest.raises(AssertionError, match="other bytes"):  # the damage goes on into the next save
        replay(store, [[1, 2, 3]] * 2, verify=False)
    result = replay(DictStore(), [[1, 2, 3]] * 2, verify=False)
    assert result.wrong_blocks is None
    assert result.verified_blocks == 0
    assert result.hit_blocks == 3


def test_a_failed_load_ends_the_hit_and_is_counted_by_its_reason() -> None:
    store = DictStore()
    store.broken[0] = "miss"
    result = replay(store, [[1, 2, 3]] * 3)
    assert result.failed_loads == {"miss": 1}
    assert result.hit_blocks == 2 + 3
    assert result.wrong_blocks == 0
    assert result.hits == {"dram": 1 + 2, "nvme": 1 + 1, "dfs": 0}


def test_dropped_saves_are_counted() -> None:
    store = DictStore()
    store.save_status = {2: BlockStatus.DROPPED, 3: BlockStatus.NO_SPACE}
    result = replay(store, [[1, 2, 3, 4]])
    assert result.dropped_saves == 1
    assert result.failed_saves == {"dropped": 1, "no_space": 1}


def test_a_stuck_store_is_an_error_and_not_a_hang() -> None:
    store = DictStore()
    store.broken[0] = "stuck"
    with pytest.raises(StorageError, match="load of 3 blocks"):
        replay(store, [[1, 2, 3]] * 2, timeout_s=0.05)


def test_options_out_of_range_are_refused() -> None:
    for options in ({"layers": 3}, {"layers": 0}, {"speed_up": -1.0}, {"samples": 0}):
        with pytest.raises(ArgumentError):
            replay(DictStore(), [[1]], **options)


def test_nothing_to_replay_gives_a_result_without_figures() -> None:
    result = replay(DictStore(), [])
    assert (result.requests, result.blocks, result.prefix_hit_rate, result.load_gb_s) == (0, 0, None, None)
    assert result.match_ms.p50 is None
    result = replay(DictStore(), [[], []])
    assert (result.requests, result.blocks, result.prefix_hit_rate) == (2, 0, None)


def test_progress_is_told_and_a_replay_can_be_stopped() -> None:
    store = DictStore()
    spec = replay_spec("test", BLOCK_BYTES)
    told: list[Progress] = []
    with Replayer(store, Keyspace(spec, spec.digest(), 1)) as replayer:  # type: ignore[arg-type]

        def on_request(progress: Progress) -> None:
            told.append(progress)
            if progress.requests == 3:
                replayer.stop()

        result = replayer.run(requests_of([[1, 2]] * 10), trace="test", on_request=on_request)
    assert [progress.requests for progress in told] == [1, 2, 3]
    assert result.requests == 3
    assert told[-1].hit_blocks == result.hit_blocks == 4


def test_requests_wait_for_their_time_when_asked_to() -> None:
    chains = [[1], [2], [3]]  # 1 ms apart
    result = replay(DictStore(), chains, speed_up=0.02)
    assert result.seconds >= 0.1
    assert result.series.seconds == sorted(result.series.seconds)


# A real store.


def dram_only(blocks: int, **settings_: Any) -> StoreConfig:
    capacity_bytes = capacity_for(blocks, BLOCK_BYTES)
    return StoreConfig(dram=DramConfig(capacity_bytes=capacity_bytes, lock_memory="off", **settings_))


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(workloads(), st.integers(1, 60))
def test_a_store_of_dram_hits_exactly_what_an_lru_hits(chains: list[list[int]], capacity: int) -> None:
    with Store(dram_only(capacity)) as store:
        result = replay(store, chains)
        assert store.stats().pins == 0
    assert result.hit_blocks == lru_hits(chains, capacity)
    assert result.hits["dram"] == result.hit_blocks
    assert result.wrong_blocks == 0
    assert result.failed_loads == {}
    longest = max(map(len, chains))
    assert (result.dropped_saves == 0) or longest > capacity


def test_agent_sessions_through_dram_and_nvme_lose_nothing(tmp_path: Path) -> None:
    """With room for everything in NVMe, the hits are those of an unbounded cache."""
    requests = generate_sessions(SessionSpec(sessions=4, turns=6, seed=9))
    chains = [request.hash_ids.tolist() for request in requests]
    unique = len({i for ids in chains for i in ids})
    nvme = NvmeConfig(directory=str(tmp_path / "nvme"), capacity_bytes=capacity_for(unique, BLOCK_BYTES))
    config = StoreConfig(dram=dram_only(100).dram, nvme=nvme)
    with Store(config) as store:
        result = replay(store, chains)
    assert result.hit_blocks == lru_hits(chains, 1 << 30)
    assert result.hits["dram"] > 0
    assert result.hits["nvme"] > 0
    assert result.wrong_blocks == 0
    assert result.failed_loads == {}
    with Store(config) as store:
        again = replay(store, chains)
    assert again.tiers["nvme"].blocks_at_start == unique, "closing must have written all that DRAM held"
    assert again.prefix_hit_rate == 1.0
    assert again.wrong_blocks == 0


@pytest.mark.skipif(not REAL_TRACES.is_dir(), reason=f"no real traces in {REAL_TRACES}")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "rate"), [(1_000, 0.0445), (3_000, 0.0653), (10_000, 0.2116), (30_000, 0.3257)]
)
def test_the_conversation_trace_gives_the_known_rates(blocks: int, rate: float) -> None:
    chains = [
        request.hash_ids.tolist() for request in read_trace(REAL_TRACES / "mooncake_conversation.jsonl")
    ]
    with Store(dram_only(blocks)) as store:
        result = replay(store, chains)
    assert result.hit_blocks == lru_hits(chains, blocks)
    assert result.prefix_hit_rate is not None
    assert round(result.prefix_hit_rate, 4) == rate
    assert result.wrong_blocks == 0


def test_the_model_itself_counts_up_to_the_first_miss() -> None:
    assert lru_hits([[1, 2, 3], [1, 2, 3]], 2) == 2, "the tail goes first"
    assert lru_hits([[1, 2, 3], [9, 2, 3], [1, 2, 3]], 10) == 3
    assert Counter(lru_hits([[1], [2], [1]], 1) for _ in range(2)) == {0: 2}
