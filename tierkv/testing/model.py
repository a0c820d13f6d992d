"""Plain-dict models of what a store may answer. A test runs one beside the real store and checks both directions.

ModelStore bounds the truth from both sides: a block MUST_NOT be found (never saved whole, or removed since), MAY be
found (saved, but evictions and faults may have taken it), or MUST be found (leased, seen in place while nothing
moved, or saved into a store that is large enough for everything). LruModel is exact, for a store of one tier.

Neither knows how the store works. Thread safety: none; the test's thread owns them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from tierkv.keys import Keyspace
from tierkv.types import BlockStatus, BoolArray, HashArray, UInt8Array

Key = tuple[bytes, bytes]
"""(keyspace digest, hash)."""


class Presence(Enum):
    """What the model says about finding a block."""

    MUST_NOT = "must not be found"
    MAY = "may be found"
    MUST = "must be found"


@dataclass(slots=True)
class _Block:
    presence: Presence = Presence.MUST_NOT
    parts: set[int] = field(default_factory=set)
    first_part_s: float = 0.0
    last_part_s: float = 0.0
    holds: int = 0
    """Leases that hold it."""


def keys_of(space: Keyspace, hashes: HashArray) -> list[Key]:
    """The keys of (n, 32) hashes in a keyspace."""
    return [(space.digest, row.tobytes()) for row in hashes]


class ModelStore:
    """lossless: nothing is evicted or lost by a fault, so what was saved must be found."""

    def __init__(self, *, save_timeout_s: float, lossless: bool = False) -> None:
        self._blocks: dict[Key, _Block] = {}
        self._save_timeout_s = save_timeout_s
        self.lossless = lossless

    def _block(self, key: Key) -> _Block:
        return self._blocks.setdefault(key, _Block())

    def presence(self, space: Keyspace, block_hash: bytes) -> Presence:
        """What the model knows of one block."""
        block = self._blocks.get((space.digest, block_hash))
        return block.presence if block is not None else Presence.MUST_NOT

    def known(self) -> list[Key]:
        """Every block that may be found."""
        return [key for key, block in self._blocks.items() if block.presence is not Presence.MUST_NOT]

    # What the test did.

    def saved(
        self, space: Keyspace, hashes: HashArray, part: int, statuses: Sequence[int], now_s: float
    ) -> None:
        """A save of one part ended with these statuses, at `now_s` of the store's clock."""
        for key, status in zip(keys_of(space, hashes), statuses, strict=True):
            if status != BlockStatus.OK:
                continue
            block = self._block(key)
            if block.presence is Presence.MUST:
                continue
            if block.parts and now_s - block.last_part_s >= self._save_timeout_s:
                block.parts.clear()  # whatever came before has certainly expired
            if not block.parts:
                block.first_part_s = now_s
            block.parts.add(part)
            block.last_part_s = now_s
            if len(block.parts) < len(space.part_bytes):
                continue
            in_time = now_s - block.first_part_s < self._save_timeout_s
            block.parts.clear()
            if self.lossless and in_time:
                block.presence = Presence.MUST
            elif block.presence is Presence.MUST_NOT:
                block.presence = Presence.MAY

    def saved_whole(self, space: Keyspace, hashes: HashArray) -> None:
        """In a lossless store: all parts were saved, in whatever order, so the blocks must be found."""
        for key in keys_of(space, hashes):
            block = self._block(key)
            if block.presence is Presence.MAY:
                block.presence = Presence.MUST

    def removed(self, space: Keyspace, hashes: HashArray) -> None:
        """remove() returned."""
        for key in keys_of(space, hashes):
            self._blocks.pop(key, None)

    def cleared(self, space: Keyspace) -> None:
        """clear() returned."""
        for key in [key for key in self._blocks if key[0] == space.digest]:
            del self._blocks[key]

    def leased(self, space: Keyspace, hashes: HashArray, held: BoolArray) -> None:
        """A lease holds the blocks of `held`: until it ends they must be found."""
        for key, is_held in zip(keys_of(space, hashes), held.tolist(), strict=True):
            block = self._block(key)
            if not is_held:
                _expect(
                    block.presence is not Presence.MUST, key, "was not leased although it", block.presence
                )
                continue
            _expect(block.presence is not Presence.MUST_NOT, key, "was leased although it", block.presence)
            block.holds += 1
            block.presence = Presence.MUST

    def lease_ended(self, space: Keyspace, hashes: HashArray, held: BoolArray) -> None:
        """A lease was released or has expired."""
        for key, is_held in zip(keys_of(space, hashes), held.tolist(), strict=True):
            block = self._blocks.get(key)
            if is_held and block is not None and block.holds:
                block.holds -= 1
                if not block.holds and not self.lossless and block.presence is Presence.MUST:
                    block.presence = Presence.MAY

    def lost(self, keys: Iterable[Key] | None = None) -> None:
        """These blocks (None: all) may be gone: a fault hit them, or evictions may have."""
        for key in list(self._blocks) if keys is None else keys:
            block = self._blocks.get(key)
            if block is not None and block.presence is Presence.MUST:
                block.presence = Presence.MAY

    def restarted(self, survives: Callable[[Key, Presence], Presence]) -> None:
        """The store was opened again. survives(key, presence) says what must have become of a block that could
        be found; parts of unfinished blocks and leases are gone."""
        for key, block in list(self._blocks.items()):
            if block.presence is Presence.MUST_NOT:
                del self._blocks[key]
                continue
            block.parts.clear()
            block.holds = 0
            block.presence = survives(key, block.presence)

    # What the store answered.

    def check_found(self, space: Keyspace, hashes: HashArray, found: Sequence[bool], doing: str) -> None:
        """A look-up of each block by itself: AssertionError if one contradicts the model."""
        for key, is_found in zip(keys_of(space, hashes), found, strict=True):
            presence = self._blocks.get(key, _Block()).presence
            if is_found:
                _expect(presence is not Presence.MUST_NOT, key, f"{doing}: found, but it", presence)
            else:
                _expect(presence is not Presence.MUST, key, f"{doing}: not found, but it", presence)

    def check_lookup(self, space: Keyspace, hashes: HashArray, masks: UInt8Array) -> None:
        """The answer of Store.lookup for one query."""
        self.check_found(space, hashes, [mask != 0 for mask in masks.tolist()], "lookup")

    def check_match(self, space: Keyspace, hashes: HashArray, length: int) -> None:
        """The answer of Store.match: everything before `length` may be there, and the block at it may be missing."""
        assert 0 <= length <= len(hashes)
        self.check_found(space, hashes[:length], [True] * length, "match")
        if length < len(hashes):
            self.check_found(space, hashes[length : length + 1], [False], "match")

    def check_load(
        self,
        space: Keyspace,
        hashes: HashArray,
        statuses: Sequence[int],
        faults: frozenset[BlockStatus] = frozenset(),
    ) -> None:
        """The statuses of a load; the bytes are the caller's to compare. faults: what else may come out now."""
        allowed = {BlockStatus.OK, BlockStatus.MISS, *faults}
        for key, status in zip(keys_of(space, hashes), statuses, strict=True):
            presence = self._blocks.get(key, _Block()).presence
            _expect(status in allowed, key, f"load gave {BlockStatus(status).name}, which", presence)
            if status == BlockStatus.OK:
                _expect(presence is not Presence.MUST_NOT, key, "loaded, but it", presence)
            elif status == BlockStatus.MISS and not faults:
                _expect(presence is not Presence.MUST, key, "load missed it, but it", presence)


