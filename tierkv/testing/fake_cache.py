"""The paged KV cache of FakeEngine: a pool of blocks with reference counts, the ranks' memory, and what is right.

The bytes that belong into a block follow from the tokens up to its end, the group, the layer and the rank alone, so
whoever holds a block, or finds it in a store under a hash, can be checked without being told what was computed.

Blocks are given out again as vLLM does (those without a name first, then the least recently freed), and a block that is
given out is filled with other bytes before the step it was given out for runs: whoever reads it late reads rubbish.

Thread safety: none, except that others may copy into and out of blocks that they were told to.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tierkv.adapters.vllm.groups import Group, Kind
from tierkv.adapters.vllm.layout import GroupCache, describe_group

UInt64Array = npt.NDArray[np.uint64]

RUBBISH = np.uint64(0x5AA5_0FF0_DEAD_BEEF)
UNSETTLED = np.uint64(0x1111_1111_1111_1111)
"""A draft layer's entry that may still be written again differs from the settled one by this."""
STATE_WORDS = 3
_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E37_79B9_7F4A_7C15


@dataclass(frozen=True, slots=True)
class FakeGroup:
    """One KV-cache group of the fake engine."""

    group: Group
    """As the connector sees it."""
    layers: tuple[int, ...] = (1,)
    """Layers on each pipeline stage."""
    replicated: bool = False
    """Whether all tensor-parallel ranks hold the same bytes (MLA)."""


@dataclass(slots=True, eq=False)
class FakeBlock:
    """A block of the pool, with the attributes that connectors read."""

    block_id: int
    is_null: bool = False
    ref_cnt: int = 0
    names: set[tuple[int, bytes]] = field(default_factory=set)
    """(group, hash) under which the engine's own prefix cache knows it."""


class FakePool:
    """The block pool: what vLLM's BlockPool does, as far as a connector and the fake engine see it."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [FakeBlock(number) for number in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.null_block.ref_cnt = 1
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._named: dict[tuple[int, bytes], dict[int, None]] = {}
        self.fresh: list[int] = []
        """Blocks given out since somebody last looked."""

    def touch(self, blocks: Sequence[FakeBlock]) -> None:
        """One more reference to each."""
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                del self._free[block.block_id]
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[FakeBlock]) -> None:
        """One reference less; the first one given is the first to be given out again."""
        nameless = []
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= (1 if block.is_null else 0), f"block {block.block_id} is freed too often"
            if block.ref_cnt == 0 and not block.is_null:
                self._free[block.block_id] = None
                if not block.names:
                    nameless.append(block.block_id)
        for number in reversed(nameless):
            self._free.move_to_end(number, last=False)

    def take(self, count: int) -> list[FakeBlock]:
        """`count` blocks; they lose their names."""
        taken = []
        for _ in range(count):
            number, _ = self._free.popitem(last=False)
            block = self.blocks[number]
            self.forget(block)
            block.ref_cnt = 1
            taken.append(block)
            self.fresh.append(number)
        return taken

    def name(self, group: int, block_hash: bytes, block: FakeBlock) -> None:
        """The engine's own prefix cache knows the block from now on."""
        block.names.add((group, block_hash))
        self._named.setdefault((group, block_hash), {})[block.block_id] = None

    def forget(self, block: FakeBlock) -> None:
        """The engine's own prefix cache no longer knows the block."""
        for name in block.names:
            holders = self._named[name]
            del holders[block.block_id]
            if not holders:
                del self._named[name]
        block.names.clear()

    def known(self, group: int, block_hash: bytes) -> FakeBlock | None:
        """The block that the engine's own prefix cache has under a hash."""
        holders = self._named.get((group, block_hash))
        return self.blocks[next(iter(holders))] if holders else None

    def reset(self) -> bool:
        """Forgets all names; False, and nothing is done, while blocks are in use."""
        if self.used:
            return False
        for block in self.blocks:
            self.forget(block)
        return True

    @property
    def free(self) -> int:
        """Blocks that can be given out."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that somebody refers to."""
        return len(self.blocks) - 1 - len(self._free)


class Sequence64:
    """Tokens, and for each the digest of all up to it: what the bytes and the hashes follow from."""

    def __init__(self, salt: int = 0) -> None:
        self.tokens: list[int] = []
        self._first = self._last = (salt * _MULTIPLIER + 1) & _MASK
        self._digests = np.zeros(64, np.uint64)

    def append(self, token: int) -> None:
        """Goes on by one token."""
        self._last = ((self._last ^ (token + 1)) * _MULTIPLIER + 0x1234_5678_9ABC_DEF1) & _MASK
        self._last ^= self._last >> 29
        count = len(self.tokens)
        if count == len(self._digests):
            self._digests = np.concatenate((self._digests, np.zeros_like(self._digests)))
        self._digests[count] = self._last
        self.tokens.append(token)

    def cut(self, count: int) -> None:
        """Forgets all but the first `count` tokens."""
        del self.tokens[count:]
        self._last = int(self._digests[count - 1]) if count else self._first

    @property
    def digests(self) -> UInt64Array:
        """(n,) uint64."""
        return self._digests[: len(self.tokens)]

    @property
    def last(self) -> int:
        """The digest of all tokens."""
        return self._last

    def __len__(self) -> int:
        return len(self.tokens)


