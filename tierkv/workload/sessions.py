"""A generator of agent sessions, for replay where no trace is at hand.

Each session re-sends its whole history every turn: a system prompt that all sessions share, the session's
first input, and then, turn after turn, the output of the turn before and some new tokens. Sessions run
interleaved, with the pauses of people and tools between turns, so that by the time a session comes back
others have used the cache. The defaults are the shape of measured agent traffic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tierkv.errors import ArgumentError
from tierkv.types import Int64Array
from tierkv.workload.traces import Request

_P99_SIGMAS = 2.3263
"""How many standard deviations a normal distribution's 99th percentile lies above its median."""
_IDS_PER_SEED = 1 << 40
MAX_SEED = (1 << 22) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """The shape of the sessions. Lengths are in tokens."""

    sessions: int = 8
    turns: int = 30
    seed: int = 1
    """Decides the pauses and, so that the blocks of two workloads never mix, the ids."""
    block_tokens: int = 512
    common_tokens: int = 20_000
    """The prompt's head that all sessions share."""
    first_input_tokens: int = 10_000
    """What a session adds in its first turn."""
    new_tokens: int = 2_048
    """What it adds in each later turn, besides the output of the turn before."""
    output_tokens: int = 900
    pause_median_s: float = 5.2
    pause_p99_s: float = 81.4
    output_tokens_per_s: float = 50.0
    """How fast a turn is answered: a session's next turn comes after its answer and a pause."""
    start_within_s: float = 60.0
    """Sessions start at random moments within this time."""

    def validate(self) -> None:
        """Raises ArgumentError that names the field that is out of range."""
        for name in ("sessions", "turns", "block_tokens"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"sessions: {name} is {getattr(self, name)}: it must be 1 or more")
        for name in ("common_tokens", "first_input_tokens", "new_tokens", "output_tokens", "start_within_s"):
            if getattr(self, name) < 0:
                raise ArgumentError(f"sessions: {name} is {getattr(self, name)}: it must not be negative")
        if not 0 <= self.seed <= MAX_SEED:
            raise ArgumentError(f"sessions: seed is {self.seed}: it must be within 0..{MAX_SEED}")
        if not 0 < self.pause_median_s <= self.pause_p99_s:
            raise ArgumentError("sessions: pauses need 0 < pause_median_s <= pause_p99_s")
        if not self.output_tokens_per_s > 0:
            raise ArgumentError("sessions: output_tokens_per_s must be more than 0")
        if self.sessions * self.blocks_at(self.turns - 1) >= _IDS_PER_SEED:
            raise ArgumentError("sessions: too many blocks: lower sessions, turns or the tokens a turn")

    def input_tokens(self, turn: int) -> int:
        """Tokens of the prompt of turn `turn`, counted from 0."""
        grown = turn * (self.output_tokens + self.new_tokens)
        return self.common_tokens + self.first_input_tokens + grown

    def blocks_at(self, turn: int) -> int:
        """Full blocks of that prompt. The last, partly filled block has no hash in an engine, so none
        here."""
        return self.input_tokens(turn) // self.block_tokens


def generate_sessions(spec: SessionSpec) -> list[Request]:
    """The requests of all sessions in order of time; the same spec gives the same list on every machine."""
    spec.validate()
    random = np.random.default_rng(spec.seed)
    starts_s = random.uniform(0.0, spec.start_within_s, spec.sessions)
    sigma = math.log(spec.pause_p99_s / spec.pause_median_s) / _P99_SIGMAS
    pauses_s = random.lognormal(math.log(spec.pause_median_s), sigma, (spec.sessions, spec.turns))
    between_s = spec.output_tokens / spec.output_tokens_per_s + pauses_s
    offsets_s = np.concatenate([np.zeros((spec.sessions, 1)), np.cumsum(between_s, axis=1)[:, :-1]], axis=1)
    times_ms = np.round((starts_s[:, None] + offsets_s) * 1000)
    chains = [_chain(spec, session) for session in range(spec.sessions)]
    order = np.argsort(times_ms, axis=None, kind="stable")
    requests = []
    for position in order:
        session, turn = divmod(int(position), spec.turns)
        ids = chains[session][: spec.blocks_at(turn)]
        time_ms = float(times_ms[session, turn])
        requests.append(Request(time_ms, spec.input_tokens(turn), spec.output_tokens, ids))
    return requests


def _chain(spec: SessionSpec, session: int) -> Int64Array:
    """The ids of all blocks a session ever has. A block is common only if its every token is."""
    total = spec.blocks_at(spec.turns - 1)
    common = min(spec.common_tokens // spec.block_tokens, total)
    own = total - common
    first_id = spec.seed * _IDS_PER_SEED
    ids = np.arange(first_id, first_id + total, dtype=np.int64)
    ids[common:] += session * own
    return ids
