"""What an agent's statistics are called as Prometheus metrics, and how they are read back.

The tables below are the one place where a metric gets its name; docs/metrics.md describes them, and a test holds the
two together. Names follow Prometheus' conventions: base units, the unit last, `_total` for counters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from tierkv import _native
from tierkv.agent.statistics import AgentStats
from tierkv.errors import FormatError
from tierkv.store import LATENCY_BOUNDS_S, OPERATIONS, LatencyStats, TierStats
from tierkv.tiers.dfs import UNLIMITED_BYTES
from tierkv.types import BlockStatus

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""(sample name, sorted labels) -> value."""

SCALARS: tuple[tuple[str, str, str], ...] = (
    ("tierkv_saved_blocks_total", "saved_blocks", "Block parts that were stored in DRAM."),
    ("tierkv_known_blocks_total", "known_blocks", "Saves of blocks that were known already; nothing was copied."),
    ("tierkv_corrupt_blocks_total", "corrupt_blocks", "Damaged copies that were found and dropped."),
    ("tierkv_match_requested_blocks_total", "match_requested_blocks", "Blocks that match was asked for."),
    ("tierkv_match_found_blocks_total", "match_found_blocks", "Blocks of the prefixes that match found."),
    ("tierkv_pins", "pins", "Pins that keep blocks where they are: of leases, loads and saves."),
    ("tierkv_pending_blocks", "pending_blocks", "Blocks that are reserved and not yet committed."),
    ("tierkv_leases", "leases", "Leases that are held."),
    ("tierkv_index_entries", "index_entries", "Blocks that the index knows, in any tier."),
    ("tierkv_index_bytes", "index_bytes", "Memory of the index."),
    ("tierkv_clients", "client_count", "Clients that are attached."),
    ("tierkv_max_clients", "max_clients", "Clients that may attach."),
    ("tierkv_accepting", "accepting", "1 while new clients are taken, 0 when the agent stops."),
    ("tierkv_reserved_bytes", "reserved_bytes", "DRAM that clients hold reserved for saves."),
    ("tierkv_leased_bytes", "leased_bytes", "Blocks that clients hold by leases."),
    ("tierkv_start_time_seconds", "started_s", "When the agent was started, in seconds since 1970."),
)  # fmt: skip
"""(name, field of AgentStats, help)."""

TIER_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("tierkv_tier_capacity_bytes", "capacity_bytes", "What blocks may fill; +Inf without a limit."),
    ("tierkv_tier_used_bytes", "used_bytes", "Bytes of the slots or files that are taken."),
    ("tierkv_tier_blocks", "blocks", "Blocks that can be found in the tier."),
    ("tierkv_tier_healthy", "healthy", "1, or 0 while writes to the tier are stopped."),
    ("tierkv_hit_blocks_total", "hit_blocks", "Blocks that loads got from the tier."),
    ("tierkv_written_blocks_total", "written_blocks", "Blocks, in DRAM block parts, written to the tier."),
    ("tierkv_evicted_blocks_total", "evicted_blocks", "Blocks that left the tier to make room."),
)  # fmt: skip
"""(name, field of TierStats, help), with the label `tier`."""

BYTES = ("tierkv_transfer_bytes_total", "Bytes that were read from and written to the tier.")
BUSY = (
    "tierkv_transfer_busy_seconds_total", "Time in which at least one transfer of the tier was under way.",
)  # fmt: skip
TRANSFERS = (
    "tierkv_transfer_duration_seconds", "Duration of the tier's transfers, each a batch of blocks.",
)  # fmt: skip
DIRECTIONS = {
    "read": ("read_bytes", "read_s", "read_latency"),
    "write": ("written_bytes", "write_s", "write_latency"),
}
OPERATION = ("tierkv_operation_duration_seconds", "Duration of calls, and of jobs from submission to end.")
MISSES = ("tierkv_missed_blocks_total", "Blocks that a load did not deliver, by reason.")
DROPS = ("tierkv_dropped_blocks_total", "Blocks that a save did not store, by reason.")
QUEUES = ("tierkv_queue_blocks", "Blocks that wait or are under way: loads, saves, writes to lower tiers.")
QUEUE_FIELDS = {"load": "load_queue_blocks", "save": "save_queue_blocks", "write": "write_queue_blocks"}
BUILD = ("tierkv_build_info", "Always 1; the labels say what is running.")

MISS_REASONS = tuple(
    status.name.lower() for status in BlockStatus if status not in (BlockStatus.OK, BlockStatus.PENDING)
)
DROP_REASONS = ("queue_full", "no_room", "timeout", "incomplete", "failed")


class AgentCollector(Collector):
    """Gives prometheus_client the statistics of an agent, read anew for each scrape."""

    def __init__(self, stats: Callable[[], AgentStats]) -> None:
        self._stats = stats

    def describe(self) -> list[Metric]:
        """Nothing: so that registering does not ask the agent."""
        return []

    def collect(self) -> Iterator[Metric]:
        return families(self._stats())


