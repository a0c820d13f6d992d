"""Mover: a client's loads or saves, copied between the engine's memory and the agent's arena in the background.

A request goes through in chunks, a few ahead: while one is copied, the agent brings the next ones. A load counts when
the lease was held until after the copy: that is certain while its time has not passed and the connection is open, else
the agent confirms it. A save counts when its commit is answered.

Thread safety: any thread may submit. Each mover has its own threads and one bounded queue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tierkv._native import CopyPool
from tierkv.agent.connection import AgentUnavailable, Connection, LimitReached, answer_of
from tierkv.agent.protocol import MAX_BLOCKS, MAX_TIMEOUT_S, Kind
from tierkv.errors import TierKVError
from tierkv.fragments import Fragments
from tierkv.jobs import Job
from tierkv.keys import Keyspace
from tierkv.memory import slot_bytes_for
from tierkv.types import BlockStatus, HashArray

log = logging.getLogger("tierkv.client")

MAX_QUEUED_BLOCKS = 65536
_LOAD_BLOCKS, _LOAD_BYTES, _LOAD_SHARE = 4096, 256 << 20, 16
_SAVE_BLOCKS, _SAVE_BYTES, _SAVE_SHARE = 512, 128 << 20, 32
"""The most that is asked for at once, and at most such a share of the arena, so that what is in flight stays within a
client's limits. What must be brought to DRAM for a load the agent brings in smaller pieces."""
_LOADS_IN_FLIGHT = 4
"""Of a client: two of each thread."""
_LOADS_AHEAD, _SAVES_AHEAD = 1, 2
"""Pieces that are asked for while one is copied."""
_GRACE_S = 1.0
"""How much longer than a job's own deadline its answer is waited for."""
_LIMIT_PAUSE_S = 0.005
_ROOM_PATIENCE_S = 2.0
"""How long a load waits for room in the arena, when all of it is in use, before it does without the block."""

Where = np.ndarray
"""Positions of a request's blocks."""


class Client(Protocol):
    """What a mover needs of the client it moves for."""

    @property
    def pool(self) -> CopyPool: ...

    def connection(self) -> Connection: ...

    def number(self, connection: Connection, space: Keyspace) -> int: ...


@dataclass(slots=True, eq=False)
class _Request:
    space: Keyspace
    hashes: HashArray
    fragments: Fragments
    part: int
    job: Job
    deadline_s: float
    room_until_s: float = 0.0
    """Until when room in the arena is waited for; 0: it was not lacking yet."""


