"""The NVMe tier's directory: its lock, its slot file, and what is wrong when one of them cannot be had.

Thread safety: opened and closed by one thread; the descriptors may be used by all.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
import time
from pathlib import Path
from typing import Literal

from tierkv.errors import ConfigError, LockedError, StorageError
from tierkv.types import SLOT_GRANULE_BYTES

LOCK_NAME = "LOCK"
SLOTS_NAME = "slots.dat"
CATALOG_NAME = "catalog"
_LATE_TIMEOUT_S = 30.0
_LATE_LOOK_S = 0.02
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def make_directory(path: Path) -> None:
    """Makes the directory if it is missing; its parent must be there, so that a disk that is not mounted
    is seen."""
    if path.is_dir():
        return
    if path.exists() or path.is_symlink():
        raise ConfigError(
            f"nvme.directory {path} is not a directory: name a directory, or move what is there away"
        )
    try:
        path.mkdir()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"nvme.directory {path}: its parent {path.parent} is not a directory: create it, or mount the disk that "
            f"belongs there"
        ) from error
    except OSError as error:
        raise StorageError(
            f"nvme.directory {path} cannot be made: {error.strerror}; {_hint(error)}"
        ) from error


class DirectoryLock:
    """Holds the directory's LOCK file (flock); the kernel releases it when the process dies."""

    def __init__(self, directory: Path) -> None:
        """LockedError names the process that has it; StorageError where the file cannot be written."""
        self.path = directory / LOCK_NAME
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StorageError(f"{self.path} cannot be opened: {error.strerror}; {_hint(error)}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            if error.errno not in {errno.EWOULDBLOCK, errno.EACCES}:
                raise StorageError(f"{self.path} cannot be locked: {error.strerror}") from error
            raise LockedError(
                f"{directory} is open in process {holder}: stop it, or give this one a directory of its own"
            ) from error
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode("ascii"), 0)
        except OSError as error:
            os.close(self._fd)
            raise StorageError(f"{self.path} cannot be written: {error.strerror}; {_hint(error)}") from error

    def release(self) -> None:
        """Idempotent. The file stays, since deleting it would race with the next owner."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class SlotFile:
    """The open slot file. `kept_bytes` is how much of it was there before: what lies behind was never
    written."""

    def __init__(self, directory: Path, capacity_bytes: int, direct: Literal["auto", "on", "off"]) -> None:
        """Opens or makes the file; it is not resized yet."""
        self.path = directory / SLOTS_NAME
        self.capacity_bytes = capacity_bytes
        self.notes: list[str] = []
        self.direct = False
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self.fd = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise StorageError(f"{self.path} cannot be opened: {error.strerror}; {_hint(error)}") from error
        self.kept_bytes = min(os.fstat(self.fd).st_size, capacity_bytes)
        if direct == "off":
            self.notes.append("direct = off is set: writes go through the page cache")
        else:
            refused = self._reopen_direct(flags)
            if refused and direct == "on":
                os.close(self.fd)
                raise StorageError(
                    f"{self.path}: direct = on is set, but the file system refuses O_DIRECT ({refused}): set direct = "
                    f"auto, or use a directory on a local disk"
                )
            if refused:
                self.notes.append(f"O_DIRECT is refused ({refused}): writes go through the page cache")
        try:
            self._wait_for_late_transfers()
        except BaseException:
            os.close(self.fd)
            raise

    def _wait_for_late_transfers(self) -> None:
        """Waits for what a killed process had under way in the kernel, which still reads or writes its memory (that may
        be kept for this process) and this file: io_uring's requests hold the open file, and so this lock, until they
        end."""
        deadline_s = time.monotonic() + _LATE_TIMEOUT_S
        pause = threading.Event()
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise StorageError(
                        f"{self.path}: transfers of a killed process have not ended for {_LATE_TIMEOUT_S:g} s: "
                        f"check the disk, and start again"
                    ) from None
                pause.wait(_LATE_LOOK_S)

    def _reopen_direct(self, flags: int) -> str:
        """Swaps the descriptor for an O_DIRECT one; returns why that is not possible, or ''."""
        try:
            fd = os.open(self.path, flags | os.O_DIRECT)
        except OSError as error:
            return error.strerror or "refused"
        try:
            with mmap.mmap(-1, SLOT_GRANULE_BYTES) as page:  # some file systems refuse only the transfer
                os.preadv(fd, [page], 0)
        except OSError as error:
            os.close(fd)
            return error.strerror or "refused"
        os.close(self.fd)
        self.fd = fd
        self.direct = True
        return ""

    def resize(self) -> None:
        """Makes the file exactly `capacity_bytes` long, preallocated; a StorageError leaves it as it was."""
        size = os.fstat(self.fd).st_size
        if size > self.capacity_bytes:
            os.ftruncate(self.fd, self.capacity_bytes)
            size = self.capacity_bytes
        failed = _allocate(self.fd, self.capacity_bytes)
        if failed in _UNSUPPORTED:
            self.notes.append("the file system cannot preallocate: it may turn out to be full later")
            os.ftruncate(self.fd, self.capacity_bytes)
        elif failed:
            allocated = os.fstat(self.fd).st_blocks * 512
            os.ftruncate(self.fd, size)
            self._refuse(failed, allocated)

    def _refuse(self, failed: int, allocated: int) -> None:
        if failed not in _FULL:
            raise StorageError(f"{self.path} cannot be preallocated: {os.strerror(failed)}")
        system = os.statvfs(self.path.parent)
        possible = os.fstat(self.fd).st_blocks * 512 + system.f_bavail * system.f_frsize
        missing = max(self.capacity_bytes - max(possible, allocated), SLOT_GRANULE_BYTES)
        raise StorageError(
            f"{self.path}: no space for nvme.capacity_bytes = {self.capacity_bytes}: about {missing} bytes are missing "
            f"({os.strerror(failed)}); free some, or set it to {max(0, self.capacity_bytes - missing)} or less"
        )

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def holder_of(directory: Path) -> int | None:
    """The process that has the directory open now, or None. Takes no lock for longer than the call."""
    with contextlib.suppress(OSError), open(directory / LOCK_NAME, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = file.read(32).decode("ascii", "replace").strip()
            return int(text) if text.isdigit() else 0
    return None


def _allocate(fd: int, size_bytes: int) -> int:
    """fallocate(2) of the file's first `size_bytes`: 0 or the errno. glibc's posix_fallocate would fall
    back to writing every block, which takes forever where the file system cannot do it."""
    libc = ctypes.CDLL(None, use_errno=True)
    while True:
        if libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes)) == 0:
            return 0
        failed = ctypes.get_errno()
        if failed != errno.EINTR:
            return failed


def _hint(error: OSError) -> str:
    hints = {
        errno.EROFS: "it is on a read-only file system: remount it writable, or choose another directory",
        errno.EACCES: "give this user the right to write there",
        errno.EPERM: "give this user the right to write there",
        errno.ENOSPC: "free some space",
        errno.EDQUOT: "the quota is used up",
    }
    return hints.get(error.errno or 0, "check the directory")
