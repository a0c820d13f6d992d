"""The stress test: real clients save and load random blocks at a real agent while both are killed with SIGKILL.

    python -m tierkv.testing.stress --seconds 60 --client-kills 100 --agent-kills 2

A block's bytes follow from its hash, so every load is checked. At the end all that was held must have come back (pins,
leases, pending blocks, reservations), each slot must belong to a block, and nothing may be left behind: descriptors
and threads in the agent, files in /dev/shm, sockets, temporary files. The exit status is 1 if anything is wrong, and
what it was stands in the last lines.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from tierkv._native import CopyPool
from tierkv.agent.client import AgentStore
from tierkv.agent.connection import AgentUnavailable
from tierkv.agent.embedded import agent_command
from tierkv.agent.statistics import AgentStats
from tierkv.config import AgentConfig, DramConfig, NvmeConfig, StoreConfig
from tierkv.errors import TierKVError
from tierkv.fragments import Fragments
from tierkv.jobs import Job
from tierkv.keys import Keyspace
from tierkv.store import StoreStats
from tierkv.testing.buffers import address_of, aligned_buffer, make_spec
from tierkv.types import BlockStatus, HashArray, UInt8Array
from tierkv.workload.payload import hashes_of, seeds_of

BLOCK_BYTES = 64 << 10
"""Of both keyspaces, so that slots can be counted against blocks."""
DRAM_BLOCKS, NVME_BLOCKS = 96, 256
CHAINS, CHAIN_BLOCKS = 20, 16
_PARTS = 2
_JOB_TIMEOUT_S = 20.0
_SAVE_TIMEOUT_S = 10.0
"""When a block is dropped of which a killed client saved one part and nobody the other: a run may end as much later."""
_SLOW_S = 3.0
_WAIT_S = 60.0
_CLIENT_END_S = 60.0
_EXPECTED = (
    BlockStatus.OK, BlockStatus.MISS, BlockStatus.TIMEOUT, BlockStatus.DROPPED, BlockStatus.CANCELLED
)  # fmt: skip
_OWN_FILES = {"nvme", "agent.json", "agent.log", "agent.sock.lock", "reports"}


# The client process.


class Blocks:
    """Memory for one part of a chain's blocks, and their right bytes."""

    def __init__(self, pool: CopyPool, space: Keyspace) -> None:
        self._pool = pool
        self.space = space
        self.size_bytes = space.part_bytes[0]
        self.memory: UInt8Array = aligned_buffer(CHAIN_BLOCKS * self.size_bytes).reshape(CHAIN_BLOCKS, -1)
        self._addresses = address_of(self.memory) + np.arange(CHAIN_BLOCKS, dtype=np.int64) * self.size_bytes
        self._lengths = np.full(CHAIN_BLOCKS, self.size_bytes, np.int64)

    def _seeds(self, hashes: HashArray, part: int) -> np.ndarray:
        salt = np.uint64(int.from_bytes(self.space.digest[:8], "little"))
        return np.ascontiguousarray(seeds_of(hashes, _PARTS)[:, part] ^ salt)

    def fill(self, hashes: HashArray, part: int) -> Fragments:
        """The right bytes of a part of the blocks."""
        count = len(hashes)
        self._pool.fill(self._addresses[:count], self._lengths[:count], self._seeds(hashes, part))
        return self.fragments(count)

    def wrong(self, hashes: HashArray, part: int) -> np.ndarray:
        """(n,) bool: which blocks' memory differs from their right bytes."""
        count = len(hashes)
        return self._pool.differ(self._addresses[:count], self._lengths[:count], self._seeds(hashes, part))

    def fragments(self, count: int) -> Fragments:
        """The memory of the first `count` blocks."""
        return Fragments.from_blocks(self.memory[:count])


