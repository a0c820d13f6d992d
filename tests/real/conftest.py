"""What the tests by real means share: the store tests' rig, small file systems, and GlusterFS."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "store"))  # store_harness
pytest.register_assert_rewrite("store_harness")

import gluster  # noqa: E402
from small_disk import SmallDisk  # noqa: E402

BRICK_BYTES = 128 << 20


@pytest.fixture(scope="package")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gluster.GlusterVolume]:
    """A small GlusterFS volume, for all tests."""
    reason = gluster.why_not()
    if reason:
        pytest.skip(reason)
    made = gluster.GlusterVolume(tmp_path_factory.mktemp("gluster"), BRICK_BYTES)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str, int], SmallDisk]]:
    """Makes small disks, of kind 'tmpfs' or 'ext4'; skips where that is not permitted."""
    made: list[SmallDisk] = []

    def make(kind: str, size_bytes: int) -> SmallDisk:
        if os.geteuid() != 0:
            pytest.skip("mounting needs root")
        directory = tmp_path / f"disk{len(made)}"
        directory.mkdir()
        try:
            disk = SmallDisk(directory, kind, size_bytes)
        except OSError as error:
            pytest.skip(f"a small {kind} cannot be mounted here: {error}")
        made.append(disk)
        return disk

    yield make
    for disk in made:
        if os.path.ismount(disk.place):
            disk.unmount()
