"""Session: one attached client, what it holds, and the requests it makes.

A session owns its client's leases and reservations, and ends them when the connection ends, however that happened:
the kernel closes a killed process's socket only after its last thread is gone, so nobody writes into a slot any more
when its reservation is given up. A client that lives but is late keeps its slots reserved, within its own limit, until
it answers: the block is given up at its deadline, the memory is not given to another block before the writer is done.

Thread safety: the session's thread receives and serves; answers may be sent from any thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import msgspec
import numpy as np

from tierkv.agent.aside import Aside
from tierkv.agent.channel import Channel, Disconnected
from tierkv.agent.protocol import (
    ANSWERS,
    MAX_TTL_S,
    REFUSAL,
    REQUESTS,
    Kind,
    ProtocolError,
    decode_body,
    encode,
    unpack_queries,
)
from tierkv.clock import Clock, SystemClock
from tierkv.config import AgentConfig
from tierkv.errors import ArgumentError, KeyspaceError, TierKVError
from tierkv.jobs import Job
from tierkv.keys import Keyspace, KeyspaceSpec
from tierkv.memory import slot_bytes_for
from tierkv.store import ChangePlace, Lease, Reservation, Store, StoreStats
from tierkv.store.checks import check_part
from tierkv.types import NO_SLOT, SLOT_GRANULE_BYTES, BlockStatus, SlotArray

log = logging.getLogger("tierkv.agent")

HELLO_TIMEOUT_S = 10.0
MESSAGE_TIMEOUT_S = 30.0
MAX_LEASES = 4096
MAX_RESERVATIONS = 4096
MAX_KEYSPACES = 1024
_STAGED_BLOCKS = 512
_STAGED_BYTES = 64 << 20
_ARENA_SHARE = 32
"""Blocks of one request, and at most this share of the arena, that are brought to DRAM at a time."""


class LimitError(TierKVError):
    """A client asked for more than one client may hold."""


class _Leases:
    """Leases of one client and the bytes of the blocks that they hold. Under the session's lock."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self._held: dict[int, tuple[Lease, int, float]] = {}

    def add(self, lease: Lease, blocks: int, size_bytes: int, now_s: float, deadline_s: float) -> bool:
        """False if that is more than the client may hold: a single block, however large, it always may."""
        if self._is_full(blocks, size_bytes):
            # What ended by itself, without a word, does not count.
            for number in [number for number, (_, _, end_s) in self._held.items() if end_s <= now_s]:
                self.pop(number)
            if self._is_full(blocks, size_bytes):
                return False
        self._held[lease.number] = (lease, size_bytes, deadline_s)
        self.size_bytes += size_bytes
        return True

    def _is_full(self, blocks: int, size_bytes: int) -> bool:
        over = self.size_bytes + size_bytes > self.max_bytes
        return (over and (self.size_bytes > 0 or blocks > 1)) or len(self._held) >= MAX_LEASES

    def get(self, number: int) -> Lease | None:
        return self._held[number][0] if number in self._held else None

    def extend(self, number: int, deadline_s: float) -> None:
        if number in self._held:
            lease, size_bytes, _ = self._held[number]
            self._held[number] = (lease, size_bytes, deadline_s)

    def pop(self, number: int) -> Lease | None:
        lease, size_bytes, _ = self._held.pop(number, (None, 0, 0.0))
        self.size_bytes -= size_bytes
        return lease

    def take_all(self) -> list[Lease]:
        leases = [lease for lease, _, _ in self._held.values()]
        self._held.clear()
        self.size_bytes = 0
        return leases


