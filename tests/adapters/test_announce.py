"""The announcer over a real store: in the end a router believes just what the store holds, wherever it was moved."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tierkv.adapters.vllm import announce
from tierkv.adapters.vllm.announce import Announcer
from tierkv.adapters.vllm.announced import Announced
from tierkv.adapters.vllm.groups import Group, Kind
from tierkv.agent.connection import AgentUnavailable
from tierkv.config import DramConfig, NvmeConfig, StoreConfig
from tierkv.keys import Keyspace
from tierkv.memory import capacity_for
from tierkv.store import ChangePlace, Changes, Store
from tierkv.testing.buffers import make_spec, random_hashes
from tierkv.testing.stores import OK, TIMEOUT_S, eventually, save
from tierkv.types import BoolArray, HashArray, TierKind, UInt8Array

BLOCK_BYTES = 4096
BLOCKS = random_hashes(40, 5)
NAMES = random_hashes(40, 6)
"""What the store calls them: not what the engine does, as under a LoRA adapter."""
GROUPS = (Group(3, Kind.FULL, 4), Group(5, Kind.SLIDING, 4, 9))
DRAM, NVME = TierKind.DRAM, TierKind.NVME


class Router:
    """What is believed to be where, by the log's calls."""

    def __init__(self) -> None:
        self.places = 1 << 20
        """How much may be told of until the engine takes it."""
        self.held: dict[TierKind, set[tuple[int, bytes]]] = {kind: set() for kind in TierKind}

    def describe(self, request: Any, group: int, hashes: HashArray, first: int, parent: bytes | None) -> Any:
        assert (parent is None) == (first == 0)
        assert np.array_equal(hashes, BLOCKS[first : first + len(hashes)])
        assert parent is None or parent == BLOCKS[first - 1].tobytes()
        return SimpleNamespace(group=group, hashes=np.array(hashes))

    def stored(self, run: Any, tier: TierKind, kept: BoolArray | None = None) -> None:
        assert kept is not None
        assert kept.any()
        self.places -= int(np.count_nonzero(kept))
        assert self.places >= 0, "more is told of than there is room for"
        told = {(run.group, row.tobytes()) for row in run.hashes[kept]}
        assert not told & self.held[tier], "nothing is told twice"
        self.held[tier] |= told

    def removed(self, group: int, hashes: HashArray, tier: TierKind) -> None:
        self.places -= len(hashes)
        gone = {(group, row.tobytes()) for row in hashes}
        assert gone <= self.held[tier], "what was never told is not taken back"
        self.held[tier] -= gone

    def room(self) -> int:
        return max(0, self.places)

    def drop(self) -> None:
        """Everything that was told has been read at once."""

    def engine_clears(self) -> None:
        """As a router takes the engine's own event."""
        self.held = {kind: set() for kind in TierKind}


