"""What of an engine's configuration changes the bytes of its blocks, or what their hashes mean. vLLM's objects are read
by name here, so that this is tested without it.

Of the configurations about the cache, attention, inputs and drafts every field counts that is not listed as one that
cannot matter: what a later vLLM adds tells blocks apart until it is known. Of the model's and the other ones, which are
mostly about serving, those count that are listed.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tierkv.adapters.vllm.identity import digest_of, directory_revision
from tierkv.errors import ConfigError

NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version", "_commit_hash")
"""Of the model's own settings."""
OF_THE_MODEL = (
    "dtype", "quantization", "quantization_config", "disable_sliding_window", "model_impl", "model_class_overrides",
    "code_revision", "runner_type", "convert_type",
)  # fmt: skip
OF_KERNELS = ("moe_backend", "linear_backend", "linear_backend_per_quant", "sparse_indexer_topk_backend")
"""Which of them quantize activations, and how, is up to each."""
OF_PARALLELISM = ("worker_cls", "dcp_kv_cache_interleave_size", "cp_kv_cache_interleave_size")
"""Sizes and ranks are in the keyspace by themselves."""

NOT_OF_THE_CACHE = frozenset({
    # Sizes and layouts that are in the keyspace as they came out.
    "block_size", "user_specified_block_size", "_block_size_resolved", "kv_cache_layout", "prefix_match_unit",
    "hash_block_size", "cache_hit_alignment_tokens", "mamba_block_size", "mamba_page_size_padded",
    "skip_page_size_padded", "prefix_caching_hash_algo",
    # How much there is, and for how long it is kept.
    "gpu_memory_utilization", "num_gpu_blocks_override", "num_gpu_blocks", "num_cpu_blocks", "kv_cache_memory_bytes",
    "effective_attention_block_size", "kv_cache_size_tokens", "kv_cache_max_concurrency", "kv_offloading_size",
    "kv_offloading_backend", "prefix_cache_retention_interval", "enable_mamba_shared_prefix_checkpoint",
    "is_attention_free", "enable_prefix_caching",
})  # fmt: skip
NOT_OF_ATTENTION = frozenset({
    # How the work is cut; what comes out differs by rounding only.
    "flash_attn_max_num_splits_for_cuda_graph", "tokenspeed_mla_min_split_kv", "tq_max_kv_splits_for_cuda_graph",
    "sparse_mla_prefill_workspace_factor", "flex_attn_block_m", "flex_attn_block_n", "flex_attn_q_block_size",
    "flex_attn_kv_block_size", "hisparse_config",
})  # fmt: skip
NOT_OF_INPUTS = frozenset({
    "enable_mm_embeds", "mm_processor_cache_gb", "mm_processor_cache_type", "mm_hasher_algorithm",
    "mm_shm_cache_max_object_size_mb", "mm_encoder_tp_mode", "mm_encoder_fp8_scale_save_path",
    "mm_encoder_fp8_scale_save_margin", "interleave_mm_strings", "skip_mm_profiling", "mm_tensor_ipc",
    "allow_missing_mm_embeddings", "mm_ipc_gpu_memory_gb",
    "mm_encoder_fp8_scale_path",  # what it holds counts
})  # fmt: skip
NOT_OF_DRAFTS = frozenset({
    "target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config",
    "draft_load_config", "model", "revision", "code_revision",  # of the draft model, which is described by itself
    "enforce_eager", "tensor_parallel_size", "use_local_argmax_reduction", "prompt_lookup_max", "prompt_lookup_min",
    "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob", "rejection_sample_method", "synthetic_acceptance_rates",
    "synthetic_acceptance_length", "enable_adaptive_verification", "draft_sample_method", "dspark_draft_topk",
})  # fmt: skip

ENVIRONMENT = (
    "VLLM_MLA_DISABLE", "VLLM_SSM_CONV_STATE_LAYOUT", "VLLM_PP_LAYER_PARTITION", "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", "VLLM_BATCH_INVARIANT", "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_MARLIN_INPUT_DTYPE", "VLLM_CPU_INT4_W4A8", "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG", "VLLM_B12X_MOE_FP4_FORCE_A16", "VLLM_ROCM_USE_AITER_FP8BMM",
    "VLLM_ROCM_USE_AITER_FP4BMM", "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE", "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
)  # fmt: skip
"""Variables that arrange blocks differently, or change values by more than rounding."""

_FILES = frozenset({
    "auto", "hf", "pt", "safetensors", "fastsafetensors", "instanttensor", "npcache", "mistral", "runai_streamer",
    "dummy",
})  # fmt: skip
"""Load formats whose weights are all those of the model's directory or repository."""
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")


def check_prefixes(vllm_config: Any, where: str) -> None:
    """ConfigError where the engine must not take over one request's prefix for another: tierkv does nothing else.

    It is resolved by now. vLLM itself hashes blocks for any connector all the same.
    """
    model = vllm_config.model_config
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            f"{where}: the engine's prefix caching is off. Either it was told so: take --no-enable-prefix-caching "
            f"away. Or vLLM found that {model.model} gives wrong answers from another request's prefix, by how it "
            f"pools or attends (its log says so): then run it without tierkv"
        )
    if model.runner_type == "pooling" and not model.is_prefix_caching_supported:
        raise ConfigError(
            f"{where}: {model.model} pools in a way that needs every token of a prompt computed anew, so prefixes "
            f"cannot be taken over: run it without tierkv"
        )


