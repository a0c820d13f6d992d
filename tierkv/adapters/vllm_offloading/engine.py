"""What the tier must know of the engine: all that it reads from vLLM's configuration, and what of it names blocks.

Supported are the versions of vLLM that the tierkv connector supports. Everything that could differ in another one is in
this module and in tier.py.
"""

from __future__ import annotations

import inspect
import logging
import os
import platform
import re
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from tierkv.adapters.vllm.compat import SUPPORTED, installed_version
from tierkv.adapters.vllm.identity import digest_of, directory_revision
from tierkv.adapters.vllm_offloading.keyspaces import GroupFacts, TierFacts
from tierkv.adapters.vllm_offloading.options import WHERE, TierOptions
from tierkv.errors import ConfigError

log = logging.getLogger("tierkv.vllm")

_SEED_VARIABLE = "PYTHONHASHSEED"
_HASHES = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
_SEEDED_AT_RANDOM = frozenset({"xxhash", "xxhash_cbor"})
"""Hash algorithms that vLLM seeds at random unless PYTHONHASHSEED is set."""
_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version", "_commit_hash")


def check_version(allow_untested: bool) -> None:
    """ConfigError unless this vLLM is supported, or untested ones are allowed."""
    found = installed_version()
    if allow_untested or SUPPORTED[0] <= found < SUPPORTED[1]:
        return
    first, end = (f"{major}.{minor}" for major, minor in SUPPORTED)
    raise ConfigError(
        f"{WHERE}: vLLM {found[0]}.{found[1]} is outside the range that this tierkv was tested with ({first} up to, "
        f"not including, {end}): install another version of either, or set allow_untested_vllm"
    )


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
        log.warning(
            "%s: the engine's configuration was not found; only options tell its weights apart", WHERE
        )
    else:
        _check_engine(engine)
    return TierFacts(
        model=options.model or config.model.name,
        revision=options.model_revision or _revision(config.model.name, engine),
        kv_dtype=config.model.dtype,
        row_bytes=row_bytes,
        worker_block_bytes=config.worker_kv_bytes_per_block,
        blocks_per_row=spec.blocks_per_chunk,
        hash_tokens=spec.tokens_per_hash,
        groups=[
            GroupFacts(group.group_id, group.tokens_per_block, tuple(group.layer_names))
            for group in config.groups
        ],
        layout=f"{config.kv_cache_layout}:{_platform()}",
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
            **({} if engine is None else _settings(engine)),
            "engine": "vllm {}.{}".format(*installed_version()),
        },
    )


def _check_engine(engine: Any) -> None:
    if engine.parallel_config.nnodes_within_dp > 1:
        raise ConfigError(
            f"{WHERE}: the engine spans several nodes, but the scheduler sees the CPU tier of its own only: use the "
            f"tierkv connector, or one node an engine"
        )
    algorithm = engine.cache_config.prefix_caching_hash_algo
    if algorithm in _SEEDED_AT_RANDOM and os.environ.get(_SEED_VARIABLE) is None:
        raise ConfigError(
            f"{WHERE}: with prefix_caching_hash_algo {algorithm} every engine seeds its block hashes at random, so "
            f"none finds what another, or the same before a restart, has stored: set {_SEED_VARIABLE} to one value "
            f"for all engines, or take sha256"
        )


def _revision(model: str, engine: Any | None) -> str:
    """Names the weights that the engine loads."""
    if engine is not None and str(engine.load_config.load_format) == "dummy":
        return f"random weights of seed {engine.model_config.seed}"
    path = Path(model)
    if path.is_dir():
        return directory_revision(path)
    revision = None if engine is None else engine.model_config.revision
    if engine is not None and not revision:
        revision = getattr(engine.model_config.hf_config, "_commit_hash", None)
    if isinstance(revision, str) and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    raise ConfigError(
        f"{WHERE}: the revision of {model} is {revision!r}, which does not tell its weights from others: set "
        f"model_revision to a commit or a digest of the weights"
    )


def _settings(engine: Any) -> dict[str, str]:
    """Settings that change values or their place, besides what the offloading spec tells."""
    model, cache, draft = engine.model_config, engine.cache_config, engine.speculative_config
    described = {
        name: value for name, value in model.hf_config.to_dict().items() if name not in _NOT_OF_THE_MODEL
    }
    found: dict[str, object] = {
        "model_settings": digest_of(described),
        "model_dtype": model.dtype,
        "quantization": model.quantization,
        "quantization_settings": digest_of({"": getattr(model, "quantization_config", None)}),
        "cache_dtype": cache.cache_dtype,
        "mamba_dtypes": f"{cache.mamba_cache_dtype},{cache.mamba_ssm_cache_dtype}",
        "attention_backend": getattr(engine.attention_config, "backend", None),
        "v2_model_runner": engine.use_v2_model_runner,
    }
    if draft is not None:
        found["draft"] = f"{draft.method} {draft.model} {draft.revision} {draft.quantization}"
    return {name: str(value) for name, value in found.items()}


def _row_format(config: Any) -> str:
    if config.canonical_layout:
        return f"canonical {canonical_format_id(config.kv_cache_layout)}"
    return "replicated" if config.replicated_layout else "direct"


def _platform() -> str:
    """The device; of a CPU also what its attention packs values for."""
    device = str(current_platform.device_type)
    if device != "cpu":
        return device
    import torch

    amx = torch.cpu._is_amx_tile_supported()
    avx512 = torch.cpu._is_avx512_supported()
    return f"cpu {platform.machine()} amx={amx} avx512={avx512}"


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
            if name in _SEEDED_AT_RANDOM and os.environ.get(_SEED_VARIABLE) != seed:
                raise ConfigError(
                    f"{WHERE}: block hashes are seeded at random: set {_SEED_VARIABLE} for all engines"
                )
            assert isinstance(start, bytes)
            return name, bytes(start)
    raise ConfigError(
        f"{WHERE}: this vLLM hashes blocks in a way that is not known: none of {', '.join(_HASHES)}"
    )
