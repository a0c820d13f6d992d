"""The child of engine_host.py: one process with at most one engine, told by lines of JSON what to do.

`python engine_child.py COMMANDS_FD ANSWERS_FD`. Workers of an engine with several processes import this file again, so
nothing heavy happens before main().
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_models import MODELS

# Both hold in the engine's workers too, which import this file.
faulthandler.register(signal.SIGUSR1, all_threads=True)
# vLLM's workers wait for each other by yielding. On two cores, Linux 6.18 then lets other processes, the agent for one,
# wait for a core for tens of seconds.
os.sched_yield = lambda: time.sleep(100e-6)

_COMMON = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_batched_tokens": 4096,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 512,
    "seed": 0,
    "disable_log_stats": False,
}
_TINY_PROMPT = [3, 4, 5]
"""Shorter than any block, so it leaves nothing in a cache."""


class LoadGate:
    """Stands before the client's loads: while it is shut none begins, so that all else can happen in the meantime."""

    def __init__(self) -> None:
        from tierkv.agent.client import AgentStore

        self._load = AgentStore.load
        self._shut = False
        self._held: list[Callable[[], None]] = []
        AgentStore.load = lambda *arguments, **options: self._take(arguments, options)

    def _take(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        from tierkv.jobs import Job

        if not self._shut:
            return self._load(*arguments, **options)
        held = Job(len(arguments[2]))

        def begin() -> None:
            begun = self._load(*arguments, **options)
            begun.add_done_callback(lambda job: held.settle(slice(None), job.status))

        self._held.append(begin)
        return held

    def shut(self) -> None:
        """From now on loads wait."""
        self._shut = True

    def open(self) -> int:
        """Begins what waited; how many loads that were."""
        self._shut = False
        held, self._held = self._held, []
        for begin in held:
            begin()
        return len(held)


class EngineServer:
    """The commands; each is a method whose arguments and result are JSON."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._gate: LoadGate | None = None
        self._finished: dict[str, Any] = {}
        self._patched: set[str] = set()

    def open(
        self,
        model: str,
        directory: str,
        connector: dict[str, Any] | None,
        weights: str,
        arguments: dict[str, Any],
    ) -> dict[str, Any]:
        """Starts an engine. Groups with their kinds and block sizes, and the tokens that hits are multiples of."""
        import engine_weights
        from vllm import LLM
        from vllm.config import KVTransferConfig

        assert self._engine is None, "the engine before is not closed"
        chosen = MODELS[model]
        for name in chosen.patches:
            if name not in self._patched:
                engine_weights.PATCHES[name]()
                self._patched.add(name)
        os.environ[engine_weights.SEED_VARIABLE] = weights
        has_weights = any(Path(directory).glob("*.safetensors"))
        load_format = "safetensors" if has_weights else engine_weights.LOAD_FORMAT
        options = {**_COMMON, "load_format": load_format, **chosen.engine, **arguments}
        if connector is not None:
            options["kv_transfer_config"] = KVTransferConfig(**connector)
        self._engine = LLM(model=directory, **options)
        self._finished = {}
        return self._description()

    def _scheduler(self) -> Any:
        core = getattr(self._engine.llm_engine.engine_core, "engine_core", None)
        return core.scheduler if core is not None else None

    def _description(self) -> dict[str, Any]:
        scheduler = self._scheduler()
        if scheduler is None:
            return {}
        config = scheduler.kv_cache_config
        groups = [
            {"kind": type(spec).__name__, "block_tokens": spec.block_size, "page_bytes": spec.page_size_bytes}
            for spec in (group.kv_cache_spec for group in config.kv_cache_groups)
        ]
        return {"groups": groups, "block_count": config.num_blocks}

    def write_checkpoint(self, directory: str, **gain: float) -> None:
        """Adds random weights to a model directory."""
        import engine_weights

        engine_weights.write_checkpoint(Path(directory), **gain)

    def generate(
        self,
        prompts: list[list[int]],
        salt: str | None,
        adapters: list[dict[str, Any] | None] | None,
        **sampling: Any,
    ) -> list[dict[str, Any]]:
        """Runs the prompts together, to their end. adapters: a LoRA adapter a prompt, None for the base model."""
        given = [_prompt(prompt, salt) for prompt in prompts]
        chosen = None if adapters is None else [_adapter(one) for one in adapters]
        answers = self._engine.generate(given, _sampling(**sampling), lora_request=chosen, use_tqdm=False)
        return [_answer(one) for one in answers]

    def add(self, request: str, prompt: list[int], salt: str | None, **sampling: Any) -> None:
        """Queues a request; step() runs it."""
        self._engine.llm_engine.add_request(request, _prompt(prompt, salt), _sampling(**sampling))

    def step(self, count: int) -> list[str]:
        """Runs so many steps, fewer if there is nothing to do; which requests are finished by now."""
        for _ in range(count):
            if not self._engine.llm_engine.has_unfinished_requests():
                break
            for output in self._engine.llm_engine.step():
                if output.finished:
                    self._finished[output.request_id] = _answer(output)
        return sorted(self._finished)

    def step_until(self, request: str, status: str, timeout_s: float) -> bool:
        """Steps until the scheduler has the request in a state; False if it finished or timed out instead."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s and request not in self.step(1):
            if self.status(request) == status:
                return True
        return False

    def status(self, request: str) -> str | None:
        """The state of a request in the scheduler."""
        for key, known in self._scheduler().requests.items():
            if key == request or key.startswith(request + "-"):
                return str(known.status.name)
        return None

    def finish(self, timeout_s: float) -> dict[str, Any]:
        """Runs what was queued to its end; the answers of all requests since open() or the last finish()."""
        deadline_s = time.monotonic() + timeout_s
        while self._engine.llm_engine.has_unfinished_requests():
            assert time.monotonic() < deadline_s, "the requests do not come to an end"
            self.step(1)
        answers, self._finished = self._finished, {}
        return answers

    def add_adapter(self, adapter: dict[str, Any]) -> None:
        """Has the engine read a LoRA adapter."""
        self._engine.llm_engine.add_lora(_adapter(adapter))

    def abort(self, request: str) -> None:
        """Takes a request back."""
        self._engine.llm_engine.abort_request([request])

    def reset(self, connector: bool) -> bool:
        """Empties the engine's prefix cache; False while blocks are in use."""
        return bool(self._engine.reset_prefix_cache(reset_connector=connector))

    def reset_within(self, timeout_s: float, connector: bool, stepping: bool) -> bool:
        """Empties the prefix cache as soon as that can be, without a request; False if it cannot be in time."""
        deadline_s = time.monotonic() + timeout_s
        while not self.reset(connector):
            if time.monotonic() > deadline_s:
                return False
            if stepping:
                self._engine.llm_engine.step()
            time.sleep(0.005)
        return True

    def settle(self, timeout_s: float) -> int:
        """Steps until no block is held any more, which empties the prefix cache; how many rounds it took.

        Saves hold their blocks, so after this everything is stored, and all that a prompt finds is external.
        """
        deadline_s = time.monotonic() + timeout_s
        rounds = 0
        while True:
            self._engine.generate([_prompt(_TINY_PROMPT, None)], _sampling(max_tokens=1), use_tqdm=False)
            rounds += 1
            if self.reset(connector=False):
                return rounds
            assert time.monotonic() < deadline_s, f"blocks are still held after {timeout_s} s"
            time.sleep(0.02)

    def inside(self, function: str, arguments: dict[str, Any]) -> Any:
        """Calls `module.function` of this directory, with the engine (an LLM) as the first argument."""
        module, _, name = function.rpartition(".")
        return getattr(importlib.import_module(module), name)(self._engine, **arguments)

    def hold_loads(self) -> None:
        """Lets no load begin until release_loads()."""
        self._gate = self._gate or LoadGate()
        self._gate.shut()

    def release_loads(self) -> int:
        """Begins the loads that were held; how many."""
        return self._gate.open() if self._gate is not None else 0

    def metrics(self, prefix: str) -> dict[str, float]:
        """The engine's counters and gauges, summed over their labels."""
        found: dict[str, float] = {}
        for metric in self._engine.get_metrics():
            value = getattr(metric, "value", None)
            if metric.name.startswith(prefix) and value is not None:
                found[metric.name] = found.get(metric.name, 0) + value
        return found

    def close(self) -> list[str]:
        """Ends the engine; which of tierkv's threads are left."""
        self.release_loads()
        if self._engine is not None:
            self._engine.llm_engine.engine_core.shutdown()
            self._engine = None
            gc.collect()
        return [one.name for one in threading.enumerate() if one.name.startswith("tierkv")]


def _prompt(tokens: list[int], salt: str | None) -> dict[str, Any]:
    return {"prompt_token_ids": tokens, **({"cache_salt": salt} if salt else {})}


def _adapter(given: dict[str, Any] | None) -> Any:
    from vllm.lora.request import LoRARequest

    return None if given is None else LoRARequest(**given)


def _sampling(max_tokens: int, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        **{"temperature": 0.0, "logprobs": 0, **more},
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
    )


def _answer(output: Any) -> dict[str, Any]:
    first = output.outputs[0]
    return {
        "tokens": list(first.token_ids),
        "logprobs": [
            step[token].logprob for token, step in zip(first.token_ids, first.logprobs or (), strict=False)
        ],
        "samples": [list(one.token_ids) for one in output.outputs],
        "cached": output.num_cached_tokens,
        "reason": first.finish_reason,
    }


def main() -> None:
    """Answers commands until their pipe is closed, then ends the engine."""
    from tierkv.adapters.engine_process import serve

    server = EngineServer()
    serve(server, int(sys.argv[1]), int(sys.argv[2]))
    server.close()


if __name__ == "__main__":
    main()
