"""What the tests of staging share: caches as engines lay them out, a store whose answers the test gives, and a device
whose work waits for the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from tierkv.adapters.vllm.device import HostDevice
from tierkv.adapters.vllm.identity import Shard
from tierkv.adapters.vllm.layout import GroupCache, describe_group
from tierkv.adapters.vllm.staging import SLOTS, DevicePath, Staging
from tierkv.config import DramConfig, StoreConfig
from tierkv.fragments import Fragments
from tierkv.jobs import Job
from tierkv.keys import Keyspace
from tierkv.store import Store
from tierkv.testing.buffers import make_spec
from tierkv.types import BlockStatus, HashArray, Int64Array

TIMEOUT_S = 30.0
SHARD = Shard(parts=1, part=0, writes=True)


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Waits for what another thread brings about without telling anyone."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"did not happen within {TIMEOUT_S} s: {what}"
        time.sleep(0.001)


def hashes_of(*numbers: int) -> HashArray:
    """One hash a number."""
    made = np.zeros((len(numbers), 32), np.uint8)
    made.view(np.int64)[:, 0] = numbers
    return made


@dataclass(frozen=True)
class Layout:
    """A cache's form. axes: sizes of layer, block and what is within; order: how these axes lie in memory."""

    axes: tuple[int, ...]
    order: tuple[int, ...]
    padding: tuple[int, ...]
    """What each axis has in memory beyond its size."""
    dtype: torch.dtype
    together: bool
    """Whether all layers are views of one allocation."""

    @property
    def blocks(self) -> int:
        """The cache's blocks."""
        return self.axes[1]

    def make(self, seed: int) -> tuple[GroupCache, list[torch.Tensor]]:
        """(the cache, its allocations as bytes), full of random bytes."""
        generator = np.random.default_rng(seed)
        allocations: list[torch.Tensor] = []

        def allocate(axes: list[int], order: list[int], padding: list[int]) -> torch.Tensor:
            shape = [axes[axis] + padding[axis] for axis in order]
            count = int(np.prod(shape)) * self.dtype.itemsize
            raw = torch.from_numpy(generator.integers(0, 256, count, np.uint8)).clone()
            allocations.append(raw)
            whole = raw.view(self.dtype).view(shape).permute([order.index(axis) for axis in range(len(axes))])
            return whole[tuple(slice(size) for size in axes)]

        axes, order, padding = list(self.axes), list(self.order), list(self.padding)
        if self.together:
            layers = list(allocate(axes, order, padding))
        else:
            order = [axis - 1 for axis in order if axis]
            layers = [allocate(axes[1:], order, padding[1:]) for _ in range(axes[0])]
        names = [f"layers.{number}" for number in range(len(layers))]
        return describe_group(names, dict(zip(names, layers, strict=True)), self.blocks), allocations


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any order of axes, padded anywhere."""
    within = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    axes = (draw(st.integers(1, 4)), draw(st.integers(2, 9)), *within)
    order = draw(st.permutations(range(len(axes))))
    padding = draw(st.lists(st.integers(0, 2), min_size=len(axes), max_size=len(axes)))
    dtype = draw(st.sampled_from([torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.int64]))
    return Layout(axes, tuple(order), tuple(padding), dtype, draw(st.booleans()))


PLAIN = Layout((2, 24, 2, 4, 8), (0, 1, 2, 3, 4), (0, 0, 0, 0, 0), torch.float16, True)
"""A block of 256 bytes, 24 of them."""


def block_bytes(cache: GroupCache, allocations: list[torch.Tensor], block: int) -> bytes:
    """A block's bytes, piece by piece, read without any of the code under test."""
    found = b""
    for base, stride, length in zip(cache.bases, cache.strides, cache.lengths, strict=True):
        address = int(base + block * stride)
        (raw,) = [raw for raw in allocations if raw.data_ptr() <= address < raw.data_ptr() + raw.numel()]
        begin = address - raw.data_ptr()
        found += raw[begin : begin + int(length)].numpy().tobytes()
    return found


def open_store(blocks: int = 512) -> Store:
    """A store in DRAM."""
    return Store(StoreConfig(dram=DramConfig(capacity_bytes=max(blocks * 4096, 1 << 20), slab_bytes=65536)))


def open_space(store: Store, cache: GroupCache) -> Keyspace:
    """The cache's keyspace."""
    return store.open(make_spec(part_bytes=(cache.block_bytes,)))


def staging_bytes(cache: GroupCache, blocks_a_slot: int) -> int:
    """Enough for slots of at least so many blocks of this cache."""
    return 2 * SLOTS * (cache.block_bytes * blocks_a_slot + 64 * len(cache.bases) + 64)


