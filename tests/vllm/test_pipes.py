"""Staged blocks when the store, the device or the engine is slow, fails or ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import staging_harness as harness
from hypothesis import given, settings
from hypothesis import strategies as st
from staging_harness import TIMEOUT_S, Asked, Rig, block_bytes, content, eventually, hashes_of, ids

from tierkv.adapters.vllm import pipes
from tierkv.adapters.vllm.staging import SLOTS
from tierkv.errors import TierKVError
from tierkv.jobs import Job
from tierkv.types import BlockStatus

CONTENT = content(256)
OK, MISS, TIMEOUT = int(BlockStatus.OK), int(BlockStatus.MISS), int(BlockStatus.TIMEOUT)
DEADLINE_S = 0.5
"""Long enough to get to the store, or the device, first."""
GRACE_S = 0.05


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes, "_GRACE_S", GRACE_S)


def ended(job: Job) -> list[int]:
    """Its statuses, when it has ended."""
    assert job.wait(TIMEOUT_S)
    statuses: list[int] = job.status.tolist()
    return statuses


def keep(into: list[list[bytes]]) -> Callable[[Asked], None]:
    """An answer to saves: keeps what it was given."""

    def answer(asked: Asked) -> None:
        into.append([row.tobytes() for row in asked.rows()])
        asked.job.settle_rest(BlockStatus.OK)

    return answer


def with_device(pipe: pipes.Pipe) -> Any:
    """The pipe's first chunk, when it is with the device."""
    eventually(lambda: bool(pipe._under_way) and pipe._under_way[0].with_device, "it is with the device")
    return pipe._under_way[0]


# The store fails


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(0, 11)), st.integers(1, 5), st.permutations(range(24)))
def test_lost_blocks_are_told_and_leave_the_engines_alone(
    lost: set[int], blocks_a_slot: int, targets: list[int]
) -> None:
    with harness.rig(blocks_a_slot) as rig:
        rig.store.answer = harness.complete(CONTENT, *lost)
        expected = rig.blocks()
        for number, target in enumerate(targets[:12]):
            if number not in lost:
                expected[target] = CONTENT(number)
        job = rig.path.load(hashes_of(*range(12)), ids(*targets[:12]), TIMEOUT_S)
        assert ended(job) == [MISS if number in lost else OK for number in range(12)]
        assert rig.blocks() == expected


@settings(max_examples=20, deadline=None)
@given(st.sets(st.integers(0, 11)), st.integers(1, 5))
def test_each_block_of_a_save_ends_as_the_store_says(lost: set[int], blocks_a_slot: int) -> None:
    with harness.rig(blocks_a_slot) as rig:

        def answer(asked: Asked) -> None:
            given = [BlockStatus.NO_SPACE if number in lost else BlockStatus.OK for number in asked.numbers()]
            asked.job.settle(slice(None), np.array(given, np.uint8))

        rig.store.answer = answer
        job = rig.path.save(hashes_of(*range(12)), ids(*range(12)), TIMEOUT_S)
        assert ended(job) == [BlockStatus.NO_SPACE if number in lost else OK for number in range(12)]


@pytest.mark.parametrize("problem", [TierKVError("the agent is away"), ValueError("a bug")])
def test_a_store_that_raises_loses_the_blocks_and_no_slot(problem: Exception) -> None:
    with harness.rig() as rig:
        before = rig.blocks()
        many = hashes_of(*range(24)), ids(*range(24))
        rig.store.problem = problem
        assert set(ended(rig.path.load(*many, TIMEOUT_S))) == {BlockStatus.IO_ERROR}
        assert set(ended(rig.path.save(*many, TIMEOUT_S))) == {BlockStatus.DROPPED}
        assert rig.blocks() == before
        rig.store.problem = None
        rig.store.answer = lambda asked: asked.job.settle_rest(BlockStatus.OK)
        assert not any(ended(rig.path.save(*many, TIMEOUT_S)))
        rig.store.answer = harness.complete(CONTENT)
        assert not any(ended(rig.path.load(*many, TIMEOUT_S)))


