"""The connector's figures in vLLM's own channels: its periodic log line and its Prometheus registry.

vLLM carries one TierKVStats a step from the workers (joined over the ranks) and from the scheduler to the process
that serves the API. There the data is joined over an interval for the log, and shown step by step to
TierKVPromMetrics. Nothing here raises for data of another version: what is unknown is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from tierkv.adapters.vllm import counters
from tierkv.adapters.vllm.counters import COUNTERS, GAUGES, HISTOGRAMS, OTHER, Counters

PREFIX = "vllm:tierkv_"


class TierKVStats(KVConnectorStats):
    """Figures of one or more halves of the connector over one or more steps; `data` is a counters.StatsData."""

    @classmethod
    def taken_from(cls, source: Counters) -> TierKVStats | None:
        """What a half has counted since the last call, None when there is nothing new."""
        data = source.take()
        return cls(data) if data else None

    def reset(self) -> None:
        """Forgets all."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Takes in `other` and returns itself. Neither's former data is changed: others may hold it."""
        if isinstance(other, TierKVStats) and not other.is_empty():
            self.data = counters.merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The log line's figures; seconds as in the names."""
        return counters.reduce(self.data)

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data


class TierKVPromMetrics(KVConnectorPromMetrics):
    """Registers vllm:tierkv_* and adds each step's figures to the engine's series.

    Every label's series exists from the start, at 0, so that rates are right from the first event on.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """`metric_types`: which classes stand for prometheus_client's Counter, Gauge and Histogram."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[tuple[int, str, str], Any] = {}
        self._histograms: dict[tuple[int, str], Any] = {}
        self._gauges: dict[tuple[int, str], Any] = {}
        self._gauge_values: dict[tuple[int, str], dict[str, float]] = {}
        for name, counter in COUNTERS.items():
            labels = [counter.label] if counter.label else []
            made = metric_types[Counter](PREFIX + name, counter.documentation, labelnames=labelnames + labels)
            for engine, values in per_engine_labelvalues.items():
                for label in counter.labels or ("",):
                    bound = made.labels(*values, *([label] if label else []))
                    self._counters[engine, name, label] = bound
        for name, histogram in HISTOGRAMS.items():
            exported = PREFIX + name.removesuffix("_s") + "_seconds"
            made = metric_types[Histogram](
                exported, histogram.documentation, labelnames=labelnames, buckets=list(histogram.bounds)
            )
            for engine, values in per_engine_labelvalues.items():
                self._histograms[engine, name] = made.labels(*values)
        for name, gauge in GAUGES.items():
            made = metric_types[Gauge](
                PREFIX + name, gauge.documentation, labelnames=labelnames, multiprocess_mode="mostrecent"
            )
            for engine, values in per_engine_labelvalues.items():
                self._gauges[engine, name] = made.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one step's figures (a counters.StatsData) to engine `engine_idx`; an unknown engine is ignored."""
        for name, values in transfer_stats_data.get("counters", {}).items():
            for label, amount in values.items():
                series = self._counters.get((engine_idx, name, label)) or self._counters.get(
                    (engine_idx, name, OTHER)
                )
                if series is not None:
                    series.inc(amount)
        for name, columns in transfer_stats_data.get("histograms", {}).items():
            series = self._histograms.get((engine_idx, name))
            if series is not None:
                for value, times in samples(HISTOGRAMS[name].bounds, *columns):
                    for _ in range(times):
                        series.observe(value)
        for name, by_source in transfer_stats_data.get("gauges", {}).items():
            series = self._gauges.get((engine_idx, name))
            if series is not None:
                latest = self._gauge_values.setdefault((engine_idx, name), {})
                latest.update(by_source)
                series.set(min(latest.values()))


def samples(bounds: tuple[float, ...], counts: list[int], sums: list[float]) -> list[tuple[float, int]]:
    """(value, times) pairs that give a histogram with these bounds the same counts and sums.

    Each bucket's observations stand as its mean: prometheus_client and its look-alikes take single observations only.
    """
    if not len(counts) == len(sums) == len(bounds) + 1:
        return []
    found = []
    for bucket, (count, total) in enumerate(zip(counts, sums, strict=True)):
        if count > 0:
            mean = total / count
            if bucket < len(bounds):  # rounding must not push it over an edge
                mean = min(mean, bounds[bucket])
            if bucket > 0:
                mean = max(mean, math.nextafter(bounds[bucket - 1], math.inf))
            found.append((mean, count))
    return found
