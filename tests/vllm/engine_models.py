"""Tiny models for the engine tests: a config.json each, with every kind of KV-cache group that the CPU build can run.

The sizes are the least that exercise the caches: several heads, several layers a group, windows of a few blocks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY = 512
WINDOW_TOKENS = 64


@dataclass(frozen=True)
class Model:
    """A model and how the engine must be started for it."""

    name: str
    config: dict[str, Any]
    groups: tuple[str, ...]
    """The kinds of its KV-cache groups, as the engine's specs are called, in any order."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Engine arguments beyond the common ones."""
    shape_sensitive: bool = False
    """Whether the engine's answers depend on what else is in a step, and on how a prompt is cut into steps. Such a
    model runs one request at a time, and is compared with a run over the engine's own prefix cache."""
    patches: tuple[str, ...] = ()
    """What engine_weights.PATCHES must do to the engine first."""

    def write(self, directory: Path) -> Path:
        """Makes a model directory without weights; where it is."""
        place = directory / self.name
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps(self.config, indent=1))
        return place


def _layers(pattern: str) -> list[str]:
    """One letter a layer: s(liding), f(ull), c(hunked), l(inear), k (short convolution), m(amba)."""
    names = {
        "s": "sliding_attention", "f": "full_attention", "c": "chunked_attention", "l": "linear_attention",
        "k": "conv", "m": "mamba", "a": "attention",
    }  # fmt: skip
    return [names[letter] for letter in pattern]


def _rope(theta: float = 10_000.0) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def _config(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    common = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": _rope(),
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return {**common, "architectures": [architecture], "model_type": model_type, **more}


_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
    "hidden_act": "silu",
}
_BFLOAT16 = {"dtype": "bfloat16"}
_FULL, _SLIDING, _CHUNKED = "FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"
_RECURRENT, _LATENT = "MambaSpec", "MLAAttentionSpec"

