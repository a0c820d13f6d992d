"""LoRA adapters: what tells the blocks of one adapter from those of another that goes by the same name.

vLLM's block hashes hold the name and the path that a request gives, not the weights: two engines, or one before and
after a restart, may have loaded different weights from that path. So the store knows the blocks of an adapter by
hashes that are re-keyed with what the adapter's directory holds, and where that cannot be told, or does not stay as
it was, nothing is kept.

The scheduler side goes by the directory as it is when a request arrives, the workers by the directory as it was when
they read it: each order says which adapter it is meant for, and a worker that serves another one does not carry it out.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from tierkv.adapters.vllm.identity import digest_of, directory_revision
from tierkv.errors import ConfigError
from tierkv.types import HashArray

log = logging.getLogger("tierkv.vllm")

MAX_ADAPTERS = 1 << 16
"""How many adapters an engine remembers; more are not kept."""


class AdapterRequest(Protocol):
    """What is read of vLLM's LoRARequest."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter whose weights are known."""

    number: int
    """The engine's id for it."""
    revision: str
    """Of its directory; see identity.directory_revision()."""
    key: bytes
    """What its block hashes are re-keyed with, 32 bytes."""


def adapter_revision(path: str) -> str | None:
    """Names the weights that are at an adapter's path now; None where that is no local directory with weights."""
    place = Path(os.path.expanduser(path) if path.startswith("~") else path)
    try:
        return directory_revision(place) if place.is_dir() else None
    except (ConfigError, OSError, ValueError):
        return None


def _look_of(path: str) -> object:
    """Names, sizes and times of an adapter's files; None where it has none."""
    try:
        with os.scandir(os.path.expanduser(path)) as entries:
            files = [(entry.name, entry.stat()) for entry in entries]
    except (OSError, ValueError):
        return None
    return sorted((name, status.st_size, status.st_mtime_ns, status.st_ino) for name, status in files)


def rekeyed(hashes: HashArray, key: bytes) -> HashArray:
    """The names of (n, 32) blocks under an adapter's key, which is as good as random: no two adapters share one."""
    return hashes ^ np.frombuffer(key, np.uint8)


class AdapterBook:
    """The scheduler side's: which weights a request's adapter stands for. On the engine's thread only."""

    def __init__(self, settings: Mapping[str, object] | None = None) -> None:
        """settings: of the engine, that change what an adapter computes."""
        self._settings = digest_of(settings or {})
        self._known: dict[tuple[str, str], str | None] = {}
        """(name, path), as in the engine's block hashes -> the revision; None if there is none to go by."""
        self._looks: dict[str, tuple[object, str | None]] = {}
        """Path -> (what its files looked like, the revision that they gave)."""

    def adapter_of(self, request: AdapterRequest) -> Adapter | None:
        """The adapter of a request; None where its blocks must be neither looked for nor kept."""
        revision = self._revision(request.lora_name, request.lora_path)
        if revision is None:
            return None
        form = f"{self._settings}\0{getattr(request, 'is_3d_lora_weight', False)}\0{revision}"
        return Adapter(request.lora_int_id, revision, hashlib.sha256(form.encode()).digest())

    def _revision(self, name: str, path: str) -> str | None:
        """Looks at the directory each time, as it may have changed since the last request: some 10 us a file."""
        known = self._known.get((name, path), "")
        if known is None or (not known and len(self._known) >= MAX_ADAPTERS):
            return None
        found = self._looked_at(path)
        if found is None:
            log.warning(
                "LoRA adapter %r: %r is no local directory with weights, so nothing tells them from others: its "
                "blocks are not kept", name, path,
            )  # fmt: skip
        elif known and found != known:
            # The engine's own prefix cache goes on by name and path: it may hold blocks of the weights before.
            log.warning(
                "LoRA adapter %r: the files in %r have changed, so its blocks are no longer kept until the engine is "
                "restarted: load changed weights from another path", name, path,
            )  # fmt: skip
            found = None
        self._known[name, path] = found
        return found

    def _looked_at(self, path: str) -> str | None:
        """adapter_revision(), which reads files only when some look different from the last time."""
        look = _look_of(path)
        known = self._looks.get(path)
        if known is None or look is None or known[0] != look:
            if len(self._looks) >= MAX_ADAPTERS:
                self._looks.clear()
            known = self._looks[path] = (look, adapter_revision(path))
        return known[1]


class LoadedAdapters:
    """A worker's: which weights it has loaded for each id. Filled by the engine's thread, as are the questions."""

    def __init__(self) -> None:
        self._loaded: dict[int, str | None] = {}

    @contextmanager
    def loading(self, number: int, path: str) -> Iterator[None]:
        """Around the reading of an adapter: notes what is read, if it stays the same meanwhile."""
        self._loaded[number] = None
        before = adapter_revision(path)
        yield
        self._loaded[number] = before if before == adapter_revision(path) else None

    def computed(self, adapter: Adapter | None) -> bool:
        """Whether blocks that were just computed for an adapter, None for the base model, are that adapter's."""
        return adapter is None or self._loaded.get(adapter.number) == adapter.revision

    def may_compute(self, adapter: Adapter | None) -> bool:
        """Whether this worker goes on with an adapter's blocks: it serves no other weights under its id."""
        return adapter is None or self._loaded.get(adapter.number, adapter.revision) == adapter.revision
