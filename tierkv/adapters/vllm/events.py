"""KV cache events of the store for routers: which blocks tierkv holds, on which medium.

vLLM publishes its events and the connector's in one stream. A router that follows it learns of a stored block its
hash, its parent's hash, its tokens and its group as with blocks in the engine's own cache, and tells the places apart
by `medium` (CPU for DRAM, STORAGE for NVMe and shared filesystems), `locality` and `ownership` ("tierkv-nvme").

What waits for the engine's next step is bounded by whoever tells: room() says how much more may be.

Thread safety: every method may be called from any thread.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import (
    ExternalBlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.request import Request

from tierkv.errors import ArgumentError
from tierkv.types import HASH_BYTES, BoolArray, HashArray, TierKind

MAX_PENDING_BLOCKS = 100_000
"""Blocks that one step's events may name; vLLM's publisher keeps as many batches by default."""
_XXHASH_BYTES = 16
"""Length of vLLM's xxhash block hashes; all others fill HASH_BYTES."""

_PLACES: dict[TierKind, tuple[str, str | None, str]] = {
    TierKind.DRAM: (MEDIUM_CPU, "LOCAL", "tierkv-dram"),
    TierKind.NVME: (MEDIUM_STORAGE, "LOCAL", "tierkv-nvme"),
    TierKind.DFS: (MEDIUM_STORAGE, "REMOTE", "tierkv-dfs"),
}
"""Tier -> medium, locality, ownership as vLLM's events spell them. HBM is the engine's own to announce."""


@dataclass(frozen=True, slots=True)
class EventGroup:
    """What events tell of a KV-cache group."""

    index: int
    block_tokens: int
    kind: str
    """vLLM's KVCacheSpecKind, such as full_attention."""
    sliding_window: int | None


@dataclass(frozen=True, slots=True, eq=False)
class StoredRun:
    """Consecutive blocks of one request and group, with all that their events need once the request is gone."""

    group: int
    hashes: HashArray
    """(n, 32) uint8."""
    parent: bytes | None
    """The hash of the block before the first; None where the first begins the sequence."""
    token_ids: Sequence[int]
    """n * the group's block_tokens."""
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: Sequence[tuple[Any, ...] | None] | None = None
    """One entry a block, as vLLM's hasher makes them; None when they are not known."""
    session_id: str | None = None


