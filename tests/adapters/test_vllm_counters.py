"""The connector's counters against a plain record of all that was counted, and the joining of several of them."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter as Tally
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.adapters.vllm import counters
from tierkv.adapters.vllm.counters import COUNTERS, GAUGES, HISTOGRAMS, OTHER, Counters, merge, reduce
from tierkv.errors import ArgumentError

Act = tuple[str, str, Any, Any]
LABELS = sorted({label for kind in COUNTERS.values() for label in kind.labels} | {"never heard of"})

acts = st.lists(
    st.one_of(
        st.tuples(
            st.just("count"),
            st.sampled_from(sorted(COUNTERS)),
            st.integers(0, 1 << 40),
            st.sampled_from(LABELS),
        ),
        # Multiples of 1/1024 s, so that sums are exact in any order.
        st.tuples(
            st.just("observe"),
            st.sampled_from(sorted(HISTOGRAMS)),
            st.integers(0, 60 << 10).map(lambda ticks: ticks / 1024),
            st.none(),
        ),
        st.tuples(st.just("set"), st.sampled_from(sorted(GAUGES)), st.integers(0, 1), st.none()),
    ),
    max_size=30,
)


def play(done: list[Act], source: str = "worker 0/1") -> Counters:
    made = Counters(source)
    for act, name, value, label in done:
        if act == "count":
            made.count(name, value, label if COUNTERS[name].labels else None)
        elif act == "observe":
            made.observe(name, value)
        else:
            made.set(name, value)
    return made


def expected(done: list[Act]) -> tuple[Tally[tuple[str, str]], dict[str, list[float]], dict[str, float]]:
    sums: Tally[tuple[str, str]] = Tally()
    observed: dict[str, list[float]] = {}
    gauges: dict[str, float] = {}
    for act, name, value, label in done:
        if act == "count" and value:
            known = COUNTERS[name].labels
            sums[name, (label if label in known else OTHER) if known else ""] += value
        elif act == "observe":
            observed.setdefault(name, []).append(value)
        elif act == "set":
            gauges[name] = value
    return sums, observed, gauges


@given(acts)
def test_what_is_taken_is_what_was_counted(done: list[Act]) -> None:
    made = play(done)
    taken = made.take()
    sums, observed, gauges = expected(done)
    assert {
        (name, label): value
        for name, values in taken.get("counters", {}).items()
        for label, value in values.items()
    } == dict(sums)
    assert set(taken.get("histograms", {})) == set(observed)
    for name, (counts, totals) in taken.get("histograms", {}).items():
        edges = [-math.inf, *HISTOGRAMS[name].bounds, math.inf]
        for bucket, (count, total) in enumerate(zip(counts, totals, strict=True)):
            inside = [value for value in observed[name] if edges[bucket] < value <= edges[bucket + 1]]
            assert (count, total) == (len(inside), sum(inside))
    if taken:
        assert taken.get("gauges", {}) == {name: {"worker 0/1": value} for name, value in gauges.items()}
    assert json.loads(json.dumps(taken)) == taken
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(taken)) == taken
    assert made.take() == {}, "take() must start anew"


@given(st.lists(acts, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_joining_is_the_same_in_any_order_and_grouping(parts: list[list[Act]], random: Any) -> None:
    taken = [play(done, f"worker {number}/4").take() for number, done in enumerate(parts)]
    before = json.dumps(taken)
    left: dict[str, Any] = {}
    for data in taken:
        left = merge(left, data)
    right: dict[str, Any] = {}
    for data in reversed(taken):
        right = merge(data, right)
    shuffled = list(taken)
    random.shuffle(shuffled)
    while len(shuffled) > 1:  # a random tree
        position = random.randrange(len(shuffled) - 1)
        shuffled[position : position + 2] = [merge(shuffled[position], shuffled[position + 1])]
    assert left == right == shuffled[0]
    assert json.dumps(taken) == before, "merge must not change its arguments"


@given(acts, acts)
def test_two_steps_joined_are_one_longer_step(first: list[Act], second: list[Act]) -> None:
    def without_gauges(data: dict[str, Any]) -> dict[str, Any]:
        return {part: values for part, values in data.items() if part != "gauges"}

    joined = merge(play(first).take(), play(second).take())
    assert without_gauges(joined) == without_gauges(play(first + second).take())


def test_a_gauge_is_the_least_of_all_ranks() -> None:
    ranks = [Counters(f"worker {rank}/3") for rank in range(3)]
    for rank, value in zip(ranks, (1, 0, 1), strict=True):
        rank.set(counters.AGENT_ATTACHED, value)
    joined: dict[str, Any] = {}
    for rank in ranks:
        joined = merge(joined, rank.take())
    assert reduce(joined) == {"agent_attached": 0}
    ranks[1].set(counters.AGENT_ATTACHED, 1)
    assert ranks[1].take() == {"gauges": {"agent_attached": {"worker 1/3": 1}}}
    ranks[1].set(counters.AGENT_ATTACHED, 1)
    assert ranks[1].take() == {}, "an unchanged gauge alone is nothing new"
    ranks[1].count(counters.LOOKUPS)
    assert ranks[1].take()["gauges"] == {"agent_attached": {"worker 1/3": 1}}


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_the_bound_of_90_percent_is_one(values: list[float]) -> None:
    made = Counters("scheduler")
    for value in values:
        made.observe(counters.LOAD_S, value)
    bound = reduce(made.take())["load_s_p90"]
    below = sorted(values)[math.ceil(0.9 * len(values)) - 1]
    if below <= HISTOGRAMS[counters.LOAD_S].bounds[-1]:
        assert below <= bound <= HISTOGRAMS[counters.LOAD_S].bounds[-1]
    else:
        assert bound > HISTOGRAMS[counters.LOAD_S].bounds[-1] - 1e-5


def test_the_size_does_not_grow_with_what_is_counted() -> None:
    made = Counters("scheduler")
    for number in range(5000):
        made.observe(counters.LOAD_S, number / 100)
        made.count(counters.FAILED_LOAD_BLOCKS, 1, f"reason {number}")
    taken = made.take()
    assert taken["counters"] == {"failed_load_blocks": {OTHER: 5000}}
    assert len(msgspec.msgpack.encode(taken)) < 500


def test_numbers_of_numpy_can_be_sent() -> None:
    made = Counters("scheduler")
    made.count(counters.LOADED_BLOCKS, np.int64(3))  # type: ignore[arg-type]
    made.observe(counters.LOAD_S, np.float32(0.5))  # type: ignore[arg-type]
    made.set(counters.AGENT_ATTACHED, np.True_)  # type: ignore[arg-type]
    taken = made.take()
    assert json.loads(msgspec.json.encode(taken)) == taken
    assert reduce(taken) == {"loaded_blocks": 3, "load_s_mean": 0.5, "load_s_p90": 0.5, "agent_attached": 1}


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("count", ("no such",)),
        ("count", (counters.LOOKUPS, -1)),
        ("count", (counters.LOOKUPS, 1, "dram")),
        ("count", (counters.HIT_TOKENS, 1)),
        ("count", (counters.LOAD_S,)),
        ("observe", (counters.LOOKUPS, 1.0)),
        ("set", (counters.LOOKUPS, 1.0)),
    ],
)
def test_wrong_names_are_refused(call: str, arguments: tuple[Any, ...]) -> None:
    made = Counters("scheduler")
    with pytest.raises(ArgumentError):
        getattr(made, call)(*arguments)
    assert made.take() == {}


def test_counting_from_several_threads_loses_nothing() -> None:
    made = Counters("scheduler")
    taken: list[dict[str, Any]] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait(10)
        for _ in range(500):
            made.count(counters.LOADED_BYTES, 3)
            made.observe(counters.LOOKUP_S, 0.001)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    start.wait(10)
    while any(thread.is_alive() for thread in threads):
        taken.append(made.take())
    for thread in threads:
        thread.join(10)
    joined: dict[str, Any] = {}
    for data in [*taken, made.take()]:
        joined = merge(joined, data)
    assert joined["counters"] == {"loaded_bytes": {"": 4500}}
    assert sum(joined["histograms"]["lookup_s"][0]) == 1500
