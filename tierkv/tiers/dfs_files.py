"""Files of blocks: how one is read, checked and written, with plain blocking calls.

FileOps is the seam to the system; tests put a failing or stalling one in its place. Everything else here
turns its errors into statuses. Thread safety: all of it may be used from several threads; scratch memory is
the caller's.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tierkv import codec
from tierkv._native import crc32c
from tierkv.memory import Scratch
from tierkv.tiers.dfs_format import (
    HEADER_BYTES,
    TEMPORARY_PREFIX,
    Header,
    check_header,
    file_bytes,
    padded,
    read_header,
)
from tierkv.types import BlockStatus, UInt8Array

FILE_MODE = 0o660
DIRECTORY_MODE = 0o770
_SPACE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT})
_GONE_ERRORS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP})
_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})


class FileOps:
    """The system calls that are used, each as it is. Paths are absolute; descriptors are never inherited."""

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)

    def close(self, fd: int) -> None:
        os.close(fd)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def stat(self, path: str) -> os.stat_result:
        return os.stat(path, follow_symlinks=False)

    def preadv(self, fd: int, target: UInt8Array, offset: int) -> int:
        return os.preadv(fd, [target.data], offset)

    def pwritev(self, fd: int, source: UInt8Array, offset: int) -> int:
        return os.pwritev(fd, [source.data], offset)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        os.mkdir(path, DIRECTORY_MODE)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def listdir(self, path: str) -> list[str]:
        return os.listdir(path)


class DirectMode:
    """Whether O_DIRECT is used. Once a file system refuses it, `auto` goes on without."""

    def __init__(self, choice: str) -> None:
        self.enabled = choice != "off"
        self._may_fall_back = choice == "auto"

    def flag(self) -> int:
        return os.O_DIRECT if self.enabled else 0

    def refused(self, error: OSError, flag: int) -> bool:
        """True when a call with `flag` failed for O_DIRECT's sake and should be tried again without."""
        if not flag or error.errno != errno.EINVAL or not self._may_fall_back:
            return False
        self.enabled = False
        return True


def write_status(error: OSError) -> BlockStatus:
    return BlockStatus.NO_SPACE if error.errno in _SPACE_ERRORS else BlockStatus.IO_ERROR


def error_name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "error")


@dataclass(slots=True)
class ReadResult:
    """`data` is set when `status` is OK and lies in scratch memory. `inode` is that of the file that was
    read."""

    status: BlockStatus
    reason: str = ""
    data: UInt8Array | None = None
    inode: int = 0


