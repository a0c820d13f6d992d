"""What an agent tells about itself: its store's statistics, and its clients'. The answer of STATS, as JSON.

Fields are only ever added: a client of another version ignores what it does not know and has defaults for what it
misses.
"""

from __future__ import annotations

from importlib import metadata

import msgspec

from tierkv.store import StoreStats

MAX_CLIENTS_LISTED = 256


class ClientStats(msgspec.Struct, kw_only=True):
    """One attached client and what it holds."""

    name: str
    """As it called itself, with its process id."""
    reserved_bytes: int
    leased_bytes: int


class AgentStats(StoreStats, kw_only=True):
    """The store's statistics, and the agent's."""

    version: str = ""
    started_s: float = 0.0
    """When the agent was started: seconds since 1970-01-01 UTC."""
    accepting: bool = True
    """Whether new clients are taken."""
    client_count: int = 0
    max_clients: int = 0
    reserved_bytes: int = 0
    """DRAM that clients hold reserved for saves."""
    leased_bytes: int = 0
    """Blocks that clients hold by leases. A block with two leases counts twice."""
    clients: list[ClientStats] = msgspec.field(default_factory=list)
    """Those that hold most, at most MAX_CLIENTS_LISTED."""


def version() -> str:
    """The installed version of tierkv."""
    try:
        return metadata.version("tierkv")
    except metadata.PackageNotFoundError:
        return "unknown"
