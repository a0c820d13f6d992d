"""Many callers at once: nobody blocks, nothing is mixed up, and afterwards nothing is held."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from store_harness import (
    MISS,
    OK,
    TIMEOUT_S,
    Load,
    Rig,
    empty_cache,
    filled_cache,
    load,
    rows,
    save,
    statuses_of,
    submit_save,
)

from tierkv.testing.buffers import chain_hashes, random_hashes
from tierkv.testing.faults import FaultKind
from tierkv.testing.tiers import run_threads
from tierkv.types import BlockStatus

FINE = {int(BlockStatus.OK), int(BlockStatus.DROPPED)}


def test_two_threads_that_save_the_same_blocks(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=32, nvme_blocks=64) as rig:
        space, hashes = rig.space(), random_hashes(32, 1)
        for turn in range(20):
            start = threading.Barrier(2)
            found: list[list[int]] = []

            def work(start: threading.Barrier = start, found: list[list[int]] = found) -> None:
                start.wait(TIMEOUT_S)
                found.append(save(rig.store, space, hashes))

            run_threads([work, work])
            assert found == [[OK] * 32] * 2
            assert rig.store.stats().tiers["dram"].blocks == 32
            assert load(rig.store, space, hashes) == [OK] * 32
            assert rig.store.remove(space, hashes) >= 32, f"turn {turn}"
        rig.settled()
        assert rig.store.stats().tiers["dram"].used_bytes == 0


@pytest.mark.parametrize("below", ["nothing", "nvme", "nvme and dfs"])
def test_hundreds_of_loads_and_saves_leave_no_pin(tmp_path: Path, below: str) -> None:
    with Rig(
        tmp_path,
        dram_blocks=24,
        nvme_blocks=48 if "nvme" in below else 0,
        dfs_blocks=64 if "dfs" in below else 0,
        dram={"free_ahead": 0.1},
    ) as rig:
        spaces = [rig.space(), rig.space(model="other", parts=2)]

        def work(number: int) -> None:
            rng = np.random.default_rng(number)
            for _ in range(40):
                space = spaces[int(rng.integers(0, 2))]
                chain = chain_hashes(int(rng.integers(0, 6)), 12, common=3)
                hashes = rows(chain, slice(0, int(rng.integers(1, 12))))
                match int(rng.integers(0, 8)):
                    case 0 | 1 | 2:
                        assert set(save(rig.store, space, hashes)) <= FINE
                    case 3 | 4 | 5:
                        assert set(load(rig.store, space, hashes)) <= {OK, MISS}
                    case 6:
                        with rig.store.lease([(space, hashes)], 60.0) as lease:
                            length = rig.store.match(space, hashes).length
                            statuses = load(rig.store, space, hashes)
                            for held, status in zip(lease.held[0].tolist(), statuses, strict=True):
                                assert status == OK or not held, "a leased block was lost"
                            assert length >= int(np.argmin([*lease.held[0].tolist(), False]))
                    case _:
                        rig.store.touch(space, hashes)

        run_threads([lambda number=number: work(number) for number in range(6)])  # type: ignore[misc]
        rig.clock.advance(rig.config.save_timeout_s)  # blocks of which a part was dropped
        rig.settled()
        rig.check_capacities()


def test_removing_and_clearing_amid_traffic_yields_no_wrong_bytes(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=16, nvme_blocks=32, dram={"free_ahead": 0.1}) as rig:
        space, other = rig.space(), rig.space(model="other")
        stop = threading.Event()

        def traffic(number: int) -> None:
            rng = np.random.default_rng(number)
            while not stop.is_set():
                hashes = rows(chain_hashes(int(rng.integers(0, 4)), 10), slice(0, int(rng.integers(1, 10))))
                mine = space if rng.random() < 0.7 else other
                if rng.random() < 0.5:
                    assert set(save(rig.store, mine, hashes)) <= {*FINE, int(BlockStatus.CANCELLED)}
                else:
                    assert set(load(rig.store, mine, hashes)) <= {OK, MISS}

        def removal() -> None:
            rng = np.random.default_rng(99)
            try:
                for turn in range(40):
                    if turn % 4:
                        rig.store.remove(space, chain_hashes(int(rng.integers(0, 4)), 10))
                    else:
                        rig.store.clear(space, TIMEOUT_S)
            finally:
                stop.set()

        run_threads([removal, *[lambda number=number: traffic(number) for number in range(3)]])  # type: ignore[misc]
        rig.settled()
        rig.check_capacities()


def test_what_was_saved_before_clear_is_not_found_after(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=16, nvme_blocks=64) as rig:
        space = rig.space()
        for turn in range(10):
            hashes = random_hashes(40, turn)
            jobs = [submit_save(rig.store, space, rows(hashes, slice(at, at + 4))) for at in range(0, 40, 4)]
            rig.store.clear(space)
            assert rig.store.match(space, hashes).length == 0
            assert not rig.store.lookup([(space, hashes)])[0].any()
            for job in jobs:
                assert set(statuses_of(job)) <= {OK, int(BlockStatus.CANCELLED), int(BlockStatus.DROPPED)}
            assert load(rig.store, space, hashes) == [MISS] * 40
        rig.settled()
        assert rig.store.stats().tiers["nvme"].used_bytes == 0


# The end of a store.


def test_close_settles_every_job(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=64) as rig:
        space, below = rig.space(), random_hashes(8, 1)
        save(rig.store, space, below)
        rig.reopen()
        space = rig.space()
        assert rig.nvme is not None
        rig.nvme.plan.fail_always("read", FaultKind.STALL)
        loads = [Load(rig.store, space, rows(below, [k % 8])) for k in range(20)]
        assert rig.nvme.gate.wait_held()
        saves = [submit_save(rig.store, space, random_hashes(4, seed)) for seed in range(10, 40)]
        rig.store.close(0)
        for one in loads:
            assert set(one.statuses()) <= {OK, MISS, int(BlockStatus.CANCELLED), int(BlockStatus.TIMEOUT)}
        for job in saves:
            assert set(statuses_of(job)) <= {OK, int(BlockStatus.CANCELLED), int(BlockStatus.DROPPED)}


def test_close_ends_in_spite_of_writes_that_never_answer(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=64) as rig:
        space = rig.space()
        save(rig.store, space, random_hashes(8, 1))
        assert rig.nvme is not None
        rig.nvme.plan.fail_always("write", FaultKind.LOST)
        saving = submit_save(rig.store, space, random_hashes(8, 2), timeout_s=0.2)
        assert rig.nvme.gate.wait_held()
        assert set(statuses_of(saving)) <= {OK, int(BlockStatus.DROPPED), int(BlockStatus.TIMEOUT)}
        rig.store.close(0)


def test_closing_while_others_call(tmp_path: Path) -> None:
    from tierkv.errors import ClosedError

    with Rig(tmp_path, dram_blocks=16, nvme_blocks=32) as rig:
        space = rig.space()
        started = threading.Barrier(4)

        def work(number: int) -> None:
            hashes = chain_hashes(number, 8)
            memory, room = filled_cache(space, hashes), empty_cache(space, 8).fragments(range(8))
            started.wait(TIMEOUT_S)
            while True:
                try:
                    jobs = [rig.store.save(space, hashes, memory), rig.store.load(space, hashes, room)]
                    rig.store.match(space, hashes)
                    rig.store.stats()
                except ClosedError:
                    return
                for job in jobs:
                    assert job.wait(TIMEOUT_S)

        def close() -> None:
            started.wait(TIMEOUT_S)
            rig.store.close()

        run_threads([close, *[lambda number=number: work(number) for number in range(3)]])  # type: ignore[misc]
