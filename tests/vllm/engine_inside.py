"""What tests do to an engine from within its process: EngineHost.inside("engine_inside.NAME", ...).

For engines that run in that process (EngineHost without several_processes).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec


def _core(engine: Any) -> Any:
    return engine.llm_engine.engine_core.engine_core


def write_weights(engine: Any, place: str, weights: str) -> None:
    """Adds random weights to a model directory."""
    import engine_weights

    os.environ[engine_weights.SEED_VARIABLE] = weights
    engine_weights.write_checkpoint(Path(place))


def update_weights(engine: Any, place: str) -> None:
    """Gives the model the weights of another directory, in place, as trainers do; nothing else is told."""
    engine.collective_rpc("reload_weights", kwargs={"weights_path": place})


def renewal(engine: Any) -> str:
    """Under which name the connector's blocks go since the last reset."""
    return str(_core(engine).scheduler.connector._renewals.word)


def keep_kernels(engine: Any) -> None:
    """Lets this process's next engines use the kernels that this one has registered.

    vLLM 0.32 looks for them in all modules again, and fails over one that its ngram drafts have loaded (llvmlite).
    """
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)


_drafts: list[list[int]] = []


def record_drafts(engine: Any) -> None:
    """Has the draft model's guesses kept for take_drafts()."""
    drafter = _core(engine).model_executor.driver_worker.worker.model_runner.drafter
    propose = drafter.propose

    def recorded(*arguments: Any, **options: Any) -> Any:
        found = propose(*arguments, **options)
        _drafts.extend(found.tolist())
        return found

    _drafts.clear()
    drafter.propose = recorded


def take_drafts(engine: Any) -> list[list[int]]:
    """The tokens of each guess since the last call."""
    found = list(_drafts)
    _drafts.clear()
    return found


def pause(engine: Any) -> None:
    """vLLM's pause_generation(mode="keep", clear_cache=True); raises where the caches cannot be cleared."""
    _core(engine).pause_scheduler(mode="keep", clear_cache=True)


def resume(engine: Any) -> None:
    """Goes on with what was paused."""
    _core(engine).resume_scheduler()


def is_saving(engine: Any) -> bool:
    """Whether the connector has saves to be sent or reported."""
    return bool(_core(engine).scheduler.connector.has_pending_push_work())


def shared_blocks(engine: Any) -> int:
    """Blocks that more than one has a hold of, such as a request and a save."""
    pool = _core(engine).scheduler.kv_cache_manager.block_pool
    return sum(block.ref_cnt > 1 and not block.is_null for block in pool.blocks)


class _Recorder:
    """In the place of the engine's publisher of KV cache events: keeps what it is to publish."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []

    def publish(self, batch: Any) -> None:
        self.batches.append(msgspec.msgpack.encode(batch))

    def shutdown(self) -> None:
        """Nothing to close."""


_recorders: list[_Recorder] = []


def record_events(engine: Any) -> None:
    """Has events kept for take_events(), from the next step on."""
    _recorders[:] = [_Recorder()]
    _core(engine).scheduler.kv_event_publisher = _recorders[0]


def take_events(engine: Any) -> list[dict[str, Any]]:
    """The events since the last call, as a subscriber decodes them."""
    recorder = _recorders[0]
    batches, recorder.batches = recorder.batches, []
    return [event for batch in batches for event in msgspec.msgpack.decode(batch)[1]]
