"""Fragments describe exactly the bytes of the blocks, and refuse what they cannot describe."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import ArgumentError
from tierkv.fragments import Fragments
from tierkv.testing.buffers import PagedCache, aligned_buffer, block_payload, make_space, part_payload
from tierkv.testing.strategies import CacheCase, caches


def read_by_hand(fragments: Fragments, position: int) -> bytes:
    """What the definition in the docstring says block `position` is."""
    block = int(fragments.block_ids[position])
    pieces = zip(
        fragments.bases.tolist(), fragments.strides.tolist(), fragments.lengths.tolist(), strict=True
    )
    return b"".join(ctypes.string_at(base + block * stride, length) for base, stride, length in pieces)


@given(caches())
def test_fragments_name_the_pieces_in_the_order_of_the_layers(case: CacheCase) -> None:
    cache = case.cache
    rng = np.random.default_rng(1)
    contents = [rng.bytes(cache.part_bytes) for _ in range(cache.blocks)]
    for block_id, data in enumerate(contents):
        cache.put(block_id, data)
    fragments = cache.fragments(case.block_ids)
    assert fragments.count == len(case.block_ids)
    assert fragments.bytes_per_block == cache.part_bytes
    for position, block_id in enumerate(case.block_ids):
        assert read_by_hand(fragments, position) == contents[block_id] == cache.get(block_id)
    assert cache.guards_intact()


@given(caches(min_ids=1), st.data())
def test_select_keeps_the_cache_and_picks_blocks(case: CacheCase, data: st.DataObject) -> None:
    fragments = case.cache.fragments(case.block_ids)
    count = fragments.count
    picks = data.draw(
        st.one_of(
            st.lists(st.integers(0, count - 1), max_size=count).map(lambda p: np.array(p, np.int64)),
            st.lists(st.booleans(), min_size=count, max_size=count).map(np.array),
            st.builds(slice, st.integers(0, count), st.integers(0, count)),
        )
    )
    selected = fragments.select(picks)
    assert selected.block_ids.tolist() == fragments.block_ids[picks].tolist()
    assert selected.bases.tolist() == fragments.bases.tolist()
    assert selected.owners == fragments.owners


@given(
    st.integers(1, 5),
    st.lists(st.integers(1, 3), max_size=2),
    st.sampled_from([np.uint8, np.float16, np.float32, np.int64]),
    st.integers(1, 3),
)
def test_from_arrays_sees_strided_views(blocks: int, shape: list[int], dtype: type, step: int) -> None:
    whole = np.arange(blocks * step * int(np.prod(shape)), dtype=dtype).reshape(blocks * step, *shape)
    view = whole[::step]
    ids = np.arange(blocks)[::-1]
    fragments = Fragments.from_arrays([view, view], ids)
    for position, block in enumerate(ids):
        assert read_by_hand(fragments, position) == view[block].tobytes() * 2


def test_from_arrays_takes_layers_of_unequal_shape_and_keeps_them_alive() -> None:
    layers = [np.zeros((4, 2, 3), np.float16), np.zeros((4, 5), np.uint8)]
    fragments = Fragments.from_arrays(layers, [3, 0])
    assert fragments.lengths.tolist() == [12, 5]
    assert fragments.owners == tuple(layers)


def test_from_blocks_is_the_simplest_cache() -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (5, 300), dtype=np.uint8)
    fragments = Fragments.from_blocks(blocks)
    assert fragments.block_ids.tolist() == [0, 1, 2, 3, 4]
    assert [read_by_hand(fragments, position) for position in range(5)] == [row.tobytes() for row in blocks]


def test_what_looks_like_a_torch_tensor_is_described_by_its_elements() -> None:
    memory = np.arange(4 * 2 * 6, dtype=np.float32).reshape(4, 2, 6)
    tensor = SimpleNamespace(
        data_ptr=lambda: memory.__array_interface__["data"][0],
        element_size=lambda: 4,
        shape=(4, 6),
        stride=lambda: (12, 1),
    )
    fragments = Fragments.from_arrays([tensor], [1, 3])
    assert [read_by_hand(fragments, k) for k in (0, 1)] == [memory[1, 0].tobytes(), memory[3, 0].tobytes()]


def test_a_block_that_is_not_contiguous_is_refused_with_a_way_out() -> None:
    with pytest.raises(ArgumentError, match="one piece for each contiguous run"):
        Fragments.from_arrays([np.zeros((4, 6, 2), np.uint8)[:, ::2]], [0])
    with pytest.raises(ArgumentError, match="layer 1"):
        Fragments.from_arrays(
            [np.zeros((4, 2), np.uint8), np.zeros((4, 3, 2), np.uint8).transpose(0, 2, 1)], [0]
        )


@pytest.mark.parametrize("ids", [[-1], [4], [0, 4], [[0]], [1 << 40]])
def test_block_ids_outside_the_layers_are_refused(ids: list[int]) -> None:
    with pytest.raises(ArgumentError, match=r"0\.\.2"):
        Fragments.from_arrays([np.zeros((4, 2), np.uint8), np.zeros((3, 2), np.uint8)], ids)


@pytest.mark.parametrize(
    "layers", [[], [b"bytes"], [np.zeros((0, 4), np.uint8)], [np.zeros((4, 0), np.uint8)], [np.array(1)]]
)
def test_what_is_no_layer_is_refused(layers: list[object]) -> None:
    with pytest.raises(ArgumentError):
        Fragments.from_arrays(layers, [])


@pytest.mark.parametrize(
    "changes",
    [
        {"bases": [1]},
        {"bases": np.array([1], np.int32)},
        {"bases": np.array([[1]])},
        {"bases": np.array([0])},
        {
            "bases": np.array([], np.int64),
            "strides": np.array([], np.int64),
            "lengths": np.array([], np.int64),
        },
        {"strides": np.array([1, 2])},
        {"lengths": np.array([0])},
        {"lengths": np.array([-5])},
        {"block_ids": np.array([-1])},
        {"block_ids": np.array([1.0])},
    ],
)
def test_wrong_arrays_are_refused(changes: dict) -> None:
    fields = {
        "bases": np.array([4096]),
        "strides": np.array([8]),
        "lengths": np.array([8]),
        "block_ids": np.array([0]),
    }
    with pytest.raises(ArgumentError, match="Fragments"):
        Fragments(**{**fields, **changes})


def test_the_helpers_agree_on_payloads() -> None:
    space = make_space(10_001, parts=3)
    block_hash = bytes(range(32))
    parts = [part_payload(space, block_hash, part) for part in range(3)]
    assert b"".join(parts) == block_payload(space, block_hash)
    assert block_payload(make_space(10_001, parts=2), block_hash) != block_payload(space, block_hash)
    assert block_payload(space, block_hash) != block_payload(space, bytes(32))


def test_the_guards_of_a_cache_notice_a_stray_byte() -> None:
    cache = PagedCache(3, [10, 20], [5, 0])
    cache.wipe(7)
    assert cache.guards_intact()
    fragments = cache.fragments([0])
    ctypes.memset(int(fragments.bases[0]) + 10, 0, 1)
    assert not cache.guards_intact()
    assert aligned_buffer(10).__array_interface__["data"][0] % 4096 == 0
