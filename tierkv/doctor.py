"""What this machine can do for tierkv, and what to change where it cannot. Nothing is changed and nothing
stays.

Each check looks at one thing and never raises. Thread safety: all functions may be called from any thread.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

State = Literal["ok", "degraded", "missing"]

_THP = Path("/sys/kernel/mm/transparent_hugepage")
_CGROUP = Path("/sys/fs/cgroup")
_INFINIBAND = Path("/sys/class/infiniband")
_ENOUGH_FILES = 4096
_LITTLE_FREE = 0.05
_CUDA_SUCCESS = 0
_NO_LIMIT = 1 << 60


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing looked at."""

    subject: str
    state: State
    """ok; degraded: tierkv works, but slower or with less; missing: a part of tierkv cannot be used."""
    found: str
    """What is there."""
    advice: str
    """What to change; '' where all is well."""


def examine(directory: str | os.PathLike[str] | None = None) -> list[Finding]:
    """Looks at the machine and, if given, at the file system of `directory`. Takes well under a second,
    unless the directory's file system hangs."""
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("kernel", _kernel),
        ("native core", _native_core),
        ("checksums", _checksums),
        ("CPU cores", _cores),
        ("memory limit", _memory_limit),
        ("huge pages", _huge_pages),
        ("huge pages in shared memory", _shared_huge_pages),
        ("locked memory", _locked_memory),
        ("open files", _open_files),
        ("io_uring", _io_uring),
        ("CUDA", _cuda),
        ("RDMA", _rdma),
        ("FUSE", _fuse),
    ]
    if directory is not None:
        place = os.path.abspath(directory)
        checks += [
            ("directory", lambda: _directory(place)),
            ("O_DIRECT", lambda: _direct(place)),
            ("free space", lambda: _free_space(place)),
        ]
    findings = []
    for subject, check in checks:
        try:
            findings.append(check())
        except Exception as error:  # a machine may be odd in any way; the other checks still count
            findings.append(_finding(subject, "degraded", f"could not be examined: {error}", "report this"))
    return findings


def _finding(subject: str, state: State, found: str, advice: str = "") -> Finding:
    return Finding(subject=subject, state=state, found=found, advice=advice)


