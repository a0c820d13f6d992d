"""One suite for the store of this process and for the one behind an agent: callers cannot tell them apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from agent_harness import serving

from tierkv.agent.client import AgentStore
from tierkv.clock import VirtualClock
from tierkv.config import AgentConfig, StoreConfig
from tierkv.store import Store
from tierkv.testing.stores import StoreConformance, StoreLike


class TestStore(StoreConformance):
    @contextmanager
    def make_store(self, config: StoreConfig, clock: VirtualClock) -> Iterator[StoreLike]:
        with Store(config, clock=clock) as store:
            yield store


class TestAgentStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def _socket(self, tmp_path: Path) -> None:
        self.socket = str(tmp_path / "agent.sock")

    @contextmanager
    def make_store(self, config: StoreConfig, clock: VirtualClock) -> Iterator[StoreLike]:
        # A store in process has no limit of leases either.
        agent = AgentConfig(store=config, socket=self.socket, max_leased_bytes=1 << 40)
        with serving(agent, clock), AgentStore(self.socket, call_timeout_s=20.0) as store:
            yield store


class TestSharedAgentStore(TestAgentStore):
    """An agent whose limits for one client are as tight as they can be, and a block at a time."""

    @contextmanager
    def make_store(self, config: StoreConfig, clock: VirtualClock) -> Iterator[StoreLike]:
        agent = AgentConfig(
            store=config, socket=self.socket, max_reserved_bytes=1, max_leased_bytes=1 << 40, max_requests=8
        )
        assert msgspec.json.decode(msgspec.json.encode(agent), type=AgentConfig) == agent
        with serving(agent, clock), AgentStore(self.socket, call_timeout_s=20.0) as store:
            yield store
