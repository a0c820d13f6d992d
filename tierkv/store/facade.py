"""Store: what callers see. Match, lookup, lease, stage, load, save, remove, flush, stats; the parts do the work.

Thread safety: every method may be called from any thread. match(), lookup(), lease() and the submission of loads and
saves look things up natively and never wait for a medium (match() may wait dfs.probe_timeout_s for other nodes'
blocks). Jobs end in bounded time: at the latest at their own deadline.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from tierkv import placement
from tierkv.clock import Clock, SystemClock
from tierkv.config import StoreConfig, validate
from tierkv.errors import ClosedError, ConfigError
from tierkv.fragments import Fragments
from tierkv.jobs import Job
from tierkv.keys import Keyspace, KeyspaceSpec, as_hash_array
from tierkv.memory import Arena, Roster, slot_bytes_for
from tierkv.store.changes import CHANGES_KEPT, ChangePlace, Changes, read_changes
from tierkv.store.checks import check_fragments, check_part, check_ttl, timeout_or
from tierkv.store.core import LOOKUP_ORDER, Core, log
from tierkv.store.loading import Loader
from tierkv.store.room import Room
from tierkv.store.saving import Reservation, Saver
from tierkv.store.sharing import Sharing
from tierkv.store.statistics import StoreStats
from tierkv.store.writing import Writers
from tierkv.tiers.base import Tier
from tierkv.types import NO_SLOT, NO_TIER, BoolArray, HashArray, SlotArray, TierKind, UInt8Array

Query = tuple[Keyspace, HashArray]
_TICK_S = 0.2
_DRAM_ONLY = bytes([TierKind.DRAM])
_CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The longest prefix that the store holds: `length` blocks, and (length,) uint8: TierKind of each one's fastest."""

    length: int
    tiers: UInt8Array


