"""The agent's wire format: small binary messages over a Unix stream socket, payload bytes never among them.

A message is a 24-byte header and a body. All numbers are little-endian.

    offset  size  field
    0       4     magic          b"TKVA"
    4       2     version        2
    6       2     kind           Kind
    8       8     request        chosen by the client, repeated in the answer
    16      4     body bytes
    20      4     crc32 of the first 20 bytes (zlib.crc32): a stream that is off is noticed at once

A body is a sequence of fields, each a 4-byte length and as many bytes: numbers as 8 bytes, text as UTF-8, arrays as
their raw C-contiguous bytes. Which fields a kind has stands in FIELDS, with their types and bounds; a message that
does not fit is refused before anything is made of it. Nothing is unpickled.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np

from tierkv.errors import ArgumentError, TierKVError
from tierkv.types import HASH_BYTES

MAGIC: Final = b"TKVA"
VERSION: Final = 2
HEADER: Final = struct.Struct("<4sHHQI")
_CRC: Final = struct.Struct("<I")
HEADER_BYTES: Final = HEADER.size + _CRC.size
_LENGTH: Final = struct.Struct("<I")
_INTEGER: Final = struct.Struct("<q")
_REAL: Final = struct.Struct("<d")

MAX_BLOCKS: Final = 1 << 18
"""Blocks in one message at most."""
MAX_CHANGES: Final = 1 << 16
"""Changes in one answer at most."""
MAX_BODY_BYTES: Final = 16 << 20
MAX_TEXT_BYTES: Final = 1 << 20


class ProtocolError(TierKVError):
    """The other side sent something that is not a message of this version."""


class Kind(IntEnum):
    """What a message asks or answers. A number never changes meaning."""

    HELLO = 1
    OPEN = 2
    MATCH = 3
    LOOKUP = 4
    LEASE = 5
    EXTEND = 6
    RELEASE = 7
    STAGE = 8
    RESERVE = 9
    COMMIT = 10
    ACQUIRE = 11
    TOUCH = 12
    REMOVE = 13
    CLEAR = 14
    FLUSH = 15
    STATS = 16
    CHANGES = 17
    ANSWER = 64
    """The answer of a request, with the fields of its kind."""
    REFUSAL = 65
    """A request that could not be served: the error's class and message."""


@dataclass(frozen=True, slots=True)
class Text:
    """UTF-8 text."""

    name: str

    def encode(self, value: Any) -> bytes:
        data = str(value).encode()
        if len(data) > MAX_TEXT_BYTES:
            raise ArgumentError(
                f"{self.name}: {len(data)} bytes of text, at most {MAX_TEXT_BYTES} can be sent"
            )
        return data

    def decode(self, data: memoryview) -> str:
        if len(data) > MAX_TEXT_BYTES:
            raise ProtocolError(f"{self.name}: {len(data)} bytes of text, at most {MAX_TEXT_BYTES} are taken")
        try:
            return bytes(data).decode()
        except UnicodeDecodeError as error:
            raise ProtocolError(f"{self.name}: not UTF-8: {error}") from error


@dataclass(frozen=True, slots=True)
class Integer:
    """A signed 64-bit number within bounds."""

    name: str
    least: int = 0
    most: int = (1 << 63) - 1

    def encode(self, value: Any) -> bytes:
        number = int(value)
        if not self.least <= number <= self.most:
            raise ArgumentError(f"{self.name} is {value}: it must be within {self.least}..{self.most}")
        return _INTEGER.pack(number)

    def decode(self, data: memoryview) -> int:
        if len(data) != _INTEGER.size:
            raise ProtocolError(f"{self.name}: {len(data)} bytes, a number has {_INTEGER.size}")
        value = int(_INTEGER.unpack(data)[0])
        if not self.least <= value <= self.most:
            raise ProtocolError(f"{self.name}: {value} is not within {self.least}..{self.most}")
        return value


@dataclass(frozen=True, slots=True)
class Real:
    """A finite double within bounds, such as seconds."""

    name: str
    least: float = 0.0
    most: float = 1e9

    def encode(self, value: Any) -> bytes:
        number = float(value)
        if not self.least <= number <= self.most:  # also false for NaN
            raise ArgumentError(f"{self.name} is {value}: it must be within {self.least}..{self.most}")
        return _REAL.pack(number)

    def decode(self, data: memoryview) -> float:
        if len(data) != _REAL.size:
            raise ProtocolError(f"{self.name}: {len(data)} bytes, a number has {_REAL.size}")
        value = float(_REAL.unpack(data)[0])
        if not self.least <= value <= self.most:  # also false for NaN
            raise ProtocolError(f"{self.name}: {value} is not within {self.least}..{self.most}")
        return value


