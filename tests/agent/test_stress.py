"""The stress test in short, and, marked slow, as long as it is meant to be."""

from __future__ import annotations

import argparse
import os
import signal
import threading
from pathlib import Path

import pytest
from agent_harness import BLOCK_BYTES, agent_config, serving

from tierkv.agent.client import AgentStore
from tierkv.testing import stress
from tierkv.testing.buffers import make_spec, random_hashes
from tierkv.testing.stores import OK, TIMEOUT_S, eventually, in_threads, save

pytestmark = pytest.mark.crash


def options(*arguments: str) -> argparse.Namespace:
    return stress.parser().parse_args(arguments)


def checked(found: stress.Outcome, client_kills: int, agent_kills: int) -> None:
    assert not found.faults
    assert (found.client_kills, found.agent_kills) == (client_kills, agent_kills)
    assert found.loaded > 0
    assert found.saved > 0


def test_a_few_seconds(tmp_path: Path) -> None:
    found = stress.run(
        options("--seconds", "6", "--clients", "3", "--client-kills", "6", "--agent-kills", "1",
                "--directory", str(tmp_path))
    )  # fmt: skip
    checked(found, 6, 1)
    assert not list(tmp_path.iterdir())


def test_faults_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge of the stress test can be trusted: what is stuck, wrong or left behind is said."""

    def misbehave(self: stress.Stress) -> None:
        (self.directory / "forgotten.tmp").write_text("x")
        (self.directory / "reports" / "9").write_text('{"wrong": "1 of 2 blocks"}\n{"wrong": "torn')
        self._clients = [self._start_client()]
        os.kill(self._clients[0].pid, signal.SIGABRT)
        self._clients[0].wait(30.0)

    monkeypatch.setattr(stress.Stress, "_work", misbehave)
    monkeypatch.setattr(stress, "_WAIT_S", 20.0)
    found = stress.run(options("--directory", str(tmp_path)))
    text = "\n".join(found.faults)
    for what in ("forgotten.tmp", "1 of 2 blocks", "ended with status -6"):
        assert what in text
    assert "torn" not in text


def test_a_late_end_says_what_it_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as for half a block, of which nobody will save the rest: it is dropped at its deadline."""

    def save_half(self: stress.Stress) -> None:
        with AgentStore(self.config.socket) as store:
            space = store.open(make_spec(stress.BLOCK_BYTES, parts=2, model="stress-parts"))
            assert save(store, space, random_hashes(1), part=0) == [OK]

    monkeypatch.setattr(stress.Stress, "_work", save_half)
    monkeypatch.setattr(stress, "_SLOW_S", 0.5)
    monkeypatch.setattr(stress, "_SAVE_TIMEOUT_S", 2.0)
    found = stress.run(options("--directory", str(tmp_path), "--seconds", "0"))
    assert not found.faults
    assert any("pending_blocks is 1" in slow for slow in found.slow)


def test_one_descriptor_or_thread_more_is_found(tmp_path: Path) -> None:
    before = stress.Held.by(os.getpid())
    assert not stress.Held.by(os.getpid()).beyond(before)
    end = threading.Event()
    thread = threading.Thread(target=end.wait, args=(stress._WAIT_S,))
    thread.start()
    try:
        with open(tmp_path / "open", "wb"):
            found = stress.Held.by(os.getpid()).beyond(before)
    finally:
        end.set()
        thread.join(stress._WAIT_S)
    assert len(found) == 2
    assert str(tmp_path / "open") in found[0]
    assert f"{before.threads + 1} threads, {before.threads} at" in found[1]


def test_what_an_agent_was_asked_does_not_make_it_start_threads(tmp_path: Path) -> None:
    with serving(agent_config(tmp_path)) as server, AgentStore(server.config.socket) as store:
        before = threading.active_count()
        clients = [AgentStore(server.config.socket) for _ in range(6)]
        spaces = [client.open(make_spec(BLOCK_BYTES)) for client in clients]
        in_threads(
            lambda number: [clients[number].flush(TIMEOUT_S), clients[number].clear(spaces[number])],
            range(6),
        )
        for client in clients:
            client.close()
        eventually(lambda: threading.active_count() <= before, "only what was there at the start is left")
        assert store.attached


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_minute(tmp_path: Path) -> None:
    checked(stress.run(options("--directory", str(tmp_path))), 100, 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_minute_of_dying_agents(tmp_path: Path) -> None:
    checked(
        stress.run(options("--agent-kills", "20", "--client-kills", "30", "--directory", str(tmp_path))),
        30,
        20,
    )
