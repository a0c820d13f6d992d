"""The offline `LLM` class: what becomes of the last saves when generate() has returned and no request follows."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent_process import AgentProcess
from engine_host import EngineHost, tierkv_connector
from engine_models import MODELS
from equality import cached, check_same, prompt_of

SOON_S = 30.0
PROMPT_TOKENS = 700
ANSWER_TOKENS = 40
PATIENT = {"lookup_timeout_s": 60.0, "save_timeout_s": 60.0}
"""Outlasts an agent that stands still for a moment."""


@contextmanager
def standing_still(agent: AgentProcess) -> Iterator[None]:
    """The agent answers nothing meanwhile, so what is saved now is still being saved afterwards."""
    agent.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        agent.signal(signal.SIGCONT)


def wait_for_saved_blocks(agent: AgentProcess, blocks: int) -> None:
    """Returns when the store has them."""
    deadline_s = time.monotonic() + SOON_S
    while (found := agent.stats().saved_blocks) != blocks:
        assert time.monotonic() < deadline_s, f"{found} blocks are saved, not {blocks}"
        time.sleep(0.02)


def checkpoint(engine: EngineHost, model: str, directory: Path) -> Path:
    """A model directory with weights, which engines of several processes need."""
    place = MODELS[model].write(directory)
    engine.call("write_checkpoint", directory=str(place))
    return place


def test_engine_of_its_own_process(engine: EngineHost, agent: AgentProcess, tmp_path: Path) -> None:
    """The default: the engine goes on stepping until its saves have ended, without a request, and before it ends."""
    place = checkpoint(engine, "gemma3", tmp_path)
    prompt = prompt_of("own process", PROMPT_TOKENS)
    with EngineHost(tmp_path, several_processes=True) as several:
        several.open("gemma3", tierkv_connector(agent.socket, role="kv_producer", **PATIENT), place=place)
        with standing_still(agent):
            several.generate([prompt], 1)
            assert not several.reset(), "nothing is being saved"
        assert several.reset_within(SOON_S)
        assert agent.stats().saved_blocks > 0
        answer = several.generate([prompt], ANSWER_TOKENS)
        several.close_engine()  # at once
    turn = prompt + answer[0]["tokens"] + prompt[:90]
    engine.open("gemma3", place=place)
    expected = engine.generate([turn], 8)
    engine.open("gemma3", tierkv_connector(agent.socket), place=place)
    found = engine.generate([turn], 8)
    check_same(found, expected, "second turn")
    assert cached(found) == [(PROMPT_TOKENS + ANSWER_TOKENS - 1) // 32 * 32]


def test_engine_in_this_process(engine: EngineHost, agent: AgentProcess) -> None:
    """VLLM_ENABLE_V1_MULTIPROCESSING=0: nobody steps, so a reset itself waits for the saves that hold blocks."""
    prompt = prompt_of("this process", PROMPT_TOKENS)
    engine.open("llama", tierkv_connector(agent.socket, role="kv_producer", **PATIENT))
    with standing_still(agent):
        engine.generate([prompt], 1)
        assert not engine.reset(), "blocks are given back that nobody has read"
    assert engine.reset(), "the saves end, and nobody asks"
    wait_for_saved_blocks(agent, PROMPT_TOKENS // 32)
    engine.generate([prompt], 1)


def test_all_is_cleared_in_this_process(engine: EngineHost, agent: AgentProcess) -> None:
    """As after a change of weights: when reset_prefix_cache(reset_connector=True) is True, nothing is left."""
    prompts = [prompt_of("cleared", PROMPT_TOKENS)]
    engine.open("llama", tierkv_connector(agent.socket, **PATIENT))
    expected = engine.generate(prompts, 8)
    assert engine.reset_within(SOON_S, connector=True, stepping=True)
    found = engine.generate(prompts, 8)
    check_same(found, expected, "after the reset")
    assert cached(found) == [0]
    engine.settle()
    assert cached(engine.generate(prompts, 8)) == [PROMPT_TOKENS // 32 * 32]


def test_closed_at_once_in_this_process(engine: EngineHost, agent: AgentProcess) -> None:
    """A script that ends when it has its answers: all that was in a step is kept; what only the end of a request makes
    worth keeping, the windows before it, takes one more step, or a reset."""
    prompts = [prompt_of(("at once", index), PROMPT_TOKENS) for index in range(2)]
    end_tokens = (PROMPT_TOKENS + ANSWER_TOKENS - 1) // 32 * 32
    engine.open("gemma3", tierkv_connector(agent.socket))
    answers = engine.generate(prompts[:1], ANSWER_TOKENS)
    engine.open("gemma3", tierkv_connector(agent.socket))
    answers += engine.generate(prompts[1:], ANSWER_TOKENS)
    assert engine.reset()
    engine.open("gemma3", tierkv_connector(agent.socket))
    turns = [prompt + answer["tokens"] + prompt[:90] for prompt, answer in zip(prompts, answers, strict=True)]
    found = cached(engine.generate(turns, 1))
    assert found[0] >= PROMPT_TOKENS // 32 * 32
    assert found[1] == end_tokens
