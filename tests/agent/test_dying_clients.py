"""Real client processes that are killed or stopped: what they held comes back, and others never notice."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from agent_harness import BLOCK_BYTES, agent_config, check_serves, check_settled, serving, store_config

from tierkv.agent.client import AgentStore
from tierkv.agent.server import AgentServer
from tierkv.clock import VirtualClock
from tierkv.testing.buffers import chain_hashes, make_spec, part_payload, random_hashes
from tierkv.testing.processes import stand_still
from tierkv.testing.stores import MISS, OK, TIMEOUT_S, eventually, load, save

pytestmark = pytest.mark.crash
CHILD = Path(__file__).parent / "client_child.py"


class Child:
    """A client process."""

    def __init__(self, what: str, path: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), what, path, *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=CHILD.parent,
        )  # fmt: skip

    def line(self) -> str:
        """What it says next."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self) -> None:
        """Lets it go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def child(what: str, path: str, *arguments: object) -> Iterator[Child]:
    made = Child(what, path, *arguments)
    try:
        yield made
    finally:
        made.kill()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def server(tmp_path: Path, clock: VirtualClock) -> Iterator[AgentServer]:
    with serving(agent_config(tmp_path, store_config(tmp_path, 16, save_timeout_s=10.0)), clock) as server:
        yield server


@pytest.mark.parametrize("point", ["before", "amid", "after"])
def test_reserved_slots_come_back_whole_and_clean(server: AgentServer, point: str) -> None:
    path = server.config.socket
    with child(point, path, 1) as victim:
        assert victim.line().split()[0] in {"reserved", "writing", "written"}
        stats = server.store.stats()
        assert (stats.pins, stats.pending_blocks) == (4, 4)
        (session,) = server.sessions()
        assert session.reserved_bytes == 4 * BLOCK_BYTES
        victim.kill()
        check_settled(server)
    with AgentStore(path) as other:
        space, hashes = other.open(make_spec(BLOCK_BYTES)), random_hashes(4, 1)
        assert load(other, space, hashes) == [MISS] * 4, "blocks that were not written whole were found"
        assert save(other, space, hashes) == [OK] * 4
        assert load(other, space, hashes) == [OK] * 4
    assert check_settled(server).tiers["dram"].blocks == 4


def test_leases_and_acquired_blocks_come_back(server: AgentServer) -> None:
    path = server.config.socket
    with child("hold", path, 2) as victim:
        assert victim.line() == "held"
        assert server.store.stats().leases == 2
        victim.kill()
        check_settled(server)
    with AgentStore(path) as other:
        assert load(other, other.open(make_spec(BLOCK_BYTES)), random_hashes(4, 2)) == [OK] * 4


def test_half_a_message(server: AgentServer) -> None:
    with child("half", server.config.socket) as victim:
        assert victim.line() == "half"
        victim.kill()
        eventually(lambda: not server.sessions(), "the session ends")
    check_settled(server)
    check_serves(server.config.socket)


def test_clients_killed_at_work_leave_nothing_and_disturb_nobody(tmp_path: Path) -> None:
    config = agent_config(tmp_path, store_config(tmp_path, 32, 128))
    with serving(config) as server:
        with AgentStore(config.socket, call_timeout_s=10.0) as other:
            space = other.open(make_spec(BLOCK_BYTES, model="other"))
            for turn in range(4):
                with (
                    child("work", config.socket, turn) as first,
                    child("work", config.socket, turn + 50) as second,
                ):
                    assert first.line() == second.line() == "working"
                    hashes = chain_hashes(100 + turn, 12)
                    first.kill()
                    assert save(other, space, hashes) == [OK] * 12
                    second.kill()
                    assert load(other, space, hashes) == [OK] * 12
        check_settled(server)


def test_a_late_writer_reaches_no_block_but_its_own(server: AgentServer, clock: VirtualClock) -> None:
    """Stopped beyond its deadline: the block is given up, its slots are nobody's until the writer is done."""
    path = server.config.socket
    with child("late", path, 3) as late:
        line = late.line()
        assert line.startswith("written")
        offsets = {int(word) for word in line.split()[1:]}
        stand_still(late.process.pid)
        clock.advance(11.0)
        eventually(lambda: server.store.stats().pending_blocks == 0, "the late client's blocks are given up")
        (session,) = server.sessions()
        assert session.reserved_bytes == 4 * BLOCK_BYTES
        with AgentStore(path, call_timeout_s=10.0) as other:
            space, late_hashes = other.open(make_spec(BLOCK_BYTES)), random_hashes(4, 3)
            assert load(other, space, late_hashes) == [MISS] * 4
            others = random_hashes(16, 4)
            save(other, space, others)
            (masks,) = other.lookup([(space, others)])
            assert np.count_nonzero(masks) == 12, "slots that a late writer can reach were given out"
            assert other.match(space, others).length >= 9, "a chain lost its head to its own tail"
            late.process.send_signal(signal.SIGCONT)
            late.tell()
            assert late.line() == "committed 7 7 7 7", "a commit after the deadline is CANCELLED"
            stored = np.ascontiguousarray(others[masks != 0])
            assert load(other, space, stored) == [OK] * 12
            assert load(other, space, late_hashes) == [MISS] * 4
            # The slots are free for others now.
            assert save(other, space, late_hashes) == [OK] * 4
            assert load(other, space, late_hashes) == [OK] * 4
            view = server.store.arena.view()
            reused = [
                bytes(view[offset : offset + BLOCK_BYTES])
                in {part_payload(space, row.tobytes(), 0) for row in late_hashes}
                for offset in sorted(offsets)
            ]
            view.release()
            assert all(reused)
    check_settled(server)


def test_a_late_writer_that_is_killed_gives_its_slots_back(server: AgentServer, clock: VirtualClock) -> None:
    path = server.config.socket
    with child("late", path, 5) as late:
        assert late.line().startswith("written")
        stand_still(late.process.pid)
        clock.advance(11.0)
        eventually(lambda: server.store.stats().pending_blocks == 0, "the late client's blocks are given up")
        late.kill()
    check_settled(server)
    with AgentStore(path, call_timeout_s=10.0) as other:
        assert save(other, other.open(make_spec(BLOCK_BYTES)), random_hashes(16, 6)) == [OK] * 16
