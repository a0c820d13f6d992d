"""The DFS tier: content-addressed files on a directory that several hosts mount.

A block is one file, `<directory>/v1/<keyspace>/<2 hex>/<hash>`, written under a temporary name and renamed,
so that any host sees it whole or not at all; losing the race to write a block is success. Every read is
verified, and a bad copy is unlinked. FORMAT.md shows the file.

File systems hang. All file operations run on threads of an OperationPool and have a deadline; a thread that
is stuck is written off, and what it does later stays in its own memory (see dfs_pool). A medium that refuses
writes is left alone for a while and tried again (see dfs_gate); reads go on meanwhile.

Thread safety: every method may be called from any thread. free() and forget() wait for the medium, for a
bounded time; the other methods do not wait, but for probe() and recover(), whose purpose it is.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterator

import numpy as np

from tierkv import codec
from tierkv._native import crc32c
from tierkv.clock import Clock, SystemClock
from tierkv.config import DfsConfig
from tierkv.errors import ArgumentError, ClosedError, KeyspaceError, StorageError
from tierkv.jobs import Job
from tierkv.keys import Keyspace, KeyspaceSpec
from tierkv.tiers.base import Batch, Residents, TierInfo
from tierkv.tiers.dfs_accounts import Accounts
from tierkv.tiers.dfs_files import BlockFiles, DirectMode, FileOps, error_name, pack, small_file, write_status
from tierkv.tiers.dfs_format import (
    FORGOTTEN_PREFIX,
    FORMAT_DIRECTORY,
    HEADER_BYTES,
    SPEC_NAME,
    Header,
    file_bytes,
    is_hash_name,
    padded,
)
from tierkv.tiers.dfs_gate import WriteGate
from tierkv.tiers.dfs_pool import Lane, Operation, OperationPool, Work
from tierkv.tiers.dfs_works import (
    BatchWork,
    CallWork,
    ListWork,
    PathsWork,
    block_path,
    copy_in,
    copy_out,
    plausible,
    read_small,
    remove_tree,
    subdirectories,
)
from tierkv.types import HASH_BYTES, BlockStatus, BoolArray, HashArray, SlotArray, TierKind, UInt8Array

_log = logging.getLogger(__name__)

UNLIMITED_BYTES = 1 << 62
"""The capacity of a tier without a limit of ours."""
RECOVER_BATCH = 8192
FREE_WAIT_S = 5.0
_CLOSE_WAIT_S = 5.0
_WAIT_SLICE_S = 60.0
_WRITE_ATTEMPTS = 3


class DfsTier:
    """A Tier on a shared directory. Any number of processes and hosts may have it open."""

    def __init__(
        self, config: DfsConfig, *, clock: Clock | None = None, files: FileOps | None = None
    ) -> None:
        """StorageError, with what to do, when the directory cannot be used. `files` replaces the system
        calls."""
        self._config = config
        self._clock = clock or SystemClock()
        self._root = os.path.abspath(config.directory)
        self._base = f"{self._root}/{FORMAT_DIRECTORY}"
        self._codec = codec.CODEC_IDS[config.codec]
        self._direct = DirectMode(config.direct)
        self._files = BlockFiles(files or FileOps(), self._direct, config.sync)
        self._gate = WriteGate(self._clock)
        capacity = UNLIMITED_BYTES if config.capacity_bytes is None else config.capacity_bytes
        self._accounts = Accounts(capacity)
        self._info = TierInfo(TierKind.DFS, capacity, 1, True, f"dfs {self._root}")
        self._lock = threading.Lock()
        self._closed = False
        self._root_identity = (0, 0)
        self._ready: set[bytes] = set()
        self._epochs: dict[bytes, int] = {}
        self._hidden: dict[bytes, str] = {}
        self.counts: dict[str, int] = {}
        """How often something out of the ordinary happened, by reason. For insight only."""
        self._pool = OperationPool(
            config.threads, config.deadline_s, self._clock, "tierkv-dfs", self._on_stall
        )
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        problems: list[str] = []
        work = CallWork(Lane.LOAD, lambda operation: self._prepare(operation, problems))
        self._submit(work)
        if not work.job.wait(2 * self._config.deadline_s):
            self._pool.check_deadlines()
        if not work.job.ok():
            what = problems[0] if problems else f"it did not answer within {self._config.deadline_s:g} s"
            raise StorageError(f"dfs.directory {self._root}: {what}")

    def _prepare(self, operation: Operation, problems: list[str]) -> int:
        files = self._files.files
        try:
            about = files.stat(f"{self._root}/.")
        except OSError as error:
            problems.append(f"{error.strerror}: create or mount it on every host, or change dfs.directory")
            return BlockStatus.IO_ERROR
        self._root_identity = (about.st_dev, about.st_ino)
        try:
            self._files.mkdir(self._base)
            self._try_write(HEADER_BYTES)
        except OSError as error:
            status = write_status(error)
            if status is BlockStatus.NO_SPACE:  # what is there can still be read, and space may come back
                self._gate.failed(status, HEADER_BYTES)
                return BlockStatus.OK
            if error.errno == errno.EINVAL and self._direct.flag():
                problems.append("O_DIRECT is refused here: set dfs.direct to 'auto' or 'off'")
            else:
                problems.append(
                    f"cannot be written ({error.strerror}): mount it read-write and check its owner"
                )
            return BlockStatus.IO_ERROR
        return BlockStatus.OK

    def _try_write(self, size_bytes: int) -> None:
        """Writes, renames and removes a file of that size, as a block is written. Raises OSError."""
        room = small_file(b" " * size_bytes)
        first, second = self._files.temporary(self._base), self._files.temporary(self._base)
        try:
            self._files.write_temporary(first, room)
            self._files.files.rename(first, second)
        except OSError:
            self._files.unlink_quietly(first)
            raise
        self._files.unlink_quietly(second)

    @property
    def info(self) -> TierInfo:
        return self._info

    @property
    def direct(self) -> bool:
        """Whether O_DIRECT is in use."""
        return self._direct.enabled

    # Accounting: each block counts as its file without compression, since free() cannot ask how long a file
    # was.

    def allocate(self, space: Keyspace, count: int) -> SlotArray | None:
        """(count,) zeros, or None when capacity_bytes would be passed. ClosedError after close()."""
        if self._closed:
            raise ClosedError(f"{self._info.name} is closed")
        if count < 0:
            raise ArgumentError(f"allocate: {count} slots")
        if not self._accounts.grant(space.digest, file_bytes(space.block_bytes), count):
            return None
        return np.zeros(count, np.uint32)

    def available(self, space: Keyspace) -> int:
        return self._accounts.available(file_bytes(space.block_bytes))

    def give_back(self, space: Keyspace, slots: SlotArray) -> None:
        self._accounts.given_back(space.digest, file_bytes(space.block_bytes), len(slots))

    def slab_of(self, slot: int) -> SlotArray:
        """None: files need not share space."""
        return np.empty(0, np.uint32)

    def used_bytes(self) -> int:
        return self._accounts.used_bytes

    def free(self, space: Keyspace, hashes: HashArray, slots: SlotArray) -> None:
        """Unlinks the files and gives their capacity back. Waits FREE_WAIT_S at most: what a slow medium
        removes later is found again until then, which is harmless, since a file's name says all that its
        bytes depend on."""
        self._accounts.freed(space.digest, file_bytes(space.block_bytes), hashes)
        work = self._unlink_work(Lane.WRITE, space, hashes)
        if self._submit(work) and self._gate.open:
            work.job.wait(min(FREE_WAIT_S, self._config.deadline_s))

    def forget(self, space: Keyspace, hashes: HashArray | None) -> None:
        """Unlinks the files (None: makes the whole keyspace vanish at once, for all hosts) while their
        capacity stays taken. If the medium does not do it within the deadline, a keyspace stays hidden here
        until it has."""
        if hashes is None:
            with self._lock:
                self._epochs[space.digest] = self._epochs.get(space.digest, 0) + 1
                self._ready.discard(space.digest)
                self._hidden[space.digest] = str(space)
            self._forget_keyspace(space.digest).job.wait(2 * self._config.deadline_s)
            return
        work = self._unlink_work(Lane.LOAD, space, hashes)
        self._submit(work)
        work.job.wait(2 * self._config.deadline_s)
        if self._config.sync and work.job.ok():
            directories = sorted({block_path(self._base, space, row.tobytes())[0] for row in hashes})
            sync = PathsWork(Lane.LOAD, directories, self._sync_quietly)
            self._submit(sync)
            sync.job.wait(2 * self._config.deadline_s)

    # Bytes.

    def submit_write(self, batch: Batch) -> Job:
        """As Tier.submit_write; addresses need no alignment. While writes are stopped, blocks get the status
        that stopped them (NO_SPACE, IO_ERROR, TIMEOUT)."""
        epoch = self._epochs.get(batch.space.digest, 0)
        work = BatchWork(batch, Lane.WRITE, functools.partial(self._write_one, epoch), self._write_settled)
        if batch.count and not self._submit(work):
            work.job.settle_rest(BlockStatus.DROPPED)
        return work.job

    def submit_read(self, batch: Batch) -> Job:
        """As Tier.submit_read; addresses need no alignment. Nothing is written to a block's memory unless its
        bytes were verified, nor after its status was settled."""
        work = BatchWork(batch, Lane.LOAD, self._read_one, self._read_settled)
        if batch.count and not self._submit(work):
            work.job.settle_rest(BlockStatus.TIMEOUT)
        return work.job

    def _submit(self, work: Work) -> bool:
        if self._pool.submit(work):
            return True
        self._count("queue full")
        return False

    def _read_one(self, batch: Batch, position: int, operation: Operation) -> int:
        space, block_hash = batch.space, batch.hashes[position].tobytes()
        if space.digest in self._hidden:
            return BlockStatus.MISS
        directory, name = block_path(self._base, space, block_hash)
        length, address = int(batch.lengths[position]), int(batch.addresses[position])
        path = f"{directory}/{name}"
        result = self._files.read(path, operation.scratch, space.digest, block_hash, length)
        data = result.data
        if data is not None:
            operation.deliver(lambda: copy_out(address, data))
        else:
            self._count(f"read: {result.reason}")
            if result.status is BlockStatus.CORRUPT:
                _log.warning("%s is damaged (%s) and is removed", path, result.reason)
                self._files.drop(path, result.inode)
        return result.status

    def _read_settled(self, batch: Batch, position: int, status: int) -> None:
        if status == BlockStatus.TIMEOUT:
            self._count("read: overdue")

    def _write_one(self, epoch: int, batch: Batch, position: int, operation: Operation) -> int:
        space, block_hash = batch.space, batch.hashes[position].tobytes()
        length, address = int(batch.lengths[position]), int(batch.addresses[position])

        def wanted() -> bool:
            return operation.live and epoch == self._epochs.get(space.digest, 0)

        if not wanted() or space.digest in self._hidden:
            return BlockStatus.CANCELLED
        refusal = self._gate.refusal()
        if refusal is not None:
            return refusal
        try:
            if space.digest not in self._ready:
                self._make_keyspace(space)
            directory, name = block_path(self._base, space, block_hash)
            if self._files.holds(f"{directory}/{name}", operation.scratch, space.digest, block_hash, length):
                self._count("write: there already")
                return BlockStatus.OK
            if not operation.deliver(lambda: copy_in(self._raw_room(operation, length), address)):
                return BlockStatus.CANCELLED
            data = self._packed(operation, space, block_hash, length)
            for attempt in range(_WRITE_ATTEMPTS):
                try:
                    if not self._files.publish(directory, name, data, wanted):
                        return BlockStatus.CANCELLED
                    break
                except (
                    FileNotFoundError
                ):  # a first block in its directory, or another host cleared the keyspace
                    if attempt + 1 == _WRITE_ATTEMPTS or not wanted():
                        raise
                    self._make_keyspace(space)
                    self._make_directory(directory, os.path.dirname(directory))
        except OSError as error:
            status = write_status(error)
            self._count(f"write: {error_name(error)}")
            if status is BlockStatus.IO_ERROR and self._others_can_be_written(operation, file_bytes(length)):
                return status
            if self._gate.open:
                _log.warning("%s: writes are stopped for now: %s", self._info.name, error.strerror)
            self._gate.failed(status, file_bytes(length))
            return status
        self._gate.succeeded()
        return BlockStatus.OK

    def _others_can_be_written(self, operation: Operation, size_bytes: int) -> bool:
        """Whether it is one name alone that is refused, by a medium that takes others: where replicas disagree about
        a file, any use of it is EIO for good, and must not stop all other writes."""
        operation.renew()
        try:
            self._try_write(size_bytes)
        except OSError:
            return False
        if operation.live:
            self._count("write: one name refused")
            self._gate.passed()
        return True

    def _raw_room(self, operation: Operation, length: int) -> UInt8Array:
        """Where the caller's bytes go first: behind the header at once, unless they are to be encoded."""
        if self._codec is codec.CodecId.NONE:
            return operation.scratch.file(file_bytes(length))[HEADER_BYTES : HEADER_BYTES + length]
        return operation.scratch.raw(length)

    def _packed(self, operation: Operation, space: Keyspace, block_hash: bytes, length: int) -> UInt8Array:
        """The whole file, in scratch memory."""
        raw = self._raw_room(operation, length)
        element_bytes = codec.element_bytes_of(space.spec.kv_dtype)
        encoded = None if self._codec is codec.CodecId.NONE else raw
        whole, used, stored = pack(
            operation.scratch, self._codec, self._config.codec_level, element_bytes, encoded, length
        )
        stored_checksum = crc32c(whole[HEADER_BYTES : HEADER_BYTES + stored])
        header = Header(
            codec=used,
            element_bytes=element_bytes if used is codec.CodecId.ZSTD_PLANES else 1,
            block_bytes=length,
            stored_bytes=stored,
            stored_checksum=stored_checksum,
            block_checksum=stored_checksum if used is codec.CodecId.NONE else crc32c(raw),
            digest=space.digest,
            block_hash=block_hash,
        )
        header.write(whole[:HEADER_BYTES])
        return whole

    def _write_settled(self, batch: Batch, position: int, status: int) -> None:
        if status == BlockStatus.OK:
            row = batch.hashes[position : position + 1]
            self._accounts.written(batch.space.digest, file_bytes(batch.space.block_bytes), row)
        elif status == BlockStatus.TIMEOUT:
            self._count("write: overdue")

    # Directories.

    def _make_keyspace(self, space: Keyspace) -> None:
        """Makes the keyspace's directory, with its spec in it before any block. Raises OSError."""
        directory = f"{self._base}/{space.digest.hex()}"
        self._make_base()
        self._make_directory(directory, self._base)
        expected = space.spec.canonical()
        if read_small(self._files.files, f"{directory}/{SPEC_NAME}").strip() != expected:
            self._files.publish(directory, SPEC_NAME, small_file(expected), lambda: True)
        with self._lock:
            self._ready.add(space.digest)

    def _make_base(self) -> None:
        """Makes v1/ again if somebody removed it, but never where the file system itself has gone: the mount
        point beneath it would be filled instead."""
        try:
            self._files.files.stat(self._base)
        except FileNotFoundError:
            about = self._files.files.stat(f"{self._root}/.")
            if (about.st_dev, about.st_ino) != self._root_identity:
                raise OSError(errno.ENODEV, "the file system is not mounted any more") from None
            self._make_directory(self._base, self._root)

    def _make_directory(self, path: str, parent: str) -> None:
        if self._files.mkdir(path) and self._config.sync:
            self._files.sync_directory(parent)

    def _unlink_work(self, lane: Lane, space: Keyspace, hashes: HashArray) -> PathsWork:
        places = (block_path(self._base, space, row.tobytes()) for row in hashes)
        return PathsWork(lane, [f"{directory}/{name}" for directory, name in places], self._unlink_one)

    def _unlink_one(self, path: str) -> bool:
        try:
            self._files.files.unlink(path)
        except FileNotFoundError:
            return True
        except OSError as error:
            self._count(f"unlink: {error_name(error)}")
            return False
        return True

    def _sync_quietly(self, path: str) -> bool:
        try:
            self._files.sync_directory(path)
        except OSError:
            return False
        return True

    def _forget_keyspace(self, digest: bytes) -> CallWork:
        """Starts moving a hidden keyspace's directory out of sight, and then its removal."""
        source = f"{self._base}/{digest.hex()}"
        suffix = os.path.basename(self._files.temporary("")).removeprefix(".")
        target = f"{self._base}/{FORGOTTEN_PREFIX}{digest.hex()}-{suffix}"

        def rename(operation: Operation) -> int:
            try:
                self._files.files.rename(source, target)
                if self._config.sync:
                    self._files.sync_directory(self._base)
            except FileNotFoundError:
                pass  # nothing there
            except OSError as error:
                self._count(f"forget: {error_name(error)}")
                return BlockStatus.IO_ERROR
            return BlockStatus.OK

        def ended(status: int) -> None:
            if status == BlockStatus.OK:
                with self._lock:
                    self._hidden.pop(digest, None)
                self._remove_tree(target)
            elif status != BlockStatus.CANCELLED:
                _log.error(
                    "%s: keyspace %s could not be cleared yet; it stays hidden", self._info.name, digest.hex()
                )
                self._gate.failed(BlockStatus.IO_ERROR, HEADER_BYTES)

        work = CallWork(Lane.LOAD, rename, ended)
        if not self._submit(work):
            work.settle(0, BlockStatus.IO_ERROR)
        return work

    def _remove_tree(self, path: str) -> None:
        """In the background, file by file; a listing goes on with what is left."""
        self._submit(CallWork(Lane.SCAN, lambda operation: remove_tree(self._files.files, path, operation)))

    # What is there.

    def probe(self, space: Keyspace, hashes: HashArray, timeout_s: float | None = None) -> BoolArray:
        """Asks the file system for each block: (n,) bool. What has no answer within `timeout_s` (default: the
        deadline) counts as absent. Contents are not looked at; a load verifies them."""
        if not len(hashes) or space.digest in self._hidden:
            return np.zeros(len(hashes), np.bool_)
        places = (block_path(self._base, space, row.tobytes()) for row in hashes)

        def present(path: str) -> bool:
            try:
                return plausible(self._files.files.stat(path).st_size, space.block_bytes)
            except OSError:
                return False

        work = PathsWork(Lane.LOAD, [f"{directory}/{name}" for directory, name in places], present)
        if self._submit(work):
            work.job.wait(self._config.deadline_s if timeout_s is None else timeout_s)
        found = work.result.copy()  # threads that are late may still write into the other one
        if found.any():
            self._accounts.found(space.digest, file_bytes(space.block_bytes), hashes[found])
        return found

    def recover(self) -> Iterator[Residents]:
        """Lists the directory as it is now, keyspace by keyspace, in batches, oldest first; removes what
        crashed writers left. Waits for the medium. StorageError at the end where some of it did not answer."""
        names: list[str] = []
        silent = 0
        if not self._call(lambda files: names.extend(files.listdir(self._base))):
            self._count("recover: unreadable")
            silent = 1
        for name in sorted(names):
            if is_hash_name(name) and bytes.fromhex(name) not in self._hidden:
                silent += yield from self._recover_keyspace(name)
        for name in names:
            if name.startswith(FORGOTTEN_PREFIX):
                self._remove_tree(f"{self._base}/{name}")
        if silent and not self._closed:
            raise StorageError(
                f"{self._base}: {silent} of its directories could not be listed: what they hold is not known; "
                f"check that the file system answers"
            )

    def _recover_keyspace(self, name: str) -> Generator[Residents, None, int]:
        """Yields what a keyspace holds; returns how many directories did not answer."""
        directory = f"{self._base}/{name}"
        texts: list[bytes] = []
        inside: list[str] = []

        def look(files: FileOps) -> None:
            try:
                texts.append(read_small(files, f"{directory}/{SPEC_NAME}"))
            except FileNotFoundError:
                texts.append(b"")
            inside.extend(subdirectories(files.listdir(directory)))

        if not self._call(look):
            self._count("recover: keyspace unreadable")
            return 1
        try:
            spec = KeyspaceSpec.from_json(texts[0])
            if spec.digest().hex() != name:
                raise KeyspaceError("the spec has another digest than its directory")
        except KeyspaceError as error:
            self._count("recover: spec unreadable")
            _log.warning("%s/%s: %s; its blocks are left alone", directory, SPEC_NAME, error)
            return 0
        if not inside:
            return 0
        work = ListWork(self._files, directory, inside, spec.block_bytes, self._clock.wall_s())
        self._submit(work)
        while not work.job.wait(_WAIT_SLICE_S):
            if self._closed:
                return 0
        listed = [entry for entry in work.listed if entry is not None]
        for entry in listed:
            for reason, count in entry.odd.items():
                self._count(f"recover: {reason}", count)
        hashes = np.concatenate([np.empty((0, HASH_BYTES), np.uint8), *(entry.hashes for entry in listed)])
        times = np.concatenate([np.empty(0, np.int64), *(entry.times_ns for entry in listed)])
        hashes = hashes[np.argsort(times, kind="stable")]
        for start in range(0, len(hashes), RECOVER_BATCH):
            if bytes.fromhex(name) in self._hidden:
                return 0
            batch = hashes[start : start + RECOVER_BATCH]
            self._accounts.found(bytes.fromhex(name), file_bytes(spec.block_bytes), batch)
            yield Residents(spec, batch, np.zeros(len(batch), np.uint32))
        return len(work.listed) - len(listed)

    def _call(self, action: Callable[[FileOps], None]) -> bool:
        """Runs action(files) on a thread of the pool; False when it failed or was overdue."""

        def run(operation: Operation) -> int:
            try:
                action(self._files.files)
            except OSError:
                return BlockStatus.IO_ERROR
            return BlockStatus.OK

        work = CallWork(Lane.SCAN, run)
        if not self._submit(work):
            return False
        while not work.job.wait(_WAIT_SLICE_S):
            if self._closed:
                return False
        return work.job.ok()

    # Health.

    def healthy(self) -> bool:
        """False while writes are stopped, after a failure or a stall, and while all threads are stuck. When a
        pause is over, asking starts the trial that may end it."""
        if self._closed or self._pool.exhausted():
            return False
        if not self._gate.open and self._pool.lost_threads < self._config.threads:
            size = self._gate.trial()
            if size:
                self._submit(CallWork(Lane.WRITE, lambda operation: self._trial(operation, size)))
        return self._gate.open

    def _trial(self, operation: Operation, size_bytes: int) -> int:
        try:
            self._make_base()
            self._try_write(padded(size_bytes))
        except OSError as error:
            self._gate.failed(write_status(error), size_bytes)
            return BlockStatus.OK
        if operation.live:
            with self._lock:
                hidden = list(self._hidden)
            self._gate.passed()
            for digest in hidden:
                self._forget_keyspace(digest)
        return BlockStatus.OK

    def _on_stall(self, count: int) -> None:
        self._count("operations overdue", count)
        self._gate.failed(BlockStatus.TIMEOUT, HEADER_BYTES)

    def _count(self, reason: str, count: int = 1) -> None:
        with self._lock:
            self.counts[reason] = self.counts.get(reason, 0) + count

    def close(self) -> None:
        """Cancels what waits, gives what runs a few seconds to end, and leaves stuck threads behind, which
        touch nothing of the caller's any more. Idempotent."""
        self._closed = True
        self._pool.close(min(_CLOSE_WAIT_S, self._config.deadline_s))
