"""What requests go through in a busy engine, with the store below: the answers stay those of an engine without it."""

from __future__ import annotations

import pytest
from agent_process import AgentProcess
from engine_host import EngineHost, tierkv_connector
from equality import cached, check_same, prompt_of

WAITING = "WAITING_FOR_REMOTE_KVS"


def prompts_of(kind: str, *lengths: int) -> list[list[int]]:
    """One prompt a length."""
    return [prompt_of((kind, index), length) for index, length in enumerate(lengths)]


def test_synchronous_loads(engine: EngineHost, agent: AgentProcess) -> None:
    """The step waits for the load; also where it has other requests to run, and a load that goes on from local hits."""
    prompts = prompts_of("synchronous", 700, 321, 96)
    engine.open("llama")
    expected = engine.generate(prompts, 12)
    engine.open("llama", tierkv_connector(agent.socket, load_async=False))
    check_same(engine.generate(prompts, 12), expected, "cold")
    engine.settle()
    found = engine.generate(prompts, 12)
    check_same(found, expected, "warm")
    assert cached(found) == [672, 320, 64]
    engine.settle()
    engine.generate([prompts[0][:256]], 1)  # now the engine has a part itself
    before = engine.external_hits()
    found = engine.generate(prompts, 12)
    check_same(found, expected, "partly local")
    assert cached(found) == [672, 320, 64]
    assert engine.external_hits() - before == 672 - 256 + 320 + 64


@pytest.mark.parametrize(
    ("model", "step_tokens"), [("llama", 96), ("gemma3", 96), ("nemotron_h", 256), ("mimo_v2", 256)]
)
def test_chunked_prefill(model: str, step_tokens: int, engine: EngineHost, agent: AgentProcess) -> None:
    """Prompts that take many steps, while others decode."""
    prompts = prompts_of("chunked", 900, 640, 333, 1100)
    engine.open(model)
    expected = engine.generate(prompts, 20)
    engine.open(model, tierkv_connector(agent.socket), max_num_batched_tokens=step_tokens)
    check_same(engine.generate(prompts, 20), expected, "cold")
    engine.settle()
    found = engine.generate(prompts, 20)
    check_same(found, expected, "warm")
    assert all(cached(found))
    engine.settle()
    longer = [
        prompt + answer["tokens"] + prompt[:90] for prompt, answer in zip(prompts, expected, strict=True)
    ]
    found = engine.generate(longer, 20)
    assert all(cached(found))
    engine.open(model)
    check_same(found, engine.generate(longer, 20), "second turn")


def test_several_samples(engine: EngineHost, agent: AgentProcess) -> None:
    """n > 1: the samples share the prompt's blocks."""
    prompts = prompts_of("samples", 500, 161)
    sampling = {"n": 3, "temperature": 0.9, "seed": 11}
    engine.open("gemma3")
    expected = engine.generate(prompts, 12, **sampling)
    assert len({tuple(sample) for sample in expected[0]["samples"]}) > 1
    engine.open("gemma3", tierkv_connector(agent.socket))
    for what in ("cold", "warm"):
        found = engine.generate(prompts, 12, **sampling)
        assert [answer["samples"] for answer in found] == [answer["samples"] for answer in expected], what
        engine.settle()
    assert engine.external_hits() >= 480 + 160


@pytest.mark.parametrize(("model", "blocks"), [("llama", 56), ("gemma3", 160), ("nemotron_h", 26)])
def test_too_few_blocks(model: str, blocks: int, engine: EngineHost, agent: AgentProcess) -> None:
    """The engine preempts requests and evicts their blocks, while loads and saves hold others."""
    prompts = prompts_of("pressure", *range(250, 650, 50))
    engine.open(model)
    expected = engine.generate(prompts, 150)
    few = {"num_gpu_blocks_override": blocks, "max_model_len": 800, "max_num_seqs": 8}
    engine.open(model, tierkv_connector(agent.socket), **few)
    for what in ("cold", "warm", "warm again"):
        check_same(engine.generate(prompts, 150), expected, what)
    figures = engine.metrics()
    assert figures["vllm:num_preemptions"] > 0
    assert figures["vllm:external_prefix_cache_hits"] > 0
    engine.settle()
    engine.close_engine()
    agent.check_idle()


@pytest.mark.parametrize("model", ["llama", "gemma3", "nemotron_h"])
def test_abort_in_mid_load(model: str, engine: EngineHost, agent: AgentProcess) -> None:
    """A load that lands after its request was aborted hits nobody else's blocks; the id may be used again."""
    prompts = prompts_of("abort", 600, 570, 610, 580)
    engine.open(model)
    expected = engine.generate(prompts, 10)
    engine.open(model, tierkv_connector(agent.socket))
    engine.generate(prompts[:2], 10)
    engine.settle()

    engine.hold_loads()
    engine.add("first", prompts[0], 10)
    engine.add("second", prompts[1], 10)
    assert engine.step_until("first", WAITING)
    assert engine.step_until("second", WAITING)
    engine.abort("first")
    engine.add("third", prompts[2], 10)  # computes, where blocks of the first might be given to it
    engine.add("first", prompts[3], 10)
    engine.step(5)
    assert engine.release_loads() >= 2
    answers = engine.finish()
    found = [answers["second"], answers["third"], answers["first"]]
    check_same(found, [expected[1], expected[2], expected[3]], "beside an aborted load")
    assert answers["second"]["cached"] > 0
    engine.settle()
    check_same(engine.generate(prompts, 10), expected, "afterwards")
    engine.settle()
    engine.close_engine()
    agent.check_idle()


@pytest.mark.parametrize("model", ["nemotron_h", "qwen3_next", "gemma3"])
def test_answers_that_cross_blocks(model: str, engine: EngineHost, agent: AgentProcess) -> None:
    """What is generated is kept too: the next turn resumes behind the prompt of the one before."""
    prompts = prompts_of("long answers", 350, 720)
    engine.open(model)
    expected = engine.generate(prompts, 140)
    turns = [
        prompt + answer["tokens"] + prompt[:30] for prompt, answer in zip(prompts, expected, strict=True)
    ]
    second = engine.generate(turns, 8)
    engine.open(model, tierkv_connector(agent.socket))
    check_same(engine.generate(prompts, 140), expected, "cold")
    engine.settle()
    found = engine.generate(turns, 8)
    check_same(found, second, "second turn")
    assert all(one >= other for one, other in zip(cached(found), cached(second), strict=True))
    if model == "gemma3":  # vLLM itself keeps no recurrent state of boundaries that a decode passes
        assert cached(found) == [(350 + 139) // 32 * 32, (720 + 139) // 32 * 32]


def test_salts_and_resets(engine: EngineHost, agent: AgentProcess) -> None:
    """A prompt under another salt is another prompt; a reset of the connector's cache leaves nothing to find."""
    prompts = prompts_of("salts", 300)
    engine.open("llama", tierkv_connector(agent.socket))
    expected = engine.generate(prompts, 8, salt="mine")
    engine.settle()
    for salt in ("yours", None):
        found = engine.generate(prompts, 8, salt=salt)
        check_same(found, expected, f"under {salt}")
        assert cached(found) == [0], f"{salt} sees what was kept for another salt"
        engine.settle()
    assert cached(engine.generate(prompts, 8, salt="mine")) == [288]
    engine.settle()
    assert engine.reset(connector=True)
    found = engine.generate(prompts, 8, salt="mine")
    check_same(found, expected, "after a reset")
    assert cached(found) == [0]
    engine.settle()
    assert cached(engine.generate(prompts, 8, salt="mine")) == [288], "nothing is kept after a reset"
