"""A secondary tier for vLLM's own OffloadingConnector: `"type": "TierKVTier", "module_path":
"tierkv.adapters.vllm_offloading"` in its `secondary_tiers`.

docs/vllm-offloading.md tells how to run it. The class is imported when it is asked for: nothing else here needs vLLM.
"""

from __future__ import annotations

from typing import Any

__all__ = ["TierKVTier"]


def __getattr__(name: str) -> Any:
    if name == "TierKVTier":
        from tierkv.adapters.vllm_offloading.tier import TierKVTier

        return TierKVTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
