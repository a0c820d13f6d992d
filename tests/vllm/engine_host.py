"""Real engines for the tests, each in a process of its own that is killed when it takes too long.

An engine's process stays for the engines of one test file, which saves the seconds that importing vLLM takes; a test
that fails leaves it behind, and the next one gets a fresh one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from engine_models import MODELS

OPEN_TIMEOUT_S = 180.0
CALL_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 60.0
_LOG_BYTES = 6000
_CHILD = Path(__file__).with_name("engine_child.py")
_ENGINE_CACHE = Path(sys.prefix) / "cache" / "vllm"
"""What vLLM finds out about model classes; to find it out again takes 8 s a model."""

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_COLOR": "0",
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


class EngineHost:
    """A process for engines, one after the other."""

    def __init__(self, directory: Path, *, several_processes: bool = False) -> None:
        self.directory = directory
        self.log = directory / "engine.log"
        self.description: dict[str, Any] = {}
        commands_end, self._commands = os.pipe()
        self._replies, replies_end = os.pipe()
        self._temporary = tempfile.mkdtemp(prefix="tierkv-")  # short, for sockets
        environment = {**os.environ, **_ENVIRONMENT, "VLLM_CACHE_ROOT": str(_ENGINE_CACHE)}
        environment["TMPDIR"] = self._temporary
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if several_processes else "0"
        environment.pop("PYTHONHASHSEED", None)  # as a user's engine runs
        try:
            with open(self.log, "ab") as log:
                self.process = subprocess.Popen(
                    [sys.executable, str(_CHILD), str(commands_end), str(replies_end)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=directory, env=environment,
                    pass_fds=(commands_end, replies_end), start_new_session=True,
                )  # fmt: skip
        finally:
            os.close(commands_end)
            os.close(replies_end)
        self._pending = b""

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
        try:
            os.write(self._commands, json.dumps({"name": name, "arguments": arguments}).encode() + b"\n")
            reply = json.loads(self._line(name, within_s))
        except BrokenPipeError:
            reply = {"error": f"the engine's process has ended: {self.process.poll()}"}
        if "error" in reply:
            raise EngineError(f"{name}: {reply['error']}\n--- end of {self.log}:\n{self.log_tail()}")
        return reply["result"]

    def _line(self, name: str, timeout_s: float) -> bytes:
        deadline_s = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._replies, select.POLLIN)
        while b"\n" not in self._pending:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                self._tell_stacks()
                self.kill()
                raise EngineError(
                    f"{name} took longer than {timeout_s} s\n--- end of {self.log}:\n{self.log_tail()}"
                )
            piece = os.read(self._replies, 1 << 20)
            if not piece:
                status = self.process.wait(_END_TIMEOUT_S)
                raise EngineError(
                    f"{name}: the process ended with {status}\n--- end of {self.log}:\n{self.log_tail()}"
                )
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _tell_stacks(self) -> None:
        """Has every process of the engine write its stacks to the log."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGUSR1)
        time.sleep(1)  # nobody tells when they are written

    def log_tail(self) -> str:
        """The last lines of what the engine said."""
        return self.log.read_bytes()[-_LOG_BYTES:].decode(errors="replace")

    @property
    def alive(self) -> bool:
        """Whether it can take commands."""
        return self.process.poll() is None

    def kill(self) -> None:
        """Ends the process and those that it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(_END_TIMEOUT_S)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def release(self) -> None:
        """Closes the pipes, at which the process ends by itself. Idempotent."""
        for end in (self._commands, self._replies):
            if end >= 0:
                os.close(end)
        self._commands = self._replies = -1

    def __enter__(self) -> EngineHost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the engine and ends the process; EngineError if it does not end well by itself."""
        self.release()
        try:
            status: int | None = self.process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            status = None
            self.kill()
        shutil.rmtree(self._temporary, ignore_errors=True)
        if kind is None and status != 0:
            raise EngineError(
                f"the engine's process ended with {status}\n--- end of {self.log}:\n{self.log_tail()}"
            )
