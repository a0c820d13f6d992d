"""The caches that are measured, each on engines of its own, one engine at a time.

Each function runs one round: the first turns, the loss of the engine's own cache, the second turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tierkv
from peers import workload
from peers.processes import BenchError, Engine, Service, free_port
from peers.results import Answer, Sample
from peers.workload import BLOCK_TOKENS, Session
from tierkv.adapters.engine_process import VLLM_ENVIRONMENT
from tierkv.agent.connection import AgentUnavailable
from tierkv.agent.embedded import agent_command

SAVE_S = 1.0
"""How long an engine is given to save the first turns, at least: not all connectors tell when they are done."""
_REATTACH_TIMEOUT_S = 60.0
_PROBE = Session(4 * BLOCK_TOKENS, 1 << 20)
"""A session that tells whether the engine has its cache again."""
_WARM_TOKENS = workload.MAX_BATCHED_TOKENS
"""A prompt that an engine runs before anything is measured: the first pass through a model takes seconds."""


@dataclass
class Bench:
    """What all rounds share."""

    python: str
    """vLLM's interpreter."""
    directory: Path
    """Scratch space on the disk that is measured."""
    lengths: list[int]
    session_count: int
    repeats: int
    """How often a second turn is measured in a round, where its hit is the same again."""
    threads: int
    answers: dict[tuple[int, int], Answer] = field(default_factory=dict)
    """(tokens, session) -> the first and the second turn's answers without any cache."""
    changed_error: float | None = None
    """How far logprobs move when one block is another one: what the comparison can see."""
    samples: list[Sample] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)
    serial: int = 0

    @property
    def sessions(self) -> list[Session]:
        """Every session of a round."""
        return [Session(tokens, number) for number in range(self.session_count) for tokens in self.lengths]

    @property
    def cache_bytes(self) -> int:
        """What a cache needs for all sessions of a round, with room to spare."""
        tokens = (
            sum(session.tokens + BLOCK_TOKENS for session in self.sessions) + _PROBE.tokens + 2 * _WARM_TOKENS
        )
        return (tokens * workload.KV_BYTES_PER_TOKEN * 3 // 2 >> 28) + 1 << 28

    @property
    def model(self) -> Path:
        """The model's directory; made when it is first asked for."""
        place = self.directory / "model"
        if not place.exists():
            with Engine(self.python, self.directory / "model.log", {}) as engine:
                engine.write_model(place)
        return place

    def place(self, name: str) -> Path:
        """A fresh directory."""
        self.serial += 1
        place = self.directory / f"{self.serial}-{name}"
        place.mkdir()
        return place

    @contextlib.contextmanager
    def engine(
        self, place: Path, connector: dict[str, Any] | None = None, environment: dict[str, str] | None = None
    ) -> Iterator[Engine]:
        """An engine, started and ended."""
        arguments = workload.engine_arguments(max(self.lengths))
        pool_bytes = arguments["num_gpu_blocks_override"] * BLOCK_TOKENS * workload.KV_BYTES_PER_TOKEN
        given = {
            **VLLM_ENVIRONMENT, **(environment or {}),
            "OMP_NUM_THREADS": str(self.threads),
            "VLLM_CPU_KVCACHE_SPACE": str((pool_bytes >> 30) + 1),
            "VLLM_CACHE_ROOT": str(Path(self.python).parent.parent / "cache" / "vllm"),
        }  # fmt: skip
        with Engine(self.python, place / "engine.log", given) as engine:
            self.start_s.append(engine.open(self.model, arguments, connector))
            self.serial += 1
            engine.turn(Session(_WARM_TOKENS, -self.serial).first, 2)
            engine.lose(0)
            yield engine

    def first_turns(self, engine: Engine) -> bool:
        """Runs all first turns and lets the engine lose them; whether their answers are the right ones."""
        right = True
        for session in self.sessions:
            answer = engine.turn(session.first, workload.ANSWER_TOKENS)
            right &= answer["tokens"] == self.answers[session.tokens, session.number].first
        engine.lose(SAVE_S)
        return right

    def second_turns(
        self,
        row: str,
        engine: Engine,
        *,
        right: bool,
        repeats: int | None = None,
        watch: Callable[[], dict[str, int]] | None = None,
    ) -> None:
        """Measures all second turns, each several times: they save nothing.

        right: whether the first turns' answers were. watch: blocks read so far, by tier.
        """
        for session in self.sessions * (repeats or self.repeats):
            before = watch() if watch else {}
            taken = self.measure(row, engine, session)
            taken.tokens_equal &= right
            if watch:
                taken.sources = {tier: count - before.get(tier, 0) for tier, count in watch().items()}
            engine.lose(0)

    def measure(self, row: str, engine: Engine, session: Session) -> Sample:
        """One second turn, compared with the one without a cache."""
        known = self.answers[session.tokens, session.number]
        answer = engine.turn(session.second(known.first), workload.CHECKED_TOKENS)
        taken = Sample(
            row=row,
            tokens=session.tokens,
            ttft_ms=answer["ttft_ms"],
            cached_tokens=answer["cached"],
            tokens_equal=answer["tokens"] == known.second,
            logprob_error=known.error(answer["logprobs"]),
        )
        self.samples.append(taken)
        return taken


def plain(bench: Bench) -> None:
    """No connector: the engine's own cache, and none. The first round makes the answers that all are held to."""
    with bench.engine(bench.place("plain")) as engine:
        for session in bench.sessions:
            first = engine.turn(session.first, workload.ANSWER_TOKENS)
            key = (session.tokens, session.number)
            if key not in bench.answers:
                prompt = session.second(first["tokens"])
                engine.lose(0)
                second = engine.turn(prompt, workload.CHECKED_TOKENS)
                bench.answers[key] = Answer(first["tokens"], second["tokens"], second["logprobs"])
                engine.lose(0)
                if bench.changed_error is None:
                    other = engine.turn(session.second_of_another(first["tokens"]), workload.CHECKED_TOKENS)
                    same = other["tokens"] == second["tokens"]
                    bench.changed_error = (
                        bench.answers[key].error(other["logprobs"]) if same else float("inf")
                    )
                engine.turn(session.first, workload.ANSWER_TOKENS)
            for _ in range(bench.repeats):
                bench.measure("local", engine, session)
            engine.lose(0)
            bench.measure("none", engine, session)
            engine.lose(0)


# tierkv


def _attached(socket_path: Path) -> bool:
    try:
        tierkv.connect(f"unix:{socket_path}").close()
    except AgentUnavailable:
        return False
    return True


def _agent(bench: Bench, place: Path, at: Path) -> Service:
    command = agent_command(
        "--socket", str(at), "--dram", str(bench.cache_bytes),
        "--nvme-dir", str(place / "nvme"), "--nvme", str(2 * bench.cache_bytes),
    )  # fmt: skip
    return Service(command, place / "agent.log", lambda: _attached(at))


def _read(at: Path) -> dict[str, int]:
    """Blocks that were read from each tier since the agent's start; from DRAM also those that NVMe brought there."""
    block_bytes = BLOCK_TOKENS * workload.KV_BYTES_PER_TOKEN
    with tierkv.connect(f"unix:{at}") as store:
        return {str(name): tier.read_bytes // block_bytes for name, tier in store.stats().tiers.items()}


def _wait_for_cache(engine: Engine, answer: list[int]) -> None:
    """Returns when the engine finds blocks in its cache."""
    deadline_s = time.monotonic() + _REATTACH_TIMEOUT_S
    while not engine.turn(_PROBE.second(answer), 1)["cached"]:
        engine.lose(0)
        if time.monotonic() > deadline_s:
            raise BenchError(f"the engine found nothing in the restarted agent for {_REATTACH_TIMEOUT_S} s")
    engine.lose(0)


def tierkv_rows(bench: Bench) -> None:
    """An agent with DRAM and NVMe; a second engine; the agent restarted, so that DRAM is empty."""
    place = bench.place("tierkv")
    with tempfile.TemporaryDirectory(prefix="ttft-") as short:  # the path of a socket must be
        _tierkv_round(bench, place, Path(short) / "agent.sock")


def _tierkv_round(bench: Bench, place: Path, at: Path) -> None:
    connector = {
        "kv_connector": "TierKVConnector",
        "kv_connector_module_path": "tierkv.adapters.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"agent": f"unix:{at}", "start_agent": False},
    }

    def watch() -> dict[str, int]:
        return _read(at)

    with contextlib.ExitStack() as agents:
        agents.enter_context(_agent(bench, place, at))
        with bench.engine(place, connector) as engine:
            probe = engine.turn(_PROBE.first, workload.ANSWER_TOKENS)["tokens"]
            right = bench.first_turns(engine)
            bench.second_turns("tierkv_dram", engine, right=right, watch=watch)
        with bench.engine(place, connector) as engine:
            bench.second_turns("tierkv_second_engine", engine, right=right, watch=watch)
            agents.close()  # in order: what only DRAM holds goes to NVMe
            agents.enter_context(_agent(bench, place, at))
            _wait_for_cache(engine, probe)
            # Once: what was read is in DRAM then.
            bench.second_turns("tierkv_nvme", engine, right=right, repeats=1, watch=watch)


# vLLM's own connector to host memory


def offloading(bench: Bench) -> None:
    """OffloadingConnector with the CPU spec of offloading_spec.py."""
    connector = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostOffloadingSpec",
            "spec_module_path": "peers.offloading_spec",
            "cpu_bytes_to_use": bench.cache_bytes,
        },
    }
    with bench.engine(bench.place("offloading"), connector) as engine:
        bench.second_turns("offloading", engine, right=bench.first_turns(engine))