class Client:
    """Saves, loads, leases and removes chains of blocks, and checks every byte that it is given."""

    def __init__(self, store: AgentStore, pool: CopyPool, random: np.random.Generator, report: int) -> None:
        self._store = store
        self._random = random
        self._report = report
        self._spaces = [
            store.open(make_spec(BLOCK_BYTES, model="stress")),
            store.open(make_spec(BLOCK_BYTES, parts=_PARTS, model="stress-parts")),
        ]
        self._blocks = [Blocks(pool, space) for space in self._spaces]

    def say(self, **what: object) -> None:
        """A line in the report; one write, so that a kill leaves whole lines and one torn one at most."""
        os.write(self._report, (json.dumps(what) + "\n").encode())

    def step(self) -> None:
        """One round with one chain."""
        number = int(self._random.integers(len(self._spaces)))
        chain = int(self._random.integers(CHAINS))
        first = chain * CHAIN_BLOCKS
        hashes = hashes_of(np.arange(first, first + int(self._random.integers(1, CHAIN_BLOCKS + 1))))
        lease = (
            self._store.lease([(self._spaces[number], hashes)], 0.3) if self._random.random() < 0.3 else None
        )
        if lease is not None and self._random.random() < 0.5:
            self._store.stage(lease, 5.0)
        if self._random.random() < 0.5:
            self.save(number, hashes)
        else:
            self.load(number, hashes)
        if lease is not None and self._random.random() < 0.7:
            lease.release()
        if self._random.random() < 0.02:
            try:
                self._store.remove(self._spaces[number], np.ascontiguousarray(hashes[-2:]), timeout_s=5.0)
            except AgentUnavailable:
                pass

    def save(self, number: int, hashes: HashArray) -> None:
        """Saves all parts of the blocks."""
        space, blocks = self._spaces[number], self._blocks[number]
        for part in range(len(space.part_bytes)):
            job = self._store.save(space, hashes, blocks.fill(hashes, part), part, _JOB_TIMEOUT_S)
            self._ended(job, "save")
            self.say(saved=int(np.count_nonzero(job.status == BlockStatus.OK)))

    def load(self, number: int, hashes: HashArray) -> None:
        """Loads one part of the blocks that are there and checks them."""
        space, blocks = self._spaces[number], self._blocks[number]
        part = int(self._random.integers(len(space.part_bytes)))
        job = self._store.load(space, hashes, blocks.fragments(len(hashes)), part, _JOB_TIMEOUT_S)
        self._ended(job, "load")
        good = job.status == BlockStatus.OK
        wrong = int(np.count_nonzero(good & blocks.wrong(hashes, part)))
        if wrong:
            self.say(
                wrong=f"{wrong} of {len(hashes)} blocks from {hashes[0].tobytes().hex()[:8]}, part {part}"
            )
        self.say(loaded=int(np.count_nonzero(good)), missed=int(np.count_nonzero(~good)))

    def _ended(self, job: Job, what: str) -> None:
        begun_s = time.monotonic()
        if not job.wait(2 * _JOB_TIMEOUT_S):
            self.say(wrong=f"a {what} did not end by its deadline")
        took_s = time.monotonic() - begun_s
        kinds = sorted({int(status) for status in job.status})
        if took_s > _SLOW_S:
            self.say(slow=f"a {what} of {job.count} blocks took {took_s:.1f} s and ended with {kinds}")
        odd = set(kinds) - {int(status) for status in _EXPECTED}
        if odd:
            self.say(wrong=f"a {what} ended with {sorted(odd)}")


