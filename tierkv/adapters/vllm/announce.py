"""Announcer: tells routers, through the engine's events, which blocks this engine put into the store, and which went.

The store does not report evictions to engines; a block that was announced is taken back when a look-up of this engine
finds it gone. What another engine saved is announced by that engine.

On the engine's thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from tierkv.adapters.vllm.groups import Group
from tierkv.types import BoolArray, HashArray, TierKind

MAX_ANNOUNCED = 200_000
"""Blocks whose announcement is remembered, a group; older ones are not taken back."""


class Log(Protocol):
    """Where events go; see events.py."""

    def describe(
        self, request: Any, group: int, hashes: HashArray, first_block: int, parent: bytes | None
    ) -> Any: ...

    def stored(self, run: Any, tier: TierKind, kept: BoolArray | None = None) -> None: ...

    def removed(self, group: int, hashes: HashArray, tier: TierKind) -> None: ...

    def cleared(self) -> None: ...


class Announcer:
    """See the module."""

    def __init__(self, log: Log, groups: Sequence[Group]) -> None:
        self._log = log
        self._groups = groups
        self._announced: list[dict[bytes, None]] = [{} for _ in groups]

    def describe(self, request: Any, position: int, hashes: HashArray, indices: Sequence[int]) -> list[Any]:
        """Blocks of a request that are being saved, as descriptions for stored(): one a gapless stretch.

        hashes: (n, 32) of all the group's blocks; indices: ascending, those that are saved.
        """
        cuts = [0, *(place for place, (a, b) in enumerate(pairwise(indices), 1) if b != a + 1), len(indices)]
        runs = []
        for begin, end in pairwise(cuts):
            first, last = indices[begin], indices[end - 1] + 1
            parent = hashes[first - 1].tobytes() if first else None
            run = self._log.describe(request, self._groups[position].index, hashes[first:last], first, parent)
            runs.append((position, hashes[first:last], run))
        return runs

    def stored(self, runs: Sequence[Any]) -> None:
        """What describe() described is in the store."""
        for position, hashes, run in runs:
            self._log.stored(run, TierKind.DRAM)
            announced = self._announced[position]
            for row in hashes:
                announced[row.tobytes()] = None
            while len(announced) > MAX_ANNOUNCED:
                del announced[next(iter(announced))]

    def seen(self, hashes: Sequence[HashArray], stored: Sequence[BoolArray]) -> None:
        """A look-up has found what is there: announced blocks that are not are taken back."""
        for position, (rows, there) in enumerate(zip(hashes, stored, strict=True)):
            announced = self._announced[position]
            if not announced:
                continue
            gone = [row for row in np.flatnonzero(~there) if rows[row].tobytes() in announced]
            if gone:
                for row in gone:
                    del announced[rows[row].tobytes()]
                self._log.removed(self._groups[position].index, rows[gone], TierKind.DRAM)

    def cleared(self) -> None:
        """Nothing is there any more."""
        self._announced = [{} for _ in self._groups]
        self._log.cleared()
