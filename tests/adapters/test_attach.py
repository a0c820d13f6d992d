"""Finding the agent, or starting one: several engines at once end up at the same one, and it outlives them."""

from __future__ import annotations

import os
import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tierkv.adapters.vllm.attach import Reviver, attach
from tierkv.adapters.vllm.settings import ConnectorSettings, read_settings
from tierkv.agent.client import AgentStore
from tierkv.agent.connection import AgentUnavailable
from tierkv.errors import ConfigError, StorageError
from tierkv.testing.stores import eventually

TIMEOUT_S = 60.0


def settings(directory: Path, **more: object) -> ConnectorSettings:
    return read_settings(
        {"agent": f"unix:{directory}/agent.sock", "dram_bytes": "8MiB", "agent_idle_s": 0.5, **more}
    )


def agents(directory: Path) -> list[psutil.Process]:
    """The agents that serve there."""
    found = []
    for process in psutil.process_iter():
        try:
            if f"{directory}/agent.sock.json" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def ended(directory: Path) -> None:
    """The agent that was started ends by itself, and takes its socket with it."""
    (agent,) = agents(directory)
    agent.wait(TIMEOUT_S)
    assert not (directory / "agent.sock").exists()


def test_of_several_one_starts_the_agent_and_all_find_it(tmp_path: Path) -> None:
    found: list[AgentStore] = []

    def work() -> None:
        found.append(attach(settings(tmp_path), "engine"))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    try:
        assert len(found) == 4
        assert len(agents(tmp_path)) == 1
        assert found[0].stats().client_count == 4
    finally:
        for store in found:
            store.close()
    ended(tmp_path)


def test_an_agent_that_runs_is_used(tmp_path: Path) -> None:
    with attach(settings(tmp_path, agent_idle_s=2), "first"):
        with attach(settings(tmp_path), "second") as second:
            assert second.stats().client_count == 2
        assert len(agents(tmp_path)) == 1
    ended(tmp_path)


def test_without_an_agent_the_error_says_what_to_do(tmp_path: Path) -> None:
    wanted = read_settings({"agent": str(tmp_path / "agent.sock"), "start_agent": False, "agent_wait_s": 0.2})
    with pytest.raises(AgentUnavailable, match=r"tierkv agent --socket .*agent\.sock"):
        attach(wanted, "engine")


def test_an_agent_that_cannot_start_is_an_error_with_its_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wanted = settings(tmp_path, nvme_directory=str(tmp_path / "file" / "below"), nvme_bytes="64MiB")
    with pytest.raises(StorageError, match="last words"):
        attach(wanted, "engine")
    assert not agents(tmp_path)


def test_an_engine_that_kills_all_its_descendants_does_not_kill_the_agent(tmp_path: Path) -> None:
    with attach(settings(tmp_path, agent_idle_s=2), "engine"):
        (agent,) = agents(tmp_path)
        assert agent.pid not in {child.pid for child in psutil.Process().children(recursive=True)}
        assert os.getsid(agent.pid) != os.getsid(0)
    ended(tmp_path)


def test_an_agent_that_was_killed_is_started_again_by_the_next_engine(tmp_path: Path) -> None:
    with attach(settings(tmp_path), "first"):
        (agent,) = agents(tmp_path)
        agent.kill()
        agent.wait(TIMEOUT_S)
    with attach(settings(tmp_path), "second") as store:
        assert store.attached
    ended(tmp_path)


def test_an_agent_that_is_killed_under_a_running_engine_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.adapters.vllm.attach._REVIVE_AFTER_S", 0.2)
    with attach(settings(tmp_path), "first") as first, attach(settings(tmp_path), "second") as second:
        for _ in range(2):
            (agent,) = agents(tmp_path)
            agent.kill()
            agent.wait(TIMEOUT_S)
            eventually(lambda: bool(agents(tmp_path)), "one of them starts another", TIMEOUT_S)
            eventually(lambda: first.attached and second.attached, "both find it", TIMEOUT_S)
            assert len(agents(tmp_path)) == 1
            assert first.stats().client_count == 2
    ended(tmp_path)


def test_where_no_agent_is_to_be_started_none_is(tmp_path: Path) -> None:
    asked: list[float] = []
    with attach(settings(tmp_path), "starts it"):
        store = AgentStore(str(tmp_path / "agent.sock"), when_away=asked.append)
    with store:
        (agent,) = agents(tmp_path)
        agent.kill()
        agent.wait(TIMEOUT_S)
        eventually(lambda: len(asked) > 2, "it is told of the absence", TIMEOUT_S)
        assert asked == sorted(asked)
        assert not agents(tmp_path)


def test_what_cannot_be_started_is_tried_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []
    clock = [100.0]
    monkeypatch.setattr("tierkv.adapters.vllm.attach.time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr("tierkv.adapters.vllm.attach._start_unless_there", lambda *_: tries.append(clock[0]))
    revive = Reviver(settings(tmp_path), tmp_path / "agent.sock")
    for tick in range(6000):
        clock[0] = 100 + tick / 10
        revive(tick / 10)
    pauses = [later - earlier for earlier, later in pairwise(tries)]
    assert tries[0] == pytest.approx(103)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(60, abs=0.2)
    clock[0] += 1000
    revive(2.0)
    assert tries[-1] < clock[0], "it is away for too short a time"
    revive(4.0)
    assert tries[-1] == clock[0]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"agnet": "unix:/x"}, "agnet"),
        ({"lease_s": -1}, "lease_s"),
        ({"sliding_window": "some"}, "sliding_window"),
        ({"dram_bytes": "many"}, "dram_bytes"),
        ({"start_agent": False, "dram_bytes": "1GiB"}, "dram_bytes would only matter"),
    ],
)
def test_a_wrong_setting_is_named(extra: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"kv_connector_extra_config: .*{words}"):
        read_settings(extra)
