"""Renewals: under which keyspaces an engine's blocks go. After each reset it is others, which nobody else has.

Nobody tells what weights an engine has after a reset, so what it computes from then on must not be found by engines
that were not updated, nor by one that starts again from the checkpoint. A renewal is a word that goes into the
keyspaces (identity.renewed()); the scheduler side chooses it, and every step's orders say it to the workers.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from tierkv.adapters.vllm.clearing import Clearer
from tierkv.adapters.vllm.identity import renewed
from tierkv.keys import Keyspace, KeyspaceSpec

SPARE_WORDS = 8
"""A word is used again only when so many others have been used since."""


class KeyspaceStore(Protocol):
    """What is needed of the store."""

    def expect(self, spec: KeyspaceSpec) -> Keyspace: ...

    def forget(self, space: Keyspace) -> None: ...


class Renewals:
    """The scheduler side's, on the engine's thread. Keyspaces that a reset gives up are cleared."""

    def __init__(self, store: KeyspaceStore, clearer: Clearer) -> None:
        self._store = store
        self._clearer = clearer
        self.word = ""
        """In use now; empty before the first reset."""
        self._given_up: list[Keyspace] = []
        """What is given up, and may still be saved to."""
        self._spent: list[str] = []
        """Its words."""
        self._spare: deque[str] = deque()
        """Words whose keyspaces are empty again. An agent never forgets a keyspace, so they are used again."""

    def used(self, specs: Sequence[KeyspaceSpec | None]) -> list[Keyspace]:
        """The keyspaces in use, of those that the engine began with."""
        return [self._store.expect(renewed(spec, self.word)) for spec in specs if spec is not None]

    def give_up(self, spaces: Sequence[Keyspace], *, renew: bool) -> None:
        """These are to be cleared; renew: and others used from now on."""
        self._given_up += spaces
        if renew:
            self._spent += [self.word] if self.word else []
            self.word = self._spare.popleft() if len(self._spare) > SPARE_WORDS else secrets.token_hex(8)

    def clear(self, *, saved: bool, forget: bool, wait_s: float = 0.0) -> bool:
        """Has clear what was given up; False if that was not confirmed within wait_s.

        saved: nothing is being saved there any more; else this is to be called once more when nothing is. forget:
        nobody here uses these keyspaces.
        """
        if not saved:
            return self._clearer.clear(self._given_up, wait_s=wait_s)
        spaces, self._given_up = self._given_up, []
        words, self._spent = self._spent, []

        def confirmed() -> None:
            if forget:
                for space in spaces:
                    self._store.forget(space)
            self._spare.extend(words)

        return self._clearer.clear(spaces, confirmed, wait_s)


class RankSpaces:
    """A worker's keyspaces by renewal; see ConnectorWorker's spaces_of."""

    def __init__(self, store: KeyspaceStore, specs: Sequence[KeyspaceSpec | None]) -> None:
        self._store = store
        self._specs = specs
        self._word = ""
        self._before: list[Keyspace | None] = []

    def __call__(self, word: str) -> list[Keyspace | None]:
        """Those from now on. To those before, jobs may be under way; what was before them is given up."""
        for space in self._before:
            if space is not None:
                self._store.forget(space)
        self._before, self._word = self._expected(self._word), word
        return self._expected(word)

    def _expected(self, word: str) -> list[Keyspace | None]:
        return [None if spec is None else self._store.expect(renewed(spec, word)) for spec in self._specs]
