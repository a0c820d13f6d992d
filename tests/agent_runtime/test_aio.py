"""AsyncAgentStore: the same calls from an event loop, which nothing blocks and no call waits for too long."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime_harness import BLOCK_BYTES, TIMEOUT_S, Agent, eventually, make_spec, names, payload

import tierkv
from tierkv import DramConfig, Fragments, StoreConfig
from tierkv.agent.aio import AsyncAgentStore
from tierkv.agent.client import AgentStore
from tierkv.errors import ClosedError

SMALL = StoreConfig(dram=DramConfig(capacity_bytes=8 << 20, first_touch="never", lock_memory="off"))


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 2 * TIMEOUT_S))


async def saved(store: AsyncAgentStore, count: int) -> tuple[tierkv.Keyspace, np.ndarray]:
    space, hashes = await store.open(make_spec()), names(0, count)
    assert not (await store.save(space, hashes, Fragments.from_blocks(payload(hashes)))).any()
    return space, hashes


def test_calls_that_wait_while_the_client_is_closed_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both those on a thread and those that wait for one; nobody's task is cancelled by it."""
    begun, go_on = threading.Semaphore(0), threading.Event()

    def slow(self: AgentStore, *_: Any) -> None:
        begun.release()
        assert go_on.wait(TIMEOUT_S)
        self._check_open()

    async def main() -> None:
        store = await tierkv.connect_async(config=SMALL)
        calls = [asyncio.create_task(store.touch(None, None)) for _ in range(8)]  # type: ignore[arg-type]
        for _ in range(4):
            assert await asyncio.to_thread(begun.acquire, timeout=TIMEOUT_S)
        closing = asyncio.create_task(store.close())
        while sum(call.done() for call in calls) < 4:  # those that wait for a thread are told first
            await asyncio.sleep(0.01)
        go_on.set()
        await closing
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in found] == [ClosedError] * 8

    monkeypatch.setattr(AgentStore, "touch", slow)
    run(main)


def test_every_call() -> None:
    async def main() -> None:
        async with await tierkv.connect_async(config=SMALL, name="aio") as store:
            space, hashes = await saved(store, 16)
            assert (await store.match(space, hashes)).length == 16
            masks = await store.lookup([(space, hashes), (space, names(50, 2))])
            assert masks[0].all()
            assert not masks[1].any()
            await store.touch(space, hashes)
            into = np.zeros((16, BLOCK_BYTES), np.uint8)
            job = store.load(space, hashes, Fragments.from_blocks(into))
            assert await job.wait(TIMEOUT_S)
            assert not (await job).any()
            assert (into == payload(hashes)).all()
            async with await store.lease([(space, hashes)], 30.0) as lease:
                assert lease.held[0].all()
                assert not (await store.stage(lease)).any()
                assert await lease.extend(60.0)
                assert (await store.stats()).leases == 1
            assert not await lease.release()
            assert (await store.stats()).leases == 0
            assert await store.remove(space, hashes[:4]) == 4
            assert await store.clear(space) == 12
            assert await store.flush(5.0) in (True, False)

    run(main)


def test_many_tasks_share_one_client() -> None:
    async def main() -> None:
        async with await tierkv.connect_async(config=SMALL) as store:
            space = await store.open(make_spec())

            async def task(number: int) -> None:
                hashes = names(number * 4, 4)
                await store.save(space, hashes, Fragments.from_blocks(payload(hashes)))
                assert (await store.match(space, hashes)).length == 4
                into = np.zeros((4, BLOCK_BYTES), np.uint8)
                assert not (await store.load(space, hashes, Fragments.from_blocks(into))).any()
                assert (into == payload(hashes)).all()

            async with asyncio.TaskGroup() as group:
                for number in range(20):
                    group.create_task(task(number))
            assert (await store.stats()).pins == 0

    run(main)


def test_an_agent_that_stands_still_costs_no_call_more_than_its_deadline(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"

    async def main() -> None:
        async with await tierkv.connect_async(f"unix:{path}", call_timeout_s=0.2) as store:
            space, hashes = await saved(store, 4)
            stopped = agent.stop_serving()
            try:
                beats = 0

                async def beat() -> None:
                    nonlocal beats
                    while True:
                        await asyncio.sleep(0.01)
                        beats += 1

                heart = asyncio.create_task(beat())
                calls: list[Awaitable[Any]] = [store.match(space, hashes) for _ in range(8)]
                matches = await asyncio.gather(*calls)
                assert [match.length for match in matches] == [0] * 8
                lease = await store.lease([(space, hashes)], 30.0)
                assert not lease.held[0].any()
                assert not await lease.release()
                into = np.zeros((4, BLOCK_BYTES), np.uint8)
                assert (await store.load(space, hashes, Fragments.from_blocks(into), timeout_s=0.2)).all()
                heart.cancel()
                assert beats >= 3  # the loop went on meanwhile, also on a busy machine
            finally:
                os.kill(stopped, signal.SIGCONT)

    with Agent("--socket", str(path), "--dram", "8MiB") as agent:
        agent.wait_serving()
        run(main)
        assert agent.end() == 0


def test_a_cancelled_lease_is_released(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"

    async def main() -> None:
        async with await tierkv.connect_async(f"unix:{path}", call_timeout_s=10.0) as store:
            space, hashes = await saved(store, 4)
            stopped = agent.stop_serving()
            leasing = asyncio.create_task(store.lease([(space, hashes)], 3600.0))
            while not store._executor._threads:  # it has begun, and waits for the answer
                await asyncio.sleep(0)
            leasing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leasing
            os.kill(stopped, signal.SIGCONT)
            # On the same client's threads: the answer that nobody waits for has come when this one has.
            await asyncio.to_thread(eventually, lambda: store.client.stats().leases == 0, "the lease ends")
            assert (await store.stats()).pins == 0

    with Agent("--socket", str(path), "--dram", "8MiB") as agent:
        agent.wait_serving()
        run(main)
        assert agent.end() == 0


def test_closing_ends_what_is_awaited() -> None:
    async def main() -> None:
        store = await tierkv.connect_async(config=SMALL)
        space, hashes = await saved(store, 4)
        jobs = [
            store.save(space, names(100 + 8 * number, 8), Fragments.from_blocks(payload(names(0, 8))))
            for number in range(50)
        ]
        await store.close()
        for job in jobs:
            await job
        await store.close()
        with pytest.raises(tierkv.ClosedError):
            store.load(space, hashes, Fragments.from_blocks(payload(hashes)))

    run(main)
