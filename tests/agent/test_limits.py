"""What one client may hold, and that what it held and gave up, or lost by time, does not count any more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from agent_harness import (
    BLOCK_BYTES,
    RawClient,
    agent_config,
    check_serves,
    check_settled,
    serving,
    store_config,
)

from tierkv.agent.aside import Aside
from tierkv.agent.client import AgentStore
from tierkv.agent.protocol import Kind
from tierkv.agent.server import AgentServer
from tierkv.clock import VirtualClock
from tierkv.testing.buffers import make_spec, random_hashes
from tierkv.testing.stores import OK, empty_cache, ended, eventually, load, save
from tierkv.types import BlockStatus

BLOCKS = 32


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def server(tmp_path: Path, clock: VirtualClock) -> Iterator[AgentServer]:
    """One client may reserve 4 blocks and hold 6 by leases, and as many as 3 by loads."""
    config = agent_config(
        tmp_path,
        store_config(tmp_path, BLOCKS),
        max_reserved_bytes=4 * BLOCK_BYTES,
        max_leased_bytes=6 * BLOCK_BYTES,
        max_lease_s=100.0,
    )
    with serving(config, clock) as server:
        yield server


def test_reservations_are_granted_as_far_as_they_go(server: AgentServer) -> None:
    with RawClient(server.config.socket) as client:
        number = client.open(make_spec(BLOCK_BYTES))
        first, status, _ = client.ask(Kind.RESERVE, number, 0, 10.0, random_hashes(3, 1))
        assert len(status) == 3
        second, status, _ = client.ask(Kind.RESERVE, number, 0, 10.0, random_hashes(3, 2))
        assert len(status) == 1, "the first blocks, as many as the limit allows"
        answer = client.try_ask(Kind.RESERVE, number, 0, 10.0, random_hashes(1, 3))
        assert isinstance(answer, str)
        assert answer.startswith("LimitError: 16384 bytes are reserved")
        check_serves(server.config.socket)
        client.ask(Kind.COMMIT, first, 1)
        assert len(client.ask(Kind.RESERVE, number, 0, 10.0, random_hashes(9, 4))[1]) == 3
        client.ask(Kind.COMMIT, second, 0)
        assert isinstance(client.try_ask(Kind.COMMIT, second, 1), str), "a reservation ends once"
    check_settled(server)


def test_a_block_larger_than_the_limit_can_be_saved_alone(server: AgentServer) -> None:
    with AgentStore(server.config.socket) as store:
        space, hashes = store.open(make_spec(8 * BLOCK_BYTES)), random_hashes(3, 5)
        assert save(store, space, hashes) == [OK] * 3
        assert load(store, space, hashes) == [OK] * 3


def test_leases_and_loads_have_limits_of_their_own(server: AgentServer) -> None:
    with AgentStore(server.config.socket) as store:
        space, hashes = store.open(make_spec(BLOCK_BYTES)), random_hashes(12, 6)
        assert save(store, space, hashes) == [OK] * 12
        lease = store.lease([(space, hashes[:6])], 50.0)
        assert lease.held[0].all()
        assert not store.lease([(space, hashes[6:8])], 50.0).held[0].any(), "one more lease than it may hold"
        assert load(store, space, hashes) == [OK] * 12, "what is leased can be loaded nevertheless"
        assert lease.release()
        assert store.lease([(space, hashes[6:8])], 50.0).held[0].all()
    check_settled(server)


def test_leases_that_ended_by_themselves_do_not_count(server: AgentServer, clock: VirtualClock) -> None:
    with AgentStore(server.config.socket) as store:
        space, hashes = store.open(make_spec(BLOCK_BYTES)), random_hashes(6, 7)
        assert save(store, space, hashes) == [OK] * 6
        for _ in range(5):  # never released
            lease = store.lease([(space, hashes)], 20.0)
            assert lease.held[0].all()
            clock.advance(15.0)
            assert lease.extend(20.0)
            clock.advance(15.0)
            assert not store.lease([(space, hashes)], 20.0).held[0].any(), "the extended lease still counts"
            clock.advance(6.0)


def test_no_lease_lives_longer_than_the_agent_allows(server: AgentServer, clock: VirtualClock) -> None:
    with AgentStore(server.config.socket) as store:
        space, hashes = store.open(make_spec(BLOCK_BYTES)), random_hashes(2, 8)
        save(store, space, hashes)
        lease = store.lease([(space, hashes)], 5000.0)
        clock.advance(99.0)
        assert lease.extend(5000.0)
        clock.advance(101.0)
        assert not lease.extend(1.0)
        eventually(lambda: store.stats().pins == 0, "the lease's pins are given back")


def test_a_client_may_have_many_leases_but_not_any_number(server: AgentServer) -> None:
    none = np.empty((0, 32), np.uint8)
    with RawClient(server.config.socket) as client:
        number = client.open(make_spec(BLOCK_BYTES))
        for _ in range(4096):
            client.ask(Kind.LEASE, 50.0, [number], [0], none)
        answer = client.try_ask(Kind.LEASE, 50.0, [number], [0], none)
        assert isinstance(answer, str)
        assert answer.startswith("LimitError")
    check_settled(server)


@pytest.mark.parametrize("aside", [True, False])
def test_loads_of_others_go_on_while_leases_hold_all_of_dram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aside: bool
) -> None:
    """There is no room to bring blocks up: they come through the memory beside the arena. Where that is taken too,
    loads say so soon, and do not wait for each other until their deadlines."""
    if not aside:
        monkeypatch.setattr(Aside, "take", lambda *_: False)
    store_settings = store_config(tmp_path, 16, 64)
    config = agent_config(tmp_path, store_settings, max_leased_bytes=1 << 30)
    with serving(config) as server:
        with AgentStore(config.socket, call_timeout_s=10.0) as store:
            space, below, above = (
                store.open(make_spec(BLOCK_BYTES)),
                random_hashes(8, 9),
                random_hashes(16, 10),
            )
            assert save(store, space, below) == [OK] * 8
            assert save(store, space, above) == [OK] * 16
            assert store.flush(30.0)
            assert save(store, space, above) == [OK] * 16
            lease = store.lease([(space, above)], 100.0)
            assert ended(store.stage(lease)) == [OK] * 16
            jobs = [
                store.load(space, below, empty_cache(space, 8).fragments(range(8)), timeout_s=60.0)
                for _ in range(3)
            ]
            for job in jobs:
                assert ended(job, timeout_s=20.0) == [OK if aside else BlockStatus.TIMEOUT] * 8
            assert load(store, space, above) == [OK] * 16
            assert lease.release()
            assert load(store, space, below) == [OK] * 8
        check_settled(server)
