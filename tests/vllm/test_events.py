"""The connector's KV cache events beside those that vLLM's own block pool publishes for the same request."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams, envs
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_block_hashes
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from tierkv import pack_hashes
from tierkv.adapters.vllm.events import EventGroup, EventLog, StoredRun
from tierkv.errors import ArgumentError
from tierkv.types import HashArray, TierKind

HASH_TOKENS = 16
INT_HASHES = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"
LORA = LoRARequest(lora_name="poet", lora_int_id=7, lora_path="adapters/poet")


@pytest.fixture(autouse=True, scope="module")
def whole_hashes() -> Iterator[None]:
    """vLLM publishes the hashes' last 64 bits by default; here they are told whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            envs.__dict__, INT_HASHES, False
        )  # vLLM reads its settings as attributes of this module
        yield


def a_request(tokens: int, **facts: Any) -> Request:
    init_none_hash(sha256_cbor)
    return Request(
        "r1",
        list(range(1000, 1000 + tokens)),
        SamplingParams(max_tokens=1),
        None,
        block_hasher=get_request_block_hasher(HASH_TOKENS, sha256_cbor),
        **facts,
    )


def group_hashes(request: Request, block_tokens: int) -> list[bytes]:
    count = request.num_tokens // block_tokens
    hashes = resolve_block_hashes(request.block_hashes, HASH_TOKENS, block_tokens)
    return [hashes[position] for position in range(count)]


def a_log(block_tokens: int = HASH_TOKENS, **settings: Any) -> EventLog:
    return EventLog([EventGroup(3, block_tokens, "sliding_window", 64)], enabled=True, **settings)


def from_vllm(request: Request, first: int, last: int, block_tokens: int) -> BlockStored:
    """What the engine itself publishes when it caches the blocks first..last-1."""
    pool = BlockPool(64, enable_caching=True, hash_block_size=HASH_TOKENS, enable_kv_cache_events=True)
    blocks = pool.get_new_blocks(last)
    pool.cache_full_blocks(request, blocks, first, last, block_tokens, kv_cache_group_id=3)
    (event,) = pool.take_events()
    assert isinstance(event, BlockStored)
    return event


@pytest.mark.parametrize("block_tokens", [HASH_TOKENS, 3 * HASH_TOKENS])
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize(
    "facts",
    [{}, {"cache_salt": "tenant 1", "session_id": "s1"}, {"lora_request": LORA}],
    ids=["plain", "salt", "lora"],
)
def test_a_store_is_told_as_vllm_tells_its_own(facts: dict[str, Any], first: int, block_tokens: int) -> None:
    request = a_request(6 * 48, **facts)
    hashes = group_hashes(request, block_tokens)
    log = a_log(block_tokens)
    parent = hashes[first - 1] if first else None
    run = log.describe(request, 3, pack_hashes(hashes[first:5]), first, parent)
    log.stored(run, TierKind.NVME)
    (event,) = log.take()
    own = from_vllm(request, first, 5, block_tokens)
    assert own.extra_keys is not None
    different = {"medium", "locality", "ownership", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"}
    for name in set(BlockStored.__struct_fields__) - different:
        assert getattr(event, name) == getattr(own, name), name
    assert (event.medium, event.locality, event.ownership) == ("STORAGE", "LOCAL", "tierkv-nvme")
    assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == ("sliding_window", 64)
    assert log.take() == []


def test_events_travel_in_vllms_batches() -> None:
    request = a_request(64)
    hashes = pack_hashes(group_hashes(request, HASH_TOKENS))
    log = a_log()
    log.stored(log.describe(request, 3, hashes, 0, None), TierKind.DFS)
    log.removed(3, hashes[2:], TierKind.DRAM)
    batch = KVEventBatch(ts=0.0, events=log.take())
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch).events
    stored, removed = told
    assert isinstance(stored, BlockStored)
    assert (stored.medium, stored.locality, stored.ownership) == ("STORAGE", "REMOTE", "tierkv-dfs")
    assert isinstance(removed, BlockRemoved)
    assert (removed.medium, removed.locality, removed.ownership) == ("CPU", "LOCAL", "tierkv-dram")
    assert removed.block_hashes == [bytes(row) for row in hashes[2:]]
    assert removed.group_idx == 3


class Router:
    """A consumer of the stream: which blocks it believes to be where, and each block's tokens by its parents'."""

    def __init__(self) -> None:
        self.held: dict[str, set[bytes]] = {}
        self.parents: dict[bytes, bytes | None] = {}
        self.tokens: dict[bytes, list[int]] = {}

    def read(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, BlockRemoved):
                self.held.setdefault(event.ownership, set()).difference_update(event.block_hashes)
            else:
                before = event.parent_block_hash
                for position, block_hash in enumerate(event.block_hashes):
                    start = position * event.block_size
                    self.held.setdefault(event.ownership, set()).add(block_hash)
                    self.parents[block_hash] = before
                    self.tokens[block_hash] = event.token_ids[start : start + event.block_size]
                    before = block_hash


BLOCKS = 12
acts = st.lists(
    st.one_of(
        st.tuples(
            st.just("stored"),
            st.sampled_from([TierKind.DRAM, TierKind.NVME]),
            st.integers(0, BLOCKS - 1),
            st.lists(st.booleans(), min_size=1, max_size=BLOCKS),
        ),
        st.tuples(
            st.just("removed"),
            st.sampled_from([TierKind.DRAM, TierKind.NVME]),
            st.integers(0, BLOCKS - 1),
            st.integers(1, 4),
        ),
        st.tuples(st.just("take"), st.none(), st.none(), st.none()),
    ),
    max_size=20,
)