def _read(path: Path) -> str:
    """A small file's text without its newline; '' when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _chosen(path: Path) -> str:
    """The word in brackets of a file such as 'always [madvise] never'; '' when there is none."""
    return _read(path).partition("[")[2].partition("]")[0]


def _size(size_bytes: int) -> str:
    value = float(size_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _kernel() -> Finding:
    release = platform.release()
    if platform.system() != "Linux":
        return _finding("kernel", "missing", f"{platform.system()} {release}", "run tierkv on Linux")
    numbers = [int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit()]
    if numbers and numbers < [5, 14]:
        advice = "use Linux 5.14 or later: memory can be touched ahead there, and io_uring is mature"
        return _finding("kernel", "degraded", release, advice)
    return _finding("kernel", "ok", release)


def _native_core() -> Finding:
    try:
        from tierkv import _native
    except ImportError as error:
        advice = "install tierkv from a wheel for this platform, or build it with a C++20 compiler"
        return _finding("native core", "missing", str(error), advice)
    facts = ", ".join(f"{name} {value}" for name, value in _native.build_info().items())
    return _finding("native core", "ok", facts)


def _checksums() -> Finding:
    from tierkv._native import crc32c_implementation

    found = crc32c_implementation()
    if found == "portable":
        advice = "use a CPU with SSE 4.2 (x86-64) or the CRC extension (ARMv8): checksums are about ten times slower"
        return _finding("checksums", "degraded", "crc32c by tables", advice)
    return _finding("checksums", "ok", f"crc32c by {found}")


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0))
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    limit = f", limited to {int(quota) / int(period):.1f} by the control group" if quota.isdigit() else ""
    if usable < 2 or (quota.isdigit() and int(quota) < 2 * int(period)):
        advice = "give it 2 cores or more, so that copies do not take the engine's"
        return _finding("CPU cores", "degraded", f"{usable} usable{limit}", advice)
    return _finding("CPU cores", "ok", f"{usable} usable of {os.cpu_count()}{limit}")


def _memory_limit() -> Finding:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    own = _read(Path("/proc/self/cgroup")).rpartition("::")[2].split("\n")[0].strip("/")
    for place in (
        _CGROUP / own / "memory.max",
        _CGROUP / "memory.max",
        _CGROUP / "memory/memory.limit_in_bytes",
    ):
        text = _read(place)
        if text.isdigit() and int(text) < min(total, _NO_LIMIT):
            advice = (
                "keep dram.capacity_bytes well below it, or raise the limit: the arena and the engine count "
                "together, "
                "and beyond it the process is killed"
            )
            found = f"{_size(int(text))} by the control group, of {_size(total)} in the machine"
            return _finding("memory limit", "degraded", found, advice)
    return _finding("memory limit", "ok", f"none below the machine's {_size(total)}")


def _huge_pages() -> Finding:
    chosen = _chosen(_THP / "enabled")
    if chosen in ("always", "madvise"):
        return _finding("huge pages", "ok", f"transparent huge pages: {chosen}")
    advice = (
        f"echo madvise > {_THP}/enabled: copies to and from the DRAM tier run at about half speed without"
    )
    return _finding(
        "huge pages", "degraded", f"transparent huge pages: {chosen or 'not in this kernel'}", advice
    )


def _shared_huge_pages() -> Finding:
    subject = "huge pages in shared memory"
    free = _read(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")) or "0"
    chosen = _chosen(_THP / "shmem_enabled")
    found = f"{free} free hugetlb pages of 2 MiB; shmem_enabled: {chosen or 'not in this kernel'}"
    if chosen in ("always", "within_size", "advise", "force") or (free.isdigit() and int(free) > 0):
        return _finding(subject, "ok", found)
    advice = (
        f"only for dram.shared: echo advise > {_THP}/shmem_enabled, or sysctl vm.nr_hugepages to the arena's "
        f"size "
        f"in 2 MiB pages"
    )
    return _finding(subject, "degraded", found, advice)


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else _size(soft)
    if soft == resource.RLIM_INFINITY or _can_lock(64 << 20):
        return _finding("locked memory", "ok", f"limit {limit}, and locking works")
    advice = (
        "raise the limit to the arena's size (ulimit -l, LimitMEMLOCK=) or give CAP_IPC_LOCK: until then the "
        "arena may be swapped out, and RDMA cannot register it"
    )
    return _finding("locked memory", "degraded", f"limit {limit}", advice)


def _can_lock(size_bytes: int) -> bool:
    """Tries it, without touching the memory: capabilities may go beyond the limit."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        anchor = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(anchor)
        try:
            if not hasattr(libc, "mlock2"):
                return False
            locked: bool = (
                libc.mlock2(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), ctypes.c_uint(1)) == 0
            )
            if locked:
                libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes))
            return locked
        finally:
            del anchor


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _ENOUGH_FILES:
        advice = f"raise it to {_ENOUGH_FILES} or more (ulimit -n, LimitNOFILE=)"
        return _finding("open files", "degraded", f"limit {soft}, at most {hard}", advice)
    return _finding("open files", "ok", f"limit {soft}")


def _io_uring() -> Finding:
    try:
        from tierkv.io.uring import io_uring_available
    except ImportError as error:
        return _finding("io_uring", "degraded", str(error), "install liburing (pip install liburing)")
    available, why = io_uring_available()
    if available:
        return _finding("io_uring", "ok", why)
    advice = (
        "allow it (sysctl kernel.io_uring_disabled=0, and a container profile that permits io_uring_setup); "
        "until "
        "then a thread pool does the NVMe tier's I/O"
    )
    return _finding("io_uring", "degraded", why, advice)


