"""The connector in any order of events: never a wrong byte, never a stuck request, nothing left held."""

from __future__ import annotations

import os
from typing import Any

import pytest
from connector_harness import HeldStore, InlineFinder, Rig, chunked, full, held_rig, recurrent, window
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tierkv.testing.fake_engine import FakeRequest, FakeShape, Status

SHAPES: dict[str, FakeShape] = {
    "full": FakeShape(groups=(full(),), num_blocks=40),
    "full, pipelined, small": FakeShape(groups=(full(),), pipelined=True, num_blocks=24),
    "full, fail": FakeShape(groups=(full(),), pipelined=True, recompute=False),
    "drafts": FakeShape(groups=(full(margin_blocks=1),), drafts=3, pipelined=True),
    "window": FakeShape(groups=(window(store="boundary"),), pipelined=True, num_blocks=24),
    "window and full": FakeShape(groups=(window(store="periodic", period=32), full(index=1)), pipelined=True),
    "hybrid, fail": FakeShape(groups=(window(), full(index=1)), recompute=False),
    "unequal, drafts": FakeShape(
        groups=(window(reach=6, store="boundary"), full(tokens=8, index=1, margin_blocks=1)),
        drafts=2, pipelined=True,
    ),
    "chunked": FakeShape(groups=(full(), chunked(reach=8, index=1, store="boundary")), num_blocks=64),
    "recurrent": FakeShape(groups=(full(tokens=8), recurrent(index=1)), pipelined=True),
    "ranks": FakeShape(
        groups=(full(layers=(1, 1), replicated=True), window(index=1, layers=(0, 1))), tensor_ranks=2,
        pipelined=True,
    ),
}  # fmt: skip
SYNC = {
    "sync": FakeShape(groups=(full(),)),
    "sync, pipelined": FakeShape(groups=(full(),), pipelined=True, num_blocks=40),
    "sync, fail": FakeShape(groups=(full(),), recompute=False),
    "sync, ranks": FakeShape(groups=(full(layers=(1, 1)),), tensor_ranks=2, pipelined=True),
}
PROMPT = [3, 1, 4, 1, 5, 0, 2, 6, 5, 3, 5] * 6


