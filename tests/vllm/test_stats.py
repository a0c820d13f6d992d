"""The connector's figures through vLLM's own machinery: step output, log line, Prometheus registry, MultiConnector."""

from __future__ import annotations

import math
import pickle
from types import SimpleNamespace
from typing import Any

import msgspec
import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats

from tierkv.adapters.vllm import counters
from tierkv.adapters.vllm.counters import COUNTERS, HISTOGRAMS, Counters
from tierkv.adapters.vllm.stats import TierKVPromMetrics, TierKVStats, samples

ENGINES: dict[int, list[object]] = {0: ["a model", "0"], 1: ["a model", "1"]}


def one_step(source: str = "worker 0/1") -> Counters:
    made = Counters(source)
    made.count(counters.LOOKUPS, 2)
    made.count(counters.HIT_TOKENS, 4096, "nvme")
    made.count(counters.LOADED_BYTES, 1 << 34)
    made.count(counters.FAILED_LOAD_BLOCKS, 3, "of a later version")
    made.observe(counters.LOAD_S, 0.0625)
    made.observe(counters.LOAD_S, 0.5)
    made.observe(counters.LOAD_S, 99.0)
    made.set(counters.AGENT_ATTACHED, 1)
    return made


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    """Where metrics without a registry of their own go, new for each test."""
    made = CollectorRegistry()
    for kind in (Counter, Gauge, Histogram):
        defaults = list(kind.__init__.__defaults__)
        names = kind.__init__.__code__.co_varnames[: kind.__init__.__code__.co_argcount]
        defaults[names[-len(defaults) :].index("registry")] = made
        monkeypatch.setattr(kind.__init__, "__defaults__", tuple(defaults))
    return made


def prom_metrics() -> TierKVPromMetrics:
    return TierKVPromMetrics(
        SimpleNamespace(kv_transfer_config=None),  # type: ignore[arg-type]
        {Counter: Counter, Gauge: Gauge, Histogram: Histogram},
        ["model_name", "engine"],
        ENGINES,
    )


def value(registry: CollectorRegistry, name: str, engine: int = 0, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"model_name": "a model", "engine": str(engine), **labels})


def test_a_step_reaches_prometheus(registry: CollectorRegistry) -> None:
    metrics = prom_metrics()
    stats = TierKVStats.taken_from(one_step())
    assert stats is not None
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    metrics.observe(wire, engine_idx=1)
    metrics.observe(wire, engine_idx=1)
    metrics.observe(wire, engine_idx=7)  # an engine that it was not told of
    assert value(registry, "vllm:tierkv_lookups_total", 1) == 4
    assert value(registry, "vllm:tierkv_lookups_total", 0) == 0
    assert value(registry, "vllm:tierkv_hit_tokens_total", 1, source="nvme") == 8192
    assert value(registry, "vllm:tierkv_hit_tokens_total", 1, source="dram") == 0
    assert value(registry, "vllm:tierkv_loaded_bytes_total", 1) == 2 << 34
    assert value(registry, "vllm:tierkv_failed_load_blocks_total", 1, reason="other") == 6
    assert value(registry, "vllm:tierkv_load_seconds_count", 1) == 6
    assert value(registry, "vllm:tierkv_load_seconds_sum", 1) == 2 * 99.5625
    assert value(registry, "vllm:tierkv_load_seconds_bucket", 1, le="0.05") == 0
    assert value(registry, "vllm:tierkv_load_seconds_bucket", 1, le="0.1") == 2
    assert value(registry, "vllm:tierkv_load_seconds_bucket", 1, le="30.0") == 4
    assert value(registry, "vllm:tierkv_agent_attached", 1) == 1
    text = generate_latest(registry).decode()
    for name in COUNTERS:
        assert f"# TYPE vllm:tierkv_{name}_total counter" in text
    for name in HISTOGRAMS:
        assert f"# TYPE vllm:tierkv_{name.removesuffix('_s')}_seconds histogram" in text