class Mover:
    """`way` is 'load' or 'save'."""

    def __init__(self, client: Client, way: str, threads: int) -> None:
        self._client = client
        self._move = self._load if way == "load" else self._save
        self._lost = BlockStatus.TIMEOUT if way == "load" else BlockStatus.DROPPED
        self._condition = threading.Condition()
        self._queue: deque[_Request] = deque()
        self._queued_blocks = 0
        self._running = 0
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"tierkv-client-{way}", daemon=True)
            for _ in range(threads)
        ]
        self._threads.append(
            threading.Thread(target=self._expire, name=f"tierkv-client-{way}-late", daemon=True)
        )
        for thread in self._threads:
            thread.start()

    def submit(
        self, space: Keyspace, hashes: HashArray, fragments: Fragments, part: int, timeout_s: float
    ) -> Job:
        """Queues a request; what the queue has no place for ends at once."""
        job = Job(len(hashes))
        if job.done():
            return job
        with self._condition:
            full = self._closing or self._queued_blocks + len(hashes) > MAX_QUEUED_BLOCKS
            if not full:
                self._queue.append(
                    _Request(space, hashes, fragments, part, job, time.monotonic() + timeout_s)
                )
                self._queued_blocks += len(hashes)
                self._condition.notify_all()
        if full:
            job.settle_rest(self._lost)
        return job

    def wait_idle(self, deadline_s: float) -> bool:
        """Waits until nothing is queued or moving; False at the deadline (time.monotonic())."""
        with self._condition:
            return self._condition.wait_for(
                lambda: not self._queue and not self._running, max(0.0, deadline_s - time.monotonic())
            )

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._queue:
                    if self._closing:
                        return
                    self._condition.wait(5.0)
                request = self._queue.popleft()
                self._running += 1
            try:
                if not self._closing:
                    self._move(request)
            except AgentUnavailable as error:
                log.info("%s", error)
            except TierKVError as error:
                log.warning("the agent refused: %s", error)
            except Exception:  # the thread must survive; what is open is settled below
                log.exception("moving blocks failed")
            finally:
                request.job.settle_rest(BlockStatus.CANCELLED if self._closing else self._lost)
                with self._condition:
                    self._queued_blocks -= len(request.hashes)
                    self._running -= 1
                    self._condition.notify_all()

    def _expire(self) -> None:
        """The thread that settles what is still queued at its deadline: those in front may wait for a stuck agent."""
        while True:
            late: list[_Request] = []
            with self._condition:
                if self._closing:
                    return
                now_s = time.monotonic()
                late = [request for request in self._queue if request.deadline_s <= now_s]
                for request in late:
                    self._queue.remove(request)
                    self._queued_blocks -= len(request.hashes)
                if not late:
                    earliest_s = min((request.deadline_s for request in self._queue), default=now_s + 5.0)
                    self._condition.wait(max(0.001, min(5.0, earliest_s - now_s)))
            for request in late:
                request.job.settle_rest(BlockStatus.TIMEOUT)

    def _pause(self, request: _Request) -> None:
        """After a refusal for a limit: what this client holds elsewhere may end soon."""
        if time.monotonic() >= request.deadline_s:
            raise AgentUnavailable("the agent's limit for this client was reached until the deadline")
        with self._condition:
            self._condition.wait(_LIMIT_PAUSE_S)

    def _check(
        self, connection: Connection, request: _Request, where: Where, answer: list[Any], aside_bytes: int = 0
    ) -> None:
        """Raises TierKVError unless the agent's answer lies within the piece that was asked for, and the arena or
        `aside_bytes` beside it."""
        _, status, offsets = answer
        arena_bytes = connection.arena.size_bytes
        inside = offsets <= arena_bytes - request.space.block_bytes
        last = arena_bytes + aside_bytes - request.space.part_bytes[request.part]
        inside |= (offsets >= arena_bytes) & (offsets <= last)
        if not (
            len(status) == len(offsets) <= len(where)
            and (len(status) or not len(where))
            and bool(inside.all())
        ):
            raise TierKVError(
                f"the agent answered for {len(status)} of {len(where)} blocks, or beyond its arena"
            )

    # Loading

    def _load(self, request: _Request) -> None:
        connection = self._client.connection()
        number = self._client.number(connection, request.space)
        share = connection.arena.size_bytes // _LOAD_SHARE, connection.max_load_bytes // _LOADS_IN_FLIGHT
        step = _piece_blocks(request.space, _LOAD_BLOCKS, min(_LOAD_BYTES, *share))
        todo = _pieces(len(request.hashes), step)
        acquired: deque[tuple[Where, float, Future[list[Any]]]] = deque()
        released: deque[tuple[np.ndarray, Future[list[Any]]]] = deque()
        ahead, in_pieces = _LOADS_AHEAD, len(todo) > 1

        def ask(most: int) -> None:
            while todo and len(acquired) < most:
                where = todo.popleft()
                asked_s = time.monotonic()
                acquired.append((where, asked_s, self._acquire(connection, number, request, where)))

        try:
            while todo or acquired:
                ask(1 + ahead)
                where, asked_s, future = acquired.popleft()
                try:
                    answer = _answer(future, request.deadline_s)
                except LimitReached:
                    while released:
                        self._settle_released(request, *released.popleft())
                    todo.appendleft(where)
                    ahead = 0  # or what was granted for later pieces would keep this one from its turn
                    if not acquired:
                        self._pause(request)
                    continue
                self._check(connection, request, where, answer, connection.aside.size_bytes)
                where, rest = where[: len(answer[1])], where[len(answer[1]) :]
                again = self._without_room(request, where, answer)
                ahead = 0 if len(again) else _LOADS_AHEAD
                if len(rest):
                    todo.appendleft(rest)
                    in_pieces = True
                ask(ahead)  # it is brought to DRAM while this one is copied
                unsure = self._copy_out(connection, request, where, asked_s, answer, again)
                if len(unsure[0]):
                    released.append(unsure)
                while len(released) > _LOADS_AHEAD:
                    self._settle_released(request, *released.popleft())
                if len(again):
                    todo.append(again)
                    if len(again) == len(where) and not acquired:
                        self._pause(request)
            if in_pieces:  # the chain's head is the most recent again
                connection.submit(Kind.TOUCH, (number, 0, request.hashes[:MAX_BLOCKS]))
        finally:
            for _, _, future in acquired:
                if not future.cancel():  # answered: release what it holds
                    future.add_done_callback(lambda done: _undo(connection, done, _release))
            while released:
                self._settle_released(request, *released.popleft())

    def _acquire(
        self, connection: Connection, number: int, request: _Request, where: Where
    ) -> Future[list[Any]]:
        values = (number, request.part, _left_s(request), request.hashes[where])
        return connection.submit(Kind.ACQUIRE, values, undo=_release)

    def _without_room(self, request: _Request, where: Where, answer: list[Any]) -> Where:
        """The blocks that found no room in the arena, or lost it again at once, and are to be asked for again."""
        _, status, offsets = answer
        lacking = (status == BlockStatus.NO_SPACE) | ((status == BlockStatus.OK) & (offsets < 0))
        again: np.ndarray = where[lacking]
        now_s = time.monotonic()
        if not lacking.all():
            request.room_until_s = 0.0  # it goes on
        if len(again) and not request.room_until_s:
            request.room_until_s = now_s + _ROOM_PATIENCE_S
        return again if now_s < request.room_until_s else again[:0]

    def _copy_out(
        self,
        connection: Connection,
        request: _Request,
        where: Where,
        asked_s: float,
        answer: list[Any],
        again: Where,
    ) -> tuple[np.ndarray, Future[list[Any]]]:
        """Copies what is in the arena and releases it: (positions that only the release can tell of, its future)."""
        lease, status, offsets = answer
        there = (status == BlockStatus.OK) & (offsets >= 0)
        copied = where[there]
        held = False
        try:
            if time.monotonic() >= request.deadline_s:
                copied = copied[:0]
            elif len(copied):
                into = request.fragments
                arena_bytes, in_part = connection.arena.size_bytes, request.space.part_offset(request.part)
                with connection.mapped() as (arena, aside):
                    offsets = offsets[there]
                    in_arena, beside = offsets + (arena + in_part), offsets + (aside - arena_bytes)
                    sources = np.where(offsets < arena_bytes, in_arena, beside)
                    blocks = np.ascontiguousarray(into.block_ids[copied])
                    self._client.pool.scatter(into.bases, into.strides, into.lengths, blocks, sources)
                held = connection.holds_since(asked_s)
        finally:
            future = connection.submit(Kind.RELEASE, (lease,))
        lost = status.copy()
        lost[status == BlockStatus.OK] = BlockStatus.MISS
        lost[status == BlockStatus.NO_SPACE] = BlockStatus.TIMEOUT
        settled = ~there & ~np.isin(where, again)
        request.job.settle(where[settled], lost[settled])
        if held:
            request.job.settle(copied, BlockStatus.OK)
            copied = copied[:0]
        return copied, future

    def _settle_released(self, request: _Request, copied: np.ndarray, future: Future[list[Any]]) -> None:
        """What was copied is good if the lease was still held afterwards."""
        try:
            held = bool(_answer(future, request.deadline_s)[0])
        except TierKVError:
            held = False
        request.job.settle(copied, BlockStatus.OK if held else BlockStatus.TIMEOUT)

    # Saving

    def _save(self, request: _Request) -> None:
        connection = self._client.connection()
        number = self._client.number(connection, request.space)
        share = connection.arena.size_bytes // _SAVE_SHARE
        step = _piece_blocks(request.space, _SAVE_BLOCKS, min(_SAVE_BYTES, share))
        todo = _pieces(len(request.hashes), step)
        reserved: deque[tuple[Where, Future[list[Any]]]] = deque()
        committed: deque[tuple[np.ndarray, Future[list[Any]]]] = deque()
        ahead = _SAVES_AHEAD
        try:
            while todo or reserved:
                while todo and len(reserved) <= ahead:
                    where = todo.popleft()
                    reserved.append((where, self._reserve(connection, number, request, where)))
                where, future = reserved.popleft()
                try:
                    answer = _answer(future, request.deadline_s)
                except LimitReached:
                    while committed:
                        self._settle_committed(request, *committed.popleft())
                    todo.appendleft(where)
                    ahead = 0  # or what was granted for later pieces would keep this one from its turn
                    if not reserved:
                        self._pause(request)
                    continue
                self._check(connection, request, where, answer)
                committed.append(self._copy_in(connection, request, where, answer))
                granted = len(answer[1])
                if len(request.hashes) > step and granted:
                    # A later piece must not push the chain's head out: up to here it is the most recent, head first.
                    so_far = request.hashes[: int(where[granted - 1]) + 1]
                    connection.submit(Kind.TOUCH, (number, 0, so_far[:MAX_BLOCKS]))
                ahead = _SAVES_AHEAD if granted == len(where) else 0
                if granted < len(where):  # the agent took only the first ones for now
                    todo.appendleft(where[granted:])
                while len(committed) > _SAVES_AHEAD:
                    self._settle_committed(request, *committed.popleft())
        finally:
            for _, future in reserved:
                if not future.cancel():
                    future.add_done_callback(lambda done: _undo(connection, done, _give_up))
            while committed:
                self._settle_committed(request, *committed.popleft())

    def _reserve(
        self, connection: Connection, number: int, request: _Request, where: Where
    ) -> Future[list[Any]]:
        values = (number, request.part, _left_s(request), request.hashes[where])
        return connection.submit(Kind.RESERVE, values, undo=_give_up)

    def _copy_in(
        self, connection: Connection, request: _Request, where: Where, answer: list[Any]
    ) -> tuple[np.ndarray, Future[list[Any]]]:
        """Copies into the granted slots and commits: (positions, future of their statuses)."""
        reservation, status, offsets = answer
        positions = where[: len(status)]
        granted = (status == BlockStatus.OK) & (offsets >= 0)
        written = 0
        try:
            if time.monotonic() < request.deadline_s:
                source = request.fragments
                with connection.mapped() as (address, _):
                    slots = offsets[granted] + (address + request.space.part_offset(request.part))
                    blocks = np.ascontiguousarray(source.block_ids[positions[granted]])
                    self._client.pool.gather(source.bases, source.strides, source.lengths, blocks, slots)
                written = 1
        finally:
            future = connection.submit(Kind.COMMIT, (reservation, written))
        if not written:
            request.job.settle(positions[granted], BlockStatus.TIMEOUT)
        return positions, future

    def _settle_committed(self, request: _Request, positions: np.ndarray, future: Future[list[Any]]) -> None:
        try:
            request.job.settle(positions, _answer(future, request.deadline_s)[0])
        except TierKVError:
            request.job.settle(positions, BlockStatus.DROPPED)

    def close(self, timeout_s: float) -> None:
        """Ends the threads; the connection must be interrupted. What is queued is settled as CANCELLED."""
        with self._condition:
            self._closing = True
            abandoned, self._queue = list(self._queue), deque()
            self._condition.notify_all()
        for request in abandoned:
            request.job.settle_rest(BlockStatus.CANCELLED)
        for thread in self._threads:
            thread.join(timeout_s)


def _answer(future: Future[list[Any]], deadline_s: float) -> list[Any]:
    """The answer of a request; AgentUnavailable if it is later than the deadline and a little."""
    return answer_of(future, deadline_s + _GRACE_S - time.monotonic())


def _piece_blocks(space: Keyspace, most_blocks: int, most_bytes: int) -> int:
    return max(1, min(most_blocks, most_bytes // slot_bytes_for(space.block_bytes)))


def _pieces(count: int, step: int) -> deque[Where]:
    return deque(np.arange(start, min(start + step, count)) for start in range(0, count, step))


def _left_s(request: _Request) -> float:
    return min(MAX_TIMEOUT_S, max(0.001, request.deadline_s - time.monotonic()))


def _release(connection: Connection, answer: list[Any]) -> None:
    connection.submit(Kind.RELEASE, (answer[0],))


def _give_up(connection: Connection, answer: list[Any]) -> None:
    connection.submit(Kind.COMMIT, (answer[0], 0))


def _undo(connection: Connection, done: Future[list[Any]], undo: Any) -> None:
    """Undoes an answer that came although its request was given up."""
    if done.exception() is None:
        try:
            undo(connection, done.result(0))
        except AgentUnavailable:
            pass  # the agent gave everything back when the connection ended
