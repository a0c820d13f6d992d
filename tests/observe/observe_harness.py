"""What the tests of observing share: a small agent, statistics out of thin air, and a bare HTTP client."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tierkv.agent.statistics import AgentStats
from tierkv.config import AgentConfig, DramConfig, NvmeConfig, StoreConfig
from tierkv.fragments import Fragments
from tierkv.observe.exposition import DROP_REASONS, MISS_REASONS
from tierkv.store import LATENCY_BOUNDS_S, OPERATIONS, LatencyStats, TierStats
from tierkv.types import HashArray

TIMEOUT_S = 20.0
BLOCK_BYTES = 4096
SLAB_BYTES = 8 * BLOCK_BYTES


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Waits for what other threads or processes bring about without telling; AssertionError if it does not come."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"did not happen within {TIMEOUT_S} s: {what}"
        time.sleep(0.002)


def agent_config(
    directory: Path, *, dram_blocks: int = 32, nvme_blocks: int = 0, **options: Any
) -> AgentConfig:
    """An agent with its socket and its NVMe tier in `directory`."""
    dram = DramConfig(
        capacity_bytes=dram_blocks * BLOCK_BYTES, slab_bytes=SLAB_BYTES, huge_pages="off", lock_memory="off",
        first_touch="never", free_ahead=0.0,
    )  # fmt: skip
    nvme = None
    if nvme_blocks:
        nvme = NvmeConfig(
            directory=str(directory / "nvme"), capacity_bytes=nvme_blocks * BLOCK_BYTES, slab_bytes=SLAB_BYTES,
            sync="process",
        )  # fmt: skip
    store = StoreConfig(dram=dram, nvme=nvme, staging_bytes=8 * BLOCK_BYTES)
    return AgentConfig(store=store, socket=str(directory / "agent.sock"), **options)


def some_hashes(count: int, seed: int = 0) -> HashArray:
    return np.random.default_rng(seed).integers(0, 256, (count, 32), dtype=np.uint8)


def some_blocks(count: int) -> tuple[np.ndarray, Fragments]:
    """Memory of `count` blocks, and its description."""
    memory = np.random.default_rng(1).integers(0, 256, (count, BLOCK_BYTES), dtype=np.uint8)
    return memory, Fragments.from_blocks(memory)


COUNT = st.integers(0, 1 << 50)
SECONDS = st.floats(0, 1e9, allow_nan=False)
BUCKETS = len(LATENCY_BOUNDS_S) + 1


@st.composite
def latencies(draw: st.DrawFn) -> LatencyStats:
    counts = draw(st.lists(st.integers(0, 1 << 30), min_size=BUCKETS, max_size=BUCKETS))
    return LatencyStats(counts=counts, sum_s=draw(SECONDS))


@st.composite
def tier_stats(draw: st.DrawFn) -> TierStats:
    names = (
        "used_bytes",
        "blocks",
        "hit_blocks",
        "read_bytes",
        "written_blocks",
        "written_bytes",
        "evicted_blocks",
    )
    return TierStats(
        capacity_bytes=draw(st.one_of(COUNT, st.just(1 << 62))),
        **{name: draw(COUNT) for name in names},
        read_s=draw(SECONDS), write_s=draw(SECONDS), healthy=draw(st.booleans()),
        read_latency=draw(latencies()), write_latency=draw(latencies()),
    )  # fmt: skip


@st.composite
def agent_stats(draw: st.DrawFn) -> AgentStats:
    """Any statistics that an agent could answer with, but for its list of clients."""
    drops = draw(st.dictionaries(st.sampled_from(DROP_REASONS), st.integers(1, 1 << 40)))
    names = (
        "saved_blocks", "known_blocks", "corrupt_blocks", "pins", "pending_blocks", "leases", "save_queue_blocks",
        "write_queue_blocks", "load_queue_blocks", "index_entries", "index_bytes", "match_requested_blocks",
        "match_found_blocks", "client_count", "max_clients", "reserved_bytes", "leased_bytes",
    )  # fmt: skip
    return AgentStats(
        tiers=draw(st.dictionaries(st.sampled_from(("dram", "nvme", "dfs")), tier_stats(), min_size=1)),
        **{name: draw(COUNT) for name in names},
        dropped_blocks=sum(drops.values()), drops=drops,
        load_misses=draw(st.dictionaries(st.sampled_from(MISS_REASONS), st.integers(1, 1 << 40))),
        latency={name: draw(latencies()) for name in OPERATIONS},
        version=draw(st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=12)),
        started_s=draw(SECONDS), accepting=draw(st.booleans()),
    )  # fmt: skip


def plain_stats(**changes: Any) -> AgentStats:
    """An idle agent with DRAM and NVMe."""
    tiers = {
        name: TierStats(capacity_bytes=1 << 30, used_bytes=1 << 29, blocks=1000) for name in ("dram", "nvme")
    }
    fields: dict[str, Any] = {
        "tiers": tiers, "saved_blocks": 0, "known_blocks": 0, "dropped_blocks": 0, "load_misses": {},
        "corrupt_blocks": 0, "pins": 0, "pending_blocks": 0, "leases": 0, "save_queue_blocks": 0,
        "write_queue_blocks": 0, "index_entries": 0, "index_bytes": 0, "version": "1.2.3", "started_s": 1000.0,
        "client_count": 0, "max_clients": 64,
    }  # fmt: skip
    return AgentStats(**(fields | changes))


def ask(port: int, request: bytes, host: str = "127.0.0.1") -> tuple[int, dict[str, str], bytes]:
    """Sends raw bytes to a port and reads to the end: (status, headers in lower case, body)."""
    with socket.create_connection((host, port), timeout=TIMEOUT_S) as connection:
        connection.sendall(request)
        return read_answer(connection)


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(status.split(" ")[1]), headers, body


def get(
    port: int, path: str, *, accept: str = "*/*", host: str = "127.0.0.1"
) -> tuple[int, dict[str, str], bytes]:
    return ask(port, f"GET {path} HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\n\r\n".encode(), host)
