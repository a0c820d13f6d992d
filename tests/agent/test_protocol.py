"""The wire format: what is encoded is decoded, and anything else is refused with ProtocolError and nothing else."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tierkv.agent.protocol import (
    ANSWERS,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_BLOCKS,
    MAX_BODY_BYTES,
    REFUSAL,
    REQUESTS,
    VERSION,
    Array,
    Field,
    Integer,
    Kind,
    ProtocolError,
    Real,
    Text,
    decode_body,
    decode_header,
    encode,
    pack_queries,
    unpack_queries,
)
from tierkv.errors import ArgumentError

LAYOUTS: list[tuple[Kind, tuple[Field, ...]]] = [
    *REQUESTS.items(),
    *((Kind.ANSWER, fields) for fields in ANSWERS.values()),
    (Kind.REFUSAL, REFUSAL),
]


def values_of(field: Field) -> st.SearchStrategy[Any]:
    """Any value that the field takes."""
    match field:
        case Text():
            return st.text(max_size=200)
        case Integer(least=least, most=most):
            return st.integers(least, most)
        case Real(least=least, most=most):
            return st.floats(least, most)
        case Array(dtype=dtype, width=width, most=most):
            step = np.dtype(dtype).itemsize * width
            lengths = st.integers(0, min(most, 40))
            return lengths.flatmap(lambda count: st.binary(min_size=count * step, max_size=count * step)).map(
                lambda data: (
                    np.frombuffer(data, dtype).reshape(-1, width) if width > 1 else np.frombuffer(data, dtype)
                )
            )
    raise AssertionError(field)


@st.composite
def messages(draw: st.DrawFn) -> tuple[Kind, tuple[Field, ...], list[Any]]:
    """A kind with its fields and values for them."""
    kind, fields = draw(st.sampled_from(LAYOUTS))
    return kind, fields, [draw(values_of(field)) for field in fields]


def joined(kind: Kind, request: int, fields: Any, values: Any) -> bytes:
    return b"".join(bytes(piece) for piece in encode(kind, request, fields, values))


@given(messages(), st.integers(0, (1 << 64) - 1))
def test_what_is_encoded_is_decoded(message: tuple[Kind, Any, list[Any]], request_number: int) -> None:
    kind, fields, values = message
    data = joined(kind, request_number, fields, values)
    header = decode_header(data[:HEADER_BYTES])
    assert (header.kind, header.request, header.body_bytes) == (
        kind,
        request_number,
        len(data) - HEADER_BYTES,
    )
    found = decode_body(fields, memoryview(data)[HEADER_BYTES:])
    for expected, value in zip(values, found, strict=True):
        if isinstance(expected, np.ndarray):
            assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
            assert value.tobytes() == expected.tobytes()
        else:
            assert value == expected
            assert type(value) is type(expected)


@given(messages(), st.data())
def test_a_body_cut_off_anywhere_is_refused(
    message: tuple[Kind, Any, list[Any]], data: st.DataObject
) -> None:
    kind, fields, values = message
    body = joined(kind, 1, fields, values)[HEADER_BYTES:]
    assume(body)
    end = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(ProtocolError):
        decode_body(fields, memoryview(body)[:end])
    with pytest.raises(ProtocolError, match="follow the last field"):
        decode_body(fields, memoryview(body + b"\0"))


@given(st.sampled_from(LAYOUTS), st.binary(max_size=300))
def test_any_bytes_as_a_body_are_decoded_or_refused(layout: tuple[Kind, Any], body: bytes) -> None:
    try:
        decode_body(layout[1], memoryview(body))
    except ProtocolError:
        pass  # and nothing else


@given(messages(), st.data())
def test_changed_bytes_of_a_body_are_decoded_or_refused(
    message: tuple[Kind, Any, list[Any]], data: st.DataObject
) -> None:
    kind, fields, values = message
    body = bytearray(joined(kind, 1, fields, values)[HEADER_BYTES:])
    assume(body)
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode_body(fields, memoryview(body))
    except ProtocolError:
        return
    for field, value in zip(fields, found, strict=True):  # whatever it is, it is within the field's bounds
        field.encode(value)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_bytes_as_a_header_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_header(data)


@given(st.sampled_from(Kind), st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_any_changed_byte_of_a_header_is_noticed(kind: Kind, at: int, change: int) -> None:
    start = HEADER.pack(MAGIC, VERSION, kind, 7, 100)
    header = bytearray(start + zlib.crc32(start).to_bytes(4, "little"))
    assert decode_header(header).kind is kind
    header[at] ^= change
    with pytest.raises(ProtocolError):
        decode_header(header)


def header_of(magic: bytes = MAGIC, version: int = VERSION, kind: int = 3, body_bytes: int = 0) -> bytes:
    start = HEADER.pack(magic, version, kind, 1, body_bytes)
    return start + zlib.crc32(start).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (header_of(magic=b"HTTP"), "does not speak this protocol"),
        (header_of(version=1), f"version 1 of the protocol, this one {VERSION}: install the same tierkv"),
        (header_of(kind=9999), "unknown kind 9999"),
        (header_of(body_bytes=MAX_BODY_BYTES + 1), "at most"),
        (header_of()[:-1], "header of 23 bytes"),
    ],
)
def test_a_refusal_of_a_header_says_why(header: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        decode_header(header)


def test_every_request_has_an_answer_and_a_number_of_its_own() -> None:
    assert REQUESTS.keys() == ANSWERS.keys() == set(Kind) - {Kind.ANSWER, Kind.REFUSAL}
    assert [int(kind) for kind in REQUESTS] == list(range(1, len(REQUESTS) + 1)), "a kind's number changed"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (Integer("n", 1, 5), 0), (Integer("n", 1, 5), 6), (Integer("n"), -1), (Integer("n"), 1 << 63),
        (Real("s", 0.0, 10.0), -0.1), (Real("s", 0.0, 10.0), 10.1), (Real("s"), float("nan")),
        (Real("s"), float("inf")), (Text("t"), "x" * ((1 << 20) + 1)),
        (Array("a", "u1"), np.zeros(MAX_BLOCKS + 1, np.uint8)),
        (Array("h", "u1", 32, most=4), np.zeros((5, 32), np.uint8)),
    ],
)  # fmt: skip
def test_what_would_be_refused_there_is_not_sent(field: Field, value: object) -> None:
    with pytest.raises(ArgumentError, match=field.name):
        field.encode(value)


def test_values_must_be_as_many_as_fields() -> None:
    with pytest.raises(ArgumentError, match="2 fields, 1 values"):
        encode(Kind.MATCH, 1, REQUESTS[Kind.MATCH], (1,))


@given(st.lists(st.tuples(st.integers(1, 1 << 31), st.integers(0, 5)), max_size=6))
def test_queries_are_unpacked_as_they_were_packed(shape: list[tuple[int, int]]) -> None:
    random = np.random.default_rng(0)
    queries = [(number, random.integers(0, 256, (count, 32), dtype=np.uint8)) for number, count in shape]
    found = unpack_queries(*pack_queries(queries))
    assert [number for number, _ in found] == [number for number, _ in queries]
    assert all((a[1] == b[1]).all() for a, b in zip(found, queries, strict=True))


@given(
    st.lists(st.integers(0, (1 << 32) - 1), max_size=5),
    st.lists(st.integers(0, (1 << 32) - 1), max_size=5),
    st.integers(0, 5),
)
def test_counts_that_do_not_add_up_are_refused(numbers: list[int], counts: list[int], hashes: int) -> None:
    assume(len(numbers) != len(counts) or sum(counts) != hashes)
    with pytest.raises(ProtocolError, match="do not fit together"):
        unpack_queries(
            np.array(numbers, np.uint32), np.array(counts, np.uint32), np.zeros((hashes, 32), np.uint8)
        )
