"""Blocks of torch tensors: saved from and loaded into views of caches, as an engine holds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_harness import MISS, OK, Rig, statuses_of

from tierkv.errors import ArgumentError
from tierkv.fragments import Fragments
from tierkv.testing.buffers import random_hashes

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")

BLOCKS = 12
HEADS, TOKENS, DIM = 2, 8, 16

Layers = list[Any]


def plain(dtype: Any) -> Layers:
    """One tensor a layer."""
    return [torch.zeros(BLOCKS, HEADS, TOKENS, DIM, dtype=dtype) for _ in range(3)]


def strided(dtype: Any) -> Layers:
    """Layers that alternate in one storage: block b of layer l lies at [b, l]."""
    whole = torch.zeros(BLOCKS, 3, HEADS, TOKENS, DIM, dtype=dtype)
    return [whole[:, layer] for layer in range(3)]


def keys_and_values(dtype: Any) -> Layers:
    """Keys and values apart in one tensor: two pieces a layer, each with its own place."""
    wholes = [torch.zeros(2, BLOCKS, TOKENS, HEADS, DIM, dtype=dtype) for _ in range(2)]
    return [whole[half] for whole in wholes for half in range(2)]


def unequal(dtype: Any) -> Layers:
    """Layers of different sizes, and gaps between the blocks of one."""
    wide = torch.zeros(BLOCKS * 2, TOKENS, DIM, dtype=dtype)
    return [wide[::2], torch.zeros(BLOCKS, 1, 3, dtype=dtype), torch.zeros(BLOCKS + 4, 5, dtype=dtype)[4:]]


def filled(layers: Layers) -> Layers:
    """The layers with values of every kind, NaN with odd bits among them: bytes are what counts."""
    for layer in layers:
        size = layer[0].numel() * layer.element_size()
        raw = torch.randint(0, 256, (len(layer), size), dtype=torch.uint8)
        layer.copy_(raw.view(layer.dtype).reshape(layer.shape))
    return layers


def raw_bytes(block: Any) -> bytes:
    return bytes(block.contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "uint8"])
@pytest.mark.parametrize("make", [plain, strided, keys_and_values, unequal])
def test_what_was_saved_from_tensors_is_loaded_into_others(
    tmp_path: Path, make: Callable[[Any], Layers], dtype: str
) -> None:
    kind = getattr(torch, dtype)
    source, target = filled(make(kind)), make(kind)
    block_bytes = sum(layer[0].numel() * layer.element_size() for layer in source)
    saved, places, hashes = [7, 0, 11, 3, 4], [2, 9, 5, 0, 8], random_hashes(5)
    with Rig(tmp_path, dram_blocks=4, nvme_blocks=16, block_bytes=block_bytes) as rig:
        space = rig.space(kv_dtype=dtype)
        from_ = Fragments.from_arrays(source, saved)
        assert from_.bytes_per_block == block_bytes
        assert statuses_of(rig.store.save(space, hashes[:4], from_.select(slice(4)))) == [OK] * 4
        assert statuses_of(rig.store.save(space, hashes[4:], from_.select(slice(4, 5)))) == [OK]
        rig.reopen()  # and from the disk, not from DRAM
        into = Fragments.from_arrays(target, torch.tensor(places))
        assert statuses_of(rig.store.load(rig.space(kv_dtype=dtype), hashes, into)) == [OK] * 5
    for source_layer, target_layer in zip(source, target, strict=True):
        for old, new in zip(saved, places, strict=True):
            assert raw_bytes(target_layer[new]) == raw_bytes(source_layer[old])
        for untouched in set(range(BLOCKS)) - set(places):
            assert not any(raw_bytes(target_layer[untouched])), "a block that was not asked for was written"


def test_a_miss_leaves_the_tensor_alone(tmp_path: Path) -> None:
    target = torch.full((4, 512), 3.0, dtype=torch.bfloat16)
    with Rig(tmp_path, block_bytes=1024) as rig:
        job = rig.store.load(rig.space(), random_hashes(4), Fragments.from_blocks(target))
        assert statuses_of(job) == [MISS] * 4
    assert bool((target == 3.0).all())


def test_the_tensors_live_as_long_as_the_job(tmp_path: Path) -> None:
    hashes, found = random_hashes(4), torch.zeros(4, 2048, dtype=torch.int16)
    with Rig(tmp_path, block_bytes=4096) as rig:
        job = rig.store.save(
            rig.space(), hashes, Fragments.from_blocks(torch.ones(4, 2048, dtype=torch.int16))
        )
        assert statuses_of(job) == [OK] * 4
        assert statuses_of(rig.store.load(rig.space(), hashes, Fragments.from_blocks(found))) == [OK] * 4
    assert bool((found == 1).all())


def test_blocks_that_are_not_contiguous_are_refused() -> None:
    whole = torch.zeros(BLOCKS, HEADS, TOKENS, DIM)
    with pytest.raises(ArgumentError, match="not contiguous"):
        Fragments.from_arrays([whole.transpose(1, 2)], [0])
    with pytest.raises(ArgumentError, match="within"):
        Fragments.from_arrays([whole], [BLOCKS])