def test_the_gauge_is_the_least_of_all_that_reported(registry: CollectorRegistry) -> None:
    metrics = prom_metrics()
    halves = [Counters("scheduler"), Counters("worker 0/1")]
    for half in halves:
        half.set(counters.AGENT_ATTACHED, 1)
        metrics.observe(half.take())
    assert value(registry, "vllm:tierkv_agent_attached") == 1
    halves[1].set(counters.AGENT_ATTACHED, 0)
    metrics.observe(halves[1].take())
    halves[0].count(counters.LOOKUPS)
    metrics.observe(halves[0].take())  # says 1, but of the scheduler alone
    assert value(registry, "vllm:tierkv_agent_attached") == 0
    halves[1].set(counters.AGENT_ATTACHED, 1)
    metrics.observe(halves[1].take())
    assert value(registry, "vllm:tierkv_agent_attached") == 1


def test_what_is_not_known_is_left_out(registry: CollectorRegistry) -> None:
    metrics = prom_metrics()
    metrics.observe(
        {
            "counters": {"of_tomorrow": {"": 3}, "lookups": {"": 1}},
            "histograms": {"of_tomorrow": [[1], [1.0]], "load_s": [[1, 2], [1.0, 2.0]]},
            "gauges": {"of_tomorrow": {"scheduler": 2}},
        }
    )
    assert value(registry, "vllm:tierkv_lookups_total") == 1
    assert value(registry, "vllm:tierkv_load_seconds_count") == 0
    assert "of_tomorrow" not in generate_latest(registry).decode()


@given(st.lists(st.floats(0, 1e9), max_size=60))
def test_samples_fall_into_the_buckets_they_came_from(values: list[float]) -> None:
    made = Counters("scheduler")
    for observed in values:
        made.observe(counters.LOOKUP_S, observed)
    bounds = HISTOGRAMS[counters.LOOKUP_S].bounds
    counts, sums = made.take().get("histograms", {}).get("lookup_s", [[0] * (len(bounds) + 1)] * 2)
    registry = CollectorRegistry()
    histogram = prometheus_client.Histogram("h", "", buckets=bounds, registry=registry)
    for observed, times in samples(bounds, counts, sums):
        for _ in range(times):
            histogram.observe(observed)
    below = 0
    for bound, count in zip([*bounds, math.inf], counts, strict=True):
        below += count
        label = "+Inf" if bound == math.inf else str(bound)
        assert registry.get_sample_value("h_bucket", {"le": label}) == below
    assert registry.get_sample_value("h_sum") == pytest.approx(sum(values))


def test_ranks_and_steps_are_joined_without_touching_what_others_hold() -> None:
    taken = [TierKVStats.taken_from(one_step(f"worker {rank}/2")) for rank in range(2)]
    held = [pickle.loads(pickle.dumps(stats)).data for stats in taken if stats is not None]
    first, second = (stats for stats in taken if stats is not None)
    data_of_first = first.data
    joined = first.aggregate(second)
    assert joined.reduce()["loaded_bytes"] == 2 << 34
    assert data_of_first == held[0]
    assert second.data == held[1]
    assert not joined.is_empty()
    joined.reset()
    assert joined.is_empty()
    assert first.aggregate(TierKVStats()).is_empty()


def test_nothing_counted_is_nothing_sent() -> None:
    assert TierKVStats.taken_from(Counters("scheduler")) is None
    assert TierKVStats().is_empty()
    assert TierKVStats().reduce() == {}


def test_the_log_line_names_what_happened_in_the_interval() -> None:
    logging = KVConnectorLogging(None)
    logging.connector_cls = SimpleNamespace(build_kv_connector_stats=TierKVStats)  # type: ignore[assignment]
    stats = TierKVStats.taken_from(one_step())
    assert stats is not None
    for _ in range(3):
        logging.observe(stats.to_dict())
    lines: list[str] = []
    logging.log(lambda form, *arguments: lines.append(form % arguments))
    logging.log(lambda form, *arguments: lines.append(form % arguments))
    assert len(lines) == 1, "the second interval was empty"
    for part in ("lookups=6", "hit_tokens_nvme=12288", "failed_load_blocks_other=9", "agent_attached=1"):
        assert part in lines[0]


def test_multi_connector_keeps_ours_apart() -> None:
    joined = MultiKVConnectorStats()
    for rank in range(2):
        stats = TierKVStats.taken_from(one_step(f"worker {rank}/2"))
        assert stats is not None
        joined = joined.aggregate(MultiKVConnectorStats({"TierKVConnector": stats}))
    wire: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(joined.to_dict()))
    assert TierKVStats(wire["TierKVConnector"]).reduce()["lookups"] == 4
