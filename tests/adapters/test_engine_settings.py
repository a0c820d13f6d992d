"""An engine's settings: whatever changes blocks changes their keyspace, and nothing else does. Without vLLM."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tierkv.adapters.vllm.engine_settings import (
    ENVIRONMENT,
    check_prefixes,
    plain,
    settings_of,
    weights_revision,
)
from tierkv.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Backend(Enum):
    FIRST = "first"
    SECOND = "second"


@dataclass
class Cache:
    cache_dtype: str = "auto"
    block_size: int = 32
    enable_prefix_caching: bool = True
    num_gpu_blocks: int | None = None
    kv_cache_dtype_skip_layers: list[str] = field(default_factory=list)
    of_a_later_version: int = 0


@dataclass
class Attention:
    backend: Backend | None = None
    indexer_kv_dtype: str = "auto"
    use_non_causal: bool = False
    flex_attn_block_m: int | None = None


@dataclass
class Mamba:
    enable_stochastic_rounding: bool = False


@dataclass
class Inputs:
    limit_per_prompt: dict[str, Any] = field(default_factory=dict)
    media_io_kwargs: dict[str, Any] = field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] | None = None
    mm_processor_cache_gb: float = 4
    mm_encoder_attn_dtype: str | None = None
    mm_encoder_fp8_scale_path: str | None = None
    video_pruning_rate: float | None = None
    interleave_mm_strings: bool = False


@dataclass
class Draft:
    method: str = "eagle"
    model: str | None = None
    num_speculative_tokens: int = 3
    parallel_drafting: bool = False
    kv_cache_dtype: str | None = None
    rejection_sample_method: str = "standard"
    draft_load_config: Any = None
    draft_model_config: Any = None


def model(name: str = "some/model", settings: dict[str, Any] | None = None, **more: Any) -> Any:
    settings = {"rope_theta": 1e4, "_name_or_path": "/here", **(settings or {})}
    values: dict[str, Any] = {
        "model": name, "revision": COMMIT, "seed": 0, "dtype": "bfloat16", "quantization": None,
        "quantization_config": None, "max_model_len": 4096, "original_max_model_len": None,
        "disable_sliding_window": False, "model_impl": "auto", "model_class_overrides": {}, "code_revision": None,
        "runner_type": "generate", "convert_type": "none", "is_prefix_caching_supported": True,
        "multimodal_config": None,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **more}, hf_config=SimpleNamespace(to_dict=lambda: settings))


def load(form: str = "auto", **extra: Any) -> Any:
    return SimpleNamespace(load_format=form, model_loader_extra_config=extra)


def engine(**parts: Any) -> Any:
    values = {
        "model_config": model(), "cache_config": Cache(), "attention_config": Attention(), "mamba_config": Mamba(),
        "kernel_config": SimpleNamespace(moe_backend="auto"), "load_config": load(), "speculative_config": None,
        "parallel_config": SimpleNamespace(dcp_kv_cache_interleave_size=1), "additional_config": {},
        "use_v2_model_runner": False,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **parts})


def seen(config: Any, named: bool = False) -> dict[str, str]:
    return settings_of(config, named, "here")


def with_draft(**more: Any) -> Any:
    return engine(speculative_config=Draft(**{"draft_model_config": model("a/draft"), **more}))


OTHERS: dict[str, Callable[[], Any]] = {
    "longest context": lambda: engine(model_config=model(max_model_len=2048)),
    "longest context, fitted": lambda: engine(model_config=model(original_max_model_len=-1)),
    "model's settings": lambda: engine(model_config=model(settings={"rope_theta": 1e6})),
    "dtype": lambda: engine(model_config=model(dtype="float16")),
    "quantization": lambda: engine(model_config=model(quantization="fp8")),
    "quantization's settings": lambda: engine(model_config=model(quantization_config={"ignore": ["x"]})),
    "implementation": lambda: engine(model_config=model(model_impl="transformers")),
    "class": lambda: engine(model_config=model(model_class_overrides={"A": "b:C"})),
    "code": lambda: engine(model_config=model(code_revision="2")),
    "weights elsewhere": lambda: engine(load_config=load("tensorizer", tensorizer_uri="s3://a")),
    "weights elsewhere, others": lambda: engine(load_config=load("tensorizer", tensorizer_uri="s3://b")),
    "cache dtype": lambda: engine(cache_config=Cache(cache_dtype="fp8")),
    "layers that are not quantized": lambda: engine(cache_config=Cache(kv_cache_dtype_skip_layers=["0"])),
    "field of a later version": lambda: engine(cache_config=Cache(of_a_later_version=1)),
    "attention": lambda: engine(attention_config=Attention(backend=Backend.FIRST)),
    "other attention": lambda: engine(attention_config=Attention(backend=Backend.SECOND)),
    "indexer": lambda: engine(attention_config=Attention(indexer_kv_dtype="fp8")),
    "bidirectional": lambda: engine(attention_config=Attention(use_non_causal=True)),
    "mamba": lambda: engine(mamba_config=Mamba(True)),
    "kernels": lambda: engine(kernel_config=SimpleNamespace(moe_backend="marlin")),
    "context parallelism": lambda: engine(parallel_config=SimpleNamespace(dcp_kv_cache_interleave_size=16)),
    "platform": lambda: engine(additional_config={"fused": True}),
    "model runner": lambda: engine(use_v2_model_runner=True),
    "multimodal": lambda: engine(model_config=model(multimodal_config=Inputs())),
    "processor": lambda: engine(model_config=model(multimodal_config=Inputs(mm_processor_kwargs={"n": 4}))),
    "media": lambda: engine(
        model_config=model(multimodal_config=Inputs(media_io_kwargs={"video": {"n": 4}}))
    ),
    "encoder": lambda: engine(model_config=model(multimodal_config=Inputs(mm_encoder_attn_dtype="fp8"))),
    "pruning": lambda: engine(model_config=model(multimodal_config=Inputs(video_pruning_rate=0.5))),
    "draft": with_draft,
    "draft's method": lambda: with_draft(method="mtp"),
    "draft's weights": lambda: with_draft(draft_model_config=model("a/draft", revision="f" * 40)),
    "draft's model": lambda: with_draft(draft_model_config=model("a/draft", {"num_hidden_layers": 2})),
    "draft's dtype": lambda: with_draft(draft_model_config=model("a/draft", dtype="float16")),
    "draft's cache": lambda: with_draft(kv_cache_dtype="fp8"),
    "draft's length": lambda: with_draft(num_speculative_tokens=1),
    "drafts in parallel": lambda: with_draft(parallel_drafting=True),
    "draft of the target's weights": lambda: with_draft(draft_model_config=model()),
}

SAME: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "path": (engine, lambda: engine(model_config=model(settings={"_name_or_path": "/there"}))),
    "memory": (engine, lambda: engine(cache_config=Cache(num_gpu_blocks=7))),
    "what fits": (
        lambda: engine(model_config=model(original_max_model_len=-1, max_model_len=1000)),
        lambda: engine(model_config=model(original_max_model_len=-1, max_model_len=1001)),
    ),
    "said or found": (engine, lambda: engine(model_config=model(original_max_model_len=4096))),
    "tiles": (engine, lambda: engine(attention_config=Attention(flex_attn_block_m=32))),
    "format": (engine, lambda: engine(load_config=load("safetensors", threads=3))),
    "processor's cache": (
        lambda: engine(model_config=model(multimodal_config=Inputs())),
        lambda: engine(model_config=model(multimodal_config=Inputs(mm_processor_cache_gb=0.5))),
    ),
    "sampling": (with_draft, lambda: with_draft(rejection_sample_method="block")),
}


def test_what_changes_blocks_changes_the_settings() -> None:
    found = [sorted(seen(make()).items()) for make in (engine, *OTHERS.values())]
    assert [sorted(seen(make()).items()) for make in (engine, *OTHERS.values())] == found
    assert len({str(one) for one in found}) == len(found)


@pytest.mark.parametrize("name", SAME)
def test_what_does_not_leaves_them(name: str) -> None:
    one, other = SAME[name]
    assert seen(one()) == seen(other())


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_the_environment_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    before = seen(engine())
    monkeypatch.setenv(name, "1")
    assert seen(engine()) != before
    assert {key for key, value in seen(engine()).items() if before[key] != value} == {"environment"}


def test_the_encoders_scales_count_and_not_their_path(tmp_path: Path) -> None:
    def scales(name: str, text: str) -> dict[str, str]:
        (tmp_path / name).write_text(text)
        inputs = Inputs(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(tmp_path / name))
        return seen(engine(model_config=model(multimodal_config=inputs)))

    first = scales("a", "1")
    assert scales("b", "1") == first
    assert scales("a", "2") != first
    missing = Inputs(mm_encoder_fp8_scale_path=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="mm_encoder_fp8_scale_path"):
        seen(engine(model_config=model(multimodal_config=missing)))


def test_a_drafts_weights_in_a_directory_are_told_apart(tmp_path: Path) -> None:
    weights = tmp_path / "draft.safetensors"
    weights.write_bytes(b"1")
    os.utime(weights, (1, 1))
    config = with_draft(draft_model_config=model(str(tmp_path)))
    before, named = seen(config), seen(config, named=True)
    os.utime(weights, (2, 2))
    assert {key for key, value in seen(config).items() if before[key] != value} == {"draft_weights"}
    assert seen(config, named=True) == named, "a revision that the user gives stands for all weights"


def test_a_draft_of_unknown_weights_is_refused() -> None:
    config = with_draft(draft_model_config=model("a/draft", revision="main"))
    with pytest.raises(ConfigError, match=r"here.*a/draft.*model_revision"):
        seen(config)
    assert seen(config, named=True)
    config.speculative_config.draft_load_config = load("dummy")
    assert "random" in seen(config)["draft_weights"]


def test_prompt_look_up_has_no_weights() -> None:
    """Such methods hand the target's configuration over as the draft's, or none."""
    for drafting in (model("some/model", revision="main"), None):
        assert seen(with_draft(method="ngram", model="ngram", draft_model_config=drafting))


def test_weights_are_named_by_commit_or_files(tmp_path: Path) -> None:
    assert weights_revision(model(), load(), "here") == COMMIT
    assert weights_revision(model(revision=None), load("dummy"), "here") == "random weights of seed 0"
    (tmp_path / "model.safetensors").write_bytes(b"1")
    assert weights_revision(model(str(tmp_path)), load(), "here").startswith("files-")
    with pytest.raises(ConfigError, match=r"here.*main.*model_revision"):
        weights_revision(model(revision="main"), load(), "here")


def test_engines_that_must_not_reuse_prefixes_are_refused() -> None:
    check_prefixes(engine(), "here")
    check_prefixes(engine(model_config=model(runner_type="pooling")), "here")
    with pytest.raises(ConfigError, match=r"here: .*off.*--no-enable-prefix-caching.*without tierkv"):
        check_prefixes(engine(cache_config=Cache(enable_prefix_caching=False)), "here")
    pooling = model(runner_type="pooling", is_prefix_caching_supported=False)
    with pytest.raises(ConfigError, match=r"here: some/model pools"):
        check_prefixes(engine(model_config=pooling), "here")


class Opaque:
    """As str() has an address of it, no two processes would agree."""

    def __init__(self, value: object) -> None:
        self.value = value


def test_settings_are_written_the_same_in_every_process() -> None:
    names = {f"layer {number}" for number in range(50)}
    assert plain(names) == plain(frozenset(sorted(names))) == sorted(names)
    assert plain({1: (Backend.FIRST, {Path("/a")})}) == {"1": ["Backend.FIRST", ["/a"]]}
    assert plain(Opaque(1)) == plain(Opaque(1)) != plain(Opaque(2))
    assert plain(Draft()) == plain(Draft()) != plain(Draft(method="mtp"))
    assert plain(plain) == "tierkv.adapters.vllm.engine_settings.plain"
    assert plain(Cache) != plain(Draft)
