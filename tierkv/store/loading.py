"""Loader: brings blocks to the caller's memory from whichever tiers hold them, several at once.

A load pins its blocks on the caller's thread, so nothing can go between the match and the copy. What DRAM holds is
copied by one thread at once; what lower tiers hold is read by other threads into new DRAM slots (or into staging,
when DRAM has no room that could be made without writing) and copied from there. Requests for a block that is being
read already wait for that read. Loads never wait for saves.

The caller's memory is not touched after the job is done. A transfer that outlives the deadline keeps its slots and
pins until it ends; only then are they given back.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import numpy as np

from tierkv import placement
from tierkv._native import RESERVE_BUSY, RESERVE_KNOWN, RESERVE_NEW
from tierkv.fragments import Fragments
from tierkv.jobs import Job
from tierkv.keys import Keyspace
from tierkv.store.core import LOOKUP_ORDER, NO_SLOTS, Core, chunk_blocks, log, select
from tierkv.store.room import Room
from tierkv.types import (
    NO_SLOT,
    NO_TIER,
    BlockStatus,
    HashArray,
    SlotArray,
    TierKind,
    UInt8Array,
    UInt32Array,
)

_CHUNK_BLOCKS = 64
_CHUNK_BYTES = 32 << 20
_CHUNKS_IN_FLIGHT = 2
"""Of each tier, of each request: while one is checked and copied, the next is read."""
_FOLLOW_S = 1.0
"""How long a request waits for another one's transfer of the same block before it reads the block for itself."""
_LOOK_AGAIN_S = 5.0
_DRAM_ONLY = bytes([TierKind.DRAM])
_DROPPED_FOR = (BlockStatus.MISS, BlockStatus.CORRUPT, BlockStatus.IO_ERROR)
"""After these the copy is erased: it is gone, bad, or would fail again."""


@dataclass(slots=True, eq=False)
class _Request:
    space: Keyspace
    hashes: HashArray
    into: Fragments | None
    """None: only bring the blocks to DRAM, under `lease`."""
    counted: bool
    """Whether this is a load, whose hits and misses count: `into` is given, or the caller copies for itself."""
    part: int
    lease: int
    make_room: bool
    """Whether to wait for blocks to be written below, where that is what makes room in DRAM."""
    job: Job
    deadline_s: float
    tiers: UInt8Array
    slots: SlotArray
    generations: UInt32Array
    handles: UInt32Array
    tried: UInt8Array
    """(n,) masks of the tiers that have failed for a block."""


@dataclass(slots=True, eq=False)
class _Chunk:
    """Blocks of one request that are being read from one tier."""

    kind: TierKind
    positions: np.ndarray
    addresses: np.ndarray
    reserved: UInt32Array
    """(k,) DRAM reservation of each block, NO_SLOT for those that go through staging."""
    buffers: SlotArray
    """Staging slots of the latter."""
    job: Job
    since_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Work:
    """What a request still has to do, as its thread sees it."""

    waiting: dict[TierKind, deque[np.ndarray]]
    in_flight: dict[TierKind, int]
    finished: SimpleQueue[_Chunk] = field(default_factory=SimpleQueue)
    chunks: set[_Chunk] = field(default_factory=set)
    followers: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    follow_until_s: float = 0.0
    alone: bool = False
    """Other requests' transfers are not waited for any more."""


