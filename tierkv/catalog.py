"""The catalog: what survives a restart on this node's NVMe. LMDB, one environment a directory.

Four tables: `meta` (format, store id, the last generation), `keyspaces` (digest -> spec as JSON),
`blocks` (digest + hash -> a packed entry of 32 bytes). FORMAT.md shows the bytes. Every entry carries a
checksum over its key and value, so that a damaged one is not there rather than wrong.

One process writes at a time (the tier's LOCK sees to that); others may read. A commit is one transaction:
after a kill it is there wholly or not at all. With sync_power=True it also survives a power cut.

Thread safety: every method may be called from any thread. When the map is full it is grown with no reader
inside.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import lmdb
import numpy as np
import numpy.typing as npt

from tierkv._native import CopyPool
from tierkv.errors import FormatError, KeyspaceError, StorageError
from tierkv.keys import KeyspaceSpec
from tierkv.lmdbfile import LmdbFileError, check_lmdb_file
from tierkv.types import HASH_BYTES, NO_SLOT, BlockStatus, BoolArray, HashArray, Int64Array, SlotArray

_log = logging.getLogger(__name__)

FORMAT_VERSION: Final = 1
ENTRY: Final = np.dtype(
    [
        ("slot", "<u4"),
        ("length", "<u4"),
        ("generation", "<u8"),
        ("checksum", "<u4"),
        ("written_s", "<u4"),
        ("codec", "u1"),
        ("reserved", "u1", (3,)),
        ("entry_checksum", "<u4"),
    ]
)
"""A block's entry, 32 bytes. `entry_checksum` is the crc32c of the 64-byte key and the 28 bytes before it."""
EntryArray = npt.NDArray[np.void]
CODEC_NONE: Final = 0
DIGEST_BYTES: Final = 32
_KEY_BYTES: Final = DIGEST_BYTES + HASH_BYTES
_ENTRY_BYTES: Final = ENTRY.itemsize
_PROTECTED_BYTES: Final = _KEY_BYTES + _ENTRY_BYTES - 4
_MAGIC: Final = b"tierkv-nvme"
_FIRST_MAP_BYTES: Final = 256 << 20
_DELETES_AT_ONCE: Final = 50_000


class CatalogWriteError(StorageError):
    """A commit failed and changed nothing; `status` is what that means for its blocks."""

    def __init__(self, message: str, status: BlockStatus) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, eq=False)
class Put:
    """Adds or replaces entries. entries: (n,) ENTRY; generation and entry_checksum are filled in by
    commit()."""

    digest: bytes
    hashes: HashArray
    entries: EntryArray


@dataclass(frozen=True, slots=True, eq=False)
class Delete:
    """Removes entries; with slots (n,) (and generations) only those that still name this slot (and
    generation)."""

    digest: bytes
    hashes: HashArray
    slots: SlotArray | None = None
    generations: npt.NDArray[np.uint64] | None = None


@dataclass(frozen=True, slots=True)
class AddKeyspace:
    """Stores a keyspace's spec; harmless when it is stored already."""

    digest: bytes
    spec: KeyspaceSpec


Change = Put | Delete | AddKeyspace


@dataclass(frozen=True, slots=True, eq=False)
class EntryBatch:
    """Entries of one keyspace in key order: hashes (n, 32), entries (n,) ENTRY, intact (n,) bool
    (checksum holds)."""

    digest: bytes
    hashes: HashArray
    entries: EntryArray
    intact: BoolArray


