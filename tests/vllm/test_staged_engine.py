"""A real engine whose blocks are staged as those on an accelerator are: the same answers as from its own prefix cache.

The engine is vLLM's CPU build, so the staging is between host memory and host memory.
"""

from __future__ import annotations

import re

import pytest
from agent_process import AgentProcess
from engine_host import EngineHost, tierkv_connector
from equality import cached, check_same, prompt_of

LENGTHS = (1800, 391, 508)
ANSWER_TOKENS = 8


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
def test_answers_from_staged_blocks(name: str, engine: EngineHost, agent: AgentProcess) -> None:
    prompts = [prompt_of((name, length), length) for length in LENGTHS]
    engine.open(name)
    engine.generate(prompts, ANSWER_TOKENS)
    warm = engine.generate(prompts, ANSWER_TOKENS)
    connector = tierkv_connector(agent.socket, staging_bytes="1MiB")
    connector["kv_connector_module_path"] = "staged_connector"
    said = engine.log.stat().st_size
    engine.open(name, connector)
    engine.generate(prompts, ANSWER_TOKENS)
    engine.settle()
    for _ in range(2):
        found = engine.generate(prompts, ANSWER_TOKENS)
        assert cached(found) == cached(warm)
        check_same(found, warm, "staged")
        engine.settle()
    assert engine.external_hits() == 2 * sum(cached(warm))
    log = engine.log.read_bytes()[said:].decode()
    staged = re.findall(r"staged: \d+ pieces in \d+ plates, (\d+) blocks a chunk", log)
    assert len(staged) == len(engine.description["groups"]), "every group is"
    assert max(LENGTHS) > int(staged[-1]) * engine.step_tokens(), "in several chunks"
    engine.close_engine()
    agent.check_idle()
