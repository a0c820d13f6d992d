"""Hooks on vLLM's own objects, for what it does not tell connectors: resets of its prefix cache, and LoRA weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tierkv.adapters.vllm.lora import LoadedAdapters


def watch_resets(kv_cache_manager: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Has before() called when the engine is about to forget its own prefix cache, and after() when it has.

    vLLM tells connectors of neither, and it cannot forget while they hold blocks.
    """
    forget = kv_cache_manager.reset_prefix_cache

    def reset_prefix_cache() -> bool:
        before()
        done = bool(forget())
        if done:
            after()
        return done

    kv_cache_manager.reset_prefix_cache = reset_prefix_cache


_ADAPTER_SETTINGS = (
    "lora_dtype", "target_modules", "fully_sharded_loras", "enable_tower_connector_lora",
    "enable_mixed_moe_lora_format", "enable_moe_shared_loras",
)  # fmt: skip


def adapter_settings(vllm_config: Any) -> dict[str, str]:
    """Settings that change what a LoRA adapter computes."""
    lora = vllm_config.lora_config
    return {name: str(getattr(lora, name, None)) for name in _ADAPTER_SETTINGS} if lora is not None else {}


_loaded_adapters: list[LoadedAdapters] = []
"""Those of this process's engine, once its loader is wrapped."""


def loaded_adapters(vllm_config: Any) -> LoadedAdapters:
    """Which LoRA weights this worker loads from now on. vLLM tells no connector, so its loader is wrapped."""
    loaded = LoadedAdapters()
    if vllm_config.lora_config is None:
        return loaded
    from vllm.lora.worker_manager import WorkerLoRAManager

    if not _loaded_adapters:
        load = WorkerLoRAManager._load_adapter

        def noted(self: Any, lora_request: Any) -> Any:
            with _loaded_adapters[0].loading(lora_request.lora_int_id, lora_request.lora_path):
                return load(self, lora_request)

        WorkerLoRAManager._load_adapter = noted
    _loaded_adapters[:] = [loaded]
    return loaded
