"""What the scheduler side tells the workers each step, and what they tell back. Plain data, pickled by the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierkv.adapters.vllm.lora import Adapter
from tierkv.types import HashArray, Int64Array


@dataclass(slots=True, eq=False)
class GroupBlocks:
    """Blocks of one group: hashes (n, 32) uint8, and the engine's block ids (n,) int64 that they lie in."""

    group: int
    hashes: HashArray
    block_ids: Int64Array


@dataclass(slots=True, eq=False)
class LoadOrder:
    """A request's blocks to load. Each rank loads its own part of them all."""

    job: int
    request_id: str
    blocks: list[GroupBlocks]
    waits: bool = False
    """Whether the engine's step waits for it (a synchronous load)."""
    fails: bool = False
    """Nothing is to be moved: the engine was promised what cannot be had, and is to be told so."""
    adapter: Adapter | None = None
    """The LoRA adapter that the request runs under."""


@dataclass(slots=True, eq=False)
class SaveOrder:
    """Blocks to save, of any requests under one LoRA adapter, or none. Their ids stay theirs until every rank has
    reported the job."""

    job: int
    blocks: list[GroupBlocks]
    adapter: Adapter | None = None


@dataclass(slots=True, eq=False)
class StepOrders:
    """One step's orders."""

    step: int
    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    answer: bool = False
    """Whether the workers are to report this step as done even when nothing else is to be reported."""
    greeted: bool = True
    """Whether the scheduler side knows the workers' keyspaces; if not, they tell them with their reports."""
    renewal: str = ""
    """Which keyspaces the orders are about: a word that changes with each reset; empty before the first."""


@dataclass(slots=True, eq=False)
class WorkerReport:
    """What workers report after a step; reports of several ranks are merged."""

    saved: dict[int, int] = field(default_factory=dict)
    """Save job -> ranks that are done with it."""
    unsaved: set[int] = field(default_factory=set)
    """Save jobs of which a rank did not store every block."""
    loaded: dict[int, int] = field(default_factory=dict)
    """Load job -> ranks that are done with it."""
    failed: set[int] = field(default_factory=set)
    """Load jobs of which a rank did not get every block."""
    bad_blocks: set[int] = field(default_factory=set)
    """The engine's ids of the blocks that a step waited for and did not get."""
    steps: dict[int, int] = field(default_factory=dict)
    """Step -> ranks that report it done."""
    greetings: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """(pipeline rank, tensor rank) -> the rank's greeting."""

    def merge(self, other: WorkerReport) -> None:
        """Adds another rank's report."""
        for mine, theirs in (
            (self.saved, other.saved), (self.loaded, other.loaded), (self.steps, other.steps)
        ):  # fmt: skip
            for number, ranks in theirs.items():
                mine[number] = mine.get(number, 0) + ranks
        self.unsaved |= other.unsaved
        self.failed |= other.failed
        self.bad_blocks |= other.bad_blocks
        self.greetings.update(other.greetings)

    def __bool__(self) -> bool:
        return bool(self.saved or self.loaded or self.steps or self.greetings)
