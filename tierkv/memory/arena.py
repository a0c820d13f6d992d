"""Arena: one mapping of memory for blocks, private and anonymous or a memfd that other processes map.

The settings (huge pages, locking, first touch) fall back step by step; `pages`, `locked` and `notes` say what
was really obtained. Thread safety: all methods may be called from any thread. Whoever uses raw addresses must
end before close(); views keep the mapping alive by themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Callable
from typing import Literal

import numpy as np

from tierkv.errors import ArgumentError, ClosedError, ConfigError, StorageError
from tierkv.types import SLOT_GRANULE_BYTES, Int64Array, SlotArray

_log = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 << 20
TOUCH_CHUNK_BYTES = 16 << 20
_TOUCH_END_TIMEOUT_S = 30.0
_MADV_HUGEPAGE = 14
_MADV_NOHUGEPAGE = 15
_MADV_DONTDUMP = 16
_MADV_POPULATE_WRITE = 23
_MLOCK_ONFAULT = 1
_MFD_HUGETLB_2MB = 0x0004 | 21 << 26
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_SHRINK") else 0x0002 | 0x0004
_SHMEM_ENABLED = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
_THP_ENABLED = "/sys/kernel/mm/transparent_hugepage/enabled"

Choice = Literal["auto", "on", "off"]
FirstTouch = Literal["background", "now", "never"]
Toucher = Callable[[int, int, int], None]
"""(address, length, page_bytes): CopyPool.touch, for kernels without MADV_POPULATE_WRITE (before 5.14)."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _madvise(address: int, length: int, advice: int) -> int:
    """0 or errno. Runs without the GIL."""
    return 0 if _libc.madvise(address, length, advice) == 0 else ctypes.get_errno()


def _lock_pages(address: int, length: int) -> int:
    """0 or errno. Locks pages as they are touched, so that it returns at once; older kernels touch them
    all."""
    try:
        mlock2 = _libc.mlock2
    except AttributeError:
        return 0 if _libc.mlock(address, length) == 0 else ctypes.get_errno()
    mlock2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    if mlock2(address, length, _MLOCK_ONFAULT) == 0:
        return 0
    failed = ctypes.get_errno()
    if failed != errno.ENOSYS:
        return failed
    return 0 if _libc.mlock(address, length) == 0 else ctypes.get_errno()


def _read_choice(path: str) -> str:
    """The chosen word of a /sys file such as 'always [madvise] never', or ''."""
    try:
        with open(path, encoding="ascii") as file:
            text = file.read()
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _huge_bytes(address: int) -> int:
    """Bytes of transparent huge pages in the mapping that contains `address`, as /proc/self/smaps tells."""
    inside = False
    total = 0
    with contextlib.suppress(OSError), open("/proc/self/smaps", encoding="ascii", errors="replace") as file:
        for line in file:
            head = line.split(maxsplit=1)[0]
            if "-" in head and not head.endswith(":"):
                low, _, high = head.partition("-")
                inside = int(low, 16) <= address < int(high, 16)
            elif inside and head in {"AnonHugePages:", "ShmemPmdMapped:"}:
                total += int(line.split()[1]) << 10
    return total