def test_a_load_ends_at_its_deadline_and_what_comes_later_is_not_written() -> None:
    with harness.rig() as rig:
        before = rig.blocks()
        per_slot = rig.path.chunk_blocks
        hashes, blocks = hashes_of(*range(24)), ids(*range(24))
        assert len(blocks) > per_slot * SLOTS, "some wait for a slot"
        assert set(ended(rig.path.load(hashes, blocks, DEADLINE_S))) == {TIMEOUT}
        assert len(rig.store.loads) == SLOTS
        waiting = rig.path.load(hashes, blocks, TIMEOUT_S)
        assert len(rig.store.loads) == SLOTS, "no slot is used again while the store may still write to it"
        late = list(rig.store.loads)
        for asked in late:
            asked.write(CONTENT)
            asked.job.settle_rest(BlockStatus.OK)
        eventually(lambda: len(rig.store.loads) == 2 * SLOTS, "the slots are used again")
        assert rig.blocks() == before
        rig.store.answer = harness.complete(CONTENT)
        for asked in rig.store.loads[SLOTS : 2 * SLOTS]:
            asked.write(CONTENT)
            asked.job.settle_rest(BlockStatus.OK)
        assert not any(ended(waiting))
        assert rig.blocks() == [CONTENT(number) for number in range(24)]


def test_a_save_ends_at_its_deadline_and_its_slots_serve_again() -> None:
    with harness.rig() as rig:
        hashes, blocks = hashes_of(*range(24)), ids(*range(24))
        assert set(ended(rig.path.save(hashes, blocks, DEADLINE_S))) == {TIMEOUT}
        stuck = list(rig.store.saves)
        assert len(stuck) == SLOTS
        kept: list[list[bytes]] = []
        rig.store.answer = keep(kept)
        waiting = rig.path.save(hashes, blocks, TIMEOUT_S)
        for asked in stuck:
            # The store may read a slot as long as its job is open: nobody else has written to it.
            assert [row.tobytes() for row in asked.rows()] == [rig.block(k) for k in asked.numbers()]
            asked.job.settle_rest(BlockStatus.OK)
        assert not any(ended(waiting))
        assert [block for rows in kept for block in rows] == rig.blocks()


# The queue is full, or others are before


def test_what_the_queue_has_no_place_for_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes, "MAX_QUEUED_BLOCKS", 10)
    with harness.rig() as rig:
        held = rig.path.chunk_blocks * SLOTS
        first = [
            move(hashes_of(*range(held)), ids(*range(held)), TIMEOUT_S)
            for move in (rig.path.load, rig.path.save)
            if held <= 10
        ]
        assert len(first) == 2
        eventually(lambda: len(rig.store.loads) == len(rig.store.saves) == SLOTS, "all slots are used")
        hashes, blocks = hashes_of(*range(8)), ids(*range(8))
        queued = rig.path.load(hashes, blocks, TIMEOUT_S), rig.path.save(hashes, blocks, TIMEOUT_S)
        load, save = rig.path.load(hashes, blocks, TIMEOUT_S), rig.path.save(hashes, blocks, TIMEOUT_S)
        assert load.done()
        assert save.done()
        assert set(load.status.tolist()) == {TIMEOUT}
        assert set(save.status.tolist()) == {BlockStatus.DROPPED}
        rig.store.answer = lambda asked: asked.job.settle_rest(BlockStatus.OK)
        for asked in [*rig.store.loads, *rig.store.saves]:
            asked.job.settle_rest(BlockStatus.OK)
        assert not any(status for job in (*first, *queued) for status in ended(job))


def test_too_many_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes, "MAX_QUEUED_REQUESTS", 3)
    with harness.rig() as rig:
        rig.device.busy = True
        jobs = []
        for k in range(SLOTS):
            jobs.append(rig.path.save(hashes_of(k), ids(k), TIMEOUT_S))
            eventually(lambda: not rig.staging.saves._queue, "it has a slot")
        jobs += [rig.path.save(hashes_of(k), ids(k), TIMEOUT_S) for k in range(4)]
        assert [job.done() for job in jobs] == [False] * (SLOTS + 3) + [True]
        assert jobs[-1].status.tolist() == [BlockStatus.DROPPED]
        rig.store.answer = lambda asked: asked.job.settle_rest(BlockStatus.OK)
        rig.device.finish()
        assert not any(status for job in jobs[:-1] for status in ended(job))


