"""Which LoRA weights a name stands for: what re-keys the block hashes, and when nothing may be kept."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.adapters.vllm import lora
from tierkv.adapters.vllm.lora import Adapter, AdapterBook, LoadedAdapters, adapter_revision, rekeyed
from tierkv.types import HASH_BYTES


@dataclass
class Request:
    """As vLLM's LoRARequest."""

    lora_path: str
    lora_name: str = "one"
    lora_int_id: int = 1
    is_3d_lora_weight: bool = False


def write(place: Path, weights: bytes = b"weights", rank: int = 4) -> Path:
    """An adapter's directory."""
    place.mkdir(exist_ok=True)
    (place / "adapter_config.json").write_text(json.dumps({"r": rank}))
    (place / "adapter_model.safetensors").write_bytes(weights)
    return place


def later(place: Path) -> None:
    """Gives the weights another time, as any later write does."""
    path = place / "adapter_model.safetensors"
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 5_000_000))


def test_what_tells_adapters_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and settings do; the place does not, so that a copy that keeps the times is the same adapter."""
    place = write(tmp_path / "one")
    first = adapter_revision(str(place))
    assert first is not None
    assert adapter_revision(str(place)) == first
    shutil.copytree(place, tmp_path / "copy")
    assert adapter_revision(str(tmp_path / "copy")) == first
    (tmp_path / "link").symlink_to(place)
    assert adapter_revision(str(tmp_path / "link")) == first
    monkeypatch.setenv("HOME", str(tmp_path))
    assert adapter_revision("~/one") == first
    later(place)
    changed = adapter_revision(str(place))
    assert changed not in (None, first)
    (place / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
    assert adapter_revision(str(place)) not in (None, first, changed)


def test_what_cannot_be_told(tmp_path: Path) -> None:
    """A hub's name, a file, a directory without weights, a path that is none."""
    (tmp_path / "empty").mkdir()
    write(tmp_path / "one")
    for path in (
        "someone/an-adapter", str(tmp_path / "none"), str(tmp_path / "empty"), "a\0b",
        str(tmp_path / "one" / "adapter_model.safetensors"),
    ):  # fmt: skip
        assert adapter_revision(path) is None
        assert AdapterBook().adapter_of(Request(path)) is None


@given(
    hashes=st.lists(st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES), max_size=20, unique=True),
    forms=st.lists(st.binary(max_size=8), min_size=2, max_size=2, unique=True),
)
def test_rekeyed(hashes: list[bytes], forms: list[bytes]) -> None:
    """Each key names each block apart, by the block alone: growing the list changes no name."""
    keys = [hashlib.sha256(form).digest() for form in forms]
    rows = np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, HASH_BYTES)
    first, second = (rekeyed(rows, key) for key in keys)
    assert first.shape == second.shape == rows.shape
    assert first.dtype == np.uint8
    names = {row.tobytes() for array in (rows, first, second) for row in array}
    assert len(names) == 3 * len(hashes)
    half = len(hashes) // 2
    assert np.array_equal(
        np.concatenate([rekeyed(rows[:half], keys[0]), rekeyed(rows[half:], keys[0])]), first
    )


def test_keys(tmp_path: Path) -> None:
    """The key goes by weights, settings and form; not by the name, which is in the hash, nor by the engine's id."""
    place = str(write(tmp_path / "one"))
    adapter = AdapterBook({"dtype": "float32"}).adapter_of(Request(place, "one", 7))
    assert adapter is not None
    assert adapter.number == 7
    again = AdapterBook({"dtype": "float32"}).adapter_of(Request(place, "two", 8))
    assert again == Adapter(8, adapter.revision, adapter.key)
    for book, request in (
        (AdapterBook({"dtype": "bfloat16"}), Request(place)),
        (AdapterBook({"dtype": "float32"}), Request(place, is_3d_lora_weight=True)),
    ):
        other = book.adapter_of(request)
        assert other is not None
        assert other.key != adapter.key
        assert len(other.key) == 32


def test_changed_under_an_engine(tmp_path: Path) -> None:
    """When the files change, the name stands for nothing any more in this engine, even if they change back."""
    place = write(tmp_path / "one")
    shutil.copytree(place, tmp_path / "kept")
    request, book = Request(str(place)), AdapterBook()
    first = book.adapter_of(request)
    assert first is not None
    assert book.adapter_of(request) == first
    later(place)
    assert book.adapter_of(request) is None
    shutil.rmtree(place)
    shutil.copytree(tmp_path / "kept", place)
    assert book.adapter_of(request) is None
    assert AdapterBook().adapter_of(request) == first
    later(place)
    renamed = book.adapter_of(Request(str(place), "another"))
    assert renamed is not None
    assert renamed.key != first.key


def test_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit is not kept; what was known before still is."""
    monkeypatch.setattr(lora, "MAX_ADAPTERS", 2)
    place, book = str(write(tmp_path / "one")), AdapterBook()
    found = [book.adapter_of(Request(place, name)) for name in ("a", "b", "c", "a")]
    assert [one is not None for one in found] == [True, True, False, True]


def test_loaded_adapters(tmp_path: Path) -> None:
    """A worker knows what it has read, and carries out no order for anything else."""
    place = write(tmp_path / "one")
    loaded, book = LoadedAdapters(), AdapterBook()
    adapter = book.adapter_of(Request(str(place)))
    assert loaded.computed(None)
    assert loaded.may_compute(None)
    assert loaded.may_compute(adapter)
    assert not loaded.computed(adapter), "it has not even been loaded"
    with loaded.loading(1, str(place)):
        pass
    assert loaded.computed(adapter)
    assert loaded.may_compute(adapter)
    later(place)
    assert loaded.computed(adapter), "what was read is what it was"
    with loaded.loading(1, str(place)):
        pass
    assert not loaded.computed(adapter)
    assert not loaded.may_compute(adapter)
    now = AdapterBook().adapter_of(Request(str(place)))
    assert loaded.computed(now)
    with loaded.loading(1, str(place)):
        later(place)
    assert not loaded.computed(now), "written while it was read"
    assert not loaded.computed(AdapterBook().adapter_of(Request(str(place))))


def test_load_fails(tmp_path: Path) -> None:
    """After a load that failed nobody knows what the id stands for."""
    place = str(write(tmp_path / "one"))
    loaded, adapter = LoadedAdapters(), AdapterBook().adapter_of(Request(place))
    with pytest.raises(KeyError), loaded.loading(1, place):
        raise KeyError
    assert not loaded.computed(adapter)
    assert not loaded.may_compute(adapter)


def test_files_are_read_again_only_when_they_look_different(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, reads = write(tmp_path / "one"), []

    def counted(path: str) -> str | None:
        reads.append(path)
        return adapter_revision(path)

    monkeypatch.setattr("tierkv.adapters.vllm.lora.adapter_revision", counted)
    book = AdapterBook()
    first = book.adapter_of(Request(str(place)))
    assert first is not None
    assert all(book.adapter_of(Request(str(place))) == first for _ in range(5))
    assert len(reads) == 1
    (place / "adapter_config.json").write_text(json.dumps({"r": 8}))
    assert book.adapter_of(Request(str(place))) is None, "the files have changed under this engine"
    assert len(reads) == 2
