"""Saver: takes blocks from the caller's memory into DRAM, on a thread of its own behind a bounded queue.

A save never fails or blocks its caller: what does not fit in the queue, or finds no room by its deadline, is
dropped and counted. Blocks that the store knows are only made most recently used.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from tierkv._native import RESERVE_BUSY, RESERVE_JOINED, RESERVE_KNOWN, RESERVE_NEW
from tierkv.fragments import Fragments
from tierkv.jobs import Job
from tierkv.keys import Keyspace
from tierkv.memory import slot_bytes_for
from tierkv.store.core import Core, log, select
from tierkv.store.room import Room
from tierkv.store.writing import Writers
from tierkv.types import BlockStatus, HashArray, TierKind

_CHUNK_BLOCKS = 128
_CHUNK_BYTES = 256 << 20
_NO_SLOTS = np.empty(0, np.uint32)


@dataclass(slots=True, eq=False)
class _Request:
    space: Keyspace
    hashes: HashArray
    source: Fragments
    part: int
    job: Job
    accepted: int
    deadline_s: float
    epoch: int


class Saver:
    """One thread and its queue."""

    def __init__(self, core: Core, room: Room, writers: Writers) -> None:
        self._core = core
        self._room = room
        self._writers = writers
        self._condition = threading.Condition()
        self._queue: deque[_Request] = deque()
        self._queued_blocks = 0
        self._queued_bytes = 0
        self._running = False
        self._thread = threading.Thread(target=self._run, name="tierkv-save", daemon=True)
        self._thread.start()

    def submit(
        self, space: Keyspace, hashes: HashArray, source: Fragments, part: int, timeout_s: float
    ) -> Job:
        """Queues a save. The blocks that the queue has no place for are settled as DROPPED, the first ones kept."""
        job = Job(len(hashes))
        if job.done():
            return job
        core, config = self._core, self._core.config
        block_bytes = space.part_bytes[part]
        with self._condition:
            if core.closing.is_set():
                accepted = 0
            else:
                accepted = min(
                    len(hashes),
                    config.save_queue_blocks - self._queued_blocks,
                    (config.save_queue_bytes - self._queued_bytes) // block_bytes,
                )
            if accepted > 0:
                request = _Request(
                    space,
                    hashes,
                    source,
                    part,
                    job,
                    accepted,
                    time.monotonic() + timeout_s,
                    core.epoch(space),
                )
                self._queue.append(request)
                self._queued_blocks += accepted
                self._queued_bytes += accepted * block_bytes
                self._condition.notify_all()
        if accepted < len(hashes):
            self._settle(
                job, slice(max(0, accepted), None), BlockStatus.DROPPED, len(hashes) - max(0, accepted)
            )
        return job

    @property
    def queued_blocks(self) -> int:
        return self._queued_blocks

    def _settle(self, job: Job, where: slice | np.ndarray, status: BlockStatus, count: int) -> None:
        self._core.counters.add("dropped", count)
        job.settle(where, status)

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
                open_blocks = int(np.count_nonzero(request.job.status == BlockStatus.PENDING))
                with self._condition:
                    self._queued_blocks -= request.accepted
                    self._queued_bytes -= request.accepted * request.space.part_bytes[request.part]
                    self._running = False
                    self._condition.notify_all()
                if open_blocks:
                    self._settle(request.job, slice(None), BlockStatus.DROPPED, open_blocks)

    def _save(self, request: _Request) -> None:
        core, space = self._core, request.space
        index, hashes = core.index, request.hashes[: request.accepted]
        positions = np.arange(len(hashes))
        if self._room.target(TierKind.DRAM) is None:
            # With nothing below, a chain longer than DRAM would push its own head out: keep the head, drop the tail.
            fits = core.dram.slot_map.capacity_slots(slot_bytes_for(space.block_bytes))
            if fits < len(hashes):
                self._settle(
                    request.job, slice(fits, request.accepted), BlockStatus.DROPPED, len(hashes) - fits
                )
                hashes, positions = hashes[:fits], positions[:fits]
        core.touch(
            space, hashes, reused=True
        )  # so that room is not made by evicting what this very chain needs
        known = index.lookup(space.number, hashes) != 0
        if known.any():
            core.counters.add("known", int(np.count_nonzero(known)))
            request.job.settle(positions[known], BlockStatus.OK)
        todo = positions[~known]
        step = max(1, min(_CHUNK_BLOCKS, _CHUNK_BYTES // slot_bytes_for(space.block_bytes)))
        for start in range(0, len(todo), step):
            chunk = todo[start : start + step]
            if core.closing.is_set() or core.epoch(space) != request.epoch:
                request.job.settle(todo[start:], BlockStatus.CANCELLED)
                break
            if time.monotonic() >= request.deadline_s:
                self._settle(request.job, todo[start:], BlockStatus.TIMEOUT, len(todo) - start)
                break
            self._save_chunk(request, chunk)
        if len(todo):
            # The chunks went in one behind the other; in order of use the chain's head comes last.
            core.touch(space, hashes, reused=False)
            self._writers.saved(space, np.ascontiguousarray(hashes[~known]))

    def _save_chunk(self, request: _Request, chunk: np.ndarray) -> None:
        core, space, part = self._core, request.space, request.part
        index, hashes = core.index, np.ascontiguousarray(request.hashes[chunk])
        deadline = core.clock.monotonic_s() + core.config.save_timeout_s
        parts = len(space.part_bytes)
        arguments = (core.size_class(space), part, parts, deadline)

        outcome, slots, handles, _ = index.reserve(space.number, hashes, TierKind.DRAM, _NO_SLOTS, *arguments)
        new = np.flatnonzero(
            (outcome != RESERVE_KNOWN) & (outcome != RESERVE_BUSY) & (outcome != RESERVE_JOINED)
        )
        if len(new):
            granted = self._room.allocate(TierKind.DRAM, space, len(new), deadline_s=request.deadline_s)
            if len(granted):
                found = index.reserve(
                    space.number, np.ascontiguousarray(hashes[new]), TierKind.DRAM, granted, *arguments
                )
                outcome[new], slots[new], handles[new] = found[:3]
                if found[3] < len(granted):
                    core.dram.slot_map.free(granted[found[3] :])

        mine = np.flatnonzero((outcome == RESERVE_NEW) | (outcome == RESERVE_JOINED))
        core.counters.add("saved", len(mine))
        if len(mine):
            self._copy_in(request, chunk, mine, handles, slots)
        others = (outcome == RESERVE_KNOWN) | (outcome == RESERVE_BUSY)
        if others.any():
            core.counters.add("known", int(np.count_nonzero(others)))
            request.job.settle(chunk[others], BlockStatus.OK)
        left = (outcome != RESERVE_NEW) & (outcome != RESERVE_JOINED) & ~others
        if left.any():
            self._settle(request.job, chunk[left], BlockStatus.DROPPED, int(np.count_nonzero(left)))

    def _copy_in(
        self, request: _Request, chunk: np.ndarray, mine: np.ndarray, handles: np.ndarray, slots: np.ndarray
    ) -> None:
        """Gathers the reserved blocks and commits them; whatever happens, the reservations end here."""
        core, space, part = self._core, request.space, request.part
        taken, reserved = select(mine, slots, handles)
        if core.epoch(space) != request.epoch:  # cleared between the check and the reservation
            core.index.abort(reserved)
            request.job.settle(chunk[mine], BlockStatus.CANCELLED)
            return
        source = request.source
        addresses = core.dram.addresses(taken) + space.part_offset(part)
        blocks = np.ascontiguousarray(source.block_ids[chunk[mine]])
        with core.counters.busy(TierKind.DRAM, "write"):
            try:
                core.pool.gather(source.bases, source.strides, source.lengths, blocks, addresses)
            except BaseException:
                core.index.abort(reserved)
                raise
        core.index.commit(reserved, part)
        core.counters.add_tier(
            TierKind.DRAM, written_blocks=len(mine), written_bytes=len(mine) * space.part_bytes[part]
        )
        request.job.settle(chunk[mine], BlockStatus.OK)

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
