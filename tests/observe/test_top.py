"""`tierkv top` as people run it: once, and live in a terminal, with an agent that goes and comes back."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from observe_harness import TIMEOUT_S, agent_config, some_blocks, some_hashes

from tierkv import cli
from tierkv.agent.client import AgentStore
from tierkv.agent.server import AgentServer
from tierkv.observe.metrics import MetricsServer
from tierkv.testing.buffers import make_spec

WIDTH = 80


def test_once_prints_a_snapshot_without_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = agent_config(tmp_path, nvme_blocks=64)
    with (
        AgentServer(config) as agent,
        MetricsServer(agent) as server,
        AgentStore(config.socket, name="an engine") as client,
    ):
        space = client.open(make_spec(part_bytes=(4096,)))
        assert client.save(space, some_hashes(8), some_blocks(8)[1]).wait(TIMEOUT_S)
        assert client.match(space, some_hashes(8)).length == 8
        # This process's client reads the page first: a client that ends is counted until its session has ended.
        assert cli.main(["top", "--metrics", f"127.0.0.1:{server.port}", "--once"]) == 0
        page = capsys.readouterr().out
        assert cli.main(["top", "--socket", config.socket, "--once"]) == 0
        text = capsys.readouterr().out
    for shown in (text, page):
        assert "\x1b" not in shown
        assert max(len(line) for line in shown.splitlines()) <= WIDTH
        assert re.search(r"^dram .*32/128 KiB +8 ", shown, re.MULTILINE)
        assert re.search(r"^nvme ", shown, re.MULTILINE)
        assert "100.0% of 8 blocks" in shown
        assert "8 stored" in shown
        assert "  ok  " in shown
    assert "an engine" in text
    assert "2 of 64 clients" in text  # this one is attached, too
    assert "1 of 64 clients" in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--socket", "/nowhere/a.sock", "--once"], "start `tierkv agent`"),
        (["--metrics", "http://127.0.0.1:1/metrics", "--once"], "is metrics_port set"),
        (["--metrics", "file:///etc/passwd", "--once"], "--metrics file:///etc/passwd"),
        (["--metrics", "http://", "--once"], "an address such as"),
        (["--socket", "/nowhere/a.sock"], "use --once"),
    ],
)
def test_what_cannot_be_shown_is_explained(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["top", *arguments]) == cli.EXIT_ERROR
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [[], ["--socket", "a", "--metrics", "b"], ["--socket", "a", "--interval", "0"], ["--interval", "x"]],
)
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["top", *arguments])
    assert end.value.code == cli.EXIT_ERROR
    assert "usage" in capsys.readouterr().err


class Terminal:
    """A terminal of 80 columns with `tierkv top` in it."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self._fd = fd
        self._text = ""

    def expect(self, pattern: str) -> str:
        """Reads until what was written since the last call matches; returns it."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not (found := re.search(pattern, self._text, re.DOTALL)):
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"{pattern!r} was not shown: {self._text[-3000:]!r}"
            if select.select([self._fd], [], [], left_s)[0]:
                try:
                    self._text += os.read(self._fd, 1 << 16).decode("utf-8", "replace")
                except OSError as error:  # the other side of the terminal is closed
                    raise AssertionError(f"{pattern!r} was not shown: {self._text[-3000:]!r}") from error
        self._text = self._text[found.end() :]
        return found[0]


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    master, slave = os.openpty()
    environment = {
        **os.environ,
        "TERM": "xterm",
        "COLUMNS": str(WIDTH),
        "LINES": "40",
        "PYTHONIOENCODING": "utf-8",
    }
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "tierkv", "top", "--interval", "0.1", *arguments],
            stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(slave)
    try:
        with process:
            try:
                yield Terminal(process, master)
            finally:
                process.kill()
    finally:
        os.close(master)


def test_live_it_waits_for_an_agent_that_is_gone_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    config = agent_config(tmp_path)
    with terminal("--socket", config.socket) as screen:
        screen.expect(r"no agent.*start `tierkv agent`")
        with AgentServer(config) as agent:
            screen.expect(r"read GB/s.*dram .*nothing asked")
            space = agent.store.open(make_spec(part_bytes=(4096,)))
            assert agent.store.save(space, some_hashes(4), some_blocks(4)[1]).wait(TIMEOUT_S)
            screen.expect(r"16/128 KiB")
        screen.expect(r"agent gone: looking for it.*16/128 KiB")
        with AgentServer(config):
            screen.expect(r"of 64 clients.*0B/128K")
            screen.process.send_signal(signal.SIGINT)
            screen.expect(re.escape("\x1b[?1049l"))  # the terminal is as before
            assert screen.process.wait(TIMEOUT_S) == 0


def test_live_it_watches_a_page_of_metrics(tmp_path: Path) -> None:
    with (
        AgentServer(agent_config(tmp_path)) as agent,
        MetricsServer(agent) as server,
        terminal("--metrics", f"127.0.0.1:{server.port}") as screen,
    ):
        screen.expect(r"read GB/s.*dram ")
        server.stop()
        screen.expect(r"agent gone.*no metrics")
        screen.process.send_signal(signal.SIGTERM)
        screen.expect(re.escape("\x1b[?1049l"))
        assert screen.process.wait(TIMEOUT_S) == cli.EXIT_TERMINATED
