"""The shared tier on a real distributed file system, seen from two hosts: what one saves the other loads, servers
that die, hang and come back, and a volume that is full."""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gluster import GlusterVolume
from store_harness import MISS, OK, Load, Rig, eventually, load, masks, rows, save, submit_save

from tierkv.clock import SystemClock
from tierkv.keys import Keyspace
from tierkv.testing.buffers import chain_hashes, random_hashes
from tierkv.types import BlockStatus, HashArray, TierKind

pytestmark = [pytest.mark.root, pytest.mark.slow]

BLOCK_BYTES = 200_000
DEADLINE_S = 4.0
BOUND_S = 60.0
"""Within this all must have ended, whatever happened to the servers. Generous: nothing here measures speed."""
BALLAST_MIB = 100
"""Leaves less room on the volume than 120 blocks need, and more than 8 do."""
FAILED = {int(status) for status in (BlockStatus.IO_ERROR, BlockStatus.TIMEOUT, BlockStatus.MISS)}
_numbers = itertools.count()

Host = Callable[..., Rig]


@pytest.fixture
def shared(volume: GlusterVolume) -> Iterator[tuple[Path, Path]]:
    """A directory of its own on the volume, as host A and as host B name it. Emptied after the test."""
    name = f"store{next(_numbers)}"
    first, second = (mount / name for mount in volume.mounts)
    first.mkdir()
    eventually(second.is_dir, "the other host sees the directory")
    yield first, second
    remove_all(first)


def remove_all(place: Path) -> None:
    for path in sorted(place.rglob("*"), reverse=True):
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink()
    place.rmdir()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """Opens stores on shared directories, each with little DRAM of its own; closed after the test."""
    with ExitStack() as open_rigs:

        def open_one(directory: Path, dram_blocks: int = 16, **dfs: Any) -> Rig:
            rig = Rig(
                tmp_path / f"host{next(_numbers)}",
                dram_blocks=dram_blocks,
                dfs_blocks=None,
                block_bytes=BLOCK_BYTES,
                clock=SystemClock(),  # type: ignore[arg-type]
                load_timeout_s=BOUND_S / 2,
                dfs={
                    "directory": str(directory),
                    "sync": True,
                    "threads": 4,
                    "deadline_s": DEADLINE_S,
                    **dfs,
                },
            )
            return open_rigs.enter_context(rig)

        yield open_one


def healthy(rig: Rig) -> bool:
    return rig.store.stats().tiers["dfs"].healthy


def matched(rig: Rig, space: Keyspace, hashes: HashArray) -> bool:
    return rig.store.match(space, hashes).length == len(hashes)


def save_below(rig: Rig, space: Keyspace, hashes: HashArray) -> None:
    assert save(rig.store, space, hashes) == [OK] * len(hashes)
    assert rig.store.flush(BOUND_S)


def loaded(rig: Rig, space: Keyspace, hashes: HashArray) -> bool:
    """Whether all can be matched and loaded. Whatever is loaded is verified."""
    return matched(rig, space, hashes) and load(rig.store, space, hashes) == [OK] * len(hashes)


def block_files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if len(path.name) == 64 and path.is_file())


def refused(path: Path) -> bool:
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.EIO
    return False


def temporary_files(directory: Path) -> list[Path]:
    return list(directory.rglob(".tmp-*"))


# Two hosts.


@pytest.mark.parametrize("codec", ["none", "zstd", "zstd-planes"])
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_one_host_loads_what_the_other_saved(
    shared: tuple[Path, Path], host: Host, codec: str, direct: str
) -> None:
    first, second = (host(place, codec=codec, direct=direct) for place in shared)
    early, late = chain_hashes(1, 24), chain_hashes(2, 24)
    save_below(first, first.space(), early)
    eventually(lambda: matched(second, second.space(), early), "the other host finds the blocks", BOUND_S)
    assert set(second.store.match(second.space(), early).tiers.tolist()) == {TierKind.DFS}
    assert load(second.store, second.space(), early) == [OK] * 24
    assert not matched(second, second.space(), late)  # and is not remembered as missing for long
    save_below(first, first.space(), late)
    eventually(lambda: loaded(second, second.space(), late), "what was saved later is found", BOUND_S)
    save_below(second, second.space(), chain_hashes(3, 8))
    eventually(lambda: loaded(first, first.space(), chain_hashes(3, 8)), "and the other way", BOUND_S)
    assert second.store.stats().corrupt_blocks == 0


