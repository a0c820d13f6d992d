"""The finder's thread: what it finds, what it promises, and that every promise ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from connector_harness import DictLease, HeldStore

from tierkv.adapters.vllm.finder import MAX_QUEUED, Finder, Search
from tierkv.adapters.vllm.groups import Group, Kind
from tierkv.errors import StorageError
from tierkv.jobs import Job
from tierkv.keys import Keyspace, pack_hashes
from tierkv.testing.buffers import make_spec
from tierkv.testing.stores import eventually
from tierkv.types import HashArray, TierKind, UInt8Array

FULL, WINDOW = Group(0, Kind.FULL, 4), Group(1, Kind.SLIDING, 4, 7)
NVME = 1 << TierKind.NVME


class ScriptedStore(HeldStore):
    """A HeldStore that can be told what happens within a call."""

    def __init__(self) -> None:
        super().__init__()
        self.on_lookup: Callable[[], None] = lambda: None
        self.on_lease: Callable[[], None] = lambda: None
        self.staged: list[Any] = []
        self.touched: list[HashArray] = []
        self.below: set[bytes] = set()
        """Hashes of blocks that are on NVMe alone."""
        self.lookups = 0

    def lookup(self, queries: Sequence[tuple[Keyspace, HashArray]]) -> list[UInt8Array]:
        masks = super().lookup(queries)
        for (_, hashes), mask in zip(queries, masks, strict=True):
            for position, row in enumerate(hashes):
                if mask[position] and row.tobytes() in self.below:
                    mask[position] = NVME
        return masks

    def lease(self, queries: Sequence[tuple[Keyspace, HashArray]], ttl_s: float) -> DictLease:
        self.on_lease()
        return super().lease(queries, ttl_s)

    def stage(self, lease: Any, timeout_s: float | None = None) -> Job:
        self.staged.append(lease)
        return Job(0)

    def touch(self, space: Keyspace, hashes: HashArray) -> None:
        self.touched.append(hashes.copy())


def names(count: int, seed: int = 0) -> HashArray:
    return pack_hashes([bytes([seed, place]) * 16 for place in range(count)])


class Rig:
    """A finder over two groups, of one pipeline stage or two."""

    def __init__(self, stages: int = 1, lease_s: float = 20.0, min_load_tokens: int = 0) -> None:
        self.store = ScriptedStore()
        spaces: list[list[Keyspace | None]] = [
            [
                self.store.open(make_spec(64, group=f"{group}", pipeline_stage=f"{stage}/{stages}"))
                for group in range(2)
            ]
            for stage in range(stages)
        ]
        if stages == 2:
            spaces[1][1] = None
        self.spaces = spaces
        self.hashes = [names(10), names(10, 1)]
        self.finder = Finder(self.store, (FULL, WINDOW), lease_s, min_load_tokens)
        self.finder.serve(lambda: spaces)
        eventually(lambda: self.finder._spaces is not None, "the finder serves")

    def keep(self, *counts: int, stages: Sequence[int] = (0, 1)) -> None:
        """The store has so many blocks of each group."""
        for number in stages:
            for group, space in enumerate(self.spaces[number] if number < len(self.spaces) else []):
                for row in self.hashes[group][: counts[group]]:
                    if space is not None:
                        self.store.blocks[space.digest, row.tobytes()] = {0: b""}

    def lose(self, group: int, index: int, stage: int = 0) -> None:
        space = self.spaces[stage][group]
        assert space is not None
        del self.store.blocks[space.digest, self.hashes[group][index].tobytes()]

    def search(self, above: int = 0, limit: int = 40) -> Search:
        search = Search(self.hashes, above, limit)
        self.finder.submit(search)
        assert search.done.wait(10)
        return search


@contextmanager
def rig(**options: Any) -> Iterator[Rig]:
    made = Rig(**options)
    try:
        yield made
    finally:
        made.finder.stop()
        assert not made.finder._thread.is_alive()
        assert not made.store.leases, "every lease ends"


def leased(store: ScriptedStore) -> list[int]:
    """Blocks that each query of the one lease holds."""
    (lease,) = store.leases
    return [int(np.count_nonzero(held)) for held in lease.held]


def test_the_longest_common_hit_is_found_and_just_what_it_loads_is_leased() -> None:
    with rig() as made:
        made.keep(10, 7)
        search = made.search()
        assert search.hit_tokens == 28
        assert leased(made.store) == [7, 2]
        assert not made.store.staged
        assert [known.sum() for known in search.stored] == [10, 7]
        assert search.took_s >= 0


def test_all_stages_must_have_a_block() -> None:
    with rig(stages=2) as made:
        made.keep(10, 10)
        made.lose(0, 5, stage=1)
        search = made.search()
        assert search.hit_tokens == 20
        assert not search.stored[0][5]
        assert leased(made.store) == [5, 2, 5]


def test_what_the_engine_has_is_not_loaded_but_touched() -> None:
    with rig() as made:
        made.keep(10, 10)
        made.lose(0, 1)
        search = made.search(above=12)
        assert search.hit_tokens == 40
        assert leased(made.store) == [7, 2]
        assert [len(touched) for touched in made.store.touched] == [2, 3]


def test_nothing_beyond_what_the_engine_has_is_no_hit() -> None:
    with rig() as made:
        made.keep(3, 3)
        search = made.search(above=12)
        assert search.hit_tokens == 12
        assert search.lease is None
        assert search.stored


def test_short_hits_are_left_alone() -> None:
    with rig(min_load_tokens=13) as made:
        made.keep(3, 3)
        assert made.search().hit_tokens == 0
        made.keep(4, 4)
        assert made.search().hit_tokens == 16


@pytest.mark.parametrize(("times", "expected"), [(1, 28), (2, 24), (3, 0)])
def test_blocks_that_go_before_they_are_leased_shorten_the_hit(times: int, expected: int) -> None:
    with rig() as made:
        made.keep(8, 8)
        left = iter(range(7, 7 - times, -1))

        def go() -> None:
            index = next(left, None)
            if index is not None:
                made.lose(0, index)

        made.store.on_lease = go
        search = made.search()
        assert search.hit_tokens == expected
        assert not search.stored[0][7]
        assert len(made.store.leases) == (1 if expected else 0)


def test_what_is_below_dram_is_staged() -> None:
    with rig() as made:
        made.keep(6, 6)
        made.store.below = {made.hashes[1][0].tobytes()}
        made.search()
        assert not made.store.staged, "a block out of the window is not needed"
        made.store.below = {made.hashes[0][0].tobytes()}
        search = made.search()
        assert made.store.staged == [search.lease]
        assert search.tiers[0][0] == NVME


def test_closing_ends_the_lease_at_once_and_in_any_state() -> None:
    with rig() as made:
        made.keep(6, 6)
        search = made.search()
        assert made.finder.want(search)
        made.finder.close(search)
        made.finder.close(search)
        eventually(lambda: not made.store.leases, "the lease ends")
        assert not made.finder.want(search)
        # Closed while it looks.
        looking, go_on = threading.Event(), threading.Event()

        def stop_here() -> None:
            looking.set()
            assert go_on.wait(10)

        made.store.on_lease = stop_here
        search = Search(made.hashes, 0, 40)
        made.finder.submit(search)
        assert looking.wait(10)
        made.finder.close(search)
        go_on.set()
        assert search.done.wait(10)
        eventually(lambda: not made.store.leases, "the lease of a search that nobody wants ends")
        assert search.hit_tokens == 0


def test_what_nobody_asks_for_any_more_is_given_up_but_not_what_is_loaded() -> None:
    with rig(lease_s=0.3) as made:
        made.keep(6, 6)
        wanted, loading, forgotten = (made.search() for _ in range(3))
        made.finder.keep(loading)
        eventually(
            lambda: made.finder.want(wanted) and len(made.store.leases) == 2, "one of three is given up"
        )
        assert forgotten.closed
        assert not made.finder.want(forgotten)
        assert loading.lease in made.store.leases


@pytest.mark.parametrize("error", [StorageError("gone"), ValueError("a bug")])
def test_a_search_that_fails_has_found_nothing(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with rig() as made:
        made.keep(6, 6)

        def fail() -> None:
            raise error

        made.store.on_lease = fail
        assert made.search().hit_tokens == 0
        made.store.on_lease = lambda: None
        assert made.search().hit_tokens == 24


def test_zeros_of_an_agent_that_is_away_say_nothing() -> None:
    with rig() as made:
        made.keep(6, 6)
        made.store.attached = False
        assert not made.finder.ready
        search = made.search()
        assert search.hit_tokens == 0
        assert search.stored == []


def test_the_queue_is_bounded() -> None:
    with rig() as made:
        looking, go_on = threading.Event(), threading.Event()

        def stop_here() -> None:
            looking.set()
            assert go_on.wait(30)

        made.keep(1, 1)
        made.store.on_lease = stop_here
        first = Search(made.hashes, 0, 40)
        made.finder.submit(first)
        assert looking.wait(10)
        waiting = [Search(made.hashes, 0, 40) for _ in range(MAX_QUEUED)]
        assert all(made.finder.submit(search) for search in waiting)
        refused = Search(made.hashes, 4, 40)
        assert not made.finder.submit(refused)
        assert refused.done.is_set()
        assert refused.hit_tokens == 4
        for search in waiting:
            made.finder.close(search)
        made.store.on_lease = lambda: None
        go_on.set()
        assert all(search.done.wait(10) for search in waiting)
        assert all(search.hit_tokens == 0 for search in waiting)


def test_keyspaces_are_opened_as_soon_as_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.adapters.vllm.finder._OPEN_AGAIN_S", 0.01)
    store, tries = ScriptedStore(), []
    space = store.open(make_spec(64))
    finder = Finder(store, (FULL,), 20.0)
    try:
        assert not finder.ready

        def open_spaces() -> list[list[Keyspace | None]]:
            tries.append(1)
            if len(tries) < 4:
                raise StorageError("not yet")
            return [[space]]

        finder.serve(open_spaces)
        eventually(lambda: finder._spaces is not None, "it goes on trying")
        assert len(tries) == 4
        assert finder.ready
        other = store.open(make_spec(64, group="other"))
        finder.serve(lambda: [[other]])
        eventually(lambda: finder._spaces == [[other]], "other keyspaces take their place")
        store.attached = False
        assert not finder.ready
    finally:
        finder.stop()


def test_a_stop_ends_all() -> None:
    with rig() as made:
        made.keep(6, 6)
        search = made.search()
        made.finder.stop()
        made.finder.stop()
        assert search.closed
        late = Search(made.hashes, 8, 40)
        assert not made.finder.submit(late)
        assert late.done.is_set()
