"""Every tier passes the suite that the package ships for tiers."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from tierkv.config import DramConfig
from tierkv.keys import Keyspace
from tierkv.testing.faults import FaultyTier
from tierkv.testing.memory_tier import MemoryMedium, MemoryTier
from tierkv.testing.tiers import TierConformance
from tierkv.testing.wrappers import CountingTier, LatencyTier
from tierkv.tiers.base import Tier
from tierkv.tiers.dram import DramTier


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
