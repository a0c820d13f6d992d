"""Codecs: exact for all bytes, bounded against all streams, with ids and a layout that never change."""

from __future__ import annotations

import struct
import threading
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from tierkv.codec import CODEC_IDS, CodecId, decode, element_bytes_of, encode
from tierkv.errors import ArgumentError
from tierkv.types import UInt8Array

CODECS = list(CodecId)


def bfloat16_normals(count: int, seed: int = 0) -> UInt8Array:
    """Bytes of `count` normally distributed bfloat16 values."""
    wide = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    return (wide.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def packed(
    codec: CodecId, raw: UInt8Array, element_bytes: int = 2, level: int = 1
) -> tuple[CodecId, UInt8Array]:
    out = np.empty(len(raw), np.uint8)
    used, size = encode(codec, raw, out, level=level, element_bytes=element_bytes)
    return used, out[:size].copy()


payloads = st.one_of(
    npst.arrays(np.uint8, st.integers(1, 4000)),
    st.integers(1, 4000).map(bfloat16_normals),
    st.tuples(st.integers(0, 255), st.integers(1, 9000)).map(
        lambda pair: np.full(pair[1], pair[0], np.uint8)
    ),
)


@settings(max_examples=150, deadline=None)
@given(
    raw=payloads, codec=st.sampled_from(CODECS), width=st.integers(1, 8), level=st.sampled_from([-7, 1, 3, 9])
)
def test_decoding_gives_the_bytes_and_never_needs_more_than_them(
    raw: UInt8Array, codec: CodecId, width: int, level: int
) -> None:
    used, stored = packed(codec, raw, width, level)
    assert used in (codec, CodecId.NONE)
    assert len(stored) <= len(raw)
    assert used is CodecId.NONE or len(stored) < len(raw)
    back = np.zeros(len(raw), np.uint8)
    assert decode(used, stored, back)
    assert (back == raw).all()


@settings(max_examples=150, deadline=None)
@given(data=st.data(), raw=payloads, codec=st.sampled_from(CODECS), width=st.integers(1, 4))
def test_a_damaged_stream_is_a_value_and_stays_inside_the_buffer(
    data: st.DataObject, raw: UInt8Array, codec: CodecId, width: int
) -> None:
    used, stored = packed(codec, raw, width)
    damage = data.draw(st.sampled_from(["cut", "flip", "grow", "other size", "other codec", "noise"]))
    count = len(raw)
    if damage == "cut":
        stored = stored[: data.draw(st.integers(0, len(stored) - 1))]
    elif damage == "flip":
        stored[data.draw(st.integers(0, len(stored) - 1))] ^= data.draw(st.integers(1, 255))
    elif damage == "grow":
        stored = np.concatenate([stored, np.zeros(data.draw(st.integers(1, 50)), np.uint8)])
    elif damage == "other size":
        count = data.draw(st.integers(1, 5000).filter(lambda n: n != len(raw)))
    elif damage == "other codec":
        used = data.draw(st.sampled_from([*CODECS, 3, 255]))  # type: ignore[assignment]
    else:
        stored = data.draw(npst.arrays(np.uint8, st.integers(0, 200)))
    room = np.full(count + 64, 0xA5, np.uint8)
    result = decode(used, stored, room[:count])
    assert result in (True, False)
    assert (room[count:] == 0xA5).all()
    if damage in ("cut", "grow") or (damage == "other size" and used != CodecId.NONE):
        assert not result


def test_a_bomb_is_refused_before_memory_is_taken_for_it() -> None:
    bomb = np.frombuffer(zstandard.ZstdCompressor(level=3).compress(bytes(200 << 20)), np.uint8)
    undeclared = np.frombuffer(
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(200 << 20)), np.uint8
    )
    planes = np.concatenate(
        [np.frombuffer(struct.pack("<B3x2I", 2, len(bomb), len(bomb)), np.uint8), bomb, bomb]
    )
    out = np.empty(100_000, np.uint8)
    tracemalloc.start()
    try:
        for codec, stream in (
            (CodecId.ZSTD, bomb),
            (CodecId.ZSTD, undeclared),
            (CodecId.ZSTD_PLANES, planes),
        ):
            assert not decode(codec, stream, out)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_two_frames_are_not_one_stream() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(1000))
    assert not decode(CodecId.ZSTD, np.frombuffer(frame + frame, np.uint8), np.empty(2000, np.uint8))
    assert not decode(CodecId.ZSTD, np.frombuffer(frame + frame, np.uint8), np.empty(1000, np.uint8))


def test_splitting_planes_pays_on_floating_point_numbers() -> None:
    raw = bfloat16_normals(1 << 19)
    whole = len(packed(CodecId.ZSTD, raw)[1])
    split = len(packed(CodecId.ZSTD_PLANES, raw)[1])
    assert len(raw) / split > 1.4
    assert split < 0.92 * whole


def test_what_is_stored_never_changes_meaning() -> None:
    """A stream written by version 1 of the format."""
    assert {name: int(number) for name, number in CODEC_IDS.items()} == {
        "none": 0,
        "zstd": 1,
        "zstd-planes": 2,
    }
    raw = np.tile(np.array([0x01, 0x3F], np.uint8), 400)
    raw[::2] = np.arange(400) % 251
    low = raw[::2].tobytes()
    high = bytes.fromhex("28b52ffd6090004d0000103f3f01008b2ac002")
    out = np.empty(800, np.uint8)
    stream = struct.pack("<B3x2I", 2, len(low), len(high)) + low + high
    assert decode(2, np.frombuffer(stream, np.uint8), out)
    assert (out == raw).all()


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("bfloat16", 2),
        ("torch.float16", 2),
        ("BF16", 2),
        ("float32", 4),
        ("fp8_e4m3", 1),
        ("k:bf16,v:fp8", 1),
    ],
)
def test_element_widths_follow_from_the_dtype(name: str, width: int) -> None:
    assert element_bytes_of(name) == width


def test_arguments_are_checked() -> None:
    raw = np.zeros(100, np.uint8)
    with pytest.raises(ArgumentError, match="100 are needed"):
        encode(CodecId.ZSTD, raw, np.empty(99, np.uint8))
    with pytest.raises(ArgumentError, match="elements of 9"):
        encode(CodecId.ZSTD_PLANES, raw, np.empty(100, np.uint8), element_bytes=9)


def test_threads_do_not_share_contexts() -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        raw = bfloat16_normals(50_000, seed)
        for _ in range(10):
            used, stored = packed(CodecId.ZSTD_PLANES, raw)
            back = np.empty(len(raw), np.uint8)
            if not decode(used, stored, back) or not (back == raw).all():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
