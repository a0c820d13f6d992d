"""Clients that send rubbish, half of a message, too much or too many, or read nothing: they hurt only themselves.

After each, another client is served, and the agent has as many threads and descriptors as before.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierkv.agent import session as session_module
from tierkv.agent.channel import Disconnected
from tierkv.agent.client import AgentStore
from tierkv.agent.connection import AgentUnavailable
from tierkv.agent.protocol import (
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_BODY_BYTES,
    REQUESTS,
    VERSION,
    Integer,
    Kind,
    Real,
    Text,
    encode,
)
from tierkv.agent.server import AgentServer
from tierkv.fragments import Fragments
from tierkv.testing.buffers import make_spec, random_hashes
from tierkv.testing.stores import TIMEOUT_S, eventually

MIB = 1 << 20


class Watched:
    """An agent, and what it had before somebody attacked it."""

    def __init__(self, server: AgentServer, path: str) -> None:
        self.server, self.path = server, path
        check_serves(path)  # what is made once is there, such as the threads for slow requests
        together = threading.Barrier(server._slow._max_workers)
        for done in [server._slow.submit(together.wait, TIMEOUT_S) for _ in range(together.parties)]:
            done.result(TIMEOUT_S)
        eventually(lambda: not server.sessions(), "the first client is gone")
        self.fds, self.threads = self._count()

    @staticmethod
    def _count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def check(self) -> None:
        """Nothing is left of the attacker, and others are served."""
        eventually(lambda: not self.server.sessions(), "the offender's session ends")
        check_settled(self.server)
        check_serves(self.path)
        eventually(lambda: not self.server.sessions(), "the other client's session ends")
        eventually(
            lambda: self._count() == (self.fds, self.threads),
            f"descriptors and threads are again as many: {self._count()}, not {(self.fds, self.threads)}",
        )


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    directory = tmp_path_factory.mktemp("agent")
    patch = pytest.MonkeyPatch()
    patch.setattr(session_module, "MESSAGE_TIMEOUT_S", 0.3)
    patch.setattr(session_module, "HELLO_TIMEOUT_S", 0.3)
    config = agent_config(directory, max_requests=16, send_timeout_s=0.5)
    with serving(config) as server:
        yield Watched(server, config.socket)
    patch.undo()


def header_of(
    kind: int = Kind.MATCH, body_bytes: int = 0, magic: bytes = MAGIC, version: int = VERSION
) -> bytes:
    start = HEADER.pack(magic, version, kind, 1, body_bytes)
    return start + zlib.crc32(start).to_bytes(4, "little")


def sent(client: RawClient, data: bytes) -> None:
    """Sends, though the agent may have hung up already."""
    try:
        client.send(data)
    except Disconnected:
        pass


FUZZ = settings(max_examples=40, suppress_health_check=list(HealthCheck))


@given(data=st.binary(min_size=1, max_size=4000), greet=st.booleans())
@FUZZ
def test_random_bytes(watched: Watched, data: bytes, greet: bool) -> None:
    with RawClient(watched.path, greet=greet) as client:
        sent(client, data.ljust(HEADER_BYTES, b"\xff"))
        assert client.hung_up()


@given(greet=st.booleans(), kind=st.sampled_from(Kind), body=st.binary(max_size=400))
@FUZZ
def test_right_headers_with_random_bodies(watched: Watched, greet: bool, kind: Kind, body: bytes) -> None:
    with RawClient(watched.path, greet=greet) as client:
        sent(client, header_of(kind, len(body)) + body)
        sent(client, header_of(magic=b"....") + b"end")
        assert client.hung_up()


def anything(field: object) -> st.SearchStrategy[bytes]:
    """Bytes of the right length for a field with any value, or any bytes."""
    match field:
        case Integer():
            return st.one_of(
                st.integers(-(1 << 63), (1 << 63) - 1).map(
                    lambda value: value.to_bytes(8, "little", signed=True)
                ),
                st.integers(0, 3).map(lambda value: value.to_bytes(8, "little")),
            )
        case Real():
            return st.floats().map(lambda value: np.float64(value).tobytes())
        case Text():
            return st.one_of(
                st.binary(max_size=80),
                st.sampled_from([b"{}", b"[]", b"null", b'{"model":1}', make_spec(BLOCK_BYTES).canonical()]),
            )
    return st.one_of(
        st.integers(0, 6).flatmap(lambda count: st.binary(min_size=32 * count, max_size=32 * count)),
        st.binary(max_size=70),
        st.lists(st.integers(0, 3), max_size=4).map(lambda numbers: np.array(numbers, np.uint32).tobytes()),
    )


@given(st.data())
@settings(max_examples=80, suppress_health_check=list(HealthCheck))
def test_conversations_of_wrong_values(watched: Watched, data: st.DataObject) -> None:
    """Well-formed messages in any order with any numbers: unknown keyspaces, leases, reservations, sums that do not
    add up, seconds that are not a number."""
    with RawClient(watched.path) as client:
        client.open(make_spec(BLOCK_BYTES))
        for _ in range(data.draw(st.integers(1, 8))):
            kind = data.draw(st.sampled_from(sorted(REQUESTS)))
            body = b""
            for field in REQUESTS[kind]:
                value = data.draw(anything(field))
                body += len(value).to_bytes(4, "little") + value
            sent(client, header_of(kind, len(body)) + body)
        client.socket.shutdown(socket.SHUT_WR)
        assert client.hung_up()


def test_after_all_that_nothing_is_left(watched: Watched) -> None:
    watched.check()


@pytest.mark.parametrize("cut", [1, 10, HEADER_BYTES, HEADER_BYTES + 5])
def test_half_a_message_and_then_silence(watched: Watched, cut: int) -> None:
    with RawClient(watched.path) as client:
        number = client.open(make_spec(BLOCK_BYTES))
        message = b"".join(
            bytes(p) for p in encode(Kind.MATCH, 9, REQUESTS[Kind.MATCH], (number, random_hashes(3)))
        )
        client.send(message[:cut])
        assert client.hung_up()
    watched.check()


def test_nothing_at_all(watched: Watched) -> None:
    with RawClient(watched.path, greet=False) as client:
        assert client.hung_up()
    watched.check()


@pytest.mark.parametrize("kind", [Kind.MATCH, Kind.STATS, Kind.ANSWER, Kind.REFUSAL])
def test_a_first_message_that_is_not_hello(watched: Watched, kind: Kind) -> None:
    with RawClient(watched.path, greet=False) as client:
        client.send(header_of(kind))
        assert client.hung_up()
    watched.check()


@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.ANSWER, Kind.REFUSAL])
def test_a_message_that_is_no_request(watched: Watched, kind: Kind) -> None:
    with RawClient(watched.path) as client:
        client.send(header_of(kind))
        assert client.hung_up()
    watched.check()


def test_another_version_is_refused(watched: Watched) -> None:
    with RawClient(watched.path, greet=False) as client:
        client.send(header_of(Kind.HELLO, version=VERSION + 1))
        assert client.hung_up()
    watched.check()


def test_huge_lengths_cost_no_memory(watched: Watched) -> None:
    process = psutil.Process()
    before_bytes = process.memory_info().rss
    clients = [RawClient(watched.path) for _ in range(20)]
    try:
        for client in clients:
            client.send(header_of(Kind.MATCH, MAX_BODY_BYTES) + (MAX_BODY_BYTES - 1).to_bytes(4, "little"))
        assert all(client.hung_up() for client in clients)
        grown_bytes = process.memory_info().rss - before_bytes
    finally:
        for client in clients:
            client.close()
    assert grown_bytes < 8 * MAX_BODY_BYTES, "memory was taken for bytes that never came"
    with RawClient(watched.path) as client:
        client.send(header_of(Kind.MATCH, MAX_BODY_BYTES + 1))
        assert client.hung_up()
    watched.check()


def test_descriptors_that_a_client_sends_are_not_taken(watched: Watched) -> None:
    for greet in (True, False):
        with RawClient(watched.path, greet=greet) as client, open("/dev/null", "rb") as file:
            header = header_of(Kind.MATCH, 4000)
            try:
                for start in range(HEADER_BYTES):  # a few with each byte
                    socket.send_fds(client.socket, [header[start : start + 1]], [file.fileno()] * 50)
            except OSError:
                pass  # hung up already
            assert client.hung_up()
    watched.check()


def test_thousands_of_requests_by_one_that_reads_no_answers(watched: Watched) -> None:
    process = psutil.Process()
    before_bytes = process.memory_info().rss
    with RawClient(watched.path) as client:
        number = client.open(make_spec(BLOCK_BYTES))
        message = b"".join(
            bytes(p)
            for p in encode(Kind.LOOKUP, 9, REQUESTS[Kind.LOOKUP], ([number], [2000], random_hashes(2000)))
        )

        def send_on() -> None:
            for _ in range(20_000):
                client.send(message)

        with pytest.raises(Disconnected):
            send_on()
    assert process.memory_info().rss - before_bytes < 6 * MAX_BODY_BYTES
    watched.check()


def test_requests_beyond_the_limit_are_refused_and_counted_once(watched: Watched) -> None:
    """Flushes wait their turn: what comes beyond max_requests is refused; the client's others are still served."""
    gate = threading.Event()
    flush = watched.server.store.flush
    watched.server.store.flush = lambda timeout_s=60.0: gate.wait(TIMEOUT_S) and flush(timeout_s)  # type: ignore[method-assign]
    try:
        with RawClient(watched.path) as client:
            for request in range(40):
                client.send(encode(Kind.FLUSH, request, REQUESTS[Kind.FLUSH], (10.0,)))
            refused = [client.receive()[0] for _ in range(40 - 16)]
            assert {header.kind for header in refused} == {Kind.REFUSAL}
            with RawClient(
                watched.path
            ) as other:  # one's waiting requests keep nobody else's from their turn
                number = other.open(make_spec(BLOCK_BYTES))
                assert other.ask(Kind.REMOVE, number, random_hashes(2)) == [0]
            gate.set()
            answered = [client.receive()[0] for _ in range(16)]
            assert {header.kind for header in answered} == {Kind.ANSWER}
            assert sorted(header.request for header in refused + answered) == list(range(40))
            assert client.ask(Kind.STATS)
    finally:
        gate.set()
        watched.server.store.flush = flush  # type: ignore[method-assign]
    watched.check()


