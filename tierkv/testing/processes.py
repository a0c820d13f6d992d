"""What tests do to other processes, such as an agent's."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tierkv.testing.stores import eventually


def stand_still(pid: int) -> None:
    """SIGSTOP, and waits until every thread stands still: until one has heard of it, the others go on."""
    os.kill(pid, signal.SIGSTOP)

    def still() -> bool:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

    eventually(still, f"process {pid} stops")
