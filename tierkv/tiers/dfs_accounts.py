"""Accounts: what a content-addressed tier believes to fill, without a slot map to ask.

Two things are counted for each keyspace: slots that were granted and not written yet, and files known to be
there (written, listed or probed). Files are remembered as 64-bit keys, about 8 bytes each; a collision costs
one block of capacity, nothing else. Thread safety: one lock.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tierkv.types import HashArray

Keys = npt.NDArray[np.uint64]
_SMALLEST_MERGE = 4096


class KeySet:
    """A set of 64-bit keys: a sorted array and what was changed since. Not thread safe."""

    def __init__(self) -> None:
        self._base: Keys = np.empty(0, np.uint64)
        self._added: set[int] = set()
        self._removed: set[int] = set()

    def __len__(self) -> int:
        return len(self._base) + len(self._added) - len(self._removed)

    def _in_base(self, keys: Keys) -> npt.NDArray[np.bool_]:
        if not len(self._base):
            return np.zeros(len(keys), np.bool_)
        at = np.minimum(np.searchsorted(self._base, keys), len(self._base) - 1)
        found: npt.NDArray[np.bool_] = self._base[at] == keys
        return found

    def add(self, keys: Keys) -> int:
        """How many were not in it."""
        before = len(self)
        for key, based in zip(keys.tolist(), self._in_base(keys).tolist(), strict=True):
            if based:
                self._removed.discard(key)
            else:
                self._added.add(key)
        grown = len(self) - before
        self._merge_if_due()
        return grown

    def discard(self, keys: Keys) -> int:
        """How many were in it."""
        before = len(self)
        for key, based in zip(keys.tolist(), self._in_base(keys).tolist(), strict=True):
            if based:
                self._removed.add(key)
            else:
                self._added.discard(key)
        shrunk = before - len(self)
        self._merge_if_due()
        return shrunk

    def _merge_if_due(self) -> None:
        if len(self._added) + len(self._removed) <= max(_SMALLEST_MERGE, len(self._base) // 4):
            return
        kept = self._base[~np.isin(self._base, _as_keys(self._removed))]
        self._base = np.sort(np.concatenate([kept, _as_keys(self._added)]))
        self._added.clear()
        self._removed.clear()


def _as_keys(keys: set[int]) -> Keys:
    return np.fromiter(keys, np.uint64, len(keys))


@dataclass(slots=True)
class _Account:
    file_bytes: int
    granted: int = 0
    files: KeySet = field(default_factory=KeySet)


class Accounts:
    """Files and grants of all keyspaces, by their digests."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._accounts: dict[bytes, _Account] = {}
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def available(self, file_bytes: int) -> int:
        return max(0, self._capacity_bytes - self._used_bytes) // file_bytes

    def grant(self, digest: bytes, file_bytes: int, count: int) -> bool:
        """Books `count` files; False, and nothing changed, when the capacity would be passed."""
        with self._lock:
            if count * file_bytes > self._capacity_bytes - self._used_bytes and count:
                return False
            self._of(digest, file_bytes).granted += count
            self._used_bytes += count * file_bytes
            return True

    def written(self, digest: bytes, file_bytes: int, hashes: HashArray) -> None:
        """Grants that became files."""
        with self._lock:
            account = self._of(digest, file_bytes)
            spent = min(len(hashes), account.granted)
            account.granted -= spent
            self._used_bytes += (account.files.add(_keys_of(hashes)) - spent) * file_bytes

    def given_back(self, digest: bytes, file_bytes: int, count: int) -> None:
        """Grants that will not be used."""
        with self._lock:
            account = self._of(digest, file_bytes)
            grants = min(count, account.granted)
            account.granted -= grants
            self._used_bytes -= grants * file_bytes

    def found(self, digest: bytes, file_bytes: int, hashes: HashArray) -> None:
        """Files that others wrote, or an earlier process."""
        with self._lock:
            self._used_bytes += self._of(digest, file_bytes).files.add(_keys_of(hashes)) * file_bytes

    def freed(self, digest: bytes, file_bytes: int, hashes: HashArray) -> None:
        """Files and grants given back: what was no file was a grant."""
        with self._lock:
            account = self._of(digest, file_bytes)
            files = account.files.discard(_keys_of(hashes))
            grants = min(len(hashes) - files, account.granted)
            account.granted -= grants
            self._used_bytes -= (files + grants) * file_bytes

    def _of(self, digest: bytes, file_bytes: int) -> _Account:
        account = self._accounts.get(digest)
        if account is None:
            account = self._accounts[digest] = _Account(file_bytes)
        return account


def _keys_of(hashes: HashArray) -> Keys:
    """(n,) keys of (n, 32) hashes: their words mixed, since an engine's hashes may be shorter than 32
    bytes."""
    words = np.ascontiguousarray(hashes).view(np.uint64)
    keys: Keys = words[:, 0] ^ (words[:, 1] * np.uint64(0x9E37_79B9_7F4A_7C15)) ^ words[:, 2] ^ words[:, 3]
    return keys