@dataclass(frozen=True, slots=True)
class Array:
    """A one-dimensional array, or (n, 32) uint8 where `width` is 32."""

    name: str
    dtype: str
    width: int = 1
    most: int = MAX_BLOCKS

    def encode(self, value: Any) -> memoryview:
        array = np.ascontiguousarray(value, dtype=self.dtype)
        if len(array) > self.most:
            raise ArgumentError(f"{self.name}: {len(array)} entries, at most {self.most} go into one message")
        return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")

    def decode(self, data: memoryview) -> np.ndarray:
        step = np.dtype(self.dtype).itemsize * self.width
        if len(data) % step or len(data) // step > self.most:
            raise ProtocolError(
                f"{self.name}: {len(data)} bytes, a multiple of {step} and at most {self.most * step} are taken"
            )
        array = np.frombuffer(data, dtype=self.dtype)
        return array.reshape(-1, self.width) if self.width > 1 else array


Field = Text | Integer | Real | Array
_SPACE = Integer("keyspace", 1, (1 << 32) - 1)
_HASHES = Array("hashes", "u1", HASH_BYTES)
_LEASE = Integer("lease", 1)
_STATUS = Array("status", "u1")
_COUNT = Integer("count")
_QUERIES: tuple[Field, ...] = (
    Array("keyspaces", "<u4", most=1024),
    Array("counts", "<u4", most=1024),
    _HASHES,
)
MAX_TIMEOUT_S: Final = 3600.0
MIN_TTL_S: Final = 1e-6
MAX_TTL_S: Final = 86400.0
_TIMEOUT = Real("timeout_s", 0.0, MAX_TIMEOUT_S)
_TTL = Real("ttl_s", MIN_TTL_S, MAX_TTL_S)

REQUESTS: Final[dict[Kind, tuple[Field, ...]]] = {
    Kind.HELLO: (Text("client"),),
    Kind.OPEN: (Text("spec"),),
    Kind.MATCH: (_SPACE, _HASHES),
    Kind.LOOKUP: _QUERIES,
    Kind.LEASE: (_TTL, *_QUERIES),
    Kind.EXTEND: (_LEASE, _TTL),
    Kind.RELEASE: (_LEASE,),
    Kind.STAGE: (_LEASE, _TIMEOUT),
    Kind.RESERVE: (_SPACE, Integer("part", 0, 63), _TIMEOUT, _HASHES),
    Kind.COMMIT: (Integer("reservation", 1), Integer("written", 0, 1)),
    Kind.ACQUIRE: (_SPACE, Integer("part", 0, 63), _TIMEOUT, _HASHES),
    Kind.TOUCH: (_SPACE, Integer("reused", 0, 1), _HASHES),
    Kind.REMOVE: (_SPACE, _HASHES),
    Kind.CLEAR: (_SPACE, _TIMEOUT),
    Kind.FLUSH: (_TIMEOUT,),
    Kind.STATS: (),
    # feed 0: none yet, only the place from which on to read.
    Kind.CHANGES: (
        Array("keyspaces", "<u4", most=1024),
        Integer("feed"),
        Integer("after"),
        Integer("count", 1, MAX_CHANGES),
    ),
}
"""The fields of each request, in order."""

ANSWERS: Final[dict[Kind, tuple[Field, ...]]] = {
    # With two descriptors: of the arena and of memory beside it (aside.py), where offsets from arena_bytes on lie.
    # max_load_bytes: what this client's ACQUIREs may hold at a time. lease_s: how long such a lease lasts from when it
    # was asked for, by the monotonic clock, as long as the connection does; 0: only RELEASE tells.
    Kind.HELLO: (
        Text("agent"),
        Integer("arena_bytes"),
        Integer("aside_bytes"),
        Integer("max_reserved_bytes"),
        Integer("max_load_bytes"),
        Real("lease_s", 0.0, MAX_TTL_S),
    ),
    Kind.OPEN: (_SPACE,),
    Kind.MATCH: (Array("tiers", "u1"),),
    Kind.LOOKUP: (Array("masks", "u1"),),
    Kind.LEASE: (_LEASE, Array("held", "u1")),
    Kind.EXTEND: (Integer("alive", 0, 1),),
    Kind.RELEASE: (Integer("alive", 0, 1),),
    Kind.STAGE: (_STATUS,),
    Kind.RESERVE: (Integer("reservation"), _STATUS, Array("offsets", "<i8")),
    Kind.COMMIT: (_STATUS,),
    # Of the first blocks only where they must be brought to DRAM: the client asks again for the rest.
    Kind.ACQUIRE: (Integer("lease"), _STATUS, Array("offsets", "<i8")),
    Kind.TOUCH: (),
    Kind.REMOVE: (_COUNT,),
    Kind.CLEAR: (_COUNT,),
    Kind.FLUSH: (Integer("complete", 0, 1),),
    Kind.STATS: (Text("stats"),),
    Kind.CHANGES: (
        Integer("feed", 1),
        Integer("next"),
        Integer("complete", 0, 1),
        Array("positions", "<u4", most=MAX_CHANGES),
        Array("hashes", "u1", HASH_BYTES, most=MAX_CHANGES),
        Array("tiers", "u1", most=MAX_CHANGES),
    ),
}
"""The fields of each request's answer, in order."""