def test_both_hosts_write_the_same_blocks_at_once(shared: tuple[Path, Path], host: Host) -> None:
    hashes = random_hashes(60, 5)
    rigs = [host(place, dram_blocks=80) for place in shared]
    orders = [hashes, rows(hashes, slice(None, None, -1))]
    jobs = [submit_save(rig.store, rig.space(), order) for rig, order in zip(rigs, orders, strict=True)]
    for rig, job in zip(rigs, jobs, strict=True):
        assert job.wait(BOUND_S)
        assert job.ok()
        assert rig.store.flush(BOUND_S)
        assert healthy(rig)
    assert block_files(shared[0]) == sorted(row.tobytes().hex() for row in hashes)
    assert not temporary_files(shared[0])
    for rig in rigs:
        rig.reopen()  # nothing in DRAM any more
        eventually(lambda rig=rig: loaded(rig, rig.space(), hashes), "all are there", BOUND_S)  # type: ignore[misc]
        assert rig.store.stats().corrupt_blocks == 0


@pytest.mark.parametrize("how", ["remove", "clear"])
def test_what_one_host_removes_disappears_on_the_other(
    shared: tuple[Path, Path], host: Host, how: str
) -> None:
    first, second = host(shared[0]), host(shared[1], rescan_s=0.5)
    gone, kept = random_hashes(10, 6), random_hashes(10, 7)
    other = {"model": "another-model"}
    save_below(first, first.space(), gone)
    save_below(first, first.space(**other), kept)
    dfs = 1 << TierKind.DFS

    def seen(hashes: HashArray, expected: int, **changes: Any) -> bool:
        return masks(second.store, second.space(**changes), hashes) == [expected] * len(hashes)

    eventually(lambda: seen(gone, dfs) and seen(kept, dfs, **other), "a listing finds both", BOUND_S)
    if how == "remove":
        assert first.store.remove(first.space(), gone) > 0
    else:
        assert first.store.clear(first.space()) > 0
    eventually(lambda: seen(gone, 0), "a listing misses what was removed", BOUND_S)
    assert load(second.store, second.space(), gone) == [MISS] * 10
    assert load(second.store, second.space(**other), kept) == [OK] * 10


# Servers that fail.


def test_one_server_of_two_may_die(volume: GlusterVolume, shared: tuple[Path, Path], host: Host) -> None:
    first, second = (host(place) for place in shared)
    before, after = random_hashes(10, 8), random_hashes(10, 9)
    save_below(first, first.space(), before)
    volume.kill_bricks(1)
    try:
        save_below(first, first.space(), after)
        for hashes in (before, after):
            eventually(lambda h=hashes: loaded(second, second.space(), h), "all is served", BOUND_S)  # type: ignore[misc]
    finally:
        volume.restart_bricks()
    second.reopen()
    eventually(lambda: loaded(second, second.space(), after), "and after the repair", BOUND_S)
    assert second.store.stats().corrupt_blocks == 0


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_servers_lost_while_saving(
    volume: GlusterVolume, shared: tuple[Path, Path], host: Host, how: str
) -> None:
    first, second = host(shared[0], dram_blocks=160), host(shared[1])
    space, hashes = first.space(), random_hashes(120, 10)
    began_s = time.monotonic()
    job = submit_save(first.store, space, hashes)
    eventually(lambda: bool(block_files(shared[1])), "some are written")
    (volume.kill_bricks if how == "kill" else volume.freeze_bricks)()
    try:
        assert job.wait(BOUND_S)
        assert job.ok(), "what goes to DRAM has nothing to do with the servers"
        assert save(first.store, space, random_hashes(8, 11)) == [OK] * 8
        eventually(lambda: not healthy(first), "the tier says that it cannot be written", BOUND_S)
        assert load(first.store, space, hashes) == [OK] * 120
        assert not first.store.flush(2.0)
        assert time.monotonic() - began_s < BOUND_S
    finally:
        (volume.restart_bricks if how == "kill" else volume.thaw_bricks)()
    eventually(lambda: healthy(first), "writes go on by themselves", BOUND_S)
    assert first.store.flush(BOUND_S)
    eventually(lambda: loaded(second, second.space(), hashes), "nothing was lost", BOUND_S)
    assert second.store.stats().corrupt_blocks == 0


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_servers_lost_while_loading(
    volume: GlusterVolume, shared: tuple[Path, Path], host: Host, how: str
) -> None:
    first, second = host(shared[0]), host(shared[1], dram_blocks=160)
    hashes = random_hashes(120, 12)
    save_below(first, first.space(), hashes)
    space = second.space()
    eventually(lambda: matched(second, space, hashes), "the other host finds the blocks", BOUND_S)
    began_s = time.monotonic()
    under_way = Load(second.store, space, hashes)
    eventually(lambda: bool((under_way.job.status == OK).any()) or under_way.job.done(), "some are loaded")
    (volume.kill_bricks if how == "kill" else volume.freeze_bricks)()
    try:
        statuses = under_way.statuses(BOUND_S)
        assert set(statuses) <= FAILED | {OK}
        if how == "kill":  # DRAM keeps what was loaded
            good = np.array(statuses) == OK
            assert load(second.store, space, rows(hashes, good)) == [OK] * int(good.sum())
        second.store.match(space, random_hashes(4, 13))
        more = Load(second.store, space, random_hashes(4, 14)).statuses(BOUND_S)
        assert set(more) <= FAILED
        assert save(second.store, space, random_hashes(2, 15)) == [OK] * 2
        assert time.monotonic() - began_s < BOUND_S
        eventually(lambda: not healthy(second), "the tier says that it cannot be written", BOUND_S)
    finally:
        (volume.restart_bricks if how == "kill" else volume.thaw_bricks)()
    eventually(lambda: healthy(second), "writes go on by themselves", BOUND_S)
    eventually(lambda: loaded(second, space, hashes), "all can be loaded again", BOUND_S)
    assert second.store.stats().corrupt_blocks == 0


