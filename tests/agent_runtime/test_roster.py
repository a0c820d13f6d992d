"""The roster: what is found after a death at any moment, and what is not, with a plain dict beside it."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime_harness import TIMEOUT_S, make_spec, names, python

from tierkv import StorageError
from tierkv.keys import Keyspace
from tierkv.memory import Arena, Roster, create_roster
from tierkv.memory.roster import FREE, RECORD, RECORDS_AT, RESERVED, SHARED, SPECS_BYTES, VALID

CAPACITY_BYTES = 1 << 20
GRANULES = CAPACITY_BYTES // 4096


def keyspace(number: int = 0, granules: int = 1, **fields: str) -> Keyspace:
    spec = make_spec((granules * 4096,), model=f"model-{number}", **fields)
    return Keyspace(spec, spec.digest(), number + 1)


@contextmanager
def memory(capacity_bytes: int = CAPACITY_BYTES) -> Iterator[tuple[int, int]]:
    """(roster's fd, arena's fd) as a supervisor holds them."""
    with Arena.create(
        capacity_bytes, shared=True, huge_pages="off", lock_memory="off", first_touch="never"
    ) as arena:
        assert arena.fd is not None
        fd = create_roster(capacity_bytes)
        try:
            yield fd, arena.fd
        finally:
            os.close(fd)


@contextmanager
def opened(fds: tuple[int, int]) -> Iterator[Roster]:
    roster = Roster(*fds, CAPACITY_BYTES)
    try:
        yield roster
    finally:
        roster.close()


def array(*slots: int) -> np.ndarray:
    return np.array(slots, np.uint32)


def found(roster: Roster) -> dict[int, tuple[bytes, bytes]]:
    """slot -> (digest, hash) of what recover() tells."""
    return {
        slot: (blocks.space.digest(), block.tobytes())
        for blocks in roster.recover()[0]
        for slot, block in zip(blocks.slots.tolist(), blocks.hashes, strict=True)
    }


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["taken", "named", "visible", "hidden", "hidden_space", "freed"]),
        st.sets(st.integers(0, 24), min_size=1, max_size=6),
        st.integers(0, 2),
    ),
    max_size=25,
)


@given(OPERATIONS)
def test_a_restart_finds_what_a_dict_says(operations: list[tuple[str, set[int], int]]) -> None:
    states: dict[int, str] = {}
    names_of: dict[int, tuple[int, bytes]] = {}
    spaces = [keyspace(number) for number in range(3)]
    with memory() as fds:
        with opened(fds) as roster:
            roster.recover()
            for step, (what, wanted, number) in enumerate(operations):
                before = {
                    "taken": None, "named": "taken", "visible": "named", "hidden": "visible",
                }  # fmt: skip
                if what == "hidden_space":
                    roster.hidden_space(spaces[number])
                    for slot, state in states.items():
                        if state == "visible" and names_of[slot][0] == number:
                            states[slot] = "hidden"
                    continue
                slots = sorted(
                    slot
                    for slot in wanted
                    if (what == "freed" and slot in states)
                    or (what != "freed" and states.get(slot) == before[what])
                )
                chosen = array(*slots)
                if what == "taken":
                    roster.taken(chosen, 4096)
                elif what == "named":
                    hashes = names(step * 100, len(slots))
                    roster.named(spaces[number], hashes, chosen)
                    names_of |= {
                        slot: (number, block.tobytes()) for slot, block in zip(slots, hashes, strict=True)
                    }
                elif what == "visible":
                    roster.visible(chosen)
                elif what == "hidden":
                    roster.hidden(chosen)
                else:
                    roster.freed(chosen)
                for slot in slots:
                    states[slot] = what
                    if what == "freed":
                        del states[slot]
        expected = {
            slot: (spaces[names_of[slot][0]].digest, names_of[slot][1])
            for slot, state in states.items()
            if state == "visible"
        }
        for _ in range(2):  # reading changes nothing
            with opened(fds) as roster:
                assert found(roster) == expected
                assert set(roster.recover()[1].slots.tolist()) == {
                    slot for slot, state in states.items() if state != "visible"
                }


def test_the_last_to_become_visible_comes_last_and_the_first_of_a_batch_after_it() -> None:
    space = keyspace()
    with memory() as fds:
        for first in (0, 10):
            with opened(fds) as roster:
                roster.recover()
                slots = array(*range(first, first + 4))
                roster.taken(slots, 4096)
                roster.named(space, names(first, 4), slots)
                roster.visible(slots[2:])
                roster.visible(slots[:2])
        with opened(fds) as roster:
            (blocks,) = roster.recover()[0]
            assert blocks.slots.tolist() == [3, 2, 1, 0, 13, 12, 11, 10]


@given(st.data())
def test_a_torn_or_foreign_record_is_never_taken_for_a_block(data: st.DataObject) -> None:
    """Any damage to a record's bytes either leaves it as it was or drops it; its slot is free then."""
    space = keyspace(granules=2)
    with memory() as fds:
        with opened(fds) as roster:
            roster.recover()
            slots = array(0, 2, 4)
            roster.taken(slots, 8192)
            roster.named(space, names(0, 3), slots)
            roster.visible(slots)
            expected = found(roster)
        at = RECORDS_AT + 2 * RECORD.itemsize
        record = bytearray(os.pread(fds[0], RECORD.itemsize, at))
        # State and owner are single words, which do not tear; the sequence is a hint.
        place = data.draw(st.integers(8, 47) | st.integers(56, 59))
        record[place] ^= data.draw(st.integers(1, 255))
        os.pwrite(fds[0], record, at)
        with opened(fds) as roster:
            assert found(roster) == {slot: block for slot, block in expected.items() if slot != 2}
            assert not len(roster.recover()[1].slots)
        assert os.pread(fds[0], 4, at) == struct.pack("<I", FREE)


