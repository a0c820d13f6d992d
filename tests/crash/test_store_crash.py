"""kill -9 of a saving process, at random moments and at named points: what was promised is there, and every byte of
what is there is right."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import crash_child
import numpy as np
import pytest
from crash_child import BLOCK_BYTES, KILL_POINTS, config, run, spaces_of

from tierkv.fragments import Fragments
from tierkv.store import Store
from tierkv.testing.buffers import block_payload
from tierkv.tiers.dfs_check import verify_tree
from tierkv.tiers.nvme import verify_directory
from tierkv.types import BlockStatus, HashArray

pytestmark = pytest.mark.crash
TIMEOUT_S = 60.0
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["crash_child"])


@pytest.fixture(scope="module", autouse=True)
def fork_server_ends() -> Iterator[None]:
    yield
    from multiprocessing import forkserver

    forkserver._forkserver._stop()  # type: ignore[attr-defined]


class Promises:
    """What the killed processes were promised, from their log: (keyspace number, hash) of each kind."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._offset = 0
        self.tried: set[tuple[int, bytes]] = set()
        self.must: set[tuple[int, bytes]] = set()
        self.must_not: set[tuple[int, bytes]] = set()

    def read(self) -> int:
        """Takes what was logged since the last call; returns how many lines that were."""
        data = self._log.read_bytes()[self._offset :] if self._log.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        for line in whole.decode().splitlines():
            word, number, *names = line.split()
            keys = {(int(number), bytes.fromhex(name)) for name in names}
            match word:
                case "saving":
                    self.tried |= keys
                case "flushed":
                    self.must |= keys
                case "removing":
                    self.must -= keys
                case "removed":
                    self.must_not |= keys
        return whole.count(b"\n")

    def survived(self, there: set[tuple[int, bytes]]) -> None:
        """After a verified reopening: what was there then has to stay, in a store that evicts nothing for good."""
        self.must |= there


def hashes_of(keys: set[tuple[int, bytes]], number: int) -> HashArray:
    rows = sorted(name for owner, name in keys if owner == number)
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), 32)


def verify(directory: Path, nvme_blocks: int, promises: Promises, what: str) -> None:
    """Reopens the store and holds it against the promises, byte by byte."""
    there: set[tuple[int, bytes]] = set()
    with Store(config(directory, nvme_blocks)) as store:
        for number, space in enumerate(spaces_of(store)):
            must = hashes_of(promises.must, number)
            for start in range(0, len(must), 64):
                some = np.ascontiguousarray(must[start : start + 64])
                assert store.match(space, some).length == len(some), f"{what}: a promised block is lost"
            gone = hashes_of(promises.must_not, number)
            assert not store.lookup([(space, gone)])[0].any(), f"{what}: a removed block is back"
            for row in gone[:10]:  # these ask the shared directory too
                assert store.match(space, row.reshape(1, 32)).length == 0, f"{what}: a removed block is back"
            tried = hashes_of(promises.tried, number)
            found = np.zeros((max(1, len(tried)), BLOCK_BYTES), np.uint8)
            statuses = np.full(len(tried), BlockStatus.OK, np.uint8)
            for part, size in enumerate(space.part_bytes):
                start = space.part_offset(part)
                into = Fragments.from_arrays([found[:, start : start + size]], range(len(tried)))
                job = store.load(space, tried, into, part)
                assert job.wait(TIMEOUT_S)
                statuses = np.maximum(statuses, job.status)
            assert set(statuses.tolist()) <= {BlockStatus.OK, BlockStatus.MISS}, f"{what}: {statuses}"
            for row, data, status in zip(tried, found, statuses, strict=False):
                if status == BlockStatus.OK:
                    assert data.tobytes() == block_payload(space, row.tobytes()), f"{what}: wrong bytes"
                    there.add((number, row.tobytes()))
        assert store.stats().corrupt_blocks == 0
    missing = promises.must - there
    assert not missing, f"{what}: {len(missing)} promised blocks are lost"
    report = verify_directory(directory / "nvme")
    assert report.bad == 0, f"{what}: {report}"
    shared = verify_tree(directory / "dfs")
    assert shared.bad == 0, f"{what}: {shared}"
    promises.survived(there)


def kill_one(
    directory: Path,
    log: Path,
    seed: int,
    nvme_blocks: int,
    promises: Promises,
    *,
    point: str | None,
    at: int,
    delay_s: float,
) -> bool:
    """Starts a saving process and kills it `delay_s` after it is ready, or lets it die at `point`; True if it did."""
    process = CONTEXT.Process(target=run, args=(str(directory), str(log), seed, nvme_blocks, point, at))
    process.start()
    deadline_s = time.monotonic() + TIMEOUT_S
    lines = 0
    while process.is_alive() and not lines:
        assert time.monotonic() < deadline_s, "the child did not come up"
        lines += promises.read()
        process.join(0.002)
    if point is not None:
        process.join(TIMEOUT_S)
    else:
        process.join(delay_s)
    by_itself = not process.is_alive()
    assert process.pid is not None
    if not by_itself:
        os.kill(process.pid, signal.SIGKILL)
    process.join(TIMEOUT_S)
    assert process.exitcode == -signal.SIGKILL, f"the child ended by itself: {process.exitcode}"
    promises.read()
    return by_itself


def cycles(tmp_path: Path, count: int, nvme_blocks: int) -> None:
    (tmp_path / "dfs").mkdir()
    moments, kept, removed = random.Random(nvme_blocks), 0, 0
    promises = Promises(tmp_path / "log")
    for turn in range(count):
        kill_one(
            tmp_path,
            tmp_path / "log",
            turn,
            nvme_blocks,
            promises,
            point=None,
            at=0,
            delay_s=moments.uniform(0, 0.25),
        )
        verify(tmp_path, nvme_blocks, promises, f"cycle {turn}")
        kept, removed = kept + len(promises.must), removed + len(promises.must_not)
        if len(promises.tried) > 600:  # keep each check short
            for path in (tmp_path / "log", *tmp_path.glob("nvme/*"), *tmp_path.glob("dfs/*")):
                remove(path)
            promises = Promises(tmp_path / "log")
    assert kept > 10 * count, "hardly anything was promised: the children are killed too early"
    assert removed > 0


def remove(path: Path) -> None:
    import shutil

    shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("nvme_blocks", [4096, 48], ids=["roomy", "evicting"])
def test_kill_9_at_25_random_moments(tmp_path: Path, nvme_blocks: int) -> None:
    """50 kills in all: half into an NVMe tier that keeps everything, half into one that passes blocks on."""
    cycles(tmp_path, 25, nvme_blocks)


@pytest.mark.parametrize("point", KILL_POINTS)
def test_kill_9_at_a_named_point(tmp_path: Path, point: str) -> None:
    (tmp_path / "dfs").mkdir()
    nvme_blocks, promises, died = 48, Promises(tmp_path / "log"), 0
    for turn, at in enumerate((1, 2, 5)):
        died += kill_one(
            tmp_path, tmp_path / "log", turn, nvme_blocks, promises, point=point, at=at, delay_s=0
        )
        verify(tmp_path, nvme_blocks, promises, f"{point}, occasion {at}")
    assert died == 3, "the point was never reached"


def test_the_child_names_every_point() -> None:
    for point in KILL_POINTS:
        assert point in Path(crash_child.__file__).read_text(encoding="utf-8").split("def kill_at")[1]