def test_what_is_refused_says_why_and_harms_nothing(watched: Watched) -> None:
    with RawClient(watched.path) as client:
        hashes = random_hashes(3)
        number = client.open(make_spec(BLOCK_BYTES))
        for kind, values, says in (
            (Kind.MATCH, (number + 77, hashes), "KeyspaceError: keyspace .* was not opened"),
            (Kind.LOOKUP, ([number], [4], hashes), "do not fit together"),
            (Kind.LEASE, (1.0, [number, number], [3], hashes), "do not fit together"),
            (Kind.STAGE, (99, 1.0), "ArgumentError: lease 99 is not one"),
            (Kind.COMMIT, (99, 1), "ArgumentError: reservation 99 is not one"),
            (Kind.RESERVE, (number, 5, 1.0, hashes), "ArgumentError: part is 5"),
            (Kind.ACQUIRE, (number, 5, 1.0, hashes), "ArgumentError: part is 5"),
            (Kind.OPEN, ("not json",), "KeyspaceError"),
            (Kind.OPEN, ("{}",), "KeyspaceError"),
            (Kind.OPEN, (make_spec(1 << 30).canonical().decode(),), r"ConfigError: .*slab_bytes"),
        ):
            answer = client.try_ask(kind, *values)
            assert isinstance(answer, str), kind
            assert re.search(says, answer), answer
        assert client.ask(Kind.EXTEND, 99, 1.0) == [0]
        assert client.ask(Kind.RELEASE, 99) == [0]
        assert client.ask(Kind.MATCH, number, hashes)[0].tolist() == []
    watched.check()