class AwayStore:
    """A store that can be away, as an agent's."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.attached = True
        self.late = 0
        """How many of the next look-ups are not answered in time."""

    def lookup(
        self, queries: Sequence[tuple[Keyspace, HashArray]], *, strict: bool = False
    ) -> list[UInt8Array]:
        assert strict, "what is not known is not to be taken for gone"
        if self.late:
            self.late -= 1
            raise AgentUnavailable("late")
        if not self.attached:
            raise AgentUnavailable("away")
        return self.store.lookup(queries)

    def changes(
        self, spaces: Sequence[Keyspace], after: ChangePlace | None = None, count: int = 1
    ) -> Changes:
        if not self.attached:
            raise AgentUnavailable("away")
        return self.store.changes(spaces, after, count)


def a_store(directory: Path, dram_blocks: int = 16, nvme_blocks: int = 32) -> Store:
    slab_bytes = 8 * BLOCK_BYTES
    return Store(
        StoreConfig(
            dram=DramConfig(
                capacity_bytes=capacity_for(dram_blocks, BLOCK_BYTES, slab_bytes), slab_bytes=slab_bytes,
                huge_pages="off", lock_memory="off", first_touch="never", free_ahead=0.0,
            ),
            nvme=NvmeConfig(
                directory=str(directory / "nvme"), capacity_bytes=capacity_for(nvme_blocks, BLOCK_BYTES, slab_bytes),
                slab_bytes=slab_bytes, sync="process",
            ),
            staging_bytes=slab_bytes,
        )
    )  # fmt: skip


class Rig:
    """An announcer that follows a store: two stages, of which the second lacks the second group."""

    def __init__(self, store: Store, max_blocks: int = 1 << 10) -> None:
        self.store, self.away, self.router = store, AwayStore(store), Router()
        self.announcer = Announcer(self.router, GROUPS, self.away, max_blocks)
        self.described: dict[int, set[int]] = {0: set(), 1: set()}
        self.generation = 0
        self.renew(0)

    def renew(self, number: int) -> None:
        names = [[f"{number} full 0", f"{number} window"], [f"{number} full 1", None]]
        self.spaces = [
            [None if name is None else self.store.open(make_spec(BLOCK_BYTES, group=name)) for name in stage]
            for stage in names
        ]
        self.announcer.serve(self.spaces, self.generation)
        self.described = {0: set(), 1: set()}

    def save(self, position: int, indices: Sequence[int], stages: Sequence[int] = (0, 1)) -> None:
        for stage in stages:
            space = self.spaces[stage][position]
            if space is not None:
                assert set(save(self.store, space, np.ascontiguousarray(NAMES[list(indices)]))) <= {OK}

    def tell(self, position: int, indices: Sequence[int]) -> None:
        runs = self.announcer.describe(None, position, BLOCKS, NAMES, indices)
        self.announcer.stored(runs)
        self.described[position] |= set(indices)

    def truth(self) -> dict[TierKind, set[tuple[int, bytes]]]:
        held: dict[TierKind, set[tuple[int, bytes]]] = {kind: set() for kind in TierKind}
        if not self.away.attached:
            return held
        for position, group in enumerate(GROUPS):
            masks = np.full(len(BLOCKS), 0xFF, np.uint8)
            for stage in self.spaces:
                if (space := stage[position]) is not None:
                    masks &= self.store.lookup([(space, NAMES)])[0]
            for index in self.described[position]:
                for kind in (DRAM, NVME):
                    if masks[index] >> kind & 1:
                        held[kind].add((group.index, BLOCKS[index].tobytes()))
        return held

    def settled(self) -> None:
        eventually(lambda: self.router.held == self.truth(), "the router knows what the store holds")

    def close(self) -> None:
        self.announcer.close()
        self.store.close(0.0)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce, "_POLL_S", 0.005)
    monkeypatch.setattr(announce, "_PIECE", 7)
    monkeypatch.setattr(announce, "_TOLD_AT_ONCE", 5)


@contextmanager
def rig(directory: Path, **options: Any) -> Iterator[Rig]:
    made = Rig(a_store(directory), **options)
    try:
        yield made
    finally:
        made.close()


def test_a_demotion_is_a_store_below_and_a_removal_above(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.save(1, range(8))
        made.tell(1, range(8))
        eventually(lambda: len(made.router.held[DRAM]) == 8, "they are announced in DRAM")
        made.save(1, range(8, 32))
        eventually(
            lambda: len(made.router.held[NVME] & {(5, row.tobytes()) for row in BLOCKS[:8]}) > 4, "demoted"
        )
        made.settled()
        made.store.remove(made.spaces[0][1], NAMES)  # type: ignore[arg-type]
        eventually(lambda: not any(made.router.held.values()), "they are taken back")


def test_a_block_is_where_all_stages_have_it(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.save(0, range(4), stages=[0])
        made.tell(0, range(4))
        made.save(0, range(2), stages=[1])
        eventually(lambda: len(made.router.held[DRAM]) == 2, "two are whole")
        made.save(0, [2], stages=[1])
        eventually(lambda: len(made.router.held[DRAM]) == 3, "and the third")
        made.settled()


def test_an_agent_that_is_away_holds_nothing(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.save(0, range(6))
        made.tell(0, range(6))
        made.settled()
        assert made.router.held[DRAM]
        made.away.attached = False
        eventually(lambda: not any(made.router.held.values()), "all is taken back")
        made.store.remove(made.spaces[0][0], NAMES[:2])  # type: ignore[arg-type]
        made.tell(0, range(6, 8))
        made.away.attached = True
        eventually(lambda: len(made.router.held[DRAM]) == 4, "what is still there is announced again")
        made.settled()


def test_a_clear_forgets_what_was_described(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.save(1, range(4))
        made.tell(1, range(4))
        made.settled()
        made.generation = made.announcer.cleared()
        assert made.announcer.describe(None, 1, BLOCKS, NAMES, [0]) == [], "nothing before it is served again"
        eventually(lambda: not any(made.router.held.values()), "what was told is taken back")
        made.renew(1)
        made.save(1, range(2, 6))
        made.tell(1, range(2, 6))
        made.settled()
        assert len(made.router.held[DRAM]) == 4


def test_only_what_is_new_is_described_a_stretch_each(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.save(1, range(10))
        made.tell(1, [2, 3, 5])
        made.settled()
        runs = made.announcer.describe(None, 1, BLOCKS, NAMES, [0, 1, 2, 3, 4, 5, 6, 9])
        assert [len(names) for _, _, names, _ in runs] == [2, 1, 1, 1]
        assert made.announcer.describe(None, 1, BLOCKS, NAMES, [2, 5]) == []
        assert made.announcer.describe(None, 1, BLOCKS, NAMES, []) == []


def test_the_oldest_are_taken_back_when_the_table_is_full(tmp_path: Path) -> None:
    with rig(tmp_path, max_blocks=8) as made:
        made.save(1, range(12))
        made.tell(1, range(6))
        made.settled()
        made.tell(1, range(6, 12))
        made.described[1] = set(range(4, 12))
        made.settled()
        assert sum(map(len, made.router.held.values())) == 8


def test_what_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce, "MAX_WAITING", 5)
    with rig(tmp_path) as made:
        runs = made.announcer.describe(None, 1, BLOCKS, NAMES, [0, 1, 2, 3, 5, 6, 8])
        made.announcer.stored(runs)
        assert made.announcer.dropped_blocks == 2
        assert made.announcer._waiting_blocks <= 5


def test_what_the_engine_makes_routers_forget_is_told_again(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.save(1, range(4))
        made.tell(1, range(4))
        made.settled()
        with made.announcer._lock:
            made.announcer._waiting.append(made.router.engine_clears)
        made.announcer.engine_cleared()
        eventually(lambda: not made.announcer._waiting, "it is heard")
        made.settled()
        assert len(made.router.held[DRAM]) == 4


def test_no_more_is_told_than_the_log_has_room_for(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.router.places = 12 * announce._EVENTS_A_ROW
        made.save(1, range(16))
        made.tell(1, range(16))
        eventually(lambda: len(made.router.held[DRAM]) > 4, "some are told of")
        made.router.places = 3
        made.away.attached = False
        eventually(
            lambda: made.announcer._follower is not None and made.announcer._follower._away, "it is noticed"
        )
        assert made.router.held[DRAM]
        made.router.places = 1 << 10
        eventually(lambda: not any(made.router.held.values()), "the rest follows when there is room")
        made.away.attached = True
        made.settled()


def test_changes_that_were_lost_take_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.store.changes.CHANGES_KEPT", 16)
    monkeypatch.setattr(announce, "_PIECE", 4)
    with rig(tmp_path) as made:
        made.save(1, range(4))
        made.tell(1, range(4))
        made.settled()
        removed: list[Any] = []
        monkeypatch.setattr(made.router, "removed", lambda *what: removed.append(what))
        other = made.store.open(make_spec(BLOCK_BYTES, group="another engine's"))
        for _ in range(20):
            save(made.store, other, NAMES[30:34])
            made.store.remove(other, NAMES[30:34])
        eventually(lambda: made.announcer._follower.place is not None, "it has read on")  # type: ignore[union-attr]
        assert not removed
        made.settled()


class AnnouncerMachine(RuleBasedStateMachine):
    """Saves, evictions, removals, an agent that goes and comes, resets; the router is checked when all is quiet."""

    group = st.integers(0, 1)

    @initialize(kept=st.sampled_from([8, 1 << 16]), rows=st.sampled_from([1 << 10, 1 << 17]))
    def begin(self, kept: int, rows: int) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("tierkv.store.changes.CHANGES_KEPT", kept)
        self.rig = Rig(a_store(Path(self.directory.name)), rows)
        self.resets = 0

    @rule(group=group, first=st.integers(0, 36), count=st.integers(1, 6), told=st.booleans())
    def save(self, group: int, first: int, count: int, told: bool) -> None:
        self.rig.save(group, range(first, min(40, first + count)))
        if told:
            self.rig.tell(group, range(first, min(40, first + count)))

    @rule(group=group, first=st.integers(0, 36), count=st.integers(1, 6), stage=st.integers(0, 1))
    def remove(self, group: int, first: int, count: int, stage: int) -> None:
        space = self.rig.spaces[stage][group]
        if space is not None:
            self.rig.store.remove(space, np.ascontiguousarray(NAMES[first : first + count]))

    @rule(away=st.booleans())
    def agent(self, away: bool) -> None:
        self.rig.away.attached = not away

    @rule(late=st.booleans())
    def reset(self, late: bool) -> None:
        self.resets += 1
        self.rig.generation = self.rig.announcer.cleared()
        if late:  # another reset came before the keyspaces of this one were opened
            self.rig.announcer.serve(self.rig.spaces, self.rig.generation - 1)
        self.rig.renew(self.resets)

    @rule()
    def engine_clears(self) -> None:
        """The engine's event is published before whatever the announcer tells from now on."""
        with self.rig.announcer._lock:  # as between two steps
            self.rig.announcer._waiting.append(self.rig.router.engine_clears)
        self.rig.announcer.engine_cleared()

    @rule(count=st.integers(1, 3))
    def agent_is_late(self, count: int) -> None:
        self.rig.away.late = count

    @rule()
    def quiet(self) -> None:
        self.rig.away.late = 0
        assert self.rig.store.flush(TIMEOUT_S)
        self.rig.settled()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        try:
            self.rig.away.attached = True
            self.quiet()
        finally:
            self.patch.undo()
            self.rig.close()
            self.directory.cleanup()


AnnouncerMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestAnnouncerMachine = AnnouncerMachine.TestCase


def test_a_block_that_is_named_twice_takes_one_row() -> None:
    removed: list[Any] = []
    table = Announced([[True]], 8)
    run = SimpleNamespace(hashes=BLOCKS[[0, 1, 0]])
    rows = table.add(0, np.ascontiguousarray(NAMES[[0, 1, 0]]), run, lambda *what: removed.append(what))
    assert len(np.unique(rows)) == 2
    for _ in range(3):
        table.add(0, NAMES[10:14], SimpleNamespace(hashes=BLOCKS[10:14]), lambda *what: removed.append(what))
        table.add(0, NAMES[14:18], SimpleNamespace(hashes=BLOCKS[14:18]), lambda *what: removed.append(what))
    assert not removed, "what was not told is not taken back"
    assert table.known(0, NAMES[10:18]).sum() >= 4
