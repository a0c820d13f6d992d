"""StoreLike: the calls that every store has, in this process or behind an agent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tierkv.fragments import Fragments
from tierkv.jobs import Job
from tierkv.keys import Keyspace, KeyspaceSpec
from tierkv.store import Match, Query, StoreStats
from tierkv.types import BoolArray, HashArray, UInt8Array


class LeaseLike(Protocol):
    """What lease() returns."""

    held: list[BoolArray]

    def extend(self, ttl_s: float) -> bool:
        """Moves the deadline; False if the lease has ended."""

    def release(self) -> bool:
        """Ends the lease; False if it had ended."""


class StoreLike(Protocol):
    """The calls that Store and AgentStore have in common."""

    def open(self, spec: KeyspaceSpec) -> Keyspace:
        """Opens a keyspace."""

    def match(self, space: Keyspace, hashes: HashArray) -> Match:
        """The longest prefix."""

    def lookup(self, queries: Sequence[Query]) -> list[UInt8Array]:
        """Masks of tiers."""

    def touch(self, space: Keyspace, hashes: HashArray) -> None:
        """Makes blocks most recently used."""

    def lease(self, queries: Sequence[Query], ttl_s: float) -> Any:
        """Holds blocks: a LeaseLike."""

    def stage(self, lease: Any, timeout_s: float | None = None) -> Job:
        """Brings leased blocks to DRAM."""

    def load(
        self,
        space: Keyspace,
        hashes: HashArray,
        into: Fragments,
        part: int = 0,
        timeout_s: float | None = None,
    ) -> Job:
        """Loads blocks."""

    def save(
        self,
        space: Keyspace,
        hashes: HashArray,
        from_: Fragments,
        part: int = 0,
        timeout_s: float | None = None,
    ) -> Job:
        """Saves blocks."""

    def remove(self, space: Keyspace, hashes: HashArray) -> int:
        """Removes blocks."""

    def clear(self, space: Keyspace) -> int:
        """Removes a keyspace."""

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Writes DRAM below."""

    def stats(self) -> StoreStats:
        """Counters."""

    def close(self) -> None:
        """Ends it."""
