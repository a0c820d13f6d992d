"""A job settles each block once, tells everyone who waits, and survives its callbacks."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.jobs import Job, finished_job
from tierkv.types import BlockStatus

TIMEOUT_S = 20.0
STATUSES = [int(status) for status in BlockStatus if status is not BlockStatus.PENDING]


def test_a_job_of_nothing_is_done_and_ok() -> None:
    job = Job(0)
    assert job.done()
    assert job.ok()
    assert job.wait(0)
    called = []
    job.add_done_callback(called.append)
    assert called == [job]
    job.settle_rest(BlockStatus.IO_ERROR)
    assert called == [job]


def test_an_open_job_says_so() -> None:
    job = Job(2)
    assert not job.done()
    assert not job.ok()
    assert not job.wait(0)
    assert (job.status == BlockStatus.PENDING).all()
    job.settle(slice(0, 1), BlockStatus.OK)
    assert not job.done()
    assert not job.ok()
    job.settle_rest(BlockStatus.OK)
    assert job.ok()


def test_one_block_that_failed_is_not_ok() -> None:
    job = Job(3)
    job.settle(np.array([1]), BlockStatus.MISS)
    job.settle_rest(BlockStatus.OK)
    assert job.done()
    assert not job.ok()
    assert job.status.tolist() == [0, BlockStatus.MISS, 0]


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[tuple[list[int], list[int]]]]:
    count = draw(st.integers(1, 8))
    steps = []
    for _ in range(draw(st.integers(0, 6))):
        where = draw(st.lists(st.integers(0, count - 1), unique=True, max_size=count))
        what = draw(st.lists(st.sampled_from([*STATUSES, 255]), min_size=len(where), max_size=len(where)))
        steps.append((where, what))
    return count, steps


@given(histories())
def test_the_first_settling_of_a_block_stands(history: tuple[int, list[tuple[list[int], list[int]]]]) -> None:
    count, steps = history
    job, calls = Job(count), []
    job.add_done_callback(calls.append)
    expected = [255] * count
    for where, what in steps:
        job.settle(np.array(where, np.int64), np.array(what, np.uint8))
        for position, status in zip(where, what, strict=True):
            if expected[position] == 255:
                expected[position] = status
        assert job.status.tolist() == expected
        assert job.done() == (255 not in expected)
    job.settle_rest(BlockStatus.CANCELLED)
    assert job.status.tolist() == [BlockStatus.CANCELLED if status == 255 else status for status in expected]
    assert job.done()
    assert calls == [job]


def test_callbacks_run_once_each_also_when_added_late() -> None:
    job, order = Job(1), []
    job.add_done_callback(lambda _: order.append("first"))
    job.add_done_callback(lambda _: order.append("second"))
    job.settle_rest(BlockStatus.OK)
    job.settle_rest(BlockStatus.IO_ERROR)
    job.add_done_callback(lambda _: order.append("late"))
    assert order == ["first", "second", "late"]


def test_a_callback_that_raises_harms_neither_the_settler_nor_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job, called = Job(1), []

    def broken(_: Job) -> None:
        raise RuntimeError("broken callback")

    job.add_done_callback(broken)
    job.add_done_callback(called.append)
    with caplog.at_level(logging.ERROR):
        job.settle_rest(BlockStatus.OK)
    assert called == [job]
    assert "broken callback" in caplog.text


def test_a_callback_may_use_the_job() -> None:
    job, seen = Job(1), []

    def callback(done: Job) -> None:
        assert done.wait(0)
        done.settle_rest(BlockStatus.OK)
        done.add_done_callback(seen.append)

    job.add_done_callback(callback)
    job.settle_rest(BlockStatus.MISS)
    assert seen == [job]
    assert job.status.tolist() == [BlockStatus.MISS]


def test_waiters_in_other_threads_wake_up_and_every_callback_runs() -> None:
    count = 400
    job = Job(count)
    start = threading.Barrier(10)
    woken, called = [], []

    def wait() -> None:
        start.wait(TIMEOUT_S)
        woken.append(job.wait(TIMEOUT_S))

    def settle(share: int) -> None:
        start.wait(TIMEOUT_S)
        for position in range(share, count, 4):
            job.settle(np.array([position]), BlockStatus.OK)

    def add(_: int) -> None:
        start.wait(TIMEOUT_S)
        for _ in range(50):
            job.add_done_callback(called.append)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    threads += [threading.Thread(target=settle, args=(share,)) for share in range(4)]
    threads += [threading.Thread(target=add, args=(0,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert woken == [True] * 4
    assert job.ok()
    assert len(called) == 100


def test_two_threads_that_settle_the_same_blocks_finish_the_job_once() -> None:
    for _ in range(200):
        job, calls = Job(4), []
        job.add_done_callback(calls.append)
        start = threading.Barrier(2)

        def settle(status: BlockStatus, job: Job = job, start: threading.Barrier = start) -> None:
            start.wait(TIMEOUT_S)
            job.settle_rest(status)

        threads = [
            threading.Thread(target=settle, args=(status,)) for status in (BlockStatus.OK, BlockStatus.MISS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert calls == [job]
        assert len(set(job.status.tolist())) == 1


@given(st.lists(st.sampled_from(STATUSES), max_size=8))
def test_a_finished_job_is_done(statuses: list[int]) -> None:
    job = finished_job(np.array(statuses, np.uint8))
    assert job.done()
    assert job.status.tolist() == statuses
    assert job.ok() == (not any(statuses))


def test_a_job_prints_its_progress() -> None:
    job = Job(3)
    job.settle(slice(0, 2), BlockStatus.OK)
    assert repr(job) == "<Job 2/3>"
