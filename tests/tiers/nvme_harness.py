"""What the tests of the NVMe tier share: opening one, and writing and reading blocks whose bytes follow
from their hash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from tierkv.clock import Clock
from tierkv.config import NvmeConfig
from tierkv.io import BlockIO, PosixBlockIO
from tierkv.jobs import Job
from tierkv.keys import Keyspace
from tierkv.testing.buffers import BlockBuffer, block_payload
from tierkv.testing.faults import FaultyBlockIO
from tierkv.tiers.base import Batch
from tierkv.tiers.nvme import NvmeTier
from tierkv.types import BlockStatus, HashArray, SlotArray

SLAB_BYTES = 256 << 10
OpenTier = Callable[..., NvmeTier]


def open_tier(directory: Path, blocks: int = 64, *, clock: Clock | None = None, engine: BlockIO | str = "auto",
              **settings: object) -> NvmeTier:  # fmt: skip
    """A tier in `directory`/nvme with room for `blocks` blocks of 4 KiB."""
    fields: dict[str, object] = {
        "directory": str(directory / "nvme"),
        "capacity_bytes": blocks * 4096,
        "slab_bytes": SLAB_BYTES,
        **settings,
    }
    if isinstance(engine, str):
        return NvmeTier(NvmeConfig(engine=engine, **fields), clock=clock)  # type: ignore[arg-type]
    return NvmeTier(NvmeConfig(**fields), clock=clock, engine=engine)  # type: ignore[arg-type]


def faulty_engine() -> FaultyBlockIO:
    return FaultyBlockIO(PosixBlockIO(4))


def buffer_for(space: Keyspace, hashes: HashArray) -> BlockBuffer:
    """The blocks' bytes, in memory."""
    buffer = BlockBuffer(max(1, len(hashes)), space.block_bytes)
    for position, row in enumerate(hashes):
        buffer.put(position, block_payload(space, row.tobytes()))
    return buffer


def batch_of(space: Keyspace, hashes: HashArray, slots: SlotArray, buffer: BlockBuffer) -> Batch:
    lengths = np.full(len(hashes), space.block_bytes, np.int64)
    return Batch(space, hashes, slots, buffer.addresses[: len(hashes)], lengths)


def ended(job: Job) -> list[BlockStatus]:
    assert job.wait(20.0), f"{job} did not end"
    return [BlockStatus(value) for value in job.status.tolist()]


def write(tier: NvmeTier, space: Keyspace, hashes: HashArray, slots: SlotArray) -> list[BlockStatus]:
    buffer = buffer_for(space, hashes)  # alive until the job has ended
    return ended(tier.submit_write(batch_of(space, hashes, slots, buffer)))


def store(tier: NvmeTier, space: Keyspace, hashes: HashArray) -> SlotArray:
    """Allocates and writes, all OK."""
    slots = tier.allocate(space, len(hashes))
    assert slots is not None
    assert set(write(tier, space, hashes, slots)) <= {BlockStatus.OK}
    return slots


def read(tier: NvmeTier, space: Keyspace, hashes: HashArray, slots: SlotArray) -> list[BlockStatus]:
    """Reads, and checks every byte of what is OK."""
    buffer = BlockBuffer(max(1, len(hashes)), space.block_bytes)
    statuses = ended(tier.submit_read(batch_of(space, hashes, slots, buffer)))
    for position, status in enumerate(statuses):
        if status == BlockStatus.OK:
            assert buffer.get(position) == block_payload(space, hashes[position].tobytes()), "wrong bytes"
    assert buffer.guards_intact()
    return statuses


def residents(tier: NvmeTier) -> dict[tuple[bytes, bytes], int]:
    """(digest, hash) -> slot of what recover() yields."""
    found = {}
    for batch in tier.recover():
        for row, slot in zip(batch.hashes, batch.slots.tolist(), strict=True):
            found[batch.space.digest(), row.tobytes()] = slot
    return found
