"""Beside a connector that loads asynchronously, as between prefill and decode engines: what it did not deliver is not
stored, whatever becomes of its transfer and of the request."""

from __future__ import annotations

from typing import Any

import pytest
from agent_process import AgentProcess
from engine_host import EngineHost, tierkv_connector
from equality import cached, check_same, prompt_of

WAITING = "WAITING_FOR_REMOTE_KVS"
ANSWER_TOKENS = 8
PROMPT_TOKENS, REMOTE_TOKENS = 400, 384
END = "remote_connector.end"


def beside_remote(agent: AgentProcess, policy: str = "recompute") -> dict[str, Any]:
    """vLLM's MultiConnector with remote_connector before ours."""
    own = tierkv_connector(agent.socket)
    del own["kv_load_failure_policy"]
    remote = {
        "kv_connector": "RemoteConnector",
        "kv_connector_module_path": "remote_connector",
        "kv_role": "kv_both",
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"connectors": [remote, own]},
    }


def parameters(**given: Any) -> dict[str, Any]:
    """kv_transfer_params of a request."""
    return {"extra_args": {"kv_transfer_params": given}}


def begin_transfer(engine: EngineHost, request: str, prompt: list[int]) -> None:
    """Adds a request, and returns while the other connector is loading it."""
    engine.add(request, prompt, ANSWER_TOKENS, **parameters(remote_tokens=REMOTE_TOKENS))
    assert engine.step_until(request, WAITING)


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_abort_during_its_transfer(model: str, engine: EngineHost, agent: AgentProcess) -> None:
    """The client goes away while the transfer is under way; then it ends, well or not."""
    prompts = [prompt_of(("abort", index), PROMPT_TOKENS) for index in range(2)]
    engine.open(model)
    expected = engine.generate(prompts, ANSWER_TOKENS)
    engine.open(model, beside_remote(agent))
    for prompt, failed in zip(prompts, (False, True), strict=True):
        begin_transfer(engine, "gone", prompt)
        engine.abort("gone")
        assert engine.inside(END, failed=failed) == 1
        engine.settle()
    assert agent.stats().saved_blocks == 0, "blocks of a request whose bytes never came are stored"
    found = engine.generate(prompts, ANSWER_TOKENS)
    check_same(found, expected, "afterwards")
    assert cached(found) == [0, 0]
    engine.settle()
    found = engine.generate(prompts, ANSWER_TOKENS)
    check_same(found, expected, "warm")
    assert cached(found) == [REMOTE_TOKENS] * 2, "the same prompts are not stored any more"
    engine.close_engine()
    agent.check_idle()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_its_transfer_fails(model: str, policy: str, engine: EngineHost, agent: AgentProcess) -> None:
    """As a whole, beside a request that shares the prefix and computes."""
    prompt = prompt_of("fails", PROMPT_TOKENS)
    other = prompt[:200] + prompt_of("another", 200)
    engine.open(model)
    expected = engine.generate([prompt, other], ANSWER_TOKENS)
    engine.open(model, beside_remote(agent, policy))
    begin_transfer(engine, "fails", prompt)
    engine.add("other", other, ANSWER_TOKENS)
    engine.step(2)
    assert engine.inside(END, failed=True) == 1
    answers = engine.finish()
    check_same([answers["other"]], expected[1:], "beside a failed transfer")
    if policy == "fail":
        assert answers["fails"]["reason"] == "error"
    else:
        check_same([answers["fails"]], expected[:1], "recomputed")
    engine.settle()
    found = engine.generate([prompt, other], ANSWER_TOKENS)
    check_same(found, expected, "afterwards")
    # Of the failed one there is what the other one stored of their common prefix, where no window is needed to go on.
    shared = 192 if model == "llama" else 0
    assert cached(found) == [REMOTE_TOKENS if policy == "recompute" else shared, REMOTE_TOKENS]
    engine.settle()
    check_same(engine.generate([prompt, other], ANSWER_TOKENS), expected, "warm")
    engine.close_engine()
    agent.check_idle()


def test_what_it_has_loaded_is_stored(engine: EngineHost, agent: AgentProcess) -> None:
    """The other end of the above: bytes that did come are kept, and found by an engine that has no other connector."""
    prompt = prompt_of("delivered", PROMPT_TOKENS)
    engine.open("llama")
    expected = engine.generate([prompt], ANSWER_TOKENS)
    engine.open("llama", beside_remote(agent))
    engine.generate([prompt], ANSWER_TOKENS, **parameters(remote_keep=True, tierkv={"save": False}))
    engine.settle()
    assert agent.stats().saved_blocks == 0
    begin_transfer(engine, "delivered", prompt)
    assert engine.inside(END) == 1
    answer = engine.finish()["delivered"]
    check_same([answer], expected, "loaded by the other one")
    assert answer["cached"] == REMOTE_TOKENS
    engine.settle()
    engine.open("llama", tierkv_connector(agent.socket))
    found = engine.generate([prompt], ANSWER_TOKENS)
    check_same(found, expected, "from the store")
    assert cached(found) == [REMOTE_TOKENS]
