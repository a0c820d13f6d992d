"""Renewals: no name is shared, none is used again while something of it could be left, and their number is bounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from tierkv.adapters.vllm.identity import renewed
from tierkv.adapters.vllm.renewals import SPARE_WORDS, RankSpaces, Renewals
from tierkv.keys import Keyspace, KeyspaceSpec
from tierkv.testing.buffers import make_spec

SPECS = [make_spec(64, group="a"), None, make_spec(64, group="b")]


class Store:
    """Knows what is open."""

    def __init__(self) -> None:
        self.open: dict[bytes, Keyspace] = {}

    def expect(self, spec: KeyspaceSpec) -> Keyspace:
        return self.open.setdefault(spec.digest(), Keyspace(spec, spec.digest(), len(self.open) + 1))

    def forget(self, space: Keyspace) -> None:
        self.open.pop(space.digest, None)


class LateClearer:
    """Confirms when the test says so, in order."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[Keyspace], Callable[[], None] | None]] = []
        self.cleared: list[Keyspace] = []

    def clear(
        self, spaces: Sequence[Keyspace], then: Callable[[], None] | None = None, wait_s: float = 0.0
    ) -> bool:
        self.asked.append((list(spaces), then))
        return wait_s > 0 and self.confirm(len(self.asked))

    def confirm(self, count: int) -> bool:
        for _ in range(min(count, len(self.asked))):
            spaces, then = self.asked.pop(0)
            self.cleared += spaces
            if then is not None:
                then()
        return True


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.booleans()), min_size=1, max_size=60))
def test_a_name_is_used_again_only_when_it_is_known_to_be_empty(steps: list[tuple[bool, int, bool]]) -> None:
    """saving: saves are still under way at the reset, and end before the next; confirm: what the store gets done."""
    store, clearer = Store(), LateClearer()
    renewals = Renewals(store, clearer)  # type: ignore[arg-type]
    used = [renewals.word]
    for saving, confirm, waits in steps:
        spaces = renewals.used(SPECS)
        assert {space.spec.extra.get("renewal", "") for space in spaces} == {renewals.word}
        renewals.give_up(spaces, renew=True)
        assert renewals.word
        assert renewals.word not in used[-SPARE_WORDS:], "too soon"
        if renewals.word in used:
            name = renewed(make_spec(64, group="a"), renewals.word).digest()
            assert used.count(renewals.word) <= [space.digest for space in clearer.cleared].count(name)
            assert not any(name == space.digest for asked, _ in clearer.asked for space in asked)
        used.append(renewals.word)
        if saving:
            renewals.clear(saved=False, forget=True)
            clearer.confirm(confirm)
        renewals.clear(saved=True, forget=True, wait_s=float(waits))
        clearer.confirm(confirm)
    clearer.confirm(1000)
    digests = {space.digest for space in renewals.used(SPECS)}
    assert store.open.keys() == digests, "only what is in use stays open"
    if all(confirm == 2 for _, confirm, _ in steps):
        assert len(set(used)) <= SPARE_WORDS + 4


def test_names_that_stay_are_cleared_and_not_forgotten() -> None:
    store, clearer = Store(), LateClearer()
    renewals = Renewals(store, clearer)  # type: ignore[arg-type]
    spaces = renewals.used(SPECS)
    renewals.give_up(spaces, renew=False)
    assert renewals.clear(saved=True, forget=False, wait_s=1.0)
    assert (renewals.word, clearer.cleared) == ("", spaces)
    assert renewals.used(SPECS) == spaces


def test_a_rank_keeps_the_keyspaces_before_open_for_its_jobs() -> None:
    store = Store()
    spaces_of = RankSpaces(store, SPECS)
    first = spaces_of("one")
    assert [space is None for space in first] == [False, True, False]
    for word in ("two", "three", "four"):
        now = spaces_of(word)
        names = {renewed(spec, word).digest() for spec in SPECS if spec is not None}
        assert {space.digest for space in now if space is not None} == names
        assert len(store.open) == 4, "those in use, and those before"
