"""Every benchmark runs, and its JSON has the agreed shape. The figures themselves are nobody's test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tierkv.cli import main

ROOT = Path(__file__).resolve().parent.parent
KEYS = {"name", "block_bytes", "value", "limit", "ratio", "unit", "cpu_s_per_gb"}


def bench(name: str, tmp_path: Path, *more: str) -> dict[str, Any]:
    target = tmp_path / f"{name}.json"
    files = tmp_path / "files"
    arguments = ["bench", name, "--quick", "--rounds", "1", "--json", str(target), "--dir", str(files), *more]
    assert main(arguments) == 0
    if files.exists():
        assert not list(files.iterdir()), "a benchmark left files behind"
    return json.loads(target.read_text())  # type: ignore[no-any-return]


def check_shape(found: dict[str, Any]) -> None:
    assert found.keys() == {"results", "machine"}
    assert {"cpu", "cores", "memory_bytes", "kernel"} <= found["machine"].keys()
    assert found["results"]
    for result in found["results"]:
        assert result.keys() >= KEYS
        assert "batch" in result or "queue_depth" in result
        assert result["value"] > 0
        if result["limit"] is None:
            assert result["ratio"] is None
        else:
            assert result["limit"] > 0
            assert result["ratio"] > 0


@pytest.mark.parametrize("name", ["dram", "nvme", "dfs", "store"])
def test_a_tier_is_measured(name: str, tmp_path: Path) -> None:
    found = bench(name, tmp_path)
    check_shape(found)
    for result in found["results"]:
        assert result["unit"] == "GB/s"
        assert result["block_bytes"] >= 64 << 10
        assert result["cpu_s_per_gb"] >= 0
        if result["limit"] is not None:
            assert result["ratio"] == pytest.approx(result["value"] / result["limit"])


def test_look_ups_are_measured(tmp_path: Path) -> None:
    found = bench("match", tmp_path, "--entries", "3000")
    check_shape(found)
    for result in found["results"]:
        assert result["unit"] == "ms"
        assert result["entries"] == 3000
        assert result["hashes"] == 1000
        assert 0 < result["p50_ms"] <= result["p99_ms"]
        assert result["value"] == result["p50_ms"]
        assert result["bytes_per_entry"] > 0


def test_the_connectors_time_is_measured(tmp_path: Path) -> None:
    found = bench("connector", tmp_path)
    check_shape(found)
    names = [result["name"] for result in found["results"]]
    assert len(set(names)) == len(names)
    assert {result["unit"] for result in found["results"]} == {"us"}
    for result in found["results"]:
        assert (result["limit"] is not None) == result["name"].startswith("idle step")


def test_block_sizes_can_be_chosen(tmp_path: Path) -> None:
    found = bench("dram", tmp_path, "--block-bytes", "4096", "--block-bytes", "12KiB")
    assert {result["block_bytes"] for result in found["results"]} == {4096, 12288}


def test_without_fio_there_is_no_limit_and_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_: None)
    found = bench("nvme", tmp_path, "--block-bytes", "65536")
    check_shape(found)
    for result in found["results"]:
        assert result["limit"] is None
        assert "install" in result["note"]


@pytest.mark.parametrize("script", sorted((ROOT / "bench").glob("bench_*.py")), ids=lambda path: path.stem)
def test_every_benchmark_is_a_program_too(script: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(script), "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        check=False, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout
