"""Layouts: blocks of tensors in any order and with any gaps come out whole, go back in, and touch nothing else."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.adapters.vllm.layout import GroupCache, describe_group
from tierkv.errors import ArgumentError

GUARD = 0xA5
Array = np.ndarray[Any, np.dtype[Any]]


def strided(
    shape: tuple[int, ...], order: tuple[int, ...], gaps: tuple[int, ...], dtype: str
) -> tuple[Array, Array]:
    """(a tensor whose axes lie in memory in `order`, outermost first, with gaps in items; all of its memory)."""
    item = np.dtype(dtype).itemsize
    strides = [0] * len(shape)
    step = item
    for axis, gap in zip(reversed(order), gaps, strict=True):
        strides[axis] = step
        step = step * shape[axis] + gap * item
    memory = np.full(step, GUARD, np.uint8)
    return np.ndarray(shape, dtype, memory, 0, tuple(strides)), memory


@st.composite
def a_layer(draw: st.DrawFn) -> dict[str, Any]:
    dims = draw(st.lists(st.integers(1, 4), min_size=0, max_size=3))
    kernel = draw(st.sampled_from([1, 1, 2, 3]))
    axes = len(dims) + 1
    order = tuple(draw(st.permutations(range(axes))))
    return {
        "kernel": kernel, "dims": tuple(dims), "order": order,
        "dtype": draw(st.sampled_from(["uint8", "float16", "float32"])),
        "gaps": [tuple(draw(st.lists(st.integers(0, 3), min_size=axes, max_size=axes))) for _ in range(2)],
    }  # fmt: skip


def made(layers: list[dict[str, Any]], blocks: int, side: int) -> tuple[GroupCache, list[Array], list[Array]]:
    arrays, memories = [], []
    for layer in layers:
        shape = (blocks * layer["kernel"], *layer["dims"])
        array, memory = strided(shape, layer["order"], layer["gaps"][side], layer["dtype"])
        arrays.append(array)
        memories.append(memory)
    names = [f"layer {number}" for number in range(len(layers))]
    return describe_group(names, dict(zip(names, arrays, strict=True)), blocks), arrays, memories


def block_of(array: Array, kernel: int, block: int) -> Array:
    return array[block * kernel : (block + 1) * kernel]


def gathered(cache: GroupCache, block: int) -> bytes:
    fragments = cache.fragments(np.array([block], np.int64))
    return b"".join(
        ctypes.string_at(int(base + block * stride), int(length))
        for base, stride, length in zip(fragments.bases, fragments.strides, fragments.lengths, strict=True)
    )


def scattered(cache: GroupCache, block: int, content: bytes) -> None:
    at = 0
    for base, stride, length in zip(cache.bases, cache.strides, cache.lengths, strict=True):
        ctypes.memmove(int(base + block * stride), content[at : at + int(length)], int(length))
        at += int(length)


@settings(max_examples=250)
@given(layers=st.lists(a_layer(), min_size=1, max_size=3), blocks=st.integers(1, 4), data=st.data())
def test_blocks_go_from_one_cache_to_another(
    layers: list[dict[str, Any]], blocks: int, data: st.DataObject
) -> None:
    source, arrays, _ = made(layers, blocks, 0)
    target, copies, memories = made(layers, blocks, 1)
    assert source.described == target.described, "gaps make no other bytes"
    assert source.block_bytes == sum(array.nbytes for array in arrays) // blocks
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    for array in arrays:
        array[...] = random.integers(0, 200, array.shape).astype(array.dtype)
    origin, place = data.draw(st.integers(0, blocks - 1)), data.draw(st.integers(0, blocks - 1))
    content = gathered(source, origin)
    assert len(content) == source.block_bytes
    scattered(target, place, content)
    for layer, array, copy, memory in zip(layers, arrays, copies, memories, strict=True):
        assert (block_of(array, layer["kernel"], origin) == block_of(copy, layer["kernel"], place)).all()
        block_of(copy, layer["kernel"], place).view()[...] = np.array(0, copy.dtype)
        written = block_of(copy, layer["kernel"], place).size * copy.itemsize
        assert np.count_nonzero(memory == GUARD) >= len(memory) - written
        untouched = memory.copy()
        expected = np.full_like(memory, GUARD)
        mirror = np.ndarray(copy.shape, copy.dtype, expected, 0, copy.strides)
        block_of(mirror, layer["kernel"], place)[...] = np.array(0, copy.dtype)
        assert (untouched == expected).all(), "nothing but the block was written"


@settings(max_examples=150)
@given(layer=a_layer(), blocks=st.integers(2, 4))
def test_another_order_of_axes_is_described_as_another(layer: dict[str, Any], blocks: int) -> None:
    """The order in which values lie within a block decides its bytes, so it must decide its description."""
    one, arrays, _ = made([layer], blocks, 0)
    for order in {tuple(reversed(layer["order"])), tuple(sorted(layer["order"]))}:
        other, others, _ = made([{**layer, "order": order}], blocks, 0)
        others[0][...] = arrays[0][...] = np.arange(arrays[0].size).reshape(arrays[0].shape) % 251
        if gathered(one, 1) != gathered(other, 1):
            assert one.described != other.described


def test_shapes_dtypes_and_names_are_described() -> None:
    base = np.zeros((4, 2, 3), np.float16)

    def described(**caches: Array) -> str:
        return describe_group(list(caches), caches, 4).described

    assert described(a=base) == described(a=base.copy())
    different = [
        described(a=base), described(a=base.view(np.int16)), described(a=base.reshape(4, 3, 2)),
        described(b=base), described(a=base, b=base.copy()), described(a=np.zeros((8, 2, 3), np.float16)),
    ]  # fmt: skip
    assert len(set(different)) == len(different)


def test_layers_side_by_side_are_one_piece() -> None:
    memory = np.zeros((4, 3, 64), np.uint8)
    layers = {f"layer {number}": memory[:, number] for number in range(3)}
    cache = describe_group(list(layers), layers, 4)
    assert cache.lengths.tolist() == [192]
    assert cache.strides.tolist() == [192]
    apart = {f"layer {number}": np.zeros((4, 64), np.uint8) for number in range(3)}
    assert describe_group(list(apart), apart, 4).lengths.tolist() == [64, 64, 64]


def test_keys_and_values_of_a_layer_may_be_two_tensors() -> None:
    pair = (np.arange(12, dtype=np.uint8).reshape(3, 4), np.arange(12, dtype=np.uint8).reshape(3, 4) + 100)
    cache = describe_group(["a"], {"a": pair}, 3)
    assert gathered(cache, 1) == bytes([4, 5, 6, 7, 104, 105, 106, 107])


@pytest.mark.parametrize(
    ("tensor", "blocks"),
    [
        (np.zeros((5, 2)), 4),
        (np.zeros((0, 2)), 4),
        (np.zeros((4, 0)), 4),
        (np.zeros((4, 2))[::-1], 4),
        (np.broadcast_to(np.zeros((1, 8)), (4, 8)), 4),
        (np.lib.stride_tricks.as_strided(np.zeros(64), (4, 8), (16, 8)), 4),
        (np.array(3.0), 1),
    ],
)
def test_what_cannot_be_described_is_refused(tensor: Array, blocks: int) -> None:
    with pytest.raises(ArgumentError, match="layer a"):
        describe_group(["a"], {"a": tensor}, blocks)


def test_a_block_in_too_many_pieces_is_refused() -> None:
    """Blocks innermost: every value is a piece of its own."""
    tensor = np.zeros((300, 300, 2), np.uint8).transpose(2, 0, 1)
    with pytest.raises(ArgumentError, match="pieces"):
        describe_group(["a"], {"a": tensor}, 2)


def test_block_ids_are_checked() -> None:
    cache = describe_group(["a"], {"a": np.zeros((4, 8), np.uint8)}, 4)
    for wrong in ([4], [-1], [0, 9]):
        with pytest.raises(ArgumentError, match=r"0\.\.3"):
            cache.fragments(np.array(wrong, np.int64))
    assert cache.fragments(np.zeros(0, np.int64)).count == 0
