"""What names an engine's blocks, against the real vLLM: none of its settings is overlooked, and engines that differ in
one that matters do not find each other's blocks, through either adapter."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agent_process import AgentProcess
from engine_host import EngineError, EngineHost, tierkv_connector
from engine_models import MODELS, Model
from equality import cached, check_same, prompt_of
from test_offloading_tier import WAIT_S, offloading
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    ModelConfig,
    MultiModalConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.config.diffusion import DiffusionConfig
from vllm.config.kernel import KernelConfig
from vllm.config.mamba import MambaConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from tierkv.adapters.vllm import compat
from tierkv.adapters.vllm import engine_settings as known
from tierkv.adapters.vllm.settings import ConnectorSettings
from tierkv.errors import ConfigError

ANSWER_TOKENS = 8
SHORT_TOKENS, LONG_TOKENS = 512, 2048

READ_OF_MODEL = {
    # What engine_settings.py reads by itself, or what stands for it in the model as it came out.
    "model", "model_weights", "seed", "hf_config", "hf_text_config", "revision", "max_model_len",
    "multimodal_config", "runner", "convert", "hf_config_path", "hf_overrides", "config_format",
    "word_embeddings_untied_by_checkpoint", "spec_target_max_model_len", "is_submodel_config",
}  # fmt: skip
NOT_OF_THE_MODEL = {
    # Texts to tokens and back, sampling, and how it is served.
    "tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init", "trust_remote_code",
    "allowed_local_media_path", "allowed_media_domains", "allow_deprecated_quantization", "enforce_eager",
    "return_sampling_mask", "max_logprobs", "logprobs_mode", "use_fp64_gumbel", "enable_trace_replay",
    "disable_cascade_attn", "served_model_name", "hf_token", "generation_config", "override_generation_config",
    "enable_sleep_mode", "sleep_preserve_parameter_names", "sleep_mode_backend", "sleep_mode_offload_cudagraph",
    "enable_nccl_comm_suspend", "enable_cumem_allocator", "logits_processors", "io_processor_plugin",
    "renderer_num_workers", "pooler_config",
    "enable_prompt_embeds",  # they are hashed by their values
}  # fmt: skip
READ_OF_ENGINE = {
    "model_config", "cache_config", "parallel_config", "load_config", "attention_config", "mamba_config",
    "kernel_config", "speculative_config", "diffusion_config", "additional_config",
    "lora_config",  # adapters are told apart by themselves
    "quant_config",  # follows from the model's
}  # fmt: skip
NOT_OF_THE_ENGINE = {
    "scheduler_config", "device_config", "offload_config", "aux_output_config", "engram_config",
    "watermark_config", "structured_outputs_config", "observability_config", "logging_config",
    "compilation_config", "profiler_config", "kv_transfer_config", "kv_events_config", "ec_transfer_config",
    "ec_manager_config", "reasoning_config", "instance_id", "optimization_level", "performance_mode",
    "weight_transfer_config", "shutdown_timeout",
}  # fmt: skip


def fields_of(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_every_field_of_this_vllm_is_decided() -> None:
    """A version that brings new ones, or calls them otherwise, fails here before anyone caches with it."""
    chosen = set(known.OF_THE_MODEL) - {"runner_type", "convert_type"}
    assert fields_of(ModelConfig) == chosen | READ_OF_MODEL | NOT_OF_THE_MODEL
    assert fields_of(VllmConfig) == READ_OF_ENGINE | NOT_OF_THE_ENGINE
    assert set(known.OF_KERNELS) <= fields_of(KernelConfig)
    assert set(known.OF_PARALLELISM) <= fields_of(ParallelConfig)
    for kind, ignored, counted in (
        (
            CacheConfig,
            known.NOT_OF_THE_CACHE,
            {
                "cache_dtype", "sliding_window", "kv_cache_dtype_skip_layers", "mamba_cache_dtype",
                "mamba_ssm_cache_dtype", "mamba_cache_mode", "replayssm_buffer_len", "use_replayssm",
                "use_kda_recoverssm", "kv_sharing_fast_prefill", "swa_bounded_replay",
            },
        ),
        (
            AttentionConfig,
            known.NOT_OF_ATTENTION,
            {
                "backend", "minimax_m3_msa_decode_backend", "backend_per_kind", "flash_attn_version",
                "use_trtllm_attention", "disable_flashinfer_q_quantization", "mla_prefill_backend",
                "use_prefill_query_quantization", "indexer_kv_dtype", "indexer_sparse_logits", "use_non_causal",
                "sparse_mla_force_mqa",
            },
        ),
        (
            MultiModalConfig,
            known.NOT_OF_INPUTS,
            {
                "language_model_only", "limit_per_prompt", "media_io_kwargs", "mm_processor_kwargs",
                "mm_device_do_normalize", "mm_encoder_only", "mm_encoder_attn_backend", "mm_encoder_attn_dtype",
                "video_pruning_rate", "video_pruning_method",
            },
        ),
        (
            SpeculativeConfig,
            known.NOT_OF_DRAFTS,
            {
                "num_speculative_tokens", "method", "draft_tensor_parallel_size", "quantization", "moe_backend",
                "attention_backend", "kv_cache_dtype", "max_model_len", "index_share_for_mtp_iteration",
                "disable_padded_drafter_batch", "disable_eagle_block_drop", "use_heterogeneous_vocab",
                "parallel_drafting", "num_speculative_tokens_per_batch_size",
            },
        ),
    ):  # fmt: skip
        assert fields_of(kind) == ignored | counted, kind
    assert fields_of(MambaConfig) == {
        "backend", "enable_stochastic_rounding", "stochastic_rounding_philox_rounds", "ssu_algorithm",
    }  # fmt: skip
    assert fields_of(DiffusionConfig) == {"canvas_length", "max_denoising_steps"}


def test_vllms_own_objects_are_written_the_same_each_time() -> None:
    for make in (
        lambda: AttentionConfig(backend="FLASH_ATTN", backend_per_kind={"mla_attention": "FLASHINFER_MLA"}),
        lambda: MultiModalConfig(limit_per_prompt={"image": 2, "video": {"count": 1, "num_frames": 3}}),
        CacheConfig,
        MambaConfig,
    ):
        text = str(known.plain(make()))
        assert text == str(known.plain(make()))
        assert " at 0x" not in text


def attention(**more: Any) -> Any:
    return FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float16, **more)


def test_a_groups_description_counts() -> None:
    specs = [
        attention(),
        attention(sliding_window=64),
        attention(attention_chunk_size=64),
        attention(tokens_per_state=4),
        attention(head_size_v=32),
        SinkFullAttentionSpec(
            block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float16, head_size_v=64, sink_len=4
        ),
    ]
    mixed = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": specs[0], "b": specs[1]})
    found = [compat.spec_detail(spec) for spec in [*specs, mixed]]
    assert len(set(found)) == len(found)
    swapped = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"b": specs[1], "a": specs[0]})
    assert compat.spec_detail(swapped) == found[-1]
    assert compat.spec_detail(attention(page_size_padded=1 << 20)) == found[0], (
        "room beside blocks is not stored"
    )


def test_groups_whose_blocks_do_not_follow_from_their_tokens_are_refused() -> None:
    """By itself: engines that have some switch their prefix caching off in the scheduler's process only."""
    replay = RSWASpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float16, rswa_window=64)
    for spec in (attention(non_causal=True), replay):
        config = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, is_eagle_group=False)],
            prefix_cacheable_group_ids=(0,),
            hash_block_size=32,
        )
        with pytest.raises(ConfigError, match=r"group 0: .*without tierkv"):
            compat.groups_of(SimpleNamespace(speculative_config=None), config, ConnectorSettings())


