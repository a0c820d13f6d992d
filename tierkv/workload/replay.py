"""Replays a workload through a store, as an engine would use it, with real bytes.

Each request is matched, its prefix loaded into a paged buffer, every loaded byte checked, and all its blocks
saved from that buffer. Every job is waited for before the next step, so the store's order of use, and with it
the hit rate, is that of one engine that serves one request after the other.

Thread safety: a Replayer belongs to one thread. It owns the buffer and the pool that makes and checks
payloads; the store stays the caller's.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tierkv._native import CopyPool
from tierkv.errors import ArgumentError, StorageError
from tierkv.fragments import Fragments
from tierkv.keys import Keyspace, KeyspaceSpec
from tierkv.memory import DEFAULT_SLAB_BYTES, slot_bytes_for
from tierkv.tiers.dfs import UNLIMITED_BYTES
from tierkv.types import BlockStatus, HashArray, Int64Array, TierKind, UInt8Array
from tierkv.workload.payload import BytePool, hashes_of, seeds_of
from tierkv.workload.result import ReplayResult, Series, TierResult, latency, rate_gb_s
from tierkv.workload.traces import Request

if TYPE_CHECKING:
    from tierkv.jobs import Job
    from tierkv.store import Store

_TIER_NAMES = {kind.name.lower(): int(kind) for kind in (TierKind.DRAM, TierKind.NVME, TierKind.DFS)}
_POISON = 0xA5
_POISON_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How to replay."""

    verify: bool = True
    """Check every byte that was loaded."""
    speed_up: float = 0.0
    """0: one request after the other; 1: at the trace's times; 10: ten times as fast."""
    samples: int = 200
    """Points of the time series."""
    layers: int = 4
    """Pieces that a block is scattered over in the engine's buffer."""
    threads: int = 2
    """Threads that make and check payloads."""
    timeout_s: float = 120.0
    """How long one job may take until the replay gives up."""
    slab_bytes: int = DEFAULT_SLAB_BYTES
    """The tiers' slab size, to tell a capacity in blocks."""

    def validate(self, block_bytes: int) -> None:
        """Raises ArgumentError that names the option that is out of range."""
        if self.speed_up < 0:
            raise ArgumentError(f"speed-up is {self.speed_up}: it must be 0 (as fast as possible) or more")
        if self.samples < 1:
            raise ArgumentError(f"samples is {self.samples}: it must be 1 or more")
        if self.layers < 1 or block_bytes % self.layers:
            raise ArgumentError(
                f"layers is {self.layers}: it must divide the block's {block_bytes} bytes without remainder"
            )


def replay_spec(
    workload: str, block_bytes: int, block_tokens: int = 512, layers: int = 4, hash_seed: str = "0"
) -> KeyspaceSpec:
    """The keyspace of a replay: `workload` names the trace, whose ids mean nothing in another trace."""
    return KeyspaceSpec(
        model="tierkv-replay", revision=workload, kv_dtype="uint8", block_tokens=block_tokens,
        part_bytes=(block_bytes,), layout=f"{layers}-layers", group="all", pipeline_stage="0/1",
        hash_algorithm="splitmix64", hash_seed=hash_seed,
    )  # fmt: skip


