"""Codecs: how a block's bytes are made smaller for a tier where bytes are dear. Exact, bounded, with stable
ids.

The ids stand in stored files and never change meaning. Decoding is of what anyone may have written: every
declared size is checked against the block's before anything is allocated, and a stream that is torn, forged
or too large is a False, never an exception. Thread safety: all functions may be called from any thread;
contexts are per thread.

The byte-plane split puts the k-th bytes of all elements together. In floating-point numbers the bytes that
hold sign and exponent repeat and the others are noise, so zstd sees the difference and is not slowed down by
the noise. One-byte elements are not split: cutting them into nibbles took more time and gave a worse ratio
(8-bit floats of normal values, e4m3: 1.20 in whole bytes, 1.17 in nibbles), since their whole byte is one
symbol for zstd already.
"""

from __future__ import annotations

import struct
import threading
from enum import IntEnum

import numpy as np
import zstandard

from tierkv.config import Codec
from tierkv.errors import ArgumentError
from tierkv.types import UInt8Array

MAX_ELEMENT_BYTES = 8
_MAX_WINDOW_BYTES = 1 << 27
_WIDTHS = {
    2: ("bfloat16", "bf16", "float16", "fp16", "half", "int16", "uint16"),
    4: ("float32", "fp32", "float", "int32", "uint32"),
    8: ("float64", "fp64", "double"),
}
_WIDTH_OF = {name: width for width, names in _WIDTHS.items() for name in names}


class CodecId(IntEnum):
    """As stored; never change meaning."""

    NONE = 0
    ZSTD = 1
    ZSTD_PLANES = 2


CODEC_IDS: dict[Codec, CodecId] = {
    "none": CodecId.NONE,
    "zstd": CodecId.ZSTD,
    "zstd-planes": CodecId.ZSTD_PLANES,
}


def element_bytes_of(kv_dtype: str) -> int:
    """Bytes of an element of a keyspace's kv_dtype; 1 for one-byte types, mixes and names that are
    unknown."""
    return _WIDTH_OF.get(kv_dtype.strip().lower().removeprefix("torch."), 1)


class _Contexts(threading.local):
    """zstd's contexts must not be used by two threads at once."""

    def __init__(self) -> None:
        self.compressors: dict[int, zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)

    def compressor(self, level: int) -> zstandard.ZstdCompressor:
        found = self.compressors.get(level)
        if found is None:
            found = zstandard.ZstdCompressor(level=level, write_checksum=False, write_content_size=True)
            self.compressors[level] = found
        return found


_contexts = _Contexts()


def encode(
    codec: CodecId, raw: UInt8Array, out: UInt8Array, *, level: int = 1, element_bytes: int = 1
) -> tuple[CodecId, int]:
    """Encodes (n,) uint8 into `out`, (>= n,) uint8: the codec that was used and the bytes it took.

    What does not become smaller is stored as it is (NONE), so the bytes never exceed n.
    """
    count = len(raw)
    if len(out) < count:
        raise ArgumentError(f"encode: the output has {len(out)} bytes, {count} are needed")
    if not 1 <= element_bytes <= MAX_ELEMENT_BYTES:
        raise ArgumentError(
            f"encode: elements of {element_bytes} bytes: 1 to {MAX_ELEMENT_BYTES} are possible"
        )
    if codec is CodecId.ZSTD:
        packed = _contexts.compressor(level).compress(raw.data)
        if len(packed) < count:
            out[: len(packed)] = np.frombuffer(packed, np.uint8)
            return codec, len(packed)
    elif codec is CodecId.ZSTD_PLANES:
        used = _encode_planes(raw, out, level, element_bytes)
        if used is not None:
            return codec, used
    out[:count] = raw
    return CodecId.NONE, count


def decode(codec: int, stored: UInt8Array, out: UInt8Array) -> bool:
    """Decodes (m,) uint8 into all of `out`, (n,) uint8. False when the codec is unknown or the stream is not
    exactly n bytes' worth; `out` may then hold anything. Allocates at most about n bytes beside it."""
    if codec == CodecId.NONE:
        if len(stored) != len(out):
            return False
        out[:] = stored
        return True
    if codec == CodecId.ZSTD:
        whole = _decompress(stored, len(out))
        if whole is None:
            return False
        out[:] = whole
        return True
    if codec == CodecId.ZSTD_PLANES:
        return _decode_planes(stored, out)
    return False


# A plane stream: u8 element bytes w, three zero bytes, w lengths (u32, little endian), then the planes one
# behind the other. A plane whose length is that of its raw bytes is stored raw, a shorter one is a zstd
# frame.


def _plane_bytes(count: int, width: int, plane: int) -> int:
    return (count - plane + width - 1) // width


def _encode_planes(raw: UInt8Array, out: UInt8Array, level: int, width: int) -> int | None:
    """The bytes used, or None when that is not less than the raw bytes."""
    count = len(raw)
    if count <= width:
        return None
    compressor = _contexts.compressor(level)
    lengths: list[int] = []
    position = 4 + 4 * width
    for plane in range(width):
        split = np.ascontiguousarray(raw[plane::width])
        packed = compressor.compress(split.data)
        piece = np.frombuffer(packed, np.uint8) if len(packed) < len(split) else split
        if position + len(piece) >= count:
            return None
        out[position : position + len(piece)] = piece
        lengths.append(len(piece))
        position += len(piece)
    out[: 4 + 4 * width] = np.frombuffer(struct.pack(f"<B3x{width}I", width, *lengths), np.uint8)
    return position


def _decode_planes(stored: UInt8Array, out: UInt8Array) -> bool:
    count = len(out)
    if len(stored) < 4:
        return False
    width = int(stored[0])
    position = 4 + 4 * width
    if not 1 <= width <= MAX_ELEMENT_BYTES or stored[1:4].any() or len(stored) < position or count <= width:
        return False
    lengths = struct.unpack(f"<{width}I", stored[4:position].tobytes())
    if sum(lengths) != len(stored) - position:
        return False
    for plane, length in enumerate(lengths):
        piece = stored[position : position + length]
        position += length
        expected = _plane_bytes(count, width, plane)
        if length == expected:
            out[plane::width] = piece
            continue
        whole = _decompress(piece, expected) if length < expected else None
        if whole is None:
            return False
        out[plane::width] = whole
    return True


def _decompress(stored: UInt8Array, expected: int) -> UInt8Array | None:
    """Exactly `expected` bytes out of one whole zstd frame, or None."""
    try:
        # The library allocates what a frame declares, whatever limit it is given: so the declaration comes
        # first.
        found = zstandard.get_frame_parameters(stored.data)
        if found.content_size != expected or found.window_size > _MAX_WINDOW_BYTES:
            return None
        whole = _contexts.decompressor.decompress(
            stored.data, max_output_size=expected, allow_extra_data=False
        )
    except (zstandard.ZstdError, MemoryError, ValueError):
        return None
    return np.frombuffer(whole, np.uint8) if len(whole) == expected else None
