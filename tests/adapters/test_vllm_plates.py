"""Pieces as plates: the same bytes in the same order, in as few as there can be, and where they lie in staging."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.adapters.vllm.layout import GroupCache, describe_group
from tierkv.adapters.vllm.plates import ALIGNMENT_BYTES, Plate, Rows, plan_plates
from tierkv.errors import ArgumentError


def group_cache(pieces: list[tuple[int, int, int]], blocks: int) -> GroupCache:
    bases, strides, lengths = (np.array(column, np.int64) for column in zip(*pieces, strict=True))
    return GroupCache(bases, strides, lengths, blocks, (), "")


def runs_of(plate: Plate, block: int) -> list[tuple[int, int]]:
    """(address, length) of each run of a block, in the order in which a plate's row has them."""
    return [
        (plate.base + block * plate.stride + sum(map(int.__mul__, index, plate.steps)), plate.length)
        for index in product(*map(range, plate.sizes))
    ]


@st.composite
def caches(draw: st.DrawFn) -> tuple[GroupCache, list[tuple[int, int]]]:
    """Regular and irregular pieces in up to three allocations."""
    blocks = draw(st.integers(1, 5))
    memories = [(1 << 20, 1 << 16), (1 << 22, 1 << 16), ((1 << 22) + (1 << 16), 1 << 16)]
    unit = draw(st.sampled_from([1, 2, 4, 8, 24]))
    pieces = []
    for _ in range(draw(st.integers(1, 4))):
        start, _ = draw(st.sampled_from(memories))
        length, stride = draw(st.integers(1, 8)) * unit, draw(st.integers(8, 200)) * unit
        inner, outer = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        steps = draw(st.integers(8, 40)) * unit, draw(st.integers(200, 300)) * unit
        base = start + draw(st.integers(0, 50)) * unit
        pieces += [
            (base + i * steps[0] + j * steps[1], stride, length) for j in range(outer) for i in range(inner)
        ]
    if draw(st.booleans()):
        pieces = draw(st.permutations(pieces))
    return group_cache(pieces, blocks), memories


@given(caches())
def test_plates_are_the_pieces_in_their_order(described: tuple[GroupCache, list[tuple[int, int]]]) -> None:
    cache, memories = described
    plates = plan_plates(cache, memories)
    assert len(plates) <= len(cache.bases)
    for block in range(cache.blocks):
        pieces = zip((cache.bases + block * cache.strides).tolist(), cache.lengths.tolist(), strict=True)
        assert [run for plate in plates for run in runs_of(plate, block)] == list(pieces)
    for plate in plates:
        start, size = memories[plate.memory]
        first, last = runs_of(plate, 0)[0][0], runs_of(plate, cache.blocks - 1)[-1][0] + plate.length
        assert start <= first <= last <= start + size
        assert all(
            number % plate.item_bytes == 0
            for number in (plate.base, start, plate.stride, plate.length, *plate.steps)
        )
        assert plate.row_bytes == sum(length for _, length in runs_of(plate, 0))


def test_a_model_in_one_allocation_is_one_plate() -> None:
    memory = np.zeros((3, 7, 2, 4, 16), np.float16)  # layer, block, key or value, head, value: heads apart
    layers = [f"layer {number}" for number in range(3)]
    tensors = {name: memory[number, :, :, :, :8] for number, name in enumerate(layers)}
    cache = describe_group(layers, tensors, 7)
    assert len(cache.bases) == 3 * 2 * 4
    (plate,) = plan_plates(cache, [(memory.ctypes.data, memory.nbytes)])
    assert (plate.sizes, plate.length, plate.item_bytes) == ((3, 8), 16, 8)  # keys and heads lie evenly


def test_allocations_are_not_joined() -> None:
    pieces = [(4096, 64, 32), (8192, 64, 32), (12288, 64, 32)]
    memories = [(12288, 4096), (4096, 4096), (8192, 4096)]
    plates = plan_plates(group_cache(pieces, 4), memories)
    assert [plate.memory for plate in plates] == [1, 2, 0]
    assert len(plan_plates(group_cache(pieces, 4), [(4096, 12288)])) == 1


@pytest.mark.parametrize("base", [4000, 4096 + 4096 - 3 * 64 - 31, 1 << 30])
def test_pieces_outside_the_allocations_are_refused(base: int) -> None:
    with pytest.raises(ArgumentError, match="beyond the memory"):
        plan_plates(group_cache([(base, 64, 32)], 4), [(4096, 4096)])


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20), st.integers(0, 100_000))
def test_rows_lie_apart_and_fit(row_bytes: list[int], size_bytes: int) -> None:
    rows = Rows(np.array(row_bytes, np.int64))
    blocks = rows.fitting(size_bytes)
    if blocks == 0:
        assert sum(row_bytes) + ALIGNMENT_BYTES * len(row_bytes) > size_bytes
        blocks = 1
    else:
        assert rows.offsets(blocks)[1] <= size_bytes
    offsets, total = rows.offsets(blocks)
    ends = offsets + blocks * rows.row_bytes
    assert not (offsets % ALIGNMENT_BYTES).any()
    assert (offsets[1:] >= ends[:-1]).all()
    assert ends[-1] <= total
