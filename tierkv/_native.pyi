"""The native core: moves bytes and holds the big tables; never decides. Every call releases the GIL.

All arrays are C-contiguous numpy arrays. `hashes` are (n, 32) uint8. A `handle` names one residency (a block in a
tier); it stays valid as long as its holder has a pin on it. Bad shapes, dtypes and numbers raise ValueError before
anything has changed; nothing else is raised but MemoryError (and TypeError where an argument is no number at all).
"""

from typing import Final

import numpy as np
import numpy.typing as npt

_U8 = npt.NDArray[np.uint8]
_U32 = npt.NDArray[np.uint32]
_I64 = npt.NDArray[np.int64]
_Bool = npt.NDArray[np.bool_]

NO_SLOT: Final[int]
NO_TIER: Final[int]
RESERVE_NEW: Final[int]
RESERVE_JOINED: Final[int]
RESERVE_KNOWN: Final[int]
RESERVE_BUSY: Final[int]
RESERVE_NO_SLOT: Final[int]
FLAG_REUSED: Final[int]

class Index:
    """(keyspace number, 32-byte hash) -> residency per tier (slot, generation, pins, flags), and the order of use.

    One mutex; calls are short and batched. A residency is pending (reserved, not yet committed: never matched),
    ready, or doomed (erased while pinned: never matched again, freed at the last unpin). Slots that become free
    are queued per tier until take_freed() fetches them: the index never hands out slots.
    """

    def __init__(self, seed: int = 0) -> None: ...

    # Looking up. Only ready residencies count.
    def match(self, space: int, hashes: _U8, tier_mask: int = 15) -> int:
        """The length of the longest prefix of `hashes` in which every block is in a tier of `tier_mask` (bit t)."""
    def prefix(self, space: int, hashes: _U8, tier_mask: int = 15) -> _U8:
        """match() that tells where: (length,) uint8, the tiers of `tier_mask` that hold each block of the prefix."""
    def lookup(self, space: int, hashes: _U8) -> _U8:
        """(n,) uint8: for each block the mask of the tiers that hold it; 0 where none does."""
    def resolve(self, space: int, hashes: _U8, tier: int) -> tuple[_U32, _U32]:
        """((n,) slots, (n,) generations) in `tier`; NO_SLOT and 0 where it does not hold the block."""
    def valid(self, space: int, hashes: _U8, tier: int, slots: _U32, generations: _U32) -> _Bool:
        """(n,) bool: the block is still ready in that slot of `tier` in that generation."""

    # Adding.
    def insert(self, space: int, hashes: _U8, tier: int, slots: _U32, size_class: int) -> _Bool:
        """Adds ready residencies as most recently used, the last of the batch first, so that the first block ends
        up as the most recent. False where the block was in that tier already (ready or pending): its slot is not
        taken."""
    def reserve(
        self,
        space: int,
        hashes: _U8,
        tier: int,
        slots: _U32,
        size_class: int,
        part: int,
        part_count: int,
        deadline: float,
    ) -> tuple[_U8, _U32, _U32, int]:
        """Prepares the writing of part `part` of each block: ((n,) outcome, (n,) slot, (n,) handle, slots used).

        Outcomes: RESERVE_NEW (a slot of `slots` was taken, in order, for a new pending residency), RESERVE_JOINED
        (pending through another part: write into its slot), RESERVE_KNOWN (ready already), RESERVE_BUSY (this part is
        being written or was written, also earlier in this call, or the block is pending with another part count),
        RESERVE_NO_SLOT (`slots` was used up). NEW and JOINED hold one pin until commit() or abort(); slot and handle
        are NO_SLOT for the others. part_count is 1 to 64, parts count from 0. The block is given up at the latest
        `deadline` of its reservations (see expire()).
        """
    def commit(self, handles: _U32, part: int) -> _Bool:
        """Ends the writing of `part` and releases the reservations' pins: (n,) bool, True where this completed the
        block, which is now ready and most recently used (the first of the batch the most). False: other parts are
        missing, or it was doomed meanwhile. ValueError (nothing changed) where `part` is not reserved."""
    def abort(self, handles: _U32) -> None:
        """Gives reservations up and releases their pins: the pending blocks are doomed, all their parts with them.
        Other parts' writers keep their pins until their own commit() or abort(), so no slot is freed under them."""
    def attach(self, handles: _U32, tier: int, slots: _U32, size_class: int) -> _Bool:
        """Adds a ready residency in another `tier` to the blocks of pinned, ready `handles` (for promotion and
        demotion), most recently used, the first block the most; FLAG_REUSED goes with the block, the pins stay. False
        where the source was doomed, its keyspace is being cleared, or the block was in `tier` already: its slot is not
        taken."""
    def attach_pending(self, handles: _U32, tier: int, slots: _U32, size_class: int, deadline: float) -> _U32:
        """attach() for a copy that is still to be written: (n,) handles of pending residencies, each with a pin, for
        commit() (part 0) or abort(); NO_SLOT where the source was doomed or the block is in `tier` already or on its
        way there: its slot is not taken. So no two movers write one block to one tier."""

    # Pins.
    def acquire(self, space: int, hashes: _U8, tier_order: bytes) -> tuple[_U8, _U32, _U32, _U32]:
        """Pins each block in the first tier of `tier_order` that holds it ready: ((n,) tier, (n,) slot, (n,)
        generation, (n,) handle); NO_TIER, NO_SLOT, 0, NO_SLOT where none does."""
    def release(self, handles: _U32) -> None:
        """Releases one pin of each handle; entries of NO_SLOT are skipped. ValueError (nothing released) if a handle
        has none, or is a reservation."""

    # Order of use.
    def touch(
        self,
        space: int,
        hashes: _U8,
        tier_mask: int = 15,
        suffix_first: bool = True,
        mark: bool = True,
        move: bool = True,
        fastest: bool = False,
    ) -> None:
        """Makes the blocks most recently used (if `move`) and sets FLAG_REUSED (if `mark`) in the tiers of `tier_mask`
        that hold them, or in the fastest of these only (if `fastest`). suffix_first walks from the last block to the
        first, so that a chain loses its tail before its head."""
    def victims(self, tier: int, size_class: int, count: int) -> tuple[_U32, _U32, _U32, _U8, _U8, _U8]:
        """Pins up to `count` of the least recently used ready, unpinned blocks of that class: ((k,) handle, (k,)
        slot, (k,) keyspace number, (k, 32) hash, (k,) flags, (k,) mask of all tiers that hold the block), oldest
        first, strictly in order of last use. Costs no more for blocks that are pinned for long."""
    def in_slots(self, tier: int, slots: _U32) -> tuple[_U32, _U32, _U32, _U8, _U8, _U8]:
        """Like victims(), but all ready, unpinned residencies of `tier` whose slot lies in the sorted list `slots`.
        Used to clear a slab, so it may walk the whole tier."""
    def oldest(self, tier: int) -> tuple[_U8, _U32, _U32]:
        """((k,) size class, (k,) age, (k,) slot) of the least recently used unpinned ready block of each class of the
        tier. The age counts the calls since then that could change an order of use (insert, commit, attach, touch)."""
    def lacking(
        self, tier: int, other: int, count: int, after: int = 4294967295
    ) -> tuple[_U32, _U32, _U32, _U8, _U8, _U8]:
        """Like victims(), but of blocks in `tier` that `other` does not hold, pinned or not, in order of record
        number after `after`: for flushing. Pins them."""
    def erase(self, handles: _U32) -> None:
        """Erases pinned residencies and releases the caller's pin on each: freed now, or at the last unpin. ValueError
        (nothing changed) if a handle has no pin, or is a reservation."""
    def evict(self, handles: _U32) -> int:
        """erase(), but of what somebody else has pinned since (a lease, a load) only the caller's pin is released.
        Returns how many were erased."""

    # Removing.
    def remove(self, space: int, hashes: _U8, tier_mask: int = 15) -> int:
        """Erases the blocks from the tiers of `tier_mask`, pending ones too; returns how many residencies that were."""
    def clear(self, space: int) -> int:
        """Erases every residency of the keyspace that was there when the call began; returns how many that were. Walks
        the whole index, letting other calls in between."""
    def take_freed(self, tier: int) -> tuple[_U32, _U32, _U8, _U8]:
        """The slots that became free since the last call: ((k,) slot, (k,) keyspace number, (k, 32) hash, (k,) size
        class)."""

    # Leases: sets of pins with a deadline.
    def lease(self, deadline: float) -> int:
        """Opens an empty lease and returns its number (>= 1)."""
    def lease_add(self, lease: int, space: int, hashes: _U8, tier_order: bytes) -> _U8:
        """Pins blocks under a lease, as acquire() does: (n,) uint8 tier, or NO_TIER; all NO_TIER if it is gone."""
    def lease_extend(self, lease: int, deadline: float) -> bool:
        """Moves the deadline; False if the lease is gone."""
    def lease_release(self, lease: int) -> bool:
        """Ends a lease and its pins; False if it is gone already."""
    def expire(self, now: float) -> tuple[int, int]:
        """Ends leases and pending blocks whose deadline is <= now: (leases, pending blocks) ended."""

    # Insight.
    def log_changes(self, capacity: int) -> None:
        """From now on changes are logged, the last `capacity` of them; the first call decides how many."""
    def changes(self, after: int, count: int, spaces: _U32) -> tuple[_U32, _U8, _U8, int, int]:
        """What became ready in a tier or ceased to be: ((k,) keyspace number, (k, 32) hash, (k,) mask of the tiers that
        hold the block since, number to go on with, changes lost), oldest first.

        Changes are numbered from 0, from the first log_changes() on. Looks at up to `count` of them from number `after`
        on (beyond the end: none, and the number of the next one) and takes those of `spaces` (sorted; empty: of all).
        `lost` of them had been overwritten. After all changes are read, the last mask of each block is what holds it.
        """
    def export(
        self, space: int, tier: int, after: int = 4294967295, count: int = 65536
    ) -> tuple[_U8, _U32, _U32, int]:
        """Ready residencies in order of record number: ((k, 32) hash, (k,) slot, (k,) generation, cursor to go on
        with); the cursor is NO_SLOT at the end. A call looks at 65,536 records at most, so k may be small, or 0, before
        the end."""
    def stats(self) -> dict[str, int]:
        """entries, residencies, ready_hbm/dram/nvme/dfs, pending, doomed, pins, leases, bytes (all memory it holds)."""
    def check(self) -> None:
        """Walks everything and raises ValueError that names the first broken invariant. For tests."""

