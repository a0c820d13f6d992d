"""A store on disks that fill up, turn read-only or refuse it, and in processes that may not do what they would like
to: real file systems, limits and filters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small_disk import SmallDisk
from store_harness import MISS, OK, Rig, load, rows, save

from tierkv.errors import LockedError, StorageError
from tierkv.testing.buffers import random_hashes
from tierkv.types import BlockStatus

BLOCK_BYTES = 16384
DISK_BYTES = 24 << 20
NVME_BLOCKS = 640
SmallDisks = Callable[[str, int], SmallDisk]


def store_on(disk: SmallDisk, sync: str = "process") -> Rig:
    """A store whose NVMe tier fills nearly half of the disk, and whose DRAM is small."""
    return Rig(
        disk.place / "store",
        dram_blocks=16,
        nvme_blocks=NVME_BLOCKS,
        block_bytes=BLOCK_BYTES,
        nvme={"sync": sync},
    )


@pytest.mark.root
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_disk_filled_up_by_others_while_saving(small_disk: SmallDisks, kind: str) -> None:
    """The slots are preallocated, so it is their catalog that finds no room."""
    disk = small_disk(kind, DISK_BYTES)
    with store_on(disk) as rig:
        space, early, late = rig.space(), random_hashes(100, 1), random_hashes(480, 2)
        assert save(rig.store, space, early) == [OK] * 100
        rig.settled()
        ballast = disk.fill()
        statuses: list[int] = []
        for start in range(0, len(late), 16):
            statuses += save(rig.store, space, rows(late, slice(start, start + 16)))
            if not rig.store.stats().tiers["nvme"].healthy:
                break
        assert set(statuses) <= {OK, BlockStatus.DROPPED}
        assert not rig.store.stats().tiers["nvme"].healthy, "nothing was refused: the disk was not full"
        assert set(load(rig.store, space, early)) <= {OK, MISS}
        below = [load(rig.store, space, rows(early, slice(p, p + 1))) == [OK] for p in range(60)]
        assert all(below), "what was on the disk before must stay readable"
        ballast.unlink()
        rig.clock.advance(2.0)
        again = random_hashes(200, 3)
        for start in range(0, 200, 16):
            piece = rows(again, slice(start, start + 16))
            assert save(rig.store, space, piece) == [OK] * len(piece)
        assert rig.store.flush(30.0)
        assert rig.store.stats().tiers["nvme"].healthy
        rig.reopen()
        assert load(rig.store, rig.space(), again) == [OK] * 200
        assert load(rig.store, rig.space(), rows(early, slice(60))) == [OK] * 60
        assert rig.store.stats().corrupt_blocks == 0


@pytest.mark.root
def test_a_disk_that_turns_read_only_is_read_on_and_holds_what_it_had(small_disk: SmallDisks) -> None:
    """The journal is aborted, as the kernel does after an I/O error: what was not synced by then is lost."""
    disk = small_disk("ext4", DISK_BYTES)
    with store_on(disk, sync="power") as rig:
        space, early, late = rig.space(), random_hashes(100, 4), random_hashes(96, 5)
        assert save(rig.store, space, early) == [OK] * 100
        assert rig.store.flush(30.0)
        disk.remount("abort")
        statuses = []
        for start in range(0, 96, 16):
            statuses += save(rig.store, space, rows(late, slice(start, start + 16)))
        assert set(statuses) <= {OK, BlockStatus.DROPPED}
        assert not rig.store.stats().tiers["nvme"].healthy
        assert load(rig.store, space, early) == [OK] * 100
        assert not rig.store.flush(1.0)
        rig.store.close(0)
        disk.unmount()
        disk.mount()
        rig.store = rig._open()
        assert load(rig.store, rig.space(), early) == [OK] * 100
        assert set(load(rig.store, rig.space(), late)) <= {OK, MISS}
        assert save(rig.store, rig.space(), late) == [OK] * 96
        assert rig.store.flush(30.0)
        assert rig.store.stats().corrupt_blocks == 0


@pytest.mark.root
def test_what_the_disk_cannot_read_is_lost_alone(small_disk: SmallDisks) -> None:
    """EIO: the disk's image is cut, so that its end cannot be read."""
    disk = small_disk("ext4", DISK_BYTES)
    with store_on(disk) as rig:
        space, hashes = rig.space(), random_hashes(NVME_BLOCKS - 40, 6)
        for start in range(0, len(hashes), 16):
            piece = rows(hashes, slice(start, start + 16))
            assert save(rig.store, space, piece) == [OK] * len(piece)
        assert rig.store.flush(30.0)
        os.sync()
        size = disk.image.stat().st_size
        with disk.image.open("r+b") as file:
            kept = file.read()
            file.truncate(size // 4)
        statuses = np.array(
            [load(rig.store, space, rows(hashes, slice(p, p + 8))) for p in range(0, len(hashes), 8)]
        ).ravel()
        assert set(statuses.tolist()) <= {OK, MISS, int(BlockStatus.IO_ERROR), int(BlockStatus.CORRUPT)}
        assert 0 < (statuses == OK).sum() < len(hashes)
        with disk.image.open("r+b") as file:
            file.write(kept)
        good = rows(hashes, statuses == OK)
        assert load(rig.store, space, good) == [OK] * len(good)
        rig.store.close(0)


@pytest.mark.root
def test_a_shared_directory_that_cannot_be_written_leaves_the_nvme_directory_free(
    tmp_path: Path, small_disk: SmallDisks
) -> None:
    disk = small_disk("tmpfs", 1 << 20)
    disk.remount("ro")
    options = {"dram_blocks": 8, "nvme_blocks": 16}
    for _ in range(2):  # the first attempt holds no lock and no thread
        with pytest.raises(StorageError, match="read-write"):
            Rig(tmp_path / "store", dfs_blocks=None, dfs={"directory": str(disk.place)}, **options)  # type: ignore[arg-type]
    with Rig(tmp_path / "store", **options) as rig:  # type: ignore[arg-type]
        assert save(rig.store, rig.space(), random_hashes(4)) == [OK] * 4
        with pytest.raises(LockedError, match=f"process {os.getpid()}"):
            Rig(tmp_path / "store", **options)  # type: ignore[arg-type]
        assert load(rig.store, rig.space(), random_hashes(4)) == [OK] * 4


_CONFINED = """
import ctypes, errno, os, resource, struct, sys
from pathlib import Path

sys.path.insert(0, sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def no_io_uring():
    IO_URING_SETUP = 425  # the same on every architecture
    steps = [
        (0x20, 0, 0, 0),  # load the number of the call
        (0x15, 0, 1, IO_URING_SETUP),  # equal? else skip one
        (0x06, 0, 0, 0x00050000 | errno.EPERM),  # refuse it
        (0x06, 0, 0, 0x7FFF0000),  # allow it
    ]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    if libc.prctl(22, 2, ctypes.byref(Program(len(steps), code)), 0, 0) != 0:
        print("no seccomp:", os.strerror(ctypes.get_errno()))
        sys.exit(77)


def no_locking():
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    sets[0] &= ~(1 << 14)  # CAP_IPC_LOCK, effective
    sets[1] &= ~(1 << 14)  # permitted
    assert libc.capset(header, sets) == 0


no_io_uring() if "io_uring" in sys.argv[3] else None
no_locking() if "memlock" in sys.argv[3] else None

from store_harness import OK, Rig, load, save
from tierkv.clock import SystemClock
from tierkv.errors import StorageError
from tierkv.testing.buffers import random_hashes

options = dict(dram_blocks=8, nvme_blocks=64, dram={"lock_memory": "auto", "first_touch": "now"})
hashes = random_hashes(40)
rig = Rig(Path(sys.argv[1]), **options)
print("tier:", rig.nvme.inner.notes)
print("memory:", rig.store.notes)
with rig:
    for start in range(0, 40, 8):
        assert save(rig.store, rig.space(), hashes[start : start + 8]) == [OK] * 8
    rig.reopen()
    assert load(rig.store, rig.space(), hashes) == [OK] * 40
if "io_uring" in sys.argv[3]:
    try:
        Rig(Path(sys.argv[1]), **options, nvme={"engine": "io_uring"})
    except StorageError as error:
        assert "use engine = auto or threads" in str(error) or "engine = io_uring is set" in str(error), error
    else:
        sys.exit("engine = io_uring was not refused")
from tierkv.cli import main
print("doctor:")
sys.exit(main(["doctor", "--json", "-"]))
"""


def confined(tmp_path: Path, *what: str) -> tuple[str, dict[str, dict[str, str]]]:
    """What a store says in a process that may not do `what`, and what the doctor finds there, by subject."""
    harness = str(Path(__file__).resolve().parent.parent / "store")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _CONFINED, str(tmp_path), harness, ",".join(what)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if done.returncode == 77:
        pytest.skip(f"a filter cannot be set here: {done.stdout.strip()}")
    said, found, report = done.stdout.partition("doctor:")
    assert found, done.stdout + done.stderr
    return said, {finding["subject"]: finding for finding in json.loads(report)["findings"]}


def test_a_seccomp_filter_against_io_uring_makes_threads_do_its_work(tmp_path: Path) -> None:
    said, doctor = confined(tmp_path, "io_uring")
    assert "engine threads: io_uring is refused: Operation not permitted" in said
    assert doctor["io_uring"]["state"] == "degraded"
    assert "seccomp" in doctor["io_uring"]["found"]
    assert "thread pool" in doctor["io_uring"]["advice"]


def test_a_process_that_may_lock_nothing_works_unlocked(tmp_path: Path) -> None:
    said, doctor = confined(tmp_path, "memlock")
    assert "CAP_IPC_LOCK" in said
    assert doctor["locked memory"]["state"] == "degraded"
