"""Looking at a shared tier's directory without running a tier: verify every block, or list what is there.

Plain blocking calls without deadlines: for the command line. Other hosts may use the directory meanwhile.
Thread safety: the functions share nothing.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from tierkv.errors import KeyspaceError, StorageError
from tierkv.keys import MAX_BLOCK_BYTES, KeyspaceSpec
from tierkv.memory import Scratch
from tierkv.tiers.dfs_files import BlockFiles, DirectMode, FileOps, error_name, unpack
from tierkv.tiers.dfs_format import (
    FORMAT_DIRECTORY,
    FORMAT_VERSION,
    SPEC_NAME,
    Header,
    check_header,
    file_bytes,
    is_hash_name,
    read_header,
)
from tierkv.tiers.dfs_works import read_small, subdirectories
from tierkv.tiers.reports import KeyspaceReport, VerifyReport
from tierkv.types import BlockStatus

_THREADS = 4
_CHUNK = 64


class InspectReport(msgspec.Struct, frozen=True, kw_only=True):
    """What inspect_tree found."""

    directory: str
    format_version: int
    blocks: int
    used_bytes: int
    """Of the files, headers included."""
    temporary_files: int
    """Of writers at work, or of crashed ones: those are removed by a listing when they are an hour old."""
    keyspaces: list[KeyspaceReport]


@dataclass(frozen=True, slots=True)
class _Block:
    path: str
    digest: bytes
    block_hash: bytes
    block_bytes: int
    """At most."""


class _Walk:
    """Goes through a directory once and keeps its blocks and what it counts."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = os.path.abspath(directory)
        self.files = FileOps()
        self.keyspaces: list[KeyspaceReport] = []
        self.blocks: list[_Block] = []
        self.temporary_files = 0
        base = f"{self.directory}/{FORMAT_DIRECTORY}"
        now_s = time.time()
        for name in sorted(self._names(base)):
            if is_hash_name(name):
                self._keyspace(f"{base}/{name}", name, now_s)

    def _names(self, path: str) -> list[str]:
        try:
            return self.files.listdir(path)
        except OSError as error:
            raise StorageError(
                f"{path}: {error.strerror}: name the directory that dfs.directory names"
            ) from error

    def _keyspace(self, path: str, name: str, now_s: float) -> None:
        spec = read_spec(self.files, f"{path}/{SPEC_NAME}", name)
        limit = MAX_BLOCK_BYTES if spec is None else spec.block_bytes
        sizes: list[int] = []
        times: list[float] = []
        for inner in subdirectories(self._names(path)):
            for entry, about in self._entries(f"{path}/{inner}"):
                if not is_hash_name(entry) or not entry.startswith(inner):
                    self.temporary_files += entry.startswith(".")
                elif stat.S_ISREG(about.st_mode):
                    sizes.append(about.st_size)
                    times.append(about.st_mtime)
                    place = f"{path}/{inner}/{entry}"
                    self.blocks.append(_Block(place, bytes.fromhex(name), bytes.fromhex(entry), limit))
        self.keyspaces.append(
            KeyspaceReport(
                digest=name,
                spec=spec,
                blocks=len(sizes),
                bytes=sum(sizes),
                oldest_s=max(0.0, now_s - min(times)) if times else 0.0,
                newest_s=max(0.0, now_s - max(times)) if times else 0.0,
            )
        )

    def _entries(self, path: str) -> Iterator[tuple[str, os.stat_result]]:
        for entry in sorted(self._names(path)):
            try:
                yield entry, self.files.stat(f"{path}/{entry}")
            except OSError:
                continue  # gone since it was listed


def read_spec(files: FileOps, path: str, digest_hex: str) -> KeyspaceSpec | None:
    """The spec in a file, or None when it is missing, unreadable or of another keyspace."""
    try:
        spec = KeyspaceSpec.from_json(read_small(files, path))
    except KeyspaceError:
        return None
    return spec if spec.digest().hex() == digest_hex else None


def inspect_tree(directory: str | os.PathLike[str]) -> InspectReport:
    """Lists what the directory holds. StorageError when it is no shared tier's directory or cannot be
    read."""
    walk = _Walk(directory)
    return InspectReport(
        directory=walk.directory,
        format_version=FORMAT_VERSION,
        blocks=len(walk.blocks),
        used_bytes=sum(keyspace.bytes for keyspace in walk.keyspaces),
        temporary_files=walk.temporary_files,
        keyspaces=walk.keyspaces,
    )


def verify_tree(
    directory: str | os.PathLike[str],
    progress: Callable[[int, int], None] | None = None,
    *,
    repair: bool = False,
) -> VerifyReport:
    """Reads and checks every block; with `repair`, damaged files are unlinked. `progress(checked, total)` is
    called now and then. Files that vanish meanwhile do not count. StorageError as inspect_tree."""
    walk = _Walk(directory)
    files = BlockFiles(walk.files, DirectMode("auto"), sync=False)
    chunks = [walk.blocks[start : start + _CHUNK] for start in range(0, len(walk.blocks), _CHUNK)]
    local = threading.local()
    reasons: Counter[str] = Counter()
    checked = repaired = done = 0

    def check(chunk: list[_Block]) -> list[tuple[str, bool]]:
        scratch = getattr(local, "scratch", None)
        if scratch is None:
            scratch = local.scratch = Scratch()
        return [_check(files, block, scratch, repair) for block in chunk]

    with ThreadPoolExecutor(_THREADS, "tierkv-verify") as pool:
        for results in pool.map(check, chunks):
            done += len(results)
            for reason, removed in results:
                if reason == "absent":
                    continue
                checked += 1
                repaired += removed
                if reason:
                    reasons[reason] += 1
            if progress is not None:
                progress(done, len(walk.blocks))
    bad = reasons.total()
    return VerifyReport(
        directory=walk.directory,
        format_version=FORMAT_VERSION,
        checked=checked,
        good=checked - bad,
        bad=bad,
        repaired=repaired,
        reasons=dict(reasons),
        keyspaces=walk.keyspaces,
    )


def _check(files: BlockFiles, block: _Block, scratch: Scratch, repair: bool) -> tuple[str, bool]:
    """What is wrong with a block ('' for nothing, 'absent' when it is gone), and whether it was removed."""
    flag = files.direct.flag()
    try:
        try:
            loaded = files.load(block.path, scratch, file_bytes(block.block_bytes), flag)
        except OSError as error:
            if not files.direct.refused(error, flag):
                raise
            loaded = files.load(block.path, scratch, file_bytes(block.block_bytes), 0)
    except FileNotFoundError:
        return "absent", False
    except OSError as error:
        return f"read {error_name(error)}", False
    wrong = loaded.reason
    if loaded.data is not None:
        header = read_header(loaded.data)
        length = header.block_bytes if isinstance(header, Header) else 0
        wrong = check_header(header, len(loaded.data), block.digest, block.block_hash, length)
        if not wrong and length > block.block_bytes:
            wrong = "block length"
        if not wrong and isinstance(header, Header):
            data = unpack(header, loaded.data, scratch)
            wrong = data if isinstance(data, str) else ""
    if not wrong:
        return "", False
    if repair and loaded.status is not BlockStatus.MISS:
        files.drop(block.path, loaded.inode)
        return wrong, not os.path.lexists(block.path)
    return wrong, False
