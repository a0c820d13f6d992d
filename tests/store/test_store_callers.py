"""Whatever a medium does, callers go on: nothing that an engine calls in its step waits for a tier below DRAM."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_harness import (
    MISS,
    OK,
    TIMEOUT_S,
    Load,
    Rig,
    empty_cache,
    filled_cache,
    load,
    save,
    submit_save,
)

from tierkv.keys import Keyspace
from tierkv.testing.buffers import random_hashes
from tierkv.testing.faults import FaultKind, FaultyTier
from tierkv.tiers.base import Tier
from tierkv.types import BlockStatus, BoolArray, HashArray, SlotArray, TierKind

PROMPTLY_S = 5.0


class DeadTier(FaultyTier):
    """A tier of which every call hangs, from die() until revive()."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.alive = threading.Event()
        self.alive.set()

    def die(self) -> None:
        self.plan.fail_always("read", FaultKind.STALL)
        self.plan.fail_always("write", FaultKind.STALL)
        self.alive.clear()

    def revive(self) -> None:
        self.plan.heal()
        self.gate.release()
        self.alive.set()

    def free(self, space: Keyspace, hashes: HashArray, slots: SlotArray) -> None:
        self.alive.wait(TIMEOUT_S)
        super().free(space, hashes, slots)

    def forget(self, space: Keyspace, hashes: HashArray | None) -> None:
        self.alive.wait(TIMEOUT_S)
        super().forget(space, hashes)

    def probe(self, space: Keyspace, hashes: HashArray) -> BoolArray:
        self.alive.wait(TIMEOUT_S)
        return super().probe(space, hashes)


class DeadRig(Rig):
    """A rig whose tiers below DRAM can die."""

    def _wrap(self, tier: Tier) -> Tier:
        dead = DeadTier(tier)
        if tier.info.kind is TierKind.NVME:
            self.nvme = dead
        else:
            self.dfs = dead
        return dead

    def everyone(self) -> list[DeadTier]:
        return [tier for tier in (self.nvme, self.dfs) if isinstance(tier, DeadTier)]


def promptly(call: Callable[[], Any]) -> Any:
    """The result of a call, which must return although the tiers hang."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(PROMPTLY_S)
    assert results, "the call waits for a medium, or failed"
    return results[0]


@pytest.mark.parametrize("dfs_blocks", [0, None], ids=["nvme", "nvme and dfs"])
def test_callers_never_wait_for_a_dead_medium(tmp_path: Path, dfs_blocks: int | None) -> None:
    with DeadRig(
        tmp_path, dram_blocks=16, nvme_blocks=64, dfs_blocks=dfs_blocks, dfs={"probe_timeout_s": 0.01}
    ) as rig:
        space, below, above = rig.space(), random_hashes(8, 1), random_hashes(8, 2)
        assert save(rig.store, space, below) == [OK] * 8
        rig.reopen()
        space = rig.space()
        assert save(rig.store, space, above) == [OK] * 8
        for tier in rig.everyone():
            tier.die()
        try:
            stuck = Load(rig.store, space, below, timeout_s=0.2)
            saves = [
                submit_save(rig.store, space, random_hashes(4, seed), timeout_s=0.2) for seed in range(10, 20)
            ]
            for seed in range(100, 130):
                unknown = random_hashes(4, seed)
                assert promptly(lambda unknown=unknown: rig.store.match(space, unknown)).length == 0
            assert promptly(lambda: rig.store.match(space, above)).length in range(9)
            promptly(lambda: rig.store.lookup([(space, above), (space, below)]))
            promptly(lambda: rig.store.touch(space, above))
            promptly(rig.store.stats)
            lease = promptly(lambda: rig.store.lease([(space, above), (space, below)], 10.0))
            promptly(lambda: rig.store.stage(lease, 0.2))
            promptly(lambda: lease.extend(10.0))
            promptly(lease.release)
            memory, room = filled_cache(space, above), empty_cache(space, 8).fragments(range(8))
            promptly(lambda: rig.store.save(space, above, memory))
            job = promptly(lambda: rig.store.load(space, above, room))
            assert job.wait(TIMEOUT_S), "what DRAM holds is loaded although the tiers below are dead"
            assert stuck.statuses() == [BlockStatus.TIMEOUT] * 8
            for job in saves:
                assert job.wait(TIMEOUT_S)
        finally:
            for tier in rig.everyone():
                tier.revive()
        rig.settled()
        assert load(rig.store, space, below) == [OK] * 8
        assert set(load(rig.store, space, above)) <= {OK, MISS}


def test_a_store_with_a_dead_tier_closes_in_bounded_time(tmp_path: Path) -> None:
    """What waits for the medium ends at its own deadline, and close() with it."""
    rig = DeadRig(tmp_path, dram_blocks=8, nvme_blocks=64)
    space = rig.space()
    save(rig.store, space, random_hashes(8, 1))
    for tier in rig.everyone():
        tier.die()
    saving = submit_save(rig.store, space, random_hashes(8, 2), timeout_s=0.5)
    assert rig.nvme is not None
    assert rig.nvme.gate.wait_held()
    closer = threading.Thread(target=lambda: rig.store.close(0.2), daemon=True)
    closer.start()
    assert saving.wait(TIMEOUT_S)
    for tier in rig.everyone():
        tier.revive()
    closer.join(TIMEOUT_S)
    assert not closer.is_alive()