def _cuda() -> Finding:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return _finding("CUDA", "missing", "no libcuda.so.1", "needed for GPUs only: install NVIDIA's driver")
    failed = driver.cuInit(0)
    if failed != _CUDA_SUCCESS:
        advice = "check nvidia-smi, and that the container was given its GPUs"
        return _finding("CUDA", "missing", f"the driver does not start (error {failed})", advice)
    count, version = ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    driver.cuDriverGetVersion(ctypes.byref(version))
    shown = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}, {count.value} GPUs"
    return _finding("CUDA", "ok" if count.value else "missing", shown, "" if count.value else "give it a GPU")


def _rdma() -> Finding:
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        advice = "needed for transfers by RDMA only: install libibverbs (rdma-core)"
        return _finding("RDMA", "missing", "no libibverbs.so.1", advice)
    try:
        devices = sorted(os.listdir(_INFINIBAND))
    except OSError:
        devices = []
    if not devices:
        advice = "needed for transfers by RDMA only: load the adapter's driver, or rdma_rxe for tests"
        return _finding("RDMA", "missing", "libibverbs, but no device", advice)
    return _finding("RDMA", "ok", ", ".join(devices))


def _fuse() -> Finding:
    place = "/dev/fuse"
    if not os.path.exists(place):
        advice = "needed for shared file systems in user space only: modprobe fuse, or give the container /dev/fuse"
        return _finding("FUSE", "missing", f"no {place}", advice)
    if not os.access(place, os.R_OK | os.W_OK):
        return _finding("FUSE", "missing", f"{place} may not be opened", f"give this user access to {place}")
    return _finding("FUSE", "ok", place)


def _directory(place: str) -> Finding:
    if not os.path.isdir(place):
        return _finding(
            "directory", "missing", f"{place} is no directory", "create it or mount the file system"
        )
    if not os.access(place, os.R_OK | os.W_OK | os.X_OK):
        advice = "mount it read-write and give this user access"
        return _finding("directory", "missing", f"{place} cannot be written", advice)
    return _finding("directory", "ok", f"{place} on {_file_system(place)}")


def _file_system(place: str) -> str:
    """The type of the file system, from /proc/self/mounts."""
    best, kind = "", "an unknown file system"
    for line in _read(Path("/proc/self/mounts")).splitlines():
        _, point, name, *_ = line.split(" ")
        point = point.encode().decode("unicode_escape")
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, name
    return kind


def _direct(place: str) -> Finding:
    """Writes and reads 4 KiB of a file without a name (or with one, where the file system has no such
    files)."""
    path = f"{place}/.tierkv-doctor-{os.getpid()}"
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT, 0o600)
        except OSError as error:
            return _no_direct(place, path, error)
        try:
            written = os.pwritev(fd, [page], 0)
            read = os.preadv(fd, [page], 0)
        except OSError as error:
            return _no_direct(place, path, error)
        finally:
            os.close(fd)
            os.unlink(path)
    if written != mmap.PAGESIZE or read != mmap.PAGESIZE:
        return _finding("O_DIRECT", "degraded", "short reads or writes", "use another file system")
    return _finding("O_DIRECT", "ok", f"works in {place}")


def _no_direct(place: str, path: str, error: OSError) -> Finding:
    if os.path.lexists(path):
        os.unlink(path)
    if error.errno != errno.EINVAL:
        advice = "make the directory writable"
        return _finding("O_DIRECT", "missing", f"could not be tried: {error.strerror}", advice)
    found = f"refused in {place} ({_file_system(place)})"
    advice = "use ext4 or xfs: through the page cache the same disk gives a quarter of its speed, or less"
    return _finding("O_DIRECT", "degraded", found, advice)


def _free_space(place: str) -> Finding:
    about = os.statvfs(place)
    free, total = about.f_bavail * about.f_frsize, about.f_blocks * about.f_frsize
    found = f"{_size(free)} of {_size(total)}"
    if total and free < _LITTLE_FREE * total:
        advice = "free space or lower capacity_bytes: a full medium takes no more blocks"
        return _finding("free space", "degraded", found, advice)
    return _finding("free space", "ok", found)
