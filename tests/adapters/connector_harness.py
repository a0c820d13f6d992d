"""A fake engine with a connector's two halves, and a store whose answers the test decides about."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from tierkv.adapters.vllm.counters import Counters
from tierkv.adapters.vllm.finder import Finder, Search, Spaces
from tierkv.adapters.vllm.groups import Group, Kind, fails_by_block
from tierkv.adapters.vllm.identity import EngineFacts, Shard, keyspace_of, renewed, shard_of
from tierkv.adapters.vllm.scheduler import ConnectorScheduler, SchedulerOptions
from tierkv.adapters.vllm.worker import ConnectorWorker, HostPath
from tierkv.fragments import Fragments
from tierkv.jobs import Job
from tierkv.keys import Keyspace, KeyspaceSpec
from tierkv.testing.fake_cache import FakeGroup
from tierkv.testing.fake_engine import FakeEngine, FakeShape
from tierkv.types import BlockStatus, BoolArray, HashArray, TierKind, UInt8Array


class HeldStore:
    """A store in dicts. Saves and loads end when the test says so; a save reads its bytes only then."""

    def __init__(self) -> None:
        self.attached = True
        self.blocks: dict[tuple[bytes, bytes], dict[int, bytes]] = {}
        """(keyspace digest, hash) -> part -> bytes."""
        self.spaces: dict[bytes, Keyspace] = {}
        self.pending: list[tuple[Job, Callable[[], None]]] = []
        self.instant_loads = False
        self.leases: set[DictLease] = set()
        self.fail_loads = 0
        """How many of the next blocks that are to be loaded fail."""
        self.checks: Callable[[Keyspace, bytes, int, bytes], None] = lambda *_: None
        self.loaded = self.saved = 0

    def open(self, spec: KeyspaceSpec) -> Keyspace:
        return self.spaces.setdefault(spec.digest(), Keyspace(spec, spec.digest(), len(self.spaces) + 1))

    def _whole(self, space: Keyspace, name: bytes) -> bool:
        return len(self.blocks.get((space.digest, name), ())) == len(space.part_bytes)

    def lookup(self, queries: Sequence[tuple[Keyspace, HashArray]]) -> list[UInt8Array]:
        mask = 1 << TierKind.DRAM if self.attached else 0
        return [
            np.array([mask * self._whole(space, row.tobytes()) for row in hashes], np.uint8)
            for space, hashes in queries
        ]

    def lease(self, queries: Sequence[tuple[Keyspace, HashArray]], ttl_s: float) -> DictLease:
        held = [masks != 0 for masks in self.lookup(queries)]
        return DictLease(self, held, queries)

    def stage(self, lease: Any, timeout_s: float | None = None) -> Job:
        raise AssertionError("everything is in DRAM already")

    def touch(self, space: Keyspace, hashes: HashArray) -> None:
        assert hashes.ndim == 2

    def leased(self) -> set[tuple[bytes, bytes]]:
        """All blocks that a lease holds."""
        return {
            (space.digest, row.tobytes())
            for lease in self.leases
            for (space, hashes), held in zip(lease.queries, lease.held, strict=True)
            for row in hashes[held]
        }

    def lose(self, keep: Callable[[tuple[bytes, bytes]], bool]) -> None:
        """Blocks go, as by eviction."""
        self.blocks = {key: parts for key, parts in self.blocks.items() if keep(key)}

    def load(
        self,
        space: Keyspace,
        hashes: HashArray,
        into: Fragments,
        part: int = 0,
        timeout_s: float | None = None,
    ) -> Job:
        job = Job(len(hashes))
        assert timeout_s
        work = partial(self._load, job, space, hashes, into, part)
        if self.instant_loads or not len(hashes):
            work()
        else:
            self.pending.append((job, work))
        return job

    def _load(self, job: Job, space: Keyspace, hashes: HashArray, into: Fragments, part: int) -> None:
        for position, row in enumerate(hashes):
            found = self.blocks.get((space.digest, row.tobytes()), {})
            status = BlockStatus.OK
            if not self.attached:
                status = BlockStatus.IO_ERROR
            elif len(found) < len(space.part_bytes):
                status = BlockStatus.MISS
            elif self.fail_loads:
                self.fail_loads -= 1
                status = BlockStatus.CORRUPT
            block, at = int(into.block_ids[position]), 0
            content = found.get(part, b"") if status is BlockStatus.OK else b"\xee" * into.bytes_per_block
            for base, stride, length in zip(into.bases, into.strides, into.lengths, strict=True):
                ctypes.memmove(int(base + block * stride), content[at : at + int(length)], int(length))
                at += int(length)
            self.loaded += status is BlockStatus.OK
            job.settle(slice(position, position + 1), status)

    def save(
        self,
        space: Keyspace,
        hashes: HashArray,
        from_: Fragments,
        part: int = 0,
        timeout_s: float | None = None,
    ) -> Job:
        job = Job(len(hashes))
        assert timeout_s
        self.pending.append((job, partial(self._save, job, space, hashes, from_, part)))
        return job

    def _save(self, job: Job, space: Keyspace, hashes: HashArray, from_: Fragments, part: int) -> None:
        for position, row in enumerate(hashes):
            block, name = int(from_.block_ids[position]), row.tobytes()
            content = b"".join(
                ctypes.string_at(int(base + block * stride), int(length))
                for base, stride, length in zip(from_.bases, from_.strides, from_.lengths, strict=True)
            )
            self.checks(space, name, part, content)
            if self.attached:
                self.blocks.setdefault((space.digest, name), {}).setdefault(part, content)
                self.saved += 1
            status = BlockStatus.OK if self.attached else BlockStatus.DROPPED
            job.settle(slice(position, position + 1), status)

    def advance(self, count: int | None = None) -> None:
        """Ends the oldest `count` saves and loads (None: all)."""
        for _ in range(len(self.pending) if count is None else min(count, len(self.pending))):
            _, work = self.pending.pop(0)
            work()

    def clear(self, space: Keyspace) -> None:
        self.lose(lambda key: key[0] != space.digest)


class DictLease:
    """A lease of HeldStore."""

    def __init__(
        self, store: HeldStore, held: list[BoolArray], queries: Sequence[tuple[Keyspace, HashArray]]
    ) -> None:
        self.store, self.held, self.queries = store, held, queries
        store.leases.add(self)

    def extend(self, ttl_s: float) -> bool:
        return self in self.store.leases

    def release(self) -> bool:
        self.store.leases.discard(self)
        return True


class InlineFinder(Finder):
    """A finder whose answers come when the test says so: at once, or when it is let go on."""

    def __init__(self, store: Any, groups: Sequence[Group], lease_s: float, min_load_tokens: int = 0) -> None:
        super().__init__(store, groups, lease_s, min_load_tokens)
        super().stop()  # its thread is not needed
        self._closing = False
        self.held_back: list[Search] = []
        self.answers = True

    def serve_now(self, spaces: Spaces) -> None:
        self._spaces = spaces

    def submit(self, search: Search) -> bool:
        search.hit_tokens = search.above_tokens
        self.want(search)
        self.held_back.append(search)
        if self.answers:
            self.answer()
        return True

    def answer(self) -> None:
        """Answers all that was asked."""
        asked, self.held_back = self.held_back, []
        for search in asked:
            if not search.closed:
                self._find(search)
            search.done.set()
        self.release_ended()

    def release_ended(self) -> None:
        """Ends the leases that nobody needs any more."""
        while self._ended:
            self._ended.popleft().release()


def facts_of(stage: int, stages: int, tensor: int, tensors: int, **changes: Any) -> EngineFacts:
    """Facts of a rank of the fake engine."""
    values: dict[str, Any] = {
        "model": "fake", "revision": "1", "hash_algorithm": "sha256_cbor", "hash_seed": "0",
        "hash_block_tokens": 4, "layout": "LBHNC", "backend": "fake", "tensor_rank": tensor,
        "tensor_size": tensors, "pipeline_rank": stage, "pipeline_size": stages, "extra": {},
    }  # fmt: skip
    return EngineFacts(**{**values, **changes})


class Rig:
    """A fake engine, its connector's halves, and the store between them."""

    def __init__(
        self, shape: FakeShape, store: Any, finder: Finder, *, load_async: bool = True, max_held_blocks: int = 24,
        save: bool = True, load: bool = True, lookup_wait_s: float = 0.0, lookup_timeout_s: float = 600.0,
    ) -> None:  # fmt: skip
        self.shape, self.store, self.finder = shape, store, finder
        self.engine = engine = FakeEngine(shape)
        self.counters = Counters("test")
        self.scheduler = ConnectorScheduler(
            SchedulerOptions(
                groups=tuple(engine.groups), hash_block_tokens=shape.hash_block_tokens,
                ranks=len(engine.ranks), max_held_blocks=max_held_blocks, load_async=load_async,
                lookup_wait_s=lookup_wait_s, lookup_timeout_s=lookup_timeout_s, save=save, load=load,
            ),
            finder, self.counters,
        )  # fmt: skip
        self.scheduler.bind(engine)
        self.specs: list[list[KeyspaceSpec | None]] = []
        self.renewal = ""
        self.workers: list[ConnectorWorker] = []
        self.spaces: list[list[Keyspace | None]] = []
        self.memory_of: dict[tuple[bytes, int], tuple[int, int]] = {}
        """(keyspace digest, part) -> (rank, group's position) whose right bytes it has."""
        for number, rank in enumerate(engine.ranks):
            stage, tensor = divmod(number, shape.tensor_ranks)
            self._add_worker(number, stage, tensor, rank)
        engine.connector, engine.workers = self.scheduler, self.workers
        self.scheduler.serving = True

    def _add_worker(self, number: int, stage: int, tensor: int, rank: Any) -> None:
        facts = facts_of(stage, self.shape.stages, tensor, self.shape.tensor_ranks)
        paths: list[HostPath | None] = []
        shards: list[Shard] = []
        spaces: list[Keyspace | None] = []
        for position, fake in enumerate(self.shape.groups):
            cache = rank.caches[position]
            shard = shard_of(facts, self.shape.tensor_ranks if fake.replicated else 1)
            shards.append(shard)
            if cache is None:
                paths.append(None)
                spaces.append(None)
                continue
            space = self.store.open(keyspace_of(facts, fake.group, f"group {position}", cache, shard))
            spaces.append(space)
            paths.append(HostPath(self.store, space, cache, shard))
            self.memory_of[space.digest, shard.part] = (number, position)
        specs = [None if space is None else space.spec for space in spaces]
        if tensor == 0:
            self.spaces.append(spaces)
            self.specs.append(specs)
        else:
            assert self.spaces[stage] == spaces, "the ranks of a stage must come to the same keyspaces"

        def spaces_of(renewal: str) -> list[Keyspace | None]:
            found = self._opened(specs, renewal)
            for position, space in enumerate(found):
                if space is not None:
                    self.memory_of[space.digest, shards[position].part] = (number, position)
            return found

        self.workers.append(
            ConnectorWorker(
                self.store, paths, shards, [0 if cache is None else cache.block_bytes for cache in rank.caches],
                self.counters, load_timeout_s=60, save_timeout_s=60, report_blocks=fails_by_block(self.engine.groups),
                greeting={(stage, tensor): b"[]"}, spaces_of=spaces_of,
            )
        )  # fmt: skip

    def _opened(self, specs: Sequence[KeyspaceSpec | None], renewal: str) -> list[Keyspace | None]:
        return [None if spec is None else self.store.open(renewed(spec, renewal)) for spec in specs]

    def clear(self, renewal: str) -> None:
        """A reset with all that belongs to it, as the connector does it; the old keyspaces' blocks are left."""
        self.renewal = renewal
        self.scheduler.begin_clear(renewal)
        self.spaces = [self._opened(specs, renewal) for specs in self.specs]
        if isinstance(self.finder, InlineFinder):
            self.finder.serve_now(self.spaces)

    def right_bytes(self, space: Keyspace, name: bytes, part: int) -> bytes:
        """What the store must hold under a hash."""
        number, position = self.memory_of[space.digest, part]
        digests = self.engine.truth.tokens_of(name, self.engine.groups[position].block_tokens)
        return self.engine.ranks[number].right_block(position, digests)

    def check_saved(self, space: Keyspace, name: bytes, part: int, content: bytes) -> None:
        _, position = self.memory_of[space.digest, part]
        assert content == self.right_bytes(space, name, part), f"wrong bytes are stored for group {position}"

    def settled(self) -> None:
        """Lets everything come to its end, and checks that nothing is left."""
        engine, scheduler = self.engine, self.scheduler
        for _ in range(2000):
            if engine.idle and not engine.pipeline and not scheduler.has_unsent_work():
                break
            self.let_go()
            while engine.other_arrives(good=True):
                pass
            if engine.idle and not scheduler.has_unsent_work():
                engine.drain()
            else:
                engine.step()
            if not isinstance(self.store, HeldStore):
                threading.Event().wait(0.002)  # others do the work meanwhile
        else:
            raise AssertionError(
                f"requests do not end: {[(r.request_id, r.status) for r in engine.requests.values()]}"
            )
        self.let_go()
        assert scheduler.held_blocks == 0
        assert engine.block_pool.used == 0
        assert not scheduler._requests
        assert not scheduler._loading
        assert not self.finder._leased
        engine.check_prefix_cache()

    def let_go(self) -> None:
        """Whatever the store and the finder hold back comes now."""
        if isinstance(self.store, HeldStore):
            self.store.advance()
        if isinstance(self.finder, InlineFinder):
            self.finder.answers = True
            self.finder.answer()


