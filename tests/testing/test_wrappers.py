"""The wrappers do what they say: a test that trusts a fault that never comes proves nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tierkv.io import Operation, PosixBlockIO
from tierkv.jobs import Job
from tierkv.keys import Keyspace
from tierkv.testing.buffers import BlockBuffer, block_payload, make_space, random_hashes
from tierkv.testing.faults import FaultKind, FaultPlan, FaultyBlockIO, FaultyTier, Gate, damage_file
from tierkv.testing.memory_tier import MemoryMedium, MemoryTier
from tierkv.testing.model import LruModel, ModelStore, Presence
from tierkv.testing.wrappers import CountingTier, LatencyTier
from tierkv.tiers.base import Batch, Tier
from tierkv.types import BlockStatus, HashArray

TIMEOUT_S = 20.0
OK, MISS, CORRUPT, IO_ERROR, NO_SPACE, CANCELLED = (
    int(status)
    for status in (
        BlockStatus.OK,
        BlockStatus.MISS,
        BlockStatus.CORRUPT,
        BlockStatus.IO_ERROR,
        BlockStatus.NO_SPACE,
        BlockStatus.CANCELLED,
    )
)
SPACE = make_space(5000)


class Bench:
    """A memory tier inside a faulty one, and four blocks."""

    def __init__(self) -> None:
        self.medium = MemoryMedium()
        self.tier = FaultyTier(MemoryTier(1 << 20, self.medium), damage=self.damage)
        self.hashes = random_hashes(4, 1)
        slots = self.tier.allocate(SPACE, 4)
        assert slots is not None
        self.slots = slots
        self.buffer = BlockBuffer(4, SPACE.block_bytes)

    def damage(self, batch: Batch, position: int, kind: FaultKind) -> None:
        block = self.medium.blocks[batch.space.digest, batch.hashes[position].tobytes()]
        block.data = block.data[:2000] + bytes(3000) if kind is FaultKind.TORN else b"\xff" + block.data[1:]

    def batch(self) -> Batch:
        return Batch(SPACE, self.hashes, self.slots, self.buffer.addresses, np.full(4, 5000, np.int64))

    def write(self) -> Job:
        for position, row in enumerate(self.hashes):
            self.buffer.put(position, block_payload(SPACE, row.tobytes()))
        return self.tier.submit_write(self.batch())

    def read(self) -> Job:
        return self.tier.submit_read(self.batch())


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.tier.close()


def ended(job: Job) -> list[int]:
    assert job.wait(TIMEOUT_S)
    return job.status.tolist()


@pytest.mark.parametrize(("kind", "status"), [(FaultKind.IO_ERROR, IO_ERROR), (FaultKind.NO_SPACE, NO_SPACE)])
def test_a_block_fails_alone_and_leaves_nothing(bench: Bench, kind: FaultKind, status: int) -> None:
    bench.tier.plan.fail_next("write", kind, blocks=[1, 3])
    assert ended(bench.write()) == [OK, status, OK, status]
    assert ended(bench.read()) == [OK, MISS, OK, MISS]
    assert bench.tier.plan.injected[kind] == 2
    assert ended(bench.write()) == [OK] * 4
    bench.tier.plan.fail_next("read", kind, blocks=[0])
    assert ended(bench.read()) == [status, OK, OK, OK]
    assert ended(bench.read()) == [OK] * 4


@pytest.mark.parametrize("kind", [FaultKind.TORN, FaultKind.FLIPPED])
def test_damage_reaches_the_medium_after_the_write_was_ok(bench: Bench, kind: FaultKind) -> None:
    bench.tier.plan.fail_next("write", kind, blocks=[2])
    assert ended(bench.write()) == [OK] * 4
    assert ended(bench.read()) == [OK, OK, CORRUPT, OK]


def test_a_stalled_write_happens_when_it_is_released(bench: Bench) -> None:
    bench.tier.plan.fail_next("write", FaultKind.STALL, blocks=[0])
    job = bench.write()
    assert bench.tier.gate.wait_held()
    assert not job.done()
    assert ended(bench.read()) == [MISS, OK, OK, OK]
    assert bench.tier.gate.release() == 1
    assert ended(job) == [OK] * 4
    assert ended(bench.read()) == [OK] * 4


def test_a_late_write_has_happened_but_says_so_later(bench: Bench) -> None:
    bench.tier.plan.fail_next("write", FaultKind.LATE)
    job = bench.write()
    assert bench.tier.gate.wait_held()
    assert not job.done()
    assert ended(bench.read()) == [OK] * 4
    bench.tier.gate.release()
    assert ended(job) == [OK] * 4


def test_a_lost_answer_comes_with_close(bench: Bench) -> None:
    bench.tier.plan.fail_next("write", FaultKind.LOST)
    job = bench.write()
    assert bench.tier.gate.wait_held()
    bench.tier.gate.release()
    assert not job.done()
    bench.tier.close()
    assert ended(job) == [CANCELLED] * 4


def test_what_is_held_is_cancelled_by_close(bench: Bench) -> None:
    for kind in (FaultKind.STALL, FaultKind.LATE, FaultKind.LOST):
        bench.tier.plan.fail_next("write", kind)
    jobs = [bench.write() for _ in range(3)]
    assert bench.tier.gate.wait_held(3)
    bench.tier.close()
    assert [ended(job) for job in jobs] == [[CANCELLED] * 4] * 3


def test_refusals_are_counted_down_or_last_until_healed(bench: Bench) -> None:
    bench.tier.plan.fail_next("allocate", FaultKind.REFUSE, calls=2)
    assert bench.tier.allocate(SPACE, 1) is None
    assert bench.tier.allocate(SPACE, 1) is None
    assert bench.tier.allocate(SPACE, 1) is not None
    bench.tier.plan.fail_always("allocate", FaultKind.REFUSE)
    assert bench.tier.available(SPACE) == 0
    assert bench.tier.allocate(SPACE, 1) is None
    bench.tier.plan.heal()
    assert bench.tier.available(SPACE) > 0
    assert bench.tier.allocate(SPACE, 1) is not None


def test_random_faults_repeat_with_their_seed() -> None:
    def outcome(seed: int) -> list[list[bool]]:
        plan = FaultPlan()
        plan.fail_randomly(seed, 0.3, [("write", FaultKind.IO_ERROR), ("write", FaultKind.NO_SPACE)])
        return [[bool(mask[k]) for _, mask in plan.decide("write", 50) for k in range(50)] for _ in range(5)]

    assert outcome(1) == outcome(1) != outcome(2)
    hits = sum(sum(masks) for masks in outcome(3))
    assert 25 < hits < 150


def test_a_gate_that_is_closed_holds_nothing() -> None:
    gate, calls = Gate(), []
    gate.hold(lambda: calls.append("go"), lambda: calls.append("cancel"))
    gate.hold(lambda: calls.append("go"), lambda: calls.append("cancel"))
    assert gate.release(1) == 1
    gate.close()
    gate.hold(lambda: calls.append("go"), lambda: calls.append("cancel"))
    assert calls == ["go", "cancel", "cancel"]
    assert not gate.wait_held(1, timeout_s=0)


def test_health_can_be_taken_away(bench: Bench) -> None:
    assert bench.tier.healthy()
    bench.tier.unhealthy = True
    assert not bench.tier.healthy()


def test_counting(bench: Bench) -> None:
    bench.tier.plan.fail_next("write", FaultKind.IO_ERROR, blocks=[0])
    counting = CountingTier(bench.tier)
    bench.tier = counting  # type: ignore[assignment]
    ended(bench.write())
    ended(bench.read())
    counts = counting.counts
    assert (counts["write_blocks"], counts["write_OK"], counts["write_IO_ERROR"]) == (4, 3, 1)
    assert (counts["read_blocks"], counts["read_bytes"], counts["read_MISS"]) == (4, 20_000, 1)
    assert (counting.in_flight, counting.most_in_flight) == (0, 1)


def test_latency_delays_the_answer_and_close_does_not_wait_for_it() -> None:
    inner = MemoryTier(1 << 20)
    slow: Tier = LatencyTier(inner, 3600.0)
    hashes = random_hashes(1, 2)
    slots = slow.allocate(SPACE, 1)
    assert slots is not None
    buffer = BlockBuffer(1, 5000)
    job = slow.submit_write(Batch(SPACE, hashes, slots, buffer.addresses, np.full(1, 5000, np.int64)))
    assert not job.wait(0.05)
    slow.close()
    assert job.wait(TIMEOUT_S)


# The I/O engine.


@pytest.mark.parametrize("operation", [Operation.READ, Operation.WRITE])
@pytest.mark.parametrize("kind", [kind for kind in FaultKind if kind is not FaultKind.REFUSE])
def test_an_engine_fails_as_told(tmp_path: Path, operation: Operation, kind: FaultKind) -> None:
    engine = FaultyBlockIO(PosixBlockIO(4))
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        content = np.random.default_rng(0).bytes(3 * 4096)
        os.pwrite(fd, content if operation is Operation.READ else bytes(len(content)), 0)
        buffer = BlockBuffer(3, 4096, fill=0)
        if operation is Operation.WRITE:
            for position in range(3):
                buffer.put(position, content[position * 4096 : (position + 1) * 4096])
        word = "read" if operation is Operation.READ else "write"
        engine.plan.fail_next(word, kind, blocks=[1])
        job = engine.submit(
            operation, fd, np.arange(3, dtype=np.int64) * 4096, buffer.addresses, np.full(3, 4096, np.int64)
        )
        held = kind in {FaultKind.STALL, FaultKind.LATE, FaultKind.LOST}
        if held:
            assert engine.gate.wait_held()
            assert not job.done()
            engine.gate.release()
            if kind is FaultKind.LOST:
                assert not job.done()
                engine.close()
        expected = {
            FaultKind.IO_ERROR: IO_ERROR,
            FaultKind.NO_SPACE: NO_SPACE,
            FaultKind.LOST: CANCELLED,
        }.get(kind, OK)
        assert ended(job) == [OK, expected, OK]
        result = [
            buffer.get(position) if operation is Operation.READ else os.pread(fd, 4096, position * 4096)
            for position in range(3)
        ]
        whole = [content[position * 4096 : (position + 1) * 4096] for position in range(3)]
        right = [one == other for one, other in zip(result, whole, strict=True)]
        arrives = kind in {FaultKind.STALL, FaultKind.LATE, FaultKind.LOST}
        assert right == [True, arrives, True]
    finally:
        engine.close()
        os.close(fd)


def test_sync_can_fail(tmp_path: Path) -> None:
    engine = FaultyBlockIO(PosixBlockIO(1))
    with open(tmp_path / "file", "wb") as file:
        assert engine.sync(file.fileno()) == BlockStatus.OK
        engine.sync_status = BlockStatus.IO_ERROR
        assert engine.sync(file.fileno()) == BlockStatus.IO_ERROR
    engine.close()


def test_damage_to_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    damage_file(path, FaultKind.FLIPPED, 10, 20)
    changed = [k for k, byte in enumerate(path.read_bytes()) if byte != k]
    assert changed == [20]
    damage_file(path, FaultKind.TORN, 50, 50)
    assert path.read_bytes()[75:] == bytes(25)
    damage_file(path, FaultKind.TORN)
    assert path.stat().st_size == 50


# The models.


def hashes_named(*numbers: int) -> HashArray:
    return np.concatenate([random_hashes(1, number) for number in numbers])


def test_the_model_refuses_what_cannot_be(bench: Bench) -> None:
    space: Keyspace = make_space(96, parts=2)
    model = ModelStore(save_timeout_s=60.0)
    hashes = hashes_named(1, 2)
    with pytest.raises(AssertionError, match="must not be found"):
        model.check_match(space, hashes, 1)
    model.saved(space, hashes, 0, [OK, OK], 0.0)
    with pytest.raises(AssertionError, match="must not be found"):
        model.check_load(space, hashes, [OK, OK])
    model.saved(space, hashes, 1, [OK, int(BlockStatus.DROPPED)], 1.0)
    model.check_load(space, hashes, [OK, MISS])
    model.check_load(space, hashes, [MISS, MISS])
    with pytest.raises(AssertionError, match="CORRUPT"):
        model.check_load(space, hashes, [CORRUPT, MISS])
    model.leased(space, hashes, np.array([True, False]))
    with pytest.raises(AssertionError, match="must be found"):
        model.check_load(space, hashes, [MISS, MISS])
    model.lease_ended(space, hashes, np.array([True, False]))
    model.check_load(space, hashes, [MISS, MISS])
    model.removed(space, hashes)
    with pytest.raises(AssertionError, match="must not be found"):
        model.check_lookup(space, hashes, np.array([2, 0], np.uint8))


def test_the_model_forgets_parts_that_expired() -> None:
    space, hashes = make_space(96, parts=2), hashes_named(1)
    model = ModelStore(save_timeout_s=60.0, lossless=True)
    model.saved(space, hashes, 0, [OK], 0.0)
    model.saved(space, hashes, 1, [OK], 100.0)
    assert model.presence(space, hashes[0].tobytes()) is Presence.MUST_NOT
    model.saved(space, hashes, 0, [OK], 110.0)
    assert model.presence(space, hashes[0].tobytes()) is Presence.MUST


def test_the_lru_model_loses_the_oldest_tail_first() -> None:
    keys = [(b"space", bytes([number])) for number in range(8)]
    model = LruModel(4)
    assert model.save(keys[:3]) == [True] * 3
    model.save(keys[3:5])
    assert [key in model for key in keys[:5]] == [True, True, False, True, True]
    model.pin([keys[1]])
    model.save(keys[5:8])
    assert [key in model for key in keys] == [False, True, False, False, False, True, True, True]
    assert model.match(keys[5:8]) == 3
    assert model.save([(b"space", bytes([number])) for number in range(20, 30)]) == [True] * 3 + [False] * 7


def test_nothing_here_leaves_threads() -> None:
    before = threading.active_count()
    tier = LatencyTier(MemoryTier(1 << 20), 0.0)
    tier.close()
    assert threading.active_count() == before
