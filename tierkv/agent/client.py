"""AgentStore: a Store for processes that attach to the agent. The same calls, the same answers.

The client maps the agent's arena and moves its own bytes: a load is acquire, copy, release; a save is reserve, copy,
commit. Control messages are answered on a connection thread; copies run on threads of the client's own, so callers
wait for nothing but look-ups, and those have a deadline.

Losing the agent is not an error: look-ups find nothing, loads end as TIMEOUT, saves as DROPPED, and the client attaches
again by itself when the agent is back. A copy out of the arena counts only when the lease was still held after the
copy, by its time and the open connection or by the agent's word; whatever happened to the slots meanwhile, wrong bytes
are never reported as good ones.

Thread safety: every method may be called from any thread.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from tierkv._native import CopyPool
from tierkv.agent.connection import AgentUnavailable, Connection, answer_of
from tierkv.agent.moving import Mover
from tierkv.agent.protocol import (
    MAX_BLOCKS,
    MAX_CHANGES,
    MAX_TIMEOUT_S,
    MAX_TTL_S,
    MIN_TTL_S,
    Kind,
    pack_queries,
)
from tierkv.agent.statistics import AgentStats
from tierkv.errors import ArgumentError, ClosedError, KeyspaceError, TierKVError
from tierkv.fragments import Fragments
from tierkv.jobs import Job
from tierkv.keys import Keyspace, KeyspaceSpec, as_hash_array
from tierkv.store import ChangePlace, Changes, Match, Query
from tierkv.store.checks import check_fragments, check_ttl, timeout_or
from tierkv.types import HASH_BYTES, BlockStatus, BoolArray, HashArray, UInt8Array

log = logging.getLogger("tierkv.client")

_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 1.0
_CLOSE_TIMEOUT_S = 10.0
_NO_HASHES = np.empty((0, HASH_BYTES), np.uint8)


class AgentStore:
    """What tierkv.connect() returns."""

    def __init__(
        self,
        path: str,
        *,
        name: str = "",
        call_timeout_s: float = 1.0,
        copy_threads: int = 2,
        load_timeout_s: float = 30.0,
        save_timeout_s: float = 60.0,
        when_away: Callable[[float], None] | None = None,
    ) -> None:
        """Attaches to the agent that serves the Unix socket `path`. AgentUnavailable if there is none.

        call_timeout_s bounds look-ups and leases; load_timeout_s and save_timeout_s are the defaults of jobs. when_away
        is called, on a thread of the client's, before each attempt to find the agent again, with the seconds that it is
        away: it may start one. What it raises is logged.
        """
        self._path = path
        self._name = name or f"pid {os.getpid()}"
        self._call_timeout_s = call_timeout_s
        self._load_timeout_s = load_timeout_s
        self._save_timeout_s = save_timeout_s
        self._when_away = when_away
        self._lock = threading.Lock()
        self._spaces: dict[bytes, Keyspace] = {}
        self._numbers = itertools.count(1)
        self._closing = threading.Event()
        self._lost = threading.Event()
        self._connection: Connection | None = Connection(path, self._name, self._lose)
        self.pool = CopyPool(copy_threads)
        self._loads = Mover(self, "load", threads=2)
        self._saves = Mover(self, "save", threads=1)
        self._keeper = threading.Thread(target=self._keep_attached, name="tierkv-attach", daemon=True)
        self._keeper.start()

    # The connection

    def connection(self) -> Connection:
        """The live connection; AgentUnavailable while there is none."""
        connection = self._connection
        if connection is None or connection.broken:
            raise AgentUnavailable(f"{self._path}: the agent is gone; it is looked for in the background")
        return connection

    @property
    def attached(self) -> bool:
        """Whether the agent can be asked now."""
        connection = self._connection
        return connection is not None and not connection.broken

    def _lose(self, connection: Connection) -> None:
        if not self._closing.is_set():
            log.warning("%s: the agent is gone", self._path)
        self._lost.set()

    def _keep_attached(self) -> None:
        """Attaches again whenever the connection is lost."""
        retry_s = _FIRST_RETRY_S
        while not self._closing.is_set():
            if not self._lost.wait(1.0) or self._closing.is_set():
                continue
            self._lost.clear()
            with self._lock:
                if self._closing.is_set():
                    return
                old = self._connection
                if old is not None and not old.broken:
                    continue  # another attempt's connection ended
                self._connection = None
            if old is not None:
                old.close()
            since_s = time.monotonic()
            while not self._closing.wait(retry_s):
                self._tell_away(time.monotonic() - since_s)
                try:
                    connection = Connection(self._path, self._name, self._lose)
                except (TierKVError, OSError) as error:  # OSError: no descriptor or thread to be had just now
                    log.debug("%s: %s", self._path, error)
                    retry_s = min(_LAST_RETRY_S, 2 * retry_s)
                    continue
                if not self._open_all(connection):
                    connection.close()
                    continue
                with self._lock:
                    if not self._closing.is_set():
                        self._connection = connection
                if self._connection is not connection:
                    connection.close()
                    return
                retry_s = _FIRST_RETRY_S
                log.info("%s: attached again", self._path)
                break

    def _tell_away(self, away_s: float) -> None:
        if self._when_away is None:
            return
        try:
            self._when_away(away_s)
        except (TierKVError, OSError) as error:
            log.warning("%s: %s", self._path, error)
        except Exception:  # the agent must be found again all the same
            log.exception("%s: what was to be done about the agent's absence failed", self._path)

    def _open_all(self, connection: Connection) -> bool:
        """Opens on a new connection what was opened on the last one; False if it is gone already."""
        with self._lock:
            spaces = list(self._spaces.values())
        for space in spaces:
            try:
                self._open_on(connection, space)
            except AgentUnavailable:
                return False
            except TierKVError as error:  # an agent with other settings: this keyspace has misses only
                log.warning("%s: the agent refuses a keyspace that it held before: %s", self._path, error)
        return True

    def _open_on(self, connection: Connection, space: Keyspace) -> None:
        (number,) = connection.call(Kind.OPEN, (space.spec.canonical().decode(),), self._call_timeout_s)
        connection.numbers[space.digest] = number

    def number(self, connection: Connection, space: Keyspace) -> int:
        """The keyspace's number on this connection, opening it there if need be."""
        if space.digest not in connection.numbers:
            self._open_on(connection, space)
        return connection.numbers[space.digest]

    def submit(self, kind: Kind, space: Keyspace, *values: Any) -> Future[list[Any]]:
        """Sends a request about a keyspace; a future of its answer's fields."""
        connection = self.connection()
        return connection.submit(kind, (self.number(connection, space), *values))

    # Keyspaces and look-ups

    def open(self, spec: KeyspaceSpec) -> Keyspace:
        """As Store.open; raises AgentUnavailable when the agent cannot be asked."""
        self._check_open()
        spec.validate()
        digest = spec.digest()
        with self._lock:
            space = self._spaces.get(digest) or Keyspace(spec, digest, next(self._numbers))
        self.number(self.connection(), space)  # the agent refuses what it cannot hold
        with self._lock:
            return self._spaces.setdefault(digest, space)

    def expect(self, spec: KeyspaceSpec) -> Keyspace:
        """As open(), but asks the agent only when the keyspace is used: what it refuses then has misses only."""
        self._check_open()
        spec.validate()
        digest = spec.digest()
        with self._lock:
            return self._spaces.setdefault(digest, Keyspace(spec, digest, next(self._numbers)))

    def forget(self, space: Keyspace) -> None:
        """The keyspace is not used by this client any more: it is not opened again at an agent that comes back."""
        with self._lock:
            if self._spaces.get(space.digest) is space:
                del self._spaces[space.digest]

    def match(self, space: Keyspace, hashes: HashArray) -> Match:
        """As Store.match; nothing while the agent cannot be asked."""
        hashes = self._checked(space, hashes)
        try:
            (tiers,) = self._ask(self.submit(Kind.MATCH, space, hashes[:MAX_BLOCKS]))
            if len(tiers) > len(hashes):
                raise TierKVError(f"the agent matched {len(tiers)} of {len(hashes)} blocks")
        except TierKVError as error:
            _note(error)
            tiers = np.empty(0, np.uint8)
        return Match(len(tiers), tiers)

    def lookup(self, queries: Sequence[Query], *, strict: bool = False) -> list[UInt8Array]:
        """As Store.lookup, in one message; while the agent cannot be asked zeros, or AgentUnavailable if `strict`."""
        checked = [(space, self._checked(space, hashes)) for space, hashes in queries]
        ends = np.cumsum([len(hashes) for _, hashes in checked])
        total = int(ends[-1]) if len(ends) else 0
        _check_count(total)
        try:
            connection = self.connection()
            packed = pack_queries([(self.number(connection, space), hashes) for space, hashes in checked])
            (masks,) = self._ask(connection.submit(Kind.LOOKUP, packed))
            if len(masks) != total:
                raise TierKVError(f"the agent looked {len(masks)} of {total} blocks up")
        except TierKVError as error:
            if strict:
                raise
            _note(error)
            masks = np.zeros(total, np.uint8)
        return list(np.split(masks, ends[:-1])) if checked else []

    def touch(self, space: Keyspace, hashes: HashArray) -> None:
        """As Store.touch."""
        hashes = self._checked(space, hashes)
        _check_count(len(hashes))
        try:
            self.submit(Kind.TOUCH, space, 1, hashes)
        except TierKVError as error:
            _note(error)  # the order of use is a hint

    def changes(
        self, spaces: Sequence[Keyspace], after: ChangePlace | None = None, count: int = MAX_CHANGES
    ) -> Changes:
        """As Store.changes; AgentUnavailable when the agent cannot be asked. The place is one in the agent's store: if
        it was restarted, `complete` is false."""
        for space in spaces:
            self._checked(space, _NO_HASHES)
        connection = self.connection()
        numbers = np.array([self.number(connection, space) for space in spaces], np.uint32)
        place = (after.feed, after.number) if after is not None else (0, 0)
        feed, following, complete, positions, hashes, tiers = self._ask(
            connection.submit(Kind.CHANGES, (numbers, *place, count))
        )
        if not len(positions) == len(hashes) == len(tiers) <= count or (positions >= len(spaces)).any():
            raise TierKVError(
                f"the agent told of {len(hashes)} changes of {len(spaces)} keyspaces, which do not fit"
            )
        return Changes(positions, hashes, tiers, ChangePlace(feed, following), bool(complete))

    def _ask(self, future: Future[list[Any]], timeout_s: float | None = None) -> list[Any]:
        """The answer; AgentUnavailable if it does not come in time."""
        return answer_of(future, timeout_s or self._call_timeout_s)

    # Leases

    def lease(self, queries: Sequence[Query], ttl_s: float) -> AgentLease:
        """As Store.lease; holds nothing while the agent cannot be asked."""
        check_ttl(ttl_s)
        checked = [(space, self._checked(space, hashes)) for space, hashes in queries]
        lengths = [len(hashes) for _, hashes in checked]
        _check_count(sum(lengths))
        try:
            connection = self.connection()
            packed = pack_queries([(self.number(connection, space), hashes) for space, hashes in checked])
            future = connection.submit(Kind.LEASE, (_ttl(ttl_s), *packed), undo=_release_late)
            number, held = self._ask(future)
            if len(held) != sum(lengths):
                raise TierKVError(f"the agent leased {len(held)} of {sum(lengths)} blocks")
        except TierKVError as error:
            _note(error)
            return AgentLease(self, None, 0, checked, [np.zeros(length, np.bool_) for length in lengths])
        flags = np.split(held.astype(np.bool_), np.cumsum(lengths)[:-1]) if lengths else []
        return AgentLease(self, connection, number, checked, list(flags))

    def stage(self, lease: AgentLease, timeout_s: float | None = None, *, make_room: bool = True) -> Job:
        """As Store.stage; every block ends as TIMEOUT while the agent cannot be asked."""
        self._check_open()
        timeout_s = timeout_or(timeout_s, self._load_timeout_s)
        job = Job(sum(len(hashes) for _, hashes in lease.queries))
        if job.done():
            return job
        try:
            if lease.connection is None:
                raise AgentUnavailable("the lease was taken while the agent was gone")
            future = lease.connection.submit(Kind.STAGE, (lease.number, min(timeout_s, MAX_TIMEOUT_S)))
        except TierKVError as error:
            _note(error)
            job.settle_rest(BlockStatus.TIMEOUT)
            return job

        def answered(done: Future[list[Any]]) -> None:
            if not done.cancelled() and done.exception() is None:
                (status,) = done.result(0)
                if len(status) == job.count:
                    job.settle(slice(None), status)
            job.settle_rest(BlockStatus.TIMEOUT)

        future.add_done_callback(answered)
        return job

    # Moving

    def load(
        self,
        space: Keyspace,
        hashes: HashArray,
        into: Fragments,
        part: int = 0,
        timeout_s: float | None = None,
    ) -> Job:
        """As Store.load."""
        hashes = self._checked(space, hashes)
        check_fragments(space, hashes, into, part)
        return self._loads.submit(space, hashes, into, part, timeout_or(timeout_s, self._load_timeout_s))

    def save(
        self,
        space: Keyspace,
        hashes: HashArray,
        from_: Fragments,
        part: int = 0,
        timeout_s: float | None = None,
    ) -> Job:
        """As Store.save."""
        hashes = self._checked(space, hashes)
        check_fragments(space, hashes, from_, part)
        return self._saves.submit(space, hashes, from_, part, timeout_or(timeout_s, self._save_timeout_s))

    # Removing

    def remove(self, space: Keyspace, hashes: HashArray, timeout_s: float = 60.0) -> int:
        """As Store.remove; AgentUnavailable when it was not confirmed."""
        hashes = self._checked(space, hashes)
        _check_count(len(hashes))
        return int(self._ask(self.submit(Kind.REMOVE, space, hashes), timeout_s)[0])

    def clear(self, space: Keyspace, timeout_s: float = 30.0) -> int:
        """As Store.clear; AgentUnavailable when it was not confirmed."""
        self._checked(space, _NO_HASHES)
        return int(
            self._ask(self.submit(Kind.CLEAR, space, min(timeout_s, MAX_TIMEOUT_S)), timeout_s + 60.0)[0]
        )

    def flush(self, timeout_s: float = 60.0) -> bool:
        """As Store.flush, for all clients of the agent; also waits for this client's saves."""
        self._check_open()
        deadline_s = time.monotonic() + timeout_s
        if not self._saves.wait_idle(deadline_s):
            return False
        left_s = min(MAX_TIMEOUT_S, max(0.001, deadline_s - time.monotonic()))
        try:
            return bool(self._ask(self.connection().submit(Kind.FLUSH, (left_s,)), left_s + 1.0)[0])
        except TierKVError as error:
            _note(error)
            return False

    def stats(self) -> AgentStats:
        """As Store.stats, of the agent's store and its clients; AgentUnavailable when it cannot be asked."""
        self._check_open()
        (text,) = self._ask(self.connection().submit(Kind.STATS, ()))
        return msgspec.json.decode(text, type=AgentStats)

    # Ending

    def close(self) -> None:
        """Settles every job and detaches; the agent goes on. Idempotent."""
        if self._closing.is_set():
            return
        with self._lock:
            self._closing.set()
            connection, self._connection = self._connection, None
        self._lost.set()
        if connection is not None:
            connection.interrupt()  # whoever waits for an answer stops waiting
        self._loads.close(_CLOSE_TIMEOUT_S)
        self._saves.close(_CLOSE_TIMEOUT_S)
        if connection is not None:
            connection.close()
        self._keeper.join(_CLOSE_TIMEOUT_S)
        self.pool.close()

    def __enter__(self) -> AgentStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Checks

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise ClosedError("the client is closed: connect again")

    def _checked(self, space: Keyspace, hashes: HashArray) -> HashArray:
        self._check_open()
        if not isinstance(space, Keyspace) or self._spaces.get(space.digest) is not space:
            raise KeyspaceError(
                f"{space} was not opened by this client: use the Keyspace that open() returned"
            )
        return as_hash_array(hashes)


