"""Saves, loads, look-ups and resets in any order, beside what was saved: never a wrong byte, never a stuck job."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from vllm_offloading_harness import ROWS, CpuTier, ask, finish, make_key, own_agent, tier_core, tier_specs

from tierkv.adapters.vllm_offloading.core import Finished
from tierkv.adapters.vllm_offloading.lookups import Answer
from tierkv.agent.client import AgentStore
from tierkv.fragments import Fragments
from tierkv.keys import pack_hashes
from tierkv.testing.stores import eventually

_examples = count()


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentStore]:
    """Small enough that blocks are evicted."""
    with own_agent(dram_bytes=256 << 10, slab_bytes=64 << 10) as store:
        yield store


class CoreMachine(RuleBasedStateMachine):
    """One engine's tier. Rows are given to jobs and not used otherwise until their jobs have ended, as vLLM does."""

    path = ""
    blocks = st.lists(st.tuples(st.integers(0, 39), st.integers(0, 1)), min_size=1, max_size=8, unique=True)

    @initialize()
    def start(self) -> None:
        self.memory = CpuTier()
        self.context = tier_core(
            self.memory, lambda: AgentStore(self.path), AgentStore(self.path), lookup_keep_s=1e-9,
            specs=tier_specs(revision=f"example {next(_examples)}"),
        )  # fmt: skip
        self.core = self.context.__enter__()
        eventually(lambda: self.core.attached, "the tier attaches")
        self.free = list(range(ROWS))
        self.jobs: dict[int, tuple[list[bytes], list[int], bool]] = {}
        self.last_job = 0
        self.may_hold: set[bytes] = set()

    def submit(self, blocks: Any, load: bool) -> None:
        keys = [make_key(number, group) for number, group in blocks]
        if len(keys) > len(self.free):
            return
        rows, self.free = self.free[: len(keys)], self.free[len(keys) :]
        self.last_job += 1
        self.jobs[self.last_job] = (keys, rows, load)
        where = np.array(rows, np.int64)
        if load:
            self.memory.rows[where] = 0xEE
            self.core.load(self.last_job, keys, where)
        else:
            self.memory.fill(rows, keys)
            self.may_hold.update(keys)  # from now on: a load may find what a save has not been heard of yet
            self.core.save(self.last_job, keys, where)

    @rule(blocks=blocks)
    def save(self, blocks: Any) -> None:
        self.submit(blocks, load=False)

    @rule(blocks=blocks)
    def load(self, blocks: Any) -> None:
        self.submit(blocks, load=True)

    def take(self, result: Finished) -> None:
        keys, rows, load = self.jobs.pop(result.job)
        assert result.load is load
        assert result.ok == (list(result.done) == keys)
        for key, row in zip(keys, rows, strict=True):
            if key in result.done:
                assert self.memory.holds(row, key)
                assert key in self.may_hold
        self.free += rows

    @rule()
    def poll(self) -> None:
        for result in self.core.finished():
            self.take(result)

    @rule()
    def wait_for_all(self) -> None:
        for result in finish(self.core, len(self.jobs)):
            self.take(result)

    @rule(blocks=blocks)
    def look_up(self, blocks: Any) -> None:
        self.wait_for_all()
        keys = [make_key(number, group) for number, group in blocks]
        for key, answer in zip(keys, ask(self.core, keys), strict=True):
            assert answer is Answer.MISS or key in self.may_hold
        self.core.end_request("r")

    @rule()
    def reset(self) -> None:
        self.core.drain()
        results = self.core.finished()
        assert {result.job for result in results} == self.jobs.keys()
        for result in results:
            self.take(result)
        self.core.reset()
        eventually(lambda: self.core.attached, "the removal is confirmed")
        self.may_hold.clear()

    @invariant()
    def nobody_writes_beside_the_rows(self) -> None:
        if hasattr(self, "memory"):
            assert self.memory.guards_intact()

    def teardown(self) -> None:
        if hasattr(self, "core"):
            self.wait_for_all()
            assert sorted(self.free) == list(range(ROWS))
            assert self.core._saving == 0
            self.context.__exit__(None, None, None)


def test_the_core_beside_what_was_saved(agent: AgentStore) -> None:
    spec = tier_specs(revision="filler")[0]  # fills DRAM, so that every save must evict
    filler = np.zeros((64, spec.block_bytes), np.uint8)
    hashes = pack_hashes(number.to_bytes(32, "little") for number in range(1, 65))
    assert agent.save(agent.open(spec), hashes, Fragments.from_blocks(filler)).wait(30)
    before = agent.stats().tiers["dram"].evicted_blocks
    CoreMachine.path = agent._path
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        CoreMachine, settings=settings(max_examples=25, stateful_step_count=25, deadline=None)
    )
    assert agent.stats().tiers["dram"].evicted_blocks > before
