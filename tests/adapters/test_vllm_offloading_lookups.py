"""Look-ups of the offloading tier: bounded waits, answers that age, and no request that asks for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierkv.adapters.vllm_offloading.lookups import MAX_TOUCHED, Answer, Lookups
from tierkv.clock import VirtualClock
from tierkv.testing.stores import TIMEOUT_S, eventually
from tierkv.types import BoolArray

KEEP_S, WAIT_S = 5.0, 1.0


class Store:
    """What is asked. `gate` holds the answer up."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.calls: list[list[bytes]] = []
        self.touched: list[bytes] = []
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Event()
        self.broken = False

    def ask(self, keys: Sequence[bytes]) -> BoolArray:
        self.calls.append(list(keys))
        self.arrived.set()
        assert self.gate.wait(TIMEOUT_S)
        if self.broken:
            raise RuntimeError("the store is broken on purpose")
        return np.array([key in self.held for key in keys], np.bool_)

    def touch(self, keys: Sequence[bytes]) -> None:
        self.touched += keys


@contextmanager
def looking(store: Store, clock: VirtualClock, **options: Any) -> Iterator[Lookups]:
    fields = {"timeout_s": WAIT_S, "keep_s": KEEP_S, "max_blocks": 1000, **options}
    lookups = Lookups(store.ask, store.touch, now_s=clock.monotonic_s, **fields)
    try:
        yield lookups
    finally:
        store.gate.set()
        lookups.close()


def answered(lookups: Lookups) -> None:
    """Waits until what was handed over is answered."""
    eventually(lambda: lookups._under_way == sum(len(batch) for batch, _ in lookups._answers), "answers")


def test_all_keys_of_a_step_go_in_one_message_and_the_next_step_knows() -> None:
    store, clock = Store(), VirtualClock()
    store.held = {b"a", b"c"}
    with looking(store, clock) as lookups:
        assert [lookups.find(key, "r") for key in (b"a", b"b", b"c")] == [Answer.RETRY] * 3
        assert lookups.find(b"a", "r") is Answer.RETRY
        assert not store.calls
        lookups.end_step()
        answered(lookups)
        expected = [Answer.HIT, Answer.MISS, Answer.HIT]
        assert [lookups.find(key, "r") for key in (b"a", b"b", b"c")] == expected
        assert store.calls == [[b"a", b"b", b"c"]]


def test_an_answer_that_does_not_come_is_a_miss_and_what_comes_late_is_ignored() -> None:
    store, clock = Store(), VirtualClock()
    store.held = {b"a"}
    store.gate.clear()
    with looking(store, clock) as lookups:
        assert lookups.find(b"a", "r") is Answer.RETRY
        lookups.end_step()
        assert store.arrived.wait(TIMEOUT_S)
        clock.advance(WAIT_S)
        assert lookups.find(b"a", "r") is Answer.RETRY
        clock.advance(0.001)
        assert lookups.find(b"a", "r") is Answer.MISS
        assert lookups.late == 1
        store.gate.set()
        answered(lookups)
        assert lookups.find(b"a", "r") is Answer.MISS
        clock.advance(KEEP_S + 1)
        assert lookups.find(b"a", "r") is Answer.RETRY
        lookups.end_step()
        answered(lookups)
        assert lookups.find(b"a", "r") is Answer.HIT


def test_an_engine_whose_steps_are_longer_than_answers_are_kept_still_hears_them() -> None:
    store, clock = Store(), VirtualClock()
    store.held = {b"a"}
    with looking(store, clock) as lookups:
        assert lookups.find(b"a", "r") is Answer.RETRY
        lookups.end_step()
        answered(lookups)
        lookups.end_step()  # the answer is taken in now
        clock.advance(100 * KEEP_S)
        assert lookups.find(b"a", "r") is Answer.HIT
        assert lookups.find(b"a", "r") is Answer.RETRY


def test_a_promise_that_was_not_kept_is_a_miss_that_is_heard() -> None:
    store, clock = Store(), VirtualClock()
    store.held = {b"a"}
    with looking(store, clock) as lookups:
        lookups.find(b"a", "r")
        lookups.end_step()
        answered(lookups)
        assert lookups.find(b"a", "r") is Answer.HIT
        lookups.miss([b"a", b"never asked for"])
        clock.advance(100 * KEEP_S)
        assert lookups.find(b"a", "r") is Answer.MISS
        assert lookups.find(b"a", "r") is Answer.RETRY


