"""The DFS tier on file systems that fail, fill up, hang and go away."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierkv.clock import VirtualClock
from tierkv.config import DfsConfig
from tierkv.errors import StorageError
from tierkv.jobs import Job
from tierkv.keys import Keyspace
from tierkv.testing.buffers import BlockBuffer, block_payload, make_space, random_hashes
from tierkv.tiers.base import Batch
from tierkv.tiers.dfs import DfsTier
from tierkv.tiers.dfs_files import FileOps
from tierkv.tiers.dfs_pool import Lane
from tierkv.tiers.dfs_works import CallWork
from tierkv.types import BlockStatus, HashArray

OK, MISS, TIMEOUT, CANCELLED = BlockStatus.OK, BlockStatus.MISS, BlockStatus.TIMEOUT, BlockStatus.CANCELLED
IO_ERROR, NO_SPACE = BlockStatus.IO_ERROR, BlockStatus.NO_SPACE
WAIT_S = 30.0
CALLS = [
    "open",
    "close",
    "fstat",
    "stat",
    "preadv",
    "pwritev",
    "fsync",
    "rename",
    "unlink",
    "mkdir",
    "listdir",
]


class FaultyFiles(FileOps):
    """Fails, stalls or shortens calls by name; `chooses` may fail any call."""

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.stalled: dict[str, threading.Event] = {}
        self.entered = threading.Semaphore(0)
        self.calls: dict[str, int] = {}
        self.most_bytes = 0
        self.refuse_direct = ""
        self.refused_name = ""
        self.chooses: Callable[[str], int] = lambda name: 0

    def _before(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        gate = self.stalled.get(name)
        if gate is not None:
            self.entered.release()
            assert gate.wait(WAIT_S)
        number = self.errors.get(name, 0) or self.chooses(name)
        if number:
            raise OSError(number, os.strerror(number))

    def open(self, path: str, flags: int) -> int:
        self._before("open")
        if flags & os.O_DIRECT and self.refuse_direct == "open":
            raise OSError(errno.EINVAL, "no direct I/O")
        return super().open(path, flags)

    def close(self, fd: int) -> None:
        super().close(fd)
        self._before("close")

    def _limit(self, fd: int, data: Any) -> Any:
        import fcntl

        if self.refuse_direct == "io" and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")
        return data[: self.most_bytes] if self.most_bytes else data

    def preadv(self, fd: int, target: Any, offset: int) -> int:
        self._before("preadv")
        return super().preadv(fd, self._limit(fd, target), offset)

    def pwritev(self, fd: int, source: Any, offset: int) -> int:
        self._before("pwritev")
        return super().pwritev(fd, self._limit(fd, source), offset)

    def __getattribute__(self, name: str) -> Any:
        if name in {"fstat", "stat", "fsync", "rename", "unlink", "mkdir", "rmdir", "listdir"}:
            real = super().__getattribute__(name)

            def call(*arguments: Any) -> Any:
                self._before(name)
                if self.refused_name and str(arguments[-1]).endswith(self.refused_name):
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return real(*arguments)

            return call
        return super().__getattribute__(name)


class World:
    """A tier over faulty files and a virtual clock."""

    def __init__(self, directory: Path, **changes: Any) -> None:
        self.directory = directory
        self.files = FaultyFiles()
        self.clock = VirtualClock()
        chosen = {"threads": 1, "deadline_s": 30.0, **changes}
        self.tier = DfsTier(DfsConfig(directory=str(directory), **chosen), clock=self.clock, files=self.files)
        self.space = make_space(20_000)

    def start_write(self, hashes: HashArray, space: Keyspace | None = None) -> Job:
        space = space or self.space
        source = BlockBuffer(len(hashes), space.block_bytes)
        for position, row in enumerate(hashes):
            source.put(position, block_payload(space, row.tobytes()))
        slots = self.tier.allocate(space, len(hashes))
        assert slots is not None
        lengths = np.full(len(hashes), space.block_bytes, np.int64)
        job = self.tier.submit_write(Batch(space, hashes, slots, source.addresses, lengths))
        job.add_done_callback(lambda _, kept=source: None)  # type: ignore[misc]
        self.kept = source
        return job

    def start_read(self, hashes: HashArray) -> tuple[Job, BlockBuffer]:
        target = BlockBuffer(len(hashes), self.space.block_bytes)
        lengths = np.full(len(hashes), self.space.block_bytes, np.int64)
        slots = np.zeros(len(hashes), np.uint32)
        return self.tier.submit_read(Batch(self.space, hashes, slots, target.addresses, lengths)), target

    def write(self, hashes: HashArray, space: Keyspace | None = None) -> list[int]:
        return ended(self.start_write(hashes, space))

    def read(self, hashes: HashArray) -> list[int]:
        job, target = self.start_read(hashes)
        statuses = ended(job)
        for position, status in enumerate(statuses):
            expected = block_payload(self.space, hashes[position].tobytes())
            assert target.get(position) == (expected if status == OK else b"\xa5" * len(expected))
        return statuses

    def settle_writes(self) -> None:
        """Waits until the write lane of a single thread has done what was queued."""
        work = CallWork(Lane.WRITE, lambda operation: OK)
        assert self.tier._submit(work)
        assert work.job.wait(WAIT_S)

    def healthy_after(self, seconds: float) -> bool:
        """Moves the clock, lets a due trial run, and asks again."""
        self.clock.advance(seconds)
        self.tier.healthy()
        self.settle_writes()
        return self.tier.healthy()

    def overdue(self, count: int = 1) -> None:
        """Waits until `count` operations hang, and lets their deadline pass."""
        for _ in range(count):
            assert self.files.entered.acquire(timeout=WAIT_S)
        self.clock.advance(self.tier._config.deadline_s + 1)
        self.tier._pool.check_deadlines()

    def block_files(self) -> list[Path]:
        return [p for p in self.directory.rglob("*") if p.is_file() and len(p.name) == 64]

    def temporary_files(self) -> list[Path]:
        return list(self.directory.rglob(".tmp-*"))


def ended(job: Job) -> list[int]:
    assert job.wait(WAIT_S)
    return job.status.tolist()  # type: ignore[no-any-return]


def eventually(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(WAIT_S * 100)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come about")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    for gate in made.files.stalled.values():
        gate.set()
    made.tier.close()


# Refusals.


@pytest.mark.parametrize("call", ["open", "pwritev", "fsync", "close", "rename"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_refused_write_leaves_nothing_stops_writes_and_heals(world: World, call: str, number: int) -> None:
    hashes = random_hashes(6)
    assert world.write(hashes[:2]) == [OK, OK]
    expected = NO_SPACE if number in (errno.ENOSPC, errno.EDQUOT) else IO_ERROR
    world.files.errors[call] = number
    assert world.write(hashes[2:4]) == [expected, expected]
    assert not world.tier.healthy()
    assert len(world.block_files()) == 2
    assert not world.temporary_files()
    calls = dict(world.files.calls)
    assert world.write(hashes[4:]) == [expected, expected]
    assert world.files.calls == calls, "a stopped tier must leave the medium alone"
    if call not in ("open", "close"):
        assert world.read(hashes[:2]) == [OK, OK]
    # 1 s, then twice as long each time.
    for pause in (1, 2, 4):
        assert not world.healthy_after(pause - 0.5)
        tried = world.files.calls[call]
        assert not world.healthy_after(0.5)
        assert world.files.calls[call] > tried, "the trial was not made"
    del world.files.errors[call]
    assert not world.healthy_after(7)
    assert world.healthy_after(1)
    assert world.write(hashes[2:]) == [OK] * 4
    assert world.read(hashes) == [OK] * 6
    assert not world.temporary_files()


def test_pauses_grow_to_a_minute_and_start_anew_after_a_success(world: World) -> None:
    world.files.errors["pwritev"] = errno.EIO
    assert world.write(random_hashes(1)) == [IO_ERROR]
    for pause in (1, 2, 4, 8, 16, 32, 60, 60):
        tried = world.files.calls["pwritev"]
        assert not world.healthy_after(pause - 0.01)
        assert world.files.calls["pwritev"] == tried
        assert not world.healthy_after(0.01)
        assert world.files.calls["pwritev"] > tried
    world.files.errors.clear()
    assert world.healthy_after(60)
    assert world.write(random_hashes(1)) == [OK]
    world.files.errors["pwritev"] = errno.EIO
    assert world.write(random_hashes(1, 1)) == [IO_ERROR]
    world.files.errors.clear()
    assert world.healthy_after(1)


def test_a_write_may_be_the_trial_itself(world: World) -> None:
    world.files.errors["fsync"] = errno.ENOSPC
    assert world.write(random_hashes(1)) == [NO_SPACE]
    world.files.errors.clear()
    world.clock.advance(1)
    assert world.write(random_hashes(3)) == [OK] * 3
    assert world.tier.healthy()


def test_a_name_that_is_refused_alone_stops_no_other_write(world: World) -> None:
    """As where two replicas hold different files under one name: each use of it is EIO."""
    hashes = random_hashes(6)
    world.files.refused_name = hashes[2].tobytes().hex()
    for _ in range(2):
        assert world.write(hashes) == [OK, OK, IO_ERROR, OK, OK, OK]
        assert world.tier.healthy()
    assert not world.temporary_files()
    assert world.tier.counts["write: one name refused"] == 2
    # It may also be the first that is tried after a real failure.
    world.files.errors["fsync"] = errno.EIO
    assert world.write(random_hashes(1, 1)) == [IO_ERROR]
    assert not world.tier.healthy()
    world.files.errors.clear()
    world.clock.advance(1)
    assert world.write(hashes[2:3]) == [IO_ERROR]
    assert world.tier.healthy()


@pytest.mark.parametrize(
    ("call", "number", "status"),
    [
        ("open", errno.EMFILE, IO_ERROR),
        ("preadv", errno.EIO, IO_ERROR),
        ("fstat", errno.ENOTCONN, IO_ERROR),
        ("open", errno.ESTALE, MISS),
    ],
)
def test_a_refused_read_is_a_status_and_reads_go_on(
    world: World, call: str, number: int, status: int
) -> None:
    hashes = random_hashes(2)
    assert world.write(hashes) == [OK, OK]
    world.files.errors[call] = number
    assert world.read(hashes) == [status, status]
    assert world.tier.healthy()
    world.files.errors.clear()
    assert world.read(hashes) == [OK, OK]


def test_probes_frees_and_listings_survive_refusals(world: World) -> None:
    hashes = random_hashes(3)
    assert world.write(hashes) == [OK] * 3
    for call in ("stat", "unlink", "listdir"):
        world.files.errors[call] = errno.EIO
    assert not world.tier.probe(world.space, hashes).any()
    with pytest.raises(StorageError, match="could not be listed"):
        list(world.tier.recover())
    world.tier.free(world.space, hashes, np.zeros(3, np.uint32))
    world.tier.forget(world.space, hashes)
    world.files.errors.clear()
    assert world.tier.used_bytes() == 0
    assert world.read(hashes) == [OK] * 3  # the medium would not let go of them


@pytest.mark.parametrize("most_bytes", [1, 4096, 5000, 12_288])
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_short_reads_and_writes_are_continued(tmp_path: Path, most_bytes: int, direct: str) -> None:
    world = World(tmp_path, direct=direct)
    try:
        hashes = random_hashes(2)
        world.space = make_space(9000)
        assert world.write(hashes) == [OK, OK]
        if most_bytes >= 4096 or direct == "off":
            world.files.most_bytes = most_bytes
            if most_bytes >= 4096:
                assert world.write(random_hashes(2, 1)) == [OK, OK]
            assert world.read(hashes) == [OK, OK]
    finally:
        world.tier.close()


@pytest.mark.parametrize("where", ["open", "io"])
def test_direct_io_falls_back_where_it_is_refused(tmp_path: Path, where: str) -> None:
    world = World(tmp_path)
    try:
        if not world.tier.direct:
            pytest.skip("this file system has no O_DIRECT to lose")
        hashes = random_hashes(2)
        assert world.write(hashes) == [OK, OK]
        world.files.refuse_direct = where
        assert world.read(hashes) == [OK, OK]
        assert not world.tier.direct
        assert world.write(random_hashes(2, 1)) == [OK, OK]
    finally:
        world.tier.close()
    files = FaultyFiles()
    files.refuse_direct = where
    with pytest.raises(StorageError, match=r"set dfs\.direct to 'auto'"):
        DfsTier(DfsConfig(directory=str(tmp_path), direct="on"), files=files)
    DfsTier(DfsConfig(directory=str(tmp_path), direct="auto"), files=files).close()


# Stalls.


@pytest.mark.parametrize("call", ["open", "pwritev", "fsync", "rename"])
def test_a_stalled_write_is_given_up_and_may_end_late(world: World, call: str) -> None:
    hashes = random_hashes(4)
    assert world.write(hashes[:1]) == [OK]
    gate = world.files.stalled[call] = threading.Event()
    job = world.start_write(hashes[1:])
    world.overdue()
    # The first is overdue; the others are refused at once, since the medium hangs.
    assert ended(job) == [TIMEOUT, TIMEOUT, TIMEOUT]
    assert not world.tier.healthy()
    assert world.tier._pool.lost_threads == 1
    if call != "open":
        assert world.read(hashes[:1]) == [OK]
    del world.files.stalled[call]
    gate.set()
    eventually(lambda: world.tier._pool.lost_threads == 0)
    assert not world.temporary_files()
    assert set(world.read(hashes[1:])) <= {OK, MISS}
    assert world.healthy_after(1)
    assert world.write(hashes) == [OK] * 4
    assert world.read(hashes) == [OK] * 4


@pytest.mark.parametrize("call", ["open", "fstat", "preadv", "close"])
def test_a_stalled_read_never_touches_the_callers_memory_again(world: World, call: str) -> None:
    hashes = random_hashes(2)
    assert world.write(hashes) == [OK, OK]
    gate = world.files.stalled[call] = threading.Event()
    job, target = world.start_read(hashes[:1])
    world.overdue()
    assert ended(job) == [TIMEOUT]
    del world.files.stalled[call]
    gate.set()
    eventually(lambda: world.tier._pool.lost_threads == 0)
    assert set(target.memory.tolist()) == {0xA5}
    assert world.read(hashes) == [OK, OK]


def test_more_stalls_than_threads_end_at_once_until_one_returns(world: World) -> None:
    hashes = random_hashes(8)
    assert world.write(hashes) == [OK] * 8
    gate = world.files.stalled["preadv"] = threading.Event()
    job, target = world.start_read(hashes)
    for _ in range(4):
        world.overdue()
    assert ended(job) == [TIMEOUT] * 8
    assert world.tier._pool.exhausted()
    assert not world.tier.healthy()
    started = world.files.calls["preadv"]
    assert ended(world.start_read(hashes)[0]) == [TIMEOUT] * 8
    assert world.write(hashes) == [TIMEOUT] * 8
    assert not world.tier.probe(world.space, hashes).any()
    world.tier.free(world.space, hashes[:1], np.zeros(1, np.uint32))
    world.tier.forget(world.space, hashes[:1])
    assert world.files.calls["preadv"] == started
    world.files.stalled.clear()
    gate.set()
    eventually(lambda: world.tier._pool.lost_threads == 0)
    assert set(target.memory.tolist()) == {0xA5}
    assert world.read(hashes) == [OK] * 8
    assert world.healthy_after(1)
    threads = [thread for thread in threading.enumerate() if thread.name == "tierkv-dfs-io"]
    assert len(threads) <= 1 or eventually(lambda: sum(t.is_alive() for t in threads) <= 1) is None


def test_loads_pass_writes_that_hang(tmp_path: Path) -> None:
    world = World(tmp_path, threads=4)
    try:
        hashes = random_hashes(20)
        assert world.write(hashes[:10]) == [OK] * 10
        gate = world.files.stalled["pwritev"] = threading.Event()
        job = world.start_write(hashes[10:])
        assert world.files.entered.acquire(timeout=WAIT_S)
        assert world.read(hashes[:10]) == [OK] * 10
        assert not job.done()
        world.files.stalled.clear()
        gate.set()
        assert ended(job) == [OK] * 10
    finally:
        world.tier.close()


def test_closing_leaves_stuck_threads_behind_and_the_callers_memory_alone(tmp_path: Path) -> None:
    world = World(tmp_path, deadline_s=0.2)
    hashes = random_hashes(3)
    assert world.write(hashes) == [OK] * 3
    gate = world.files.stalled["preadv"] = threading.Event()
    job, target = world.start_read(hashes)
    assert world.files.entered.acquire(timeout=WAIT_S)
    world.tier.close()
    assert ended(job) == [CANCELLED] * 3
    world.tier.close()
    gate.set()
    stuck = [thread for thread in threading.enumerate() if thread.name == "tierkv-dfs-io"]
    for thread in stuck:
        thread.join(WAIT_S)
    assert set(target.memory.tolist()) == {0xA5}
    assert ended(world.start_read(hashes)[0]) == [CANCELLED] * 3


def test_the_real_clock_and_watchdog_end_a_stalled_operation(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = DfsTier(DfsConfig(directory=str(tmp_path), threads=2, deadline_s=0.2), files=files)
    gate = files.stalled["stat"] = threading.Event()
    try:
        assert not tier.probe(make_space(), random_hashes(40)).any()
        eventually(lambda: not tier.healthy())
        assert tier.counts["operations overdue"] >= 1
    finally:
        gate.set()
        tier.close()


def test_opening_on_a_file_system_that_hangs_is_refused_in_time(tmp_path: Path) -> None:
    files = FaultyFiles()
    gate = files.stalled["mkdir"] = threading.Event()
    try:
        with pytest.raises(StorageError, match=r"did not answer within 0\.2 s"):
            DfsTier(DfsConfig(directory=str(tmp_path), threads=1, deadline_s=0.2), files=files)
    finally:
        gate.set()


# Forgetting what must not come back.


def test_a_keyspace_that_cannot_be_cleared_stays_hidden_until_it_is(world: World) -> None:
    hashes = random_hashes(5)
    assert world.write(hashes) == [OK] * 5
    world.files.errors["rename"] = errno.EIO
    world.tier.forget(world.space, None)
    assert world.read(hashes) == [MISS] * 5
    assert not world.tier.probe(world.space, hashes).any()
    assert list(world.tier.recover()) == []
    assert world.write(hashes) == [CANCELLED] * 5
    assert not world.tier.healthy()
    assert len(world.block_files()) == 5
    world.files.errors.clear()
    assert world.healthy_after(1)
    eventually(lambda: not world.tier._hidden)
    assert world.read(hashes) == [MISS] * 5
    assert world.write(hashes[:2]) == [OK, OK]
    assert world.read(hashes) == [OK, OK, MISS, MISS, MISS]


def test_a_write_under_way_does_not_outlive_the_clearing_of_its_keyspace(tmp_path: Path) -> None:
    world = World(tmp_path, threads=4)
    try:
        hashes = random_hashes(2)
        assert world.write(hashes[:1]) == [OK]
        gate = world.files.stalled["pwritev"] = threading.Event()
        job = world.start_write(hashes[1:])
        assert world.files.entered.acquire(timeout=WAIT_S)
        world.tier.forget(world.space, None)
        world.files.stalled.clear()
        gate.set()
        assert ended(job) in ([CANCELLED], [IO_ERROR])
        assert world.read(hashes) == [MISS, MISS]
    finally:
        world.tier.close()


# Any fault at any time.


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_fault_gives_wrong_bytes_or_loses_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    sync, codec = data.draw(st.booleans()), data.draw(st.sampled_from(["none", "zstd"]))
    plan = data.draw(st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 12)), max_size=8))
    numbers = [errno.EIO, errno.ENOSPC, errno.EMFILE, errno.ESTALE, errno.ENOENT]
    chosen = {pair: data.draw(st.sampled_from(numbers)) for pair in plan}
    hashes = random_hashes(6)
    stored: set[int] = set()
    uncertain: set[int] = set()

    def chooses(name: str) -> int:
        seen[name] = seen.get(name, -1) + 1
        return chosen.get((name, seen[name]), 0)

    world = World(tmp_path_factory.mktemp("faults"), sync=sync, codec=codec)
    try:
        for _ in range(data.draw(st.integers(1, 5))):
            seen: dict[str, int] = {}
            world.files.chooses = chooses
            some = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
            rows = np.ascontiguousarray(hashes[some])
            action = data.draw(st.sampled_from(["write", "read", "free", "probe", "recover"]))
            if action == "write":
                for index, status in zip(some, world.write(rows), strict=True):
                    if status == OK:
                        stored.add(index)
                        uncertain.discard(index)
                    elif index not in stored:
                        uncertain.add(index)
            elif action == "read":
                for index, status in zip(some, world.read(rows), strict=True):
                    assert status != OK or index in stored | uncertain
            elif action == "free":
                world.tier.free(world.space, rows, np.zeros(len(some), np.uint32))
                uncertain |= stored & set(some)
                stored -= set(some)
            elif action == "probe":
                world.tier.probe(world.space, rows)
            else:
                with contextlib.suppress(StorageError):  # what could not be listed is said at the end
                    for residents in world.tier.recover():
                        names = {row.tobytes() for row in residents.hashes}
                        known = stored | uncertain
                        assert names <= {hashes[index].tobytes() for index in known}
            world.clock.advance(100)
            world.files.chooses = lambda name: 0
            world.tier.healthy()
            world.settle_writes()
        for index, status in enumerate(world.read(hashes)):
            if index in stored:
                assert status == OK
            elif index not in uncertain:
                assert status == MISS
    finally:
        world.files.chooses = lambda name: 0
        world.tier.close()


# Real mounts.


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small tmpfs; options are remounted with mount('remount,...')."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a tmpfs")
    place = tmp_path / "mounted"
    place.mkdir()

    def call(options: str) -> Path:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)],
            check=False,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        if done.returncode:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        return place

    yield call
    libc = ctypes.CDLL(None, use_errno=True)
    while os.path.ismount(place):
        assert libc.umount2(str(place).encode(), 2) == 0


@pytest.mark.root
def test_a_full_file_system_stops_writes_keeps_reads_and_heals(mount: Callable[[str], Path]) -> None:
    world = World(mount("size=1m"))
    try:
        hashes = random_hashes(60)
        statuses = world.write(hashes)
        good = statuses.count(OK)
        assert 20 <= good < 60
        assert set(statuses) == {OK, NO_SPACE}
        assert not world.tier.healthy()
        assert not world.temporary_files()
        assert world.read(hashes) == [OK if status == OK else MISS for status in statuses]
        assert not world.healthy_after(1)  # the trial is as large as the block that failed
        written = hashes[:good]
        world.tier.free(world.space, written[:5], np.zeros(5, np.uint32))
        world.settle_writes()
        assert world.healthy_after(2)
        assert world.write(hashes[good : good + 3]) == [OK] * 3
        assert world.read(hashes[5 : good + 3]) == [OK] * (good - 2)
    finally:
        world.tier.close()


@pytest.mark.root
def test_a_full_file_system_can_be_opened_for_what_it_holds(mount: Callable[[str], Path]) -> None:
    place = mount("size=512k")
    world = World(place)
    hashes = random_hashes(3)
    assert world.write(hashes) == [OK] * 3
    world.tier.close()
    with (place / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    world = World(place)
    try:
        assert not world.tier.healthy()
        assert world.read(hashes) == [OK] * 3
    finally:
        world.tier.close()


@pytest.mark.root
def test_a_read_only_file_system_is_refused(mount: Callable[[str], Path]) -> None:
    place = mount("size=1m")
    mount("remount,ro")
    with pytest.raises(StorageError, match="read-write"):
        World(place)


@pytest.mark.root
def test_nothing_is_written_beneath_a_lost_mount(mount: Callable[[str], Path]) -> None:
    place = mount("size=1m")
    world = World(place)
    try:
        hashes = random_hashes(3)
        assert world.write(hashes) == [OK] * 3
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.umount2(str(place).encode(), 2) == 0
        assert world.read(hashes) == [MISS] * 3
        assert world.write(random_hashes(3, 1)) == [IO_ERROR] * 3
        assert not world.healthy_after(1)
        assert list(place.iterdir()) == []
    finally:
        world.tier.close()


def test_a_directory_removed_by_hand_is_made_again(world: World) -> None:
    import shutil

    hashes = random_hashes(2)
    assert world.write(hashes) == [OK, OK]
    shutil.rmtree(world.directory / "v1")
    assert world.read(hashes) == [MISS, MISS]
    assert world.write(hashes) == [OK, OK]
    assert world.read(hashes) == [OK, OK]
