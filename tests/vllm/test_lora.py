"""LoRA: blocks that were computed under an adapter are found under that adapter, and under no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_process import AgentProcess
from engine_host import Adapter, Answer, EngineHost, tierkv_connector
from engine_models import MODELS
from equality import cached, check_same, prompt_of
from safetensors.numpy import save_file

LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_cpu_loras": 4, "max_lora_rank": 8}
"""One place more than there are adapters: vLLM 0.32's kernels for CPU give tokens of the base model the last place's
weights when they are in one batch with tokens of an adapter, so that place must stay empty."""
RANK = 4
ANSWER_TOKENS = 8
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def write_adapter(place: Path, model: str, seed: int, rank: int = RANK) -> Path:
    """A PEFT directory with random weights, as strong as the model's own; where it is."""
    config = MODELS[model].config
    heads, kv_heads = (
        config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes = {  # module: (in, out)
        "self_attn.q_proj": (hidden, heads), "self_attn.k_proj": (hidden, kv_heads),
        "self_attn.v_proj": (hidden, kv_heads), "self_attn.o_proj": (heads, hidden),
        "mlp.up_proj": (hidden, inner), "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    source = np.random.default_rng(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (taken, given) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            down, up = source.standard_normal((rank, taken)), source.standard_normal((given, rank))
            weights[f"{name}.lora_A.weight"] = (down / taken**0.5).astype(np.float32)
            weights[f"{name}.lora_B.weight"] = (up / rank**0.5).astype(np.float32)
    place.mkdir(parents=True, exist_ok=True)
    save_file(weights, place / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none",
        "target_modules": list(_TARGETS), "base_model_name_or_path": model,
    }  # fmt: skip
    (place / "adapter_config.json").write_text(json.dumps(settings))
    return place


def adapter(name: str, number: int, place: Path, **more: Any) -> Adapter:
    """LoRARequest's arguments."""
    return {"lora_name": name, "lora_int_id": number, "lora_path": str(place), **more}


def prompts_of(kind: str, *lengths: int) -> list[list[int]]:
    """One prompt a length."""
    return [prompt_of((kind, index), length) for index, length in enumerate(lengths)]


def hits(engine: EngineHost, prompts: list[list[int]], under: Adapter | None, expected: list[Answer]) -> int:
    """Runs prompts that must have these answers; how many of their tokens came from the store."""
    before = engine.external_hits()
    check_same(
        engine.generate(prompts, ANSWER_TOKENS, adapters=[under] * len(prompts)), expected, f"under {under}"
    )
    found = engine.external_hits() - before
    engine.settle()
    return found


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_answers_under_adapters(model: str, engine: EngineHost, agent: AgentProcess, tmp_path: Path) -> None:
    """The base model and two adapters side by side, each over what it has stored itself; cold, warm, and restarted."""
    prompts = prompts_of("answers", 400, 231)
    under = [
        None,
        adapter("first", 1, write_adapter(tmp_path / "first", model, 1)),
        adapter("second", 2, write_adapter(tmp_path / "second", model, 2)),
    ]
    engine.open(model, **LORA)
    alone = [engine.generate(prompts, ANSWER_TOKENS, adapters=[one] * 2) for one in under]
    assert len({tuple(answers[0]["tokens"]) for answers in alone}) == 3, "the adapters change nothing"
    expected = [answer for answers in alone for answer in answers]
    mixed = {"prompts": prompts * 3, "adapters": [one for one in under for _ in prompts]}
    engine.open(model, tierkv_connector(agent.socket), **LORA)
    found = engine.generate(max_tokens=ANSWER_TOKENS, **mixed)
    check_same(found, expected, "cold")
    assert cached(found) == [0] * 6, "the same prompt under another adapter is found"
    engine.settle()
    for what in ("warm", "after a restart"):
        found = engine.generate(max_tokens=ANSWER_TOKENS, **mixed)
        check_same(found, expected, what)
        assert cached(found) == [384, 224] * 3
        assert engine.external_hits() == 3 * (384 + 224)
        engine.settle()
        if what == "warm":
            engine.open(model, tierkv_connector(agent.socket), **LORA)
    engine.open(model, tierkv_connector(agent.socket))  # one that knows of no adapters
    found = engine.generate(prompts, ANSWER_TOKENS)
    check_same(found, alone[0], "the base model alone")
    assert cached(found) == [384, 224]
    engine.close_engine()
    agent.check_idle()


def test_each_adapter_finds_its_own(engine: EngineHost, agent: AgentProcess, tmp_path: Path) -> None:
    """What is stored under one adapter is found under no other name, no other path, and not by the base model."""
    prompts = prompts_of("its own", 400)
    first = adapter("first", 1, write_adapter(tmp_path / "first", "llama", 1))
    second = adapter("second", 2, write_adapter(tmp_path / "second", "llama", 2))
    elsewhere = adapter("first", 1, write_adapter(tmp_path / "elsewhere", "llama", 3))
    engine.open("llama", **LORA)
    expected = {
        one["lora_path"]: engine.generate(prompts, ANSWER_TOKENS, adapters=[one]) for one in (first, second)
    }
    base = engine.generate(prompts, ANSWER_TOKENS)
    engine.open("llama", **LORA)
    other = engine.generate(prompts, ANSWER_TOKENS, adapters=[elsewhere])
    engine.open("llama", tierkv_connector(agent.socket), **LORA)
    assert hits(engine, prompts, first, expected[first["lora_path"]]) == 0
    engine.open("llama", tierkv_connector(agent.socket, save=False), **LORA)
    assert hits(engine, prompts, None, base) == 0
    assert hits(engine, prompts, second, expected[second["lora_path"]]) == 0
    assert hits(engine, prompts, {**first, "lora_name": "renamed"}, expected[first["lora_path"]]) == 0
    assert hits(engine, prompts, first, expected[first["lora_path"]]) == 384
    engine.open("llama", tierkv_connector(agent.socket, save=False), **LORA)
    assert hits(engine, prompts, elsewhere, other) == 0, "the name stands for other weights here"


def test_other_weights_at_the_same_path(engine: EngineHost, agent: AgentProcess, tmp_path: Path) -> None:
    """vLLM's block hash holds an adapter's name and path only; the weights there may be new ones."""
    prompts = prompts_of("same path", 400)
    place = tmp_path / "adapter"
    same = adapter("adapter", 1, place)
    write_adapter(place, "llama", 2)
    engine.open("llama", **LORA)
    new = engine.generate(prompts, ANSWER_TOKENS, adapters=[same])
    write_adapter(place, "llama", 1)
    engine.open("llama", **LORA)
    old = engine.generate(prompts, ANSWER_TOKENS, adapters=[same])
    assert new[0]["tokens"] != old[0]["tokens"]
    engine.open("llama", tierkv_connector(agent.socket), **LORA)
    assert hits(engine, prompts, same, old) == 0
    assert hits(engine, prompts, same, old) == 384
    write_adapter(place, "llama", 2)
    engine.open("llama", tierkv_connector(agent.socket), **LORA)
    assert hits(engine, prompts, same, new) == 0, "blocks of the weights before are found"
    assert hits(engine, prompts, same, new) == 384


def test_adapter_changes_under_an_engine(engine: EngineHost, agent: AgentProcess, tmp_path: Path) -> None:
    """Weights that are written while an engine serves the ones before: neither finds the other's blocks, nor stores
    its own under the other's name."""
    prompts, later = prompts_of("changes", 400), prompts_of("changes later", 300)
    place = tmp_path / "adapter"
    same = adapter("adapter", 1, place)
    write_adapter(place, "llama", 2)
    engine.open("llama", **LORA)
    new = [engine.generate(one, ANSWER_TOKENS, adapters=[same]) for one in (prompts, later)]
    write_adapter(place, "llama", 1)
    engine.open("llama", **LORA)
    old = [engine.generate(one, ANSWER_TOKENS, adapters=[same]) for one in (prompts, later)]
    engine.open("llama", tierkv_connector(agent.socket), **LORA)
    assert hits(engine, prompts, same, old[0]) == 0
    write_adapter(place, "llama", 2)
    assert hits(engine, later, same, old[1]) == 0  # the engine still has what it has read
    assert hits(engine, prompts, {**same, "load_inplace": True}, new[0]) == 0
    assert hits(engine, later, same, new[1]) == 0, "stored by the name of weights that did not compute it"
    engine.open("llama", tierkv_connector(agent.socket), **LORA)
    assert hits(engine, later, same, new[1]) == 0
    assert hits(engine, prompts, same, new[0]) == 0
    assert hits(engine, prompts, same, new[0]) == 384


def test_read_before_it_changed(engine: EngineHost, agent: AgentProcess, tmp_path: Path) -> None:
    """Weights that the engine has read before they changed, and that no request was seen with until then."""
    prompts = prompts_of("read before", 400)
    place = tmp_path / "adapter"
    same = adapter("adapter", 1, place)
    write_adapter(place, "llama", 2)
    engine.open("llama", **LORA)
    new = engine.generate(prompts, ANSWER_TOKENS, adapters=[same])
    write_adapter(place, "llama", 1)
    engine.open("llama", **LORA)
    old = engine.generate(prompts, ANSWER_TOKENS, adapters=[same])
    engine.open("llama", tierkv_connector(agent.socket), **LORA)
    engine.add_adapter(same)
    write_adapter(place, "llama", 2)
    assert hits(engine, prompts, same, old) == 0
    engine.open("llama", tierkv_connector(agent.socket), **LORA)
    assert hits(engine, prompts, same, new) == 0, "old weights have stored blocks by the new ones' name"
    assert hits(engine, prompts, same, new) == 384
