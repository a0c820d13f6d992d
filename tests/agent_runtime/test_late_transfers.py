"""A new owner of an NVMe directory waits for what a killed one has under way: its open slot file tells."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest
from runtime_harness import TIMEOUT_S

from tierkv import StorageError
from tierkv.clock import SystemClock
from tierkv.config import NvmeConfig
from tierkv.tiers import nvme_directory
from tierkv.tiers.nvme import NvmeTier


@pytest.fixture
def late_transfer(tmp_path: Path) -> int:
    """An open slot file, locked as that of a tier whose process is gone while a request of its still holds it."""
    open_tier(tmp_path).close()
    fd = os.open(tmp_path / "nvme" / nvme_directory.SLOTS_NAME, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def open_tier(directory: Path) -> NvmeTier:
    config = NvmeConfig(directory=str(directory / "nvme"), capacity_bytes=1 << 20, slab_bytes=1 << 20)
    return NvmeTier(config, clock=SystemClock())


def test_opening_waits_until_the_transfer_has_ended(tmp_path: Path, late_transfer: int) -> None:
    opened = threading.Event()

    def work() -> None:
        tier = open_tier(tmp_path)
        opened.set()
        tier.close()

    opener = threading.Thread(target=work)
    opener.start()
    assert not opened.wait(0.2)
    os.close(late_transfer)
    assert opened.wait(TIMEOUT_S)
    opener.join(TIMEOUT_S)


def test_a_transfer_that_never_ends_is_an_error_that_says_so(
    tmp_path: Path, late_transfer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme_directory, "_LATE_TIMEOUT_S", 0.05)
    try:
        with pytest.raises(StorageError, match="killed process"):
            open_tier(tmp_path)
    finally:
        os.close(late_transfer)
    open_tier(tmp_path).close()
