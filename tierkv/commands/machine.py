"""The facts of this machine that a figure depends on, as they go beside every result."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def machine_facts() -> dict[str, Any]:
    """CPU, memory, kernel and versions. What cannot be found out is left away; no names of hosts or users."""
    from tierkv import _native

    facts: dict[str, Any] = {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "crc32c": _native.crc32c_implementation(),
        "native": _native.build_info(),
        "transparent_huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load_average_1m": round(os.getloadavg()[0], 2),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _field(path: str, name: str) -> str | None:
    """The value of the first 'name : value' line of a file."""
    try:
        text = Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _chosen(path: str) -> str | None:
    """The chosen word of a file such as 'always [madvise] never'."""
    try:
        text = Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return text.partition("[")[2].partition("]")[0] or None