class CopyPool:
    """Copies batches of pieces on a few threads, the caller's among them. Addresses are of this process.

    Several threads may call at once; calls share the workers.
    """

    def __init__(self, threads: int = 2) -> None:
        """threads: 1 to 64, the caller's included."""
    def gather(self, bases: _I64, strides: _I64, lengths: _I64, block_ids: _I64, destinations: _I64) -> None:
        """Fragments -> slots: the pieces of block i go one behind the other to destinations[i]."""
    def gather_checksum(
        self, bases: _I64, strides: _I64, lengths: _I64, block_ids: _I64, destinations: _I64
    ) -> _U32:
        """gather() that also returns the crc32c of each block, computed while its bytes are in the cache."""
    def scatter(self, bases: _I64, strides: _I64, lengths: _I64, block_ids: _I64, sources: _I64) -> None:
        """Slots -> fragments: the inverse of gather()."""
    def copy(self, destinations: _I64, sources: _I64, lengths: _I64) -> None:
        """memcpy of each piece; pieces must not overlap."""
    def crc32c(self, addresses: _I64, lengths: _I64) -> _U32:
        """(n,) crc32c of each range."""
    def fill(self, addresses: _I64, lengths: _I64, seeds: npt.NDArray[np.uint64]) -> None:
        """Fills each range with the pseudo-random sequence of its seed (splitmix64, 8 bytes a step, little endian)."""
    def differ(self, addresses: _I64, lengths: _I64, seeds: npt.NDArray[np.uint64]) -> _Bool:
        """(n,) bool: the range differs from what fill() with that seed writes."""
    def touch(self, address: int, length: int, page_bytes: int) -> None:
        """Makes the kernel map every page of the range, writable, without changing its content; safe while others use
        the memory. MemoryError where the kernel has no memory for it or the range is not mapped."""
    def close(self) -> None:
        """Ends the workers; later calls run on the caller's thread. Idempotent."""

def crc32c(data: _U8, value: int = 0) -> int:
    """crc32c (Castagnoli) of a one-dimensional uint8 array, going on from `value`; of b'123456789': 0xE3069283."""

def crc32c_portable(data: _U8, value: int = 0) -> int:
    """The same by tables, on any CPU."""

def crc32c_implementation() -> str:
    """What crc32c() runs on here: 'sse4.2+pclmul', 'sse4.2', 'armv8' or 'portable'."""

def build_info() -> dict[str, str]:
    """compiler, build_type, optimized ('yes' or 'no'), sanitizer ('none', ...)."""