def test_too_many_clients_are_told_so(tmp_path: Path) -> None:
    config = agent_config(tmp_path, max_clients=2)
    with serving(config) as server:
        first, second = AgentStore(config.socket), AgentStore(config.socket)
        try:
            for _ in range(20):
                with pytest.raises(AgentUnavailable, match="2 clients are attached, which is the limit"):
                    AgentStore(config.socket)
            first.close()
            eventually(lambda: len(server.sessions()) == 1, "the first client is gone")
            AgentStore(config.socket).close()
        finally:
            first.close()
            second.close()


def test_strangers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = agent_config(tmp_path)
    with serving(config):
        assert os.stat(config.socket).st_mode & 0o777 == 0o600
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
        with pytest.raises(AgentUnavailable, match="may not attach"):
            AgentStore(config.socket)


def test_a_store_of_dram_that_is_full_of_leases_serves_on(tmp_path: Path) -> None:
    """One holds all it may, for ever; the others' blocks go through what is left."""
    config = agent_config(tmp_path, store_config(tmp_path, 16))
    with serving(config) as server:
        with AgentStore(config.socket) as greedy:
            space, hashes = greedy.open(make_spec(BLOCK_BYTES)), random_hashes(16)
            job = greedy.save(space, hashes, _memory(16))
            assert job.wait(TIMEOUT_S)
            held = [
                greedy.lease([(space, np.ascontiguousarray(hashes[at : at + 1]))], 300.0) for at in range(16)
            ]
            assert sum(bool(lease.held[0].any()) for lease in held) == 8, "half of DRAM is the limit"
            check_serves(config.socket)
        check_settled(server)


def _memory(blocks: int) -> Fragments:
    return Fragments.from_blocks(np.zeros((blocks, BLOCK_BYTES), np.uint8))
