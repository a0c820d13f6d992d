"""What the agent's tests share: an agent in this process, a raw client that may misbehave, and an agent process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from tierkv.agent.channel import Channel
from tierkv.agent.client import AgentStore
from tierkv.agent.embedded import agent_command
from tierkv.agent.protocol import ANSWERS, REFUSAL, REQUESTS, Kind, decode_body, encode
from tierkv.agent.server import AgentServer
from tierkv.clock import Clock
from tierkv.config import AgentConfig, DramConfig, NvmeConfig, StoreConfig
from tierkv.keys import KeyspaceSpec
from tierkv.memory import Arena, capacity_for, slot_bytes_for
from tierkv.store import StoreStats
from tierkv.testing.processes import stand_still
from tierkv.testing.stores import TIMEOUT_S, eventually

BLOCK_BYTES = 4096


def store_config(
    directory: Path,
    dram_blocks: int = 32,
    nvme_blocks: int = 0,
    block_bytes: int = BLOCK_BYTES,
    **options: Any,
) -> StoreConfig:
    """Tiers with room for so many blocks."""
    slab_bytes = 8 * slot_bytes_for(block_bytes)
    dram = DramConfig(
        capacity_bytes=capacity_for(dram_blocks, block_bytes, slab_bytes), slab_bytes=slab_bytes,
        huge_pages="off", lock_memory="off", first_touch="never", free_ahead=0.0,
    )  # fmt: skip
    nvme = NvmeConfig(
        directory=str(directory / "nvme"), capacity_bytes=capacity_for(max(1, nvme_blocks), block_bytes, slab_bytes),
        slab_bytes=slab_bytes, sync="process",
    )  # fmt: skip
    return StoreConfig(dram=dram, nvme=nvme if nvme_blocks else None, staging_bytes=slab_bytes, **options)


def agent_config(directory: Path, store: StoreConfig | None = None, **options: Any) -> AgentConfig:
    """An agent at directory/agent.sock."""
    return AgentConfig(
        store=store or store_config(directory),
        socket=str(directory / "agent.sock"),
        **{"drain_timeout_s": TIMEOUT_S, **options},
    )


@contextmanager
def serving(config: AgentConfig, clock: Clock | None = None) -> Iterator[AgentServer]:
    """An agent in this process."""
    server = AgentServer(config, clock=clock)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def check_settled(server: AgentServer) -> StoreStats:
    """Waits until the agent holds nothing for anybody; checks slots against blocks of one slot each."""

    def still() -> bool:
        stats = server.store.stats()
        busy = stats.pins or stats.pending_blocks or stats.leases or stats.save_queue_blocks
        return not busy and not any(s.reserved_bytes or s.leased_bytes for s in server.sessions())

    eventually(still, "pins, leases, reservations and queues become empty")
    server.store._core.index.check()
    stats = server.store.stats()
    assert stats.tiers["dram"].used_bytes == stats.tiers["dram"].blocks * slot_bytes_for(BLOCK_BYTES)
    return stats


def check_serves(path: str) -> None:
    """Another client is served as if nothing had happened."""
    from tierkv.testing.buffers import make_spec, random_hashes
    from tierkv.testing.stores import OK, load, save

    with AgentStore(path, name="well-behaved") as store:
        space, hashes = store.open(make_spec(BLOCK_BYTES, model="well-behaved")), random_hashes(2)
        assert save(store, space, hashes) == [OK] * 2
        assert load(store, space, hashes) == [OK] * 2


class RawClient:
    """A client without manners: sends what it is told, in the order it is told."""

    def __init__(self, path: str, *, greet: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect(path)
        self.channel = Channel(self.socket, send_timeout_s=TIMEOUT_S)
        self.arena: Arena | None = None
        self.aside: Arena | None = None
        self._last_request = 0
        if greet:
            self.send(encode(Kind.HELLO, 0, REQUESTS[Kind.HELLO], ("raw",)))
            header, body, fds = self.receive(max_fds=2)
            assert header.kind == Kind.ANSWER
            _, arena_bytes, aside_bytes, *_ = decode_body(ANSWERS[Kind.HELLO], body)
            self.arena = Arena.attach(fds[0], arena_bytes)
            self.aside = Arena.attach(fds[1], aside_bytes)
            for fd in fds:
                os.close(fd)

    def send(self, data: bytes | Sequence[bytes | memoryview]) -> None:
        """Sends bytes as they are; Disconnected when the agent has hung up."""
        self.channel.send([data] if isinstance(data, bytes) else data, patient=True)

    def receive(self, max_fds: int = 0) -> Any:
        return self.channel.receive(wait_s=TIMEOUT_S, message_s=TIMEOUT_S, max_fds=max_fds)

    def ask(self, kind: Kind, *values: Any) -> list[Any]:
        """A request and its answer. AssertionError with its text if it is refused."""
        answer = self.try_ask(kind, *values)
        assert not isinstance(answer, str), answer
        return answer

    def try_ask(self, kind: Kind, *values: Any) -> list[Any] | str:
        """The answer's fields, or "Error: message" of a refusal."""
        self._last_request += 1
        self.send(encode(kind, self._last_request, REQUESTS[kind], values))
        header, body, _ = self.receive()
        assert header.request == self._last_request
        if header.kind == Kind.REFUSAL:
            return ": ".join(decode_body(REFUSAL, body))
        return decode_body(ANSWERS[kind], body)

    def open(self, spec: KeyspaceSpec) -> int:
        (number,) = self.ask(Kind.OPEN, spec.canonical().decode())
        return int(number)

    def write(self, offset: int, data: bytes) -> None:
        """Writes into the arena, as a client does into the slots that it was granted."""
        assert self.arena is not None
        view = self.arena.view(offset, len(data))
        view[:] = data
        view.release()

    def read(self, offset: int, size_bytes: int) -> bytes:
        assert self.arena is not None
        view = self.arena.view(offset, size_bytes)
        try:
            return bytes(view)
        finally:
            view.release()

    def hung_up(self) -> bool:
        """Whether the agent ends the connection; reads away what it still answers."""
        from tierkv.agent.channel import Disconnected

        try:
            while True:
                self.receive()
        except Disconnected as reason:
            return "slow" not in str(reason)

    def close(self) -> None:
        self.channel.close()
        for arena in (self.arena, self.aside):
            if arena is not None:
                arena.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AgentProcess:
    """A real `tierkv agent` process."""

    def __init__(self, directory: Path, config: AgentConfig) -> None:
        self.config_path = directory / "agent.json"
        self.config_path.write_bytes(msgspec.json.encode(config))
        self.process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        """Starts it and waits until it serves."""
        self.process = subprocess.Popen(
            agent_command("--config", str(self.config_path), "--log-level", "warning"),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("serving"), f"the agent did not start: {line!r}"

    def kill(self, how: int = signal.SIGKILL) -> int:
        """Ends it by a signal and waits; its status."""
        assert self.process is not None
        assert self.process.stdout is not None
        self.process.send_signal(how)
        status = self.process.wait(TIMEOUT_S)
        self.process.stdout.close()
        return status

    def signal(self, how: int) -> None:
        assert self.process is not None
        if how == signal.SIGSTOP:
            stand_still(self.process.pid)
        else:
            self.process.send_signal(how)

    def __enter__(self) -> AgentProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()
        elif self.process.stdout is not None:
            self.process.stdout.close()


def offsets_of(answer: list[Any]) -> list[int]:
    """The arena offsets in an answer of RESERVE or ACQUIRE."""
    return [int(offset) for offset in np.asarray(answer[2])]
