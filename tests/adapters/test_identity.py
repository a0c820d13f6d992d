"""Identity: other bytes, another keyspace; and what was written under one is not found under another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from connector_harness import facts_of

from tierkv.adapters.vllm.groups import Group, Kind
from tierkv.adapters.vllm.identity import digest_of, directory_revision, keyspace_of, shard_of
from tierkv.adapters.vllm.layout import describe_group
from tierkv.config import DramConfig, StoreConfig
from tierkv.errors import ConfigError, KeyspaceError
from tierkv.keys import KeyspaceSpec, pack_hashes
from tierkv.store import Store
from tierkv.types import BlockStatus

GROUP = Group(0, Kind.FULL, 16)


def tensors(dtype: str = "float16", tokens: int = 16, heads: int = 2, layers: int = 2) -> dict[str, Any]:
    return {f"layer {number}": np.zeros((8, heads, tokens, 4), dtype) for number in range(layers)}


def spec(
    group: Group = GROUP, *, detail: str = "full", caches: Any = None, replicas: int = 1, **facts: Any
) -> KeyspaceSpec:
    values = {"tensor_rank": 0, "tensor_size": 2, "pipeline_rank": 0, "pipeline_size": 1, **facts}
    place = [values.pop(name) for name in ("pipeline_rank", "pipeline_size", "tensor_rank", "tensor_size")]
    facts_here = facts_of(*place, **values)
    caches = caches or tensors()
    cache = describe_group(list(caches), caches, 8)
    return keyspace_of(facts_here, group, detail, cache, shard_of(facts_here, replicas))


OTHERS: dict[str, KeyspaceSpec] = {
    "model": spec(model="other"),
    "revision": spec(revision="2"),
    "cache dtype": spec(caches=tensors("float32")),
    "cache dtype of equal size": spec(caches=tensors("int16")),
    "block size": spec(Group(0, Kind.FULL, 32), caches=tensors(tokens=32)),
    "block size, equal bytes": spec(Group(0, Kind.FULL, 32), caches=tensors(tokens=32, heads=1)),
    "heads": spec(caches=tensors(heads=4)),
    "layers": spec(caches=tensors(layers=3)),
    "names of layers": spec(caches={f"draft {name}": cache for name, cache in tensors().items()}),
    "draft layers": spec(caches={**tensors(), "draft layer 0": np.zeros((8, 2, 16, 4), np.float16)}),
    "order of values": spec(
        caches={
            name: cache.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)
            for name, cache in tensors().items()
        }
    ),
    "tensor parallel size": spec(tensor_size=4),
    "tensor parallel size 1": spec(tensor_size=1),
    "replicas": spec(replicas=2),
    "layout": spec(layout="LBNHC"),
    "packing": spec(layout="LBHNC:amx"),
    "back end": spec(backend="other"),
    "pipeline stage": spec(pipeline_rank=1, pipeline_size=2),
    "pipeline size": spec(pipeline_size=2),
    "hash algorithm": spec(hash_algorithm="sha256"),
    "hash seed": spec(hash_seed="7"),
    "tokens a hash": spec(hash_block_tokens=16),
    "kind of group": spec(Group(0, Kind.SLIDING, 16, 63)),
    "detail of the group": spec(detail="full, window 64"),
    "extra": spec(extra={"speculative": "eagle"}),
    "extra value": spec(extra={"speculative": "none"}),
}


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    config = DramConfig(capacity_bytes=8 << 20, slab_bytes=64 << 10, lock_memory="off", huge_pages="off")
    with Store(StoreConfig(dram=config)) as opened:
        yield opened


def save_all(store: Store, wanted: KeyspaceSpec, hashes: Any) -> None:
    from tierkv.fragments import Fragments

    space = store.open(wanted)
    for part, size in enumerate(wanted.part_bytes):
        job = store.save(space, hashes, Fragments.from_blocks(np.ones((len(hashes), size), np.uint8)), part)
        assert job.wait(10)
        assert (job.status == BlockStatus.OK).all()


@pytest.mark.parametrize("name", OTHERS)
def test_written_under_one_looked_up_under_another_misses(name: str, store: Store) -> None:
    hashes = pack_hashes([bytes([place, len(name) % 256]) * 16 for place in range(3)])
    mine, other = spec(), OTHERS[name]
    save_all(store, mine, hashes)
    found, missed = store.lookup([(store.open(mine), hashes), (store.open(other), hashes)])
    assert found.all()
    assert not missed.any()
    store.clear(store.open(mine))
    save_all(store, other, hashes)
    missed, found = store.lookup([(store.open(mine), hashes), (store.open(other), hashes)])
    assert not missed.any()
    assert found.all()
    store.clear(store.open(other))


def test_all_differ_from_each_other() -> None:
    digests = [spec().digest(), *(other.digest() for other in OTHERS.values())]
    assert len(set(digests)) == len(digests)


def test_what_makes_no_other_bytes_makes_no_other_keyspace() -> None:
    same = spec()
    assert spec(tensor_rank=1) == same, "all ranks come to the same"
    wide = {name: np.zeros((8, 3, 16, 4), np.float16)[:, :2] for name in tensors()}
    assert spec(caches=wide) == same, "gaps between blocks are not stored"
    assert spec(Group(3, Kind.FULL, 16)) == same, "the engine's number of the group says nothing"
    assert spec(Group(0, Kind.FULL, 16, margin_blocks=1)) == same


@pytest.mark.parametrize("field", ["model", "revision", "hash_algorithm", "hash_seed", "layout"])
def test_the_ends_of_fields_do_not_run_into_each_other(field: str) -> None:
    assert spec(**{field: "a:b"}).digest() != spec(**{field: "a"}).digest()


def test_what_is_not_resolved_is_refused() -> None:
    for field in ("model", "revision", "hash_seed"):
        with pytest.raises(KeyspaceError, match=field):
            spec(**{field: "auto"})


@pytest.mark.parametrize(
    ("size", "replicas", "expected"),
    [
        (1, 1, [(1, 0, True)]),
        (4, 1, [(4, 0, True), (4, 1, True), (4, 2, True), (4, 3, True)]),
        (4, 2, [(2, 0, True), (2, 0, False), (2, 1, True), (2, 1, False)]),
        (4, 4, [(1, 0, True), (1, 0, False), (1, 0, False), (1, 0, False)]),
        (2, 8, [(1, 0, True), (1, 0, False)]),
    ],
)
def test_each_part_has_one_writer(size: int, replicas: int, expected: list[tuple[int, int, bool]]) -> None:
    shards = [shard_of(facts_of(0, 1, rank, size), replicas) for rank in range(size)]
    assert [(shard.parts, shard.part, shard.writes) for shard in shards] == expected


def test_uneven_replicas_and_too_many_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="replicas"):
        shard_of(facts_of(0, 1, 0, 6), 4)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        shard_of(facts_of(0, 1, 0, 128), 1)


def test_a_directorys_revision_follows_its_weights_and_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model_revision"):
        directory_revision(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights.write_bytes(b"1" * 10)
    config.write_text("{}")
    os.utime(weights, (1, 1))
    seen = [directory_revision(tmp_path)]
    (tmp_path / "README.md").write_text("not part of it")
    os.utime(config, (5, 5))
    assert directory_revision(tmp_path) == seen[0]

    def changed() -> None:
        seen.append(directory_revision(tmp_path))
        assert len(set(seen)) == len(seen)

    os.utime(weights, (2, 2))
    changed()
    weights.write_bytes(b"1" * 11)
    os.utime(weights, (2, 2))
    changed()
    config.write_text("{ }")
    changed()
    (tmp_path / "more.safetensors").write_bytes(b"")
    changed()
    code = tmp_path / "modeling_own.py"
    code.write_text("one = 1")
    changed()
    code.write_text("one = 2")
    changed()


def test_a_digest_of_settings_does_not_depend_on_their_order() -> None:
    assert digest_of({"a": 1, "b": [2]}) == digest_of({"b": [2], "a": 1})
    assert digest_of({"a": 1}) != digest_of({"a": 2})
