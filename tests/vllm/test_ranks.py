"""Engines of several processes: tensor-parallel and pipeline-parallel ranks share look-ups, each has its own bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agent_process import AgentProcess
from engine_host import EngineHost, tierkv_connector
from engine_models import MODELS
from equality import cached, check_same, prompt_of

pytestmark = pytest.mark.slow

ROUNDING = 1e-3
"""Sums over ranks are added in another order."""
_EAGER = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
"""The only way in which vLLM 0.32's pipeline stages exchange tensors on CPU."""
CASES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "tensor": ("llama", {"tensor_parallel_size": 2}, 1, 1),
    "tensor-several-groups": ("gemma3", {"tensor_parallel_size": 2}, 1, 1),
    "tensor-replicas": ("one_head", {"tensor_parallel_size": 2}, 1, 1),
    "pipeline": ("llama", {"pipeline_parallel_size": 2, **_EAGER}, 2, 1),
}
"""Model, engine arguments, how many blocks of the store one of the engine's makes, how often its bytes are stored."""
LATENT_ROUNDING = 0.1
"""vLLM 0.32 computes MLA over cached blocks by another kernel, in bfloat16."""
LATENT_BLOCK_BYTES = 2 * 16 * 576 * 2
"""Layers, tokens, width, bytes."""
RESTARTED = ("tensor", "pipeline")


@pytest.mark.parametrize("case", CASES)
def test_ranks_share_a_store(case: str, engine: EngineHost, agent: AgentProcess, tmp_path: Path) -> None:
    """Cold, warm, and warm after a restart: the answers of a single process, from every rank's own bytes."""
    model, ranks, stages, copies = CASES[case]
    place = MODELS[model].write(tmp_path)
    engine.call("write_checkpoint", directory=str(place))
    prompts = [prompt_of((case, length), length) for length in (500, 231)]
    connector = tierkv_connector(agent.socket)
    engine.open(model, connector, place=place)
    expected = engine.generate(prompts, 10)
    engine.settle()
    alone = agent.stats().tiers["dram"]
    engine.close_engine()
    with EngineHost(tmp_path, several_processes=True) as several:
        several.open(model, connector, place=place, **ranks)
        found = several.generate(prompts, 10)
        check_same(found, expected, "cold", ROUNDING)
        assert cached(found) == [0, 0], "finds blocks of an engine with other ranks"
        several.settle()
        stored = agent.stats().tiers["dram"]
        assert stored.blocks == alone.blocks * (1 + stages) > 0
        assert stored.used_bytes == alone.used_bytes * (1 + copies)
        found = several.generate(prompts, 10)
        check_same(found, expected, "warm", ROUNDING)
        assert cached(found) == [480, 224]
        assert several.external_hits() == 480 + 224
        if case in RESTARTED:
            several.settle()
            several.open(model, connector, place=place, **ranks)
            found = several.generate(prompts, 10)
            check_same(found, expected, "after a restart", ROUNDING)
            assert cached(found) == [480, 224]
        several.close_engine()
    agent.check_idle()


def test_replicated_latents(engine: EngineHost, agent: AgentProcess, tmp_path: Path) -> None:
    """MLA: every rank holds the same latents; one rank stores them, all load them."""
    place = MODELS["deepseek_v2"].write(tmp_path)
    engine.call("write_checkpoint", directory=str(place), gain=0.4)  # less, for bfloat16 and sums over ranks
    prompts = [prompt_of(("latents", length), length) for length in (500, 231)]
    connector = tierkv_connector(agent.socket)
    with EngineHost(tmp_path, several_processes=True) as several:
        several.open("deepseek_v2", connector, place=place, tensor_parallel_size=2)
        cold = several.generate(prompts, 10)
        several.settle()
        stored = agent.stats().tiers["dram"]
        assert stored.blocks == 500 // 16 + 240 // 16
        assert stored.used_bytes == stored.blocks * LATENT_BLOCK_BYTES, "stored more than once"
        warm = several.generate(prompts, 10)
        several.settle()
        assert cached(warm) == [496, 224]
        again = several.generate(prompts, 10)
        assert cached(again) == [496, 224]
        check_same(again, warm, "the same blocks again")
        check_same(warm, cold, "warm", LATENT_ROUNDING)
        several.close_engine()
    agent.check_idle()