def test_more_look_ups_than_allowed_are_misses_and_do_not_count_for_ever() -> None:
    store, clock = Store(), VirtualClock()
    store.held = {b"a", b"b", b"c"}
    store.gate.clear()
    with looking(store, clock, max_blocks=2) as lookups:
        found = [lookups.find(key, "r") for key in (b"a", b"b", b"c")]
        assert found == [Answer.RETRY, Answer.RETRY, Answer.MISS]
        assert lookups.refused == 1
        lookups.end_step()
        store.gate.set()
        answered(lookups)
        assert lookups.find(b"a", "r") is Answer.HIT
        assert lookups.find(b"c", "r") is Answer.RETRY


def test_a_store_that_fails_is_a_miss_and_the_thread_goes_on(caplog: Any) -> None:
    store, clock = Store(), VirtualClock()
    store.held, store.broken = {b"a", b"b"}, True
    with looking(store, clock) as lookups:
        lookups.find(b"a", "r")
        lookups.end_step()
        answered(lookups)
        assert lookups.find(b"a", "r") is Answer.MISS
        assert "on purpose" in caplog.text
        store.broken = False
        lookups.find(b"b", "r")
        lookups.end_step()
        answered(lookups)
        assert lookups.find(b"b", "r") is Answer.HIT


def test_touches_are_told_and_bounded() -> None:
    store, clock = Store(), VirtualClock()
    with looking(store, clock) as lookups:
        lookups.touch([b"a", b"b"])
        lookups.touch([b"x"] * MAX_TOUCHED)
        lookups.end_step()
        eventually(lambda: store.touched == [b"a", b"b"], "the touches arrive")


class LookupsMachine(RuleBasedStateMachine):
    """Requests, stores and time in any order, beside a history of what the store held."""

    keys = st.integers(0, 7).map(lambda number: bytes([number]))
    requests = st.sampled_from(["r1", "r2", "r3"])

    def __init__(self) -> None:
        super().__init__()
        self.store, self.clock = Store(), VirtualClock()
        self.lookups = Lookups(
            self.store.ask, self.store.touch, timeout_s=WAIT_S, keep_s=KEEP_S, max_blocks=6,
            now_s=self.clock.monotonic_s,
        )  # fmt: skip
        self.ever_held: set[bytes] = set()
        self.live: set[str] = set()

    @rule(key=keys)
    def put(self, key: bytes) -> None:
        self.store.held.add(key)
        self.ever_held.add(key)

    @rule(key=keys)
    def take_away(self, key: bytes) -> None:
        self.store.held.discard(key)

    @rule(key=keys, request=requests)
    def find(self, key: bytes, request: str) -> None:
        self.live.add(request)
        if self.lookups.find(key, request) is Answer.HIT:
            assert key in self.ever_held

    @rule()
    def end_step(self) -> None:
        self.lookups.end_step()

    @rule(seconds=st.sampled_from([0.1, WAIT_S, KEEP_S + 0.1]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(key=keys)
    def fail_a_load(self, key: bytes) -> None:
        self.lookups.miss([key])

    @rule(request=requests)
    def end_request(self, request: str) -> None:
        self.live.discard(request)
        self.lookups.forget(request)

    @rule()
    def reset(self) -> None:
        self.lookups.forget_answers()
        self.ever_held = set(self.store.held)
        for key in range(8):  # what was known of the old contents is gone
            entry = self.lookups._entries.get(bytes([key]))
            assert entry is None or entry.answer is Answer.MISS

    @rule(key=keys, request=requests)
    def a_request_that_keeps_asking_gets_the_truth(self, key: bytes, request: str) -> None:
        self.live.add(request)
        self.clock.advance(KEEP_S + 0.1)  # all that was heard is old now
        self.lookups.find(key, request)
        answers = []
        for _ in range(8):
            self.lookups.end_step()
            answered(self.lookups)
            answers.append(self.lookups.find(key, request))
            self.clock.advance(KEEP_S + 0.1)
        assert Answer.RETRY in answers
        truth = Answer.HIT if key in self.store.held else Answer.MISS
        told = [answer for answer in answers if answer is not Answer.RETRY]
        assert told[-1] is truth
        assert len(told) >= 3

    @precondition(lambda self: not self.live)
    @invariant()
    def nothing_is_kept_for_nobody(self) -> None:
        assert self.lookups.size == 0
        assert not self.lookups._of_request

    @invariant()
    def look_ups_under_way_are_bounded(self) -> None:
        assert 0 <= self.lookups._under_way <= 6

    def teardown(self) -> None:
        self.lookups.close()


TestLookups = LookupsMachine.TestCase
TestLookups.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