def test_a_file_whose_replicas_disagree_costs_itself_alone(
    volume: GlusterVolume, shared: tuple[Path, Path], host: Host
) -> None:
    first, second = host(shared[0], dram_blocks=40), host(shared[1])
    space, hashes = first.space(), chain_hashes(20, 12)
    save_below(first, space, rows(hashes, slice(4)))
    name = hashes[4].tobytes().hex()
    directory = shared[0] / "v1" / space.digest.hex() / name[:2]
    directory.mkdir(exist_ok=True)
    volume.make_replicas_disagree((directory / name).relative_to(volume.mounts[0]))
    eventually(lambda: refused(directory / name), "the name is refused", BOUND_S)
    eventually(lambda: healthy(first), "writes go on by themselves", BOUND_S)
    assert save(first.store, space, hashes) == [OK] * 12
    first.store.flush(2.0)
    kept = rows(hashes, [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11])
    eventually(lambda: loaded(second, second.space(), kept), "the other blocks are there", BOUND_S)
    assert healthy(first)
    assert second.store.match(second.space(), hashes).length == 4
    assert set(Load(second.store, second.space(), rows(hashes, [4])).statuses()) <= FAILED
    assert first.store.remove(space, hashes) > 0
    assert healthy(first)
    for brick in volume.bricks:  # the name cannot be removed through the mount
        (brick / "data" / (directory / name).relative_to(volume.mounts[0])).unlink()


def test_a_store_closes_while_its_servers_hang(
    volume: GlusterVolume, shared: tuple[Path, Path], host: Host
) -> None:
    rig = host(shared[0])
    save_below(rig, rig.space(), random_hashes(4, 16))
    volume.freeze_bricks()
    try:
        job = submit_save(rig.store, rig.space(), random_hashes(8, 17))
        assert job.wait(BOUND_S)
        began_s = time.monotonic()
        rig.store.close(1.0)
        assert time.monotonic() - began_s < BOUND_S
    finally:
        volume.thaw_bricks()


# A full volume.


def test_a_full_volume_stops_writes_and_heals(shared: tuple[Path, Path], host: Host) -> None:
    first, second = host(shared[0], dram_blocks=160), host(shared[1])
    space, kept, hashes = first.space(), random_hashes(8, 18), random_hashes(120, 19)
    save_below(first, space, kept)
    ballast = shared[1].parent / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for _ in range(BALLAST_MIB):
            file.write(bytes(1 << 20))
    try:
        assert save(first.store, space, hashes) == [OK] * 120
        eventually(lambda: not healthy(first), "the volume is full", BOUND_S)
        assert not first.store.flush(2.0)
        assert load(first.store, space, hashes) == [OK] * 120
        eventually(lambda: loaded(second, second.space(), kept), "what is there can be read", BOUND_S)
        found = second.store.match(second.space(), hashes).length
        assert load(second.store, second.space(), rows(hashes, slice(found))) == [OK] * found
    finally:
        ballast.unlink()
    eventually(lambda: healthy(first), "writes go on by themselves", BOUND_S)
    assert first.store.flush(BOUND_S)
    eventually(lambda: loaded(second, second.space(), hashes), "nothing was lost", BOUND_S)
    assert not temporary_files(shared[0])
    assert second.store.stats().corrupt_blocks == 0
