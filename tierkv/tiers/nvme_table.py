"""SlotTable: what the catalog says about each slot, in memory: 24 bytes a slot of the slabs in use.

Reads are checked against it, before and after the transfer, without touching LMDB. It mirrors committed
entries only. Thread safety: one lock, every call is short and works on whole batches.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierkv.types import SLOT_GRANULE_BYTES, BoolArray, HashArray, Int64Array, SlotArray, UInt32Array

UInt64Array = npt.NDArray[np.uint64]
_ROW = np.dtype([("name", "<u8"), ("generation", "<u8"), ("checksum", "<u4"), ("length", "<u4")])
_MIX = np.array([1, 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """(n,) each; generation 0 where the slot does not hold the block that was asked for."""

    generations: UInt64Array
    checksums: UInt32Array
    lengths: UInt32Array


def names_of(digest: bytes, hashes: HashArray) -> UInt64Array:
    """(n,) 64 bits that stand for the keyspace and hash of each block."""
    words = np.ascontiguousarray(hashes).view("<u8")
    seed = np.frombuffer(digest, "<u8") * _MIX
    mixed: UInt64Array = np.bitwise_xor.reduce(words * _MIX, axis=1) ^ np.bitwise_xor.reduce(seed)
    return mixed


class SlotTable:
    """Rows for the slots of each slab, made when the slab is first used by a slot size."""

    def __init__(self, capacity_bytes: int, slab_bytes: int) -> None:
        self._slab_granules = min(slab_bytes, capacity_bytes) // SLOT_GRANULE_BYTES
        slabs = -(-capacity_bytes // (self._slab_granules * SLOT_GRANULE_BYTES))
        self._base = np.zeros(slabs, np.int64)
        self._granules = np.zeros(slabs, np.int64)  # of the slots the rows are for; 0: no rows
        self._rows = np.zeros(1024, _ROW)
        self._end = 0
        self._spare: dict[int, list[int]] = {}
        self._lock = threading.Lock()

    def put(self, slot_bytes: int, slots: SlotArray, names: UInt64Array, found: Found) -> None:
        """Notes committed entries."""
        granules = slot_bytes // SLOT_GRANULE_BYTES
        slabs = slots.astype(np.int64) // self._slab_granules
        with self._lock:
            for slab in np.unique(slabs[self._granules[slabs] != granules]).tolist():
                self._make_rows(slab, granules)
            rows = self._locate(slots, slabs, granules)
            self._rows["name"][rows] = names
            self._rows["generation"][rows] = found.generations
            self._rows["checksum"][rows] = found.checksums
            self._rows["length"][rows] = found.lengths

    def get(self, slot_bytes: int, slots: SlotArray, names: UInt64Array) -> Found:
        """What the slots hold, where it is the named blocks."""
        granules = slot_bytes // SLOT_GRANULE_BYTES
        slabs = slots.astype(np.int64) // self._slab_granules
        with self._lock:
            held = self._granules[np.minimum(slabs, len(self._granules) - 1)] == granules
            held &= slabs < len(self._granules)
            held &= slots % self._slab_granules % granules == 0
            rows = self._locate(slots, np.where(held, slabs, 0), granules)
            found = self._rows[np.where(held, rows, 0)]
        held &= found["name"] == names
        return Found(np.where(held, found["generation"], np.uint64(0)), found["checksum"], found["length"])

    def drop(
        self, slot_bytes: int, slots: SlotArray, names: UInt64Array, generations: UInt64Array | None = None
    ) -> BoolArray:
        """Forgets the named blocks (of these generations): (n,) bool, which of them were there."""
        granules = slot_bytes // SLOT_GRANULE_BYTES
        slabs = slots.astype(np.int64) // self._slab_granules
        with self._lock:
            held: BoolArray = self._granules[slabs] == granules
            rows = self._locate(slots, slabs, granules)
            rows = np.where(held, rows, 0)
            held &= (self._rows["name"][rows] == names) & (self._rows["generation"][rows] != 0)
            if generations is not None:
                held &= self._rows["generation"][rows] == generations
            self._rows[rows[held]] = np.zeros((), _ROW)
        return held

    def _locate(self, slots: SlotArray, slabs: Int64Array, granules: int) -> Int64Array:
        return self._base[slabs] + slots.astype(np.int64) % self._slab_granules // granules

    def _make_rows(self, slab: int, granules: int) -> None:
        """The slab now serves another slot size, so all it held is gone."""
        if self._granules[slab]:
            old = self._slab_granules // int(self._granules[slab])
            self._spare.setdefault(old, []).append(int(self._base[slab]))
        count = self._slab_granules // granules
        spare = self._spare.get(count)
        if spare:
            base = spare.pop()
        else:
            base = self._end
            self._end += count
            if self._end > len(self._rows):
                grown = np.zeros(max(self._end, 2 * len(self._rows)), _ROW)
                grown[: len(self._rows)] = self._rows
                self._rows = grown
        self._rows[base : base + count] = np.zeros((), _ROW)
        self._base[slab] = base
        self._granules[slab] = granules
