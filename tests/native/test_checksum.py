"""crc32c: the check value, both implementations against the definition, going on, bad arguments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv import _native as native


def as_array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def by_definition(data: bytes, value: int = 0) -> int:
    state = value ^ 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def test_check_value() -> None:
    assert native.crc32c(as_array(b"123456789")) == 0xE3069283
    assert native.crc32c_portable(as_array(b"123456789")) == 0xE3069283
    assert native.crc32c_implementation() in {"sse4.2+pclmul", "sse4.2", "armv8", "portable"}


@given(data=st.binary(max_size=400), value=st.integers(0, 2**32 - 1))
def test_both_follow_the_definition(data: bytes, value: int) -> None:
    expected = by_definition(data, value)
    assert native.crc32c(as_array(data), value) == expected
    assert native.crc32c_portable(as_array(data), value) == expected


@given(
    size=st.integers(0, 60_000),
    offset=st.integers(0, 63),
    cut=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_long_unaligned_and_in_two_steps(size: int, offset: int, cut: float, seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, size + offset, dtype=np.uint8)[offset:]
    whole = native.crc32c(data)
    assert whole == native.crc32c_portable(data)
    middle = int(cut * size)
    assert native.crc32c(data[middle:], native.crc32c(data[:middle])) == whole


@pytest.mark.parametrize("function", [native.crc32c, native.crc32c_portable])
def test_bad_arguments(function: object) -> None:
    for data in (np.zeros((2, 2), np.uint8), np.zeros(4, np.int8), np.zeros(8, np.uint8)[::2], [1, 2]):
        with pytest.raises(ValueError, match="data"):
            function(data)  # type: ignore[operator]
    for value in (-1, 2**32, 2**70):
        with pytest.raises(ValueError, match="value"):
            function(np.zeros(4, np.uint8), value)  # type: ignore[operator]