class ConnectorMachine(RuleBasedStateMachine):
    """See the module."""

    shape: FakeShape
    load_async = True
    which = st.integers(0, 7)

    @initialize(room=st.sampled_from([3, 12, 40]))
    def start(self, room: int) -> None:
        self.context = held_rig(self.shape, load_async=self.load_async, max_held_blocks=room)
        self.rig: Rig
        self.store: HeldStore
        self.finder: InlineFinder
        self.rig, self.store, self.finder = self.context.__enter__()
        self.engine = self.rig.engine
        self.all: list[FakeRequest] = []
        self.resets = 0
        self.new_spaces: set[bytes] = set()
        """The digests of keyspaces that must be empty."""
        self.faults = False
        """Whether blocks went that were promised, or loads were made to fail."""

    def pick(self, which: int, *status: Status) -> FakeRequest | None:
        there = [request for request in self.engine.requests.values() if request.status in status]
        return there[which % len(there)] if there else None

    @rule(
        shared=st.integers(1, 60), own=st.lists(st.integers(0, 6), max_size=9), tokens=st.integers(1, 20),
        branch=st.integers(0, 1), salt=st.sampled_from([0, 0, 0, 1]), count=st.integers(1, 3),
        wishes=st.sampled_from([{}, {}, {}, {"load": False}, {"save": False}]),
    )  # fmt: skip
    def arrive(
        self, shared: int, own: list[int], tokens: int, branch: int, salt: int, count: int, wishes: Any
    ) -> None:
        """Requests with a prefix in common, and ids that were used before."""
        for number in range(count):
            taken = self.engine.requests
            name = next((f"r{place}" for place in range(6) if f"r{place}" not in taken), None)
            if name is None:
                return
            request = FakeRequest(name, PROMPT[:shared] + own, tokens, branch=branch + number, salt=salt)
            request.kv_transfer_params = {"tierkv": wishes}
            self.all.append(request)
            self.engine.add(request)

    @rule(which=which, tokens=st.integers(1, 12))
    def next_turn(self, which: int, tokens: int) -> None:
        """A session goes on with all that it has seen."""
        past = [request for request in self.all if request.status is Status.FINISHED]
        if past and "turn" not in self.engine.requests:
            request = FakeRequest("turn", [*past[which % len(past)].tokens, 1, 2, 3], tokens)
            self.all.append(request)
            self.engine.add(request)

    @rule(steps=st.integers(1, 6), late=st.booleans(), moves=st.integers(0, 3))
    def go_on(self, steps: int, late: bool, moves: int) -> None:
        for _ in range(steps):
            self.store.advance(moves)
            self.engine.step(execute_late=late)
            self.finder.release_ended()

    @rule()
    def go_far(self) -> None:
        for _ in range(25):
            self.store.advance()
            self.engine.step()

    @rule(
        shared=st.integers(12, 60), gap=st.integers(0, 2), fail=st.integers(0, 6), late=st.booleans(),
        moves=st.integers(0, 3),
    )  # fmt: skip
    def come_one_after_another(self, shared: int, gap: int, fail: int, late: bool, moves: int) -> None:
        """What the engine has forgotten and the store may have, while loads of it may fail."""
        self.forget_locally()
        self.faults |= bool(fail)
        self.store.fail_loads = fail
        for branch in (0, 1, 2):
            self.arrive(shared, [branch] * 7, 4, branch, 0, 1, {})
            self.go_on(gap, late, moves)

    @rule(which=which)
    def abort(self, which: int) -> None:
        request = self.pick(which, Status.WAITING, Status.RUNNING, Status.PREEMPTED, Status.LOADING)
        if request is not None:
            self.engine.abort(request)

    @rule(which=which)
    def abort_in_load(self, which: int) -> None:
        request = self.pick(which, Status.LOADING)
        if request is not None:
            self.engine.abort(request)

    @rule(which=which)
    def preempt(self, which: int) -> None:
        request = self.pick(which, Status.RUNNING)
        if request is not None:
            self.engine.preempt(request)

    @rule()
    def forget_locally(self) -> None:
        for block in self.engine.block_pool.blocks:
            if block.ref_cnt == 0:
                self.engine.block_pool.forget(block)

    @rule(loads=st.booleans())
    def another_connector_is_chosen(self, loads: bool) -> None:
        self.engine.choose_other, self.engine.other_loads = True, loads

    @rule(good=st.booleans())
    def another_connector_has_loaded(self, good: bool) -> None:
        self.engine.other_arrives(good=good)

    @rule()
    def another_connector_loads_and_the_client_goes(self) -> None:
        self.forget_locally()
        self.another_connector_is_chosen(True)
        self.arrive(50, [], 2, 0, 0, 1, {})
        self.go_on(2, False, 1)
        self.abort_in_load(0)

    @rule(answers=st.booleans())
    def look_ups(self, answers: bool) -> None:
        self.finder.answers = answers
        if answers:
            self.finder.answer()

    @rule(keep=st.integers(0, 3), hard=st.booleans())
    def blocks_are_lost(self, keep: int, hard: bool) -> None:
        """By eviction, which spares what is leased, or by a fault, which spares nothing."""
        self.faults |= hard
        leased = set() if hard else self.store.leased()
        self.store.lose(lambda key: key in leased or key[1][0] % 4 < keep)

    @rule(count=st.integers(1, 9))
    def loads_fail(self, count: int) -> None:
        self.faults = True
        self.store.fail_loads = count

    @rule()
    def agent_dies(self) -> None:
        self.faults = True
        self.store.attached = False
        self.store.blocks.clear()
        self.store.leases.clear()

    @rule()
    def agent_is_back(self) -> None:
        self.store.attached = True

    @rule()
    def leases_are_given_up(self) -> None:
        """As when the engine has not asked for long."""
        for search in [search for search in self.finder._leased if not search.loading]:
            self.finder.close(search)
        self.finder.release_ended()

    @rule(forgets=st.booleans(), clears=st.booleans())
    def clear(self, forgets: bool, clears: bool) -> None:
        """A reset. Until the engine has forgotten its own prefix cache too, nothing is saved under the new names."""
        self.resets += 1
        pool = self.engine.block_pool
        clean = (forgets and self.engine.reset()) or not (
            pool.used or any(block.names for block in pool.blocks)
        )
        self.rig.clear(f"reset {self.resets}")
        if clears:
            self.faults = True  # what is being loaded goes too
            self.store.blocks.clear()
        self.new_spaces = (
            set() if clean else {space.digest for spaces in self.rig.spaces for space in spaces if space}
        )

    @rule()
    def engine_forgets(self) -> None:
        if self.engine.reset():
            self.new_spaces = set()

    @invariant()
    def nothing_is_saved_from_before_a_reset(self) -> None:
        if hasattr(self, "rig"):
            assert self.rig.scheduler.held_blocks >= 0
            assert not any(digest in self.new_spaces for digest, _ in self.store.blocks)
            self.rig.scheduler.end_clear()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.store.attached = True
        self.store.fail_loads = 0
        self.rig.settled()
        self.finder.release_ended()
        assert not self.store.leases
        for (digest, name), parts in self.store.blocks.items():
            space = self.store.spaces[digest]
            for part, content in parts.items():
                assert content == self.rig.right_bytes(space, name, part)
        if not self.faults:
            failed = self.rig.counters.take().get("counters", {}).get("failed_load_blocks", {})
            assert not sum(failed.values()), "what was promised has come"
        allowed = (Status.FINISHED, Status.ABORTED, *(() if self.shape.recompute else (Status.FAILED,)))
        assert all(request.status in allowed for request in self.all)
        self.context.__exit__(None, None, None)


@pytest.mark.parametrize("name", [*SHAPES, *SYNC])
def test_any_order_of_events(name: str) -> None:
    class Machine(ConnectorMachine):
        shape = SHAPES.get(name) or SYNC[name]
        load_async = name in SHAPES

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=int(os.environ.get("TIERKV_EXAMPLES", "20")),
            stateful_step_count=40, deadline=None, report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