class Arena:
    """One mapping of `size_bytes` from `address` on. Made by create() or attach()."""

    def __init__(
        self,
        mapping: mmap.mmap,
        offset: int,
        size_bytes: int,
        *,
        fd: int | None,
        pages: str,
        notes: list[str],
    ) -> None:
        self._mapping = mapping
        self._whole = memoryview(mapping)[offset : offset + size_bytes]
        self._lock = threading.Lock()
        self._closed = False
        self._stop = threading.Event()
        self._touched = threading.Event()
        self._thread: threading.Thread | None = None
        self.address: int = _address_of(mapping) + offset
        self.size_bytes = size_bytes
        self.fd = fd
        """The memfd, open until close(), or None for private memory."""
        self.pages = pages
        """'anonymous huge', 'anonymous 4K', 'hugetlb', 'memfd huge' or 'memfd 4K'."""
        self.locked = False
        self.notes = notes
        """What could not be had, and what to set to have it."""

    # Making.

    @classmethod
    def create(
        cls,
        size_bytes: int,
        *,
        shared: bool = False,
        huge_pages: Choice = "auto",
        lock_memory: Choice = "auto",
        first_touch: FirstTouch = "background",
        name: str = "tierkv",
        toucher: Toucher | None = None,
    ) -> Arena:
        """Maps memory; settings as in DramConfig. ConfigError where a setting of "on" cannot be had,
        StorageError where the memory cannot be had at all. `toucher` is used on kernels before 5.14 only."""
        if size_bytes < 1:
            raise ArgumentError(f"an arena of {size_bytes} bytes")
        arena = (
            cls._map_shared(size_bytes, huge_pages, name)
            if shared
            else cls._map_private(size_bytes, huge_pages)
        )
        try:
            if huge_pages == "on" and not arena.pages.endswith(("huge", "hugetlb")):
                raise ConfigError(f"huge_pages is 'on', but they were not granted: {'; '.join(arena.notes)}")
            _madvise(arena.address, _round_up(size_bytes, mmap.PAGESIZE), _MADV_DONTDUMP)
            arena._lock_memory(lock_memory)
            arena._first_touch(first_touch, toucher)
        except BaseException:
            arena.close()
            raise
        return arena

    @classmethod
    def attach(cls, fd: int, size_bytes: int) -> Arena:
        """Maps the first `size_bytes` of a memfd that another process made. `fd` stays the caller's; the
        arena keeps a copy of its own. ArgumentError when the file is shorter, or could be cut off under the
        reader."""
        found = os.fstat(fd).st_size
        if not 0 < size_bytes <= found:
            raise ArgumentError(f"attach: {size_bytes} bytes are wanted of a memfd that has {found}")
        try:
            seals = fcntl.fcntl(fd, 1034)  # F_GET_SEALS
        except OSError as error:
            raise ArgumentError(f"attach: descriptor {fd} is not a memfd: {error.strerror}") from error
        if not seals & 0x0002:  # F_SEAL_SHRINK
            raise ArgumentError(
                "attach: the memfd is not sealed against shrinking, so a reader could be killed by SIGBUS"
            )
        own = os.dup(fd)
        try:
            mapping = mmap.mmap(own, found, flags=mmap.MAP_SHARED)
        except BaseException:
            os.close(own)
            raise
        hugetlb = os.fstatvfs(fd).f_bsize >= HUGE_PAGE_BYTES
        address = _address_of(mapping)
        granted = not hugetlb and _madvise(address, found, _MADV_HUGEPAGE) == 0 and _huge_bytes(address) > 0
        pages = "hugetlb" if hugetlb else "memfd huge" if granted else "memfd 4K"
        return cls(mapping, 0, size_bytes, fd=own, pages=pages, notes=[])

    @classmethod
    def adopt(
        cls,
        fd: int,
        size_bytes: int,
        *,
        lock_memory: Choice = "auto",
        first_touch: FirstTouch = "background",
        toucher: Toucher | None = None,
    ) -> Arena:
        """attach() for the process that owns the memory from now on: locks and touches it as create() would. Its bytes
        stay as they are."""
        arena = cls.attach(fd, size_bytes)
        try:
            _madvise(arena.address, _round_up(size_bytes, mmap.PAGESIZE), _MADV_DONTDUMP)
            arena._lock_memory(lock_memory)
            arena._first_touch(first_touch, toucher)
        except BaseException:
            arena.close()
            raise
        return arena

    @classmethod
    def _map_private(cls, size_bytes: int, huge_pages: Choice) -> Arena:
        wanted = huge_pages == "on" or (huge_pages == "auto" and size_bytes >= HUGE_PAGE_BYTES)
        # One huge page more than needed, so that the arena can start on a huge page's boundary.
        length = (
            _round_up(size_bytes, HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES
            if wanted
            else _round_up(size_bytes, mmap.PAGESIZE)
        )
        try:
            mapping = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise StorageError(
                f"cannot map {size_bytes} bytes of memory: {error.strerror}; lower dram.capacity_bytes"
            ) from error
        start = _address_of(mapping)
        if not wanted:
            _madvise(start, length, _MADV_NOHUGEPAGE)
            return cls(mapping, 0, size_bytes, fd=None, pages="anonymous 4K", notes=[])
        offset = -start % HUGE_PAGE_BYTES
        address = start + offset
        notes: list[str] = []
        advised = _madvise(address, _round_up(size_bytes, HUGE_PAGE_BYTES), _MADV_HUGEPAGE)
        if advised == 0 and _granted(address):
            return cls(mapping, offset, size_bytes, fd=None, pages="anonymous huge", notes=notes)
        chosen = _read_choice(_THP_ENABLED) or "missing"
        notes.append(
            f"no huge pages: the kernel gave none ({_THP_ENABLED} is '{chosen}'); set it to 'madvise' or "
            f"'always', "
            f"or free memory where it is fragmented; copies run at about half speed"
        )
        return cls(mapping, offset, size_bytes, fd=None, pages="anonymous 4K", notes=notes)

    @classmethod
    def _map_shared(cls, size_bytes: int, huge_pages: Choice, name: str) -> Arena:
        notes: list[str] = []
        wanted = huge_pages == "on" or (huge_pages == "auto" and size_bytes >= HUGE_PAGE_BYTES)
        if wanted:
            length = _round_up(size_bytes, HUGE_PAGE_BYTES)
            try:
                mapping, fd = _map_memfd(name, length, _MFD_HUGETLB_2MB)
            except OSError as error:
                notes.append(
                    f"no hugetlb pages ({error.strerror}): set vm.nr_hugepages to at least "
                    f"{length // HUGE_PAGE_BYTES} "
                    f"for this arena"
                )
            else:
                if _madvise(_address_of(mapping), HUGE_PAGE_BYTES, _MADV_POPULATE_WRITE) in (0, errno.EINVAL):
                    return cls(mapping, 0, size_bytes, fd=fd, pages="hugetlb", notes=[])
                mapping.close()
                os.close(fd)
                notes.append("no hugetlb pages: they are reserved, but this control group may not use them")
        length = _round_up(size_bytes, HUGE_PAGE_BYTES if wanted else mmap.PAGESIZE)
        try:
            mapping, fd = _map_memfd(name, length, 0)
        except OSError as error:
            raise StorageError(
                f"cannot map {size_bytes} bytes of shared memory: {error.strerror}; lower dram.capacity_bytes"
            ) from error
        if wanted:
            chosen = _read_choice(_SHMEM_ENABLED) or "missing"
            address = _address_of(mapping)
            if (
                chosen not in {"never", "deny", "missing"}
                and _madvise(address, length, _MADV_HUGEPAGE) == 0
                and _granted(address)
            ):
                return cls(mapping, 0, size_bytes, fd=fd, pages="memfd huge", notes=notes)
            notes.append(
                f"no transparent huge pages in shared memory: {_SHMEM_ENABLED} is '{chosen}'; set it to "
                f"'advise'"
            )
        return cls(mapping, 0, size_bytes, fd=fd, pages="memfd 4K", notes=notes)

    def _lock_memory(self, choice: Choice) -> None:
        if choice == "off":
            return
        if self.pages == "hugetlb":  # never swapped
            self.locked = True
            return
        failed = _lock_pages(self.address, _round_up(self.size_bytes, mmap.PAGESIZE))
        if not failed:
            self.locked = True
            return
        note = (
            f"not locked in memory ({os.strerror(failed)}): raise the locked-memory limit (ulimit -l, "
            f"LimitMEMLOCK=) to "
            f"{self.size_bytes} bytes or give the process CAP_IPC_LOCK"
        )
        if choice == "on":
            raise ConfigError(f"lock_memory is 'on', but the arena is {note}")
        self.notes.append(note)

    # First touch.

    def _first_touch(self, choice: FirstTouch, toucher: Toucher | None) -> None:
        if choice == "never":
            self._touched.set()
        elif choice == "now":
            self._touch(toucher)
        else:
            self._thread = threading.Thread(
                target=self._touch, args=(toucher,), name="tierkv-touch", daemon=True
            )
            self._thread.start()

    def _touch(self, toucher: Toucher | None) -> None:
        page_bytes = HUGE_PAGE_BYTES if self.pages.endswith(("huge", "hugetlb")) else mmap.PAGESIZE
        populate = True
        for offset in range(0, self.size_bytes, TOUCH_CHUNK_BYTES):
            if self._stop.is_set():
                break
            length = min(TOUCH_CHUNK_BYTES, self.size_bytes - offset)
            # Populating maps pages as a write would and never changes their bytes: users may write meanwhile.
            failed = self._populate(self.address + offset, length) if populate else 0
            if failed == errno.EINVAL:
                populate = False
                failed = 0
            if failed:
                self.notes.append(
                    f"memory could not be touched beyond {offset} of {self.size_bytes} bytes "
                    f"({os.strerror(failed)}): "
                    f"lower dram.capacity_bytes"
                )
                _log.warning("%s", self.notes[-1])
                break
            if not populate:
                if toucher is None:
                    self.notes.append("memory is not touched ahead: the kernel is older than 5.14")
                    break
                toucher(self.address + offset, length, page_bytes)
        self._touched.set()

    def _populate(self, address: int, length: int) -> int:
        while True:
            failed = _madvise(address, _round_up(length, mmap.PAGESIZE), _MADV_POPULATE_WRITE)
            if failed not in (errno.EINTR, errno.EAGAIN) or self._stop.is_set():
                return failed

    def wait_touched(self, timeout_s: float | None = None) -> bool:
        """Waits for the first touch to end (at once if it is 'never'); False when `timeout_s` passed
        first."""
        return self._touched.wait(timeout_s)

    # Using.

    def view(self, offset: int = 0, length: int | None = None) -> memoryview:
        """A writable view of bytes; it keeps the mapping alive. ArgumentError beyond the arena."""
        if length is None:
            length = self.size_bytes - offset
        if offset < 0 or length < 0 or offset + length > self.size_bytes:
            raise ArgumentError(f"view of {length} bytes at {offset}: the arena has {self.size_bytes}")
        with self._lock:
            if self._closed:
                raise ClosedError("the arena is closed")
            return self._whole[offset : offset + length]

    def addresses(self, slots: SlotArray) -> Int64Array:
        """(n,) int64: where slots start, in this process."""
        return slots.astype(np.int64) * SLOT_GRANULE_BYTES + self.address

    def close(self) -> None:
        """Ends the first touch and unmaps. Where views still exist the mapping stays until the last one is
        gone, and a note says so; closing again then unmaps it. Idempotent."""
        with self._lock:
            first = not self._closed
            self._closed = True
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_TOUCH_END_TIMEOUT_S)  # it ends after the chunk at hand
            self._thread = None
        if first and self.fd is not None:
            os.close(self.fd)
            self.fd = None
        try:
            self._whole.release()
            self._mapping.close()
        except BufferError:
            if not first:
                return
            self.notes.append(
                "the arena was closed while views of it exist: its memory stays until they are gone"
            )
            _log.warning("%s", self.notes[-1])

    def close_again(self) -> None:
        """Unmaps an arena that was closed while a view of it existed; does nothing to one that is open."""
        if self._closed:
            self.close()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Arena {self.size_bytes} bytes, {self.pages}{', locked' if self.locked else ''}>"


def _address_of(mapping: mmap.mmap) -> int:
    address = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
    assert isinstance(address, int)
    return address


def _granted(address: int) -> bool:
    """Touches the first huge page and asks whether it is one."""
    failed = _madvise(address, HUGE_PAGE_BYTES, _MADV_POPULATE_WRITE)
    if failed == errno.EINVAL:  # a kernel without it: an ordinary write to fresh memory
        ctypes.memset(address, 0, 1)
    elif failed:
        return False
    return _huge_bytes(address) >= HUGE_PAGE_BYTES


def _map_memfd(name: str, length: int, flags: int) -> tuple[mmap.mmap, int]:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, length)
        # Other processes map it: nobody may cut it off under them.
        fcntl.fcntl(fd, 1033, _SEALS)  # F_ADD_SEALS
        return mmap.mmap(fd, length, flags=mmap.MAP_SHARED), fd
    except BaseException:
        os.close(fd)
        raise