def weights_revision(model: Any, load: Any, where: str) -> str:
    """Names the weights that are loaded for a model's configuration."""
    if str(load.load_format) == "dummy":
        return f"random weights of seed {model.seed}"
    name = str(model.model)
    if Path(name).is_dir():
        return directory_revision(Path(name))
    revision = model.revision or getattr(model.hf_config, "_commit_hash", None)
    if isinstance(revision, str) and _COMMIT.match(revision):
        return revision
    raise ConfigError(
        f"{where}: the revision of {name} is {revision!r}, which does not tell its weights from others: set "
        f"model_revision to a commit or a digest of the weights"
    )


def settings_of(vllm_config: Any, named: bool, where: str) -> dict[str, str]:
    """Settings that change values or their place in a block, as text by name.

    named: whether the user names the weights, so that a draft's need not be told apart here.
    """
    model, draft = vllm_config.model_config, vllm_config.speculative_config
    found: dict[str, object] = {
        **_of_model(model),
        "weights_source": _source_of(vllm_config.load_config),
        "cache_settings": digest_of(_fields(vllm_config.cache_config, NOT_OF_THE_CACHE)),
        "attention_settings": digest_of(_fields(vllm_config.attention_config, NOT_OF_ATTENTION)),
        "mamba_settings": digest_of(_fields(getattr(vllm_config, "mamba_config", None), ())),
        "diffusion_settings": digest_of(_fields(getattr(vllm_config, "diffusion_config", None), ())),
        "kernel_settings": digest_of(_named(getattr(vllm_config, "kernel_config", None), OF_KERNELS)),
        "parallel_settings": digest_of(_named(vllm_config.parallel_config, OF_PARALLELISM)),
        "platform_settings": digest_of({"": plain(getattr(vllm_config, "additional_config", None))}),
        "input_settings": _of_inputs(getattr(model, "multimodal_config", None), where),
        "environment": digest_of({name: os.environ[name] for name in ENVIRONMENT if name in os.environ}),
        "v2_model_runner": vllm_config.use_v2_model_runner,
    }
    if draft is not None:
        found["draft_settings"] = digest_of(_fields(draft, NOT_OF_DRAFTS))
        if draft.draft_model_config is not None:
            for name, value in _of_model(draft.draft_model_config).items():
                found[f"draft_{name}"] = value
            found["draft_weights"] = _draft_weights(vllm_config, named, where)
    return {name: str(value) for name, value in found.items()}


def _of_model(model: Any) -> dict[str, object]:
    described = {
        name: value for name, value in model.hf_config.to_dict().items() if name not in NOT_OF_THE_MODEL
    }
    return {
        "model_settings": digest_of(_as_mapping(plain(described))),
        "max_model_len": _length(model),
        **_named(model, OF_THE_MODEL),
    }


def _length(model: Any) -> str:
    """The longest context that the model is built for: positions are encoded by it (LongRoPE, dynamic NTK), queries are
    scaled by it (Llama 4), and other models may use it as they like.

    Where the engine fits it to its memory, that happens after the model was built for the longest one that it has.
    """
    fitted = getattr(model, "original_max_model_len", None) == -1
    return "fitted to memory" if fitted else str(model.max_model_len)


def _source_of(load: Any) -> str:
    """Where weights come from, unless they are the model's own files."""
    form = str(load.load_format)
    if form in _FILES:
        return "files"
    return f"{form} {digest_of({'': plain(load.model_loader_extra_config)})}"


def _of_inputs(inputs: Any, where: str) -> str:
    """Images, audio and video: vLLM's hashes name what a request gives, not how this engine reads and encodes it."""
    if inputs is None:
        return "text"
    found = _fields(inputs, NOT_OF_INPUTS)
    scales = getattr(inputs, "mm_encoder_fp8_scale_path", None)
    if scales:
        try:
            found["scales"] = hashlib.sha256(Path(scales).read_bytes()).hexdigest()
        except OSError as error:
            raise ConfigError(
                f"{where}: the scales of the multimodal encoder cannot be read, so nothing tells its embeddings from "
                f"others: {error}: set mm_encoder_fp8_scale_path to a file that this host has"
            ) from error
    return digest_of(found)


def _draft_weights(vllm_config: Any, named: bool, where: str) -> str:
    """Draft layers' blocks are stored as the target's are."""
    target, draft = vllm_config.model_config, vllm_config.speculative_config
    model = draft.draft_model_config
    if named or str(model.model) in (str(target.model), getattr(target, "model_weights", "") or target.model):
        return "as the target's"
    load = draft.draft_load_config or vllm_config.load_config
    return f"{_source_of(load)} {weights_revision(model, load, where)}"


def _fields(config: Any, ignored: Collection[str]) -> dict[str, object]:
    """All fields of a configuration but some."""
    if config is None:
        return {}
    names = [one.name for one in dataclasses.fields(config)]
    return {name: plain(getattr(config, name)) for name in names if name not in ignored}


def _named(config: Any, names: Collection[str]) -> dict[str, object]:
    return {name: _text(plain(getattr(config, name, None))) for name in names}


def _text(value: object) -> object:
    return digest_of({"": value}) if isinstance(value, (dict, list)) else value


def _as_mapping(value: object) -> dict[str, object]:
    assert isinstance(value, dict)
    return value


def plain(value: Any) -> Any:
    """A setting as JSON has it, the same in every process that has the same one."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(inner) for inner in value), key=str)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    kind = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if isinstance(value, type):
        return kind
    if dataclasses.is_dataclass(value):
        return {"": kind, **_fields(value, ())}
    if str(value) == object.__repr__(value):  # its address
        return {"": kind, **{name: plain(inner) for name, inner in vars(value).items()}}
    return str(value) if not callable(value) else kind
