"""What the tests of the agent as a process share: starting it, killing what serves, and blocks with known bytes."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import psutil

from tierkv import Fragments, Job, KeyspaceSpec
from tierkv.agent.client import AgentStore
from tierkv.agent.embedded import agent_command
from tierkv.testing.processes import stand_still
from tierkv.types import BlockStatus, HashArray
from tierkv.workload.payload import hashes_of, seeds_of

TIMEOUT_S = 60.0
BLOCK_BYTES = 64 << 10


def make_spec(part_bytes: tuple[int, ...] = (BLOCK_BYTES,), **fields: Any) -> KeyspaceSpec:
    fields = {
        "model": "model", "revision": "r1", "kv_dtype": "bfloat16", "layout": "test", "group": "full",
        "pipeline_stage": "0/1", "hash_algorithm": "sha256_cbor", "hash_seed": "0", **fields,
    }  # fmt: skip
    return KeyspaceSpec(block_tokens=16, part_bytes=part_bytes, **fields)


def names(first: int, count: int) -> HashArray:
    """`count` hashes; the same numbers give the same ones in every process."""
    return hashes_of(np.arange(first, first + count))


def payload(hashes: HashArray, part: int = 0, size_bytes: int = BLOCK_BYTES) -> np.ndarray:
    """(n, size_bytes) uint8: what a part of those blocks must hold, in every byte."""
    words = seeds_of(hashes, part + 1)[:, part, None] + np.arange(size_bytes // 8, dtype=np.uint64)
    return words.view(np.uint8).reshape(len(hashes), size_bytes)


def finished(job: Job) -> np.ndarray:
    assert job.wait(TIMEOUT_S), f"{job} did not end"
    return job.status


def eventually(condition: Any, what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Looks again and again at something that has no event; fails with `what`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"did not come to pass: {what}"
        time.sleep(0.01)


class Agent:
    """A `tierkv agent` process. `said` has the lines of its standard output so far."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            agent_command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        self.said: list[str] = []
        self.errors: list[str] = []
        self._selector = selectors.DefaultSelector()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._selector.register(self.process.stdout, selectors.EVENT_READ, self.said)
        self._selector.register(self.process.stderr, selectors.EVENT_READ, self.errors)

    def wait_serving(self, times: int = 1) -> None:
        """Until it has said so often that it serves."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while sum(line.startswith("serving ") for line in self.said) < times:
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"the agent does not serve: {self.said} {self.errors}"
            self._read(left_s)
            assert self._selector.get_map(), f"the agent ended: {self.said} {self.errors}"

    def _read(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            line = key.fileobj.readline()  # type: ignore[union-attr]
            if line:
                key.data.append(line.rstrip("\n"))
            else:
                self._selector.unregister(key.fileobj)

    def serving_pid(self) -> int:
        """The process that serves: this one's child where a supervisor holds DRAM."""
        children = psutil.Process(self.process.pid).children()
        return int(children[0].pid) if children else self.process.pid

    def kill_serving(self) -> None:
        """SIGKILL for the process that serves."""
        os.kill(self.serving_pid(), signal.SIGKILL)

    def stop_serving(self) -> int:
        """SIGSTOP for the process that serves, and waits until every thread stands still; its pid, for SIGCONT."""
        pid = self.serving_pid()
        stand_still(pid)
        return pid

    def end(self, how: int = signal.SIGTERM) -> int:
        """Ends it by a signal; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        while self._selector.get_map():
            self._read(TIMEOUT_S)
        return self.process.wait(TIMEOUT_S)

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        try:
            self.end(signal.SIGKILL)
        finally:
            self._selector.close()
            for stream in (self.process.stdout, self.process.stderr):
                assert stream is not None
                stream.close()


def python(script: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Another process of this interpreter, with this directory's modules."""
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent.parent)])
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}, **options,
    )  # fmt: skip


def save(store: AgentStore, space: Any, hashes: HashArray) -> np.ndarray:
    return finished(store.save(space, hashes, Fragments.from_blocks(payload(hashes))))


def load_checked(store: AgentStore, space: Any, hashes: HashArray) -> np.ndarray:
    """Loads blocks, (n,) bool which were there; AssertionError where one has wrong bytes."""
    into = np.zeros((len(hashes), BLOCK_BYTES), np.uint8)
    status = finished(store.load(space, hashes, Fragments.from_blocks(into)))
    good = status == BlockStatus.OK
    wrong = np.flatnonzero((into[good] != payload(hashes[good])).any(axis=1))
    assert not len(wrong), f"wrong bytes in {len(wrong)} of {np.count_nonzero(good)} loaded blocks"
    return good
