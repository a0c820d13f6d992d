"""Tiers and I/O engines that fail on demand. Production code has no hooks; tests wrap the real parts.

The faults, and what each part must survive:

IO_ERROR (EIO, EMFILE)  The tier reports IO_ERROR for those blocks alone. The store answers those loads
                        IO_ERROR or from another tier, drops the copy of a failed write, and keeps the
                        rest readable.
NO_SPACE (ENOSPC)       The tier reports NO_SPACE for those blocks alone. The store frees their slots, goes on
                        reading, and writes again once it heals.
STALL                   Nothing happens until release(); then the operation is really done. The store answers
                        TIMEOUT at the load's deadline, keeps its pins until the end, and never lets a load
                        wait behind a stalled save.
LATE                    The medium is done, but says so only at release(). The same, and no byte that arrived
                        after a deadline is trusted.
LOST                    No answer until close(), then CANCELLED. The store settles its own jobs at their
                        deadlines and holds no pin after close.
TORN (power cut)        The tier reports OK, but only the head of the block reached the medium. The next read
                        says CORRUPT or MISS, never OK with wrong bytes.
FLIPPED (bit rot)       The tier reports OK, but one bit changes on the medium. The same.
REFUSE                  allocate() answers None. The store evicts and asks again, or drops the save; it never
                        fails or blocks the caller.

An I/O engine (FaultyBlockIO) has all but REFUSE, with the same meaning for operations on a file: the tier
above must report the block's fault and leave nothing of it behind, and its checksums must find what TORN and
FLIPPED did.

Thread safety: everything may be called from any thread. Tests order events with wait_held() and release(),
never with sleeps.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import numpy as np

from tierkv.io.base import BlockIO
from tierkv.io.base import Operation as IoOperation
from tierkv.jobs import Job
from tierkv.keys import Keyspace
from tierkv.testing.wrappers import TierWrapper, positions_of
from tierkv.tiers.base import Batch, Tier
from tierkv.types import BlockStatus, BoolArray, Int64Array, SlotArray

Operation = Literal["read", "write", "allocate"]


class FaultKind(Enum):
    """What goes wrong; the table at the head of this module says what must come of it."""

    IO_ERROR = "io-error"
    NO_SPACE = "no-space"
    STALL = "stall"
    LATE = "late"
    LOST = "lost"
    TORN = "torn"
    FLIPPED = "flipped"
    REFUSE = "refuse"


_AT_ONCE = {FaultKind.IO_ERROR: BlockStatus.IO_ERROR, FaultKind.NO_SPACE: BlockStatus.NO_SPACE}
_DAMAGE = (FaultKind.TORN, FaultKind.FLIPPED)


@dataclass(slots=True)
class _Rule:
    """One fault to come. calls: how many matching calls it still hits (None: all). blocks: positions."""

    operation: Operation
    kind: FaultKind
    calls: int | None
    blocks: tuple[int, ...] | None


class FaultPlan:
    """Which calls fail and how: scripted rules first, then random ones from a seed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[_Rule] = []
        self._random: np.random.Generator | None = None
        self._rate = 0.0
        self._kinds: tuple[tuple[Operation, FaultKind], ...] = ()
        self.injected: dict[FaultKind, int] = dict.fromkeys(FaultKind, 0)
        """Blocks (for REFUSE: calls) that were hit."""

    def fail_next(
        self, operation: Operation, kind: FaultKind, calls: int = 1, blocks: Sequence[int] | None = None
    ) -> None:
        """The next `calls` calls of `operation` fail; blocks: only at these positions of the batch."""
        with self._lock:
            self._rules.append(_Rule(operation, kind, calls, None if blocks is None else tuple(blocks)))

    def fail_always(self, operation: Operation, kind: FaultKind) -> None:
        """Every call of `operation` fails until heal()."""
        with self._lock:
            self._rules.append(_Rule(operation, kind, None, None))

    def fail_randomly(self, seed: int, rate: float, kinds: Sequence[tuple[Operation, FaultKind]]) -> None:
        """Each block (for REFUSE: each call) fails with probability `rate`, in one of the `kinds`."""
        with self._lock:
            self._random, self._rate, self._kinds = np.random.default_rng(seed), rate, tuple(kinds)

    def heal(self) -> None:
        """Forgets every rule. Jobs that are held stay held."""
        with self._lock:
            self._rules.clear()
            self._random = None

    def refuses(self) -> bool:
        """Whether allocate() is told to refuse until heal()."""
        with self._lock:
            return any(rule.kind is FaultKind.REFUSE and rule.calls is None for rule in self._rules)

    def decide(self, operation: Operation, count: int) -> list[tuple[FaultKind, BoolArray]]:
        """The faults of one call: disjoint masks (count,) bool of the blocks hit."""
        with self._lock:
            for rule in self._rules:
                if rule.operation != operation or rule.calls == 0:
                    continue
                if rule.calls is not None:
                    rule.calls -= 1
                mask = np.ones(count, np.bool_)
                if rule.blocks is not None:
                    mask[:] = False
                    mask[[position for position in rule.blocks if position < count]] = True
                self.injected[rule.kind] += 1 if rule.kind is FaultKind.REFUSE else int(mask.sum())
                return [(rule.kind, mask)]
            kinds = [kind for at, kind in self._kinds if at == operation]
            if self._random is None or not kinds:
                return []
            hit = self._random.random(count) < self._rate
            which = self._random.integers(0, len(kinds), count)
            found = [(kind, hit & (which == number)) for number, kind in enumerate(kinds)]
            for kind, mask in found:
                self.injected[kind] += int(mask.sum())
            return [(kind, mask) for kind, mask in found if mask.any()]


