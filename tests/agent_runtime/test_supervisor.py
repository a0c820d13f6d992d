"""The supervisor's decisions, with small scripts in place of the agent: restart, give up, forget, end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tierkv.agent import supervisor
from tierkv.agent.signals import StopSignals
from tierkv.agent.supervisor import EXIT_GIVEN_UP, MAX_DEATHS, TRIES_WITH_DRAM, Supervisor
from tierkv.config import AgentConfig, DramConfig, StoreConfig

CHILD = """
import os, signal, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
log = open({log!r}, "a")
count = len(open({log!r}).readlines())
log.write(str(os.fstat(int(given["--arena-fd"])).st_ino) + "\\n")
log.close()
def ready():
    os.write(int(given["--ready-fd"]), b"ready")
{script}
"""
Run = Callable[[str], tuple[int, list[str], list[str]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a supervisor over a script: (status, arena of each child, what systemd was told)."""
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(supervisor, "LAST_PAUSE_S", 0.002)
    log = tmp_path / "children"
    told: list[str] = []
    store = StoreConfig(dram=DramConfig(capacity_bytes=1 << 20, huge_pages="off"))
    config = AgentConfig(store=store, socket=str(tmp_path / "s"), drain_timeout_s=0.1)

    def run(script: str) -> tuple[int, list[str], list[str]]:
        code = CHILD.format(log=str(log), script=script)
        monkeypatch.setattr(supervisor, "agent_command", lambda *given: [sys.executable, "-c", code, *given])
        log.touch()
        with StopSignals() as signals, Supervisor(config, [], signals, told.append) as found:
            status = found.run()
        return status, log.read_text().split(), told

    return run


def test_an_orderly_end_is_the_end(run: Run) -> None:
    status, children, told = run("ready()")
    assert (status, len(children), told) == (0, 1, ["READY=1"])


def test_a_failure_before_it_ever_served_is_reported_and_not_repeated(run: Run) -> None:
    status, children, told = run("sys.exit(2)")
    assert (status, len(children), told) == (2, 1, [])


def test_one_that_dies_after_serving_is_started_again_with_the_same_memory(run: Run) -> None:
    status, children, told = run("ready(); count < 3 and os.kill(os.getpid(), signal.SIGKILL)")
    assert (status, len(children), told) == (0, 4, ["READY=1"])
    assert len(set(children)) == 1


def test_one_that_keeps_dying_is_given_up(run: Run) -> None:
    status, children, _ = run("ready(); sys.exit(7)")
    assert (status, len(children)) == (EXIT_GIVEN_UP, MAX_DEATHS + 1)
    assert len(set(children)) == 1


def test_memory_that_no_agent_can_start_with_is_replaced(run: Run) -> None:
    script = f"count <= {TRIES_WITH_DRAM} and count and sys.exit(1); ready(); count or sys.exit(1)"
    status, children, _ = run(script)
    assert status == 0
    assert len(children) == TRIES_WITH_DRAM + 2
    assert len(set(children[:-1])) == 1
    assert children[-1] != children[0]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_child_in_order(run: Run, how: int) -> None:
    script = (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); ready(); "
        f"os.kill(os.getppid(), {int(how)}); signal.pause()"
    )
    status, children, told = run(script)
    assert (status, len(children), told) == (0, 1, ["READY=1", "STOPPING=1"])


def test_a_child_that_does_not_end_is_killed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_END_TIMEOUT_S", 0.3)
    script = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); "
        f"os.kill(os.getppid(), {int(signal.SIGTERM)})\nwhile True: signal.pause()"
    )
    status, children, told = run(script)
    assert (status, len(children), told) == (EXIT_GIVEN_UP, 1, ["READY=1", "STOPPING=1"])


def test_no_descriptor_is_left(run: Run) -> None:
    before = len(os.listdir("/proc/self/fd"))
    run("ready(); count < 2 and sys.exit(1)")
    assert len(os.listdir("/proc/self/fd")) == before