class Loader:
    """The threads and queues of loads and stagings."""

    def __init__(self, core: Core, room: Room) -> None:
        self._core = core
        self._room = room
        self._lock = threading.Lock()
        self._queued_blocks = 0
        self._fast: SimpleQueue[_Request | None] = SimpleQueue()
        self._slow: SimpleQueue[_Request | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run_fast, name="tierkv-load", daemon=True)]
        self._threads += [
            threading.Thread(target=self._run_slow, name=f"tierkv-load-{number}", daemon=True)
            for number in range(core.config.load_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def queued_blocks(self) -> int:
        """Blocks of loads and stagings that wait or are under way."""
        return self._queued_blocks

    def submit(
        self,
        space: Keyspace,
        hashes: HashArray,
        into: Fragments | None,
        part: int,
        timeout_s: float,
        job: Job | None = None,
        lease: int = 0,
        make_room: bool = False,
        counted: bool = True,
    ) -> Job:
        """Pins the blocks and queues the load. Blocks that no tier holds are settled as MISS at once."""
        since_s = time.perf_counter()
        core, count = self._core, len(hashes)
        job = job if job is not None else Job(count)
        if count == 0:
            return job
        with self._lock:
            refused = core.closing.is_set() or self._queued_blocks + count > core.config.load_queue_blocks
            if not refused:
                self._queued_blocks += count
        if refused:
            job.settle_rest(BlockStatus.CANCELLED if core.closing.is_set() else BlockStatus.TIMEOUT)
            if counted:
                core.counters.add_misses(job.status)
            return job
        core.touch(space, hashes, reused=True, mask=placement.bit(TierKind.DRAM))
        tiers, slots, generations, handles = core.index.acquire(space.number, hashes, LOOKUP_ORDER)
        request = _Request(
            space, hashes, into, counted, part, lease, make_room, job, time.monotonic() + timeout_s, tiers, slots,
            generations, handles, np.zeros(count, np.uint8),
        )  # fmt: skip
        job.add_done_callback(lambda done: self._done(done, count, since_s, counted=counted))
        missing = np.flatnonzero(tiers == NO_TIER)
        if len(missing):
            job.settle(missing, BlockStatus.MISS)
        if len(missing) < count:
            if into is None:  # nothing to copy: what is in DRAM needs no other thread
                self._begin(request)
            else:
                self._fast.put(request)
        return job

    def _done(self, job: Job, count: int, since_s: float, *, counted: bool) -> None:
        with self._lock:
            self._queued_blocks -= count
        if counted:
            self._core.counters.add_misses(job.status)
        self._core.counters.observe("load" if counted else "stage", since_s)

    # DRAM

    def _run_fast(self) -> None:
        while (request := _next(self._fast)) is not None:
            self._begin(request)

    def _begin(self, request: _Request) -> None:
        """Serves what is in DRAM and queues the rest. Never raises."""
        try:
            self._load_from_dram(request, np.flatnonzero(request.tiers == TierKind.DRAM))
            lower = np.flatnonzero((request.tiers != TierKind.DRAM) & (request.tiers != NO_TIER))
            if len(lower):
                self._slow.put(request)
        except Exception:  # the thread must survive; nobody may wait for ever
            log.exception("a load from DRAM failed")
            self._fail(request)

    def _load_from_dram(self, request: _Request, positions: np.ndarray) -> None:
        """Copies pinned DRAM blocks out, settles them and releases their pins."""
        if not len(positions):
            return
        core = self._core
        handles, slots = select(positions, request.handles, request.slots)
        try:
            if core.closing.is_set():
                request.job.settle(positions, BlockStatus.CANCELLED)
            elif request.into is None and not request.counted:
                request.job.settle(positions, BlockStatus.OK)
            elif time.monotonic() >= request.deadline_s:
                request.job.settle(positions, BlockStatus.TIMEOUT)
            else:
                if request.into is not None:
                    with core.counters.busy(TierKind.DRAM, "read"):
                        self._scatter(request, positions, core.dram.addresses(slots))
                core.counters.add_tier(
                    TierKind.DRAM,
                    hit_blocks=len(positions),
                    read_bytes=len(positions) * request.space.part_bytes[request.part],
                )
        finally:
            core.index.release(handles)
            request.handles[positions] = NO_SLOT
            core.drain(TierKind.DRAM)
        request.job.settle(positions, BlockStatus.OK)

    def _scatter(self, request: _Request, positions: np.ndarray, addresses: np.ndarray) -> None:
        """Copies whole blocks at `addresses` to where the caller wants its part of them."""
        into = request.into
        if into is not None:
            sources = np.ascontiguousarray(addresses + request.space.part_offset(request.part))
            blocks = np.ascontiguousarray(into.block_ids[positions])
            self._core.pool.scatter(into.bases, into.strides, into.lengths, blocks, sources)

    # Lower tiers

    def _run_slow(self) -> None:
        while (request := _next(self._slow)) is not None:
            work = _Work({kind: deque() for kind in self._core.lower}, dict.fromkeys(self._core.lower, 0))
            ticket = self._room.enter(down=False)
            try:
                self._load_from_lower(request, work)
            except Exception:  # the thread must survive; nobody may wait for ever
                log.exception("a load from a lower tier failed")
                self._give_up(request, work, BlockStatus.IO_ERROR)
            finally:
                self._room.leave(ticket)

    def _load_from_lower(self, request: _Request, work: _Work) -> None:
        core, space = self._core, request.space
        step = chunk_blocks(space, _CHUNK_BLOCKS, _CHUNK_BYTES)
        for kind, queue in work.waiting.items():
            positions = np.flatnonzero(request.tiers == kind)
            queue.extend(positions[start : start + step] for start in range(0, len(positions), step))
        erased = False
        while any(work.waiting.values()) or work.chunks or len(work.followers):
            left_s = request.deadline_s - time.monotonic()
            if left_s <= 0 or core.closing.is_set():
                self._give_up(
                    request, work, BlockStatus.CANCELLED if core.closing.is_set() else BlockStatus.TIMEOUT
                )
                return
            for kind, queue in work.waiting.items():
                while queue and work.in_flight[kind] < _CHUNKS_IN_FLIGHT:
                    if not self._start(request, work, kind, queue.popleft()):
                        break
            self._follow(request, work)
            if work.chunks:
                # Followers and staging depend on others, whose end is not announced in this queue: look again soon.
                look_again = len(work.followers) or any(work.waiting.values())
                try:
                    chunk = work.finished.get(timeout=min(left_s, 0.02 if look_again else 0.5))
                except Empty:
                    continue
                erased |= self._finish(request, work, chunk)
            elif any(work.waiting.values()) or len(work.followers):
                with core.changed:
                    core.changed.wait(min(left_s, 0.02))
        core.touch(space, request.hashes, reused=True)
        if erased:
            for kind in core.lower:
                core.drain(kind)

    def _start(self, request: _Request, work: _Work, kind: TierKind, positions: np.ndarray) -> bool:
        """Starts reading a chunk; False when memory for (some of) it must be waited for."""
        core, space = self._core, request.space
        hashes = np.ascontiguousarray(request.hashes[positions])
        count = len(positions)
        reserved = np.full(count, NO_SLOT, np.uint32)
        targets = np.full(count, NO_SLOT, np.uint32)
        if core.config.promote == "on-hit" or request.into is None:
            outcome, targets, reserved = self._reserve(request, hashes)
            elsewhere = (outcome == RESERVE_KNOWN) | (outcome == RESERVE_BUSY)
            if work.alone:
                elsewhere = outcome == RESERVE_KNOWN
            if elsewhere.any():
                if not len(work.followers):
                    work.follow_until_s = time.monotonic() + _FOLLOW_S
                work.followers = np.union1d(work.followers, positions[elsewhere])
                positions, hashes = select(~elsewhere, positions, hashes)
                targets, reserved = select(~elsewhere, targets, reserved)
                count = len(positions)
        addresses = np.zeros(count, np.int64)
        in_dram = reserved != NO_SLOT
        addresses[in_dram] = core.dram.addresses(np.ascontiguousarray(targets[in_dram]))
        staged = np.flatnonzero(~in_dram)
        buffers = NO_SLOTS
        if len(staged) and request.into is None:
            self._settle_lower(request, positions[staged], BlockStatus.NO_SPACE)
            positions, hashes, addresses, reserved = select(in_dram, positions, hashes, addresses, reserved)
        elif len(staged):
            buffers, places = core.staging.allocate(space, len(staged))
            addresses[staged[: len(buffers)]] = places
            if len(buffers) < len(staged):
                later = staged[len(buffers) :]
                work.waiting[kind].appendleft(np.ascontiguousarray(positions[later]))
                keep = np.ones(count, np.bool_)
                keep[later] = False
                positions, hashes, addresses, reserved = select(keep, positions, hashes, addresses, reserved)
        if not len(positions):
            return not work.waiting[kind]
        slots = np.ascontiguousarray(request.slots[positions])
        chunk = _Chunk(kind, positions, addresses, reserved, buffers, Job(0))
        try:
            since_s = time.perf_counter()
            job = chunk.job = core.tiers[kind].submit_read(core.batch(space, hashes, slots, addresses))
        except BaseException:
            self._return_memory(chunk, np.zeros(len(positions), np.bool_))
            raise
        chunk.since_s = core.counters.begin(kind, "read", since_s)
        work.chunks.add(chunk)
        work.in_flight[kind] += 1
        job.add_done_callback(lambda _: self._arrived(work, chunk))
        return True

    def _arrived(self, work: _Work, chunk: _Chunk) -> None:
        self._core.counters.end(chunk.kind, "read", chunk.since_s)
        work.finished.put(chunk)

    def _reserve(self, request: _Request, hashes: HashArray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Reserves DRAM slots for what is about to be read: (outcome, slot, handle)."""
        core, space = self._core, request.space

        def room_for(count: int) -> SlotArray:
            granted = self._room.allocate(
                TierKind.DRAM, space, count, deadline_s=request.deadline_s, may_write=False
            )
            if not request.make_room or len(granted) == count:
                return granted
            more = self._room.allocate(
                TierKind.DRAM,
                space,
                count - len(granted),
                deadline_s=request.deadline_s,
                patient=False,  # this load is among those that others would wait for, and they for it
            )
            return np.concatenate([granted, more])

        outcome, slots, handles = core.reserve_dram(space, hashes, 0, 1, room_for)
        handles[outcome != RESERVE_NEW] = NO_SLOT
        mine = np.flatnonzero(handles != NO_SLOT)
        core.name_slots(space, np.ascontiguousarray(hashes[mine]), np.ascontiguousarray(slots[mine]))
        return outcome, slots, handles

    def _finish(self, request: _Request, work: _Work, chunk: _Chunk) -> bool:
        """Copies out and settles what a chunk brought; True if bad copies were erased."""
        core, space = self._core, request.space
        work.chunks.discard(chunk)
        work.in_flight[chunk.kind] -= 1
        status = chunk.job.status
        good = status == BlockStatus.OK
        positions, addresses = select(good, chunk.positions, chunk.addresses)
        try:
            if len(positions):
                self._scatter(request, positions, addresses)
        except BaseException:
            self._return_memory(chunk, np.zeros(len(good), np.bool_))
            raise
        self._return_memory(chunk, good & self._still_there(request, chunk))
        if len(positions):
            if request.lease:
                core.index.lease_add(
                    request.lease, space.number, np.ascontiguousarray(request.hashes[positions]), _DRAM_ONLY
                )
            core.counters.add_tier(
                chunk.kind,
                hit_blocks=len(positions) if request.counted else 0,
                read_bytes=len(positions) * space.block_bytes,
            )
            self._settle_lower(request, positions, BlockStatus.OK)
        core.announce()
        if good.all():
            return False
        return self._retry(request, work, chunk, ~good)

    def _still_there(self, request: _Request, chunk: _Chunk) -> np.ndarray:
        """(k,) bool: the block was not removed since it was pinned; a removed one must not come back by promotion."""
        return self._core.index.valid(
            request.space.number,
            np.ascontiguousarray(request.hashes[chunk.positions]),
            chunk.kind,
            np.ascontiguousarray(request.slots[chunk.positions]),
            np.ascontiguousarray(request.generations[chunk.positions]),
        )

    def _return_memory(self, chunk: _Chunk, good: np.ndarray) -> None:
        """Commits the DRAM slots of good blocks, gives the others and the staging buffers back."""
        core = self._core
        in_dram = chunk.reserved != NO_SLOT
        whole = np.flatnonzero(in_dram & good)
        core.commit_dram(
            np.ascontiguousarray(chunk.reserved[whole]), core.dram.slots_at(chunk.addresses[whole]), 0
        )
        core.index.abort(np.ascontiguousarray(chunk.reserved[in_dram & ~good]))
        if len(chunk.buffers):
            core.staging.free(chunk.buffers)
        core.drain(TierKind.DRAM)

    def _unpin_read(self, chunk: _Chunk, bad: np.ndarray, handles: UInt32Array) -> bool:
        """Releases the source pins of blocks that could not be read, and erases the copies that never can be; True if
        there were any. `handles`: (k,) of the whole chunk."""
        core, status = self._core, chunk.job.status
        core.counters.add("corrupt", int(np.count_nonzero(status == BlockStatus.CORRUPT)))
        drop = bad & np.isin(status, _DROPPED_FOR)
        core.index.erase(np.ascontiguousarray(handles[drop]))
        core.index.release(np.ascontiguousarray(handles[bad & ~drop]))
        return bool(drop.any())

    def _retry(self, request: _Request, work: _Work, chunk: _Chunk, bad: np.ndarray) -> bool:
        """Erases copies that cannot be used and looks for the blocks in the tiers that are left."""
        core, space = self._core, request.space
        status = chunk.job.status
        erased = self._unpin_read(chunk, bad, request.handles[chunk.positions])
        request.handles[chunk.positions[bad]] = NO_SLOT
        request.tried[chunk.positions[bad]] |= np.uint8(1 << chunk.kind)
        lost = []
        for tried in np.unique(request.tried[chunk.positions[bad]]).tolist():
            positions = chunk.positions[bad & (request.tried[chunk.positions] == tried)]
            order = bytes(kind for kind in LOOKUP_ORDER if not tried >> kind & 1)
            tiers, slots, generations, handles = core.index.acquire(
                space.number, np.ascontiguousarray(request.hashes[positions]), order
            )
            request.tiers[positions], request.slots[positions] = tiers, slots
            request.generations[positions], request.handles[positions] = generations, handles
            lost.append(positions[tiers == NO_TIER])
            for kind, queue in work.waiting.items():
                again = positions[tiers == kind]
                if len(again):
                    queue.append(again)
            self._load_from_dram(request, positions[tiers == TierKind.DRAM])
        gone = np.concatenate(lost)
        if len(gone):
            where = np.searchsorted(chunk.positions, gone)
            request.job.settle(gone, status[where])
        return erased

    def _follow(self, request: _Request, work: _Work) -> None:
        """Takes the blocks that other requests have brought to DRAM meanwhile; queues those that they have not."""
        positions = work.followers
        if not len(positions):
            return
        core, space = self._core, request.space
        hashes = np.ascontiguousarray(request.hashes[positions])
        _, slots, _, handles = core.index.acquire(space.number, hashes, _DRAM_ONLY)
        there = handles != NO_SLOT
        if there.any():
            ready = positions[there]
            core.index.release(np.ascontiguousarray(request.handles[ready]))
            request.handles[ready], request.slots[ready] = handles[there], slots[there]
            if request.lease:
                core.index.lease_add(
                    request.lease, space.number, np.ascontiguousarray(hashes[there]), _DRAM_ONLY
                )
            self._load_from_dram(request, ready)
        positions, hashes = positions[~there], np.ascontiguousarray(hashes[~there])
        if len(positions):
            work.alone = work.alone or time.monotonic() >= work.follow_until_s
            arguments = (core.size_class(space), 0, 1, 0.0)
            outcome = core.index.reserve(space.number, hashes, TierKind.DRAM, NO_SLOTS, *arguments)[0]
            own = np.ones(len(positions), np.bool_) if work.alone else outcome != RESERVE_BUSY
            for kind, queue in work.waiting.items():
                again = positions[own & (request.tiers[positions] == kind)]
                if len(again):
                    queue.append(again)
            positions = positions[~own]
        work.followers = positions

    def _settle_lower(self, request: _Request, positions: np.ndarray, status: BlockStatus) -> None:
        """Releases the source pins of blocks and settles them."""
        self._core.index.release(np.ascontiguousarray(request.handles[positions]))
        request.handles[positions] = NO_SLOT
        request.job.settle(positions, status)

    def _give_up(self, request: _Request, work: _Work, status: BlockStatus) -> None:
        """Settles all that is open. Transfers in flight keep their memory and pins until they end."""
        core = self._core
        for chunk in list(work.chunks):
            handles = np.ascontiguousarray(request.handles[chunk.positions])
            request.handles[chunk.positions] = NO_SLOT

            def end(chunk: _Chunk = chunk, handles: np.ndarray = handles) -> None:
                good = chunk.job.status == BlockStatus.OK
                self._return_memory(chunk, good & self._still_there(request, chunk))
                self._unpin_read(chunk, ~good, handles)
                core.index.release(np.ascontiguousarray(handles[good]))
                core.announce()

            core.when_done(chunk.job, end)
        work.chunks.clear()
        core.index.release(request.handles)
        request.handles[:] = NO_SLOT
        request.job.settle_rest(status)

    def _fail(self, request: _Request) -> None:
        self._core.index.release(request.handles)
        request.handles[:] = NO_SLOT
        request.job.settle_rest(BlockStatus.IO_ERROR)

    def close(self, timeout_s: float) -> None:
        """Ends the threads; core.closing must be set. What is still queued is settled as CANCELLED."""
        deadline_s = time.monotonic() + timeout_s
        self._fast.put(None)
        self._threads[0].join(max(0.0, deadline_s - time.monotonic()))
        for _ in self._threads[1:]:
            self._slow.put(None)
        for thread in self._threads[1:]:
            thread.join(max(0.0, deadline_s - time.monotonic()))


def _next(queue: SimpleQueue[_Request | None]) -> _Request | None:
    """The queue's next request, or None when the loader closes."""
    while True:
        try:
            return queue.get(timeout=_LOOK_AGAIN_S)
        except Empty:
            continue
