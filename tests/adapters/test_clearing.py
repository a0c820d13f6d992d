"""The clearer: keyspaces are cleared in the end, whatever the agent does; nobody waits for that longer than said."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from connector_harness import HeldStore

from tierkv.adapters.vllm import clearing
from tierkv.adapters.vllm.clearing import MAX_WAITING, Clearer
from tierkv.errors import StorageError
from tierkv.keys import Keyspace
from tierkv.testing.buffers import make_spec
from tierkv.testing.stores import eventually

WAIT_S = 20.0


class StubbornStore(HeldStore):
    """Clears only when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.willing = threading.Event()
        self.answers = threading.Event()
        self.answers.set()
        self.tries = 0
        self.cleared: list[Keyspace] = []

    def clear(self, space: Keyspace, timeout_s: float = 30.0) -> int:
        self.tries += 1
        assert self.answers.wait(WAIT_S)
        if not self.willing.is_set():
            raise StorageError("not now")
        self.cleared.append(space)
        return 1


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clearing, "_AGAIN_S", 0.01)


@pytest.fixture
def store() -> StubbornStore:
    return StubbornStore()


@pytest.fixture
def clearer(store: StubbornStore) -> Iterator[Clearer]:
    clearer = Clearer(store)
    yield clearer
    clearer.stop()


def spaces_of(store: HeldStore, count: int, first: int = 0) -> list[Keyspace]:
    return [store.open(make_spec(64, group=f"group {number}")) for number in range(first, first + count)]


def test_what_is_confirmed_is_reported(store: StubbornStore, clearer: Clearer) -> None:
    store.willing.set()
    spaces, told = spaces_of(store, 3), threading.Event()
    assert clearer.clear([], wait_s=WAIT_S)
    assert clearer.clear(spaces, told.set, WAIT_S)
    assert told.is_set()
    assert sorted(store.cleared, key=spaces.index) == spaces


def test_it_is_tried_until_it_is_confirmed(store: StubbornStore, clearer: Clearer) -> None:
    told: list[int] = []
    assert not clearer.clear(spaces_of(store, 2), lambda: told.append(1))
    eventually(lambda: store.tries >= 3, "it is tried again")
    store.attached = False
    store.willing.set()
    tries = store.tries
    assert not clearer.clear(spaces_of(store, 1, 2), lambda: told.append(2), 0.05)
    assert store.tries <= tries + 1, "an agent that is away is not asked"
    assert not told
    store.attached = True
    assert clearer.clear([], lambda: told.append(3), WAIT_S)
    assert told == [1, 2, 3]
    assert {space.digest for space in store.cleared} == {space.digest for space in spaces_of(store, 3)}


def test_nobody_waits_for_an_agent_that_hangs(store: StubbornStore, clearer: Clearer) -> None:
    store.answers.clear()
    assert not clearer.clear(spaces_of(store, 1), wait_s=0.01)
    store.willing.set()
    store.answers.set()
    assert clearer.clear([], wait_s=WAIT_S)


def test_what_waits_is_bounded_and_a_stop_ends_it(
    store: StubbornStore, clearer: Clearer, caplog: pytest.LogCaptureFixture
) -> None:
    store.attached = False
    for number in range(MAX_WAITING + 2):
        assert not clearer.clear(spaces_of(store, 1, number))
    assert caplog.text.count("never cleared, too many") == 2
    clearer.stop()
    clearer.stop()
    assert f"{MAX_WAITING} keyspaces were never cleared" in caplog.text
    assert not clearer.clear(spaces_of(store, 1))
