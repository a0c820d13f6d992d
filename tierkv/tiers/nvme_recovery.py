"""What a reopened directory still holds: the catalog's entries, sorted out before anything is allocated.

Entries that cannot be right are deleted and counted by reason; the others' slots are taken in the slot
map. Of two entries that name the same slot the newer one wins. Thread safety: made by one thread;
residents() may be called from any.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np

from tierkv.catalog import CODEC_NONE, Catalog, CatalogWriteError, Delete, EntryArray, EntryBatch
from tierkv.keys import KeyspaceSpec
from tierkv.memory import SlotMap, slot_bytes_for
from tierkv.tiers.base import Residents
from tierkv.tiers.nvme_table import Found, SlotTable, names_of
from tierkv.types import SLOT_GRANULE_BYTES, HashArray

_log = logging.getLogger(__name__)
RESIDENTS_BLOCKS = 65536
_DELETES_AT_ONCE = 50_000


def entry_faults(batch: EntryBatch, spec: KeyspaceSpec | None, file_bytes: int) -> list[str]:
    """(n,) what is wrong with each entry, '' for nothing, judged without reading its block."""
    entries = batch.entries
    if spec is None:
        return ["unknown keyspace"] * len(entries)
    slot_bytes = slot_bytes_for(spec.block_bytes)
    ends = entries["slot"].astype(np.int64) * SLOT_GRANULE_BYTES + slot_bytes
    faults = np.full(len(entries), "", dtype="<U24")
    faults[ends > file_bytes] = "beyond the slot file"
    faults[(entries["length"] < 1) | (entries["length"] > spec.block_bytes)] = "wrong length"
    faults[entries["codec"] != CODEC_NONE] = "unknown codec"
    faults[~batch.intact] = "damaged entry"
    found: list[str] = faults.tolist()
    return found


class Recovery:
    """Sorts the catalog out at opening. `dropped`: reason -> entries deleted; `notes`: the same in words."""

    def __init__(self, catalog: Catalog, slots: SlotMap, table: SlotTable, kept_bytes: int) -> None:
        """kept_bytes: entries beyond this much of the slot file are dropped."""
        self._catalog = catalog
        self.dropped: Counter[str] = Counter()
        self._specs = catalog.keyspaces()
        self._drops: list[Delete] = []
        hashes: defaultdict[bytes, list[HashArray]] = defaultdict(list)
        entries: defaultdict[bytes, list[EntryArray]] = defaultdict(list)
        for batch in catalog.scan():
            faults = np.array(entry_faults(batch, self._specs.get(batch.digest), kept_bytes), dtype="<U24")
            good = faults == ""
            if not good.all():
                self.dropped.update(faults[~good].tolist())
                self._drops.append(Delete(batch.digest, batch.hashes[~good]))
            if good.any():
                hashes[batch.digest].append(batch.hashes[good])
                entries[batch.digest].append(batch.entries[good])
        self._found: list[Residents] | None = []
        for digest in hashes:
            self._found += self._adopt(
                digest, np.concatenate(hashes[digest]), np.concatenate(entries[digest]), slots, table
            )
        self._delete_dropped()
        self.notes = [
            f"recovery dropped {count} catalog entries: {reason}" for reason, count in self.dropped.items()
        ]

    def residents(self) -> Iterator[Residents]:
        """The first call yields what was found at opening (and lets it go), later ones read the catalog
        again."""
        found, self._found = self._found, None
        if found is not None:
            yield from found
            return
        for digest, spec in self._specs_now().items():
            batches = [batch for batch in self._catalog.scan(digest) if len(batch.hashes)]
            if batches:
                hashes = np.concatenate([batch.hashes[batch.intact] for batch in batches])
                entries = np.concatenate([batch.entries[batch.intact] for batch in batches])
                yield from _in_order(spec, hashes, entries)

    def _specs_now(self) -> dict[bytes, KeyspaceSpec]:
        self._specs = self._catalog.keyspaces()
        return self._specs

    def _adopt(
        self, digest: bytes, hashes: HashArray, entries: EntryArray, slots: SlotMap, table: SlotTable
    ) -> list[Residents]:
        spec = self._specs[digest]
        slot_bytes = slot_bytes_for(spec.block_bytes)
        newest_first = np.argsort(entries["generation"])[::-1]
        hashes, entries = hashes[newest_first], entries[newest_first]
        taken = np.zeros(len(entries), np.bool_)
        if slot_bytes <= slots.slab_bytes:
            taken = slots.adopt(slot_bytes, entries["slot"])
        if not taken.all():
            self.dropped["slot of another block"] += int((~taken).sum())
            self._drops.append(Delete(digest, hashes[~taken]))
            hashes, entries = hashes[taken], entries[taken]
        found = Found(entries["generation"], entries["checksum"], entries["length"])
        if len(entries):
            table.put(slot_bytes, entries["slot"], names_of(digest, hashes), found)
        return list(_in_order(spec, hashes, entries))

    def _delete_dropped(self) -> None:
        for drop in self._drops:
            for start in range(0, len(drop.hashes), _DELETES_AT_ONCE):
                try:
                    self._catalog.commit([Delete(drop.digest, drop.hashes[start : start + _DELETES_AT_ONCE])])
                except CatalogWriteError as error:  # they are dropped again at the next opening
                    _log.warning("dropped catalog entries could not be deleted: %s", error)
                    return
        self._drops = []


def _in_order(spec: KeyspaceSpec, hashes: HashArray, entries: EntryArray) -> Iterator[Residents]:
    order = np.argsort(entries["generation"])
    for start in range(0, len(order), RESIDENTS_BLOCKS):
        part = order[start : start + RESIDENTS_BLOCKS]
        yield Residents(spec, hashes[part], np.ascontiguousarray(entries["slot"][part]))
