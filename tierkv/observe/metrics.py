"""MetricsServer: an agent's /metrics and /healthz over HTTP, on one thread.

Made to be left alone with whatever connects: every exchange has one request of bounded size and one deadline for all
of it, the number of connections is bounded, and a client that is slow delays nobody else. A connection serves one
request and is closed.

Thread safety: start() and stop() belong to the owner; the rest happens on the server's own thread.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol
from urllib.parse import urlsplit

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from tierkv.agent.statistics import AgentStats
from tierkv.errors import ConfigError
from tierkv.observe.exposition import AgentCollector
from tierkv.observe.health import Health, judge

log = logging.getLogger("tierkv.metrics")

MAX_REQUEST_BYTES = 8192
MAX_CONNECTIONS = 32
EXCHANGE_TIMEOUT_S = 5.0
_LONGEST_WAIT_S = 5.0
_ACCEPT_PAUSE_S = 0.2
_JOIN_TIMEOUT_S = 10.0
_RECEIVE_BYTES = 4096
_BACKLOG = 64


class Observed(Protocol):
    """What is watched: an AgentServer."""

    def stats(self) -> AgentStats:
        """See AgentServer.stats()."""
        ...


@dataclass(slots=True, eq=False)
class _Exchange:
    """One connection: its request is received, then answered, then the other side's end is waited for."""

    connection: socket.socket
    deadline_s: float
    received: bytearray = field(default_factory=bytearray)
    answer: memoryview | None = None


