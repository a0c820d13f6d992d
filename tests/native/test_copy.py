"""CopyPool against numpy: fragments of any shape, batches on both sides of every threshold, bad arguments."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv import _native as native

I64 = np.int64


@pytest.fixture(scope="module", params=[1, 2, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[native.CopyPool]:
    made = native.CopyPool(request.param)
    yield made
    made.close()


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def rows(array: np.ndarray) -> np.ndarray:
    """The addresses of a matrix's rows."""
    return address(array) + np.arange(len(array), dtype=I64) * array.strides[0]


piece_lengths = st.lists(
    st.integers(1, 300) | st.sampled_from([4096, 32_768, 32_769, 300_000, 700_001]), min_size=1, max_size=4
)


@given(
    lengths=piece_lengths, gaps=st.integers(0, 70), count=st.integers(0, 7), seed=st.integers(0, 2**32 - 1)
)
def test_gather_and_scatter(
    pool: native.CopyPool, lengths: list[int], gaps: int, count: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    layers = [rng.integers(0, 256, (count + 2, length + gaps), dtype=np.uint8) for length in lengths]
    ids = rng.permutation(count + 2)[:count].astype(I64)
    cache = (
        np.array([address(layer) for layer in layers], I64),
        np.array([layer.strides[0] for layer in layers], I64),
        np.array(lengths, I64),
    )
    expected = np.concatenate([layer[ids, :n] for layer, n in zip(layers, lengths, strict=True)], axis=1)
    slots = np.full((count, sum(lengths) + 16), 0xEE, np.uint8)
    pool.gather(*cache, ids, rows(slots))
    assert (slots[:, :-16] == expected).all()
    assert (slots[:, -16:] == 0xEE).all()
    again = np.full_like(slots, 0xEE)
    checksums = pool.gather_checksum(*cache, ids, rows(again))
    assert (again == slots).all()
    assert checksums.tolist() == [native.crc32c_portable(row) for row in expected]
    before = [layer.copy() for layer in layers]
    for layer in layers:
        layer[ids] ^= 0xFF
    pool.scatter(*cache, ids, rows(slots))
    for layer, old, length in zip(layers, before, lengths, strict=True):
        old[ids, length:] ^= 0xFF  # what lies between the pieces is not written
        assert (layer == old).all()


@given(sizes=st.lists(st.integers(0, 5000) | st.sampled_from([262_144, 900_001]), max_size=8))
def test_copy_and_crc32c(pool: native.CopyPool, sizes: list[int]) -> None:
    lengths = np.array(sizes, I64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(I64)
    source = np.random.default_rng(len(sizes)).integers(0, 256, offsets[-1] + 1, dtype=np.uint8)
    target = np.zeros_like(source)
    pool.copy(offsets[:-1] + address(target), offsets[:-1] + address(source), lengths)
    assert (target[:-1] == source[:-1]).all()
    assert target[-1] == 0
    sums = pool.crc32c(offsets[:-1] + address(source), lengths)
    expected = [native.crc32c(source[a:b]) for a, b in pairwise(offsets)]
    assert sums.tolist() == expected


def splitmix64(seed: int, length: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        steps = np.arange(1, length // 8 + 2, dtype=np.uint64)
        word = np.uint64(seed) + steps * np.uint64(0x9E3779B97F4A7C15)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        word ^= word >> np.uint64(31)
    return word.astype("<u8").view(np.uint8)[:length]


@given(
    length=st.integers(1, 200) | st.sampled_from([262_147, 1_200_005]),
    seed=st.integers(0, 2**64 - 1),
    data=st.data(),
)
def test_fill_and_differ(pool: native.CopyPool, length: int, seed: int, data: st.DataObject) -> None:
    memory = np.zeros((2, length + 3), np.uint8)
    where = (rows(memory), np.full(2, length, I64), np.array([seed, seed ^ 1], np.uint64))
    pool.fill(*where)
    assert (memory[0, :length] == splitmix64(seed, length)).all()
    assert not memory[:, length:].any()
    assert pool.differ(*where).tolist() == [False, False]
    memory[1, data.draw(st.integers(0, length - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert pool.differ(*where).tolist() == [False, True]


def test_touch_keeps_the_content(pool: native.CopyPool) -> None:
    memory = np.random.default_rng(1).integers(0, 256, 3_000_001, dtype=np.uint8)
    before = memory.copy()
    for page_bytes in (1 << 12, 1 << 21, 1000):
        pool.touch(address(memory) + 1, len(memory) - 2, page_bytes)
    pool.touch(address(memory), 0, 4096)
    assert (memory == before).all()


def test_bad_arguments_change_nothing(pool: native.CopyPool) -> None:
    memory = np.zeros((2, 100), np.uint8)
    good, length, seeds = rows(memory), np.full(2, 50, I64), np.zeros(2, np.uint64)
    ids, stride = np.arange(2, dtype=I64), np.zeros(2, I64)
    fragments = (good, stride, length, ids)
    bad_calls = [
        lambda: pool.copy(good, good[:1], length),
        lambda: pool.copy(good, good, length[:1]),
        lambda: pool.copy(good, good, -length),
        lambda: pool.copy(good.astype(np.uint64), good, length),
        lambda: pool.copy(good.reshape(1, 2), good, length),
        lambda: pool.copy(np.zeros(2, I64), good, length),
        lambda: pool.gather(*fragments, good[:1]),
        lambda: pool.gather(good, stride[:1], length, ids, good),
        lambda: pool.gather(good, np.full(2, 2**62, I64), length, ids + 8, good),
        lambda: pool.gather_checksum(good, stride, -length, ids, good),
        lambda: pool.scatter(*fragments, np.zeros(2, I64)),
        lambda: pool.fill(good, length, seeds[:1]),
        lambda: pool.fill(good, length, seeds.astype(I64)),
        lambda: pool.differ(good, -length, seeds),
        lambda: pool.crc32c(good, np.full(2, 2**62, I64)),
        lambda: pool.touch(address(memory), 10, 0),
        lambda: pool.touch(-1, 10, 4096),
        lambda: native.CopyPool(0),
        lambda: native.CopyPool(65),
    ]
    for call in bad_calls:
        with pytest.raises(ValueError, match=r"\w"):
            call()
    assert not memory.any()


def test_a_closed_pool_copies_on_the_callers_thread() -> None:
    pool = native.CopyPool(3)
    pool.close()
    pool.close()
    source = np.arange(3_000_000, dtype=np.uint8)
    target = np.zeros_like(source)
    pool.copy(np.array([address(target)]), np.array([address(source)]), np.array([len(source)]))
    assert (source == target).all()
