"""The committer: the one thread that changes the catalog.

Writes whose bytes are on the medium and deletions queue up here; one transaction takes what has come together
while the last one was committed (group commit): when a job's last bytes have landed, when 512 blocks wait, when
somebody waits for a deletion, or after 50 ms. With sync "power" the slot file is synced before. The order of the
queue is kept, so a deletion that was asked for after a write removes it.

Deletions that could not be committed stay owed: their slots stay taken and they are tried again every
second.

Thread safety: every method may be called from any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tierkv.catalog import CODEC_NONE, ENTRY, AddKeyspace, Catalog, CatalogWriteError, Change, Delete, Put
from tierkv.clock import Clock
from tierkv.errors import ArgumentError, FormatError, StorageError
from tierkv.jobs import Job
from tierkv.keys import Keyspace
from tierkv.memory import slot_bytes_for
from tierkv.tiers.nvme_table import Found, SlotTable, names_of
from tierkv.types import (
    NO_SLOT,
    BlockStatus,
    BoolArray,
    HashArray,
    Int64Array,
    SlotArray,
    UInt8Array,
    UInt32Array,
)

_log = logging.getLogger(__name__)
GROUP_BLOCKS = 512
MOST_BLOCKS = 8192
LONGEST_WAIT_S = 0.05
OWED_PAUSE_S = 1.0


@dataclass(slots=True, eq=False)
class WriteChunk:
    """Some blocks of one write job: ready to commit when their bytes and their checksums are there."""

    space: Keyspace
    slot_bytes: int
    hashes: HashArray
    slots: SlotArray
    lengths: Int64Array
    addresses: Int64Array
    job: Job
    start: int
    """Where the chunk's blocks begin in the job."""
    trial: bool
    submitted_s: float
    status: UInt8Array
    """(n,) what the engine said; CANCELLED where the block was forgotten meanwhile."""
    checksums: UInt32Array | None = None
    steps_left: int = 2
    cancelled: BoolArray | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def cancel(self, which: BoolArray | None) -> None:
        """Blocks (all of them for None) that must not be committed any more."""
        with self.lock:
            everything = np.ones(len(self.hashes), np.bool_)
            old = self.cancelled if self.cancelled is not None else ~everything
            self.cancelled = old | (everything if which is None else which)

    def outcome(self) -> UInt8Array:
        with self.lock:
            if self.cancelled is None:
                return self.status.copy()
            cancelled = self.cancelled & (self.status == BlockStatus.OK)
            return np.where(cancelled, np.uint8(BlockStatus.CANCELLED), self.status)


@dataclass(slots=True, eq=False)
class Deletion:
    """Blocks to delete; hashes None: all of the keyspace. `done` is set when it was tried, `committed`
    tells."""

    space: Keyspace
    slot_bytes: int
    hashes: HashArray | None
    slots: SlotArray | None
    free_slots: SlotArray | None
    """Slots that become allocatable once this is committed."""
    generations: np.ndarray[tuple[int], np.dtype[np.uint64]] | None = None
    done: threading.Event = field(default_factory=threading.Event)
    committed: bool = False


