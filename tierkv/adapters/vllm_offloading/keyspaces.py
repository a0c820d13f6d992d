"""Keyspaces of the tier: one a KV-cache group, from what vLLM resolved. No vLLM here, only its facts.

vLLM's CPU tier holds a block as one row: what all workers of the engine hold for it side by side, in rank order, padded
to whole pages. A row is one part of ours. Where rows are the same under any parallel layout (vLLM's canonical layout
where it certifies that, and MLA stored once for all ranks), engines of other sizes share them; else all sizes are part
of the keyspace: in the direct layout a row has each rank's layers one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tierkv.adapters.vllm.identity import digest_of
from tierkv.errors import ConfigError
from tierkv.keys import KeyspaceSpec

GROUP_BYTES = 4
"""An OffloadKey is the block's hash and the group's number as so many bytes, big-endian."""
_UNKNOWN_YET = "unset"


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A KV-cache group that is offloaded."""

    number: int
    """As in the engine's KV cache, and at the end of keys."""
    block_tokens: int
    """Tokens of one of the engine's blocks, over all context-parallel ranks."""
    layers: Sequence[str]


@dataclass(frozen=True, slots=True)
class TierFacts:
    """All that changes the bytes of a row of vLLM's CPU tier."""

    model: str
    revision: str
    kv_dtype: str
    row_bytes: int
    worker_block_bytes: int
    """What one worker holds of an engine's block."""
    blocks_per_row: int
    hash_tokens: int
    """Tokens a block hash covers; a block ends at a multiple of it."""
    groups: Sequence[GroupFacts]
    layout: str
    """The engine's cache layout, and packing for an instruction set."""
    row_format: str
    """direct, replicated or canonical, with its version."""
    parallel: Mapping[str, int]
    """Sizes of the engine's dimensions: tp, pp, pcp, dcp, world."""
    any_parallel: bool
    """Whether rows are the same whatever `parallel` is."""
    extra: Mapping[str, str]
    """Whatever else: model settings' digest, quantization, the engine's version."""


def keyspaces_of(facts: TierFacts) -> dict[int, KeyspaceSpec]:
    """Group number -> keyspace. What blocks are hashed with is not known yet: see with_hashing().

    ConfigError or KeyspaceError names what is unresolved.
    """
    if len({group.number for group in facts.groups}) != len(facts.groups) or not facts.groups:
        raise ConfigError(
            f"vLLM offloads groups {[group.number for group in facts.groups]}: none, or not distinct"
        )
    parallel = {"any": 1} if facts.any_parallel else dict(facts.parallel)
    described = digest_of(
        {
            # Which layers a row holds, in which place, follows from all groups together: they share the memory.
            "groups": [[group.number, group.block_tokens, list(group.layers)] for group in facts.groups],
            "worker_block_bytes": None if facts.any_parallel else facts.worker_block_bytes,
            "blocks_per_row": facts.blocks_per_row,
            "parallel": parallel,
        }
    )
    specs = {}
    for group in facts.groups:
        spec = KeyspaceSpec(
            model=facts.model,
            revision=facts.revision,
            kv_dtype=facts.kv_dtype,
            block_tokens=group.block_tokens * facts.blocks_per_row,
            part_bytes=(facts.row_bytes,),
            layout=f"vllm-offloading:{facts.layout}:{facts.row_format}:{described}",
            group=f"group {group.number} of {len(facts.groups)}",
            pipeline_stage="all",
            hash_algorithm=_UNKNOWN_YET,
            hash_seed=_UNKNOWN_YET,
            extra={
                **facts.extra,
                **{f"parallel_{name}": str(size) for name, size in parallel.items()},
                "hash_tokens": str(facts.hash_tokens),
            },
        )
        spec.validate()
        specs[group.number] = spec
    return specs


def with_hashing(
    specs: Mapping[int, KeyspaceSpec], algorithm: str, none_hash: bytes
) -> dict[int, KeyspaceSpec]:
    """The keyspaces of blocks whose hash chains start from `none_hash`, which stands for the seed."""
    return {
        number: msgspec.structs.replace(spec, hash_algorithm=algorithm, hash_seed=none_hash.hex())
        for number, spec in specs.items()
    }


def pack_keys(keys: Sequence[bytes]) -> dict[int, tuple[list[int], list[bytes]]]:
    """OffloadKeys by group: number -> (their positions, their block hashes)."""
    found: dict[int, tuple[list[int], list[bytes]]] = {}
    for position, key in enumerate(keys):
        number = int.from_bytes(key[-GROUP_BYTES:], "big")
        positions, hashes = found.setdefault(number, ([], []))
        positions.append(position)
        hashes.append(key[:-GROUP_BYTES])
    return found
