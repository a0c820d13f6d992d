"""Resets of a cache that others use as well: after new weights, with the agent away, and while requests run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from agent_process import AgentProcess
from engine_host import Answer, EngineHost, tierkv_connector
from engine_models import MODELS
from equality import cached, check_same, prompt_of

SOON_S = 60.0
ANSWER_TOKENS = 8
QUICK = {"lookup_timeout_s": 1, "load_timeout_s": 5, "save_timeout_s": 5}
WEIGHTS = ("base", "updated")
PROMPTS = [prompt_of(("reset", index), 300) for index in range(2)]
Places = dict[str, Path]
"""Directories of the same model with other weights."""
Answers = dict[str, list[Answer]]
"""To PROMPTS, without a store, for each of WEIGHTS."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what all tests here need."""
    return tmp_path_factory.mktemp("weights")


@pytest.fixture
def places(engine: EngineHost, directory: Path) -> Places:
    """For each of WEIGHTS."""
    found = {weights: directory / weights / "llama" for weights in WEIGHTS}
    for weights, place in found.items():
        if not place.exists():
            MODELS["llama"].write(directory / weights)
            engine.inside("engine_inside.write_weights", place=str(place), weights=weights)
    return found


@pytest.fixture(scope="module")
def known() -> Answers:
    """What right_answers() has found."""
    return {}


@pytest.fixture
def right_answers(engine: EngineHost, places: Places, known: Answers) -> Answers:
    """See Answers."""
    for weights, place in places.items():
        if weights not in known:
            engine.open("llama", place=place)
            known[weights] = engine.generate(PROMPTS, ANSWER_TOKENS)
    assert known["base"][0]["tokens"] != known["updated"][0]["tokens"]
    return known


def update(engine: EngineHost, place: Path) -> None:
    """Gives the engine other weights, in place."""
    engine.inside("engine_inside.update_weights", place=str(place))


def wait_until_away(agent: AgentProcess, tier: str) -> None:
    """Returns when a tier of the agent's has no blocks any more."""
    deadline_s = time.monotonic() + SOON_S
    while blocks := agent.stats().tiers[tier].blocks:
        assert time.monotonic() < deadline_s, f"{blocks} blocks are still in {tier}: they are never cleared"
        time.sleep(0.05)


def save_all(engine: EngineHost) -> None:
    """Steps until nothing is being saved; the requests that run go on."""
    deadline_s = time.monotonic() + SOON_S
    while engine.inside("engine_inside.is_saving"):
        assert time.monotonic() < deadline_s, "saves do not end"
        time.sleep(0.02)
        engine.step()


def test_weights_updated_in_place(
    engine: EngineHost, agent: AgentProcess, places: Places, right_answers: Answers
) -> None:
    """An engine that gets other weights forgets what the first have computed, and caches for itself from then on."""
    base, updated = right_answers["base"], right_answers["updated"]
    connector = tierkv_connector(agent.socket)
    engine.open("llama", connector, place=places["base"])
    check_same(engine.generate(PROMPTS, ANSWER_TOKENS), base, "before the update")
    engine.settle()
    update(engine, places["updated"])
    assert engine.reset(connector=True)
    assert agent.stats().tiers["dram"].blocks == 0
    found = engine.generate(PROMPTS, ANSWER_TOKENS)
    check_same(found, updated, "after the update")
    assert cached(found) == [0, 0]
    engine.settle()
    found = engine.generate(PROMPTS, ANSWER_TOKENS)
    check_same(found, updated, "warm after the update")
    assert cached(found) == [288, 288], "the engine does not cache any more"
    engine.settle()
    assert agent.stats().tiers["dram"].blocks > 0

    engine.open("llama", connector, place=places["base"])  # another engine, with the weights of before
    found = engine.generate(PROMPTS, ANSWER_TOKENS)
    check_same(found, base, "another engine with the base weights")
    assert cached(found) == [0, 0], "blocks of other weights are found"
    engine.settle()
    engine.open("llama", connector, place=places["base"])
    found = engine.generate(PROMPTS, ANSWER_TOKENS)
    check_same(found, base, "warm with the base weights")
    assert cached(found) == [288, 288], "what was stored after the other engine's reset is lost"
    engine.close_engine()
    agent.check_idle()


def test_two_resets_beside_another_engine(
    engine: EngineHost, agent: AgentProcess, places: Places, right_answers: Answers, tmp_path: Path
) -> None:
    """Both engines run on: each reset of the one clears its own keyspace, not what the other has stored meanwhile."""
    base, updated = right_answers["base"], right_answers["updated"]
    connector = tierkv_connector(agent.socket)
    engine.open("llama", connector, place=places["base"])
    with EngineHost(tmp_path) as other:
        other.open("llama", connector, place=places["base"])
        update(engine, places["updated"])
        assert engine.reset(connector=True)
        check_same(other.generate(PROMPTS, ANSWER_TOKENS), base, "the other engine")
        other.settle()
        check_same(engine.generate(PROMPTS, ANSWER_TOKENS), updated, "the updated engine")
        engine.settle()
        update(engine, places["base"])
        assert engine.reset(connector=True)
        found = engine.generate(PROMPTS, ANSWER_TOKENS)
        check_same(found, base, "updated once more")
        assert cached(found) == [0, 0]
        engine.settle()
        found = other.generate(PROMPTS, ANSWER_TOKENS)
        check_same(found, base, "the other engine, warm")
        assert cached(found) == [288, 288]
        other.close_engine()
    engine.close_engine()
    agent.check_idle()


