"""Checks of what callers pass to a store, here or through the agent."""

from __future__ import annotations

from tierkv.errors import ArgumentError
from tierkv.fragments import Fragments
from tierkv.keys import Keyspace
from tierkv.types import HashArray


def check_part(space: Keyspace, part: int) -> None:
    """Raises ArgumentError if the keyspace has no such part."""
    if not 0 <= part < len(space.part_bytes):
        raise ArgumentError(f"part is {part}: {space} has parts 0 to {len(space.part_bytes) - 1}")


def check_fragments(space: Keyspace, hashes: HashArray, fragments: Fragments, part: int) -> None:
    """Raises ArgumentError if the memory does not fit the blocks."""
    if not isinstance(fragments, Fragments):
        raise ArgumentError(f"memory is described by tierkv.Fragments, got {type(fragments).__name__}")
    check_part(space, part)
    if fragments.count != len(hashes):
        raise ArgumentError(
            f"{len(hashes)} hashes but {fragments.count} blocks of memory: they must be as many"
        )
    expected = space.part_bytes[part]
    if fragments.bytes_per_block != expected:
        raise ArgumentError(
            f"the memory has {fragments.bytes_per_block} bytes a block, but part {part} of {space} has {expected}"
        )


def timeout_or(timeout_s: float | None, default_s: float) -> float:
    """`timeout_s`, or the default for None; ArgumentError unless it is positive."""
    if timeout_s is None:
        return default_s
    if not timeout_s > 0:
        raise ArgumentError(f"timeout_s is {timeout_s!r}: a positive number of seconds is needed")
    return timeout_s


def check_ttl(ttl_s: float) -> None:
    """Raises ArgumentError unless the time to live is positive."""
    if not ttl_s > 0:
        raise ArgumentError(f"ttl_s is {ttl_s!r}: a lease needs a positive number of seconds")
