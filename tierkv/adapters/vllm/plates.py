"""Plates: a group's pieces gathered into few regular ones, so that an accelerator moves many by one kernel.

layout.py describes a block as pieces, one a run of bytes. Pieces that follow each other at even distances within one
allocation (the heads of a layer, the layers of a model) are one plate: a strided array of which one index, the block,
is chosen. In staging memory the rows of a plate lie side by side, plate after plate; read plate by plate, a block's
bytes come in the order of its pieces, which is what the store keeps.

Pure arithmetic: knows neither tensors nor devices.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tierkv.adapters.vllm.layout import GroupCache
from tierkv.errors import ArgumentError
from tierkv.types import Int64Array

ALIGNMENT_BYTES = 64
"""Of a plate's rows in staging memory."""
_WIDEST_ITEM_BYTES = 8


@dataclass(frozen=True, slots=True)
class Plate:
    """Of block b, the run (i, j, ...) is at base + b * stride + i * steps[0] + j * steps[1] + ..., length bytes long.

    Addresses and distances in bytes; i < sizes[0], j < sizes[1], ...; all runs are within allocation `memory`.
    """

    base: int
    stride: int
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    length: int
    memory: int
    item_bytes: int
    """The widest integer, 1 to 8 bytes, that divides all of this: kernels move such items."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one block."""
        return math.prod(self.sizes) * self.length


def plan_plates(cache: GroupCache, memories: Sequence[tuple[int, int]]) -> tuple[Plate, ...]:
    """The cache's pieces, in their order, as plates.

    memories: (address, bytes) of every allocation that the cache lies in. ArgumentError if a piece lies in none.
    """
    order = sorted(range(len(memories)), key=lambda number: memories[number])
    starts = [memories[number][0] for number in order]
    plates: list[Plate] = []
    pieces = zip(cache.bases.tolist(), cache.strides.tolist(), cache.lengths.tolist(), strict=True)
    for base, stride, length in pieces:
        place = bisect_right(starts, base) - 1
        address, size = memories[order[place]] if place >= 0 else (0, 0)
        if base + (cache.blocks - 1) * stride + length > address + size:
            raise ArgumentError("a KV cache's blocks reach beyond the memory that was allocated for them")
        distance = stride if cache.blocks > 1 else 0
        item = math.gcd(_WIDEST_ITEM_BYTES, base, address, distance, length)
        plates.append(Plate(base, distance, (), (), length, order[place], item))
    while len(folded := _fold(plates)) < len(plates):
        plates = folded
    return tuple(plates)


def _fold(plates: Sequence[Plate]) -> list[Plate]:
    """Neighbours that are alike and at even distances, made one."""
    folded: list[Plate] = []
    position = 0
    while position < len(plates):
        first, count, step = plates[position], 1, 0
        while position + count < len(plates):
            following = plates[position + count]
            distance = following.base - plates[position + count - 1].base
            alike = following == replace(first, base=following.base, item_bytes=following.item_bytes)
            if not alike or distance <= 0 or (count > 1 and distance != step):
                break
            step = distance
            count += 1
        if count > 1:
            first = replace(
                first, sizes=(count, *first.sizes), steps=(step, *first.steps),
                item_bytes=math.gcd(first.item_bytes, step),
            )  # fmt: skip
        folded.append(first)
        position += count
    return folded


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Where the blocks of plates lie in staging memory."""

    row_bytes: Int64Array
    """(plates,) int64."""

    def offsets(self, blocks: int) -> tuple[Int64Array, int]:
        """((plates,) int64 of where each plate's rows begin, bytes of all) for so many blocks."""
        sizes = (self.row_bytes * blocks + (ALIGNMENT_BYTES - 1)) & -ALIGNMENT_BYTES
        ends = np.cumsum(sizes)
        return ends - sizes, int(ends[-1])

    def fitting(self, size_bytes: int) -> int:
        """How many blocks fit; 0 if not even one does."""
        slack = ALIGNMENT_BYTES * len(self.row_bytes)
        return max(0, (size_bytes - slack) // int(self.row_bytes.sum()))

    @classmethod
    def of(cls, plates: Sequence[Plate]) -> Rows:
        """Those of the plates' blocks."""
        return cls(np.array([plate.row_bytes for plate in plates], np.int64))