class Gate:
    """Holds what must not happen yet: each entry has an action for release() and one for cancel()."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self._closed = False

    def hold(self, go: Callable[[], None], cancel: Callable[[], None]) -> None:
        """Keeps an entry; if the gate was closed already, `cancel` runs now."""
        with self._changed:
            if not self._closed:
                self._held.append((go, cancel))
                self._changed.notify_all()
                return
        cancel()

    def hold_until_close(self, cancel: Callable[[], None]) -> None:
        """Keeps an entry that release() does not let go."""
        self.hold(lambda: self.hold_until_close(cancel), cancel)

    def held(self) -> int:
        """Entries that wait."""
        with self._changed:
            return len(self._held)

    def wait_held(self, count: int = 1, timeout_s: float = 20.0) -> bool:
        """Waits until `count` entries are held; False when `timeout_s` passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._held) >= count, timeout_s)

    def release(self, count: int | None = None) -> int:
        """Lets the oldest `count` entries (None: all) go, on this thread; returns how many went."""
        with self._changed:
            number = len(self._held) if count is None else min(count, len(self._held))
            going, self._held = self._held[:number], self._held[number:]
        for go, _ in going:
            go()
        return number

    def close(self) -> None:
        """Cancels every entry, and whatever is held later."""
        with self._changed:
            self._closed = True
            ending, self._held = self._held, []
        for _, cancel in ending:
            cancel()


DamageBlock = Callable[[Batch, int, FaultKind], None]
"""(batch, position, TORN or FLIPPED): damages on the medium the block that was just written."""


