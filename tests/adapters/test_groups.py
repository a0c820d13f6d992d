"""Policies by group: what a resume needs against what tokens see, hits against brute force, and kept covers needed."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.adapters.vllm.groups import Group, Kind, last_boundary, longest_hit, step_tokens, to_load


@st.composite
def some_group(draw: st.DrawFn, kinds: tuple[Kind, ...] = tuple(Kind), store: str = "") -> Group:
    kind = draw(st.sampled_from(kinds))
    tokens = draw(st.sampled_from([1, 2, 4, 8, 16]))
    reach = 0
    if kind is Kind.SLIDING:
        reach = draw(st.integers(0, 40))
    elif kind is Kind.CHUNKED:
        reach = draw(st.sampled_from([4, 8, 12, 16, 32]))
    margin = draw(st.sampled_from([0, 0, 1])) if kind is not Kind.RECURRENT else 0
    policy = store or draw(st.sampled_from(["all", "periodic", "boundary"]))
    return Group(0, kind, tokens, reach, margin, policy, draw(st.sampled_from([16, 32, 48])))


groups_lists = st.lists(some_group(), min_size=1, max_size=3)


def tokens_seen(group: Group, position: int) -> set[int]:
    """The tokens before `position` that the token there sees, by the definition of each kind."""
    if group.kind is Kind.FULL:
        return set(range(position))
    if group.kind is Kind.SLIDING:
        return {token for token in range(position) if position - token <= group.reach_tokens}
    if group.kind is Kind.CHUNKED:
        return {
            token
            for token in range(position)
            if token // group.reach_tokens == position // group.reach_tokens
        }
    return set()


def blocks_needed(group: Group, boundary: int) -> set[int]:
    """Blocks that a resume at the boundary loads, by brute force."""
    if group.kind is Kind.RECURRENT:
        return {boundary // group.block_tokens - 1} if boundary else set()
    return {token // group.block_tokens for token in tokens_seen(group, boundary)}


def blocks_that_must_match(group: Group, boundary: int) -> set[int]:
    """The same, and the margin behind the boundary."""
    end = boundary // group.block_tokens
    return blocks_needed(group, boundary) | set(range(end, end + group.margin_blocks))


@given(group=some_group(), blocks=st.integers(0, 40))
def test_a_resume_needs_what_the_next_token_sees(group: Group, blocks: int) -> None:
    boundary = blocks * group.block_tokens
    assert set(range(group.first_needed(boundary), group.blocks_at(boundary))) == blocks_needed(
        group, boundary
    )


@given(group=some_group(kinds=(Kind.SLIDING, Kind.CHUNKED)), tokens=st.integers(0, 300))
def test_what_is_needed_is_what_the_engine_keeps(group: Group, tokens: int) -> None:
    """vLLM's get_num_skipped_tokens: windows give up whole blocks that no later token sees."""
    if group.kind is Kind.SLIDING:
        skipped = max(0, tokens - (group.reach_tokens + 1) + 1)
    else:
        skipped = tokens // group.reach_tokens * group.reach_tokens
    assert group.first_needed(tokens) == skipped // group.block_tokens


