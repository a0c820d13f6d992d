"""Memory and bytes for tests: aligned buffers, paged caches with gaps, payloads that follow from a name.

A payload derives from the keyspace's digest and the block's hash alone, so any process can check any block
without being told what was saved. Thread safety: buffers and caches are plain memory; use disjoint blocks
from several threads.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tierkv.fragments import Fragments
from tierkv.keys import Keyspace, KeyspaceSpec
from tierkv.types import HASH_BYTES, HashArray, Int64Array, UInt8Array

ALIGNMENT_BYTES = 4096
GUARD_BYTE = 0xA5
"""What PagedCache puts around pieces, to see that nobody writes there."""


def round_up(size_bytes: int, unit_bytes: int = ALIGNMENT_BYTES) -> int:
    """The next multiple of `unit_bytes`."""
    return -(-size_bytes // unit_bytes) * unit_bytes


def aligned_buffer(size_bytes: int, fill: int = 0) -> UInt8Array:
    """(size_bytes,) uint8 at a multiple of 4096; the memory lives as long as an array over it does."""
    memory = mmap.mmap(-1, max(round_up(size_bytes), ALIGNMENT_BYTES))
    array = np.frombuffer(memory, np.uint8)[:size_bytes]
    if fill:
        array[:] = fill
    return array


def address_of(array: npt.NDArray[np.uint8]) -> int:
    """The address of the first byte, in this process."""
    return int(array.__array_interface__["data"][0])


class BlockBuffer:
    """Room for `count` blocks of up to `block_bytes`, each aligned, with a guard page after each."""

    def __init__(self, count: int, block_bytes: int, fill: int = GUARD_BYTE) -> None:
        self.count = count
        self.block_bytes = block_bytes
        self.room_bytes = round_up(block_bytes)
        self.stride_bytes = self.room_bytes + ALIGNMENT_BYTES
        self.memory = aligned_buffer(count * self.stride_bytes, fill)
        self._fill = fill

    @property
    def addresses(self) -> Int64Array:
        """(count,) int64."""
        return address_of(self.memory) + np.arange(self.count, dtype=np.int64) * self.stride_bytes

    def __getitem__(self, position: int) -> UInt8Array:
        """(block_bytes,) uint8, a view."""
        start = position * self.stride_bytes
        return self.memory[start : start + self.block_bytes]

    def put(self, position: int, data: bytes) -> None:
        """Copies `data` to the start of block `position`."""
        self[position][: len(data)] = np.frombuffer(data, np.uint8)

    def get(self, position: int, size_bytes: int | None = None) -> bytes:
        """The first `size_bytes` (default: all) of block `position`."""
        return self[position][:size_bytes].tobytes()

    def guards_intact(self) -> bool:
        """True when no byte of a guard page was touched: nobody wrote past a block's (rounded-up) room."""
        table = self.memory.reshape(self.count, self.stride_bytes)
        return bool((table[:, self.room_bytes :] == self._fill).all())


def payload(digest: bytes, block_hash: bytes, size_bytes: int) -> bytes:
    """The bytes of a block, from its keyspace's digest and its hash (zero-extended to 32 bytes) alone."""
    name = block_hash.ljust(HASH_BYTES, b"\x00")
    return hashlib.shake_128(b"tierkv.testing.payload\x00" + digest + name).digest(size_bytes)


def block_payload(space: Keyspace, block_hash: bytes) -> bytes:
    """The bytes of a whole block of `space`, all parts."""
    return payload(space.digest, block_hash, space.block_bytes)


def part_payload(space: Keyspace, block_hash: bytes, part: int) -> bytes:
    """The bytes of one part of a block of `space`."""
    start = space.part_offset(part)
    return block_payload(space, block_hash)[start : start + space.part_bytes[part]]


def make_spec(block_bytes: int = 4096, parts: int | Sequence[int] = 1, **changes: object) -> KeyspaceSpec:
    """A valid KeyspaceSpec. parts: into how many parts block_bytes is cut (evenly, the last takes the rest),
    or their sizes. `changes` replaces other fields."""
    if isinstance(parts, int):
        share = block_bytes // parts
        sizes = (*([share] * (parts - 1)), block_bytes - share * (parts - 1))
    else:
        sizes = tuple(parts)
    fields: dict[str, object] = {
        "model": "test-model",
        "revision": "r1",
        "kv_dtype": "bfloat16",
        "block_tokens": 16,
        "part_bytes": sizes,
        "layout": "LBHNC",
        "group": "full",
        "pipeline_stage": "0/1",
        "hash_algorithm": "sha256_cbor",
        "hash_seed": "0",
        **changes,
    }
    return KeyspaceSpec.from_mapping(fields)


