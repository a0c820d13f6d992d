"""The DFS tier on a real directory: the shared suite, the file's format, damage, races between processes,
kill -9."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tierkv.tiers.dfs
from tierkv.clock import VirtualClock
from tierkv.codec import CodecId
from tierkv.config import DfsConfig
from tierkv.errors import ClosedError, StorageError
from tierkv.keys import Keyspace, KeyspaceSpec
from tierkv.testing.buffers import BlockBuffer, block_payload, make_space, make_spec, random_hashes
from tierkv.testing.tiers import TierConformance
from tierkv.tiers.base import Batch
from tierkv.tiers.dfs import UNLIMITED_BYTES, DfsTier
from tierkv.tiers.dfs_format import HEADER_BYTES, Header, file_bytes, read_header
from tierkv.types import BlockStatus, HashArray, TierKind

OK, MISS, CORRUPT = BlockStatus.OK, BlockStatus.MISS, BlockStatus.CORRUPT
GOLDEN = Path(__file__).parent.parent / "golden" / "dfs-v1"
TIMEOUT_S = 30.0


def config(directory: Path, **changes: object) -> DfsConfig:
    settings_ = {"sync": False, "threads": 4, **changes}
    return DfsConfig(directory=str(directory), **settings_)  # type: ignore[arg-type]


def path_of(directory: Path, space: Keyspace, block_hash: bytes) -> Path:
    name = block_hash.hex()
    return directory / "v1" / space.digest.hex() / name[:2] / name


class DfsConformance(TierConformance):
    durable = content_addressed = shared = True
    changes: dict[str, object] = {}  # noqa: RUF012

    def make_tier(self, directory: Path) -> DfsTier:
        # The suite counts blocks; a file has a header besides.
        capacity = self.capacity_bytes + (self.capacity_bytes >> 20) * HEADER_BYTES
        return DfsTier(config(directory, capacity_bytes=capacity, **self.changes))

    def damage(self, tier: object, space: Keyspace, block_hash: bytes, slot: int) -> None:
        assert isinstance(tier, DfsTier)
        path = path_of(Path(tier._root), space, block_hash)
        data = bytearray(path.read_bytes())
        data[HEADER_BYTES + 40] ^= 0x10
        path.write_bytes(data)


class TestDfsDirect(DfsConformance):
    pass


class TestDfsBufferedSync(DfsConformance):
    capacity_bytes = 4 << 20  # each block costs two fsyncs
    changes = {"direct": "off", "sync": True, "threads": 8}  # noqa: RUF012


class TestDfsCompressed(DfsConformance):
    capacity_bytes = 4 << 20
    changes = {"codec": "zstd-planes", "threads": 4}  # noqa: RUF012


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DfsTier]:
    opened = DfsTier(config(tmp_path))
    yield opened
    opened.close()


def write(tier: DfsTier, space: Keyspace, hashes: HashArray, length: int | None = None) -> list[int]:
    count, size = len(hashes), length or space.block_bytes
    source = BlockBuffer(count, space.block_bytes)
    for position, row in enumerate(hashes):
        source.put(position, block_payload(space, row.tobytes())[:size])
    slots = tier.allocate(space, count)
    assert slots is not None
    job = tier.submit_write(Batch(space, hashes, slots, source.addresses, np.full(count, size, np.int64)))
    assert job.wait(TIMEOUT_S)
    return job.status.tolist()  # type: ignore[no-any-return]


def read(tier: DfsTier, space: Keyspace, hashes: HashArray, length: int | None = None) -> list[int]:
    """Statuses; OK means the payload, anything else that not one byte was written."""
    count, size = len(hashes), length or space.block_bytes
    target = BlockBuffer(count, space.block_bytes)
    slots = np.zeros(count, np.uint32)
    job = tier.submit_read(Batch(space, hashes, slots, target.addresses, np.full(count, size, np.int64)))
    assert job.wait(TIMEOUT_S)
    for position, status in enumerate(job.status.tolist()):
        if status == OK:
            assert target.get(position, size) == block_payload(space, hashes[position].tobytes())[:size]
        else:
            assert set(target.get(position)) == {0xA5}
    assert target.guards_intact()
    return job.status.tolist()  # type: ignore[no-any-return]


def recovered(tier: DfsTier) -> dict[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = {}
    for residents in tier.recover():
        found.setdefault(residents.space.digest(), []).extend(row.tobytes() for row in residents.hashes)
    return found


# The stored form.


def test_a_file_is_what_the_format_says(tmp_path: Path, tier: DfsTier) -> None:
    space, hashes = make_space(5000), random_hashes(1)
    assert write(tier, space, hashes) == [OK]
    data = np.frombuffer(path_of(tmp_path, space, hashes[0].tobytes()).read_bytes(), np.uint8)
    assert len(data) == 4096 + 8192 == file_bytes(5000)
    header = read_header(data)
    assert isinstance(header, Header)
    assert (header.codec, header.element_bytes, header.block_bytes, header.stored_bytes) == (0, 1, 5000, 5000)
    assert (header.digest, header.block_hash) == (space.digest, hashes[0].tobytes())
    payload = block_payload(space, hashes[0].tobytes())
    assert data[4096 : 4096 + 5000].tobytes() == payload
    assert not data[4096 + 5000 :].any()
    spec = KeyspaceSpec.from_json((tmp_path / "v1" / space.digest.hex() / "spec.json").read_bytes())
    assert spec == space.spec
    assert not list(tmp_path.rglob(".*"))


def test_golden_files_of_version_1_stay_readable(tmp_path: Path) -> None:
    """Files of every codec that version 1 wrote; the payloads follow from the names."""
    shutil.copytree(GOLDEN, tmp_path / "copy")
    tier = DfsTier(config(tmp_path / "copy"))
    try:
        codecs = set()
        found = list(tier.recover())
        assert len(found) == 3
        for residents in found:
            space = Keyspace(residents.space, residents.space.digest(), 1)
            hashes = np.ascontiguousarray(residents.hashes)
            assert len(hashes) == 1
            assert golden_read(tier, space, hashes) == golden_block(space)
            path = path_of(tmp_path / "copy", space, hashes[0].tobytes())
            header = read_header(np.frombuffer(path.read_bytes(), np.uint8))
            assert isinstance(header, Header)
            codecs.add(header.codec)
        assert codecs == set(CodecId)
    finally:
        tier.close()


def test_the_worked_example_of_the_format_is_a_real_file() -> None:
    text = (Path(tierkv.tiers.dfs.__file__).parent.parent / "FORMAT.md").read_text(encoding="utf-8")
    section = text.partition("## Shared directory (DFS), version 1")[2]
    place = re.search(r"^v1/[0-9a-f]{64}/[0-9a-f]{2}/[0-9a-f]{64}$", section, re.MULTILINE)
    assert place is not None
    data = (GOLDEN / place[0]).read_bytes()
    lines = re.findall(r"^([0-9a-f]{4})  ((?:[0-9a-f]{2} )*[0-9a-f]{2})(?: |$)", section, re.MULTILINE)
    assert len(lines) == 22
    shown = 0
    for offset, digits in lines:
        expected = bytes.fromhex(digits)
        assert data[int(offset, 16) :][: len(expected)] == expected, offset
        shown += len(expected)
    assert shown == 112 + 4 + 16
    assert not any(data[112:4092])


def golden_block(space: Keyspace) -> bytes:
    """Compressible, and the same for ever: byte k is k / 16 in low bytes, one constant in high ones."""
    low = (np.arange(space.block_bytes) // 16 % 256).astype(np.uint8)
    low[1::2] = 0x3F
    return low.tobytes()


def golden_read(tier: DfsTier, space: Keyspace, hashes: HashArray) -> bytes:
    target = BlockBuffer(1, space.block_bytes)
    lengths = np.array([space.block_bytes], np.int64)
    job = tier.submit_read(Batch(space, hashes, np.zeros(1, np.uint32), target.addresses, lengths))
    assert job.wait(TIMEOUT_S)
    assert job.ok(), (job.status, tier.counts)
    return target.get(0)


def make_golden(directory: Path) -> None:
    """How the golden files were made; run by hand for a new version, never for an old one."""
    for codec in ("none", "zstd", "zstd-planes"):
        tier = DfsTier(config(directory, codec=codec))
        spec = make_spec(6000, group=f"golden-{codec}")
        space = Keyspace(spec, spec.digest(), 1)
        source = BlockBuffer(1, 6000)
        source.put(0, golden_block(space))
        lengths = np.array([6000], np.int64)
        slots = tier.allocate(space, 1)
        assert slots is not None
        job = tier.submit_write(Batch(space, random_hashes(1, 1), slots, source.addresses, lengths))
        assert job.wait(TIMEOUT_S)
        assert job.ok()
        tier.close()


# Damage: never wrong bytes, and the bad copy goes.


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), codec=st.sampled_from(["none", "zstd", "zstd-planes"]))
def test_any_flipped_bit_or_cut_is_found(tmp_path: Path, data: st.DataObject, codec: str) -> None:
    tier = DfsTier(config(tmp_path, codec=codec, threads=1))
    try:
        space = make_space(6000)
        hashes = random_hashes(1, data.draw(st.integers(0, 1 << 32)))
        path = path_of(tmp_path, space, hashes[0].tobytes())
        assert write(tier, space, hashes) == [OK]
        content = bytearray(path.read_bytes())
        if data.draw(st.booleans(), label="cut"):
            path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
            certain = True
        else:
            at = data.draw(st.integers(0, len(content) - 1), label="byte")
            content[at] ^= 1 << data.draw(st.integers(0, 7))
            path.write_bytes(content)
            header = read_header(np.frombuffer(bytes(content), np.uint8))
            # What pads the payload belongs to nobody.
            certain = not (isinstance(header, Header) and at >= HEADER_BYTES + header.stored_bytes)
        status = read(tier, space, hashes)
        assert status == ([CORRUPT] if certain else [OK])
        if certain:
            assert not path.exists()
            assert read(tier, space, hashes) == [MISS]
            assert write(tier, space, hashes) == [OK]
            assert read(tier, space, hashes) == [OK]
    finally:
        tier.close()


def test_a_renamed_file_is_found_out(tmp_path: Path, tier: DfsTier) -> None:
    space, other = make_space(4096, 1), make_space(4096, 2, revision="r2")
    hashes = random_hashes(3)
    assert write(tier, space, hashes[:1]) == [OK]
    assert write(tier, other, hashes[1:2]) == [OK]
    source = path_of(tmp_path, space, hashes[0].tobytes())
    wrong_hash = path_of(tmp_path, space, hashes[2].tobytes())
    wrong_space = path_of(tmp_path, other, hashes[0].tobytes())
    for target in (wrong_hash, wrong_space):
        target.parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(source, target)
    assert read(tier, space, hashes[2:]) == [CORRUPT]
    assert read(tier, other, hashes[:1]) == [CORRUPT]
    assert not wrong_hash.exists()
    assert not wrong_space.exists()
    assert read(tier, space, hashes[:1]) == [OK]
    assert tier.counts == {"read: hash": 1, "read: keyspace": 1}


def test_other_things_under_a_blocks_name_are_misses(tmp_path: Path, tier: DfsTier) -> None:
    space, hashes = make_space(4096), random_hashes(4)
    assert write(tier, space, hashes) == [OK] * 4
    paths = [path_of(tmp_path, space, row.tobytes()) for row in hashes]
    content = paths[3].read_bytes()
    for path in paths[:3]:
        path.unlink()
    paths[0].mkdir()
    os.mkfifo(paths[1])
    paths[2].symlink_to(paths[3])
    assert read(tier, space, hashes) == [MISS, MISS, MISS, OK]
    assert paths[0].is_dir()
    assert paths[3].read_bytes() == content
    assert tier.probe(space, hashes).tolist() == [False, False, False, True]
    assert set(recovered(tier)[space.digest]) == {hashes[3].tobytes()}
    # A directory cannot be replaced, the others can.
    assert write(tier, space, hashes) == [BlockStatus.IO_ERROR, OK, OK, OK] or not tier.healthy()


def test_a_block_of_another_length_is_not_taken(tmp_path: Path, tier: DfsTier) -> None:
    space, hashes = make_space(9000), random_hashes(1)
    assert write(tier, space, hashes, length=5000) == [OK]
    assert read(tier, space, hashes, length=5000) == [OK]
    assert read(tier, space, hashes, length=9000) == [CORRUPT]


def test_a_bad_copy_is_replaced_by_a_write_and_a_good_one_is_left_alone(
    tmp_path: Path, tier: DfsTier
) -> None:
    space, hashes = make_space(5000), random_hashes(2)
    assert write(tier, space, hashes) == [OK, OK]
    good, bad = (path_of(tmp_path, space, row.tobytes()) for row in hashes)
    before = good.stat().st_ino
    bad.write_bytes(bad.read_bytes()[:4096])
    assert write(tier, space, hashes) == [OK, OK]
    assert good.stat().st_ino == before
    assert tier.counts["write: there already"] == 1
    assert read(tier, space, hashes) == [OK, OK]


# Listing.


def test_recovery_lists_what_is_ours_oldest_first_and_cleans_up(tmp_path: Path, tier: DfsTier) -> None:
    space, hashes = make_space(4096), random_hashes(30)
    assert write(tier, space, hashes) == [OK] * 30
    order = np.random.default_rng(5).permutation(30)
    now = time.time()
    for age, index in enumerate(order.tolist()):
        os.utime(path_of(tmp_path, space, hashes[index].tobytes()), (0, now - 1000 + age))
    keyspace = tmp_path / "v1" / space.digest.hex()
    inside = next(p for p in keyspace.iterdir() if p.is_dir())
    fresh, stale = inside / ".tmp-host-1-1", inside / ".tmp-host-1-2"
    for path in (fresh, stale, inside / "README", keyspace / "notes", tmp_path / "v1" / "lost+found"):
        path.write_text("x")
    os.utime(stale, (0, now - 4000))
    (tmp_path / "v1" / ("0" * 64)).mkdir()  # a keyspace whose spec was never written
    (tmp_path / "v1" / ("1" * 64)).mkdir()
    (tmp_path / "v1" / ("1" * 64) / "spec.json").write_bytes(space.spec.canonical())
    cut = path_of(tmp_path, space, hashes[order[0]].tobytes())
    cut.write_bytes(b"short")
    assert recovered(tier) == {space.digest: [hashes[index].tobytes() for index in order[1:].tolist()]}
    assert fresh.exists()
    assert not stale.exists()
    assert (inside / "README").exists()
    assert cut.exists()  # it may be somebody's half-visible new file
    assert tier.counts == {
        "recover: foreign file": 1,
        "recover: stale temporary file": 1,
        "recover: file length": 1,
        "recover: spec unreadable": 2,
    }
    os.utime(cut, (0, now - 4000))
    assert len(recovered(tier)[space.digest]) == 29
    assert not cut.exists()
    assert tier.used_bytes() == 30 * file_bytes(4096)


def test_listing_in_batches_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.tiers.dfs.RECOVER_BATCH", 7)
    tier = DfsTier(config(tmp_path))
    try:
        spaces = [make_space(100, n, group=f"g{n}") for n in range(3)]
        expected = {}
        for number, space in enumerate(spaces):
            hashes = random_hashes(20, number)
            assert write(tier, space, hashes) == [OK] * 20
            expected[space.digest] = {row.tobytes() for row in hashes}
        for _ in range(2):
            batches = list(tier.recover())
            assert max(len(batch.hashes) for batch in batches) == 7
            assert {d: set(found) for d, found in recovered(tier).items()} == expected
        assert tier.used_bytes() == 60 * file_bytes(100)
    finally:
        tier.close()


# Forgetting.


def test_a_cleared_keyspace_vanishes_at_once_for_everybody(tmp_path: Path) -> None:
    first, second = DfsTier(config(tmp_path)), DfsTier(config(tmp_path, sync=True))
    try:
        space, other = make_space(4096, 1), make_space(4096, 2, revision="r2")
        hashes = random_hashes(40)
        assert write(first, space, hashes) == [OK] * 40
        assert write(first, other, hashes[:3]) == [OK] * 3
        used = first.used_bytes()
        second.forget(space, None)
        assert read(first, space, hashes) == [MISS] * 40
        assert not first.probe(space, hashes).any()
        assert recovered(first).keys() == {other.digest}
        assert first.used_bytes() == used
        first.free(space, hashes, np.zeros(40, np.uint32))
        assert first.used_bytes() == 3 * file_bytes(4096)
        # The first tier still thinks the keyspace's directory is there.
        assert write(first, space, hashes[:5]) == [OK] * 5
        assert recovered(second)[space.digest]
    finally:
        first.close()
        second.close()


def test_what_is_left_of_a_cleared_keyspace_is_removed_by_a_listing(tmp_path: Path) -> None:
    left = tmp_path / "v1" / (".gone-" + "a" * 64 + "-x")
    (left / "ab").mkdir(parents=True)
    (left / "ab" / ("ab" * 32)).write_bytes(b"x")
    (left / "spec.json").write_bytes(b"x")
    tier = DfsTier(config(tmp_path))
    try:
        assert recovered(tier) == {}
        assert tier._call(lambda files: None)  # listings come one behind the other
        assert not left.exists()
    finally:
        tier.close()


# Accounts.


@settings(max_examples=40)
@given(st.data())
def test_accounts_agree_with_a_model(data: st.DataObject) -> None:
    from tierkv.tiers.dfs_accounts import Accounts

    accounts = Accounts(10 * 8192)
    hashes = random_hashes(8)
    digest = bytes(32)
    files: set[int] = set()
    granted = 0
    for _ in range(30):
        action = data.draw(st.sampled_from(["grant", "write", "find", "free"]))
        some = data.draw(st.lists(st.integers(0, 7), unique=True, max_size=4))
        rows = hashes[np.array(some, np.int64)]
        if action == "grant":
            fits = (granted + len(files) + len(some)) <= 10 or not some
            assert accounts.grant(digest, 8192, len(some)) == fits
            granted += len(some) if fits else 0
        elif action == "write":
            accounts.written(digest, 8192, rows)
            granted = max(0, granted - len(some))
            files |= set(some)
        elif action == "find":
            accounts.found(digest, 8192, rows)
            files |= set(some)
        else:
            accounts.freed(digest, 8192, rows)
            granted = max(0, granted - len(set(some) - files))
            files -= set(some)
        assert accounts.used_bytes == (granted + len(files)) * 8192
        assert accounts.available(8192) == max(0, 10 - granted - len(files))


def test_key_sets_merge_and_stay_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    from tierkv.tiers import dfs_accounts

    monkeypatch.setattr(dfs_accounts, "_SMALLEST_MERGE", 10)
    rng = np.random.default_rng(0)
    keys, model = dfs_accounts.KeySet(), set[int]()
    for _ in range(300):
        some = rng.integers(0, 500, rng.integers(0, 30)).astype(np.uint64)
        fresh = set(some.tolist())
        if rng.random() < 0.5:
            assert keys.add(some) == len(fresh - model)
            model |= fresh
        else:
            assert keys.discard(some) == len(fresh & model)
            model -= fresh
        assert len(keys) == len(model)


def test_capacity_is_kept_and_unlimited_without(tmp_path: Path, tier: DfsTier) -> None:
    space = make_space(4096)
    assert tier.info.kind is TierKind.DFS
    assert tier.info.shared
    assert tier.info.capacity_bytes == UNLIMITED_BYTES
    assert tier.available(space) == UNLIMITED_BYTES // 8192
    limited = DfsTier(config(tmp_path, capacity_bytes=5 * 8192 + 8191))
    try:
        assert limited.available(space) == 5
        assert limited.allocate(space, 6) is None
        slots = limited.allocate(space, 5)
        assert slots is not None
        assert slots.tolist() == [0] * 5
        assert limited.allocate(space, 1) is None
        limited.free(space, random_hashes(2), slots[:2])
        assert limited.available(space) == 2
    finally:
        limited.close()
    with pytest.raises(ClosedError):
        limited.allocate(space, 1)


# Opening.


def test_a_directory_that_cannot_be_used_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="create or mount it"):
        DfsTier(config(tmp_path / "missing"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="create or mount it"):
        DfsTier(config(tmp_path / "file"))


def test_opening_leaves_no_file(tmp_path: Path) -> None:
    DfsTier(config(tmp_path)).close()
    assert [p.name for p in tmp_path.rglob("*")] == ["v1"]


# Several processes.

_WRITER = """
import sys
import numpy as np
from tierkv.config import DfsConfig
from tierkv.testing.buffers import BlockBuffer, block_payload, make_space, random_hashes
from tierkv.tiers.base import Batch
from tierkv.tiers.dfs import DfsTier

