"""The offloading tier without vLLM: options, keyspaces, and the core beside a real agent."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_offloading_harness import (
    ROW_BYTES,
    ROWS,
    CpuTier,
    ask,
    finish,
    load,
    make_key,
    own_agent,
    save,
    tier_core,
    tier_facts,
    tier_specs,
)

from tierkv.adapters.vllm_offloading.attachment import Attachment
from tierkv.adapters.vllm_offloading.core import Rows
from tierkv.adapters.vllm_offloading.keyspaces import GroupFacts, keyspaces_of, pack_keys, with_hashing
from tierkv.adapters.vllm_offloading.lookups import Answer
from tierkv.adapters.vllm_offloading.options import TierOptions, read_options
from tierkv.agent.client import AgentStore
from tierkv.agent.connection import AgentUnavailable
from tierkv.errors import ArgumentError, ConfigError, KeyspaceError
from tierkv.keys import KeyspaceSpec, pack_hashes
from tierkv.testing.processes import stand_still
from tierkv.testing.stores import eventually

HIT, MISS = Answer.HIT, Answer.MISS


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentStore]:
    """An agent for tests that do not end it; each of them has keyspaces of its own."""
    store = own_agent()
    try:
        yield store
    finally:
        store.close()


def client_of(agent: AgentStore) -> AgentStore:
    return AgentStore(agent._path)


# Options


def test_the_options_have_defaults_and_unknown_ones_are_refused() -> None:
    assert read_options({}) == TierOptions()
    assert read_options({"dram_bytes": "1GiB", "save": False}).store().dram.capacity_bytes == 1 << 30
    with pytest.raises(ConfigError, match=r"TierKVTier: .*\bnvme_dir\b.*docs/configuration.md"):
        read_options({"nvme_dir": "/x"})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"lookup_timeout_s": 0}, "lookup_timeout_s"),
        ({"max_saving_share": 1.5}, "max_saving_share"),
        ({"copy_threads": "two"}, "copy_threads"),
        ({"locality": "NEAR"}, "locality"),
        ({"extra_identity": {"a": 1}}, "extra_identity"),
        ({"dram_bytes": "many"}, "dram_bytes"),
        ({"start_agent": False, "nvme_directory": "/x"}, "nvme_directory"),
    ],
)
def test_an_option_that_cannot_be_is_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"TierKVTier: .*{named}"):
        read_options(given)


# Keyspaces

FACTS: dict[str, list[Any]] = {
    "model": ["org/other"],
    "revision": ["r2"],
    "kv_dtype": ["float16"],
    "row_bytes": [4096],
    "worker_block_bytes": [4096],
    "blocks_per_row": [2],
    "hash_tokens": [8],
    "layout": ["LBNHC:cpu", "LBHNC:cuda"],
    "row_format": ["canonical v1"],
    "parallel": [
        {"tp": 2, "pp": 1, "pcp": 1, "dcp": 1, "world": 2}, {"tp": 1, "pp": 2, "pcp": 1, "dcp": 1, "world": 2},
    ],
    "extra": [{"engine": "vllm 0.32.1"}, {"engine": "vllm 0.32.0", "quantization": "fp8"}],
    "groups": [
        (GroupFacts(0, 16, ("layers.0", "layers.2")), GroupFacts(1, 16, ("layers.1", "layers.3"))),
        (GroupFacts(0, 16, ("layers.0", "layers.1")), GroupFacts(1, 32, ("layers.2", "layers.3"))),
        (GroupFacts(0, 16, ("layers.2", "layers.0")), GroupFacts(1, 32, ("layers.1", "layers.3"))),
    ],
}  # fmt: skip


def digests(specs: dict[int, KeyspaceSpec]) -> set[bytes]:
    return {spec.digest() for spec in specs.values()}


def test_whatever_changes_bytes_changes_the_keyspaces_of_all_groups() -> None:
    seen = digests(tier_specs())
    assert len(seen) == 2
    assert digests(tier_specs()) == seen
    for name, values in FACTS.items():
        for value in values:
            found = digests(tier_specs(**{name: value}))
            assert len(found) == 2
            assert not found & seen, name
            seen |= found
    unset = keyspaces_of(tier_facts())
    for algorithm, start in (("sha256", b"\x08" * 32), ("sha256_cbor", b"\x07" * 32)):
        found = digests(with_hashing(unset, algorithm, start))
        assert not found & seen
        seen |= found
    assert set(FACTS) | {"any_parallel"} == set(type(tier_facts()).__dataclass_fields__)


def test_rows_that_are_the_same_under_any_parallel_layout_are_shared() -> None:
    one = tier_specs(any_parallel=True)
    two = tier_specs(
        any_parallel=True,
        worker_block_bytes=4096,
        parallel={"tp": 2, "pp": 1, "pcp": 1, "dcp": 1, "world": 2},
    )
    assert digests(one) == digests(two)
    assert not digests(one) & digests(tier_specs())


def test_what_is_unresolved_is_refused_by_name() -> None:
    for field, value in (("revision", ""), ("kv_dtype", "auto"), ("model", "")):
        with pytest.raises(KeyspaceError, match=field):
            keyspaces_of(tier_facts(**{field: value}))
    with pytest.raises(ConfigError, match="groups"):
        keyspaces_of(tier_facts(groups=()))


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=32), st.integers(0, 3)), max_size=20))
def test_keys_are_split_by_group_and_lose_nothing(parts: list[tuple[bytes, int]]) -> None:
    keys = [block_hash + group.to_bytes(4, "big") for block_hash, group in parts]
    back: dict[int, tuple[bytes, int]] = {}
    for group, (positions, hashes) in pack_keys(keys).items():
        assert positions == sorted(positions)
        back |= {p: (h, group) for p, h in zip(positions, hashes, strict=True)}
    assert [back[position] for position in range(len(keys))] == parts


def test_memory_that_cannot_be_is_refused() -> None:
    for fields in ((0, 4096, 1), (4096, 0, 1), (4096, 4096, 0)):
        with pytest.raises(ArgumentError):
            Rows(*fields)


# The core and a real agent


def test_what_was_saved_is_found_and_loaded_into_the_rows(agent: AgentStore) -> None:
    memory = CpuTier()
    keys = [make_key(number, group) for number in range(5) for group in (0, 1)]
    absent = [make_key(99, 0), make_key(99, 1)]
    specs = tier_specs(revision="basic")
    with tier_core(memory, lambda: client_of(agent), specs=specs) as core:
        eventually(lambda: core.attached, "the tier attaches")
        assert ask(core, keys) == [MISS] * len(keys)
        core.end_request("r")
        saved = save(core, memory, keys)
        assert saved.ok
        assert saved.size_bytes == len(keys) * ROW_BYTES
        assert ask(core, keys + absent) == [HIT] * len(keys) + [MISS] * 2
        assert load(core, memory, keys, job=2).ok
        partly = load(core, memory, [absent[0], keys[3], absent[1]], job=3)
        assert (partly.ok, list(partly.done)) == (False, [keys[3]])
        assert ask(core, [keys[3], *absent]) == [HIT, MISS, MISS]
        assert core.stats() == {
            "looked_up": 2 * len(keys) + 2, "found": len(keys), "saved": len(keys), "loaded": len(keys) + 1,
            "load_miss": 2, "lookup_late": 0, "lookup_refused": 0,
        }  # fmt: skip
    with tier_core(CpuTier(), lambda: client_of(agent), specs=specs) as core:  # the next engine
        eventually(lambda: core.attached, "the tier attaches")
        assert ask(core, keys) == [HIT] * len(keys)


def test_the_first_request_waits_for_the_keyspaces_and_not_for_nothing(agent: AgentStore) -> None:
    memory, specs = CpuTier(), tier_specs(revision="first request")
    keys = [make_key(1)]
    with tier_core(memory, lambda: client_of(agent), specs=specs) as core:
        eventually(lambda: core.attached, "the tier attaches")
        assert save(core, memory, keys).ok
    with tier_core(memory, lambda: client_of(agent), client_of(agent), specs=specs) as core:
        assert ask(core, keys) == [HIT]


def test_a_block_whose_load_failed_is_not_promised_again_to_the_request(agent: AgentStore) -> None:
    memory, specs = CpuTier(), tier_specs(revision="failed load")
    keys = [make_key(1), make_key(2)]
    with tier_core(memory, lambda: client_of(agent), specs=specs, lookup_keep_s=3600) as core:
        eventually(lambda: core.attached, "the tier attaches")
        assert save(core, memory, keys).ok
        assert ask(core, keys) == [HIT, HIT]
        with client_of(agent) as other:
            other.remove(other.open(specs[0]), np.frombuffer(keys[0][:-4], np.uint8).reshape(1, 32))
        assert list(load(core, memory, keys).done) == [keys[1]]
        assert ask(core, keys) == [MISS, HIT]


def test_equal_hashes_of_two_groups_are_two_blocks_and_short_hashes_are_blocks(agent: AgentStore) -> None:
    memory = CpuTier()
    keys = [make_key(7, 0), make_key(7, 1), make_key(7, 0, 16), make_key(7, 1, 16)]
    with tier_core(memory, lambda: client_of(agent), specs=tier_specs(revision="groups")) as core:
        eventually(lambda: core.attached, "the tier attaches")
        assert save(core, memory, keys[:1]).ok
        assert ask(core, keys) == [HIT, MISS, MISS, MISS]
        assert save(core, memory, keys).ok
        assert load(core, memory, keys).ok


def test_saves_beyond_the_bound_are_dropped_from_the_end_and_the_bound_is_given_back(
    agent: AgentStore,
) -> None:
    memory = CpuTier()
    specs = tier_specs(revision="bound")
    keys = [make_key(number) for number in range(ROWS)]
    rows = np.arange(ROWS, dtype=np.int64)
    memory.fill(rows.tolist(), keys)
    with tier_core(memory, lambda: client_of(agent), specs=specs, max_saving_share=0.25) as core:
        eventually(lambda: core.attached, "the tier attaches")
        for turn in range(3):
            core.save(2 * turn, keys[:6], rows[:6])
            core.save(2 * turn + 1, keys[6:12], rows[6:12])
            first, second = sorted(finish(core, 2), key=lambda result: result.job)
            assert first.ok
            assert (second.ok, list(second.done)) == (False, keys[6:8])
        assert core.stats()["save_dropped"] == 3 * 4
        assert load(core, memory, keys[:8]).ok
        memory.fill(rows.tolist(), keys)
        core.save(9, keys, rows)
        assert finish(core)[0].ok  # more than the bound, but alone


@pytest.mark.parametrize("rows", [[0, ROWS], [-1, 0], [0], [0, 1, 2]])
def test_rows_outside_the_cpu_tier_are_not_touched(agent: AgentStore, rows: list[int]) -> None:
    memory = CpuTier()
    keys = [make_key(1), make_key(2)]
    with tier_core(memory, lambda: client_of(agent), specs=tier_specs(revision="rows")) as core:
        eventually(lambda: core.attached, "the tier attaches")
        assert save(core, memory, keys).ok
        memory.wipe()
        for job, submit in ((2, core.load), (3, core.save)):
            submit(job, keys, np.array(rows, np.int64))
            (result,) = finish(core)
            assert (result.job, result.ok, list(result.done)) == (job, False, [])
        assert memory.guards_intact()
        assert (memory.rows == 0xEE).all()


def test_saving_and_loading_can_be_switched_off(agent: AgentStore) -> None:
    memory, specs = CpuTier(), tier_specs(revision="switches")
    keys = [make_key(1)]
    with tier_core(memory, lambda: client_of(agent), specs=specs, save=False) as core:
        eventually(lambda: core.attached, "the tier attaches")
        assert not save(core, memory, keys).ok
        assert ask(core, keys) == [MISS]
    with tier_core(memory, lambda: client_of(agent), specs=specs, load=False) as core:
        eventually(lambda: core.attached, "the tier attaches")
        assert save(core, memory, keys).ok
        assert ask(core, keys) == [MISS]
    with tier_core(memory, lambda: client_of(agent), specs=specs) as core:
        eventually(lambda: core.attached, "the tier attaches")
        assert ask(core, keys) == [HIT]


@pytest.mark.parametrize("on_reset", ["renew", "clear"])
def test_a_reset_removes_the_blocks_unless_it_is_not_to(on_reset: str, agent: AgentStore) -> None:
    memory, specs = CpuTier(), tier_specs(revision=f"reset {on_reset}")
    keys = [make_key(number, number % 2) for number in range(6)]
    with tier_core(memory, lambda: client_of(agent), specs=specs, on_reset="keep") as core:
        eventually(lambda: core.attached, "the tier attaches")
        assert save(core, memory, keys).ok
        core.drain()
        core.reset()
        assert ask(core, keys) == [HIT] * 6
    with tier_core(
        memory, lambda: client_of(agent), specs=specs, lookup_keep_s=3600, on_reset=on_reset
    ) as core:
        eventually(lambda: core.attached, "the tier attaches")
        assert ask(core, keys) == [HIT] * 6
        memory.fill(range(6), keys)
        core.save(7, keys, np.arange(6, dtype=np.int64))
        core.drain()
        core.reset()
        assert [core.lookup(key, "r") for key in keys] == [
            MISS
        ] * 6  # at once, before the agent has heard of it
        assert [result.job for result in core.finished()] == [7]
        eventually(lambda: core.attached, "the removal is confirmed")
        core.end_request("r")
        assert ask(core, keys) == [MISS] * 6
        assert save(core, memory, keys[:2]).ok
        core.end_request("r")
        assert ask(core, keys) == [HIT] * 2 + [MISS] * 4
        eventually(lambda: not core._attachment._to_clear, "what was given up is cleared")
    with tier_core(memory, lambda: client_of(agent), specs=specs) as core:
        eventually(lambda: core.attached, "the tier attaches")
        found = 2 if on_reset == "clear" else 0  # else they are the other engine's alone
        assert ask(core, keys) == [HIT] * found + [MISS] * (6 - found)


@pytest.mark.parametrize("on_reset", ["renew", "clear"])
def test_a_reset_before_the_first_request_counts_too(on_reset: str, agent: AgentStore) -> None:
    memory, specs = CpuTier(), tier_specs(revision=f"early {on_reset}")
    keys = [make_key(number) for number in range(3)]
    with tier_core(memory, lambda: client_of(agent), specs=specs) as core:
        eventually(lambda: core.attached, "the tier attaches")
        assert save(core, memory, keys).ok
    attachment = Attachment(lambda: client_of(agent))
    try:
        attachment.clear(renew=on_reset == "renew")
        attachment.open(specs)
        eventually(lambda: attachment.current is not None, "it attaches")
        current = attachment.current
        assert current is not None
        assert (current.spaces[0].spec == specs[0]) == (on_reset == "clear")
        eventually(lambda: not attachment._to_clear, "what was there is cleared")
        assert not agent.lookup([(agent.open(specs[0]), pack_hashes([key[:32] for key in keys]))])[0].any()
    finally:
        attachment.close()


def test_keyspaces_that_cannot_be_named_leave_an_engine_without_the_tier(
    agent: AgentStore, caplog: Any
) -> None:
    memory = CpuTier()

    def unnamed() -> dict[int, KeyspaceSpec]:
        raise ConfigError("block hashes are seeded at random")

    with tier_core(memory, lambda: client_of(agent), client_of(agent), specs=unnamed) as core:
        assert "holds nothing: block hashes are seeded at random" in caplog.text
        assert not save(core, memory, [make_key(1)]).ok
        assert core.lookup(make_key(1), "r") is MISS


def test_an_agent_that_refuses_the_keyspace_means_misses(agent: AgentStore, caplog: Any) -> None:
    memory = CpuTier(2, 2 << 20)
    too_large = {0: msgspec.structs.replace(tier_specs(revision="large")[0], part_bytes=(2 << 20,))}
    with tier_core(memory, lambda: client_of(agent), specs=too_large) as core:
        eventually(lambda: "refuses the keyspace" in caplog.text, "the refusal is told")
        assert core.lookup(make_key(1), "r") is MISS
        assert not save(core, memory, [make_key(1)]).ok


def test_without_an_agent_all_misses_and_it_is_taken_up_when_it_comes() -> None:
    memory, keys = CpuTier(), [make_key(1)]
    there = threading.Event()

    def connect() -> AgentStore:
        if not there.is_set():
            raise AgentUnavailable("none yet")
        return own_agent()

    with tier_core(memory, connect) as core:
        assert core.lookup(keys[0], "r") is MISS
        assert not save(core, memory, keys).ok
        assert not load(core, memory, keys).ok
        there.set()
        eventually(lambda: core.attached, "the agent is found")
        assert save(core, memory, keys).ok
        assert ask(core, keys) == [HIT]


def test_an_agent_that_dies_means_misses_and_another_is_taken_up() -> None:
    memory = CpuTier()
    keys = [make_key(number) for number in range(8)]
    agents: list[Any] = []

    def connect() -> AgentStore:
        agents.append(own_agent())
        return agents[-1]  # type: ignore[no-any-return]

    with tier_core(memory, connect, load_timeout_s=5, save_timeout_s=5) as core:
        eventually(lambda: core.attached, "the tier attaches")
        assert save(core, memory, keys).ok
        assert ask(core, keys) == [HIT] * 8
        stand_still(agents[0].agent_pid)
        core.load(2, keys, np.arange(8, dtype=np.int64))
        core.save(3, [make_key(50)], np.array([9], np.int64))
        os.kill(agents[0].agent_pid, signal.SIGKILL)
        results = finish(core, 2)
        assert not any(result.ok for result in results)
        eventually(lambda: not core.attached or len(agents) == 2, "the loss is noticed")
        assert ask(core, keys, "r2") in ([MISS] * 8, [HIT] * 8)  # what was heard may stand for a while
        eventually(lambda: len(agents) == 2 and core.attached, "another agent is started")
        core.end_request("r")
        core.end_request("r2")
        assert ask(core, keys) == [MISS] * 8
        assert save(core, memory, keys).ok
        assert load(core, memory, keys, job=4).ok


def test_an_agent_that_hangs_holds_neither_look_ups_nor_jobs_nor_the_end() -> None:
    memory, keys = CpuTier(), [make_key(1), make_key(2)]
    agent: Any = own_agent(call_timeout_s=0.3)
    options = {"lookup_timeout_s": 0.2, "load_timeout_s": 0.5, "save_timeout_s": 0.5, "shutdown_wait_s": 0.1}
    with tier_core(memory, own_agent, agent, **options) as core:
        eventually(lambda: core.attached, "the tier attaches")
        assert save(core, memory, keys).ok
        stand_still(agent.agent_pid)
        try:
            assert ask(core, keys) == [MISS, MISS]
            core.load(2, keys, np.arange(2, dtype=np.int64))
            core.save(3, [make_key(3)], np.array([4], np.int64))
            assert not any(result.ok for result in finish(core, 2))
        finally:
            os.kill(agent.agent_pid, signal.SIGCONT)


def test_closing_ends_what_is_under_way_and_is_idempotent(agent: AgentStore) -> None:
    memory, specs = CpuTier(), tier_specs(revision="close")
    keys = [make_key(number) for number in range(16)]
    memory.fill(range(16), keys)
    with tier_core(memory, lambda: client_of(agent), specs=specs, shutdown_wait_s=0.0) as core:
        eventually(lambda: core.attached, "the tier attaches")
        core.save(1, keys, np.arange(16, dtype=np.int64))
        assert core.close()
        assert core.close()
        memory.wipe()  # nothing reads it any more: what is in the store is right, or is not there
        assert [result.job for result in core.finished()] == [1]
        assert not load(core, memory, keys).ok
    with tier_core(memory, lambda: client_of(agent), specs=specs) as core:
        eventually(lambda: core.attached, "the tier attaches")
        load(core, memory, keys)
