"""Changes through the agent: what other clients bring and evict is told, and a restarted agent is noticed."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from agent_harness import BLOCK_BYTES, AgentProcess, agent_config, serving, store_config

from tierkv.agent.aio import AsyncAgentStore
from tierkv.agent.client import AgentStore
from tierkv.agent.connection import AgentUnavailable
from tierkv.errors import ArgumentError, KeyspaceError
from tierkv.testing.buffers import make_spec, random_hashes
from tierkv.testing.stores import OK, TIMEOUT_S, eventually, save
from tierkv.types import TierKind

DRAM, NVME = 1 << TierKind.DRAM, 1 << TierKind.NVME
SPEC = make_spec(BLOCK_BYTES)
BLOCKS = random_hashes(40, 3)


def test_what_another_client_saves_and_what_is_demoted_for_it_is_told(tmp_path: Path) -> None:
    config = agent_config(tmp_path, store_config(tmp_path, 16, 256))
    with serving(config), AgentStore(config.socket) as reader, AgentStore(config.socket) as writer:
        ours, others = reader.open(SPEC), writer.open(SPEC)
        elsewhere = writer.open(make_spec(BLOCK_BYTES, group="elsewhere"))
        place = reader.changes([ours]).place
        assert save(writer, elsewhere, BLOCKS[:4]) == [OK] * 4
        assert save(writer, others, BLOCKS) == [OK] * 40
        seen: dict[bytes, set[int]] = {}

        def some_went_down() -> bool:
            nonlocal place
            changes = reader.changes([ours], place, 7)
            assert changes.complete
            assert changes.spaces.tolist() == [0] * len(changes.hashes)
            place = changes.place
            for row, mask in zip(changes.hashes, changes.tiers.tolist(), strict=True):
                seen.setdefault(row.tobytes(), set()).add(mask)
            return len(seen) == 40 and any(NVME in masks for masks in seen.values())

        eventually(some_went_down, "40 blocks came, and some were demoted")
        assert all(DRAM in masks for masks in seen.values())
        assert reader.remove(ours, BLOCKS[:1])
        assert 0 in reader.changes([ours], place).tiers


@pytest.mark.crash
def test_a_restarted_agent_is_another_feed(tmp_path: Path) -> None:
    config = agent_config(tmp_path, store_config(tmp_path, 32, 256))
    with AgentProcess(tmp_path, config) as agent, AgentStore(config.socket) as store:
        space = store.open(SPEC)
        place = store.changes([space]).place
        assert store.changes([space], place).complete
        agent.process.send_signal(signal.SIGKILL)
        eventually(lambda: not store.attached, "the loss is noticed")
        with pytest.raises(AgentUnavailable):
            store.changes([space], place)
        with AgentProcess(tmp_path, config):
            eventually(lambda: store.attached, "attached again")
            changes = store.changes([space], place)
            assert not changes.complete
            assert not len(changes.hashes)
            assert store.changes([space], changes.place).complete


def test_arguments_are_checked_on_both_sides(tmp_path: Path) -> None:
    config = agent_config(tmp_path)
    with serving(config), AgentStore(config.socket) as store, AgentStore(config.socket) as other:
        space = store.open(SPEC)
        for count in (0, 1 << 17):
            with pytest.raises(ArgumentError, match="count"):
                store.changes([space], count=count)
        with pytest.raises(KeyspaceError):
            other.changes([space])
        assert store.changes([space], count=1).complete
        assert store.changes([]).complete


def test_changes_over_asyncio(tmp_path: Path) -> None:
    config = agent_config(tmp_path)

    async def follow() -> None:
        async with AsyncAgentStore(AgentStore(config.socket)) as store:
            space = await store.open(SPEC)
            place = (await store.changes([space])).place
            assert save(store.client, space, BLOCKS[:3]) == [OK] * 3
            changes = await store.changes([space], place)
            assert (changes.tiers.tolist(), changes.hashes.tolist()) == ([DRAM] * 3, BLOCKS[:3].tolist())

    with serving(config):
        asyncio.run(asyncio.wait_for(follow(), TIMEOUT_S))
