"""The memory beside the arena: lent to one load at a time, never reused under it, given back to the system."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from agent_harness import BLOCK_BYTES, RawClient, agent_config, check_settled, serving, store_config

from tierkv.agent.aside import Aside
from tierkv.agent.protocol import Kind
from tierkv.agent.server import AgentServer
from tierkv.clock import VirtualClock
from tierkv.keys import Keyspace
from tierkv.testing.buffers import make_spec, part_payload, random_hashes
from tierkv.testing.stores import OK, TIMEOUT_S, eventually, save
from tierkv.types import BlockStatus

SIZE = 64 << 10


@pytest.fixture
def aside() -> Iterator[Aside]:
    made = Aside(SIZE)
    yield made
    made.close()


def used(fd: int) -> int:
    """Bytes of real memory that a memfd has."""
    return os.fstat(fd).st_blocks * 512


def write(aside: Aside) -> None:
    os.pwrite(aside.fd, b"x" * SIZE, 0)


def test_one_load_has_it_until_its_lease_ends(aside: Aside) -> None:
    assert aside.take(1, until_s=10.0, now_s=0.0)
    aside.filled()
    assert not aside.take(2, 20.0, 9.9)
    aside.give_back(2)
    assert not aside.take(2, 20.0, 9.9), "it is not the other's to give back"
    aside.extend(1, 30.0)
    assert not aside.take(2, 20.0, 10.0)
    assert aside.take(2, 60.0, 30.0), "its time has passed"
    aside.filled()
    aside.give_back(1)
    assert not aside.take(3, 60.0, 31.0)
    aside.give_back(2)
    assert aside.take(3, 60.0, 31.0)


def test_it_is_not_lent_while_something_is_read_into_it(aside: Aside) -> None:
    assert aside.take(1, 10.0, 0.0)
    aside.give_back(1)
    assert not aside.take(2, 30.0, 20.0)
    aside.filled()
    assert aside.take(2, 30.0, 20.0)


def test_it_takes_memory_only_while_it_is_lent(aside: Aside) -> None:
    assert used(aside.fd) == 0
    assert aside.take(1, 10.0, 0.0)
    write(aside)
    aside.filled()
    assert used(aside.fd) == SIZE
    aside.give_back(1)
    assert used(aside.fd) == 0


@pytest.mark.parametrize("closed_first", [True, False])
def test_a_session_that_ends_leaves_nothing(closed_first: bool) -> None:
    aside = Aside(SIZE)
    fd = os.dup(aside.fd)
    try:
        assert aside.take(1, 10.0, 0.0)
        write(aside)
        if closed_first:
            aside.close()
            os.fstat(aside.fd)  # it is still being read into
            aside.filled()
        else:
            aside.filled()
            aside.close()
        assert not aside.take(2, 10.0, 0.0)
        aside.close()
        assert used(fd) == 0
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(aside.fd)
    finally:
        os.close(fd)


def test_parts_lie_apart_and_only_as_many_as_fit(aside: Aside) -> None:
    spec = make_spec(10_000, parts=2)
    space = Keyspace(spec, spec.digest(), 1)
    into, places = aside.room(space, 1, 3)
    assert (places.tolist(), into.count, into.bytes_per_block) == ([0, 8192, 16384], 3, 5000)
    into, places = aside.room(space, 0, 100)
    assert (len(places), into.count) == (SIZE // 8192, SIZE // 8192)


def held_dram(server: AgentServer, below: np.ndarray) -> Keyspace:
    """Blocks `below` DRAM, all of which a lease holds."""
    store = server.store
    space, above = store.open(make_spec(BLOCK_BYTES)), random_hashes(16, 10)
    for hashes in (below, above):
        assert save(store, space, hashes) == [OK] * len(hashes)
        assert store.flush(TIMEOUT_S)
    assert store.lease([(space, above)], 1e6).held[0].all()
    return space


def acquired(client: RawClient, number: int, hashes: np.ndarray) -> tuple[int, list[int], np.ndarray]:
    lease, status, offsets = client.ask(Kind.ACQUIRE, number, 0, 5.0, hashes)
    return int(lease), [int(value) for value in status], offsets


def test_a_client_that_keeps_it_hurts_only_itself(tmp_path: Path) -> None:
    clock = VirtualClock()
    config = agent_config(tmp_path, store_config(tmp_path, 16, 64), max_lease_s=100.0)
    below = random_hashes(2, 9)
    with serving(config, clock) as server:
        space = held_dram(server, below)
        with RawClient(config.socket) as greedy, RawClient(config.socket) as other:
            number, no_space = greedy.open(make_spec(BLOCK_BYTES)), [int(BlockStatus.NO_SPACE)]
            assert other.open(make_spec(BLOCK_BYTES)) == number
            assert greedy.arena is not None
            for client in (greedy, other):
                lease, status, offsets = acquired(client, number, below[:1])
                assert (status, offsets.tolist()) == ([OK], [greedy.arena.size_bytes])
                assert client.aside is not None
                with client.aside.view(0, BLOCK_BYTES) as view:
                    assert bytes(view) == part_payload(space, below[0].tobytes(), 0)
            again, status, offsets = acquired(greedy, number, below[1:])
            assert (status, offsets.tolist()) == (no_space, [-1]), "it has not given the first one back"
            clock.advance(101.0)
            third, status, _ = acquired(greedy, number, below[1:])
            assert status == [OK], "what it kept beyond its time is not its any more"
            assert other.ask(Kind.RELEASE, lease) == [0]
            assert [greedy.ask(Kind.RELEASE, number)[0] for number in (again, third)] == [0, 1]
        eventually(lambda: not server.sessions(), "both are gone")
        clock.advance(2e6)
        check_settled(server)