def families(stats: AgentStats) -> Iterator[Metric]:
    """All metrics of an agent."""
    for name, field, text in SCALARS:
        family = _family(name, text, ())
        family.add_metric((), float(getattr(stats, field)))
        yield family
    for name, field, text in TIER_SCALARS:
        family = _family(name, text, ("tier",))
        for tier, values in stats.tiers.items():
            family.add_metric((tier,), _tier_value(values, field))
        yield family
    for (name, text), which in ((BYTES, 0), (BUSY, 1)):
        family = _family(name, text, ("tier", "direction"))
        for tier, values in stats.tiers.items():
            for direction, fields in DIRECTIONS.items():
                family.add_metric((tier, direction), float(getattr(values, fields[which])))
        yield family
    transfers = HistogramMetricFamily(*TRANSFERS, labels=("tier", "direction"))
    for tier, values in stats.tiers.items():
        for direction, fields in DIRECTIONS.items():
            _add_latency(transfers, (tier, direction), getattr(values, fields[2]))
    yield transfers
    operations = HistogramMetricFamily(*OPERATION, labels=("operation",))
    for operation in OPERATIONS:
        _add_latency(operations, (operation,), stats.latency.get(operation, LatencyStats()))
    yield operations
    yield _by_reason(MISSES, MISS_REASONS, stats.load_misses)
    yield _by_reason(DROPS, DROP_REASONS, stats.drops)
    queues = _family(*QUEUES, ("queue",))
    for queue, field in QUEUE_FIELDS.items():
        queues.add_metric((queue,), getattr(stats, field))
    yield queues
    build = GaugeMetricFamily(*BUILD, labels=("version", "build_type", "checksum"))
    native = _native.build_info()
    build.add_metric((stats.version, native["build_type"], _native.crc32c_implementation()), 1)
    yield build


def _family(name: str, text: str, labels: tuple[str, ...]) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return kind(name, text, labels=labels)


def _tier_value(values: TierStats, field: str) -> float:
    value = float(getattr(values, field))
    return math.inf if field == "capacity_bytes" and value >= UNLIMITED_BYTES else value


def _by_reason(
    metric: tuple[str, str], reasons: tuple[str, ...], counts: Mapping[str, int]
) -> CounterMetricFamily:
    """Every reason has a series from the start, so that the first of its kind shows as a rate."""
    family = CounterMetricFamily(*metric, labels=("reason",))
    for reason in dict.fromkeys((*reasons, *counts)):
        family.add_metric((reason,), counts.get(reason, 0))
    return family


def _bound(seconds: float) -> str:
    """A bucket's label."""
    return "+Inf" if math.isinf(seconds) else repr(seconds)


def _add_latency(family: HistogramMetricFamily, labels: tuple[str, ...], latency: LatencyStats) -> None:
    buckets, total = [], 0
    for bound, count in zip((*LATENCY_BOUNDS_S, math.inf), latency.counts, strict=True):
        total += count
        buckets.append((_bound(bound), float(total)))
    family.add_metric(labels, buckets, latency.sum_s)


# Reading back


def parse(text: str) -> AgentStats:
    """The statistics in a page of metrics, without the list of clients. FormatError if it is not an agent's."""
    try:
        samples: Samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    except (ValueError, KeyError, IndexError) as error:
        raise FormatError(
            f"not Prometheus metrics: {error}; give the address of an agent's /metrics"
        ) from error
    if not any(name == BUILD[0] for name, _ in samples):
        raise FormatError(f"no {BUILD[0]} among the metrics: give the address of an agent's /metrics")
    fields: dict[str, Any] = {field: _get(samples, name) for name, field, _ in SCALARS}
    fields |= {field: _get(samples, QUEUES[0], queue=queue) for queue, field in QUEUE_FIELDS.items()}
    tiers = dict.fromkeys(_values_of(samples, TIER_SCALARS[0][0], "tier"))
    fields["tiers"] = {tier: _tier(samples, tier) for tier in tiers}
    fields["latency"] = {name: _latency(samples, OPERATION[0], operation=name) for name in OPERATIONS}
    for field, (name, _) in (("load_misses", MISSES), ("drops", DROPS)):
        counts = {
            reason: _get(samples, name, reason=reason) for reason in _values_of(samples, name, "reason")
        }
        fields[field] = {reason: count for reason, count in counts.items() if count}
    fields["dropped_blocks"] = sum(fields["drops"].values())
    fields["version"] = next(iter(_values_of(samples, BUILD[0], "version")), "")
    try:
        return msgspec.convert(fields, AgentStats, strict=False)
    except msgspec.ValidationError as error:
        raise FormatError(f"these metrics are not an agent's: {error}") from error


def _get(samples: Samples, name: str, **labels: str) -> float | int:
    value = samples.get((name, tuple(sorted(labels.items()))), 0.0)
    return int(value) if value.is_integer() else value


def _values_of(samples: Samples, name: str, label: str) -> Iterator[str]:
    return (dict(labels).get(label, "") for found, labels in samples if found == name)


def _tier(samples: Samples, tier: str) -> dict[str, Any]:
    values: dict[str, Any] = {field: _get(samples, name, tier=tier) for name, field, _ in TIER_SCALARS}
    if math.isinf(values["capacity_bytes"]):
        values["capacity_bytes"] = UNLIMITED_BYTES
    for direction, (size, busy, latency) in DIRECTIONS.items():
        values[size] = _get(samples, BYTES[0], tier=tier, direction=direction)
        values[busy] = _get(samples, BUSY[0], tier=tier, direction=direction)
        values[latency] = _latency(samples, TRANSFERS[0], tier=tier, direction=direction)
    return values


def _latency(samples: Samples, name: str, **labels: str) -> dict[str, Any]:
    counts, before = [], 0
    for bound in (*LATENCY_BOUNDS_S, math.inf):
        total = int(_get(samples, f"{name}_bucket", le=_bound(bound), **labels))
        counts.append(max(0, total - before))
        before = total
    return {"counts": counts, "sum_s": _get(samples, f"{name}_sum", **labels)}
