"""Several engines over one store, and several connectors in one engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agent_process import AgentProcess
from engine_host import EngineHost, tierkv_connector
from equality import cached, check_same, prompt_of

ANSWER_TOKENS = 8


def prompts_of(kind: str, *lengths: int) -> list[list[int]]:
    """One prompt a length."""
    return [prompt_of((kind, index), length) for index, length in enumerate(lengths)]


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_sessions_hop_between_engines(
    model: str, engine: EngineHost, agent: AgentProcess, tmp_path: Path
) -> None:
    """Two engines at once; each turn goes to the other one, which finds what the first has stored."""
    sessions = prompts_of("hop", 300, 450)
    engine.open(model)
    connector = tierkv_connector(agent.socket)
    turns: list[list[list[int]]] = []
    expected = []
    for turn in range(4):
        answers = engine.generate(sessions, ANSWER_TOKENS)
        turns.append(sessions)
        expected.append(answers)
        sessions = [
            session + answer["tokens"] + prompt_of((turn, index), 70)
            for index, (session, answer) in enumerate(zip(sessions, answers, strict=True))
        ]
    engine.open(model, connector)
    with EngineHost(tmp_path) as other:
        other.open(model, connector)
        for turn, (prompts, answers) in enumerate(zip(turns, expected, strict=True)):
            here = (engine, other)[turn % 2]
            found = here.generate(prompts, ANSWER_TOKENS)
            check_same(found, answers, f"turn {turn}")
            here.settle()
            if turn:
                before = [len(prompt) + ANSWER_TOKENS - 1 for prompt in turns[turn - 1]]
                assert cached(found) == [tokens // 32 * 32 for tokens in before]
        assert engine.external_hits() > 0
        assert other.external_hits() > 0
        other.close_engine()
    engine.close_engine()
    agent.check_idle()


def test_only_the_same_keyspace_is_found(engine: EngineHost, agent: AgentProcess) -> None:
    """Written under A, read under B, where B differs in one thing that changes the bytes: nothing is found."""
    prompts = prompts_of("identity", 400)
    connector = tierkv_connector(agent.socket)
    engine.open("llama", connector)
    engine.generate(prompts, ANSWER_TOKENS)
    engine.settle()
    others: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
        "model name": ({"model": "another"}, {}, "llama"),
        "revision": ({"model_revision": "another"}, {}, "llama"),
        "dtype": ({}, {"dtype": "bfloat16"}, "llama"),
        "block size": ({}, {"block_size": 64}, "llama"),
        "hash algorithm": ({}, {"prefix_caching_hash_algo": "sha256_cbor"}, "llama"),
        "architecture": ({}, {}, "qwen3"),
        "settings": ({}, {"hf_overrides": {"rms_norm_eps": 1e-5}}, "llama"),
    }
    for what, (extra, arguments, model) in others.items():
        engine.open(model, tierkv_connector(agent.socket, save=False, **extra), **arguments)
        assert cached(engine.generate(prompts, ANSWER_TOKENS)) == [0], (
            f"another {what} finds blocks that are not its own"
        )
    engine.open("llama", connector)
    assert cached(engine.generate(prompts, ANSWER_TOKENS)) == [384]


def test_roles(engine: EngineHost, agent: AgentProcess) -> None:
    """A producer writes and reads nothing, a consumer reads and writes nothing; settings can say otherwise."""
    prompts = prompts_of("roles", 400, 231)
    others = prompts_of("other roles", 380)
    engine.open("llama")
    expected = engine.generate(prompts, ANSWER_TOKENS)
    engine.open("llama", tierkv_connector(agent.socket, role="kv_producer"))
    for _ in range(2):
        found = engine.generate(prompts, ANSWER_TOKENS)
        check_same(found, expected, "producer")
        assert cached(found) == [0, 0]
        engine.settle()
    stored = agent.stats().tiers["dram"].blocks
    assert agent.stats().saved_blocks == 12 + 7

    engine.open("llama", tierkv_connector(agent.socket, role="kv_consumer"))
    found = engine.generate(prompts, ANSWER_TOKENS)
    check_same(found, expected, "consumer")
    assert cached(found) == [384, 224]
    engine.generate(others, ANSWER_TOKENS)
    engine.settle()
    assert agent.stats().saved_blocks == 12 + 7
    assert agent.stats().tiers["dram"].blocks == stored > 0

    engine.open("llama", tierkv_connector(agent.socket, role="kv_consumer", save=True, load=False))
    found = engine.generate(prompts, ANSWER_TOKENS)
    assert cached(found) == [0, 0]
    engine.generate(others, ANSWER_TOKENS)
    engine.settle()
    assert agent.stats().saved_blocks > 12 + 7


def beside_example(connector: dict[str, Any], directory: Path, *, first: bool) -> dict[str, Any]:
    """vLLM's MultiConnector with its ExampleConnector before or behind ours."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(directory)},
    }
    own = {key: value for key, value in connector.items() if key != "kv_load_failure_policy"}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [example, own] if first else [own, example]},
    }


@pytest.mark.parametrize("load_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("first", [True, False], ids=["other first", "ours first"])
def test_beside_another_connector(
    first: bool, load_async: bool, engine: EngineHost, agent: AgentProcess, tmp_path: Path
) -> None:
    """In a MultiConnector: whoever is chosen loads, both store, and each alone serves what both have seen."""
    prompts = prompts_of("beside", 400, 231)
    later = prompts_of("later", 300, 352)
    connector = tierkv_connector(agent.socket, load_async=load_async)
    engine.open("llama")
    expected = engine.generate(prompts, ANSWER_TOKENS)
    expected_later = engine.generate(later, ANSWER_TOKENS)
    both = beside_example(connector, tmp_path / "example", first=first)
    (tmp_path / "example").mkdir()
    engine.open("llama", both)
    check_same(engine.generate(prompts, ANSWER_TOKENS), expected, "cold")
    engine.settle()
    found = engine.generate(prompts, ANSWER_TOKENS)
    check_same(found, expected, "warm")
    assert all(cached(found))
    engine.settle()
    check_same(engine.generate([*later, prompts[0]], ANSWER_TOKENS), [*expected_later, expected[0]], "mixed")
    engine.settle()

    agent.kill()  # only the other one has blocks now
    agent.start()
    engine.open("llama", both)
    found = engine.generate(prompts, ANSWER_TOKENS)
    check_same(found, expected, "from the other one")
    assert all(cached(found))
    engine.settle()

    engine.open("llama", connector)
    found = engine.generate(prompts, ANSWER_TOKENS)
    check_same(found, expected, "alone")
    engine.settle()
    check_same(engine.generate(prompts, ANSWER_TOKENS), expected, "alone, warm")
    engine.close_engine()
    agent.check_idle()
