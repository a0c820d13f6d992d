"""The catalog against a dict, and against files that are damaged, foreign, full or from the future."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.catalog import ENTRY, AddKeyspace, Catalog, CatalogWriteError, Delete, Put
from tierkv.errors import FormatError, StorageError
from tierkv.lmdbfile import LmdbFileError, check_lmdb_file
from tierkv.testing.buffers import make_spec, random_hashes
from tierkv.types import NO_SLOT, BlockStatus

SPECS = [make_spec(4096), make_spec(5000, group="window")]
DIGESTS = [spec.digest() for spec in SPECS]
HASHES = random_hashes(12, 5)


def entries(slots: list[int], length: int = 4096) -> np.ndarray:  # type: ignore[type-arg]
    made = np.zeros(len(slots), ENTRY)
    made["slot"] = slots
    made["length"] = length
    made["checksum"] = [slot * 7 + 1 for slot in slots]
    made["written_s"] = 1_700_000_000
    return made


def put(catalog: Catalog, count: int, space: int = 0, seed: int = 1) -> np.ndarray:  # type: ignore[type-arg]
    hashes = random_hashes(count, seed)
    catalog.commit(
        [AddKeyspace(DIGESTS[space], SPECS[space]), Put(DIGESTS[space], hashes, entries(list(range(count))))]
    )
    return hashes


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["put", "delete", "delete-slot", "delete-generation", "reopen", "clear"]),
        st.integers(0, 1),
        st.lists(st.integers(0, len(HASHES) - 1), min_size=1, max_size=6, unique=True),
        st.integers(0, 3),
    ),
    max_size=12,
)


@settings(deadline=None, max_examples=40)
@given(CHANGES)
def test_any_history_agrees_with_a_dict(tmp_path_factory: pytest.TempPathFactory, changes) -> None:  # type: ignore[no-untyped-def]
    directory = tmp_path_factory.mktemp("catalog")
    model: dict[tuple[int, int], tuple[int, int]] = {}  # (space, hash) -> (slot, generation)
    generation = 0
    catalog = Catalog(directory, sync_power=False)
    try:
        for kind, space, chosen, slot in changes:
            hashes = HASHES[chosen]
            keys = [(space, position) for position in chosen]
            slots = np.full(len(chosen), slot, np.uint32)
            match kind:
                case "put":
                    catalog.commit([Put(DIGESTS[space], hashes, entries(slots.tolist()))])
                    for key in keys:
                        generation += 1
                        model[key] = (slot, generation)
                case "delete":
                    catalog.commit([Delete(DIGESTS[space], hashes)])
                    model = {key: value for key, value in model.items() if key not in keys}
                case "delete-slot":
                    catalog.commit([Delete(DIGESTS[space], hashes, slots)])
                    model = {k: v for k, v in model.items() if k not in keys or v[0] != slot}
                case "delete-generation":
                    generations = np.full(len(chosen), generation, np.uint64)
                    catalog.commit([Delete(DIGESTS[space], hashes, slots, generations)])
                    model = {k: v for k, v in model.items() if k not in keys or v != (slot, generation)}
                case "reopen":
                    catalog.close()
                    catalog = Catalog(directory, sync_power=False)
                case _:
                    assert catalog.delete_keyspace(DIGESTS[space]) == sum(key[0] == space for key in model)
                    model = {key: value for key, value in model.items() if key[0] != space}
            for space_, digest in enumerate(DIGESTS):
                found = catalog.get(digest, HASHES)
                expected = [model.get((space_, position), (NO_SLOT, 0)) for position in range(len(HASHES))]
                assert (
                    list(zip(found["slot"].tolist(), found["generation"].tolist(), strict=True)) == expected
                )
            scanned = {
                (DIGESTS.index(batch.digest), HASHES.tolist().index(row.tolist())): (
                    int(e["slot"]),
                    int(e["generation"]),
                )
                for batch in catalog.scan(batch_blocks=3)
                for row, e in zip(batch.hashes, batch.entries, strict=True)
            }
            assert scanned == model
            assert len(catalog) == len(model)
    finally:
        catalog.close()
    check_lmdb_file(directory / "data.mdb")


def test_what_is_stored_comes_back_after_reopening(tmp_path: Path) -> None:
    with_specs = Catalog(tmp_path / "c", created_s=123.9)
    hashes = put(with_specs, 100)
    put(with_specs, 5, space=1)
    uuid = with_specs.uuid
    with_specs.close()
    with_specs.close()
    again = Catalog(tmp_path / "c", created_s=999)
    assert (again.uuid, again.created_s, again.format_version) == (uuid, 123, 1)
    assert again.keyspaces() == dict(zip(DIGESTS, SPECS, strict=True))
    found = again.get(DIGESTS[0], hashes)
    assert found["slot"].tolist() == list(range(100))
    assert found["checksum"].tolist() == [slot * 7 + 1 for slot in range(100)]
    assert [len(batch.hashes) for batch in again.scan(DIGESTS[1])] == [5]
    again.close()
    with pytest.raises(CatalogWriteError, match="closed"):
        again.commit([])


def test_a_full_map_grows_under_readers(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "c", sync_power=False, map_bytes=64 << 10)
    stop, failures = threading.Event(), []

    def read() -> None:
        while not stop.wait(0.001):
            try:
                catalog.get(DIGESTS[0], HASHES)
                for _ in catalog.scan(batch_blocks=1000):
                    pass
            except Exception as error:
                failures.append(error)
                return

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for seed in range(6):
        put(catalog, 2000, seed=seed)
    stop.set()
    for reader in readers:
        reader.join(30.0)
    assert failures == []
    assert len(catalog) == 12_000
    assert (tmp_path / "c" / "data.mdb").stat().st_size > 1 << 20
    catalog.close()


@pytest.mark.parametrize("position", [0, 31, 32, 63])
def test_an_entry_under_another_key_is_not_found(tmp_path: Path, position: int) -> None:
    """A flipped bit in a stored key or value must not make another block's bytes appear."""
    catalog = Catalog(tmp_path / "c")
    hashes = put(catalog, 1)
    key = bytearray(DIGESTS[0] + hashes[0].tobytes())
    value = catalog.get(DIGESTS[0], hashes)[0].tobytes()
    key[position] ^= 1
    flipped = bytearray(value)
    flipped[position // 2] ^= 16
    with catalog._environment.begin(write=True) as transaction:
        transaction.put(bytes(key), value, db=catalog._blocks)
        transaction.put(DIGESTS[0] + hashes[0].tobytes(), bytes(flipped), db=catalog._blocks)
    other = np.frombuffer(bytes(key[32:]), np.uint8).reshape(1, 32)
    assert catalog.get(bytes(key[:32]), other)["slot"].tolist() == [NO_SLOT]
    assert catalog.get(DIGESTS[0], hashes)["slot"].tolist() == [NO_SLOT]
    assert [batch.intact.tolist() for batch in catalog.scan()] in ([[False, False]], [[False], [False]])
    catalog.close()


def test_a_newer_version_is_refused_with_the_way_out(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "c")
    with catalog._environment.begin(write=True) as transaction:
        transaction.put(b"version", (2).to_bytes(4, "little"), db=catalog._meta)
    catalog.close()
    with pytest.raises(
        FormatError, match=r"format version 2, this tierkv reads 1.*tierkv verify.*new directory"
    ):
        Catalog(tmp_path / "c")


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "data.mdb").write_bytes(b"not a database " * 1000)
    with pytest.raises(FormatError, match="no valid header"):
        Catalog(tmp_path / "text")
    with lmdb.open(str(tmp_path / "other"), max_dbs=9) as environment:
        for name in (b"a", b"b", b"c"):
            environment.open_db(name)
        with environment.begin(write=True) as transaction:
            transaction.put(b"somebody", b"else's")
    with pytest.raises(FormatError, match="not a catalog"):
        Catalog(tmp_path / "other")
    with pytest.raises(StorageError, match="missing/c"):
        Catalog(tmp_path / "missing" / "c")
    with pytest.raises(StorageError):
        Catalog(tmp_path / "none", read_only=True)