def test_queued_blocks_end_at_their_deadline() -> None:
    with harness.rig() as rig:
        per_slot = rig.path.chunk_blocks
        hashes, blocks = hashes_of(*range(per_slot * SLOTS)), ids(*range(per_slot * SLOTS))
        rig.path.load(hashes, blocks, TIMEOUT_S)
        eventually(lambda: len(rig.store.loads) == SLOTS, "all slots are used")
        assert ended(rig.path.load(hashes_of(1), ids(23), DEADLINE_S)) == [TIMEOUT]
        for asked in rig.store.loads:
            asked.job.settle_rest(BlockStatus.MISS)


def test_loads_do_not_wait_for_saves() -> None:
    with harness.rig() as rig:
        save = rig.path.save(hashes_of(*range(24)), ids(*range(24)), TIMEOUT_S)
        eventually(lambda: len(rig.store.saves) == SLOTS, "the saves are stuck in the store")
        rig.store.answer = harness.complete(CONTENT)
        assert not any(ended(rig.path.load(hashes_of(*range(24)), ids(*range(24)), TIMEOUT_S)))
        assert not save.done()
        rig.store.answer = lambda asked: asked.job.settle_rest(BlockStatus.OK)
        for asked in rig.store.saves[:SLOTS]:
            asked.job.settle_rest(BlockStatus.OK)
        assert not any(ended(save))


def test_chunks_go_on_in_the_order_in_which_the_store_has_them() -> None:
    with harness.rig() as rig:
        per_slot = rig.path.chunk_blocks
        count = per_slot * 3
        job = rig.path.load(hashes_of(*range(count)), ids(*range(count)), TIMEOUT_S)
        eventually(lambda: len(rig.store.loads) == 3, "several chunks are with the store at once")
        last = max(rig.store.loads, key=lambda asked: asked.numbers())
        last.write(CONTENT)
        last.job.settle_rest(BlockStatus.OK)
        eventually(lambda: rig.block(count - 1) == CONTENT(count - 1), "it is written before those before it")
        for asked in rig.store.loads:
            if asked is not last:
                asked.job.settle_rest(BlockStatus.MISS)
        assert ended(job) == [MISS] * (2 * per_slot) + [OK] * per_slot


# The engine's own work is still under way


def test_a_save_reads_what_the_engine_had_ordered_when_it_was_called() -> None:
    with harness.rig() as rig:
        kept: list[list[bytes]] = []
        rig.store.answer = keep(kept)
        rig.device.busy = True
        job = rig.path.save(hashes_of(1, 2), ids(4, 7), TIMEOUT_S)
        rig.fill(77)  # the step that was ordered before the call writes its last bytes
        assert not job.done()
        rig.device.finish()
        assert not any(ended(job))
        assert kept == [[b"\x4d" * 256] * 2]


def test_a_load_writes_only_after_the_engines_earlier_work_and_is_open_until_then() -> None:
    """Its blocks may have been those of a request of a step that the device is still busy with."""
    with harness.rig() as rig:
        rig.store.answer = harness.complete(CONTENT)
        rig.device.busy = True
        job = rig.path.load(hashes_of(1, 2), ids(4, 7), DEADLINE_S)
        eventually(lambda: len(rig.store.loads) == 1, "the store does not wait for the device")
        chunk = with_device(rig.staging.loads)
        eventually(lambda: chunk.late, "the deadline passes")
        assert not job.done(), "the copy is ordered: the job must not end before it, however late"
        rig.fill(77)
        rig.device.finish()
        assert ended(job) == [OK, OK]
        assert (rig.block(4), rig.block(7)) == (CONTENT(1), CONTENT(2))


