"""What a replay found out, as one typed tree that goes to JSON and from there to tables and reports.

A figure that does not exist (a percentile of nothing, a rate of no time) is None, never 0.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of a call, in milliseconds."""

    p50: float | None
    p99: float | None
    count: int


class TierResult(msgspec.Struct, frozen=True, kw_only=True):
    """One tier's share. Rates are bytes by the time in which at least one such transfer was under way."""

    hit_blocks: int
    read_bytes: int
    read_gb_s: float | None
    written_blocks: int
    written_bytes: int
    write_gb_s: float | None
    evicted_blocks: int
    capacity_blocks: int | None
    """Blocks of this replay's size that fit; None: no limit of ours."""
    blocks: int
    """Blocks held at the end."""
    blocks_at_start: int
    """Blocks that were there before the first request: an earlier run's."""
    healthy: bool


class Series(msgspec.Struct, kw_only=True):
    """Samples over the replay, all lists of one length; hits are cumulative, blocks are what the tier
    holds."""

    request: list[int] = msgspec.field(default_factory=list)
    seconds: list[float] = msgspec.field(default_factory=list)
    referenced_blocks: list[int] = msgspec.field(default_factory=list)
    prefix_hit_rate: list[float | None] = msgspec.field(default_factory=list)
    hits: dict[str, list[int]] = msgspec.field(default_factory=dict)
    blocks: dict[str, list[int]] = msgspec.field(default_factory=dict)


class ReplayResult(msgspec.Struct, kw_only=True):
    """A whole replay. Times exclude nothing unless named: `seconds` is the wall time of all requests."""

    trace: str
    requests: int
    blocks: int
    """Block references: the sum of the requests' lengths."""
    unique_blocks: int
    block_bytes: int
    hit_blocks: int
    """Blocks that were matched and loaded, counted up to each request's first failure."""
    prefix_hit_rate: float | None
    hits: dict[str, int]
    tiers: dict[str, TierResult]
    loaded_bytes: int
    saved_blocks: int
    """Blocks that were new to the store."""
    wrong_blocks: int | None
    """Loaded blocks with other bytes than their hash demands; None: not verified."""
    verified_blocks: int
    failed_loads: dict[str, int]
    """Blocks that were matched but not loaded, by reason."""
    failed_saves: dict[str, int]
    dropped_saves: int
    match_ms: Latency
    load_ms: Latency
    save_ms: Latency
    load_gb_s: float | None
    """Loaded bytes by the time the requests waited for them."""
    seconds: float
    match_s: float
    load_s: float
    save_s: float
    payload_s: float
    """Time spent making and checking payloads; no tier's time."""
    series: Series
    config: dict[str, Any]
    machine: dict[str, Any] = msgspec.field(default_factory=dict)


def latency(samples_s: list[float]) -> Latency:
    """Percentiles of samples in seconds; None where there are none."""
    if not samples_s:
        return Latency(p50=None, p99=None, count=0)
    p50, p99 = np.percentile(np.array(samples_s), [50, 99]) * 1000
    return Latency(p50=float(p50), p99=float(p99), count=len(samples_s))


def rate_gb_s(size_bytes: int, time_s: float) -> float | None:
    """10^9 bytes a second; None where nothing was moved or no time passed."""
    return size_bytes / time_s / 1e9 if size_bytes > 0 and time_s > 0 else None
