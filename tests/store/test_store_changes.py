"""Changes: whoever follows them knows what is where, without ever looking again, unless it is told that it must."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from store_harness import OK, TIMEOUT_S, Rig, eventually, load, masks, rows, save

from tierkv.errors import ArgumentError, KeyspaceError
from tierkv.keys import Keyspace
from tierkv.store import CHANGES_KEPT, ChangePlace, Store
from tierkv.store import changes as changes_module
from tierkv.testing.buffers import make_spec, random_hashes
from tierkv.types import HashArray, TierKind

BLOCKS = random_hashes(48, 7)
DRAM, NVME = 1 << TierKind.DRAM, 1 << TierKind.NVME


class Follower:
    """Knows what is where from changes alone."""

    def __init__(self, store: Store, spaces: list[Keyspace]) -> None:
        self.store = store
        self.spaces = spaces
        self.place: ChangePlace | None = None
        self.seen: dict[tuple[int, bytes], int] = {}
        self.resyncs = -1  # the first one is none

    def follow(self, count: int = CHANGES_KEPT) -> bool:
        """Reads on; False when there was nothing."""
        changes = self.store.changes(self.spaces, self.place, count)
        if self.place is None or not changes.complete:
            self.resyncs += 1
            held = self.store.lookup([(space, BLOCKS) for space in self.spaces])
            self.seen = {
                (position, row.tobytes()): int(mask)
                for position, masks_of in enumerate(held)
                for row, mask in zip(BLOCKS, masks_of, strict=True)
            }
        moved = changes.place != self.place
        self.place = changes.place
        assert len(changes.hashes) <= count
        for position, row, mask in zip(
            changes.spaces.tolist(), changes.hashes, changes.tiers.tolist(), strict=True
        ):
            self.seen[position, row.tobytes()] = mask
        return moved

    def check(self) -> None:
        """It has read on to the end: what it knows is so."""
        for position, held in enumerate(self.store.lookup([(space, BLOCKS) for space in self.spaces])):
            assert [self.seen.get((position, row.tobytes()), 0) for row in BLOCKS] == held.tolist()


class ChangesMachine(RuleBasedStateMachine):
    """Saves, loads, evictions, demotions, removals; two followers of different keyspaces that read when they like."""

    @initialize(kept=st.sampled_from([6, 40, CHANGES_KEPT]))
    def begin(self, kept: int) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(changes_module, "CHANGES_KEPT", kept)
        self.kept = kept
        self.rig = Rig(Path(self.directory.name), dram_blocks=8, nvme_blocks=16)
        store = self.rig.store
        self.spaces = [store.open(make_spec(4096, group=group)) for group in ("a", "b", "c")]
        self.followers = [Follower(store, self.spaces[:2]), Follower(store, [self.spaces[2], self.spaces[0]])]
        for follower in self.followers:
            follower.follow(1)

    @rule(space=st.integers(0, 2), first=st.integers(0, 40), count=st.integers(1, 8))
    def save(self, space: int, first: int, count: int) -> None:
        assert set(save(self.rig.store, self.spaces[space], rows(BLOCKS, slice(first, first + count)))) == {
            OK
        }

    @rule(space=st.integers(0, 2), first=st.integers(0, 40), count=st.integers(1, 8))
    def load(self, space: int, first: int, count: int) -> None:
        load(self.rig.store, self.spaces[space], rows(BLOCKS, slice(first, first + count)))

    @rule(space=st.integers(0, 2), first=st.integers(0, 40), count=st.integers(1, 8))
    def remove(self, space: int, first: int, count: int) -> None:
        self.rig.store.remove(self.spaces[space], rows(BLOCKS, slice(first, first + count)))

    @rule(space=st.integers(0, 2))
    def clear(self, space: int) -> None:
        self.rig.store.clear(self.spaces[space])

    @rule(which=st.integers(0, 1), count=st.integers(1, 6))
    def follow(self, which: int, count: int) -> None:
        self.followers[which].follow(count)

    @rule(which=st.integers(0, 1))
    def catch_up(self, which: int) -> None:
        assert self.rig.store.flush(TIMEOUT_S)  # nothing moves by itself meanwhile
        follower = self.followers[which]
        while follower.follow(min(4, self.kept)):
            pass
        follower.check()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        try:
            for which in (0, 1):
                self.catch_up(which)
            if self.kept == CHANGES_KEPT:
                assert [follower.resyncs for follower in self.followers] == [0, 0]
        finally:
            self.patch.undo()
            self.rig.__exit__(None, None, None)
            self.directory.cleanup()


ChangesMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestChangesMachine = ChangesMachine.TestCase


def follow_of(store: Store, space: Keyspace, hashes: HashArray, place: ChangePlace) -> list[int]:
    """The masks that changes tell of these blocks, the last one of each."""
    changes = store.changes([space], place)
    assert changes.complete
    seen = {row.tobytes(): mask for row, mask in zip(changes.hashes, changes.tiers.tolist(), strict=True)}
    return [seen.get(row.tobytes(), -1) for row in hashes]


def test_a_demoted_block_is_told_of_in_both_places(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=64) as rig:
        store, space = rig.store, rig.space()
        place = store.changes([space]).place
        assert save(store, space, BLOCKS[:8]) == [OK] * 8
        assert follow_of(store, space, BLOCKS[:9], place) == [DRAM] * 8 + [-1]
        assert save(store, space, BLOCKS[8:40]) == [OK] * 32
        eventually(lambda: masks(store, space, BLOCKS[:8]) == [NVME] * 8, "the first ones are demoted")
        assert follow_of(store, space, BLOCKS[:8], place) == [NVME] * 8
        store.remove(space, BLOCKS[:4])
        assert follow_of(store, space, BLOCKS[:8], place) == [0] * 4 + [NVME] * 4


def test_nothing_is_told_before_somebody_asks_and_a_new_reader_begins_at_the_end(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        store, space = rig.store, rig.space()
        save(store, space, BLOCKS[:4])
        first = store.changes([space])
        assert (len(first.hashes), first.complete) == (0, True)
        save(store, space, BLOCKS[4:6])
        assert len(store.changes([space], first.place).hashes) == 2
        later = store.changes([space])
        assert (len(later.hashes), later.complete, later.place.number) == (0, True, 2)
        assert len(store.changes([], first.place).hashes) == 0


def test_another_stores_place_is_not_gone_on_from(tmp_path: Path) -> None:
    with Rig(tmp_path, nvme_blocks=16) as rig:
        space = rig.space()
        place = rig.store.changes([space]).place
        save(rig.store, space, BLOCKS[:4])
        rig.reopen()
        space = rig.space()
        found = rig.store.changes([space], place)
        assert not found.complete
        assert found.place.feed != place.feed
        assert masks(rig.store, space, BLOCKS[:4]) == [NVME] * 4
        assert rig.store.changes([space], found.place).complete


def test_a_reader_that_is_overtaken_is_told_so(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig, pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes_module, "CHANGES_KEPT", 4)
        store, space = rig.store, rig.space()
        place = store.changes([space], count=1).place
        save(store, space, BLOCKS[:4])
        assert store.changes([space], place, 4).complete
        save(store, space, BLOCKS[4:5])
        found = store.changes([space], place, 4)
        assert (found.complete, len(found.hashes)) == (False, 4)
        assert store.changes([space], found.place, 4).complete


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        space = rig.space()
        for count in (0, CHANGES_KEPT + 1):
            with pytest.raises(ArgumentError, match="count is"):
                rig.store.changes([space], count=count)
        stranger = Keyspace(make_spec(4096), bytes(32), 77)
        with pytest.raises(KeyspaceError):
            rig.store.changes([stranger])
        assert np.array_equal(rig.store.changes([space]).spaces, np.empty(0, np.uint32))
