"""vLLM's OffloadingConnector with tierkv below its CPU tier: the same tokens, from tierkv, over restarts and losses.

The CPU tier holds little more than one prompt, so that what is asked for again has to come from tierkv.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_process import AgentProcess
from engine_host import Answer, EngineError, EngineHost
from engine_models import MODELS, VOCABULARY
from offloading_cpu_spec import ZERO_LOADS

PROMPT_TOKENS = 300
TURN_TOKENS = 12
BLOCK_TOKENS = 32
ROW_BYTES = {"llama": 32 << 10, "gemma3": 16 << 10}
"""Of the CPU tier, in float32 with blocks of 32 tokens."""
WAIT_S = 60.0

Tokens = list[list[int]]


def prompts_of(seed: int, count: int = 4) -> Tokens:
    source = random.Random(seed)
    return [[source.randrange(3, VOCABULARY) for _ in range(PROMPT_TOKENS + 17 * i)] for i in range(count)]


def tokens_of(answers: list[Answer]) -> Tokens:
    return [answer["tokens"] for answer in answers]


def offloading(
    agent: AgentProcess, rows: int, model: str = "llama", tier: dict[str, Any] | None = None, **extra: Any
) -> Any:
    """KVTransferConfig's arguments: a CPU tier of so many rows, and tierkv below it."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "offloading_cpu_spec",
            "cpu_bytes_to_use": rows * ROW_BYTES[model],
            "secondary_tiers": [
                {
                    "type": "TierKVTier",
                    "module_path": "tierkv.adapters.vllm_offloading",
                    "agent": f"unix:{agent.socket}",
                    "start_agent": False,
                    "model_revision": "random",
                    **(tier or {}),
                }
            ],
            **extra,
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("offloading")


@pytest.fixture(scope="module")
def host(place: Path) -> Iterator[EngineHost]:
    with EngineHost(place) as host:
        yield host


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with AgentProcess(
        tmp_path, "--nvme-dir", str(tmp_path / "nvme"), "--nvme", "128MiB", dram="128MiB"
    ) as agent:
        yield agent


@pytest.fixture(scope="module")
def prompts() -> Tokens:
    return prompts_of(1)


@pytest.fixture(scope="module")
def expected(host: EngineHost, prompts: Tokens) -> Tokens:
    """Without any cache but the engine's own, which is empty."""
    host.open("llama")
    return tokens_of([host.generate([prompt], TURN_TOKENS)[0] for prompt in prompts])


def one_by_one(host: EngineHost, prompts: Tokens) -> list[Answer]:
    return [host.generate([prompt], TURN_TOKENS)[0] for prompt in prompts]


