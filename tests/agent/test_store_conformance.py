"""One suite for the store of this process and for those behind agents: callers cannot tell them apart."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agent_harness import serving

import tierkv
from tierkv.agent.aio import AsyncAgentLease, AsyncAgentStore, AsyncJob
from tierkv.agent.client import AgentStore
from tierkv.clock import VirtualClock
from tierkv.config import AgentConfig, StoreConfig
from tierkv.store import Store
from tierkv.store.calls import StoreCalls
from tierkv.testing.stores import TIMEOUT_S, StoreConformance
from tierkv.types import UInt8Array


class TestStore(StoreConformance):
    @contextmanager
    def make_store(self, config: StoreConfig, clock: VirtualClock) -> Iterator[StoreCalls]:
        with Store(config, clock=clock) as store:
            yield store


class TestAgentStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def _socket(self, tmp_path: Path) -> None:
        self.socket = str(tmp_path / "agent.sock")

    @contextmanager
    def make_store(self, config: StoreConfig, clock: VirtualClock) -> Iterator[StoreCalls]:
        # A store in process has no limit of leases either.
        agent = AgentConfig(store=config, socket=self.socket, max_leased_bytes=1 << 40)
        with serving(agent, clock), AgentStore(self.socket, call_timeout_s=20.0) as store:
            yield store


class TestSharedAgentStore(TestAgentStore):
    """An agent whose limits for one client are as tight as they can be, and a block at a time."""

    @contextmanager
    def make_store(self, config: StoreConfig, clock: VirtualClock) -> Iterator[StoreCalls]:
        agent = AgentConfig(
            store=config, socket=self.socket, max_reserved_bytes=1, max_leased_bytes=1 << 40, max_requests=8
        )
        assert msgspec.json.decode(msgspec.json.encode(agent), type=AgentConfig) == agent
        with serving(agent, clock), AgentStore(self.socket, call_timeout_s=20.0) as store:
            yield store


class Loop:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """What the coroutine gives, or raises, on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(3 * TIMEOUT_S)

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """What the function gives on the loop; awaited there if that is a coroutine."""

        async def call() -> Any:
            found = function(*arguments, **options)
            return await found if asyncio.iscoroutine(found) else found

        return self.run(call())

    def close(self) -> None:
        self.call(self.loop.shutdown_default_executor)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(TIMEOUT_S)
        self.loop.close()


class Awaited:
    """An AsyncJob, awaited on its loop."""

    def __init__(self, loop: Loop, job: AsyncJob) -> None:
        self._loop, self._job = loop, job

    def wait(self, timeout_s: float) -> bool:
        return bool(self._loop.call(self._job.wait, timeout_s))

    @property
    def status(self) -> UInt8Array:
        async def status() -> UInt8Array:
            return await self._job

        found: UInt8Array = self._loop.run(status())
        return found

    def ok(self) -> bool:
        return not self.status.any()


class Synchronous:
    """An AsyncAgentStore, or a lease of one, with calls that wait."""

    def __init__(self, loop: Loop, one: AsyncAgentStore | AsyncAgentLease) -> None:
        self._loop, self._one = loop, one

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._one, name)
        return partial(self._call, found) if callable(found) else found

    def _call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        found = self._loop.call(method, *map(_inside, arguments), **options)
        if isinstance(found, AsyncJob):
            return Awaited(self._loop, found)
        return Synchronous(self._loop, found) if isinstance(found, AsyncAgentLease) else found


def _inside(argument: Any) -> Any:
    return argument._one if isinstance(argument, Synchronous) else argument


class TestAsyncAgentStore(TestAgentStore):
    """From an event loop."""

    @contextmanager
    def make_store(self, config: StoreConfig, clock: VirtualClock) -> Iterator[Any]:
        with super().make_store(config, clock):
            loop = Loop()
            try:
                store = loop.run(tierkv.connect_async(f"unix:{self.socket}", call_timeout_s=20.0))
                try:
                    yield Synchronous(loop, store)
                finally:
                    loop.run(store.close())
            finally:
                loop.close()


@pytest.mark.slow
class TestOwnAgentStore(StoreConformance):
    """An agent process of one's own. Its clock cannot be moved from here, and one client may lease half of its DRAM."""

    @contextmanager
    def make_store(self, config: StoreConfig, clock: VirtualClock) -> Iterator[StoreCalls]:
        with tierkv.connect(config=config, call_timeout_s=20.0) as store:
            yield store

    test_parts_that_do_not_all_come_are_dropped_at_the_deadline = None  # type: ignore[assignment]
    test_a_lease_ends_by_itself = None  # type: ignore[assignment]
    test_blocks_are_loaded_while_all_of_dram_is_held = None  # type: ignore[assignment]