class Session:
    """Serves one client until it goes."""

    def __init__(
        self,
        store: Store,
        config: AgentConfig,
        channel: Channel,
        peer: str,
        slow: Executor,
        stats: Callable[[], StoreStats] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`stats`: what STATS is answered with; the store's, if None. `clock`: the store's, for deadlines of leases."""
        self._store = store
        self._config = config
        self._channel = channel
        self.peer = peer
        self.name = peer
        self._slow = slow
        self._waiting: deque[Callable[[], None]] = deque()
        self._clock = clock or SystemClock()
        self._all_stats = stats or store.stats
        self._lock = threading.Lock()
        self._ended = False
        self._under_way = 0
        self._spaces: dict[int, Keyspace] = {}
        self._reservations: dict[int, tuple[Reservation, int]] = {}
        self._reserved_bytes = 0
        self._last_reservation = 0
        self._number = 0
        self._aside: Aside | None = None
        arena_bytes = store.arena.size_bytes
        self._max_reserved_bytes = config.max_reserved_bytes or arena_bytes // 4
        max_leased_bytes = config.max_leased_bytes or arena_bytes // 2
        self._leases = _Leases(max_leased_bytes)
        # Apart, so that a client can load what it has leased; half, so that it cannot hold all of DRAM with both.
        self._loads = _Leases(max_leased_bytes // 2)
        self._handlers: dict[Kind, Callable[[int, list[Any]], None]] = {
            Kind.OPEN: self._open,
            Kind.MATCH: self._match,
            Kind.LOOKUP: self._lookup,
            Kind.LEASE: self._lease,
            Kind.EXTEND: self._extend,
            Kind.RELEASE: self._release,
            Kind.STAGE: self._stage,
            Kind.RESERVE: self._reserve,
            Kind.COMMIT: self._commit,
            Kind.ACQUIRE: self._acquire,
            Kind.TOUCH: self._touch,
            Kind.REMOVE: self._remove,
            Kind.CLEAR: self._clear,
            Kind.FLUSH: self._flush,
            Kind.STATS: self._stats,
            Kind.CHANGES: self._changes,
        }

    @property
    def reserved_bytes(self) -> int:
        return self._reserved_bytes

    @property
    def leased_bytes(self) -> int:
        return self._leases.size_bytes + self._loads.size_bytes

    # The conversation

    def run(self) -> None:
        """Serves until the client goes; then gives back all it held. Never raises."""
        try:
            self._greet()
            while True:
                header, body, _ = self._channel.receive(wait_s=None, message_s=MESSAGE_TIMEOUT_S)
                self._serve(header.kind, header.request, body)
        except Disconnected as reason:
            log.info("%s: %s", self.name, reason)
        except ProtocolError as error:
            log.warning("%s: disconnected: %s", self.name, error)
        except Exception:  # one client's session must not take the agent with it
            log.exception("%s: disconnected after an error", self.name)
        finally:
            # First: a client that finds its connection open after a copy relies on its leases (moving.py).
            self._channel.interrupt()
            self._give_all_back()
            if self._aside is not None:
                self._aside.close()
            self._channel.close()

    def interrupt(self) -> None:
        """Makes run() end."""
        self._channel.interrupt()

    def _greet(self) -> None:
        header, body, _ = self._channel.receive(wait_s=HELLO_TIMEOUT_S, message_s=HELLO_TIMEOUT_S)
        if header.kind != Kind.HELLO:
            raise ProtocolError(f"the first message was {header.kind.name}, not HELLO")
        (client,) = decode_body(REQUESTS[Kind.HELLO], body)
        self.name = f"{client[:64]} ({self.peer})"
        arena = self._store.arena
        # Another clock's seconds are not the client's.
        lease_s = min(self._config.max_lease_s, MAX_TTL_S) if isinstance(self._clock, SystemClock) else 0.0
        self._aside = aside = Aside(self._config.store.staging_bytes)
        limits = self._max_reserved_bytes, self._loads.max_bytes
        values = ("tierkv", arena.size_bytes, aside.size_bytes, *limits, lease_s)
        message = encode(Kind.ANSWER, header.request, ANSWERS[Kind.HELLO], values)
        # Where DRAM is kept over a restart, the descriptor tells as long as this client may write what it reserved.
        self._number, arena_fd = self._store.new_session()
        try:
            self._channel.send(message, fds=[arena_fd, aside.fd], patient=True)
        finally:
            os.close(arena_fd)
        log.info("%s: attached", self.name)

    def _serve(self, kind: Kind, request: int, body: memoryview) -> None:
        handler = self._handlers.get(kind)
        if handler is None:
            raise ProtocolError(f"{kind.name} is not a request of an attached client")
        values = decode_body(REQUESTS[kind], body)
        with self._lock:
            if self._under_way >= self._config.max_requests:
                self._refuse(
                    request, LimitError(f"{self._under_way} requests are under way: wait for answers")
                )
                return
            self._under_way += 1
        try:
            handler(request, values)
        except TierKVError as error:
            self._done(request, error)

    def _answer(self, kind: Kind, request: int, *values: Any) -> None:
        """Answers a request; from any thread, never waiting for the client."""
        with self._lock:
            self._under_way -= 1
        try:
            self._channel.send(encode(Kind.ANSWER, request, ANSWERS[kind], values))
        except Disconnected:
            pass  # run() notices too, and gives back what the client held

    def _done(self, request: int, error: TierKVError) -> None:
        with self._lock:
            self._under_way -= 1
        self._refuse(request, error)

    def _refuse(self, request: int, error: TierKVError) -> None:
        try:
            self._channel.send(encode(Kind.REFUSAL, request, REFUSAL, (type(error).__name__, str(error))))
        except Disconnected:
            pass  # as above

    def _later(self, request: int, work: Callable[[], None]) -> None:
        """Runs what may take long on another thread, one such request of a client at a time: its others wait."""

        def run() -> None:
            try:
                work()
            except TierKVError as error:
                self._done(request, error)
            except Exception as error:  # the client waits for an answer
                log.exception("%s: a request failed", self.name)
                self._done(request, TierKVError(f"the agent failed: {error!r}"))
            finally:
                with self._lock:
                    self._waiting.popleft()
                    following = self._waiting[0] if self._waiting and not self._ended else None
                if following is not None:
                    self._submit_slow(following)

        with self._lock:
            self._waiting.append(run)
            if len(self._waiting) > 1:
                return
        self._submit_slow(run)

    def _submit_slow(self, run: Callable[[], None]) -> None:
        try:
            self._slow.submit(run)
        except RuntimeError:  # the agent ends, and this connection with it
            log.debug("%s: the agent ends before a request is served", self.name)

    def _space(self, number: int) -> Keyspace:
        space = self._spaces.get(number)
        if space is None:
            raise KeyspaceError(f"keyspace {number} was not opened on this connection: send OPEN first")
        return space

    # Looking up

    def _open(self, request: int, values: list[Any]) -> None:
        if len(self._spaces) >= MAX_KEYSPACES:
            raise LimitError(f"a client may open {MAX_KEYSPACES} keyspaces")
        space = self._store.open(KeyspaceSpec.from_json(values[0]))
        self._spaces[space.number] = space
        self._answer(Kind.OPEN, request, space.number)

    def _match(self, request: int, values: list[Any]) -> None:
        space, hashes = self._space(values[0]), values[1]
        self._answer(Kind.MATCH, request, self._store.match(space, hashes).tiers)

    def _lookup(self, request: int, values: list[Any]) -> None:
        queries = [(self._space(number), hashes) for number, hashes in unpack_queries(*values)]
        masks = self._store.lookup(queries)
        self._answer(Kind.LOOKUP, request, np.concatenate([np.empty(0, np.uint8), *masks]))

    def _touch(self, request: int, values: list[Any]) -> None:
        number, reused, hashes = values
        self._store.touch(self._space(number), hashes, reused=bool(reused))
        self._answer(Kind.TOUCH, request)

    def _changes(self, request: int, values: list[Any]) -> None:
        numbers, feed, after, count = values
        spaces = [self._space(number) for number in numbers.tolist()]
        found = self._store.changes(spaces, ChangePlace(feed, after) if feed else None, count)
        self._answer(
            Kind.CHANGES, request, found.place.feed, found.place.number, int(found.complete), found.spaces,
            found.hashes, found.tiers,
        )  # fmt: skip

    # Leases

    def _keep(self, leases: _Leases, lease: Lease, ttl_s: float) -> int:
        """Takes a lease into the client's account, or ends it and raises LimitError."""
        blocks = sum(int(np.count_nonzero(held)) for held in lease.held)
        size = sum(
            int(np.count_nonzero(held)) * slot_bytes_for(space.block_bytes)
            for (space, _), held in zip(lease.queries, lease.held, strict=True)
        )
        now_s = self._clock.monotonic_s()
        with self._lock:
            kept = not self._ended and leases.add(lease, blocks, size, now_s, now_s + ttl_s)
        if not kept:
            lease.release()
            raise LimitError(
                f"{size} bytes more than the {leases.size_bytes} that are held by leases: one client may hold "
                f"{leases.max_bytes} bytes in {MAX_LEASES} leases; release some, or raise max_leased_bytes"
            )
        return lease.number

    def _find(self, number: int) -> Lease | None:
        with self._lock:
            return self._leases.get(number) or self._loads.get(number)

    def _drop(self, number: int) -> Lease | None:
        with self._lock:
            return self._leases.pop(number) or self._loads.pop(number)

    def _lease(self, request: int, values: list[Any]) -> None:
        ttl_s = min(values[0], self._config.max_lease_s)
        queries = [(self._space(number), hashes) for number, hashes in unpack_queries(*values[1:])]
        lease = self._store.lease(queries, ttl_s)
        number = self._keep(self._leases, lease, ttl_s)
        held = np.concatenate([np.empty(0, np.uint8), *(flags.view(np.uint8) for flags in lease.held)])
        self._answer(Kind.LEASE, request, number, held)

    def _extend(self, request: int, values: list[Any]) -> None:
        lease = self._find(values[0])
        ttl_s = min(values[1], self._config.max_lease_s)
        now_s = self._clock.monotonic_s()
        alive = lease is not None and lease.extend(ttl_s)
        if alive:
            with self._lock:
                self._leases.extend(values[0], now_s + ttl_s)
                self._loads.extend(values[0], now_s + ttl_s)
            if self._aside is not None:
                self._aside.extend(values[0], now_s + ttl_s)
        else:
            self._drop(values[0])
        self._answer(Kind.EXTEND, request, int(alive))

    def _release(self, request: int, values: list[Any]) -> None:
        lease = self._drop(values[0])
        alive = lease is not None and lease.release()
        if self._aside is not None:
            self._aside.give_back(values[0])
        self._answer(Kind.RELEASE, request, int(alive))

    def _stage(self, request: int, values: list[Any]) -> None:
        lease = self._find(values[0])
        if lease is None:
            raise ArgumentError(f"lease {values[0]} is not one of this client, or has ended")
        job = self._store.stage(lease, values[1] or None, make_room=True)
        job.add_done_callback(lambda done: self._answer(Kind.STAGE, request, done.status))

    # Saving: reserve, write into the slots, commit

    def _reserve(self, request: int, values: list[Any]) -> None:
        number, part, timeout_s, hashes = values
        space = self._space(number)
        slot_bytes = slot_bytes_for(space.block_bytes)
        with self._lock:
            if len(self._reservations) >= MAX_RESERVATIONS:
                raise LimitError(f"a client may hold {MAX_RESERVATIONS} reservations: commit some")
            fits = min(len(hashes), max(0, self._max_reserved_bytes - self._reserved_bytes) // slot_bytes)
            if not self._reserved_bytes:
                fits = max(fits, min(1, len(hashes)))  # one block, however large, or it could never be saved
            if not fits and len(hashes):
                raise LimitError(
                    f"{self._reserved_bytes} bytes are reserved, one client may hold {self._max_reserved_bytes}: "
                    f"commit some, or raise max_reserved_bytes"
                )
            size = fits * slot_bytes
            self._reserved_bytes += size
            self._last_reservation += 1
            own = self._last_reservation
        try:
            reservation = self._store.reserve(
                space, hashes[:fits], part, timeout_s or None, session=self._number
            )
        except BaseException:
            with self._lock:
                self._reserved_bytes -= size
            raise
        with self._lock:
            self._reservations[own] = (reservation, size)

        def granted(job: Job) -> None:
            self._answer(Kind.RESERVE, request, own, job.status, _offsets(reservation.slots))

        reservation.job.add_done_callback(granted)

    def _commit(self, request: int, values: list[Any]) -> None:
        status = self._end_reservation(values[0], written=bool(values[1]))
        if status is None:
            raise ArgumentError(f"reservation {values[0]} is not one of this client, or has ended")
        self._answer(Kind.COMMIT, request, status)

    def _end_reservation(self, number: int, *, written: bool) -> np.ndarray | None:
        """Ends a reservation; None if there is none of this number. Its bytes count until its slots are given back."""
        with self._lock:
            reservation, size = self._reservations.pop(number, (None, 0))
        if reservation is None:
            return None

        def give_back(_: Job) -> None:
            reservation.abort()
            with self._lock:
                self._reserved_bytes -= size

        if (
            not reservation.job.done()
        ):  # the slots are still to be granted: they are given back when they come
            reservation.job.add_done_callback(give_back)
            return np.full(reservation.job.count, BlockStatus.CANCELLED, np.uint8)
        status = reservation.commit() if written else reservation.job.status
        give_back(reservation.job)
        return status

    # Loading: the blocks are leased and brought to DRAM, the client copies them and releases the lease

    def _acquire(self, request: int, values: list[Any]) -> None:
        number, part, timeout_s, hashes = values
        space, ttl_s = self._space(number), self._config.max_lease_s
        check_part(space, part)
        lease = self._store.lease([(space, hashes)], ttl_s)
        slots = self._store.dram_slots(lease, space, hashes)
        all_there = bool(((slots != NO_SLOT) == lease.held[0]).all())
        few = self._staged_blocks(space)
        if not all_there and len(hashes) > few:  # so that the client copies these while the next are brought
            lease.release()
            hashes = hashes[:few]
            lease = self._store.lease([(space, hashes)], ttl_s)
        until_s = self._clock.monotonic_s() + ttl_s
        own = self._keep(self._loads, lease, ttl_s)
        if all_there:  # the client goes on while this load is counted
            status = np.where(lease.held[0], np.uint8(BlockStatus.OK), np.uint8(BlockStatus.MISS))
            self._answer(Kind.ACQUIRE, request, own, status, _offsets(slots))
            with contextlib.suppress(TierKVError):  # the store is being closed
                self._store.stage(lease, timeout_s or None, load_part=part)
            return
        deadline_s = time.monotonic() + (timeout_s or self._config.store.load_timeout_s)
        job = self._store.stage(lease, timeout_s or None, make_room=True, load_part=part)

        def staged(done: Job) -> None:
            status = done.status.copy()
            try:
                slots = self._store.dram_slots(lease, space, hashes)
            except TierKVError:  # the store has been closed, and with it this connection
                return
            # Brought to DRAM and evicted again before it was held: as if there had been no room.
            status[(status == BlockStatus.OK) & (slots == NO_SLOT)] = BlockStatus.NO_SPACE
            slots[status != BlockStatus.OK] = NO_SLOT
            offsets = _offsets(slots)

            def answer() -> None:
                self._answer(Kind.ACQUIRE, request, own, status, offsets)

            left_s = deadline_s - time.monotonic()
            if left_s > 0 and (status == BlockStatus.NO_SPACE).any():
                self._load_aside(own, until_s, space, hashes, part, left_s, status, offsets, answer)
            else:
                answer()

        job.add_done_callback(staged)

    def _staged_blocks(self, space: Keyspace) -> int:
        """How many blocks are brought to DRAM for one request of a client's."""
        size_bytes = min(_STAGED_BYTES, self._store.arena.size_bytes // _ARENA_SHARE)
        return max(1, min(_STAGED_BLOCKS, size_bytes // slot_bytes_for(space.block_bytes)))

    def _load_aside(
        self,
        lease: int,
        until_s: float,
        space: Keyspace,
        hashes: np.ndarray,
        part: int,
        timeout_s: float,
        status: np.ndarray,
        offsets: np.ndarray,
        answer: Callable[[], None],
    ) -> None:
        """Brings blocks that found no room in DRAM (NO_SPACE) to the memory beside it, as far as it goes, and puts what
        became of them into `status` and `offsets`; then, or if another load has that memory, calls answer()."""
        aside, arena_bytes = self._aside, self._store.arena.size_bytes
        if aside is None or not aside.take(lease, until_s, self._clock.monotonic_s()):
            answer()
            return
        lacking = np.flatnonzero(status == BlockStatus.NO_SPACE)
        into, places = aside.room(space, part, len(lacking))
        lacking = lacking[: len(places)]

        def loaded(done: Job) -> None:
            aside.filled()
            status[lacking] = done.status
            good = done.status == BlockStatus.OK
            offsets[lacking[good]] = arena_bytes + places[good]
            answer()

        try:
            job = self._store.load(space, np.ascontiguousarray(hashes[lacking]), into, part, timeout_s)
        except TierKVError as error:  # the store is being closed
            log.debug("%s: %s", self.name, error)
            aside.filled()
            answer()
            return
        job.add_done_callback(loaded)

    # The rest

    def _remove(self, request: int, values: list[Any]) -> None:
        space, hashes = self._space(values[0]), values[1]
        self._later(request, lambda: self._answer(Kind.REMOVE, request, self._store.remove(space, hashes)))

    def _clear(self, request: int, values: list[Any]) -> None:
        space, timeout_s = self._space(values[0]), values[1] or 30.0
        self._later(request, lambda: self._answer(Kind.CLEAR, request, self._store.clear(space, timeout_s)))

    def _flush(self, request: int, values: list[Any]) -> None:
        timeout_s = values[0] or 60.0
        self._later(request, lambda: self._answer(Kind.FLUSH, request, int(self._store.flush(timeout_s))))

    def _stats(self, request: int, values: list[Any]) -> None:
        self._answer(Kind.STATS, request, msgspec.json.encode(self._all_stats()).decode())

    def _give_all_back(self) -> None:
        with self._lock:
            self._ended = True
            leases = [*self._leases.take_all(), *self._loads.take_all()]
            reservations = list(self._reservations)
        for lease in leases:
            lease.release()
        for number in reservations:
            self._end_reservation(number, written=False)


def _offsets(slots: SlotArray) -> np.ndarray:
    """(n,) int64: where slots lie in the arena, -1 for NO_SLOT."""
    return np.where(slots == NO_SLOT, -1, slots.astype(np.int64) * SLOT_GRANULE_BYTES)
