"""Hypothesis strategies for what crosses tierkv's seams.

The sizes are small on purpose: what breaks a store is the order of operations and odd sizes, not volume.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tierkv.testing.buffers import PagedCache, chain_hashes
from tierkv.types import HASH_BYTES, HashArray

TEXT_FIELDS = (
    "model",
    "revision",
    "kv_dtype",
    "layout",
    "group",
    "pipeline_stage",
    "hash_algorithm",
    "hash_seed",
)
UNRESOLVED = ("", " ", "auto", "AUTO", "none", "None", "unknown", "default", " auto ")


def words() -> Any:
    """Text that a resolved setting may have, also outside ASCII."""
    plain = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)
    return plain.filter(lambda text: text.strip().lower() not in {"", "auto", "none", "unknown", "default"})


def part_sizes(max_parts: int = 4, max_bytes: int = 20_000) -> Any:
    """Tuples of bytes per part, with a liking for what lies around 4 KiB."""
    near_page = st.sampled_from([1, 2, 511, 512, 513, 4095, 4096, 4097, 8192])
    size = st.one_of(near_page, st.integers(1, max_bytes))
    return st.lists(size, min_size=1, max_size=max_parts).map(tuple)


def spec_fields() -> Any:
    """Mappings that KeyspaceSpec.from_mapping accepts."""
    return st.fixed_dictionaries(
        {
            **{name: words() for name in TEXT_FIELDS},
            "block_tokens": st.integers(1, 4096),
            "part_bytes": part_sizes(),
        },
        optional={"extra": st.dictionaries(words(), words(), max_size=3)},
    )


def _break(fields: dict[str, Any], choice: tuple[str, Any]) -> dict[str, Any]:
    kind, value = choice
    broken = dict(fields)
    match kind:
        case "unresolved":
            name, text = value
            broken[name] = text
        case "missing":
            broken.pop(value, None)
        case "unknown":
            broken[value] = "x"
        case _:
            name, wrong = value
            broken[name] = wrong
    return broken


def invalid_spec_fields() -> Any:
    """Mappings that must be refused: a field unresolved, missing, unknown or out of range."""
    required = (*TEXT_FIELDS, "block_tokens", "part_bytes")
    choice = st.one_of(
        st.tuples(
            st.just("unresolved"),
            st.tuples(st.sampled_from(TEXT_FIELDS), st.sampled_from(UNRESOLVED)),
        ),
        st.tuples(st.just("missing"), st.sampled_from(required)),
        st.tuples(st.just("unknown"), st.sampled_from(["dtype", "Model", "tp", "block_bytes"])),
        st.tuples(
            st.just("range"),
            st.sampled_from(
                [
                    ("block_tokens", 0),
                    ("block_tokens", -1),
                    ("block_tokens", "16"),
                    ("part_bytes", ()),
                    ("part_bytes", (0,)),
                    ("part_bytes", (4096, -1)),
                    ("part_bytes", (1,) * 65),
                    ("part_bytes", ((1 << 30) + 1,)),
                    ("part_bytes", 4096),
                    ("model", 7),
                    ("extra", {"a": 1}),
                    ("extra", None),
                ]
            ),
        ),
    )
    return st.tuples(spec_fields(), choice).map(lambda pair: _break(*pair))


def raw_hashes(max_bytes: int = HASH_BYTES) -> Any:
    """Block hashes as bytes: full and short ones, zeros, and ones that agree but for the last byte."""
    return st.one_of(
        st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES),
        st.binary(min_size=1, max_size=max_bytes),
        st.just(bytes(HASH_BYTES)),
        st.integers(0, 255).map(lambda last: b"\xab" * (HASH_BYTES - 1) + bytes([last])),
        st.integers(0, 255).map(lambda first: bytes([first]) + bytes(HASH_BYTES - 1)),
    )


def hash_arrays(min_count: int = 0, max_count: int = 20, *, unique: bool = True) -> Any:
    """(n, 32) uint8 arrays, by default of distinct hashes."""

    def pack(items: list[bytes]) -> HashArray:
        joined = b"".join(item.ljust(HASH_BYTES, b"\x00") for item in items)
        return np.frombuffer(joined, np.uint8).reshape(len(items), HASH_BYTES).copy()

    by = (lambda item: item.ljust(HASH_BYTES, b"\x00")) if unique else None
    return st.lists(raw_hashes(), min_size=min_count, max_size=max_count, unique_by=by).map(pack)


def chains(max_chains: int = 4, max_length: int = 12) -> Any:
    """(n, 32) uint8: a chain's block hashes; chains share their first blocks, as with one system prompt."""
    return st.builds(
        lambda chain, length, common: chain_hashes(chain, length, min(common, length)),
        st.integers(0, max_chains - 1),
        st.integers(1, max_length),
        st.integers(0, max_length),
    )


@dataclass(frozen=True)
class CacheCase:
    """A paged cache and the block ids of one batch, in no order, without repetition."""

    cache: PagedCache
    block_ids: tuple[int, ...]


def caches(part_bytes: int | None = None, max_blocks: int = 12, max_pieces: int = 4, min_ids: int = 0) -> Any:
    """CacheCases: several layers, gaps, shuffled block ids. part_bytes: the sum of a block's pieces."""

    def build(blocks: int, pieces: list[int], gaps: list[int], order: list[int], count: int) -> CacheCase:
        cache = PagedCache(blocks, pieces, gaps[: len(pieces)])
        ids = [position for position in order if position < blocks][: max(count, min_ids)]
        return CacheCase(cache, tuple(ids))

    return st.builds(
        build,
        st.integers(max(1, min_ids), max_blocks),
        piece_sizes(part_bytes, max_pieces),
        st.lists(st.sampled_from([0, 1, 64, 100, 4096]), min_size=max_pieces, max_size=max_pieces),
        st.permutations(range(max_blocks)),
        st.integers(min_ids, max_blocks),
    )


def piece_sizes(part_bytes: int | None = None, max_pieces: int = 4) -> Any:
    """Lists of 1 to max_pieces sizes; they sum to part_bytes where it is given."""
    if part_bytes is None:
        return st.lists(
            st.one_of(st.integers(1, 300), st.sampled_from([4095, 4096, 4097])),
            min_size=1,
            max_size=max_pieces,
        )

    def cut(points: list[int]) -> list[int]:
        edges = [0, *sorted(set(points)), part_bytes]
        return [high - low for low, high in itertools.pairwise(edges)]

    if part_bytes == 1:
        return st.just([1])
    return st.lists(st.integers(1, part_bytes - 1), max_size=max_pieces - 1).map(cut)


@dataclass(frozen=True)
class Operation:
    """One step against a store or a tier. `kind` as in `operations()`; chain and length name the hashes."""

    kind: str
    space: int
    chain: int
    length: int
    part: int


def operations(
    kinds: tuple[str, ...] = ("save", "load", "match", "touch", "remove"),
    *,
    spaces: int = 1,
    max_chains: int = 4,
    max_length: int = 8,
    parts: int = 1,
) -> Any:
    """Single Operations; take a list of them for a history."""
    return st.builds(
        Operation,
        st.sampled_from(kinds),
        st.integers(0, spaces - 1),
        st.integers(0, max_chains - 1),
        st.integers(1, max_length),
        st.integers(0, parts - 1),
    )
