"""How figures are written for people. What is missing (None, NaN, not a number) is n/a, never 0."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

MISSING = "n/a"


def _or_missing(show: Callable[[Any], str]) -> Callable[[Any], str]:
    def shown(value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
            return MISSING
        return show(value)

    return shown


def _size(value: float) -> str:
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{value:.3g} {units[0]}" if abs(value) < 100 else f"{value:,.0f} {units[0]}"


percent = _or_missing(lambda value: f"{value * 100:.2f} %")
count = _or_missing(lambda value: f"{value:,.0f}")
size = _or_missing(_size)
"""Bytes in the largest fitting unit of 1,024."""
gb_s = _or_missing(lambda value: f"{value:.2f} GB/s")
milliseconds = _or_missing(lambda value: f"{value:.3f} ms" if value < 10 else f"{value:.1f} ms")
seconds = _or_missing(lambda value: f"{value:.1f} s")


def plain(value: Any) -> str:
    """Anything as text."""
    return (str(value) or MISSING) if value is not None else MISSING
