"""The NVMe tier when the medium fails: back-off and healing, late and lost I/O, full and read-only file
systems."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvme_harness import batch_of, buffer_for, ended, faulty_engine, open_tier, read, residents, store, write

from tierkv.catalog import Catalog, CatalogWriteError
from tierkv.clock import VirtualClock
from tierkv.config import NvmeConfig
from tierkv.errors import StorageError
from tierkv.testing.buffers import BlockBuffer, make_space, random_hashes
from tierkv.testing.faults import FaultKind
from tierkv.tiers.nvme import NvmeTier
from tierkv.tiers.nvme_breaker import WriteBreaker
from tierkv.types import BlockStatus, HashArray

OK, MISS, CANCELLED = BlockStatus.OK, BlockStatus.MISS, BlockStatus.CANCELLED
IO_ERROR, NO_SPACE = BlockStatus.IO_ERROR, BlockStatus.NO_SPACE
SPACE = make_space(4096)
HASHES = random_hashes(30, 4)


class Bench:
    """A tier on a faulty engine and a clock that the test moves."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = VirtualClock()
        self.engine = faulty_engine()
        self.tier = open_tier(directory, clock=self.clock, engine=self.engine)

    def write(self, *positions: int) -> list[BlockStatus]:
        """Writes the blocks into slots of their own; those that fail give theirs back."""
        hashes = HASHES[list(positions)]
        slots = self.tier.allocate(SPACE, len(hashes))
        assert slots is not None
        statuses = write(self.tier, SPACE, hashes, slots)
        bad = np.array([status != OK for status in statuses])
        self.tier.free(SPACE, hashes[bad], slots[bad])
        return statuses


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.tier.close()


@pytest.mark.parametrize(("kind", "status"), [(FaultKind.NO_SPACE, NO_SPACE), (FaultKind.IO_ERROR, IO_ERROR)])
def test_a_failing_medium_is_left_alone_and_heals_by_itself(
    bench: Bench, kind: FaultKind, status: BlockStatus
) -> None:
    tier, clock, plan = bench.tier, bench.clock, bench.engine.plan
    slots = store(tier, SPACE, HASHES[:3])
    plan.fail_always("write", kind)
    assert bench.write(10, 11) == [status] * 2
    for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
        assert not tier.healthy()
        hit = plan.injected[kind]
        assert bench.write(12) == [status]
        clock.advance(pause_s * 0.99)
        assert not tier.healthy()
        assert bench.write(13) == [status]
        assert plan.injected[kind] == hit, "the medium was touched during the pause"
        assert read(tier, SPACE, HASHES[:3], slots) == [OK] * 3
        clock.advance(pause_s * 0.02)
        assert tier.healthy()
        assert bench.write(14) == [status]  # the trial
        assert plan.injected[kind] == hit + 1
    plan.heal()
    clock.advance(60)
    assert bench.write(15) == [OK]
    assert tier.healthy()
    plan.fail_next("write", kind)
    assert bench.write(16) == [status]
    clock.advance(1.0)  # the pause starts over at one second
    assert bench.write(16) == [OK]
    assert tier.used_bytes() == 5 * 4096


def test_each_block_of_a_batch_fails_alone(bench: Bench) -> None:
    bench.engine.plan.fail_next("write", FaultKind.IO_ERROR, blocks=[1])
    slots = bench.tier.allocate(SPACE, 3)
    assert slots is not None
    assert write(bench.tier, SPACE, HASHES[:3], slots) == [OK, IO_ERROR, OK]
    assert read(bench.tier, SPACE, HASHES[:3], slots) == [OK, MISS, OK]
    bench.engine.plan.fail_next("read", FaultKind.IO_ERROR, blocks=[0])
    bench.clock.advance(2)
    assert bench.tier.healthy(), "a failed read says nothing about writes"
    assert read(bench.tier, SPACE, HASHES[:3], slots) == [IO_ERROR, MISS, OK]
    assert read(bench.tier, SPACE, HASHES[:3], slots) == [OK, MISS, OK]


@pytest.mark.parametrize("kind", [FaultKind.FLIPPED, FaultKind.TORN])
def test_what_is_damaged_on_its_way_is_never_given_out(bench: Bench, kind: FaultKind) -> None:
    slots = store(bench.tier, SPACE, HASHES[:2])
    bench.engine.plan.fail_next("read", kind, blocks=[1])
    assert read(bench.tier, SPACE, HASHES[:2], slots) == [OK, BlockStatus.CORRUPT]
    assert read(bench.tier, SPACE, HASHES[:2], slots) == [OK, MISS]