REFUSAL: Final[tuple[Field, ...]] = (Text("error"), Text("message"))


@dataclass(frozen=True, slots=True)
class Header:
    """A decoded header."""

    kind: Kind
    request: int
    body_bytes: int


def encode(
    kind: Kind, request: int, fields: Sequence[Field], values: Sequence[Any]
) -> list[bytes | memoryview]:
    """The buffers of a message, for sendmsg(). ArgumentError when a value does not fit its field."""
    if len(fields) != len(values):
        raise ArgumentError(f"{kind.name} has {len(fields)} fields, {len(values)} values were given")
    body: list[bytes | memoryview] = []
    for field, value in zip(fields, values, strict=True):
        data = field.encode(value)
        body += (_LENGTH.pack(len(data)), data)
    size = sum(len(data) for data in body)
    if size > MAX_BODY_BYTES:
        raise ArgumentError(
            f"{kind.name}: {size} bytes, at most {MAX_BODY_BYTES} go into one message: send fewer blocks"
        )
    start = HEADER.pack(MAGIC, VERSION, kind, request, size)
    return [start + _CRC.pack(zlib.crc32(start)), *body]


def decode_header(data: bytes | bytearray | memoryview) -> Header:
    """Checks a header of HEADER_BYTES; ProtocolError says what is wrong with it."""
    if len(data) != HEADER_BYTES:
        raise ProtocolError(f"a header of {len(data)} bytes, {HEADER_BYTES} are needed")
    magic, version, kind, request, body_bytes = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError(
            f"the other side does not speak this protocol: it begins with {magic!r}, not {MAGIC!r}"
        )
    if version != VERSION:
        raise ProtocolError(
            f"the other side speaks version {version} of the protocol, this one {VERSION}: install the same tierkv "
            f"on both"
        )
    if _CRC.unpack_from(data, HEADER.size)[0] != zlib.crc32(bytes(data[: HEADER.size])):
        raise ProtocolError("a damaged header: its checksum is wrong")
    if body_bytes > MAX_BODY_BYTES:
        raise ProtocolError(f"a body of {body_bytes} bytes, at most {MAX_BODY_BYTES} are taken")
    try:
        return Header(Kind(kind), request, body_bytes)
    except ValueError:
        raise ProtocolError(f"a message of the unknown kind {kind}") from None


def decode_body(fields: Sequence[Field], body: memoryview) -> list[Any]:
    """The values of a body. Arrays are views of it. ProtocolError when it does not fit `fields` exactly."""
    values: list[Any] = []
    at = 0
    for field in fields:
        if at + _LENGTH.size > len(body):
            raise ProtocolError(f"the message ends before its field {field.name!r}")
        (size,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        if at + size > len(body):
            raise ProtocolError(
                f"field {field.name!r} is said to have {size} bytes, {len(body) - at} are left"
            )
        values.append(field.decode(body[at : at + size]))
        at += size
    if at != len(body):
        raise ProtocolError(f"{len(body) - at} bytes follow the last field")
    return values


def pack_queries(queries: Sequence[tuple[int, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[(keyspace number, (n, 32) hashes), ...] -> the three arrays of _QUERIES."""
    numbers = np.array([number for number, _ in queries], np.uint32)
    counts = np.array([len(hashes) for _, hashes in queries], np.uint32)
    hashes = np.concatenate([np.empty((0, HASH_BYTES), np.uint8), *(hashes for _, hashes in queries)])
    return numbers, counts, hashes


def unpack_queries(
    numbers: np.ndarray, counts: np.ndarray, hashes: np.ndarray
) -> list[tuple[int, np.ndarray]]:
    """The inverse of pack_queries(); ProtocolError when the counts do not add up."""
    if len(numbers) != len(counts) or int(counts.sum(dtype=np.int64)) != len(hashes):
        raise ProtocolError(
            f"{len(numbers)} keyspaces, {len(counts)} counts and {len(hashes)} hashes do not fit together"
        )
    ends = np.cumsum(counts, dtype=np.int64)
    return [
        (int(number), hashes[end - count : end])
        for number, count, end in zip(numbers.tolist(), counts.tolist(), ends.tolist(), strict=True)
    ]