# Mooncake


def mooncake_version(python: str) -> str | None:
    """The version of Mooncake's wheel in vLLM's environment; None: not installed, or it does not load."""
    program = (
        "from importlib import metadata as m; import mooncake.store;"
        "print(next(d.version for d in m.distributions() if d.name.startswith('mooncake-transfer-engine')))"
    )
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _mooncake(
    bench: Bench, place: Path, pool_process: bool
) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """A master on loopback, and a process that owns the pool if asked for; (connector, environment)."""
    master_port, metrics_port = free_port(), free_port()
    master = f"127.0.0.1:{master_port}"
    config: dict[str, Any] = {
        "metadata_server": "P2PHANDSHAKE", "master_server_address": master, "protocol": "tcp", "device_name": "",
        "mode": "standalone-store" if pool_process else "embedded",
        "global_segment_size": 0 if pool_process else bench.cache_bytes,
        "local_buffer_size": 256 << 20,
    }  # fmt: skip
    (place / "mooncake.json").write_text(json.dumps(config))
    connector = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    environment = {"MOONCAKE_CONFIG_PATH": str(place / "mooncake.json")}
    with contextlib.ExitStack() as services:
        services.enter_context(
            Service(
                [bench.python, "-m", "mooncake.cli", "-rpc_address=127.0.0.1", f"-rpc_port={master_port}",
                 "-metrics_host=127.0.0.1", f"-metrics_port={metrics_port}"],
                place / "master.log", lambda: _listening(master_port),
            )
        )  # fmt: skip
        if pool_process:
            port = free_port()
            services.enter_context(
                Service(
                    [bench.python, "-m", "mooncake.cli_client", "-host=127.0.0.1", f"-port={port}",
                     f"-master_server_address={master}", "-metadata_server=P2PHANDSHAKE", "-protocol=tcp",
                     f"-global_segment_size={bench.cache_bytes}", f"-threads={max(2, os.cpu_count() or 2)}"],
                    place / "pool.log", lambda: _listening(port),
                )
            )  # fmt: skip
        yield connector, environment


def mooncake_embedded(bench: Bench) -> None:
    """Mooncake with its pool in the engine's own process, which ends with it."""
    place = bench.place("mooncake-embedded")
    with (
        _mooncake(bench, place, pool_process=False) as (connector, environment),
        bench.engine(place, connector, environment) as engine,
    ):
        bench.second_turns("mooncake_embedded", engine, right=bench.first_turns(engine))


def mooncake_pool(bench: Bench) -> None:
    """Mooncake with its pool in a process of its own, as other engines and hosts need it."""
    place = bench.place("mooncake-pool")
    with _mooncake(bench, place, pool_process=True) as (connector, environment):
        with bench.engine(place, connector, environment) as engine:
            right = bench.first_turns(engine)
            bench.second_turns("mooncake_pool", engine, right=right)
        with bench.engine(place, connector, environment) as engine:
            bench.second_turns("mooncake_second_engine", engine, right=right)
