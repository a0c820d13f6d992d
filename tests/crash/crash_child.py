"""The process that gets killed: saves blocks into NVMe and a shared directory and says what it was promised.

It appends lines to a log: 'saving HEX...' before a batch is saved, 'flushed HEX...' once a flush has promised that
a restart finds it, 'removing HEX...' before and 'removed HEX...' after a removal. Lines that a kill cut short have no
newline and do not count. A block's bytes follow from its hash, so whoever reads it can check it.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tierkv.config import DfsConfig, DramConfig, NvmeConfig, StoreConfig
from tierkv.fragments import Fragments
from tierkv.keys import Keyspace
from tierkv.store import Store
from tierkv.testing.buffers import block_payload, make_spec, random_hashes
from tierkv.tiers import dfs as dfs_module
from tierkv.tiers import nvme as nvme_module
from tierkv.tiers import nvme_commit as nvme_commit_module
from tierkv.types import BlockStatus, HashArray

BLOCK_BYTES = 12_000
SLOT_BYTES = 12_288
KILL_POINTS = (
    "nvme: before data",
    "nvme: after data, before the catalog's commit",
    "nvme: after the catalog's commit",
    "nvme: amid deleting",
    "dfs: half of a file written",
    "dfs: before a file is published",
    "dfs: after a file is published",
    "dfs: before a file is removed",
)


def config(directory: Path, nvme_blocks: int) -> StoreConfig:
    """A store with little DRAM, NVMe of so many blocks, and a shared directory without a limit."""
    slab_bytes = 8 * SLOT_BYTES
    return StoreConfig(
        dram=DramConfig(
            capacity_bytes=2 * slab_bytes,
            slab_bytes=slab_bytes,
            lock_memory="off",
            huge_pages="off",
            first_touch="never",
        ),
        nvme=NvmeConfig(
            directory=str(directory / "nvme"),
            capacity_bytes=nvme_blocks * SLOT_BYTES // slab_bytes * slab_bytes,
            slab_bytes=slab_bytes,
            sync="process",
        ),
        dfs=DfsConfig(
            directory=str(directory / "dfs"),
            admission="on-evict",
            sync=False,
            threads=2,
            probe_timeout_s=10.0,
        ),
        staging_bytes=slab_bytes,
    )


def spaces_of(store: Store) -> list[Keyspace]:
    """The two keyspaces that are used: one whole block, and three parts."""
    return [
        store.open(make_spec(BLOCK_BYTES, model="crash")),
        store.open(make_spec(BLOCK_BYTES, parts=3, model="crash-parts")),
    ]


class Log:
    """An append-only file; each line is one write, so that a kill leaves whole lines and at most one torn one."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(self, word: str, number: int = 0, hashes: HashArray | None = None) -> None:
        names = [] if hashes is None else [row.tobytes().hex() for row in hashes]
        os.write(self._fd, (" ".join([word, str(number), *names]) + "\n").encode())


def save(store: Store, space: Keyspace, hashes: HashArray) -> bool:
    """Saves all parts; True if every block was taken."""
    blocks = np.frombuffer(b"".join(block_payload(space, row.tobytes()) for row in hashes), np.uint8)
    blocks = blocks.reshape(len(hashes), BLOCK_BYTES)
    taken = True
    for part, size in enumerate(space.part_bytes):
        start = space.part_offset(part)
        job = store.save(
            space, hashes, Fragments.from_arrays([blocks[:, start : start + size]], range(len(hashes))), part
        )
        taken &= job.wait(30.0) and job.ok()
    return taken


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def on_call(owner: Any, name: str, at: int, *, before: bool) -> None:
    """Replaces a method of a class by one that kills the process at its `at`-th call, before or after it acts."""
    original: Callable[..., Any] = getattr(owner, name)
    calls = itertools.count(1)

    def call(*arguments: Any, **options: Any) -> Any:
        mine = next(calls)
        if before and mine == at:
            die()
        result = original(*arguments, **options)
        if not before and mine == at:
            die()
        return result

    setattr(owner, name, call)


def kill_at(point: str, at: int) -> None:
    """Arms one of KILL_POINTS, for its `at`-th occasion."""
    files = dfs_module.FileOps
    match point:
        case "nvme: before data":
            on_call(nvme_module.NvmeTier, "submit_write", at, before=True)
        case "nvme: after data, before the catalog's commit":
            on_call(nvme_commit_module.Catalog, "commit", at, before=True)
        case "nvme: after the catalog's commit":
            on_call(nvme_commit_module.Catalog, "commit", at, before=False)
        case "nvme: amid deleting":
            on_call(nvme_module.NvmeTier, "free", at, before=False)
        case "dfs: half of a file written":
            original = files.pwritev
            calls = itertools.count(1)

            def half(self: Any, fd: int, source: Any, offset: int) -> int:
                if next(calls) == at:
                    original(self, fd, source[: len(source) // 2 // 4096 * 4096], offset)
                    die()
                return original(self, fd, source, offset)

            files.pwritev = half  # type: ignore[method-assign]
        case "dfs: before a file is published":
            on_call(files, "rename", at, before=True)
        case "dfs: after a file is published":
            on_call(files, "rename", at, before=False)
        case "dfs: before a file is removed":
            on_call(files, "unlink", at, before=True)
        case _:
            raise ValueError(point)


def run(directory: str, log_path: str, seed: int, nvme_blocks: int, point: str | None, at: int) -> None:
    """Saves, flushes and removes until it is killed."""
    log = Log(Path(log_path))
    rng = np.random.default_rng(seed)
    if point is not None:
        kill_at(point, at)
    store = Store(config(Path(directory), nvme_blocks))
    spaces = spaces_of(store)
    log.say("ready")
    pending: list[tuple[int, HashArray]] = []
    flushed: list[tuple[int, HashArray]] = []
    for _ in range(100_000):
        number = int(rng.integers(0, 2))
        hashes = random_hashes(int(rng.integers(1, 12)), rng)
        log.say("saving", number, hashes)
        if save(store, spaces[number], hashes):
            pending.append((number, hashes))
        if rng.random() < 0.4 and store.flush(30.0):
            for number, hashes in pending:
                log.say("flushed", number, hashes)
            flushed, pending = flushed + pending, []
        if flushed and rng.random() < 0.25:
            number, hashes = flushed.pop(int(rng.integers(0, len(flushed))))
            log.say("removing", number, hashes)
            store.remove(spaces[number], hashes)
            log.say("removed", number, hashes)
        if rng.random() < 0.2:
            found = np.zeros((len(hashes), spaces[number].part_bytes[0]), np.uint8)
            job = store.load(spaces[number], hashes, Fragments.from_blocks(found))
            assert job.wait(30.0)
            assert BlockStatus.CORRUPT not in job.status
