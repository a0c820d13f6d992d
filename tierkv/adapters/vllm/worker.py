"""The worker side: moves the ordered blocks between this rank's KV cache and the agent, and reports their fate.

The engine's thread only hands orders over and picks outcomes up; bytes move on the client's threads. Every order ends:
the client settles each block by its deadline, whatever the agent does.

Knows tensors only through layout.py, and the engine not at all.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tierkv.adapters.vllm.counters import Counters
from tierkv.adapters.vllm.identity import Shard
from tierkv.adapters.vllm.layout import GroupCache
from tierkv.adapters.vllm.lora import LoadedAdapters
from tierkv.adapters.vllm.messages import GroupBlocks, StepOrders, WorkerReport
from tierkv.errors import TierKVError
from tierkv.jobs import Job, finished_job
from tierkv.keys import Keyspace
from tierkv.store.calls import Attachable, MoveCalls
from tierkv.types import BlockStatus, HashArray, Int64Array

log = logging.getLogger("tierkv.vllm")

_GRACE_S = 5.0
"""How much longer than a load's own deadline a synchronous load is waited for."""
_OTHER_WEIGHTS = "this rank has loaded other weights of the LoRA adapter than the request was taken in for"


class Path(Protocol):
    """How the bytes of one group get from the engine's memory to the store and back."""

    def load(self, hashes: HashArray, block_ids: Int64Array, timeout_s: float) -> Job: ...

    def save(self, hashes: HashArray, block_ids: Int64Array, timeout_s: float) -> Job: ...

    def renewed(self, space: Keyspace) -> Path:
        """The same for another keyspace of the same shape; what is under way stays with this one."""


class HostPath:
    """Straight, for caches in host memory: the client copies between the cache and the agent's arena itself."""

    def __init__(self, store: MoveCalls, space: Keyspace, cache: GroupCache, shard: Shard) -> None:
        self._store = store
        self._space = space
        self._cache = cache
        self._part = shard.part

    def load(self, hashes: HashArray, block_ids: Int64Array, timeout_s: float) -> Job:
        """Brings (n,) blocks into the cache."""
        return self._store.load(self._space, hashes, self._cache.fragments(block_ids), self._part, timeout_s)

    def save(self, hashes: HashArray, block_ids: Int64Array, timeout_s: float) -> Job:
        """Hands (n,) blocks of the cache to the store."""
        return self._store.save(self._space, hashes, self._cache.fragments(block_ids), self._part, timeout_s)

    def renewed(self, space: Keyspace) -> HostPath:
        """See Path."""
        path = copy.copy(self)
        path._space = space
        return path


@dataclass(slots=True, eq=False)
class _Transfer:
    """One order under way: a job a group."""

    number: int
    request_id: str
    blocks: list[GroupBlocks]
    jobs: list[Job] = field(default_factory=list)
    begun_s: float = field(default_factory=time.monotonic)

    def done(self) -> bool:
        return all(job.done() for job in self.jobs)