@pytest.fixture(scope="module")
def big_catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A catalog with branch pages, free pages and three tables."""
    directory = tmp_path_factory.mktemp("big") / "c"
    catalog = Catalog(directory, sync_power=False)
    kept = put(catalog, 5000)
    catalog.commit([Delete(DIGESTS[0], kept[:2000])])
    put(catalog, 500, space=1, seed=2)
    catalog.close()
    check_lmdb_file(directory / "data.mdb")
    return directory


def test_a_catalog_cut_anywhere_never_crashes(big_catalog: Path, tmp_path: Path) -> None:
    data = (big_catalog / "data.mdb").read_bytes()
    refused = 0
    for length in (1, 100, 4096, 8192, 8193, 12_288, len(data) // 2, len(data) - 4096, len(data) - 1):
        copy = tmp_path / str(length)
        copy.mkdir()
        (copy / "data.mdb").write_bytes(data[:length])
        refused += outcome_of_opening(copy) == "FormatError"
    assert refused >= 8  # the last page may be a free one


@pytest.mark.parametrize("seed", range(12))
def test_a_garbled_catalog_never_crashes(big_catalog: Path, tmp_path: Path, seed: int) -> None:
    """Whole sectors of noise or zeros over live pages: refused, or (in a free page) harmless; never a
    signal."""
    random = np.random.default_rng(seed)
    copy = tmp_path / "c"
    shutil.copytree(big_catalog, copy)
    data = bytearray((copy / "data.mdb").read_bytes())
    for _ in range(1 + seed % 3):
        start = int(random.integers(16, len(data) // 512)) * 512
        noise = random.integers(0, 256, 512, np.uint8).tobytes() if seed % 2 else bytes(512)
        data[start : start + 512] = noise
    (copy / "data.mdb").write_bytes(data)
    assert outcome_of_opening(copy) in {"ok", "FormatError"}


_OPEN = """
import sys, numpy as np
from tierkv.catalog import Catalog
from tierkv.errors import TierKVError
try:
    catalog = Catalog(sys.argv[1])
    good = sum(int(batch.intact.sum()) for batch in catalog.scan())
    catalog.keyspaces()
    catalog.close()
    print("ok")
