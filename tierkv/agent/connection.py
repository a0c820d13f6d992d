"""Connection: a client's end of one attachment to the agent, with the arena mapped.

Requests are numbered and answered in any order; each has a future. An answer to a request that nobody waits for any
more is undone (a lease released, a reservation given up), so a slow moment leaks nothing.

Thread safety: any thread may submit; one thread receives. Futures are completed on the receiving thread, so their
callbacks must be short.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from tierkv.agent.channel import Channel, Disconnected
from tierkv.agent.protocol import ANSWERS, REFUSAL, REQUESTS, Kind, ProtocolError, decode_body, encode
from tierkv.errors import ArgumentError, ConfigError, KeyspaceError, TierKVError
from tierkv.memory import Arena

log = logging.getLogger("tierkv.client")

CONNECT_TIMEOUT_S = 5.0
MESSAGE_TIMEOUT_S = 30.0
MAX_UNDER_WAY = 200
_JOIN_TIMEOUT_S = 10.0
_COMPLETION_TIMEOUT_S = 5.0

Undo = Callable[["Connection", list[Any]], None]


class AgentUnavailable(TierKVError):
    """The agent cannot be asked now: it is not there, went away, or did not answer in time."""


class LimitReached(TierKVError):
    """The agent refuses more for this client for now."""


_REFUSALS: dict[str, type[TierKVError]] = {
    "ArgumentError": ArgumentError,
    "ConfigError": ConfigError,
    "KeyspaceError": KeyspaceError,
    "LimitError": LimitReached,
}


def answer_of(future: Future[list[Any]], timeout_s: float) -> list[Any]:
    """The answer; after `timeout_s` the request is given up, an answer that still comes undone: AgentUnavailable."""
    try:
        return future.result(max(0.0, timeout_s))
    except TimeoutError:
        if not future.cancel():  # it is being completed just now
            return future.result(_COMPLETION_TIMEOUT_S)
        raise AgentUnavailable(f"the agent did not answer within {timeout_s:.3g} s") from None


class Connection:
    """One attachment. `numbers` maps keyspace digests to the agent's numbers for them."""

    def __init__(self, path: str, name: str, on_lost: Callable[[Connection], None]) -> None:
        """Attaches. AgentUnavailable if nobody serves `path`, or refuses; it says why."""
        self._path = path
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._futures: dict[int, tuple[Kind, Future[list[Any]], Undo | None]] = {}
        self._last_request = 0
        self.broken = False
        self.numbers: dict[bytes, int] = {}
        self._channel = self._connect()
        try:
            self.arena, self.aside, self.max_load_bytes, self.lease_s = self._greet(name)
        except BaseException:
            self._channel.close()
            raise
        self._receiver = threading.Thread(target=self._receive, name="tierkv-answers", daemon=True)
        self._receiver.start()

    def _connect(self) -> Channel:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            connection.connect(self._path)
        except OSError as error:
            connection.close()
            raise AgentUnavailable(
                f"{self._path}: no agent answers ({error.strerror or error}): start `tierkv agent`, or check the path"
            ) from error
        return Channel(connection, send_timeout_s=CONNECT_TIMEOUT_S)

    def _greet(self, name: str) -> tuple[Arena, Arena, int, float]:
        fds: list[int] = []
        try:
            # An agent that refuses says so and hangs up at once, perhaps before it is greeted: what it said is there.
            with contextlib.suppress(Disconnected):
                self._channel.send(encode(Kind.HELLO, 0, REQUESTS[Kind.HELLO], (name,)), patient=True)
            header, body, fds = self._channel.receive(
                wait_s=CONNECT_TIMEOUT_S, message_s=CONNECT_TIMEOUT_S, max_fds=2
            )
            if header.kind == Kind.REFUSAL:
                raise AgentUnavailable(f"{self._path}: {decode_body(REFUSAL, body)[1]}")
            if header.kind != Kind.ANSWER or len(fds) != 2:
                raise ProtocolError(f"the agent greeted with {header.kind.name} and {len(fds)} descriptors")
            _, arena_bytes, aside_bytes, _, max_load_bytes, lease_s = decode_body(ANSWERS[Kind.HELLO], body)
            arena = Arena.attach(fds[0], arena_bytes)
            try:
                return arena, Arena.attach(fds[1], aside_bytes), max_load_bytes, lease_s
            except BaseException:
                arena.close()
                raise
        except (Disconnected, ProtocolError) as error:
            raise AgentUnavailable(f"{self._path}: {error}") from error
        finally:
            for fd in fds:
                os.close(fd)  # the arenas have copies of their own

    def submit(self, kind: Kind, values: Sequence[Any], undo: Undo | None = None) -> Future[list[Any]]:
        """Sends a request; the future has its answer's fields, or fails with AgentUnavailable or the refusal.

        A future that was cancelled in time has its answer undone by `undo`.
        """
        future: Future[list[Any]] = Future()
        with self._lock:
            if self.broken:
                raise AgentUnavailable(f"{self._path}: the agent is gone")
            if len(self._futures) >= MAX_UNDER_WAY:
                raise AgentUnavailable(
                    f"{self._path}: {MAX_UNDER_WAY} requests are unanswered: the agent is too slow"
                )
            self._last_request += 1
            request = self._last_request
            self._futures[request] = (kind, future, undo)
        try:
            # Never waiting: an agent that does not read holds nobody up, the deadline of the answer does.
            self._channel.send(encode(kind, request, REQUESTS[kind], values))
        except Disconnected as error:
            with self._lock:
                self._futures.pop(request, None)
            raise AgentUnavailable(f"{self._path}: {error}") from error
        except BaseException:
            with self._lock:
                self._futures.pop(request, None)
            raise
        return future

    def call(self, kind: Kind, values: Sequence[Any], timeout_s: float) -> list[Any]:
        """Sends a request and waits for its answer."""
        return answer_of(self.submit(kind, values), timeout_s)

    @contextlib.contextmanager
    def mapped(self) -> Iterator[tuple[int, int]]:
        """Keeps the arena and the memory beside it mapped meanwhile: their addresses."""
        try:
            with self.arena.view(), self.aside.view():
                yield self.arena.address, self.aside.address
        finally:
            for arena in (self.arena, self.aside):
                arena.close_again()  # if it was closed meanwhile

    def holds_since(self, asked_s: float) -> bool:
        """Whether a lease of ACQUIRE, asked for after `asked_s` (time.monotonic()), holds still for sure: it has not
        expired, and the agent has not ended the connection, which it does before it gives back what it held for it.
        False: only RELEASE tells."""
        return time.monotonic() < asked_s + self.lease_s and self._channel.is_open()

    def _receive(self) -> None:
        reason: TierKVError
        try:
            while True:
                header, body, _ = self._channel.receive(wait_s=None, message_s=MESSAGE_TIMEOUT_S)
                self._complete(header.kind, header.request, body)
        except (Disconnected, ProtocolError) as error:
            reason = error
        except Exception as error:  # whoever waits must learn of it
            log.exception("the connection to the agent failed")
            reason = TierKVError(repr(error))
        with self._lock:
            self.broken = True
            left, self._futures = list(self._futures.values()), {}
        for _, future, _ in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(AgentUnavailable(f"{self._path}: {reason}"))
        self._on_lost(self)

    def _complete(self, kind: Kind, request: int, body: memoryview) -> None:
        with self._lock:
            asked = self._futures.pop(request, None)
        if asked is None:
            raise ProtocolError(f"the agent answered request {request}, which was not made")
        asked_kind, future, undo = asked
        if kind == Kind.REFUSAL:
            name, message = decode_body(REFUSAL, body)
            if future.set_running_or_notify_cancel():
                future.set_exception(_REFUSALS.get(name, TierKVError)(message))
            return
        if kind != Kind.ANSWER:
            raise ProtocolError(f"the agent sent a {kind.name}")
        answer = decode_body(ANSWERS[asked_kind], body)
        if future.set_running_or_notify_cancel():
            future.set_result(answer)
        elif undo is not None:
            with contextlib.suppress(AgentUnavailable):
                undo(self, answer)

    def interrupt(self) -> None:
        """Ends the conversation; every future fails."""
        self._channel.interrupt()

    def close(self) -> None:
        """Ends the conversation and unmaps the arena once no copy uses it. Not from a future's callback."""
        self.interrupt()
        self._receiver.join(_JOIN_TIMEOUT_S)
        self._channel.close()
        self.arena.close()
        self.aside.close()
