"""A load counts only if its lease was held until after the copy: known from its time and the open connection where that
is certain, told by the agent otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from agent_harness import BLOCK_BYTES, agent_config, check_settled, serving, store_config

from tierkv.agent.client import AgentStore
from tierkv.agent.connection import Connection
from tierkv.agent.protocol import Kind
from tierkv.agent.server import AgentServer
from tierkv.clock import VirtualClock
from tierkv.testing.buffers import make_spec, random_hashes
from tierkv.testing.stores import OK, TIMEOUT_S, empty_cache, ended, eventually, load, save
from tierkv.types import BlockStatus

TIMEOUT = int(BlockStatus.TIMEOUT)


class Pool:
    """A client's copy pool that lets something happen before, or after, each copy of a load."""

    def __init__(self, pool: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._pool, self._before, self._after = pool, before, after

    def scatter(self, *arguments: Any) -> None:
        self._before()
        self._pool.scatter(*arguments)
        self._after()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


def nothing() -> None:
    """Happens by default."""


@contextmanager
def copying(
    store: AgentStore, before: Callable[[], None] = nothing, after: Callable[[], None] = nothing
) -> Iterator[None]:
    pool = store.pool
    store.pool = Pool(pool, before, after)  # type: ignore[assignment]
    try:
        yield
    finally:
        store.pool = pool


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Kind]:
    """What clients ask from now on. RELEASE is sent, but what it is answered never arrives."""
    kinds: list[Kind] = []
    submit = Connection.submit

    def unanswered(self: Connection, kind: Kind, *arguments: Any, **options: Any) -> Future[list[Any]]:
        kinds.append(kind)
        future = submit(self, kind, *arguments, **options)
        return Future() if kind == Kind.RELEASE else future

    monkeypatch.setattr(Connection, "submit", unanswered)
    return kinds


def test_a_load_that_surely_held_its_lease_waits_for_no_answer(tmp_path: Path, asked: list[Kind]) -> None:
    config = agent_config(tmp_path, store_config(tmp_path, 64))
    with serving(config) as server, AgentStore(config.socket, call_timeout_s=TIMEOUT_S) as store:
        space, hashes = store.open(make_spec(BLOCK_BYTES)), random_hashes(20, 1)
        assert save(store, space, hashes) == [OK] * 20
        assert load(store, space, hashes) == [OK] * 20
        assert Kind.RELEASE in asked
        check_settled(server)


@contextmanager
def one_block(tmp_path: Path, clock: VirtualClock | None = None, **options: Any) -> Iterator[Any]:
    """(agent, client, keyspace, a saved block) of an agent with room for two blocks."""
    config = agent_config(tmp_path, store_config(tmp_path, 8), **options)
    with serving(config, clock) as server, AgentStore(config.socket, call_timeout_s=TIMEOUT_S) as store:
        space, hashes = store.open(make_spec(BLOCK_BYTES)), random_hashes(1, 2)
        assert save(store, space, hashes) == [OK]
        yield server, store, space, hashes


def loaded(store: AgentStore, space: Any, hashes: Any) -> list[int]:
    return ended(store.load(space, hashes, empty_cache(space, len(hashes)).fragments([0])))


def overwrite(server: AgentServer, store: AgentStore) -> None:
    """Fills all of DRAM with other blocks, through the agent's own store."""
    space = server.store.open(make_spec(BLOCK_BYTES))
    for seed in range(50, 54):
        assert save(server.store, space, random_hashes(8, seed))


def test_a_lease_that_expired_during_the_copy_is_asked_about(tmp_path: Path) -> None:
    with one_block(tmp_path, max_lease_s=0.05) as (server, store, space, hashes):

        def expire() -> None:
            eventually(lambda: server.store.stats().leases == 0, "the lease ends by itself")
            overwrite(server, store)

        with copying(store, before=expire):
            assert loaded(store, space, hashes) == [TIMEOUT]
        check_settled(server)


def test_an_agent_with_a_clock_of_its_own_is_always_asked(tmp_path: Path) -> None:
    clock = VirtualClock()
    with one_block(tmp_path, clock) as (server, store, space, hashes):

        def expire() -> None:
            clock.advance(1000.0)
            overwrite(server, store)

        with copying(store, before=expire):
            assert loaded(store, space, hashes) == [TIMEOUT]
        check_settled(server)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_connection_that_the_agent_ended_during_the_copy_holds_nothing(tmp_path: Path, when: str) -> None:
    with one_block(tmp_path) as (server, store, space, hashes):
        assert loaded(store, space, hashes) == [OK]

        def end() -> None:
            for session in server.sessions():
                session.interrupt()
            eventually(lambda: server.store.stats().leases == 0, "what the client held is given back")
            overwrite(server, store)

        with copying(store, **{when: end}):
            assert loaded(store, space, hashes) == [TIMEOUT]
        eventually(lambda: store.attached, "the client attaches again")
        check_settled(server)


def test_the_connection_ends_before_anything_is_given_back(tmp_path: Path) -> None:
    """However a session ends: what it held is released only when its client can know."""
    with one_block(tmp_path) as (server, store, _, _):
        (session,) = server.sessions()
        open_at_release: list[bool] = []
        give_back, channel = session._give_all_back, store.connection()._channel

        def watched() -> None:
            open_at_release.append(session._channel.is_open() or channel.is_open())
            give_back()

        session._give_all_back = watched
        channel.send([b"rubbish" * 10])
        eventually(lambda: bool(open_at_release), "the session ends")
        assert open_at_release == [False]