class _Gate:
    """Lets many readers in, or one that changes the map; bounded by how long a transaction takes."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self._shut = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._condition:
            while self._shut:
                self._condition.wait(60.0)
            self._inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._inside -= 1
                self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._condition:
            while self._shut:
                self._condition.wait(60.0)
            self._shut = True
            while self._inside:
                self._condition.wait(60.0)
        try:
            yield
        finally:
            with self._condition:
                self._shut = False
                self._condition.notify_all()


_OPEN: weakref.WeakValueDictionary[str, Catalog] = weakref.WeakValueDictionary()


def open_in_this_process(directory: str | os.PathLike[str]) -> Catalog | None:
    """The catalog of that directory if this process has it open: LMDB must not open a file twice in a process."""
    catalog = _OPEN.get(os.path.realpath(directory))
    return catalog if catalog is not None and catalog.is_open() else None


class Catalog:
    """An open catalog in `directory` (made if it is missing, unless `read_only`)."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        sync_power: bool = True,
        read_only: bool = False,
        created_s: float = 0.0,
        map_bytes: int = _FIRST_MAP_BYTES,
    ) -> None:
        """created_s: the wall time to store in a new catalog.

        FormatError: not a catalog of this format, or damaged. StorageError: the directory cannot be used.
        """
        self.directory = Path(directory)
        self._read_only = read_only
        self._sync = sync_power
        self._gate = _Gate()
        self._write_lock = threading.Lock()
        self._pool = CopyPool(1)
        self._environment: Any = None
        self._map_bytes = map_bytes
        self._check_file()
        try:
            self._open()
            self._read_or_make_meta(created_s)
        except BaseException:
            self.close()
            raise
        _OPEN[os.path.realpath(self.directory)] = self

    # Opening.

    def _check_file(self) -> None:
        if self._read_only:
            return  # somebody may be writing; who writes has checked it
        try:
            check_lmdb_file(self.directory / "data.mdb")
        except LmdbFileError as error:
            raise FormatError(f"{self.directory / 'data.mdb'}: {error}; {_WAY_OUT}") from error
        except OSError as error:
            raise StorageError(f"{self.directory / 'data.mdb'}: cannot be read: {error.strerror}") from error

    def _open(self) -> None:
        data = self.directory / "data.mdb"
        try:
            if not self._read_only:
                self.directory.mkdir(exist_ok=True)
            size = data.stat().st_size if data.exists() else 0
            self._map_bytes = max(self._map_bytes, 2 * size) // 4096 * 4096
            self._environment = lmdb.open(
                str(self.directory),
                map_size=self._map_bytes,
                max_dbs=4,
                sync=self._sync,
                metasync=self._sync,
                readonly=self._read_only,
                create=not self._read_only,
                max_spare_txns=4,
            )
            if not self._read_only:
                self._environment.reader_check()  # forget readers that were killed
            self._meta, self._keyspaces, self._blocks = (
                self._environment.open_db(name, create=not self._read_only)
                for name in (b"meta", b"keyspaces", b"blocks")
            )
        except (
            lmdb.InvalidError,
            lmdb.CorruptedError,
            lmdb.VersionMismatchError,
            lmdb.PageNotFoundError,
        ) as error:
            raise FormatError(f"{data}: LMDB cannot read it ({error}); {_WAY_OUT}") from error
        except lmdb.NotFoundError as error:
            raise FormatError(f"{data}: not a catalog of tierkv (a table is missing); {_WAY_OUT}") from error
        except (lmdb.Error, OSError) as error:
            raise StorageError(
                f"{self.directory}: the catalog cannot be opened: {error}; check that the directory is there, "
                f"writable and on a local file system with free space"
            ) from error

    def _read_or_make_meta(self, created_s: float) -> None:
        with self._environment.begin(write=not self._read_only) as transaction:
            magic = transaction.get(b"magic", db=self._meta)
            if magic is None:
                tables = transaction.stat()["entries"]
                if self._read_only or tables > 3 or transaction.stat(self._blocks)["entries"]:
                    raise FormatError(
                        f"{self.directory}: an LMDB file, but not a catalog of tierkv; {_WAY_OUT}"
                    )
                for key, value in (
                    (b"magic", _MAGIC),
                    (b"version", FORMAT_VERSION.to_bytes(4, "little")),
                    (b"uuid", secrets.token_bytes(16)),
                    (b"created_s", int(created_s).to_bytes(8, "little")),
                    (b"generation", (0).to_bytes(8, "little")),
                ):
                    transaction.put(key, value, db=self._meta)
                magic = _MAGIC
            if magic != _MAGIC:
                raise FormatError(f"{self.directory}: its magic is {magic!r}, not {_MAGIC!r}; {_WAY_OUT}")
            values = {
                name: transaction.get(name, db=self._meta) or b""
                for name in (b"version", b"uuid", b"created_s", b"generation")
            }
        self.format_version = int.from_bytes(values[b"version"], "little")
        if self.format_version != FORMAT_VERSION:
            raise FormatError(
                f"{self.directory}: format version {self.format_version}, this tierkv reads {FORMAT_VERSION}: "
                f"use the version that wrote it, look at it with `tierkv verify`, or choose a new directory"
            )
        self.uuid = values[b"uuid"]
        self.created_s = int.from_bytes(values[b"created_s"], "little")
        self._generation = int.from_bytes(values[b"generation"], "little")

    # Reading.

    def __len__(self) -> int:
        """Blocks in the catalog."""
        with self._reading() as transaction:
            return int(transaction.stat(self._blocks)["entries"])

    def keyspaces(self) -> dict[bytes, KeyspaceSpec]:
        """digest -> spec. Specs that cannot be read, or do not have the digest they stand under, are left
        out."""
        found = {}
        with self._reading() as transaction:
            stored = list(transaction.cursor(self._keyspaces))
        for digest, text in stored:
            try:
                spec = KeyspaceSpec.from_json(text)
            except KeyspaceError as error:
                _log.warning("%s: keyspace %s cannot be read: %s", self.directory, digest.hex()[:12], error)
                continue
            if spec.digest() == digest:
                found[digest] = spec
            else:
                _log.warning("%s: keyspace %s has another digest: ignored", self.directory, digest.hex()[:12])
        return found

    def get(self, digest: bytes, hashes: HashArray) -> EntryArray:
        """(n,) ENTRY of the blocks; slot is NO_SLOT where there is none, or only a damaged one."""
        keys = _keys(digest, hashes)
        with self._reading() as transaction:
            get, blocks = transaction.get, self._blocks
            values = [get(key, _ABSENT, blocks) for key in keys]
        entries = _entries(values)
        absent = entries["slot"] == NO_SLOT
        if not absent.all():
            table = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), _KEY_BYTES)
            damaged = ~absent & (self._checksums(table, entries) != entries["entry_checksum"])
            if damaged.any():
                _log.warning("%s: %d damaged catalog entries are ignored", self.directory, int(damaged.sum()))
                entries[damaged] = _NOTHING
        return entries

    def scan(self, digest: bytes | None = None, batch_blocks: int = 65536) -> Iterator[EntryBatch]:
        """All entries (of one keyspace) in key order. Each batch is read in a transaction of its own."""
        start = digest or b""
        while True:
            with self._reading() as transaction, transaction.cursor(self._blocks) as cursor:
                if not cursor.set_range(start):
                    return
                pairs = list(itertools.islice(cursor.iternext(), batch_blocks))
            keys, values = zip(*pairs, strict=True)
            if any(len(key) != _KEY_BYTES for key in keys):
                raise FormatError(
                    f"{self.directory}: a block's key is not {_KEY_BYTES} bytes long; {_WAY_OUT}"
                )
            table = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), _KEY_BYTES)
            entries = _entries(values)
            intact = self._checksums(table, entries) == entries["entry_checksum"]
            edges = np.flatnonzero((table[1:, :DIGEST_BYTES] != table[:-1, :DIGEST_BYTES]).any(axis=1)) + 1
            for low, high in itertools.pairwise([0, *edges.tolist(), len(keys)]):
                owner = keys[low][:DIGEST_BYTES]
                if digest is not None and owner != digest:
                    return
                hashes = np.ascontiguousarray(table[low:high, DIGEST_BYTES:])
                yield EntryBatch(owner, hashes, entries[low:high], intact[low:high])
            if len(pairs) < batch_blocks:
                return
            start = keys[-1] + b"\x00"

    # Writing.

    def commit(self, changes: Sequence[Change]) -> None:
        """Applies the changes, in order, in one transaction. CatalogWriteError: nothing changed."""
        with self._write_lock:
            generation = self._generation
            while True:
                try:
                    with self._writing() as transaction:
                        for change in changes:
                            generation = self._apply(transaction, change, generation)
                        if generation != self._generation:
                            transaction.put(b"generation", generation.to_bytes(8, "little"), db=self._meta)
                    break
                except lmdb.MapFullError:
                    generation = self._generation
                    self._grow()
                except lmdb.Error as error:
                    if isinstance(error, lmdb.PanicError):
                        self._reopen()
                    raise CatalogWriteError(
                        f"{self.directory}: commit failed: {error}", _status(error)
                    ) from error
            self._generation = generation

    def delete_keyspace(self, digest: bytes) -> int:
        """Removes all blocks of a keyspace, in transactions of bounded size; returns how many. Its spec
        stays."""
        removed = 0
        while True:
            with self._reading() as transaction, transaction.cursor(self._blocks) as cursor:
                keys: list[bytes] = []
                if cursor.set_range(digest):
                    ahead = itertools.islice(cursor.iternext(values=False), _DELETES_AT_ONCE)
                    keys = list(itertools.takewhile(lambda key: key.startswith(digest), ahead))
            if not keys:
                return removed
            table = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), _KEY_BYTES)
            self.commit([Delete(digest, np.ascontiguousarray(table[:, DIGEST_BYTES:]))])
            removed += len(keys)

    def is_open(self) -> bool:
        return self._environment is not None

    def close(self) -> None:
        """Closes the environment. Idempotent."""
        with self._write_lock, self._gate.alone():
            if self._environment is not None:
                self._environment.close()
                self._environment = None
        self._pool.close()

    def _apply(self, transaction: Any, change: Change, generation: int) -> int:
        if isinstance(change, AddKeyspace):
            transaction.put(change.digest, change.spec.canonical(), db=self._keyspaces)
            return generation
        keys = _keys(change.digest, change.hashes)
        if isinstance(change, Put):
            count = len(keys)
            entries = change.entries
            entries["generation"] = np.arange(generation + 1, generation + 1 + count, dtype=np.uint64)
            table = np.frombuffer(b"".join(keys), np.uint8).reshape(count, _KEY_BYTES)
            entries["entry_checksum"] = self._checksums(table, entries)
            raw = entries.tobytes()
            values = (
                raw[start : start + _ENTRY_BYTES] for start in range(0, count * _ENTRY_BYTES, _ENTRY_BYTES)
            )
            with transaction.cursor(self._blocks) as cursor:
                cursor.putmulti(list(zip(keys, values, strict=True)))
            return generation + count
        if change.slots is not None:
            entries = _entries([transaction.get(key, _ABSENT, self._blocks) for key in keys])
            same = entries["slot"] == change.slots
            if change.generations is not None:
                same &= entries["generation"] == change.generations
            keys = [keys[position] for position in np.flatnonzero(same).tolist()]
        for key in keys:
            transaction.delete(key, db=self._blocks)
        return generation

    def _checksums(self, keys: HashArray, entries: EntryArray) -> npt.NDArray[np.uint32]:
        """(n,) crc32c of each key and the protected part of its entry."""
        count = len(entries)
        if not count:
            return np.empty(0, np.uint32)
        joined = np.empty((count, _PROTECTED_BYTES), np.uint8)
        joined[:, :_KEY_BYTES] = keys
        joined[:, _KEY_BYTES:] = entries.view(np.uint8).reshape(count, _ENTRY_BYTES)[:, : _ENTRY_BYTES - 4]
        first = int(joined.__array_interface__["data"][0])
        addresses: Int64Array = first + np.arange(count, dtype=np.int64) * _PROTECTED_BYTES
        return self._pool.crc32c(addresses, np.full(count, _PROTECTED_BYTES, np.int64))

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        with self._gate.reading():
            environment = self._open_environment()
            try:
                with environment.begin() as transaction:
                    yield transaction
            except (lmdb.CorruptedError, lmdb.PageNotFoundError) as error:
                raise FormatError(
                    f"{self.directory}: the catalog is damaged ({error}); {_WAY_OUT}"
                ) from error
            except lmdb.Error as error:
                raise StorageError(f"{self.directory}: the catalog cannot be read: {error}") from error

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        with self._gate.reading(), self._open_environment().begin(write=True) as transaction:
            yield transaction

    def _open_environment(self) -> Any:
        if self._environment is None:
            raise CatalogWriteError(f"{self.directory}: the catalog is closed", BlockStatus.CANCELLED)
        return self._environment

    def _grow(self) -> None:
        with self._gate.alone():
            self._map_bytes *= 2
            self._open_environment().set_mapsize(self._map_bytes)

    def _reopen(self) -> None:
        """LMDB refuses everything after a failed write of its meta page until it is opened anew."""
        with self._gate.alone():
            self._open_environment().close()
            self._environment = None
            try:
                self._check_file()
                self._open()
            except (StorageError, FormatError):
                _log.exception("%s: the catalog could not be opened again", self.directory)


