"""Everything that depends on vLLM's version: what is supported, and how its objects are read.

Checked at start, so that an engine with a vLLM that works differently does not start instead of caching wrongly.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    get_kv_cache_spec_kind,
    group_kernel_blocks,
    iter_layer_specs,
)

from tierkv.adapters.vllm.engine_settings import check_prefixes, plain, weights_revision
from tierkv.adapters.vllm.facts import (
    SEED_VARIABLE,
    check_hashes,
    check_version,
    model_settings,
    platform_words,
)
from tierkv.adapters.vllm.groups import Group, Kind, step_tokens
from tierkv.adapters.vllm.identity import EngineFacts
from tierkv.adapters.vllm.settings import ConnectorSettings
from tierkv.errors import ConfigError

_DEFAULT_SEED = "vllm-none-hash"
_WHERE = "kv_connector_extra_config"
_NOT_OF_BLOCKS = frozenset({
    "page_size_padded", "block_stride_alignment", "num_speculative_blocks", "num_prefill_checkpoint_blocks",
    "prefill_checkpoint_alignment",
})  # fmt: skip
"""Fields of vLLM's group descriptions about room between and beside blocks."""


def check_engine(vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings) -> None:
    """ConfigError for what is not supported, with the setting to change."""
    check_version(settings.allow_untested_vllm, _WHERE)
    check_hashes(vllm_config, _WHERE)
    check_prefixes(vllm_config, _WHERE)
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(
                f"{name} {getattr(parallel, name)}: blocks that are split over tokens are not supported"
            )
    if kv_cache_config.host_group_ids:
        raise ConfigError(
            "KV-cache groups in host memory (HiSparse) are not supported by the tierkv connector"
        )


def register(name: str, module: str) -> None:
    """Makes the connector known by its name alone: so vLLM's MultiConnector looks for the class of what it counted."""
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module, name)


