"""Finding the node agent, or starting one.

All processes of an engine, and all engines of a host, come here with the same socket; of those that find nobody there,
one starts the agent, and the others wait for it. The agent is a process of its own that outlives them.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from tierkv.adapters.vllm.agent_options import AgentOptions
from tierkv.agent.client import AgentStore
from tierkv.agent.connection import AgentUnavailable
from tierkv.agent.embedded import agent_command, socket_path
from tierkv.config import AgentConfig
from tierkv.errors import StorageError

log = logging.getLogger("tierkv.vllm")

_PAUSE_S = 0.05
_LOG_TAIL_BYTES = 2000
_LEAVE_TIMEOUT_S = 30.0
_REVIVE_AFTER_S = 3.0
"""How long an agent is away before a running engine starts another."""
_REVIVE_WAIT_S = 5.0
_LONGEST_PAUSE_S = 60.0
_LEAVE = "import os, sys; os.fork() and os._exit(0); os.execv(sys.argv[1], sys.argv[1:])"
"""A process that leaves its child, the agent, to init: engines kill whatever descends from them when they end."""


def attach(settings: AgentOptions, name: str, *, revive: bool = True, **options: Any) -> AgentStore:
    """A client of the agent at the settings' socket; AgentUnavailable when there is none within agent_wait_s.

    With start_agent and `revive`, the client also starts one when the agent goes away later. options: for AgentStore.
    """
    path = socket_path(settings.socket())
    if settings.start_agent and revive:
        options["when_away"] = Reviver(settings, Path(path))
    deadline_s = time.monotonic() + settings.agent_wait_s
    while True:
        try:
            return AgentStore(path, name=name, **options)
        except AgentUnavailable as error:
            if time.monotonic() >= deadline_s:
                hint = (
                    "see the agent's log beside the socket"
                    if settings.start_agent
                    else "start_agent is false"
                )
                raise AgentUnavailable(
                    f"{error} Waited {settings.agent_wait_s:g} s ({hint}): start one with `tierkv agent --socket "
                    f"{path} --dram SIZE`, or name its socket in {settings.where}: agent"
                ) from error
        if settings.start_agent:
            _start_unless_there(settings, Path(path), deadline_s)
        threading.Event().wait(_PAUSE_S)  # nobody could wake us: the agent is another's process


class Reviver:
    """Starts the agent again that went away while an engine runs. For AgentStore's when_away.

    Not at once: whoever else started it may be about to do so. And ever more rarely, while it does not stay.
    """

    def __init__(self, settings: AgentOptions, socket: Path) -> None:
        self._settings = settings
        self._socket = socket
        self._pause_s = _REVIVE_AFTER_S
        self._last_s = -math.inf

    def __call__(self, away_s: float) -> None:
        """See AgentStore."""
        now_s = time.monotonic()
        if away_s < _REVIVE_AFTER_S or now_s - self._last_s < self._pause_s:
            return
        lately = now_s - self._last_s < 2 * _LONGEST_PAUSE_S
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s) if lately else _REVIVE_AFTER_S
        self._last_s = now_s
        log.warning("%s: the agent does not come back: starting one", self._socket)
        _start_unless_there(self._settings, self._socket, now_s + _REVIVE_WAIT_S)


def _start_unless_there(settings: AgentOptions, socket: Path, deadline_s: float) -> None:
    """Starts an agent at the socket if nobody else does; returns when one is there, or at the deadline."""
    socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if socket.parent.stat().st_uid != os.getuid():
        raise StorageError(
            f"{socket.parent} belongs to another user: name a socket of yours in {settings.where}: agent"
        )
    with open(f"{socket}.start", "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # somebody is at it; the caller looks again
        try:
            AgentStore(str(socket), name="looking").close()
            return
        except AgentUnavailable:
            pass
        config = AgentConfig(
            store=settings.store(), socket=str(socket), end_when_idle_s=settings.agent_idle_s or None
        )
        place = Path(f"{socket}.json")
        place.write_bytes(msgspec.json.encode(config))
        ready, told = os.pipe2(os.O_CLOEXEC)
        command = agent_command("--config", str(place), "--ready-fd", str(told))
        try:
            with open(f"{socket}.log", "ab") as words:
                subprocess.run(
                    [sys.executable, "-P", "-c", _LEAVE, *command],
                    stdin=subprocess.DEVNULL, stdout=words, stderr=words, pass_fds=(told,), start_new_session=True,
                    cwd="/", timeout=_LEAVE_TIMEOUT_S, check=True,
                )  # fmt: skip
            os.close(told)
            told = -1
            poll = select.poll()
            poll.register(ready, select.POLLIN)
            answered = bool(poll.poll(max(1.0, deadline_s - time.monotonic()) * 1000))
            if answered and os.read(ready, 16):
                log.info("started an agent at %s (its log: %s.log)", socket, socket)
                return
        except (OSError, subprocess.SubprocessError) as error:
            raise StorageError(f"no agent can be started for {socket}: {error}") from error
        finally:
            os.close(ready)
            if told >= 0:
                os.close(told)
        raise StorageError(f"the agent for {socket} did not come up; its last words:\n{_tail(socket)}")


def _tail(socket: Path) -> str:
    try:
        return Path(f"{socket}.log").read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
    except OSError as error:
        return str(error)


def process_name(what: str) -> str:
    """How this process shows in the agent's list of clients."""
    return f"vllm {what} {os.getpid()} {Path(sys.argv[0]).name}"[:100]
