"""What the tests of the offloading tier share: a CPU tier of numpy rows, keys, and steps of an engine that waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import tierkv
from tierkv.adapters.vllm_offloading.core import Finished, Rows, TierCore
from tierkv.adapters.vllm_offloading.keyspaces import GroupFacts, TierFacts, keyspaces_of, with_hashing
from tierkv.adapters.vllm_offloading.lookups import Answer
from tierkv.adapters.vllm_offloading.options import TierOptions
from tierkv.agent.client import AgentStore
from tierkv.config import DramConfig, StoreConfig
from tierkv.keys import KeyspaceSpec
from tierkv.testing.buffers import address_of, aligned_buffer
from tierkv.testing.stores import TIMEOUT_S, eventually

ROW_BYTES = 8192
ROWS = 32


def tier_facts(**changes: Any) -> TierFacts:
    """Two groups, one worker."""
    fields: dict[str, Any] = {
        "model": "org/model", "revision": "r1", "kv_dtype": "bfloat16", "row_bytes": ROW_BYTES,
        "worker_block_bytes": ROW_BYTES, "blocks_per_row": 1, "hash_tokens": 16,
        "groups": (GroupFacts(0, 16, ("layers.0", "layers.2")), GroupFacts(1, 32, ("layers.1", "layers.3"))),
        "layout": "LBHNC:cpu", "row_format": "direct",
        "parallel": {"tp": 1, "pp": 1, "pcp": 1, "dcp": 1, "world": 1}, "any_parallel": False,
        "extra": {"engine": "vllm 0.32.0"},
        **changes,
    }  # fmt: skip
    return TierFacts(**fields)


def tier_specs(**changes: Any) -> dict[int, KeyspaceSpec]:
    return with_hashing(keyspaces_of(tier_facts(**changes)), "sha256", b"\x07" * 32)


def make_key(number: int, group: int = 0, hash_bytes: int = 32) -> bytes:
    """An OffloadKey."""
    return number.to_bytes(hash_bytes, "big") + group.to_bytes(4, "big")


def own_agent(dram_bytes: int = 16 << 20, slab_bytes: int = 1 << 20, **options: Any) -> AgentStore:
    """A client of an agent of this process."""
    dram = DramConfig(
        capacity_bytes=dram_bytes, slab_bytes=slab_bytes, huge_pages="off", lock_memory="off"
    )  # fmt: skip
    return tierkv.connect(config=StoreConfig(dram=dram), **options)


class CpuTier:
    """Rows of memory as vLLM's CPU tier has them, with guard rows around."""

    def __init__(self, count: int = ROWS, row_bytes: int = ROW_BYTES) -> None:
        self.memory = aligned_buffer((count + 2) * row_bytes, 0xA5).reshape(count + 2, row_bytes)
        self.rows = self.memory[1:-1]

    def describe(self) -> Rows:
        return Rows(address_of(self.rows), self.rows.shape[1], self.rows.shape[0])

    def fill(self, numbers: Sequence[int], keys: Sequence[bytes]) -> None:
        """Puts what stands for each key into its row."""
        for number, key in zip(numbers, keys, strict=True):
            self.rows[number] = content_of(key, self.rows.shape[1])

    def holds(self, number: int, key: bytes) -> bool:
        return bool((self.rows[number] == content_of(key, self.rows.shape[1])).all())

    def wipe(self) -> None:
        self.rows[:] = 0xEE

    def guards_intact(self) -> bool:
        return bool((self.memory[0] == 0xA5).all() and (self.memory[-1] == 0xA5).all())


def content_of(key: bytes, size_bytes: int) -> np.ndarray:
    """(size_bytes,) uint8 that no other key has."""
    seed = int.from_bytes(key, "big") % (1 << 63)
    return np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)


@contextmanager
def tier_core(
    memory: CpuTier,
    connect: Callable[[], AgentStore],
    store: AgentStore | None = None,
    specs: Mapping[int, KeyspaceSpec] | Callable[[], Mapping[int, KeyspaceSpec]] | None = None,
    **options: Any,
) -> Iterator[TierCore]:
    """A tier that has seen its first request."""
    name = specs if callable(specs) else lambda: specs or tier_specs()
    settings = TierOptions(**{"lookup_timeout_s": TIMEOUT_S, "shutdown_wait_s": TIMEOUT_S, **options})
    core = TierCore(settings, memory.describe(), name, connect, store)
    try:
        core.start_request()
        yield core
    finally:
        assert core.close()


def ask(core: TierCore, keys: Sequence[bytes], request: str = "r") -> list[Answer]:
    """Asks step by step, as the engine does, until all is answered."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        answers = [core.lookup(key, request) for key in keys]
        if Answer.RETRY not in answers:
            return answers
        core.end_step()
        assert time.monotonic() < deadline_s, "no answer in time"
        time.sleep(0.001)


def finish(core: TierCore, jobs: int = 1) -> list[Finished]:
    """The results of so many jobs."""
    ended: list[Finished] = []

    def all_in() -> bool:
        ended.extend(core.finished())
        return len(ended) >= jobs

    eventually(all_in, f"{jobs} jobs end")
    assert len(ended) == jobs
    return ended


def save(core: TierCore, memory: CpuTier, keys: Sequence[bytes], job: int = 1) -> Finished:
    """Saves keys from the first rows."""
    rows = list(range(len(keys)))
    memory.fill(rows, keys)
    core.save(job, keys, np.array(rows, np.int64))
    (result,) = finish(core)
    return result


def load(core: TierCore, memory: CpuTier, keys: Sequence[bytes], job: int = 1) -> Finished:
    """Loads keys into the last rows; what is said to be there is checked."""
    first = len(memory.rows) - len(keys)
    memory.wipe()
    core.load(job, keys, np.arange(first, first + len(keys), dtype=np.int64))
    (result,) = finish(core)
    for position, key in enumerate(keys):
        if key in result.done:
            assert memory.holds(first + position, key)
    assert memory.guards_intact()
    assert (memory.rows[:first] == 0xEE).all()
    return result
