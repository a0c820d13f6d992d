"""A replay's result as one HTML page that needs nothing else: styles and plots are inside.

It reads the JSON of a result (a mapping), not the code that made it, so that results of other versions can be
shown too: whatever is missing is shown as n/a. Needs matplotlib and jinja2 (the `report` extra).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierkv.errors import ConfigError, StorageError
from tierkv.observe import figures

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
    for name in ("percent", "count", "size", "gb_s", "milliseconds", "seconds", "plain"):
        environment.filters[name] = getattr(figures, name)
    series = result.get("series") or {}
    tiers = result.get("tiers") or {}
    drawn = {
        "hit_rate": plots.hit_rate(series),
        "sources": plots.sources(series),
        "occupancy": plots.occupancy(series, tiers),
        "bandwidth": plots.bandwidth(tiers),
        "latency": plots.latency({name: result.get(f"{name}_ms") for name in ("match", "load", "save")}),
    }
    return environment.get_template(_TEMPLATE).render(
        result=result, tiers=tiers, plots=drawn, titles=_TIER_TITLES, missing=figures.MISSING,
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