@contextmanager
def held_rig(shape: FakeShape, **options: Any) -> Iterator[tuple[Rig, HeldStore, InlineFinder]]:
    """A rig over a HeldStore whose every save is checked."""
    store = HeldStore()
    finder = InlineFinder(store, [fake.group for fake in shape.groups], 20.0)
    rig = Rig(shape, store, finder, **options)
    store.checks = rig.check_saved
    store.instant_loads = not options.get("load_async", True)
    finder.serve_now(rig.spaces)
    yield rig, store, finder


def full(tokens: int = 4, index: int = 0, **more: Any) -> FakeGroup:
    margin = more.pop("margin_blocks", 0)
    return FakeGroup(Group(index, Kind.FULL, tokens, margin_blocks=margin), **more)


def window(
    tokens: int = 4, reach: int = 9, index: int = 0, store: str = "all", period: int = 0, **more: Any
) -> FakeGroup:
    margin = more.pop("margin_blocks", 0)
    return FakeGroup(Group(index, Kind.SLIDING, tokens, reach, margin, store, period), **more)


def chunked(
    tokens: int = 4, reach: int = 16, index: int = 0, store: str = "all", period: int = 0, **more: Any
) -> FakeGroup:
    return FakeGroup(Group(index, Kind.CHUNKED, tokens, reach, 0, store, period), **more)


def recurrent(tokens: int = 8, index: int = 0, **more: Any) -> FakeGroup:
    return FakeGroup(Group(index, Kind.RECURRENT, tokens), **more)
