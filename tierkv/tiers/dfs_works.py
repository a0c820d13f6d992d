"""Works: the kinds of operations that the DFS tier gives to its threads.

Each keeps what it needs of the caller's request and says how one position is done. Thread safety: positions
of one work are run on several threads; each touches only its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tierkv.jobs import Job
from tierkv.keys import Keyspace
from tierkv.tiers.base import Batch
from tierkv.tiers.dfs_files import BlockFiles, FileOps
from tierkv.tiers.dfs_format import (
    HEADER_BYTES,
    TEMPORARY_PREFIX,
    file_bytes,
    is_hash_name,
    is_subdirectory_name,
)
from tierkv.tiers.dfs_pool import Lane, Operation
from tierkv.types import HASH_BYTES, BlockStatus, BoolArray, HashArray, Int64Array, UInt8Array

PROBE_CHUNK = 16
SMALL_FILE_BYTES = 1 << 16
STALE_TEMPORARY_S = 3600.0


class BatchWork:
    """The blocks of a batch, one an operation."""

    def __init__(
        self,
        batch: Batch,
        lane: Lane,
        run: Callable[[Batch, int, Operation], int],
        settled: Callable[[Batch, int, int], None],
    ) -> None:
        self.batch = batch
        self.job = Job(batch.count)
        self._lane = lane
        self._run = run
        self._settled = settled

    @property
    def count(self) -> int:
        return self.batch.count

    @property
    def lane(self) -> Lane:
        return self._lane

    def run(self, position: int, operation: Operation) -> int:
        return self._run(self.batch, position, operation)

    def settle(self, position: int, status: int) -> None:
        self._settled(self.batch, position, status)
        self.job.settle(slice(position, position + 1), status)


class CallWork:
    """One call, whose result is a status; `ended` is told of it."""

    def __init__(
        self, lane: Lane, call: Callable[[Operation], int], ended: Callable[[int], None] | None = None
    ) -> None:
        self.job = Job(1)
        self._lane = lane
        self._call = call
        self._ended = ended

    @property
    def count(self) -> int:
        return 1

    @property
    def lane(self) -> Lane:
        return self._lane

    def run(self, position: int, operation: Operation) -> int:
        return self._call(operation)

    def settle(self, position: int, status: int) -> None:
        if self._ended is not None:
            self._ended(status)
        self.job.settle_rest(status)


class PathsWork:
    """Something done to each of many paths, in chunks; `result` is (n,) bool, True where it succeeded."""

    def __init__(self, lane: Lane, paths: list[str], one: Callable[[str], bool]) -> None:
        self._lane = lane
        self._paths = paths
        self._one = one
        self.result: BoolArray = np.zeros(len(paths), np.bool_)
        self.job = Job(self.count)

    @property
    def count(self) -> int:
        return -(-len(self._paths) // PROBE_CHUNK)

    @property
    def lane(self) -> Lane:
        return self._lane

    def run(self, position: int, operation: Operation) -> int:
        for place in range(position * PROBE_CHUNK, min((position + 1) * PROBE_CHUNK, len(self._paths))):
            if not operation.live:
                break
            operation.renew()
            self.result[place] = self._one(self._paths[place])
        return BlockStatus.OK

    def settle(self, position: int, status: int) -> None:
        self.job.settle(slice(position, position + 1), status)


@dataclass(slots=True)
class Listed:
    """What one subdirectory holds: (n,) times in ns, (n, 32) hashes, and what was odd, by reason."""

    times_ns: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))
    hashes: HashArray = field(default_factory=lambda: np.empty((0, HASH_BYTES), np.uint8))
    odd: dict[str, int] = field(default_factory=dict)


class ListWork:
    """Lists subdirectories of a keyspace, one an operation. `listed[k]` is what subdirectory k holds."""

    def __init__(
        self, files: BlockFiles, directory: str, names: list[str], block_bytes: int, now_s: float
    ) -> None:
        self._files = files
        self._directory = directory
        self._names = names
        self._block_bytes = block_bytes
        self._now_s = now_s
        self.listed: list[Listed | None] = [None] * len(names)
        self.job = Job(len(names))

    @property
    def count(self) -> int:
        return len(self._names)

    @property
    def lane(self) -> Lane:
        return Lane.SCAN

    def run(self, position: int, operation: Operation) -> int:
        name = self._names[position]
        self.listed[position] = list_subdirectory(
            self._files, f"{self._directory}/{name}", name, self._block_bytes, self._now_s, operation
        )
        return BlockStatus.OK

    def settle(self, position: int, status: int) -> None:
        self.job.settle(slice(position, position + 1), status)


def list_subdirectory(
    files: BlockFiles, path: str, name: str, block_bytes: int, now_s: float, operation: Operation
) -> Listed:
    """The blocks in one subdirectory. Removes temporary files and damaged blocks that are old enough to be
    nobody's work in progress."""
    found = Listed()
    times: list[int] = []
    packed: list[bytes] = []

    def odd(reason: str) -> None:
        found.odd[reason] = found.odd.get(reason, 0) + 1

    try:
        entries = files.files.listdir(path)
    except OSError:
        odd("subdirectory unreadable")
        return found
    for entry in entries:
        if not operation.live:
            break
        operation.renew()
        ours = is_hash_name(entry) and entry.startswith(name)
        if not ours and not entry.startswith(TEMPORARY_PREFIX):
            odd("foreign file")
            continue
        try:
            about = files.files.stat(f"{path}/{entry}")
        except OSError:
            continue  # gone since it was listed
        old = now_s - about.st_mtime > STALE_TEMPORARY_S
        if not ours:
            if old and stat.S_ISREG(about.st_mode):
                files.unlink_quietly(f"{path}/{entry}")
                odd("stale temporary file")
        elif not stat.S_ISREG(about.st_mode):
            odd("not a file")
        elif not plausible(about.st_size, block_bytes):
            odd("file length")
            if old:
                files.unlink_quietly(f"{path}/{entry}")
        else:
            times.append(about.st_mtime_ns)
            packed.append(bytes.fromhex(entry))
    found.times_ns = np.array(times, np.int64)
    found.hashes = np.frombuffer(b"".join(packed), np.uint8).reshape(len(packed), HASH_BYTES)
    return found


