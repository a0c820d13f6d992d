"""What the store promises to those that move their own bytes: reservations, and slots held by a lease."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tierkv.clock import VirtualClock
from tierkv.config import DramConfig, StoreConfig
from tierkv.fragments import Fragments
from tierkv.keys import Keyspace
from tierkv.store import Reservation, Store
from tierkv.testing.buffers import make_spec, random_hashes
from tierkv.types import NO_SLOT, BlockStatus, HashArray

TIMEOUT_S = 30.0
BLOCKS = 8
OK, CANCELLED = BlockStatus.OK, BlockStatus.CANCELLED


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def store(clock: VirtualClock) -> Iterator[Store]:
    dram = DramConfig(
        capacity_bytes=BLOCKS * 4096, slab_bytes=BLOCKS * 4096, huge_pages="off", lock_memory="off",
        first_touch="never",
    )  # fmt: skip
    with Store(StoreConfig(dram=dram, save_timeout_s=10.0), clock=clock) as store:
        yield store


def reserve(store: Store, space: Keyspace, hashes: HashArray, part: int = 0) -> Reservation:
    reservation = store.reserve(space, hashes, part)
    assert reservation.job.wait(TIMEOUT_S)
    return reservation


def save(store: Store, space: Keyspace, hashes: HashArray) -> list[int]:
    job = store.save(space, hashes, Fragments.from_blocks(np.zeros((len(hashes), 4096), np.uint8)))
    assert job.wait(TIMEOUT_S)
    return [int(status) for status in job.status]


def check_empty_handed(store: Store) -> None:
    stats = store.stats()
    assert (stats.pins, stats.pending_blocks, stats.leases) == (0, 0, 0)


def test_a_block_given_up_at_its_deadline_is_refused_at_commit(store: Store, clock: VirtualClock) -> None:
    space, hashes = store.open(make_spec(4096)), random_hashes(3)
    late = reserve(store, space, hashes)
    clock.advance(11.0)
    assert store.stats().pending_blocks == 0
    assert late.commit().tolist() == [CANCELLED] * 3
    assert store.match(space, hashes).length == 0
    check_empty_handed(store)
    assert store.stats().tiers["dram"].used_bytes == 0


def test_a_late_writers_slots_are_nobody_elses_until_it_ends(store: Store, clock: VirtualClock) -> None:
    space = store.open(make_spec(4096))
    late = reserve(store, space, random_hashes(3, 1))
    clock.advance(11.0)
    assert store.stats().pending_blocks == 0
    found = save(store, space, random_hashes(BLOCKS, 2))
    assert found.count(OK) == BLOCKS - 3, "slots were given out that somebody may still write into"
    others = reserve(store, space, random_hashes(BLOCKS, 3))
    assert not set(late.slots.tolist()) & set(others.slots[others.slots != NO_SLOT].tolist())
    others.abort()
    late.abort()
    assert save(store, space, random_hashes(BLOCKS, 4)) == [OK] * BLOCKS
    check_empty_handed(store)


def test_a_late_commit_takes_nothing_from_another_parts_writer(store: Store, clock: VirtualClock) -> None:
    """The block was given up and begun again by the writer of another part before the late commit came."""
    space, hashes = store.open(make_spec(4096, parts=2)), random_hashes(1)
    late = reserve(store, space, hashes, part=0)
    clock.advance(11.0)
    assert store.stats().pending_blocks == 0
    other = reserve(store, space, hashes, part=1)
    late.commit()
    assert store.stats().pins == 1, "only the other part's writer holds a pin"
    assert other.commit().tolist() == [OK]
    again = reserve(store, space, hashes, part=0)
    assert again.slots[0] != NO_SLOT
    assert again.commit().tolist() == [OK]
    assert store.match(space, hashes).length == 1
    check_empty_handed(store)


def test_an_abort_gives_all_back(store: Store) -> None:
    space, hashes = store.open(make_spec(4096)), random_hashes(4)
    reservation = reserve(store, space, hashes)
    reservation.abort()
    reservation.abort()
    check_empty_handed(store)
    assert store.stats().tiers["dram"].used_bytes == 0


def test_what_was_removed_while_it_was_written_is_not_stored(store: Store) -> None:
    space, hashes = store.open(make_spec(4096)), random_hashes(3)
    reservation = reserve(store, space, hashes)
    store.clear(space)
    assert reservation.commit().tolist() == [CANCELLED] * 3
    assert store.match(space, hashes).length == 0
    check_empty_handed(store)


def test_slots_of_a_lease_are_of_the_copy_that_it_holds(store: Store) -> None:
    """Saved again after it was removed, a block is elsewhere: that copy must be held, or its slot not be told."""
    space, hashes = store.open(make_spec(4096)), random_hashes(2)
    save(store, space, hashes)
    lease = store.lease([(space, hashes)], 5.0)
    store.remove(space, hashes)
    save(store, space, hashes)
    slots = store.dram_slots(lease, space, hashes)
    for seed in range(3, 9):
        save(store, space, random_hashes(BLOCKS, seed))
    assert store.dram_slots(lease, space, hashes).tolist() == slots.tolist(), "a leased copy was evicted"
    assert (slots != NO_SLOT).all()
    assert lease.release()
    check_empty_handed(store)


def test_an_ended_lease_tells_no_slots(store: Store, clock: VirtualClock) -> None:
    space, hashes = store.open(make_spec(4096)), random_hashes(2)
    save(store, space, hashes)
    lease = store.lease([(space, hashes)], 5.0)
    clock.advance(6.0)
    store.stats()
    assert store.dram_slots(lease, space, hashes).tolist() == [NO_SLOT] * 2
