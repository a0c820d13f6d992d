"""Nothing waits for ever: not for a tier that contradicts itself, nor for one that hangs while the store closes."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
from store_harness import MISS, OK, TIMEOUT_S, Load, Rig, masks, rows, save, submit_save

from tierkv.keys import Keyspace
from tierkv.testing.buffers import chain_hashes, random_hashes
from tierkv.testing.faults import FaultKind
from tierkv.tiers.base import Tier
from tierkv.types import BlockStatus, SlotArray, TierKind


class BoastingTier:
    """Says that it has room, and grants nothing."""

    def __init__(self, inner: Tier) -> None:
        self._inner = inner
        self.boasting = True

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def allocate(self, space: Keyspace, count: int) -> SlotArray | None:
        return None if self.boasting else self._inner.allocate(space, count)

    def available(self, space: Keyspace) -> int:
        return 1 << 20 if self.boasting else self._inner.available(space)


class BoastingRig(Rig):
    def _wrap(self, tier: Tier) -> Tier:
        wrapped = super()._wrap(tier)
        return BoastingTier(wrapped) if tier.info.kind is TierKind.NVME else wrapped  # type: ignore[return-value]


def test_a_tier_that_refuses_what_it_says_it_has_is_given_up_soon(tmp_path: Path) -> None:
    with BoastingRig(tmp_path, dram_blocks=8, nvme_blocks=16) as rig:
        space = rig.space()
        for seed in range(4):
            assert save(rig.store, space, random_hashes(8, seed)) == [OK] * 8
        assert rig.store.stats().tiers["nvme"].written_blocks == 0


def test_flush_does_not_wait_for_a_read_that_hangs(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=16, nvme_blocks=32) as rig:
        space, below = rig.space(), random_hashes(4, 1)
        save(rig.store, space, below)
        rig.reopen()
        space = rig.space()
        assert rig.nvme is not None
        rig.nvme.plan.fail_next("read", FaultKind.STALL)
        stuck = Load(rig.store, space, below)
        assert rig.nvme.gate.wait_held()
        save(rig.store, space, random_hashes(4, 2))
        assert rig.store.flush(TIMEOUT_S / 2), "a load keeps flush waiting"
        rig.nvme.gate.release()
        assert stuck.statuses() == [OK] * 4


def test_close_does_not_wait_for_the_deadline_of_a_save_whose_write_hangs(tmp_path: Path) -> None:
    rig = Rig(tmp_path, dram_blocks=8, nvme_blocks=64)
    space = rig.space()
    save(rig.store, space, random_hashes(8, 1))
    assert rig.nvme is not None
    rig.nvme.plan.fail_always("write", FaultKind.STALL)
    saving = submit_save(rig.store, space, random_hashes(8, 2), timeout_s=600.0)
    assert rig.nvme.gate.wait_held()
    began_s = time.monotonic()
    closer = threading.Thread(target=lambda: rig.store.close(0), daemon=True)
    closer.start()
    closer.join(TIMEOUT_S)
    assert not closer.is_alive(), f"close() still waits after {time.monotonic() - began_s:.0f} s"
    assert saving.done()
    assert set(saving.status.tolist()) <= {BlockStatus.DROPPED, BlockStatus.CANCELLED}


def test_a_chain_does_not_push_its_head_out_for_its_tail_when_the_rest_is_leased(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=6, slab_blocks=6) as rig:
        space, chain = rig.space(), chain_hashes(1, 7)
        held = rows(chain, slice(2, 7))
        save(rig.store, space, held)
        with rig.store.lease([(space, held)], 10.0):
            assert save(rig.store, space, rows(chain, slice(0, 3))) == [OK, BlockStatus.DROPPED, OK]
            assert [bool(mask) for mask in masks(rig.store, space, chain)] == [True, False] + [True] * 5
            assert rig.store.match(space, chain).length == 1
        assert np.count_nonzero(masks(rig.store, space, random_hashes(1, 9))) == 0
        assert Load(rig.store, space, random_hashes(1, 9)).statuses() == [MISS]


def test_flush_ends_when_the_tier_below_is_smaller_than_dram(tmp_path: Path) -> None:
    """It must not write to and fro what that tier evicts for the rest."""
    with Rig(tmp_path, dram_blocks=32, nvme_blocks=8) as rig:
        space, hashes = rig.space(), random_hashes(32, 1)
        assert save(rig.store, space, hashes) == [OK] * 32
        assert rig.store.flush(TIMEOUT_S)
        assert rig.store.stats().tiers["nvme"].written_blocks == 32
        assert Load(rig.store, space, hashes).statuses() == [OK] * 32
