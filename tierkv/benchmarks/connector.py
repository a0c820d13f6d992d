"""The vLLM connector's time on the engine's thread: idle steps, decoding, and requests of 80,000 tokens.

Measured on the connector's own halves, with an engine that is no more than what they read: requests, block tables, and
a pool that counts references one block at a time, as vLLM's does. Look-ups run on their thread against a store that has
everything (or nothing), and transfers end at once, so that what is left is what the engine's thread pays.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from tierkv.adapters.vllm.counters import Counters
from tierkv.adapters.vllm.finder import Finder
from tierkv.adapters.vllm.groups import Group, Kind
from tierkv.adapters.vllm.identity import Shard
from tierkv.adapters.vllm.messages import WorkerReport
from tierkv.adapters.vllm.scheduler import ConnectorScheduler, SchedulerOptions
from tierkv.adapters.vllm.worker import ConnectorWorker
from tierkv.benchmarks.common import JOB_TIMEOUT_S, BenchOptions, Measurement, bench_space
from tierkv.errors import StorageError
from tierkv.jobs import Job, finished_job
from tierkv.keys import Keyspace
from tierkv.types import BlockStatus, BoolArray, HashArray, Int64Array, TierKind, UInt8Array

BLOCK_TOKENS = 16
PROMPT_TOKENS = 80_000
QUICK_PROMPT_TOKENS = 16_000
CHUNK_TOKENS = 8_192
DECODING = 256
WINDOW_TOKENS = 1_024
IDLE_LIMIT_US = 50.0
"""What a step with nothing to do may take."""
_CONTEXT_TOKENS = 4_000
"""What a decoding request has before."""
_GROUPS = (1, 5)


def run(options: BenchOptions) -> list[Measurement]:
    """All figures, in microseconds."""
    rounds = options.rounds or (3 if options.quick else 30)
    prompt = QUICK_PROMPT_TOKENS if options.quick else PROMPT_TOKENS
    results = []
    for count in _GROUPS:
        results += measure_steps(count, 20 * rounds)
        results += measure_prompt(count, prompt, rounds)
    return results


def groups_of(count: int) -> tuple[Group, ...]:
    """Full attention, and beside it sliding windows with the default policy."""
    window = [
        Group(index, Kind.SLIDING, BLOCK_TOKENS, WINDOW_TOKENS - 1, 0, "periodic", 2048)
        for index in range(1, count)
    ]
    return (Group(0, Kind.FULL, BLOCK_TOKENS), *window)


@dataclass(slots=True, eq=False)
class _Block:
    block_id: int
    ref_cnt: int = 1
    is_null: bool = False


class _Pool:
    """A block pool that counts references."""

    def touch(self, blocks: Sequence[_Block]) -> None:
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                raise StorageError("the benchmark's blocks are all in use")
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[_Block]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                raise StorageError("the benchmark's blocks are all in use")


class _Store:
    """Has every block, or none; transfers are done when they begin."""

    attached = True

    def __init__(self, has: bool) -> None:
        self._mask = (1 << TierKind.DRAM) * has

    def lookup(self, queries: Sequence[tuple[Keyspace, HashArray]]) -> list[UInt8Array]:
        return [np.full(len(hashes), self._mask, np.uint8) for _, hashes in queries]

    def lease(self, queries: Sequence[tuple[Keyspace, HashArray]], ttl_s: float) -> _Lease:
        return _Lease([np.ones(len(hashes), np.bool_) for _, hashes in queries])

    def stage(self, lease: Any, timeout_s: float | None = None) -> Job:
        return finished_job(np.zeros(0, np.uint8))

    def touch(self, space: Keyspace, hashes: HashArray) -> None:
        """Nothing ages here."""

    def load(self, *_: Any, **__: Any) -> Job:
        raise StorageError("the benchmark moves no bytes")

    save = load


@dataclass(slots=True, eq=False)
class _Lease:
    held: list[BoolArray]

    def extend(self, ttl_s: float) -> bool:
        return True

    def release(self) -> bool:
        return True


class _Path:
    """Moves nothing, at once."""

    def load(self, hashes: HashArray, block_ids: Int64Array, timeout_s: float) -> Job:
        return finished_job(np.full(len(hashes), BlockStatus.OK, np.uint8))

    save = load

    def renewed(self, space: Keyspace) -> _Path:
        return self


class _Request:
    """What the connector reads of a request."""

    skip_reading_prefix_cache = False
    kv_transfer_params = None
    num_in_flight_tokens = 0

    def __init__(self, name: str, tokens: int) -> None:
        self.request_id = name
        self.num_tokens = self.num_prompt_tokens = tokens
        self.num_computed_tokens = 0
        self.block_hashes: list[bytes] = []
        self.grow()

    def grow(self) -> None:
        """Names the blocks that are whole."""
        for index in range(len(self.block_hashes), self.num_tokens // BLOCK_TOKENS):
            self.block_hashes.append(hashlib.sha256(f"{self.request_id} {index}".encode()).digest())


@dataclass(slots=True, eq=False)
class _Rig:
    """The connector's halves, and the engine around them."""

    scheduler: ConnectorScheduler
    worker: ConnectorWorker
    finder: Finder
    groups: tuple[Group, ...]
    tables: dict[str, tuple[list[_Block], ...]] = field(default_factory=dict)
    blocks: int = 0

    def give(self, request: _Request, tokens: int) -> None:
        """Block tables for that many tokens."""
        tables = self.tables.setdefault(request.request_id, tuple([] for _ in self.groups))
        for table in tables:
            while len(table) * BLOCK_TOKENS < tokens:
                self.blocks += 1
                table.append(_Block(self.blocks))

    def end(self, request: _Request) -> None:
        """The request is over; what was queued for it is done with."""
        self.scheduler.finished(request)
        self.round(_output())
        self.round(_output())
        del self.tables[request.request_id]

    def round(self, output: Any) -> None:
        """A step, and the report of it."""
        report = self.workers_part(self.scheduler.step(output))
        if report is not None:
            self.scheduler.reported(report)

    def workers_part(self, orders: Any) -> WorkerReport | None:
        """What a worker does in a step."""
        self.worker.start_loads(orders)
        self.worker.start_saves(orders)
        self.worker.poll()
        self.worker.take_bad_blocks()
        return self.worker.take_report()