def make_space(
    block_bytes: int = 4096, number: int = 1, parts: int | Sequence[int] = 1, **changes: object
) -> Keyspace:
    """A Keyspace for tests of a tier, which need no store."""
    spec = make_spec(block_bytes, parts, **changes)
    return Keyspace(spec, spec.digest(), number)


def random_hashes(count: int, seed: int | np.random.Generator = 0) -> HashArray:
    """(count, 32) uint8, distinct for all practical purposes."""
    return np.random.default_rng(seed).integers(0, 256, (count, HASH_BYTES), dtype=np.uint8)


def chain_hashes(chain: int, count: int, common: int = 0) -> HashArray:
    """(count, 32) uint8: the block hashes of request `chain`; the first `common` ones are chain 0's."""
    rows = []
    previous = b""
    for position in range(count):
        owner = 0 if position < common else chain
        step = owner.to_bytes(8, "little") + position.to_bytes(8, "little")
        previous = hashlib.sha256(previous + step).digest()
        rows.append(previous)
    return np.frombuffer(b"".join(rows), np.uint8).reshape(count, HASH_BYTES)


class PagedCache:
    """A paged KV cache of one rank: `pieces` layers, each holding a piece of every block, with gaps between.

    piece_bytes: bytes of each layer's piece; gap_bytes: what lies between the pieces of a layer. Together
    the pieces of a block are one part. Every byte outside the pieces holds GUARD_BYTE.
    """

    def __init__(self, blocks: int, piece_bytes: Sequence[int], gap_bytes: Sequence[int] | int = 0) -> None:
        gaps = [gap_bytes] * len(piece_bytes) if isinstance(gap_bytes, int) else list(gap_bytes)
        self.blocks = blocks
        self.piece_bytes = tuple(piece_bytes)
        self.strides = tuple(size + gap for size, gap in zip(piece_bytes, gaps, strict=True))
        self._layers = [np.full(blocks * stride + 64, GUARD_BYTE, np.uint8) for stride in self.strides]

    @property
    def part_bytes(self) -> int:
        return sum(self.piece_bytes)

    def fragments(self, block_ids: Sequence[int] | Int64Array) -> Fragments:
        """Fragments over the blocks `block_ids`."""
        return Fragments(
            np.array([address_of(layer) for layer in self._layers], np.int64),
            np.array(self.strides, np.int64),
            np.array(self.piece_bytes, np.int64),
            np.ascontiguousarray(block_ids, dtype=np.int64),
            tuple(self._layers),
        )

    def put(self, block_id: int, data: bytes) -> None:
        """Cuts `data` (part_bytes long) over the layers."""
        start = 0
        for layer, stride, size in zip(self._layers, self.strides, self.piece_bytes, strict=True):
            at = block_id * stride
            layer[at : at + size] = np.frombuffer(data[start : start + size], np.uint8)
            start += size

    def get(self, block_id: int) -> bytes:
        """The bytes of a block, (part_bytes,), layer by layer."""
        pieces = []
        for layer, stride, size in zip(self._layers, self.strides, self.piece_bytes, strict=True):
            pieces.append(layer[block_id * stride : block_id * stride + size].tobytes())
        return b"".join(pieces)

    def wipe(self, fill: int = 0) -> None:
        """Sets every piece to `fill`."""
        for block_id in range(self.blocks):
            self.put(block_id, bytes([fill]) * self.part_bytes)

    def guards_intact(self) -> bool:
        """True when no byte outside the pieces was touched."""
        for layer, stride, size in zip(self._layers, self.strides, self.piece_bytes, strict=True):
            body = layer[: self.blocks * stride].reshape(self.blocks, stride)
            rest = layer[self.blocks * stride :]
            if (body[:, size:] != GUARD_BYTE).any() or (rest != GUARD_BYTE).any():
                return False
        return True
