"""The scheduler side: what to load for a request, what to save of each step, and which blocks the saves hold.

Everything here runs on the engine's thread and only keeps books: look-ups happen on the finder's thread, bytes move on
the workers'. Requests are known by their state here as long as the engine knows them.

A save's source blocks are held by a reference in the engine's block pool until every rank has reported the job, so
preemption, abort, the end of a request or a window that slides on cannot give them to somebody else meanwhile.

Knows the engine's objects only by the attributes that it reads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tierkv.adapters.vllm.announce import Announcer
from tierkv.adapters.vllm.books import PendingSave, RequestState, SaveBook
from tierkv.adapters.vllm.counters import Counters
from tierkv.adapters.vllm.finder import Finder, Search
from tierkv.adapters.vllm.groups import Group, Kind, longest_hit, margin_tokens, step_tokens, to_load
from tierkv.adapters.vllm.lora import AdapterBook
from tierkv.adapters.vllm.messages import GroupBlocks, LoadOrder, StepOrders, WorkerReport
from tierkv.types import HASH_BYTES, TierKind

log = logging.getLogger("tierkv.vllm")

_PATIENCE_S = 1.0
"""How long pending saves may keep the engine from preempting: after that it need not wait for them."""


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """What of the settings and the engine matters here."""

    groups: tuple[Group, ...]
    hash_block_tokens: int
    ranks: int
    """Workers that report each job."""
    max_held_blocks: int
    load: bool = True
    save: bool = True
    load_async: bool = True
    lookup_wait_s: float = 0.002
    lookup_timeout_s: float = 1.0
    save_alarm_s: float = 120.0
    """A save that no rank has reported after so long is told of: its blocks are held until then."""


class ConnectorScheduler:
    """See the module."""

    def __init__(
        self,
        options: SchedulerOptions,
        finder: Finder,
        counters: Counters,
        announcer: Announcer | None = None,
        adapters: AdapterBook | None = None,
    ) -> None:
        """announcer: whom to tell what is stored, if anybody; adapters: knows the engine's LoRA adapters."""
        self._announcer = announcer
        self._adapters = adapters or AdapterBook()
        self._options = options
        self._groups = options.groups
        self._finder = finder
        self._counters = counters
        self._step_tokens = step_tokens(options.groups)
        self._margin_tokens = margin_tokens(options.groups)
        kinds = [group.kind for group in options.groups]
        self._windows_and_full = [
            (position, group)
            for position, group in enumerate(options.groups)
            if kinds[position] is not Kind.RECURRENT
        ]
        self._full = {position for position, kind in enumerate(kinds) if kind is Kind.FULL}
        self._sparse = [
            (position, group)
            for position, group in self._windows_and_full
            if group.store != "all" and position not in self._full
        ]
        """The groups of which not every block is kept."""
        policies = [replace(group, index=0) for group in options.groups]
        self._alike = [policies.index(policy) for policy in policies]
        """For each group: the first one with the same policy."""
        self._positions = {group.index: position for position, group in enumerate(options.groups)}
        self._requests: dict[str, RequestState] = {}
        self._loading: dict[int, tuple[RequestState, Search, int]] = {}
        """Load job -> (request, its search, ranks that are done)."""
        self._book = SaveBook(options.ranks, options.max_held_blocks)
        self._last_job = 0
        self._loads: list[LoadOrder] = []
        self._step = 0
        self._awaited_step = 0
        """The last step that waited for loads: whether they came is known with its outcome."""
        self._known_step = 0
        """The last such step of which all ranks have reported."""
        self._step_ranks: dict[int, int] = {}
        self._waited_s = 0.0
        self._alarmed = False
        self._manager: Any = None
        self._renewal = ""
        self._clear_mark: int | None = None
        """The last job before begin_clear(), until all up to it have ended."""
        self._clean = True
        """Whether no request was given blocks since the engine's own prefix cache was last empty."""
        self._stale = False
        """Whether the engine's own prefix cache has blocks from before begin_clear()."""
        self.serving = False
        """Whether the workers' keyspaces are known: before, nothing is saved."""

    def bind(self, kv_cache_manager: Any) -> None:
        """The engine's cache manager: block tables, and the pool that counts references."""
        self._manager = kv_cache_manager
        self._book.pool = kv_cache_manager.block_pool

    def _next_job(self) -> int:
        self._last_job += 1
        return self._last_job

    # Looking up

    def new_request(self, request: Any) -> None:
        """A request arrived; one that reuses an id starts afresh."""
        self._forget(request.request_id)

    def _state(self, request: Any) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None or state.request is not request:
            self._forget(request.request_id)
            lora = getattr(request, "lora_request", None)
            adapter = self._adapters.adapter_of(lora) if lora is not None else None
            state = self._requests[request.request_id] = RequestState(request, len(self._groups), adapter)
        state.update_hashes(self._groups, self._options.hash_block_tokens)
        return state

    def matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond computed_tokens the store has, and whether they load asynchronously.

        None: not known yet, to be asked again in the next step.
        """
        state = self._state(request)
        state.restarted()
        limit = (request.num_tokens - 1) // self._step_tokens * self._step_tokens
        wanted = self._options.load and not state.no_load and not request.skip_reading_prefix_cache
        if not wanted or limit <= computed_tokens or computed_tokens % self._step_tokens:
            self._end_search(state)
            return 0, False
        search = state.search
        if search is not None and not self._fits(search, computed_tokens, limit):
            self._end_search(state)
            search = None
        if search is None:
            if not self._finder.ready:
                return 0, False
            search = state.search = Search(list(map(state.names, state.hashes)), computed_tokens, limit)
            self._counters.count("lookups")
            self._finder.submit(search)
        if not self._found(search):
            if search.age_s < self._options.lookup_timeout_s:
                self._counters.count("lookups_deferred")
                return None, False
            self._counters.count("lookups_late")
            self._end_search(state)
            state.no_load = True
            return 0, False
        if search.stored and state.asked is not search:
            state.asked = search
            state.stored = search.stored if any(known.any() for known in search.stored) else []
            self._counters.observe("lookup_s", search.took_s)
            if self._announcer is not None:
                self._tell_of_stored(self._announcer, state, search)
        found = search.hit_tokens - computed_tokens
        return (found, self._options.load_async) if found > 0 else (0, False)

    def _tell_of_stored(self, announcer: Announcer, state: RequestState, search: Search) -> None:
        """What others, or an engine before this one, have saved of a request can be announced now: its tokens are here.

        Of what the workers save later, the jobs tell.
        """
        for position, (names, stored) in enumerate(zip(search.hashes, search.stored, strict=True)):
            hashes = state.hashes[position][: len(names)]
            found = np.flatnonzero(stored).tolist()
            announcer.stored(announcer.describe(state.request, position, hashes, names, found))

    def _fits(self, search: Search, computed_tokens: int, limit: int) -> bool:
        """Whether a search still answers the question, and its lease is still held."""
        same = search.above_tokens == computed_tokens and search.limit_tokens == limit
        return same and self._finder.want(search)

    def _found(self, search: Search) -> bool:
        """Waits for a search; for all of this step's together not longer than they may."""
        if search.done.is_set():
            return True
        left_s = self._options.lookup_wait_s - self._waited_s
        if left_s <= 0:
            return False
        begun_s = time.monotonic()
        done = search.done.wait(left_s)
        self._waited_s += time.monotonic() - begun_s
        return done

    def _end_search(self, state: RequestState) -> None:
        if state.search is not None:
            self._finder.close(state.search)
            state.search = None

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """The engine has given the request its blocks; external_tokens of them are ours to load."""
        state = self._state(request)
        state.taken_in = state.awaits = True
        self._clean = False
        if external_tokens == 0:
            self._end_search(state)
            return
        search = state.search
        if search is None:
            raise RuntimeError(f"{request.request_id}: a load that was never offered is asked for")
        boundary = search.above_tokens + external_tokens
        # The engine may take less than was offered; where a group serves no resume there, the load must fail whole.
        whole = longest_hit(self._groups, search.stored, search.above_tokens, boundary) == boundary
        order = LoadOrder(
            self._next_job(), request.request_id, [], not self._options.load_async, not whole, state.adapter
        )
        for position, group in enumerate(self._groups):
            table = blocks.blocks[group.index]
            indices = [
                index for index in to_load(group, search.above_tokens, boundary) if not table[index].is_null
            ]
            if indices:
                ids = np.array([table[index].block_id for index in indices], np.int64)
                order.blocks.append(GroupBlocks(position, search.hashes[position][indices], ids))
        self._finder.keep(search)
        state.search = None
        self._loading[order.job] = (state, search, 0)
        self._loads.append(order)
        self._counters.count("load_requests")

    def refuse(self, request_id: str, blocks: Any) -> None:
        """The engine waits for a load that cannot be: it is told that all of it failed, and offered no other."""
        state = self._requests.get(request_id)
        if state is not None:
            self._end_search(state)
            state.load_failed()
        order = LoadOrder(self._next_job(), request_id, [], not self._options.load_async, fails=True)
        for position, group in enumerate(self._groups):
            ids = np.array(
                [block.block_id for block in blocks.blocks[group.index] if not block.is_null], np.int64
            )
            order.blocks.append(GroupBlocks(position, np.zeros((len(ids), HASH_BYTES), np.uint8), ids))
        self._loads.append(order)

    def hit_sources(self, request: Any, external_tokens: int) -> dict[str, int]:
        """Tokens of the request's load by tier (dram, nvme, dfs); they sum to external_tokens, or nothing is known."""
        search = next(
            (search for state, search, _ in reversed(self._loading.values()) if state.request is request),
            None,
        )
        if search is None or not search.tiers:
            return {}
        # The group with the longest memory has the most blocks to tell by.
        position = min(range(len(self._groups)), key=lambda place: list(Kind).index(self._groups[place].kind))
        group = self._groups[position]
        span = to_load(group, search.above_tokens, search.above_tokens + external_tokens)
        masks = search.tiers[position][span.start : span.stop]
        found: dict[str, int] = {}
        left = external_tokens
        for kind in (TierKind.DRAM, TierKind.NVME, TierKind.DFS):
            here = (masks >> int(kind)) & 1 != 0
            tokens = left if here.all() else min(left, int(np.count_nonzero(here)) * group.block_tokens)
            masks = masks[~here]
            if tokens:
                found[kind.name.lower()] = tokens
                left -= tokens
        for source, tokens in found.items():
            self._counters.count("hit_tokens", tokens, source)
        return found if not left else {}

    # A step

    def step(self, output: Any) -> StepOrders:
        """What the workers are to do in the step that the engine has just scheduled."""
        self._step += 1
        self._waited_s = 0.0
        self._watch_saves()
        orders = StepOrders(self._step, greeted=self.serving, renewal=self._renewal)
        orders.loads, self._loads = self._loads, []
        if output.has_sync_kv_loads:
            self._awaited_step = self._step
        try:
            for request_id in output.preempted_req_ids or ():
                if request_id in self._requests:
                    self._book.drop_tails(self._requests[request_id])
            if self._saving:
                self._collect(output)
                orders.saves = self._book.orders(self._next_job)
                self._counters.count("save_jobs", len(orders.saves))
        except Exception:  # the engine waits for the loads that are ordered here
            log.exception("what this step completes is not saved")
        orders.answer = self._awaited_step > self._known_step
        return orders

    def _watch_saves(self) -> None:
        if not self._book.busy:
            self._alarmed = False
        elif not self._alarmed and self._book.oldest_s > self._options.save_alarm_s:
            self._alarmed = True
            log.error(
                "a worker has not reported its saves for %.0f s: %d of the engine's blocks are held meanwhile, and its "
                "prefix cache cannot be reset", self._book.oldest_s, self._book.held_blocks,
            )  # fmt: skip

    @property
    def _saving(self) -> bool:
        return self._options.save and self.serving and self._manager is not None and not self._stale

    def _collect(self, output: Any) -> None:
        """Finds the blocks that this step completes."""
        scheduled = output.num_scheduled_tokens
        for data in output.scheduled_new_reqs:
            self._consider(data.req_id, data.num_computed_tokens + scheduled[data.req_id])
        cached = output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._consider(request_id, computed + scheduled[request_id])
        state = output.kv_connector_block_state
        if state is not None and state.boundary_state_offloads:
            for request_id, offers in state.boundary_state_offloads.items():
                self._take_states(request_id, offers)

    def _consider(self, request_id: str, tokens_after: int) -> None:
        state = self._requests.get(request_id)
        if state is None:
            return
        state.awaits = False
        if tokens_after < state.next_tokens or state.no_save or self._unsure(state):
            return
        state.update_hashes(self._groups, self._options.hash_block_tokens)
        tokens = min(tokens_after, state.request.num_tokens)
        boundaries = state.prompt_boundaries(self._step_tokens, self._margin_tokens)
        self._keep(state, tokens, boundaries, tokens > state.request.num_prompt_tokens)
        if self._sparse and tokens >= state.request.num_prompt_tokens:
            self._follow_tail(state, tokens)
        state.set_next_tokens(self._groups)

    def _unsure(self, state: RequestState) -> bool:
        """Whether what the request computes may stand on blocks that turn out not to have been loaded.

        A step does not wait to hear of its synchronous loads, by whatever connector, and until then the engine gives
        their blocks to every request that it takes in.
        """
        if state.taken_in:
            state.taken_in = False
            state.hold_until_step = self._awaited_step
        return state.hold_until_step > self._known_step

    def _follow_tail(self, state: RequestState, tokens: int) -> None:
        """Holds what a resume at the request's end needs, should it end now, of that which no other boundary needs.

        The end is known only when it has come, and by then windows have moved beyond what its last boundary needs. So
        the blocks that may leave a window before the next boundary is reached (or, with drafts, the one after it) are
        held; what is still in the window is the engine's until the end.
        """
        boundary = self._last_boundary(tokens)
        beyond = boundary + 2 * self._step_tokens + self._margin_tokens
        table = None
        found: dict[tuple[int, int], list[int]] = {}
        for position, group in self._sparse:
            ask = (self._alike[position], state.next_block[position])
            if ask not in found or state.stored:
                complete = min(tokens // group.block_tokens, len(state.hashes[position]))
                begin, end = group.first_needed(boundary), min(complete, group.first_needed(beyond) + 1)
                found[ask] = self._unsaved(state, position, begin, end)
            wanted = found[ask]
            if not wanted and not state.tails[position]:
                continue
            if table is None:
                table = self._manager.get_blocks(state.request.request_id).blocks
            self._book.follow_tail(state, position, wanted, table[group.index])

    def _unsaved(self, state: RequestState, position: int, begin: int, end: int) -> list[int]:
        """Those of the blocks begin..end-1 of a group that were neither saved when they went by nor stored already."""
        if begin >= end:
            return []
        group = self._groups[position]
        boundaries = state.prompt_boundaries(self._step_tokens, self._margin_tokens)
        kept = group.keeps(begin, min(end, max(begin, state.next_block[position])), boundaries)
        unsaved = np.ones(end - begin, np.bool_)
        unsaved[: len(kept)] = ~kept
        if state.stored:
            known = state.stored[position][begin:end]
            unsaved[: len(known)] &= ~known
        return [begin + int(index) for index in np.flatnonzero(unsaved)]

    def _last_boundary(self, tokens: int) -> int:
        """groups.last_boundary()"""
        return max(0, tokens - self._margin_tokens) // self._step_tokens * self._step_tokens

    def _keep(self, state: RequestState, tokens: int, boundaries: Sequence[int], hold_back: bool) -> None:
        """Queues what of the request's blocks up to `tokens` is complete, is kept, and is not stored yet."""
        found: dict[tuple[int, int, int], list[int]] = {}
        for position, group in self._windows_and_full:
            first = state.next_block[position]
            last = min(tokens // group.block_tokens, len(state.hashes[position]))
            if hold_back:  # a draft layer's last entry still changes with the token that is accepted next
                last -= group.margin_blocks
            if last <= first:
                continue
            ask = (self._alike[position], first, last)
            if ask not in found:
                wanted = group.keeps(first, last, boundaries)
                found[ask] = (np.flatnonzero(wanted) + first).tolist()
            left = self._queue(state, position, found[ask])
            # What there is no room for has another chance in the next step, where it stays with the request for long.
            full = position in self._full
            state.next_block[position] = left[0] if left and full else last
            if left and not full:
                self._counters.count("dropped_blocks", len(left))

    def _queue(self, state: RequestState, position: int, indices: list[int]) -> list[int]:
        """Holds those of a group's blocks that exist and are not stored yet, for the next step's saves.

        Returns those that there is no room for.
        """
        if state.stored:
            known = state.stored[position]
            indices = [index for index in indices if index >= len(known) or not known[index]]
        if not indices:
            return []
        table = self._manager.get_blocks(state.request.request_id).blocks[self._groups[position].index]
        there = [index for index in indices if index < len(table) and not table[index].is_null]
        return self._hold(position, state, there, table)

    def _hold(self, position: int, state: RequestState, indices: list[int], blocks: Any) -> list[int]:
        """blocks: index -> the engine's block. Returns the indices that there is no room for, the last ones."""
        room = self._book.room()
        indices, left = indices[:room], indices[room:]
        if indices:
            held = [blocks[index] for index in indices]
            self._book.hold(held)
            hashes, told = state.hashes[position], []
            names = state.names(hashes)
            if self._announcer is not None:
                told = self._announcer.describe(state.request, position, hashes, names, indices)
            self._book.queue(PendingSave(position, names[indices], held, state.adapter, told))
        return left

    def _take_states(self, request_id: str, offers: Sequence[tuple[int, int, int]]) -> None:
        """Recurrent states that the engine hands over: exact block, exact boundary."""
        state = self._requests.get(request_id)
        if state is None or state.no_save or self._unsure(state):
            return
        state.update_hashes(self._groups, self._options.hash_block_tokens)
        for group_id, block_id, boundary in offers:
            position = self._positions.get(group_id)
            if position is None:
                continue
            index, rest = divmod(boundary, self._groups[position].block_tokens)
            index -= 1
            if rest or not 0 <= index < len(state.hashes[position]):
                continue  # within a block: nobody can name it by a whole block's hash
            if state.stored and index < len(state.stored[position]) and state.stored[position][index]:
                continue
            left = self._hold(position, state, [index], {index: self._manager.block_pool.blocks[block_id]})
            self._counters.count("dropped_blocks", len(left))

    # What the workers report

    def reported(self, report: WorkerReport) -> None:
        """Takes in what workers report."""
        for step, ranks in report.steps.items():
            self._step_ranks[step] = self._step_ranks.get(step, 0) + ranks
            if self._step_ranks[step] >= self._options.ranks:
                del self._step_ranks[step]
                self._known_step = max(self._known_step, step)
        for job in report.failed:
            if job in self._loading:
                self._loading[job][0].load_failed()
        if report.bad_blocks:
            self._forget_what_stands_on(report.bad_blocks)
        for job, ranks in report.loaded.items():
            if job not in self._loading:
                continue
            state, search, done = self._loading[job]
            if done + ranks >= self._options.ranks:
                del self._loading[job]
                self._finder.close(search)
            else:
                self._loading[job] = (state, search, done + ranks)
        for job, ranks in report.saved.items():
            told = self._book.reported(job, ranks, job not in report.unsaved)
            if self._announcer is not None:
                self._announcer.stored(told)

    def _forget_what_stands_on(self, bad: set[int]) -> None:
        """Takes blocks that a step waited for in vain, and what has been computed on them, out of the engine's own
        prefix cache: it computes them again, but gives them to others meanwhile."""
        gone = set(bad)
        for request_id in self._requests:
            for table in self._manager.get_blocks(request_id).blocks:
                ids = [block.block_id for block in table]
                first = next((place for place, block_id in enumerate(ids) if block_id in bad), len(ids))
                gone.update(ids[first:])
        self._manager.evict_blocks(gone)

    # The end of a request

    def finished(self, request: Any) -> None:
        """The request has ended; its blocks are still its own."""
        state = self._requests.get(request.request_id)
        try:
            if state is not None and state.request is request and self._saving and not state.no_save:
                self._keep_at_end(state)
        finally:
            self._forget(request.request_id)

    def _keep_at_end(self, state: RequestState) -> None:
        """Saves what a resume at the end of the request needs."""
        request = state.request
        loading = any(loading is state for loading, _, _ in self._loading.values())
        if state.awaits or loading or self._unsure(state):
            return
        state.update_hashes(self._groups, self._options.hash_block_tokens)
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        tokens = min(computed, request.num_tokens)
        if tokens <= 0:
            return
        boundary = self._last_boundary(tokens)
        passed = list(state.next_block)
        self._keep(state, tokens, [boundary], hold_back=False)
        for position, group in enumerate(self._groups):
            if group.kind is Kind.FULL:
                complete = min(tokens // group.block_tokens, len(state.hashes[position]))
                self._counters.count("dropped_blocks", max(0, complete - state.next_block[position]))
        for position, group in self._sparse:
            # Blocks that no boundary needed when they went by: this one does. Some have left the window since.
            end = min(passed[position], group.blocks_at(boundary) + group.margin_blocks)
            wanted = self._unsaved(state, position, group.first_needed(boundary), end)
            hashes, tail = state.hashes[position], state.tails[position]
            blocks = {
                index: block for index, (name, block) in tail.items() if hashes[index].tobytes() == name
            }
            table = self._manager.get_blocks(request.request_id).blocks[group.index]
            blocks.update(
                (index, table[index]) for index in wanted if index < len(table) and not table[index].is_null
            )
            left = self._hold(position, state, [index for index in wanted if index in blocks], blocks)
            self._counters.count("dropped_blocks", len(left))

    def _forget(self, request_id: str) -> None:
        state = self._requests.pop(request_id, None)
        if state is not None:
            self._end_search(state)
            self._book.drop_tails(state)

    # Waiting and clearing

    def has_unsent_work(self) -> bool:
        """Whether the engine must go on stepping for saves to be sent or reported."""
        return self._book.has_queued or self._book.busy

    def frees_blocks_soon(self) -> bool:
        """Whether blocks come free without preempting anybody: those of saves under way, unless they take long."""
        if self._book.busy and self._book.oldest_s < _PATIENCE_S:
            return True
        # They may wait for as long as their requests run; rather than that one is preempted, they go now.
        dropped = [self._book.drop_tails(state) for state in self._requests.values()] if self._sparse else []
        return any(dropped)

    def before_reset(self) -> None:
        """The engine is about to forget its own prefix cache, which it cannot while blocks are held: what is held for
        ends of requests that may never come is given back."""
        for state in self._requests.values():
            self._book.drop_tails(state)

    def orders_now(self) -> StepOrders:
        """What is to be saved, as an order between two steps."""
        saves = self._book.orders(self._next_job)
        return StepOrders(self._step, saves=saves, greeted=self.serving, renewal=self._renewal)

    def was_reset(self) -> None:
        """The engine has forgotten its own prefix cache."""
        self._clean, self._stale = True, False
        if self._announcer is not None:
            self._announcer.engine_cleared()

    def begin_clear(self, renewal: str) -> None:
        """The cache is to be forgotten: what was computed before now is neither saved nor looked for any more, and
        what is computed from now on belongs to the keyspaces of `renewal`.

        What the engine has not forgotten itself it goes on computing with, for new requests too: nothing is saved then
        until it has.
        """
        self.before_reset()
        self._counters.count("dropped_blocks", self._book.drop_queued())
        self._renewal = renewal
        self._stale = not self._clean
        if self._stale:
            log.warning("the engine has not reset its own prefix cache: nothing is saved until it has")
        self._clear_mark = self._last_job
        for state in self._requests.values():
            state.no_save = True
            self._end_search(state)

    def end_clear(self) -> bool:
        """Whether the last save that was under way at begin_clear() has just ended: true once."""
        if self._clear_mark is None or self._book.busy_until(self._clear_mark):
            return False
        self._clear_mark = None
        return True

    @property
    def held_blocks(self) -> int:
        """Blocks of the engine that saves hold."""
        return self._book.held_blocks
