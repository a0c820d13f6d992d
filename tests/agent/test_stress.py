"""The stress test in short, and, marked slow, as long as it is meant to be."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import pytest

from tierkv.testing import stress

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