@st.composite
def presence(draw: st.DrawFn) -> tuple[list[Group], list[np.ndarray], int, int]:
    """(groups, what the store has, what the engine has, limit)"""
    groups = draw(groups_lists)
    step = lcm(*(group.block_tokens for group in groups))
    tokens = draw(st.integers(0, 12)) * step + draw(st.integers(0, step))
    likely = draw(st.sampled_from([0.5, 0.8, 0.95]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    present = [random.random(tokens // group.block_tokens) < likely for group in groups]
    above = draw(st.integers(0, 6)) * step
    limit = max(0, tokens - draw(st.integers(0, 2))) // step * step
    return groups, present, above, limit


@settings(max_examples=400)
@given(presence())
def test_the_longest_hit_is_that_of_brute_force(case: tuple[list[Group], list[np.ndarray], int, int]) -> None:
    groups, present, above, limit = case
    step = step_tokens(groups)
    best = above
    for boundary in range(above + step, limit + 1, step):
        if all(
            all(
                (index < above // group.block_tokens and index < len(there))
                or (index < len(there) and there[index])
                for index in blocks_that_must_match(group, boundary)
            )
            for group, there in zip(groups, present, strict=True)
        ):
            best = boundary
    before = [there.copy() for there in present]
    assert longest_hit(groups, present, above, limit) == best
    assert all((old == new).all() for old, new in zip(before, present, strict=True)), (
        "the question is not an answer"
    )


@given(presence())
def test_what_is_loaded_and_what_the_engine_has_are_all_that_is_needed(
    case: tuple[list[Group], list[np.ndarray], int, int],
) -> None:
    groups, present, above, limit = case
    hit = longest_hit(groups, present, above, limit)
    if hit == above:
        return
    for group, there in zip(groups, present, strict=True):
        loaded = set(to_load(group, above, hit))
        assert all(there[index] for index in loaded), "only what the store has is loaded"
        has = set(range(above // group.block_tokens)) & blocks_needed(group, above) | (
            set(range(above // group.block_tokens)) if group.kind is Kind.FULL else set()
        )
        assert blocks_needed(group, hit) <= loaded | has
        assert loaded <= blocks_needed(group, hit)


@given(groups=groups_lists, prompt=st.integers(0, 200), chunks=st.lists(st.integers(1, 60), max_size=12))
def test_the_prompts_boundary_is_served_by_what_is_kept(
    groups: list[Group], prompt: int, chunks: list[int]
) -> None:
    """Whatever the steps are: what keeps() says of each of them adds up to what serves() asks for."""
    boundaries = sorted({last_boundary(groups, prompt), last_boundary(groups, prompt - 1)})
    for group in groups:
        total = prompt // group.block_tokens
        kept = np.zeros(total, np.bool_)
        at = 0
        for chunk in [*chunks, 1 << 20]:
            until = min(prompt, at * group.block_tokens + chunk) // group.block_tokens
            if until > at:
                kept[at:until] = group.keeps(at, until, boundaries)
                at = until
        for boundary in boundaries:
            if boundary > 0:
                assert group.serves(kept, np.array([boundary], np.int64))[0]


@given(groups=groups_lists, tokens=st.integers(1, 400))
def test_periodic_boundaries_are_served_by_what_is_kept(groups: list[Group], tokens: int) -> None:
    step = step_tokens(groups)
    for group in groups:
        if group.store != "periodic":
            continue
        period = -(-group.period_tokens // step) * step
        kept_by = replace(group, period_tokens=period)
        total = tokens // group.block_tokens
        kept = np.concatenate(
            [kept_by.keeps(index, index + 1) for index in range(total)] or [np.zeros(0, np.bool_)]
        )
        assert (kept == kept_by.keeps(0, total)).all(), "however the blocks come"
        for boundary in range(period, last_boundary([group], tokens) + 1, period):
            if boundary % group.block_tokens == 0:
                assert kept_by.serves(kept, np.array([boundary], np.int64))[0], boundary


@given(groups=groups_lists, tokens=st.integers(0, 400))
def test_the_last_boundary_is_whole_in_every_group(groups: list[Group], tokens: int) -> None:
    boundary = last_boundary(groups, tokens)
    step = step_tokens(groups)
    margin = max(group.margin_blocks * group.block_tokens for group in groups)
    assert boundary % step == 0
    assert 0 <= boundary <= tokens
    assert boundary == 0 or boundary + margin <= tokens
    assert boundary + step + margin > tokens, "none that is later would do"


def test_boundary_only_keeps_much_less_than_all() -> None:
    group = Group(0, Kind.SLIDING, 16, 1023, 0, "boundary")
    assert np.count_nonzero(group.keeps(0, 5000, [80_000])) == 64
    periodic = Group(0, Kind.SLIDING, 16, 1023, 0, "periodic", 8192)
    assert np.count_nonzero(periodic.keeps(0, 5120)) == 64 * 10


@given(group=some_group(), boundary=st.integers(0, 30))
def test_serving_is_never_claimed_beyond_what_is_known(group: Group, boundary: int) -> None:
    tokens = boundary * group.block_tokens
    short = np.ones(max(0, boundary + group.margin_blocks - 1), np.bool_)
    if blocks_that_must_match(group, tokens) - set(range(len(short))):
        assert not group.serves(short, np.array([tokens], np.int64))[0]
