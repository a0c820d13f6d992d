"""`tierkv bench agent` runs, and its JSON has the agreed names. The figures are nobody's test."""

from __future__ import annotations

import json
from pathlib import Path

from tierkv.cli import main


def test_the_agent_is_measured(tmp_path: Path) -> None:
    target = tmp_path / "agent.json"
    assert (
        main(["bench", "agent", "--quick", "--rounds", "1", "--json", str(target), "--entries", "6000"]) == 0
    )
    load, match = json.loads(target.read_text())["results"]
    assert (load["name"], load["block_bytes"], load["unit"]) == ("load_2MiB_vs_in_process", 2 << 20, "GB/s")
    assert load["ratio"] == load["value"] / load["limit"]
    assert (match["name"], match["entries"], match["hashes"], match["unit"]) == (
        "match_5000",
        6000,
        5000,
        "ms",
    )
    assert 0 < match["p50_ms"] <= match["p99_ms"]