def saved_all(host: EngineHost, agent: AgentProcess, prompts: Tokens, groups: int = 1) -> None:
    """Steps the engine until tierkv holds every whole block of the prompts."""
    wanted = groups * sum(len(prompt) // BLOCK_TOKENS for prompt in prompts)
    deadline_s = time.monotonic() + WAIT_S
    while agent.stats().saved_blocks < wanted:
        assert time.monotonic() < deadline_s, f"{agent.stats().saved_blocks} of {wanted} blocks are saved"
        host.settle()


def check_turn(host: EngineHost, agent: AgentProcess, prompts: Tokens, expected: Tokens) -> int:
    """Asks again with an empty prefix cache; how many blocks tierkv delivered."""
    host.settle()
    before = agent.loaded_blocks()
    answers = one_by_one(host, prompts)
    assert tokens_of(answers) == expected
    delivered = agent.loaded_blocks() - before
    assert delivered == 0 or any(answer["cached"] for answer in answers)
    return delivered


def whole_blocks(prompts: Tokens) -> int:
    return sum((len(prompt) - 1) // BLOCK_TOKENS for prompt in prompts)


def test_second_turns_come_from_tierkv_also_after_restarts_and_never_wrong(
    host: EngineHost, agent: AgentProcess, prompts: Tokens, expected: Tokens
) -> None:
    host.open("llama", offloading(agent, rows=16))
    assert tokens_of(one_by_one(host, prompts)) == expected
    saved_all(host, agent, prompts)
    # The last prompt may still be in the CPU tier, the others cannot.
    assert check_turn(host, agent, prompts, expected) >= whole_blocks(prompts[:-1])
    assert host.metrics()["vllm:kv_offload_tierkv_attached"] == 1
    assert host.metrics()["vllm:kv_offload_tierkv_blocks"] > 0

    host.open("llama", offloading(agent, rows=16))  # the engine's restart
    assert check_turn(host, agent, prompts, expected) >= whole_blocks(prompts)

    agent.kill()  # and the agent's, in mid-run: what NVMe does not hold is lost
    assert tokens_of(one_by_one(host, prompts[:1])) == expected[:1]
    agent.start()
    one_by_one(host, prompts_of(2, 1))  # some steps, in which the agent is taken up again
    deadline_s = time.monotonic() + WAIT_S
    while host.metrics()["vllm:kv_offload_tierkv_attached"] != 1:
        assert time.monotonic() < deadline_s, "the agent is not taken up again"
        host.settle()
    check_turn(host, agent, prompts, expected)
    saved_all(host, agent, prompts[:1])
    assert check_turn(host, agent, prompts, expected) > 0

    host.open("llama", offloading(agent, rows=16, tier={"model_revision": "another"}))
    assert check_turn(host, agent, prompts, expected) == 0

    host.close_engine()
    agent.check_idle()


def test_tokens_depend_on_what_is_loaded(
    host: EngineHost, agent: AgentProcess, prompts: Tokens, expected: Tokens
) -> None:
    """Or the tests of this file would prove nothing."""
    host.open("llama", offloading(agent, rows=16, **{ZERO_LOADS: True}))
    assert tokens_of(one_by_one(host, prompts)) == expected
    saved_all(host, agent, prompts)
    host.settle()
    assert tokens_of(one_by_one(host, prompts)) != expected
    host.close_engine()


def test_damaged_blocks_are_computed_again(
    host: EngineHost, agent: AgentProcess, prompts: Tokens, expected: Tokens
) -> None:
    host.open("llama", offloading(agent, rows=16))
    assert tokens_of(one_by_one(host, prompts)) == expected
    saved_all(host, agent, prompts)
    host.close_engine()
    agent.end()  # DRAM goes to NVMe
    damaged = 0
    for file in (agent.directory / "nvme").rglob("*"):
        if file.is_file() and file.stat().st_size >= 1 << 20 and "slots" in file.name:
            data = bytearray(file.read_bytes())
            for start in range(1000, len(data), 4096):
                if any(data[start : start + 8]):
                    data[start] ^= 0x40
                    damaged += 1
            file.write_bytes(data)
    assert damaged > 0
    agent.start()
    host.open("llama", offloading(agent, rows=16))
    assert tokens_of(one_by_one(host, prompts)) == expected
    assert agent.stats().corrupt_blocks > 0
    host.close_engine()


def test_a_reset_of_the_connector_empties_tierkv_too(
    host: EngineHost, agent: AgentProcess, prompts: Tokens, expected: Tokens
) -> None:
    host.open("llama", offloading(agent, rows=16))
    assert tokens_of(one_by_one(host, prompts)) == expected
    saved_all(host, agent, prompts)
    assert host.reset(connector=True)
    deadline_s = time.monotonic() + WAIT_S
    while any(tier.blocks for tier in agent.stats().tiers.values()):
        assert time.monotonic() < deadline_s, "the blocks are not removed"
        time.sleep(0.05)
    assert check_turn(host, agent, prompts, expected) == 0
    host.close_engine()


def test_several_groups_and_prompts_at_a_time(host: EngineHost, agent: AgentProcess, prompts: Tokens) -> None:
    host.open("gemma3")
    expected = tokens_of(one_by_one(host, prompts))
    host.open("gemma3", offloading(agent, rows=160, model="gemma3"))
    groups = len(host.description["groups"])
    assert groups > 1
    assert tokens_of(one_by_one(host, prompts)) == expected
    host.settle()
    host.open("gemma3", offloading(agent, rows=160, model="gemma3"))
    before = agent.loaded_blocks()
    answers = host.generate(prompts, TURN_TOKENS)
    assert tokens_of(answers) == expected
    assert agent.loaded_blocks() > before
    assert sum(answer["cached"] for answer in answers) > 0
    host.close_engine()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_rows_of_two_ranks_are_not_those_of_one(
    place: Path, agent: AgentProcess, prompts: Tokens
) -> None:
    """Workers in processes of their own, which fill the rows that the scheduler's process hands to tierkv."""
    with EngineHost(place, several_processes=True) as host:
        model = MODELS["llama"].write(place / "two ranks")
        host.call("write_checkpoint", directory=str(model))
        two = {"tensor_parallel_size": 2}
        host.open("llama", offloading(agent, rows=16, tier={"model_revision": None}), place=model, **two)
        expected = tokens_of(one_by_one(host, prompts))
        assert agent.loaded_blocks() == 0
        saved_all(host, agent, prompts)
        assert check_turn(host, agent, prompts, expected) >= whole_blocks(prompts[:-1])
        host.open("llama", offloading(agent, rows=16, tier={"model_revision": None}), place=model)
        before = agent.loaded_blocks()
        assert tokens_of(one_by_one(host, prompts)) == expected
        assert agent.loaded_blocks() == before
        saved = agent.stats().saved_blocks
        assert saved > sum(len(prompt) // BLOCK_TOKENS for prompt in prompts)


@pytest.mark.parametrize(
    ("tier", "engine", "named"),
    [
        ({"nvme_dir": "/x"}, {}, "nvme_dir"),
        ({"model_revision": None}, {}, "model_revision"),
        ({}, {"prefix_caching_hash_algo": "xxhash"}, "PYTHONHASHSEED"),
    ],
)
def test_what_cannot_work_is_refused_when_the_engine_starts(
    host: EngineHost, agent: AgentProcess, tier: dict[str, Any], engine: dict[str, Any], named: str
) -> None:
    with pytest.raises(EngineError, match=named):
        host.open("llama", offloading(agent, rows=16, tier=tier), **engine)
