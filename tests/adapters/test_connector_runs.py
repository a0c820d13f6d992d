"""One engine's connector over whole runs: hits happen, and what is resumed, computed and stored is right."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from connector_harness import Rig, chunked, full, held_rig, recurrent, window

from tierkv.adapters.vllm.groups import Kind
from tierkv.testing.fake_engine import FakeRequest, FakeShape, Status

SHAPES: dict[str, FakeShape] = {
    "full": FakeShape(groups=(full(),)),
    "full, pipelined": FakeShape(groups=(full(),), pipelined=True),
    "full, drafts": FakeShape(groups=(full(margin_blocks=1),), drafts=3),
    "full, drafts, pipelined": FakeShape(groups=(full(margin_blocks=1),), drafts=2, pipelined=True),
    "window alone": FakeShape(groups=(window(),)),
    "window and full": FakeShape(groups=(window(), full(index=1))),
    "window, boundary": FakeShape(groups=(window(store="boundary"), full(index=1)), pipelined=True),
    "window, periodic": FakeShape(groups=(window(store="periodic", period=32), full(index=1))),
    "unequal blocks": FakeShape(groups=(window(tokens=4, reach=6), full(tokens=16, index=1)), pipelined=True),
    "unequal, boundary": FakeShape(groups=(window(reach=6, store="boundary"), full(tokens=16, index=1))),
    "chunked": FakeShape(groups=(chunked(), full(index=1))),
    "chunked, boundary": FakeShape(groups=(chunked(store="boundary"), full(index=1)), pipelined=True),
    "recurrent": FakeShape(groups=(recurrent(), full(index=1))),
    "recurrent, pipelined": FakeShape(groups=(full(tokens=8), recurrent(index=1)), pipelined=True),
    "three kinds": FakeShape(
        groups=(window(store="periodic", period=64), recurrent(index=1), full(index=2)), num_blocks=160
    ),
    "tensor ranks": FakeShape(groups=(full(), window(index=1)), tensor_ranks=2, pipelined=True),
    "replicas": FakeShape(groups=(full(replicated=True),), tensor_ranks=2),
    "stages": FakeShape(
        groups=(full(layers=(1, 2)), window(index=1, layers=(0, 1))), tensor_ranks=2, pipelined=True
    ),
    "drafts in a group of their own": FakeShape(groups=(full(), full(index=1, margin_blocks=1)), drafts=2),
}  # fmt: skip


def run(rig: Rig, requests: Sequence[FakeRequest]) -> None:
    for request in requests:
        rig.engine.add(request)
    rig.settled()
    assert all(request.status is Status.FINISHED for request in requests)


def prompt(count: int, seed: int = 1) -> list[int]:
    return [(seed * 31 + place * place) % 6 for place in range(count)]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tokens", [31, 32, 33, 48])
def test_a_second_turn_is_served_from_the_store(name: str, tokens: int) -> None:
    shape = SHAPES[name]
    with held_rig(shape) as (rig, store, _):
        first = FakeRequest("a", prompt(tokens), 17)
        run(rig, [first])
        assert store.saved
        unit = rig.engine.step_unit
        margin = max(group.margin_blocks * group.block_tokens for group in rig.engine.groups)
        states = any(group.kind is Kind.RECURRENT for group in rig.engine.groups)
        for again, kept in (
            (first.tokens[:-1] + [5] * 21, len(first.tokens) - 1),
            (first.tokens[:tokens], tokens),
        ):
            if states and kept % unit == 0:
                continue  # the engine hands a state over only where a step ends, and the request goes on
            assert rig.engine.reset()
            second = FakeRequest("b", again, 5)
            run(rig, [second])
            expected = min((kept - margin) // unit * unit, (len(again) - 1) // unit * unit)
            assert second.external_tokens == expected, f"{kept} tokens were kept"


def test_nothing_is_saved_that_may_stand_on_a_load_whose_outcome_is_not_known() -> None:
    shape = FakeShape(groups=(full(),), pipelined=True)
    with held_rig(shape, load_async=False) as (rig, store, _):
        run(rig, [FakeRequest("a", prompt(40), 2)])
        assert rig.engine.reset()
        store.fail_loads = 9
        rig.engine.add(FakeRequest("b", prompt(40) + [1] * 20, 2))
        rig.engine.step()
        # The next step is scheduled before the outcome of the load is known, and takes what it brings for loaded.
        rig.engine.add(FakeRequest("c", prompt(40) + [2] * 20, 2))
        rig.engine.step()
        rig.settled()


@pytest.mark.parametrize("failures", [1, 2])
def test_a_load_of_a_window_fails_as_a_whole(failures: int) -> None:
    """The engine would go on from before the block that failed, without the window that this needs."""
    with held_rig(FakeShape(groups=(window(),))) as (rig, store, _):
        run(rig, [FakeRequest("a", prompt(40), 2)])
        assert rig.engine.reset()
        store.fail_loads = failures
        again = FakeRequest("b", prompt(40), 2)
        run(rig, [again])
        assert again.served_tokens == 0


@pytest.mark.parametrize("name", ["full, pipelined", "window and full", "recurrent", "tensor ranks"])
def test_what_was_promised_comes_though_blocks_are_evicted(name: str) -> None:
    with held_rig(SHAPES[name]) as (rig, store, finder):
        first = FakeRequest("a", prompt(40), 2)
        run(rig, [first])
        assert rig.engine.reset()
        second = FakeRequest("b", [*first.tokens, 1], 2)
        rig.engine.add(second)
        rig.engine.step()
        assert second.status is Status.LOADING
        for _ in range(3):
            finder.release_ended()
            leased = store.leased()
            assert leased
            store.lose(leased.__contains__)
            rig.engine.step()
        run(rig, [])
        assert second.served_tokens > 0
        finder.release_ended()
        assert not store.leases


def test_another_connector_may_be_chosen() -> None:
    with held_rig(SHAPES["full"]) as (rig, store, finder):
        run(rig, [FakeRequest("a", prompt(40), 2)])
        assert rig.engine.reset()
        rig.engine.choose_other = True
        second = FakeRequest("b", prompt(40), 2)
        run(rig, [second])
        assert rig.engine.offered > 0
        assert second.served_tokens == 0
        finder.release_ended()
        assert not store.leases


def test_blocks_are_not_given_to_others_before_they_are_read() -> None:
    with held_rig(FakeShape(groups=(full(),), num_blocks=32)) as (rig, store, _):
        rig.engine.add(FakeRequest("a", prompt(40), 1))
        for _ in range(4):
            rig.engine.step()
        assert rig.engine.idle
        assert store.pending, "its saves are under way, and it has gone"
        for number in range(4):
            rig.engine.add(FakeRequest(f"other {number}", prompt(20, seed=number + 2), 3))
        for _ in range(8):
            rig.engine.step()
        run(rig, [])
        assert store.saved > 10


def test_saves_that_nobody_reports_are_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    later_s, monotonic = [0.0], time.monotonic
    clock = SimpleNamespace(monotonic=lambda: monotonic() + later_s[0])
    monkeypatch.setattr("tierkv.adapters.vllm.books.time", clock)
    with held_rig(SHAPES["full"]) as (rig, store, _):
        rig.engine.add(FakeRequest("a", prompt(40), 2))
        for _ in range(4):
            rig.engine.step()
        assert store.pending
        later_s[0] = 121
        for _ in range(3):
            rig.engine.step()
        assert caplog.text.count("has not reported its saves") == 1
        run(rig, [])


def test_a_step_whose_end_nobody_told_of_is_saved_with_the_next() -> None:
    with held_rig(SHAPES["full"]) as (rig, store, _):
        (worker,) = rig.workers

        class Untold:
            """An engine's worker that never tells of the end of a forward pass."""

            def start_saves(self, orders: Any) -> None:
                pass

            def __getattr__(self, name: str) -> Any:
                return getattr(worker, name)

        rig.engine.workers = [Untold()]
        run(rig, [FakeRequest("a", prompt(40), 2)])
        assert store.saved >= 10


def test_a_load_that_cannot_be_ordered_is_not_offered_again() -> None:
    with held_rig(SHAPES["full"]) as (rig, store, finder):
        run(rig, [FakeRequest("a", prompt(40), 2)])
        assert rig.engine.reset()
        allocated, scheduler = rig.scheduler.allocated, rig.scheduler

        def broken(request: Any, blocks: Any, external: int) -> None:
            """As the connector does when a load cannot be ordered."""
            if external:
                scheduler.refuse(request.request_id, blocks)
            else:
                allocated(request, blocks, external)

        rig.engine.connector.allocated = broken  # type: ignore[method-assign]
        second = FakeRequest("b", prompt(40), 2)
        run(rig, [second])
        assert second.served_tokens == 0
        finder.release_ended()
        assert not store.leases
