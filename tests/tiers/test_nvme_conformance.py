"""The NVMe tier passes the suite that every tier must pass, with each engine, with and without O_DIRECT."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from tierkv.config import NvmeConfig
from tierkv.io import io_uring_available
from tierkv.keys import Keyspace
from tierkv.testing.tiers import TierConformance
from tierkv.tiers.base import Tier
from tierkv.tiers.nvme import NvmeTier

AVAILABLE, REASON = io_uring_available()


class TestNvmeThreads(TierConformance):
    """The thread pool, O_DIRECT where the file system has it."""

    durable = True
    engine: ClassVar[Literal["io_uring", "threads"]] = "threads"
    direct: ClassVar[Literal["auto", "off"]] = "auto"
    sync: ClassVar[Literal["power", "process"]] = "power"

    def make_tier(self, directory: Path) -> Tier:
        config = NvmeConfig(
            directory=str(directory / "nvme"),
            capacity_bytes=self.capacity_bytes,
            slab_bytes=min(2 << 20, self.capacity_bytes),
            engine=self.engine,
            direct=self.direct,
            sync=self.sync,
        )
        return NvmeTier(config)

    def damage(self, tier: Tier, space: Keyspace, block_hash: bytes, slot: int) -> None:
        assert isinstance(tier, NvmeTier)
        path = tier.info.name.removeprefix("nvme ") + "/slots.dat"
        with open(path, "r+b", buffering=0) as file:
            byte = os.pread(file.fileno(), 1, slot * 4096 + 100)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), slot * 4096 + 100)
            os.fsync(file.fileno())


@pytest.mark.skipif(not AVAILABLE, reason=REASON)
class TestNvmeUring(TestNvmeThreads):
    """io_uring, O_DIRECT where the file system has it."""

    engine = "io_uring"


@pytest.mark.skipif(not AVAILABLE, reason=REASON)
class TestNvmeUringBuffered(TestNvmeThreads):
    """io_uring through the page cache, surviving only a killed process."""

    engine = "io_uring"
    direct = "off"
    sync = "process"
