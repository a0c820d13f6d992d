"""Small file systems for tests that fill them up, turn them read-only or damage what is below them. Needs root."""

from __future__ import annotations

import subprocess
from pathlib import Path

COMMAND_TIMEOUT_S = 30.0


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
