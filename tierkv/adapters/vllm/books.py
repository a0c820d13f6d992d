"""What the scheduler side keeps of each request, and of the blocks that saves under way hold.

On the engine's thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tierkv.adapters.vllm.finder import Search
from tierkv.adapters.vllm.groups import Group, Kind
from tierkv.adapters.vllm.lora import Adapter, rekeyed
from tierkv.adapters.vllm.messages import GroupBlocks, SaveOrder
from tierkv.keys import pack_hashes
from tierkv.types import HASH_BYTES, BoolArray, HashArray

PARAMETERS_KEY = "tierkv"
_NONE = np.zeros((0, HASH_BYTES), np.uint8)


class RequestState:
    """One request, as long as the engine knows it."""

    __slots__ = (
        "_hashed", "_last_hash", "_prompt", "_rooms", "adapter", "asked", "awaits", "hashes", "hold_until_step",
        "never_save", "next_block", "next_tokens", "no_load", "no_save", "request", "search", "stored", "tails",
        "taken_in",
    )  # fmt: skip

    def __init__(self, request: Any, groups: int, adapter: Adapter | None = None) -> None:
        """adapter: the LoRA adapter of a request that has one; without it, such a request is left alone."""
        self.request = request
        self.adapter = adapter
        self.hashes: list[HashArray] = [_NONE] * groups
        """For each group (n, 32): the engine's hashes of its whole blocks so far."""
        self.search: Search | None = None
        wishes = _wishes(request)
        unknown = adapter is None and getattr(request, "lora_request", None) is not None
        self.no_load = unknown or wishes.get("load") is False
        """The request does not want to be loaded, or that failed, or took too long: it is computed."""
        self.never_save = unknown or wishes.get("save") is False
        """The request does not want to be saved."""
        self.no_save = self.never_save
        """What it has computed so far stands on a cache that was cleared since, or is not to be saved at all."""
        self.hold_until_step = 0
        """Its blocks wait to be saved until this step's outcome is known."""
        self.taken_in = False
        """The engine has given it blocks that others had, and nothing of it has been considered since."""
        self.awaits = False
        """Nothing of it was computed since the engine gave it blocks: what they are to hold may be still to come,
        through whatever connector."""
        self.tails: list[dict[int, tuple[bytes, Any]]] = [{} for _ in range(groups)]
        """For each group: block index -> (hash, held block) of what a resume at the request's end may need."""
        self._hashed = 0
        self._last_hash = b""
        self._rooms: dict[int, HashArray] = {}
        """Hashes a block of a group -> an array with room for more of them."""
        self._prompt: tuple[int, list[int]] = (-1, [])
        self.forget_saves()

    def forget_saves(self) -> None:
        """From here on every block counts as not saved."""
        self.next_block = [0] * len(self.hashes)
        """For each group: the next block to be considered."""
        self.next_tokens = 0
        """Nothing is to be considered before the request has this many tokens."""
        self.stored: list[BoolArray] = []
        """For each group (n,): what the store had when it was last asked; empty if that is nothing."""
        self.asked: Search | None = None
        """The search that said so."""

    def restarted(self) -> None:
        """The engine begins with the request (again): nothing of it is computed yet."""
        if self.no_save and not self.never_save:
            self.no_save = False
            self.forget_saves()

    def load_failed(self) -> None:
        """What was promised has not come: do not ask for it again, and save what is computed in its place."""
        self.no_load = True
        self.forget_saves()

    def update_hashes(self, groups: Sequence[Group], hash_block_tokens: int) -> None:
        """Takes the engine's new block hashes over."""
        known = self.request.block_hashes
        count = len(known)
        same = count >= self._hashed and (not self._hashed or known[self._hashed - 1] == self._last_hash)
        if same and count == self._hashed:
            return
        if not same:
            self._hashed = 0  # another continuation than the one that was hashed
            self.hashes, self._rooms = [_NONE] * len(groups), {}
            self.forget_saves()
        names: dict[int, HashArray] = {}
        for position, group in enumerate(groups):
            per_block = group.block_tokens // hash_block_tokens
            if per_block not in names:  # groups with equal blocks share the array
                names[per_block] = self._grown(position, known, per_block)
            self.hashes[position] = names[per_block]
        self._hashed = count
        self._last_hash = bytes(known[count - 1]) if count else b""

    def _grown(self, position: int, known: Sequence[bytes], per_block: int) -> HashArray:
        """A group's hashes with what is new of the engine's."""
        hashes = self.hashes[position]
        have, count = len(hashes), len(known) // per_block
        if have == count:
            return hashes
        room = self._rooms.get(per_block)
        if room is None or len(room) < count:  # others go on reading from the old one
            room = np.empty((max(64, 2 * have, count), HASH_BYTES), np.uint8)
            room[:have] = hashes
            self._rooms[per_block] = room
        new = known[(have + 1) * per_block - 1 :: per_block]
        joined = b"".join(new)
        if len(new[0]) == HASH_BYTES and len(joined) == len(new) * HASH_BYTES:
            room[have:count] = np.frombuffer(joined, np.uint8).reshape(-1, HASH_BYTES)
        else:
            room[have:count] = pack_hashes(new)
        return room[:count]

    def names(self, hashes: HashArray) -> HashArray:
        """What the store calls blocks of this request, (n, 32): by more than the engine's hashes under an adapter."""
        return hashes if self.adapter is None else rekeyed(hashes, self.adapter.key)

    def prompt_boundaries(self, step_tokens: int, margin_tokens: int) -> list[int]:
        """Where the request's prompt can be resumed: by one that goes on, and by one that repeats it."""
        tokens = self.request.num_prompt_tokens
        if self._prompt[0] != tokens:
            ends = {max(0, end - margin_tokens) // step_tokens * step_tokens for end in (tokens, tokens - 1)}
            self._prompt = (tokens, sorted(ends))
        return self._prompt[1]

    def set_next_tokens(self, groups: Sequence[Group]) -> None:
        """After blocks were considered: when there will be more."""
        self.next_tokens = min(
            (
                (block + 1) * group.block_tokens
                for block, group in zip(self.next_block, groups, strict=True)
                if group.kind is not Kind.RECURRENT
            ),
            default=1 << 62,
        )


def _wishes(request: Any) -> Mapping[str, Any]:
    """What the request's kv_transfer_params say to us: {"tierkv": {"load": false, "save": false}}."""
    given = (getattr(request, "kv_transfer_params", None) or {}).get(PARAMETERS_KEY)
    return given if isinstance(given, Mapping) else {}


@dataclass(slots=True, eq=False)
class _Job:
    blocks: list[Any]
    told: list[Any]
    begun_s: float = field(default_factory=time.monotonic)
    ranks: int = 0
    kept: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class PendingSave:
    """Blocks of one request and group that are to be saved."""

    group: int
    """The group's position."""
    names: HashArray
    blocks: list[Any]
    """The engine's, held."""
    adapter: Adapter | None
    told: list[Any]
    """What the announcer is to tell of them."""


class SaveBook:
    """The save jobs to come and under way, and the references they hold in the engine's block pool."""

    def __init__(self, ranks: int, max_held_blocks: int) -> None:
        self.pool: Any = None
        """The engine's block pool, once it is bound."""
        self._ranks = ranks
        self._max_held_blocks = max_held_blocks
        self._held = 0
        self._queued: list[PendingSave] = []
        self._jobs: dict[int, _Job] = {}

    def room(self) -> int:
        """Blocks that may be held more."""
        return max(0, self._max_held_blocks - self._held)

    def hold(self, blocks: list[Any]) -> None:
        """Keeps the engine from giving the blocks to anybody else."""
        self.pool.touch(blocks)
        self._held += len(blocks)

    def release(self, blocks: list[Any]) -> None:
        """Gives the blocks back, the chain's end first, as the engine does."""
        self.pool.free_blocks(reversed(blocks))
        self._held -= len(blocks)

    def queue(self, save: PendingSave) -> None:
        """Its blocks are held; the next orders() send it."""
        self._queued.append(save)

    @property
    def has_queued(self) -> bool:
        """Whether anything is to be sent."""
        return bool(self._queued)

    def drop_queued(self) -> int:
        """Gives back what was not sent yet; returns how many blocks that were."""
        dropped = [block for save in self._queued for block in save.blocks]
        for save in self._queued:
            self.release(save.blocks)
        self._queued = []
        return len(dropped)

    def orders(self, next_job: Callable[[], int]) -> list[SaveOrder]:
        """One job of all that is queued, group by group; under each LoRA adapter one of its own."""
        queued, self._queued = sorted(self._queued, key=lambda save: save.group), []
        return [
            self._order(next_job(), adapter, [save for save in queued if save.adapter == adapter])
            for adapter in dict.fromkeys(save.adapter for save in queued)
        ]

    def _order(self, job: int, adapter: Adapter | None, saves: Sequence[PendingSave]) -> SaveOrder:
        parts = []
        for position in dict.fromkeys(save.group for save in saves):
            pieces = [save for save in saves if save.group == position]
            ids = [block.block_id for save in pieces for block in save.blocks]
            names = np.concatenate([save.names for save in pieces])
            parts.append(GroupBlocks(position, names, np.array(ids, np.int64)))
        blocks = [block for save in saves for block in save.blocks]
        self._jobs[job] = _Job(blocks, [run for save in saves for run in save.told])
        return SaveOrder(job, parts, adapter)

    def reported(self, job: int, ranks: int, kept: bool) -> list[Any]:
        """`ranks` more ranks are done with the job; returns what is to be told of it if all are and all was stored."""
        known = self._jobs.get(job)
        if known is None:
            return []
        known.ranks += ranks
        known.kept &= kept
        if known.ranks < self._ranks:
            return []
        del self._jobs[job]
        self.release(known.blocks)
        return known.told if known.kept else []

    @property
    def busy(self) -> bool:
        """Whether jobs are under way."""
        return bool(self._jobs)

    def busy_until(self, job: int) -> bool:
        """Whether jobs are under way whose number is not above `job`."""
        return any(number <= job for number in self._jobs)

    @property
    def held_blocks(self) -> int:
        """Blocks that are held, of jobs, of those to come and of tails."""
        return self._held

    def drop_tails(self, state: RequestState) -> bool:
        """Gives back what is held of a request's end; False if that is nothing."""
        held = [block for tail in state.tails for _, block in tail.values()]
        if held:
            self.release(held)
            state.tails = [{} for _ in state.tails]
        return bool(held)

    def follow_tail(
        self, state: RequestState, position: int, wanted: Sequence[int], table: Sequence[Any]
    ) -> None:
        """Holds the blocks `wanted` of one group's tail, and gives up the others. table: the engine's blocks."""
        hashes, tail = state.hashes[position], state.tails[position]
        now = {index: hashes[index].tobytes() for index in wanted}
        gone = [index for index, (name, _) in tail.items() if now.get(index) != name]
        if gone:
            self.release([tail.pop(index)[1] for index in gone])
        new = [
            index for index in wanted if index not in tail and index < len(table) and not table[index].is_null
        ]
        if new and len(new) <= self.room() - self._max_held_blocks // 2:  # saves come first
            self.hold([table[index] for index in new])
            tail.update((index, (now[index], table[index])) for index in new)

    @property
    def oldest_s(self) -> float:
        """The age of the oldest job."""
        return time.monotonic() - min((job.begun_s for job in self._jobs.values()), default=time.monotonic())
