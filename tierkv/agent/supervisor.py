"""Supervisor: holds DRAM, and starts the agent that serves it again whenever it dies.

A small process of one thread. It makes the arena and its roster as memfds, which its child, the agent itself,
inherits. Signals are passed on; the child ends when this process ends, however that happens, since it watches it.
A child that keeps dying is given up.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec

from tierkv.agent.embedded import agent_command
from tierkv.agent.signals import StopSignals, open_self
from tierkv.config import AgentConfig
from tierkv.memory import Arena, create_roster

log = logging.getLogger("tierkv.supervisor")

MAX_DEATHS = 10
DEATHS_WITHIN_S = 300.0
"""More deaths than this within this time: the agent is given up."""
FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 10.0
TRIES_WITH_DRAM = 3
"""So often an agent may fail to start with what its predecessor left before that is forgotten."""
EXIT_GIVEN_UP = 1
_END_TIMEOUT_S = 30.0


class Supervisor:
    """Runs agents one after the other. `told` is called with READY=1, once, and STOPPING=1."""

    def __init__(
        self, config: AgentConfig, arguments: Sequence[str], signals: StopSignals, told: Callable[[str], None]
    ) -> None:
        """`arguments` of `tierkv agent` for the child. ConfigError and StorageError where memory cannot be had."""
        self._config = config
        self._arguments = arguments
        self._signals = signals
        self._told = told
        self._ready = False
        self._served = False
        self._resources = ExitStack()
        self._make_memory()

    def _make_memory(self) -> None:
        """A new arena and roster, instead of those there were."""
        self._resources.close()
        try:
            dram = self._config.store.dram
            # The agent locks and touches it: that belongs to the process that uses it.
            arena = Arena.create(
                dram.capacity_bytes,
                shared=True,
                huge_pages=dram.huge_pages,
                lock_memory="off",
                first_touch="never",
                name="tierkv-dram",
            )
            self._resources.callback(arena.close)
            assert arena.fd is not None  # it is shared
            for note in arena.notes:
                log.warning("%s", note)
            self._arena_fd = arena.fd
            self._roster_fd = create_roster(dram.capacity_bytes)
            self._resources.callback(os.close, self._roster_fd)
            settings = os.memfd_create("tierkv-settings", os.MFD_CLOEXEC)  # a file would outlive a SIGKILL
            self._resources.callback(os.close, settings)
            os.pwrite(settings, msgspec.json.encode(self._config), 0)
            self._settings_fd = settings
            self._own_end = open_self()
            self._resources.callback(os.close, self._own_end)
        except BaseException:
            self._resources.close()
            raise

    def run(self) -> int:
        """Until a signal, or the child's own orderly end; the exit status."""
        deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self._signals.started()
        never_served = 0
        while not self._signals.stopped:
            started_s = time.monotonic()
            status = self._run_child()
            if status == 0 or self._signals.stopped:
                return max(0, status)
            if not self._ready:
                return status if status > 0 else EXIT_GIVEN_UP  # it has said what is wrong
            never_served = 0 if self._served else never_served + 1
            if never_served == TRIES_WITH_DRAM:
                log.error("the agent does not start with the DRAM that is kept: it starts with an empty one")
                self._make_memory()
            now_s = time.monotonic()
            if len(deaths) == MAX_DEATHS and now_s - deaths[0] < DEATHS_WITHIN_S:
                log.error("the agent died %d times within %g s: giving up", MAX_DEATHS + 1, now_s - deaths[0])
                return EXIT_GIVEN_UP
            deaths.append(now_s)
            lately = sum(now_s - death_s < DEATHS_WITHIN_S for death_s in deaths)
            pause_s = min(LAST_PAUSE_S, FIRST_PAUSE_S * 2 ** (lately - 1))
            log.error(
                "the agent died after %.1f s (%s); it is started again in %g s, with its DRAM",
                now_s - started_s,
                f"signal {-status}" if status < 0 else f"status {status}",
                pause_s,
            )
            self._signals.wait(timeout_s=pause_s)
        return 0

    def _run_child(self) -> int:
        """Starts an agent and waits for its end: its exit status, or minus the signal that killed it."""
        self._served = False
        reader, writer = os.pipe2(os.O_CLOEXEC)
        inherited = {
            "--settings-fd": self._settings_fd,
            "--arena-fd": self._arena_fd,
            "--roster-fd": self._roster_fd,
            "--end-with-fd": self._own_end,
            "--ready-fd": writer,
        }
        pairs = [text for name, fd in inherited.items() for text in (name, str(fd))]
        try:
            child = subprocess.Popen(
                agent_command(*self._arguments, *pairs),
                pass_fds=list(inherited.values()),
                start_new_session=True,  # a Ctrl-C at the terminal comes to us, and we pass it on
            )
        finally:
            os.close(writer)
        with ExitStack() as stack:
            ended = os.pidfd_open(child.pid)
            stack.callback(os.close, ended)
            stack.callback(os.close, reader)
            return self._watch(child, ended, reader)

    def _watch(self, child: subprocess.Popen[bytes], ended: int, reader: int) -> int:
        watched = [ended, reader]
        while True:
            found = self._signals.wait(watched)
            if reader in found:
                watched.remove(reader)
                self._served = bool(os.read(reader, 16))
                if self._served and not self._ready:
                    self._ready = True
                    self._told("READY=1")
            if self._signals.stopped:
                self._told("STOPPING=1")
                child.send_signal(signal.SIGTERM)
                try:
                    return child.wait(self._config.drain_timeout_s + _END_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    log.error("the agent does not end: killing it")
                    child.kill()
                    child.wait(_END_TIMEOUT_S)
                    return EXIT_GIVEN_UP
            if ended in found:
                return child.wait(_END_TIMEOUT_S)

    def close(self) -> None:
        """Gives the memory up. Idempotent."""
        self._resources.close()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