class EventLog:
    """Collects events between two take() calls; does nothing while `enabled` is false."""

    def __init__(
        self,
        groups: Sequence[EventGroup],
        *,
        enabled: bool,
        hash_bytes: int = HASH_BYTES,
        max_pending_blocks: int = MAX_PENDING_BLOCKS,
    ) -> None:
        """`hash_bytes`: length of the engine's block hashes; tierkv's rows are zero-extended to 32."""
        if not 1 <= hash_bytes <= HASH_BYTES or max_pending_blocks < 1:
            raise ArgumentError(
                f"EventLog: hash_bytes {hash_bytes} or max_pending_blocks {max_pending_blocks}"
            )
        self.enabled = enabled
        self._groups = {group.index: group for group in groups}
        self._hash_bytes = hash_bytes
        self._max_blocks = max_pending_blocks
        self._lock = threading.Lock()
        self._pending: deque[KVCacheEvent] = deque()
        self._pending_blocks = 0

    @classmethod
    def from_config(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> EventLog:
        """For this engine: enabled when its kv_events_config says so."""
        events = vllm_config.kv_events_config
        groups = [
            EventGroup(
                index,
                group.kv_cache_spec.block_size,
                get_kv_cache_spec_kind(group.kv_cache_spec).value,
                get_kv_cache_spec_sliding_window(group.kv_cache_spec),
            )
            for index, group in enumerate(kv_cache_config.kv_cache_groups)
        ]
        enabled = events is not None and bool(events.enable_kv_cache_events)
        short = str(vllm_config.cache_config.prefix_caching_hash_algo).startswith("xxhash")
        hash_bytes = _XXHASH_BYTES if short else HASH_BYTES
        return cls(groups, enabled=enabled, hash_bytes=hash_bytes)

    def describe(
        self, request: Request, group: int, hashes: HashArray, first_block: int, parent: bytes | None
    ) -> StoredRun | None:
        """Blocks first_block, first_block + 1, ... of `request`, to be told by stored() later; None when disabled.

        hashes: (n, 32) uint8, the group's block hashes; parent: the hash of block first_block - 1, None for 0. The
        request must have all tokens of these blocks.
        """
        if not self.enabled or not len(hashes):
            return None
        block_tokens = self._groups[group].block_tokens
        start = first_block * block_tokens
        end = start + len(hashes) * block_tokens
        token_ids = array("i", request.all_token_ids[start:end])
        if len(token_ids) != end - start:
            raise ArgumentError(
                f"describe: request {request.request_id} has {len(request.all_token_ids)} tokens, "
                f"blocks up to {end} were named"
            )
        lora = request.lora_request
        return StoredRun(
            group,
            np.array(hashes),
            parent,
            token_ids,
            lora_id=lora.adapter_id if lora is not None else None,
            lora_name=lora.name if lora is not None else None,
            extra_keys=_extra_keys(request, start, end, block_tokens),
            session_id=getattr(request, "session_id", None),
        )

    def stored(self, run: StoredRun | None, tier: TierKind, kept: BoolArray | None = None) -> None:
        """The blocks of `run` are in `tier` now; of `kept` ((n,) bool) only those. One event a gapless stretch."""
        if not self.enabled or run is None:
            return
        medium, locality, ownership = _place(tier)
        group = self._groups[run.group]
        count = len(run.hashes)
        mask = np.ones(count, np.bool_) if kept is None else np.asarray(kept, np.bool_)
        if mask.shape != (count,):
            raise ArgumentError(f"stored: kept has shape {mask.shape}, the run {count} blocks")
        for start, end in _stretches(mask):
            extra = run.extra_keys[start:end] if run.extra_keys is not None else None
            fields: dict[str, Any] = {
                "block_hashes": self._external(run.hashes[start:end]),
                "parent_block_hash": self._parent(run, start),
                "token_ids": list(run.token_ids[start * group.block_tokens : end * group.block_tokens]),
                "block_size": group.block_tokens,
                "lora_id": run.lora_id,
                "medium": medium,
                "lora_name": run.lora_name,
                "extra_keys": to_event_extra_keys(extra),
                "group_idx": group.index,
                "kv_cache_spec_kind": group.kind,
                "kv_cache_spec_sliding_window": group.sliding_window,
                "locality": locality,
                "ownership": ownership,
                "session_id": run.session_id,
            }
            self._append(BlockStored(**fields), end - start)

    def removed(self, group: int, hashes: HashArray, tier: TierKind) -> None:
        """These blocks ((n, 32) uint8) are no longer in `tier`."""
        if not self.enabled or not len(hashes):
            return
        medium, locality, ownership = _place(tier)
        event = BlockRemoved(
            block_hashes=self._external(hashes),
            medium=medium,
            group_idx=group,
            locality=locality,
            ownership=ownership,
        )
        self._append(event, len(hashes))

    def room(self) -> int:
        """How many more blocks may be told of before the next take()."""
        with self._lock:
            return max(0, self._max_blocks - self._pending_blocks)

    def drop(self) -> None:
        """What waits is moot."""
        self.take()

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call, in order."""
        with self._lock:
            events = list(self._pending)
            self._pending.clear()
            self._pending_blocks = 0
        return events

    # Inside

    def _append(self, event: KVCacheEvent, blocks: int) -> None:
        with self._lock:
            self._pending.append(event)
            self._pending_blocks += blocks

    def _external(self, hashes: HashArray) -> list[ExternalBlockHash]:
        """As vLLM publishes them: bytes, or 64-bit integers where its settings say so."""
        packed = np.ascontiguousarray(hashes[:, : self._hash_bytes]).tobytes()
        size = self._hash_bytes
        return [
            maybe_convert_block_hash(packed[start : start + size]) for start in range(0, len(packed), size)
        ]

    def _parent(self, run: StoredRun, start: int) -> ExternalBlockHash | None:
        if start:
            return self._external(run.hashes[start - 1 : start])[0]
        return maybe_convert_block_hash(run.parent[: self._hash_bytes]) if run.parent is not None else None


def _place(tier: TierKind) -> tuple[str, str | None, str]:
    place = _PLACES.get(tier)
    if place is None:
        raise ArgumentError(f"events: tier {tier!r} has no medium in vLLM's events")
    return place


def _stretches(mask: BoolArray) -> Iterator[tuple[int, int]]:
    """(start, end) of each run of true entries."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _extra_keys(request: Request, start: int, end: int, block_tokens: int) -> list[tuple[Any, ...] | None]:
    """What besides the tokens went into each block's hash, as vLLM's own events tell it; None where nothing did."""
    if not (
        request.mm_features or request.lora_request or getattr(request, "prompt_embeds", None) is not None
    ):
        # All that is left is a salt, which goes into the first block: no need to ask for each.
        first, _ = generate_block_hash_extra_keys(request, start, start + block_tokens, 0)
        return [first] + [None] * ((end - start) // block_tokens - 1)
    multimodal = 0
    found: list[tuple[Any, ...] | None] = []
    for block_start in range(start, end, block_tokens):
        keys, multimodal = generate_block_hash_extra_keys(
            request, block_start, block_start + block_tokens, multimodal
        )
        found.append(keys)
    return found
