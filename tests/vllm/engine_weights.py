"""Weights for the tiny models, such that each token of the answer depends on the whole context.

The engine's own dummy weights are so small that the cache hardly matters to what is generated; a test that compares
tokens would prove nothing with them.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

LOAD_FORMAT = "tierkv_random"
SEED_VARIABLE = "TIERKV_TEST_WEIGHTS"
"""Names the weights: engines with another value have another model, which nothing tells from the first by its files."""
_GAIN = 1.5


def _values(name: str, like: torch.Tensor, gain: float = _GAIN) -> torch.Tensor:
    """float32 of the shape of `like`; the same for the same name, shape and SEED_VARIABLE."""
    words = f"{os.environ.get(SEED_VARIABLE, '')}/{name}/{tuple(like.shape)}"
    generator = torch.Generator().manual_seed(zlib.crc32(words.encode()))
    if like.dim() >= 2:
        spread = gain / like.shape[-1] ** 0.5
        return torch.randn(like.shape, generator=generator) * spread
    noise = torch.rand(like.shape, generator=generator)
    last = name.rpartition(".")[2]
    if last == "A":  # the decay of a state: less than nothing, or states grow without bound
        return -0.1 - noise
    if last in ("A_log", "dt_bias"):
        return noise * 0.5 - 0.5
    return 0.75 + noise * 0.5


@register_model_loader(LOAD_FORMAT)
class RandomLoader(BaseModelLoader):
    """Fills a model in memory; for engines within the test's process."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing to fetch."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Sets every floating-point weight."""
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if tensor.is_floating_point():
                    tensor.copy_(_values(name, tensor))


def write_checkpoint(directory: Path, gain: float = _GAIN) -> None:
    """Adds real weights (safetensors) to a model directory; for engines whose workers are processes of their own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(_values(name, tensor, gain))
    settings = (directory / "config.json").read_text()
    model.save_pretrained(directory)
    (directory / "config.json").write_text(settings)


def _mamba2_without_checkpoints() -> None:
    """vLLM 0.32's CPU scan gives final states only, yet its Mamba2 layer asks for states within a prefill and fails.

    Without that request the scheduler ends its steps at block boundaries, which gives the same states.
    """
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    original = MambaMixer2.get_kv_cache_spec

    def spec(self: Any, vllm_config: Any) -> Any:
        found = original(self, vllm_config)
        if found is None:
            return None
        return replace(found, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

    MambaMixer2.get_kv_cache_spec = spec


def _mla_with_prefix_cache() -> None:
    """vLLM 0.32 switches the prefix cache off for MLA on CPU, though it works; a hit in it is what ours must equal."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config

    def check(vllm_config: Any) -> None:
        wanted = vllm_config.cache_config.enable_prefix_caching
        original(vllm_config)
        vllm_config.cache_config.enable_prefix_caching = wanted

    CpuPlatform.check_and_update_config = staticmethod(check)


PATCHES = {
    "mamba2_without_checkpoints": _mamba2_without_checkpoints,
    "mla_with_prefix_cache": _mla_with_prefix_cache,
}
"""Repairs of the engine that a model needs on CPU, by name."""
