"""What the tier must know of the engine: all that it reads from vLLM's configuration, and what of it names blocks.

Supported are the versions of vLLM that the tierkv connector supports. Everything that could differ in another one is in
this module and in tier.py.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from tierkv.adapters.vllm.engine_settings import check_prefixes, weights_revision
from tierkv.adapters.vllm.facts import (
    SEED_VARIABLE,
    SEEDED_AT_RANDOM,
    check_hashes,
    model_settings,
    platform_words,
)
from tierkv.adapters.vllm_offloading.keyspaces import GroupFacts, TierFacts
from tierkv.adapters.vllm_offloading.options import WHERE, TierOptions
from tierkv.errors import ConfigError

_HASHES = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


def engine_config(engine_id: str) -> Any | None:
    """The configuration of the engine that makes this tier; None where it cannot be found.

    vLLM hands tiers only a part of it, without the weights' revision, quantization or block hash. Blocks of different
    weights must not meet, so it is taken from the callers: the connector that is being made has it.
    """
    config = get_current_vllm_config_or_none()
    frame = inspect.currentframe()
    while frame is not None:
        if _is_of(config, engine_id):
            return config
        config = frame.f_locals.get("vllm_config")
        frame = frame.f_back
    return None


def _is_of(config: Any, engine_id: str) -> bool:
    transfer = getattr(config, "kv_transfer_config", None)
    return isinstance(config, VllmConfig) and transfer is not None and transfer.engine_id == engine_id


def facts_of(spec: Any, row_bytes: int, options: TierOptions) -> TierFacts:
    """What names the blocks of an offloading spec's CPU tier; ConfigError says what to set where it is unknown."""
    config, parallel = spec.config, spec.config.parallel
    engine = engine_config(config.engine_id)
    if engine is None:
        raise ConfigError(
            f"{WHERE}: the engine's configuration was not found, so nothing tells its weights and settings from "
            f"others: use a supported vLLM, or the tierkv connector"
        )
    _check_engine(engine, options)
    return TierFacts(
        model=options.model or config.model.name,
        revision=options.model_revision or weights_revision(engine.model_config, engine.load_config, WHERE),
        kv_dtype=config.model.dtype,
        row_bytes=row_bytes,
        worker_block_bytes=config.worker_kv_bytes_per_block,
        blocks_per_row=spec.blocks_per_chunk,
        hash_tokens=spec.tokens_per_hash,
        groups=[
            GroupFacts(group.group_id, group.tokens_per_block, tuple(group.layer_names))
            for group in config.groups
        ],
        layout=f"{config.kv_cache_layout}:{platform_words()}",
        row_format=_row_format(config),
        parallel={
            "tp": parallel.tp_size,
            "pp": parallel.pp_size,
            "pcp": parallel.pcp_size,
            "dcp": parallel.dcp_size,
            "world": parallel.world_size,
        },
        any_parallel=bool(
            config.replicated_layout or (config.canonical_layout and parallel.is_parallelism_agnostic)
        ),
        extra={
            **{f"user_{name}": value for name, value in options.extra_identity.items()},
            **model_settings(engine, options.model_revision is not None, WHERE),
        },
    )


def _check_engine(engine: Any, options: TierOptions) -> None:
    if engine.lora_config is not None and not options.lora_paths_are_stable:
        raise ConfigError(
            f"{WHERE}: blocks of LoRA adapters have only their names and paths to go by, so those of weights that were "
            f"replaced would be found: use the tierkv connector, which looks at the files, or set "
            f"lora_paths_are_stable if that never happens"
        )
    if engine.parallel_config.nnodes_within_dp > 1:
        raise ConfigError(
            f"{WHERE}: the engine spans several nodes, but the scheduler sees the CPU tier of its own only: use the "
            f"tierkv connector, or one node an engine"
        )
    check_hashes(engine, WHERE)
    check_prefixes(engine, WHERE)


def _row_format(config: Any) -> str:
    if config.canonical_layout:
        return f"canonical {canonical_format_id(config.kv_cache_layout)}"
    return "replicated" if config.replicated_layout else "direct"


def hashing() -> tuple[str, bytes]:
    """(the block hash's algorithm, what its chains start from), once the engine has set them.

    ConfigError where they are not set, or seeded at random.
    """
    seed = kv_cache_utils.get_none_hash_seed()
    start = getattr(kv_cache_utils, "NONE_HASH", None)
    for name in _HASHES:
        try:
            same = start is not None and get_hash_fn_by_name(name)(seed) == start
        except ImportError:  # an algorithm whose package is not installed is not the one in use
            continue
        if same:
            if name in SEEDED_AT_RANDOM and os.environ.get(SEED_VARIABLE) != seed:
                raise ConfigError(
                    f"{WHERE}: block hashes are seeded at random: set {SEED_VARIABLE} for all engines"
                )
            assert isinstance(start, bytes)
            return name, bytes(start)
    raise ConfigError(
        f"{WHERE}: this vLLM hashes blocks in a way that is not known: none of {', '.join(_HASHES)}"
    )