@contextmanager
def _rig(count: int, *, has: bool) -> Iterator[_Rig]:
    groups, store, space = groups_of(count), _Store(has), bench_space(4096)
    finder = Finder(store, groups, 20.0)
    finder.serve(lambda: [[space] * count])
    counters = Counters("bench")
    options = SchedulerOptions(
        groups=groups, hash_block_tokens=BLOCK_TOKENS, ranks=1, max_held_blocks=1 << 20, lookup_wait_s=0.0,
    )  # fmt: skip
    scheduler = ConnectorScheduler(options, finder, counters)
    worker = ConnectorWorker(
        store, [_Path()] * count, [Shard(1, 0, True)] * count, [4096] * count, counters, load_timeout_s=30.0,
        save_timeout_s=30.0, report_blocks=count == 1, greeting={}, spaces_of=lambda renewal: [space] * count,
    )  # fmt: skip
    rig = _Rig(scheduler, worker, finder, groups)
    scheduler.bind(
        SimpleNamespace(block_pool=_Pool(), get_blocks=lambda name: SimpleNamespace(blocks=rig.tables[name]))
    )
    scheduler.serving = True
    try:
        until(lambda: finder.ready, "the finder is ready")
        yield rig
    finally:
        finder.stop()


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for another thread; StorageError when it takes too long."""
    deadline_s = time.monotonic() + JOB_TIMEOUT_S
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline_s:
            raise StorageError(f"did not happen within {JOB_TIMEOUT_S:g} s: {what}")
        pause.wait(0.0005)


def _output(
    new: Sequence[tuple[_Request, int]] = (), running: Sequence[_Request] = (), tokens: int = 1
) -> Any:
    """What the engine's scheduler says of a step. new: requests with the tokens that they compute in it."""
    scheduled = {request.request_id: count for request, count in new}
    scheduled.update((request.request_id, tokens) for request in running)
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=request.request_id, num_computed_tokens=request.num_computed_tokens)
            for request, _ in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[request.request_id for request in running],
            num_computed_tokens=[request.num_computed_tokens for request in running],
        ),
        has_sync_kv_loads=False,
        preempted_req_ids=set(),
        kv_connector_block_state=None,
    )


def measurement(
    name: str, times_s: Sequence[float], batch: int, limit_us: float | None = None
) -> Measurement:
    """The median of some calls, in microseconds."""
    p50_us, p99_us = (float(value) * 1e6 for value in np.percentile(times_s, [50, 99]))
    return Measurement(
        name=name, block_bytes=None, value=p50_us, limit=limit_us, ratio=limit_us / p50_us if limit_us else None,
        unit="us", cpu_s_per_gb=None, limit_name="what an idle step may take" if limit_us else None, batch=batch,
        rounds=len(times_s), p50_ms=p50_us / 1000, p99_ms=p99_us / 1000,
    )  # fmt: skip


def timed(work: Callable[[], Any], into: list[float]) -> Any:
    """Calls `work`, and notes how long it took."""
    begun_s = time.perf_counter()
    result = work()
    into.append(time.perf_counter() - begun_s)
    return result


