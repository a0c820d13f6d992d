"""Real agents that are killed or stopped: a client's calls end as misses in bounded time, and go on by themselves."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from agent_harness import BLOCK_BYTES, AgentProcess, agent_config, store_config

from tierkv.agent.client import AgentStore
from tierkv.agent.connection import AgentUnavailable
from tierkv.config import AgentConfig
from tierkv.fragments import Fragments
from tierkv.testing.buffers import chain_hashes, make_spec, random_hashes
from tierkv.testing.stores import (
    MISS,
    OK,
    TIMEOUT_S,
    empty_cache,
    ended,
    eventually,
    filled,
    in_threads,
    load,
    save,
)
from tierkv.types import BlockStatus

pytestmark = pytest.mark.crash
LOST = {int(BlockStatus.TIMEOUT), int(BlockStatus.DROPPED)}


@pytest.fixture
def config(tmp_path: Path) -> AgentConfig:
    return agent_config(tmp_path, store_config(tmp_path, 32, 256))


@pytest.fixture
def agent(tmp_path: Path, config: AgentConfig) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path, config) as agent:
        yield agent


@pytest.fixture
def store(agent: AgentProcess, config: AgentConfig) -> Iterator[AgentStore]:
    with AgentStore(config.socket) as store:
        yield store


def test_without_its_agent_a_client_misses_and_then_goes_on(agent: AgentProcess, store: AgentStore) -> None:
    space, hashes = store.open(make_spec(BLOCK_BYTES)), chain_hashes(1, 20)
    assert save(store, space, hashes) == [OK] * 20
    assert store.flush(TIMEOUT_S)
    lease = store.lease([(space, hashes)], 60.0)
    agent.kill()
    eventually(lambda: not store.attached, "the client notices")
    assert store.match(space, hashes).length == 0
    assert [int(mask) for mask in store.lookup([(space, hashes)])[0]] == [0] * 20
    assert not store.lease([(space, hashes)], 1.0).held[0].any()
    assert set(load(store, space, hashes)) <= LOST
    assert set(save(store, space, random_hashes(3, 2))) <= LOST
    store.touch(space, hashes)
    assert ended(store.stage(lease)) == [BlockStatus.TIMEOUT] * 20
    assert not lease.extend(1.0)
    assert not lease.release()
    assert not store.flush(1.0)
    for call in (store.stats, lambda: store.remove(space, hashes), lambda: store.clear(space)):
        with pytest.raises(AgentUnavailable):
            call()
    agent.start()
    eventually(lambda: store.attached, "the client attaches by itself")
    assert store.match(space, hashes).length == 20, "what NVMe holds is found by the restarted agent"
    assert load(store, space, hashes) == [OK] * 20
    assert save(store, space, random_hashes(3, 3)) == [OK] * 3
    stats = store.stats()
    assert (stats.pins, stats.leases, stats.pending_blocks) == (0, 0, 0)


def test_an_agent_killed_under_load_gives_no_wrong_byte(agent: AgentProcess, store: AgentStore) -> None:
    space = store.open(make_spec(BLOCK_BYTES))
    stop = threading.Event()
    done: dict[int, int] = {}

    def work(number: int) -> None:
        if number == 0:
            for _ in range(3):
                served = sum(done.values())
                eventually(lambda served=served: sum(done.values()) > served + 10, "clients are served")  # type: ignore[misc]
                agent.kill()
                agent.start()
            served = sum(done.values())
            eventually(lambda: sum(done.values()) > served + 10, "clients are served again")
            stop.set()
            return
        random = np.random.default_rng(number)
        while not stop.is_set():
            hashes = chain_hashes(int(random.integers(1, 8)), 10)
            assert set(save(store, space, hashes)) <= LOST | {OK, int(BlockStatus.CANCELLED)}
            found = load(store, space, hashes)  # checks every byte
            assert set(found) <= LOST | {OK, MISS}
            assert store.match(space, hashes).length <= 10
            if OK in found:
                done[number] = done.get(number, 0) + 1

    try:
        in_threads(work, range(4))
    finally:
        stop.set()


def test_a_stopped_agent_holds_nobody_beyond_the_deadlines(agent: AgentProcess, config: AgentConfig) -> None:
    with AgentStore(config.socket) as store, AgentStore(config.socket, call_timeout_s=10.0) as judge:
        space, hashes = store.open(make_spec(BLOCK_BYTES)), chain_hashes(3, 2000)
        assert save(store, space, hashes[:8]) == [OK] * 8
        agent.signal(signal.SIGSTOP)
        try:
            begun_s = time.monotonic()
            jobs = [
                store.load(space, hashes[:8], empty_cache(space, 8).fragments(range(8)), 0, 1.0)
                for _ in range(5)
            ]
            jobs += [store.save(space, random_hashes(8, seed), _zeros(8), 0, 1.0) for seed in range(5)]
            for _ in range(6):  # more than the socket takes
                assert store.match(space, hashes).length == 0
            assert not store.lease([(space, hashes)], 1.0).held[0].any()
            assert [int(mask) for mask in store.lookup([(space, hashes[:4])])[0]] == [0] * 4
            for job in jobs:
                assert set(ended(job)) <= LOST | {int(BlockStatus.CANCELLED)}
            assert time.monotonic() - begun_s < 25.0
        finally:
            agent.signal(signal.SIGCONT)
        eventually(lambda: store.match(space, hashes).length == 8, "the client is served again")
        eventually(lambda: judge.stats().pins == 0, "what came too late was undone")
        stats = judge.stats()
        assert (stats.leases, stats.pending_blocks) == (0, 0)
        assert load(store, space, hashes[:8]) == [OK] * 8


def _zeros(count: int) -> Fragments:
    return Fragments.from_blocks(np.zeros((count, BLOCK_BYTES), np.uint8))


@pytest.mark.parametrize("state", ["served", "stopped", "killed", "restarted"])
def test_close_is_bounded_in_every_state(agent: AgentProcess, config: AgentConfig, state: str) -> None:
    store = AgentStore(config.socket)
    space, hashes = store.open(make_spec(BLOCK_BYTES)), random_hashes(20, 4)
    save(store, space, hashes)
    if state == "stopped":
        agent.signal(signal.SIGSTOP)
    elif state != "served":
        agent.kill()
        if state == "restarted":
            agent.start()
    jobs = [
        store.save(space, random_hashes(20, seed), filled(space, random_hashes(20, seed)))
        for seed in range(5)
    ]
    jobs += [store.load(space, hashes, empty_cache(space, 20).fragments(range(20))) for _ in range(5)]
    begun_s = time.monotonic()
    store.close()
    assert time.monotonic() - begun_s < 25.0
    assert all(job.done() for job in jobs)
    agent.signal(signal.SIGCONT)


def test_a_client_attaches_to_an_agent_with_other_settings(
    tmp_path: Path, config: AgentConfig, agent: AgentProcess, store: AgentStore
) -> None:
    """A keyspace that the new agent cannot hold has misses only; the others go on."""
    large, small = store.open(make_spec(8 * BLOCK_BYTES)), store.open(make_spec(BLOCK_BYTES))
    hashes = random_hashes(2, 5)
    assert save(store, large, hashes) == [OK] * 2
    agent.kill()
    slab_bytes = 2 * BLOCK_BYTES
    dram = msgspec.structs.replace(config.store.dram, slab_bytes=slab_bytes)
    other = msgspec.structs.replace(config, store=msgspec.structs.replace(config.store, dram=dram, nvme=None))
    agent.config_path.write_bytes(msgspec.json.encode(other))
    agent.start()
    eventually(lambda: store.attached, "the client attaches")
    assert store.match(large, hashes).length == 0
    assert set(load(store, large, hashes)) <= LOST
    assert set(save(store, large, hashes)) <= LOST
    assert save(store, small, hashes) == [OK] * 2
    assert load(store, small, hashes) == [OK] * 2


def test_agents_killed_and_clients_leave_no_descriptors(agent: AgentProcess, config: AgentConfig) -> None:
    """Each attachment maps an arena: none is left mapped or open when its agent is gone."""
    with AgentStore(config.socket) as store:
        space, hashes = store.open(make_spec(BLOCK_BYTES)), random_hashes(4, 6)

        def count() -> tuple[int, int]:
            mapped = Path("/proc/self/maps").read_text().count("memfd:")
            return len(os.listdir("/proc/self/fd")), mapped

        assert save(store, space, hashes) == [OK] * 4
        before = count()
        for _ in range(4):
            agent.kill()
            agent.start()
            eventually(lambda: set(load(store, space, hashes)) <= {OK, MISS}, "the client attaches")
        assert save(store, space, hashes) == [OK] * 4
        eventually(lambda: count() == before, f"{count()} is {before} again")


def test_sigterm_writes_dram_below_and_ends_with_0(agent: AgentProcess, config: AgentConfig) -> None:
    with AgentStore(config.socket) as store:
        space, hashes = store.open(make_spec(BLOCK_BYTES)), random_hashes(20, 7)
        assert save(store, space, hashes) == [OK] * 20
        assert agent.kill(signal.SIGTERM) == 0
        assert not Path(config.socket).exists()
        agent.start()
        eventually(lambda: store.attached, "the client attaches")
        assert load(store, space, hashes) == [OK] * 20
