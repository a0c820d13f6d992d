"""The report's plots, each an inline SVG (text stays text, so the page's fonts and search apply), or None
where there is nothing to draw. Uses matplotlib's Figure directly: no global state, no display.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

TIER_COLOURS = {"dram": "#2563eb", "nvme": "#0d9488", "dfs": "#d97706"}
_TITLES = {"dram": "DRAM", "nvme": "NVMe", "dfs": "DFS"}
_MISS = "#e5e7eb"
_INK = "#374151"
_FAINT = "#9ca3af"
_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.edgecolor": "#d1d5db",
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eef0f3",
    "grid.linewidth": 0.8,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def hit_rate(series: Mapping[str, Any]) -> str | None:
    """The prefix-hit rate so far, and the rate between one sample and the next."""
    requests, referenced = series.get("request") or [], series.get("referenced_blocks") or []
    cumulative = series.get("prefix_hit_rate") or []
    if len(requests) < 2 or not len(requests) == len(referenced) == len(cumulative):
        return None
    hits = [sum(values) for values in zip(*_of_tiers(series, "hits").values(), strict=True)]
    recent = [
        100 * gained / blocks if blocks else float("nan")
        for gained, blocks in zip(_steps(hits), _steps(referenced), strict=True)
    ]
    with mpl.rc_context({**_STYLE, "svg.hashsalt": "hit_rate"}):
        figure, axes = _figure()
        if len(recent) == len(requests):
            axes.plot(requests, recent, color="#93c5fd", linewidth=0.9, label="since the last sample")
        axes.plot(requests, _percent(cumulative), color="#1d4ed8", linewidth=2.0, label="since the start")
        axes.set_ylim(0, 100)
        axes.set_ylabel("prefix-hit rate, %")
        return _finish(figure, axes, requests)


def sources(series: Mapping[str, Any]) -> str | None:
    """Where the referenced blocks came from, as shares of each step."""
    requests, steps = series.get("request") or [], _steps(series.get("referenced_blocks") or [])
    hits = _of_tiers(series, "hits")
    if len(requests) < 2 or not hits or len(steps) != len(requests):
        return None
    shares = {
        name: [100 * h / n if n else 0.0 for h, n in zip(_steps(values), steps, strict=True)]
        for name, values in hits.items()
    }
    with mpl.rc_context({**_STYLE, "svg.hashsalt": "sources"}):
        figure, axes = _figure()
        below = [0.0] * len(requests)
        for name, values in shares.items():
            above = [low + value for low, value in zip(below, values, strict=True)]
            axes.fill_between(requests, below, above, color=_colour(name), linewidth=0, label=_title(name))
            below = above
        axes.fill_between(requests, below, 100, color=_MISS, linewidth=0, label="computed")
        axes.set_ylim(0, 100)
        axes.set_ylabel("blocks from, %")
        return _finish(figure, axes, requests)


def occupancy(series: Mapping[str, Any], tiers: Mapping[str, Any]) -> str | None:
    """Blocks that each tier holds; a dashed line where its capacity is known and near."""
    requests, blocks = series.get("request") or [], _of_tiers(series, "blocks")
    if len(requests) < 2 or not blocks:
        return None
    with mpl.rc_context({**_STYLE, "svg.hashsalt": "occupancy"}):
        figure, axes = _figure()
        top = max(max(values) for values in blocks.values())
        for name, values in blocks.items():
            axes.plot(requests, values, color=_colour(name), linewidth=2.0, label=_title(name))
            capacity = (tiers.get(name) or {}).get("capacity_blocks")
            if capacity and capacity <= 1.5 * top:
                axes.axhline(capacity, color=_colour(name), linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.7)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("blocks held")
        axes.yaxis.set_major_formatter(_THOUSANDS)
        return _finish(figure, axes, requests)


def bandwidth(tiers: Mapping[str, Any]) -> str | None:
    """Read and write rate of each tier."""
    rows = [
        (name, tier.get("read_gb_s"), tier.get("write_gb_s"))
        for name, tier in tiers.items()
        if name in TIER_COLOURS
    ]
    largest = max((rate for _, *rates in rows for rate in rates if rate), default=0)
    if not largest:
        return None
    with mpl.rc_context({**_STYLE, "svg.hashsalt": "bandwidth"}):
        figure, axes = _figure()
        for place, (name, read, write) in enumerate(rows):
            for offset, rate, shade, what in ((-0.19, read, 1.0, "read"), (0.19, write, 0.45, "write")):
                axes.barh(place + offset, rate or 0, height=0.34, color=_colour(name), alpha=shade)
                label = f"{what}  {rate:.2f}" if rate else f"{what}  n/a"
                axes.text(
                    (rate or 0) + largest * 0.012, place + offset, label, va="center", color=_INK, fontsize=9
                )
        axes.set_yticks(range(len(rows)), [_title(name) for name, *_ in rows])
        axes.invert_yaxis()
        axes.set_xlim(0, largest * 1.2)
        axes.set_xlabel("GB/s while at least one transfer was under way")
        axes.grid(axis="y", visible=False)
        return _svg(figure)


def latency(calls: Mapping[str, Any]) -> str | None:
    """Median and 99th percentile of each call on a logarithmic axis."""
    rows = [
        (name, call["p50"], call["p99"])
        for name, call in calls.items()
        if call and call.get("p50") and call.get("p99")
    ]
    if not rows:
        return None
    with mpl.rc_context({**_STYLE, "svg.hashsalt": "latency"}):
        figure, axes = _figure()
        for place, (_, p50, p99) in enumerate(rows):
            axes.plot(
                [p50, p99], [place, place], color="#c7d2fe", linewidth=7, solid_capstyle="round", zorder=2
            )
            axes.scatter(
                [p50], [place], s=52, color="#4338ca", zorder=3, label="median" if not place else None
            )
            axes.scatter(
                [p99],
                [place],
                s=52,
                color="#db2777",
                zorder=3,
                label="99th percentile" if not place else None,
            )
            axes.text(p50, place - 0.17, _short_ms(p50), ha="center", va="bottom", color=_INK, fontsize=8.5)
            axes.text(p99, place + 0.17, _short_ms(p99), ha="center", va="top", color=_INK, fontsize=8.5)
        axes.set_xscale("log")
        low, high = min(p50 for _, p50, _ in rows), max(p99 for *_, p99 in rows)
        axes.set_xlim(low / 2.2, high * 2.2)
        axes.set_ylim(len(rows) - 0.45, -0.55)
        axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("ms a request")
        axes.grid(axis="y", visible=False)
        _legend(axes)
        return _svg(figure)


_THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")


def _figure() -> tuple[Any, Any]:
    figure = Figure(figsize=(6.4, 2.9), layout="constrained")
    figure.patch.set_alpha(0.0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0.0)
    return figure, axes


def _finish(figure: Any, axes: Any, requests: Sequence[int]) -> str:
    axes.set_xlim(requests[0], requests[-1])
    axes.set_xlabel("requests")
    axes.xaxis.set_major_formatter(_THOUSANDS)
    _legend(axes)
    return _svg(figure)


def _legend(axes: Any) -> None:
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=5,
        borderaxespad=0.0,
        handlelength=1.2,
        columnspacing=1.4,
    )


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _of_tiers(series: Mapping[str, Any], key: str) -> dict[str, list[int]]:
    """A series' lists per tier, only those as long as the series."""
    length = len(series.get("request") or [])
    found = series.get(key) or {}
    return {name: found[name] for name in TIER_COLOURS if len(found.get(name) or []) == length > 0}


def _steps(values: Sequence[int]) -> list[int]:
    return [value - before for value, before in zip(values, [0, *values], strict=False)]


def _percent(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else 100 * value for value in values]


def _short_ms(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _colour(name: str) -> str:
    return TIER_COLOURS.get(name, _FAINT)


def _title(name: str) -> str:
    return _TITLES.get(name, name)
