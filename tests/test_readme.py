"""The README's program runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN_TIMEOUT_S = 60


def test_the_program_in_the_readme_runs(tmp_path: Path) -> None:
    programs = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S
    )
    assert len(programs) == 1
    program = tmp_path / "program.py"
    program.write_text(programs[0], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)], cwd=tmp_path, capture_output=True, text=True,
        timeout=RUN_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kv-cache").is_dir(), "the NVMe tier left no files"
    assert done.stderr == ""