def run_client(path: str, seed: int, report_path: str) -> int:
    """Works until SIGTERM. Any exception is a failure, whatever happens to the agent meanwhile."""
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    report = os.open(report_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    pool = CopyPool(1)
    store = client = None
    while not stop and client is None:
        try:
            store = store or AgentStore(path, name=f"stress {seed}")
            client = Client(store, pool, np.random.default_rng(seed), report)
        except AgentUnavailable:  # just being killed
            time.sleep(0.02)
    while not stop and client is not None:
        client.step()
        if store is not None and not store.attached:
            time.sleep(0.01)  # an engine does not ask as fast as it can for what it does not get
    if store is not None:
        store.close()
    pool.close()
    return 0


# The parent.


@dataclass
class Outcome:
    """What happened."""

    saved: int = 0
    loaded: int = 0
    missed: int = 0
    client_kills: int = 0
    agent_kills: int = 0
    faults: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    """What took long: no fault, but worth a look."""


class Stress:
    """One run in a directory of its own."""

    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self.directory = directory
        self.options = options
        self.outcome = Outcome()
        self._random = np.random.default_rng(options.seed)
        self._next_seed = options.seed * 1_000_000
        self._clients: list[subprocess.Popen[bytes]] = []
        self._shared_memory = _listing("/dev/shm")
        self._temporary = _listing(tempfile.gettempdir())
        (directory / "reports").mkdir()
        slab_bytes = 8 * BLOCK_BYTES
        dram = DramConfig(
            capacity_bytes=DRAM_BLOCKS * BLOCK_BYTES,
            slab_bytes=slab_bytes,
            huge_pages="off",
            lock_memory="off",
        )
        nvme = NvmeConfig(
            directory=str(directory / "nvme"), capacity_bytes=NVME_BLOCKS * BLOCK_BYTES, slab_bytes=slab_bytes,
            sync="process",
        )  # fmt: skip
        self.config = AgentConfig(
            store=StoreConfig(dram=dram, nvme=nvme, save_timeout_s=_SAVE_TIMEOUT_S, staging_bytes=slab_bytes),
            socket=str(directory / "agent.sock"),
            keep_dram=options.keep_dram,
        )
        (directory / "agent.json").write_bytes(msgspec.json.encode(self.config))
        self._agent = self._start_agent()

    def run(self) -> Outcome:
        """The whole run; whatever is wrong is in the outcome's faults."""
        try:
            before = self._with_client(self._warm_up)
            with self._expected("killing processes", self.options.seconds):
                self._work()
            with self._expected("ending the clients"):
                self._end_clients()
            self._with_client(lambda store: self._check_settled(store, before))
            with self._expected("ending the agent"):
                self._end_agent()
            self._check_left_behind()
        finally:
            for process in [*self._clients, self._agent]:
                if process.poll() is None:
                    process.kill()
                    process.wait(_WAIT_S)
            if self._agent.stdout is not None:
                self._agent.stdout.close()
        self._read_reports()
        return self.outcome

    @contextmanager
    def _expected(self, what: str, duration_s: float = 0.0) -> Iterator[None]:
        """Says so when something takes much longer than `duration_s`."""
        begun_s = time.monotonic()
        yield
        late_s = time.monotonic() - begun_s - duration_s
        if late_s > _SLOW_S:
            self.outcome.slow.append(f"{what} took {late_s:.1f} s more than {duration_s:g} s")

    # Processes

    def _start_agent(self) -> subprocess.Popen[bytes]:
        with open(self.directory / "agent.log", "ab") as log:
            process = subprocess.Popen(
                agent_command("--config", str(self.directory / "agent.json"), "--log-level", "warning"),
                stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith(b"serving"):
            process.kill()
            process.wait(_WAIT_S)
            process.stdout.close()
            raise TierKVError(
                f"the agent did not start: {(self.directory / 'agent.log').read_text()[-2000:]}"
            )
        return process

    def _agent_pid(self) -> int:
        """The process that serves: with keep_dram the supervisor's child."""
        own = self._agent.pid
        if not self.options.keep_dram:
            return own
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        return int(children[0]) if children else 0

    def _kill_agent(self) -> None:
        pid = self._agent_pid()
        if not pid:
            return  # between two of them
        self.outcome.agent_kills += 1
        os.kill(pid, signal.SIGKILL)
        if self.options.keep_dram:
            return  # the supervisor starts the next one
        self._agent.wait(_WAIT_S)
        assert self._agent.stdout is not None
        self._agent.stdout.close()
        self._agent = self._start_agent()

    def _start_client(self) -> subprocess.Popen[bytes]:
        self._next_seed += 1
        report = self.directory / "reports" / str(self._next_seed)
        with open(self.directory / "reports" / "errors", "ab") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "tierkv.testing.stress", "--client", self.config.socket,
                 str(self._next_seed), str(report)],
                stdout=subprocess.DEVNULL, stderr=errors,
            )  # fmt: skip

    def _kill_client(self) -> None:
        position = int(self._random.integers(len(self._clients)))
        victim = self._clients[position]
        if self._random.random() < 0.2:  # some are stopped before, in whatever they are doing
            victim.send_signal(signal.SIGSTOP)
            time.sleep(0.05)
        victim.kill()
        self._check_client(victim, victim.wait(_WAIT_S))
        self.outcome.client_kills += 1
        self._clients[position] = self._start_client()

    def _check_client(self, client: subprocess.Popen[bytes], status: int) -> None:
        if status not in (0, -signal.SIGKILL, -signal.SIGTERM):  # SIGTERM: before it took notice of it
            self.outcome.faults.append(f"client {client.pid} ended with status {status}: {self._errors()}")

    def _errors(self) -> str:
        return (self.directory / "reports" / "errors").read_text(errors="replace")[-1500:]

    # The course of a run

    def _work(self) -> None:
        options = self.options
        self._clients = [self._start_client() for _ in range(options.clients)]
        begun_s = time.monotonic()
        kills = [(moment, self._kill_client) for moment in self._moments(options.client_kills)]
        kills += [(moment, self._kill_agent) for moment in self._moments(options.agent_kills)]
        for moment_s, kill in sorted(kills, key=lambda kill: kill[0]):
            time.sleep(max(0.0, begun_s + moment_s - time.monotonic()))
            kill()
        time.sleep(max(0.0, begun_s + options.seconds - time.monotonic()))

    def _moments(self, count: int) -> list[float]:
        """Random moments, spread over the run but for its start and end."""
        share_s = 0.8 * self.options.seconds / max(1, count)
        return [
            0.1 * self.options.seconds + share_s * (number + float(self._random.random()))
            for number in range(count)
        ]

    def _end_clients(self) -> None:
        for client in self._clients:
            client.terminate()
        for client in self._clients:
            try:
                self._check_client(client, client.wait(_CLIENT_END_S))
            except subprocess.TimeoutExpired:
                self.outcome.faults.append(
                    f"client {client.pid} does not end after SIGTERM: {self._errors()}"
                )

    def _end_agent(self) -> None:
        self._agent.terminate()
        try:
            status = self._agent.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            self.outcome.faults.append("the agent does not end after SIGTERM")
            return
        if status != 0:
            self.outcome.faults.append(f"the agent ended with status {status} after SIGTERM")

    # Checks

    def _with_client(self, work: Callable[[AgentStore], Held]) -> Held:
        deadline_s = time.monotonic() + _WAIT_S
        while True:
            try:
                with AgentStore(self.config.socket, name="judge", call_timeout_s=10.0) as store:
                    return work(store)
            except AgentUnavailable:  # a killed agent is being started again
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)

    def _warm_up(self, store: AgentStore) -> Held:
        """Makes the agent open and start all that it has only once."""
        with CopyPoolOf(1) as pool:
            report = os.open(
                self.directory / "reports" / "judge", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
            )
            try:
                client = Client(store, pool, np.random.default_rng(0), report)
                for _ in range(30):
                    client.step()
            finally:
                os.close(report)
        store.flush(_WAIT_S)
        return self._held()

    def _held(self) -> Held:
        return Held.by(self._agent_pid())

    def _check_settled(self, store: AgentStore, before: Held) -> Held:
        """Nothing is held for anybody; each slot belongs to a block; what is there has the right bytes."""
        begun_s = time.monotonic()
        waited_for: list[str] = []
        while True:
            left = _held_by_somebody(store.stats())
            left += self._held().beyond(before) if not left else []
            if not left or time.monotonic() >= begun_s + _WAIT_S:
                break
            waited_for = left
            time.sleep(0.1)
        took_s = time.monotonic() - begun_s
        if took_s > _SLOW_S and not left:
            self.outcome.slow.append(
                f"{'; '.join(waited_for)}, for {took_s:.1f} s after all clients had ended"
            )
        self.outcome.faults += [f"{what} after all clients have ended" for what in left]
        with CopyPoolOf(1) as pool:
            report = os.open(
                self.directory / "reports" / "judge", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
            )
            try:
                client = Client(store, pool, np.random.default_rng(1), report)
                for number in range(2):
                    for chain in range(CHAINS):
                        first = chain * CHAIN_BLOCKS
                        client.load(number, hashes_of(np.arange(first, first + CHAIN_BLOCKS)))
            finally:
                os.close(report)
        return before

    def _check_left_behind(self) -> None:
        faults = self.outcome.faults
        faults += [f"left in {self.directory}: {name}" for name in _listing(self.directory) - _OWN_FILES]
        faults += [
            f"left in /dev/shm: {name}"
            for name in _listing("/dev/shm") - self._shared_memory
            if "tierkv" in name
        ]
        new = _listing(tempfile.gettempdir()) - self._temporary - {self.directory.name}
        faults += [
            f"left in {tempfile.gettempdir()}: {name}" for name in new if name.startswith("tierkv-agent")
        ]
        checked = subprocess.run(
            [*agent_command()[:-1], "verify", str(self.directory / "nvme")], capture_output=True, text=True,
            timeout=_WAIT_S, check=False,
        )  # fmt: skip
        if checked.returncode != 0:
            faults.append(f"tierkv verify: {checked.stdout[-500:]} {checked.stderr[-500:]}")

    def _read_reports(self) -> None:
        outcome = self.outcome
        for path in sorted((self.directory / "reports").iterdir()):
            if path.name == "errors":
                continue
            for line in path.read_text().splitlines(keepends=True):
                if not line.endswith("\n"):
                    continue  # cut short by a kill
                found = json.loads(line)
                outcome.saved += found.get("saved", 0)
                outcome.loaded += found.get("loaded", 0)
                outcome.missed += found.get("missed", 0)
                if "slow" in found:
                    outcome.slow.append(f"client {path.name}: {found['slow']}")
                if "wrong" in found:
                    outcome.faults.append(f"client {path.name}: {found['wrong']}")
        if not outcome.loaded:
            outcome.faults.append("no block was loaded: nothing was tested")


