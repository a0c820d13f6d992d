"""Finding the agent, or starting one: several engines at once end up at the same one, and it outlives them."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from tierkv.adapters.vllm import attach as module
from tierkv.adapters.vllm.attach import attach
from tierkv.adapters.vllm.settings import ConnectorSettings, read_settings
from tierkv.agent.client import AgentStore
from tierkv.agent.connection import AgentUnavailable
from tierkv.errors import ConfigError, StorageError

TIMEOUT_S = 60.0


def settings(directory: Path, **more: object) -> ConnectorSettings:
    return read_settings(
        {"agent": f"unix:{directory}/agent.sock", "dram_bytes": "8MiB", "agent_idle_s": 0.5, **more}
    )


def ended() -> None:
    """All agents that were started here end by themselves, with status 0."""
    while module._started:
        assert module._started.pop().wait(TIMEOUT_S) == 0


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
        assert len(module._started) == 1
        assert found[0].stats().client_count == 4
    finally:
        for store in found:
            store.close()
    ended()


def test_an_agent_that_runs_is_used(tmp_path: Path) -> None:
    with attach(settings(tmp_path, agent_idle_s=2), "first"):
        with attach(settings(tmp_path), "second") as second:
            assert second.stats().client_count == 2
        assert len(module._started) == 1
    ended()


def test_without_an_agent_the_error_says_what_to_do(tmp_path: Path) -> None:
    wanted = read_settings({"agent": str(tmp_path / "agent.sock"), "start_agent": False, "agent_wait_s": 0.2})
    with pytest.raises(AgentUnavailable, match=r"tierkv agent --socket .*agent\.sock"):
        attach(wanted, "engine")


def test_an_agent_that_cannot_start_is_an_error_with_its_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wanted = settings(tmp_path, nvme_directory=str(tmp_path / "file" / "below"), nvme_bytes="64MiB")
    with pytest.raises(StorageError, match="last words"):
        attach(wanted, "engine")
    assert module._started.pop().wait(TIMEOUT_S) != 0


def test_an_agent_that_was_killed_is_started_again_by_the_next_engine(tmp_path: Path) -> None:
    with attach(settings(tmp_path), "first"):
        process = module._started.pop()
        os.kill(process.pid, signal.SIGKILL)
        process.wait(TIMEOUT_S)
    with attach(settings(tmp_path), "second") as store:
        assert store.attached
    ended()


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
    with pytest.raises(ConfigError, match=words):
        read_settings(extra)