class ConnectorWorker:
    """See the module. `paths` and `shards`: by the group's position; None where this rank has no layers of a group."""

    def __init__(
        self,
        store: Attachable,
        paths: Sequence[Path | None],
        shards: Sequence[Shard],
        block_bytes: Sequence[int],
        counters: Counters,
        *,
        load_timeout_s: float,
        save_timeout_s: float,
        report_blocks: bool,
        greeting: Mapping[tuple[int, int], bytes],
        spaces_of: Callable[[str], Sequence[Keyspace | None]],
        adapters: LoadedAdapters | None = None,
    ) -> None:
        """report_blocks: whether failed loads are reported block by block (see groups.fails_by_block()), or whole.

        spaces_of: a renewal (see StepOrders) -> the groups' keyspaces; it must not wait for the store. adapters: which
        LoRA weights this rank has loaded.
        """
        self._store = store
        self._paths = paths
        self._shards = shards
        self._block_bytes = block_bytes
        self._counters = counters
        self._load_timeout_s = load_timeout_s
        self._save_timeout_s = save_timeout_s
        self._report_blocks = report_blocks
        self._greeting = dict(greeting)
        self._spaces_of = spaces_of
        self._adapters = adapters or LoadedAdapters()
        self._renewal = ""
        self._begun: StepOrders | None = None
        """The step whose saves are still to be begun."""
        self._loads: list[_Transfer] = []
        self._saves: list[_Transfer] = []
        self._report = WorkerReport()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()

    # Orders

    def start_loads(self, orders: StepOrders) -> None:
        """Begins the step's loads; returns when those that the step waits for are done. To be called each step."""
        self._start_begun()
        self._begun = orders
        self._follow(orders.renewal)
        for order in orders.loads:
            refusal = "the engine takes less than was offered" if order.fails else ""
            if not self._adapters.may_compute(order.adapter):
                refusal = _OTHER_WEIGHTS
            transfer = self._begin(order.job, order.request_id, order.blocks, refusal, load=True)
            if order.waits:
                self._wait(transfer)
                self._end_load(transfer, waits=True)
            else:
                self._loads.append(transfer)

    def start_saves(self, orders: StepOrders) -> None:
        """Begins the step's saves; the blocks must hold their bytes by now."""
        self._begun = None
        self._follow(orders.renewal)
        for order in orders.saves:
            refusal = "" if self._adapters.computed(order.adapter) else _OTHER_WEIGHTS
            self._saves.append(self._begin(order.job, "", order.blocks, refusal, load=False))
        if orders.answer:
            self._report.steps[orders.step] = 1
        if not orders.greeted and self._greeting:
            self._report.greetings = dict(self._greeting)

    def end_saves(self, orders: StepOrders, timeout_s: float) -> WorkerReport | None:
        """Begins what is to be saved between two steps, and waits for all that is: take_report()."""
        self._start_begun()
        self.start_saves(orders)
        self.drain(timeout_s)
        return self.take_report()

    def _start_begun(self) -> None:
        """Begins the saves of a step whose end nobody has told of: its forward pass lies behind all the same."""
        if self._begun is not None:
            self.start_saves(self._begun)

    def _follow(self, renewal: str) -> None:
        """From here on, blocks are loaded from and saved to the keyspaces of this renewal."""
        if renewal == self._renewal:
            return
        self._paths = [
            None if path is None or space is None else path.renewed(space)
            for path, space in zip(self._paths, self._spaces_of(renewal), strict=True)
        ]
        self._renewal = renewal

    def _begin(
        self, number: int, request_id: str, blocks: list[GroupBlocks], refusal: str, *, load: bool
    ) -> _Transfer:
        """refusal: why nothing is to be moved, if so."""
        transfer = _Transfer(number, request_id, blocks)
        for piece in blocks:
            path = self._paths[piece.group]
            if path is None or (not load and not self._shards[piece.group].writes):
                continue
            try:
                if refusal:
                    raise TierKVError(refusal)
                if load:
                    job = path.load(piece.hashes, piece.block_ids, self._load_timeout_s)
                else:
                    job = path.save(piece.hashes, piece.block_ids, self._save_timeout_s)
            except Exception as error:  # the engine must learn of every order's end
                log.warning(
                    "%d blocks cannot be %s: %s", len(piece.hashes), "loaded" if load else "saved", error,
                    exc_info=not isinstance(error, TierKVError),
                )  # fmt: skip
                lost = BlockStatus.IO_ERROR if load else BlockStatus.DROPPED
                job = finished_job(np.full(len(piece.hashes), lost, np.uint8))
            transfer.jobs.append(job)
        return transfer

    def _wait(self, transfer: _Transfer) -> None:
        deadline_s = time.monotonic() + self._load_timeout_s + _GRACE_S
        for job in transfer.jobs:
            job.wait(max(0.0, deadline_s - time.monotonic()))

    # Outcomes

    def poll(self) -> tuple[set[str], set[str]]:
        """(requests whose loads have ended, those of them that failed and are to be reported as a whole)."""
        ended = [transfer for transfer in self._loads if transfer.done()]
        for transfer in ended:
            self._loads.remove(transfer)
            self._end_load(transfer, waits=False)
        received, self._received = self._received, set()
        failed, self._failed = self._failed, set()
        return received, failed

    def _end_load(self, transfer: _Transfer, *, waits: bool) -> None:
        self._report.loaded[transfer.number] = 1
        good = bad = moved = 0
        jobs = iter(transfer.jobs)
        for piece in transfer.blocks:
            if self._paths[piece.group] is None:
                continue
            status = next(jobs).status
            failed = status != BlockStatus.OK
            bad += int(np.count_nonzero(failed))
            good += int(np.count_nonzero(~failed))
            moved += int(np.count_nonzero(~failed)) * self._block_bytes[piece.group]
            for value, count in zip(*np.unique(status[failed], return_counts=True), strict=True):
                self._counters.count("failed_load_blocks", int(count), BlockStatus(int(value)).name.lower())
            if self._report_blocks:
                bad_ids = piece.block_ids[failed].tolist()
                self._bad_blocks.update(bad_ids)
                if waits:
                    self._report.bad_blocks.update(bad_ids)
        self._counters.count("loaded_blocks", good)
        self._counters.count("loaded_bytes", moved)
        self._counters.observe("load_s", time.monotonic() - transfer.begun_s)
        if bad:
            log.warning("%s: %d of %d blocks could not be loaded", transfer.request_id, bad, good + bad)
            self._report.failed.add(transfer.number)
            if not self._report_blocks:
                self._failed.add(transfer.request_id)
        if not waits:
            self._received.add(transfer.request_id)

    def take_bad_blocks(self) -> set[int]:
        """The block ids whose loads failed since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> WorkerReport | None:
        """What the scheduler side is to know; None when there is nothing new."""
        ended = [transfer for transfer in self._saves if transfer.done()]
        for transfer in ended:
            self._saves.remove(transfer)
            self._end_save(transfer)
        self._counters.set("agent_attached", float(self._store.attached))
        if not self._report:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def _end_save(self, transfer: _Transfer) -> None:
        self._report.saved[transfer.number] = 1
        jobs = iter(transfer.jobs)
        for piece in transfer.blocks:
            if self._paths[piece.group] is None or not self._shards[piece.group].writes:
                continue
            status = next(jobs).status
            stored = int(np.count_nonzero(status == BlockStatus.OK))
            self._counters.count("saved_blocks", stored)
            self._counters.count("saved_bytes", stored * self._block_bytes[piece.group])
            self._counters.count("dropped_blocks", len(status) - stored)
            if stored < len(status):
                self._report.unsaved.add(transfer.number)
        if transfer.jobs:
            self._counters.observe("save_s", time.monotonic() - transfer.begun_s)

    def drain(self, timeout_s: float) -> bool:
        """Waits for the saves under way; False if some were not done in time."""
        deadline_s = time.monotonic() + timeout_s
        return all(
            job.wait(max(0.0, deadline_s - time.monotonic()))
            for transfer in self._saves
            for job in transfer.jobs
        )