class Committer:
    """Owns all changes of `catalog` from start to close()."""

    def __init__(
        self,
        catalog: Catalog,
        table: SlotTable,
        clock: Clock,
        *,
        sync: Callable[[], BlockStatus] | None,
        ended: Callable[[WriteChunk, UInt8Array], None],
        release: Callable[[SlotArray], None],
    ) -> None:
        """sync: makes the slot file durable. ended: told what became of a chunk. release: frees slots."""
        self._catalog = catalog
        self._table = table
        self._clock = clock
        self._sync = sync
        self._ended = ended
        self._release = release
        self._stored = set(catalog.keyspaces())
        self._condition = threading.Condition()
        self._queue: deque[WriteChunk | Deletion] = deque()
        self._queued_blocks = 0
        self._oldest_s = 0.0
        self._urgent = False
        self._owed: list[Deletion] = []
        self._owed_until_s = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tierkv-nvme-commit", daemon=True)
        self._thread.start()

    def add(self, chunk: WriteChunk, urgent: bool) -> None:
        """Queues a chunk whose bytes and checksums are there."""
        self._append(chunk, len(chunk.hashes), urgent)

    def delete(self, deletion: Deletion) -> None:
        """Queues a deletion; wait for its `done`."""
        self._append(deletion, 0, True)

    def owes(self) -> bool:
        """True while deletions could not be committed."""
        with self._condition:
            return bool(self._owed)

    def close(self, timeout_s: float) -> bool:
        """Commits what is queued and ends the thread; False if it is stuck in the medium."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _append(self, item: WriteChunk | Deletion, blocks: int, urgent: bool) -> None:
        with self._condition:
            if not self._queue:
                self._oldest_s = time.monotonic()
            self._queue.append(item)
            self._queued_blocks += blocks
            self._urgent |= urgent
            if self._urgent or self._queued_blocks >= GROUP_BLOCKS or len(self._queue) == 1:
                self._condition.notify()

    # The committer's thread.

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._due():
                    if self._closed:
                        return
                    self._condition.wait(self._pause_s())
                items = self._take()
                owed, self._owed = self._owed, []
            try:
                self._commit(items, owed)
            except Exception:  # a fault of ours must not leave jobs open for ever
                _log.exception("the catalog's thread failed on a batch: its blocks end as IO_ERROR")
                self._end([item for item in items if isinstance(item, WriteChunk)], {}, BlockStatus.IO_ERROR)
                self._finish(owed + [item for item in items if isinstance(item, Deletion)], committed=False)

    def _due(self) -> bool:
        now = time.monotonic()
        if self._owed and (now >= self._owed_until_s or self._closed):
            self._owed_until_s = now + OWED_PAUSE_S
            return not self._closed or bool(self._queue)
        if not self._queue:
            return False
        full = self._queued_blocks >= GROUP_BLOCKS or now - self._oldest_s >= LONGEST_WAIT_S
        return self._urgent or full or self._closed

    def _pause_s(self) -> float:
        now, until = time.monotonic(), time.monotonic() + 60.0
        if self._queue:
            until = min(until, self._oldest_s + LONGEST_WAIT_S)
        if self._owed:
            until = min(until, self._owed_until_s)
        return max(0.001, until - now)

    def _take(self) -> list[WriteChunk | Deletion]:
        items: list[WriteChunk | Deletion] = []
        blocks = 0
        while self._queue and blocks < MOST_BLOCKS:
            item = self._queue.popleft()
            blocks += len(item.hashes) if isinstance(item, WriteChunk) else 0
            items.append(item)
        self._queued_blocks -= blocks
        self._urgent = self._urgent and bool(self._queue)
        self._oldest_s = time.monotonic()
        return items

    def _commit(self, items: list[WriteChunk | Deletion], owed: list[Deletion]) -> None:
        chunks = [item for item in items if isinstance(item, WriteChunk)]
        deletions = owed + [item for item in items if isinstance(item, Deletion)]
        whole = [deletion for deletion in deletions if deletion.hashes is None]
        for deletion in whole:
            self._finish([deletion], committed=self._delete_keyspace(deletion.space))
        deletions = [deletion for deletion in deletions if deletion.hashes is not None]
        failed = BlockStatus.OK
        if chunks and self._sync is not None:
            failed = self._sync()
        puts: dict[WriteChunk, Put] = {}
        new_keyspaces: dict[bytes, Change] = {}
        if failed == BlockStatus.OK:
            for chunk in chunks:
                puts[chunk] = self._put(chunk)
                if chunk.space.digest not in self._stored:
                    new_keyspaces[chunk.space.digest] = AddKeyspace(chunk.space.digest, chunk.space.spec)
        changes = self._deletions(deletions)
        committed = self._try([*new_keyspaces.values(), *changes, *puts.values()])
        if committed == BlockStatus.OK:
            self._stored.update(new_keyspaces)
        elif puts and changes:
            self._finish(deletions, committed=self._try(changes) == BlockStatus.OK)
            deletions = []
        self._finish(deletions, committed=committed == BlockStatus.OK)
        self._end(chunks, puts, failed if failed != BlockStatus.OK else committed)

    def _try(self, changes: list[Change]) -> BlockStatus:
        try:
            if changes:
                self._catalog.commit(changes)
        except CatalogWriteError as error:
            _log.warning("%s", error)
            return error.status
        return BlockStatus.OK

    def _put(self, chunk: WriteChunk) -> Put:
        """The chunk's good blocks; chunk.status holds what is final about the others."""
        chunk.status = chunk.outcome()
        good = chunk.status == BlockStatus.OK
        assert chunk.checksums is not None
        entries = np.zeros(int(good.sum()), ENTRY)
        entries["slot"] = chunk.slots[good]
        entries["length"] = chunk.lengths[good]
        entries["checksum"] = chunk.checksums[good]
        entries["written_s"] = int(self._clock.wall_s())
        entries["codec"] = CODEC_NONE
        return Put(chunk.space.digest, chunk.hashes[good], entries)

    def _deletions(self, deletions: list[Deletion]) -> list[Change]:
        """The changes, after making the blocks unfindable in the table."""
        changes: list[Change] = []
        for deletion in deletions:
            assert deletion.hashes is not None
            slots, digest = deletion.slots, deletion.space.digest
            if slots is None:
                entries = self._catalog.get(digest, deletion.hashes)
                there = entries["slot"] != NO_SLOT
                self._table.drop(
                    deletion.slot_bytes, entries["slot"][there], names_of(digest, deletion.hashes[there])
                )
            changes.append(Delete(digest, deletion.hashes, slots, deletion.generations))
        return changes

    def _delete_keyspace(self, space: Keyspace) -> bool:
        try:
            for batch in self._catalog.scan(space.digest):
                self._table.drop(
                    slot_bytes_for(space.block_bytes),
                    batch.entries["slot"],
                    names_of(space.digest, batch.hashes),
                )
            self._catalog.delete_keyspace(space.digest)
        except (StorageError, FormatError) as error:
            _log.warning("%s", error)
            return False
        return True

    def _finish(self, deletions: list[Deletion], *, committed: bool) -> None:
        for deletion in deletions:
            deletion.committed = committed
            if committed and deletion.free_slots is not None:
                try:
                    self._release(deletion.free_slots)
                except ArgumentError:  # freed twice by the caller: what others wrote must not fail for it
                    _log.exception("slots were freed that are not taken")
        if not committed and deletions:
            with self._condition:
                self._owed += deletions
                self._owed_until_s = time.monotonic() + OWED_PAUSE_S
        for deletion in deletions:
            deletion.done.set()

    def _end(self, chunks: list[WriteChunk], puts: dict[WriteChunk, Put], failed: BlockStatus) -> None:
        for chunk in chunks:
            outcome = chunk.status
            if failed != BlockStatus.OK:
                outcome = np.where(outcome == BlockStatus.OK, np.uint8(failed), outcome)
            elif chunk in puts:
                put = puts[chunk]
                found = Found(put.entries["generation"], put.entries["checksum"], put.entries["length"])
                names = names_of(put.digest, put.hashes)
                self._table.put(chunk.slot_bytes, put.entries["slot"], names, found)
            self._ended(chunk, outcome)
