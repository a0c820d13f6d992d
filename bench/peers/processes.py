"""Processes of the benchmark: engines and services, each with a log, each ended by its own process id."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 60.0
OPEN_TIMEOUT_S = 240.0
CALL_TIMEOUT_S = 300.0
_LOG_BYTES = 3000
_PROGRAMS = Path(__file__).resolve().parent.parent
"""Where this package lies: engines find it there too."""


class BenchError(Exception):
    """An engine or a service failed or did not answer; with the end of its log."""


def log_tail(log: Path) -> str:
    """The last of what a process said."""
    return log.read_bytes()[-_LOG_BYTES:].decode(errors="replace")


def free_port() -> int:
    """A TCP port that is free on loopback now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Service:
    """A process that serves until it is ended."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        ready: Callable[[], bool],
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Starts it and returns when `ready` says so. BenchError if it ends, or is not ready in time."""
        self._log = log
        with open(log, "ab") as words:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=words, stderr=words, cwd=cwd, start_new_session=True,
                env={**os.environ, **(environment or {})},
            )  # fmt: skip
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not ready():
            status = self.process.poll()
            if status is not None or time.monotonic() > deadline_s:
                self.end()
                raise BenchError(f"{command[0]} did not come up ({status}):\n{log_tail(log)}")
            time.sleep(0.05)

    def end(self) -> None:
        """Ends it in order, and at once if that takes too long."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(END_TIMEOUT_S)

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class Engine:
    """One vLLM engine in a process of its own."""

    def __init__(self, python: str, log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        self._pending = b""
        self._replies, replies_end = os.pipe()
        try:
            with open(log, "ab") as words:
                self.process = subprocess.Popen(
                    [python, "-m", "peers.engine_child", str(replies_end)], stdin=subprocess.PIPE,
                    stdout=words, stderr=words, pass_fds=(replies_end,), start_new_session=True,
                    env={**os.environ, **environment, "PYTHONPATH": str(_PROGRAMS)}, cwd=log.parent,
                )  # fmt: skip
        finally:
            os.close(replies_end)

    def write_model(self, directory: Path) -> None:
        """Makes the model directory."""
        self._call("write_model", CALL_TIMEOUT_S, directory=str(directory))

    def open(self, model: Path, arguments: Mapping[str, Any], connector: Mapping[str, Any] | None) -> float:
        """Starts the engine; how many seconds that took."""
        took_s: float = self._call(
            "open", OPEN_TIMEOUT_S, model=str(model), arguments=arguments, connector=connector
        )
        return took_s

    def turn(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """Runs one request to its end: ttft_ms, tokens and cached (prompt tokens that were not computed)."""
        answer: dict[str, Any] = self._call("turn", CALL_TIMEOUT_S, prompt=prompt, max_tokens=max_tokens)
        return answer

    def lose(self, least_s: float) -> None:
        """Waits until what was computed is saved, and empties the engine's own prefix cache."""
        self._call("lose", CALL_TIMEOUT_S, least_s=least_s, timeout_s=CALL_TIMEOUT_S / 2)

    def _call(self, name: str, timeout_s: float, /, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"name": name, "arguments": arguments}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise BenchError(f"{name}: the engine has ended:\n{log_tail(self._log)}") from None
        reply = json.loads(self._line(name, timeout_s))
        if "error" in reply:
            raise BenchError(f"{name}: {reply['error']}\n{log_tail(self._log)}")
        return reply["result"]

    def _line(self, name: str, timeout_s: float) -> bytes:
        deadline_s = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._replies, select.POLLIN)
        while b"\n" not in self._pending:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                raise BenchError(f"{name} took longer than {timeout_s} s:\n{log_tail(self._log)}")
            piece = os.read(self._replies, 1 << 20)
            if not piece:
                raise BenchError(f"{name}: the engine has ended:\n{log_tail(self._log)}")
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def end(self) -> None:
        """Ends the engine, and with it what its process started."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(END_TIMEOUT_S)
        os.close(self._replies)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