except TierKVError as error:
    assert "tierkv verify" in str(error), error
    print(type(error).__name__)
"""


def outcome_of_opening(directory: Path) -> str:
    """Opens and reads everything in a process of its own, since the point is whether that survives."""
    done = subprocess.run(
        [sys.executable, "-c", _OPEN, str(directory)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr}"
    return done.stdout.strip()


def test_the_check_finds_a_page_named_twice(big_catalog: Path, tmp_path: Path) -> None:
    data = bytearray((big_catalog / "data.mdb").read_bytes())
    pages = [data[start : start + 4096] for start in range(0, len(data), 4096)]
    branch = next(
        number
        for number in itertools.count(len(pages) - 1, -1)
        if int.from_bytes(pages[number][10:12], "little") & 1
        and int.from_bytes(pages[number][12:14], "little") > 40
    )
    first, second = (int.from_bytes(pages[branch][16 + 2 * k : 18 + 2 * k], "little") for k in (1, 2))
    start = branch * 4096
    data[start + second : start + second + 4] = data[start + first : start + first + 4]
    copy = tmp_path / "data.mdb"
    copy.write_bytes(data)
    with pytest.raises(LmdbFileError, match=r"twice|not the page"):
        check_lmdb_file(copy)


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = Catalog(tmp_path / "c")
    hashes = put(catalog, 3)

    class Failing:
        def __init__(self, environment: object, error: Exception) -> None:
            self._environment, self._error = environment, error

        def begin(self, write: bool = False):  # type: ignore[no-untyped-def]
            if write:
                raise self._error
            return self._environment.begin()  # type: ignore[attr-defined]

    real = catalog._environment
    for error, status in (
        (lmdb.DiskError("mdb_txn_commit: No space left on device"), BlockStatus.NO_SPACE),
        (lmdb.Error("mdb_txn_commit: Input/output error"), BlockStatus.IO_ERROR),
    ):
        catalog._environment = Failing(real, error)
        with pytest.raises(CatalogWriteError) as caught:
            catalog.commit([Delete(DIGESTS[0], hashes)])
        assert caught.value.status == status
    catalog._environment = real
    assert len(catalog) == 3
    generations = catalog.get(DIGESTS[0], hashes)["generation"].tolist()
    put(catalog, 1, seed=9)
    assert max(catalog.get(DIGESTS[0], random_hashes(1, 9))["generation"].tolist()) > max(generations)
    catalog.close()


def test_readers_elsewhere_see_commits(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "c")
    put(catalog, 7)
    script = (
        "import sys; from tierkv.catalog import Catalog; c = Catalog(sys.argv[1], read_only=True);"
        "print(len(c), len(c.keyspaces()))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "c")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stdout.split() == ["7", "1"]
    catalog.close()
