"""What the store's tests share: a store in a temporary directory with faulty tiers, and saves and loads that check."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tierkv.clock import VirtualClock
from tierkv.config import DfsConfig, DramConfig, NvmeConfig, StoreConfig
from tierkv.fragments import Fragments
from tierkv.jobs import Job
from tierkv.keys import Keyspace
from tierkv.memory import capacity_for, slot_bytes_for
from tierkv.store import Store
from tierkv.testing.buffers import GUARD_BYTE, PagedCache, make_spec, part_payload
from tierkv.testing.faults import FaultKind, FaultyTier, damage_file
from tierkv.tiers.base import Batch, Tier
from tierkv.tiers.dfs_format import HEADER_BYTES, file_bytes
from tierkv.types import SLOT_GRANULE_BYTES, BlockStatus, HashArray, TierKind

TIMEOUT_S = 30.0
OK = int(BlockStatus.OK)
MISS = int(BlockStatus.MISS)


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Waits for what background threads bring about without telling anyone; AssertionError if it does not come."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"did not happen within {timeout_s} s: {what}"
        time.sleep(0.001)


class Rig(AbstractContextManager["Rig"]):
    """A store on `directory` with room for so many blocks a tier (0: no such tier; dfs_blocks None: no limit).

    The tiers below DRAM are wrapped in FaultyTier: `nvme`, `dfs`. reopen() closes and opens again.
    """

    def __init__(
        self,
        directory: Path,
        *,
        dram_blocks: int = 8,
        nvme_blocks: int = 0,
        dfs_blocks: int | None = 0,
        block_bytes: int = 4096,
        slab_blocks: int = 8,
        clock: VirtualClock | None = None,
        nvme: dict[str, Any] | None = None,
        dfs: dict[str, Any] | None = None,
        dram: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.directory = directory
        self.clock = clock or VirtualClock()
        self.block_bytes = block_bytes
        slab_bytes = slot_bytes_for(block_bytes) * slab_blocks

        def capacity(blocks: int) -> int:
            return capacity_for(blocks, block_bytes, slab_bytes)

        self.dfs_block_bytes = file_bytes(block_bytes)

        (directory / "dfs").mkdir(exist_ok=True, parents=True)
        self.config = StoreConfig(
            dram=DramConfig(
                capacity_bytes=capacity(dram_blocks),
                slab_bytes=slab_bytes,
                **{
                    "huge_pages": "off",
                    "lock_memory": "off",
                    "first_touch": "never",
                    "free_ahead": 0.0,
                    **(dram or {}),
                },
            ),
            nvme=NvmeConfig(
                directory=str(directory / "nvme"),
                capacity_bytes=capacity(nvme_blocks),
                slab_bytes=slab_bytes,
                **{"sync": "process", **(nvme or {})},
            )
            if nvme_blocks
            else None,
            dfs=DfsConfig(
                capacity_bytes=None if dfs_blocks is None else self.dfs_block_bytes * dfs_blocks,
                **{
                    "directory": str(directory / "dfs"),
                    "sync": False,
                    "probe_timeout_s": 10.0,
                    "threads": 2,
                    **(dfs or {}),
                },
            )
            if dfs_blocks != 0
            else None,
            **{"staging_bytes": slot_bytes_for(block_bytes) * 8, **options},
        )
        self.nvme: FaultyTier | None = None
        self.dfs: FaultyTier | None = None
        self.store = self._open()

    def _open(self) -> Store:
        return Store(self.config, clock=self.clock, wrap_tier=self._wrap)

    def _wrap(self, tier: Tier) -> Tier:
        if tier.info.kind is TierKind.NVME:
            self.nvme = FaultyTier(tier, damage=self._damage_slot)
            return self.nvme
        self.dfs = FaultyTier(tier, damage=self._damage_file)
        return self.dfs

    def _damage_slot(self, batch: Batch, position: int, kind: FaultKind) -> None:
        self.damage_slot(batch.space, int(batch.slots[position]), kind)

    def _damage_file(self, batch: Batch, position: int, kind: FaultKind) -> None:
        self.damage_file(batch.space, batch.hashes[position].tobytes(), kind)

    def damage_slot(self, space: Keyspace, slot: int, kind: FaultKind) -> None:
        """Damages a block in the slot file."""
        offset = slot * SLOT_GRANULE_BYTES
        damage_file(self.directory / "nvme" / "slots.dat", kind, offset, space.block_bytes)

    def damage_file(self, space: Keyspace, block_hash: bytes, kind: FaultKind) -> None:
        """Damages a block's file in the shared directory: its payload, or (TORN) its length."""
        assert self.config.dfs is not None
        name = block_hash.hex()
        path = Path(self.config.dfs.directory) / "v1" / space.digest.hex() / name[:2] / name
        if kind is FaultKind.FLIPPED:
            damage_file(path, kind, HEADER_BYTES, 64)
        else:
            damage_file(path, kind)

    def reopen(self, flush_timeout_s: float = TIMEOUT_S) -> None:
        """Closes the store and opens it again on the same directory."""
        self.store.close(flush_timeout_s)
        self.store = self._open()

    def space(self, **changes: Any) -> Keyspace:
        """Opens a keyspace of the rig's block size."""
        return self.store.open(make_spec(**{"block_bytes": self.block_bytes, **changes}))

    def settled(self) -> None:
        """Waits until nothing moves: no pins, no queues. Leases must have ended."""

        def still() -> bool:
            stats = self.store.stats()
            return not (
                stats.pins or stats.pending_blocks or stats.save_queue_blocks or stats.write_queue_blocks
            )

        eventually(still, f"pins and queues become empty: {self.store.stats()}")

    def idle(self) -> None:
        """Waits until no save is queued and no block is being moved, whether or not leases are open."""
        store = self.store

        def still() -> bool:
            stats = store.stats()
            return not (stats.save_queue_blocks or stats.write_queue_blocks or store._room._moving)

        eventually(still, "nothing moves")

    def check_misses(self, **expected: int) -> None:
        """Waits until exactly these misses are counted, by reason: counting follows the end of the job."""
        eventually(
            lambda: self.store.stats().load_misses == expected,
            f"{expected}, not {self.store.stats().load_misses}",
        )

    def check_capacities(self) -> None:
        """No tier may hold more than its capacity."""
        for name, tier in self.store.stats().tiers.items():
            assert tier.used_bytes <= tier.capacity_bytes, f"{name} holds more than its capacity: {tier}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for tier in (self.nvme, self.dfs):
            if tier is not None:
                tier.plan.heal()
                tier.gate.release()
        self.store.close(0 if error else TIMEOUT_S)


