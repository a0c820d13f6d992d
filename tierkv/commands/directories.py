"""What `verify` and `inspect` share: telling an NVMe directory from a shared one, and listing keyspaces."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from tierkv.commands import output
from tierkv.errors import StorageError

Kind = Literal["nvme", "dfs"]


def kind_of(directory: str) -> Kind:
    """Which tier's files are in `directory`; StorageError when it is no directory."""
    from tierkv.tiers.dfs_format import FORMAT_DIRECTORY

    place = Path(directory)
    if not place.is_dir():
        raise StorageError(f"{directory}: no such directory: name the one that a tier was given")
    return "dfs" if (place / FORMAT_DIRECTORY).is_dir() else "nvme"


def print_keyspaces(human: Any, keyspaces: list[dict[str, Any]]) -> None:
    """A table of keyspaces, as the tiers' reports have them."""
    from tierkv.observe import figures

    made = output.table(
        "keyspaces", "model, revision, group", "digest", "blocks", "bytes", "oldest", "newest"
    )
    for keyspace in keyspaces:
        spec = keyspace["spec"] or {}
        ages = [
            _age(keyspace[name]) if keyspace["blocks"] else figures.MISSING
            for name in ("oldest_s", "newest_s")
        ]
        name = ", ".join(figures.plain(spec.get(field)) for field in ("model", "revision", "group"))
        made.add_row(
            name,
            keyspace["digest"][:12],
            figures.count(keyspace["blocks"]),
            figures.size(keyspace["bytes"]),
            *ages,
        )
    human.print(made)


def _age(seconds: float) -> str:
    """Rounded down to the largest fitting unit."""
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{int(seconds // length_s)} {unit} ago"
    return f"{int(seconds)} s ago"
