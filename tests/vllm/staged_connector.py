"""The connector, but with blocks staged as those on an accelerator are: `kv_connector_module_path` of
test_staged_engine.py."""

from __future__ import annotations

import logging
from typing import Any

from tierkv.adapters.vllm.connector import TierKVConnector as RealConnector
from tierkv.adapters.vllm.device import HostDevice
from tierkv.adapters.vllm.staging import DevicePath, PathMaker, Staging


class _Staged(PathMaker):
    def path(self, space: Any, cache: Any, shard: Any) -> DevicePath:
        """A path through staging, though the cache is in host memory; the log tells of it."""
        if self._staging is None:
            self._staging = Staging(self._store, HostDevice(), self._staging_bytes)
        path = self._staging.path(space, cache, shard)
        logging.getLogger("tierkv.vllm").warning(
            "staged: %d pieces in %d plates, %d blocks a chunk",
            len(cache.bases),
            path.plates,
            path.chunk_blocks,
        )
        return path


class TierKVConnector(RealConnector):
    """See the module."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._paths = _Staged(self._store, self._settings.staging())
