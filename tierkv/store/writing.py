"""Writers: copy blocks from DRAM to lower tiers in the background, as they are saved or when the store is flushed.

One thread a lower tier, so that a slow shared file system does not hold the NVMe up. The queues are bounded; what
does not fit is left to eviction, which writes it then.
"""

from __future__ import annotations

import threading
import time
from collections import deque

import numpy as np

from tierkv import placement
from tierkv.keys import Keyspace
from tierkv.store.core import Core, chunk_blocks, log, select
from tierkv.store.room import Room, Victims
from tierkv.types import NO_SLOT, HashArray, TierKind, UInt32Array

_CHUNK_BLOCKS = 128
_CHUNK_BYTES = 128 << 20
_DRAM_ONLY = bytes([TierKind.DRAM])


class Writers:
    """Write-through to every lower tier whose admission asks for it."""

    def __init__(self, core: Core, room: Room) -> None:
        self._core = core
        self._room = room
        self._writers = [
            _Writer(core, room, kind) for kind in core.lower if core.admission(kind) == "write-through"
        ]

    def saved(self, space: Keyspace, hashes: HashArray) -> None:
        """Blocks that were just saved (some may still lack parts)."""
        for writer in self._writers:
            writer.submit(space, hashes)

    @property
    def queued_blocks(self) -> int:
        return sum(writer.queued_blocks for writer in self._writers)

    def wait_idle(self, deadline_s: float) -> bool:
        """Waits until nothing is queued or being written; False at the deadline (time.monotonic())."""
        return all(writer.wait_idle(deadline_s) for writer in self._writers)

    def flush(self, deadline_s: float) -> bool:
        """Writes what DRAM holds and the next healthy tier lacks; False if some could not be written in time.

        Each block is written once: where that tier is too small for all of them, it evicts some for others.
        """
        found, stored = self._flush_once(deadline_s)
        if stored < found and self._room.wait_for_current(deadline_s):
            # Others may have been writing them, and have failed or not: what is still lacking tells.
            left, again = self._flush_once(deadline_s)
            stored += found if not left else again
        return stored >= found and time.monotonic() < deadline_s

    def _flush_once(self, deadline_s: float) -> tuple[int, int]:
        """(blocks that the next healthy tier lacked, how many of them were written)."""
        core, target = self._core, self._room.target(TierKind.DRAM)
        if target is None:
            return (1, 0) if core.lower else (0, 0)
        found, stored, after = 0, 0, NO_SLOT
        while True:
            lacking = Victims(*core.index.lacking(TierKind.DRAM, target, _CHUNK_BLOCKS, after))
            if not len(lacking):
                return found, stored
            after = int(lacking.handles[-1])
            found += len(lacking)
            if time.monotonic() >= deadline_s:
                core.index.release(lacking.handles)
                return found, stored
            for space, where in core.by_space(lacking.spaces):
                stored += copy_chunks(core, self._room, target, space, lacking.at(where), deadline_s)

    def close(self, timeout_s: float) -> None:
        """Ends the threads; core.closing must be set."""
        deadline_s = time.monotonic() + timeout_s
        for writer in self._writers:
            writer.close(max(0.0, deadline_s - time.monotonic()))


def copy_chunks(
    core: Core, room: Room, target: TierKind, space: Keyspace, pinned: Victims, deadline_s: float
) -> int:
    """Writes pinned DRAM blocks to `target` and releases their pins; returns how many were stored."""
    stored = 0
    most_bytes = min(_CHUNK_BYTES, core.tiers[target].info.capacity_bytes)
    step = chunk_blocks(space, _CHUNK_BLOCKS, most_bytes)
    for start in range(0, len(pinned), step):
        chunk = pinned.at(np.arange(start, min(start + step, len(pinned))))
        ticket = room.enter()
        try:
            addresses = core.dram.addresses(chunk.slots)
            copied = room.copy_down(target, space, chunk, addresses, deadline_s, unpin=core.index.release)
            if copied is not None:
                core.index.release(chunk.handles)
                stored += copied
        finally:
            room.leave(ticket)
    core.drain(TierKind.DRAM)
    return stored


class _Writer:
    def __init__(self, core: Core, room: Room, kind: TierKind) -> None:
        self._core = core
        self._room = room
        self._kind = kind
        self._condition = threading.Condition()
        self._queue: deque[tuple[Keyspace, HashArray]] = deque()
        self.queued_blocks = 0
        self._running = False
        self._thread = threading.Thread(
            target=self._run, name=f"tierkv-write-{kind.name.lower()}", daemon=True
        )
        self._thread.start()

    def submit(self, space: Keyspace, hashes: HashArray) -> None:
        with self._condition:
            accepted = min(len(hashes), self._core.config.write_queue_blocks - self.queued_blocks)
            if accepted > 0 and not self._core.closing.is_set():
                self._queue.append((space, hashes[:accepted]))
                self.queued_blocks += accepted
                self._condition.notify_all()

    def wait_idle(self, deadline_s: float) -> bool:
        with self._condition:
            return self._condition.wait_for(
                lambda: not self._queue and not self._running, max(0.0, deadline_s - time.monotonic())
            )

    def _run(self) -> None:
        core = self._core
        while True:
            with self._condition:
                while not self._queue:
                    if core.closing.is_set():
                        return
                    self._condition.wait(1.0)
                space, hashes = self._queue.popleft()
                self._running = True
            try:
                if not core.closing.is_set() and core.tiers[self._kind].healthy():
                    self._write(space, hashes)
            except Exception:  # the thread must survive; eviction writes what this could not
                log.exception("writing through to %s failed", core.tiers[self._kind].info.name)
            finally:
                with self._condition:
                    self.queued_blocks -= len(hashes)
                    self._running = False
                    self._condition.notify_all()

    def _write(self, space: Keyspace, hashes: HashArray) -> None:
        core = self._core
        step = chunk_blocks(space, _CHUNK_BLOCKS, _CHUNK_BYTES)
        for start in range(0, len(hashes), step):
            chunk = np.ascontiguousarray(hashes[start : start + step])
            lacking = (core.index.lookup(space.number, chunk) & placement.bit(self._kind)) == 0
            chunk = np.ascontiguousarray(chunk[lacking])
            pinned = _pin(core, space, chunk)
            if len(pinned):
                deadline_s = time.monotonic() + core.config.save_timeout_s
                copy_chunks(core, self._room, self._kind, space, pinned, deadline_s)

    def close(self, timeout_s: float) -> None:
        with self._condition:
            self._queue.clear()
            self.queued_blocks = 0 if not self._running else self.queued_blocks
            self._condition.notify_all()
        self._thread.join(timeout_s)


def _pin(core: Core, space: Keyspace, hashes: HashArray) -> Victims:
    """Pins those of the blocks that are whole in DRAM, the last one first as eviction would have them."""
    _, slots, _, handles = core.index.acquire(space.number, hashes, _DRAM_ONLY)
    there = np.flatnonzero(handles != NO_SLOT)[::-1]
    numbers: UInt32Array = np.full(len(there), space.number, np.uint32)
    nothing = np.zeros(len(there), np.uint8)
    handles, slots, hashes = select(there, handles, slots, hashes)
    return Victims(handles, slots, numbers, hashes, nothing, nothing)
