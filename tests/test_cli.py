"""The command line: exit statuses, one clear line for each error, and nothing but JSON where JSON was asked for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tierkv.cli import main

TIMEOUT_S = 90
SMALL = ["replay", "--sessions", "2", "--turns", "3", "--block-bytes", "4096", "--dram-blocks", "80"]
RESULT_KEYS = {
    "trace", "requests", "blocks", "unique_blocks", "prefix_hit_rate", "hit_blocks", "hits", "tiers", "wrong_blocks",
    "failed_loads", "dropped_saves", "match_ms", "load_ms", "seconds", "config", "machine", "series",
}  # fmt: skip
TIER_KEYS = {
    "hit_blocks", "read_bytes", "read_gb_s", "written_bytes", "write_gb_s", "evicted_blocks", "capacity_blocks",
    "blocks",
}  # fmt: skip


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tierkv", *arguments]


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=TIMEOUT_S, check=False, **options
    )


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("tierkv ")
    for name in ("replay", "bench", "verify", "inspect", "doctor"):
        with pytest.raises(SystemExit) as end:
            main([name, "--help"])
        assert end.value.code == 0
        assert "usage: tierkv" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["bench"],
        ["bench", "moon"],
        ["verify"],
        ["replay", "--dram-blocks", "0"],
        ["replay", "--dram", "lots"],
        ["replay", "--dram", "1GiB", "--dram-blocks", "5"],
        ["replay", "--eviction", "mood"],
        ["replay", "--speed-up", "fast"],
    ],
)
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "usage: tierkv" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["replay", "nowhere.jsonl"], "nowhere.jsonl"),
        ([*SMALL, "--nvme-dir", "somewhere"], "--nvme-blocks"),
        ([*SMALL, "--dfs", "1GiB"], "--dfs-dir"),
        ([*SMALL, "--json", "/proc/nothing/here.json"], "/proc/nothing"),
        ([*SMALL, "--layers", "3"], "layers"),
        ([*SMALL, "--speed-up", "-1"], "speed-up"),
        ([*SMALL, "--seed", "-1"], "seed"),
        ([*SMALL, "--free-ahead", "0.7"], "free-ahead"),
        (["replay", "--dram", "4096", "--block-bytes", "8192"], "8192"),
        (["verify", "nowhere"], "nowhere"),
        (["inspect", "nowhere"], "nowhere"),
    ],
)
def test_an_error_is_one_clear_line_and_status_2(
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("tierkv: ")
    assert len(said.err.splitlines()) == 1
    assert says in said.err


def test_a_bad_trace_names_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}\noops\n')
    assert main(["replay", str(trace)]) == 2
    assert f"{trace}:2:" in capsys.readouterr().err


def test_replay_json_on_standard_output_is_all_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json", "-"]) == 0
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert result.keys() >= RESULT_KEYS
    assert result["requests"] == 6
    assert result["wrong_blocks"] == 0
    assert result["hit_blocks"] == sum(result["hits"].values()) > 0
    assert set(result["match_ms"]) >= {"p50", "p99"}
    for tier in result["tiers"].values():
        assert tier.keys() >= TIER_KEYS
    assert result["tiers"]["dram"]["capacity_blocks"] == 80
    assert said.err == ""


def test_three_tiers_a_report_and_a_temporary_directory_that_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    report, target = tmp_path / "out" / "report.html", tmp_path / "out" / "result.json"
    arguments = [
        "--nvme-blocks",
        "60",
        "--dfs-dir",
        str(tmp_path / "dfs"),
        "--report",
        str(report),
        "--json",
        str(target),
    ]
    assert main([*SMALL, *arguments]) == 0
    said = capsys.readouterr()
    assert "temporary directory" in said.out
    assert "prefix-hit rate" in said.out
    result = json.loads(target.read_text())
    assert result["wrong_blocks"] == 0
    assert set(result["tiers"]) == {"dram", "nvme", "dfs"}
    assert result["tiers"]["dfs"]["capacity_blocks"] is None
    assert result["tiers"]["nvme"]["capacity_blocks"] == 60
    assert result["tiers"]["dfs"]["written_bytes"] > 0
    assert "<svg" in report.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dfs", "out"]


def test_a_trace_file_and_a_second_run_that_finds_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": n, "input_length": 2048, "output_length": 1, "hash_ids": [0, 1, 2, 10 + n]}
        for n in range(20)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["replay", str(trace), "--dram-blocks", "8", "--nvme-blocks", "50", "--block-bytes", "4096",
                 "--nvme-dir", str(tmp_path / "nvme"), "--limit", "15", "--json", "-"]  # fmt: skip
    assert main(arguments) == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["requests"], first["unique_blocks"], first["hit_blocks"]) == (15, 18, 14 * 3)
    assert main(arguments) == 0
    second = json.loads(capsys.readouterr().out)
    assert second["tiers"]["nvme"]["blocks_at_start"] == 18
    assert second["prefix_hit_rate"] == 1.0
    assert second["wrong_blocks"] == 0


@pytest.mark.parametrize("module", ["jinja2", "matplotlib"])
def test_a_report_without_its_packages_says_what_to_install(module: str, tmp_path: Path) -> None:
    program = f"import sys; sys.modules[{module!r}] = None; from tierkv.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, *SMALL, "--report", "r.html"], cwd=tmp_path, capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "tierkv[report]" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_closed_pipe_is_no_traceback() -> None:
    process = subprocess.Popen(command(*SMALL, "--json", "-"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    error = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(TIMEOUT_S) == 128 + signal.SIGPIPE
    assert error == ""


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_replay_ends_cleanly(sent: signal.Signals, status: int, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command(*SMALL, "--nvme-blocks", "60", "--speed-up", "0.001"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    assert "temporary directory" in process.stdout.readline()  # from here on there is something to clean up
    assert [path.name.startswith("tierkv-nvme-") for path in tmp_path.iterdir()] == [True]
    process.send_signal(sent)
    _, error = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == status
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_the_package_runs_as_a_module() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("tierkv ")


def test_doctor_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--dir", str(tmp_path), "--json", "-"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {"io_uring", "O_DIRECT", "free space"} <= {finding["subject"] for finding in findings}
    for finding in findings:
        assert finding["state"] in ("ok", "degraded", "missing")
    assert main(["doctor"]) == 0
    said = capsys.readouterr()
    assert "io_uring" in said.out
    assert said.err == ""
