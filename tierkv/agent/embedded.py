"""An agent of one's own: connect() starts a process that serves only this one and ends with it.

The process is told of this one's end by the kernel (a pidfd that it polls), so it goes away after SIGKILL too; the
agent itself then removes its private directory. Where an agent is running already, connect() only attaches to it.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from tierkv.agent.client import AgentStore
from tierkv.agent.signals import open_self
from tierkv.config import MAX_SOCKET_PATH_BYTES, AgentConfig, DramConfig, StoreConfig, validate
from tierkv.errors import ArgumentError, ConfigError, StorageError

SOCKET_NAME = "agent.sock"
CONFIG_NAME = "agent.json"
LOG_NAME = "agent.log"
OWN_FILES = (SOCKET_NAME, f"{SOCKET_NAME}.lock", CONFIG_NAME, LOG_NAME)
"""All that lies in the private directory of such an agent."""
DEFAULT_DRAM_BYTES = 1 << 30
_LOG_LINES = 5
_END_TIMEOUT_S = 10.0

# -c and not -m: the package is found where this process found it, whatever the working directory holds.
_BOOT = "import sys; sys.path.append(sys.argv.pop(1)); from tierkv.cli import main; sys.exit(main())"


def socket_path(address: str) -> str:
    """The path in "unix:PATH" or "PATH"; ArgumentError for anything else."""
    path = address.removeprefix("unix:")
    if not path or path.partition(":")[0] in {"tcp", "http", "https"}:
        raise ArgumentError(f"connect: {address!r} is not an address: write 'unix:PATH', the agent's socket")
    return path


def agent_command(*arguments: str) -> list[str]:
    """The command line of another `tierkv agent` process with this interpreter and this package."""
    place = str(Path(__file__).resolve().parent.parent.parent)
    return [sys.executable, "-P", "-c", _BOOT, place, "agent", *arguments]


class OwnAgentStore(AgentStore):
    """An AgentStore whose agent is a process of its own, which ends with close() or with this process."""

    def __init__(self, agent: OwnAgent, **options: Any) -> None:
        self._agent = agent
        super().__init__(agent.socket, **options)

    @property
    def agent_pid(self) -> int:
        """The process number of the agent."""
        return self._agent.process.pid

    def close(self) -> None:
        """Detaches and ends the agent, which writes what only DRAM holds to the next tier. Idempotent."""
        try:
            super().close()
        finally:
            self._agent.end()


class OwnAgent:
    """The process. StorageError with the last lines of its log when it does not come up in time."""

    def __init__(self, config: StoreConfig, timeout_s: float) -> None:
        self._directory = _private_directory()
        self.socket = str(self._directory / SOCKET_NAME)
        self._config = AgentConfig(store=config, socket=self.socket)
        try:
            self.process = self._start()
            try:
                self._wait_ready(timeout_s)
            except BaseException:
                self.end(0.0)
                raise
        except BaseException:
            self._remove()
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        (self._directory / CONFIG_NAME).write_bytes(msgspec.json.encode(self._config))
        self._ready, told = os.pipe2(os.O_CLOEXEC)
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(os.close, told)
                own_end = open_self()
                stack.callback(os.close, own_end)
                log = stack.enter_context(open(self._directory / LOG_NAME, "ab"))
                return subprocess.Popen(
                    agent_command(
                        "--config", str(self._directory / CONFIG_NAME), "--end-with-fd", str(own_end),
                        "--ready-fd", str(told), "--remove-directory", str(self._directory),
                    ),
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(own_end, told),
                    start_new_session=True,  # a Ctrl-C at the terminal is for us; we end it in our own time
                )  # fmt: skip
        except BaseException as error:
            os.close(self._ready)
            if isinstance(error, OSError):
                raise StorageError(f"connect: no agent could be started: {error}") from error
            raise

    def _wait_ready(self, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(self._ready, select.POLLIN)
        try:
            answered = bool(poll.poll(timeout_s * 1000))
            if answered and os.read(self._ready, 16):
                return
        finally:
            os.close(self._ready)
        why = "ended" if answered else f"did not come up within {timeout_s} s"
        lines = "\n  ".join(self._last_lines()) or "(it logged nothing)"
        raise StorageError(f"connect: the agent {why}; its last words:\n  {lines}")

    def _last_lines(self) -> list[str]:
        try:
            with open(self._directory / LOG_NAME, encoding="utf-8", errors="replace") as file:
                return [line.rstrip() for line in deque(file, maxlen=_LOG_LINES)]
        except OSError:
            return []

    def end(self, drain_s: float | None = None) -> None:
        """Ends the process, after the time that it may take to write DRAM below. Idempotent."""
        if self.process.poll() is None:
            self.process.terminate()
            longest_s = self._config.drain_timeout_s if drain_s is None else drain_s
            try:
                self.process.wait(longest_s + _END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(_END_TIMEOUT_S)
        self._remove()

    def _remove(self) -> None:
        """What the agent removes itself, unless it was killed."""
        for name in OWN_FILES:
            with contextlib.suppress(OSError):
                (self._directory / name).unlink()
        with contextlib.suppress(OSError):
            self._directory.rmdir()


def _private_directory() -> Path:
    for parent in (None, "/tmp"):
        directory = Path(tempfile.mkdtemp(prefix="tierkv-", dir=parent))  # mode 0700
        if len(os.fsencode(directory / SOCKET_NAME)) <= MAX_SOCKET_PATH_BYTES:
            return directory
        directory.rmdir()
    raise ConfigError(f"connect: no directory for the agent's socket has a short enough path: {directory}")


def connect(
    address: str | None = None, *, config: StoreConfig | None = None, timeout_s: float = 30.0, **options: Any
) -> AgentStore:
    """See tierkv.connect()."""
    if address is not None:
        if config is not None:
            raise ArgumentError("connect: an agent that runs has its own settings: leave config away")
        return AgentStore(socket_path(address), **options)
    config = config or StoreConfig(dram=DramConfig(capacity_bytes=DEFAULT_DRAM_BYTES))
    validate(config)
    agent = OwnAgent(config, timeout_s)
    try:
        return OwnAgentStore(agent, **options)
    except BaseException:
        agent.end(0.0)
        raise
