"""The DRAM tier beyond what every tier must do: bounds, closing under use, and both ways of copying."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv._native import CopyPool
from tierkv.config import DramConfig
from tierkv.errors import ArgumentError, ConfigError
from tierkv.testing.buffers import BlockBuffer, block_payload, make_space, random_hashes
from tierkv.testing.tiers import TierConformance
from tierkv.tiers.base import Batch, Tier
from tierkv.tiers.dram import DramTier
from tierkv.types import BlockStatus, TierKind

MIB = 1 << 20


def config(capacity_bytes: int = 4 * MIB, slab_bytes: int = MIB, **changes: object) -> DramConfig:
    return DramConfig(capacity_bytes=capacity_bytes, slab_bytes=slab_bytes, **changes)  # type: ignore[arg-type]


class TestDram(TierConformance):
    verifies = False

    def make_tier(self, directory: Path) -> DramTier:
        return DramTier(config(self.capacity_bytes, 2 * MIB))


@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_blocks_come_back_as_they_were(pool: bool, shared: bool) -> None:
    copy_pool = CopyPool(2) if pool else None
    tier = DramTier(config(shared=shared), copy_pool=copy_pool)
    try:
        seam: Tier = tier
        assert seam.info.kind is TierKind.DRAM
        space = make_space(5000)
        hashes = random_hashes(100)
        slots = tier.allocate(space, 100)
        assert slots is not None
        assert tier.used_bytes() == 100 * 8192
        source, target = BlockBuffer(100, 5000), BlockBuffer(100, 5000)
        for position in range(100):
            source.put(position, block_payload(space, hashes[position].tobytes()))
        lengths = np.full(100, 5000, np.int64)
        assert tier.submit_write(Batch(space, hashes, slots, source.addresses, lengths)).ok()
        order = np.random.default_rng(3).permutation(100)
        read = Batch(space, hashes[order], slots[order], target.addresses, lengths)
        assert tier.submit_read(read).ok()
        for position, original in enumerate(order.tolist()):
            assert target.get(position) == block_payload(space, hashes[original].tobytes())
        assert target.guards_intact()
        assert (tier.addresses(slots) == tier.arena.address + slots.astype(np.int64) * 4096).all()
        tier.free(space, hashes, slots)
        assert tier.used_bytes() == 0
        assert list(tier.recover()) == []
        assert not tier.probe(space, hashes).any()
    finally:
        tier.close()
        tier.close()
        if copy_pool is not None:
            copy_pool.close()


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, MIB), min_size=1, max_size=12))
def test_unequal_block_sizes_share_the_arena_and_never_touch_each_other(sizes: list[int]) -> None:
    tier = DramTier(config(capacity_bytes=8 * MIB, huge_pages="off", lock_memory="off", first_touch="never"))
    try:
        held = []
        for number, size in enumerate(sizes):
            space = make_space(size, number=number, model=f"m{number}")
            before = tier.available(space)
            slots = tier.allocate(space, 1)
            assert (slots is not None) == (before > 0)
            if slots is None:
                continue
            source = BlockBuffer(1, size, fill=number + 1)
            hashes = random_hashes(1, seed=number)
            lengths = np.array([size], np.int64)
            assert tier.submit_write(Batch(space, hashes, slots, source.addresses, lengths)).ok()
            held.append((space, hashes, slots, lengths, number + 1))
        for space, hashes, slots, lengths, fill in held:
            target = BlockBuffer(1, space.block_bytes)
            assert tier.submit_read(Batch(space, hashes, slots, target.addresses, lengths)).ok()
            assert (target[0] == fill).all()
        for space, hashes, slots, _, _ in held:
            tier.free(space, hashes, slots)
        assert tier.used_bytes() == 0
    finally:
        tier.close()


def test_what_is_out_of_bounds_is_refused_before_a_byte_moves() -> None:
    tier = DramTier(config())
    try:
        space = make_space(8192)
        buffer = BlockBuffer(1, 8192)
        beyond = np.array([tier.info.capacity_bytes // 4096 - 1], np.uint32)
        batch = Batch(space, random_hashes(1), beyond, buffer.addresses, np.array([8192], np.int64))
        for submit in (tier.submit_write, tier.submit_read):
            with pytest.raises(ArgumentError, match="beyond"):
                submit(batch)
        with pytest.raises(ArgumentError, match="slab_bytes"):
            tier.allocate(make_space(2 * MIB), 1)
        with pytest.raises(ArgumentError, match="free"):
            tier.free(space, random_hashes(1), np.array([3], np.uint32))
    finally:
        tier.close()


def test_full_means_none_and_nothing_changed() -> None:
    tier = DramTier(config())
    try:
        space = make_space(MIB)
        assert tier.available(space) == 4
        assert tier.allocate(space, 5) is None
        assert tier.available(space) == 4
        slots = tier.allocate(space, 4)
        assert slots is not None
        assert tier.allocate(space, 1) is None
    finally:
        tier.close()


def test_closing_waits_for_copies_and_cancels_later_ones() -> None:
    """A copy that is under way when close() comes must find its memory mapped until it ends."""
    entered, go_on = threading.Event(), threading.Event()

    class SlowPool(CopyPool):
        def copy(self, destinations: object, sources: object, lengths: object) -> None:
            entered.set()
            assert go_on.wait(30)
            super().copy(destinations, sources, lengths)

    pool = SlowPool(1)
    tier = DramTier(config(), copy_pool=pool)
    space = make_space(4096)
    slots = tier.allocate(space, 1)
    assert slots is not None
    source = BlockBuffer(1, 4096)
    batch = Batch(space, random_hashes(1), slots, source.addresses, np.array([4096], np.int64))
    outcome: list[int] = []
    writer = threading.Thread(target=lambda: outcome.append(int(tier.submit_write(batch).status[0])))
    writer.start()
    assert entered.wait(30)
    closer = threading.Thread(target=tier.close)
    closer.start()
    while not tier._closed:
        closer.join(0.001)
    assert closer.is_alive()
    assert tier.submit_read(batch).status.tolist() == [BlockStatus.CANCELLED]
    go_on.set()
    writer.join(30)
    closer.join(30)
    assert outcome == [BlockStatus.OK]
    assert not closer.is_alive()
    assert not any("views" in note for note in tier.arena.notes)
    pool.close()


def test_settings_that_cannot_be_had_are_refused() -> None:
    with pytest.raises(ConfigError, match="huge_pages"):
        _with_thp_off(lambda: DramTier(config(huge_pages="on")))


def _with_thp_off(action: object) -> None:
    """prctl(PR_SET_THP_DISABLE): this process gets no transparent huge pages while it is set."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(41, 1, 0, 0, 0) != 0:
        pytest.skip("this kernel cannot switch huge pages off for a process")
    try:
        action()  # type: ignore[operator]
    finally:
        libc.prctl(41, 0, 0, 0, 0)
