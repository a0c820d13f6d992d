"""The suite that the package ships for tiers can be passed: by its reference tier, through wrappers, by compressed
files. Each tier's other tests, beside this one, hold it to the suite too."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from tierkv.config import Codec, DfsConfig
from tierkv.keys import Keyspace
from tierkv.testing.faults import FaultKind, FaultyTier, damage_file
from tierkv.testing.memory_tier import MemoryMedium, MemoryTier
from tierkv.testing.tiers import TierConformance
from tierkv.testing.wrappers import CountingTier, LatencyTier
from tierkv.tiers.base import Tier
from tierkv.tiers.dfs import DfsTier
from tierkv.tiers.dfs_format import HEADER_BYTES


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


class TestCompressedFiles(TierConformance):
    """Files whose blocks shrink, most of them: lengths on the medium differ from block to block."""

    durable = True
    shared = True
    content_addressed = True
    codec: ClassVar[Codec] = "zstd"

    def make_tier(self, directory: Path) -> Tier:
        config = DfsConfig(
            directory=str(directory),
            capacity_bytes=self.capacity_bytes,
            codec=self.codec,
            threads=3,
            sync=False,
        )
        return DfsTier(config)

    def payload(self, space: Keyspace, block_hash: bytes) -> bytes:
        whole = super().payload(space, block_hash)
        if block_hash[0] % 4 == 0:
            return whole
        return (whole[:40] * (space.block_bytes // 40 + 1))[: space.block_bytes]

    def damage(self, tier: Tier, space: Keyspace, block_hash: bytes, slot: int) -> None:
        root = Path(tier.info.name.removeprefix("dfs "))
        path = root / "v1" / space.digest.hex() / block_hash.hex()[:2] / block_hash.hex()
        damage_file(path, FaultKind.FLIPPED, HEADER_BYTES, 64)


class TestCompressedPlanes(TestCompressedFiles):
    """The same after a split into byte planes."""

    codec = "zstd-planes"