class AgentLease:
    """As tierkv.Lease, held by the agent for this client."""

    def __init__(
        self,
        client: AgentStore,
        connection: Connection | None,
        number: int,
        queries: list[Query],
        held: list[BoolArray],
    ) -> None:
        self._client = client
        self.connection = connection
        self.number = number
        self.queries = queries
        self.held = held
        """For each query (n,) bool: which blocks were there and are now held."""

    def _ask(self, kind: Kind, *values: Any) -> bool:
        if self.connection is None:
            return False
        try:
            return bool(self._client._ask(self.connection.submit(kind, (self.number, *values)))[0])
        except TierKVError as error:  # mostly: the lease is gone with the connection
            _note(error)
            return False

    def extend(self, ttl_s: float) -> bool:
        """Moves the deadline to `ttl_s` from now; False if the lease has ended."""
        return self._ask(Kind.EXTEND, _ttl(ttl_s))

    def release(self) -> bool:
        """Ends the lease; False if it had ended already."""
        return self._ask(Kind.RELEASE)

    def __enter__(self) -> AgentLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _note(error: TierKVError) -> None:
    """An engine goes on without the agent; why it has to is for the log."""
    level = logging.DEBUG if isinstance(error, AgentUnavailable) else logging.WARNING
    log.log(level, "the agent could not be asked: %s", error)


def _ttl(ttl_s: float) -> float:
    """What the agent takes; it has a limit of its own (max_lease_s)."""
    return min(max(ttl_s, MIN_TTL_S), MAX_TTL_S)


def _check_count(count: int) -> None:
    if count > MAX_BLOCKS:
        raise ArgumentError(f"{count} hashes: an agent is asked for at most {MAX_BLOCKS} at once")


def _release_late(connection: Connection, answer: list[Any]) -> None:
    """A lease that came when nobody waited for it any more."""
    connection.submit(Kind.RELEASE, (answer[0],))
