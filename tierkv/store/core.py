"""Core: what the parts of a store share. The index, the tiers, the keyspaces, and the flow of freed slots.

Ownership: a slot belongs to the index from the moment a residency is made with it; when that residency ends, the
slot comes back through take_freed() and drain() gives it to its tier. A slot that was allocated but not accepted by
the index belongs to whoever allocated it.

Thread safety: all methods may be called from any thread. `changed` is notified whenever a transfer ends or room is
made; whoever waits on it waits with a deadline and looks again.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue

import numpy as np

from tierkv._native import RESERVE_NO_SLOT, CopyPool, Index
from tierkv.clock import Clock
from tierkv.config import Admission, StoreConfig
from tierkv.errors import ConfigError, KeyspaceError
from tierkv.jobs import Job
from tierkv.keys import Keyspace, KeyspaceSpec
from tierkv.memory import Arena, Roster, SlotMap, slot_bytes_for
from tierkv.store.statistics import Counters
from tierkv.tiers.base import Batch, Tier
from tierkv.tiers.dram import DramTier
from tierkv.types import (
    ALL_TIERS,
    NO_SLOT,
    BoolArray,
    HashArray,
    SlotArray,
    TierKind,
    UInt8Array,
    UInt32Array,
)

log = logging.getLogger("tierkv.store")

LOOKUP_ORDER = bytes([TierKind.DRAM, TierKind.NVME, TierKind.DFS])
NO_SLOTS = np.empty(0, np.uint32)
_MAX_CLASSES = 255
_SLABS_A_SIZE = 8
"""With fewer slabs for each size of block, sizes crowd each other out noticeably."""
_CLOSING_NOTICED_S = 0.25


class Core:
    """Shared state of a store's parts."""

    def __init__(
        self,
        config: StoreConfig,
        clock: Clock,
        lower: dict[TierKind, Tier],
        roster: Roster | None = None,
    ) -> None:
        self.config = config
        self.clock = clock
        self.index = Index()
        self.feed = 1 + secrets.randbelow((1 << 62) - 1)
        """Names this store's changes, see changes.py."""
        self.pool = CopyPool(config.copy_threads)
        self.counters = Counters()
        self.dram = DramTier(config.dram, copy_pool=self.pool, roster=roster)
        self.roster = roster
        """Where DRAM's blocks are noted for a process that is restarted; None where nobody keeps the memory."""
        self.lower = lower
        """The tiers below DRAM, fastest first."""
        self.tiers: dict[TierKind, Tier] = {TierKind.DRAM: self.dram, **lower}
        self.staging = Staging(config.staging_bytes)
        self.changed = threading.Condition()
        self.closing = threading.Event()
        self.tick = threading.Event()
        """Wakes the ticker before its time."""
        self._janitor: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._late_lock = threading.Lock()
        self.late = 0
        """Transfers that outlived their deadline and are not cleaned up yet."""
        self._spaces_lock = threading.Lock()
        self._by_digest: dict[bytes, Keyspace] = {}
        self._by_number: dict[int, Keyspace] = {}
        self._epochs: dict[int, int] = {}
        self._removals: dict[int, int] = {}
        self._learning = threading.Lock()
        self._classes: dict[int, int] = {}
        self._drain_locks = {kind: threading.Lock() for kind in TierKind}

    # Keyspaces

    def register(self, spec: KeyspaceSpec) -> Keyspace:
        """The keyspace of `spec`, the same object each time."""
        spec.validate()
        digest = spec.digest()
        with self._spaces_lock:
            space = self._by_digest.get(digest)
            if space is None:
                self._class_of(slot_bytes_for(spec.block_bytes))
                space = Keyspace(spec, digest, len(self._by_number) + 1)
                self._by_digest[digest] = space
                self._by_number[space.number] = space
                self._epochs[space.number] = 0
            return space

    def check_space(self, space: Keyspace) -> None:
        """Raises KeyspaceError if `space` was not opened by this store."""
        if not isinstance(space, Keyspace) or self._by_number.get(space.number) is not space:
            raise KeyspaceError(
                f"{space} was not opened by this store: use the Keyspace that Store.open() returned"
            )

    def space(self, number: int) -> Keyspace:
        return self._by_number[number]

    def spaces(self) -> list[Keyspace]:
        with self._spaces_lock:
            return list(self._by_number.values())

    def epoch(self, space: Keyspace) -> int:
        """Grows each time the keyspace is cleared: what was submitted before must not be stored after."""
        return self._epochs[space.number]

    def new_epoch(self, space: Keyspace) -> None:
        with self._spaces_lock:
            self._epochs[space.number] += 1

    def remove(self, space: Keyspace, hashes: HashArray | None) -> int:
        """Removes blocks (None: all) from the index, so that what was learnt before is not added any more."""
        with self._learning:
            self._removals[space.number] = self.removals(space) + 1
            with self._hidden(space, hashes):
                if hashes is None:
                    return self.index.clear(space.number)
                return self.index.remove(space.number, hashes, ALL_TIERS)

    @contextmanager
    def _hidden(self, space: Keyspace, hashes: HashArray | None) -> Iterator[None]:
        """Sees to it that a restart does not find what is removed meanwhile, though somebody may read it still."""
        if self.roster is None:
            yield
            return
        with self.roster.lock:
            if hashes is None:
                self.roster.hidden_space(space)
            else:
                slots = self.index.resolve(space.number, hashes, TierKind.DRAM)[0]
                self.roster.hidden(slots[slots != NO_SLOT])
            yield

    def removals(self, space: Keyspace) -> int:
        """Grows with each removal: see learn()."""
        return self._removals.get(space.number, 0)

    def learn(self, kind: TierKind, space: Keyspace, hashes: HashArray, removals: int) -> bool:
        """Makes known what a shared tier was found to hold, most recent first; False, and nothing is added, when
        blocks of the keyspace were removed since `removals` was read, as these may be among them."""
        with self._learning:
            if self.removals(space) != removals:
                return False
            slots = np.zeros(len(hashes), np.uint32)
            self.index.insert(space.number, hashes, kind, slots, self.size_class(space))
            return True

    def _class_of(self, slot_bytes: int) -> int:
        found = self._classes.get(slot_bytes)
        if found is None:
            if len(self._classes) >= _MAX_CLASSES:
                raise ConfigError(
                    f"a store holds at most {_MAX_CLASSES} different block sizes; {slot_bytes} is one more"
                )
            found = self._classes[slot_bytes] = len(self._classes)
            self._warn_of_few_slabs()
        return found

    def _warn_of_few_slabs(self) -> None:
        """A slab holds blocks of one size: with few of them, some sizes find no room while others have it."""
        for name, tier in (("dram", self.config.dram), ("nvme", self.config.nvme)):
            if tier is None:
                continue
            slabs, sizes = tier.capacity_bytes // tier.slab_bytes, len(self._classes)
            if sizes > 1 and slabs < _SLABS_A_SIZE * sizes:
                log.warning(
                    "%s: %d slabs of %d bytes for %d different sizes of block: one may lack room while another has "
                    "plenty: raise %s.capacity_bytes, or lower %s.slab_bytes",
                    name, slabs, tier.slab_bytes, sizes, name, name,
                )  # fmt: skip

    def size_class(self, space: Keyspace) -> int:
        """The number of the keyspace's slot size in the index."""
        return self._classes[slot_bytes_for(space.block_bytes)]

    def class_count(self) -> int:
        """How many different slot sizes are in use."""
        return len(self._classes)

    def admission(self, kind: TierKind) -> Admission:
        """When blocks are written to a lower tier."""
        tier = self.config.nvme if kind is TierKind.NVME else self.config.dfs
        assert tier is not None  # only configured tiers are asked for
        return tier.admission

    def touch(self, space: Keyspace, hashes: HashArray, *, reused: bool, mask: int = ALL_TIERS) -> None:
        """Makes the blocks most recently used in the fastest tier that holds each, in the order that the eviction
        policy has; `reused` also marks them as used again, which second-touch admission asks for.

        Copies further down keep their place: while a block is above, its copy below is the first to go, so that the
        tiers together hold more different blocks. It is renewed when the upper copy is evicted (Room._drop).
        """
        order = self.config.eviction
        self.index.touch(
            space.number, hashes, mask, order == "lru", mark=reused, move=order != "fifo", fastest=True
        )
        if self.roster is not None and order != "fifo" and mask >> TierKind.DRAM & 1:
            slots = self.index.resolve(space.number, hashes, TierKind.DRAM)[0]
            self.roster.used(slots[slots != NO_SLOT], first_is_latest=order == "lru")

    # Slots

    def name_slots(self, space: Keyspace, hashes: HashArray, slots: SlotArray, owner: int = 0) -> None:
        """DRAM slots are reserved for blocks that session `owner` writes. Before that is told."""
        if self.roster is not None:
            self.roster.named(space, hashes, slots, owner)

    def reserve_dram(
        self,
        space: Keyspace,
        hashes: HashArray,
        part: int,
        part_count: int,
        allocate: Callable[[int], SlotArray],
    ) -> tuple[UInt8Array, SlotArray, UInt32Array]:
        """Index.reserve() in DRAM: (outcome, slot, handle). `allocate(count)` is asked for the slots of just those
        blocks that need one, and may give fewer."""
        deadline = self.clock.monotonic_s() + self.config.save_timeout_s
        arguments = (self.size_class(space), part, part_count, deadline)
        outcome, slots, handles, _ = self.index.reserve(
            space.number, hashes, TierKind.DRAM, NO_SLOTS, *arguments
        )
        new = np.flatnonzero(outcome == RESERVE_NO_SLOT)
        granted = allocate(len(new)) if len(new) else NO_SLOTS
        if len(granted):
            found = self.index.reserve(
                space.number, np.ascontiguousarray(hashes[new]), TierKind.DRAM, granted, *arguments
            )
            outcome[new], slots[new], handles[new] = found[:3]
            if found[3] < len(granted):
                self.dram.free_slots(granted[found[3] :])
        return outcome, slots, handles

    def commit_dram(self, handles: UInt32Array, slots: SlotArray, part: int) -> BoolArray:
        """Index.commit() of reserved DRAM slots, also for a process that is restarted."""
        if self.roster is None:
            return self.index.commit(handles, part)
        with self.roster.lock:
            whole = self.index.commit(handles, part)
            self.roster.visible(slots[whole])
            return whole

    def drain(self, kind: TierKind) -> None:
        """Gives the slots that the index freed back to their tier. May commit to a catalog: movers' threads only."""
        tier = self.tiers.get(kind)
        if tier is None:
            return
        with self._drain_locks[kind]:
            slots, spaces, hashes, _ = self.index.take_freed(kind)
            if not len(slots):
                return
            if kind is TierKind.DRAM:
                self.dram.free_slots(slots)
            elif not tier.info.shared:
                for space, where in self.by_space(spaces):
                    tier.free(space, hashes[where], slots[where])
            # A shared tier's files are other nodes' too: only eviction and remove() delete them, explicitly.
        self.announce()

    def by_space(self, spaces: UInt32Array) -> Iterator[tuple[Keyspace, np.ndarray]]:
        """Groups positions by keyspace number: (keyspace, positions in ascending order)."""
        if len(spaces) and (spaces == spaces[0]).all():
            yield self._by_number[int(spaces[0])], np.arange(len(spaces))
            return
        for number in np.unique(spaces).tolist():
            yield self._by_number[number], np.flatnonzero(spaces == number)

    def announce(self) -> None:
        """Wakes whoever waits for room or for a transfer."""
        with self.changed:
            self.changed.notify_all()

    def expire(self) -> None:
        """Ends leases and unfinished blocks whose deadline has passed."""
        leases, pending = self.index.expire(self.clock.monotonic_s())
        if pending:
            self.counters.add_dropped("incomplete", pending)
        if leases or pending:
            self.drain(TierKind.DRAM)
            self.announce()

    # Transfers

    def wait(self, job: Job, deadline_s: float) -> bool:
        """Waits for a job; False at the deadline (time.monotonic()), or soon after the store begins to close."""
        while not job.wait(min(_CLOSING_NOTICED_S, max(0.0, deadline_s - time.monotonic()))):
            if self.closing.is_set() or time.monotonic() >= deadline_s:
                return job.done()
        return True

    def write(self, kind: TierKind, batch: Batch, deadline_s: float) -> tuple[Job, bool]:
        """Writes a batch to a tier and waits for it: (job, whether it was done in time)."""
        since_s = self.counters.begin(kind, "write")
        job = self.tiers[kind].submit_write(batch)
        job.add_done_callback(lambda done: self._written(kind, batch, done, since_s))
        return job, self.wait(job, deadline_s)

    def _written(self, kind: TierKind, batch: Batch, job: Job, since_s: float) -> None:
        self.counters.end(kind, "write", since_s)
        good = job.status == 0
        self.counters.add_tier(
            kind, written_blocks=int(np.count_nonzero(good)), written_bytes=int(batch.lengths[good].sum())
        )

    def when_done(self, job: Job, action: Callable[[], None]) -> None:
        """Runs `action` on the ticker's thread once the job is done: for transfers that outlived their deadline.

        The job's callback itself runs on a thread of the tier, which must not wait for the tier.
        """
        with self._late_lock:
            self.late += 1

        def ended(_: Job) -> None:
            self._janitor.put(action)
            self.tick.set()

        job.add_done_callback(ended)

    def tidy(self) -> None:
        """Runs what when_done() has collected."""
        while True:
            try:
                action = self._janitor.get_nowait()
            except Empty:
                return
            try:
                action()
            except Exception:  # one transfer's clean-up must not keep the others from theirs
                log.exception("cleaning up after a late transfer failed")
            finally:
                with self._late_lock:
                    self.late -= 1

    def batch(self, space: Keyspace, hashes: HashArray, slots: SlotArray, addresses: np.ndarray) -> Batch:
        """A batch of whole blocks."""
        return Batch(space, hashes, slots, addresses, np.full(len(hashes), space.block_bytes, np.int64))


