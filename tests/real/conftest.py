"""What the tests by real means share: the store tests' rig, small file systems, and GlusterFS."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "store"))  # store_harness
pytest.register_assert_rewrite("store_harness")

import gluster  # noqa: E402

BRICK_BYTES = 128 << 20
COMMAND_TIMEOUT_S = 30.0


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


class SmallDisk:
    """A small file system of its own: mounted, remounted and unmounted."""

    def __init__(self, directory: Path, kind: str, size_bytes: int) -> None:
        self.place = directory / "mounted"
        self.place.mkdir()
        self.kind = kind
        self.image = directory / "disk.img"
        if kind == "tmpfs":
            self._mount("-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs")
            return
        with self.image.open("wb") as file:
            file.truncate(size_bytes)
        _must("mkfs.ext4", "-q", "-F", "-m", "0", str(self.image))
        self.mount()

    def mount(self) -> None:
        """Mounts the ext4 (again)."""
        self._mount("-o", "loop", str(self.image))

    def _mount(self, *words: str) -> None:
        _must("mount", *words, str(self.place))

    def remount(self, options: str) -> None:
        self._mount("-o", f"remount,{options}")

    def unmount(self) -> None:
        _must("umount", str(self.place))

    def fill(self) -> Path:
        """Writes a file until nothing more goes in; returns it."""
        ballast = self.place / "ballast"
        with ballast.open("wb", buffering=0) as file:
            for piece in (1 << 20, 4096, 512):
                try:
                    while file.write(bytes(piece)) == piece:
                        pass
                except OSError:
                    continue
        return ballast


def _must(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


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