@dataclass(eq=False)
class Asked:
    """A job that the store was asked for, until the test ends it."""

    hashes: HashArray
    memory: Fragments
    timeout_s: float
    job: Job = field(init=False)

    def __post_init__(self) -> None:
        self.job = Job(len(self.hashes))

    def rows(self) -> list[np.ndarray]:
        """The memory, a block each, as (bytes,) arrays of its pieces one after the other."""
        return [
            np.concatenate([self._piece(piece, row) for piece in range(len(self.memory.bases))])
            for row in range(self.memory.count)
        ]

    def write(self, contents: Callable[[int], bytes]) -> None:
        """Writes contents(number of the hash) to every block's memory."""
        for row, number in enumerate(self.numbers()):
            data, at = np.frombuffer(contents(number), np.uint8), 0
            for piece in range(len(self.memory.bases)):
                part = self._piece(piece, row)
                part[:] = data[at : at + len(part)]
                at += len(part)

    def numbers(self) -> list[int]:
        """The numbers that the hashes were made of."""
        found: list[int] = self.hashes.view(np.int64)[:, 0].tolist()
        return found

    def _piece(self, piece: int, row: int) -> np.ndarray:
        memory = self.memory
        address = int(memory.bases[piece] + memory.block_ids[row] * memory.strides[piece])
        (host,) = memory.owners
        begin, length = address - host.data_ptr(), int(memory.lengths[piece])
        assert begin >= 0
        assert begin + length <= host.numel()
        view: np.ndarray = host.numpy()[begin : begin + length]
        return view


class ScriptedStore:
    """Jobs stay open until the test ends them; `answer`, if set, is called with each as it comes."""

    attached = True

    def __init__(self) -> None:
        self.loads: list[Asked] = []
        self.saves: list[Asked] = []
        self.answer: Callable[[Asked], None] | None = None
        self.problem: Exception | None = None

    def _ask(self, asked: list[Asked], hashes: HashArray, memory: Fragments, timeout_s: float | None) -> Job:
        if self.problem is not None:
            raise self.problem
        assert timeout_s is not None
        assert timeout_s > 0
        one = Asked(hashes, memory, timeout_s)
        if self.answer is not None:
            self.answer(one)
        asked.append(one)
        return one.job

    def load(
        self, space: Any, hashes: HashArray, into: Fragments, part: int = 0, timeout_s: float | None = None
    ) -> Job:
        """Asks for blocks."""
        return self._ask(self.loads, hashes, into, timeout_s)

    def save(
        self, space: Any, hashes: HashArray, from_: Fragments, part: int = 0, timeout_s: float | None = None
    ) -> Job:
        """Hands blocks over."""
        return self._ask(self.saves, hashes, from_, timeout_s)


class GatedDevice(HostDevice):
    """While `busy`, what the engine has ordered is not done: marks wait until the test opens them."""

    def __init__(self) -> None:
        self.busy = False
        self.marks: list[threading.Event] = []

    def mark(self) -> threading.Event:
        """A mark that stays closed while the device is busy."""
        mark = super().mark()
        if self.busy:
            mark.clear()
            self.marks.append(mark)
        return mark

    def finish(self) -> None:
        """The engine's work is done."""
        self.busy = False
        for mark in self.marks:
            mark.set()


@dataclass(eq=False)
class Rig:
    """A cache on a gated device, staged to a scripted store."""

    store: ScriptedStore
    device: GatedDevice
    staging: Staging
    path: DevicePath
    cache: GroupCache
    allocations: list[torch.Tensor]

    def block(self, number: int) -> bytes:
        """A block's bytes."""
        return block_bytes(self.cache, self.allocations, number)

    def blocks(self) -> list[bytes]:
        """Those of all blocks."""
        return [self.block(number) for number in range(self.cache.blocks)]

    def fill(self, value: int) -> None:
        """Overwrites the whole cache."""
        for raw in self.allocations:
            raw.fill_(value)


def content(size: int) -> Callable[[int], bytes]:
    """What the scripted store has under a number."""
    return lambda number: np.random.default_rng(number).integers(0, 256, size, np.uint8).tobytes()


def ids(*numbers: int) -> Int64Array:
    """Block ids."""
    return np.array(numbers, np.int64)


def complete(contents: Callable[[int], bytes], *lost: int) -> Callable[[Asked], None]:
    """An answer to loads: all blocks come but the lost ones, which are misses."""

    def answer(asked: Asked) -> None:
        asked.write(contents)
        missing = np.isin(asked.numbers(), lost)
        asked.job.settle(slice(None), np.where(missing, BlockStatus.MISS, BlockStatus.OK).astype(np.uint8))

    return answer


@contextmanager
def rig(blocks_a_slot: int = 2, layout: Layout = PLAIN) -> Iterator[Rig]:
    """A rig with slots of so many blocks."""
    cache, allocations = layout.make(1)
    store, device = ScriptedStore(), GatedDevice()
    staging = Staging(store, device, staging_bytes(cache, blocks_a_slot))
    try:
        space: Any = None  # the scripted store does not ask
        path = staging.path(space, cache, SHARD)
        yield Rig(store, device, staging, path, cache, allocations)
    finally:
        device.finish()
        assert staging.close(TIMEOUT_S)
