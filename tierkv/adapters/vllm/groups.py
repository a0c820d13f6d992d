"""Per-group policies: which blocks of a KV-cache group a resume needs, and which ones a save keeps.

An engine resumes a request at a boundary, a number of tokens of which everything is known. What it needs there differs
by the kind of attention: every block before it (full, MLA), the trailing ones that the window still sees (sliding
window, chunked local), or the one state at exactly this boundary (Mamba, GDN, KDA, short convolutions). A hit is the
longest boundary that every group can serve.

Pure: arrays in, numbers and arrays out. The lengths of windows follow what the engine keeps itself: a block is needed
unless all its tokens are out of the next token's sight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import lcm

import numpy as np

from tierkv.types import BoolArray, Int64Array


class Kind(Enum):
    """The kinds of KV-cache groups."""

    FULL = "full"
    """Full attention and MLA."""
    SLIDING = "sliding-window"
    CHUNKED = "chunked-local"
    RECURRENT = "recurrent"
    """Mamba, GDN, KDA, short convolution: one state a block, right at the block's end only."""


_FULL, _SLIDING, _CHUNKED = Kind.FULL, Kind.SLIDING, Kind.CHUNKED  # an Enum's attribute is slow to get


@dataclass(frozen=True, slots=True)
class Group:
    """One KV-cache group, as far as decisions about blocks go."""

    index: int
    """The engine's number of the group."""
    kind: Kind
    block_tokens: int
    """Tokens a block holds."""
    reach_tokens: int = 0
    """SLIDING: tokens before the next one that it still sees (the window less one, and what the engine retains beyond).
    CHUNKED: tokens a chunk."""
    margin_blocks: int = 0
    """Blocks beyond the boundary that must match too. 1 for groups with draft layers: a draft layer's last entry in a
    block depends on the token after the block, so only a match of the following block proves it right."""
    store: str = "all"
    """all: keep every block; periodic: what resumes at multiples of period_tokens need, and the boundaries of the
    prompt and of the finished request; boundary: only the latter. Full attention always keeps all, and recurrent groups
    keep the states that the engine offers."""
    period_tokens: int = 0

    def blocks_at(self, boundary_tokens: int) -> int:
        """Blocks before a boundary."""
        return boundary_tokens // self.block_tokens

    def first_needed(self, boundary_tokens: int) -> int:
        """The first block that a resume at the boundary needs; it needs all from there up to blocks_at()."""
        if self.kind is _FULL:
            return 0
        if self.kind is _SLIDING:
            return max(0, boundary_tokens - self.reach_tokens) // self.block_tokens
        if self.kind is _CHUNKED:
            return boundary_tokens // self.reach_tokens * self.reach_tokens // self.block_tokens
        return max(0, boundary_tokens // self.block_tokens - 1)

    def _first_needed(self, boundaries: Int64Array) -> Int64Array:
        """The same for many: (n,) int64 tokens -> (n,) int64 block indices."""
        if self.kind is _FULL:
            return np.zeros(len(boundaries), np.int64)
        if self.kind is _SLIDING:
            return np.maximum(0, boundaries - self.reach_tokens) // self.block_tokens
        if self.kind is _CHUNKED:
            return boundaries // self.reach_tokens * self.reach_tokens // self.block_tokens
        return np.maximum(0, boundaries // self.block_tokens - 1)

    def serves(self, present: BoolArray, boundaries: Int64Array) -> BoolArray:
        """Whether resumes at the (n,) boundaries find all that they need. present: (m,) bool, one a block."""
        positions = np.arange(len(present), dtype=np.int64)
        last_gap = np.maximum.accumulate(np.where(present, -1, positions)) if len(present) else positions
        ends = boundaries // self.block_tokens + self.margin_blocks
        counts = ends - self._first_needed(boundaries)
        inside = ends <= len(present)
        gaps = last_gap[np.where(inside, ends, 1) - 1] if len(present) else np.zeros_like(ends)
        enough: BoolArray = (counts <= 0) | (inside & (gaps < ends - counts))
        return enough

    def keeps(self, first: int, last: int, boundaries: Sequence[int] = ()) -> BoolArray:
        """Which of the blocks first..last-1 a save keeps, as (last - first,) bool.

        boundaries: tokens at which resumes are expected besides the periodic ones. Holds by construction: all blocks
        that serves() asks for at a kept boundary, the margin included, are kept.
        """
        if self.kind is _FULL or self.store == "all":
            return np.ones(last - first, np.bool_)
        kept = np.zeros(last - first, np.bool_)
        wanted = list(boundaries)
        if self.store == "periodic" and self.period_tokens:
            # A block may serve the boundaries from its own start (as margin) up to those that see it last.
            start = max(1, first * self.block_tokens // self.period_tokens)
            beyond = last * self.block_tokens + self.reach_tokens
            stop = -(-beyond // self.period_tokens) + 1
            wanted += range(start * self.period_tokens, (stop + 1) * self.period_tokens, self.period_tokens)
        for boundary in wanted:
            end = boundary // self.block_tokens + self.margin_blocks - first
            if end > 0:
                kept[max(0, self.first_needed(boundary) - first) : end] = True
        return kept


def step_tokens(groups: Sequence[Group]) -> int:
    """The unit of hits: every boundary that is a multiple of it ends a block in every group."""
    return lcm(*(group.block_tokens for group in groups))


def fails_by_block(groups: Sequence[Group]) -> bool:
    """Whether a load of these groups may fail block by block, so that the engine goes on from before the first failure.

    Only where all blocks before are there: of windows and states, those that the load was for are all that it brought.
    """
    return len(groups) == 1 and groups[0].kind is _FULL


def margin_tokens(groups: Sequence[Group]) -> int:
    """How far behind a boundary blocks must match."""
    return max(group.margin_blocks * group.block_tokens for group in groups)


def last_boundary(groups: Sequence[Group], tokens: int) -> int:
    """The last boundary at which a request of which `tokens` tokens are stored can be resumed."""
    step = step_tokens(groups)
    return max(0, tokens - margin_tokens(groups)) // step * step


def longest_hit(
    groups: Sequence[Group], present: Sequence[BoolArray], above_tokens: int, limit_tokens: int
) -> int:
    """The longest boundary that every group serves, in tokens; above_tokens if none is longer.

    present: for each group (m,) bool, whether the store has the block. Blocks before above_tokens are with the engine.
    limit_tokens: the boundary must not exceed it.
    """
    step = step_tokens(groups)
    candidates = np.arange(above_tokens // step + 1, limit_tokens // step + 1, dtype=np.int64) * step
    if not len(candidates):
        return above_tokens
    good = np.ones(len(candidates), np.bool_)
    for group, there in zip(groups, present, strict=True):
        known = there.copy()
        known[: above_tokens // group.block_tokens] = True
        good &= group.serves(known, candidates)
    served = np.flatnonzero(good)
    return int(candidates[served[-1]]) if len(served) else above_tokens


def to_load(group: Group, above_tokens: int, boundary_tokens: int) -> range:
    """The blocks to load for a resume at the boundary, when the engine has all before above_tokens."""
    first = max(group.first_needed(boundary_tokens), above_tokens // group.block_tokens)
    return range(first, group.blocks_at(boundary_tokens))
