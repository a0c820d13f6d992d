"""What is kept of requests: hashes as the engine gives them, and the references that saves hold."""

from __future__ import annotations

import itertools
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tierkv.adapters.vllm.books import PendingSave, RequestState, SaveBook
from tierkv.adapters.vllm.groups import Group, Kind, last_boundary, margin_tokens, step_tokens
from tierkv.adapters.vllm.lora import Adapter
from tierkv.keys import pack_hashes
from tierkv.testing.fake_cache import FakePool

GROUPS = (
    Group(0, Kind.FULL, 8),
    Group(1, Kind.SLIDING, 4, 9),
    Group(2, Kind.FULL, 8),
    Group(3, Kind.FULL, 16),
)


def a_request(**values: Any) -> Any:
    return SimpleNamespace(block_hashes=[], num_prompt_tokens=0, kv_transfer_params=None, **values)


@given(
    changes=st.lists(
        st.one_of(
            st.tuples(st.just("grow"), st.integers(0, 90)),
            st.tuples(st.just("another"), st.integers(0, 90)),
            st.tuples(st.just("cut"), st.integers(0, 90)),
        ),
        max_size=8,
    ),
    length=st.sampled_from([32, 16]),
)
def test_hashes_are_those_of_the_engine(changes: list[tuple[str, int]], length: int) -> None:
    request = a_request()
    state = RequestState(request, len(GROUPS))
    seen: list[Any] = []
    for number, (what, count) in enumerate(changes):
        known = request.block_hashes
        if what == "another":
            known = []
        elif what == "cut":
            known = known[: count % (len(known) + 1)]
        request.block_hashes = list(known)
        for _ in range(count):  # each hash covers all before it, as the engine's do
            last = request.block_hashes[-1] if request.block_hashes else b""
            request.block_hashes.append(sha256(last + bytes([number])).digest()[:length])
        state.next_tokens = 5
        state.update_hashes(GROUPS, 4)
        for position, group in enumerate(GROUPS):
            per_block = group.block_tokens // 4
            expected = pack_hashes(request.block_hashes[per_block - 1 :: per_block])
            assert (state.hashes[position] == expected).all()
            assert len(state.hashes[position]) == len(expected)
        seen.append((list(state.hashes), [hashes.copy() for hashes in state.hashes]))
    for views, copies in seen:
        assert all((view == copy).all() for view, copy in zip(views, copies, strict=True)), (
            "a search reads on"
        )


def test_another_continuation_of_the_same_length_is_saved_anew() -> None:
    request = a_request()
    request.block_hashes = [bytes([1]) * 32, bytes([2]) * 32]
    state = RequestState(request, len(GROUPS))
    state.update_hashes(GROUPS, 4)
    state.next_block, state.next_tokens = [1, 2, 1, 0], 12
    request.block_hashes = [bytes([1]) * 32, bytes([3]) * 32]
    state.update_hashes(GROUPS, 4)
    assert state.next_block == [0, 0, 0, 0]
    assert state.next_tokens == 0
    assert state.hashes[0][0].tobytes() == bytes([3]) * 32


@given(tokens=st.integers(1, 400), margin=st.integers(0, 1))
def test_the_prompts_boundaries(tokens: int, margin: int) -> None:
    groups = (Group(0, Kind.FULL, 8, 0, margin), Group(1, Kind.SLIDING, 4, 9))
    request = a_request()
    request.num_prompt_tokens = tokens
    state = RequestState(request, 2)
    for _ in range(2):
        found = state.prompt_boundaries(step_tokens(groups), margin_tokens(groups))
        assert found == sorted({last_boundary(groups, tokens), last_boundary(groups, tokens - 1)})
        request.num_prompt_tokens = tokens = tokens + 3  # a session went on


def send(book: SaveBook, job: int, blocks: list[Any]) -> None:
    names = pack_hashes([bytes([block.block_id]) * 32 for block in blocks])
    book.queue(PendingSave(0, names, blocks, None, ["told"]))
    assert book.has_queued
    (order,) = book.orders(lambda: job)
    assert (order.job, order.blocks[0].block_ids.tolist()) == (job, [block.block_id for block in blocks])
    assert not book.has_queued


def test_what_is_queued_goes_group_by_group_and_a_job_an_adapter() -> None:
    pool, book = FakePool(20), SaveBook(1, 20)
    book.pool = pool
    adapters = [Adapter(number, f"revision {number}", bytes([number]) * 32) for number in (1, 2)]
    for group, adapter in (
        (1, None),
        (0, adapters[0]),
        (0, None),
        (1, None),
        (0, adapters[1]),
        (1, adapters[0]),
    ):
        blocks = pool.take(2)
        book.hold(blocks)
        names = pack_hashes([bytes([block.block_id]) * 32 for block in blocks])
        book.queue(PendingSave(group, names, blocks, adapter, []))
    jobs = itertools.count(5)
    orders = book.orders(lambda: next(jobs))
    assert [order.job for order in orders] == [5, 6, 7]
    found = {order.adapter: [(part.group, len(part.hashes)) for part in order.blocks] for order in orders}
    assert found == {None: [(0, 2), (1, 4)], adapters[0]: [(0, 2), (1, 2)], adapters[1]: [(0, 2)]}
    for order in orders:
        for part in order.blocks:
            assert part.hashes[:, 0].tolist() == part.block_ids.tolist()
    assert book.orders(lambda: next(jobs)) == []


def test_what_was_not_sent_can_be_dropped() -> None:
    pool, book = FakePool(10), SaveBook(1, 9)
    book.pool = pool
    blocks = pool.take(3)
    book.hold(blocks)
    book.queue(PendingSave(0, pack_hashes([b"x" * 32] * 3), blocks, None, []))
    assert book.drop_queued() == 3
    assert (book.drop_queued(), book.held_blocks, book.has_queued) == (0, 0, False)


def test_blocks_come_back_when_every_rank_has_reported_the_job() -> None:
    pool = FakePool(10)
    book = SaveBook(3, 4)
    book.pool = pool
    blocks = pool.take(3)
    book.hold(blocks)
    assert (book.room(), book.held_blocks, book.busy) == (1, 3, False)
    send(book, 7, blocks)
    pool.free_blocks(reversed(blocks))
    assert pool.free == 6, "the request has gone, its blocks have not"
    assert book.reported(7, 1, True) == []
    assert book.reported(8, 9, True) == [], "nobody knows that job"
    assert book.busy
    assert book.reported(7, 2, True) == ["told"]
    assert (pool.free, book.held_blocks, book.busy) == (9, 0, False)
    assert book.reported(7, 1, True) == []


def test_a_job_of_which_a_rank_stored_less_is_not_told_of() -> None:
    book = SaveBook(2, 4)
    book.pool = FakePool(4)
    send(book, 1, [])
    book.reported(1, 1, False)
    assert book.reported(1, 1, True) == []


def test_wishes_of_a_request() -> None:
    def state(params: Any) -> RequestState:
        request = a_request()
        request.kv_transfer_params = params
        return RequestState(request, 1)

    assert not state(None).no_load
    assert not state({"other": 1}).no_save
    assert state({"tierkv": {"load": False}}).no_load
    kept_out = state({"tierkv": {"save": False}})
    kept_out.restarted()
    assert kept_out.no_save
    assert not state({"tierkv": "nonsense"}).no_save
    cleared = state(None)
    cleared.no_save = True
    cleared.restarted()
    assert not cleared.no_save