def statuses_of(job: Job, timeout_s: float = TIMEOUT_S) -> list[int]:
    """The statuses of a job, which must end in time."""
    assert job.wait(timeout_s), f"the job did not end within {timeout_s} s: {job}"
    return [int(status) for status in job.status]


def filled_cache(space: Keyspace, hashes: HashArray, part: int = 0) -> Fragments:
    """A paged cache (two layers with gaps where the part is large enough) that holds the blocks' right bytes."""
    cache = empty_cache(space, len(hashes), part)
    for position, row in enumerate(hashes):
        cache.put(position, part_payload(space, row.tobytes(), part))
    return cache.fragments(range(len(hashes)))


def empty_cache(space: Keyspace, count: int, part: int = 0) -> PagedCache:
    """A paged cache for `count` blocks."""
    size = space.part_bytes[part]
    pieces = [size // 3, size - size // 3] if size >= 3 else [size]
    return PagedCache(max(1, count), pieces, 32)


def submit_save(
    store: Store, space: Keyspace, hashes: HashArray, part: int = 0, timeout_s: float | None = None
) -> Job:
    """Starts saving the right bytes of one part of each block."""
    return store.save(space, hashes, filled_cache(space, hashes, part), part, timeout_s)


def save(
    store: Store, space: Keyspace, hashes: HashArray, part: int | None = None, timeout_s: float | None = None
) -> list[int]:
    """Saves the right bytes (part None: all parts, one after the other) and returns the worst status a block."""
    worst = [OK] * len(hashes)
    for number in range(len(space.part_bytes)) if part is None else [part]:
        statuses = statuses_of(submit_save(store, space, hashes, number, timeout_s))
        worst = [max(pair) for pair in zip(worst, statuses, strict=True)]
    return worst


class Load:
    """A load under way, and the check of what it brings."""

    def __init__(
        self, store: Store, space: Keyspace, hashes: HashArray, part: int = 0, timeout_s: float | None = None
    ) -> None:
        self.space, self.hashes, self.part = space, hashes, part
        self.cache = empty_cache(space, len(hashes), part)
        self.cache.wipe(0xEE)
        self.job = store.load(space, hashes, self.cache.fragments(range(len(hashes))), part, timeout_s)

    def statuses(self, timeout_s: float = TIMEOUT_S) -> list[int]:
        """Waits; every OK block must have the right bytes, and nothing beside the pieces may have changed."""
        found = statuses_of(self.job, timeout_s)
        for position, status in enumerate(found):
            if status == OK:
                expected = part_payload(self.space, self.hashes[position].tobytes(), self.part)
                assert self.cache.get(position) == expected, f"wrong bytes in block {position}"
        assert self.cache.guards_intact(), f"the store wrote outside the pieces (guard {GUARD_BYTE:#x})"
        return found


def load(
    store: Store, space: Keyspace, hashes: HashArray, part: int | None = None, timeout_s: float | None = None
) -> list[int]:
    """Loads and checks (part None: all parts); the worst status a block."""
    worst = [OK] * len(hashes)
    for number in range(len(space.part_bytes)) if part is None else [part]:
        found = Load(store, space, hashes, number, timeout_s).statuses()
        worst = [max(pair) for pair in zip(worst, found, strict=True)]
    return worst


def masks(store: Store, space: Keyspace, hashes: HashArray) -> list[int]:
    """Which tiers hold each block, as bits."""
    return [int(mask) for mask in store.lookup([(space, hashes)])[0]]


def in_tier(kind: TierKind, found: Sequence[int]) -> list[bool]:
    """Which of the masks have the tier's bit."""
    return [bool(mask >> kind & 1) for mask in found]


def rows(hashes: HashArray, positions: Any) -> HashArray:
    """Some rows, C-contiguous."""
    return np.ascontiguousarray(hashes[positions])


__all__ = [
    "MISS",
    "OK",
    "TIMEOUT_S",
    "Load",
    "Rig",
    "damage_file",
    "empty_cache",
    "eventually",
    "filled_cache",
    "in_tier",
    "load",
    "masks",
    "rows",
    "save",
    "statuses_of",
    "submit_save",
]