@pytest.fixture
def long_rope(tmp_path: Path) -> Path:
    """A model whose positions are encoded by how long a context it is started for."""
    config = {
        **MODELS["llama"].config,
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "max_position_embeddings": LONG_TOKENS,
        "original_max_position_embeddings": SHORT_TOKENS,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "original_max_position_embeddings": SHORT_TOKENS,
            "short_factor": [1.0] * 16,
            "long_factor": [1.0 + 0.8 * place for place in range(16)],
        },
    }
    return Model("phi3", config, ()).write(tmp_path)


@pytest.fixture
def tier_agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path, dram="128MiB") as process:
        yield process


def test_engines_for_shorter_contexts_find_nothing_of_longer_ones(
    engine: EngineHost, agent: AgentProcess, long_rope: Path
) -> None:
    prompts = [prompt_of("long rope", 300)]
    connector = tierkv_connector(agent.socket)
    expected = {}
    for length in (LONG_TOKENS, SHORT_TOKENS):
        engine.open("llama", place=long_rope, max_model_len=length)
        expected[length] = engine.generate(prompts, ANSWER_TOKENS)
    assert expected[LONG_TOKENS][0]["tokens"] != expected[SHORT_TOKENS][0]["tokens"], "or this proves nothing"
    for length, found in ((LONG_TOKENS, 0), (SHORT_TOKENS, 0), (LONG_TOKENS, 288), (SHORT_TOKENS, 288)):
        engine.open("llama", connector, place=long_rope, max_model_len=length)
        answers = engine.generate(prompts, ANSWER_TOKENS)
        check_same(answers, expected[length], f"for {length} tokens")
        assert cached(answers) == [found]
        engine.settle()


