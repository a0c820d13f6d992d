"""Saver: takes blocks from the caller's memory into DRAM, on a thread of its own behind a bounded queue.

A save never fails or blocks its caller: what does not fit in the queue, or finds no room by its deadline, is
dropped and counted. Blocks that the store knows are only made most recently used.

A reservation is a save whose bytes somebody else writes: it gets the slots, and ends with commit() or abort(). Until
then its pins keep the slots from being given to other blocks, even when the deadline has passed meanwhile and the
block was given up: a late writer can only reach a slot that is still its own, and its commit is refused.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from tierkv import placement
from tierkv._native import RESERVE_BUSY, RESERVE_JOINED, RESERVE_KNOWN, RESERVE_NEW, RESERVE_NO_SLOT
from tierkv.fragments import Fragments
from tierkv.jobs import Job
from tierkv.keys import Keyspace
from tierkv.memory import slot_bytes_for
from tierkv.store.core import NO_SLOTS, Core, chunk_blocks, log, select
from tierkv.store.room import Room
from tierkv.store.writing import Writers
from tierkv.types import NO_SLOT, BlockStatus, HashArray, SlotArray, TierKind, UInt8Array, UInt32Array

_CHUNK_BLOCKS = 128
_CHUNK_BYTES = 256 << 20
_DRAM_ONLY = bytes([TierKind.DRAM])
_GRANT_TIMEOUT_S = 120.0
_MAX_PARTS = 64


@dataclass(slots=True, eq=False)
class _Request:
    space: Keyspace
    hashes: HashArray
    source: Fragments | None
    """None: a reservation."""
    owner: int
    """The session that writes a reservation's slots; 0: this process."""
    part: int
    job: Job
    accepted: int
    since_s: float
    deadline_s: float
    epoch: int
    status: UInt8Array
    """(n,) what is decided but not settled yet: a job ends only after the order of use is right."""
    slots: SlotArray
    """(n,) DRAM slots of a reservation, NO_SLOT where there is nothing to write."""
    handles: UInt32Array


class Reservation:
    """DRAM slots for blocks that the holder writes itself. Every reservation must be ended, by commit() or abort()."""

    def __init__(self, saver: Saver, request: _Request) -> None:
        self._saver = saver
        self._request = request
        self._lock = threading.Lock()
        self._ended = False

    @property
    def job(self) -> Job:
        """Done when the slots are granted. OK: write the block where `slots` has one, else it is known already."""
        return self._request.job

    @property
    def slots(self) -> SlotArray:
        """(n,) uint32, NO_SLOT where there is nothing to write. Valid when the job is done."""
        return self._request.slots

    def commit(self) -> UInt8Array:
        """Ends the reservation, all bytes being written: (n,) BlockStatus. CANCELLED where the block was given up."""
        return self._saver.end(self._request, written=self._end())

    def abort(self) -> None:
        """Ends the reservation; its blocks are given up. Does nothing if it has ended. Waits for a grant under way."""
        if self._end():
            self.job.wait(_GRANT_TIMEOUT_S)
            self._saver.end(self._request, written=False)

    def _end(self) -> bool:
        with self._lock:
            ended, self._ended = self._ended, True
            return not ended


