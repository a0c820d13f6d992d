"""A real store beside a plain-dict model, through any history: saves by parts, evictions, leases on a virtual clock,
faults, damage, restarts and crashes. Both are held against each other in both directions.

The store must never give wrong bytes, never find what was not saved whole or was removed, never lose what is leased
(or, where everything fits, anything at all), never pass a capacity, and hold nothing when nobody holds it.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from store_harness import (
    OK,
    TIMEOUT_S,
    Load,
    Rig,
    eventually,
    in_tier,
    masks,
    rows,
    statuses_of,
    submit_save,
)

from tierkv.jobs import Job
from tierkv.keys import Keyspace
from tierkv.store import Lease
from tierkv.testing.buffers import chain_hashes, make_spec
from tierkv.testing.faults import FaultKind
from tierkv.testing.model import ModelStore, Presence, keys_of
from tierkv.types import BlockStatus, BoolArray, HashArray, TierKind

CHAINS, LENGTH = 4, 8
SPECS = (
    make_spec(4096, model="one-part"),
    make_spec(4096, model="three-parts", parts=(1000, 96, 3000)),
    make_spec(6000, model="larger", parts=1),
)
SAVE_TIMEOUT_S = 60.0
FAULTS = frozenset({BlockStatus.CORRUPT, BlockStatus.IO_ERROR})

spaces_ = st.integers(0, len(SPECS) - 1)
chains_ = st.integers(0, CHAINS - 1)
lengths_ = st.integers(1, LENGTH)
starts_ = st.integers(0, LENGTH - 1)


@dataclass(eq=False)
class Held:
    """A lease and what the model knows of it."""

    lease: Lease
    space: Keyspace
    hashes: HashArray
    held: BoolArray
    deadline_s: float


class StoreMachine(RuleBasedStateMachine):
    """Small tiers, so that everything is evicted all the time."""

    dram_blocks, nvme_blocks, dfs_blocks = 16, 32, 48
    lossless = False

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="tierkv-machine-"))
        (self.directory / "shared").mkdir()
        self.generation = itertools.count()
        self.leases: list[Held] = []
        self.faulty = False
        """Whether a fault may have left something behind since the store was opened."""

    @initialize(
        dfs=st.booleans(),
        nvme_admission=st.sampled_from(["on-evict", "write-through", "second-touch"]),
        dfs_admission=st.sampled_from(["write-through", "on-evict"]),
        promote=st.sampled_from(["on-hit", "on-hit", "never"]),
        free_ahead=st.sampled_from([0.0, 0.2]),
    )
    def open(
        self, dfs: bool, nvme_admission: str, dfs_admission: str, promote: str, free_ahead: float
    ) -> None:
        self.options = {
            "dram_blocks": self.dram_blocks,
            "nvme_blocks": self.nvme_blocks,
            "dfs_blocks": self.dfs_blocks if dfs else 0,
            "nvme": {"admission": "on-evict" if self.lossless else nvme_admission, "engine": "threads"},
            "dfs": {
                "admission": dfs_admission,
                "directory": str(self.directory / "shared"),
                "deadline_s": 1e6,  # of the virtual clock, which this test moves by minutes
            },
            "dram": {"free_ahead": free_ahead},
            "promote": promote,
            "save_timeout_s": SAVE_TIMEOUT_S,
        }
        self.rig = Rig(self.directory / f"g{next(self.generation)}", **self.options)
        self.spaces = [self.rig.store.open(spec) for spec in SPECS]
        self.model = ModelStore(save_timeout_s=SAVE_TIMEOUT_S, lossless=self.lossless)

    # Help.

    @property
    def now_s(self) -> float:
        return self.rig.clock.monotonic_s()

    def hashes(self, chain: int, start: int, length: int) -> HashArray:
        return rows(chain_hashes(chain, LENGTH, common=2), slice(start, start + length))

    def everything(self) -> HashArray:
        """The hashes of all chains."""
        return np.unique(np.concatenate([self.hashes(chain, 0, LENGTH) for chain in range(CHAINS)]), axis=0)

    def expected_faults(self) -> frozenset[BlockStatus]:
        return FAULTS if self.faulty else frozenset()

    def finish_save(self, space: Keyspace, hashes: HashArray, part: int, job: Job) -> None:
        statuses = statuses_of(job)
        allowed = {OK, int(BlockStatus.DROPPED), int(BlockStatus.TIMEOUT)}
        assert set(statuses) <= allowed, f"save gave {statuses}"
        if self.lossless:
            assert set(statuses) == {OK}, "a store with room for everything dropped a save"
        self.model.saved(space, hashes, part, statuses, self.now_s)

    def finish_load(self, load: Load, *, late: bool = False) -> list[int]:
        statuses = load.statuses()
        faults = self.expected_faults() | ({BlockStatus.TIMEOUT} if late else set())
        self.model.check_load(load.space, load.hashes, statuses, frozenset(faults))
        self.note_losses(load.space, load.hashes, statuses)
        return statuses

    def note_losses(self, space: Keyspace, hashes: HashArray, statuses: list[int]) -> None:
        lost = [key for key, status in zip(keys_of(space, hashes), statuses, strict=True) if status != OK]
        if self.faulty:
            self.model.lost(lost)

    def end_lease(self, held: Held) -> None:
        self.leases.remove(held)
        self.model.lease_ended(held.space, held.hashes, held.held)

    # Saving and loading.

    @rule(space=spaces_, chain=chains_, length=lengths_)
    def save(self, space: int, chain: int, length: int) -> None:
        hashes, opened = self.hashes(chain, 0, length), self.spaces[space]
        for part in range(len(opened.part_bytes)):
            self.finish_save(
                opened, hashes, part, submit_save(self.rig.store, opened, hashes, part, TIMEOUT_S)
            )

    @rule(chain=chains_, start=starts_, length=lengths_, part=st.integers(0, 2))
    def save_one_part(self, chain: int, start: int, length: int, part: int) -> None:
        hashes, space = self.hashes(chain, start, length), self.spaces[1]
        self.finish_save(space, hashes, part, submit_save(self.rig.store, space, hashes, part, TIMEOUT_S))

    @rule(chain=chains_, length=lengths_, order=st.permutations(range(3)))
    def save_parts_at_once(self, chain: int, length: int, order: list[int]) -> None:
        hashes, space = self.hashes(chain, 0, length), self.spaces[1]
        jobs = [(part, submit_save(self.rig.store, space, hashes, part, TIMEOUT_S)) for part in order]
        for part, job in jobs:
            self.finish_save(space, hashes, part, job)

    @rule(space=spaces_, chain=chains_, start=starts_, length=lengths_, part=st.integers(0, 2))
    def load(self, space: int, chain: int, start: int, length: int, part: int) -> None:
        opened = self.spaces[space]
        self.finish_load(
            Load(self.rig.store, opened, self.hashes(chain, start, length), part % len(opened.part_bytes))
        )

    @rule(space=spaces_, chains=st.lists(chains_, min_size=2, max_size=4), length=lengths_)
    def load_several_at_once(self, space: int, chains: list[int], length: int) -> None:
        opened = self.spaces[space]
        loads = [Load(self.rig.store, opened, self.hashes(chain, 0, length)) for chain in chains]
        for load in loads:
            self.finish_load(load)

    @rule(space=spaces_, chain=chains_, other=chains_, length=lengths_)
    def save_and_load_at_once(self, space: int, chain: int, other: int, length: int) -> None:
        opened, hashes = self.spaces[space], self.hashes(chain, 0, length)
        saves = [
            (part, submit_save(self.rig.store, opened, hashes, part, TIMEOUT_S))
            for part in range(len(opened.part_bytes))
        ]
        loads = [Load(self.rig.store, opened, self.hashes(which, 0, length)) for which in (chain, other)]
        for part, job in saves:
            self.finish_save(opened, hashes, part, job)
        self.model.lost(keys_of(opened, hashes))  # what a load missed may have been saved a moment later
        for load in loads:
            self.finish_load(load)
        if self.lossless:
            self.model.saved_whole(opened, hashes)

    @rule(space=spaces_, chain=chains_, length=lengths_)
    def match(self, space: int, chain: int, length: int) -> None:
        hashes = self.hashes(chain, 0, length)
        found = self.rig.store.match(self.spaces[space], hashes)
        assert len(found.tiers) == found.length
        assert set(found.tiers.tolist()) <= {TierKind.DRAM, TierKind.NVME, TierKind.DFS}
        self.model.check_match(self.spaces[space], hashes, found.length)

    @rule()
    def look_everything_up(self) -> None:
        hashes = self.everything()
        for space, found in zip(
            self.spaces, self.rig.store.lookup([(space, hashes) for space in self.spaces]), strict=True
        ):
            self.model.check_lookup(space, hashes, found)

    @rule(space=spaces_, chain=chains_, length=lengths_)
    def touch(self, space: int, chain: int, length: int) -> None:
        self.rig.store.touch(self.spaces[space], self.hashes(chain, 0, length))

    # Removing.

    @rule(space=spaces_, chain=chains_, start=starts_, length=lengths_)
    def remove(self, space: int, chain: int, start: int, length: int) -> None:
        hashes = self.hashes(chain, start, length)
        self.rig.store.remove(self.spaces[space], hashes)
        self.model.removed(self.spaces[space], hashes)
        assert not any(masks(self.rig.store, self.spaces[space], hashes))

    @rule(space=spaces_)
    def clear(self, space: int) -> None:
        self.rig.store.clear(self.spaces[space], TIMEOUT_S)
        self.model.cleared(self.spaces[space])
        assert not any(masks(self.rig.store, self.spaces[space], self.everything()))

    # Leases and time.

    @precondition(lambda self: len(self.leases) < 4)
    @rule(
        space=spaces_,
        chain=chains_,
        start=starts_,
        length=st.integers(1, 4),
        ttl_s=st.sampled_from([5.0, 50.0]),
    )
    def lease(self, space: int, chain: int, start: int, length: int, ttl_s: float) -> None:
        hashes, opened = self.hashes(chain, start, length), self.spaces[space]
        lease = self.rig.store.lease([(opened, hashes)], ttl_s)
        self.model.leased(opened, hashes, lease.held[0])
        self.leases.append(Held(lease, opened, hashes, lease.held[0], self.now_s + ttl_s))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), ttl_s=st.sampled_from([5.0, 50.0]))
    def extend(self, data: st.DataObject, ttl_s: float) -> None:
        held = data.draw(st.sampled_from(self.leases))
        assert held.lease.extend(ttl_s)
        held.deadline_s = self.now_s + ttl_s

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.leases))
        assert held.lease.release()
        assert not held.lease.release()
        self.end_lease(held)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def load_under_lease(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.leases))
        self.finish_load(Load(self.rig.store, held.space, held.hashes))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def stage(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.leases))
        statuses = statuses_of(self.rig.store.stage(held.lease, TIMEOUT_S))
        good = [position for position, status in enumerate(statuses) if status == OK]
        assert all(in_tier(TierKind.DRAM, masks(self.rig.store, held.space, rows(held.hashes, good))))
        errors = [int(BlockStatus.MISS) if status == BlockStatus.NO_SPACE else status for status in statuses]
        allowed = {int(status) for status in (BlockStatus.OK, BlockStatus.MISS, BlockStatus.NO_SPACE)}
        assert set(statuses) <= allowed | {int(status) for status in self.expected_faults()}
        self.note_losses(held.space, held.hashes, errors)

    @rule(seconds=st.sampled_from([1.0, 6.0, 61.0]))
    def advance(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)
        for held in list(self.leases):
            if held.deadline_s <= self.now_s:
                self.rig.store.stats()  # whoever calls ends what has expired
                assert not held.lease.extend(5.0)
                self.end_lease(held)

    # Moving down, and coming back.

    @rule()
    def flush(self) -> None:
        done = self.rig.store.flush(TIMEOUT_S)
        assert done or self.faulty

    @rule(flush=st.booleans())
    def restart(self, flush: bool) -> None:
        self.heal()
        before = self.stable()
        self.leases.clear()
        self.rig.reopen(TIMEOUT_S if flush else 0)
        self.spaces = [self.rig.store.open(spec) for spec in SPECS]
        if flush:
            self.model.restarted(lambda _, presence: presence if self.lossless else Presence.MAY)
            self.check_everything()
        else:
            self.compare_after_crash(before)

    @rule()
    def crash(self) -> None:
        """What kill -9 leaves behind: the files as they are at this moment."""
        self.heal()
        target = self.directory / f"g{next(self.generation)}"
        while True:
            self.rig.idle()
            before = self.found()
            shutil.copytree(self.rig.directory, target)
            if not self.rig.store._room._moving and self.found() == before:
                break
            shutil.rmtree(target)  # something was on its way down: not one moment
        self.leases.clear()
        self.rig.store.close(0)
        clock = self.rig.clock
        self.rig = Rig(target, clock=clock, **self.options)
        self.spaces = [self.rig.store.open(spec) for spec in SPECS]
        self.compare_after_crash(before)

    def stable(self) -> list[list[int]]:
        """found() of a moment at which nothing moved."""
        while True:
            self.rig.idle()
            before = self.found()
            self.rig.idle()
            if self.found() == before:
                return before

    def found(self) -> list[list[int]]:
        return [masks(self.rig.store, space, self.everything()) for space in self.spaces]

    def compare_after_crash(self, before: list[list[int]]) -> None:
        """NVMe holds what it held, and at most what the model allows besides (what was being evicted); a shared
        tier's blocks are found by whoever asks."""
        survivors = set()
        for space, old, new in zip(self.spaces, before, self.found(), strict=True):
            there = in_tier(TierKind.NVME, new)
            lost = [was and not now for was, now in zip(in_tier(TierKind.NVME, old), there, strict=True)]
            assert not any(lost), f"{space}: recovery dropped {self.rig.nvme.inner.dropped_entries}"
            self.model.check_found(
                space,
                self.everything(),
                [now or mask != 0 for now, mask in zip(there, old, strict=True)],
                "after a crash",
            )
            survivors |= {
                key for key, now in zip(keys_of(space, self.everything()), there, strict=True) if now
            }
            assert not any(in_tier(TierKind.DRAM, new))
            for key, mask in zip(keys_of(space, self.everything()), old, strict=True):
                if mask & (1 << TierKind.DFS) and not self.faulty:  # a torn file is noticed by its length
                    one = np.frombuffer(key[1], np.uint8).reshape(1, 32)
                    assert self.rig.store.match(space, one).length == 1, "a block of the shared tier is lost"
        shared = self.options["dfs_blocks"] != 0

        def survives(key: tuple[bytes, bytes], presence: Presence) -> Presence:
            if key in survivors:
                return presence if self.lossless else Presence.MAY
            return Presence.MAY if shared else Presence.MUST_NOT

        self.model.restarted(survives)
        self.check_everything()

    def check_everything(self) -> None:
        for sharing in self.rig.store._sharing:  # what only the shared tier holds is known after its listing
            assert sharing.scanned.wait(TIMEOUT_S)
        for space in self.spaces:
            self.finish_load(Load(self.rig.store, space, self.everything()))

    # Faults.

    def heal(self) -> None:
        for tier in (self.rig.nvme, self.rig.dfs):
            if tier is not None:
                tier.plan.heal()
                tier.gate.release()
        core = self.rig.store._core  # what a late read found damaged leaves the tier first, then the index
        eventually(lambda: core.late == 0, "late transfers are cleaned up after")

    @precondition(lambda self: not self.lossless)
    @rule(
        lower=st.sampled_from(["nvme", "dfs"]),
        what=st.sampled_from(
            [
                ("write", FaultKind.IO_ERROR),
                ("write", FaultKind.NO_SPACE),
                ("write", FaultKind.TORN),
                ("write", FaultKind.FLIPPED),
                ("read", FaultKind.IO_ERROR),
                ("allocate", FaultKind.REFUSE),
            ]
        ),
        blocks=st.none() | st.lists(st.integers(0, 7), min_size=1, max_size=3, unique=True),
        calls=st.integers(1, 3),
    )
    def fail_next(self, lower: str, what: tuple, blocks: list[int] | None, calls: int) -> None:
        tier = self.rig.nvme if lower == "nvme" else self.rig.dfs
        if tier is not None:
            self.faulty = True
            tier.plan.fail_next(what[0], what[1], calls, blocks)

    @precondition(lambda self: not self.lossless)
    @rule(
        lower=st.sampled_from(["nvme", "dfs"]),
        kind=st.sampled_from([FaultKind.TORN, FaultKind.FLIPPED]),
        which=st.integers(0, 1 << 16),
    )
    def damage(self, lower: str, kind: FaultKind, which: int) -> None:
        """Bit rot: a block on a medium changes behind the store's back."""
        tier = self.rig.dfs if lower == "dfs" and self.rig.dfs is not None else self.rig.nvme
        assert tier is not None
        stored = [
            (space, row.tobytes(), int(slot))
            for group in tier.recover()
            for space in self.spaces
            if space.spec == group.space
            for row, slot in zip(group.hashes, group.slots, strict=True)
        ]
        if not stored:
            return
        space, block_hash, slot = sorted(stored, key=lambda one: one[1])[which % len(stored)]
        self.faulty = True
        if tier is self.rig.nvme:
            self.rig.damage_slot(space, slot, kind)
        else:
            self.rig.damage_file(space, block_hash, kind)

    @precondition(lambda self: not self.lossless and self.rig.nvme is not None)
    @rule(space=spaces_, chain=chains_, kind=st.sampled_from([FaultKind.STALL, FaultKind.LATE]))
    def load_too_slowly(self, space: int, chain: int, kind: FaultKind) -> None:
        assert self.rig.nvme is not None
        self.rig.nvme.plan.fail_next("read", kind)
        load = Load(self.rig.store, self.spaces[space], self.hashes(chain, 0, LENGTH), timeout_s=0.03)
        self.finish_load(load, late=True)
        self.heal()

    @rule()
    def faults_end(self) -> None:
        self.heal()

    # Always.

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.check_capacities()
        self.rig.store._core.index.check()
        if not self.leases:
            eventually(lambda: self.rig.store.stats().pins == 0, f"no pins: {self.rig.store.stats()}")

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            try:
                self.heal()
                for held in list(self.leases):
                    held.lease.release()
                    self.end_lease(held)
                self.rig.clock.advance(SAVE_TIMEOUT_S + 1)
                self.rig.settled()
                self.check_everything()
            finally:
                self.rig.store.close(0)
        shutil.rmtree(self.directory, ignore_errors=True)


class RoomyStoreMachine(StoreMachine):
    """Room for everything and no faults: nothing may be lost, over restarts too."""

    dram_blocks, nvme_blocks, dfs_blocks = 256, 256, 256
    lossless = True


_QUICK = settings(
    deadline=None,
    max_examples=25,
    stateful_step_count=30,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
"""Without shrinking: threads make failures too rare for it, and it takes minutes."""
_LONG = settings(_QUICK, max_examples=400, stateful_step_count=60)


@pytest.mark.parametrize("machine", [StoreMachine, RoomyStoreMachine])
def test_the_store_agrees_with_its_model(machine: type[StoreMachine]) -> None:
    run_state_machine_as_test(machine, settings=_QUICK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", [StoreMachine, RoomyStoreMachine])
def test_the_store_agrees_with_its_model_for_long(machine: type[StoreMachine]) -> None:
    run_state_machine_as_test(machine, settings=_LONG)
