"""fio as the machine's limit for files: io_uring and O_DIRECT at a given block size and depth, same
directory."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from tierkv.benchmarks.common import Sample
from tierkv.errors import StorageError

MISSING_NOTE = "fio is not installed, so there is no limit to compare with: install it (apt-get install fio)"
_TIMEOUT_S = 180.0


def available() -> bool:
    return shutil.which("fio") is not None


class Fio:
    """One preallocated file in `directory`; remove() ends it."""

    def __init__(self, directory: str, block_bytes: int, size_bytes: int, queue_depth: int) -> None:
        self._file = Path(directory) / "fio.bench"
        self._block_bytes, self._queue_depth = block_bytes, queue_depth
        self._size_bytes = size_bytes // block_bytes * block_bytes

    def write(self) -> Sample:
        """Writes the whole file in order."""
        return self._run("write")

    def read(self) -> Sample:
        """Reads every block once, in random order."""
        return self._run("randread")

    def remove(self) -> None:
        self._file.unlink(missing_ok=True)

    def _run(self, pattern: str) -> Sample:
        command = [
            "fio", "--name=limit", f"--filename={self._file}", f"--rw={pattern}", f"--bs={self._block_bytes}",
            f"--size={self._size_bytes}", f"--iodepth={self._queue_depth}", "--ioengine=io_uring", "--direct=1",
            "--overwrite=1", "--fallocate=posix", "--randrepeat=0", "--norandommap=0", "--output-format=json",
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=True)
            job = json.loads(done.stdout[done.stdout.index(b"{") :])["jobs"][0]
        except (subprocess.SubprocessError, OSError, ValueError, LookupError) as error:
            said = getattr(error, "stderr", None) or b""
            raise StorageError(f"fio failed: {error}: {said.decode(errors='replace').strip()}") from error
        side = job["read" if pattern.endswith("read") else "write"]
        return Sample(side["io_bytes"], max(side["runtime"], 1) / 1000, 0.0)
