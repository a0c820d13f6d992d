"""The child of processes.Engine: one process with one vLLM engine, told by lines of JSON what to do.

`python -m peers.engine_child COMMANDS_FD ANSWERS_FD`. The engine runs in this process, stepped here, so times are those
of the engine and its connector alone, without a server's sockets.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_IDLE_PAUSE_S = 0.001
_TINY_PROMPT = [3, 4, 5]
"""Shorter than a block, so it leaves nothing in a cache."""


def _paced(step: Callable[[], Any], scheduler: Any) -> Callable[[], Any]:
    """A step after which nothing is computed pauses, as vLLM's own engine process does, so that transfers get on."""

    def paced() -> Any:
        outputs, executed = step()
        if not executed and scheduler.has_requests():
            time.sleep(_IDLE_PAUSE_S)
        return outputs, executed

    return paced


class Commands:
    """Each method is a command; arguments and results are JSON."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._requests = 0

    def write_model(self, directory: str) -> None:
        """Makes the model directory."""
        from peers.workload import write_model

        write_model(Path(directory))

    def open(self, model: str, arguments: dict[str, Any], connector: dict[str, Any] | None) -> float:
        """Starts the engine; how many seconds that took."""
        began_s = time.perf_counter()
        from vllm import LLM
        from vllm.config import KVTransferConfig

        options = dict(arguments)
        if connector is not None:
            options["kv_transfer_config"] = KVTransferConfig(**connector)
        self._engine = LLM(model=model, **options).llm_engine
        core = self._engine.engine_core.engine_core
        core.step_fn = _paced(core.step_fn, core.scheduler)
        for cache in core.model_executor.driver_worker.worker.model_runner.kv_caches:
            cache.zero_()  # touched here, so that no variant pays for first use
        return time.perf_counter() - began_s

    def turn(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """Runs one request, alone and greedily.

        ttft_ms: from handing it over to its first token; tokens and logprobs: its answer; cached: prompt tokens that
        were not computed.
        """
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=0
        )
        self._requests += 1
        gc.collect()
        first_s, last = 0.0, None
        began_s = time.perf_counter()
        self._engine.add_request(f"turn-{self._requests}", {"prompt_token_ids": prompt}, sampling)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.outputs[0].token_ids and not first_s:
                    first_s = time.perf_counter() - began_s
                last = output
        assert last is not None
        answer = last.outputs[0]
        tokens = list(answer.token_ids)
        logprobs = [step[token].logprob for token, step in zip(tokens, answer.logprobs, strict=True)]
        return {
            "ttft_ms": first_s * 1000,
            "tokens": tokens,
            "logprobs": logprobs,
            "cached": last.num_cached_tokens,
        }

    def lose(self, least_s: float, timeout_s: float) -> None:
        """Empties the engine's prefix cache, once what was computed is saved.

        Connectors hear of the end of their saves in later steps, so tiny requests make some; for at least `least_s`,
        and until no block is held any more.
        """
        began_s = time.monotonic()
        while True:
            self.turn(_TINY_PROMPT, 1)
            waited_s = time.monotonic() - began_s
            if waited_s >= least_s and self._engine.reset_prefix_cache():
                return
            if waited_s >= timeout_s:
                raise TimeoutError(f"blocks are still held after {timeout_s} s")
            time.sleep(0.05)

    def close(self) -> None:
        """Ends the engine."""
        if self._engine is not None:
            self._engine.engine_core.shutdown()
            self._engine = None
            gc.collect()


def main() -> None:
    """Answers commands until their pipe is closed, then ends the engine.

    As tierkv's serve() does, but without tierkv: the other caches are measured in processes of their own.
    """
    logging.basicConfig(level=logging.INFO)
    commands = Commands()
    with (
        open(int(sys.argv[1]), encoding="utf-8") as lines,
        open(int(sys.argv[2]), "w", encoding="utf-8") as replies,
    ):
        for line in lines:
            command = json.loads(line)
            print(f"--- {command['name']}", flush=True)
            try:
                reply = {"result": getattr(commands, command["name"])(**command["arguments"])}
            except Exception as error:
                traceback.print_exc()
                reply = {"error": f"{type(error).__name__}: {error}"}
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
    commands.close()
    sys.stdout.flush()
    os._exit(0)  # what is measured is over; transfer engines' threads do not always end well


if __name__ == "__main__":
    main()
