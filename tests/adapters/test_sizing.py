"""Sizes from configuration files: known models by hand, and what holds for every model, split and context."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tierkv.adapters.sizing.families import read_model
from tierkv.adapters.sizing.grouping import GroupSize, group_layers, resolve_kv_dtype
from tierkv.adapters.sizing.layers import Attention, Latent, Layer, Model, State
from tierkv.adapters.sizing.plan import POLICIES, context_size, recommend, slot_bytes
from tierkv.adapters.vllm.groups import Kind
from tierkv.cli import main
from tierkv.errors import ConfigError
from tierkv.memory import SlotMap

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_size": 7168, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss", "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "hidden_size": 2880, "sliding_window": 128, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA3_27B: dict[str, Any] = {
    "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text", "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
        "head_dim": 128, "hidden_size": 5376, "sliding_window": 1024, "sliding_window_pattern": 6,
    },
}  # fmt: skip
LLAMA4_SCOUT: dict[str, Any] = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text", "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
        "head_dim": 128, "hidden_size": 5120, "attention_chunk_size": 8192, "no_rope_layers": [],
        "torch_dtype": "bfloat16",
    },
}  # fmt: skip
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next", "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "hidden_size": 2048, "full_attention_interval": 4, "linear_num_key_heads": 16,
    "linear_key_head_dim": 128, "linear_num_value_heads": 32, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "torch_dtype": "bfloat16",
}  # fmt: skip
NEMOTRON_H: dict[str, Any] = {
    "model_type": "nemotron_h", "num_hidden_layers": 6, "hybrid_override_pattern": "M-M*ME", "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 128, "hidden_size": 1024, "mamba_num_heads": 16, "mamba_head_dim": 64,
    "n_groups": 2, "ssm_state_size": 128, "conv_kernel": 4, "torch_dtype": "bfloat16",
}  # fmt: skip
KIMI_LINEAR: dict[str, Any] = {
    "model_type": "kimi_linear", "num_hidden_layers": 4, "num_attention_heads": 32, "hidden_size": 2304,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16",
    "linear_attn_config": {
        "kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
    },
}  # fmt: skip
FALCON_H1: dict[str, Any] = {
    "model_type": "falcon_h1", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "hidden_size": 128, "mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1,
    "mamba_d_state": 32, "mamba_d_conv": 4, "mamba_expand": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
JAMBA: dict[str, Any] = {
    "model_type": "jamba", "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
MIMO: dict[str, Any] = {
    "model_type": "mimo_v2_flash", "num_hidden_layers": 4, "hybrid_layer_pattern": [0, 1, 1, 0], "head_dim": 192,
    "v_head_dim": 128, "num_key_value_heads": 4, "swa_num_key_value_heads": 8, "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "sliding_window_size": 128, "num_attention_heads": 64, "torch_dtype": "bfloat16",
}  # fmt: skip
LFM2: dict[str, Any] = {
    "model_type": "lfm2", "num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"],
    "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 2048, "conv_dim": 2048, "conv_L_cache": 3,
    "torch_dtype": "bfloat16",
}  # fmt: skip
GRANITE: dict[str, Any] = {
    "model_type": "granitemoehybrid", "num_hidden_layers": 4, "layer_types": ["mamba", "mamba", "mamba", "attention"],
    "num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 1536, "mamba_expand": 2, "mamba_n_heads": 48,
    "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "torch_dtype": "bfloat16",
}  # fmt: skip
ALL = [
    LLAMA_8B, DEEPSEEK_V3, GPT_OSS_20B, GEMMA3_27B, LLAMA4_SCOUT, QWEN3_NEXT, NEMOTRON_H, KIMI_LINEAR, FALCON_H1,
    JAMBA, MIMO, LFM2, GRANITE,
]  # fmt: skip


def groups_of(
    config: dict[str, Any], block_tokens: int = 16, kv_dtype: str = "auto", **split: Any
) -> list[GroupSize]:
    model = read_model(config)
    return list(
        group_layers(model, block_tokens=block_tokens, kv_dtype=resolve_kv_dtype(model, kv_dtype), **split)
    )


# Known models, by hand


def test_llama_3_8b_takes_128_kib_a_token() -> None:
    (group,) = groups_of(LLAMA_8B)
    assert (group.kind, group.layers, group.token_bytes, group.block_bytes) == (
        Kind.FULL,
        32,
        131072,
        16 * 131072,
    )
    (group,) = groups_of(LLAMA_8B, tensor_size=2)
    assert (group.parts, group.stages[0].part_bytes, group.token_bytes) == (2, 8 * 131072, 131072)
    (group,) = groups_of(LLAMA_8B, kv_dtype="fp8")
    assert group.token_bytes == 65536


def test_heads_that_several_ranks_hold_are_stored_by_each() -> None:
    (group,) = groups_of(LLAMA_8B, tensor_size=16)
    assert (group.parts, group.replicas, group.copies, group.token_bytes) == (16, 1, 2, 2 * 131072)


def test_deepseek_v3_takes_the_same_whatever_the_ranks() -> None:
    for ranks in (1, 8, 16):
        (group,) = groups_of(DEEPSEEK_V3, tensor_size=ranks)
        assert (group.parts, group.replicas, group.token_bytes) == (1, ranks, 61 * 576 * 2)
    assert groups_of(DEEPSEEK_V3, kv_dtype="fp8_ds_mla")[0].token_bytes == 61 * 656


def test_gpt_oss_has_a_group_of_each_kind() -> None:
    sliding, full = groups_of(GPT_OSS_20B)
    assert (sliding.kind, sliding.layers, sliding.reach_tokens) == (Kind.SLIDING, 12, 127)
    assert (full.kind, full.layers) == (Kind.FULL, 12)
    assert sliding.token_bytes == full.token_bytes == 12 * 8 * 64 * 2 * 2


def test_gemma_3_27b_cuts_its_windows_into_groups_of_the_full_layers_size() -> None:
    groups = groups_of(GEMMA3_27B)
    assert [(group.kind, group.layers) for group in groups] == [
        *[(Kind.SLIDING, layers) for layers in (9, 9, 9, 9, 8, 8)],
        (Kind.FULL, 10),
    ]
    one = 2 * 16 * 128 * 2
    assert sum(group.token_bytes or 0 for group in groups) == 62 * one


def test_gemma_3_takes_what_its_class_defaults_to() -> None:
    """gemma-3-4b's file names neither heads nor head_dim."""
    config = {
        "model_type": "gemma3", "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024
        },
    }  # fmt: skip
    groups = groups_of(config)
    assert sum(group.layers for group in groups if group.kind is Kind.FULL) == 5
    assert groups[0].token_bytes == groups[0].layers * 2 * 4 * 256 * 2


