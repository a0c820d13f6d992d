"""Attachment: the agent, and the tier's keyspaces open at it, kept so by a thread of its own.

Whoever uses it asks for `current`, which is None while there is no agent, and goes on without. A client attaches
again by itself when its agent is back; an agent that stays away is looked for, or started, anew.

Thread safety: every method may be called from any thread.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tierkv.adapters.vllm.identity import renewed
from tierkv.agent.client import AgentStore
from tierkv.agent.connection import AgentUnavailable
from tierkv.errors import TierKVError
from tierkv.keys import Keyspace, KeyspaceSpec

log = logging.getLogger("tierkv.vllm")

_LOOK_S = 1.0
"""How often the thread looks whether the agent is still there."""
_RETRY_S = 0.2
_LONGEST_RETRY_S = 5.0
_REFUSED_RETRY_S = 30.0
_AWAY_S = 2.0
"""How long an agent is away before it is looked for anew."""
_JOIN_TIMEOUT_S = 30.0
MAX_TO_CLEAR = 64


class Attached(NamedTuple):
    """An agent, and the keyspaces by group number."""

    store: AgentStore
    spaces: Mapping[int, Keyspace]


class Attachment:
    """`connect()` finds or starts the agent; it raises a TierKVError or OSError when it cannot."""

    def __init__(self, connect: Callable[[], AgentStore], store: AgentStore | None = None) -> None:
        """`store`: what connect() returned already, if it did."""
        self._connect = connect
        self._lock = threading.Condition()
        self._store = store
        self._specs: Mapping[int, KeyspaceSpec] | None = None
        self._attached: Attached | None = None
        self._first_specs: Mapping[int, KeyspaceSpec] = {}
        self._renewal = ""
        self._reset_early = False
        """Whether clear() came before the keyspaces were known."""
        self._to_clear: list[KeyspaceSpec] = []
        """What is to be removed from the store, the oldest first."""
        self._refused = False
        self._closing = False
        self._told = False
        self._away_since_s: float | None = None
        self._retry_s = _RETRY_S
        self._thread = threading.Thread(target=self._run, name="tierkv-tier-attach", daemon=True)
        self._thread.start()

    @property
    def current(self) -> Attached | None:
        """What can be used now."""
        attached = self._attached
        return attached if attached is not None and attached.store.attached else None

    @property
    def soon(self) -> bool:
        """Whether the agent is there and only the keyspaces are still to be opened."""
        store = self._store
        return (
            self._attached is None
            and self._specs is not None
            and store is not None
            and store.attached
            and not (self._must_clear_first() or self._refused)
        )

    def _must_clear_first(self) -> bool:
        """Whether a keyspace that is still in use is to be cleared."""
        specs = list((self._specs or {}).values())
        return any(spec in specs for spec in self._to_clear)

    def wait(self, timeout_s: float) -> Attached | None:
        """`current`, after waiting while it is to be there `soon`."""
        with self._lock:
            self._lock.wait_for(lambda: self._closing or not self.soon, timeout_s)
        return self.current

    def open(self, specs: Mapping[int, KeyspaceSpec]) -> None:
        """The keyspaces to open, as soon as may be. Once."""
        with self._lock:
            self._first_specs = specs
            self._specs = {number: renewed(spec, self._renewal) for number, spec in specs.items()}
            if self._reset_early:
                self._to_clear += specs.values()
            self._lock.notify_all()

    def clear(self, *, renew: bool) -> None:
        """Removes all blocks of the keyspaces, however often that must be tried. renew: they are given up for others,
        which nobody else has; else `current` is None until it is confirmed."""
        with self._lock:
            self._attached = None
            if renew:
                self._renewal = secrets.token_hex(8)
            if self._specs is None:
                self._reset_early = True
            else:
                self._to_clear += self._specs.values()
                self._specs = {
                    number: renewed(spec, self._renewal) for number, spec in self._first_specs.items()
                }
            if len(self._to_clear) > MAX_TO_CLEAR:
                log.warning(
                    "%d keyspaces are never cleared: too many others wait", len(self._to_clear) - MAX_TO_CLEAR
                )
                del self._to_clear[:-MAX_TO_CLEAR]
            self._lock.notify_all()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._pause(pause_s):
            try:
                pause_s = self._step()
            except Exception:  # the thread must survive; without it the agent is never found again
                log.exception("looking for the agent failed")
                pause_s = _LONGEST_RETRY_S

    def _pause(self, pause_s: float) -> bool:
        """Waits until the next look is due, or something was asked for; True when this closes."""
        with self._lock:
            asked_meanwhile = pause_s == _LOOK_S and self._work_waits()
            if not (self._closing or asked_meanwhile):
                self._lock.wait(pause_s)
            return self._closing

    def _work_waits(self) -> bool:
        return self._specs is not None and (self._attached is None or bool(self._to_clear))

    def _step(self) -> float:
        """One thing after the other that lacks; how long until the next look."""
        store = self._store
        if store is None or self._is_away(store):
            return self._look_for_agent(store)
        if not store.attached:
            return _RETRY_S
        if self._work_waits():
            return self._open(store)
        return _LOOK_S

    def _is_away(self, store: AgentStore) -> bool:
        if store.attached:
            self._away_since_s = None
            return False
        now_s = time.monotonic()
        if self._away_since_s is None:
            self._away_since_s = now_s
        return now_s - self._away_since_s >= _AWAY_S

    def _look_for_agent(self, old: AgentStore | None) -> float:
        try:
            store = self._connect()
        except (TierKVError, OSError) as error:
            log.log(logging.DEBUG if self._told else logging.WARNING, "going on without the agent: %s", error)
            self._told = True
            retry_s, self._retry_s = self._retry_s, min(_LONGEST_RETRY_S, 2 * self._retry_s)
            return retry_s
        with self._lock:
            self._store, self._attached = store, None
        log.info("attached to the agent")
        self._told, self._away_since_s, self._retry_s = False, None, _RETRY_S
        if old is not None:
            old.close()
        return 0.0

    def _open(self, store: AgentStore) -> float:
        with self._lock:
            specs, clear_first = self._specs, self._must_clear_first()
        assert specs is not None
        try:
            if clear_first:
                self._clear(store)
            spaces = {number: store.open(spec) for number, spec in specs.items()}
        except AgentUnavailable as error:
            log.debug("%s", error)
            return _RETRY_S
        except TierKVError as error:
            log.error("the agent refuses the keyspace of this engine, all look-ups miss: %s", error)
            with self._lock:
                self._refused = True
                self._lock.notify_all()
            return _REFUSED_RETRY_S
        with self._lock:
            self._refused = False
            if self._specs is specs and not self._must_clear_first():
                self._attached = Attached(store, spaces)
            self._lock.notify_all()
        try:
            self._clear(store)
        except TierKVError as error:
            log.warning("what was reset is not cleared yet, it is tried on: %s", error)
            return _LONGEST_RETRY_S
        return _LOOK_S

    def _clear(self, store: AgentStore) -> None:
        """Removes what is to be removed; what the store does not confirm is left to be."""
        while True:
            with self._lock:
                spec = self._to_clear[0] if self._to_clear else None
            if spec is None:
                return
            space = store.expect(spec)
            removed = store.clear(space)
            log.info("removed %d copies of blocks from the store, for the engine's cache was reset", removed)
            with self._lock:
                if self._to_clear and self._to_clear[0] is spec:
                    del self._to_clear[0]
                if spec not in (self._specs or {}).values():
                    store.forget(space)

    def close(self) -> None:
        """Detaches; every job of the agent's client is settled. Idempotent."""
        with self._lock:
            self._closing = True
            self._attached = None
            self._lock.notify_all()
        self._thread.join(_JOIN_TIMEOUT_S)
        if self._store is not None:
            self._store.close()
