"""Fragments: a paged KV cache described without copying it.

A block of the engine is scattered: each layer holds a piece of it, at base + block_id * stride. Fragments list
those pieces for a batch of blocks; native gather and scatter walk them. The pieces of one block, in the order of
the layers, are one part of a stored block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tierkv.errors import ArgumentError
from tierkv.types import Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """`n` blocks of `m` pieces each.

    bases, strides, lengths: (m,) int64: the address of piece j of block id b is bases[j] + b * strides[j], and it
    is lengths[j] bytes long. block_ids: (n,) int64. `owners` keeps the memory alive while a job uses it; for
    memory that tierkv cannot hold a reference to, the caller must keep it valid until the job is done.
    """

    bases: Int64Array
    strides: Int64Array
    lengths: Int64Array
    block_ids: Int64Array
    owners: tuple[Any, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name in ("bases", "strides", "lengths", "block_ids"):
            value = getattr(self, name)
            if not isinstance(value, np.ndarray) or value.dtype != np.int64 or value.ndim != 1:
                raise ArgumentError(f"Fragments.{name} must be a one-dimensional int64 array, got {value!r}")
            object.__setattr__(self, name, np.ascontiguousarray(value))
        if not len(self.bases) == len(self.strides) == len(self.lengths) or not len(self.bases):
            raise ArgumentError(
                "Fragments: bases, strides and lengths must have the same length, one or more"
            )
        if (self.lengths < 1).any() or (self.bases == 0).any():
            raise ArgumentError(
                "Fragments: every piece needs a base address and a length of one byte or more"
            )
        if (self.block_ids < 0).any():
            raise ArgumentError("Fragments: block ids must not be negative")

    @property
    def count(self) -> int:
        """Blocks."""
        return len(self.block_ids)

    @property
    def bytes_per_block(self) -> int:
        return int(self.lengths.sum())

    def select(self, positions: Any) -> Fragments:
        """The same cache, only the blocks at `positions` (a slice, a mask or indices into block_ids)."""
        return Fragments(self.bases, self.strides, self.lengths, self.block_ids[positions], self.owners)

    @classmethod
    def from_arrays(cls, layers: Sequence[Any], block_ids: Any) -> Fragments:
        """Layers whose first dimension is the block: numpy arrays or torch CPU/CUDA tensors.

        Each layer's block must be contiguous within itself; the blocks may lie apart (strided views).
        """
        if not layers:
            raise ArgumentError("Fragments.from_arrays: at least one layer is needed")
        described = [_describe(layer, position) for position, layer in enumerate(layers)]
        ids = np.ascontiguousarray(block_ids, dtype=np.int64)
        blocks = min(entry[3] for entry in described)
        if ids.ndim != 1 or (len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= blocks)):
            raise ArgumentError(f"block_ids must be one-dimensional and within 0..{blocks - 1}")
        bases, strides, lengths = (np.array([entry[k] for entry in described], np.int64) for k in range(3))
        return cls(bases, strides, lengths, ids, tuple(layers))

    @classmethod
    def from_blocks(cls, blocks: Any) -> Fragments:
        """One array or tensor of n whole blocks, block i at blocks[i]: the simplest cache there is."""
        return cls.from_arrays([blocks], np.arange(len(blocks), dtype=np.int64))


def _describe(layer: Any, position: int) -> tuple[int, int, int, int]:
    """(address, bytes between blocks, bytes of a block, blocks) of a numpy array or torch tensor."""
    if isinstance(layer, np.ndarray):
        address, itemsize, shape = layer.__array_interface__["data"][0], layer.itemsize, layer.shape
        strides = layer.strides
    elif hasattr(layer, "data_ptr") and hasattr(layer, "element_size"):
        address, itemsize, shape = layer.data_ptr(), layer.element_size(), tuple(layer.shape)
        strides = tuple(step * itemsize for step in layer.stride())
    else:
        raise ArgumentError(
            f"layer {position} is a {type(layer).__name__}: a numpy array or torch tensor is needed"
        )
    if len(shape) < 1 or 0 in shape:
        raise ArgumentError(
            f"layer {position} has shape {tuple(shape)}: blocks must be the first dimension, none empty"
        )
    expected = itemsize
    for size, step in zip(reversed(shape[1:]), reversed(strides[1:]), strict=True):
        if size > 1 and step != expected:
            raise ArgumentError(
                f"layer {position}: a block is not contiguous (shape {tuple(shape)}, strides {tuple(strides)} bytes); "
                f"give Fragments one piece for each contiguous run"
            )
        expected *= size
    return int(address), int(strides[0]), int(expected), int(shape[0])
