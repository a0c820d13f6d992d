"""Agent sessions: chains that grow, share their head and nothing else, in a realistic order of time."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import ArgumentError
from tierkv.workload.sessions import MAX_SEED, SessionSpec, generate_sessions
from tierkv.workload.traces import Request

specs = st.builds(
    SessionSpec,
    sessions=st.integers(1, 6),
    turns=st.integers(1, 8),
    seed=st.integers(0, MAX_SEED),
    block_tokens=st.integers(1, 3_000),
    common_tokens=st.integers(0, 30_000),
    first_input_tokens=st.integers(0, 12_000),
    new_tokens=st.integers(0, 3_000),
    output_tokens=st.integers(0, 1_000),
)


def by_session(requests: list[Request], common_blocks: int) -> dict[int, list[Request]]:
    """Groups the requests that have blocks of their own by the first of them."""
    groups: dict[int, list[Request]] = defaultdict(list)
    for request in requests:
        if len(request.hash_ids) > common_blocks:
            groups[int(request.hash_ids[common_blocks])].append(request)
    return groups


@given(specs)
def test_chains_grow_and_share_exactly_the_common_head(spec: SessionSpec) -> None:
    requests = generate_sessions(spec)
    assert len(requests) == spec.sessions * spec.turns
    common = spec.common_tokens // spec.block_tokens
    times = [request.timestamp_ms for request in requests]
    assert times == sorted(times)
    groups = by_session(requests, common)
    assert len(groups) <= spec.sessions
    seen: set[int] = set()
    for group in groups.values():
        for before, after in pairwise(group):
            assert after.input_length - before.input_length == before.output_length + spec.new_tokens
            np.testing.assert_array_equal(after.hash_ids[: len(before.hash_ids)], before.hash_ids)
        own = set(group[-1].hash_ids[common:].tolist())
        assert not own & seen, "two sessions share a block of their own"
        seen |= own
    heads = [request.hash_ids[:common] for request in requests]
    longest = max(heads, key=len)
    for head in heads:
        np.testing.assert_array_equal(head, longest[: len(head)])
    for request in requests:
        assert len(request.hash_ids) == request.input_length // spec.block_tokens
        assert len(set(request.hash_ids.tolist())) == len(request.hash_ids)


@given(specs)
def test_the_same_seed_gives_the_same_sessions_and_another_one_shares_nothing(spec: SessionSpec) -> None:
    first, again = generate_sessions(spec), generate_sessions(spec)
    for one, other in zip(first, again, strict=True):
        assert one.timestamp_ms == other.timestamp_ms
        np.testing.assert_array_equal(one.hash_ids, other.hash_ids)
    shape = {name: getattr(spec, name) for name in SessionSpec.__dataclass_fields__}
    shape["seed"] = (spec.seed + 1) % (MAX_SEED + 1)
    others = generate_sessions(SessionSpec(**shape))
    ids = {i for request in first for i in request.hash_ids.tolist()}
    assert not ids & {i for request in others for i in request.hash_ids.tolist()}


def test_the_default_shape_is_the_measured_one() -> None:
    spec = SessionSpec(sessions=400, turns=30, seed=4)
    requests = generate_sessions(spec)
    groups = by_session(requests, spec.common_tokens // spec.block_tokens)
    assert len(groups) == 400
    assert all(len(group) == 30 for group in groups.values())
    answer_s = spec.output_tokens / spec.output_tokens_per_s
    pauses_s = np.array(
        [
            (after.timestamp_ms - before.timestamp_ms) / 1000 - answer_s
            for group in groups.values()
            for before, after in pairwise(group)
        ]
    )
    assert np.median(pauses_s) == pytest.approx(5.2, rel=0.05)
    assert np.percentile(pauses_s, 99) == pytest.approx(81.4, rel=0.15)
    switches = sum(one.hash_ids[-1] not in other.hash_ids for one, other in pairwise(requests))
    assert switches > 0.9 * len(requests), "sessions must interleave"
    assert requests[0].input_length == 30_000


@pytest.mark.parametrize(
    ("field", "value"),
    [("sessions", 0), ("turns", 0), ("block_tokens", 0), ("seed", -1), ("common_tokens", -1), ("pause_median_s", 0.0),
     ("output_tokens_per_s", 0.0), ("sessions", 1 << 50)],
)  # fmt: skip
def test_impossible_shapes_are_refused(field: str, value: float) -> None:
    with pytest.raises(ArgumentError, match="sessions"):
        generate_sessions(SessionSpec(**{field: value}))  # type: ignore[arg-type]
