"""The NVMe tier: histories against a dict, damage of every file, resizing, locks, and what cannot be
opened."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvme_harness import batch_of, buffer_for, ended, faulty_engine, open_tier, read, residents, store, write

from tierkv._native import crc32c
from tierkv.catalog import ENTRY, AddKeyspace, Catalog, Put
from tierkv.errors import ArgumentError, ConfigError, FormatError, LockedError, StorageError
from tierkv.keys import KeyspaceSpec
from tierkv.testing.buffers import make_space, random_hashes
from tierkv.testing.faults import FaultKind, damage_file
from tierkv.tiers import nvme
from tierkv.tiers.nvme import NvmeTier, inspect_directory, verify_directory
from tierkv.types import BlockStatus

OK, MISS, CORRUPT = BlockStatus.OK, BlockStatus.MISS, BlockStatus.CORRUPT
SPACES = [make_space(4096), make_space(5000, 2, group="window"), make_space(12_288, 3, group="other")]
POOL = random_hashes(10, 3)

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "write", "free", "forget", "clear", "reopen", "rewrite"]),
        st.integers(0, 2),
        st.lists(st.integers(0, len(POOL) - 1), min_size=1, max_size=5, unique=True),
    ),
    max_size=14,
)


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_any_history_agrees_with_a_dict(tmp_path_factory: pytest.TempPathFactory, engine: str) -> None:
    @settings(max_examples=25, deadline=None)
    @given(STEPS)
    def check(steps: list[tuple[str, int, list[int]]]) -> None:
        directory = tmp_path_factory.mktemp("nvme")
        options = {"engine": engine, "sync": "process"}
        tier = open_tier(directory, 192, **options)
        held: dict[tuple[int, int], int] = {}  # (space, hash) -> slot that is findable
        taken: dict[tuple[int, int], int] = {}  # ... whose slot is ours, findable or not
        try:
            for kind, number, chosen in steps:
                space = SPACES[number]
                keys = [(number, position) for position in chosen]
                if kind in {"write", "rewrite"}:
                    new = [
                        position
                        for position in chosen
                        if ((number, position) in taken) == (kind == "rewrite")
                    ]
                    if not new:
                        continue
                    slots = tier.allocate(space, len(new))
                    if slots is None:
                        continue
                    assert set(write(tier, space, POOL[new], slots)) == {OK}
                    for position, slot in zip(new, slots.tolist(), strict=True):
                        key = (number, position)
                        if key in taken:  # the old copy goes, and must not take the new entry with it
                            tier.free(space, POOL[[position]], np.array([taken[key]], np.uint32))
                        held[key] = taken[key] = slot
                elif kind == "free":
                    mine = [key for key in keys if key in taken]
                    slots = np.array([taken.pop(key) for key in mine], np.uint32)
                    tier.free(space, POOL[[position for _, position in mine]], slots)
                    held = {key: slot for key, slot in held.items() if key not in mine}
                elif kind == "forget":
                    tier.forget(space, POOL[chosen])
                    held = {key: slot for key, slot in held.items() if key not in keys}
                elif kind == "clear":
                    tier.forget(space, None)
                    held = {key: slot for key, slot in held.items() if key[0] != number}
                else:
                    tier.close()
                    tier = open_tier(directory, 192, **options)
                    taken = dict(held)
                    assert residents(tier) == {
                        (SPACES[s].digest, POOL[position].tobytes()): slot
                        for (s, position), slot in held.items()
                    }
                for s, space in enumerate(SPACES):
                    slots = np.array([taken.get((s, p), 0) for p in range(len(POOL))], np.uint32)
                    expected = [OK if (s, p) in held else MISS for p in range(len(POOL))]
                    assert read(tier, space, POOL, slots) == expected
                    assert tier.probe(space, POOL).tolist() == [status == OK for status in expected]
                slot_bytes = [4096, 8192, 12_288]
                assert tier.used_bytes() == sum(slot_bytes[s] for s, _ in taken)
        finally:
            tier.close()
            shutil.rmtree(directory)

    check()


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, np.ndarray]:  # type: ignore[type-arg]
    """A closed directory with 20 blocks in slots 0 to 19."""
    tier = open_tier(tmp_path)
    slots = store(tier, SPACES[0], random_hashes(20, 1))
    assert slots.tolist() == list(range(20))
    tier.close()
    return tmp_path / "nvme", random_hashes(20, 1)


def test_a_flipped_bit_is_corrupt_once_then_gone(kept: tuple[Path, np.ndarray]) -> None:  # type: ignore[type-arg]
    directory, hashes = kept
    damage_file(directory / "slots.dat", FaultKind.FLIPPED, 7 * 4096, 4096)
    slots = np.arange(20, dtype=np.uint32)
    tier = open_tier(directory.parent)
    expected = [OK] * 20
    expected[7] = CORRUPT
    assert read(tier, SPACES[0], hashes, slots) == expected
    expected[7] = MISS
    assert read(tier, SPACES[0], hashes, slots) == expected
    tier.close()
    tier = open_tier(directory.parent)
    assert len(residents(tier)) == 19
    assert tier.available(SPACES[0]) == 64 - 19
    tier.close()


@pytest.mark.parametrize("left", [0, 4096 * 5, 4096 * 5 + 100])
def test_a_truncated_slot_file_costs_only_what_it_lost(kept: tuple[Path, np.ndarray], left: int) -> None:  # type: ignore[type-arg]
    directory, hashes = kept
    os.truncate(directory / "slots.dat", left)
    tier = open_tier(directory.parent)
    whole = left // 4096
    assert tier.dropped_entries == {"beyond the slot file": 20 - whole}
    assert any("beyond the slot file" in note for note in tier.notes)
    assert len(residents(tier)) == whole
    assert read(tier, SPACES[0], hashes, np.arange(20, dtype=np.uint32)) == [OK] * whole + [MISS] * (
        20 - whole
    )
    assert len(store(tier, SPACES[0], random_hashes(20, 2))) == 20
    tier.close()


def test_a_lost_slot_file_empties_the_tier(kept: tuple[Path, np.ndarray]) -> None:  # type: ignore[type-arg]
    directory, _ = kept
    (directory / "slots.dat").unlink()
    tier = open_tier(directory.parent)
    assert residents(tier) == {}
    assert tier.used_bytes() == 0
    tier.close()


def test_a_slot_file_cut_while_open_gives_no_wrong_bytes(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    hashes = random_hashes(8)
    slots = store(tier, SPACES[0], hashes)
    os.truncate(tmp_path / "nvme" / "slots.dat", 4 * 4096)
    assert read(tier, SPACES[0], hashes, slots) == [OK] * 4 + [BlockStatus.IO_ERROR] * 4
    tier.close()


def test_garbled_and_truncated_catalogs_are_refused(kept: tuple[Path, np.ndarray]) -> None:  # type: ignore[type-arg]
    directory, _ = kept
    data = directory / "catalog" / "data.mdb"
    whole = data.read_bytes()
    for broken in (b"x" * len(whole), whole[: len(whole) // 2], whole[:8192] + bytes(len(whole) - 8192)):
        data.write_bytes(broken)
        with pytest.raises(FormatError, match="tierkv verify"):
            open_tier(directory.parent)
    data.write_bytes(whole)  # a refusal leaves nothing locked and nothing changed
    tier = open_tier(directory.parent)
    assert len(residents(tier)) == 20
    tier.close()


def test_entries_that_cannot_be_right_are_dropped_and_counted(kept: tuple[Path, np.ndarray]) -> None:  # type: ignore[type-arg]
    directory, _ = kept
    catalog = Catalog(directory / "catalog")
    bad = np.zeros(4, ENTRY)
    bad["slot"], bad["length"], bad["codec"] = [3, 64, 40, 41], [4096, 4096, 4097, 4096], [0, 0, 0, 9]
    unknown = np.zeros(2, ENTRY)
    unknown["slot"], unknown["length"] = [50, 51], 4096
    misplaced = np.zeros(1, ENTRY)
    misplaced["slot"], misplaced["length"] = 31, 5000
    window = SPACES[1]
    catalog.commit(
        [
            Put(SPACES[0].digest, random_hashes(4, 9), bad),
            Put(b"u" * 32, random_hashes(2, 9), unknown),
            AddKeyspace(window.digest, window.spec),
            Put(window.digest, random_hashes(1, 9), misplaced),
        ]
    )
    key = SPACES[0].digest + random_hashes(20, 1)[11].tobytes()
    with catalog._environment.begin(write=True) as transaction:
        value = bytearray(transaction.get(key, db=catalog._blocks))
        value[0] ^= 1
        transaction.put(key, bytes(value), db=catalog._blocks)
    catalog.close()
    tier = open_tier(directory.parent)
    # The newer of two entries for slot 3 wins; its bytes are another block's, which the checksum will say.
    assert tier.dropped_entries == {
        "slot of another block": 2,
        "beyond the slot file": 1,
        "wrong length": 1,
        "unknown codec": 1,
        "unknown keyspace": 2,
        "damaged entry": 1,
    }
    found = residents(tier)
    assert len(found) == 20 - 2 + 1
    assert residents(tier) == found  # asked again, the catalog says the same
    tier.close()


def test_recovery_is_oldest_first_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.tiers.nvme_recovery.RESIDENTS_BLOCKS", 4)
    tier = open_tier(tmp_path)
    hashes = random_hashes(10)
    for row in range(10):
        store(tier, SPACES[0], hashes[row : row + 1])
    tier.close()
    tier = open_tier(tmp_path)
    batches = list(tier.recover())
    assert [len(batch.hashes) for batch in batches] == [4, 4, 2]
    assert (np.concatenate([batch.hashes for batch in batches]) == hashes).all()
    tier.close()


def test_the_capacity_setting_may_change(kept: tuple[Path, np.ndarray]) -> None:  # type: ignore[type-arg]
    directory, hashes = kept
    slots = np.arange(20, dtype=np.uint32)
    tier = open_tier(directory.parent, 128)
    assert (directory / "slots.dat").stat().st_size == 128 * 4096
    assert read(tier, SPACES[0], hashes, slots) == [OK] * 20
    assert tier.available(SPACES[0]) == 108
    tier.close()
    tier = open_tier(directory.parent, 12)
    assert (directory / "slots.dat").stat().st_size == 12 * 4096
    assert tier.dropped_entries == {"beyond the slot file": 8}
    assert tier.available(SPACES[0]) == 0
    tier.close()
    tier = open_tier(directory.parent, 64)
    assert read(tier, SPACES[0], hashes, slots) == [OK] * 12 + [MISS] * 8
    tier.close()


def test_a_slot_that_does_not_fit_a_slab_says_which_setting(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, slab_bytes=8192)
    with pytest.raises(ArgumentError, match="slab_bytes"):
        tier.allocate(SPACES[2], 1)
    tier.close()


def test_misuse_is_refused_before_anything_happens(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    hashes = random_hashes(1)
    buffer = buffer_for(SPACES[0], hashes)
    for submit in (tier.submit_read, tier.submit_write):
        with pytest.raises(ArgumentError, match="capacity"):
            submit(batch_of(SPACES[0], hashes, np.array([64], np.uint32), buffer))
    if not any("O_DIRECT" in note for note in tier.notes):
        batch = batch_of(SPACES[0], hashes, np.array([0], np.uint32), buffer)
        batch.addresses[:] += 512
        with pytest.raises(ArgumentError, match="multiple of 4096"):
            tier.submit_read(batch)
    tier.close()


def test_one_directory_has_one_owner(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    with pytest.raises(LockedError, match=f"process {os.getpid()}"):
        open_tier(tmp_path)
    with pytest.raises(LockedError, match=f"process {os.getpid()}"):
        verify_directory(tmp_path / "nvme")
    script = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path; from nvme_harness import open_tier; from tierkv.errors import LockedError\n"
        "try: open_tier(Path(sys.argv[1]))\n"
        "except LockedError as error: print(error)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert f"is open in process {os.getpid()}: stop it" in done.stdout
    tier.close()
    open_tier(tmp_path).close()


def test_what_is_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "nvme").write_text("a file")
    with pytest.raises(ConfigError, match="is not a directory"):
        open_tier(tmp_path)
    with pytest.raises(ConfigError, match=r"its parent .* is not a directory.*mount the disk"):
        open_tier(tmp_path / "missing")
    (tmp_path / "other" / "nvme" / "slots.dat").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"slots\.dat cannot be opened"):
        open_tier(tmp_path / "other")
    with lmdb.open(str(make(tmp_path / "foreign" / "nvme") / "catalog"), max_dbs=9) as environment:
        for name in (b"a", b"b", b"c", b"d"):
            environment.open_db(name)
    with pytest.raises(FormatError, match="not a catalog"):
        open_tier(tmp_path / "foreign")


def make(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def test_verify_reads_every_block_and_repairs(kept: tuple[Path, np.ndarray]) -> None:  # type: ignore[type-arg]
    directory, _ = kept
    damage_file(directory / "slots.dat", FaultKind.FLIPPED, 3 * 4096, 4096)
    os.truncate(directory / "slots.dat", 19 * 4096)
    seen: list[tuple[int, int]] = []
    report = verify_directory(directory, lambda done, total: seen.append((done, total)))
    assert (report.checked, report.good, report.bad, report.repaired) == (20, 18, 2, 0)
    assert report.reasons == {"wrong checksum": 1, "beyond the slot file": 1}
    assert report.format_version == 1
    assert [(k.blocks, k.bytes) for k in report.keyspaces] == [(20, 20 * 4096)]
    assert seen[-1] == (20, 20)
    assert verify_directory(directory, repair=True).repaired == 2
    assert verify_directory(directory).reasons == {}
    tier = open_tier(directory.parent)
    assert len(residents(tier)) == 18
    tier.close()


def test_inspect_works_beside_an_open_store(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, 192)
    store(tier, SPACES[0], random_hashes(3))
    store(tier, SPACES[1], random_hashes(2))
    script = (
        "import sys, msgspec; from tierkv.tiers.nvme import inspect_directory;"
        "print(msgspec.json.encode(inspect_directory(sys.argv[1])).decode())"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "nvme")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    import msgspec

    from tierkv.tiers.nvme import InspectReport

    report = msgspec.json.decode(done.stdout, type=InspectReport)
    assert report.open_in_process == os.getpid()
    assert report.capacity_bytes == 192 * 4096
    assert report.used_bytes == 3 * 4096 + 2 * 8192
    assert Counter({k.digest: k.blocks for k in report.keyspaces}) == Counter(
        {SPACES[0].digest.hex(): 3, SPACES[1].digest.hex(): 2}
    )
    assert {k.digest: k.spec for k in report.keyspaces} == {s.digest.hex(): s.spec for s in SPACES[:2]}
    assert all(0 <= k.newest_s <= k.oldest_s < 3600 for k in report.keyspaces)
    here = inspect_directory(tmp_path / "nvme")  # and in the process that has it open
    assert here.keyspaces[0].blocks == report.keyspaces[0].blocks
    tier.close()
    assert inspect_directory(tmp_path / "nvme").open_in_process is None
    with pytest.raises(StorageError, match="does not exist"):
        inspect_directory(tmp_path / "nothing")


def test_the_directory_of_version_1_stays_readable(tmp_path: Path) -> None:
    golden = Path(__file__).parent.parent / "golden" / "nvme-v1"
    shutil.copytree(golden, tmp_path / "nvme")
    assert verify_directory(tmp_path / "nvme").good == 3
    tier = open_tier(tmp_path, 4, slab_bytes=8192)
    for space, count, seed in ((SPACES[0], 2, 100), (SPACES[1], 1, 101)):
        hashes = random_hashes(count, seed)
        slots = [residents(tier)[space.digest, row.tobytes()] for row in hashes]
        assert read(tier, space, hashes, np.array(slots, np.uint32)) == [OK] * count
    tier.close()


def test_o_direct_can_be_refused_or_demanded(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, direct="off")
    assert any("direct = off" in note for note in tier.notes)
    hashes = random_hashes(5)
    slots = store(tier, SPACES[1], hashes)
    assert read(tier, SPACES[1], hashes, slots) == [OK] * 5
    tier.close()
    tier = open_tier(tmp_path)
    assert read(tier, SPACES[1], hashes, slots) == [OK] * 5
    tier.close()


def test_several_opens_and_closes_leave_no_descriptors(tmp_path: Path) -> None:
    open_tier(tmp_path).close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        open_tier(tmp_path).close()
        with pytest.raises(ConfigError):
            open_tier(tmp_path / "missing")
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_engine_that_is_handed_in_is_closed(tmp_path: Path) -> None:
    engine = faulty_engine()
    tier = open_tier(tmp_path, engine=engine)
    assert isinstance(tier, NvmeTier)
    hashes = random_hashes(2)
    buffer = buffer_for(SPACES[0], hashes)
    slots = tier.allocate(SPACES[0], 2)
    assert slots is not None
    job = tier.submit_write(batch_of(SPACES[0], hashes, slots, buffer))
    tier.close()
    assert set(ended(job)) <= {OK, BlockStatus.CANCELLED}
    assert engine.waiting() == 0


def test_the_worked_example_of_the_format_page_is_true() -> None:
    """Reads the example from FORMAT.md and finds the same bytes in the directory of version 1, computed anew."""
    page = (Path(nvme.__file__).parent.parent / "FORMAT.md").read_text("utf-8")
    section = page[page.index("## NVMe directory, version 1") :]
    example = section[section.index("### A worked example") :]
    block, spec_text = example.split("```")[1::2][:2]
    words = [line.replace("key ", "").replace("value ", "").split()[0] for line in block.strip().splitlines()]
    digest, block_hash, *fields = [bytes.fromhex(word) for word in words]
    start = bytes.fromhex(re.findall(r"begins with the bytes `([0-9a-f]+)`", example)[0])
    spec = KeyspaceSpec.from_json(spec_text)
    assert spec.digest() == digest
    entry = np.frombuffer(b"".join(fields), ENTRY)[0]
    golden = Path(__file__).parent.parent / "golden" / "nvme-v1"
    data = (golden / "slots.dat").read_bytes()
    body = data[int(entry["slot"]) * 4096 :][: int(entry["length"])]
    assert body.startswith(start)
    assert crc32c(np.frombuffer(body, np.uint8)) == entry["checksum"]
    assert (
        crc32c(np.frombuffer(digest + block_hash + entry.tobytes()[:28], np.uint8)) == entry["entry_checksum"]
    )
    assert digest + block_hash in (golden / "catalog" / "data.mdb").read_bytes()
    assert entry.tobytes() in (golden / "catalog" / "data.mdb").read_bytes()
