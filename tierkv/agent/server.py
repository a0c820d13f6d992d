"""AgentServer: owns a store and the Unix socket at which clients attach, a thread for each.

Start-up refuses what would go wrong later: a socket path that another agent serves, a directory that others can
write. Shutdown ends the sessions, writes below what only DRAM holds, and removes the socket.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tierkv.agent.channel import Channel
from tierkv.agent.protocol import REFUSAL, Kind, encode
from tierkv.agent.session import Session
from tierkv.agent.statistics import MAX_CLIENTS_LISTED, AgentStats, ClientStats, version
from tierkv.clock import Clock
from tierkv.config import AgentConfig
from tierkv.errors import LockedError, StorageError
from tierkv.memory import Roster
from tierkv.store import Store

log = logging.getLogger("tierkv.agent")

_BACKLOG = 64
_CREDENTIALS = struct.Struct("3i")
_SLOW_THREADS = 4
_JOIN_TIMEOUT_S = 10.0


class AgentServer:
    """The agent of one host. Use start() and stop(), or as a context manager."""

    def __init__(
        self, config: AgentConfig, *, clock: Clock | None = None, roster: Roster | None = None
    ) -> None:
        """Opens the socket and the tiers. LockedError if another agent serves the socket or owns a directory.

        `roster` is of DRAM that a supervisor keeps; it is closed with the store.
        """
        self.config = config
        self._clock = clock
        self._path = Path(config.socket)
        self._lock_file = self._take_socket()
        try:
            dram = msgspec.structs.replace(config.store.dram, shared=True)
            self.store = Store(msgspec.structs.replace(config.store, dram=dram), clock=clock, roster=roster)
            try:
                self._listener = self._listen()
            except BaseException:
                self.store.close(0)
                raise
        except BaseException:
            os.close(self._lock_file)
            raise
        try:
            self._slow = _started_pool(_SLOW_THREADS)
        except BaseException:
            self._listener.close()
            self.store.close(0)
            os.close(self._lock_file)
            raise
        self._lock = threading.Lock()
        self._sessions: dict[Session, threading.Thread] = {}
        self._stopping = threading.Event()
        self._started_s = time.time()
        self._alone_since_s = time.monotonic()
        self._accepting = threading.Thread(target=self._accept, name="tierkv-accept", daemon=True)

    # Start and stop

    def start(self) -> None:
        """Begins to accept clients."""
        self._accepting.start()
        log.info("serving %s, arena %d bytes", self._path, self.store.arena.size_bytes)

    def stop(self) -> None:
        """Ends the sessions and closes the store, writing DRAM below within drain_timeout_s. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._accepting.is_alive():
            self._accepting.join(_JOIN_TIMEOUT_S)
        self._listener.close()
        with self._lock:
            sessions = dict(self._sessions)
        for session in sessions:
            session.interrupt()
        deadline_s = time.monotonic() + _JOIN_TIMEOUT_S
        for thread in sessions.values():
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self._slow.shutdown(wait=False, cancel_futures=True)
        self.store.close(self.config.drain_timeout_s)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        os.close(self._lock_file)
        log.info("ended")

    def __enter__(self) -> AgentServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_idle(self, idle_s: float, wait: Callable[[float], bool]) -> bool:
        """Waits until no client was attached for idle_s; False if wait(timeout_s) said before that it is over."""
        while True:
            with self._lock:
                alone_s = 0.0 if self._sessions else time.monotonic() - self._alone_since_s
            if alone_s >= idle_s:
                return True
            if wait(idle_s - alone_s):
                return False

    # Insight

    def sessions(self) -> list[Session]:
        """The clients that are attached now."""
        with self._lock:
            return list(self._sessions)

    def stats(self) -> AgentStats:
        """What the store did and holds, and what the clients hold."""
        stats = self.store.stats()
        clients = [
            ClientStats(
                name=session.name, reserved_bytes=session.reserved_bytes, leased_bytes=session.leased_bytes
            )
            for session in self.sessions()
        ]
        clients.sort(key=lambda client: client.reserved_bytes + client.leased_bytes, reverse=True)
        return AgentStats(
            **{name: getattr(stats, name) for name in stats.__struct_fields__},
            version=version(),
            started_s=self._started_s,
            accepting=self.healthy(),
            client_count=len(clients),
            max_clients=self.config.max_clients,
            reserved_bytes=sum(client.reserved_bytes for client in clients),
            leased_bytes=sum(client.leased_bytes for client in clients),
            clients=clients[:MAX_CLIENTS_LISTED],
        )

    def healthy(self) -> bool:
        """Whether clients can be served."""
        return self._accepting.is_alive() and not self._stopping.is_set()

    # The socket

    def _take_socket(self) -> int:
        """Locks the socket's path for this process; returns the lock's descriptor."""
        parent = self._path.parent
        if not parent.is_dir():
            raise StorageError(
                f"{parent}: the socket's directory does not exist: make it, or choose another socket"
            )
        if parent.stat().st_mode & stat.S_IWOTH and not parent.stat().st_mode & stat.S_ISVTX:
            raise StorageError(
                f"{parent}: everybody can write there and could replace the socket: chmod o-w {parent}"
            )
        place = f"{self._path}.lock"
        try:
            lock = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StorageError(f"{place}: cannot be made: {error.strerror}; choose another socket") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise LockedError(
                    f"{self._path}: another agent serves this socket: stop it, or choose another"
                ) from None
            raise
        return lock

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISSOCK(self._path.lstat().st_mode):
                    raise StorageError(f"{self._path}: is there and is not a socket: choose another path")
                self._path.unlink()  # of an agent that was killed: we hold its lock
            # Nobody connects before listen(), so the mode is right before anybody can.
            listener.bind(str(self._path))
            self._path.chmod(0o600 if not self.config.allowed_uids else 0o666)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise StorageError(f"{self._path}: cannot be served: {error.strerror}") from error
        except BaseException:
            listener.close()
            raise
        return listener

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._stopping.is_set():
                    return
                log.error("a client could not be accepted: %s", error.strerror)
                self._stopping.wait(0.1)  # out of descriptors, say: others may end meanwhile
                continue
            try:
                self._attach(connection)
            except Exception:  # accepting must go on
                log.exception("a client could not be attached")
                connection.close()

    def _attach(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
        channel = Channel(connection, send_timeout_s=self.config.send_timeout_s)
        refusal = None
        if uid not in (os.geteuid(), *self.config.allowed_uids):
            refusal = f"user {uid} may not attach: run as user {os.geteuid()}, or add it to allowed_uids"
        with self._lock:
            if len(self._sessions) >= self.config.max_clients:
                refusal = f"{len(self._sessions)} clients are attached, which is the limit: raise max_clients"
            if refusal is None:
                session = Session(
                    self.store, self.config, channel, f"pid {pid}", self._slow, self.stats, self._clock
                )
                thread = threading.Thread(
                    target=self._serve, args=(session,), name=f"tierkv-{pid}", daemon=True
                )
                self._sessions[session] = thread
        if refusal is not None:
            log.warning("pid %d: refused: %s", pid, refusal)
            with contextlib.suppress(Exception):
                channel.send(encode(Kind.REFUSAL, 0, REFUSAL, ("LimitError", refusal)))
            channel.close()
            return
        try:
            thread.start()
        except RuntimeError:  # no thread to be had
            with self._lock:
                self._sessions.pop(session, None)
            raise

    def _serve(self, session: Session) -> None:
        try:
            session.run()
        finally:
            with self._lock:
                self._sessions.pop(session, None)
                self._alone_since_s = time.monotonic()


def _started_pool(threads: int) -> ThreadPoolExecutor:
    """A pool whose threads all run from the start: what an agent holds must not depend on what it was asked for, or
    its growth would look like a leak."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="tierkv-slow")
    all_there = threading.Barrier(threads)
    try:
        for _ in range(threads):  # none is idle before the last has started, so each call starts one
            pool.submit(all_there.wait, _JOIN_TIMEOUT_S)
    except BaseException:  # no thread to be had
        all_there.abort()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    return pool
