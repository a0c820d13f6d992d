"""What `verify` and `inspect` share: telling an NVMe directory from a shared one."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tierkv.errors import StorageError

Kind = Literal["nvme", "dfs"]


def kind_of(directory: str) -> Kind:
    """Which tier's files are in `directory`; StorageError when it is no directory."""
    from tierkv.tiers.dfs_format import FORMAT_DIRECTORY

    place = Path(directory)
    if not place.is_dir():
        raise StorageError(f"{directory}: no such directory: name the one that a tier was given")
    return "dfs" if (place / FORMAT_DIRECTORY).is_dir() else "nvme"
