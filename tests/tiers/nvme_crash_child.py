"""Writes and frees blocks in a directory until it is killed, telling its parent what was acknowledged.

Lines on stdout, flushed: 'W hex' a block's write was OK; 'F hex' the block is about to be freed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from nvme_harness import open_tier, write

from tierkv.testing.buffers import make_space
from tierkv.types import BlockStatus


def main(directory: str, seed: int, sync: str) -> None:
    random = np.random.default_rng(seed)
    spaces = [make_space(4096), make_space(20_000, 2, group="window")]
    tier = open_tier(Path(directory), 512, sync=sync)
    held: list[tuple[int, np.ndarray, int]] = []  # type: ignore[type-arg]
    digests = [space.digest for space in spaces]
    for batch in tier.recover():
        number = digests.index(batch.space.digest())
        held += [(number, row, slot) for row, slot in zip(batch.hashes, batch.slots.tolist(), strict=True)]
    print("ready", flush=True)
    while True:
        number = int(random.integers(2))
        space, count = spaces[number], int(random.integers(1, 20))
        slots = tier.allocate(space, count)
        if slots is None or random.random() < 0.3:
            random.shuffle(held)  # type: ignore[arg-type]
            gone, held = held[: len(held) // 2], held[len(held) // 2 :]
            print("\n".join(f"F {row.tobytes().hex()}" for _, row, _ in gone), flush=True)
            for which in (0, 1):
                mine = [(row, slot) for owner, row, slot in gone if owner == which]
                if mine:
                    rows = np.array([row for row, _ in mine])
                    tier.free(spaces[which], rows, np.array([slot for _, slot in mine], np.uint32))
        if slots is None:
            continue
        hashes = random.integers(0, 256, (count, 32), dtype=np.uint8)
        statuses = write(tier, space, hashes, slots)
        assert set(statuses) == {BlockStatus.OK}
        print("\n".join(f"W {row.tobytes().hex()}" for row in hashes), flush=True)
        held += [(number, row, slot) for row, slot in zip(hashes, slots.tolist(), strict=True)]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
