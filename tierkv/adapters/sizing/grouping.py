"""A model's layers as KV-cache groups, as vLLM forms them, and the bytes of a block by group, stage and rank.

vLLM gives all groups pages of one size: hybrids with recurrent layers get attention blocks so long that a page holds a
state; where attention layers differ, the smaller ones get longer blocks. Layers of one kind are then cut into groups
of equally many. What is padding in a page is not stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import TypeAlias

from tierkv.adapters.sizing.layers import Attention, Latent, Layer, Model, State
from tierkv.adapters.vllm.groups import Group, Kind
from tierkv.errors import ConfigError
from tierkv.keys import MAX_BLOCK_BYTES, MAX_PARTS

_KERNEL_BLOCK_TOKENS = 16
"""Attention kernels work on multiples of this."""
_LATENT_BLOCK_TOKENS = 128
"""vLLM rounds the blocks of latent attention beside recurrent layers to this."""

PlacedLayer: TypeAlias = tuple[int, Layer]
"""(number of the model's layer, what it keeps)"""


@dataclass(frozen=True, slots=True)
class StageShare:
    """One pipeline stage's share of a group."""

    stage: int
    layers: int
    part_bytes: int
    """Of a block, one part: what one rank saves."""


@dataclass(frozen=True, slots=True)
class GroupSize:
    """One KV-cache group. A block is stored once a stage, whole with all its parts."""

    index: int
    kind: Kind
    description: str
    block_tokens: int
    parts: int
    """Shares of a block over the tensor-parallel ranks; ranks that hold the same bytes share one part."""
    replicas: int
    """Ranks that hold each part: it is stored once."""
    copies: int
    """How often equal bytes are stored within a block, where ranks repeat heads: see Attention.copies()."""
    reach_tokens: int
    stages: tuple[StageShare, ...]
    """Those that have layers of this group."""

    @property
    def layers(self) -> int:
        return sum(share.layers for share in self.stages)

    @property
    def block_bytes(self) -> int:
        """Of a block in all stages, all parts."""
        return self.parts * sum(share.part_bytes for share in self.stages)

    @property
    def token_bytes(self) -> float | None:
        """Bytes a token, None for recurrent groups: a state does not grow with the sequence."""
        return None if self.kind is Kind.RECURRENT else self.block_bytes / self.block_tokens

    def as_group(self, store: str, period_tokens: int) -> Group:
        """For the adapter's policies."""
        kept = store if self.kind in (Kind.SLIDING, Kind.CHUNKED) else "all"
        return Group(
            self.index,
            self.kind,
            self.block_tokens,
            self.reach_tokens,
            store=kept,
            period_tokens=period_tokens,
        )


@dataclass(frozen=True, slots=True)
class _Page:
    """A layer's page on one rank, comparable: layers with equal pages can share a group."""

    layer: Layer
    """Of attention only the heads on one rank."""
    block_tokens: int
    content_bytes: int


def group_layers(
    model: Model,
    *,
    block_tokens: int,
    kv_dtype: str,
    state_dtype: str = "auto",
    tensor_size: int = 1,
    pipeline_size: int = 1,
) -> tuple[GroupSize, ...]:
    """The groups. ConfigError where the engine could not serve the model so, or its grouping is not known here.

    block_tokens: vLLM's --block-size; kv_dtype: resolved, see resolve_kv_dtype(); state_dtype: vLLM's
    --mamba-ssm-cache-dtype.
    """
    placed = [(number, layer) for number, kept in enumerate(model.layers) for layer in kept]
    if not any(isinstance(layer, (Attention, Latent)) for _, layer in placed):
        raise ConfigError(
            f"model_type {model.name!r}: it has no attention layers, so vLLM caches no prefixes of it"
        )
    states = [
        layer.state_bytes(tensor_size, model.dtype, state_dtype) if isinstance(layer, State) else 0
        for _, layer in placed
    ]
    pages = _pages(model.name, [layer for _, layer in placed], states, block_tokens, kv_dtype, tensor_size)
    stages = _stages(len(model.layers), pipeline_size)
    groups = []
    for index, members in enumerate(_members(pages)):
        layer = placed[members[0]][1]
        # Ranks share a part only if they hold the same bytes of every layer.
        replicas = gcd(*(tensor_size // placed[member][1].shards(tensor_size) for member in members))
        copies = [
            layer.copies(tensor_size)
            for layer in (placed[member][1] for member in members)
            if isinstance(layer, Attention)
        ] or [1]
        shares = []
        for stage, (first, last) in enumerate(stages):
            here = [member for member in members if first <= placed[member][0] < last]
            if here:
                size = sum(pages[member].content_bytes for member in here)
                shares.append(StageShare(stage, len(here), size))
        kind, description, reach = _describe(layer)
        group = GroupSize(
            index, kind, description, pages[members[0]].block_tokens, tensor_size // replicas, replicas,
            max(copies), reach, tuple(shares),
        )  # fmt: skip
        _check(group)
        groups.append(group)
    return tuple(groups)


def resolve_kv_dtype(model: Model, asked: str) -> str:
    """The cache's dtype: `asked`, or for "auto" what the checkpoint asks for, else the model's."""
    if asked != "auto":
        return asked
    return model.kv_dtype or model.dtype


def _check(group: GroupSize) -> None:
    if group.parts > MAX_PARTS:
        raise ConfigError(
            f"group {group.index}: {group.parts} parts a block; at most {MAX_PARTS} are possible"
        )
    largest = max(share.part_bytes for share in group.stages) * group.parts
    if largest > MAX_BLOCK_BYTES:
        raise ConfigError(
            f"group {group.index}: a block has {largest} bytes; at most {MAX_BLOCK_BYTES} are possible: take shorter "
            f"blocks"
        )


def _pages(
    name: str,
    layers: Sequence[Layer],
    states: Sequence[int],
    block_tokens: int,
    kv_dtype: str,
    tensor_size: int,
) -> list[_Page]:
    """Each layer's page, with block lengths as vLLM settles them. states: bytes of each layer's state, 0 for none."""
    tokens = [
        layer.token_bytes(tensor_size, kv_dtype) for layer in layers if isinstance(layer, (Attention, Latent))
    ]
    if any(states):
        latent = any(isinstance(layer, Latent) for layer in layers)
        unit = max(_LATENT_BLOCK_TOKENS if latent else _KERNEL_BLOCK_TOKENS, block_tokens)
        if len(set(tokens)) > 1:
            raise ConfigError(
                f"model_type {name!r}: recurrent layers beside attention layers of different sizes are not known"
            )
        block_tokens = max(block_tokens, unit * -(-max(states) // (unit * tokens[0])))
    pages = []
    for layer, state in zip(layers, states, strict=True):
        if isinstance(layer, State):
            pages.append(_Page(layer, block_tokens, state))
            continue
        content = layer.token_bytes(tensor_size, kv_dtype) * block_tokens
        if isinstance(layer, Attention):
            layer_on_rank: Layer = replace(layer, kv_heads=layer.rank_heads(tensor_size))
        else:
            layer_on_rank = layer
        pages.append(_Page(layer_on_rank, block_tokens, content))
    if _is_one_group(pages):
        return pages
    largest = max(page.content_bytes for page in pages)
    return [_grown(page, largest, name) for page in pages]


def _grown(page: _Page, largest_bytes: int, name: str) -> _Page:
    """The page with a block so long that it has the common size, where that is possible; else it is padded."""
    if isinstance(page.layer, State) or largest_bytes == page.content_bytes:
        return page
    if not largest_bytes % page.content_bytes:
        ratio = largest_bytes // page.content_bytes
        return _Page(page.layer, page.block_tokens * ratio, largest_bytes)
    if isinstance(page.layer, Latent):
        raise ConfigError(
            f"model_type {name!r}: a latent page of {page.content_bytes} bytes does not divide the largest page of "
            f"{largest_bytes}; vLLM's way out is not known here"
        )
    return page


def _is_one_group(pages: Sequence[_Page]) -> bool:
    """Layers that need the same tokens can share a block table though their sizes differ."""
    first = pages[0].layer
    if isinstance(first, State):
        return False
    windows = {
        (page.layer.window_tokens, page.layer.chunk_tokens) if isinstance(page.layer, Attention) else (0, 0)
        for page in pages
        if not isinstance(page.layer, State)
    }
    return len(windows) == 1 and not any(isinstance(page.layer, State) for page in pages)


def _members(pages: Sequence[_Page]) -> list[list[int]]:
    """Positions of the layers of each group, groups in vLLM's order."""
    if _is_one_group(pages):
        return [list(range(len(pages)))]
    kinds: dict[_Page, list[int]] = {}
    for position, page in enumerate(pages):
        kinds.setdefault(page, []).append(position)
    fewest = min(map(len, kinds.values()))
    most = max(map(len, kinds.values()))
    group_layers = most if most < fewest * 1.5 else fewest
    members = []
    for positions in kinds.values():
        count = -(-len(positions) // group_layers)
        members += [positions[start::count] for start in range(count)]
    return members


def _stages(layers: int, pipeline_size: int) -> list[tuple[int, int]]:
    """(first, last + 1) of each stage's layers: equally many, what is left over from the last stage but one upwards."""
    if pipeline_size > layers:
        raise ConfigError(f"{layers} layers cannot be split over {pipeline_size} pipeline stages")
    counts = [layers // pipeline_size] * pipeline_size
    for extra in range(layers % pipeline_size):
        counts[-2 - extra] += 1
    ends = [sum(counts[: stage + 1]) for stage in range(pipeline_size)]
    return [(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _describe(layer: Layer) -> tuple[Kind, str, int]:
    """(kind, words, tokens before the next one that it sees)."""
    if isinstance(layer, State):
        return Kind.RECURRENT, f"{layer.kind} state", 0
    if isinstance(layer, Latent):
        return Kind.FULL, "latent attention (MLA)", 0
    if layer.window_tokens:
        return Kind.SLIDING, f"sliding window of {layer.window_tokens:,}", layer.window_tokens - 1
    if layer.chunk_tokens:
        return Kind.CHUNKED, f"chunks of {layer.chunk_tokens:,}", layer.chunk_tokens
    return Kind.FULL, "full attention", 0
