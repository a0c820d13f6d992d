"""Processes of the benchmark: engines and services, each with a log, each ended by its own process id."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tierkv.adapters.engine_process import EngineProcess, log_tail

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 60.0
OPEN_TIMEOUT_S = 240.0
CALL_TIMEOUT_S = 300.0
_PROGRAMS = Path(__file__).resolve().parent.parent
"""Where this package lies: engines find it there too."""


class BenchError(Exception):
    """An engine or a service failed or did not answer; with the end of its log."""


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


class Engine(EngineProcess):
    """One vLLM engine in a process of its own."""

    end_timeout_s = END_TIMEOUT_S

    def __init__(self, python: str, log: Path, environment: Mapping[str, str]) -> None:
        given = {**os.environ, **environment, "PYTHONPATH": str(_PROGRAMS)}
        super().__init__([python, "-m", "peers.engine_child"], log, given, log.parent)

    def failure(self, what: str) -> Exception:
        return BenchError(f"{what}\n{log_tail(self.log)}")

    def write_model(self, directory: Path) -> None:
        """Makes the model directory."""
        self.call("write_model", CALL_TIMEOUT_S, directory=str(directory))

    def open(self, model: Path, arguments: Mapping[str, Any], connector: Mapping[str, Any] | None) -> float:
        """Starts the engine; how many seconds that took."""
        took_s: float = self.call(
            "open", OPEN_TIMEOUT_S, model=str(model), arguments=arguments, connector=connector
        )
        return took_s

    def turn(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """Runs one request to its end: ttft_ms, tokens and cached (prompt tokens that were not computed)."""
        answer: dict[str, Any] = self.call("turn", CALL_TIMEOUT_S, prompt=prompt, max_tokens=max_tokens)
        return answer

    def lose(self, least_s: float) -> None:
        """Waits until what was computed is saved, and empties the engine's own prefix cache."""
        self.call("lose", CALL_TIMEOUT_S, least_s=least_s, timeout_s=CALL_TIMEOUT_S / 2)