def test_a_failed_sync_commits_nothing(bench: Bench) -> None:
    bench.engine.sync_status = IO_ERROR
    assert bench.write(0, 1) == [IO_ERROR] * 2
    assert not bench.tier.healthy()
    bench.engine.sync_status = None
    bench.tier.close()
    bench.tier = open_tier(bench.directory)
    assert residents(bench.tier) == {}


def held_read(bench: Bench, hashes: HashArray, slots: np.ndarray, buffer: BlockBuffer):  # type: ignore[no-untyped-def, type-arg]
    """A read whose bytes have arrived, but whose completion waits until the gate is released."""
    bench.engine.plan.fail_next("read", FaultKind.LATE)
    job = bench.tier.submit_read(batch_of(SPACE, hashes, slots, buffer))
    assert bench.engine.gate.wait_held()
    assert not job.done()
    return job


@pytest.mark.parametrize("reuse", ["free", "forget", "other block", "same block again"])
def test_a_slot_that_changed_while_it_was_read_is_a_miss(bench: Bench, reuse: str) -> None:
    tier = bench.tier
    slots = store(tier, SPACE, HASHES[:1])
    buffer = BlockBuffer(1, 4096)
    job = held_read(bench, HASHES[:1], slots, buffer)
    if reuse == "forget":
        tier.forget(SPACE, HASHES[:1])
    else:
        tier.free(SPACE, HASHES[:1], slots)
    if reuse.endswith(("block", "again")):
        again = tier.allocate(SPACE, 1)
        assert again is not None
        assert again.tolist() == slots.tolist()
        row = HASHES[:1] if reuse == "same block again" else HASHES[1:2]
        assert write(tier, SPACE, row, again) == [OK]
    bench.engine.gate.release()
    assert ended(job) == [MISS]


def test_writes_under_way_of_forgotten_blocks_are_cancelled(bench: Bench) -> None:
    tier = bench.tier
    slots = tier.allocate(SPACE, 4)
    assert slots is not None
    buffer = buffer_for(SPACE, HASHES[:4])
    for which, expected in ((HASHES[1:2], [OK, CANCELLED, OK, OK]), (None, [CANCELLED] * 4)):
        bench.engine.plan.fail_next("write", FaultKind.LATE)
        job = tier.submit_write(batch_of(SPACE, HASHES[:4], slots, buffer))
        assert bench.engine.gate.wait_held()
        tier.forget(SPACE, which)
        bench.engine.gate.release()
        assert ended(job) == expected
        found = [status == OK for status in read(tier, SPACE, HASHES[:4], slots)]
        assert found == [status == OK for status in expected]
    assert tier.healthy(), "a cancelled write is no fault of the medium"


def test_a_write_that_hangs_makes_the_tier_unhealthy_until_it_ends(bench: Bench) -> None:
    tier = bench.tier
    slots = tier.allocate(SPACE, 2)
    assert slots is not None
    buffer = buffer_for(SPACE, HASHES[:2])
    bench.engine.plan.fail_next("write", FaultKind.STALL)
    job = tier.submit_write(batch_of(SPACE, HASHES[:1], slots[:1], buffer))
    assert bench.engine.gate.wait_held()
    assert tier.healthy()
    bench.clock.advance(31)
    assert not tier.healthy()
    assert write(tier, SPACE, HASHES[1:2], slots[1:]) == [IO_ERROR]
    bench.engine.gate.release()
    assert ended(job) == [OK]
    assert tier.healthy()
    assert write(tier, SPACE, HASHES[1:2], slots[1:]) == [OK]


def test_close_settles_what_hangs_and_keeps_what_was_whole(bench: Bench) -> None:
    tier = bench.tier
    slots = tier.allocate(SPACE, 3)
    assert slots is not None
    store_one = write(tier, SPACE, HASHES[:1], slots[:1])
    buffer = buffer_for(SPACE, HASHES[:3])
    bench.engine.plan.fail_next("write", FaultKind.LOST)
    lost = tier.submit_write(batch_of(SPACE, HASHES[1:3], slots[1:], buffer))
    assert bench.engine.gate.wait_held()
    bench.engine.plan.fail_next("read", FaultKind.STALL)
    stalled = tier.submit_read(batch_of(SPACE, HASHES[:1], slots[:1], BlockBuffer(1, 4096)))
    tier.close()
    assert store_one == [OK]
    assert ended(lost) == [CANCELLED] * 2
    assert ended(stalled) == [CANCELLED]
    assert ended(tier.submit_read(batch_of(SPACE, HASHES[:1], slots[:1], buffer))) == [CANCELLED]
    bench.tier = open_tier(bench.directory)
    assert len(residents(bench.tier)) == 1


