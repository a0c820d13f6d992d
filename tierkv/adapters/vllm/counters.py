"""What the connector counts: names, kinds and labels of its figures, and where both of its halves put them.

A Counters holds sums, gauges and histograms as bucket counts, never single samples, and labels come from closed
sets, so its size does not depend on how much is counted. What take() returns is plain data (JSON, msgpack, pickle);
merge() joins such data of several ranks or steps, in any order.

Thread safety: all methods of Counters may be called from any thread.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from tierkv.errors import ArgumentError

LOOKUPS: Final = "lookups"
LOOKUPS_DEFERRED: Final = "lookups_deferred"
LOOKUPS_LATE: Final = "lookups_late"
LOOKUP_S: Final = "lookup_s"
HIT_TOKENS: Final = "hit_tokens"
LOAD_REQUESTS: Final = "load_requests"
LOADED_BLOCKS: Final = "loaded_blocks"
LOADED_BYTES: Final = "loaded_bytes"
LOAD_S: Final = "load_s"
FAILED_LOAD_BLOCKS: Final = "failed_load_blocks"
SAVE_JOBS: Final = "save_jobs"
SAVED_BLOCKS: Final = "saved_blocks"
KNOWN_BLOCKS: Final = "known_blocks"
DROPPED_BLOCKS: Final = "dropped_blocks"
SAVED_BYTES: Final = "saved_bytes"
SAVE_S: Final = "save_s"
AGENT_ATTACHED: Final = "agent_attached"

OTHER: Final = "other"
"""Where a label outside its set is counted."""

StatsData: TypeAlias = dict[str, Any]
"""{"counters": {name: {label: sum}}, "gauges": {name: {source: value}}, "histograms": {name: [counts, sums]}}: a
counter without a label has the label "". `counts` and `sums` have one entry a bucket (the last is above all bounds);
both halves and empty parts may be absent. {} is nothing."""

_LOOKUP_BUCKETS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
_TRANSFER_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class CounterKind:
    """A sum that only grows. `labels`: what `label` may be; empty when the counter has none."""

    documentation: str
    label: str = ""
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HistogramKind:
    """Observations in buckets. `bounds`: the buckets' upper bounds (inclusive), ascending; one more is above all."""

    documentation: str
    bounds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class GaugeKind:
    """A value that stays until it is set again; of several sources the least one counts."""

    documentation: str


COUNTERS: Final[Mapping[str, CounterKind]] = {
    LOOKUPS: CounterKind("Requests whose prefix was looked up in the store."),
    LOOKUPS_DEFERRED: CounterKind("Look-ups that were not answered at once: the engine asked again."),
    LOOKUPS_LATE: CounterKind("Look-ups that were not answered by their deadline: no hit was taken."),
    HIT_TOKENS: CounterKind(
        "Tokens of requests that the store held and the engine took, by the tier they were found in.",
        "source",
        ("dram", "nvme", "dfs", OTHER),
    ),
    LOAD_REQUESTS: CounterKind("Requests for which blocks were loaded."),
    LOADED_BLOCKS: CounterKind("Blocks that were loaded into the engine's cache."),
    LOADED_BYTES: CounterKind("Bytes that were loaded into the engine's cache."),
    FAILED_LOAD_BLOCKS: CounterKind(
        "Blocks that were promised and could not be loaded, by reason; the engine computes them.",
        "reason",
        (
            "miss", "corrupt", "timeout", "io_error", "no_space", "dropped", "cancelled", "agent_lost", "refused",
            OTHER,
        ),
    ),
    SAVE_JOBS: CounterKind("Batches of blocks that were handed to the store."),
    SAVED_BLOCKS: CounterKind("Blocks that the store took."),
    KNOWN_BLOCKS: CounterKind("Blocks that were not saved since the store already had them."),
    DROPPED_BLOCKS: CounterKind("Blocks that the store did not take: it was behind, full or away."),
    SAVED_BYTES: CounterKind("Bytes that the store took."),
}  # fmt: skip
HISTOGRAMS: Final[Mapping[str, HistogramKind]] = {
    LOOKUP_S: HistogramKind(
        "Time from asking for a prefix to the store's answer, in seconds.", _LOOKUP_BUCKETS_S
    ),
    LOAD_S: HistogramKind(
        "Time from a load's start to its last block in the engine's cache, in seconds.", _TRANSFER_BUCKETS_S
    ),
    SAVE_S: HistogramKind(
        "Time from handing over a batch of blocks to its end in the store, in seconds.", _TRANSFER_BUCKETS_S
    ),
}
GAUGES: Final[Mapping[str, GaugeKind]] = {
    AGENT_ATTACHED: GaugeKind("1 while all ranks and the scheduler are attached to their agent, else 0."),
}


