"""What FakeEngine is made for and works on: its shape, its requests, and the steps that it plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tierkv.adapters.vllm.groups import Group, Kind
from tierkv.adapters.vllm.messages import WorkerReport
from tierkv.testing.fake_cache import FakeBlock, FakeGroup, Sequence64


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeShape:
    """What kind of engine it is."""

    groups: tuple[FakeGroup, ...]
    num_blocks: int = 96
    """Block 0 is the null block."""
    hash_block_tokens: int = 4
    step_tokens: int = 48
    """Tokens of a step, all requests together."""
    chunk_tokens: int = 24
    """Tokens of a request in a step."""
    tensor_ranks: int = 1
    drafts: int = 0
    """Draft tokens of a decoding request in a step."""
    pipelined: bool = False
    """Whether a step is scheduled before the outcome of the one before is known (async scheduling)."""
    recompute: bool = True
    """What follows a failed load: computing (kv_load_failure_policy recompute), or the request's end (fail)."""

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return len(self.groups[0].layers)


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


ENDED = (Status.FINISHED, Status.ABORTED, Status.FAILED)


class FakeRequest:
    """One request, with the attributes that connectors read."""

    def __init__(
        self, request_id: str, prompt: Sequence[int], max_tokens: int, *, branch: int = 0, salt: int = 0
    ) -> None:
        """branch: requests with the same prompt and branch go on alike. salt: requests with another share nothing."""
        self.request_id = request_id
        self.num_prompt_tokens = len(prompt)
        self.max_tokens = max_tokens
        self.branch = branch
        self.status = Status.WAITING
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.skip_reading_prefix_cache = False
        self.kv_transfer_params: dict[str, Any] | None = None
        self.block_hashes: list[bytes] = []
        self.sequence = Sequence64(salt)
        """What the workers know; the scheduler knows num_tokens of it."""
        for token in prompt:
            self.sequence.append(token)
        self.num_tokens = len(prompt)
        self.placeholders = 0
        """Tokens that steps under way will bring, drafts included."""
        self.stale_tokens = 0
        self.drop_stale = False
        self.worker_computed = 0
        self.tables: list[list[FakeBlock]] = []
        self.named: list[int] = []
        """For each group: blocks that the prefix cache was told of."""
        self.load_failed = False
        self.load_ended = False
        self.external_tokens = 0
        """What came from the connector, last time."""
        self.served_tokens = 0
        """The same, of all its starts."""

    @property
    def tokens(self) -> list[int]:
        """All that the scheduler knows."""
        return self.sequence.tokens[: self.num_tokens]

    @property
    def ended(self) -> bool:
        """Whether nothing more is computed for it."""
        return self.status in ENDED


@dataclass(slots=True, eq=False)
class Work:
    """A request's share of a step."""

    request: FakeRequest
    start: int
    count: int
    decodes: bool
    drafts: int
    tables: list[list[int]]


@dataclass(slots=True, eq=False)
class Plan:
    """A step that was scheduled."""

    number: int
    work: list[Work] = field(default_factory=list)
    new: list[FakeRequest] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    sync_loads: list[FakeRequest] = field(default_factory=list)
    preempted: bool = False
    orders: Any = None
    outcome: Outcome | None = None


@dataclass(slots=True, eq=False)
class Outcome:
    """What the workers made of a step."""

    new_tokens: dict[FakeRequest, int] = field(default_factory=dict)
    accepted: dict[FakeRequest, int] = field(default_factory=dict)
    spoiled: set[FakeRequest] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)
    report: WorkerReport | None = None


def first_seen(group: Group, position: int) -> int:
    """The first token that the one at `position` sees."""
    if group.kind is Kind.SLIDING:
        return max(0, position - group.reach_tokens)
    if group.kind is Kind.CHUNKED:
        return position // group.reach_tokens * group.reach_tokens
    return 0


def ceil(value: int, unit: int) -> int:
    return -(-value // unit)