def test_nor_does_the_tier_below_vllms_own(
    engine: EngineHost, tier_agent: AgentProcess, long_rope: Path
) -> None:
    prompts = [prompt_of("long rope", 300)]
    connector = offloading(tier_agent, rows=32)
    loaded = []
    for length, stored in ((LONG_TOKENS, 9), (SHORT_TOKENS, 18), (LONG_TOKENS, 18)):
        before = tier_agent.loaded_blocks()
        engine.open("llama", connector, place=long_rope, max_model_len=length)
        engine.generate(prompts, ANSWER_TOKENS)
        deadline_s = time.monotonic() + WAIT_S
        while tier_agent.stats().saved_blocks < stored:
            assert time.monotonic() < deadline_s, f"{tier_agent.stats().saved_blocks} of {stored} are saved"
            engine.settle()
        loaded.append(tier_agent.loaded_blocks() - before)
        engine.close_engine()
    assert loaded == [0, 0, 9]


@pytest.mark.parametrize("adapter", ["connector", "tier"])
def test_without_vllms_prefix_caching_the_engine_does_not_start(
    adapter: str, engine: EngineHost, agent: AgentProcess
) -> None:
    connector = tierkv_connector(agent.socket) if adapter == "connector" else offloading(agent, rows=16)
    where = "kv_connector_extra_config" if adapter == "connector" else "secondary_tiers"
    with pytest.raises(EngineError, match=rf"{where}.*prefix caching is off.*--no-enable-prefix-caching"):
        engine.open("llama", connector, enable_prefix_caching=False)


@pytest.mark.parametrize("asked", [None, True], ids=["as vLLM finds", "asked for"])
def test_models_that_pool_over_all_tokens_are_refused(
    asked: bool | None, engine: EngineHost, agent: AgentProcess
) -> None:
    """With prefix caching asked for, vLLM warns and goes on."""
    pooling: dict[str, Any] = {
        "runner": "pooling", "convert": "embed", "pooler_config": {"seq_pooling_type": "CLS"},
    }  # fmt: skip
    if asked is not None:
        pooling["enable_prefix_caching"] = asked
    with pytest.raises(EngineError, match=r"kv_connector_extra_config.*without tierkv"):
        engine.open("llama", tierkv_connector(agent.socket), **pooling)