class MetricsServer:
    """Serves GET /metrics and GET /healthz of `server`. Use start() and stop(), or as a context manager."""

    def __init__(self, server: Observed, host: str = "127.0.0.1", port: int = 0) -> None:
        """Nothing is served before start(). `port` 0: any free one, see `port`."""
        self._server = server
        self._host = host
        self._wanted_port = port
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(AgentCollector(server.stats))
        ProcessCollector(registry=self._registry)
        self._exchanges: set[_Exchange] = set()
        self._stopping = threading.Event()
        self._listening = False
        self._pause_until_s = 0.0
        self._thread: threading.Thread | None = None
        self.port = port
        """The port that is served, once started."""

    # Start and stop

    def start(self) -> None:
        """Begins to serve. ConfigError if the address cannot be had."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            self._listener = socket.create_server(
                (self._host, self._wanted_port), family=family, backlog=_BACKLOG
            )
        except OSError as error:
            raise ConfigError(
                f"metrics: {self._host} port {self._wanted_port} cannot be served: {error.strerror or error}; choose "
                f"another metrics_port or metrics_host"
            ) from error
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="tierkv-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends serving and closes every connection. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stopping.set()
        os.eventfd_write(self._wake, 1)
        thread.join(_JOIN_TIMEOUT_S)
        if thread.is_alive():  # it waits for the agent: what it uses stays open until it has seen the end
            log.error("metrics: the server's thread did not end within %g s", _JOIN_TIMEOUT_S)
            return
        os.close(self._wake)

    def __enter__(self) -> MetricsServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # The thread

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._listen_or_not()
                for key, _ in self._selector.select(self._wait_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data is not None:
                        self._go_on(key.data)
                now_s = time.monotonic()
                for exchange in [exchange for exchange in self._exchanges if exchange.deadline_s <= now_s]:
                    self._close(exchange)
        except Exception:  # nobody else would tell
            log.exception("metrics: serving failed and has ended")
        finally:
            for exchange in list(self._exchanges):
                self._close(exchange)
            self._selector.close()
            self._listener.close()

    def _wait_s(self) -> float:
        """Until the next deadline."""
        next_s = min((exchange.deadline_s for exchange in self._exchanges), default=float("inf"))
        if not self._listening:
            next_s = min(next_s, max(self._pause_until_s, time.monotonic() + _ACCEPT_PAUSE_S))
        return min(_LONGEST_WAIT_S, max(0.0, next_s - time.monotonic()))

    def _listen_or_not(self) -> None:
        """Takes connections only while there is room for them; the kernel queues what comes meanwhile."""
        wanted = len(self._exchanges) < MAX_CONNECTIONS and time.monotonic() >= self._pause_until_s
        if wanted and not self._listening:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif self._listening and not wanted:
            self._selector.unregister(self._listener)
        self._listening = wanted

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # out of descriptors, say: others may end meanwhile
            log.warning("metrics: a connection could not be accepted: %s", error.strerror)
            self._pause_until_s = time.monotonic() + _ACCEPT_PAUSE_S
            return
        connection.setblocking(False)
        exchange = _Exchange(connection, time.monotonic() + EXCHANGE_TIMEOUT_S)
        self._exchanges.add(exchange)
        self._selector.register(connection, selectors.EVENT_READ, exchange)

    def _close(self, exchange: _Exchange) -> None:
        self._exchanges.discard(exchange)
        self._selector.unregister(exchange.connection)
        exchange.connection.close()

    def _go_on(self, exchange: _Exchange) -> None:
        try:
            if exchange.answer is None:
                self._receive(exchange)
            elif len(exchange.answer):
                self._send(exchange)
            elif not exchange.connection.recv(_RECEIVE_BYTES):
                self._close(exchange)
        except BlockingIOError:
            return
        except OSError:  # it went away
            self._close(exchange)

    def _receive(self, exchange: _Exchange) -> None:
        data = exchange.connection.recv(_RECEIVE_BYTES)
        if not data:
            self._close(exchange)
            return
        exchange.received += data
        if b"\r\n\r\n" in exchange.received or b"\n\n" in exchange.received:
            answer = self._answer(bytes(exchange.received))
        elif len(exchange.received) > MAX_REQUEST_BYTES:
            answer = _response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        else:
            return
        exchange.answer = memoryview(answer)
        self._selector.modify(exchange.connection, selectors.EVENT_WRITE, exchange)
        self._send(exchange)

    def _send(self, exchange: _Exchange) -> None:
        assert exchange.answer is not None
        exchange.answer = exchange.answer[exchange.connection.send(exchange.answer) :]
        if not len(exchange.answer):
            # Closing at once, with bytes unread, would make the kernel discard the answer.
            exchange.connection.shutdown(socket.SHUT_WR)
            self._selector.modify(exchange.connection, selectors.EVENT_READ, exchange)

    # Answers

    def _answer(self, request: bytes) -> bytes:
        lines = request.decode("latin-1").splitlines()
        try:
            method, target, version = lines[0].split(" ")
            path = urlsplit(target).path
        except (ValueError, IndexError):
            return _response(HTTPStatus.BAD_REQUEST)
        if not version.startswith("HTTP/1."):
            return _response(HTTPStatus.BAD_REQUEST)
        if path not in ("/metrics", "/healthz"):
            return _response(HTTPStatus.NOT_FOUND, b"/metrics and /healthz are served here\n")
        if method not in ("GET", "HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, extra="Allow: GET, HEAD\r\n")
        try:
            answer = self._metrics(lines) if path == "/metrics" else self._health()
        except Exception as error:  # the scraper is told, and the next one may work
            log.warning("metrics: the agent could not be asked: %r", error)
            answer = _response(HTTPStatus.SERVICE_UNAVAILABLE, b"the agent could not be asked; see its log\n")
        return answer if method == "GET" else answer[: answer.index(b"\r\n\r\n") + 4]

    def _metrics(self, lines: list[str]) -> bytes:
        headers = [line.partition(":") for line in lines[1:]]
        accept = ",".join(value.strip() for name, _, value in headers if name.lower() == "accept")
        encode, content_type = choose_encoder(accept)
        return _response(HTTPStatus.OK, encode(self._registry), content_type=content_type)

    def _health(self) -> bytes:
        try:
            health = judge(self._server.stats())
        except Exception as error:
            log.warning("metrics: the agent could not be asked: %r", error)
            health = Health(
                status="unavailable", reasons=["the agent could not be asked; see its log"], tiers={}
            )
        status = HTTPStatus.OK if health.serving else HTTPStatus.SERVICE_UNAVAILABLE
        return _response(status, msgspec.json.encode(health) + b"\n", content_type="application/json")


def _response(
    status: HTTPStatus,
    body: bytes | None = None,
    *,
    content_type: str = "text/plain; charset=utf-8",
    extra: str = "",
) -> bytes:
    body = f"{status.phrase}\n".encode() if body is None else body
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        f"Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n{extra}Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + body
