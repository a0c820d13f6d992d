"""Real engines for the tests, each in a process of its own that is killed when it takes too long.

An engine's process stays for the engines of one test file, which saves the seconds that importing vLLM takes; a test
that fails leaves it behind, and the next one gets a fresh one.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from engine_models import MODELS

from tierkv.adapters.engine_process import VLLM_ENVIRONMENT, EngineProcess, log_tail

OPEN_TIMEOUT_S = 180.0
CALL_TIMEOUT_S = 120.0
_CHILD = Path(__file__).with_name("engine_child.py")
_ENGINE_CACHE = Path(sys.prefix) / "cache" / "vllm"
"""What vLLM finds out about model classes; to find it out again takes 8 s a model."""

_ENVIRONMENT = {
    **VLLM_ENVIRONMENT,
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "OMP_NUM_THREADS": "1",
}

Answer = dict[str, Any]
"""tokens: of the first sample; samples: of all; cached: prompt tokens that were not computed; reason: why it ended."""

Adapter = dict[str, Any]
"""LoRARequest's arguments: lora_name, lora_int_id, lora_path, and what else it takes."""


class EngineError(AssertionError):
    """The engine failed or did not answer in time."""


def tierkv_connector(
    socket: Path | str, *, policy: str = "recompute", role: str = "kv_both", **extra: Any
) -> dict[str, Any]:
    """KVTransferConfig's arguments for tierkv's connector. extra: keys of kv_connector_extra_config."""
    settings = {
        "agent": f"unix:{socket}",
        "start_agent": False,
        "model": "tiny",
        "model_revision": "random",
        **extra,
    }
    return {
        "kv_connector": "TierKVConnector",
        "kv_connector_module_path": "tierkv.adapters.vllm",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {key: value for key, value in settings.items() if value is not None},
    }


