"""Names and bytes of replayed blocks: distinct, stable, and checked by the native pool that makes them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv._native import CopyPool
from tierkv.workload.payload import hashes_of, mix, seeds_of

ids_strategy = st.lists(st.integers(0, (1 << 62)), min_size=1, max_size=200, unique=True)


def test_mix_is_splitmix64() -> None:
    """The first three outputs for seed 0, as published with the generator."""
    step = 0x9E37_79B9_7F4A_7C15
    states = np.array([(step * n) % (1 << 64) for n in range(3)], np.uint64)
    assert [int(value) for value in mix(states)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@given(ids_strategy, st.integers(1, 8))
def test_different_ids_have_different_hashes_and_seeds(ids: list[int], pieces: int) -> None:
    hashes = hashes_of(np.array(ids, np.int64))
    assert hashes.shape == (len(ids), 32)
    assert hashes.dtype == np.uint8
    assert len(np.unique(hashes, axis=0)) == len(ids)
    seeds = seeds_of(hashes, pieces)
    assert seeds.shape == (len(ids), pieces)
    assert len(np.unique(seeds)) == seeds.size
    np.testing.assert_array_equal(seeds, seeds_of(hashes, pieces + 1)[:, :pieces])


@given(st.integers(0, 1 << 62))
def test_a_hash_is_a_function_of_its_id_alone(number: int) -> None:
    alone = hashes_of(np.array([number], np.int64))
    among = hashes_of(np.array([5, number, 7], np.int64))
    np.testing.assert_array_equal(alone[0], among[1])


def test_every_byte_of_a_hash_depends_on_the_id() -> None:
    hashes = hashes_of(np.arange(4096, dtype=np.int64))
    counts = [len(np.unique(hashes[:, column])) for column in range(32)]
    assert min(counts) == 256


@pytest.fixture
def pool():  # type: ignore[no-untyped-def]
    pool = CopyPool(2)
    yield pool
    pool.close()


def test_a_wrong_byte_a_swapped_block_and_a_swapped_piece_are_noticed(pool: CopyPool) -> None:
    blocks, pieces, piece_bytes = 5, 3, 100
    seeds = seeds_of(hashes_of(np.arange(blocks, dtype=np.int64)), pieces).reshape(-1)
    memory = np.zeros((blocks, pieces, piece_bytes), np.uint8)
    start = memory.__array_interface__["data"][0]
    addresses = start + np.arange(blocks * pieces, dtype=np.int64) * piece_bytes
    lengths = np.full(blocks * pieces, piece_bytes, np.int64)
    pool.fill(addresses, lengths, seeds)
    right = memory.copy()
    assert not pool.differ(addresses, lengths, seeds).any()
    memory[3, 1, 99] ^= 1
    assert np.flatnonzero(pool.differ(addresses, lengths, seeds)).tolist() == [3 * pieces + 1]
    memory[:] = right[[1, 0, 2, 3, 4]]
    assert np.flatnonzero(pool.differ(addresses, lengths, seeds)).tolist() == [0, 1, 2, 3, 4, 5]
    memory[:] = right
    memory[2] = right[2][[1, 0, 2]]
    assert np.flatnonzero(pool.differ(addresses, lengths, seeds)).tolist() == [6, 7]
