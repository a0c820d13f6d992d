"""Arena: what is mapped, what it says about it, and that closing never takes memory from a reader."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tierkv.errors import ArgumentError, ClosedError, ConfigError
from tierkv.memory import HUGE_PAGE_BYTES, Arena
from tierkv.memory import arena as arena_module

SIZE = 6 << 20
SHMEM = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
NR_HUGE = Path("/proc/sys/vm/nr_hugepages")


def chosen(path: Path) -> str:
    return path.read_text().partition("[")[2].partition("]")[0]


@contextmanager
def kernel_setting(path: Path, value: str) -> Iterator[None]:
    before = chosen(path) if "[" in path.read_text() else path.read_text().strip()
    try:
        path.write_text(value)
    except OSError as error:
        pytest.skip(f"{path} cannot be set here: {error.strerror}")
    try:
        yield
    finally:
        path.write_text(before)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("first_touch", ["background", "now", "never"])
def test_every_byte_is_usable_and_keeps_its_value(shared: bool, first_touch: str) -> None:
    with Arena.create(SIZE, shared=shared, first_touch=first_touch) as arena:  # type: ignore[arg-type]
        view = np.frombuffer(arena.view(), np.uint8)
        view[:] = np.arange(SIZE, dtype=np.uint64).astype(np.uint8)
        assert arena.wait_touched(30)
        assert (view == np.arange(SIZE, dtype=np.uint64).astype(np.uint8)).all()
        assert arena.address == view.__array_interface__["data"][0]
        assert arena.address % 4096 == 0
        assert arena.size_bytes == SIZE
        assert (arena.fd is not None) == shared
        slots = np.array([0, 3, SIZE // 4096 - 1], np.uint32)
        assert (arena.addresses(slots) == arena.address + slots.astype(np.int64) * 4096).all()
        ctypes.memset(int(arena.addresses(slots)[1]), 7, 4096)
        assert (view[3 * 4096 : 4 * 4096] == 7).all()
        del view


def test_first_touch_maps_all_pages_and_writers_meanwhile_lose_nothing() -> None:
    size = 64 << 20
    with Arena.create(size, huge_pages="off", first_touch="background", lock_memory="off") as arena:
        view = np.frombuffer(arena.view(), np.uint8)
        marks = np.arange(0, size, 4096)
        view[marks] = (marks // 4096 % 251).astype(np.uint8)
        assert arena.wait_touched(60)
        assert (view[marks] == (marks // 4096 % 251)).all()
        assert _resident_bytes(arena) == size
        del view


def _resident_bytes(arena: Arena) -> int:
    """mincore: how many bytes of the arena are mapped."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = (ctypes.c_ubyte * (arena.size_bytes // 4096))()
    assert libc.mincore(ctypes.c_void_p(arena.address), ctypes.c_size_t(arena.size_bytes), pages) == 0
    return sum(page & 1 for page in pages) * 4096


def test_huge_pages_are_real_and_aligned() -> None:
    if chosen(THP) == "never":
        pytest.skip(f"{THP} is 'never'")
    with Arena.create(SIZE, huge_pages="on", first_touch="now") as arena:
        assert arena.pages == "anonymous huge"
        assert arena.address % HUGE_PAGE_BYTES == 0
        assert arena_module._huge_bytes(arena.address) >= SIZE
    with Arena.create(SIZE, huge_pages="off", first_touch="now") as arena:
        assert arena.pages == "anonymous 4K"
        assert arena_module._huge_bytes(arena.address) == 0


@pytest.mark.root
def test_shared_memory_says_what_to_set_and_takes_it_when_set() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to change kernel settings")
    with kernel_setting(SHMEM, "never"), kernel_setting(NR_HUGE, "0"):
        with Arena.create(SIZE, shared=True) as arena:
            assert arena.pages == "memfd 4K"
            assert any("vm.nr_hugepages" in note for note in arena.notes)
            assert any("shmem_enabled" in note and "advise" in note for note in arena.notes)
        with pytest.raises(ConfigError, match=r"vm\.nr_hugepages"):
            Arena.create(SIZE, shared=True, huge_pages="on")
    with (
        kernel_setting(SHMEM, "advise"),
        kernel_setting(NR_HUGE, "0"),
        Arena.create(SIZE, shared=True, first_touch="now", huge_pages="on") as arena,
    ):
        assert arena.pages == "memfd huge"
        assert arena_module._huge_bytes(arena.address) >= SIZE
    with kernel_setting(NR_HUGE, "4"):
        if int(NR_HUGE.read_text()) < 4:
            pytest.skip("memory is too fragmented for 4 huge pages")
        with Arena.create(SIZE, shared=True, huge_pages="on", first_touch="now") as arena:
            assert arena.pages == "hugetlb"
            assert arena.locked
            assert arena.address % HUGE_PAGE_BYTES == 0
            arena.view(0, 4)[:] = b"abcd"
            assert arena.fd is not None
            with Arena.attach(arena.fd, SIZE) as other:
                assert other.pages == "hugetlb"
                assert bytes(other.view(0, 4)) == b"abcd"


