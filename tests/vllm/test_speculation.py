"""Speculative decoding over the store: greedy answers stay those of an engine that neither guesses nor caches, and the
drafts' own caches come back as right as the model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agent_process import AgentProcess
from engine_host import EngineHost, tierkv_connector
from engine_models import MODELS
from equality import cached, check_same, prompt_of

ANSWER_TOKENS = 60
PROMPT_TOKENS = 300
GUESSED = {"num_speculative_tokens": 3}


def drafts_of(method: str, place: Path) -> dict[str, Any]:
    """speculative_config. A draft model's random weights are llama's own, so it guesses that one's tokens right."""
    if method == "ngram":
        return {"method": "ngram", **GUESSED, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    config = dict(MODELS["llama"].config)
    if method == "eagle":
        config |= {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    return {"method": method, **GUESSED, "model": str(place)}


# vLLM 0.32 itself cannot have drafts in several groups, and its answers to gemma3 with llama's drafts are wrong on CPU.
@pytest.mark.parametrize(
    ("method", "model"),
    [("ngram", "llama"), ("ngram", "gemma3"), ("draft_model", "llama"), ("eagle", "llama")],
)
def test_answers_with_guesses(
    method: str, model: str, engine: EngineHost, agent: AgentProcess, tmp_path: Path
) -> None:
    prompts = [prompt_of((method, 1), PROMPT_TOKENS), (prompt_of((method, 2), 40) * 8)[:PROMPT_TOKENS]]
    engine.open(model)
    answers = engine.generate(prompts, ANSWER_TOKENS)
    turns = [prompt + answer["tokens"] + prompt[:50] for prompt, answer in zip(prompts, answers, strict=True)]
    second = engine.generate(turns, ANSWER_TOKENS)
    engine.inside("engine_inside.keep_kernels")
    speculation = drafts_of(method, tmp_path / "drafts")
    engine.open(model, tierkv_connector(agent.socket), speculative_config=speculation)
    if method != "ngram":
        engine.inside("engine_inside.record_drafts")
    margin = 32 if method == "eagle" else 0  # its cache's last entry in a block depends on the next block
    end = PROMPT_TOKENS + ANSWER_TOKENS - 1  # the last token is sampled, not computed
    external = 0
    drafts = {}
    for what, asked, expected, hit in (
        ("cold", prompts, answers, 0),
        ("warm", prompts, answers, PROMPT_TOKENS // 32 * 32 - margin),
        ("second turn", turns, second, end // 32 * 32 - margin),
        ("second turn, warm", turns, second, len(turns[0]) // 32 * 32 - margin),
    ):
        engine.inside("engine_inside.take_drafts")
        found = engine.generate(asked, ANSWER_TOKENS)
        check_same(found, expected, what)
        assert cached(found) == [hit, hit], what
        external += 2 * hit
        assert engine.external_hits() == external, what
        drafts[what] = sorted(engine.inside("engine_inside.take_drafts"))
        engine.settle()
    figures = engine.metrics("vllm:spec_decode_num_")
    guessed, right = (figures[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted"))
    assert guessed > 0
    if method == "ngram":
        assert right > 0
    else:
        assert drafts["warm"] == drafts["cold"], "drafts over a cache that was loaded are others"
        assert drafts["second turn, warm"] == drafts["second turn"]
        assert len(drafts["cold"]) >= 2 * ANSWER_TOKENS / 4
    if method == "draft_model":
        assert right == guessed
    engine.close_engine()
    agent.check_idle()