def test_slots_stay_taken_while_their_deletion_cannot_be_committed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = bench.tier
    slots = store(tier, SPACE, HASHES[:4])
    real, broken = Catalog.commit, threading.Event()
    committed = threading.Event()
    broken.set()

    def commit(catalog: Catalog, changes) -> None:  # type: ignore[no-untyped-def]
        if broken.is_set():
            raise CatalogWriteError("no room", NO_SPACE)
        real(catalog, changes)
        committed.set()

    monkeypatch.setattr(Catalog, "commit", commit)
    monkeypatch.setattr("tierkv.tiers.nvme_commit.OWED_PAUSE_S", 0.02)
    tier.free(SPACE, HASHES[:2], slots[:2])
    assert tier.used_bytes() == 4 * 4096
    assert read(tier, SPACE, HASHES[:4], slots) == [MISS, MISS, OK, OK]
    assert bench.write(7) == [NO_SPACE]
    assert not tier.healthy()
    broken.clear()
    assert committed.wait(20.0)
    bench.clock.advance(1)
    assert bench.write(8) == [OK]
    assert tier.used_bytes() == 3 * 4096
    tier.close()
    bench.tier = open_tier(bench.directory)
    assert len(residents(bench.tier)) == 3


def test_a_catalog_that_lmdb_gave_up_is_opened_again(tmp_path: Path) -> None:
    """After a failed write of its meta page LMDB answers MDB_PANIC to everything until it is reopened."""
    catalog = Catalog(tmp_path / "c")
    real = catalog._environment

    class Panicking:
        def begin(self, write: bool = False) -> object:
            raise lmdb.PanicError("mdb_txn_begin")

        def close(self) -> None:
            real.close()

    catalog._environment = Panicking()
    with pytest.raises(CatalogWriteError):
        catalog.commit([])
    catalog.commit([])
    assert len(catalog) == 0
    catalog.close()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 30), st.floats(0.0, 0.6), st.integers(1, 12))
def test_random_faults_never_give_wrong_bytes(
    tmp_path_factory: pytest.TempPathFactory, seed: int, rate: float, rounds: int
) -> None:
    """Statuses may be anything the seam allows; what is OK is right, now and after a reopen, and slots
    add up."""
    bench = Bench(tmp_path_factory.mktemp("nvme"))
    tier, plan = bench.tier, bench.engine.plan
    kinds = [("write", FaultKind.IO_ERROR), ("write", FaultKind.NO_SPACE), ("read", FaultKind.IO_ERROR),
             ("read", FaultKind.FLIPPED), ("read", FaultKind.TORN)]  # fmt: skip
    plan.fail_randomly(seed, rate, kinds)  # type: ignore[arg-type]
    random = np.random.default_rng(seed)
    held: dict[int, int] = {}
    for _ in range(rounds):
        bench.clock.advance(float(random.choice([0.0, 1.0, 61.0])))
        chosen = random.permutation(20)[: int(random.integers(1, 6))]
        new = [int(position) for position in chosen if int(position) not in held]
        slots = tier.allocate(SPACE, len(new))
        assert slots is not None
        statuses = write(tier, SPACE, HASHES[new], slots)
        for position, slot, status in zip(new, slots.tolist(), statuses, strict=True):
            if status == OK:
                held[position] = slot
            else:
                tier.free(SPACE, HASHES[[position]], np.array([slot], np.uint32))
        mine = np.array(sorted(held), np.int64)
        slots = np.array([held[int(position)] for position in mine], np.uint32)
        for position, status in zip(mine.tolist(), read(tier, SPACE, HASHES[mine], slots), strict=True):
            if status in (MISS, BlockStatus.CORRUPT):
                tier.free(SPACE, HASHES[[position]], np.array([held.pop(position)], np.uint32))
        assert tier.used_bytes() == len(held) * 4096
    tier.close()
    tier = open_tier(bench.directory)
    names = {(SPACE.digest, HASHES[position].tobytes()): slot for position, slot in held.items()}
    assert residents(tier) == names
    everything = np.array(sorted(held), np.int64)
    slots = np.array([held[int(position)] for position in everything], np.uint32)
    assert set(read(tier, SPACE, HASHES[everything], slots)) <= {OK}
    tier.close()


