"""The hooks on vLLM's objects, without an engine: what is certain is told, what is not is not guessed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.linear import MinimaxM3QKVParallelLinearWithIndexer, QKVParallelLinear

from tierkv.adapters.vllm import hooks


def projection(kind: type, replicas: int, heads: int = 1) -> Any:
    """A projection as vLLM makes it, without its weights and ranks."""
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    made.num_kv_heads, made.num_kv_head_replicas = heads, replicas
    return made


class Wrapped(torch.nn.Module):
    """As vLLM's layers with LoRA."""

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


class Attention(torch.nn.Module):
    """A model's attention: projections, and the engine's layer with the cache."""

    def __init__(self, *projections: torch.nn.Module, heads: int = 1) -> None:
        super().__init__()
        for number, made in enumerate(projections):
            setattr(self, f"proj_{number}", made)
        self.attn = torch.nn.Module()
        self.attn.num_kv_heads = heads


class Runner:
    """What registers caches: it has the model."""

    def __init__(self, *attentions: Attention) -> None:
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(attentions)
        self.layers = {f"layers.{number}": made.attn for number, made in enumerate(attentions)}

    def get_model(self) -> torch.nn.Module:
        return self.model

    def register(self, *names: str) -> int:
        return hooks.kv_head_replicas(self.layers, names or list(self.layers))


def test_ranks_that_hold_the_same_heads_are_told() -> None:
    for made in (projection(QKVParallelLinear, 4), Wrapped(projection(QKVParallelLinear, 4))):
        assert Runner(Attention(made), Attention(projection(QKVParallelLinear, 4))).register() == 4
    assert Runner(Attention(projection(QKVParallelLinear, 1, 2), heads=2)).register() == 1


@pytest.mark.parametrize(
    "attention",
    [
        Attention(torch.nn.Linear(2, 2)),
        Attention(projection(MinimaxM3QKVParallelLinearWithIndexer, 4)),
        Attention(projection(QKVParallelLinear, 4), projection(QKVParallelLinear, 4)),
        Attention(projection(QKVParallelLinear, 4), heads=2),
    ],
    ids=["another projection", "one that extends vLLM's", "two", "another number of heads"],
)
def test_what_is_not_certain_is_not_taken_for_a_replica(attention: Attention) -> None:
    assert Runner(attention).register() == 1
    sure = Attention(projection(QKVParallelLinear, 4))
    assert Runner(sure, attention).register() == 1, "all layers of a group must be sure"
    assert Runner(sure, attention).register("layers.0") == 4


def test_a_layer_that_is_not_of_the_model_is_none() -> None:
    runner = Runner(Attention(projection(QKVParallelLinear, 4)))
    runner.layers["draft"] = Attention(projection(QKVParallelLinear, 4)).attn
    assert runner.register() == 1
    assert runner.register("layers.0", "unknown") == 1
    assert hooks.kv_head_replicas(runner.layers, list(runner.layers)) == 1, (
        "nobody who has a model has us called"
    )


def test_resets_are_told_of_before_and_after() -> None:
    told: list[str] = []
    done = [False]

    def reset() -> bool:
        told.append("reset")
        return done[0]

    manager = SimpleNamespace(reset_prefix_cache=reset)
    hooks.watch_resets(manager, lambda: told.append("before"), lambda: told.append("after"))
    assert manager.reset_prefix_cache() is False
    done[0] = True
    assert manager.reset_prefix_cache() is True
    assert told == ["before", "reset", "before", "reset", "after"]


def test_the_connector_of_this_process_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ours:
        def __init__(self, engine: str) -> None:
            self._vllm_config = config(engine)

    def config(engine: str, ranks: int = 1) -> Any:
        return SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=ranks),
            kv_transfer_config=SimpleNamespace(engine_id=engine),
        )

    def found(group: Any, ranks: int = 1) -> Any:
        monkeypatch.setattr("vllm.distributed.kv_transfer.has_kv_transfer_group", lambda: group is not None)
        monkeypatch.setattr("vllm.distributed.kv_transfer.get_kv_transfer_group", lambda: group)
        return hooks.local_connector(Ours, config("this", ranks))

    ours, others = Ours("this"), Ours("another engine")
    assert found(ours) is ours
    assert found(SimpleNamespace(_connectors=[object(), others, ours])) is ours
    assert found(ours, ranks=2) is None, "others hold blocks too"
    for group in (None, object(), others, SimpleNamespace(_connectors=[others])):
        assert found(group) is None