class PagedBuffer:
    """An engine's paged cache: `layers` arrays of `slots` pieces. Requests get slots in scattered order.

    The slots a request gets move on with every request, so that bytes an earlier one left behind do not look
    like a load that worked.
    """

    def __init__(self, slots: int, block_bytes: int, layers: int) -> None:
        self.piece_bytes = block_bytes // layers
        self._layers = np.empty((layers, slots, self.piece_bytes), np.uint8)
        self._order = np.random.default_rng(0).permutation(slots).astype(np.int64)
        self._first = 0

    def take(self, count: int) -> Fragments:
        """Fragments of `count` slots, until the next call."""
        self._first = (self._first + count // 2 + 1) % len(self._order)
        ids = np.take(self._order, np.arange(self._first, self._first + count), mode="wrap")
        return Fragments.from_arrays(list(self._layers), ids)

    def pieces(self, fragments: Fragments) -> tuple[Int64Array, Int64Array]:
        """((n * layers,) addresses, lengths) of the fragments' blocks, block by block."""
        addresses = fragments.bases[None, :] + fragments.block_ids[:, None] * fragments.strides[None, :]
        lengths = np.broadcast_to(fragments.lengths[None, :], addresses.shape)
        return np.ascontiguousarray(addresses.reshape(-1)), np.ascontiguousarray(lengths.reshape(-1))

    def poison(self, fragments: Fragments) -> None:
        """Spoils both ends of every piece, so that a piece nobody wrote is told from one that was loaded."""
        self._layers[:, fragments.block_ids, :_POISON_BYTES] = _POISON
        self._layers[:, fragments.block_ids, -_POISON_BYTES:] = _POISON


class Replayer:
    """Replays requests through `store` under `space`. Use as a context manager, or call close()."""

    def __init__(
        self,
        store: Store,
        space: Keyspace,
        options: ReplayOptions | None = None,
        pool: BytePool | None = None,
    ) -> None:
        self._options = options or ReplayOptions()
        self._options.validate(space.block_bytes)
        self._store = store
        self._space = space
        self._own_pool = CopyPool(self._options.threads) if pool is None else None
        self._pool: BytePool = self._own_pool if self._own_pool is not None else pool  # type: ignore[assignment]
        self._stop = threading.Event()

    def __enter__(self) -> Replayer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads that make payloads. Idempotent."""
        if self._own_pool is not None:
            self._own_pool.close()

    def stop(self) -> None:
        """Makes a run on another thread end after its current request."""
        self._stop.set()

    def run(
        self,
        requests: Sequence[Request],
        *,
        trace: str,
        config: dict[str, Any] | None = None,
        on_request: Callable[[Progress], None] | None = None,
    ) -> ReplayResult:
        """Replays all requests and returns what was found.

        `on_request` is called after each. Raises StorageError when a job is not finished within timeout_s.
        """
        run = _Run(self._store, self._space, self._options, self._pool, requests)
        started_s = time.perf_counter()
        for number, request in enumerate(requests, 1):
            self._pace(request, requests[0], started_s)
            if self._stop.is_set():
                break
            run.serve(request)
            run.sample(number, time.perf_counter() - started_s)
            if on_request is not None:
                on_request(Progress(number, run.blocks, sum(run.hits.values()), dict(run.hits)))
        return run.result(trace, time.perf_counter() - started_s, dict(config or {}))

    def _pace(self, request: Request, first: Request, started_s: float) -> None:
        if self._options.speed_up > 0:
            due_s = (request.timestamp_ms - first.timestamp_ms) / 1000 / self._options.speed_up
            self._stop.wait(max(0.0, started_s + due_s - time.perf_counter()))


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a replay is."""

    requests: int
    blocks: int
    hit_blocks: int
    hits: dict[str, int]


class _Run:
    """One replay's counters and buffer."""

    def __init__(
        self,
        store: Store,
        space: Keyspace,
        options: ReplayOptions,
        pool: BytePool,
        requests: Sequence[Request],
    ) -> None:
        self._store, self._space, self._options, self._pool = store, space, options, pool
        longest = max((len(request.hash_ids) for request in requests), default=0)
        slots = longest + longest // 4 + 16
        self._buffer = PagedBuffer(slots, space.block_bytes, options.layers)
        self._sample_every = max(1, len(requests) // options.samples)
        self._request_count = len(requests)
        self._unique = _unique_ids(requests)
        self._start = store.stats()
        self._series = Series()
        self.blocks = 0
        self.hits = dict.fromkeys(_TIER_NAMES, 0)
        self._served = self._wrong = self._verified = 0
        self._failed_loads: Counter[str] = Counter()
        self._failed_saves: Counter[str] = Counter()
        self._match_s: list[float] = []
        self._load_s: list[float] = []
        self._save_s: list[float] = []
        self._payload_s = 0.0

    def serve(self, request: Request) -> None:
        self._served += 1
        count = len(request.hash_ids)
        if count == 0:
            return
        self.blocks += count
        hashes = hashes_of(request.hash_ids)
        seeds = seeds_of(hashes, self._options.layers)
        fragments = self._buffer.take(count)
        begun_s = time.perf_counter()
        match = self._store.match(self._space, hashes)
        self._match_s.append(time.perf_counter() - begun_s)
        good = np.zeros(count, np.bool_)
        if match.length:
            good[: match.length] = self._load(hashes, seeds, fragments, match.length)
            usable = count if good.all() else int(np.argmin(good))
            for name, kind in _TIER_NAMES.items():
                self.hits[name] += int(np.count_nonzero(match.tiers[:usable] == kind))
        self._save(hashes, seeds, fragments, good)

    def _load(self, hashes: HashArray, seeds: Any, fragments: Fragments, length: int) -> Any:
        """Loads the first `length` blocks: (length,) bool, True where the right bytes arrived."""
        into = fragments.select(slice(0, length))
        if self._options.verify:
            begun_s = time.perf_counter()
            self._buffer.poison(into)
            self._payload_s += time.perf_counter() - begun_s
        begun_s = time.perf_counter()
        status = self._finished(self._store.load(self._space, hashes[:length], into), "load")
        self._load_s.append(time.perf_counter() - begun_s)
        ok = status == BlockStatus.OK
        self._failed_loads.update(_reasons(status))
        if not self._options.verify:
            return ok
        begun_s = time.perf_counter()
        addresses, lengths = self._buffer.pieces(into.select(ok))
        wrong_pieces = self._pool.differ(
            addresses, lengths, np.ascontiguousarray(seeds[:length][ok].reshape(-1))
        )
        wrong = np.atleast_1d(wrong_pieces.reshape(-1, self._options.layers).any(axis=1))
        self._payload_s += time.perf_counter() - begun_s
        self._verified += len(wrong)
        self._wrong += int(np.count_nonzero(wrong))
        right = ok.copy()
        right[ok] = ~wrong
        return right

    def _save(self, hashes: HashArray, seeds: Any, fragments: Fragments, good: Any) -> None:
        """Saves all blocks. Those that were not loaded get their bytes made first, known to the store or not:
        it may forget any of them until it is asked to save them."""
        begun_s = time.perf_counter()
        addresses, lengths = self._buffer.pieces(fragments.select(~good))
        self._pool.fill(addresses, lengths, np.ascontiguousarray(seeds[~good].reshape(-1)))
        made_s = time.perf_counter()
        self._payload_s += made_s - begun_s
        status = self._finished(self._store.save(self._space, hashes, fragments), "save")
        self._save_s.append(time.perf_counter() - made_s)
        self._failed_saves.update(_reasons(status))

    def _finished(self, job: Job, what: str) -> UInt8Array:
        if not job.wait(self._options.timeout_s):
            raise StorageError(
                f"a {what} of {job.count} blocks did not finish within {self._options.timeout_s:g} s: the "
                f"store is stuck, or the medium is far too slow for this replay"
            )
        return job.status

    def sample(self, number: int, seconds: float) -> None:
        if number % self._sample_every and number != self._request_count:
            return
        series = self._series
        series.request.append(number)
        series.seconds.append(round(seconds, 6))
        series.referenced_blocks.append(self.blocks)
        series.prefix_hit_rate.append(sum(self.hits.values()) / self.blocks if self.blocks else None)
        for name, tier in self._store.stats().tiers.items():
            if name in _TIER_NAMES:
                series.hits.setdefault(name, []).append(self.hits[name])
                series.blocks.setdefault(name, []).append(tier.blocks)

    def result(self, trace: str, seconds: float, config: dict[str, Any]) -> ReplayResult:
        self._store.wait_idle(self._options.timeout_s)  # what is written through counts too
        stats = self._store.stats()
        tiers = {}
        for name, tier in stats.tiers.items():
            before = self._start.tiers[name]
            capacity = tier.capacity_bytes
            tiers[name] = TierResult(
                hit_blocks=self.hits.get(name, 0),
                read_bytes=tier.read_bytes - before.read_bytes,
                read_gb_s=rate_gb_s(tier.read_bytes - before.read_bytes, tier.read_s - before.read_s),
                written_blocks=tier.written_blocks - before.written_blocks,
                written_bytes=tier.written_bytes - before.written_bytes,
                write_gb_s=rate_gb_s(
                    tier.written_bytes - before.written_bytes, tier.write_s - before.write_s
                ),
                evicted_blocks=tier.evicted_blocks - before.evicted_blocks,
                capacity_blocks=self._slots_in(capacity) if capacity < UNLIMITED_BYTES else None,
                blocks=tier.blocks,
                blocks_at_start=before.blocks,
                healthy=tier.healthy,
            )
        hit_blocks = sum(self.hits.values())
        loaded_bytes = hit_blocks * self._space.block_bytes
        return ReplayResult(
            trace=trace,
            requests=self._served,
            blocks=self.blocks,
            unique_blocks=self._unique,
            block_bytes=self._space.block_bytes,
            hit_blocks=hit_blocks,
            prefix_hit_rate=hit_blocks / self.blocks if self.blocks else None,
            hits=dict(self.hits),
            tiers=tiers,
            loaded_bytes=loaded_bytes,
            saved_blocks=stats.saved_blocks - self._start.saved_blocks,
            wrong_blocks=self._wrong if self._options.verify else None,
            verified_blocks=self._verified,
            failed_loads=dict(self._failed_loads),
            failed_saves=dict(self._failed_saves),
            dropped_saves=self._failed_saves[BlockStatus.DROPPED.name.lower()],
            match_ms=latency(self._match_s),
            load_ms=latency(self._load_s),
            save_ms=latency(self._save_s),
            load_gb_s=rate_gb_s(loaded_bytes, sum(self._load_s)),
            seconds=seconds,
            match_s=sum(self._match_s),
            load_s=sum(self._load_s),
            save_s=sum(self._save_s),
            payload_s=self._payload_s,
            series=self._series,
            config=config,
        )

    def _slots_in(self, capacity_bytes: int) -> int:
        """Blocks that fit into a capacity which is cut into slabs."""
        slot_bytes = slot_bytes_for(self._space.block_bytes)
        slabs, rest_bytes = divmod(capacity_bytes, self._options.slab_bytes)
        return slabs * (self._options.slab_bytes // slot_bytes) + rest_bytes // slot_bytes


def _reasons(status: UInt8Array) -> dict[str, int]:
    """How many blocks failed, by the reason's name."""
    if not status.any():
        return {}
    values, counts = np.unique(status[status != BlockStatus.OK], return_counts=True)
    return {BlockStatus(int(value)).name.lower(): int(n) for value, n in zip(values, counts, strict=True)}


def _unique_ids(requests: Sequence[Request]) -> int:
    ids = [request.hash_ids for request in requests]
    return len(np.unique(np.concatenate(ids))) if ids else 0
