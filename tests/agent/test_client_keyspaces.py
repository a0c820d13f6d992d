"""A client's keyspaces: asked for late, given up, and look-ups that say when nobody was asked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from agent_harness import BLOCK_BYTES, agent_config, serving

from tierkv.agent.client import AgentStore
from tierkv.agent.connection import AgentUnavailable
from tierkv.errors import KeyspaceError
from tierkv.testing.buffers import make_spec, random_hashes
from tierkv.testing.stores import OK, eventually, load, save

BLOCKS = random_hashes(4, 9)
SPEC = make_spec(BLOCK_BYTES)


def test_a_keyspace_can_be_expected_without_the_agent(tmp_path: Path) -> None:
    config = agent_config(tmp_path)
    with serving(config), AgentStore(config.socket) as store:
        opened = store.open(SPEC)
        assert store.expect(SPEC) is opened
    with serving(config) as server, AgentStore(config.socket) as store:
        server.stop()
        eventually(lambda: not store.attached, "the agent's end is noticed")
        with pytest.raises(AgentUnavailable):
            store.open(SPEC)
        space = store.expect(SPEC)
        assert not store.lookup([(space, BLOCKS)])[0].any()
        with serving(config):
            eventually(lambda: store.attached, "another one is found")
            assert save(store, space, BLOCKS) == [OK] * 4
            assert load(store, space, BLOCKS) == [OK] * 4
            assert store.open(SPEC) is space


def test_what_the_agent_refuses_of_an_expected_keyspace_is_a_miss(tmp_path: Path) -> None:
    config = agent_config(tmp_path)
    with serving(config), AgentStore(config.socket) as store:
        space = store.expect(make_spec(1 << 29))  # no slab has room for such a block
        assert not store.lookup([(space, BLOCKS)])[0].any()
        assert store.match(space, BLOCKS).length == 0


def test_a_keyspace_that_was_given_up_is_not_opened_again(tmp_path: Path) -> None:
    config = agent_config(tmp_path)
    with serving(config) as server, AgentStore(config.socket) as store:
        kept, gone = store.open(SPEC), store.open(make_spec(BLOCK_BYTES, group="gone"))
        store.forget(gone)
        store.forget(gone)
        with pytest.raises(KeyspaceError, match="not opened by this client"):
            store.lookup([(gone, BLOCKS)])
        server.stop()
        eventually(lambda: not store.attached, "the agent's end is noticed")
        with serving(config):
            eventually(lambda: store.attached, "another one is found")
            connection = store.connection()
            assert kept.digest in connection.numbers
            assert gone.digest not in connection.numbers
            again = store.open(gone.spec)
            assert again is not gone
            assert save(store, again, BLOCKS) == [OK] * 4


def test_a_strict_look_up_says_that_nobody_was_asked(tmp_path: Path) -> None:
    config = agent_config(tmp_path)
    with serving(config) as server, AgentStore(config.socket) as store:
        space = store.open(SPEC)
        assert save(store, space, BLOCKS[:2]) == [OK] * 2
        found = store.lookup([(space, BLOCKS)], strict=True)[0]
        assert np.flatnonzero(found).tolist() == [0, 1]
        server.stop()
        eventually(lambda: not store.attached, "the agent's end is noticed")
        assert not store.lookup([(space, BLOCKS)])[0].any()
        with pytest.raises(AgentUnavailable):
            store.lookup([(space, BLOCKS)], strict=True)
