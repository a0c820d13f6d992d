"""The shared tier: what other nodes wrote is learned, what they removed is forgotten, what was cleared stays so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
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
)

from tierkv.errors import StorageError
from tierkv.keys import Keyspace
from tierkv.testing.buffers import random_hashes
from tierkv.testing.faults import FaultyTier
from tierkv.testing.wrappers import TierWrapper
from tierkv.tiers.base import Residents, Tier
from tierkv.types import BoolArray, HashArray, TierKind


class SlowListing(FaultyTier):
    """A tier whose listing and probes answer when they are let go: as they were when asked."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.asked = threading.Event()
        self.go = threading.Event()
        self.go.set()

    def recover(self) -> Iterator[Residents]:
        listed = list(self.inner.recover())
        self.asked.set()
        assert self.go.wait(TIMEOUT_S)
        yield from listed

    def probe(self, space: Keyspace, hashes: HashArray) -> BoolArray:
        found = self.inner.probe(space, hashes)
        self.asked.set()
        assert self.go.wait(TIMEOUT_S)
        return found


class SharedRig(Rig):
    """A rig whose shared tier is a SlowListing."""

    hold = False

    def _wrap(self, tier: Tier) -> Tier:
        assert tier.info.kind is TierKind.DFS
        self.listing = SlowListing(tier)
        self.dfs = self.listing
        if self.hold:
            self.listing.go.clear()
        return self.listing


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[SharedRig]:
    with SharedRig(tmp_path, dram_blocks=16, dfs_blocks=None) as rig:
        yield rig
        rig.listing.go.set()


def stored(rig: SharedRig, seed: int = 1) -> tuple[Keyspace, HashArray]:
    space, hashes = rig.space(), random_hashes(6, seed)
    assert save(rig.store, space, hashes) == [OK] * 6
    assert rig.store.flush(TIMEOUT_S)
    assert in_tier(TierKind.DFS, masks(rig.store, space, hashes)) == [True] * 6
    return space, hashes


@pytest.mark.parametrize("how", ["clear", "remove"])
def test_a_listing_begun_before_a_removal_does_not_bring_blocks_back(rig: SharedRig, how: str) -> None:
    _, hashes = stored(rig)
    rig.hold = True
    rig.reopen(0)
    space = rig.space()
    assert rig.listing.asked.wait(TIMEOUT_S)  # the files are listed, but not yet in the index
    if how == "clear":
        rig.store.clear(space)
    else:
        rig.store.remove(space, hashes)
    rig.listing.go.set()
    assert rig.store._sharing[0].scanned.wait(TIMEOUT_S)
    assert masks(rig.store, space, hashes) == [0] * 6
    assert rig.store.match(space, hashes).length == 0
    assert load(rig.store, space, hashes) == [MISS] * 6


@pytest.mark.parametrize("how", ["clear", "remove"])
def test_a_probe_begun_before_a_removal_does_not_bring_blocks_back(tmp_path: Path, how: str) -> None:
    with SharedRig(tmp_path, dram_blocks=16, dfs_blocks=None, dfs={"probe_timeout_s": 0.01}) as rig:
        space, hashes = rig.space(), random_hashes(6, 2)
        assert rig.store._sharing[0].scanned.wait(TIMEOUT_S)
        with Rig(tmp_path / "other", dfs_blocks=None, dfs={"directory": str(tmp_path / "dfs")}) as other:
            assert save(other.store, other.space(), hashes) == [OK] * 6
            assert other.store.flush(TIMEOUT_S)
        rig.listing.asked.clear()
        rig.listing.go.clear()
        assert rig.store.match(space, hashes).length == 0, "a slow directory must not hold a look-up up"
        assert rig.listing.asked.wait(TIMEOUT_S)
        if how == "clear":
            rig.store.clear(space)
        else:
            rig.store.remove(space, hashes)
        rig.listing.go.set()
        rig.clock.advance(5.0)
        found = rig.store.match(space, hashes).length
        assert found == 0
        assert load(rig.store, space, hashes) == [MISS] * 6


def test_what_others_removed_is_forgotten_at_the_next_listing(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=16, dfs_blocks=None, dfs={"rescan_s": 0.05}) as rig:
        space, hashes = rig.space(), random_hashes(6, 3)
        save(rig.store, space, hashes)
        assert rig.store.flush(TIMEOUT_S)
        for row in rows(hashes, slice(0, 3)):
            for path in (tmp_path / "dfs").rglob(row.tobytes().hex()):
                path.unlink()
        expected = [False] * 3 + [True] * 3
        eventually(
            lambda: in_tier(TierKind.DFS, masks(rig.store, space, hashes)) == expected,
            "the listing is compared",
        )
        assert load(rig.store, space, hashes) == [OK] * 6, "DRAM still has them"


def test_a_listing_finds_what_nobody_asked_for(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=16, dfs_blocks=None) as one:
        hashes = random_hashes(6, 4)
        save(one.store, one.space(), hashes)
        assert one.store.flush(TIMEOUT_S)
        with Rig(tmp_path / "two", dfs_blocks=None, dfs={"directory": str(tmp_path / "dfs")}) as two:
            space = two.space()
            eventually(lambda: all(masks(two.store, space, hashes)), "the directory is listed at the start")


def test_a_directory_that_does_not_answer_costs_a_look_up_a_bounded_time(tmp_path: Path) -> None:
    with SharedRig(tmp_path, dram_blocks=16, dfs_blocks=None, dfs={"probe_timeout_s": 0.01}) as rig:
        assert rig.store._sharing[0].scanned.wait(TIMEOUT_S)
        rig.listing.go.clear()
        space = rig.space()
        for seed in range(100):  # more than the queue of probes holds
            assert rig.store.match(space, random_hashes(3, seed)).length == 0
        mine = random_hashes(3, 200)
        assert save(rig.store, space, mine) == [OK] * 3
        assert rig.store.match(space, mine).length == 3
        rig.listing.go.set()


class SilentTier(TierWrapper):
    """Cannot be listed while `silent`."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.silent = False
        self.asked = 0

    def recover(self) -> Iterator[Residents]:
        if self.silent:
            self.asked += 1
            raise StorageError("the medium does not answer")
        return super().recover()


class SilentRig(Rig):
    silent: SilentTier

    def _wrap(self, tier: Tier) -> Tier:
        wrapped = super()._wrap(tier)
        if tier.info.shared:
            wrapped = self.silent = SilentTier(wrapped)
        return wrapped


def test_a_listing_that_fails_does_not_make_the_store_forget(tmp_path: Path) -> None:
    with SilentRig(tmp_path, dram_blocks=16, dfs_blocks=None, dfs={"rescan_s": 0.05}) as rig:
        space, hashes = rig.space(), random_hashes(4, 1)
        save(rig.store, space, hashes)
        eventually(
            lambda: in_tier(TierKind.DFS, masks(rig.store, space, hashes)) == [True] * 4, "write-through"
        )
        rig.silent.silent = True
        eventually(lambda: rig.silent.asked >= 3, "it is asked again and again")
        assert in_tier(TierKind.DFS, masks(rig.store, space, hashes)) == [True] * 4
