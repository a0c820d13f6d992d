"""EngineProcess: whatever becomes of the process, the call ends, says what happened, and leaves nothing behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from tierkv.adapters.engine_process import EngineProcess
from tierkv.errors import StorageError
from tierkv.testing.stores import eventually

TIMEOUT_S = 60.0
CHILD = """
import os, subprocess, sys, time
from tierkv.adapters.engine_process import serve

class Commands:
    def add(self, numbers):
        return sum(numbers)
    def echo(self, text):
        return text
    def divide(self, by):
        return 1 / by
    def unspeakable(self):
        return object()
    def hang(self):
        time.sleep(1000)
    def end(self, status):
        print("last words", flush=True)
        os._exit(status)
    def start(self):
        return subprocess.Popen(["sleep", "1000"]).pid

serve(Commands(), int(sys.argv[1]), int(sys.argv[2]))
if os.environ.get("TEST_LINGER"):
    time.sleep(1000)
"""


class Child(EngineProcess):
    def __init__(self, directory: Path, program: str = CHILD, **variables: str) -> None:
        self.was_late = 0
        super().__init__(
            [sys.executable, "-c", program], directory / "log", {**os.environ, **variables}, directory
        )

    def late(self) -> None:
        self.was_late += 1


def test_commands_are_answered_and_errors_are_answers(tmp_path: Path) -> None:
    with Child(tmp_path) as child:
        assert child.call("add", TIMEOUT_S, numbers=[1, 2, 3]) == 6
        with pytest.raises(StorageError, match=r"divide: (.|\n)*ZeroDivisionError"):
            child.call("divide", TIMEOUT_S, by=0)
        with pytest.raises(StorageError, match="TypeError"):
            child.call("unspeakable", TIMEOUT_S)
        with pytest.raises(StorageError, match="AttributeError"):
            child.call("nothing", TIMEOUT_S)
        assert child.call("add", TIMEOUT_S, numbers=[]) == 0
        assert child.end() == 0
        assert not child.alive
        assert child.end() == 0
    assert (tmp_path / "log").read_text().count("--- add") == 2


def test_lines_may_be_longer_than_a_pipe_holds(tmp_path: Path) -> None:
    text = "x" * (3 << 20)
    with Child(tmp_path) as child:
        assert child.call("echo", TIMEOUT_S, text=text) == text


def test_an_end_is_told_with_the_last_words(tmp_path: Path) -> None:
    with Child(tmp_path) as child:
        with pytest.raises(StorageError, match=r"end: the process has ended with 3\n(.|\n)*last words"):
            child.call("end", TIMEOUT_S, status=3)
        with pytest.raises(StorageError, match="add: the process has ended with 3"):
            child.call("add", TIMEOUT_S, numbers=[1])
        assert child.was_late == 0


def test_a_command_that_takes_too_long_fails_and_its_process_can_be_killed(tmp_path: Path) -> None:
    with Child(tmp_path) as child:
        below = psutil.Process(child.call("start", TIMEOUT_S))
        with pytest.raises(StorageError, match=r"hang took longer than 0.05 s"):
            child.call("hang", 0.05)
        assert child.was_late == 1
        child.kill()
        assert not child.alive
        eventually(
            lambda: not below.is_running() or below.status() == psutil.STATUS_ZOMBIE, "its child is gone"
        )


def test_a_process_that_does_not_listen_holds_nobody_up(tmp_path: Path) -> None:
    with Child(tmp_path, "import time; time.sleep(1000)") as child:
        with pytest.raises(StorageError, match="echo took longer"):
            child.call("echo", 0.05, text="x" * (3 << 20))
        child.kill()


def test_one_that_does_not_end_by_itself_is_killed(tmp_path: Path) -> None:
    with Child(tmp_path, TEST_LINGER="1") as child:
        assert child.call("add", TIMEOUT_S, numbers=[1]) == 1
        child.end_timeout_s = 0.05
        assert child.end() is None
        assert not child.alive


def test_a_program_that_is_not_there_leaves_no_pipe_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        EngineProcess([str(tmp_path / "nothing")], tmp_path / "log", {})
    assert len(os.listdir("/proc/self/fd")) == before
