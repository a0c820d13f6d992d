"""Keyspaces: everything besides the tokens that changes a block's bytes, and the packing of hashes.

A block is found only under the keyspace it was saved in. The digest of the spec names the keyspace in every
file, message and index, so two engines share blocks exactly when all of these fields agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from tierkv.errors import ArgumentError, KeyspaceError
from tierkv.types import HASH_BYTES, HashArray

_DIGEST_DOMAIN = b"tierkv.keyspace.v1\x00"
_UNRESOLVED = frozenset({"", "auto", "none", "unknown", "default"})
MAX_PARTS = 64
MAX_BLOCK_BYTES = 1 << 30


class KeyspaceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that changes a block's bytes besides its tokens. Every field is required and must be resolved.

    A setting the engine calls `auto` (a dtype, a revision) is refused here: resolve it first, since two hosts
    may resolve it differently.
    """

    model: str
    """The model's name or path, as all engines that share the cache spell it."""
    revision: str
    """The weights' revision (a commit, a digest): other weights, other bytes."""
    kv_dtype: str
    """The dtype of the cached values, such as bfloat16 or fp8_e4m3; a mix is spelled out."""
    block_tokens: int
    """Tokens a block holds."""
    part_bytes: tuple[int, ...]
    """Bytes of each part (one a shard; a single one where ranks hold replicas). Their sum is block_bytes."""
    layout: str
    """How the bytes are arranged inside a part (the engine's cache layout, packing for an instruction set)."""
    group: str
    """The KV-cache group: which layers, and of which kind."""
    pipeline_stage: str
    """Which share of the layers, such as 0/1."""
    hash_algorithm: str
    """The engine's block hash, such as sha256_cbor."""
    hash_seed: str
    """What the engine seeds its hashes with; equal in all processes that share blocks. Use '0' for none."""
    extra: dict[str, str] = msgspec.field(default_factory=dict)
    """Whatever else an adapter knows to change the bytes (rope scaling, quantization scales)."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block, of all parts."""
        return sum(self.part_bytes)

    def validate(self) -> None:
        """Raises KeyspaceError that names the field when one is unresolved or out of range."""
        for name in (
            "model",
            "revision",
            "kv_dtype",
            "layout",
            "group",
            "pipeline_stage",
            "hash_algorithm",
            "hash_seed",
        ):
            value = getattr(self, name)
            if not isinstance(value, str) or value.strip().lower() in _UNRESOLVED:
                raise KeyspaceError(
                    f"keyspace field {name!r} is {value!r}: resolve it to the value the engine really uses, "
                    f"since it changes a block's bytes or names"
                )
        if not isinstance(self.block_tokens, int) or self.block_tokens < 1:
            raise KeyspaceError(
                f"keyspace field 'block_tokens' is {self.block_tokens!r}: it must be 1 or more"
            )
        parts = self.part_bytes
        if not 1 <= len(parts) <= MAX_PARTS:
            raise KeyspaceError(
                f"keyspace field 'part_bytes' has {len(parts)} parts: 1 to {MAX_PARTS} are possible"
            )
        if any(not isinstance(size, int) or size < 1 for size in parts):
            raise KeyspaceError(
                f"keyspace field 'part_bytes' is {parts!r}: every part must have 1 byte or more"
            )
        if self.block_bytes > MAX_BLOCK_BYTES:
            raise KeyspaceError(
                f"keyspace field 'part_bytes' sums to {self.block_bytes}: at most {MAX_BLOCK_BYTES}"
            )
        for key, value in self.extra.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise KeyspaceError(f"keyspace field 'extra' has {key!r}: {value!r}: both must be text")

    def canonical(self) -> bytes:
        """The spec as JSON with sorted keys: what is digested, and what the stores keep beside the blocks."""
        return msgspec.json.encode(msgspec.to_builtins(self), order="sorted")

    def digest(self) -> bytes:
        """32 bytes that name the keyspace."""
        return hashlib.sha256(_DIGEST_DOMAIN + self.canonical()).digest()

    @classmethod
    def from_json(cls, data: bytes | str) -> KeyspaceSpec:
        """Reads a spec; unknown or missing fields and wrong types raise KeyspaceError."""
        try:
            spec = msgspec.json.decode(data, type=cls)
        except msgspec.ValidationError as error:
            raise KeyspaceError(f"keyspace spec: {error}") from error
        except msgspec.DecodeError as error:
            raise KeyspaceError(f"keyspace spec is not JSON: {error}") from error
        spec.validate()
        return spec

    @classmethod
    def from_mapping(cls, fields: Mapping[str, Any]) -> KeyspaceSpec:
        """Builds a spec from a mapping (config, engine); unknown or missing fields raise KeyspaceError."""
        try:
            spec = msgspec.convert(dict(fields), type=cls)
        except msgspec.ValidationError as error:
            raise KeyspaceError(f"keyspace spec: {error}") from error
        spec.validate()
        return spec


@dataclass(frozen=True, slots=True)
class Keyspace:
    """A spec that a store has opened. `number` is its name in this process's index only."""

    spec: KeyspaceSpec
    digest: bytes
    number: int

    @property
    def block_bytes(self) -> int:
        return self.spec.block_bytes

    @property
    def part_bytes(self) -> tuple[int, ...]:
        return self.spec.part_bytes

    def part_offset(self, part: int) -> int:
        """Where part `part` starts within a block, in bytes."""
        return sum(self.spec.part_bytes[:part])

    def __str__(self) -> str:
        return f"{self.spec.model}/{self.spec.group}@{self.digest.hex()[:12]}"


def pack_hashes(hashes: Iterable[bytes]) -> HashArray:
    """Packs hashes of 1 to 32 bytes into an (n, 32) uint8 array; shorter ones are zero-extended."""
    items = list(hashes)
    for position, item in enumerate(items):
        if not isinstance(item, (bytes, bytearray, memoryview)) or not 1 <= len(item) <= HASH_BYTES:
            raise ArgumentError(f"hash {position} is {item!r}: bytes of length 1 to {HASH_BYTES} are needed")
    joined = b"".join(bytes(item).ljust(HASH_BYTES, b"\x00") for item in items)
    return np.frombuffer(joined, dtype=np.uint8).reshape(len(items), HASH_BYTES)


def as_hash_array(hashes: Any) -> HashArray:
    """Checks that `hashes` is an (n, 32) uint8 array and makes it C-contiguous; copies only if it must."""
    if (
        not isinstance(hashes, np.ndarray)
        or hashes.dtype != np.uint8
        or hashes.ndim != 2
        or hashes.shape[1] != HASH_BYTES
    ):
        found = f"{hashes.dtype} {hashes.shape}" if isinstance(hashes, np.ndarray) else type(hashes).__name__
        raise ArgumentError(
            f"hashes must be an (n, {HASH_BYTES}) uint8 array, got {found}: use tierkv.pack_hashes"
        )
    return np.ascontiguousarray(hashes)
