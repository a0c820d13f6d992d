"""Names and bytes of replayed blocks: a trace's ids become 32-byte hashes, and hashes become payloads.

A block's bytes follow from its hash alone, so that whoever holds the hash can tell whether loaded bytes are
the right ones. A block is cut into one piece a layer; each piece has a seed of its own, so that two swapped
layers are noticed as well as two swapped blocks.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierkv.types import HASH_BYTES, BoolArray, HashArray, Int64Array

_U64 = npt.NDArray[np.uint64]
_STEP = np.uint64(0x9E37_79B9_7F4A_7C15)


class BytePool(Protocol):
    """What is needed of the native CopyPool."""

    def fill(self, addresses: Int64Array, lengths: Int64Array, seeds: _U64) -> None: ...
    def differ(self, addresses: Int64Array, lengths: Int64Array, seeds: _U64) -> BoolArray: ...


def mix(values: _U64) -> _U64:
    """The finaliser of splitmix64, (n,) uint64: a one-to-one mapping in which every input bit moves every
    output bit."""
    mixed = values + _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return mixed ^ (mixed >> np.uint64(31))


def hashes_of(ids: Int64Array) -> HashArray:
    """(n,) ids -> (n, 32) uint8 hashes, as evenly spread as an engine's; different ids give different
    hashes."""
    words = np.empty((len(ids), HASH_BYTES // 8), "<u8")
    words[:, 0] = mix(ids.astype(np.uint64))
    for column in range(1, words.shape[1]):
        words[:, column] = mix(words[:, column - 1])
    return words.view(np.uint8).reshape(len(ids), HASH_BYTES)


def seeds_of(hashes: HashArray, pieces: int) -> _U64:
    """(n, 32) hashes -> (n, pieces) uint64: the seed of each piece of each block."""
    words = np.ascontiguousarray(hashes).view("<u8").reshape(len(hashes), HASH_BYTES // 8)
    block = mix(words[:, 0] ^ mix(words[:, 1] ^ mix(words[:, 2] ^ mix(words[:, 3].astype(np.uint64)))))
    seeds: _U64 = mix(block[:, None] + np.arange(1, pieces + 1, dtype=np.uint64)[None, :] * _STEP)
    return seeds
