"""The forward pass of FakeEngine: what its ranks write into their caches, and whether what they hold is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tierkv.adapters.vllm.groups import Kind
from tierkv.testing.fake_cache import RUBBISH, UNSETTLED, FakePool, RankMemory, Truth
from tierkv.testing.fake_requests import FakeRequest, FakeShape, Outcome, Work, ceil, first_seen

_VOCABULARY = 7


class Forward:
    """All ranks of an engine. A step that sees wrong bytes makes wrong bytes."""

    def __init__(self, shape: FakeShape) -> None:
        self.groups = [fake.group for fake in shape.groups]
        self.ranks = [
            RankMemory(shape.groups, shape.num_blocks, stage, tensor)
            for stage in range(shape.stages)
            for tensor in range(shape.tensor_ranks)
        ]

    def compute(self, work: Work, outcome: Outcome) -> None:
        request, sequence = work.request, work.request.sequence
        start = request.worker_computed if work.decodes else work.start
        accepted = 0
        if work.decodes:
            start = min(start, len(sequence) - 1)
            if work.drafts:
                accepted = (sequence.last >> 9) % (work.drafts + 1)
        good = self._sees(work, start)
        new = accepted + 1 if work.decodes or start + work.count == len(sequence) else 0
        known = len(sequence)
        for _ in range(new):
            sequence.append((sequence.last ^ (request.branch * 0x9E37)) % _VOCABULARY)
        count = accepted + 1 if work.decodes else work.count
        spoil = None if good else RUBBISH
        for rank in self.ranks:
            for position, group in enumerate(self.groups):
                self._write(rank, work, position, start, count, spoil)
                if group.margin_blocks and work.decodes and good:
                    last = start + count - 1
                    block = work.tables[position][last // group.block_tokens]
                    rank.write(
                        position,
                        block,
                        last % group.block_tokens,
                        sequence.digests[last : last + 1],
                        UNSETTLED,
                    )
        if good:
            request.worker_computed = start + count
            outcome.new_tokens[request] = new
            outcome.accepted[request] = accepted
        else:
            outcome.spoiled.add(request)
            request.worker_computed = start
            sequence.cut(known)  # what was made of wrong context is not the truth

    def _write(
        self, rank: RankMemory, work: Work, position: int, start: int, count: int, spoil: np.uint64 | None
    ) -> None:
        group, table = self.groups[position], work.tables[position]
        digests = work.request.sequence.digests
        tokens = group.block_tokens
        if group.kind is Kind.RECURRENT:
            rank.write_state(
                position, table[ceil(start + count, tokens) - 1], digests[start + count - 1], spoil
            )
            return
        # What was drafted and not accepted lies behind, and is written again.
        for first, until, flip in (
            (start, start + count, spoil),
            (start + count, start + work.count, RUBBISH),
        ):
            at = first
            while at < until:
                stop = min(until, (at // tokens + 1) * tokens)
                values = digests[at:stop] if flip is not RUBBISH else np.zeros(stop - at, np.uint64)
                if table[at // tokens]:
                    rank.write(position, table[at // tokens], at % tokens, values, flip)
                at = stop

    def _sees(self, work: Work, start: int) -> bool:
        """Whether all that a step builds on is right. Draft layers' last entry is settled first."""
        good = True
        digests = work.request.sequence.digests
        for rank in self.ranks:
            for position, group in enumerate(self.groups):
                tokens, table = group.block_tokens, work.tables[position]
                if group.margin_blocks and work.decodes and start:
                    rank.write(
                        position,
                        table[(start - 1) // tokens],
                        (start - 1) % tokens,
                        digests[start - 1 : start],
                    )
                good &= self.right(rank, position, table, first_seen(group, start), start, digests)
        return good

    def right(
        self, rank: RankMemory, position: int, table: Sequence[int], first: int, end: int, digests: Any
    ) -> bool:
        """Whether the entries first..end-1, or the state after end tokens, are right on a rank."""
        group = self.groups[position]
        tokens = group.block_tokens
        if not end:
            return True
        if group.kind is Kind.RECURRENT:
            return rank.holds_state(position, table[ceil(end, tokens) - 1], digests[end - 1])
        for index in range(first // tokens, ceil(end, tokens)):
            begin, stop = max(first, index * tokens), min(end, (index + 1) * tokens)
            if not table[index] or not rank.holds(
                position, table[index], begin % tokens, digests[begin:stop]
            ):
                return False
        return True

    def settle_last(self, request: FakeRequest) -> None:
        """A draft layer's last entry is settled by the token that was sampled last, though no step runs any more."""
        last = request.num_computed_tokens - request.num_in_flight_tokens - 1
        if not request.tables or last < request.num_prompt_tokens or request.num_in_flight_tokens:
            return
        for rank in self.ranks:
            for position, group in enumerate(self.groups):
                block = request.tables[position][last // group.block_tokens]
                if group.margin_blocks and not block.is_null and last < request.worker_computed:
                    digests = request.sequence.digests[last : last + 1]
                    rank.write(position, block.block_id, last % group.block_tokens, digests)

    def receive(self, request: FakeRequest, tokens: int) -> None:
        """Another connector brings what the first `tokens` tokens of a request are to hold."""
        digests = request.sequence.digests
        for rank in self.ranks:
            for position, group in enumerate(self.groups):
                size = group.block_tokens
                for index, block in enumerate(request.tables[position]):
                    first, end = index * size, min(tokens, (index + 1) * size)
                    if block.is_null or end <= first:
                        continue
                    if group.kind is not Kind.RECURRENT:
                        rank.write(position, block.block_id, 0, digests[first:end])
                    elif end == tokens:
                        rank.write_state(position, block.block_id, digests[end - 1])

    def check(self, request: FakeRequest, tokens: int, what: str) -> None:
        """Every block that the engine may still use holds the right bytes."""
        digests = request.sequence.digests
        for number, rank in enumerate(self.ranks):
            for position, group in enumerate(self.groups):
                table = [block.block_id for block in request.tables[position]]
                end = tokens
                if group.margin_blocks and what == "computed" and end > request.num_prompt_tokens:
                    end -= 1  # not settled yet
                if group.kind is Kind.RECURRENT and request.num_in_flight_tokens:
                    continue  # a step under way may have gone on with the state
                assert self.right(rank, position, table, first_seen(group, tokens), end, digests), (
                    f"{request.request_id}: rank {number}, group {position}: not all of the {tokens} {what} tokens "
                    f"are right"
                )

    def check_prefix_cache(self, pool: FakePool, truth: Truth) -> None:
        """Every block that the engine's own prefix cache knows holds the right bytes. Nothing may be under way."""
        for block in pool.blocks:
            for position, name in block.names:
                group = self.groups[position]
                digests = truth.tokens_of(name, group.block_tokens)
                for rank in self.ranks:
                    if group.kind is Kind.RECURRENT:
                        assert rank.holds_state(position, block.block_id, digests[-1])
                    elif not group.margin_blocks:
                        assert rank.holds(position, block.block_id, 0, digests)