class BlockFiles:
    """Reads and writes block files."""

    def __init__(self, files: FileOps, direct: DirectMode, sync: bool) -> None:
        self.files = files
        self.direct = direct
        self.sync = sync
        host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:64]
        self._temporary = f"{TEMPORARY_PREFIX}{host}-{os.getpid()}-"
        self._counter = itertools.count(int.from_bytes(os.urandom(4), "little"))

    # Reading.

    def read(
        self, path: str, scratch: Scratch, digest: bytes, block_hash: bytes, block_bytes: int
    ) -> ReadResult:
        """Reads and verifies one block. OK, MISS, CORRUPT or IO_ERROR with a reason; raises nothing."""
        flag = self.direct.flag()
        try:
            try:
                loaded = self.load(path, scratch, file_bytes(block_bytes), flag)
            except OSError as error:
                if not self.direct.refused(error, flag):
                    raise
                loaded = self.load(path, scratch, file_bytes(block_bytes), 0)
        except OSError as error:
            if error.errno in _GONE_ERRORS:
                return ReadResult(BlockStatus.MISS, "absent")
            return ReadResult(BlockStatus.IO_ERROR, f"read {error_name(error)}")
        if loaded.data is None:
            return loaded
        header = read_header(loaded.data)
        wrong = check_header(header, len(loaded.data), digest, block_hash, block_bytes)
        if wrong or isinstance(header, str):
            return ReadResult(BlockStatus.CORRUPT, wrong, inode=loaded.inode)
        data = unpack(header, loaded.data, scratch)
        if isinstance(data, str):
            return ReadResult(BlockStatus.CORRUPT, data, inode=loaded.inode)
        loaded.data = data
        return loaded

    def load(self, path: str, scratch: Scratch, most_bytes: int, flag: int) -> ReadResult:
        """The whole file in scratch memory; raises OSError."""
        # Not blocking: a FIFO under a block's name must not hold the thread.
        fd = self.files.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | flag)
        try:
            found = self.files.fstat(fd)
            size = found.st_size
            if not stat.S_ISREG(found.st_mode):
                return ReadResult(BlockStatus.MISS, "not a file")
            if size > most_bytes or size < HEADER_BYTES or size % HEADER_BYTES:
                reason = "file length" if size > most_bytes else "truncated"
                return ReadResult(BlockStatus.CORRUPT, reason, inode=found.st_ino)
            buffer = scratch.file(size)
            done = 0
            while done < size:
                count = self.files.preadv(fd, buffer[done:], done)
                if count <= 0:
                    return ReadResult(BlockStatus.CORRUPT, "truncated", inode=found.st_ino)
                whole = count // HEADER_BYTES * HEADER_BYTES
                if whole != count and flag and done + count < size:
                    if not whole:  # it would be unaligned from here on
                        raise OSError(errno.EINVAL, "short direct read")
                    count = whole
                done += count
            return ReadResult(BlockStatus.OK, data=buffer, inode=found.st_ino)
        finally:
            self.files.close(fd)

    def holds(self, path: str, scratch: Scratch, digest: bytes, block_hash: bytes, block_bytes: int) -> bool:
        """Whether a file with this block's header and the right length is there. Looks at no payload."""
        try:
            fd = self.files.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            found = self.files.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                return False
            head = scratch.file(HEADER_BYTES)
            if self.files.preadv(fd, head, 0) != HEADER_BYTES:
                return False
            return not check_header(read_header(head), found.st_size, digest, block_hash, block_bytes)
        except OSError:
            return False
        finally:
            with contextlib.suppress(OSError):
                self.files.close(fd)

    def drop(self, path: str, inode: int) -> None:
        """Unlinks a bad copy, unless a new one has taken its place."""
        with contextlib.suppress(OSError):
            if self.files.stat(path).st_ino == inode:
                self.files.unlink(path)

    # Writing.

    def temporary(self, directory: str) -> str:
        """A name in `directory` that nobody else uses."""
        return f"{directory}/{self._temporary}{next(self._counter)}"

    def publish(self, directory: str, name: str, data: UInt8Array, wanted: Callable[[], bool]) -> bool:
        """Writes `data`, aligned and of whole pages, under a temporary name and renames it to `name`. False,
        and nothing left, when it is no longer `wanted` by then. Raises OSError, and then left nothing
        either."""
        temporary, final = self.temporary(directory), f"{directory}/{name}"
        try:
            self.write_temporary(temporary, data)
            if not wanted():
                self.files.unlink(temporary)
                return False
            self.files.rename(temporary, final)
        except OSError:
            self.unlink_quietly(temporary)
            raise
        if self.sync:
            try:
                self.sync_directory(directory)
            except OSError:
                self.unlink_quietly(final)
                raise
        return True

    def write_temporary(self, path: str, data: UInt8Array) -> None:
        """Writes (and, with sync, fsyncs) a new file. Raises OSError and may leave a part of it."""
        flag = self.direct.flag()
        try:
            self._write_whole(path, data, flag)
        except OSError as error:
            if not self.direct.refused(error, flag):
                raise
            self.unlink_quietly(path)
            self._write_whole(path, data, 0)

    def _write_whole(self, path: str, data: UInt8Array, flag: int) -> None:
        fd = self.files.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flag)
        try:
            done = 0
            while done < len(data):
                count = self.files.pwritev(fd, data[done:], done)
                if flag and done + count < len(data):
                    count = count // HEADER_BYTES * HEADER_BYTES
                if count <= 0:
                    raise OSError(errno.EIO, "nothing was written")
                done += count
            if self.sync:
                self.files.fsync(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                self.files.close(fd)
            raise
        self.files.close(fd)  # a quota may show only here

    def sync_directory(self, path: str) -> None:
        """fsync of a directory, where the file system has such a thing."""
        fd = self.files.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.files.fsync(fd)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_SYNC:
                raise
        finally:
            with contextlib.suppress(OSError):
                self.files.close(fd)

    def unlink_quietly(self, path: str) -> None:
        with contextlib.suppress(OSError):
            self.files.unlink(path)

    def mkdir(self, path: str) -> bool:
        """Makes a directory; False if it is there already. Raises OSError."""
        try:
            self.files.mkdir(path)
        except FileExistsError:
            return False
        return True


def pack(
    scratch: Scratch,
    chosen: codec.CodecId,
    level: int,
    element_bytes: int,
    raw: UInt8Array | None,
    length: int,
) -> tuple[UInt8Array, codec.CodecId, int]:
    """Encodes `raw`, or, when it is None, takes the block that lies behind the header already: (the file's
    room, codec used, bytes stored)."""
    room = scratch.file(file_bytes(length))
    if raw is None:
        used, stored = codec.CodecId.NONE, length
    else:
        used, stored = codec.encode(
            chosen, raw, room[HEADER_BYTES:], level=level, element_bytes=element_bytes
        )
    whole = room[: file_bytes(stored)]
    whole[HEADER_BYTES + stored :] = 0
    return whole, used, stored


def unpack(header: Header, whole: UInt8Array, scratch: Scratch) -> UInt8Array | str:
    """The block in a whole file's bytes, verified, or a text that names what is wrong."""
    stored = whole[HEADER_BYTES : HEADER_BYTES + header.stored_bytes]
    if crc32c(stored) != header.stored_checksum:
        return "payload checksum"
    if header.codec == codec.CodecId.NONE:
        if header.stored_bytes != header.block_bytes or header.block_checksum != header.stored_checksum:
            return "header values"
        return stored
    raw = scratch.raw(header.block_bytes)
    if not codec.decode(header.codec, stored, raw):
        return "encoding"
    if crc32c(raw) != header.block_checksum:
        return "block checksum"
    return raw


def small_file(text: bytes) -> UInt8Array:
    """`text` followed by spaces up to a whole page, in page-aligned memory: a file O_DIRECT can write."""
    room = Scratch().file(max(HEADER_BYTES, padded(len(text))))
    room[:] = ord(" ")
    room[: len(text)] = np.frombuffer(text, np.uint8)
    return room
