"""Looking at an NVMe directory without running a tier: verify every block, or list what is there.

Thread safety: the functions share nothing.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from tierkv._native import CopyPool
from tierkv.catalog import Catalog, Delete, EntryBatch, open_in_this_process
from tierkv.errors import StorageError
from tierkv.io import Operation, open_engine
from tierkv.io.base import BlockIO
from tierkv.keys import KeyspaceSpec
from tierkv.memory import slot_bytes_for
from tierkv.tiers.base import slot_offsets
from tierkv.tiers.nvme_directory import CATALOG_NAME, SLOTS_NAME, DirectoryLock, SlotFile, holder_of
from tierkv.tiers.nvme_recovery import entry_faults
from tierkv.tiers.reports import KeyspaceReport, VerifyReport
from tierkv.types import SLOT_GRANULE_BYTES, BlockStatus, Int64Array

_BUFFER_BYTES = 32 << 20
_READ_TIMEOUT_S = 300.0


class InspectReport(msgspec.Struct, frozen=True, kw_only=True):
    """What inspect_directory found."""

    directory: str
    format_version: int
    uuid: str
    """In hex: which catalog this is."""
    created_s: int
    capacity_bytes: int
    """Length of the slot file."""
    used_bytes: int
    """Bytes of slots that blocks take."""
    open_in_process: int | None
    keyspaces: list[KeyspaceReport]


def inspect_directory(path: str | os.PathLike[str]) -> InspectReport:
    """Lists what the directory holds, without a lock: also while a store has it open.

    Raises StorageError (no such directory, not readable) or FormatError.
    """
    directory = _existing(path)
    shared = open_in_this_process(directory / CATALOG_NAME)
    catalog = shared or Catalog(directory / CATALOG_NAME, read_only=True)
    try:
        tally = _Tally(catalog.keyspaces())
        for batch in catalog.scan():
            tally.add(batch)
        return InspectReport(
            directory=str(directory),
            format_version=catalog.format_version,
            uuid=catalog.uuid.hex(),
            created_s=catalog.created_s,
            capacity_bytes=(directory / SLOTS_NAME).stat().st_size,
            used_bytes=tally.slot_bytes,
            open_in_process=holder_of(directory),
            keyspaces=tally.reports(),
        )
    finally:
        if shared is None:
            catalog.close()


def verify_directory(
    path: str | os.PathLike[str],
    progress: Callable[[int, int], None] | None = None,
    *,
    repair: bool = False,
) -> VerifyReport:
    """Reads every block and compares it with its catalog entry; with `repair` bad entries are deleted.

    progress(checked, all) is called now and then. Raises LockedError while a store has the directory open,
    StorageError or FormatError where it cannot be read at all.
    """
    directory = _existing(path)
    lock = DirectoryLock(directory)
    catalog: Catalog | None = None
    try:
        catalog = Catalog(directory / CATALOG_NAME)
        size_bytes = (directory / SLOTS_NAME).stat().st_size
        file = SlotFile(directory, size_bytes, "auto")
        engine, _ = open_engine("auto", 32)
        try:
            return _verify(directory, catalog, file, engine, progress, repair)
        finally:
            engine.close()
            file.close()
    finally:
        if catalog is not None:
            catalog.close()
        lock.release()


def _existing(path: str | os.PathLike[str]) -> Path:
    directory = Path(path)
    for part in (directory, directory / CATALOG_NAME / "data.mdb", directory / SLOTS_NAME):
        if not part.exists():
            raise StorageError(f"{part} does not exist: {directory} is not the directory of an NVMe tier")
    return directory


def _verify(
    directory: Path,
    catalog: Catalog,
    file: SlotFile,
    engine: BlockIO,
    progress: Callable[[int, int], None] | None,
    repair: bool,
) -> VerifyReport:
    specs = catalog.keyspaces()
    tally = _Tally(specs)
    reasons: Counter[str] = Counter()
    total, checked, repaired = len(catalog), 0, 0
    owners: dict[int, int] = {}  # granule -> how many entries start there
    with mmap.mmap(-1, _BUFFER_BYTES) as memory:
        buffer = _Buffer(memory, engine, file)
        for batch in catalog.scan():
            tally.add(batch)
            spec = specs.get(batch.digest)
            faults = np.array(entry_faults(batch, spec, file.kept_bytes), dtype="<U24")
            for position, slot in enumerate(batch.entries["slot"].tolist()):
                owners[slot] = owners.get(slot, 0) + 1
                if owners[slot] > 1 and not faults[position]:
                    faults[position] = "slot of another block"
            readable = np.flatnonzero(faults == "")
            step = 1 if spec is None else max(1, _BUFFER_BYTES // slot_bytes_for(spec.block_bytes))
            for start in range(0, len(readable), step):
                part = readable[start : start + step]
                faults[part] = buffer.check(batch, part)
                if progress is not None:
                    progress(checked + int(part[-1]) + 1, total)
            checked += len(faults)
            bad = faults != ""
            reasons.update(faults[bad].tolist())
            if repair and bad.any():
                catalog.commit([Delete(batch.digest, batch.hashes[bad])])
                repaired += int(bad.sum())
        buffer.close()
    if progress is not None:
        progress(checked, total)
    return VerifyReport(
        directory=str(directory),
        format_version=catalog.format_version,
        checked=checked,
        good=checked - reasons.total(),
        bad=reasons.total(),
        repaired=repaired,
        reasons=dict(reasons),
        keyspaces=tally.reports(),
    )


class _Buffer:
    """Reads blocks into one buffer and checks them there; a block larger than it gets one of its own."""

    def __init__(self, memory: mmap.mmap, engine: BlockIO, file: SlotFile) -> None:
        self._array: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = np.frombuffer(memory, np.uint8)
        self._engine = engine
        self._file = file
        self._pool = CopyPool(1)

    def check(self, batch: EntryBatch, part: Int64Array) -> list[str]:
        """What is wrong with the blocks at `part`, '' for nothing."""
        entries = batch.entries[part]
        lengths = entries["length"].astype(np.int64)
        rounded = -(-lengths // SLOT_GRANULE_BYTES) * SLOT_GRANULE_BYTES
        ends = np.cumsum(rounded)
        own = None
        array = self._array
        assert array is not None
        if int(ends[-1]) > len(array):
            own = mmap.mmap(-1, int(ends[-1]))
            array = np.frombuffer(own, np.uint8)
        addresses = int(array.__array_interface__["data"][0]) + ends - rounded
        moved = rounded if self._file.direct else lengths
        job = self._engine.submit(
            Operation.READ, self._file.fd, slot_offsets(entries["slot"], SLOT_GRANULE_BYTES), addresses, moved
        )
        if not job.wait(_READ_TIMEOUT_S):
            raise StorageError(f"{self._file.path}: reading did not end within {_READ_TIMEOUT_S:.0f} s")
        sums = self._pool.crc32c(addresses, lengths)
        same = sums == entries["checksum"]
        return [
            "unreadable" if status != BlockStatus.OK else "" if right else "wrong checksum"
            for status, right in zip(job.status.tolist(), same.tolist(), strict=True)
        ]

    def close(self) -> None:
        self._array = None
        self._pool.close()


class _Tally:
    """Adds up the keyspaces while the catalog is walked."""

    def __init__(self, specs: dict[bytes, KeyspaceSpec]) -> None:
        self._specs = specs
        self._sums: dict[bytes, list[int]] = {digest: [0, 0, 0, 0] for digest in specs}
        self.slot_bytes = 0

    def add(self, batch: EntryBatch) -> None:
        blocks, size, oldest, newest = self._sums.get(batch.digest, [0, 0, 0, 0])
        written = batch.entries["written_s"]
        first, last = int(written.min()), int(written.max())
        lengths = batch.entries["length"].astype(np.int64)
        self.slot_bytes += int((-(-lengths // SLOT_GRANULE_BYTES) * SLOT_GRANULE_BYTES).sum())
        self._sums[batch.digest] = [
            blocks + len(batch.hashes),
            size + int(lengths.sum()),
            min(first, oldest) if blocks else first,
            max(last, newest),
        ]

    def reports(self) -> list[KeyspaceReport]:
        now = time.time()
        return [
            KeyspaceReport(
                digest=digest.hex(),
                spec=self._specs.get(digest),
                blocks=blocks,
                bytes=size,
                oldest_s=max(0.0, now - oldest) if blocks else 0.0,
                newest_s=max(0.0, now - newest) if blocks else 0.0,
            )
            for digest, (blocks, size, oldest, newest) in self._sums.items()
        ]