_WAY_OUT: Final = (
    "remove the directory (the cache starts empty), choose a new one, or look at it with `tierkv verify`"
)
_NOTHING = np.zeros((), ENTRY)
_NOTHING["slot"] = NO_SLOT
_ABSENT: Final = _NOTHING.tobytes()


def _keys(digest: bytes, hashes: HashArray) -> list[bytes]:
    raw = hashes.tobytes()
    return [digest + raw[start : start + HASH_BYTES] for start in range(0, len(raw), HASH_BYTES)]


def _entries(values: Sequence[bytes]) -> EntryArray:
    """(n,) ENTRY, writable; values of another size count as damaged."""
    joined = b"".join(values)
    if len(joined) != len(values) * _ENTRY_BYTES or any(len(value) != _ENTRY_BYTES for value in values):
        joined = b"".join(value if len(value) == _ENTRY_BYTES else bytes(_ENTRY_BYTES) for value in values)
    return np.frombuffer(bytearray(joined), ENTRY)


def _status(error: lmdb.Error) -> BlockStatus:
    """py-lmdb keeps the errno only in its text."""
    text = str(error)
    full = isinstance(error, lmdb.DiskError) or "No space left" in text or "quota" in text.lower()
    return BlockStatus.NO_SPACE if full else BlockStatus.IO_ERROR
