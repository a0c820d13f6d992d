"""Prints what tierkv's pyproject.toml asks for, with the development extras, one requirement a line."""

from __future__ import annotations

import tomllib
from pathlib import Path


def requirements(extras: tuple[str, ...] = ("report", "testing", "dev")) -> list[str]:
    """The project's dependencies and those of `extras`, without references to tierkv itself."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    found = list(project["dependencies"])
    for extra in extras:
        found += project["optional-dependencies"][extra]
    return sorted({entry for entry in found if not entry.startswith("tierkv")})


if __name__ == "__main__":
    print("\n".join(requirements()))