class Lease:
    """A promise that blocks are neither moved nor evicted until a deadline. Ends by release(), or by itself."""

    def __init__(self, core: Core, number: int, queries: list[Query], held: list[BoolArray]) -> None:
        self._core = core
        self.number = number
        self.queries = queries
        self.held = held
        """For each query (n,) bool: which blocks were there and are now held."""

    def extend(self, ttl_s: float) -> bool:
        """Moves the deadline to `ttl_s` from now; False if the lease has ended."""
        self._core.expire()
        return self._core.index.lease_extend(self.number, self._core.clock.monotonic_s() + ttl_s)

    def release(self) -> bool:
        """Ends the lease; False if it had ended already."""
        self._core.expire()
        released = self._core.index.lease_release(self.number)
        self._core.drain(TierKind.DRAM)
        self._core.announce()
        return released

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Store:
    """A tiered store of immutable KV-cache blocks on one node.

    `clock` is read for deadlines of leases and parts. `wrap_tier` is applied to each tier below DRAM: for limits,
    statistics or faults around the tier. `roster` belongs to DRAM that another process keeps (the agent's keep_dram):
    its blocks are known again.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        clock: Clock | None = None,
        wrap_tier: Callable[[Tier], Tier] | None = None,
        roster: Roster | None = None,
    ) -> None:
        validate(config)
        clock = clock or SystemClock()
        opened: list[Tier] = []
        try:
            # Imported where they are used: a store of DRAM alone needs neither LMDB nor io_uring.
            if config.nvme is not None:
                from tierkv.tiers.nvme import NvmeTier

                opened.append(NvmeTier(config.nvme, clock=clock))
            if config.dfs is not None:
                from tierkv.tiers.dfs import DfsTier

                opened.append(DfsTier(config.dfs, clock=clock))
            lower = {tier.info.kind: wrap_tier(tier) if wrap_tier else tier for tier in opened}
            core = Core(config, clock, lower, roster)
        except BaseException:
            for tier in opened:
                tier.close()
            raise
        self._core = core
        self._closed = False
        self._close_lock = threading.Lock()
        self._recover()
        self._room = Room(core)
        self._writers = Writers(core, self._room)
        self._saver = Saver(core, self._room, self._writers)
        self._loader = Loader(core, self._room)
        self._sharing = [
            Sharing(core, kind, config.dfs.rescan_s)
            for kind, tier in lower.items()
            if tier.info.shared and config.dfs is not None
        ]
        self._ticker = threading.Thread(target=self._tick, name="tierkv-tick", daemon=True)
        self._ticker.start()

    def _recover(self) -> None:
        """Makes known what the node's own tiers kept over a restart. Shared tiers are listed in the background."""
        core = self._core
        for kind, tier in [*core.lower.items(), (TierKind.DRAM, core.dram)]:
            if tier.info.shared:
                continue
            for residents in tier.recover():
                space = core.register(residents.space)
                # The tier has the oldest first; the index takes the most recent first.
                hashes = np.ascontiguousarray(residents.hashes[::-1])
                slots = np.ascontiguousarray(residents.slots[::-1])
                added = core.index.insert(space.number, hashes, kind, slots, core.size_class(space))
                if not added.all():
                    tier.free(
                        space, np.ascontiguousarray(hashes[~added]), np.ascontiguousarray(slots[~added])
                    )

    # Keyspaces

    def open(self, spec: KeyspaceSpec) -> Keyspace:
        """Opens a keyspace; the same spec gives the same object. KeyspaceError or ConfigError if it cannot be held."""
        self._check_open()
        spec.validate()
        config, slot_bytes = self._core.config, slot_bytes_for(spec.block_bytes)
        limits = [
            ("dram.slab_bytes", config.dram.slab_bytes),
            ("dram.capacity_bytes", config.dram.capacity_bytes),
        ]
        limits.append(("staging_bytes", config.staging_bytes))
        if config.nvme is not None:
            limits.append(("nvme.slab_bytes", config.nvme.slab_bytes))
            limits.append(("nvme.capacity_bytes", config.nvme.capacity_bytes))
        for name, limit in limits:
            if slot_bytes > limit:
                raise ConfigError(
                    f"a block of {spec.model}/{spec.group} takes {slot_bytes} bytes, but {name} is {limit}: raise it "
                    f"to at least one block, better to hundreds"
                )
        return self._core.register(spec)

    # Looking up

    def match(self, space: Keyspace, hashes: HashArray) -> Match:
        """The longest prefix of `hashes` ((n, 32) uint8, in the order of the chain) that the store holds."""
        since_s = time.perf_counter()
        hashes = self._checked(space, hashes)
        core = self._core
        core.expire()
        masks = core.index.prefix(space.number, hashes)
        if len(masks) < len(hashes) and core.config.dfs is not None:
            for sharing in self._sharing:
                missed = np.ascontiguousarray(hashes[len(masks) :])
                if sharing.probe(space, missed, core.config.dfs.probe_timeout_s):
                    masks = core.index.prefix(space.number, hashes)
        found = Match(len(masks), placement.fastest(masks))
        core.counters.add_match(len(hashes), len(masks), since_s)
        return found

    def lookup(self, queries: Sequence[Query]) -> list[UInt8Array]:
        """For each query (n,) uint8: the mask of the tiers (bit TierKind) that hold each block, 0 for none."""
        since_s = time.perf_counter()
        self._core.expire()
        masks = [
            self._core.index.lookup(space.number, self._checked(space, hashes)) for space, hashes in queries
        ]
        self._core.counters.observe("lookup", since_s)
        return masks

    def touch(self, space: Keyspace, hashes: HashArray, *, reused: bool = True) -> None:
        """Makes the blocks of a chain most recently used, its head the most recent. `reused`: as another use of them,
        which second-touch admission asks for."""
        self._core.touch(space, self._checked(space, hashes), reused=reused)

    def changes(
        self, spaces: Sequence[Keyspace], after: ChangePlace | None = None, count: int = CHANGES_KEPT
    ) -> Changes:
        """What came into a tier and what went since `after`, of these keyspaces, `count` changes at most; a place to go
        on from. None: only that place, from which on nothing is missed.

        To know what is where at any time: take a place, lookup(), then apply changes. Where `complete` is false,
        changes were lost: look up again. Looks at no more than the latest CHANGES_KEPT changes of all keyspaces.
        """
        self._check_open()
        return read_changes(self._core, spaces, after, count)

    # Holding

    def lease(self, queries: Sequence[Query], ttl_s: float) -> Lease:
        """Holds the blocks that are there, each in its fastest tier, for `ttl_s` seconds at most."""
        check_ttl(ttl_s)
        checked = [(space, self._checked(space, hashes)) for space, hashes in queries]
        core = self._core
        core.expire()
        number = core.index.lease(core.clock.monotonic_s() + ttl_s)
        held = [
            core.index.lease_add(number, space.number, hashes, LOOKUP_ORDER) != NO_TIER
            for space, hashes in checked
        ]
        return Lease(core, number, checked, held)

    def stage(
        self,
        lease: Lease,
        timeout_s: float | None = None,
        *,
        make_room: bool = False,
        load_part: int | None = None,
    ) -> Job:
        """Brings the leased blocks to DRAM and holds them there too. The job has the blocks of all queries in a row.

        OK: in DRAM. NO_SPACE: DRAM has no room now; the block stays held where it is. make_room waits for other blocks
        to be written below where that makes room. `load_part`: the caller goes on to copy that part out of DRAM itself,
        so that this counts as a load in the statistics.
        """
        self._check_open()
        timeout_s = timeout_or(timeout_s, self._core.config.load_timeout_s)
        whole = Job(sum(len(hashes) for _, hashes in lease.queries))
        start = 0
        for space, hashes in lease.queries:
            part = Job(len(hashes))
            where = slice(start, start + len(hashes))
            part.add_done_callback(lambda done, where=where: whole.settle(where, done.status))  # type: ignore[misc]
            self._loader.submit(
                space, hashes, None, load_part or 0, timeout_s, job=part, lease=lease.number, make_room=make_room,
                counted=load_part is not None,
            )  # fmt: skip
            start += len(hashes)
        return whole

    # Moving

    def load(
        self,
        space: Keyspace,
        hashes: HashArray,
        into: Fragments,
        part: int = 0,
        timeout_s: float | None = None,
    ) -> Job:
        """Loads part `part` of each block into the caller's memory.

        Per block OK, MISS, CORRUPT, TIMEOUT or IO_ERROR; the bytes of `into` are only meaningful where it is OK, and
        are not touched after the job is done. Until then the memory must stay valid.
        """
        hashes = self._checked(space, hashes)
        check_fragments(space, hashes, into, part)
        return self._loader.submit(
            space, hashes, into, part, timeout_or(timeout_s, self._core.config.load_timeout_s)
        )

    def save(
        self,
        space: Keyspace,
        hashes: HashArray,
        from_: Fragments,
        part: int = 0,
        timeout_s: float | None = None,
    ) -> Job:
        """Saves part `part` of each block from the caller's memory, which must stay as it is until the job is done.

        Per block OK (stored, or known already), DROPPED (no room, or the queue is full), TIMEOUT or CANCELLED. A
        block can be matched when its last part is in; it is dropped if that takes longer than save_timeout_s.
        """
        hashes = self._checked(space, hashes)
        check_fragments(space, hashes, from_, part)
        self._core.expire()
        return self._saver.submit(
            space, hashes, from_, part, timeout_or(timeout_s, self._core.config.save_timeout_s)
        )

    # For processes that move their own bytes (the agent's clients)

    @property
    def arena(self) -> Arena:
        """The DRAM tier's memory, to be mapped by others where the config says dram.shared."""
        return self._core.dram.arena

    def new_session(self) -> tuple[int, int]:
        """For a process that will map the arena: (number, descriptor of the memfd). The descriptor is the caller's to
        pass on and close. The number (0 where nobody keeps the memory) is what reserve() is told."""
        self._check_open()
        if self._core.roster is not None:
            return self._core.roster.new_session()
        assert self.arena.fd is not None  # dram.shared
        return 0, os.dup(self.arena.fd)

    def reserve(
        self,
        space: Keyspace,
        hashes: HashArray,
        part: int = 0,
        timeout_s: float | None = None,
        *,
        session: int = 0,
    ) -> Reservation:
        """A save whose bytes the caller writes into the DRAM slots that it is granted; see Reservation."""
        hashes = self._checked(space, hashes)
        check_part(space, part)
        self._core.expire()
        return self._saver.reserve(
            space, hashes, part, timeout_or(timeout_s, self._core.config.save_timeout_s), session
        )

    def dram_slots(self, lease: Lease, space: Keyspace, hashes: HashArray) -> SlotArray:
        """Holds the blocks' DRAM copies by `lease` too: (n,) uint32 their slots, NO_SLOT where there is none.

        The slots stay what they are until the lease ends; whether it has, only its release() tells.
        """
        index, hashes = self._core.index, self._checked(space, hashes)
        slots, generations = index.resolve(space.number, hashes, TierKind.DRAM)
        leased = index.lease_add(lease.number, space.number, hashes, _DRAM_ONLY) != NO_TIER
        # Removed and saved again in between: it may be another copy that is held, and that only for others.
        held = leased & index.valid(space.number, hashes, TierKind.DRAM, slots, generations)
        return np.where(held, slots, np.uint32(NO_SLOT))

    # Removing

    def remove(self, space: Keyspace, hashes: HashArray) -> int:
        """Removes blocks from every tier, durably; returns how many copies that were."""
        hashes = self._checked(space, hashes)
        core = self._core
        removed = core.remove(space, hashes)
        for tier in core.lower.values():
            tier.forget(space, hashes)
        for kind in core.tiers:
            core.drain(kind)
        return removed

    def clear(self, space: Keyspace, timeout_s: float = 30.0) -> int:
        """Removes the whole keyspace from every tier, what is being saved or moved included (weights were updated).

        Saves that were submitted before are cancelled. Returns how many copies were removed.
        """
        self._check_open()
        core = self._core
        core.check_space(space)
        core.new_epoch(space)
        removed = core.remove(space, None)
        # What is on its way down now finds its source gone and is undone; then nothing can come back by itself.
        self._room.wait_for_current(time.monotonic() + timeout_s)
        for tier in core.lower.values():
            tier.forget(space, None)
        for kind in core.tiers:
            core.drain(kind)
        return removed

    def wait_idle(self, timeout_s: float = 60.0) -> bool:
        """Waits until no save and no write-through is queued or under way; False if some still is at `timeout_s`."""
        self._check_open()
        deadline_s = time.monotonic() + timeout_s
        return self._saver.wait_idle(deadline_s) and self._writers.wait_idle(deadline_s)

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Waits for the saves under way, then writes to the next tier what only DRAM holds; False if not all was
        written by `timeout_s`. True means that a restart finds it (unless that tier had to evict it)."""
        self._check_open()
        deadline_s = time.monotonic() + timeout_s
        return self.wait_idle(timeout_s) and self._writers.flush(deadline_s)

    # Insight

    def stats(self) -> StoreStats:
        """Counters since the store was opened, and what it holds now."""
        core = self._core
        core.expire()
        index, counters = core.index.stats(), core.counters
        drops = counters.drops()
        return StoreStats(
            tiers={
                kind.name.lower(): counters.tier(
                    kind,
                    capacity_bytes=tier.info.capacity_bytes,
                    used_bytes=tier.used_bytes(),
                    blocks=index[f"ready_{kind.name.lower()}"],
                    healthy=tier.healthy(),
                )
                for kind, tier in core.tiers.items()
            },
            saved_blocks=counters.total("saved"),
            known_blocks=counters.total("known"),
            dropped_blocks=sum(drops.values()),
            drops=drops,
            load_misses=counters.misses(),
            corrupt_blocks=counters.total("corrupt"),
            pins=index["pins"],
            pending_blocks=index["pending"],
            leases=index["leases"],
            save_queue_blocks=self._saver.queued_blocks,
            write_queue_blocks=self._writers.queued_blocks,
            load_queue_blocks=self._loader.queued_blocks,
            match_requested_blocks=counters.total("match_requested"),
            match_found_blocks=counters.total("match_found"),
            latency=counters.latency(),
            index_entries=index["entries"],
            index_bytes=index["bytes"],
        )

    @property
    def notes(self) -> list[str]:
        """What works less well than it could on this machine, and what to set."""
        return list(self._core.dram.arena.notes)

    # Ending

    def close(self, flush_timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Writes what only DRAM holds to the next tier (0: do not), settles every job and ends. Idempotent."""
        with self._close_lock:
            if self._closed:
                return
            if flush_timeout_s > 0 and self._core.lower and not self.flush(flush_timeout_s):
                log.warning("closing: not everything in DRAM could be written within %g s", flush_timeout_s)
            self._closed = True
        core = self._core
        core.closing.set()
        core.tick.set()
        core.announce()
        self._saver.close(_CLOSE_TIMEOUT_S)
        self._writers.close(_CLOSE_TIMEOUT_S)
        self._loader.close(_CLOSE_TIMEOUT_S)
        self._room.close(_CLOSE_TIMEOUT_S)
        for sharing in self._sharing:
            sharing.close(_CLOSE_TIMEOUT_S)
        for tier in core.lower.values():
            tier.close()
        self._ticker.join(_CLOSE_TIMEOUT_S)
        core.tidy()
        core.pool.close()
        core.staging.close()
        core.dram.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Checks

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the store is closed: open a new one")

    def _checked(self, space: Keyspace, hashes: HashArray) -> HashArray:
        self._check_open()
        self._core.check_space(space)
        return as_hash_array(hashes)

    def _tick(self) -> None:
        """Ends what has expired, and cleans up after transfers that outlived their deadline."""
        core = self._core
        while not core.closing.is_set():
            core.tick.wait(_TICK_S)
            core.tick.clear()
            try:
                core.expire()
                core.tidy()
                if core.dram.release_left():
                    core.announce()
                for kind in core.tiers:
                    core.drain(kind)
            except Exception:  # the thread must survive
                log.exception("the store's clean-up failed")
