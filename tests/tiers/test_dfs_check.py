"""verify_tree and inspect_tree: they find exactly what is there and what is wrong with it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from tierkv.config import DfsConfig
from tierkv.errors import StorageError
from tierkv.keys import Keyspace
from tierkv.testing.buffers import BlockBuffer, block_payload, make_space, random_hashes
from tierkv.tiers.base import Batch
from tierkv.tiers.dfs import DfsTier
from tierkv.tiers.dfs_check import inspect_tree, verify_tree
from tierkv.types import HashArray


def fill(directory: Path, space: Keyspace, hashes: HashArray, codec: str = "none") -> list[Path]:
    """Writes blocks and returns their files."""
    tier = DfsTier(DfsConfig(directory=str(directory), sync=False, codec=codec))  # type: ignore[arg-type]
    try:
        source = BlockBuffer(len(hashes), space.block_bytes)
        for position, row in enumerate(hashes):
            source.put(position, block_payload(space, row.tobytes()))
        slots = tier.allocate(space, len(hashes))
        assert slots is not None
        lengths = np.full(len(hashes), space.block_bytes, np.int64)
        job = tier.submit_write(Batch(space, hashes, slots, source.addresses, lengths))
        assert job.wait(30)
        assert job.ok()
    finally:
        tier.close()
    names = [row.tobytes().hex() for row in hashes]
    return [directory / "v1" / space.digest.hex() / name[:2] / name for name in names]


def test_inspect_lists_keyspaces_blocks_bytes_and_ages(tmp_path: Path) -> None:
    first, second = make_space(5000, 1), make_space(100_000, 2, group="swa")
    files = fill(tmp_path, first, random_hashes(7))
    fill(tmp_path, second, random_hashes(3, 1))
    os.utime(files[0], (0, time.time() - 5000))
    (files[0].parent / ".tmp-host-1-1").write_text("x")
    (tmp_path / "v1" / ("0" * 64)).mkdir()
    found = inspect_tree(tmp_path)
    assert (found.directory, found.format_version, found.blocks) == (str(tmp_path), 1, 10)
    assert found.temporary_files == 1
    keyspaces = {keyspace.digest: keyspace for keyspace in found.keyspaces}
    assert keyspaces.keys() == {first.digest.hex(), second.digest.hex(), "0" * 64}
    one = keyspaces[first.digest.hex()]
    assert (one.blocks, one.bytes, one.spec) == (7, 7 * 12288, first.spec)
    assert 5000 <= one.oldest_s < 6000
    assert 0 <= one.newest_s < 1000
    assert keyspaces["0" * 64].spec is None
    assert found.used_bytes == sum(keyspace.bytes for keyspace in found.keyspaces)


@pytest.mark.parametrize("codec", ["none", "zstd-planes"])
def test_verify_names_what_is_wrong_and_repairs_it(tmp_path: Path, codec: str) -> None:
    space, other = make_space(9000, 1), make_space(9000, 2, revision="r2")
    files = fill(tmp_path, space, random_hashes(150), codec)
    fill(tmp_path, other, random_hashes(2, 1), codec)
    seen: list[tuple[int, int]] = []
    good = verify_tree(tmp_path, lambda checked, total: seen.append((checked, total)))
    assert (good.checked, good.good, good.bad, good.reasons) == (152, 152, 0, {})
    assert seen[-1] == (152, 152)

    def flip(path: Path, at: int) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    flip(files[0], 0)
    flip(files[1], 8)
    flip(files[2], 60)
    flip(files[3], 4096 + 17)
    files[4].write_bytes(files[4].read_bytes()[:-4096])
    files[5].write_bytes(b"")
    files[6].write_bytes(files[7].read_bytes())
    found = verify_tree(tmp_path)
    assert (found.checked, found.good, found.bad, found.repaired) == (152, 145, 7, 0)
    assert found.reasons == {
        "magic": 1,
        "version": 1,
        "header checksum": 1,
        "payload checksum": 1,
        "truncated": 2,
        "hash": 1,
    }
    assert files[0].exists()
    repaired = verify_tree(tmp_path, repair=True)
    assert (repaired.bad, repaired.repaired) == (7, 7)
    again = verify_tree(tmp_path)
    assert (again.checked, again.bad) == (145, 0)


def test_blocks_of_a_keyspace_without_a_spec_are_still_checked(tmp_path: Path) -> None:
    space = make_space(5000)
    fill(tmp_path, space, random_hashes(4))
    spec = tmp_path / "v1" / space.digest.hex() / "spec.json"
    spec.write_text("{}")
    found = verify_tree(tmp_path)
    assert (found.checked, found.good) == (4, 4)
    assert found.keyspaces[0].spec is None
    # Writing to the keyspace again mends it.
    fill(tmp_path, space, random_hashes(1))
    assert inspect_tree(tmp_path).keyspaces[0].spec == space.spec


def test_the_golden_files_are_good() -> None:
    found = verify_tree(Path(__file__).parent.parent / "golden" / "dfs-v1")
    assert (found.checked, found.good, found.bad) == (3, 3, 0)


def test_what_is_no_tier_is_refused(tmp_path: Path) -> None:
    for call in (inspect_tree, verify_tree):
        with pytest.raises(StorageError, match=r"dfs\.directory"):
            call(tmp_path)
