"""Every kind of model: the same answers from the store as from the engine's own prefix cache, and hits as long."""

from __future__ import annotations

import pytest
from agent_process import AgentProcess
from engine_host import Answer, EngineHost, tierkv_connector
from engine_models import MODELS
from equality import EXACT, apart, cached, check_same, prompt_of

LENGTHS = (900, 391, 476)
"""Tokens of the prompts: more than a block of every model, none ends with a block, and one answer crosses into the next
block of 32 (but not of 128: there, a shape-sensitive model would have two right answers)."""
ANSWER_TOKENS = 8
NEW_TOKENS = 150


def check_equal(found: list[Answer], expected: list[Answer], what: str) -> None:
    """The same answers, after hits at least as long."""
    shorter = [one < other for one, other in zip(cached(found), cached(expected), strict=True)]
    assert not any(shorter), (
        f"{what}: {cached(found)}, but {cached(expected)} in the engine's own prefix cache"
    )
    check_same(found, expected, what)


@pytest.mark.parametrize("name", MODELS)
def test_answers_from_the_store(name: str, engine: EngineHost, agent: AgentProcess) -> None:
    """Cold, warm, a second turn, and that turn again after a restart of the engine."""
    model = MODELS[name]
    prompts = [prompt_of((name, length), length) for length in LENGTHS]

    engine.open(name)
    assert sorted(group["kind"] for group in engine.description["groups"]) == sorted(model.groups)
    cold = engine.generate(prompts, ANSWER_TOKENS)
    warm = engine.generate(prompts, ANSWER_TOKENS)
    turns = [
        prompt + answer["tokens"] + prompt_of((name, index), NEW_TOKENS)
        for index, (prompt, answer) in enumerate(zip(prompts, cold, strict=True))
    ]
    second = engine.generate(turns, ANSWER_TOKENS)
    repeated = engine.generate(turns, ANSWER_TOKENS)
    step = engine.step_tokens()
    assert cached(cold) == [0, 0, 0]
    assert cached(warm) == [(length - 1) // step * step for length in LENGTHS]

    connector = tierkv_connector(agent.socket)
    engine.open(name, connector)
    check_equal(engine.generate(prompts, ANSWER_TOKENS), cold, "cold")
    assert engine.external_hits() == 0
    engine.settle()
    found = engine.generate(prompts, ANSWER_TOKENS)
    check_equal(found, warm, "warm")
    if not model.shape_sensitive:
        check_same(found, cold, "warm against cold")
    assert engine.external_hits() == sum(cached(warm))
    engine.settle()
    found = engine.generate(turns, ANSWER_TOKENS)
    check_equal(found, second, "second turn")
    assert engine.external_hits() == sum(cached(warm)) + sum(cached(found))
    engine.settle()

    engine.open(name, connector)
    found = engine.generate(turns, ANSWER_TOKENS)
    check_equal(found, repeated, "after a restart of the engine")
    assert cached(found) == cached(repeated)
    engine.close_engine()
    agent.check_idle()


@pytest.mark.parametrize("name", MODELS)
def test_answers_depend_on_the_loaded_bytes(name: str, engine: EngineHost, agent: AgentProcess) -> None:
    """The control: what an engine with other weights has stored gives other answers. Else nothing above proves much."""
    prompts = [prompt_of(("control", name, length), length) for length in LENGTHS]
    connector = tierkv_connector(agent.socket)
    engine.open(name, connector, weights="other")
    engine.generate(prompts, ANSWER_TOKENS)
    engine.settle()
    engine.open(name)
    engine.generate(prompts, ANSWER_TOKENS)
    expected = engine.generate(prompts, ANSWER_TOKENS)
    engine.open(name, connector)
    found = engine.generate(prompts, ANSWER_TOKENS)
    assert cached(found) == cached(expected)
    assert [answer["tokens"] for answer in found] != [answer["tokens"] for answer in expected]
    assert apart(found, expected) > 100 * EXACT
