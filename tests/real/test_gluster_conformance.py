"""The suite that every tier must pass, on a mounted GlusterFS."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from gluster import GlusterVolume

from tierkv.config import DfsConfig
from tierkv.keys import Keyspace
from tierkv.testing.faults import FaultKind, damage_file
from tierkv.testing.tiers import TierConformance
from tierkv.tiers.base import Tier
from tierkv.tiers.dfs import DfsTier
from tierkv.tiers.dfs_format import HEADER_BYTES

pytestmark = [pytest.mark.root, pytest.mark.slow]

_numbers = itertools.count()


class TestOnGluster(TierConformance):
    """Without fsync of each file, which only takes long here: the other tests have it."""

    durable = True
    shared = True
    content_addressed = True

    @pytest.fixture
    def tmp_path(self, volume: GlusterVolume) -> Iterator[Path]:
        """A directory on the volume instead."""
        place = volume.mounts[0] / f"suite{next(_numbers)}"
        place.mkdir()
        yield place
        shutil.rmtree(place)

    def make_tier(self, directory: Path) -> Tier:
        return DfsTier(
            DfsConfig(directory=str(directory), capacity_bytes=self.capacity_bytes, threads=4, sync=False)
        )

    def damage(self, tier: Tier, space: Keyspace, block_hash: bytes, slot: int) -> None:
        root = Path(tier.info.name.removeprefix("dfs "))
        path = root / "v1" / space.digest.hex() / block_hash.hex()[:2] / block_hash.hex()
        damage_file(path, FaultKind.FLIPPED, HEADER_BYTES, 64)
