"""EngineProcess: an engine in a process of its own, told by lines of JSON what to do; and serve(), that process's side.

Commands and answers have pipes of their own, so whatever an engine prints goes to its log. Every wait has a timeout,
and what fails is said with the end of the log. The process and those that it starts are ended by its id.

Not thread-safe: one command at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tierkv.errors import StorageError

VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_COLOR": "0",
}
"""For a vLLM that runs in the process that is driven, on any cores, and asks nobody on the network for anything."""
_LOG_BYTES = 6000
_KILL_TIMEOUT_S = 60.0


def log_tail(log: Path) -> str:
    """The last of what a process said."""
    with open(log, "rb") as words:
        words.seek(max(0, log.stat().st_size - _LOG_BYTES))
        return words.read().decode(errors="replace")


class EngineProcess:
    """See the module. Subclasses have the commands as methods, and may say what failures are."""

    end_timeout_s = 60.0
    """How long it may take to end by itself once its commands have ended."""

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str], cwd: Path | None = None
    ) -> None:
        """Starts `command`, with the numbers of its two pipes as the last arguments, which it hands to serve().

        `environment` is all of it. The log is appended to.
        """
        self.log = log
        self._pending = b""
        theirs, self._commands = os.pipe()
        self._answers, theirs_too = os.pipe()
        os.set_blocking(self._commands, False)
        try:
            with open(log, "ab") as words:
                self.process = subprocess.Popen(
                    [*command, str(theirs), str(theirs_too)], stdin=subprocess.DEVNULL, stdout=words, stderr=words,
                    env=environment, cwd=cwd, pass_fds=(theirs, theirs_too), start_new_session=True,
                )  # fmt: skip
        except BaseException:
            self.release()
            raise
        finally:
            os.close(theirs)
            os.close(theirs_too)

    # Commands

    def call(self, name: str, timeout_s: float, /, **arguments: Any) -> Any:
        """One command's result: a method of what serve() was given. failure() if it raised, ended or is late."""
        if self._commands < 0:
            raise self.failure(f"{name}: it takes no commands any more: one was late, or it was ended")
        deadline_s = time.monotonic() + timeout_s
        line = json.dumps({"name": name, "arguments": arguments}).encode() + b"\n"
        while line:
            self._wait(self._commands, select.POLLOUT, deadline_s, name, timeout_s)
            try:
                line = line[os.write(self._commands, line) :]
            except BrokenPipeError:
                raise self._ended(name) from None
        while b"\n" not in self._pending:
            self._wait(self._answers, select.POLLIN, deadline_s, name, timeout_s)
            piece = os.read(self._answers, 1 << 20)
            if not piece:
                raise self._ended(name)
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise self.failure(f"{name}: {answer['error']}")
        return answer["result"]

    def _wait(self, end: int, event: int, deadline_s: float, name: str, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(end, event)
        if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            self.late()
            self._close_commands()  # its answer may still come: nobody must take it for another's
            raise self.failure(f"{name} took longer than {timeout_s:g} s")

    def _ended(self, name: str) -> Exception:
        try:
            status = str(self.process.wait(self.end_timeout_s))
        except subprocess.TimeoutExpired:
            status = "no status yet"
        return self.failure(f"{name}: the process has ended with {status}")

    def failure(self, what: str) -> Exception:
        """What to raise for it, with the end of the log."""
        return StorageError(f"{what}\n--- end of {self.log}:\n{log_tail(self.log)}")

    def late(self) -> None:
        """Called when a command takes too long, before its failure() is raised."""

    # Ending

    @property
    def alive(self) -> bool:
        """Whether it can take commands."""
        return self.process.poll() is None

    def end(self) -> int | None:
        """Ends the commands, and with them the process; one that takes too long is killed. Its exit status, None if
        it was killed here. Idempotent."""
        self._close_commands()
        status: int | None = None
        try:
            status = self.process.wait(self.end_timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self.release()
        return status

    def kill(self) -> None:
        """Ends the process and those that it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(_KILL_TIMEOUT_S)

    def release(self) -> None:
        """Closes the pipes. Idempotent."""
        self._close_commands()
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1

    def _close_commands(self) -> None:
        if self._commands >= 0:
            os.close(self._commands)
            self._commands = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def serve(target: object, commands: int, answers: int) -> None:
    """Calls `target`'s methods as the other end of the pipes says, until that closes.

    What a method raises is its answer. The log says which command is at work.
    """
    with open(commands, encoding="utf-8") as lines, open(answers, "w", encoding="utf-8") as replies:
        for line in lines:
            command = json.loads(line)
            sys.stderr.write(f"--- {command['name']}\n")
            sys.stderr.flush()
            try:
                answer = json.dumps({"result": getattr(target, command["name"])(**command["arguments"])})
            except Exception:
                answer = json.dumps({"error": traceback.format_exc()})
            replies.write(answer + "\n")
            replies.flush()
