"""Roster: what lies in each slot of a DRAM arena, in memory that outlives the process, for the one after it.

The arena and the roster are two memfds that a supervisor process holds. Layout of the roster, little-endian:

    0         8     magic        b"TKVROST1"
    8         8     capacity of the arena in bytes
    16        8     the next session number
    24        8     how many specs are written
    4096      1 MiB specs, one behind the other: u32 length, u32 crc32, then KeyspaceSpec.canonical(); numbered from 1
    4096+1MiB 64 each, one record for each SLOT_GRANULE_BYTES of the arena; a slot uses the record where it starts:
      0   u32  state         FREE 0, RESERVED 1, VALID 2
      4   u32  owner         RESERVED: the session that may write there; 0: this process alone; SHARED: several
      8   u32  spec          number of the keyspace's spec; 0: none, never to become VALID
      12  u32  granules      the slot's size / SLOT_GRANULE_BYTES
      16  32   hash
      48  u64  sequence      of use: the most recently used block has the highest
      56  u32  check         xor of the words 8..47, the record's number and CHECK
      60  u32  (zero)

A process may be killed between any two stores, and stores before that are all seen: so a record's state is the last
word written when a slot becomes RESERVED or VALID, and the first when it ceases to be. A slot is RESERVED before
anybody is told of it, VALID after its last byte, FREE before it can be granted again.

Who still writes: each session maps the arena through an open file description of its own, with an OFD lock at the byte
of its number. The kernel drops the lock when the last mapping and descriptor are gone, and so nobody of that session
can write any more; until then the slots that it had RESERVED are left alone (take_left()).

Thread safety: all methods may be called from any thread. `lock` is to be held by whoever changes in one step both what
is known of a block elsewhere and its VALID record, or frees slots.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import struct
import threading
import zlib
from dataclasses import dataclass
from typing import Final

import numpy as np

from tierkv.errors import StorageError, TierKVError
from tierkv.keys import Keyspace, KeyspaceSpec
from tierkv.types import SLOT_GRANULE_BYTES, BoolArray, HashArray, SlotArray, UInt32Array

_log = logging.getLogger(__name__)

MAGIC: Final = int.from_bytes(b"TKVROST1", "little")
HEADER_BYTES: Final = 4096
SPECS_BYTES: Final = 1 << 20
RECORDS_AT: Final = HEADER_BYTES + SPECS_BYTES
RECORD: Final = np.dtype(
    [
        ("state", "<u4"), ("owner", "<u4"), ("spec", "<u4"), ("granules", "<u4"), ("hash", "u1", 32),
        ("sequence", "<u8"), ("check", "<u4"), ("zero", "<u4"),
    ]
)  # fmt: skip
CHECK: Final = 0x7E57A2C1
FREE: Final = 0
RESERVED: Final = 1
VALID: Final = 2
SHARED: Final = 0xFFFF_FFFF
"""The owner of a slot that several sessions may write: several parts of one block."""

_CAPACITY, _NEXT_SESSION, _SPEC_COUNT = 1, 2, 3
_SPEC_HEAD = struct.Struct("<II")
_FLOCK = struct.Struct("hhqqi0q")
_F_ADD_SEALS = 1033
_SEALS = 0x0002 | 0x0004  # F_SEAL_SHRINK | F_SEAL_GROW


@dataclass(frozen=True, slots=True, eq=False)
class KeptBlocks:
    """Blocks that were VALID, of one keyspace, the least recently used first: (n, 32) hashes, (n,) slots."""

    space: KeyspaceSpec
    hashes: HashArray
    slots: SlotArray


@dataclass(frozen=True, slots=True, eq=False)
class LeftSlots:
    """Slots that were RESERVED: (n,) slots, (n,) sizes in granules, (n,) owners."""

    slots: SlotArray
    granules: UInt32Array
    owners: UInt32Array


def roster_bytes(capacity_bytes: int) -> int:
    """Bytes of the roster of an arena; only the pages of slots in use take memory."""
    return RECORDS_AT + capacity_bytes // SLOT_GRANULE_BYTES * RECORD.itemsize


def create_roster(capacity_bytes: int) -> int:
    """A new roster, in which every slot is free: its memfd."""
    fd = os.memfd_create("tierkv-roster", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, roster_bytes(capacity_bytes))
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
        os.pwrite(fd, struct.pack("<QQQQ", MAGIC, capacity_bytes, 1, 0), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Roster:
    """A mapped roster and the arena it belongs to. `arena_fd` stays the caller's."""

    def __init__(self, fd: int, arena_fd: int, capacity_bytes: int) -> None:
        """Maps the roster of an arena of `capacity_bytes`; StorageError where it is not one."""
        size = roster_bytes(capacity_bytes)
        if os.fstat(fd).st_size != size:
            raise StorageError(f"the roster has {os.fstat(fd).st_size} bytes, its arena needs {size}")
        self._fd = os.dup(fd)
        self._arena_fd = arena_fd
        self._map = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED)
        self._header = np.frombuffer(self._map, "<u8", HEADER_BYTES // 8)
        self._records = np.frombuffer(self._map, RECORD, offset=RECORDS_AT)
        self.lock = threading.Lock()
        self._specs: dict[bytes, int] = {}
        self._spec_list: list[KeyspaceSpec] = []
        self._specs_end = 0
        self._full = False
        self._sequence = 1
        try:
            if int(self._header[0]) != MAGIC or int(self._header[_CAPACITY]) != capacity_bytes:
                raise StorageError("the roster was made for another arena, or by another version: start anew")
            self._read_specs()
            self._first_session = int(self._header[_NEXT_SESSION])
        except BaseException:
            self.close()
            raise

    @property
    def arena_fd(self) -> int:
        """The memfd of the arena."""
        return self._arena_fd

    # Specs

    def _read_specs(self) -> None:
        at = HEADER_BYTES
        for number in range(1, int(self._header[_SPEC_COUNT]) + 1):
            length, crc = _SPEC_HEAD.unpack_from(self._map, at)
            data = self._map[at + _SPEC_HEAD.size : at + _SPEC_HEAD.size + length]
            if zlib.crc32(data) != crc:
                raise StorageError("the roster is damaged: start anew")
            spec = KeyspaceSpec.from_json(data)
            self._specs[spec.digest()] = number
            self._spec_list.append(spec)
            at += _SPEC_HEAD.size + length
        self._specs_end = at

    def _spec_number(self, space: Keyspace) -> int:
        number = self._specs.get(space.digest)
        if number is None:
            with self.lock:
                number = self._specs.get(space.digest)
                if number is None:
                    number = self._write_spec(space)
        return number

    def _write_spec(self, space: Keyspace) -> int:
        data = space.spec.canonical()
        end = self._specs_end + _SPEC_HEAD.size + len(data)
        if end > RECORDS_AT:
            if not self._full:
                _log.warning("no room for more keyspaces: blocks of %s are not kept over a restart", space)
            self._full = True
            return 0
        self._map[self._specs_end : end] = _SPEC_HEAD.pack(len(data), zlib.crc32(data)) + data
        self._specs_end = end
        self._spec_list.append(space.spec)
        number = len(self._spec_list)
        self._header[_SPEC_COUNT] = number  # last: before, the bytes are nothing
        self._specs[space.digest] = number
        return number

    # What becomes of slots

    def taken(self, slots: SlotArray, slot_bytes: int) -> None:
        """Free slots are taken by this process: RESERVED, owner 0."""
        records = self._records
        records["owner"][slots] = 0
        records["spec"][slots] = 0
        records["granules"][slots] = slot_bytes // SLOT_GRANULE_BYTES
        records["state"][slots] = RESERVED

    def named(self, space: Keyspace, hashes: HashArray, slots: SlotArray, owner: int = 0) -> None:
        """Taken slots are reserved for blocks, to be written by a session (0: this process). Before it is told."""
        records = self._records
        if owner:
            before = records["owner"][slots]
            records["owner"][slots] = np.where((before == 0) | (before == owner), np.uint32(owner), SHARED)
        records["hash"][slots] = hashes
        records["spec"][slots] = self._spec_number(space)

    def visible(self, slots: SlotArray) -> None:
        """Named slots hold whole blocks now. Under `lock`, with what makes them known elsewhere."""
        records = self._records
        slots = slots[records["spec"][slots] != 0]
        if not len(slots):
            return
        self.used(slots)
        records["check"][slots] = _check(records[slots], slots)
        records["state"][slots] = VALID

    def used(self, slots: SlotArray, *, first_is_latest: bool = True) -> None:
        """Slots were used, one after the other: the first as the last of them, or in order. A hint, without `lock`."""
        count = len(slots)
        first, self._sequence = self._sequence, self._sequence + count
        numbers = np.arange(first, first + count, dtype=np.uint64)
        self._records["sequence"][slots] = numbers[::-1] if first_is_latest else numbers

    def hidden(self, slots: SlotArray) -> None:
        """VALID slots must not be found any more, though somebody may use them still. Under `lock`."""
        records = self._records
        valid = slots[records["state"][slots] == VALID]
        records["state"][valid] = RESERVED
        records["owner"][valid] = 0

    def hidden_space(self, space: Keyspace) -> None:
        """hidden() for all slots of a keyspace. Under `lock`."""
        number = self._specs.get(space.digest)
        for start, records in self._written() if number is not None else ():
            found = np.flatnonzero((records["state"] == VALID) & (records["spec"] == number))
            self.hidden((found + start).astype(np.uint32))

    def freed(self, slots: SlotArray) -> None:
        """Slots are free. Under `lock`, and before they can be granted again."""
        self._records["state"][slots] = FREE

    # After a restart

    def _written(self) -> list[tuple[int, np.ndarray]]:
        """(number of the first, records) of each stretch that was ever written: the rest of the file has no pages."""
        found, at, end = [], RECORDS_AT, RECORDS_AT + self._records.nbytes
        while at < end:
            try:
                start = os.lseek(self._fd, at, os.SEEK_DATA)
                at = min(end, os.lseek(self._fd, start, os.SEEK_HOLE))
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing behind `at`
                    break
                raise
            first = (max(start, RECORDS_AT) - RECORDS_AT) // RECORD.itemsize
            last = -(-(at - RECORDS_AT) // RECORD.itemsize)
            found.append((first, self._records[first:last]))
        return found

    def recover(self) -> tuple[list[KeptBlocks], LeftSlots]:
        """What the process before this one left. Records that make no sense become free. Call it once, first."""
        slots, records = [np.empty(0, np.int64)], [np.empty(0, RECORD)]
        for start, stretch in self._written():
            used = np.flatnonzero(stretch["state"] != FREE)
            slots.append(used + start)
            records.append(stretch[used])
        numbers, found = np.concatenate(slots).astype(np.uint32), np.concatenate(records)
        valid = (found["state"] == VALID) & self._plausible(found, numbers)
        left = (found["state"] == RESERVED) & (found["granules"] > 0)
        self.freed(numbers[~valid & ~left])
        if valid.any():
            self._sequence = int(found["sequence"][valid].max()) + 1
        blocks = []
        for number in np.unique(found["spec"][valid]).tolist():
            chosen = np.flatnonzero(valid & (found["spec"] == number))
            chosen = chosen[np.argsort(found["sequence"][chosen], kind="stable")]
            hashes = np.ascontiguousarray(found["hash"][chosen])
            blocks.append(KeptBlocks(self._spec_list[number - 1], hashes, numbers[chosen]))
        return blocks, LeftSlots(
            numbers[left],
            np.ascontiguousarray(found["granules"][left]),
            np.ascontiguousarray(found["owner"][left]),
        )

    def _plausible(self, found: np.ndarray, slots: SlotArray) -> BoolArray:
        """(n,) bool: the record is whole, and its slot has the size of its keyspace's blocks."""
        sizes = np.zeros(len(self._spec_list) + 1, np.int64)
        for number, spec in enumerate(self._spec_list, 1):
            sizes[number] = -(-spec.block_bytes // SLOT_GRANULE_BYTES)
        known = (found["spec"] > 0) & (found["spec"] < len(sizes))
        right_size = sizes[np.where(known, found["spec"], 0)] == found["granules"]
        good: BoolArray = known & right_size & (found["check"] == _check(found, slots))
        return good

    # Sessions

    def new_session(self) -> tuple[int, int]:
        """A number, and a descriptor of the arena for that session alone: it holds the session's lock as long as the
        descriptor, a copy of it, or a mapping of it is left anywhere."""
        with self.lock:
            number = int(self._header[_NEXT_SESSION])
            self._header[_NEXT_SESSION] = number + 1
        try:
            fd = os.open(f"/proc/self/fd/{self._arena_fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TierKVError(
                f"keep_dram needs /proc to let clients attach: {error.strerror}; mount it, or do without keep_dram"
            ) from error
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))
        except BaseException:
            os.close(fd)
            raise
        return number, fd

    def _locked(self, first: int, count: int) -> bool:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, count, 0)
        return bool(_FLOCK.unpack(fcntl.fcntl(self._arena_fd, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK)

    def writers_left(self, owners: UInt32Array) -> BoolArray:
        """(n,) bool: a process that was a session of an earlier agent may still write what that owner had RESERVED."""
        alive = {0: False}
        for owner in np.unique(owners).tolist():
            if owner == SHARED:  # any of them: a client that lives gives its mapping up as it attaches again
                alive[owner] = self._first_session > 1 and self._locked(1, self._first_session - 1)
            elif owner:
                alive[owner] = self._locked(owner, 1)
        return np.array([alive[owner] for owner in owners.tolist()], np.bool_)

    def close(self) -> None:
        """Unmaps; what is written stays with whoever has the memfd. Idempotent."""
        self._header = self._records = np.empty(0, RECORD)
        with contextlib.suppress(BufferError):
            self._map.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _check(records: np.ndarray, slots: SlotArray) -> UInt32Array:
    """(n,) uint32: what `check` must be."""
    words = np.ascontiguousarray(records).view("<u4").reshape(-1, RECORD.itemsize // 4)
    folded: UInt32Array = np.bitwise_xor.reduce(words[:, 2:12], axis=1) ^ slots.astype(np.uint32)
    return folded ^ np.uint32(CHECK)
