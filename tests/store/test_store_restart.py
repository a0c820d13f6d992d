"""Restart: what was committed is found, byte for byte, and nothing else is."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path

import numpy as np
import pytest
from store_harness import (
    MISS,
    OK,
    TIMEOUT_S,
    Rig,
    eventually,
    in_tier,
    load,
    masks,
    rows,
    save,
    submit_save,
)

from tierkv.errors import LockedError
from tierkv.store import Store
from tierkv.testing.buffers import random_hashes
from tierkv.testing.faults import FaultKind
from tierkv.types import BlockStatus, TierKind


def test_a_closed_store_is_found_whole(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=16, nvme_blocks=64) as rig:
        spaces = [rig.space(), rig.space(model="other"), rig.space(parts=3)]
        hashes = [random_hashes(10, seed) for seed in range(3)]
        for space, mine in zip(spaces, hashes, strict=True):
            assert save(rig.store, space, mine) == [OK] * 10
        rig.reopen()
        spaces = [rig.space(), rig.space(model="other"), rig.space(parts=3)]
        for number, space in enumerate(spaces):
            for other, mine in enumerate(hashes):
                expected = [OK if other == number else MISS] * 10
                assert load(rig.store, space, mine) == expected
        assert rig.store.stats().tiers["nvme"].blocks == 30
        rig.settled()


def test_a_store_closed_without_flush_keeps_what_was_committed_and_no_other(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=64) as rig:
        space, hashes = rig.space(), random_hashes(30, 1)
        for at in range(0, 30, 6):
            save(rig.store, space, rows(hashes, slice(at, at + 6)))
        committed = in_tier(TierKind.NVME, masks(rig.store, space, hashes))
        assert 0 < sum(committed) < 30
        rig.reopen(0)
        space = rig.space()
        assert in_tier(TierKind.NVME, masks(rig.store, space, hashes)) == committed
        assert load(rig.store, space, hashes) == [OK if there else MISS for there in committed]


def test_restarts_do_not_leak_slots(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=16) as rig:
        for seed in range(6):
            space = rig.space()
            for number in range(3):
                assert save(rig.store, space, random_hashes(8, 10 * seed + number)) == [OK] * 8
            rig.check_capacities()
            rig.reopen()
            nvme = rig.store.stats().tiers["nvme"]
            assert nvme.used_bytes == nvme.blocks * 4096
        newest = random_hashes(8, 52)
        assert load(rig.store, rig.space(), newest) == [OK] * 8


def test_the_order_of_use_survives_a_restart_roughly(tmp_path: Path) -> None:
    """What was written last goes last."""
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=32) as rig:
        space = rig.space()
        for seed in range(4):
            save(rig.store, space, random_hashes(8, seed))
        rig.reopen()
        space = rig.space()
        for seed in range(10, 13):
            save(rig.store, space, random_hashes(8, seed))
        assert load(rig.store, space, random_hashes(8, 0)) == [MISS] * 8
        assert load(rig.store, space, random_hashes(8, 3)) == [OK] * 8


def test_removed_and_cleared_blocks_stay_gone(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=16, nvme_blocks=64, dfs_blocks=None) as rig:
        space, other = rig.space(), rig.space(model="other")
        hashes = random_hashes(8, 1)
        save(rig.store, space, hashes)
        save(rig.store, other, hashes)
        assert rig.store.flush(TIMEOUT_S)
        eventually(
            lambda: in_tier(TierKind.DFS, masks(rig.store, other, hashes)) == [True] * 8, "write-through"
        )
        rig.settled()
        rig.store.remove(space, rows(hashes, [0, 1]))
        rig.store.clear(other)
        rig.reopen(0)
        space, other = rig.space(), rig.space(model="other")
        assert rig.store.match(other, hashes).length == 0
        assert load(rig.store, space, hashes) == [MISS] * 2 + [OK] * 6
        assert load(rig.store, other, hashes) == [MISS] * 8


def copied(source: Path, target: Path) -> Path:
    """What a killed process leaves behind: the files as they are now."""
    shutil.copytree(source, target)
    return target


def test_an_abrupt_end_keeps_what_was_committed_and_no_other(tmp_path: Path) -> None:
    with Rig(tmp_path / "a", dram_blocks=8, nvme_blocks=64) as rig:
        space, hashes = rig.space(), random_hashes(30, 2)
        for at in range(0, 30, 6):
            save(rig.store, space, rows(hashes, slice(at, at + 6)))
        rig.settled()
        committed = in_tier(TierKind.NVME, masks(rig.store, space, hashes))
        copied(tmp_path / "a", tmp_path / "b")
    with Rig(tmp_path / "b", dram_blocks=8, nvme_blocks=64) as rig:
        space = rig.space()
        assert in_tier(TierKind.NVME, masks(rig.store, space, hashes)) == committed
        assert load(rig.store, space, hashes) == [OK if there else MISS for there in committed]


def test_an_abrupt_end_in_the_middle_of_writing_yields_no_wrong_bytes(tmp_path: Path) -> None:
    with Rig(tmp_path / "a", dram_blocks=8, nvme_blocks=24) as rig:
        space = rig.space()
        everything = [random_hashes(8, seed) for seed in range(12)]
        jobs = [submit_save(rig.store, space, hashes) for hashes in everything]
        for number in range(4):
            jobs[3 * number].wait(TIMEOUT_S)
            copied(tmp_path / "a", tmp_path / f"copy-{number}")
    for number in range(4):
        with Rig(tmp_path / f"copy-{number}", dram_blocks=8, nvme_blocks=24) as rig:
            space = rig.space()
            for hashes in everything:
                found = masks(rig.store, space, hashes)
                statuses = load(rig.store, space, hashes)
                # The copy is not one instant of the directory, as a crash is: damage may be seen, never given out.
                allowed = {OK, MISS, int(BlockStatus.CORRUPT)}
                assert set(statuses) <= allowed
                assert all(mask for mask, status in zip(found, statuses, strict=True) if status == OK)


def test_damage_done_while_closed_is_a_counted_miss(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=16) as rig:
        space, hashes = rig.space(), random_hashes(8, 3)
        save(rig.store, space, hashes)
        assert rig.store.flush(TIMEOUT_S)
        assert rig.nvme is not None
        residents = {
            row.tobytes(): int(slot)
            for group in rig.nvme.recover()
            for row, slot in zip(group.hashes, group.slots, strict=True)
        }
        rig.store.close()
        for position in (2, 6):
            block_hash = hashes[position].tobytes()
            rig.damage_slot(space, residents[block_hash], FaultKind.FLIPPED)
        rig.store = Store(rig.config, clock=rig.clock, wrap_tier=rig._wrap)
        space = rig.space()
        corrupt = int(BlockStatus.CORRUPT)
        assert load(rig.store, space, hashes) == [corrupt if k in {2, 6} else OK for k in range(8)]
        rig.check_misses(corrupt=2)


# The shared tier.


def test_another_node_finds_what_this_one_shared(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    with (
        Rig(tmp_path / "one", nvme_blocks=16, dfs_blocks=None, dfs={"directory": str(shared)}) as one,
        Rig(tmp_path / "two", nvme_blocks=16, dfs_blocks=None, dfs={"directory": str(shared)}) as two,
    ):
        here, there = one.space(), two.space()
        hashes = random_hashes(6, 4)
        assert two.store.match(there, hashes).length == 0
        assert save(one.store, here, hashes) == [OK] * 6
        eventually(
            lambda: in_tier(TierKind.DFS, masks(one.store, here, hashes)) == [True] * 6, "write-through"
        )
        two.clock.advance(5.0)  # what was found missing is not asked for again at once
        assert two.store.match(there, hashes).length == 6
        assert load(two.store, there, hashes) == [OK] * 6
        two.settled()


def test_a_file_that_another_node_removed_is_a_miss(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=8, dfs_blocks=None) as rig:
        space, hashes = rig.space(), random_hashes(4, 5)
        save(rig.store, space, hashes)
        assert rig.store.flush(TIMEOUT_S)
        rig.reopen()
        space = rig.space()
        assert rig.store.match(space, hashes).length == 4
        for path in (tmp_path / "dfs").rglob(hashes[1].tobytes().hex()):
            path.unlink()
        assert load(rig.store, space, hashes) == [OK, MISS, OK, OK]
        rig.settled()


@pytest.mark.parametrize("kind", [FaultKind.FLIPPED, FaultKind.TORN])
@pytest.mark.parametrize("codec", ["none", "zstd", "zstd-planes"])
def test_a_damaged_file_is_never_given_out(tmp_path: Path, kind: FaultKind, codec: str) -> None:
    with Rig(tmp_path, dram_blocks=8, dfs_blocks=None, dfs={"codec": codec}) as rig:
        space, hashes = rig.space(), random_hashes(4, 6)
        save(rig.store, space, hashes)
        assert rig.store.flush(TIMEOUT_S)
        rig.reopen()
        space = rig.space()
        rig.damage_file(space, hashes[2].tobytes(), kind)
        # A file of the wrong length may be noticed by the look-up already, a flipped bit only by the load.
        assert rig.store.match(space, hashes).length in ({4} if kind is FaultKind.FLIPPED else {2, 4})
        eventually(lambda: all(masks(rig.store, space, rows(hashes, [0, 1, 3]))), "the directory is listed")
        statuses = load(rig.store, space, hashes)
        assert [statuses[k] for k in (0, 1, 3)] == [OK] * 3
        assert statuses[2] in (
            {BlockStatus.CORRUPT} if kind is FaultKind.FLIPPED else {BlockStatus.CORRUPT, MISS}
        )
        assert load(rig.store, space, rows(hashes, [2])) == [MISS]
        assert save(rig.store, space, hashes) == [OK] * 4
        assert load(rig.store, space, hashes) == [OK] * 4
        rig.settled()


# Two at once.


def open_and_report(rig_arguments: tuple[str, int], answer: multiprocessing.SimpleQueue) -> None:  # type: ignore[type-arg]
    """In another process: tries to open the directory, and says what came of it."""
    try:
        rig = Rig(Path(rig_arguments[0]), nvme_blocks=rig_arguments[1])
    except Exception as error:
        answer.put((type(error).__name__, str(error)))
    else:
        rig.store.close()
        answer.put(("opened", ""))


def test_a_second_process_on_one_directory_gets_a_clear_error(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with Rig(tmp_path, nvme_blocks=16) as rig:
        with pytest.raises(LockedError, match="nvme"):
            Rig(tmp_path, nvme_blocks=16)
        answers = context.SimpleQueue()
        process = context.Process(target=open_and_report, args=((str(tmp_path), 16), answers))
        process.start()
        name, message = answers.get()
        process.join(TIMEOUT_S)
        assert name == "LockedError"
        assert str(tmp_path) in message
        assert save(rig.store, rig.space(), random_hashes(2, 7)) == [OK] * 2
    with Rig(tmp_path, nvme_blocks=16) as rig:
        assert load(rig.store, rig.space(), random_hashes(2, 7)) == [OK] * 2


def test_hashes_in_many_keyspaces_survive(tmp_path: Path) -> None:
    with Rig(tmp_path, dram_blocks=16, nvme_blocks=64) as rig:
        hashes = random_hashes(2, 8)
        for number in range(20):
            assert save(rig.store, rig.space(group=f"g{number}"), hashes) == [OK] * 2
        rig.reopen()
        found = [
            np.count_nonzero(masks(rig.store, rig.space(group=f"g{number}"), hashes)) for number in range(20)
        ]
        assert found == [2] * 20


def test_two_movers_do_not_write_one_block_to_one_tier(tmp_path: Path) -> None:
    """Write-through finds its blocks on their way down by eviction; it must neither write nor undo them."""
    with Rig(tmp_path, dram_blocks=8, nvme_blocks=64, nvme={"admission": "write-through"}) as rig:
        space = rig.space()
        before, both, pressure = (random_hashes(4, seed) for seed in (1, 2, 3))
        assert rig.nvme is not None
        rig.nvme.plan.fail_always("write", FaultKind.STALL)
        save(rig.store, space, before)
        assert rig.nvme.gate.wait_held(1)  # write-through of the first ones is stuck,
        save(rig.store, space, both)  # so that of these waits behind it
        under_pressure = submit_save(rig.store, space, pressure)
        assert rig.nvme.gate.wait_held(2)  # and their eviction comes first
        rig.nvme.gate.release(1)
        # Write-through gets to them while they are being written, and leaves them alone.
        eventually(lambda: rig.store.stats().write_queue_blocks <= len(pressure), "write-through goes on")
        assert rig.nvme.gate.held() <= 2  # the eviction, and later the write-through of the last ones
        rig.nvme.plan.heal()
        rig.nvme.gate.release()
        assert under_pressure.wait(TIMEOUT_S)
        rig.idle()
        assert in_tier(TierKind.NVME, masks(rig.store, space, both)) == [True] * 4
        assert load(rig.store, space, both) == [OK] * 4
        rig.reopen(0)
        assert load(rig.store, rig.space(), both) == [OK] * 4
        assert rig.store.stats().tiers["nvme"].used_bytes == rig.store.stats().tiers["nvme"].blocks * 4096