class Saver:
    """One thread and its queue."""

    def __init__(self, core: Core, room: Room, writers: Writers) -> None:
        self._core = core
        self._room = room
        self._writers = writers
        asked = any(core.admission(kind) == "second-touch" for kind in core.lower)
        self._history = placement.History() if asked else None
        self._condition = threading.Condition()
        self._queue: deque[_Request] = deque()
        self._queued_blocks = 0
        self._queued_bytes = 0
        self._running = False
        self._thread = threading.Thread(target=self._run, name="tierkv-save", daemon=True)
        self._thread.start()

    def reserve(
        self, space: Keyspace, hashes: HashArray, part: int, timeout_s: float, owner: int
    ) -> Reservation:
        """Queues a reservation."""
        return Reservation(self, self._submit(space, hashes, None, part, timeout_s, owner))

    def submit(
        self, space: Keyspace, hashes: HashArray, source: Fragments, part: int, timeout_s: float
    ) -> Job:
        """Queues a save. The blocks that the queue has no place for are settled as DROPPED, the first ones kept."""
        return self._submit(space, hashes, source, part, timeout_s).job

    def _submit(
        self,
        space: Keyspace,
        hashes: HashArray,
        source: Fragments | None,
        part: int,
        timeout_s: float,
        owner: int = 0,
    ) -> _Request:
        count = len(hashes)
        job = Job(count)
        core, config = self._core, self._core.config
        block_bytes = space.part_bytes[part]
        request = _Request(
            space, hashes, source, owner, part, job, 0, time.perf_counter(), time.monotonic() + timeout_s,
            core.epoch(space), np.full(count, BlockStatus.PENDING, np.uint8), np.full(count, NO_SLOT, np.uint32),
            np.full(count, NO_SLOT, np.uint32),
        )  # fmt: skip
        with self._condition:
            if not core.closing.is_set():
                request.accepted = max(
                    0,
                    min(
                        count,
                        config.save_queue_blocks - self._queued_blocks,
                        (config.save_queue_bytes - self._queued_bytes) // block_bytes,
                    ),
                )
            accepted = request.accepted
            if accepted:
                self._queue.append(request)
                self._queued_blocks += accepted
                self._queued_bytes += accepted * block_bytes
                self._condition.notify_all()
        if accepted < count:
            core.counters.add_dropped("queue_full", count - accepted)
            job.settle(slice(accepted, None), BlockStatus.DROPPED)
        if count and source is not None:
            job.add_done_callback(lambda _: core.counters.observe("save", request.since_s))
        return request

    @property
    def queued_blocks(self) -> int:
        return self._queued_blocks

    def _decide(self, request: _Request, where: slice | np.ndarray, status: BlockStatus) -> None:
        """Notes what becomes of blocks; they are settled with their chunk."""
        request.status[where] = status
        if status in (BlockStatus.DROPPED, BlockStatus.TIMEOUT):
            reason = "no_room" if status == BlockStatus.DROPPED else "timeout"
            self._core.counters.add_dropped(reason, len(request.status[where]))

    def wait_idle(self, deadline_s: float) -> bool:
        """Waits until nothing is queued or being saved; False at the deadline (time.monotonic())."""
        with self._condition:
            return self._condition.wait_for(
                lambda: not self._queue and not self._running, max(0.0, deadline_s - time.monotonic())
            )

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._queue:
                    if self._core.closing.is_set():
                        return
                    self._condition.wait(1.0)
                request = self._queue.popleft()
                self._running = True
            try:
                self._save(request)
            except Exception:  # the thread must survive; what is open is settled below
                log.exception("a save failed")
            finally:
                with self._condition:
                    self._queued_blocks -= request.accepted
                    self._queued_bytes -= request.accepted * request.space.part_bytes[request.part]
                    self._running = False
                    self._condition.notify_all()
                request.job.settle(slice(None), request.status)
                if not request.job.done():
                    left = int(np.count_nonzero(request.job.status == BlockStatus.PENDING))
                    self._core.counters.add_dropped("failed", left)
                    request.job.settle_rest(BlockStatus.DROPPED)

    def _save(self, request: _Request) -> None:
        core, space = self._core, request.space
        index, hashes = core.index, request.hashes[: request.accepted]
        positions = np.arange(len(hashes))
        keeps_evicted = self._room.keeps_evicted()
        if not keeps_evicted:
            # A chain longer than DRAM would push its own head out: keep the head, drop the tail.
            fits = core.dram.slot_map.capacity_slots(slot_bytes_for(space.block_bytes))
            if fits < len(hashes):
                self._decide(request, slice(fits, request.accepted), BlockStatus.DROPPED)
                hashes, positions = hashes[:fits], positions[:fits]
        known = index.lookup(space.number, hashes) != 0
        own: list[UInt32Array] = []
        any_known = bool(known.any())
        if any_known:
            # First, so that room is not made by evicting what this very chain needs.
            core.touch(space, hashes, reused=True)
            core.counters.add("known", int(np.count_nonzero(known)))
            self._decide(request, positions[known], BlockStatus.OK)
        todo = positions[~known] if any_known else positions
        if not len(todo):
            return
        if any_known and not keeps_evicted:
            own.append(self._pin(space, hashes[known]))
        try:
            rounds = self._save_chunks(request, todo, own, keeps_evicted=keeps_evicted)
        finally:
            for handles in own:
                index.release(handles)
        if self._history is not None:
            again = self._history.seen(space.number, np.ascontiguousarray(hashes[~known]))
            core.touch(space, np.ascontiguousarray(hashes[~known][again]), reused=True)
        if any_known or rounds > 1 or core.config.eviction != "lru":
            # They went in one behind the other; in order of use the chain's head comes last.
            core.touch(space, hashes, reused=False)
        self._writers.saved(space, np.ascontiguousarray(hashes[~known]))

    def _save_chunks(
        self, request: _Request, todo: np.ndarray, own: list[UInt32Array], *, keeps_evicted: bool
    ) -> int:
        """Saves chunk by chunk; returns in how many rounds. What must stay until the end is added to `own`."""
        core, space, rounds = self._core, request.space, 0
        step = chunk_blocks(space, _CHUNK_BLOCKS, _CHUNK_BYTES)
        for start in range(0, len(todo), step):
            chunk = todo[start : start + step]
            if core.closing.is_set() or core.epoch(space) != request.epoch:
                self._decide(request, todo[start:], BlockStatus.CANCELLED)
                break
            if time.monotonic() >= request.deadline_s:
                self._decide(request, todo[start:], BlockStatus.TIMEOUT)
                break
            rounds += self._save_blocks(request, chunk, again=keeps_evicted)
            if start + step < len(todo):  # the last chunk is settled after the order of use is right
                request.job.settle(slice(None), request.status)
                if not keeps_evicted:
                    own.append(self._pin(space, request.hashes[chunk]))
        return rounds

    def _pin(self, space: Keyspace, hashes: HashArray) -> UInt32Array:
        """Keeps blocks of the chain that is being saved from being evicted for its own tail."""
        return self._core.index.acquire(space.number, np.ascontiguousarray(hashes), _DRAM_ONLY)[3]

    def _save_blocks(self, request: _Request, positions: np.ndarray, *, again: bool) -> int:
        """Saves a chunk, in as many rounds as room can be made for; what finds none is dropped. Returns the rounds.

        One only, unless `again`, where what is evicted is lost: a second one would evict what the first one saved.
        """
        rounds = 0
        while len(positions):
            rounds += 1
            left = self._save_round(request, positions)
            if len(left) == len(positions) or not again:
                self._decide(request, left, BlockStatus.DROPPED)
                break
            positions = left
        return rounds

    def _save_round(self, request: _Request, chunk: np.ndarray) -> np.ndarray:
        """Reserves, copies and commits what fits now; returns the positions that found no room."""
        core, space, part = self._core, request.space, request.part
        hashes = np.ascontiguousarray(request.hashes[chunk])
        outcome, slots, handles = core.reserve_dram(
            space,
            hashes,
            part,
            len(space.part_bytes),
            lambda count: self._room.allocate(TierKind.DRAM, space, count, deadline_s=request.deadline_s),
        )
        mine = np.flatnonzero((outcome == RESERVE_NEW) | (outcome == RESERVE_JOINED))
        if len(mine):
            self._copy_in(request, chunk, mine, handles, slots)
        others = (outcome == RESERVE_KNOWN) | (outcome == RESERVE_BUSY)
        if others.any():
            core.counters.add("known", int(np.count_nonzero(others)))
            self._decide(request, chunk[others], BlockStatus.OK)
        left: np.ndarray = chunk[outcome == RESERVE_NO_SLOT]
        return left

    def _copy_in(
        self, request: _Request, chunk: np.ndarray, mine: np.ndarray, handles: np.ndarray, slots: np.ndarray
    ) -> None:
        """Gathers the reserved blocks and commits them; whatever happens, the reservations end here."""
        core, space, part = self._core, request.space, request.part
        taken, reserved = select(mine, slots, handles)
        if core.epoch(space) != request.epoch:  # cleared between the check and the reservation
            core.index.abort(reserved)
            self._decide(request, chunk[mine], BlockStatus.CANCELLED)
            return
        self._decide(request, chunk[mine], BlockStatus.OK)
        hashes = np.ascontiguousarray(request.hashes[chunk[mine]])
        core.name_slots(space, hashes, taken, request.owner)
        source = request.source
        if source is None:
            request.slots[chunk[mine]], request.handles[chunk[mine]] = taken, reserved
            return
        addresses = core.dram.addresses(taken) + space.part_offset(part)
        blocks = np.ascontiguousarray(source.block_ids[chunk[mine]])
        with core.counters.busy(TierKind.DRAM, "write"):
            try:
                core.pool.gather(source.bases, source.strides, source.lengths, blocks, addresses)
            except BaseException:
                core.index.abort(reserved)
                raise
        self._commit(request, reserved, taken)

    def _commit(self, request: _Request, reserved: UInt32Array, slots: SlotArray) -> None:
        core = self._core
        core.commit_dram(reserved, slots, request.part)
        core.counters.add("saved", len(reserved))
        core.counters.add_tier(
            TierKind.DRAM,
            written_blocks=len(reserved),
            written_bytes=len(reserved) * request.space.part_bytes[request.part],
        )

    def end(self, request: _Request, *, written: bool) -> UInt8Array:
        """Ends a reservation whose slots were written, or not: (n,) BlockStatus."""
        core, space = self._core, request.space
        status = request.job.status.copy()
        granted = np.flatnonzero(request.handles != NO_SLOT)
        reserved, hashes, slots = select(granted, request.handles, request.hashes, request.slots)
        request.handles[granted] = NO_SLOT
        if not written:
            core.index.abort(reserved)
            status[granted] = BlockStatus.CANCELLED
        elif len(granted):
            self._commit(request, reserved, slots)
            # Given up meanwhile (deadline, clear, remove): neither known nor pending any more.
            # Asked with a number of parts that no pending block has, so that nothing is reserved by asking.
            arguments = (core.size_class(space), 0, len(space.part_bytes) % _MAX_PARTS + 1, 0.0)
            outcome = core.index.reserve(space.number, hashes, TierKind.DRAM, NO_SLOTS, *arguments)[0]
            lost = (outcome == RESERVE_NO_SLOT) & (core.index.lookup(space.number, hashes) == 0)
            status[granted[lost]] = BlockStatus.CANCELLED
            core.touch(space, request.hashes, reused=False)
            self._writers.saved(space, hashes)
        if written:
            core.counters.observe("save", request.since_s)
        core.drain(TierKind.DRAM)
        return status

    def close(self, timeout_s: float) -> None:
        """Ends the thread; core.closing must be set. What is still queued is settled as CANCELLED."""
        with self._condition:
            abandoned, self._queue = list(self._queue), deque()
            for request in abandoned:
                self._queued_blocks -= request.accepted
                self._queued_bytes -= request.accepted * request.space.part_bytes[request.part]
            self._condition.notify_all()
        for request in abandoned:
            request.job.settle_rest(BlockStatus.CANCELLED)
        self._thread.join(timeout_s)