_ALL = (
    Model("llama", _config("LlamaForCausalLM", "llama", hidden_act="silu"), (_FULL,), {"block_size": 32}),
    Model("qwen3", _config("Qwen3ForCausalLM", "qwen3", hidden_act="silu"), (_FULL,), {"block_size": 32}),
    Model(
        "one_head",
        _config("LlamaForCausalLM", "llama", num_key_value_heads=1, hidden_act="silu"),
        (_FULL,),
        {"block_size": 32},
    ),
    Model(
        "gemma3",
        _config(
            "Gemma3ForCausalLM",
            "gemma3_text",
            num_hidden_layers=6,
            sliding_window=WINDOW_TOKENS,
            layer_types=_layers("sssssf"),
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=32,
            rope_parameters={"sliding_attention": _rope(), "full_attention": _rope(1e6)},
        ),
        (_FULL, *[_SLIDING] * 5),
        {"block_size": 32},
    ),
    Model(
        "gpt_oss",
        _config(
            "GptOssForCausalLM",
            "gpt_oss",
            num_hidden_layers=4,
            sliding_window=WINDOW_TOKENS,
            layer_types=_layers("sfsf"),
            num_local_experts=4,
            num_experts_per_tok=2,
            hidden_act="silu",
            attention_bias=True,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 2.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 2048,
                "truncate": False,
            },
        ),
        (_FULL, _SLIDING),
        {"block_size": 32},
    ),
    Model(  # full attention in blocks of 256 tokens, its windows in blocks of 128: unequal heads make unequal pages
        "mimo_v2",
        _config(
            "MiMoV2FlashForCausalLM",
            "mimo_v2_flash",
            num_hidden_layers=4,
            hybrid_layer_pattern=[0, 1, 1, 0],
            sliding_window=WINDOW_TOKENS,
            sliding_window_size=WINDOW_TOKENS,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=4,
            swa_head_dim=32,
            swa_v_head_dim=32,
            v_head_dim=32,
            rope_theta=10_000.0,
            swa_rope_theta=10_000.0,
            partial_rotary_factor=1.0,
            moe_layer_freq=[0, 0, 0, 0],
            layernorm_epsilon=1e-5,
            hidden_act="silu",
            attention_bias=False,
            add_full_attention_sink_bias=False,
            add_swa_attention_sink_bias=False,
            n_routed_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=64,
        ),
        (_FULL, _SLIDING),
        _BFLOAT16,
    ),
    Model(
        "llama4",
        _config(
            "Llama4ForCausalLM",
            "llama4_text",
            num_hidden_layers=4,
            attention_chunk_size=WINDOW_TOKENS,
            no_rope_layers=[1, 1, 1, 0],
            layer_types=_layers("cccf"),
            num_local_experts=2,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
            intermediate_size_mlp=256,
            hidden_act="silu",
            use_qk_norm=True,
            attn_temperature_tuning=False,
        ),
        (_FULL, *[_CHUNKED] * 3),
        {"block_size": 32},
    ),
    Model(
        "nemotron_h",
        _config(
            "NemotronHForCausalLM",
            "nemotron_h",
            num_hidden_layers=4,
            hybrid_override_pattern="M-M*",
            layers_block_type=["mamba", "mlp", "mamba", "attention"],
            mamba_num_heads=8,
            mamba_head_dim=32,
            ssm_state_size=32,
            n_groups=2,
            conv_kernel=4,
            chunk_size=64,
            mlp_hidden_act="relu2",
            layer_norm_epsilon=1e-5,
            use_mamba_kernels=False,
            attention_head_dim=32,
        ),
        (_FULL, *[_RECURRENT] * 2),
        patches=("mamba2_without_checkpoints",),
    ),
    Model(
        "falcon_h1",
        _config("FalconH1ForCausalLM", "falcon_h1", mamba_d_ssm=256, **_MAMBA2),
        (_FULL, _RECURRENT),
        patches=("mamba2_without_checkpoints",),
    ),
    Model(
        "granite_hybrid",
        _config(
            "GraniteMoeHybridForCausalLM",
            "granitemoehybrid",
            num_hidden_layers=4,
            layer_types=_layers("mmma"),
            layers_block_type=_layers("mmma"),
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=256,
            position_embedding_type="rope",
            embedding_multiplier=1.0,
            logits_scaling=1.0,
            residual_multiplier=1.0,
            attention_multiplier=0.17,
            **_MAMBA2,
        ),
        (_FULL, *[_RECURRENT] * 3),
        patches=("mamba2_without_checkpoints",),
    ),
    Model(
        "qwen3_next",
        _config(
            "Qwen3NextForCausalLM",
            "qwen3_next",
            num_hidden_layers=4,
            layer_types=_layers("lllf"),
            linear_conv_kernel_dim=4,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            mlp_only_layers=[],
            decoder_sparse_step=1,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            hidden_act="silu",
            attention_bias=False,
            partial_rotary_factor=0.25,
        ),
        (_FULL, *[_RECURRENT] * 3),
        _BFLOAT16,
    ),
    Model(
        "lfm2",
        _config(
            "Lfm2ForCausalLM",
            "lfm2",
            num_hidden_layers=4,
            layer_types=_layers("kkkf"),
            conv_L_cache=3,
            conv_bias=False,
            block_dim=128,
            conv_dim=128,
            block_ff_dim=256,
            norm_eps=1e-5,
            block_multiple_of=32,
            block_ffn_dim_multiplier=1.0,
            block_auto_adjust_ff_dim=False,
            num_heads=4,
        ),
        (_FULL, *[_RECURRENT] * 3),
        {"max_num_seqs": 1},
        shape_sensitive=True,
    ),
    Model(
        "deepseek_v2",
        {
            key: value
            for key, value in _config(
                "DeepseekV2ForCausalLM",
                "deepseek_v2",
                hidden_size=256,
                kv_lora_rank=512,
                q_lora_rank=None,
                qk_nope_head_dim=128,
                qk_rope_head_dim=64,
                v_head_dim=128,
                first_k_dense_replace=2,
                n_routed_experts=4,
                n_shared_experts=1,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                moe_layer_freq=1,
                hidden_act="silu",
                topk_method="greedy",
                scoring_func="softmax",
                n_group=1,
                topk_group=1,
                routed_scaling_factor=1.0,
                norm_topk_prob=False,
            ).items()
            if key != "head_dim"
        },
        (_LATENT,),
        {"block_size": 16, "max_num_seqs": 1, **_BFLOAT16},
        shape_sensitive=True,
        patches=("mla_with_prefix_cache",),
    ),
)
MODELS: dict[str, Model] = {model.name: model for model in _ALL}
