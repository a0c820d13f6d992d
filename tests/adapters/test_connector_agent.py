"""The connector over real stores: a small agent with evictions, and one that is killed and comes back."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
from connector_harness import Rig, chunked, full, recurrent, window

from tierkv.adapters.vllm.finder import Finder
from tierkv.agent.client import AgentStore
from tierkv.agent.embedded import agent_command
from tierkv.config import AgentConfig, DramConfig, NvmeConfig, StoreConfig
from tierkv.fragments import Fragments
from tierkv.keys import pack_hashes
from tierkv.testing.fake_engine import FakeRequest, FakeShape, Status
from tierkv.testing.stores import eventually
from tierkv.types import BlockStatus

SHAPES = {
    "full": FakeShape(groups=(full(),), pipelined=True, num_blocks=64),
    "hybrid": FakeShape(
        groups=(window(store="periodic", period=32), full(index=1), chunked(index=2)), num_blocks=200
    ),
    "recurrent, ranks": FakeShape(
        groups=(full(tokens=8, layers=(1, 1)), recurrent(index=1, layers=(0, 2))), tensor_ranks=2,
        pipelined=True,
    ),
}  # fmt: skip


class Agent:
    """A real agent process."""

    def __init__(self, directory: Path, nvme: bool) -> None:
        self.socket = str(directory / "agent.sock")
        dram = DramConfig(
            capacity_bytes=512 << 10, slab_bytes=64 << 10, huge_pages="off", lock_memory="off", shared=True
        )
        tier = NvmeConfig(directory=str(directory / "nvme"), capacity_bytes=8 << 20, slab_bytes=64 << 10)
        config = AgentConfig(store=StoreConfig(dram=dram, nvme=tier if nvme else None), socket=self.socket)
        self._config = directory / "agent.json"
        self._config.write_bytes(msgspec.json.encode(config))
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            agent_command("--config", str(self._config), "--log-level", "error"),
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("serving")

    def end(self, how: int) -> None:
        self.process.send_signal(how)
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def agent_rig(shape: FakeShape, directory: Path, *, nvme: bool) -> Iterator[tuple[Rig, Agent]]:
    agent = Agent(directory, nvme)
    try:
        with AgentStore(agent.socket, name="test", load_timeout_s=20.0, save_timeout_s=20.0) as store:
            finder = Finder(store, [fake.group for fake in shape.groups], 5.0)
            try:
                rig = Rig(shape, store, finder, lookup_wait_s=0.01, lookup_timeout_s=5.0)
                finder.serve(lambda: rig.spaces)
                eventually(lambda: finder.ready, "the finder serves")
                yield rig, agent
            finally:
                finder.stop()
    finally:
        agent.end(signal.SIGTERM)


def sessions(seed: int, count: int) -> list[FakeRequest]:
    """Requests of a few sessions whose turns go on from one another."""
    random = Random(seed)
    prompts = [[random.randrange(7) for _ in range(random.randrange(20, 60))] for _ in range(4)]
    return [
        FakeRequest(
            f"r{number}", prompts[random.randrange(4)] + [number % 3] * random.randrange(9), random.randrange(1, 14),
            branch=number % 2,
        )
        for number in range(count)
    ]  # fmt: skip


def stored_blocks_are_right(rig: Rig) -> int:
    """Loads whatever the store has of all that the engine ever named; returns how many blocks that are."""
    names = list(rig.engine.truth._digests)
    found = 0
    for (digest, part), (rank, position) in rig.memory_of.items():
        space = next(
            space for stage in rig.spaces for space in stage if space is not None and space.digest == digest
        )
        right = {}
        for name in names:
            tokens = rig.engine.truth._digests[name]
            if len(tokens) % rig.engine.groups[position].block_tokens == 0:
                right[name] = rig.right_bytes(space, name, part)
        hashes = pack_hashes(list(right))
        into = np.zeros((len(right), space.part_bytes[part]), np.uint8)
        job = rig.store.load(space, hashes, Fragments.from_blocks(into), part)
        assert job.wait(30)
        for row, status, content in zip(into, job.status, right.values(), strict=True):
            if status == BlockStatus.OK:
                found += 1
                assert row.tobytes() == content, f"rank {rank}, group {position}"
    return found


def go(rig: Rig, requests: list[FakeRequest], disturb: threading.Event | None = None) -> None:
    """Runs requests, a few at a time, with the engine's own cache forgotten again and again."""
    random = Random(7)
    left = list(requests)
    for round_number in range(5000):
        if not left and rig.engine.idle:
            break
        if left and len(rig.engine.requests) < 3:
            rig.engine.add(left.pop(0))
        if random.random() < 0.2:
            for block in rig.engine.block_pool.blocks:
                if block.ref_cnt == 0:
                    rig.engine.block_pool.forget(block)
        if random.random() < 0.05 and rig.engine.running:
            rig.engine.preempt(random.choice(rig.engine.running))
        if random.random() < 0.03 and rig.engine.requests:
            rig.engine.abort(random.choice(list(rig.engine.requests.values())))
        rig.engine.step(execute_late=round_number % 2 == 0)
        threading.Event().wait(0.0005)  # the copying threads are in this process
    rig.settled()
    assert all(request.status in (Status.FINISHED, Status.ABORTED) for request in requests)


@pytest.mark.parametrize("nvme", [False, True], ids=["dram", "nvme"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_small_agent_that_evicts(name: str, nvme: bool, tmp_path: Path) -> None:
    with agent_rig(SHAPES[name], tmp_path, nvme=nvme) as (rig, _):
        requests = sessions(1, 40)
        go(rig, requests)
        assert sum(request.served_tokens for request in requests) > 0
        assert stored_blocks_are_right(rig) > 0


@pytest.mark.crash
def test_an_agent_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    with agent_rig(SHAPES["full"], tmp_path, nvme=True) as (rig, agent):
        served = 0
        for turn in range(3):
            requests = sessions(turn, 16)
            for request in requests[:3]:
                rig.engine.add(request)
            for _ in range(4):
                rig.engine.step()
            if turn < 2:
                agent.end(signal.SIGKILL)
            go(rig, requests[3:])
            assert requests[0].status in (Status.FINISHED, Status.ABORTED)
            served = sum(request.served_tokens for request in requests)
            if turn < 2:
                agent.start()
                eventually(lambda: rig.finder.ready, "the agent is found again")
        assert served > 0
        assert stored_blocks_are_right(rig) > 0