class Staging:
    """Memory for blocks on their way, when DRAM has no room for them: aligned, slot-sized, mapped on first use."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = slot_bytes_for(size_bytes)
        self._slots = SlotMap(self.size_bytes, self.size_bytes)
        self._arena: Arena | None = None
        self._lock = threading.Lock()

    def allocate(self, space: Keyspace, count: int) -> tuple[SlotArray, np.ndarray]:
        """Up to `count` buffers for blocks of `space`: ((k,) slot, (k,) address); k may be 0."""
        with self._lock:
            if self._arena is None:
                self._arena = Arena.create(
                    size_bytes=self.size_bytes, shared=False, huge_pages="auto", lock_memory="off", first_touch="never",
                    name="staging",
                )  # fmt: skip
            slot_bytes = slot_bytes_for(space.block_bytes)
            slots = self._slots.allocate(slot_bytes, min(count, self._slots.available(slot_bytes)))
            assert slots is not None  # not more than available, under the lock
            return slots, self._arena.addresses(slots)

    def free(self, slots: SlotArray) -> None:
        with self._lock:
            self._slots.free(slots)

    def close(self) -> None:
        with self._lock:
            if self._arena is not None:
                self._arena.close()
                self._arena = None


def wait_for_change(core: Core, deadline_s: float, longest_s: float = 0.05) -> bool:
    """Waits until something changes, at most `longest_s`; False when time.monotonic() has passed `deadline_s`.

    Real time, not the injected clock: these waits are for threads and devices.
    """
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        return False
    with core.changed:
        core.changed.wait(min(left_s, longest_s))
    return True


def select(mask: BoolArray | np.ndarray, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """The arrays' rows at `mask`, C-contiguous."""
    return tuple(np.ascontiguousarray(array[mask]) for array in arrays)


def chunk_blocks(space: Keyspace, most_blocks: int, most_bytes: int) -> int:
    """How many blocks of `space` go into one chunk: at least one."""
    return max(1, min(most_blocks, most_bytes // slot_bytes_for(space.block_bytes)))
