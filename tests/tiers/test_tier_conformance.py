"""Every tier passes the suite that the package ships for tiers."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import pytest

from tierkv.config import Codec, DfsConfig, DramConfig, NvmeConfig
from tierkv.io import io_uring_available
from tierkv.keys import Keyspace
from tierkv.testing.faults import FaultKind, FaultyTier, damage_file
from tierkv.testing.memory_tier import MemoryMedium, MemoryTier
from tierkv.testing.tiers import TierConformance
from tierkv.testing.wrappers import CountingTier, LatencyTier
from tierkv.tiers.base import Tier
from tierkv.tiers.dfs import DfsTier
from tierkv.tiers.dfs_format import HEADER_BYTES
from tierkv.tiers.dram import DramTier
from tierkv.tiers.nvme import NvmeTier
from tierkv.types import SLOT_GRANULE_BYTES


class TestMemoryTier(TierConformance):
    """The reference, which also shows that the suite can be passed."""

    durable = True

    def setup_method(self) -> None:
        self.media: dict[Path, MemoryMedium] = {}

    def make_tier(self, directory: Path) -> Tier:
        return MemoryTier(self.capacity_bytes, self.media.setdefault(directory, MemoryMedium()))

    def damage(self, tier: Tier, space: Keyspace, block_hash: bytes, slot: int) -> None:
        (medium,) = self.media.values()
        block = medium.blocks[space.digest, block_hash]
        block.data = block.data[:100] + bytes([block.data[100] ^ 1]) + block.data[101:]


class TestWrappedMemoryTier(TestMemoryTier):
    """Wrappers that do nothing are not noticed."""

    def make_tier(self, directory: Path) -> Tier:
        return CountingTier(FaultyTier(LatencyTier(super().make_tier(directory), 0.0001)))


class TestDramTier(TierConformance):
    """Memory: nothing survives, and nothing is verified."""

    verifies = False
    shared_memory: ClassVar[bool] = False

    def make_tier(self, directory: Path) -> Tier:
        config = DramConfig(
            capacity_bytes=self.capacity_bytes,
            slab_bytes=2 << 20,
            shared=self.shared_memory,
            lock_memory="off",
            first_touch="never",
        )
        return DramTier(config)


class TestSharedDramTier(TestDramTier):
    """The arena that other processes can map."""

    shared_memory = True


class TestNvmeTierThreads(TierConformance):
    """A slot file and its catalog, by the thread pool."""

    durable = True
    engine: ClassVar[Literal["auto", "io_uring", "threads"]] = "threads"
    direct: ClassVar[Literal["auto", "on", "off"]] = "auto"
    sync: ClassVar[Literal["power", "process"]] = "process"

    def make_tier(self, directory: Path) -> Tier:
        config = NvmeConfig(
            directory=str(directory / "nvme"),
            capacity_bytes=self.capacity_bytes,
            slab_bytes=2 << 20,
            engine=self.engine,
            direct=self.direct,
            sync=self.sync,
        )
        return NvmeTier(config)

    def damage(self, tier: Tier, space: Keyspace, block_hash: bytes, slot: int) -> None:
        path = Path(tier.info.name.removeprefix("nvme ")) / "slots.dat"
        damage_file(path, FaultKind.FLIPPED, slot * SLOT_GRANULE_BYTES, space.block_bytes)


@pytest.mark.skipif(not io_uring_available()[0], reason=f"io_uring: {io_uring_available()[1]}")
class TestNvmeTierUring(TestNvmeTierThreads):
    """The same by io_uring, with commits that survive a power cut."""

    engine = "io_uring"
    sync = "power"


class TestNvmeTierBuffered(TestNvmeTierThreads):
    """Through the page cache, as where O_DIRECT is refused."""

    direct = "off"


class TestDfsTier(TierConformance):
    """Files on a shared directory, as they are."""

    durable = True
    shared = True
    content_addressed = True
    codec: ClassVar[Codec] = "none"

    def make_tier(self, directory: Path) -> Tier:
        config = DfsConfig(
            directory=str(directory),
            capacity_bytes=self.capacity_bytes,
            codec=self.codec,
            threads=3,
            sync=False,
        )
        return DfsTier(config)

    def damage(self, tier: Tier, space: Keyspace, block_hash: bytes, slot: int) -> None:
        root = Path(tier.info.name.removeprefix("dfs "))
        path = root / "v1" / space.digest.hex() / block_hash.hex()[:2] / block_hash.hex()
        damage_file(path, FaultKind.FLIPPED, HEADER_BYTES, 64)


class TestDfsTierZstd(TestDfsTier):
    """Compressed; what does not shrink (a quarter of the blocks) is stored as it is."""

    codec = "zstd"

    def payload(self, space: Keyspace, block_hash: bytes) -> bytes:
        if block_hash[0] % 4 == 0:
            return super().payload(space, block_hash)
        return (super().payload(space, block_hash)[:40] * (space.block_bytes // 40 + 1))[: space.block_bytes]


class TestDfsTierPlanes(TestDfsTierZstd):
    """Compressed after a split into byte planes."""

    codec = "zstd-planes"