class FaultyTier(TierWrapper):
    """A tier that fails as `plan` says. damage: how TORN and FLIPPED reach the medium."""

    def __init__(self, inner: Tier, plan: FaultPlan | None = None, damage: DamageBlock | None = None) -> None:
        super().__init__(inner)
        self.plan = FaultPlan() if plan is None else plan
        self.gate = Gate()
        self.unhealthy = False
        """Set to make healthy() answer False."""
        self._damage = damage

    def allocate(self, space: Keyspace, count: int) -> SlotArray | None:
        if any(kind is FaultKind.REFUSE for kind, _ in self.plan.decide("allocate", 1)):
            return None
        return self.inner.allocate(space, count)

    def available(self, space: Keyspace) -> int:
        return 0 if self.plan.refuses() else self.inner.available(space)

    def submit_write(self, batch: Batch) -> Job:
        return self._submit("write", batch, self.inner.submit_write)

    def submit_read(self, batch: Batch) -> Job:
        return self._submit("read", batch, self.inner.submit_read)

    def _submit(self, operation: Operation, batch: Batch, submit: Callable[[Batch], Job]) -> Job:
        faults = self.plan.decide(operation, batch.count)
        if not faults:
            return submit(batch)
        job = Job(batch.count)
        healthy = np.ones(batch.count, np.bool_)
        for _, mask in faults:
            healthy &= ~mask
        if healthy.any():
            self._forward(job, positions_of(healthy), batch, submit)
        for kind, mask in faults:
            self._fail(kind, job, positions_of(mask), batch, submit)
        return job

    def _fail(
        self, kind: FaultKind, job: Job, positions: Int64Array, batch: Batch, submit: Callable[[Batch], Job]
    ) -> None:
        def cancel() -> None:
            job.settle(positions, BlockStatus.CANCELLED)

        if kind in _AT_ONCE:
            job.settle(positions, _AT_ONCE[kind])
        elif kind is FaultKind.STALL:
            self.gate.hold(lambda: self._forward(job, positions, batch, submit), cancel)
        elif kind is FaultKind.LATE:
            submit(batch.select(positions)).add_done_callback(
                lambda inner: self.gate.hold(lambda: job.settle(positions, inner.status), cancel)
            )
        elif kind is FaultKind.LOST:
            submit(batch.select(positions)).add_done_callback(lambda _: self.gate.hold_until_close(cancel))
        elif kind in _DAMAGE:
            self._forward(job, positions, batch, submit, kind)
        else:
            raise ValueError(f"{kind} is no fault of reads and writes")

    def _forward(
        self,
        job: Job,
        positions: Int64Array,
        batch: Batch,
        submit: Callable[[Batch], Job],
        damage: FaultKind | None = None,
    ) -> None:
        def ended(inner: Job) -> None:
            if damage is not None:
                assert self._damage is not None, f"{damage} needs FaultyTier(..., damage=...)"
                for number in np.flatnonzero(inner.status == BlockStatus.OK).tolist():
                    self._damage(batch, int(positions[number]), damage)
            job.settle(positions, inner.status)

        try:
            inner_job = submit(batch.select(positions))
        except BaseException:
            job.settle(positions, BlockStatus.CANCELLED)
            raise
        inner_job.add_done_callback(ended)

    def healthy(self) -> bool:
        return not self.unhealthy and self.inner.healthy()

    def close(self) -> None:
        self.gate.close()
        self.inner.close()


@dataclass(slots=True, eq=False)
class _Request:
    """One submit() call, parts of which are passed on."""

    engine: BlockIO
    operation: IoOperation
    fd: int
    offsets: Int64Array
    addresses: Int64Array
    lengths: Int64Array
    job: Job

    def forward(self, positions: Int64Array, ended: Callable[[Job], None] | None = None) -> None:
        def settle(inner: Job) -> None:
            self.job.settle(positions, inner.status)

        p = positions
        arrays = (self.offsets[p], self.addresses[p], self.lengths[p])
        self.engine.submit(self.operation, self.fd, *arrays).add_done_callback(ended or settle)

    def damage(self, kind: FaultKind, positions: Int64Array, inner: Job) -> None:
        for position in positions.tolist():
            length = int(self.lengths[position])
            if self.operation == IoOperation.READ:
                _damage_memory(int(self.addresses[position]), length, kind)
            else:
                damage_file(f"/proc/self/fd/{self.fd}", kind, int(self.offsets[position]), length)
        self.job.settle(positions, inner.status)


