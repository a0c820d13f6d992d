"""The stored form of a block on a shared file system, version 1; FORMAT.md shows it with a worked example.

Nothing here does I/O. All integers are little endian.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

import numpy as np

from tierkv._native import crc32c
from tierkv.codec import CodecId
from tierkv.types import UInt8Array

FORMAT_VERSION = 1
FORMAT_DIRECTORY = "v1"
SPEC_NAME = "spec.json"
TEMPORARY_PREFIX = ".tmp-"
FORGOTTEN_PREFIX = ".gone-"
"""A keyspace's directory on its way out: renamed first, so that all its blocks vanish at once."""
HEADER_BYTES = 4096
MAGIC = b"tkvblock"
_FIELDS = struct.Struct("<8sIIBB6xQQII32s32s")
_CHECKSUM = struct.Struct("<I")
_HASH_NAME = re.compile(r"[0-9a-f]{64}\Z")
_SUBDIRECTORY_NAME = re.compile(r"[0-9a-f]{2}\Z")


def padded(size_bytes: int) -> int:
    """Rounded up to HEADER_BYTES, so that files can be read and written with O_DIRECT."""
    return -(-size_bytes // HEADER_BYTES) * HEADER_BYTES


def file_bytes(stored_bytes: int) -> int:
    """The length of a file whose payload has `stored_bytes`."""
    return HEADER_BYTES + padded(stored_bytes)


def is_hash_name(name: str) -> bool:
    return _HASH_NAME.match(name) is not None


def is_subdirectory_name(name: str) -> bool:
    return _SUBDIRECTORY_NAME.match(name) is not None


@dataclass(frozen=True, slots=True)
class Header:
    """What a block's file says about itself."""

    codec: int
    element_bytes: int
    block_bytes: int
    stored_bytes: int
    stored_checksum: int
    """crc32c of the payload as stored, without its padding."""
    block_checksum: int
    """crc32c of the block's own bytes."""
    digest: bytes
    """Of the keyspace, 32 bytes."""
    block_hash: bytes
    """32 bytes."""

    def write(self, into: UInt8Array) -> None:
        """Fills (HEADER_BYTES,) uint8."""
        packed = _FIELDS.pack(
            MAGIC,
            FORMAT_VERSION,
            HEADER_BYTES,
            self.codec,
            self.element_bytes,
            self.block_bytes,
            self.stored_bytes,
            self.stored_checksum,
            self.block_checksum,
            self.digest,
            self.block_hash,
        )
        into[:] = 0
        into[: len(packed)] = np.frombuffer(packed, np.uint8)
        checksum = crc32c(into[: HEADER_BYTES - _CHECKSUM.size])
        into[HEADER_BYTES - _CHECKSUM.size :] = np.frombuffer(_CHECKSUM.pack(checksum), np.uint8)


def read_header(data: UInt8Array) -> Header | str:
    """Reads (>= HEADER_BYTES,) uint8; a text that names what is wrong when it is no header of this
    version."""
    if len(data) < HEADER_BYTES:
        return "truncated"
    head = data[:HEADER_BYTES]
    magic, version, header_bytes, *fields = _FIELDS.unpack(head[: _FIELDS.size].tobytes())
    if magic != MAGIC:
        return "magic"
    if version != FORMAT_VERSION or header_bytes != HEADER_BYTES:
        return "version"
    (checksum,) = _CHECKSUM.unpack(head[HEADER_BYTES - _CHECKSUM.size :].tobytes())
    if crc32c(head[: HEADER_BYTES - _CHECKSUM.size]) != checksum:
        return "header checksum"
    header = Header(*fields)
    if header.stored_bytes > header.block_bytes or header.codec not in list(CodecId):
        return "header values"
    return header


def check_header(
    header: Header | str, size_bytes: int, digest: bytes, block_hash: bytes, block_bytes: int
) -> str:
    """'' when the header of a file of `size_bytes` is that of this very block, else what is wrong."""
    if isinstance(header, str):
        return header
    if header.digest != digest:
        return "keyspace"
    if header.block_hash != block_hash:
        return "hash"
    if header.block_bytes != block_bytes:
        return "block length"
    if size_bytes != file_bytes(header.stored_bytes):
        return "truncated" if size_bytes < file_bytes(header.stored_bytes) else "file length"
    return ""
