"""A replay's result as one HTML page that needs nothing else: styles and plots are inside.

It reads the JSON of a result (a mapping), not the code that made it, so that results of other versions can be
shown too: whatever is missing is shown as n/a. Needs matplotlib and jinja2 (the `report` extra).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tierkv.errors import ConfigError, StorageError

MISSING = "n/a"
_TEMPLATE = "report.html.j2"
_TIER_TITLES = {"hbm": "HBM", "dram": "DRAM", "nvme": "NVMe", "dfs": "DFS"}


def write_report(result: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes the page for a replay's result (its JSON as a mapping).

    Raises ConfigError when matplotlib or jinja2 is missing, StorageError when the file cannot be written.
    """
    page = render_report(result)
    place = Path(path)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(page, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"report {place}: cannot be written: {error.strerror}") from error


def check_requirements() -> None:
    """Raises ConfigError that says what to install, so that a long run does not fail at its end."""
    try:
        import jinja2
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError(
            f"the HTML report needs {error.name}, which is not installed: pip install 'tierkv[report]'"
        ) from error
    del jinja2, mpl


def render_report(result: Mapping[str, Any]) -> str:
    """The page as text; ConfigError when matplotlib or jinja2 is missing."""
    check_requirements()
    import jinja2

    from tierkv.observe import plots

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.ChainableUndefined,
    )
    environment.filters.update(FILTERS)
    series = result.get("series") or {}
    tiers = result.get("tiers") or {}
    figures = {
        "hit_rate": plots.hit_rate(series),
        "sources": plots.sources(series),
        "occupancy": plots.occupancy(series, tiers),
        "bandwidth": plots.bandwidth(tiers),
        "latency": plots.latency({name: result.get(f"{name}_ms") for name in ("match", "load", "save")}),
    }
    return environment.get_template(_TEMPLATE).render(
        result=result, tiers=tiers, figures=figures, titles=_TIER_TITLES, missing=MISSING,
        config=_flat(result.get("config") or {}), machine=_flat(result.get("machine") or {}),
    )  # fmt: skip


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """A nested mapping as (dotted name, value) rows."""
    rows: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            rows.extend(_flat(value, f"{prefix}{key}."))
        else:
            rows.append((f"{prefix}{key}", value))
    return rows


def _or_missing(show: Callable[[Any], str]) -> Callable[[Any], str]:
    def shown(value: Any) -> str:
        if (
            value is None
            or isinstance(value, bool)
            or not isinstance(value, (int, float))
            or math.isnan(value)
        ):
            return MISSING
        return show(value)

    return shown


def format_bytes(value: float) -> str:
    """Bytes in the largest fitting unit of 1,024, such as '1.5 GiB'."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{value:.3g} {units[0]}" if abs(value) < 100 else f"{value:,.0f} {units[0]}"


FILTERS: dict[str, Callable[[Any], str]] = {
    "percent": _or_missing(lambda value: f"{value * 100:.2f} %"),
    "count": _or_missing(lambda value: f"{value:,.0f}"),
    "size": _or_missing(format_bytes),
    "gb_s": _or_missing(lambda value: f"{value:.2f} GB/s"),
    "ms": _or_missing(lambda value: f"{value:.3f} ms" if value < 10 else f"{value:.1f} ms"),
    "seconds": _or_missing(lambda value: f"{value:.1f} s"),
    "plain": lambda value: str(value) or MISSING if value is not None else MISSING,
}
"""How figures are written; None and NaN are n/a."""