class Counters:
    """The figures of one half of the connector, from the last take() on.

    `source` tells several halves apart ("scheduler", "worker 1/2"): a gauge is kept for each of them.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._counters: dict[str, dict[str, int]] = {}
        self._histograms: dict[str, tuple[list[int], list[float]]] = {}
        self._gauges: dict[str, float] = {}
        self._gauge_changed = False

    def count(self, name: str, amount: int = 1, label: str | None = None) -> None:
        """Adds `amount` (0 or more; 0 is nothing; also numpy's integers). A label outside the counter's set counts as
        "other".

        ArgumentError for a name that is no counter, a negative amount, or a label where there is none to give or
        none where one is needed.
        """
        kind = COUNTERS.get(name)
        if kind is None or amount < 0 or (label is None) == bool(kind.labels):
            raise ArgumentError(
                f"count({name!r}, {amount!r}, label={label!r}): no such counter, amount or label"
            )
        if not amount:
            return
        if label is None:
            label = ""
        elif label not in kind.labels:
            label = OTHER
        with self._lock:
            sums = self._counters.setdefault(name, {})
            sums[label] = sums.get(label, 0) + int(amount)  # plain, or it could not be sent

    def observe(self, name: str, value: float) -> None:
        """Adds one observation to a histogram; ArgumentError for a name that is none. Below 0 counts as 0."""
        kind = HISTOGRAMS.get(name)
        if kind is None:
            raise ArgumentError(f"observe({name!r}): no such histogram")
        value = max(0.0, float(value))
        bucket = bisect_left(kind.bounds, value)
        with self._lock:
            found = self._histograms.get(name)
            if found is None:
                buckets = len(kind.bounds) + 1
                found = self._histograms[name] = ([0] * buckets, [0.0] * buckets)
            found[0][bucket] += 1
            found[1][bucket] += value

    def set(self, name: str, value: float) -> None:
        """Sets a gauge; it is told again with whatever else is counted. ArgumentError for a name that is none."""
        if name not in GAUGES:
            raise ArgumentError(f"set({name!r}): no such gauge")
        with self._lock:
            if self._gauges.get(name) != value:
                self._gauges[name] = float(value)
                self._gauge_changed = True

    def take(self) -> StatsData:
        """What was counted since the last call, and all gauges; {} when there is nothing new."""
        with self._lock:
            if not (self._counters or self._histograms or self._gauge_changed):
                return {}
            counters, self._counters = self._counters, {}
            histograms, self._histograms = self._histograms, {}
            gauges = {name: {self._source: value} for name, value in self._gauges.items()}
            self._gauge_changed = False
        taken: StatsData = {}
        if counters:
            taken["counters"] = counters
        if histograms:
            taken["histograms"] = {name: [counts, sums] for name, (counts, sums) in histograms.items()}
        if gauges:
            taken["gauges"] = gauges
        return taken


def merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> StatsData:
    """Both together, as new data: counters and histograms add up, a gauge of one source is the least it was.

    Names that this version does not know are kept when they have the shape of their kind.
    """
    merged: StatsData = {}
    for part, join in (("counters", _add), ("gauges", min)):
        tables: dict[str, dict[str, float]] = {}
        for data in (first, second):
            for name, values in data.get(part, {}).items():
                table = tables.setdefault(name, {})
                for label, value in values.items():
                    table[label] = join(table[label], value) if label in table else value
        if tables:
            merged[part] = tables
    histograms: dict[str, list[list[float]]] = {}
    for data in (first, second):
        for name, columns in data.get("histograms", {}).items():
            before = histograms.get(name)
            if before is None:
                histograms[name] = [list(column) for column in columns]
            elif [len(column) for column in before] == [len(column) for column in columns]:
                histograms[name] = [
                    [a + b for a, b in zip(*pair, strict=True)] for pair in zip(before, columns, strict=True)
                ]
    if histograms:
        merged["histograms"] = histograms
    return merged


def reduce(data: Mapping[str, Any]) -> dict[str, int | float]:
    """A flat summary for a log line: sums (by label too), and of histograms the mean and an upper bound of 90 %."""
    flat: dict[str, int | float] = {}
    for name, values in data.get("counters", {}).items():
        flat[name] = _rounded(sum(values.values()))
        if name in COUNTERS and COUNTERS[name].labels:
            for label, value in sorted(values.items()):
                flat[f"{name}_{label}"] = _rounded(value)
    for name, (counts, sums) in data.get("histograms", {}).items():
        total = sum(counts)
        if not total or name not in HISTOGRAMS:
            continue
        flat[f"{name}_mean"] = _rounded(sum(sums) / total)
        bounds = HISTOGRAMS[name].bounds
        reached = 0
        for bucket, found in enumerate(counts):
            reached += found
            if reached >= 0.9 * total:
                above_all = bucket >= len(bounds)
                flat[f"{name}_p90"] = _rounded(sums[bucket] / found if above_all else bounds[bucket])
                break
    for name, values in data.get("gauges", {}).items():
        flat[name] = _rounded(min(values.values()))
    return flat


def _add(first: float, second: float) -> float:
    return first + second


def _rounded(value: float) -> int | float:
    return int(value) if value == int(value) else round(value, 6)
