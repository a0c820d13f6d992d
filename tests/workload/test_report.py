"""The report: one file that needs nothing else, honest about what is missing, safe against what a trace is called."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tierkv.errors import ConfigError, StorageError
from tierkv.observe import figures
from tierkv.observe.report import render_report, write_report
from tierkv.workload.result import Latency, ReplayResult, Series, TierResult

VOID = {"meta", "br", "path", "use", "rect", "line", "link", "img", "input"}


def result(**changes: Any) -> dict[str, Any]:
    samples = 50
    requests = [10 * n for n in range(1, samples + 1)]
    tier = TierResult(
        hit_blocks=500, read_bytes=1 << 30, read_gb_s=1.25, written_blocks=9, written_bytes=1 << 20, write_gb_s=None,
        evicted_blocks=3, capacity_blocks=100, blocks=99, blocks_at_start=0, healthy=True,
    )  # fmt: skip
    whole = ReplayResult(
        trace="a trace", requests=500, blocks=5000, unique_blocks=900, block_bytes=4096, hit_blocks=1000,
        prefix_hit_rate=0.2, hits={"dram": 500, "nvme": 500, "dfs": 0}, tiers={"dram": tier, "nvme": tier},
        loaded_bytes=4096000, saved_blocks=900, wrong_blocks=0, verified_blocks=1000, failed_loads={}, failed_saves={},
        dropped_saves=0, match_ms=Latency(p50=0.123, p99=0.4, count=500), load_ms=Latency(p50=2.0, p99=9.0, count=400),
        save_ms=Latency(p50=1.0, p99=3.0, count=500), load_gb_s=1.5, seconds=12.3, match_s=0.1, load_s=2.0, save_s=1.0,
        payload_s=0.5, config={"store": {"dram": {"capacity_bytes": 409600}}, "limit": None}, machine={"cpu": "a CPU"},
        series=Series(
            request=requests, seconds=[0.1 * n for n in range(samples)], referenced_blocks=[10 * n for n in requests],
            prefix_hit_rate=[0.2] * samples, hits={"dram": requests, "nvme": requests},
            blocks={"dram": [min(n, 100) for n in requests], "nvme": requests},
        ),
    )  # fmt: skip
    found = msgspec.to_builtins(whole)
    found.update(changes)
    return found  # type: ignore[no-any-return]


class Balance(HTMLParser):
    """Checks that elements are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def parsed(page: str) -> Balance:
    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    return balance


def test_the_page_needs_nothing_else_and_has_all_plots() -> None:
    page = render_report(result())
    balance = parsed(page)
    assert page.count("<svg") == 5
    assert all(source.startswith("#") for source in balance.sources), "something is fetched from elsewhere"
    assert "<script" not in page
    assert not re.search(r"url\((?!#)", page)
    for text in ("20.00 %", "0.123 ms", "1.25 GB/s", "store.dram.capacity_bytes", "a CPU", "not set"):
        assert text in page


def test_ids_of_two_plots_do_not_collide() -> None:
    page = render_report(result())
    plots = page.split("<svg")[1:]
    clips = [set(re.findall(r'<clipPath id="(\w+)"', plot)) for plot in plots]
    for number, plot in enumerate(plots):
        used = set(re.findall(r"url\(#(\w+)\)", plot))
        assert used <= clips[number]
        others: set[str] = set().union(*(clips[:number] + clips[number + 1 :]))
        assert not used & others


def test_the_same_result_gives_the_same_page() -> None:
    assert render_report(result()) == render_report(result())


@pytest.mark.parametrize(
    "name",
    ["trace", "tiers", "series", "match_ms", "failed_loads", "hit_blocks", "wrong_blocks", "config", None],
)
def test_whatever_is_missing_is_shown_as_such(name: str | None) -> None:
    whole = {} if name is None else {key: value for key, value in result().items() if key != name}
    page = render_report(whole)
    parsed(page)
    assert "None" not in page
    assert "nan" not in re.sub(r"<style.*?</style>", "", page, flags=re.S).lower().split()
    if name is None:
        assert page.count(figures.MISSING) > 15
        assert "<svg" not in page


def test_none_everywhere_is_shown_as_missing() -> None:
    page = render_report(dict.fromkeys(result()))
    parsed(page)
    assert "None" not in page


def test_an_empty_replay_makes_a_page() -> None:
    series = msgspec.to_builtins(Series())
    page = render_report(result(requests=0, blocks=0, prefix_hit_rate=None, series=series, tiers={}))
    parsed(page)
    assert figures.MISSING in page


def test_wrong_blocks_are_not_to_be_overlooked() -> None:
    assert 'class="value bad">3<' in render_report(result(wrong_blocks=3))
    assert 'class="value good">0<' in render_report(result())
    assert "not verified" in render_report(result(wrong_blocks=None))


def test_names_are_text_and_not_markup() -> None:
    page = render_report(result(trace="<script>alert(1)</script>", machine={"cpu": "<b>&amp;"}))
    parsed(page)
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="report"):
        write_report(result(), tmp_path)
    write_report(result(), tmp_path / "new" / "report.html")
    assert (tmp_path / "new" / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("module", ["jinja2", "matplotlib"])
def test_without_its_packages_it_says_what_to_install(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"{module}.*tierkv\[report\]"):
        render_report(result())


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (figures.percent(0.34567), "34.57 %"),
        (figures.count(1234567), "1,234,567"),
        (figures.size(0), "0 B"),
        (figures.size(1023), "1,023 B"),
        (figures.size(1536), "1.5 KiB"),
        (figures.size(5 << 40), "5 TiB"),
        (figures.size(5 << 50), "5,120 TiB"),
        (figures.milliseconds(0.0123), "0.012 ms"),
        (figures.milliseconds(123.45), "123.5 ms"),
        (figures.gb_s(None), "n/a"),
        (figures.count(float("nan")), "n/a"),
        (figures.count(True), "n/a"),
        (figures.plain(None), "n/a"),
        (figures.plain(""), "n/a"),
        (figures.plain(False), "False"),
    ],
)
def test_figures_are_written_for_people(shown: str, text: str) -> None:
    assert shown == text
