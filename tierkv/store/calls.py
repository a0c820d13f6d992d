"""StoreCalls: what every store does, in this process or behind an agent, and the parts of it that a user may need.

Store and AgentStore have them all (tierkv/testing/stores.py holds both to it). They are protocols: a stand-in for tests
has just the calls of the part that it stands in for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tierkv.fragments import Fragments
from tierkv.jobs import Job
from tierkv.keys import Keyspace, KeyspaceSpec
from tierkv.store.facade import Match, Query
from tierkv.store.statistics import StoreStats
from tierkv.types import BoolArray, HashArray, UInt8Array


class LeaseCalls(Protocol):
    """What lease() returns."""

    held: list[BoolArray]
    """For each query (n,) bool: which blocks were there and are now held."""

    def extend(self, ttl_s: float) -> bool:
        """Moves the deadline to `ttl_s` from now; False if the lease has ended."""

    def release(self) -> bool:
        """Ends the lease; False if it had ended already."""


class LookupCalls(Protocol):
    """Finding blocks and holding them."""

    def lookup(self, queries: Sequence[Query]) -> list[UInt8Array]:
        """For each query (n,) uint8: the mask of the tiers (bit TierKind) that hold each block, 0 for none."""

    def touch(self, space: Keyspace, hashes: HashArray) -> None:
        """Makes (n, 32) blocks the most recently used."""

    def lease(self, queries: Sequence[Query], ttl_s: float) -> LeaseCalls:
        """Holds those blocks that are there, until the lease is released or `ttl_s` have passed."""

    def stage(self, lease: Any, timeout_s: float | None = None) -> Job:
        """Brings the blocks of a lease of this store to DRAM."""


class MoveCalls(Protocol):
    """Moving blocks between the store and the caller's memory, in the background."""

    def load(
        self,
        space: Keyspace,
        hashes: HashArray,
        into: Fragments,
        part: int = 0,
        timeout_s: float | None = None,
    ) -> Job:
        """Loads one part of (n, 32) blocks; the job has (n,) BlockStatus, and the memory holds what is OK."""

    def save(
        self,
        space: Keyspace,
        hashes: HashArray,
        from_: Fragments,
        part: int = 0,
        timeout_s: float | None = None,
    ) -> Job:
        """Saves one part of (n, 32) blocks from memory that must not change until the job is done."""


class StoreCalls(LookupCalls, MoveCalls, Protocol):
    """All that Store and AgentStore have in common."""

    def open(self, spec: KeyspaceSpec) -> Keyspace:
        """The keyspace that the other calls take."""

    def match(self, space: Keyspace, hashes: HashArray) -> Match:
        """The longest prefix of (n, 32) blocks, in the order of the chain, that is there."""

    def remove(self, space: Keyspace, hashes: HashArray) -> int:
        """Removes blocks from every tier; returns how many copies that were."""

    def clear(self, space: Keyspace, timeout_s: float = 30.0) -> int:
        """Removes all blocks of a keyspace from every tier; returns how many copies that were."""

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Writes to the next tier what only DRAM holds; False if not all was written by then."""

    def stats(self) -> StoreStats:
        """What it holds and what it did."""

    def close(self) -> None:
        """Ends it. Idempotent."""


class Attachable(Protocol):
    """Of a store behind an agent, which may be away: its look-ups then find nothing, and its jobs fail."""

    @property
    def attached(self) -> bool:
        """Whether the agent can be asked now."""