def test_the_breaker_lets_one_trial_through() -> None:
    clock = VirtualClock()
    breaker = WriteBreaker(clock)
    assert breaker.admit() == (OK, False)
    breaker.ended(NO_SPACE, trial=False)
    breaker.ended(IO_ERROR, trial=False)  # others that were under way say nothing new
    assert breaker.admit() == (NO_SPACE, False)
    breaker.ended(OK, trial=False)
    assert not breaker.healthy()
    clock.advance(1)
    assert breaker.healthy()
    assert breaker.admit() == (OK, True)
    assert not breaker.healthy()
    assert breaker.admit() == (NO_SPACE, False)
    breaker.ended(CANCELLED, trial=True)  # the trial was called off: the next one may try
    assert breaker.admit() == (OK, True)
    breaker.ended(OK, trial=True)
    assert breaker.admit() == (OK, False)


# Real file systems.


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts small file systems; skips where that is not permitted."""
    places: list[Path] = []

    def mount(*arguments: str) -> Path:
        place = tmp_path / f"mount{len(places)}"
        place.mkdir()
        done = subprocess.run(["mount", *arguments, str(place)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.root
def test_a_disk_without_room_for_the_capacity_says_how_much_is_missing(mounted: Callable[..., Path]) -> None:
    place = mounted("-t", "tmpfs", "-o", "size=4m", "tmpfs")
    with pytest.raises(StorageError, match=r"about \d+ bytes are missing") as caught:
        open_tier(place, 2048)
    words = str(caught.value).split()
    missing = int(words[words.index("about") + 1])
    assert 4 << 20 <= missing <= 5 << 20
    assert f"set it to {(8 << 20) - missing} or less" in str(caught.value)
    free = os.statvfs(place)
    assert free.f_bavail * free.f_frsize > 3 << 20, "the refused file must not keep the disk full"
    open_tier(place, 512).close()


@pytest.mark.root
def test_a_disk_that_fills_up_later_stops_writes_and_heals(mounted: Callable[..., Path]) -> None:
    """The slot file is preallocated, so it is the catalog that finds no room."""
    place = mounted("-t", "tmpfs", "-o", "size=6m", "tmpfs")
    clock = VirtualClock()
    tier = open_tier(place, 512, clock=clock, sync="process")
    first = store(tier, SPACE, HASHES[:10])
    ballast = place / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    many = random_hashes(480, 8)
    slots = tier.allocate(SPACE, len(many))
    assert slots is not None
    statuses = write(tier, SPACE, many, slots)
    assert set(statuses) == {NO_SPACE}
    assert not tier.healthy()
    assert read(tier, SPACE, HASHES[:10], first) == [OK] * 10
    ballast.unlink()
    clock.advance(1)
    assert set(write(tier, SPACE, many, slots)) == {OK}
    assert tier.healthy()
    tier.close()
    tier = open_tier(place, 512)
    assert len(residents(tier)) == 490
    tier.close()


@pytest.mark.root
def test_a_read_only_file_system_is_named(mounted: Callable[..., Path]) -> None:
    place = mounted("-t", "tmpfs", "-o", "size=4m", "tmpfs")
    open_tier(place, 16).close()
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    with pytest.raises(StorageError, match=r"LOCK cannot be opened.*remount it writable"):
        open_tier(place, 16)
    with pytest.raises(StorageError, match=r"cannot be made.*remount it writable"):
        NvmeTier(NvmeConfig(directory=str(place / "other"), capacity_bytes=1 << 16))


def test_a_blocked_io_uring_is_noted_and_threads_take_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import liburing

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(liburing, "io_uring_queue_init", refuse)
    tier = open_tier(tmp_path)
    assert any(note.startswith("engine threads: io_uring is refused") for note in tier.notes)
    slots = store(tier, SPACE, HASHES[:5])
    assert read(tier, SPACE, HASHES[:5], slots) == [OK] * 5
    tier.close()
    with pytest.raises(StorageError, match="engine = io_uring is set, but io_uring is refused"):
        open_tier(tmp_path, engine="io_uring")
    open_tier(tmp_path).close()  # the refusal left nothing locked