def hash_of(digest: int) -> bytes:
    """The block hash at a place in a sequence."""
    return hashlib.sha256(b"fake block" + digest.to_bytes(8, "little")).digest()


class Truth:
    """What every hash stands for: (group's block) -> the digests of the tokens up to the block's end."""

    def __init__(self) -> None:
        self._digests: dict[bytes, UInt64Array] = {}

    def learn(self, block_hash: bytes, digests: UInt64Array) -> None:
        """digests: (n,) of all tokens up to where the hash stands."""
        self._digests.setdefault(block_hash, digests.copy())

    def tokens_of(self, block_hash: bytes, block_tokens: int) -> UInt64Array:
        """(block_tokens,) digests of the block that ends where the hash stands. KeyError for a hash nobody made."""
        return self._digests[block_hash][-block_tokens:]


class RankMemory:
    """The caches of one rank: for each group, its layers on this rank's pipeline stage."""

    def __init__(self, groups: Sequence[FakeGroup], num_blocks: int, stage: int, tensor_rank: int) -> None:
        self.groups = groups
        self.layers: list[list[UInt64Array]] = []
        """For each group, for each layer (num_blocks, words) uint64: an entry a token, or one state a block."""
        self.caches: list[GroupCache | None] = []
        """For each group, what the connector sees; None where this stage has no layers of it."""
        self._keys: list[list[np.uint64]] = []
        for position, fake in enumerate(groups):
            words = STATE_WORDS if fake.group.kind is Kind.RECURRENT else fake.group.block_tokens
            layers = [np.full((num_blocks, words), RUBBISH, np.uint64) for _ in range(fake.layers[stage])]
            first = sum(fake.layers[:stage])
            who = 0 if fake.replicated else tensor_rank
            self.layers.append(layers)
            self._keys.append(
                [
                    np.uint64(((position * 1009 + first + layer) * 31 + who + 1) * _MULTIPLIER & _MASK | 1)
                    for layer in range(len(layers))
                ]
            )
            names = [f"group {position} layer {first + layer}" for layer in range(len(layers))]
            self.caches.append(
                describe_group(names, dict(zip(names, layers, strict=True)), num_blocks) if layers else None
            )

    def right(self, position: int, layer: int, digests: UInt64Array) -> UInt64Array:
        """(n,) uint64: the entries of a layer for tokens with these digests."""
        key = self._keys[position][layer]
        with np.errstate(over="ignore"):
            mixed = (digests ^ key) * (key | np.uint64(1))
        result: UInt64Array = mixed ^ (mixed >> np.uint64(31))
        return result

    def right_state(self, position: int, layer: int, digest: np.uint64) -> UInt64Array:
        """(STATE_WORDS,) uint64: a recurrent layer's state after the token with this digest."""
        seeds = np.arange(1, STATE_WORDS + 1, dtype=np.uint64) * np.uint64(0x0101_0101_0101)
        return self.right(position, layer, seeds ^ digest)

    def right_block(self, position: int, digests: UInt64Array) -> bytes:
        """A whole block's part of this rank, as the store keeps it. digests: (block_tokens,)."""
        recurrent = self.groups[position].group.kind is Kind.RECURRENT
        return b"".join(
            (
                self.right_state(position, layer, digests[-1])
                if recurrent
                else self.right(position, layer, digests)
            ).tobytes()
            for layer in range(len(self.layers[position]))
        )

    def write(
        self, position: int, block: int, first: int, digests: UInt64Array, spoil: np.uint64 | None = None
    ) -> None:
        """Writes the entries of (n,) tokens from entry `first` of a block on; spoil: with these bits flipped."""
        for layer, memory in enumerate(self.layers[position]):
            values = self.right(position, layer, digests)
            memory[block, first : first + len(digests)] = values if spoil is None else values ^ spoil

    def write_state(
        self, position: int, block: int, digest: np.uint64, spoil: np.uint64 | None = None
    ) -> None:
        """Writes the state after the token with this digest."""
        for layer, memory in enumerate(self.layers[position]):
            values = self.right_state(position, layer, digest)
            memory[block] = values if spoil is None else values ^ spoil

    def holds(self, position: int, block: int, first: int, digests: UInt64Array) -> bool:
        """Whether the entries of (n,) tokens from entry `first` of a block on are right."""
        return all(
            bool((memory[block, first : first + len(digests)] == self.right(position, layer, digests)).all())
            for layer, memory in enumerate(self.layers[position])
        )

    def holds_state(self, position: int, block: int, digest: np.uint64) -> bool:
        """Whether a block holds the state after the token with this digest."""
        return all(
            bool((memory[block] == self.right_state(position, layer, digest)).all())
            for layer, memory in enumerate(self.layers[position])
        )

    def scramble(self, blocks: Sequence[int], salt: int) -> None:
        """Fills blocks that were given out with other bytes."""
        if blocks:
            for layers in self.layers:
                for memory in layers:
                    memory[list(blocks)] = RUBBISH ^ np.uint64(salt)
