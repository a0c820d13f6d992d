"""vLLM's KV connector: `kv_connector="TierKVConnector"`, `kv_connector_module_path="tierkv.adapters.vllm"`.

docs/vllm.md tells how to run it. The class is imported when it is asked for: nothing else here needs vLLM.
"""

from __future__ import annotations

from typing import Any

__all__ = ["TierKVConnector"]


def __getattr__(name: str) -> Any:
    if name == "TierKVConnector":
        from tierkv.adapters.vllm.connector import TierKVConnector

        return TierKVConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
