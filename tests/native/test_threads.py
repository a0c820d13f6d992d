"""Index and CopyPool under several Python threads: they run beside each other and stay consistent."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tierkv import _native as native
from tierkv.types import NO_SLOT, HashArray

U32 = np.uint32
SPACE = 1


def pack(numbers: np.ndarray) -> HashArray:
    hashes = np.zeros((len(numbers), 32), np.uint8)
    hashes[:, :4] = np.ascontiguousarray(numbers, U32).view(np.uint8).reshape(-1, 4)
    return hashes


def together(*works: Callable[[], None]) -> None:
    """Runs all at once; the first exception of any is raised."""
    start = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        start.wait(30)
        work()

    with ThreadPoolExecutor(len(works)) as threads:
        for future in [threads.submit(run, work) for work in works]:
            future.result(60)


def test_index_stays_consistent() -> None:
    index = native.Index(3)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for step in range(150):
            hashes = pack(rng.integers(0, 300, rng.integers(1, 40)))
            slots = np.arange(len(hashes), dtype=U32) + seed * 1_000_000 + step * 100
            outcome, _, handle, _ = index.reserve(SPACE, hashes, 1, slots, 0, 0, 1, 1e9)
            mine = handle[outcome == native.RESERVE_NEW]
            if step % 3:
                assert index.commit(mine, 0).sum() <= len(mine)
            else:
                index.abort(mine)
            tiers, _, _, held = index.acquire(SPACE, hashes, b"\1\2")
            assert ((tiers == native.NO_TIER) == (held == NO_SLOT)).all()
            index.attach(held[tiers == 1], 2, slots[: int((tiers == 1).sum())], 0)
            index.touch(SPACE, hashes)
            index.release(held)
            index.erase(index.victims(1, 0, 20)[0])
            lease = index.lease(1e9)
            index.lease_add(lease, SPACE, hashes, b"\2\1")
            assert index.match(SPACE, hashes) <= len(hashes)
            if step % 5 == 0:
                index.remove(SPACE, hashes[:3])
                index.take_freed(1)
            assert index.lease_release(lease)

    def watch() -> None:
        for _ in range(30):
            index.check()

    together(*(lambda seed=seed: work(seed) for seed in range(3)), watch)
    index.check()
    stats = index.stats()
    assert (stats["pins"], stats["doomed"], stats["pending"], stats["leases"]) == (0, 0, 0, 0)
    assert index.clear(SPACE) == stats["ready_dram"] + stats["ready_nvme"]


def test_one_reservation_wins() -> None:
    index = native.Index()
    hashes = pack(np.arange(2000))
    wins: list[np.ndarray] = []

    def work(seed: int) -> None:
        for first in range(0, len(hashes), 50):
            slots = np.arange(50, dtype=U32) + seed * 100_000 + first
            outcome, _, handle, _ = index.reserve(SPACE, hashes[first : first + 50], 1, slots, 0, 0, 1, 1e9)
            new = outcome == native.RESERVE_NEW
            assert index.commit(handle[new], 0).all()
            wins.append(np.flatnonzero(new) + first)

    together(*(lambda seed=seed: work(seed) for seed in range(4)))
    assert sorted(np.concatenate(wins).tolist()) == list(range(2000))
    index.check()


def test_a_pin_protects_while_others_evict() -> None:
    index = native.Index()
    hashes = pack(np.arange(400))
    index.insert(SPACE, hashes, 1, np.arange(400, dtype=U32), 0)
    _, slots, generations, held = index.acquire(SPACE, hashes[:200], b"\1")

    def evict() -> None:
        for _ in range(40):
            index.erase(index.victims(1, 0, 10)[0])

    together(evict, evict)
    assert index.valid(SPACE, hashes[:200], 1, slots, generations).all()
    assert index.match(SPACE, hashes) == 200
    assert sorted(index.take_freed(1)[0].tolist()) == list(range(200, 400))
    index.release(held)
    index.check()


def test_callers_share_a_copy_pool() -> None:
    pool = native.CopyPool(3)

    def work(seed: int) -> None:
        source = np.random.default_rng(seed).integers(0, 256, 1_500_000, dtype=np.uint8)
        for _ in range(10):
            target = np.zeros_like(source)
            where = [np.array([a.ctypes.data], np.int64) for a in (target, source)]
            pool.copy(*where, np.array([len(source)], np.int64))
            assert (target == source).all()

    together(*(lambda seed=seed: work(seed) for seed in range(4)), pool.close)
    pool.close()


def test_the_interpreter_ends_with_pools_and_leases_open() -> None:
    program = (
        "import numpy as np\n"
        "from tierkv import _native as native\n"
        "pool = native.CopyPool(4)\n"
        "index = native.Index()\n"
        "lease = index.lease(1.0)\n"
        "memory = np.zeros(2_000_000, np.uint8)\n"
        "pool.fill(np.array([memory.ctypes.data]), np.array([len(memory)]), np.array([1], np.uint64))\n"
        "assert memory.any()\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_memory_of_an_entry() -> None:
    index = native.Index()
    count = 262_144
    numbers = np.arange(count, dtype=U32)
    for first in range(0, count, 16_384):
        part = slice(first, first + 16_384)
        assert index.insert(SPACE, pack(numbers[part]), 1, numbers[part], 0).all()
    assert index.match(SPACE, pack(numbers)) == count
    used = index.stats()["bytes"]
    scratch = count * 4  # of the match() of everything
    assert (used - scratch) / count <= 100
