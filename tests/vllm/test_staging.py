"""Blocks staged between a device and the store: the same bytes as straight from host memory, for any layout."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import staging_harness as harness
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from staging_harness import SHARD, TIMEOUT_S, Layout, block_bytes, hashes_of, ids

from tierkv.adapters.vllm.device import Device, HostDevice
from tierkv.adapters.vllm.settings import ConnectorSettings, read_settings
from tierkv.adapters.vllm.staging import DevicePath, PathMaker, Staging
from tierkv.adapters.vllm.worker import HostPath
from tierkv.errors import ArgumentError, ConfigError, StorageError
from tierkv.types import BlockStatus


@settings(max_examples=60, deadline=None)
@given(harness.layouts(), st.integers(1, 5), st.data())
def test_staged_blocks_are_those_of_the_straight_path(
    layout: Layout, blocks_a_slot: int, data: st.DataObject
) -> None:
    """Saved one way and loaded the other, both ways round; what was not loaded stays as it was."""
    mine, mine_raw = layout.make(1)
    other, other_raw = layout.make(2)
    count = data.draw(st.integers(1, layout.blocks))
    sources = data.draw(st.permutations(range(layout.blocks)))[:count]
    targets = data.draw(st.permutations(range(layout.blocks)))[:count]
    hashes = hashes_of(*range(count))
    with harness.open_store() as store:
        space = harness.open_space(store, mine)
        staging = Staging(store, HostDevice(), harness.staging_bytes(mine, blocks_a_slot))
        try:
            for save_staged in (True, False):
                staged = staging.path(space, mine if save_staged else other, SHARD)
                straight = HostPath(store, space, other if save_staged else mine, SHARD)
                from_, into = (staged, straight) if save_staged else (straight, staged)
                store.clear(space)
                before = [block_bytes(mine, mine_raw, block) for block in range(layout.blocks)]
                expected = [block_bytes(other, other_raw, block) for block in range(layout.blocks)]
                for target, source in zip(targets, sources, strict=True):
                    expected[target] = before[source]
                untouched = _between_blocks(other, other_raw)
                saved = from_.save(hashes, ids(*sources), TIMEOUT_S)
                assert saved.wait(TIMEOUT_S)
                assert saved.ok()
                loaded = into.load(hashes, ids(*targets), TIMEOUT_S)
                assert loaded.wait(TIMEOUT_S)
                assert loaded.ok()
                assert [block_bytes(other, other_raw, block) for block in range(layout.blocks)] == expected
                assert [block_bytes(mine, mine_raw, block) for block in range(layout.blocks)] == before
                assert _between_blocks(other, other_raw) == untouched
                other, other_raw = layout.make(3)
        finally:
            assert staging.close(TIMEOUT_S)


def _between_blocks(cache: Any, allocations: list[torch.Tensor]) -> list[bytes]:
    """The padding: what belongs to no block."""
    found = []
    for raw in allocations:
        bytes_ = raw.numpy().copy()
        for base, stride, length in zip(cache.bases, cache.strides, cache.lengths, strict=True):
            for block in range(cache.blocks):
                begin = int(base + block * stride) - raw.data_ptr()
                if 0 <= begin < len(bytes_):
                    bytes_[begin : begin + int(length)] = 0
        found.append(bytes_.tobytes())
    return found


def test_many_threads_move_blocks_at_once() -> None:
    layout = Layout((3, 64, 2, 8, 4), (1, 0, 2, 3, 4), (0, 0, 0, 0, 1), torch.float16, True)
    cache, raw = layout.make(1)
    original = [block_bytes(cache, raw, block) for block in range(layout.blocks)]
    problems: list[str] = []
    with harness.open_store() as store:
        space = harness.open_space(store, cache)
        staging = Staging(store, HostDevice(), harness.staging_bytes(cache, 3))
        path = staging.path(space, cache, SHARD)

        def move(own: range) -> None:
            """Saves its blocks, and loads them back to themselves after wiping them, a few times."""
            blocks = ids(*own)
            for turn in range(8):
                hashes = hashes_of(*(turn << 16 | block for block in own))
                saved = path.save(hashes, blocks, TIMEOUT_S)
                if not saved.wait(TIMEOUT_S) or not saved.ok():
                    problems.append(f"save {own} {turn}: {saved.status}")
                for tensor in cache.tensors:
                    tensor[own.start : own.stop] = 0
                loaded = path.load(hashes, blocks, TIMEOUT_S)
                if not loaded.wait(TIMEOUT_S) or not loaded.ok():
                    problems.append(f"load {own} {turn}: {loaded.status}")

        threads = [threading.Thread(target=move, args=(range(k * 13, k * 13 + 13),)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * TIMEOUT_S)
        assert staging.close(TIMEOUT_S)
    assert not problems
    assert [block_bytes(cache, raw, block) for block in range(layout.blocks)] == original


def test_caches_made_in_inference_mode_are_written() -> None:
    with torch.inference_mode(), harness.open_store() as store:
        cache, raw = harness.PLAIN.make(1)
        space = harness.open_space(store, cache)
        staging = Staging(store, HostDevice(), 1 << 20)
        path = staging.path(space, cache, SHARD)
        expected = block_bytes(cache, raw, 3)
        assert path.save(hashes_of(1), ids(3), TIMEOUT_S).wait(TIMEOUT_S)
        loaded = path.load(hashes_of(1), ids(5), TIMEOUT_S)
        assert loaded.wait(TIMEOUT_S)
        assert loaded.ok()
        assert block_bytes(cache, raw, 5) == expected
        assert staging.close(TIMEOUT_S)


def test_a_regular_cache_takes_one_kernel_a_chunk() -> None:
    with harness.rig() as rig:
        assert len(rig.cache.bases) == 2
        assert rig.path.plates == 1
        assert rig.path.chunk_blocks >= 2


@pytest.mark.parametrize("block_ids", [ids(0, 24), ids(-1, 0), ids(1)])
def test_blocks_outside_the_cache_are_refused(block_ids: np.ndarray) -> None:
    with harness.rig() as rig, pytest.raises(ArgumentError):
        rig.path.save(hashes_of(1, 2), block_ids, TIMEOUT_S)


def test_a_block_that_fits_no_slot_is_refused_with_the_setting() -> None:
    cache, _ = harness.PLAIN.make(1)
    space: Any = None
    needed = harness.staging_bytes(cache, 1)
    staging = Staging(harness.ScriptedStore(), HostDevice(), 1024)
    try:
        with pytest.raises(ConfigError, match=r"staging_bytes to (\d+)") as refusal:
            staging.path(space, cache, SHARD)
    finally:
        assert staging.close(TIMEOUT_S)
    named = int(str(refusal.value).rpartition("staging_bytes to ")[2].split()[0])
    assert named <= needed
    staging = Staging(harness.ScriptedStore(), HostDevice(), named)
    assert staging.path(space, cache, SHARD).chunk_blocks == 1
    assert staging.close(TIMEOUT_S)


def test_a_device_that_cannot_copy_is_found_at_the_start() -> None:
    class Broken(HostDevice):
        def mark(self) -> threading.Event:
            raise RuntimeError("no kernel image is available")

    class BrokenWork(HostDevice):
        def lane(self, name: str) -> Any:
            lane = super().lane(name)
            run = lane.run
            lane.run = lambda after, work, landed: run(after, lambda: 1 / 0, landed)  # type: ignore[method-assign]
            return lane

    cache, _ = harness.PLAIN.make(1)
    space: Any = None
    for device, error in ((Broken(), RuntimeError), (BrokenWork(), StorageError)):
        staging = Staging(harness.ScriptedStore(), device, 1 << 20)
        with pytest.raises(error):
            staging.path(space, cache, SHARD)
        assert staging.close(TIMEOUT_S)


class OnHost(PathMaker):
    """Takes caches on the `meta` device for ones that it has to stage, and stages them in host memory."""

    def _open(self, device: Any) -> Device:
        return HostDevice()


def test_the_path_is_chosen_by_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    store = harness.ScriptedStore()
    space: Any = None
    cache, _ = harness.PLAIN.make(1)
    maker = OnHost(store, 1 << 20)
    assert isinstance(maker.path(space, cache, SHARD), HostPath)
    assert maker.close(0.0)

    def on(*devices: str) -> Any:
        tensors = tuple(SimpleNamespace(device=torch.device(name)) for name in devices)
        return SimpleNamespace(tensors=tensors)

    with pytest.raises(ConfigError, match="on a xpu device"):
        maker.path(space, on("xpu:0"), SHARD)
    with pytest.raises(ConfigError, match="on a meta device"):
        maker.path(space, on("cuda:0", "meta"), SHARD)
    with pytest.raises(ConfigError, match="cpu, cuda:0"):
        maker.path(space, on("cpu", "cuda:0"), SHARD)
    with pytest.raises(ConfigError, match="cuda:0, cuda:1"):
        maker.path(space, on("cuda:0", "cuda:1"), SHARD)
    made: list[Any] = []
    monkeypatch.setattr(Staging, "path", lambda self, *given: made.append(self))
    maker.path(space, on("cuda:0"), SHARD)
    maker.path(space, on("cuda:0", "cuda:0"), SHARD)
    assert made[0] is made[1], "the groups share one staging"
    with pytest.raises(ConfigError, match="cuda:0, cuda:1"):
        maker.path(space, on("cuda:1"), SHARD)
    assert maker.close(TIMEOUT_S)


def test_the_setting() -> None:
    assert ConnectorSettings().staging() == 256 << 20
    assert read_settings({"staging_bytes": "1GiB"}).staging() == 1 << 30
    for wrong in (0, -4096, "lots"):
        with pytest.raises(ConfigError, match="staging_bytes"):
            read_settings({"staging_bytes": wrong})


def test_orders_to_a_closed_path_are_cancelled() -> None:
    with harness.rig() as rig:
        assert rig.staging.close(TIMEOUT_S)
        path: DevicePath = rig.path
        for job in (path.load(hashes_of(1), ids(1), 1.0), path.save(hashes_of(1), ids(1), 1.0)):
            assert job.done()
            assert job.status.tolist() == [BlockStatus.CANCELLED]
