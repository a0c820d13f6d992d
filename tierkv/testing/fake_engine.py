"""FakeEngine: an engine with a paged KV cache that calls a connector as vLLM's scheduler and workers do.

No vLLM, no model: what a step computes follows from the tokens alone, so every block that the engine believes to hold
something, and every block in a store, can be checked byte by byte. Wrong context makes wrong results here too, as in a
model, and is an AssertionError where the engine had no reason to expect it.

What it does as vLLM does: chunked prefill, decoding with and without drafts, groups of all kinds with unequal blocks,
windows that give up blocks, exact recurrent states that are handed over, a prefix cache of its own, preemption, aborts
in any state, one step of pipeline (a step is scheduled before the outcome of the one before is known), several ranks
whose reports are merged, failed loads by request and by block, synchronous and asynchronous loads, request ids that are
used again, and another connector that is chosen although ours offered something, and that loads or does not.

What it does better than vLLM: when a synchronous load has failed, what stands on it is computed again by each request
that has it.

Order of the connector's calls: matched_tokens, allocated, step; on the workers start_loads (before the forward pass if
the step waits for them, else after), start_saves, poll, take_bad_blocks, take_report; finished, reported.

Thread safety: none.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tierkv.adapters.vllm.groups import Group, Kind, step_tokens
from tierkv.testing.fake_cache import FakeBlock, FakePool, Truth, hash_of
from tierkv.testing.fake_forward import Forward
from tierkv.testing.fake_requests import FakeRequest, FakeShape, Outcome, Plan, Status, Work, ceil, first_seen
from tierkv.testing.fake_sides import SchedulerSide, WorkerSide

__all__ = ["FakeEngine", "FakeRequest", "FakeShape", "Status"]


class FakeEngine:
    """See the module. Attributes ending in _memory and the like are there to be looked at by tests."""

    def __init__(self, shape: FakeShape) -> None:
        self.shape = shape
        self.groups = [fake.group for fake in shape.groups]
        self.step_unit = step_tokens(self.groups)
        self.block_pool = FakePool(shape.num_blocks)
        self.truth = Truth()
        self.forward = Forward(shape)
        self.ranks = self.forward.ranks
        self.connector: SchedulerSide
        self.workers: Sequence[WorkerSide]
        self.requests: dict[str, FakeRequest] = {}
        """All whose ids are taken."""
        self.waiting: list[FakeRequest] = []
        self.running: list[FakeRequest] = []
        self.pipeline: list[Plan] = []
        self._preempted: set[str] = set()
        self.choose_other = False
        """Whether another connector is chosen for the next request that ours offers something for."""
        self.other_loads = False
        """Whether that one loads what ours offered, asynchronously; else it has nothing."""
        self._others: list[FakeRequest] = []
        """Those whose load by the other connector is under way."""
        self.offered = 0
        """Tokens that the connector offered."""
        self._offers: dict[str, list[tuple[int, int, int]]] = {}
        self._named_now: set[int] = set()
        self._receive_left: dict[str, int] = {}
        self._failed_early: set[str] = set()
        self._number = 0

    # What a connector calls (vLLM's KVCacheManager)

    def get_blocks(self, request_id: str) -> Any:
        """The block tables of a request."""
        return SimpleNamespace(blocks=tuple(self.requests[request_id].tables))

    def evict_blocks(self, block_ids: set[int]) -> None:
        """The engine's own prefix cache no longer knows these blocks."""
        for block_id in block_ids:
            self.block_pool.forget(self.block_pool.blocks[block_id])

    # Requests

    def add(self, request: FakeRequest) -> None:
        """A request arrives; its id must not be taken."""
        assert request.request_id not in self.requests
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self._learn(request)
        self.connector.new_request(request)

    def abort(self, request: FakeRequest) -> None:
        """The client has gone."""
        self._end(request, Status.ABORTED)

    def preempt(self, request: FakeRequest) -> None:
        """Takes a running request's blocks away; it goes on later, from what is cached then."""
        self.running.remove(request)
        self._free(request)
        self._preempted.add(request.request_id)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = 0
        request.stale_tokens = request.num_in_flight_tokens
        request.drop_stale = False
        request.placeholders = 0
        self.waiting.insert(0, request)

    def reset(self) -> bool:
        """Forgets the engine's own prefix cache; False while blocks are in use."""
        self.connector.before_reset()
        done = self.block_pool.reset()
        if done:
            self.connector.was_reset()
        return done

    def other_arrives(self, *, good: bool) -> bool:
        """The oldest load by the other connector ends; False if there is none."""
        if not self._others:
            return False
        request = self._others.pop(0)
        if good:
            self.forward.receive(request, request.num_computed_tokens)
        if request.ended:
            self._free(request)
            del self.requests[request.request_id]
        elif good:
            request.load_ended = True
        elif self.shape.recompute:
            request.num_computed_tokens = 0
            request.load_ended = request.load_failed = True
        else:
            request.load_ended = True
            self._end(request, Status.FAILED)
        return True

    def _end(self, request: FakeRequest, status: Status) -> None:
        if request.ended:
            return
        keeps_blocks = request.status is Status.LOADING and not request.load_ended
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        request.status = status
        self.forward.settle_last(request)
        self._remove_skipped(request, max(0, request.num_computed_tokens - request.num_in_flight_tokens))
        self.connector.finished(request)
        if not keeps_blocks:
            self._free(request)
            del self.requests[request.request_id]

    def _free(self, request: FakeRequest) -> None:
        self._offers.pop(request.request_id, None)
        for table in request.tables:
            self.block_pool.free_blocks(block for block in reversed(table) if not block.is_null)
        request.tables = []

    def _learn(self, request: FakeRequest) -> None:
        """The scheduler's new tokens complete blocks: their hashes."""
        unit = self.shape.hash_block_tokens
        digests = request.sequence.digests
        while (len(request.block_hashes) + 1) * unit <= request.num_tokens:
            end = (len(request.block_hashes) + 1) * unit
            name = hash_of(int(digests[end - 1]))
            self.truth.learn(name, digests[:end])
            request.block_hashes.append(name)

    def _name_of(self, request: FakeRequest, group: Group, index: int) -> bytes:
        return request.block_hashes[(index + 1) * group.block_tokens // self.shape.hash_block_tokens - 1]

    # Scheduling

    def schedule(self) -> Plan:
        """Plans a step, and has the connector give its orders."""
        self._number += 1
        plan = Plan(self._number)
        self._named_now.clear()
        budget = self._schedule_running(plan, self.shape.step_tokens)
        if not plan.preempted:
            self._schedule_waiting(plan, budget)
        plan.fresh, self.block_pool.fresh = self.block_pool.fresh, []
        offers, self._offers = self._offers, {}
        preempted, self._preempted = self._preempted, set()
        cached = [work for work in plan.work if work.request not in plan.new]
        plan.orders = copy.deepcopy(
            self.connector.step(
                SimpleNamespace(
                    num_scheduled_tokens={work.request.request_id: work.count for work in plan.work},
                    scheduled_new_reqs=[
                        SimpleNamespace(req_id=work.request.request_id, num_computed_tokens=work.start)
                        for work in plan.work
                        if work.request in plan.new
                    ],
                    scheduled_cached_reqs=SimpleNamespace(
                        req_ids=[work.request.request_id for work in cached],
                        num_computed_tokens=[work.start for work in cached],
                    ),
                    preempted_req_ids=preempted,
                    has_sync_kv_loads=bool(plan.sync_loads),
                    kv_connector_block_state=SimpleNamespace(boundary_state_offloads=offers),
                )
            )
        )
        for work in plan.work:
            work.request.num_computed_tokens += work.count
            work.request.num_in_flight_tokens += work.count
        return plan

    def _schedule_running(self, plan: Plan, budget: int) -> int:
        for request in list(self.running):
            if request not in self.running or budget <= 0:
                continue
            wanted, drafts = self._wanted(request)
            count = min(wanted, budget)
            drafts = 0 if count < wanted else drafts
            count = self._aligned(request, request.num_computed_tokens, count)
            if count <= 0:
                continue
            while not (given := self._allocate(request, count)):
                if self.connector.frees_blocks_soon():
                    break
                victim = self.running[-1]
                self.preempt(victim)
                plan.preempted = True
                if victim is request:
                    break
            if not given:
                break
            self._plan(plan, request, count, drafts)
            budget -= count
        return budget

    def _wanted(self, request: FakeRequest) -> tuple[int, int]:
        """(tokens to compute next, drafts among them)."""
        known = request.num_tokens - request.num_prompt_tokens
        if request.placeholders and known + request.placeholders >= request.max_tokens:
            return 0, 0
        left = request.num_tokens + request.placeholders - request.num_computed_tokens
        if left == 1 and request.num_computed_tokens >= request.num_prompt_tokens:
            return 1 + self.shape.drafts, self.shape.drafts
        return min(left, self.shape.chunk_tokens), 0

    def _aligned(self, request: FakeRequest, start: int, count: int) -> int:
        """Recurrent groups: a chunk of the prompt ends where a state is to be kept."""
        units = {group.block_tokens for group in self.groups if group.kind is Kind.RECURRENT}
        prompt_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        if not units or start >= prompt_end:
            return count
        (unit,) = units
        end = start + count
        if end < prompt_end and (end // unit * unit > start or unit <= self.shape.chunk_tokens):
            end = end // unit * unit
        stops = [request.num_tokens // unit * unit]
        if start % unit:
            stops.append((start // unit + 1) * unit)
        return max(0, min([stop for stop in stops if start < stop < end], default=end) - start)

    def _plan(self, plan: Plan, request: FakeRequest, count: int, drafts: int) -> None:
        start = request.num_computed_tokens
        decodes = start + count == request.num_tokens + request.placeholders + drafts and start >= (
            request.num_prompt_tokens
        )
        plan.work.append(
            Work(
                request, start, count, decodes and count == 1 + drafts, drafts,
                [[block.block_id for block in table] for table in request.tables],
            )
        )  # fmt: skip
        if start + count >= request.num_tokens + request.placeholders:
            request.placeholders += 1 + drafts

    def _schedule_waiting(self, plan: Plan, budget: int) -> None:
        skipped = []
        queue = sorted(self.waiting, key=lambda request: not request.tables)  # those that hold blocks first
        for request in queue:
            if budget <= 0:
                break
            if (request.status is Status.LOADING and not self._promoted(request)) or (
                request.num_in_flight_tokens and request.stale_tokens
            ):
                skipped.append(request)
                continue
            admitted = self._admit(request, plan, budget)
            if admitted is None:
                break
            budget -= admitted

    def _promoted(self, request: FakeRequest) -> bool:
        """A request that waited for its load may go on, with or without it."""
        if not request.load_ended:
            return False
        if request.load_failed:
            if not request.num_computed_tokens:
                self._free(request)
        else:
            self.forward.check(request, request.num_computed_tokens, "loaded")
        if request.num_computed_tokens:
            self._name(request, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1
        request.served_tokens += request.external_tokens if not request.load_failed else 0
        request.load_ended = request.load_failed = False
        request.status = Status.WAITING
        return True

    def _admit(self, request: FakeRequest, plan: Plan, budget: int) -> int | None:
        """Tokens that a waiting request computes in this step; None when there is no room for it."""
        external, waits, theirs = 0, False, False
        adopted: list[list[FakeBlock]] | None = None
        local = 0
        if request.num_computed_tokens == 0:
            adopted, local = self._local_hit(request)
            found, waits = self.connector.matched_tokens(request, local)
            if found is None:
                return 0
            assert found >= 0
            assert not found or (local + found) % self.step_unit == 0
            assert local + found < request.num_tokens
            self.offered += found
            if found and self.choose_other:
                self.choose_other = False
                theirs = self.other_loads and waits
                found, waits = (found, True) if theirs else (0, False)
            external = found
            waits = waits and external > 0
        start = request.num_computed_tokens + local + external
        count = 0
        if not waits:
            count = min(request.num_tokens - start, budget, self.shape.chunk_tokens)
            count = self._aligned(request, start, count)
            if count <= 0:
                return None
        if waits and not self._may_load(request):
            return None
        if not self._allocate(request, count, adopted, local, external, delay_names=waits):
            return None
        ours = 0 if theirs else external
        self.connector.allocated(request, self.get_blocks(request.request_id), ours)
        if adopted is not None:
            request.external_tokens = ours
        request.num_computed_tokens = start
        if waits:
            request.status = Status.LOADING
            if theirs:
                self._others.append(request)
            return 0
        self.waiting.remove(request)
        self.running.append(request)
        request.status = Status.RUNNING
        plan.new.append(request)
        if external:
            plan.sync_loads.append(request)
            request.served_tokens += external
        request.placeholders = 0
        self._plan(plan, request, count, 0)
        return count

    def _may_load(self, request: FakeRequest) -> bool:
        """Whether a load may hold blocks: only if its request, and all that are on their way, can get all they need."""
        on_their_way = [
            other
            for other in [*self.running, *self.waiting]
            if other.tables and other.num_computed_tokens < other.num_tokens
        ]
        needed = [(other, other.tables) for other in on_their_way if other is not request]
        needed.append((request, [[] for _ in self.groups]))
        reserved = sum(
            max(0, ceil(other.num_tokens + self.shape.drafts, group.block_tokens) - len(table))
            for other, tables in needed
            for group, table in zip(self.groups, tables, strict=True)
        )
        return len(needed) == 1 or reserved <= self.block_pool.free

    # Blocks

    def _local_hit(self, request: FakeRequest) -> tuple[list[list[FakeBlock]], int]:
        """(tables, tokens) of the longest boundary that the engine's own prefix cache serves."""
        boundary = (request.num_tokens - 1) // self.step_unit * self.step_unit
        while boundary > 0:
            tables = []
            for position, group in enumerate(self.groups):
                table = self._cached_table(request, position, group, boundary)
                if table is None:
                    break
                tables.append(table)
            else:
                return tables, boundary
            boundary -= self.step_unit
        return [[] for _ in self.groups], 0

    def _cached_table(
        self, request: FakeRequest, position: int, group: Group, boundary: int
    ) -> list[FakeBlock] | None:
        count = boundary // group.block_tokens
        needed = range(first_seen(group, boundary) // group.block_tokens, count + group.margin_blocks)
        if group.kind is Kind.RECURRENT:
            needed = range(count - 1, count)
        if needed.stop * group.block_tokens > request.num_tokens:
            return None
        table = [self.block_pool.null_block] * count
        for index in needed:
            block = self.block_pool.known(position, self._name_of(request, group, index))
            if block is None or (group.kind is Kind.RECURRENT and block.block_id in self._named_now):
                return None
            if index < count:
                table[index] = block
        return table

    def _allocate(
        self, request: FakeRequest, count: int, adopted: list[list[FakeBlock]] | None = None, local: int = 0,
        external: int = 0, *, delay_names: bool = False,
    ) -> bool:  # fmt: skip
        """Gives a request the blocks for `count` more tokens, and those of a hit; False if there are not enough."""
        computed = request.num_computed_tokens + local + external
        tables = adopted if adopted is not None else request.tables
        if adopted is None:
            self._remove_skipped(request, max(0, computed - request.num_in_flight_tokens))
        plans = [
            self._new_blocks(group, tables[position], computed, count, external)
            for position, group in enumerate(self.groups)
        ]
        kept = [] if adopted is None else [block for table in adopted for block in table if not block.is_null]
        idle = sum(block.ref_cnt == 0 for block in kept)
        if sum(sum(plan) for plan in plans) > self.block_pool.free - idle:
            return False
        if adopted is not None:
            self.block_pool.touch(kept)
            request.tables = adopted
            request.named = [local // group.block_tokens for group in self.groups]
        for table, plan in zip(request.tables, plans, strict=True):
            for real in plan:
                table.append(self.block_pool.take(1)[0] if real else self.block_pool.null_block)
        if not delay_names:
            self._name(request, min(computed + count, request.num_tokens))
        return True

    def _new_blocks(
        self, group: Group, table: list[FakeBlock], computed: int, count: int, external: int
    ) -> list[bool]:
        """For each block that a table gets: whether it is a real one."""
        tokens = group.block_tokens
        last = ceil(computed + count, tokens)
        held = computed // tokens if external else len(table)
        if group.kind is Kind.RECURRENT:
            real = {last - 1, held - 1} if external else {last - 1}
            return [index in real for index in range(len(table), last)]
        skipped = first_seen(group, computed) // tokens if external else 0
        return [index >= skipped for index in range(len(table), last)]

    def _remove_skipped(self, request: FakeRequest, processed: int) -> None:
        """Gives up the blocks that no later token sees."""
        for group, table in zip(self.groups, request.tables, strict=False):
            if group.kind is Kind.RECURRENT:
                end = max(0, processed - 1) // group.block_tokens
            else:
                end = first_seen(group, processed) // group.block_tokens
            gone = [index for index in range(min(end, len(table))) if not table[index].is_null]
            self.block_pool.free_blocks([table[index] for index in reversed(gone)])
            for index in gone:
                table[index] = self.block_pool.null_block

    def _name(self, request: FakeRequest, tokens: int) -> None:
        """The prefix cache learns of the blocks that are complete."""
        for position, (group, table) in enumerate(zip(self.groups, request.tables, strict=True)):
            for index in range(request.named[position], tokens // group.block_tokens):
                block = table[index]
                if block.is_null:
                    continue
                self.block_pool.name(position, self._name_of(request, group, index), block)
                if group.kind is Kind.RECURRENT:
                    self._named_now.add(block.block_id)
                    self._offers.setdefault(request.request_id, []).append(
                        (group.index, block.block_id, (index + 1) * group.block_tokens)
                    )
            request.named[position] = max(request.named[position], tokens // group.block_tokens)

    # The workers

    def execute(self, plan: Plan) -> Outcome:
        """Runs a step on all ranks."""
        outcome = plan.outcome = Outcome()
        for rank in self.ranks:
            rank.scramble(plan.fresh, plan.number)
        orders = [copy.deepcopy(plan.orders) for _ in self.workers]
        if plan.sync_loads:
            for worker, order in zip(self.workers, orders, strict=True):
                worker.start_loads(order)
        for work in plan.work:
            self.forward.compute(work, outcome)
        for worker, order in zip(self.workers, orders, strict=True):
            if not plan.sync_loads:
                worker.start_loads(order)
            worker.start_saves(order)
            received, failed = worker.poll()
            outcome.bad_blocks |= worker.take_bad_blocks()
            self._failed_early |= failed
            for request_id in received:
                left = self._receive_left.get(request_id, len(self.workers)) - 1
                self._receive_left[request_id] = left
                if not left:
                    del self._receive_left[request_id]
                    outcome.received.add(request_id)
            report = worker.take_report()
            if report is not None:
                report = copy.deepcopy(report)
                if outcome.report is None:
                    outcome.report = report
                else:
                    outcome.report.merge(report)
        outcome.failed = self._failed_early & outcome.received
        self._failed_early -= outcome.failed
        return outcome

    # Outcomes

    def update(self, plan: Plan) -> None:
        """Takes a step's outcome in."""
        outcome = plan.outcome
        assert outcome is not None
        errors: list[FakeRequest] = []
        for request_id in outcome.failed:
            request = self.requests.get(request_id)
            if request is not None and request.status is Status.LOADING:
                request.load_failed = True
                if self.shape.recompute:
                    request.num_computed_tokens = 0
                else:
                    errors.append(request)
        cut = self._take_bad_blocks(outcome.bad_blocks, plan)
        if not self.shape.recompute:
            errors += cut
        for work in plan.work:
            self._take_tokens(work, outcome, work.request in cut)
        for request in errors:
            self._end(request, Status.FAILED)
        if outcome.report is not None:
            self.connector.reported(outcome.report)
        for request_id in outcome.received:
            request = self.requests[request_id]
            if request.status is Status.LOADING:
                request.load_ended = True
            else:
                assert request.ended
                self._free(request)
                del self.requests[request_id]

    def _take_bad_blocks(self, bad: set[int], plan: Plan) -> list[FakeRequest]:
        """Requests whose computed tokens were cut because a load has failed."""
        if not bad:
            return []
        assert len(self.groups) == 1, "block ids cannot be reported with several groups"
        scheduled = {work.request: work.count for work in plan.work}
        tokens = self.groups[0].block_tokens
        cut = []
        for request in [*self.running, *(held for held in self.waiting if held.status is Status.LOADING)]:
            computed = request.num_computed_tokens - scheduled.get(request, 0)
            table = request.tables[0]
            first = next(
                (index for index in range(ceil(computed, tokens)) if table[index].block_id in bad), None
            )
            if first is None:
                continue
            cut.append(request)
            request.num_computed_tokens = first * tokens
            if request.status is Status.LOADING:
                request.load_failed = True
                continue
            request.placeholders = 0
            request.stale_tokens = request.num_in_flight_tokens
            request.drop_stale = True
        return cut

    def _take_tokens(self, work: Work, outcome: Outcome, cut: bool) -> None:
        request = work.request
        request.num_in_flight_tokens -= work.count
        stale = request.stale_tokens > 0
        if stale:
            request.stale_tokens -= work.count
        if request in outcome.spoiled:
            assert cut or request.ended or (stale and request.drop_stale), (
                f"{request.request_id} was computed on wrong bytes"
            )
        if cut or request.ended or (stale and request.drop_stale):
            self._forget_unknown(request)
            return
        new = outcome.new_tokens.get(request, 0)
        if new and not stale:
            rejected = work.drafts - outcome.accepted[request]
            request.num_computed_tokens -= rejected
            request.placeholders -= new + rejected
        left = request.num_prompt_tokens + request.max_tokens - request.num_tokens
        request.num_tokens += min(new, left)
        self._learn(request)
        if not stale:
            processed = request.num_computed_tokens - request.num_in_flight_tokens
            self.forward.check(request, min(processed, request.num_tokens), "computed")
        if request.num_tokens == request.num_prompt_tokens + request.max_tokens:
            self._end(request, Status.FINISHED)

    def _forget_unknown(self, request: FakeRequest) -> None:
        """Tokens that the scheduler will not hear of are sampled again."""
        if not request.ended and not request.num_in_flight_tokens:
            request.sequence.cut(request.num_tokens)

    # Steps

    def step(self, *, execute_late: bool = False) -> None:
        """One round of the engine's loop. execute_late: the workers begin with a step only when the next one is
        scheduled (pipelined engines)."""
        plan = self.schedule()
        for earlier in self.pipeline:
            if earlier.outcome is None:
                self.execute(earlier)
        self.pipeline.append(plan)
        if not (execute_late and self.shape.pipelined):
            self.execute(plan)
        while len(self.pipeline) > int(self.shape.pipelined):
            self.update(self.pipeline.pop(0))

    def drain(self) -> None:
        """Takes in the outcome of what is under way."""
        while self.pipeline:
            plan = self.pipeline.pop(0)
            if plan.outcome is None:
                self.execute(plan)
            self.update(plan)

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return not self.requests

    def check_prefix_cache(self) -> None:
        """Every block that the engine's own prefix cache knows holds the right bytes. Nothing may be under way."""
        self.forward.check_prefix_cache(self.block_pool, self.truth)
