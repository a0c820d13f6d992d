"""`tierkv verify` and `tierkv inspect` on what a replay left behind, whole and damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tierkv.cli import main
from tierkv.config import NvmeConfig
from tierkv.tiers.nvme import NvmeTier

BLOCK_BYTES = 8192
UNIQUE_BLOCKS = 39 + 2 * 31  # of two sessions and three turns: the common head, and each session's own blocks


@pytest.fixture
def stores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Path]:
    """The directories of an NVMe and of a shared tier, each holding all blocks."""
    places = {"nvme": tmp_path / "nvme", "dfs": tmp_path / "dfs"}
    arguments = [
        "replay", "--sessions", "2", "--turns", "3", "--block-bytes", str(BLOCK_BYTES), "--dram-blocks", "200",
        "--nvme-blocks", "300", "--nvme-dir", str(places["nvme"]), "--dfs-dir", str(places["dfs"]), "--json", "-",
    ]  # fmt: skip
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["unique_blocks"] == UNIQUE_BLOCKS
    return places


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main([*arguments, "--json", "-"])
    return status, json.loads(capsys.readouterr().out)


def damage(kind: str, directory: Path, blocks: int) -> None:
    """Flips one bit in each of some blocks."""
    if kind == "nvme":
        with (directory / "slots.dat").open("r+b") as file:
            flipped = 0
            for start in range(0, file.seek(0, 2), BLOCK_BYTES):
                file.seek(start)
                content = bytearray(file.read(BLOCK_BYTES))
                if any(content) and flipped < blocks:
                    content[100] ^= 4
                    file.seek(start)
                    file.write(content)
                    flipped += 1
        assert flipped == blocks
        return
    files = sorted(path for path in (directory / "v1").rglob("*") if path.is_file() and len(path.name) == 64)
    for path in files[:blocks]:
        content = bytearray(path.read_bytes())
        content[5000] ^= 4
        path.write_bytes(content)


@pytest.mark.parametrize("kind", ["nvme", "dfs"])
def test_whole_directories_are_good(
    kind: str, stores: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = run(capsys, "verify", str(stores[kind]))
    assert status == 0
    assert (found["kind"], found["checked"], found["good"], found["bad"]) == (
        kind,
        UNIQUE_BLOCKS,
        UNIQUE_BLOCKS,
        0,
    )
    assert found["reasons"] == {}
    status, found = run(capsys, "inspect", str(stores[kind]))
    assert status == 0
    (keyspace,) = found["keyspaces"]
    assert keyspace["blocks"] == UNIQUE_BLOCKS
    assert keyspace["spec"]["model"] == "tierkv-replay"
    assert keyspace["bytes"] >= UNIQUE_BLOCKS * BLOCK_BYTES
    for name in ("verify", "inspect"):
        assert main([name, str(stores[kind])]) == 0
        said = capsys.readouterr()
        assert "tierkv-replay" in said.out
        assert said.err == ""


@pytest.mark.parametrize("kind", ["nvme", "dfs"])
def test_flipped_bits_are_status_1_and_can_be_repaired(
    kind: str, stores: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(kind, stores[kind], 3)
    status, found = run(capsys, "verify", str(stores[kind]))
    assert status == 1
    assert (found["good"], found["bad"], sum(found["reasons"].values())) == (UNIQUE_BLOCKS - 3, 3, 3)
    assert main(["verify", str(stores[kind]), "--repair"]) == 1
    assert "3 bad" in capsys.readouterr().out
    status, found = run(capsys, "verify", str(stores[kind]))
    assert (status, found["checked"], found["bad"]) == (0, UNIQUE_BLOCKS - 3, 0)


def test_a_directory_in_use_is_an_error_for_verify_and_not_for_inspect(
    stores: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    tier = NvmeTier(NvmeConfig(directory=str(stores["nvme"]), capacity_bytes=64 << 20))
    try:
        assert main(["verify", str(stores["nvme"])]) == 2
        said = capsys.readouterr()
        assert said.err.startswith("tierkv: ")
        assert len(said.err.splitlines()) == 1
    finally:
        tier.close()


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_directory_of_something_else_is_an_error(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8")
    assert main([command, str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
