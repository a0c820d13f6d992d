"""`tierkv size` beside vLLM's own arithmetic: its cache specs, its grouping, its shapes of recurrent states."""

from __future__ import annotations

from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agent_process import AgentProcess
from engine_host import EngineHost, tierkv_connector
from engine_models import MODELS
from equality import prompt_of
from hypothesis import assume, given
from hypothesis import strategies as st
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from tierkv.adapters.sizing.families import read_model
from tierkv.adapters.sizing.grouping import group_layers
from tierkv.adapters.sizing.layers import Attention, Latent, Layer, Model, State
from tierkv.errors import ConfigError
from tierkv.tiers.nvme_check import inspect_directory

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "fp8": torch.uint8}
BLOCK_TOKENS = 16

full = st.builds(Attention, st.sampled_from([1, 2, 4]), st.sampled_from([64, 96]), st.sampled_from([64, 96]))
layer_kinds = st.one_of(
    full,
    st.builds(
        Attention,
        st.sampled_from([1, 2, 4]),
        st.just(64),
        st.just(64),
        window_tokens=st.sampled_from([100, 999]),
    ),
    st.builds(Attention, st.sampled_from([1, 2, 4]), st.just(64), st.just(64), chunk_tokens=st.just(512)),
)


@st.composite
def attention_models(draw: st.DrawFn) -> Model:
    """Full, sliding and chunked layers of several sizes in any order; or latents alone."""
    kinds: list[Layer] = draw(st.lists(layer_kinds, min_size=1, max_size=3, unique=True))
    if draw(st.integers(0, 9)) == 0:
        kinds = [Latent(draw(st.sampled_from([192, 576])))]
    order = draw(st.lists(st.sampled_from(range(len(kinds))), min_size=1, max_size=16))
    return Model("drawn", "bfloat16", tuple((kinds[number],) for number in order))