def test_llama_4_sees_chunks_in_three_layers_of_four() -> None:
    groups = groups_of(LLAMA4_SCOUT)
    assert [(group.kind, group.layers) for group in groups] == [(Kind.CHUNKED, 12)] * 3 + [(Kind.FULL, 12)]
    assert {group.reach_tokens for group in groups[:3]} == {8192}


@pytest.mark.parametrize(("ranks", "block_tokens"), [(1, 544), (2, 544), (4, 272)])
def test_qwen3_next_gets_blocks_that_hold_a_state(ranks: int, block_tokens: int) -> None:
    groups = groups_of(QWEN3_NEXT, tensor_size=ranks)
    state = 3 * (2 * 16 * 128 + 32 * 128) * 2 + 32 * 128 * 128 * 2
    assert [(group.kind, group.layers) for group in groups] == [(Kind.RECURRENT, 12)] * 3 + [(Kind.FULL, 12)]
    assert {group.block_tokens for group in groups} == {block_tokens}
    assert {group.block_bytes for group in groups[:3]} == {12 * state}
    assert groups[0].token_bytes is None
    assert (groups[3].parts, groups[3].copies) == (ranks, max(1, ranks // 2))
    assert groups[3].token_bytes == groups[3].copies * 12 * 2 * 2 * 256 * 2


def test_nemotron_h_keeps_its_states_in_32_bits() -> None:
    first, second, third, full = groups_of(NEMOTRON_H)
    state = 3 * (16 * 64 + 2 * 2 * 128) * 2 + 16 * 64 * 128 * 4
    assert [group.block_bytes for group in (first, second, third)] == [state] * 3
    assert full.kind is Kind.FULL
    in_16_bits = groups_of(NEMOTRON_H, state_dtype="bfloat16")[0]
    assert in_16_bits.block_bytes == state - 16 * 64 * 128 * 2
    # Four ranks need the two groups twice.
    assert groups_of(NEMOTRON_H, tensor_size=4)[0].block_bytes == state + 3 * 2 * 2 * 128 * 2


def test_kimi_linear_has_latents_beside_states() -> None:
    groups = groups_of(KIMI_LINEAR)
    state = 3 * 3 * 32 * 128 * 2 + 32 * 128 * 128 * 4
    assert [(group.kind, group.block_bytes) for group in groups[:3]] == [(Kind.RECURRENT, state)] * 3
    assert groups[3].token_bytes == 576 * 2
    assert groups[3].block_tokens == 128 * math.ceil(state / (128 * 1152))


def test_falcon_h1_has_both_in_every_layer() -> None:
    full, state = groups_of(FALCON_H1, state_dtype="float32")
    assert (full.layers, state.layers, state.block_bytes) == (2, 2, 69376)


def test_mimo_gives_the_smaller_layers_longer_blocks() -> None:
    full, sliding = groups_of(MIMO)
    assert (full.block_tokens, sliding.block_tokens) == (32, 16)
    assert full.block_bytes == sliding.block_bytes == 2 * 16 * 8 * 320 * 2


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"sliding_window": 4096}, Kind.SLIDING),
        ({"sliding_window": None}, Kind.FULL),
        ({"sliding_window": 0}, Kind.FULL),
        ({"sliding_window": 4096, "use_sliding_window": False}, Kind.FULL),
        ({"sliding_window": 4096, "layer_types": ["full_attention"] * 32}, Kind.FULL),
        ({"sliding_window": 4096, "layer_types": ["sliding_attention"] * 32}, Kind.SLIDING),
    ],
)
def test_a_window_of_all_layers(fields: dict[str, Any], kind: Kind) -> None:
    (group,) = groups_of({**LLAMA_8B, "model_type": "mistral", **fields})
    assert group.kind is kind