def test_a_record_that_was_copied_elsewhere_is_none() -> None:
    with memory() as fds:
        with opened(fds) as roster:
            roster.recover()
            roster.taken(array(3), 4096)
            roster.named(keyspace(), names(0, 1), array(3))
            roster.visible(array(3))
        record = os.pread(fds[0], RECORD.itemsize, RECORDS_AT + 3 * RECORD.itemsize)
        os.pwrite(fds[0], record, RECORDS_AT + 9 * RECORD.itemsize)
        with opened(fds) as roster:
            assert set(found(roster)) == {3}


KILLED = """
import sys
import numpy as np
from runtime_harness import names
from test_roster import keyspace
from tierkv.memory import Roster
roster = Roster(int(sys.argv[1]), int(sys.argv[2]), 1 << 20)
roster.recover()
space, step = keyspace(), 0
print("going", flush=True)
while True:
    slots = np.arange(step % 4 * 8, step % 4 * 8 + 8, dtype=np.uint32)
    roster.taken(slots, 4096)
    roster.named(space, names(int(step) * 8, 8), slots)
    roster.visible(slots)
    step += 1
    after = np.arange(step % 4 * 8, step % 4 * 8 + 8, dtype=np.uint32)
    roster.freed(after)
"""


@pytest.mark.crash
def test_a_writer_killed_at_any_moment_leaves_only_whole_records() -> None:
    delays = np.random.default_rng(5)
    with memory() as fds:
        for _ in range(5):
            os.pwrite(fds[0], bytes(64 * RECORD.itemsize), RECORDS_AT)
            with python(KILLED, *map(str, fds), pass_fds=fds) as writer:
                assert writer.stdout is not None
                assert writer.stdout.readline() == "going\n"
                with pytest.raises(subprocess.TimeoutExpired):
                    writer.wait(float(delays.uniform(0.005, 0.03)))
                writer.send_signal(signal.SIGKILL)
                writer.wait(TIMEOUT_S)
            with opened(fds) as roster:
                blocks, left = roster.recover()
                assert set(left.slots.tolist()).isdisjoint(found(roster))
                assert len(blocks) == 1
                whole = found(roster)
                assert 16 <= len(whole) <= 32
                # Eight slots in a row were written as one batch: what is visible of it has the batch's names.
                for start in range(0, 32, 8):
                    batch = {slot: block for slot, block in whole.items() if start <= slot < start + 8}
                    if not batch:
                        continue
                    step_names = [block for _, block in batch.values()]
                    assert len(set(step_names)) == len(step_names)


