"""What `tierkv top` draws: within 80 columns, whatever the figures, and rates from two readings."""

from __future__ import annotations

import io
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from observe_harness import agent_stats, latencies, plain_stats
from rich.console import Console

from tierkv.agent.statistics import AgentStats, ClientStats
from tierkv.observe.picture import Change, Reading, quantile_s, render, render_absent, short
from tierkv.store import LATENCY_BOUNDS_S, LatencyStats, TierStats


def drawn(change: Change, *, gone: str = "", width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False).print(
        render("/run/a.sock", change, gone=gone)
    )
    return out.getvalue()


def since(now: AgentStats, before: AgentStats | None = None, seconds: float = 2.0) -> Change:
    return Change(Reading(now, 100.0), Reading(before, 100.0 - seconds) if before is not None else None)


def busy(factor: int) -> AgentStats:
    """Counters in proportion to `factor`."""
    tiers = {
        "dram": TierStats(
            capacity_bytes=4 << 30, used_bytes=3 << 30, blocks=1500, hit_blocks=600 * factor,
            read_bytes=4_000_000_000 * factor, written_bytes=1_000_000_000 * factor, evicted_blocks=50 * factor,
        ),
        "dfs": TierStats(capacity_bytes=1 << 62, used_bytes=5 << 30, blocks=70_000, hit_blocks=200 * factor),
    }  # fmt: skip
    match = LatencyStats(counts=[0] * len(LATENCY_BOUNDS_S) + [0])
    match.counts[LATENCY_BOUNDS_S.index(0.1)] = 10 * factor
    return plain_stats(
        tiers=tiers, saved_blocks=2000 * factor, known_blocks=10 * factor, load_misses={"miss": 200 * factor},
        drops={"no_room": 30 * factor}, match_requested_blocks=1000 * factor, match_found_blocks=900 * factor,
        latency={"match": match}, save_queue_blocks=12, leases=3, leased_bytes=6 << 20, client_count=2,
    )  # fmt: skip


def test_rates_are_of_the_time_between_two_readings() -> None:
    text = drawn(since(busy(3), busy(1)))
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert lines["dram"].split()[2:] == ["3/4", "GiB", "1,500", "60.0%", "4.00", "1.00", "50"]
    assert lines["dfs"].split()[1:] == ["no", "limit", "5", "GiB", "70,000", "20.0%", "0.00", "0.00", "0"]
    assert "90.0% of 1.00k blocks/s" in lines["match"]
    assert "miss 200/s (600)" in lines["misses"]
    assert "2.00k/s stored, 10/s known" in lines["saves"]
    assert "no room 30/s (90)" in lines["drops"]
    assert "save 12" in lines["queues"]
    assert "match 75 ms/99.5 ms, load n/a" in lines["p50/p99"]
    assert "read GB/s" in text


def test_without_an_earlier_reading_the_sums_are_shown() -> None:
    text = drawn(since(busy(1)))
    assert "/s" not in text.replace("p50/p99", "")
    assert "3.73 GiB" in text  # 4 GB read
    assert "miss 200" in text


def test_a_restarted_agent_begins_anew() -> None:
    before, now = busy(5), busy(1)
    now.started_s = before.started_s + 10
    assert not since(now, before).is_rate
    assert since(now, before).growth(lambda stats: stats.saved_blocks) == 2000


@settings(max_examples=40)
@given(now=agent_stats(), before=agent_stats(), same=st.booleans())
def test_any_figures_fit_80_columns_without_a_negative_rate(
    now: AgentStats, before: AgentStats, same: bool
) -> None:
    before.started_s = now.started_s if same else before.started_s
    now.version = "1.2.3"
    for name in ("dram", "nvme", "dfs"):  # figures of machines that exist
        for stats in (now, before):
            if name in stats.tiers:
                tier = stats.tiers[name]
                tier.read_bytes %= 10**11
                tier.written_bytes %= 10**11
    text = drawn(since(now, before, seconds=1.0))
    assert max(len(line) for line in text.splitlines()) <= 80
    for name in now.tiers:
        row = next(line for line in text.splitlines() if line.startswith(name))
        assert "…" not in row
    assert not re.search(r"\s-", text)
    assert "nan" not in text


def test_health_and_its_reasons_are_shown() -> None:
    stats = plain_stats()
    assert " ok" in drawn(since(stats))
    stats.tiers["nvme"].healthy = False
    text = drawn(since(stats))
    assert "degraded" in text
    assert "nvme: writes are stopped" in text


def test_a_gone_agent_is_said_to_be_gone_and_the_last_figures_stay() -> None:
    text = drawn(since(busy(2), busy(1)), gone="for 3 s: nobody answers")
    assert "agent gone" in text
    assert "for 3 s: nobody answers" in text
    assert "1,500" in text
    out = io.StringIO()
    Console(file=out, width=80).print(render_absent("/run/a.sock", "nobody answers"))
    assert "no agent" in out.getvalue()


def test_a_clients_name_cannot_move_the_cursor_or_set_styles() -> None:
    clients = [ClientStats(name="\x1b[2J[red]evil[/red]\n", reserved_bytes=1, leased_bytes=2048)]
    text = drawn(since(plain_stats(clients=clients, client_count=1)))
    assert "\x1b" not in text
    assert "[red]evil[/red]" in text
    many = [ClientStats(name=f"client {n}", reserved_bytes=0, leased_bytes=0) for n in range(20)]
    assert "and 12 more" in drawn(since(plain_stats(clients=many, client_count=20)))


@given(latency=latencies(), low=st.floats(0, 1), high=st.floats(0, 1))
def test_quantiles_ascend_within_the_bounds(latency: LatencyStats, low: float, high: float) -> None:
    if not latency.count:
        assert math.isnan(quantile_s(latency, low))
        return
    low, high = sorted((low, high))
    assert 0 <= quantile_s(latency, low) <= quantile_s(latency, high) <= LATENCY_BOUNDS_S[-1]


@given(took_s=st.floats(1e-6, 50), share=st.floats(0.01, 1))
def test_a_quantile_lies_in_the_bucket_of_what_was_observed(took_s: float, share: float) -> None:
    from bisect import bisect_left

    bucket = bisect_left(LATENCY_BOUNDS_S, took_s)
    latency = LatencyStats()
    latency.counts[bucket] = 7
    low = LATENCY_BOUNDS_S[bucket - 1] if bucket else 0.0
    assert low <= quantile_s(latency, share) <= LATENCY_BOUNDS_S[bucket] * (1 + 1e-9)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7, "7"), (0.25, "0.25"), (1e-9, "<0.01"), (999, "999"), (999.7, "1.00k"), (1000, "1.00k"),
     (1234, "1.23k"), (99_949, "99.9k"), (99_950, "100k"), (999_600, "1.00M"),
     (999_400, "999k"), (4_560_000, "4.56M"), (7e12, "7000G")],
)  # fmt: skip
def test_counts_are_short(value: float, text: str) -> None:
    assert short(value) == text


@given(st.floats(0, 1e12))
def test_no_count_is_longer_than_six_characters(value: float) -> None:
    assert len(short(value)) <= 6
    assert (short(value) == "0") == (value == 0)