class EngineHost(EngineProcess):
    """A process for engines, one after the other."""

    def __init__(self, directory: Path, *, several_processes: bool = False) -> None:
        self.directory = directory
        self.description: dict[str, Any] = {}
        self._temporary = tempfile.mkdtemp(prefix="tierkv-")  # short, for sockets
        environment = {**os.environ, **_ENVIRONMENT, "VLLM_CACHE_ROOT": str(_ENGINE_CACHE)}
        environment["TMPDIR"] = self._temporary
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if several_processes else "0"
        environment.pop("PYTHONHASHSEED", None)  # as a user's engine runs
        super().__init__([sys.executable, str(_CHILD)], directory / "engine.log", environment, directory)

    # Engines

    def open(
        self,
        model: str,
        connector: dict[str, Any] | None = None,
        *,
        weights: str = "one",
        place: Path | None = None,
        **arguments: Any,
    ) -> EngineHost:
        """Starts an engine with a model of engine_models; the one before is closed first.

        weights: names the random weights; ignored where `place`, a model directory, has real ones.
        arguments: engine arguments.
        """
        self.close_engine()
        place = place or MODELS[model].write(self.directory)
        self.description = self.call(
            "open", OPEN_TIMEOUT_S, model=model, directory=str(place), connector=connector, weights=weights,
            arguments=arguments,
        )  # fmt: skip
        return self

    def step_tokens(self) -> int:
        """What lengths of hits are multiples of."""
        return math.lcm(*(group["block_tokens"] for group in self.description["groups"]))

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 8,
        *,
        salt: str | None = None,
        adapters: Sequence[Adapter | None] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
        **sampling: Any,
    ) -> list[Answer]:
        """Runs the prompts together to their end, greedily unless told otherwise. adapters: one a prompt."""
        answers: list[Answer] = self.call(
            "generate",
            timeout_s,
            prompts=prompts,
            salt=salt,
            adapters=adapters,
            max_tokens=max_tokens,
            **sampling,
        )
        return answers

    def add(
        self,
        request: str,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        salt: str | None = None,
        **sampling: Any,
    ) -> None:
        """Queues a request; step(), step_until() and finish() run it."""
        self.call("add", request=request, prompt=prompt, salt=salt, max_tokens=max_tokens, **sampling)

    def step(self, count: int = 1) -> list[str]:
        """Runs steps; the requests that are finished by now."""
        finished: list[str] = self.call("step", count=count)
        return finished

    def step_until(self, request: str, status: str, timeout_s: float = 20.0) -> bool:
        """Steps until the scheduler has the request in that state; False if it never is."""
        return bool(
            self.call(
                "step_until", timeout_s + CALL_TIMEOUT_S, request=request, status=status, timeout_s=timeout_s
            )
        )

    def finish(self, timeout_s: float = 60.0) -> dict[str, Answer]:
        """Runs all that was queued to its end."""
        answers: dict[str, Answer] = self.call("finish", timeout_s + CALL_TIMEOUT_S, timeout_s=timeout_s)
        return answers

    def add_adapter(self, adapter: Adapter) -> None:
        """Has the engine read a LoRA adapter."""
        self.call("add_adapter", adapter=adapter)

    def abort(self, request: str) -> None:
        """Takes a request back."""
        self.call("abort", request=request)

    def reset(self, *, connector: bool = False) -> bool:
        """Empties the prefix cache, and the connector's with `connector`; False while blocks are in use."""
        return bool(self.call("reset", connector=connector))

    def reset_within(self, timeout_s: float, *, connector: bool = False, stepping: bool = False) -> bool:
        """reset() again and again without a request, until it is True; False if that takes too long.

        stepping: step the engine by hand in between, which only one of this very process can.
        """
        return bool(
            self.call(
                "reset_within", timeout_s + CALL_TIMEOUT_S, timeout_s=timeout_s, connector=connector,
                stepping=stepping,
            )
        )  # fmt: skip

    def settle(self, timeout_s: float = 30.0) -> None:
        """Waits until all saves have read their blocks, and empties the engine's prefix cache."""
        self.call("settle", timeout_s + CALL_TIMEOUT_S, timeout_s=timeout_s)

    def inside(self, function: str, **arguments: Any) -> Any:
        """Calls `module.function` of this directory in the engine's process, with the engine as the first argument."""
        return self.call("inside", function=function, arguments=arguments)

    def hold_loads(self) -> None:
        """Lets no load of the connector begin until release_loads()."""
        self.call("hold_loads")

    def release_loads(self) -> int:
        """Begins the loads that were held; how many."""
        return int(self.call("release_loads"))

    def metrics(self, prefix: str = "vllm:") -> dict[str, float]:
        """The engine's figures, summed over labels."""
        figures: dict[str, float] = self.call("metrics", prefix=prefix)
        return figures

    def external_hits(self) -> int:
        """Prompt tokens that came from the connector since the engine started, as vLLM counts them."""
        return int(self.metrics("vllm:external_prefix_cache_hits")["vllm:external_prefix_cache_hits"])

    def close_engine(self) -> None:
        """Ends the engine and checks that the connector left no thread."""
        threads = self.call("close", OPEN_TIMEOUT_S)
        assert not threads, f"the connector left threads behind: {threads}"

    # The process

    def call(self, name: str, within_s: float = CALL_TIMEOUT_S, /, **arguments: Any) -> Any:
        """One command of engine_child.EngineServer. EngineError with the end of the log if it fails."""
        return super().call(name, within_s, **arguments)

    def failure(self, what: str) -> Exception:
        return EngineError(f"{what}\n--- end of {self.log}:\n{log_tail(self.log)}")

    def late(self) -> None:
        """Has every process of the engine write its stacks to the log, and ends them."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGUSR1)
        time.sleep(1)  # nobody tells when they are written
        self.kill()

    def kill(self) -> None:
        super().kill()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def __enter__(self) -> EngineHost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the engine and ends the process; EngineError if it does not end well by itself."""
        status = self.end()
        shutil.rmtree(self._temporary, ignore_errors=True)
        if kind is None and status != 0:
            raise self.failure(f"the engine's process ended with {status}")