def test_a_load_whose_time_is_up_before_the_copy_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes, "_GRACE_S", TIMEOUT_S)
    with harness.rig() as rig:
        before = rig.blocks()

        def answer(asked: Asked) -> None:
            threading.Event().wait(asked.timeout_s + 0.01)
            harness.complete(CONTENT)(asked)

        rig.store.answer = answer
        job = rig.path.load(hashes_of(1, 2), ids(4, 7), DEADLINE_S)
        assert ended(job) == [TIMEOUT, TIMEOUT]
        assert rig.blocks() == before


def test_a_save_whose_blocks_were_given_back_is_not_stored() -> None:
    with harness.rig() as rig:
        kept: list[list[bytes]] = []
        rig.store.answer = keep(kept)
        rig.device.busy = True
        assert ended(rig.path.save(hashes_of(1, 2), ids(4, 7), DEADLINE_S)) == [TIMEOUT, TIMEOUT]
        rig.fill(77)  # now the blocks are another request's
        rig.device.finish()
        assert not any(ended(rig.path.save(hashes_of(3), ids(5), TIMEOUT_S)))
        assert kept == [[b"\x4d" * 256]], "only the second save's block"


# The device fails


def _fail(rig: Rig, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The next copies raise, after they have ordered some."""

    def failing(*given: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(type(rig.path), name, failing)


def test_a_failed_copy_loses_the_blocks_and_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    with harness.rig() as rig:
        rig.store.answer = harness.complete(CONTENT, 3)
        hashes, blocks = hashes_of(*range(24)), ids(*range(24))
        with monkeypatch.context() as patch:
            _fail(rig, patch, "copy_in")
            _fail(rig, patch, "copy_out")
            loaded = ended(rig.path.load(hashes, blocks, TIMEOUT_S))
            assert loaded == [MISS if number == 3 else BlockStatus.IO_ERROR for number in range(24)]
            assert set(ended(rig.path.save(hashes, blocks, TIMEOUT_S))) == {BlockStatus.DROPPED}
            assert not rig.store.saves
        assert ended(rig.path.load(hashes, blocks, TIMEOUT_S)) == [MISS if k == 3 else OK for k in range(24)]
        rig.store.answer = lambda asked: asked.job.settle_rest(BlockStatus.OK)
        assert not any(ended(rig.path.save(hashes, blocks, TIMEOUT_S)))


# The end


def test_closing_cancels_what_is_queued_and_with_the_store() -> None:
    with harness.rig() as rig:
        cache, allocations = rig.cache, rig.allocations
        before = rig.blocks()
        hashes, blocks = hashes_of(*range(24)), ids(*range(24))
        load, save = rig.path.load(hashes, blocks, TIMEOUT_S), rig.path.save(hashes, blocks, TIMEOUT_S)
        eventually(lambda: len(rig.store.loads) == len(rig.store.saves) == SLOTS, "all slots are used")
        assert rig.staging.close(TIMEOUT_S)
        for job in (load, save):
            assert job.done()
            assert set(job.status.tolist()) == {BlockStatus.CANCELLED}
        for asked in rig.store.loads:  # the store keeps the memory that it writes to
            asked.write(CONTENT)
            asked.job.settle_rest(BlockStatus.OK)
        for asked in rig.store.saves:
            asked.job.settle_rest(BlockStatus.OK)
    assert [block_bytes(cache, allocations, block) for block in range(24)] == before


def test_closing_waits_for_the_device() -> None:
    with harness.rig() as rig:
        rig.store.answer = harness.complete(CONTENT)
        rig.device.busy = True
        load = rig.path.load(hashes_of(1), ids(4), TIMEOUT_S)
        save = rig.path.save(hashes_of(2), ids(5), TIMEOUT_S)
        with_device(rig.staging.loads)
        with_device(rig.staging.saves)
        assert not rig.staging.close(GRACE_S), "the device may still write: the job must stay open"
        assert not load.done()
        rig.device.finish()
        assert rig.staging.close(TIMEOUT_S)
        assert ended(load) == [OK]
        assert rig.block(4) == CONTENT(1)
        assert ended(save) == [BlockStatus.CANCELLED]
        assert not rig.store.saves
