"""An agent for engines: a process that a test starts, kills, and starts again at the same socket."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType

import tierkv
from tierkv.agent.embedded import agent_command
from tierkv.agent.statistics import AgentStats
from tierkv.testing.processes import stand_still

START_TIMEOUT_S = 30.0
END_TIMEOUT_S = 60.0


class AgentProcess:
    """`tierkv agent` at a socket of its own."""

    def __init__(self, directory: Path, *arguments: str, dram: str = "512MiB") -> None:
        self.directory = directory
        self.socket = directory / "agent.sock"
        self._arguments = ("--dram", dram, *arguments)
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Starts it, and returns when it serves."""
        assert self.process is None
        ready, told = os.pipe()
        try:
            with open(self.directory / "agent.log", "ab") as log:
                self.process = subprocess.Popen(
                    agent_command("--socket", str(self.socket), "--ready-fd", str(told), *self._arguments),
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(told,),
                )  # fmt: skip
            os.close(told)
            told = -1
            poll = select.poll()
            poll.register(ready, select.POLLIN)
            came_up = poll.poll(START_TIMEOUT_S * 1000) and os.read(ready, 16)
            assert came_up, f"no agent came up: {self.log()}"
        finally:
            os.close(ready)
            if told >= 0:
                os.close(told)

    def log(self) -> str:
        """What it said."""
        return (self.directory / "agent.log").read_text(errors="replace")

    def signal(self, number: int) -> None:
        """Sends it a signal; after SIGKILL and SIGTERM it is gone."""
        assert self.process is not None
        if number == signal.SIGSTOP:
            stand_still(self.process.pid)
            return
        self.process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.process.wait(END_TIMEOUT_S)
            self.process = None

    def kill(self) -> None:
        """As a crash: what only DRAM held is lost."""
        self.signal(signal.SIGKILL)

    def end(self) -> None:
        """Ends it in order; DRAM is written to the next tier."""
        if self.process is not None:
            self.signal(signal.SIGTERM)

    def stats(self) -> AgentStats:
        """Its statistics."""
        with tierkv.connect(f"unix:{self.socket}") as store:
            return store.stats()

    def check_idle(self, timeout_s: float = 20.0) -> AgentStats:
        """Its statistics, once it has no client but us; AssertionError if anything is still held then."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            stats = self.stats()
            held = {
                "clients": stats.client_count - 1, "leases": stats.leases, "pins": stats.pins,
                "pending blocks": stats.pending_blocks, "reserved bytes": stats.reserved_bytes,
                "leased bytes": stats.leased_bytes,
            }  # fmt: skip
            if not any(held.values()):
                return stats
            assert time.monotonic() < deadline_s, f"the engine is gone, yet the agent holds {held}"
            time.sleep(0.05)

    def loaded_blocks(self) -> int:
        """Blocks that the agent's tiers have delivered so far, as the store counts them."""
        return sum(tier.hit_blocks for tier in self.stats().tiers.values())

    def __enter__(self) -> AgentProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.end()