_PEER = """
import sys
from tierkv.memory import Arena
fd, size = int(sys.argv[1]), int(sys.argv[2])
with Arena.attach(fd, size) as arena:
    assert bytes(arena.view(10, 5)) == b"hello", bytes(arena.view(10, 5))
    arena.view(size - 5, 5)[:] = b"there"
"""


def test_another_process_sees_the_same_bytes() -> None:
    with Arena.create(SIZE, shared=True) as arena:
        arena.view(10, 5)[:] = b"hello"
        fd = arena.fd
        assert fd is not None
        subprocess.run(
            [sys.executable, "-c", _PEER, str(fd), str(SIZE)], check=True, timeout=60, pass_fds=[fd]
        )
        assert bytes(arena.view(SIZE - 5, 5)) == b"there"


def test_attach_refuses_what_could_kill_the_reader(tmp_path: Path) -> None:
    with Arena.create(SIZE, shared=True, huge_pages="off") as arena:
        assert arena.fd is not None
        with pytest.raises(OSError, match=os.strerror(errno.EPERM)):
            os.ftruncate(arena.fd, 4096)
        with pytest.raises(ArgumentError, match="has"):
            Arena.attach(arena.fd, SIZE + 1)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(loose, SIZE)
        with pytest.raises(ArgumentError, match="not sealed"):
            Arena.attach(loose, SIZE)
    finally:
        os.close(loose)
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(SIZE)
        with pytest.raises(ArgumentError, match="not a memfd"):
            Arena.attach(file.fileno(), SIZE)


def test_closing_keeps_memory_that_is_still_viewed() -> None:
    arena = Arena.create(SIZE)
    array = np.frombuffer(arena.view(4096, 4096), np.uint8)
    array[:] = 9
    arena.close()
    arena.close()
    assert any("views" in note for note in arena.notes)
    assert (array == 9).all()
    array[:] = 3
    assert int(array.sum()) == 3 * 4096
    with pytest.raises(ClosedError):
        arena.view()


def test_closing_unmaps_and_returns_the_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    arena = Arena.create(SIZE, shared=True)
    address = arena.address
    assert _mapped(address)
    arena.close()
    assert not _mapped(address)
    assert not arena.notes or "views" not in arena.notes[-1]
    assert set(os.listdir("/proc/self/fd")) == before
    assert not [t for t in threading.enumerate() if t.name == "tierkv-touch"]


def _mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, _, high = line.split()[0].partition("-")
        if int(low, 16) <= address < int(high, 16):
            return True
    return False


_LOCKED = """
import ctypes, resource, sys
from tierkv.errors import ConfigError
from tierkv.memory import Arena
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
libc = ctypes.CDLL(None, use_errno=True)
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
sets = (ctypes.c_uint32 * 6)()
assert libc.capget(header, sets) == 0
sets[0] &= ~(1 << 14)  # CAP_IPC_LOCK, effective
sets[1] &= ~(1 << 14)  # permitted
assert libc.capset(header, sets) == 0
with Arena.create(6 << 20, lock_memory="auto") as arena:
    assert not arena.locked
    assert any("CAP_IPC_LOCK" in note and "ulimit -l" in note for note in arena.notes), arena.notes
with Arena.create(6 << 20, lock_memory="off") as arena:
    assert not arena.locked and not arena.notes, arena.notes
try:
    Arena.create(6 << 20, lock_memory="on")
except ConfigError as error:
    assert "lock_memory" in str(error)
else:
    sys.exit("lock_memory='on' was not refused")
"""


def test_locking_falls_back_or_refuses_without_the_right() -> None:
    subprocess.run([sys.executable, "-c", _LOCKED], check=True, timeout=60)


def test_locking_works_where_it_is_allowed() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if os.geteuid() != 0 and soft != resource.RLIM_INFINITY and soft < SIZE:
        pytest.skip(f"RLIMIT_MEMLOCK is {soft} and this is not root")
    with Arena.create(SIZE, lock_memory="on") as arena:
        assert arena.locked


def test_arguments_are_checked() -> None:
    with pytest.raises(ArgumentError):
        Arena.create(0)
    with Arena.create(8192, huge_pages="off") as arena:
        for offset, length in ((-1, 1), (0, 8193), (8192, 1), (4096, -1)):
            with pytest.raises(ArgumentError, match="8192"):
                arena.view(offset, length)
        assert len(arena.view(8192, 0)) == 0


def test_too_much_memory_is_refused_with_the_setting() -> None:
    code = (
        "import resource\nfrom tierkv.errors import StorageError\nfrom tierkv.memory import Arena\n"
        "import os; used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)\n"
        "for shared in (False, True):\n"
        "    try: Arena.create(1 << 30, shared=shared)\n"
        "    except StorageError as error: assert 'dram.capacity_bytes' in str(error), error\n"
        "    else: raise SystemExit('not refused')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.returncode != -signal.SIGKILL
