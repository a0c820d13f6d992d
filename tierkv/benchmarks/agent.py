"""The agent: what going through it costs, beside the same calls in one process.

The agent runs in a process of its own. Loads are those of a store in this process with an arena of the same kind of
pages, in turn. Look-ups are beside the same store's match(), and beside what memory alone takes (see match.py). The
agent's index is filled by the helper process itself, as saving a million blocks measures something else.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from tierkv.agent.client import AgentStore
from tierkv.agent.server import AgentServer
from tierkv.benchmarks.common import (
    MIB,
    BenchOptions,
    Measurement,
    Names,
    Sample,
    against,
    bench_spec,
    finish,
    in_turn,
    memory,
    timed,
)
from tierkv.benchmarks.match import (
    CALLS,
    ENTRIES,
    HASHES,
    QUICK_CALLS,
    QUICK_ENTRIES,
    Workload,
    batches,
)
from tierkv.config import AgentConfig, DramConfig, StoreConfig
from tierkv.errors import StorageError
from tierkv.fragments import Fragments
from tierkv.memory import DEFAULT_SLAB_BYTES, Arena, capacity_for, slot_bytes_for
from tierkv.store import Store
from tierkv.types import TierKind

LOAD_BYTES = 2 * MIB
BATCH = 128
QUICK_BATCH = 8
_BATCHES_OF_ROOM = 16
"""DRAM for as many batches, of which one is used: a client's share of the arena bounds what it moves at a time."""
_ENTRY_BYTES = 4096
_START_TIMEOUT_S = 120.0
_CALL_TIMEOUT_S = 30.0
_BOOT = "import sys; sys.path.append(sys.argv.pop(1)); from tierkv.benchmarks.agent import serve; serve()"


def run(options: BenchOptions) -> list[Measurement]:
    """load_2MiB_vs_in_process for each block size, and match_5000."""
    sizes = options.block_bytes or (LOAD_BYTES,)
    entries = options.entries or (QUICK_ENTRIES if options.quick else ENTRIES)
    return [*(measure_load(size, options) for size in sizes), *measure_match(entries, options)]


def measure_load(block_bytes: int, options: BenchOptions) -> Measurement:
    """Loads of a batch through the agent, beside the same in process."""
    batch = QUICK_BATCH if options.quick else BATCH
    dram = _dram(_BATCHES_OF_ROOM * batch, block_bytes)
    with ExitStack() as stack:
        engine = stack.enter_context(memory(batch * slot_bytes_for(block_bytes)))
        store = stack.enter_context(Store(StoreConfig(dram=dram, copy_threads=options.threads)))
        path = stack.enter_context(agent_process(dram, options.threads))
        client = stack.enter_context(
            AgentStore(path, call_timeout_s=_CALL_TIMEOUT_S, copy_threads=options.threads)
        )
        runs = (_loads(client, engine, block_bytes, batch), _loads(store, engine, block_bytes, batch))
        through, in_process = in_turn(options.round_count(), runs)
        pages = store.arena.pages
    name = (
        f"load_{block_bytes // MIB}MiB_vs_in_process"
        if block_bytes >= MIB
        else f"load_{block_bytes}_vs_in_process"
    )
    result = against(name, block_bytes, through, in_process, "the same load in process")
    result.batch = batch
    result.pages = pages
    return result


def _loads(store: Store | AgentStore, engine: Arena, block_bytes: int, batch: int) -> Callable[[], Sample]:
    space = store.open(bench_spec(block_bytes))
    step = slot_bytes_for(block_bytes)
    blocks = np.arange(batch, dtype=np.int64)
    fragments = Fragments(
        np.array([engine.address], np.int64), np.array([step], np.int64), np.array([block_bytes], np.int64), blocks,
        (engine,),
    )  # fmt: skip
    hashes = Names().take(batch)
    finish(store.save(space, hashes, fragments))
    return lambda: timed(batch * block_bytes, lambda: finish(store.load(space, hashes, fragments)))


def measure_match(entries: int, options: BenchOptions) -> list[Measurement]:
    """match() of a long prefix through the agent."""
    hashes = min(entries, HASHES)
    calls = QUICK_CALLS if options.quick else CALLS
    dram = _dram(entries, _ENTRY_BYTES)
    with (
        agent_process(dram, options.threads, entries) as path,
        AgentStore(path, call_timeout_s=_CALL_TIMEOUT_S) as client,
    ):
        space = client.open(bench_spec(_ENTRY_BYTES))

        def match(query: np.ndarray) -> None:
            if client.match(space, query).length != len(query):
                raise StorageError("the agent did not find what its index was filled with")

        result = Workload(entries, hashes, calls).measure(f"match_{hashes}", match)
        stats = client.stats()
        result.bytes_per_entry = stats.index_bytes / max(1, stats.index_entries)
    return [result]


def _dram(blocks: int, block_bytes: int) -> DramConfig:
    slab_bytes = max(DEFAULT_SLAB_BYTES, slot_bytes_for(block_bytes))
    return DramConfig(
        capacity_bytes=capacity_for(blocks, block_bytes, slab_bytes), slab_bytes=slab_bytes, shared=True,
        first_touch="never", lock_memory="off",
    )  # fmt: skip


@contextlib.contextmanager
def agent_process(dram: DramConfig, threads: int, entries: int = 0) -> Iterator[str]:
    """An agent in a process of its own, its index filled with `entries` blocks: the path of its socket."""
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as directory:
        path = str(Path(directory) / "agent.sock")
        package = str(Path(__file__).resolve().parent.parent.parent)
        arguments = [str(value) for value in (path, dram.capacity_bytes, dram.slab_bytes, threads, entries)]
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, package, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if not process.stdout.readline():
                raise StorageError("the agent's process did not start: its errors stand above")
            yield path
        finally:
            process.stdin.close()  # it ends with this
            try:
                process.wait(_START_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_START_TIMEOUT_S)
            process.stdout.close()


def serve() -> None:
    """The helper process: serves until its standard input ends."""
    path, capacity_bytes, slab_bytes, threads, entries = sys.argv[1:]
    dram = DramConfig(
        capacity_bytes=int(capacity_bytes), slab_bytes=int(slab_bytes), lock_memory="off",
        first_touch="never",
    )  # fmt: skip
    config = AgentConfig(store=StoreConfig(dram=dram, copy_threads=int(threads)), socket=path)
    with AgentServer(config) as server:
        fill(server.store, int(entries))
        os.write(1, b"serving\n")
        os.read(0, 1)


def fill(store: Store, entries: int) -> None:
    """Makes the index hold so many blocks; their bytes are whatever memory has."""
    space = store.open(bench_spec(_ENTRY_BYTES))
    core = store._core
    for known, _ in batches(entries):
        slots = core.dram.allocate(space, len(known))
        assert slots is not None  # the arena was made for as many
        core.index.insert(space.number, known, TierKind.DRAM, slots, core.size_class(space))