def spec_of(layer: Layer, kv_dtype: str, block_tokens: int, ranks: int) -> KVCacheSpec:
    dtype = DTYPES[kv_dtype]
    if isinstance(layer, Latent):
        return MLAAttentionSpec(
            block_size=block_tokens, num_kv_heads=1, head_size=layer.dim, dtype=dtype, max_tp_shards=1
        )
    assert isinstance(layer, Attention)
    shape: dict[str, Any] = {
        "block_size": block_tokens, "num_kv_heads": max(1, layer.kv_heads // ranks), "head_size": layer.key_dim,
        "head_size_v": layer.value_dim, "dtype": dtype,
    }  # fmt: skip
    if layer.window_tokens:
        return SlidingWindowSpec(sliding_window=layer.window_tokens, **shape)
    if layer.chunk_tokens:
        return ChunkedLocalAttentionSpec(attention_chunk_size=layer.chunk_tokens, **shape)
    return FullAttentionSpec(**shape)


def vllm_groups(specs: dict[str, KVCacheSpec]) -> list[tuple[tuple[str, ...], int, int]]:
    """(layers, tokens a block, bytes a block on one rank without padding) of each group."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBHNC),
        speculative_config=None,
        attention_config=SimpleNamespace(hisparse_config=None),
        kv_transfer_config=None,
        model_config=SimpleNamespace(hf_config=SimpleNamespace()),
    )
    found = []
    for group in get_kv_cache_groups(config, dict(specs)):  # type: ignore[arg-type]
        spec = group.kv_cache_spec
        layers = dict.fromkeys(group.layer_names, spec)
        if isinstance(spec, UniformTypeKVCacheSpecs):
            layers = spec.kv_cache_specs
        size = sum(layer.real_page_size_bytes for layer in layers.values())  # type: ignore[attr-defined]
        found.append((tuple(group.layer_names), next(iter(layers.values())).block_size, size))
    return found


@given(attention_models(), st.sampled_from(sorted(DTYPES)), st.sampled_from([1, 2, 4]))
def test_groups_are_those_of_vllm(model: Model, kv_dtype: str, ranks: int) -> None:
    specs = {
        str(number): spec_of(layer, kv_dtype, BLOCK_TOKENS, ranks)
        for number, (layer,) in enumerate(model.layers)
    }
    ours = group_layers(model, block_tokens=BLOCK_TOKENS, kv_dtype=kv_dtype, tensor_size=ranks)
    theirs = vllm_groups(specs)
    assert [
        (group.layers, group.block_tokens, sum(share.part_bytes for share in group.stages)) for group in ours
    ] == [(len(layers), tokens, size) for layers, tokens, size in theirs]


@given(
    st.sampled_from([4, 8]),
    st.integers(1, 12),
    st.sampled_from([1, 2]),
    st.sampled_from(["bfloat16", "float32"]),
)
def test_recurrent_layers_beside_attention(heads: int, count: int, ranks: int, state_dtype: str) -> None:
    state = State("GDN", 3, 512, heads, 4096, state_dtype=state_dtype)
    attention = Attention(2, 64, 64)
    layers = tuple((attention,) if number % 3 == 2 else (state,) for number in range(count))
    assume(count > 2)
    model = Model("drawn", "bfloat16", layers)
    ours = group_layers(model, block_tokens=BLOCK_TOKENS, kv_dtype="bfloat16", tensor_size=ranks)
    block_tokens = ours[0].block_tokens
    page = spec_of(attention, "bfloat16", block_tokens, ranks).page_size_bytes
    recurrent = MambaSpec(
        block_size=block_tokens,
        shapes=((3, 512 // ranks), (heads // ranks, 4096)),
        dtypes=(torch.bfloat16, DTYPES[state_dtype]),
        page_size_padded=page,
    )
    shorter = spec_of(attention, "bfloat16", block_tokens - BLOCK_TOKENS, ranks).page_size_bytes
    assert shorter < recurrent.real_page_size_bytes <= page, "the shortest block whose page holds a state"
    specs: dict[str, KVCacheSpec] = {
        str(number): recurrent
        if isinstance(layer, State)
        else spec_of(layer, "bfloat16", block_tokens, ranks)
        for number, (layer,) in enumerate(layers)
    }
    assert [
        (group.layers, group.block_tokens, sum(share.part_bytes for share in group.stages)) for group in ours
    ] == [(len(names), tokens, size) for names, tokens, size in vllm_groups(specs)]


def state_bytes(shapes: Any, dtypes: Any) -> int:
    return sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))


QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next", "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "hidden_size": 2048, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_num_value_heads": 32, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4, "torch_dtype": "bfloat16",
}  # fmt: skip
NEMOTRON_H: dict[str, Any] = {
    "model_type": "nemotron_h", "num_hidden_layers": 4, "hybrid_override_pattern": "M-M*", "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 1024, "mamba_num_heads": 16, "mamba_head_dim": 64,
    "n_groups": 2, "ssm_state_size": 128, "conv_kernel": 4, "torch_dtype": "bfloat16",
}  # fmt: skip
GRANITE: dict[str, Any] = {
    "model_type": "granitemoehybrid", "num_hidden_layers": 2, "layer_types": ["mamba", "attention"],
    "num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 1536, "head_dim": 64, "mamba_expand": 2,
    "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4,
    "torch_dtype": "bfloat16",
}  # fmt: skip
JAMBA: dict[str, Any] = {
    "model_type": "jamba", "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
LFM2: dict[str, Any] = {
    "model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 2048, "conv_dim": 2048, "conv_L_cache": 3, "torch_dtype": "bfloat16",
}  # fmt: skip
KIMI: dict[str, Any] = {
    "model_type": "kimi_linear", "num_hidden_layers": 2, "num_attention_heads": 32, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "torch_dtype": "bfloat16",
    "linear_attn_config": {"kda_layers": [1], "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4},
}  # fmt: skip
AUTO = (torch.bfloat16, "auto", "auto")
STATES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "qwen3_next": (
        QWEN3_NEXT,
        lambda ranks: MambaStateShapeCalculator.gated_delta_net_state_shape(ranks, 16, 32, 128, 64, 4),
        MambaStateDtypeCalculator.gated_delta_net_state_dtype(*AUTO),
    ),
    "nemotron_h": (
        NEMOTRON_H,
        lambda ranks: MambaStateShapeCalculator.mamba2_state_shape(ranks, 16 * 64, 2, 16, 64, 128, 4),
        MambaStateDtypeCalculator.mamba2_state_dtype(torch.bfloat16, "auto", "float32"),
    ),
    "granitemoehybrid": (
        GRANITE,
        lambda ranks: MambaStateShapeCalculator.mamba2_state_shape(ranks, 2 * 1536, 1, 48, 64, 128, 4),
        MambaStateDtypeCalculator.mamba2_state_dtype(*AUTO),
    ),
    "jamba": (
        JAMBA,
        lambda ranks: MambaStateShapeCalculator.mamba1_state_shape(ranks, 2 * 4096, 16, 4),
        MambaStateDtypeCalculator.mamba1_state_dtype(*AUTO),
    ),
    "lfm2": (
        LFM2,
        lambda ranks: MambaStateShapeCalculator.short_conv_state_shape(ranks, 2048, 3),
        MambaStateDtypeCalculator.short_conv_state_dtype(torch.bfloat16, "auto"),
    ),
    "kimi_linear": (
        KIMI,
        lambda ranks: MambaStateShapeCalculator.kda_state_shape(ranks, 32, 128, conv_kernel_size=4),
        MambaStateDtypeCalculator.kda_state_dtype(torch.bfloat16, "auto"),
    ),
}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", sorted(STATES))
def test_states_have_vllms_shapes_and_dtypes(name: str, ranks: int) -> None:
    config, shapes, dtypes = STATES[name]
    model = read_model(config)
    states = [layer for layers in model.layers for layer in layers if isinstance(layer, State)]
    expected = state_bytes(shapes(ranks), dtypes)
    assert {state.state_bytes(ranks, model.dtype) for state in states} == {expected}


@given(st.integers(1, 40), st.integers(1, 8))
def test_stages_have_vllms_layers(count: int, size: int) -> None:
    model = Model("drawn", "bfloat16", ((Attention(2, 64, 64),),) * count)
    if size > count:
        with pytest.raises(ConfigError):
            group_layers(model, block_tokens=16, kv_dtype="bfloat16", pipeline_size=size)
        return
    (group,) = group_layers(model, block_tokens=16, kv_dtype="bfloat16", pipeline_size=size)
    ends = [get_pp_indices(count, rank, size) for rank in range(size)]
    assert [share.layers for share in group.stages] == [last - first for first, last in ends]


@pytest.mark.parametrize("name", ["gemma3", "mimo_v2", "falcon_h1", "qwen3_next", "deepseek_v2"])
def test_blocks_in_the_store_are_as_large_as_said(name: str, engine: EngineHost, tmp_path: Path) -> None:
    """A real engine saves a prompt; the store knows the sizes of its groups' blocks."""
    settings = MODELS[name].engine
    nvme = tmp_path / "nvme"
    with AgentProcess(tmp_path, "--nvme-dir", str(nvme), "--nvme", "64MiB") as agent:
        engine.open(name, tierkv_connector(agent.socket, sliding_window="all", chunked_local="all"))
        engine.generate([prompt_of(name, 2 * engine.step_tokens() + 10)], 2)
        engine.settle()
        engine.close_engine()
    dtype = settings.get("dtype", "float32")
    groups = group_layers(
        read_model(MODELS[name].config, dtype),
        block_tokens=settings.get("block_size", 128),
        kv_dtype=dtype,
        state_dtype="float32",  # as the CPU build keeps it
    )
    specs = [space.spec for space in inspect_directory(str(nvme)).keyspaces]
    stored = sorted((spec.block_bytes, spec.block_tokens) for spec in specs if spec is not None)
    assert stored == sorted((group.block_bytes, group.block_tokens) for group in groups)
    assert sorted(group["block_tokens"] for group in engine.description["groups"]) == sorted(
        group.block_tokens for group in groups
    )
