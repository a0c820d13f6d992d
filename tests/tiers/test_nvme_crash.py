"""kill -9 while blocks are written and freed: what was acknowledged is there, and every byte of what is
there is right."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from nvme_harness import open_tier, read, residents

from tierkv.testing.buffers import make_space
from tierkv.tiers.nvme import verify_directory
from tierkv.types import BlockStatus

SPACES = [make_space(4096), make_space(20_000, 2, group="window")]
ROUNDS = 6


@pytest.mark.crash
@pytest.mark.parametrize("sync", ["power", "process"])
def test_kill_9_at_any_moment_loses_only_what_was_not_acknowledged(tmp_path: Path, sync: str) -> None:
    moments = random.Random(sync)
    expected: set[bytes] = set()  # acknowledged and not freed
    for turn in range(ROUNDS):
        written, freed = run_and_kill(tmp_path, turn, sync, lines=moments.randint(0, 400))
        expected = (expected | written) - freed
        # (what was being freed may be there or not)
        tier = open_tier(tmp_path, 512, sync=sync)
        assert tier.dropped_entries == {}
        found = residents(tier)
        names = {block_hash for _, block_hash in found}
        assert expected <= names, f"round {turn}: {len(expected - names)} acknowledged blocks are lost"
        for space in SPACES:
            mine = [(h, slot) for (digest, h), slot in found.items() if digest == space.digest]
            hashes = np.frombuffer(b"".join(h for h, _ in mine), np.uint8).reshape(-1, 32)
            slots = np.array([slot for _, slot in mine], np.uint32)
            assert set(read(tier, space, hashes, slots)) <= {BlockStatus.OK}
        sizes = {SPACES[0].digest: 4096, SPACES[1].digest: 20_480}
        assert tier.used_bytes() == sum(sizes[digest] for digest, _ in found)
        tier.close()
        expected = names  # what was not acknowledged but is there has to stay from now on
    report = verify_directory(tmp_path / "nvme")
    assert (report.bad, report.checked) == (0, len(expected))
    assert len(expected) > 0


def run_and_kill(directory: Path, seed: int, sync: str, lines: int) -> tuple[set[bytes], set[bytes]]:
    """Runs the child until it has said so many lines, kills it, and returns what it wrote and what it
    freed."""
    child = Path(__file__).with_name("nvme_crash_child.py")
    command = [sys.executable, str(child), str(directory), str(seed), sync]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        said = []
        for line in process.stdout:
            said.append(line)
            if len(said) >= lines:
                break
        process.kill()
        said += process.stdout.readlines()
        process.wait(60)
    written: set[bytes] = set()
    freed: set[bytes] = set()
    for line in said:
        kind, _, name = line.strip().partition(" ")
        if len(name) != 64:  # the pipe's last line may be cut short
            continue
        if kind == "W":
            written.add(bytes.fromhex(name))
        else:
            freed.add(bytes.fromhex(name))
    return written, freed