class FaultyBlockIO:
    """An I/O engine that fails as `plan` says; faults of a batch hit whole operations of it."""

    def __init__(self, inner: BlockIO, plan: FaultPlan | None = None) -> None:
        self.inner = inner
        self.plan = FaultPlan() if plan is None else plan
        self.gate = Gate()
        self.sync_status: BlockStatus | None = None
        """Set to make sync() answer this."""

    @property
    def name(self) -> str:
        return self.inner.name

    def submit(
        self, operation: IoOperation, fd: int, offsets: Int64Array, addresses: Int64Array, lengths: Int64Array
    ) -> Job:
        faults = self.plan.decide("read" if operation == IoOperation.READ else "write", len(offsets))
        if not faults:
            return self.inner.submit(operation, fd, offsets, addresses, lengths)
        request = _Request(self.inner, operation, fd, offsets, addresses, lengths, Job(len(offsets)))
        healthy = np.ones(len(offsets), np.bool_)
        for _, mask in faults:
            healthy &= ~mask
        if healthy.any():
            request.forward(positions_of(healthy))
        for kind, mask in faults:
            self._fail(kind, request, positions_of(mask))
        return request.job

    def _fail(self, kind: FaultKind, request: _Request, positions: Int64Array) -> None:
        job = request.job

        def cancel() -> None:
            job.settle(positions, BlockStatus.CANCELLED)

        def late(inner: Job) -> None:
            self.gate.hold(lambda: job.settle(positions, inner.status), cancel)

        if kind in _AT_ONCE:
            job.settle(positions, _AT_ONCE[kind])
        elif kind is FaultKind.STALL:
            self.gate.hold(lambda: request.forward(positions), cancel)
        elif kind is FaultKind.LATE:
            request.forward(positions, late)
        elif kind is FaultKind.LOST:
            request.forward(positions, lambda _: self.gate.hold_until_close(cancel))
        elif kind in _DAMAGE:
            request.forward(positions, lambda inner: request.damage(kind, positions, inner))
        else:
            raise ValueError(f"{kind} is no fault of an I/O engine")

    def sync(self, fd: int) -> BlockStatus:
        return self.inner.sync(fd) if self.sync_status is None else self.sync_status

    def waiting(self) -> int:
        return self.inner.waiting() + self.gate.held()

    def close(self, timeout_s: float = 10.0) -> bool:
        self.gate.close()
        return self.inner.close(timeout_s)


def _damage_memory(address: int, length: int, kind: FaultKind) -> None:
    view = (ctypes.c_ubyte * length).from_address(address)
    if kind is FaultKind.FLIPPED:
        view[length // 2] ^= 0x10
    else:
        ctypes.memset(address + length // 2, 0, length - length // 2)


def damage_file(
    path: str | os.PathLike[str], kind: FaultKind, offset: int = 0, length: int | None = None
) -> None:
    """Damages `length` bytes (None: to the end) of a file from `offset` on.

    FLIPPED turns one bit in the middle. TORN sets the second half to zeros, as when only the head was
    written, or, without a length, cuts the file short.
    """
    fd = os.open(path, os.O_RDWR)
    try:
        size = os.fstat(fd).st_size
        end = size if length is None else min(offset + length, size)
        middle = offset + (end - offset) // 2
        if kind is FaultKind.FLIPPED:
            byte = os.pread(fd, 1, middle)
            os.pwrite(fd, bytes([byte[0] ^ 0x10]), middle)
        elif kind is FaultKind.TORN and length is None:
            os.ftruncate(fd, middle)
        elif kind is FaultKind.TORN:
            os.pwrite(fd, bytes(end - middle), middle)
        else:
            raise ValueError(f"{kind} does not damage a medium")
        os.fsync(fd)
    finally:
        os.close(fd)
