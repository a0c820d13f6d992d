"""The HTTP server: what it answers, what it refuses, and that nobody can hold it up."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from observe_harness import (
    BLOCK_BYTES,
    TIMEOUT_S,
    agent_config,
    ask,
    eventually,
    get,
    plain_stats,
    read_answer,
    some_blocks,
    some_hashes,
)

from tierkv.agent.client import AgentStore
from tierkv.agent.server import AgentServer
from tierkv.agent.statistics import AgentStats
from tierkv.errors import ConfigError
from tierkv.observe import metrics
from tierkv.observe.exposition import parse
from tierkv.observe.metrics import MAX_CONNECTIONS, MAX_REQUEST_BYTES, MetricsServer
from tierkv.testing.buffers import make_spec


class Watched:
    """Stands for an agent: statistics as told."""

    def __init__(self, **changes: Any) -> None:
        self.answer: Callable[[], AgentStats] = lambda: plain_stats(**changes)

    def stats(self) -> AgentStats:
        return self.answer()


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture
def served(watched: Watched) -> Iterator[MetricsServer]:
    with MetricsServer(watched) as server:
        yield server


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def health_of(port: int) -> tuple[int, dict[str, Any]]:
    status, headers, body = get(port, "/healthz")
    assert headers["content-type"] == "application/json"
    return status, json.loads(body)


def test_an_agent_tells_what_its_clients_did(tmp_path: Path) -> None:
    config = agent_config(tmp_path, dram_blocks=16, nvme_blocks=64)
    spec = make_spec(part_bytes=(BLOCK_BYTES,))
    with AgentServer(config) as agent, MetricsServer(agent) as server, AgentStore(config.socket) as client:
        space = client.open(spec)
        memory, blocks = some_blocks(32)
        hashes = some_hashes(32)
        save = client.save(space, hashes, blocks)
        assert save.wait(TIMEOUT_S)
        assert save.ok()
        assert client.match(space, hashes).length == 32
        expected = memory.copy()
        memory[:] = 0
        load = client.load(space, hashes, blocks)
        assert load.wait(TIMEOUT_S)
        assert load.ok()
        assert (memory == expected).all()
        assert client.load(space, some_hashes(3, seed=9), some_blocks(3)[1]).wait(TIMEOUT_S)
        eventually(lambda: client.stats().load_misses == {"miss": 3}, "the misses are counted")
        with client.lease([(space, hashes[:4])], 60.0):
            status, headers, body = get(server.port, "/metrics")
        assert status == 200
        assert headers["content-type"].startswith("text/plain; version=")
        assert b"process_resident_memory_bytes" in body
        stats = parse(body.decode())
        assert stats.saved_blocks == 32
        assert (stats.match_requested_blocks, stats.match_found_blocks) == (32, 32)
        assert sum(tier.hit_blocks for tier in stats.tiers.values()) == 32
        assert stats.tiers["nvme"].hit_blocks >= 16  # DRAM has room for half of them
        assert stats.tiers["nvme"].read_bytes == stats.tiers["nvme"].hit_blocks * BLOCK_BYTES
        assert stats.tiers["nvme"].read_latency.count > 0
        assert stats.tiers["nvme"].write_latency.count > 0
        assert stats.load_misses == {"miss": 3}
        assert stats.latency["match"].count == 1
        assert stats.latency["load"].count >= 2
        assert stats.latency["save"].count >= 1
        assert (stats.client_count, stats.leases, stats.leased_bytes) == (1, 1, 4 * BLOCK_BYTES)
        assert health_of(server.port) == (
            200, {"status": "ok", "reasons": [], "tiers": {"dram": True, "nvme": True}},
        )  # fmt: skip
        agent.stop()
        status, health = health_of(server.port)
        assert status == 503
        assert health["status"] == "unavailable"
        assert "stopping" in health["reasons"][0]


def test_a_sick_tier_degrades_and_a_sick_dram_is_the_end(watched: Watched, served: MetricsServer) -> None:
    stats = plain_stats()
    watched.answer = lambda: stats
    assert health_of(served.port)[0] == 200
    stats.tiers["nvme"].healthy = False
    status, health = health_of(served.port)
    assert (status, health["status"]) == (200, "degraded")
    assert health["tiers"] == {"dram": True, "nvme": False}
    assert "nvme" in health["reasons"][0]
    assert b'tierkv_tier_healthy{tier="nvme"} 0.0' in get(served.port, "/metrics")[2]
    stats.tiers["dram"].healthy = False
    status, health = health_of(served.port)
    assert (status, health["status"], len(health["reasons"])) == (503, "unavailable", 2)


def test_an_agent_that_cannot_be_asked_is_unavailable_and_asked_again(
    watched: Watched, served: MetricsServer
) -> None:
    def fail() -> AgentStats:
        raise RuntimeError("secret detail")

    works, watched.answer = watched.answer, fail
    status, health = health_of(served.port)
    assert (status, health["status"]) == (503, "unavailable")
    status, _, body = get(served.port, "/metrics")
    assert status == 503
    assert b"secret" not in body
    watched.answer = works
    assert health_of(served.port)[0] == 200
    assert get(served.port, "/metrics")[0] == 200


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/ HTTP/1.1\r\n\r\n", 404),
        (b"GET /../etc/passwd HTTP/1.0\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"DELETE /healthz HTTP/1.1\r\n\r\n", 405),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET /metrics HTTP/2\r\n\r\n", 400),
        (b"GET http://[/metrics HTTP/1.1\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\xff\xfe\x00 \x80\r\n\r\n", 400),
        (b"GET /healthz?verbose=1 HTTP/1.1\r\n\r\n", 200),
        (b"GET /healthz HTTP/1.0\n\n", 200),
        (b"GET http://agent/healthz HTTP/1.1\r\n\r\n", 200),
    ],
)
def test_what_is_answered(served: MetricsServer, request_: bytes, status: int) -> None:
    found, headers, body = ask(served.port, request_)
    assert found == status
    assert int(headers["content-length"]) == len(body) > 0
    assert headers["connection"] == "close"
    assert (headers.get("allow") == "GET, HEAD") == (status == 405)


def test_head_has_the_headers_of_get_alone(served: MetricsServer) -> None:
    status, headers, body = ask(served.port, b"HEAD /healthz HTTP/1.1\r\n\r\n")
    assert (status, body) == (200, b"")
    assert int(headers["content-length"]) == len(get(served.port, "/healthz")[2])


def test_openmetrics_is_served_to_who_asks_for_it(served: MetricsServer) -> None:
    _, headers, body = get(served.port, "/metrics", accept="application/openmetrics-text;version=1.0.0")
    assert headers["content-type"].startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_a_request_without_end_is_refused(served: MetricsServer) -> None:
    status, _, _ = ask(served.port, b"GET /metrics HTTP/1.1\r\nX: " + b"a" * (MAX_REQUEST_BYTES + 1000))
    assert status == 431


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(junk=st.binary(min_size=1, max_size=300))
def test_junk_is_answered_or_closed_and_harms_nobody(served: MetricsServer, junk: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=TIMEOUT_S) as connection:
        connection.sendall(junk + b"\r\n\r\n")
        assert connection.recv(12).startswith(b"HTTP/1.1 ")
    assert get(served.port, "/healthz")[0] == 200


def test_a_slow_client_delays_nobody(served: MetricsServer) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=TIMEOUT_S) as slow:
        slow.sendall(b"GET /healthz HT")
        assert get(served.port, "/healthz")[0] == 200
        slow.sendall(b"TP/1.1\r\n\r\n")
        assert read_answer(slow)[0] == 200


def test_a_client_that_sends_nothing_or_reads_nothing_is_closed_at_its_deadline(
    served: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "EXCHANGE_TIMEOUT_S", 0.05)
    with socket.create_connection(("127.0.0.1", served.port), timeout=TIMEOUT_S) as silent:
        assert silent.recv(1) == b""
    with socket.create_connection(("127.0.0.1", served.port), timeout=TIMEOUT_S) as drip:
        drip.sendall(b"GET /healthz HT")
        assert drip.recv(1) == b""
    with socket.create_connection(("127.0.0.1", served.port), timeout=TIMEOUT_S) as lingering:
        lingering.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert read_answer(lingering)[0] == 200  # and the server does not wait for our end for ever:

        def closed() -> bool:
            try:
                lingering.send(b"x")
            except ConnectionError:
                return True
            return False

        eventually(closed, "the connection is closed")


def test_more_connections_than_are_served_at_once_wait_for_their_turn(served: MetricsServer) -> None:
    many = [
        socket.create_connection(("127.0.0.1", served.port), timeout=TIMEOUT_S)
        for _ in range(MAX_CONNECTIONS + 10)
    ]
    try:
        # Those that are served hold their place until they have sent something.
        for connection in many:
            connection.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        for connection in many:
            assert read_answer(connection)[0] == 200
            connection.close()
    finally:
        for connection in many:
            connection.close()


def test_stopping_leaves_nothing_open(watched: Watched) -> None:
    before = open_descriptors()
    server = MetricsServer(watched)
    server.start()
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as waiting:
        assert get(server.port, "/healthz")[0] == 200
        server.stop()
        server.stop()
        assert waiting.recv(1) == b""
    assert open_descriptors() == before
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S)


def test_a_server_that_never_started_stops() -> None:
    before = open_descriptors()
    MetricsServer(Watched()).stop()
    assert open_descriptors() == before


def test_stopping_waits_for_the_agents_answer_in_bounded_time(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_JOIN_TIMEOUT_S", 0.05)
    asked, answer = threading.Event(), threading.Event()

    def hang() -> AgentStats:
        asked.set()
        assert answer.wait(TIMEOUT_S)
        return plain_stats()

    watched.answer = hang
    server = MetricsServer(watched)
    server.start()
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert asked.wait(TIMEOUT_S)
        server.stop()
        answer.set()


def test_a_port_in_use_is_named(served: MetricsServer) -> None:
    with pytest.raises(ConfigError, match=f"{served.port}.*choose another metrics_port"):
        MetricsServer(Watched(), port=served.port).start()
    with pytest.raises(ConfigError, match="metrics_host"):
        MetricsServer(Watched(), host="256.0.0.1").start()


def test_ipv6_is_served() -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("no IPv6 here")
    with MetricsServer(Watched(), host="::1") as server:
        assert get(server.port, "/healthz", host="::1")[0] == 200