def test_cohere2_sees_one_token_more_than_its_window() -> None:
    config = {**LLAMA_8B, "model_type": "cohere2", "sliding_window": 4096}
    groups = groups_of(config)
    assert [(group.kind, group.layers) for group in groups] == [(Kind.SLIDING, 8)] * 3 + [(Kind.FULL, 8)]
    assert groups[0].reach_tokens == 4096


@pytest.mark.parametrize(
    ("config", "kv_dtype"),
    [
        ({"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}, "fp8"),
        ({"quantization_config": {"quantization": {"kv_cache_quant_algo": "FP8"}}}, "fp8"),
        ({"quantization_config": {"kv_cache_scheme": {"type": "float", "num_bits": 8}}}, "fp8"),
        ({"quantization_config": {"kv_cache_scheme": None}}, "bfloat16"),
        ({"torch_dtype": "float32"}, "bfloat16"),
        ({"torch_dtype": "float32", "dtype": "float16"}, "float16"),
    ],
)
def test_the_caches_dtype_is_resolved_as_the_engine_does(config: dict[str, Any], kv_dtype: str) -> None:
    model = read_model({**LLAMA_8B, **config})
    assert resolve_kv_dtype(model, "auto") == kv_dtype
    assert bool(model.notes) is (model.dtype == "bfloat16" and "torch_dtype" in config)


# What is not known is refused


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "model_type"),
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": "deepseek_v32"}, "index"),
        ({"model_type": "mamba2"}, "attention"),
        ({"model_type": "llama"}, "num_hidden_layers"),
        ({**LLAMA_8B, "is_encoder_decoder": True}, "encoder"),
        ({**LLAMA_8B, "hidden_size": 4095}, "head_dim"),
        ({**LLAMA_8B, "num_key_value_heads": "8"}, "num_key_value_heads"),
        ({**LLAMA_8B, "torch_dtype": "float6"}, "float6"),
        ({**LLAMA_8B, "layer_types": ["full_attention"]}, "layer_types"),
        ({**LLAMA_8B, "layer_types": ["sparse_attention"] * 32, "sliding_window": 8}, "sparse_attention"),
        ({**LLAMA_8B, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}, "layer_types"),
        ({**LLAMA_8B, "model_type": "exaone4", "sliding_window": 8}, "sliding_window_pattern"),
        ({**LLAMA_8B, "quantization_config": {"kv_cache_quant_algo": "NVFP4"}}, "NVFP4"),
        ({**DEEPSEEK_V3, "kv_lora_rank": None}, "kv_lora_rank"),
        ({**NEMOTRON_H, "hybrid_override_pattern": "M?"}, "?"),
    ],
)
def test_what_is_missing_is_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=r".*" + named.replace("?", r"\?")):
        groups_of(config)