def _expect(condition: bool, key: Key, what: str, presence: Presence) -> None:
    assert condition, f"block {key[1].hex()[:12]} of keyspace {key[0].hex()[:8]}: {what} {presence.value}"


class LruModel:
    """The exact content of a store of one tier with `capacity` blocks: least recently used, suffix first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._order: dict[Key, None] = {}
        """Oldest first."""
        self._pins: Counter[Key] = Counter()
        self.evicted = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)

    def content(self) -> list[Key]:
        """Oldest first."""
        return list(self._order)

    def match(self, keys: Sequence[Key]) -> int:
        """The longest prefix that is there."""
        for length, key in enumerate(keys):
            if key not in self._order:
                return length
        return len(keys)

    def touch(self, keys: Sequence[Key]) -> None:
        """Most recently used, the head of the chain last of all."""
        for key in reversed(keys):
            if key in self._order:
                del self._order[key]
                self._order[key] = None

    def save(self, keys: Sequence[Key]) -> list[bool]:
        """Saves a chain; True for what is there afterwards. A chain longer than the tier loses its tail."""
        kept = keys[: self.capacity]
        self.touch(kept)
        stored = []
        for key in kept:
            if key not in self._order:
                if len(self._order) >= self.capacity and not self._evict_one(kept):
                    stored.append(False)
                    continue
                self._order[key] = None
            stored.append(True)
        self.touch(kept)
        return stored + [False] * (len(keys) - len(kept))

    def _evict_one(self, wanted: Sequence[Key]) -> bool:
        spared = set(wanted)
        for key in self._order:
            if not self._pins[key] and key not in spared:
                del self._order[key]
                self.evicted += 1
                return True
        return False

    def remove(self, keys: Iterable[Key]) -> int:
        """Removes blocks; returns how many were there."""
        count = 0
        for key in keys:
            if key in self._order:
                del self._order[key]
                self._pins.pop(key, None)
                count += 1
        return count

    def pin(self, keys: Iterable[Key]) -> list[Key]:
        """Keeps those that are there from being evicted, and returns them."""
        held = [key for key in keys if key in self._order]
        self._pins.update(held)
        return held

    def unpin(self, keys: Iterable[Key]) -> None:
        """Ends a pin()."""
        for key in keys:
            if self._pins[key] > 0:
                self._pins[key] -= 1
