"""Identity: the keyspace of a rank's blocks, from what the engine really resolved.

Everything that changes a block's bytes, or what its hash means, goes into the keyspace; whatever cannot be resolved is
an error with the setting that resolves it. The facts are gathered on the worker side, where tensors, dtypes and back
ends are known.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tierkv.adapters.vllm.groups import Group
from tierkv.adapters.vllm.layout import GroupCache
from tierkv.errors import ConfigError
from tierkv.keys import MAX_PARTS, KeyspaceSpec

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
MAX_SETTINGS_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What of one worker's engine changes the bytes of all groups."""

    model: str
    revision: str
    hash_algorithm: str
    hash_seed: str
    hash_block_tokens: int
    """Tokens a block hash covers; a group's block ends at a multiple of it."""
    layout: str
    """The engine's cache layout, and packing for an instruction set."""
    backend: str
    """The attention back ends, which arrange values within a block."""
    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    extra: Mapping[str, str]
    """Whatever else: model settings' digest, quantization, speculative decoding, the engine's version."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of the blocks of a group a rank holds."""

    parts: int
    part: int
    writes: bool
    """Whether this rank saves the part; of the ranks that hold the same one, the first does."""


def shard_of(facts: EngineFacts, replicas: int) -> Shard:
    """The shard of this rank when `replicas` consecutive tensor-parallel ranks hold the same bytes."""
    replicas = max(1, min(replicas, facts.tensor_size))
    if facts.tensor_size % replicas:
        raise ConfigError(
            f"{facts.tensor_size} tensor-parallel ranks cannot hold a cache in groups of {replicas} replicas"
        )
    parts = facts.tensor_size // replicas
    if parts > MAX_PARTS:
        raise ConfigError(f"tensor_parallel_size {facts.tensor_size}: at most {MAX_PARTS} parts are possible")
    rank, replica = divmod(facts.tensor_rank, replicas)
    return Shard(parts, rank, replica == 0)


def keyspace_of(
    facts: EngineFacts, group: Group, kind_detail: str, cache: GroupCache, shard: Shard
) -> KeyspaceSpec:
    """The keyspace of a group's blocks; every rank of a pipeline stage comes to the same.

    kind_detail: what the engine's own description of the group adds (its kind, window and the like).
    """
    described = hashlib.sha256(cache.described.encode()).hexdigest()
    spec = KeyspaceSpec(
        model=facts.model,
        revision=facts.revision,
        kv_dtype=",".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in cache.tensors})),
        block_tokens=group.block_tokens,
        part_bytes=(cache.block_bytes,) * shard.parts,
        layout=f"{facts.layout}:{described}",
        group=f"{group.kind.value}:{kind_detail}",
        pipeline_stage=f"{facts.pipeline_rank}/{facts.pipeline_size}",
        hash_algorithm=f"{facts.hash_algorithm}:{facts.hash_block_tokens}",
        hash_seed=facts.hash_seed,
        extra={**facts.extra, "backend": facts.backend, "tensor_parallel": str(facts.tensor_size)},
    )
    spec.validate()
    return spec


def renewed(spec: KeyspaceSpec, renewal: str) -> KeyspaceSpec:
    """The keyspace that an engine uses instead of `spec` after its cache was reset: nobody tells what weights it has
    since, so nobody else may find its blocks. renewal: a word that no other engine has; empty: `spec` itself."""
    return msgspec.structs.replace(spec, extra={**spec.extra, "renewal": renewal}) if renewal else spec


def directory_revision(directory: Path) -> str:
    """A revision for weights in a local directory: names, sizes and times of the weights, contents of the settings
    and of the model's own code.

    Another host that sees the same directory, or a copy that kept the times, comes to the same.
    """
    digest = hashlib.sha256()
    weights = 0
    for path in sorted(directory.iterdir(), key=lambda entry: entry.name):
        if not path.is_file():
            continue
        status = path.stat()
        if path.suffix in _WEIGHT_SUFFIXES:
            weights += 1
            digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        elif path.suffix in (".json", ".py") and status.st_size <= MAX_SETTINGS_BYTES:
            digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    if not weights:
        raise ConfigError(
            f"{directory}: no weights are there ({', '.join(_WEIGHT_SUFFIXES)}), so nothing tells one revision from "
            f"another: set kv_connector_extra_config.model_revision"
        )
    return f"files-{digest.hexdigest()}"


def digest_of(settings: Mapping[str, object]) -> str:
    """A short digest of an engine's settings, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