def measure_steps(count: int, steps: int) -> list[Measurement]:
    """Steps with nothing to do, and with 256 decoding requests, of which each fills a block every 16 steps."""
    idle: list[float] = []
    schedulers: list[float] = []
    workers: list[float] = []
    with _rig(count, has=False) as rig:
        for _ in range(steps):
            timed(partial(rig.round, _output()), idle)
        running = []
        for number in range(DECODING):
            request = _Request(f"decoding {number}", _CONTEXT_TOKENS + number % BLOCK_TOKENS)
            _take_in(rig, request, 0)
            rig.give(request, request.num_tokens + steps + 1)
            rig.round(_output([(request, request.num_tokens)]))
            request.num_computed_tokens = request.num_tokens
            running.append(request)
        for _ in range(steps):
            for request in running:
                request.num_tokens += 1
                request.grow()
            output = _output(running=running)
            begun_s = time.perf_counter()
            orders = rig.scheduler.step(output)
            between_s = time.perf_counter()
            report = rig.workers_part(orders)
            since_s = time.perf_counter()
            if report is not None:
                rig.scheduler.reported(report)
            ended_s = time.perf_counter()
            schedulers.append(between_s - begun_s + ended_s - since_s)
            workers.append(since_s - between_s)
            for request in running:
                request.num_computed_tokens += 1
    words = _words(count)
    return [
        measurement(f"idle step, both sides, {words}", idle, 0, IDLE_LIMIT_US),
        measurement(f"step of {DECODING} decoding requests, scheduler, {words}", schedulers, DECODING),
        measurement(f"step of {DECODING} decoding requests, worker, {words}", workers, DECODING),
    ]


def measure_prompt(count: int, prompt: int, rounds: int) -> list[Measurement]:
    """A long request that is served from the store, and one that is computed and saved, call by call."""
    names = (
        "matched, asked", "matched, answered", "allocated", "step with its load", "load reported",
        "step of a chunk that is saved", "save reported",
    )  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in names}
    with _rig(count, has=True) as rig:
        for number in range(rounds):
            _load_one(rig, _Request(f"loaded {number}", prompt + 1), times)
    with _rig(count, has=False) as rig:
        for number in range(rounds):
            _save_one(rig, _Request(f"saved {number}", prompt), times)
    words = f"{prompt // BLOCK_TOKENS:,} blocks, {_words(count)}"
    chunk = f"{CHUNK_TOKENS // BLOCK_TOKENS} blocks, {_words(count)}"
    return [
        measurement(
            f"{name}, {chunk if 'sav' in name else words}", found,
            (CHUNK_TOKENS if "sav" in name else prompt) // BLOCK_TOKENS,
        )
        for name, found in times.items()
    ]  # fmt: skip


def _words(count: int) -> str:
    return "1 group" if count == 1 else f"{count} groups"


def _take_in(rig: _Rig, request: _Request, expected: int) -> None:
    """Asks until it is answered, and gives the request its blocks."""
    rig.scheduler.new_request(request)
    until(lambda: rig.scheduler.matched_tokens(request, 0)[0] is not None, "a look-up is answered")
    assert rig.scheduler.matched_tokens(request, 0)[0] == expected
    rig.give(request, request.num_tokens)
    rig.scheduler.allocated(request, SimpleNamespace(blocks=rig.tables[request.request_id]), expected)


def _load_one(rig: _Rig, request: _Request, times: dict[str, list[float]]) -> None:
    scheduler = rig.scheduler
    scheduler.new_request(request)
    found, _ = timed(lambda: scheduler.matched_tokens(request, 0), times["matched, asked"])
    if found is None:
        search = scheduler._requests[request.request_id].search
        assert search is not None
        until(search.done.is_set, "a look-up is answered")
    found, _ = timed(lambda: scheduler.matched_tokens(request, 0), times["matched, answered"])
    assert found == request.num_tokens - 1
    rig.give(request, request.num_tokens)
    blocks = SimpleNamespace(blocks=rig.tables[request.request_id])
    timed(lambda: scheduler.allocated(request, blocks, found), times["allocated"])
    orders = timed(lambda: scheduler.step(_output()), times["step with its load"])
    report = rig.workers_part(orders)
    assert report is not None
    timed(lambda: scheduler.reported(report), times["load reported"])
    request.num_computed_tokens = found
    scheduler.allocated(request, blocks, 0)
    rig.end(request)


def _save_one(rig: _Rig, request: _Request, times: dict[str, list[float]]) -> None:
    scheduler = rig.scheduler
    _take_in(rig, request, 0)
    while request.num_computed_tokens < request.num_tokens:
        tokens = min(CHUNK_TOKENS, request.num_tokens - request.num_computed_tokens)
        first = request.num_computed_tokens == 0
        output = _output([(request, tokens)]) if first else _output(running=[request], tokens=tokens)
        begun_s = time.perf_counter()
        orders = scheduler.step(output)
        ordered_s = time.perf_counter()
        report = rig.workers_part(orders)
        since_s = time.perf_counter()
        if report is not None:
            scheduler.reported(report)
        if tokens == CHUNK_TOKENS:
            times["step of a chunk that is saved"].append(ordered_s - begun_s)
            times["save reported"].append(time.perf_counter() - since_s)
        request.num_computed_tokens += tokens
    rig.end(request)