directory, seed, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
tier = DfsTier(DfsConfig(directory=directory, sync=False, threads=4, codec=sys.argv[4]))
space = make_space(200_000)
hashes = random_hashes(24, 7)
source = BlockBuffer(24, 200_000)
for position, row in enumerate(hashes):
    source.put(position, block_payload(space, row.tobytes()))
lengths = np.full(24, 200_000, np.int64)
print("ready", flush=True)
for turn in range(rounds):
    order = np.random.default_rng(seed + turn).permutation(24)
    slots = tier.allocate(space, 24)
    batch = Batch(space, hashes[order], slots, source.addresses[order], lengths)
    job = tier.submit_write(batch)
    assert job.wait(60)
    assert job.ok(), (job.status, tier.counts)
    if seed % 2:
        tier.free(space, hashes[order[:12]], slots[:12])
print("done", flush=True)
tier.close()
"""


def start_writer(directory: Path, seed: int, rounds: int, codec: str = "none") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _WRITER, str(directory), str(seed), str(rounds), codec]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_processes_write_the_same_blocks_at_once_while_others_read(tmp_path: Path) -> None:
    tier = DfsTier(config(tmp_path))
    writers = [start_writer(tmp_path, seed, 12) for seed in (0, 1, 2)]
    try:
        space, hashes = make_space(200_000), random_hashes(24, 7)
        while any(writer.poll() is None for writer in writers):
            assert set(read(tier, space, hashes)) <= {OK, MISS}
        assert [writer.wait(TIMEOUT_S) for writer in writers] == [0, 0, 0]
        assert tier.counts.keys() <= {"read: absent"}
        assert not list(tmp_path.rglob(".tmp-*"))
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
        tier.close()


@pytest.mark.crash
def test_a_killed_writer_leaves_nothing_but_temporary_files(tmp_path: Path) -> None:
    space, hashes = make_space(200_000), random_hashes(24, 7)
    rng = np.random.default_rng()
    tier = DfsTier(config(tmp_path))
    try:
        for turn in range(6):
            writer = start_writer(tmp_path, 1, 10_000, "zstd" if turn % 2 else "none")
            # Reading a few times is as good a moment as any; which one is left to chance.
            for _ in range(int(rng.integers(1, 8))):
                assert set(read(tier, space, hashes)) <= {OK, MISS}
            writer.send_signal(signal.SIGKILL)
            writer.wait(TIMEOUT_S)
            writer.communicate()
            for path in tmp_path.rglob("*"):
                if path.is_file() and not path.name.startswith(".tmp-") and path.name != "spec.json":
                    header = read_header(np.frombuffer(path.read_bytes(), np.uint8))
                    assert isinstance(header, Header)
            assert set(read(tier, space, hashes)) <= {OK, MISS}
        assert write(tier, space, hashes) == [OK] * 24
        assert read(tier, space, hashes) == [OK] * 24
    finally:
        tier.close()
    later = VirtualClock(time.time() + 7200)
    tier = DfsTier(config(tmp_path), clock=later)
    try:
        assert len(recovered(tier)[space.digest]) == 24
        assert not list(tmp_path.rglob(".tmp-*"))
    finally:
        tier.close()
