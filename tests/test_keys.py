"""Keyspaces name exactly what changes a block's bytes; hashes are packed without loss."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import ArgumentError, KeyspaceError, TierKVError
from tierkv.keys import MAX_PARTS, KeyspaceSpec, as_hash_array, pack_hashes
from tierkv.testing.buffers import make_space, make_spec
from tierkv.testing.strategies import UNRESOLVED, hash_arrays, invalid_spec_fields, raw_hashes, spec_fields
from tierkv.types import HASH_BYTES


@given(spec_fields())
def test_a_spec_survives_its_canonical_form(fields: dict) -> None:
    spec = KeyspaceSpec.from_mapping(fields)
    again = KeyspaceSpec.from_json(spec.canonical())
    assert again == spec
    assert again.digest() == spec.digest()
    assert len(spec.digest()) == 32
    assert spec.block_bytes == sum(fields["part_bytes"])


@given(spec_fields())
def test_the_digest_does_not_depend_on_the_order_of_fields(fields: dict) -> None:
    shuffled = dict(reversed(fields.items()))
    if "extra" in shuffled:
        shuffled["extra"] = dict(reversed(shuffled["extra"].items()))
    assert KeyspaceSpec.from_mapping(shuffled).digest() == KeyspaceSpec.from_mapping(fields).digest()


@given(spec_fields(), spec_fields())
def test_equal_digests_mean_equal_specs(first: dict, second: dict) -> None:
    one, two = KeyspaceSpec.from_mapping(first), KeyspaceSpec.from_mapping(second)
    assert (one == two) == (one.digest() == two.digest())


@pytest.mark.parametrize("field", [field.name for field in msgspec.structs.fields(KeyspaceSpec)])
def test_every_field_changes_the_digest(field: str) -> None:
    spec = make_spec(8192, parts=2)
    other = {
        "block_tokens": 32,
        "part_bytes": (4096, 4095),
        "extra": {"rope_scaling": "yarn"},
    }.get(field, "another")
    changed = msgspec.structs.replace(spec, **{field: other})
    changed.validate()
    assert changed.digest() != spec.digest()


def test_how_a_block_is_cut_into_parts_changes_the_digest() -> None:
    cuts = [(8192,), (4096, 4096), (4095, 4097), (2048, 6144)]
    digests = {make_spec(8192, parts=cut).digest() for cut in cuts}
    assert len(digests) == len(cuts)


def test_moving_text_between_fields_changes_the_digest() -> None:
    assert make_spec(model="ab", revision="c").digest() != make_spec(model="a", revision="bc").digest()
    assert make_spec(extra={"a": "bc"}).digest() != make_spec(extra={"ab": "c"}).digest()


def test_the_digest_is_the_same_in_every_process() -> None:
    program = (
        "from tierkv.testing.buffers import make_spec;"
        "print(make_spec(8192, parts=2, extra={'b': '2', 'a': '1'}).digest().hex())"
    )
    expected = make_spec(8192, parts=2, extra={"a": "1", "b": "2"}).digest().hex()
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.strip() == expected


def test_the_digest_is_a_stored_format() -> None:
    """A change of this digest makes every stored block of every user unfindable."""
    assert make_spec().canonical() == (
        b'{"block_tokens":16,"extra":{},"group":"full","hash_algorithm":"sha256_cbor","hash_seed":"0",'
        b'"kv_dtype":"bfloat16","layout":"LBHNC","model":"test-model","part_bytes":[4096],'
        b'"pipeline_stage":"0/1","revision":"r1"}'
    )
    assert make_spec().digest().hex() == "c212d5272602b27237eca05d3084720b26fdf6b3b35db213b4d8b9116b0d0351"


@given(invalid_spec_fields())
def test_unresolved_missing_unknown_and_impossible_fields_are_refused(fields: dict) -> None:
    with pytest.raises(KeyspaceError):
        KeyspaceSpec.from_mapping(fields)


@pytest.mark.parametrize("value", UNRESOLVED)
def test_a_refusal_names_the_field(value: str) -> None:
    with pytest.raises(KeyspaceError, match="kv_dtype"):
        make_spec(kv_dtype=value)


def test_a_refusal_names_the_missing_and_the_unknown_field() -> None:
    fields = msgspec.to_builtins(make_spec())
    with pytest.raises(KeyspaceError, match="revision"):
        KeyspaceSpec.from_mapping({key: value for key, value in fields.items() if key != "revision"})
    with pytest.raises(KeyspaceError, match="tensor_parallel"):
        KeyspaceSpec.from_mapping({**fields, "tensor_parallel": "2"})


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "1", '{"model": 1}', b"\xff\xfe"])
def test_what_is_not_a_spec_is_a_keyspace_error(text: bytes | str) -> None:
    with pytest.raises(KeyspaceError):
        KeyspaceSpec.from_json(text)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_raise_anything_else(data: bytes) -> None:
    try:
        KeyspaceSpec.from_json(data)
    except TierKVError:
        pass


def test_parts_lie_side_by_side() -> None:
    space = make_space(10_000, parts=3)
    assert space.part_bytes == (3333, 3333, 3334)
    assert [space.part_offset(part) for part in range(3)] == [0, 3333, 6666]
    assert space.block_bytes == 10_000


def test_the_most_parts_are_accepted_and_one_more_is_not() -> None:
    make_spec(parts=(1,) * MAX_PARTS)
    with pytest.raises(KeyspaceError, match="part_bytes"):
        make_spec(parts=(1,) * (MAX_PARTS + 1))


def test_a_keyspace_prints_what_a_reader_needs() -> None:
    space = make_space()
    assert str(space).startswith("test-model/full@")
    with pytest.raises(dataclasses.FrozenInstanceError):
        space.number = 2  # type: ignore[misc]


@given(st.lists(raw_hashes(), max_size=20))
def test_packing_keeps_every_hash(hashes: list[bytes]) -> None:
    packed = pack_hashes(hashes)
    assert packed.shape == (len(hashes), HASH_BYTES)
    assert packed.dtype == np.uint8
    assert packed.flags.c_contiguous
    assert [row.tobytes() for row in packed] == [item + bytes(HASH_BYTES - len(item)) for item in hashes]


def test_packing_takes_any_iterable_of_buffers() -> None:
    expected = b"ab".ljust(32, b"\x00")
    for item in (b"ab", bytearray(b"ab"), memoryview(b"ab")):
        assert pack_hashes(iter([item]))[0].tobytes() == expected


@pytest.mark.parametrize("bad", [b"", bytes(33), "ab", 7, None])
def test_a_hash_of_the_wrong_kind_is_named_by_its_position(bad: object) -> None:
    with pytest.raises(ArgumentError, match="hash 1"):
        pack_hashes([b"ok", bad])  # type: ignore[list-item]


@given(hash_arrays(min_count=1))
def test_a_hash_array_passes_unchanged_or_becomes_contiguous(hashes: np.ndarray) -> None:
    assert as_hash_array(hashes) is hashes
    strided = np.repeat(hashes, 2, axis=0)[::2]
    assert not strided.flags.c_contiguous or len(hashes) == 1
    assert as_hash_array(strided).flags.c_contiguous
    assert (as_hash_array(strided) == hashes).all()


@pytest.mark.parametrize(
    "bad",
    [
        None,
        b"x" * 32,
        [b"x" * 32],
        np.zeros((2, 31), np.uint8),
        np.zeros((2, 33), np.uint8),
        np.zeros(32, np.uint8),
        np.zeros((2, 32), np.int8),
        np.zeros((2, 2, 32), np.uint8),
    ],
)
def test_what_is_not_a_hash_array_is_refused(bad: object) -> None:
    with pytest.raises(ArgumentError, match="pack_hashes"):
        as_hash_array(bad)