def plausible(size_bytes: int, block_bytes: int) -> bool:
    """Whether a file of this length can hold a block."""
    return HEADER_BYTES < size_bytes <= file_bytes(block_bytes) and size_bytes % HEADER_BYTES == 0


def subdirectories(names: list[str]) -> list[str]:
    return sorted(name for name in names if is_subdirectory_name(name))


def block_path(root: str, space: Keyspace, block_hash: bytes) -> tuple[str, str]:
    """(directory, file name) of a block."""
    name = block_hash.hex()
    return f"{root}/{space.digest.hex()}/{name[:2]}", name


def copy_in(target: UInt8Array, address: int) -> None:
    """The caller's memory -> ours, without the GIL."""
    ctypes.memmove(target.__array_interface__["data"][0], address, len(target))


def copy_out(address: int, source: UInt8Array) -> None:
    """Our memory -> the caller's, without the GIL."""
    ctypes.memmove(address, source.__array_interface__["data"][0], len(source))


def read_small(files: FileOps, path: str) -> bytes:
    """The first SMALL_FILE_BYTES of a file, b'' when it cannot be read."""
    try:
        fd = files.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        room = np.empty(SMALL_FILE_BYTES, np.uint8)
        return room[: max(0, files.preadv(fd, room, 0))].tobytes()
    except OSError:
        return b""
    finally:
        with contextlib.suppress(OSError):
            files.close(fd)


def remove_tree(files: FileOps, path: str, operation: Operation) -> int:
    """Removes a keyspace's directory, two levels deep, as far as it goes."""
    for name in _names(files, path):
        inner = f"{path}/{name}"
        for entry in _names(files, inner) if is_subdirectory_name(name) else ():
            if not operation.live:
                return BlockStatus.OK
            operation.renew()
            with contextlib.suppress(OSError):
                files.unlink(f"{inner}/{entry}")
        with contextlib.suppress(OSError):
            if is_subdirectory_name(name):
                files.rmdir(inner)
            else:
                files.unlink(inner)
    with contextlib.suppress(OSError):
        files.rmdir(path)
    return BlockStatus.OK


def _names(files: FileOps, path: str) -> list[str]:
    try:
        return files.listdir(path)
    except OSError:
        return []
