"""The block I/O engines against a bytearray: what is read is what was written, each block alone, reads first."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.errors import ArgumentError, ClosedError, ConfigError, StorageError
from tierkv.io import (
    BlockIO,
    NullBlockIO,
    Operation,
    PosixBlockIO,
    UringBlockIO,
    io_uring_available,
    open_engine,
    status_of,
    uring,
)
from tierkv.io.queue import RequestQueue
from tierkv.testing.buffers import BlockBuffer, address_of, aligned_buffer
from tierkv.types import BlockStatus, Int64Array

AVAILABLE, REASON = io_uring_available()
ENGINES = [
    pytest.param(UringBlockIO, marks=pytest.mark.skipif(not AVAILABLE, reason=REASON)),
    pytest.param(PosixBlockIO),
]
FILE_BYTES = 1 << 20


@pytest.fixture(params=ENGINES)
def make_engine(request: pytest.FixtureRequest) -> Iterator[Callable[..., BlockIO]]:
    """Makes engines and closes them."""
    made: list[BlockIO] = []

    def make(*args: int, **options: int) -> BlockIO:
        made.append(request.param(*args, **options))
        return made[-1]

    yield make
    assert all(engine.close(10.0) for engine in made)


@pytest.fixture(params=[False, True], ids=["buffered", "direct"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(bytes(FILE_BYTES))
    try:
        fd = os.open(path, os.O_RDWR | (os.O_DIRECT if request.param else 0))
    except OSError as error:
        pytest.skip(f"O_DIRECT is refused here: {error.strerror}")
    yield fd
    os.close(fd)


def i64(*values: int) -> Int64Array:
    return np.array(values, np.int64)


def run(engine: BlockIO, operation: Operation, fd: int, *arrays: Int64Array) -> list[BlockStatus]:
    job = engine.submit(operation, fd, *arrays)
    assert job.wait(20.0)
    return [BlockStatus(value) for value in job.status.tolist()]


@pytest.mark.parametrize("piece_bytes", [8192, 1 << 20])
def test_random_batches_agree_with_a_bytearray(
    make_engine: Callable[..., BlockIO], file: int, piece_bytes: int
) -> None:
    engine = make_engine(4, piece_bytes=piece_bytes)
    granules = FILE_BYTES // 4096
    model = bytearray(FILE_BYTES)
    os.pwrite(file, aligned_buffer(FILE_BYTES), 0)
    block = st.tuples(st.integers(0, granules - 8), st.integers(1, 8), st.integers(0, 255))

    @settings(deadline=None, max_examples=40)
    @given(st.lists(st.tuples(st.sampled_from(Operation), st.lists(block, max_size=12)), max_size=6))
    def check(batches: list[tuple[Operation, list[tuple[int, int, int]]]]) -> None:
        for operation, blocks in batches:
            taken: set[int] = set()
            chosen = []
            for start, count, fill in blocks:  # blocks of a batch must not overlap: their order is free
                if taken.isdisjoint(range(start, start + count)):
                    taken.update(range(start, start + count))
                    chosen.append((start * 4096, count * 4096, fill))
            buffer = BlockBuffer(max(1, len(chosen)), 8 * 4096)
            for position, (offset, length, fill) in enumerate(chosen):
                if operation == Operation.WRITE:
                    data = bytes([fill]) * (length - 1) + b"\x01"
                    buffer.put(position, data)
                    model[offset : offset + length] = data
            statuses = run(
                engine,
                operation,
                file,
                i64(*(offset for offset, _, _ in chosen)),
                buffer.addresses[: len(chosen)],
                i64(*(length for _, length, _ in chosen)),
            )
            assert statuses == [BlockStatus.OK] * len(chosen)
            assert buffer.guards_intact()
            if operation == Operation.READ:
                for position, (offset, length, _) in enumerate(chosen):
                    assert buffer.get(position, length) == model[offset : offset + length]

    check()
    assert engine.sync(file) == BlockStatus.OK
    assert engine.waiting() == 0


def test_odd_lengths_and_addresses_work_without_o_direct(
    make_engine: Callable[..., BlockIO], tmp_path: Path
) -> None:
    engine = make_engine(2, piece_bytes=1000)
    memory = aligned_buffer(30_000)
    memory[:] = np.arange(30_000) % 251
    with open(tmp_path / "file", "w+b", buffering=0) as file:
        base = address_of(memory)
        first = (i64(3, 5000), i64(base + 1, base + 7000), i64(2777, 1))
        assert run(engine, Operation.WRITE, file.fileno(), *first) == [BlockStatus.OK] * 2
        back = aligned_buffer(4096)
        arrays = (i64(3), i64(address_of(back) + 5), i64(2777))
        assert run(engine, Operation.READ, file.fileno(), *arrays) == [BlockStatus.OK]
        assert (back[5 : 5 + 2777] == memory[1:2778]).all()
        assert not back[:5].any()
        assert not back[5 + 2777 :].any()


def test_each_block_fails_alone(make_engine: Callable[..., BlockIO], file: int) -> None:
    engine = make_engine(4)
    buffer = BlockBuffer(3, 8192)
    os.pwrite(file, aligned_buffer(4096, 7), FILE_BYTES - 4096)
    offsets = i64(0, FILE_BYTES - 4096, FILE_BYTES)  # whole, half of it, nothing of it in the file
    statuses = run(engine, Operation.READ, file, offsets, buffer.addresses, i64(8192, 8192, 8192))
    assert statuses == [BlockStatus.OK, BlockStatus.IO_ERROR, BlockStatus.IO_ERROR]
    assert buffer.get(0) == bytes(8192)


def test_errno_becomes_a_status(make_engine: Callable[..., BlockIO], tmp_path: Path) -> None:
    engine = make_engine(4)
    buffer = BlockBuffer(2, 4096)
    full = os.open("/dev/full", os.O_WRONLY)
    closed = os.open(tmp_path / "file", os.O_RDONLY | os.O_CREAT)
    try:
        two = (i64(0, 4096), buffer.addresses, i64(4096, 4096))
        assert run(engine, Operation.WRITE, full, *two) == [BlockStatus.NO_SPACE] * 2
        assert run(engine, Operation.WRITE, closed, *two) == [BlockStatus.IO_ERROR] * 2
    finally:
        os.close(full)
        os.close(closed)
    assert run(engine, Operation.READ, closed, *two) == [BlockStatus.IO_ERROR] * 2
    assert engine.sync(closed) == BlockStatus.IO_ERROR
    assert status_of(errno.EDQUOT) == BlockStatus.NO_SPACE
    assert status_of(errno.EMFILE) == BlockStatus.IO_ERROR


def test_what_finds_no_room_is_dropped_and_reads_go_first(
    make_engine: Callable[..., BlockIO], tmp_path: Path
) -> None:
    """A pipe without a writer holds a read in flight for as long as the test wants."""
    engine = make_engine(1, queue_blocks=3)
    reader, writer = os.pipe()
    path = tmp_path / "file"
    path.write_bytes(b"a" * 4096)
    fd = os.open(path, os.O_RDWR)
    buffer = BlockBuffer(4, 4096)
    order: list[str] = []
    try:
        held = held_in_flight(engine, reader, buffer.addresses[:1])
        write = engine.submit(
            Operation.WRITE, fd, i64(0, 4096, 8192, 12288), buffer.addresses, i64(*[4096] * 4)
        )
        assert write.status.tolist()[3] == BlockStatus.DROPPED
        assert not write.done()
        read = engine.submit(Operation.READ, fd, i64(0), buffer.addresses[1:2], i64(4096))
        write.add_done_callback(lambda job: order.append("write"))
        read.add_done_callback(lambda job: order.append("read"))
        os.write(writer, b"x")
        assert held.wait(20.0)
        assert read.wait(20.0)
        assert write.wait(20.0)
        assert order == ["read", "write"]
        assert write.status.tolist() == [BlockStatus.OK] * 3 + [BlockStatus.DROPPED]
    finally:
        os.close(reader)
        os.close(writer)
        os.close(fd)


def held_in_flight(engine: BlockIO, pipe: int, addresses: Int64Array):  # type: ignore[no-untyped-def]
    """A read of a pipe, in flight until somebody writes a byte: its job ends then."""
    if engine.name == "threads":
        pytest.skip("preadv of a pipe is refused (ESPIPE)")
    job = engine.submit(Operation.READ, pipe, i64(0), addresses, i64(1))
    assert not job.wait(0.05)
    return job


def test_close_cancels_what_waits_and_gives_up_on_what_hangs(tmp_path: Path) -> None:
    if not AVAILABLE:
        pytest.skip(REASON)
    engine = UringBlockIO(1)
    reader, writer = os.pipe()
    buffer = BlockBuffer(2, 4096)
    held = held_in_flight(engine, reader, buffer.addresses[:1])
    waiting = engine.submit(Operation.READ, reader, i64(0), buffer.addresses[1:], i64(1))
    assert engine.waiting() == 2
    assert not engine.close(0.05)
    assert held.status.tolist() == [BlockStatus.CANCELLED]
    assert waiting.status.tolist() == [BlockStatus.CANCELLED]
    os.write(writer, b"x")  # the disk comes back: the thread ends all the same
    assert engine.close(20.0)
    os.close(reader)
    os.close(writer)


def test_closed_engines_refuse(make_engine: Callable[..., BlockIO], file: int) -> None:
    engine = make_engine(2)
    assert engine.close(10.0)
    assert engine.close(10.0)
    with pytest.raises(ClosedError):
        engine.submit(Operation.READ, file, i64(0), BlockBuffer(1, 4096).addresses, i64(4096))


def test_bad_arrays_are_refused(make_engine: Callable[..., BlockIO], file: int) -> None:
    engine = make_engine(2)
    address = BlockBuffer(1, 4096).addresses
    for arrays in ((i64(0, 1), address, i64(1)), (i64(0), address, i64(0)), (i64(-1), address, i64(1))):
        with pytest.raises(ArgumentError):
            engine.submit(Operation.READ, file, *arrays)
    assert engine.submit(Operation.READ, file, i64(), i64(), i64()).done()


def test_many_threads_submit_at_once(make_engine: Callable[..., BlockIO], file: int) -> None:
    engine = make_engine(3)
    failures: list[str] = []

    def work(number: int) -> None:
        buffer = BlockBuffer(4, 4096, number + 1)
        offsets = (np.arange(4, dtype=np.int64) + 4 * number) * 4096
        for turn in range(20):
            buffer.memory[:] = (number * 20 + turn) % 256
            for operation in (Operation.WRITE, Operation.READ):
                if run(engine, operation, file, offsets, buffer.addresses, i64(*[4096] * 4)) != [0] * 4:
                    failures.append("status")
                if operation == Operation.WRITE:
                    buffer.memory[:] = 0
            if not all((buffer[i] == (number * 20 + turn) % 256).all() for i in range(4)):
                failures.append(f"bytes of {number} in turn {turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert failures == []


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.sampled_from(Operation), st.integers(1, 12)), max_size=12),
    st.randoms(use_true_random=False),
)
def test_the_queue_keeps_its_promises(depth: int, batches: list[tuple[Operation, int]], random) -> None:  # type: ignore[no-untyped-def]
    """Never more than the depth; reads first; a place for reads; writes are not starved; all is handed out once."""
    queue = RequestQueue(depth, queue_blocks=1000, piece_bytes=4096)
    jobs = [
        queue.add(operation, 0, i64(*range(count)), i64(*[4096] * count), i64(*[5000] * count))
        for operation, count in batches
    ]
    left = {
        operation: sum(2 * count for kind, count in batches if kind == operation) for operation in Operation
    }
    flying: list = []  # type: ignore[type-arg]
    while any(left.values()) or flying:
        with queue.condition:
            taken = queue.take(random.randint(1, depth))
            assert queue.can_take() or len(flying) + len(taken) > 0
        for piece in taken:
            left[piece.request.operation] -= 1
            flying.append(piece)
        assert len(flying) <= depth
        kinds = [piece.request.operation for piece in flying]
        assert kinds.count(Operation.WRITE) <= max(1, depth - depth // 8)
        if depth > 1 and left[Operation.WRITE] and len(flying) == depth:
            assert Operation.WRITE in kinds
        if any(piece.request.operation == Operation.WRITE for piece in taken) and left[Operation.READ]:
            assert kinds.count(Operation.WRITE) == 1
        random.shuffle(flying)
        for piece in [flying.pop() for _ in range(random.randint(1, len(flying)))]:
            with queue.condition:
                queue.ended(piece.request.operation)
            piece.request.end_piece(piece.number, BlockStatus.OK)
    assert all(job.ok() for job in jobs)
    assert queue.waiting() == 0


def test_auto_falls_back_to_threads_when_io_uring_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    import liburing

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(liburing, "io_uring_queue_init", refuse)
    available, reason = uring.io_uring_available()
    assert not available
    assert "seccomp" in reason
    engine, why = open_engine("auto", 4)
    assert engine.name == "threads"
    assert why == reason
    assert engine.close()
    with pytest.raises(StorageError, match="seccomp"):
        open_engine("io_uring", 4)


def test_open_engine_follows_the_setting() -> None:
    for kind, names in (("threads", {"threads"}), ("auto", {"io_uring" if AVAILABLE else "threads"})):
        engine, reason = open_engine(kind, 4)
        assert engine.name in names
        assert reason
        assert engine.close()
    with pytest.raises(ConfigError):
        open_engine("libaio", 4)


def test_the_null_engine_moves_nothing() -> None:
    buffer = BlockBuffer(2, 4096, 9)
    engine = NullBlockIO()
    assert run(engine, Operation.READ, -1, i64(0, 1), buffer.addresses, i64(4096, 4096)) == [0, 0]
    assert (buffer.memory == 9).all()
    assert engine.sync(-1) == BlockStatus.OK
    assert engine.close()