@given(acts)
def test_a_router_believes_just_what_is_so(done: list[Any]) -> None:
    request = a_request(BLOCKS * HASH_TOKENS)
    hashes = group_hashes(request, HASH_TOKENS)
    log, router = a_log(), Router()
    truth: dict[str, set[bytes]] = {}
    for act, tier, first, what in done:
        place = f"tierkv-{tier.name.lower()}" if tier is not None else ""
        if act == "stored":
            kept = np.array(what[: BLOCKS - first], np.bool_)
            part = hashes[first : first + len(kept)]
            parent = hashes[first - 1] if first else None
            log.stored(log.describe(request, 3, pack_hashes(part), first, parent), tier, kept)
            told = {block for block, keep in zip(part, kept, strict=True) if keep}
            truth.setdefault(place, set()).update(told)
        elif act == "removed":
            part = hashes[first : first + what]
            log.removed(3, pack_hashes(part), tier)
            truth.setdefault(place, set()).difference_update(part)
        else:
            router.read(log.take())
    router.read(log.take())
    assert log.take() == []
    for block_hash in set().union(*router.held.values()):
        position = hashes.index(block_hash)
        assert router.parents[block_hash] == (hashes[position - 1] if position else None)
        start = position * HASH_TOKENS
        assert router.tokens[block_hash] == request.all_token_ids[start : start + HASH_TOKENS]
    assert {place: held for place, held in router.held.items() if held} == {
        place: held for place, held in truth.items() if held
    }


def test_room_is_what_waits_for_the_next_step() -> None:
    request = a_request(8 * HASH_TOKENS)
    hashes = pack_hashes(group_hashes(request, HASH_TOKENS))
    log = a_log(max_pending_blocks=10)
    assert log.room() == 10
    log.stored(log.describe(request, 3, hashes, 0, None), TierKind.DRAM)
    log.removed(3, hashes[5:], TierKind.NVME)
    assert log.room() == 0, "whoever tells more than there is room for is heard all the same"
    assert len(log.take()) == 2
    assert log.room() == 10


def test_disabled_it_does_nothing() -> None:
    log = EventLog([EventGroup(3, HASH_TOKENS, "full_attention", None)], enabled=False)
    request = a_request(64)
    hashes = pack_hashes(group_hashes(request, HASH_TOKENS))
    assert log.describe(request, 3, hashes, 0, None) is None
    log.stored(StoredRun(3, hashes, None, list(range(64))), TierKind.DRAM)
    log.removed(3, hashes, TierKind.DRAM)
    assert log.take() == []


@pytest.mark.parametrize("enabled", [True, False, None])
def test_vllms_configuration_decides(enabled: bool | None) -> None:
    shape = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    config = KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(["a"], FullAttentionSpec(block_size=32, **shape)),
            KVCacheGroupSpec(["b"], SlidingWindowSpec(block_size=64, sliding_window=128, **shape)),
        ],
    )
    events = None if enabled is None else SimpleNamespace(enable_kv_cache_events=enabled)
    algorithm = SimpleNamespace(prefix_caching_hash_algo="sha256_cbor")
    log = EventLog.from_config(SimpleNamespace(kv_events_config=events, cache_config=algorithm), config)  # type: ignore[arg-type]
    assert log.enabled is bool(enabled)
    request = a_request(128)
    for group, tokens in ((0, 32), (1, 64)):
        hashes = pack_hashes(group_hashes(request, tokens))
        log.stored(log.describe(request, group, hashes, 0, None), TierKind.DRAM)
    told = [(e.block_size, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window) for e in log.take()]
    assert told == ([(32, "full_attention", None), (64, "sliding_window", 128)] if enabled else [])


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_short_hashes_are_told_at_their_length(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes: HashArray = pack_hashes([b"0123456789abcdef", b"fedcba9876543210"])
    run = StoredRun(3, hashes[1:], bytes(hashes[0]), list(range(HASH_TOKENS)))
    spec = FullAttentionSpec(block_size=HASH_TOKENS, num_kv_heads=2, head_size=32, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([name], spec) for name in "abcd"]
    )
    vllm_config = SimpleNamespace(
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
        cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm),
    )
    log = EventLog.from_config(vllm_config, config)  # type: ignore[arg-type]
    log.stored(run, TierKind.DRAM)
    (event,) = log.take()
    assert event.block_hashes == [b"fedcba9876543210"]
    assert event.parent_block_hash == b"0123456789abcdef"
    monkeypatch.setitem(envs.__dict__, INT_HASHES, True)
    log.stored(run, TierKind.DRAM)
    (event,) = log.take()
    assert event.block_hashes == [int.from_bytes(b"76543210", "big")]


def test_what_cannot_be_told_is_refused() -> None:
    log = a_log()
    request = a_request(3 * HASH_TOKENS)
    hashes = pack_hashes(group_hashes(request, HASH_TOKENS))
    run = log.describe(request, 3, hashes, 0, None)
    with pytest.raises(ArgumentError, match="no medium"):
        log.stored(run, TierKind.HBM)
    with pytest.raises(ArgumentError, match="shape"):
        log.stored(run, TierKind.DRAM, np.ones(2, np.bool_))
    with pytest.raises(ArgumentError, match="tokens"):
        log.describe(request, 3, hashes, 1, bytes(hashes[0]))
    assert log.take() == []
