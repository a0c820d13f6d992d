"""What goes wrong below the engine: agents die or stall, blocks are damaged. It costs hits, never an answer."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_process import AgentProcess
from engine_host import EngineHost, tierkv_connector
from equality import cached, check_same, prompt_of

WAITING = "WAITING_FOR_REMOTE_KVS"
BACK_TIMEOUT_S = 40.0
QUICK = {"lookup_timeout_s": 1, "load_timeout_s": 5, "save_timeout_s": 5}
"""Short deadlines, for tests that let them pass."""
MODELS = ["llama", "gemma3", "nemotron_h"]
"""One group, whose failed blocks are named one by one; several, whose failed loads are reported by request; states."""


def prompts_of(kind: str, *lengths: int) -> list[list[int]]:
    """One prompt a length."""
    return [prompt_of((kind, index), length) for index, length in enumerate(lengths)]


def wait_for_hits(engine: EngineHost, prompts: list[list[int]]) -> None:
    """Until the prompts are found again, once the agent is back; they are stored again on the way."""
    deadline_s = time.monotonic() + BACK_TIMEOUT_S
    while True:
        found = engine.generate(prompts, 8)
        engine.settle()
        if all(cached(found)):
            return
        assert time.monotonic() < deadline_s, "the agent is back, yet nothing is found any more"


@pytest.mark.parametrize("model", MODELS)
def test_agent_dies_and_comes_back(model: str, engine: EngineHost, agent: AgentProcess) -> None:
    """SIGKILL between requests, then in the middle of some: all are answered; a new agent is picked up."""
    prompts = prompts_of("dies", 700, 420)
    others = prompts_of("others", 650, 390)
    engine.open(model)
    expected = engine.generate(prompts, 8)
    expected_others = engine.generate(others, 8)
    engine.open(model, tierkv_connector(agent.socket, **QUICK))
    check_same(engine.generate(prompts, 8), expected, "before")
    engine.settle()

    agent.kill()
    found = engine.generate(prompts, 8)
    check_same(found, expected, "without an agent")
    assert cached(found) == [0, 0]
    engine.settle()
    agent.start()
    wait_for_hits(engine, prompts)

    engine.add("one", prompts[0], 8)
    engine.add("two", others[0], 8)
    engine.step(2)
    agent.kill()
    engine.add("three", others[1], 8)
    answers = engine.finish()
    check_same([answers["one"]], expected[:1], "killed in the middle")
    check_same([answers["two"], answers["three"]], expected_others, "killed in the middle")
    engine.settle()
    agent.start()
    wait_for_hits(engine, others)
    check_same(engine.generate(others, 8), expected_others, "after all")
    engine.settle()
    engine.close_engine()
    agent.check_idle()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("model", MODELS)
def test_agent_dies_under_loads(model: str, policy: str, engine: EngineHost, agent: AgentProcess) -> None:
    """What was promised does not come: recomputed, or reported as the policy says; the engine goes on either way."""
    prompts = prompts_of("loads", 700, 420)
    engine.open(model)
    expected = engine.generate(prompts, 8)
    engine.open(model, tierkv_connector(agent.socket, policy=policy, **QUICK))
    engine.generate(prompts, 8)
    engine.settle()

    engine.hold_loads()
    for index, prompt in enumerate(prompts):
        engine.add(f"request {index}", prompt, 8)
    assert engine.step_until("request 0", WAITING)
    assert engine.step_until("request 1", WAITING)
    agent.kill()
    assert engine.release_loads() >= 2
    answers = engine.finish()
    found = [answers[f"request {index}"] for index in range(len(prompts))]
    if policy == "recompute":
        check_same(found, expected, "recomputed")
    else:
        assert [answer["reason"] for answer in found] == ["error", "error"]
    engine.settle()
    check_same(engine.generate(prompts, 8), expected, "afterwards")


@pytest.fixture
def agent_on_disk(tmp_path: Path) -> Iterator[AgentProcess]:
    """An agent with DRAM and a directory."""
    with AgentProcess(tmp_path, "--nvme-dir", str(tmp_path / "nvme"), "--nvme", "1GiB") as process:
        yield process


def damage(directory: Path) -> int:
    """Changes a byte in each 4 KiB of what is stored in files; how many."""
    changed = 0
    for path in directory.rglob("*"):
        if not path.is_file() or path.suffix == ".mdb" or "catalog" in path.name:
            continue
        with open(path, "r+b") as file:
            size = path.stat().st_size
            for offset in range(0, size, 4096):
                file.seek(offset + 100)
                before = file.read(1)
                if before not in (b"", b"\0"):
                    file.seek(offset + 100)
                    file.write(bytes([before[0] ^ 0x40]))
                    changed += 1
    return changed


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("model", MODELS)
def test_damaged_blocks(model: str, policy: str, engine: EngineHost, agent_on_disk: AgentProcess) -> None:
    """Blocks come back from the disk after the agent's restart; damaged ones are found out and never used."""
    prompts = prompts_of("damage", 700, 420)
    connector = tierkv_connector(agent_on_disk.socket, policy=policy)
    engine.open(model)
    expected = engine.generate(prompts, 8)
    engine.open(model, connector)
    engine.generate(prompts, 8)
    engine.settle()
    engine.close_engine()
    agent_on_disk.end()

    agent_on_disk.start()
    engine.open(model, connector)
    found = engine.generate(prompts, 8)
    check_same(found, expected, "from disk")
    assert all(cached(found))
    engine.close_engine()
    agent_on_disk.end()

    assert damage(agent_on_disk.directory / "nvme")
    agent_on_disk.start()
    engine.open(model, connector)
    found = engine.generate(prompts, 8)
    if policy == "recompute":
        check_same(found, expected, "damaged")
    else:
        assert [answer["reason"] for answer in found] == ["error", "error"]
    assert agent_on_disk.stats().corrupt_blocks > 0
    engine.settle()
    check_same(engine.generate(prompts, 8), expected, "afterwards")
    engine.settle()
    found = engine.generate(prompts, 8)
    check_same(found, expected, "stored anew")
    assert all(cached(found))


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_prefix_of_a_failed_synchronous_load(
    policy: str, engine: EngineHost, agent_on_disk: AgentProcess
) -> None:
    """Such a load's blocks are in the engine's own cache before they are there. When they turn out not to come, nobody
    who shares the prefix may go on with them: not beside the load, not right after it, and not from the store."""
    prompts = [prompt_of(("prefix", index), 400) for index in range(3)]
    turns = [prompt[:300] + prompt_of(("another", index), 150) for index, prompt in enumerate(prompts)]
    settings = {
        "load_async": False,
        "lookup_wait_s": 0.1,
    }  # so that look-ups are answered in the step that asks
    connector = tierkv_connector(agent_on_disk.socket, policy=policy, **settings)
    engine.open("llama")
    expected, expected_turns = engine.generate(prompts, 8), engine.generate(turns, 8)
    engine.open("llama", connector)
    engine.generate(prompts, 8)
    engine.settle()
    engine.close_engine()
    agent_on_disk.end()
    assert damage(agent_on_disk.directory / "nvme")
    agent_on_disk.start()

    engine.open("llama", connector)
    engine.add("load 0", prompts[0], 8)
    engine.add("beside", turns[0], 8)
    for index in (1, 2):
        engine.add(f"load {index}", prompts[index], 8)
        engine.step_until(f"load {index}", "RUNNING")
        if index == 2:
            engine.abort("load 2")  # nobody computes it
        engine.add(f"after {index}", turns[index], 8)
    answers = engine.finish()
    assert agent_on_disk.stats().corrupt_blocks > 0
    loads = [answers["load 0"], answers["load 1"]]
    if policy == "recompute":
        check_same(loads, expected[:2], "recomputed")
        check_same([answers["beside"]], expected_turns[:1], "beside a load that failed")
    else:
        assert [answer["reason"] for answer in loads] == ["error", "error"]
        if answers["beside"]["reason"] != "error":  # the policy may take those that share the blocks along
            check_same([answers["beside"]], expected_turns[:1], "beside a load that failed")
    found = [answers["after 1"], answers["after 2"]]
    check_same(found, expected_turns[1:], "right after a load that failed")
    check_same(engine.generate(turns, 8), expected_turns, "from the engine's own cache")
    for what in ("stored anew", "warm"):
        engine.settle()
        found = engine.generate([*prompts, *turns], 8)
        check_same(found, [*expected, *expected_turns], what)
    assert all(cached(found))


def test_agent_stalls(engine: EngineHost, agent: AgentProcess) -> None:
    """SIGSTOP: look-ups, loads and saves end by their deadlines; SIGCONT: hits again."""
    prompts = prompts_of("stalls", 700, 420)
    engine.open("llama")
    expected = engine.generate(prompts, 8)
    engine.open("llama", tierkv_connector(agent.socket, **QUICK))
    engine.generate(prompts, 8)
    engine.settle()
    agent.signal(signal.SIGSTOP)
    try:
        begun_s = time.monotonic()
        check_same(engine.generate(prompts, 8, timeout_s=60), expected, "while it stands still")
        assert time.monotonic() - begun_s < 30
        engine.settle(60)
    finally:
        agent.signal(signal.SIGCONT)
    wait_for_hits(engine, prompts)
    check_same(engine.generate(prompts, 8), expected, "afterwards")