def test_reset_with_the_agent_away(engine: EngineHost, tmp_path: Path) -> None:
    """The engine goes on; what could not be cleared is cleared when the agent is back, and never found."""
    prompts = [prompt_of(("away", index), 300) for index in range(2)]
    disk = ("--nvme-dir", str(tmp_path / "nvme"), "--nvme", "1GiB")
    engine.open("llama")
    expected = engine.generate(prompts, ANSWER_TOKENS)
    with AgentProcess(tmp_path, *disk) as agent:
        connector = tierkv_connector(agent.socket, **QUICK)
        engine.open("llama", connector)
        engine.generate(prompts, ANSWER_TOKENS)
        engine.settle()
        agent.end()  # which writes all to the disk
        agent.start()
        assert agent.stats().tiers["nvme"].blocks == 18
        agent.kill()
        assert engine.reset(connector=True), "a pause or sleep would fail"
        found = engine.generate(prompts, ANSWER_TOKENS)
        check_same(found, expected, "with the agent away")
        assert cached(found) == [0, 0]
        engine.settle()

        agent.start()
        wait_until_away(agent, "nvme")
        deadline_s = time.monotonic() + SOON_S
        stored = False
        while not stored:  # the engine saves again from when it has found the agent
            before = agent.stats().saved_blocks
            found = engine.generate(prompts, ANSWER_TOKENS)
            check_same(found, expected, "when the agent is back")
            assert cached(found) == [0, 0], "blocks of before the reset are found"
            engine.settle()
            stored = agent.stats().saved_blocks == before + 18
            assert time.monotonic() < deadline_s, "nothing is stored after the reset"
        found = engine.generate(prompts, ANSWER_TOKENS)
        check_same(found, expected, "warm")
        assert cached(found) == [288, 288]
        engine.settle()
        engine.open("llama", connector)
        assert cached(engine.generate(prompts, ANSWER_TOKENS)) == [0, 0], "another engine finds them"
        engine.close_engine()
        agent.check_idle()


def test_pause_with_a_running_request(engine: EngineHost, agent: AgentProcess) -> None:
    """vLLM's pause in the middle of an answer, with blocks held for the end of the request: all caches are cleared, and
    the answer goes on as if nothing had been."""
    prompt = prompt_of("pause", 300)
    engine.open("gemma3")
    expected = engine.generate([prompt], 400)
    engine.open("gemma3", tierkv_connector(agent.socket))
    engine.add("paused", prompt, 400)
    engine.step(150)
    save_all(engine)
    assert engine.inside("engine_inside.shared_blocks") > 0, "the connector holds nothing"
    engine.inside("engine_inside.pause")
    assert agent.stats().tiers["dram"].blocks == 0
    engine.inside("engine_inside.resume")
    answers = engine.finish()
    check_same([answers["paused"]], expected, "paused and resumed")
    engine.settle()
    turn = prompt + answers["paused"]["tokens"] + prompt[:40]
    found = engine.generate([turn], ANSWER_TOKENS)
    assert cached(found) == [(300 + 399) // 32 * 32], "nothing is kept after a pause"
    engine.open("gemma3")
    check_same(found, engine.generate([turn], ANSWER_TOKENS), "second turn")
    agent.check_idle()


def test_reset_while_a_request_runs(
    engine: EngineHost, agent: AgentProcess, places: Places, right_answers: Answers
) -> None:
    """The engine cannot forget its own blocks then, and computes with those of the old weights: none of that is stored
    by the new ones' name."""
    prompt, updated = PROMPTS[0], right_answers["updated"][:1]
    engine.open("llama", tierkv_connector(agent.socket), place=places["base"])
    engine.generate([prompt], ANSWER_TOKENS)
    engine.settle()
    engine.generate([prompt], ANSWER_TOKENS)  # now the engine has its blocks too
    engine.add("running", prompt_of("running", 100), 200)
    engine.step(5)
    save_all(engine)
    update(engine, places["updated"])
    assert not engine.reset(connector=True), "the engine's own cache could be reset"
    assert agent.stats().tiers["dram"].blocks == 0
    saved = agent.stats().saved_blocks
    engine.add("old", prompt + prompt[:100], 40)
    answers = engine.finish()
    assert answers["old"]["cached"] == 288, "nothing of before is left in the engine"
    assert agent.stats().saved_blocks == saved, "what stands on blocks of before the reset is stored"
    engine.settle()
    found = engine.generate([prompt], ANSWER_TOKENS)
    check_same(found, updated, "once the engine has forgotten too")
    assert cached(found) == [0]
    engine.settle()
    found = engine.generate([prompt], ANSWER_TOKENS)
    check_same(found, updated, "warm")
    assert cached(found) == [288], "the engine does not save any more"
    engine.close_engine()
    agent.check_idle()


def test_many_resets(engine: EngineHost, agent: AgentProcess) -> None:
    """Trainers reset after each of very many steps: names are used again, or agents would know more and more."""
    prompt = prompt_of("many", 100)
    engine.open("llama", tierkv_connector(agent.socket))
    expected = engine.generate([prompt], ANSWER_TOKENS)
    names: list[str] = []
    for round_number in range(40):
        engine.settle()
        assert engine.reset(connector=True)
        names.append(engine.inside("engine_inside.renewal"))
        assert names[-1] not in names[-8:-1], "a name is used again too soon"
        if round_number % 4 == 0:
            found = engine.generate([prompt], ANSWER_TOKENS)
            check_same(found, expected, "after a reset")
            assert cached(found) == [0]
            engine.settle()
            assert cached(engine.generate([prompt], ANSWER_TOKENS)) == [96]
    assert len(set(names)) <= 14
    engine.close_engine()
    agent.check_idle()
