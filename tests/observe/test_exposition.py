"""The metrics' names, their documentation, and that reading them back gives the same statistics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from observe_harness import agent_stats, plain_stats
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_open
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open

from tierkv.agent.statistics import AgentStats
from tierkv.errors import FormatError
from tierkv.observe.exposition import DROP_REASONS, MISS_REASONS, AgentCollector, families, parse

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
UNITS = ("_seconds", "_bytes", "_blocks")
WITHOUT_UNIT = {
    "tierkv_pins", "tierkv_leases", "tierkv_clients", "tierkv_max_clients", "tierkv_accepting", "tierkv_tier_healthy",
    "tierkv_index_entries", "tierkv_build_info",
}  # fmt: skip
"""They count what their name says, or are flags."""


def page(stats: AgentStats) -> str:
    registry = CollectorRegistry()
    registry.register(AgentCollector(lambda: stats))
    return generate_latest(registry).decode()


@settings(max_examples=40)
@given(stats=agent_stats())
def test_what_is_exported_is_read_back_the_same(stats: AgentStats) -> None:
    back = parse(page(stats))
    for name, tier in stats.tiers.items():
        assert back.tiers[name] == tier
    assert back == stats


def test_every_reason_has_a_series_before_the_first_of_its_kind() -> None:
    text = page(plain_stats())
    for reason in MISS_REASONS:
        assert f'tierkv_missed_blocks_total{{reason="{reason}"}} 0.0' in text
    for reason in DROP_REASONS:
        assert f'tierkv_dropped_blocks_total{{reason="{reason}"}} 0.0' in text


def test_histograms_are_cumulative_and_end_with_their_count() -> None:
    stats = plain_stats()
    stats.tiers["nvme"].read_latency.counts[3] = 5
    stats.tiers["nvme"].read_latency.counts[-1] = 2
    text = page(stats)
    name, labels = "tierkv_transfer_duration_seconds", 'direction="read",tier="nvme"'
    for bound, total in (("5e-05", 0), ("0.0001", 5), ("60.0", 5), ("+Inf", 7)):
        assert f'{name}_bucket{{direction="read",le="{bound}",tier="nvme"}} {total}.0' in text
    assert f"{name}_count{{{labels}}} 7.0" in text


def test_openmetrics_takes_it_too() -> None:
    registry = CollectorRegistry()
    registry.register(AgentCollector(plain_stats))
    found = {family.name for family in parse_open(generate_open(registry).decode())}
    assert found == {family.name for family in families(plain_stats())}


def exported() -> dict[str, tuple[str, frozenset[str]]]:
    """Name -> type, labels (without le)."""
    found = {}
    for family in families(plain_stats()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = (family.type, frozenset(labels))
    return found


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    rows = re.findall(
        r"^\| `(tierkv_\w+)` \| (\w+) \| ([\w, ]*?) ?\| .+\|$",
        DOCUMENT.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(rows) == len({row[0] for row in rows}), "a metric is documented twice"
    return {name: (kind, frozenset(filter(None, labels.split(", ")))) for name, kind, labels in rows}


def test_the_document_lists_exactly_what_is_exported() -> None:
    assert documented() == exported()


@pytest.mark.parametrize(
    "reason", [*MISS_REASONS, *DROP_REASONS, "match", "lookup", "load", "stage", "save", "write"]
)
def test_the_document_names_the_values_of_labels(reason: str) -> None:
    assert f"`{reason}`" in DOCUMENT.read_text(encoding="utf-8")


def test_queries_in_the_document_use_metrics_that_exist() -> None:
    names = set(re.findall(r"tierkv_\w+", DOCUMENT.read_text(encoding="utf-8")))
    bases = {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}
    assert bases == set(exported())


def test_names_follow_the_conventions() -> None:
    for name, (kind, _) in exported().items():
        assert re.fullmatch(r"tierkv_[a-z][a-z0-9]*(_[a-z0-9]+)*", name)
        assert (kind == "counter") == name.endswith("_total"), name
        assert name.removesuffix("_total").endswith(UNITS) or name in WITHOUT_UNIT, name


@pytest.mark.parametrize(
    "text",
    ["", "<html>", "tierkv_pins 3\n", "# nothing\n", "a{b=} 1\n", "tierkv_build_info x\n", "go_threads 12\n"],
)
def test_a_page_that_is_no_agents_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="metrics"):
        parse(text)


def test_a_page_with_figures_that_make_no_sense_is_refused() -> None:
    text = page(plain_stats())
    assert parse(text).pins == 0
    with pytest.raises(FormatError, match="not an agent's"):
        parse(text.replace("tierkv_pins 0.0", "tierkv_pins 0.5"))
