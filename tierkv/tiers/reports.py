"""What checking a tier's directory finds: the same words for every medium."""

from __future__ import annotations

import msgspec

from tierkv.keys import KeyspaceSpec


class KeyspaceReport(msgspec.Struct, frozen=True, kw_only=True):
    """One keyspace of a directory. Ages are of the blocks' writing; 0 where there are none."""

    digest: str
    """In hex."""
    spec: KeyspaceSpec | None
    """None: there are blocks but no readable spec, so nobody will find them."""
    blocks: int
    bytes: int
    """Of the blocks without the rounding of their slots (nvme), or of the files with their headers (dfs)."""
    oldest_s: float
    newest_s: float


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a check of every block found."""

    directory: str
    format_version: int
    checked: int
    good: int
    bad: int
    repaired: int
    """Bad blocks that were deleted."""
    reasons: dict[str, int]
    """Why, for the bad ones."""
    keyspaces: list[KeyspaceReport]
