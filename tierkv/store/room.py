"""Room: makes room in a tier by evicting what placement chose, writing it to the next tier where that is wanted.

Eviction pins its victims, so they stay loadable until their copy below is committed; only then is the upper copy
erased. A victim whose write fails is dropped: it is a cache. Nothing leased, loading or saving is ever a victim.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tierkv import placement
from tierkv.jobs import Job
from tierkv.keys import Keyspace
from tierkv.memory import slot_bytes_for
from tierkv.store.core import NO_SLOTS, Core, chunk_blocks, log, select, wait_for_change
from tierkv.tiers.base import Batch
from tierkv.types import NO_SLOT, BlockStatus, HashArray, SlotArray, TierKind, UInt8Array, UInt32Array

_CHUNK_BLOCKS = 128
_CHUNK_BYTES = 128 << 20
_STAGED_BLOCKS = 16
_SLAB_CANDIDATES = 256
_SLABS_TRIED = 8
_MOST_REFUSALS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Victims:
    """Pinned residencies, least recently used first."""

    handles: UInt32Array
    slots: SlotArray
    spaces: UInt32Array
    hashes: HashArray
    flags: UInt8Array
    masks: UInt8Array

    def at(self, positions: np.ndarray) -> Victims:
        return Victims(
            *select(positions, self.handles, self.slots, self.spaces, self.hashes, self.flags, self.masks)
        )

    def __len__(self) -> int:
        return len(self.handles)


@dataclass(frozen=True, slots=True)
class _Move:
    """A transfer under way."""

    down: bool
    thread: int


class Room:
    """Allocation with eviction, for every tier."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._moving: dict[int, _Move] = {}
        self._last_ticket = 0
        self._ahead_wanted = threading.Event()
        self._ahead = threading.Thread(target=self._run_ahead, name="tierkv-ahead", daemon=True)
        self._ahead.start()

    # Who is at work: an allocation that finds everything pinned waits only while somebody may unpin something.

    def enter(self, *, down: bool = True, late: bool = False) -> int:
        """A transfer that pins blocks for a while begins, to a lower tier or (a load) not; its ticket for leave().

        late: it goes on without the thread that began it.
        """
        with self._lock:
            self._last_ticket += 1
            self._moving[self._last_ticket] = _Move(down, 0 if late else threading.get_ident())
            return self._last_ticket

    def leave(self, ticket: int) -> None:
        with self._lock:
            self._moving.pop(ticket, None)
        self._core.announce()

    def wait_for_current(self, deadline_s: float) -> bool:
        """Waits until the writes to lower tiers that are under way now have ended; False at the deadline
        (time.monotonic()). Loads bring nothing down, and are not waited for."""
        with self._lock:
            current = {ticket for ticket, move in self._moving.items() if move.down}
        while current & self._moving.keys():
            if not wait_for_change(self._core, deadline_s):
                return False
        return True

    def _others_move(self) -> bool:
        """Whether a transfer of another thread may yet unpin something."""
        own = threading.get_ident()
        with self._lock:
            return any(move.thread != own for move in self._moving.values())

    def allocate(
        self,
        kind: TierKind,
        space: Keyspace,
        count: int,
        *,
        deadline_s: float,
        may_write: bool = True,
        patient: bool = True,
    ) -> SlotArray:
        """Up to `count` slots for blocks of `space`, evicting where needed; fewer, or none, where that is impossible.

        may_write=False evicts only what needs no writing below, so it does not wait for a medium; patient=False does
        not wait for what other transfers have pinned. `deadline_s` is of time.monotonic().
        """
        core, tier = self._core, self._core.tiers[kind]
        count = min(count, tier.info.capacity_bytes // slot_bytes_for(space.block_bytes))
        refusals = 0
        try:
            while count > 0:
                core.drain(kind)
                slots = tier.allocate(space, count)
                if slots is not None:
                    return slots
                missing = count - tier.available(space)
                if missing <= 0:  # somebody else gave back, or the tier refuses what it says it has
                    refusals += 1
                    if refusals > _MOST_REFUSALS:
                        break
                    continue
                late = time.monotonic() >= deadline_s or core.closing.is_set()
                if not late and self._evict(kind, space, missing, may_write, deadline_s):
                    continue
                waits = patient and may_write and not late and self._others_move()
                if waits and wait_for_change(core, deadline_s):
                    continue
                count = min(count, tier.available(space))
            return NO_SLOTS
        finally:
            if kind is TierKind.DRAM:
                self._ahead_wanted.set()

    def _evict(self, kind: TierKind, space: Keyspace, count: int, may_write: bool, deadline_s: float) -> int:
        """Evicts about `count` blocks of the keyspace's slot size, or a slab of another one; returns how many."""
        index, own = self._core.index, self._core.size_class(space)
        victims = self._slab_of_others(kind, own, can_evict_own=True)
        if victims is None:
            victims = Victims(*index.victims(kind, own, count))
            if not len(victims):
                victims = self._slab_of_others(kind, own, can_evict_own=False)
        if victims is None or not len(victims):
            return 0
        return self._dispose(kind, victims, may_write, deadline_s)

    def _slab_of_others(self, kind: TierKind, own: int, *, can_evict_own: bool) -> Victims | None:
        """All blocks of a slab that another block size should give up, pinned, or None."""
        core = self._core
        if core.class_count() < 2:
            return None
        classes, ages, _ = core.index.oldest(kind)
        position = placement.slab_to_steal(own, classes, ages, can_evict_own)
        if position is None:
            return None
        # From the oldest block's slab on; a slab with a pinned block cannot be had as a whole.
        oldest = Victims(*core.index.victims(kind, int(classes[position]), _SLAB_CANDIDATES))
        core.index.release(oldest.handles)
        tried: set[int] = set()
        for slot in oldest.slots.tolist():
            in_slab = core.tiers[kind].slab_of(slot)
            if not len(in_slab) or int(in_slab[0]) in tried:
                continue
            tried.add(int(in_slab[0]))
            victims = Victims(*core.index.in_slots(kind, in_slab))
            if len(victims) == len(in_slab):
                return victims
            core.index.release(victims.handles)
            if len(tried) >= _SLABS_TRIED:
                break
        return None

    def target(self, kind: TierKind) -> TierKind | None:
        """The tier that takes what is evicted from `kind`: the next lower one that accepts writes."""
        for lower, tier in self._core.lower.items():
            if lower > kind and tier.healthy():
                return lower
        return None

    def keeps_evicted(self) -> bool:
        """Whether what DRAM evicts now is written below, and so stays in the store."""
        target = self.target(TierKind.DRAM)
        return target is not None and self._core.admission(target) != "second-touch"

    def _dispose(self, kind: TierKind, victims: Victims, may_write: bool, deadline_s: float) -> int:
        core = self._core
        target = self.target(kind)
        wanted = np.zeros(len(victims), np.bool_)
        if target is not None:
            admission = core.admission(target)
            wanted = placement.admitted_on_eviction(admission, target, victims.masks, victims.flags)
        gone = self._drop(kind, victims.at(~wanted)) if not wanted.all() else 0
        if not wanted.any():
            return gone
        dirty = victims.at(wanted)
        if not may_write or target is None:
            core.index.release(dirty.handles)
            return gone
        return gone + self._demote(kind, target, dirty, deadline_s)

    def _drop(self, kind: TierKind, victims: Victims) -> int:
        """Erases copies that need no writing: they are below already, or not worth keeping. Returns how many."""
        core = self._core
        below = sum(placement.bit(lower) for lower in core.lower if lower > kind)
        shared = core.tiers[kind].info.shared
        for space, where in core.by_space(victims.spaces) if below or shared else ():
            if below:
                # A block that comes back down is as recent below as one that is written now.
                newest_first = np.ascontiguousarray(victims.hashes[where[::-1]])
                core.touch(space, newest_first, reused=False, mask=below)
            if shared:
                core.tiers[kind].free(
                    space, np.ascontiguousarray(victims.hashes[where]), victims.slots[where]
                )
        if shared:
            core.index.erase(victims.handles)
            gone = len(victims)
        else:  # what was leased since they were chosen stays: that was promised
            gone = core.index.evict(victims.handles)
        core.counters.add_tier(kind, evicted_blocks=gone)
        return gone

    def _demote(self, kind: TierKind, target: TierKind, victims: Victims, deadline_s: float) -> int:
        """Writes pinned victims to `target`, then erases them from `kind`; returns how many left."""
        left = 0
        for space, where in self._core.by_space(victims.spaces):
            step = chunk_blocks(space, _CHUNK_BLOCKS, _CHUNK_BYTES)
            for start in range(0, len(where), step):
                left += self._demote_chunk(
                    kind, target, space, victims.at(where[start : start + step]), deadline_s
                )
        return left

    def _demote_chunk(
        self, kind: TierKind, target: TierKind, space: Keyspace, victims: Victims, deadline_s: float
    ) -> int:
        """Writes a chunk down and erases it above; returns how many are gone now (late ones go later)."""
        core = self._core
        ticket = self.enter()
        try:
            if kind is TierKind.DRAM:
                addresses = core.dram.addresses(victims.slots)
                stored = self.copy_down(target, space, victims, addresses, deadline_s, unpin=core.index.erase)
                gone = 0 if stored is None else len(victims)
                if gone:
                    core.index.erase(victims.handles)
            else:
                gone = self._demote_through_staging(kind, target, space, victims, deadline_s)
            core.counters.add_tier(kind, evicted_blocks=len(victims))
            core.drain(kind)
            return gone
        finally:
            self.leave(ticket)

    def _demote_through_staging(
        self, kind: TierKind, target: TierKind, space: Keyspace, victims: Victims, deadline_s: float
    ) -> int:
        """The same from a tier that is not memory: each piece is read into staging, and written from there."""
        core, gone, start = self._core, 0, 0
        while start < len(victims):
            buffers, addresses = core.staging.allocate(space, min(_STAGED_BLOCKS, len(victims) - start))
            if not len(buffers):
                if wait_for_change(core, deadline_s):
                    continue
                core.index.erase(victims.handles[start:])  # staging is busy with loads, which go first
                return gone + len(victims) - start
            piece = victims.at(np.arange(start, start + len(buffers)))
            start += len(buffers)
            gone += self._demote_piece(kind, target, space, piece, buffers, addresses, deadline_s)
        return gone

    def _demote_piece(
        self,
        kind: TierKind,
        target: TierKind,
        space: Keyspace,
        piece: Victims,
        buffers: SlotArray,
        addresses: np.ndarray,
        deadline_s: float,
    ) -> int:
        core = self._core

        def free_buffers() -> None:
            core.staging.free(buffers)

        since_s = core.counters.begin(kind, "read")
        job = core.tiers[kind].submit_read(core.batch(space, piece.hashes, piece.slots, addresses))
        job.add_done_callback(lambda done: self._read(kind, space, done, since_s))
        if not core.wait(job, deadline_s):

            def give_up() -> None:
                core.index.erase(piece.handles)
                free_buffers()

            core.when_done(job, give_up)
            return 0
        readable = job.status == BlockStatus.OK
        core.index.erase(piece.handles[~readable])
        good = piece.at(readable)
        stored = self.copy_down(
            target, space, good, addresses[readable], deadline_s, unpin=core.index.erase, end=free_buffers
        )
        if stored is None:
            return len(piece) - len(good)
        core.index.erase(good.handles)
        return len(piece)

    def _read(self, kind: TierKind, space: Keyspace, job: Job, since_s: float) -> None:
        self._core.counters.end(kind, "read", since_s)
        good = int(np.count_nonzero(job.status == BlockStatus.OK))
        self._core.counters.add_tier(kind, read_bytes=good * space.block_bytes)

    def copy_down(
        self,
        target: TierKind,
        space: Keyspace,
        source: Victims,
        addresses: np.ndarray,
        deadline_s: float,
        unpin: Callable[[UInt32Array], None],
        end: Callable[[], None] = lambda: None,
    ) -> int | None:
        """Writes pinned blocks from memory into `target` and makes them known there: how many were stored.

        None: the write did not end by the deadline; then unpin(handles) and end() are called when it does end.
        Otherwise end() has been called and the pins are still the caller's.
        """
        core = self._core

        slots = NO_SLOTS
        if len(source):
            slots = self.allocate(target, space, len(source), deadline_s=deadline_s, patient=False)
        if not len(slots):
            end()
            return 0
        # The most recent ones, if not all fit, and those first: commit() makes the first of a batch the most recent.
        order = np.arange(len(source))[::-1][: len(slots)]
        taken, batch = self._reserve_below(target, space, source.at(order), slots, addresses[order])
        if not len(taken):
            end()
            return 0
        job, in_time = core.write(target, batch, deadline_s)
        if in_time:
            stored = self._end_write(target, space, batch, taken, job)
            end()
            return stored

        ticket = self.enter(late=True)

        def finish_late() -> None:
            self._end_write(target, space, batch, taken, job)
            unpin(source.handles)
            core.drain(TierKind.DRAM)
            end()
            self.leave(ticket)

        log.warning(
            "%s: a write of %d blocks is late; it goes on in the background",
            core.tiers[target].info.name,
            len(taken),
        )
        core.when_done(job, finish_late)
        return None

    def _reserve_below(
        self, target: TierKind, space: Keyspace, source: Victims, slots: SlotArray, addresses: np.ndarray
    ) -> tuple[UInt32Array, Batch]:
        """Reserves the blocks in `target` and gives back the slots of those that are there or on their way."""
        core = self._core
        # No deadline: the reservation ends by commit() or abort(), when the write ends.
        reserved = core.index.attach_pending(source.handles, target, slots, core.size_class(space), math.inf)
        mine = reserved != NO_SLOT
        if not mine.all():
            core.tiers[target].give_back(space, np.ascontiguousarray(slots[~mine]))
        taken, hashes, slots, addresses = select(mine, reserved, source.hashes, slots, addresses)
        return taken, core.batch(space, hashes, slots, addresses)

    def _end_write(
        self, target: TierKind, space: Keyspace, batch: Batch, reserved: UInt32Array, job: Job
    ) -> int:
        """Makes known what was written. The slots of the rest come back through drain()."""
        core, tier = self._core, self._core.tiers[target]
        written = job.status == BlockStatus.OK
        core.index.abort(np.ascontiguousarray(reserved[~written]))
        known = np.zeros(len(reserved), np.bool_)
        known[written] = core.index.commit(np.ascontiguousarray(reserved[written]), 0)
        if (
            tier.info.shared and not known.all()
        ):  # failed, or removed meanwhile: drain() leaves shared tiers alone
            tier.free(space, *select(~known, batch.hashes, batch.slots))
        core.drain(target)
        return int(np.count_nonzero(known))

    # Room ahead of need

    def _run_ahead(self) -> None:
        core = self._core
        while not core.closing.is_set():
            self._ahead_wanted.wait(1.0)
            self._ahead_wanted.clear()
            if core.closing.is_set() or not self.keeps_evicted():
                continue  # what is dropped without writing makes room at once, when it is needed
            try:
                self._make_ahead()
            except Exception:  # the thread must survive; allocations still evict for themselves
                log.exception("making room ahead failed")

    def _make_ahead(self) -> None:
        core = self._core
        seen: set[int] = set()
        for space in core.spaces():
            slot_bytes = slot_bytes_for(space.block_bytes)
            if slot_bytes in seen:
                continue
            seen.add(slot_bytes)
            wanted = int(core.dram.slot_map.capacity_slots(slot_bytes) * core.config.dram.free_ahead)
            while not core.closing.is_set():
                core.drain(TierKind.DRAM)
                missing = wanted - core.dram.available(space)
                if missing <= 0:
                    break
                victims = Victims(
                    *core.index.victims(TierKind.DRAM, core.size_class(space), min(missing, _CHUNK_BLOCKS))
                )
                deadline_s = time.monotonic() + core.config.save_timeout_s
                if not len(victims) or not self._dispose(TierKind.DRAM, victims, True, deadline_s):
                    break

    def close(self, timeout_s: float) -> None:
        """Ends the background thread; core.closing must be set."""
        self._ahead_wanted.set()
        self._ahead.join(timeout_s)