def groups_of(vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings) -> tuple[Group, ...]:
    """The groups that the store keeps, in the engine's order. ConfigError for a kind that it cannot keep."""
    hash_tokens = hash_block_tokens(vllm_config, kv_cache_config)
    speculative = vllm_config.speculative_config
    drafts = {index for index, group in enumerate(kv_cache_config.kv_cache_groups) if group.is_eagle_group}
    unmarked = speculative is not None and speculative.use_eagle_block_drop() and not drafts
    found = []
    for index in kv_cache_config.prefix_cacheable_group_ids:
        group = kv_cache_config.kv_cache_groups[index]
        kind, reach = _kind_of(index, group.kv_cache_spec)
        tokens = group.kv_cache_spec.block_size
        if tokens % hash_tokens:
            raise ConfigError(
                f"KV-cache group {index} has blocks of {tokens} tokens, which is no multiple of the {hash_tokens} "
                f"tokens of a block hash: choose another --block-size"
            )
        # Draft layers that share the target's group are not marked: they are attention layers.
        margin = int(index in drafts or (unmarked and kind is Kind.FULL))
        policy = {Kind.SLIDING: settings.sliding_window, Kind.CHUNKED: settings.chunked_local}.get(
            kind, "all"
        )
        found.append(Group(index, kind, tokens, reach, margin, policy))
    if not found:
        raise ConfigError("this model has no KV-cache group that can be cached by prefix")
    step = step_tokens(found)
    period = -(-settings.period_tokens // step) * step
    return tuple(
        Group(
            group.index,
            group.kind,
            group.block_tokens,
            group.reach_tokens,
            group.margin_blocks,
            group.store,
            period,
        )
        for group in found
    )


def _kind_of(index: int, spec: Any) -> tuple[Kind, int]:
    """(kind, reach in tokens) of a group."""
    kinds = set()
    for layer in iter_layer_specs(spec):
        if getattr(layer, "non_causal", False) or getattr(layer, "rswa_window", None):
            raise ConfigError(
                f"KV-cache group {index}: {type(layer).__name__} attends such that a block does not follow from the "
                f"tokens before its end: nothing can be shared, run this model without tierkv"
            )
        if isinstance(layer, MambaSpec):
            if layer.mamba_cache_mode != "align":
                raise ConfigError(
                    f"KV-cache group {index}: mamba_cache_mode is {layer.mamba_cache_mode!r}; the store needs the "
                    f"exact states that `--mamba-cache-mode align` with prefix caching hands over"
                )
            kinds.add((Kind.RECURRENT, 0))
        elif isinstance(layer, SlidingWindowSpec):
            kinds.add((Kind.SLIDING, layer.sliding_window - 1 + layer.extra_retained_tokens))
        elif isinstance(layer, ChunkedLocalAttentionSpec):
            kinds.add((Kind.CHUNKED, layer.attention_chunk_size))
        elif isinstance(layer, FullAttentionSpec):
            kinds.add((Kind.FULL, 0))
        else:
            raise ConfigError(f"KV-cache group {index}: {type(layer).__name__} is not supported")
    if len(kinds) != 1:
        raise ConfigError(f"KV-cache group {index} mixes kinds of attention: {sorted(map(str, kinds))}")
    return kinds.pop()


def hash_block_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens that one block hash covers."""
    return int(kv_cache_config.hash_block_size or vllm_config.cache_config.block_size)


def replicas_of(vllm_config: Any, spec: Any) -> int:
    """Consecutive tensor-parallel ranks that hold the same bytes of a group."""
    size = vllm_config.parallel_config.tensor_parallel_size
    found = set()
    for layer in iter_layer_specs(spec):
        shards = getattr(layer, "max_tp_shards", None)
        if getattr(layer, "tp_replicated", False):
            shards = 1
        found.add(max(1, size // shards) if shards else 1)
    return min(found)


def blocks_of(cache: Any, num_blocks: int) -> Any:
    """A layer's tensor, or tensors, with the manager's blocks as the first dimension."""
    if isinstance(cache, (list, tuple)):
        return [group_kernel_blocks(tensor, num_blocks) for tensor in cache]
    return group_kernel_blocks(cache, num_blocks)


def facts_of(
    vllm_config: Any, kv_cache_config: Any, settings: ConnectorSettings, tensor_rank: int, pipeline_rank: int
) -> EngineFacts:
    """What of this worker's engine changes the bytes. Called once the caches are there."""
    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    backends = sorted(
        f"{backend.__module__}.{backend.__qualname__}" for backend in get_current_attn_backends(vllm_config)
    )
    return EngineFacts(
        model=settings.model or str(vllm_config.model_config.model),
        revision=settings.model_revision
        or weights_revision(vllm_config.model_config, vllm_config.load_config, _WHERE),
        hash_algorithm=str(cache.prefix_caching_hash_algo),
        hash_seed=os.environ.get(SEED_VARIABLE) or _DEFAULT_SEED,
        hash_block_tokens=hash_block_tokens(vllm_config, kv_cache_config),
        layout=f"{kv_cache_config.kv_cache_layout}:{platform_words()}",
        backend=",".join(backends),
        tensor_rank=tensor_rank,
        tensor_size=parallel.tensor_parallel_size,
        pipeline_rank=pipeline_rank,
        pipeline_size=parallel.pipeline_parallel_size,
        extra=model_settings(vllm_config, settings.model_revision is not None, _WHERE),
    )


def spec_detail(spec: Any) -> str:
    """What vLLM's own description of a group adds to its identity."""
    found = set()
    for layer in iter_layer_specs(spec):
        fields = {
            field.name: plain(getattr(layer, field.name))
            for field in dataclasses.fields(layer)
            if field.name not in _NOT_OF_BLOCKS
        }
        found.add(json.dumps({"": type(layer).__name__, **fields}))
    return f"{get_kv_cache_spec_kind(spec).value}:{','.join(sorted(found))}"
