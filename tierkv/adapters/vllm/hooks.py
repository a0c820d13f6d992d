"""Hooks on vLLM's own objects, for what it does not tell connectors: resets of its prefix cache, the LoRA weights that
a worker has loaded, and which ranks hold the same KV heads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
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


def kv_head_replicas(layers: Mapping[str, Any], names: Sequence[str]) -> int:
    """How many consecutive tensor-parallel ranks hold the same KV heads of attention layers, because there are more
    ranks than heads; 1 where that is not certain. To be called while the worker's model runner has us called.

    layers: the engine's attention layers by name. What counts is the projection that makes a layer's keys and values:
    vLLM's own gives rank r the head r // replicas, and another one may do otherwise.
    """
    model = _model_being_served()
    if model is None:
        return 1
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    return min((_replicas_of(layers.get(name), parents) for name in names), default=1)


def _replicas_of(layer: Any, parents: Mapping[int, Any]) -> int:
    from vllm.model_executor.layers.linear import QKVParallelLinear

    parent = parents.get(id(layer))
    if parent is None:
        return 1
    projections = [getattr(child, "base_layer", child) for child in parent.children()]  # LoRA wraps them
    found = [child for child in projections if type(child) is QKVParallelLinear]
    if len(found) != 1 or getattr(layer, "num_kv_heads", None) != found[0].num_kv_heads:
        return 1
    return int(found[0].num_kv_head_replicas)


def _model_being_served() -> Any | None:
    """The model of the runner that is among the callers; None where there is none."""
    frame = inspect.currentframe()
    while frame is not None:
        get_model = getattr(frame.f_locals.get("self"), "get_model", None)
        if callable(get_model):
            return get_model()
        frame = frame.f_back
    return None


def local_connector(kind: type, vllm_config: Any) -> Any | None:
    """The worker side's connector of this engine, where its only worker is in this process: a `kind`, by itself or in a
    MultiConnector."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if vllm_config.parallel_config.world_size != 1 or not has_kv_transfer_group():
        return None
    group = get_kv_transfer_group()
    for connector in (group, *getattr(group, "_connectors", ())):
        if isinstance(connector, kind) and _engine_of(connector) == vllm_config.kv_transfer_config.engine_id:
            return connector
    return None


def _engine_of(connector: Any) -> object:
    return connector._vllm_config.kv_transfer_config.engine_id