@pytest.mark.parametrize(
    ("config", "split", "named"),
    [
        (LLAMA_8B, {"tensor_size": 3}, "heads"),
        (LLAMA_8B, {"pipeline_size": 33}, "stages"),
        (LLAMA_8B, {"kv_dtype": "nvfp4"}, "nvfp4"),
        (LLAMA_8B, {"block_tokens": 1 << 14}, "bytes"),
        (QWEN3_NEXT, {"tensor_size": 3}, "split"),
    ],
)
def test_what_cannot_be_served_is_refused(config: dict[str, Any], split: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        groups_of(config, **split)


junk = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.floats(allow_nan=False), st.text(max_size=5),
    st.lists(
        st.one_of(st.integers(-2, 3), st.text(max_size=3), st.none(), st.lists(st.integers(), max_size=1)),
        max_size=5,
    ),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@given(st.sampled_from(ALL), st.data())
def test_a_broken_file_is_a_clear_error_or_a_model(config: dict[str, Any], data: st.DataObject) -> None:
    broken = json.loads(json.dumps(config))
    place = broken.get("text_config", broken)
    place = data.draw(st.sampled_from([place, place.get("linear_attn_config", place)]))
    for name in data.draw(st.lists(st.sampled_from(sorted(place)), min_size=1, max_size=2, unique=True)):
        if data.draw(st.booleans()):
            place[name] = data.draw(junk)
        else:
            place.pop(name, None)
    try:
        groups = groups_of(broken)
    except ConfigError:
        return
    assert all(group.block_bytes > 0 for group in groups)


# What holds for every model

head_dims = st.sampled_from([64, 128])
attention = st.one_of(
    st.builds(Attention, st.sampled_from([2, 4, 8]), head_dims, head_dims),
    st.builds(
        Attention,
        st.sampled_from([2, 4, 8]),
        head_dims,
        head_dims,
        window_tokens=st.sampled_from([100, 1024]),
    ),
    st.builds(
        Attention, st.sampled_from([2, 4, 8]), head_dims, head_dims, chunk_tokens=st.sampled_from([64, 512])
    ),
)
state = st.builds(
    State,
    st.just("Mamba-2"),
    conv_rows=st.just(3),
    conv_channels=st.sampled_from([256, 512]),
    heads=st.sampled_from([8, 16]),
    head_values=st.sampled_from([512, 2048]),
    groups=st.sampled_from([0, 1, 2]),
    group_channels=st.just(64),
)


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Some kinds of layers, repeated in a pattern."""
    if draw(st.booleans()):
        kinds: list[Layer] = draw(st.lists(attention, min_size=1, max_size=3))
    else:
        kinds = [draw(st.one_of(attention, st.builds(Latent, st.sampled_from([192, 576])))), draw(state)]
    order = draw(st.lists(st.sampled_from(range(-1, len(kinds))), min_size=1, max_size=14))
    layers = tuple(() if number < 0 else (kinds[number],) for number in order)
    assume(any(isinstance(layer, (Attention, Latent)) for kept in layers for layer in kept))
    return Model("drawn", "bfloat16", layers)


@given(models(), st.sampled_from([16, 32, 128]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4))
def test_every_layer_is_in_one_group_and_nothing_is_lost(
    model: Model, block_tokens: int, tensor_size: int, pipeline_size: int
) -> None:
    assume(pipeline_size <= len(model.layers))
    split = {"block_tokens": block_tokens, "kv_dtype": "bfloat16", "tensor_size": tensor_size}
    groups = group_layers(model, pipeline_size=pipeline_size, **split)  # type: ignore[arg-type]
    kept = [layer for layers in model.layers for layer in layers]
    assert sum(group.layers for group in groups) == len(kept)
    assert [group.index for group in groups] == list(range(len(groups)))
    for group in groups:
        assert group.parts * group.replicas == tensor_size
        assert group.block_tokens % block_tokens == 0
        assert len({share.stage for share in group.stages}) == len(group.stages)
    whole = group_layers(model, **split)  # type: ignore[arg-type]
    assert [(group.block_bytes, group.block_tokens) for group in groups] == [
        (group.block_bytes, group.block_tokens) for group in whole
    ], "pipeline stages must not change a block's bytes"


@given(models(), st.sampled_from([1, 2]))
def test_a_token_takes_what_its_layers_keep(model: Model, tensor_size: int) -> None:
    """While no two ranks hold the same head, the sum does not depend on the split."""
    groups = group_layers(model, block_tokens=16, kv_dtype="bfloat16", tensor_size=tensor_size)
    expected = 0
    for layers in model.layers:
        for layer in layers:
            if isinstance(layer, Attention):
                expected += layer.kv_heads * (layer.key_dim + layer.value_dim) * 2
            elif isinstance(layer, Latent):
                expected += layer.dim * 2
    assert sum(group.token_bytes or 0 for group in groups) == pytest.approx(expected)


@given(models(), st.integers(1, 6000), st.sampled_from([1, 300, 2048]), st.sampled_from([64, 1024]))
def test_contexts_are_ordered_and_made_of_whole_blocks(
    model: Model, tokens: int, period: int, prefill: int
) -> None:
    groups = group_layers(model, block_tokens=16, kv_dtype="bfloat16")

    def size(length: int, policy: str) -> Any:
        return context_size(groups, length, policy, period_tokens=period, prefill_tokens=prefill)

    found = {policy: size(tokens, policy) for policy in POLICIES}
    assert found["boundary"].store_bytes <= found["periodic"].store_bytes <= found["all"].store_bytes
    for context in found.values():
        assert context.tokens <= tokens
        for group, held in zip(groups, context.groups, strict=True):
            assert held.blocks <= tokens // group.block_tokens
            assert held.store_bytes == held.blocks * sum(slot_bytes(group))
            assert all(size % 4096 == 0 for size in slot_bytes(group))
            assert group.block_bytes <= sum(slot_bytes(group)) < group.block_bytes + 4096 * len(group.stages)
            if group.kind is Kind.FULL:
                assert held.blocks == tokens // group.block_tokens
            if group.kind is Kind.RECURRENT and context.tokens:
                assert held.blocks >= 1
    assert size(tokens + 500, "all").store_bytes >= found["all"].store_bytes


@given(
    models(), st.integers(1, 6000), st.sampled_from(POLICIES), st.sampled_from([1, 5, 9]), st.integers(1, 3)
)
def test_the_recommended_tiers_hold_what_they_should(
    model: Model, tokens: int, policy: str, sessions: int, pipeline_size: int
) -> None:
    """Tried with the map that the tiers themselves allocate by, contexts one after the other."""
    assume(pipeline_size <= len(model.layers))
    groups = group_layers(model, block_tokens=16, kv_dtype="bfloat16", pipeline_size=pipeline_size)
    context = context_size(groups, tokens, policy, period_tokens=2048, prefill_tokens=1024)
    advice = recommend(groups, context, sessions)
    assume(advice.nvme_bytes)
    for capacity, contexts in (
        (advice.dram_bytes, max(2, -(-sessions // 4))),
        (advice.nvme_bytes, sessions * 5 // 4),
    ):
        slots = SlotMap(capacity, advice.slab_bytes)
        for _ in range(contexts):
            for group, held in zip(groups, context.groups, strict=True):
                for size in slot_bytes(group):
                    given_slots = slots.allocate(size, held.blocks)
                    assert given_slots is not None
                    assert len(given_slots) == held.blocks


def test_blocks_that_exceed_a_slab_need_larger_ones() -> None:
    groups = groups_of(LLAMA_8B, block_tokens=1024)
    context = context_size(groups, 10_000, "all", period_tokens=2048, prefill_tokens=8192)
    advice = recommend(groups, context, 2)
    assert advice.slab_bytes == slot_bytes(groups[0])[0] == 128 << 20
    assert advice.dram_bytes == 18 * advice.slab_bytes


@given(st.integers(1, 40_000), st.sampled_from(POLICIES))
def test_a_sliding_group_keeps_its_windows(tokens: int, policy: str) -> None:
    """gpt-oss: a window of 128 is 8 whole blocks at a boundary; every 2,048 tokens, at the end, or always."""
    groups = groups_of(GPT_OSS_20B)
    context = context_size(groups, tokens, policy, period_tokens=2048, prefill_tokens=8192)
    end = tokens // 16 * 16
    boundaries = {"all": range(16, end + 1, 16), "periodic": range(2048, end + 128, 2048), "boundary": ()}[
        policy
    ]
    wanted = set()
    for boundary in [*boundaries, end]:
        wanted |= set(range(max(0, boundary - 127) // 16, boundary // 16))
    assert context.groups[0].blocks == len({block for block in wanted if block < end // 16})


# The command


def test_the_command_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_20B))
    arguments = [
        "size",
        "--model-config",
        str(tmp_path),
        "--context",
        "100000",
        "--tp",
        "2",
        "--pp",
        "3",
        "--json",
        "-",
    ]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["token_bytes"] == 49152
    assert [group["parts"] for group in found["groups"]] == [2, 2]
    assert sum(stage["layers"] for group in found["groups"] for stage in group["stages"]) == 24
    full = found["policies"]["periodic"]["groups"][1]
    assert full["blocks"] == 6250
    assert found["recommendation"]["nvme_bytes"] >= 16 * found["policies"]["periodic"]["store_bytes"]
    assert found["policies"]["all"]["store_bytes"] > found["policies"]["boundary"]["store_bytes"]


@pytest.mark.parametrize("config", ALL, ids=[config["model_type"] for config in ALL])
def test_the_command_prints_tables(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "config.json"
    place.write_text(json.dumps(config))
    assert main(["size", "--model-config", str(place)]) == 0
    text = capsys.readouterr().out
    assert "for 16 sessions, periodic: DRAM" in text
    assert "bytes a block" in text


def test_the_command_says_when_heads_are_stored_more_than_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    for ranks, told in ((8, False), (16, True)):
        assert main(["size", "--model-config", str(tmp_path), "--tp", str(ranks)]) == 0
        assert ("stored, 2 times" in capsys.readouterr().out) is told


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{", b"\xff", b'{"model_type": "llama"}'])
def test_a_file_that_is_none_is_one_clear_line(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "config.json"
    if content is not None:
        place.write_bytes(content)
    assert main(["size", "--model-config", str(place)]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("tierkv: ")
    assert "Traceback" not in streams.err
