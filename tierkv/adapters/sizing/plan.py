"""What contexts take in the store, and how large DRAM and NVMe should be for a number of sessions.

A stored block occupies whole granules of 4 KiB in every tier, and a tier gives its space to block sizes by the slab, so
it needs a slab for each size that a model has. Only whole blocks are stored. Sessions are counted as if they shared
nothing: a common system prompt makes them smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tierkv.adapters.sizing.grouping import GroupSize
from tierkv.adapters.vllm.groups import Kind, last_boundary, step_tokens
from tierkv.errors import ConfigError
from tierkv.memory import DEFAULT_SLAB_BYTES, slot_bytes_for

POLICIES: Final = ("all", "periodic", "boundary")
"""What is kept of sliding-window and chunked-local groups: see tierkv.adapters.vllm.groups.Group.store."""
DRAM_SHARE: Final = 4
"""DRAM is to hold one session in so many: those whose next turn comes soon."""
MIN_DRAM_CONTEXTS: Final = 2
"""But no less than one that is saved and one that is loaded."""
NVME_HEADROOM: Final = 1.25
"""So that a session is not evicted as soon as another one begins."""


@dataclass(frozen=True, slots=True)
class GroupContext:
    """What is stored of one group for one context."""

    index: int
    blocks: int
    store_bytes: int


@dataclass(frozen=True, slots=True)
class ContextSize:
    """What one context takes in the store under a policy."""

    policy: str
    tokens: int
    """Of the context that the stored blocks let a request resume at."""
    groups: tuple[GroupContext, ...]

    @property
    def blocks(self) -> int:
        return sum(group.blocks for group in self.groups)

    @property
    def store_bytes(self) -> int:
        return sum(group.store_bytes for group in self.groups)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Sizes of the tiers of one host whose agent serves all ranks."""

    sessions: int
    dram_bytes: int
    nvme_bytes: int
    slab_bytes: int
    """The tiers' slab_bytes: their default, or more where a block does not fit into that."""


def slot_bytes(group: GroupSize) -> tuple[int, ...]:
    """What a block takes in a tier, by stage: each stage's share is a stored block of its own."""
    return tuple(slot_bytes_for(share.part_bytes * group.parts) for share in group.stages)


def context_size(
    groups: Sequence[GroupSize], context_tokens: int, policy: str, *, period_tokens: int, prefill_tokens: int
) -> ContextSize:
    """One context of `context_tokens` tokens under one of POLICIES.

    period_tokens: of "periodic". prefill_tokens: tokens of an engine's step when it computes a prompt: recurrent states
    are stored where a step ends.
    """
    if policy not in POLICIES:
        raise ConfigError(f"policy {policy!r}: one of {', '.join(POLICIES)} is needed")
    if context_tokens < 1 or period_tokens < 1 or prefill_tokens < 1:
        raise ConfigError("the tokens of a context, a period and a step must be 1 or more")
    unit = step_tokens([group.as_group("all", 0) for group in groups])
    period = -(-period_tokens // unit) * unit
    made = [group.as_group(policy, period) for group in groups]
    end = last_boundary(made, context_tokens)
    found = []
    for group, rules in zip(groups, made, strict=True):
        if group.kind is Kind.RECURRENT:
            # A step ends on a block's end where it can; the last state is the one to resume at.
            stride = max(1, prefill_tokens // group.block_tokens) * group.block_tokens
            blocks = -(-end // stride)
        else:
            blocks = int(rules.keeps(0, context_tokens // group.block_tokens, [end]).sum())
        found.append(GroupContext(group.index, blocks, blocks * sum(slot_bytes(group))))
    return ContextSize(policy, end, tuple(found))


def recommend(groups: Sequence[GroupSize], context: ContextSize, sessions: int) -> Recommendation:
    """DRAM for the sessions that are due soon, NVMe for all."""
    if sessions < 1:
        raise ConfigError(f"{sessions} sessions: 1 or more are needed")
    largest = max(max(slot_bytes(group)) for group in groups)
    slab = max(DEFAULT_SLAB_BYTES, 1 << (largest - 1).bit_length())
    in_dram = max(MIN_DRAM_CONTEXTS, -(-sessions // DRAM_SHARE))
    return Recommendation(
        sessions,
        _tier_bytes(groups, context, in_dram, slab),
        _tier_bytes(groups, context, sessions * NVME_HEADROOM, slab),
        slab,
    )


def _tier_bytes(groups: Sequence[GroupSize], context: ContextSize, contexts: float, slab_bytes: int) -> int:
    """Bytes of a tier that holds so many contexts, in whole slabs of each block size."""
    blocks: dict[int, int] = {}
    for group, held in zip(groups, context.groups, strict=True):
        for size in slot_bytes(group):
            blocks[size] = blocks.get(size, 0) + held.blocks
    return slab_bytes * sum(
        -(-math.ceil(count * contexts) // (slab_bytes // size)) for size, count in blocks.items()
    )