def test_sessions_lock_as_long_as_anything_of_theirs_is_mapped() -> None:
    with memory() as fds:
        with opened(fds) as roster:
            roster.recover()
            first, first_fd = roster.new_session()
            second, second_fd = roster.new_session()
            slots = array(0, 1, 2, 3)
            roster.taken(slots, 4096)
            roster.named(keyspace(), names(0, 1), array(1), first)
            roster.named(keyspace(), names(1, 1), array(2), second)
            roster.named(keyspace(), names(2, 1), array(3), first)
            roster.named(keyspace(), names(2, 1), array(3), second)
        mapped = Arena.attach(first_fd, CAPACITY_BYTES)
        os.close(first_fd)
        with opened(fds) as roster:
            left = roster.recover()[1]
            assert left.owners.tolist() == [0, first, second, SHARED]
            assert roster.writers_left(left.owners).tolist() == [False, True, True, True]
            os.close(second_fd)
            assert roster.writers_left(left.owners).tolist() == [False, True, False, True]
            view = mapped.view(0, 1)
            mapped.close()
            assert roster.writers_left(left.owners).tolist() == [False, True, False, True]
            view.release()
            mapped.close_again()
            assert not roster.writers_left(left.owners).any()
            third, third_fd = roster.new_session()
            assert third > second
            # A client of this agent is no writer of an earlier one.
            assert not roster.writers_left(left.owners).any()
            os.close(third_fd)


def test_the_same_session_twice_is_not_shared() -> None:
    with memory() as fds, opened(fds) as roster:
        roster.recover()
        number, fd = roster.new_session()
        os.close(fd)
        roster.taken(array(0), 4096)
        for _ in range(2):
            roster.named(keyspace(), names(0, 1), array(0), number)
        assert roster.recover()[1].owners.tolist() == [number]
        roster.freed(array(0))
        roster.taken(array(0), 4096)
        assert roster.recover()[1].owners.tolist() == [0]


def test_keyspaces_beyond_the_table_are_not_kept_and_harm_nobody() -> None:
    large = [keyspace(number, layout="x" * (SPECS_BYTES // 4)) for number in range(5)]
    with memory() as fds:
        with opened(fds) as roster:
            roster.recover()
            for number, space in enumerate(large):
                slot = array(number)
                roster.taken(slot, 4096)
                roster.named(space, names(number, 1), slot)
                roster.visible(slot)
        with opened(fds) as roster:
            kept = found(roster)
            assert set(kept) == {0, 1, 2}
            assert set(roster.recover()[1].slots.tolist()) == {3, 4}


def test_another_arena_is_refused() -> None:
    with memory() as fds:
        with pytest.raises(StorageError, match="roster"):
            Roster(*fds, 2 * CAPACITY_BYTES)
        os.pwrite(fds[0], b"x", 0)
        with pytest.raises(StorageError, match="start anew"):
            Roster(*fds, CAPACITY_BYTES)


def test_an_empty_roster_of_a_large_arena_takes_no_memory_to_read() -> None:
    with memory(1 << 36) as (roster_fd, arena_fd):
        roster = Roster(roster_fd, arena_fd, 1 << 36)
        try:
            roster.taken(array(0, 1 << 20, (1 << 24) - 1), 4096)
            assert roster.recover()[1].slots.tolist() == [0, 1 << 20, (1 << 24) - 1]
            assert os.fstat(roster_fd).st_blocks * 512 < 1 << 20
        finally:
            roster.close()


def test_the_constants_on_which_memory_depends() -> None:
    assert (FREE, RESERVED, VALID, RECORD.itemsize) == (0, 1, 2, 64)
    assert fcntl.F_OFD_SETLK == 37