@dataclass(frozen=True)
class Held:
    """What a process has open and running: descriptors by what they are of, and threads."""

    descriptors: dict[str, int]
    threads: int

    @classmethod
    def by(cls, pid: int) -> Held:
        """What the process `pid` holds now."""
        descriptors: dict[str, int] = {}
        for name in _listing(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{name}").partition(":[")[0]
            except FileNotFoundError:
                continue
            descriptors[target] = descriptors.get(target, 0) + 1
        return cls(descriptors, sum(_is_own_thread(pid, name) for name in _listing(f"/proc/{pid}/task")))

    def beyond(self, before: Held) -> list[str]:
        """What it holds more than before. An agent opens and starts all that is not a client's once, when it starts
        or is first used, so one descriptor or thread more is a leak."""
        more = [
            f"the agent has {count} descriptors of {what}, {before.descriptors.get(what, 0)} at the start"
            for what, count in self.descriptors.items()
            if count > before.descriptors.get(what, 0) and "pidfd" not in what
        ]
        if self.threads > before.threads:
            more.append(f"the agent has {self.threads} threads, {before.threads} at the start")
        return more


def _is_own_thread(pid: int, task: str) -> bool:
    """Whether a task is the process's own thread: the kernel adds and ends workers of io_uring as it likes."""
    try:
        return not Path(f"/proc/{pid}/task/{task}/comm").read_text().startswith("iou-")
    except OSError:
        return False  # it has ended


class CopyPoolOf:
    """A CopyPool as a context."""

    def __init__(self, threads: int) -> None:
        self._pool = CopyPool(threads)

    def __enter__(self) -> CopyPool:
        return self._pool

    def __exit__(self, *_: object) -> None:
        self._pool.close()


def _held_by_somebody(stats: StoreStats) -> list[str]:
    """What must be zero, or equal, when nobody does anything."""
    wrong = [
        f"{name} is {getattr(stats, name)}"
        for name in ("pins", "pending_blocks", "leases", "save_queue_blocks", "write_queue_blocks")
        if getattr(stats, name)
    ]
    if isinstance(stats, AgentStats):
        wrong += [
            f"{name} is {getattr(stats, name)}"
            for name in ("reserved_bytes", "leased_bytes")
            if getattr(stats, name)
        ]
        if stats.client_count != 1:
            wrong.append(f"client_count is {stats.client_count}, not 1")
    for name, tier in stats.tiers.items():
        if tier.used_bytes != tier.blocks * BLOCK_BYTES:
            wrong.append(f"{name} has {tier.used_bytes // BLOCK_BYTES} slots in use for {tier.blocks} blocks")
    return wrong


def _listing(directory: str | Path) -> set[str]:
    try:
        return set(os.listdir(directory))
    except OSError:
        return set()


def run(options: argparse.Namespace) -> Outcome:
    """One run in a new directory, which is removed again."""
    with tempfile.TemporaryDirectory(prefix="tierkv-stress-", dir=options.directory) as directory:
        return Stress(Path(directory), options).run()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="tierkv.testing.stress", description=__doc__)
    made.add_argument("--seconds", type=float, default=60.0)
    made.add_argument("--clients", type=int, default=4, help="client processes at a time")
    made.add_argument("--client-kills", type=int, default=100)
    made.add_argument("--agent-kills", type=int, default=2)
    made.add_argument(
        "--keep-dram", action="store_true", help="a supervisor keeps DRAM and restarts the agent"
    )
    made.add_argument("--seed", type=int, default=int(time.time()) % 1000)
    made.add_argument("--directory", help="where its files go (default: the directory for temporary files)")
    made.add_argument("--client", nargs=3, metavar=("SOCKET", "SEED", "REPORT"), help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if nothing is wrong."""
    options = parser().parse_args(arguments)
    if options.client:
        return run_client(options.client[0], int(options.client[1]), options.client[2])
    outcome = run(options)
    print(
        f"seed {options.seed}: {outcome.client_kills} clients and {outcome.agent_kills} agents killed, "
        f"{outcome.saved} blocks saved, {outcome.loaded} loaded and checked, {outcome.missed} not found"
    )
    for slow in outcome.slow:
        print(f"slow: {slow}")
    for fault in outcome.faults:
        print(f"WRONG: {fault}")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
