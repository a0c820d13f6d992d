"""Layout: an engine's KV tensors as pieces that native gather and scatter walk.

Of every layer the blocks lie at some stride, and a block may itself lie in several runs (heads outermost, kernel blocks
within a manager block, padding between layers). Each run is one piece: base address, distance between blocks, length.
The pieces of a block, layer by layer in the group's order, are the bytes that the store keeps.

Knows tensors only by shape, strides and address: NumPy arrays and torch tensors of any device serve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from tierkv.errors import ArgumentError
from tierkv.fragments import Fragments
from tierkv.types import Int64Array

MAX_PIECES = 65536


@dataclass(frozen=True, slots=True, eq=False)
class GroupCache:
    """One group's paged cache on one rank.

    bases, strides, lengths: (m,) int64, bytes. Block b's piece j lies at bases[j] + b * strides[j].
    """

    bases: Int64Array
    strides: Int64Array
    lengths: Int64Array
    blocks: int
    """Blocks that every layer has."""
    tensors: tuple[Any, ...]
    """The layers' tensors: they keep the memory, and say on which device it is."""
    described: str
    """How the bytes of a block are arranged, for the keyspace."""

    @property
    def block_bytes(self) -> int:
        """Bytes of this rank's share of a block."""
        return int(self.lengths.sum())

    def fragments(self, block_ids: Int64Array) -> Fragments:
        """The (n,) blocks as fragments; ArgumentError if one is not in the cache."""
        if len(block_ids) and not 0 <= int(block_ids.min()) <= int(block_ids.max()) < self.blocks:
            raise ArgumentError(f"block ids must be within 0..{self.blocks - 1}")
        return Fragments(self.bases, self.strides, self.lengths, block_ids, self.tensors)


def describe_group(
    layers: Sequence[str], caches: Mapping[str, Any | Sequence[Any]], num_blocks: int
) -> GroupCache:
    """The cache of a group's layers, in the order of `layers`.

    caches: layer -> tensor of shape (num_blocks * k, ...), k kernel blocks a manager block, or a list of such tensors.
    ArgumentError for tensors that cannot be described.
    """
    bases: list[int] = []
    strides: list[int] = []
    lengths: list[int] = []
    tensors: list[Any] = []
    words: list[str] = []
    for layer in layers:
        cache = caches[layer]
        for tensor in cache if isinstance(cache, (list, tuple)) else (cache,):
            pieces = _pieces(tensor, num_blocks, layer)
            for base, stride, length in pieces:
                if bases and strides[-1] == stride and bases[-1] + lengths[-1] == base:
                    lengths[-1] += length  # one run across layers
                    continue
                bases.append(base)
                strides.append(stride)
                lengths.append(length)
            tensors.append(tensor)
            words.append(f"{layer}:{_words(tensor, num_blocks)}")
    if not bases or len(bases) > MAX_PIECES:
        raise ArgumentError(f"a block in {len(bases)} pieces cannot be moved: 1 to {MAX_PIECES} are possible")
    return GroupCache(
        np.array(bases, np.int64), np.array(strides, np.int64), np.array(lengths, np.int64), num_blocks,
        tuple(tensors), ";".join(words),
    )  # fmt: skip


def _geometry(tensor: Any) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """(address, item bytes, shape, strides in bytes)."""
    if isinstance(tensor, np.ndarray):
        return tensor.__array_interface__["data"][0], tensor.itemsize, tensor.shape, tensor.strides
    item = tensor.element_size()
    return tensor.data_ptr(), item, tuple(tensor.shape), tuple(step * item for step in tensor.stride())


def _axes(tensor: Any, num_blocks: int, layer: str) -> tuple[list[int], list[int], list[int], int]:
    """The axes within a manager block, outermost in memory first: (order, sizes, steps in bytes), and the block's step.

    Axis 0 is the kernel block within the manager block, axis k the tensor's dimension k.
    """
    _, _, shape, strides = _geometry(tensor)
    if not shape or 0 in shape or shape[0] % num_blocks:
        raise ArgumentError(
            f"layer {layer}: a tensor of shape {shape} does not hold {num_blocks} blocks in its first dimension"
        )
    if any(step < 0 for step in strides):
        raise ArgumentError(f"layer {layer}: strides {strides} run backwards")
    kernel_blocks = shape[0] // num_blocks
    sizes = [kernel_blocks, *shape[1:]]
    order = sorted(
        (axis for axis, size in enumerate(sizes) if size > 1), key=lambda axis: strides[axis], reverse=True
    )
    steps = [strides[axis] for axis in order]
    return order, [sizes[axis] for axis in order], steps, kernel_blocks * strides[0]


def _pieces(tensor: Any, num_blocks: int, layer: str) -> list[tuple[int, int, int]]:
    """(base, stride between manager blocks, length) of each run of a block, as they lie in memory."""
    address, item, _, _ = _geometry(tensor)
    _, sizes, steps, block_stride = _axes(tensor, num_blocks, layer)
    run = item
    while sizes and steps[-1] == run:
        run *= sizes.pop()
        steps.pop()
    if any(step < run for step in steps) or (num_blocks > 1 and block_stride < run):
        raise ArgumentError(f"layer {layer}: its blocks overlap in memory")
    return [
        (address + sum(index * step for index, step in zip(indices, steps, strict=True)), block_stride, run)
        for indices in product(*(range(size) for size in sizes))
    ]


def _words(tensor: Any, num_blocks: int) -> str:
    """What of a tensor's form decides the order of bytes in a stored block: a block's shape, the order of its axes in
    memory, and the dtype. Distances do not: the pieces of a block lie side by side in the store."""
    _, _, shape, _ = _geometry(tensor)
    order, _, _, _ = _axes(tensor, num_blocks, "")
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{shape[0] // num_blocks}x{'x'.join(map(str, shape[1:]))}:{','.join(map(str, order))}:{kind}"
