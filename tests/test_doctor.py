"""doctor: what it says agrees with the machine, and every complaint comes with a way out."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tierkv import doctor
from tierkv._native import crc32c_implementation
from tierkv.doctor import Finding, examine


def by_subject(findings: list[Finding]) -> dict[str, Finding]:
    found = {finding.subject: finding for finding in findings}
    assert len(found) == len(findings)
    return found


def test_every_complaint_says_what_to_change(tmp_path: Path) -> None:
    for finding in examine(tmp_path):
        assert finding.state in ("ok", "degraded", "missing")
        assert finding.found
        assert bool(finding.advice) == (finding.state != "ok"), finding
        assert "could not be examined" not in finding.found, finding


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    examine(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_directory_is_looked_at_only_when_asked(tmp_path: Path) -> None:
    plain, full = by_subject(examine()), by_subject(examine(tmp_path))
    assert full.keys() - plain.keys() == {"directory", "O_DIRECT", "free space"}
    assert full["directory"].state == "ok"


def test_findings_agree_with_the_machine(tmp_path: Path) -> None:
    found = by_subject(examine(tmp_path))
    assert os.uname().release in found["kernel"].found
    assert crc32c_implementation() in found["checksums"].found or found["checksums"].state == "degraded"
    assert (found["FUSE"].state == "ok") == os.access("/dev/fuse", os.R_OK | os.W_OK)
    thp = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    granted = thp.exists() and "[never]" not in thp.read_text()
    assert (found["huge pages"].state == "ok") == granted
    assert str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) in found["open files"].found


def test_a_missing_directory_and_one_without_direct_io(tmp_path: Path) -> None:
    missing = by_subject(examine(tmp_path / "none"))
    assert missing["directory"].state == "missing"
    assert missing["O_DIRECT"].state != "ok"
    if Path("/proc/self/mounts").exists():
        assert by_subject(examine("/proc"))["O_DIRECT"].state != "ok"


def test_limits_show_as_complaints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("always madvise [never]")
    (tmp_path / "shmem_enabled").write_text("always within_size advise [never] deny force")
    (tmp_path / "memory.max").write_text("1048576")
    (tmp_path / "cpu.max").write_text("50000 100000")
    monkeypatch.setattr(doctor, "_THP", tmp_path)
    monkeypatch.setattr(doctor, "_CGROUP", tmp_path)
    found = by_subject(examine())
    assert found["huge pages"].state == "degraded"
    assert "echo madvise" in found["huge pages"].advice
    assert found["memory limit"].state == "degraded"
    assert "1.0 MiB" in found["memory limit"].found
    assert found["CPU cores"].state == "degraded"
    assert "0.5" in found["CPU cores"].found


def test_low_limits_of_the_process(tmp_path: Path) -> None:
    code = (
        "import ctypes, resource\n"
        "libc = ctypes.CDLL(None)\n"
        "header = (ctypes.c_uint32 * 2)(0x20080522, 0); sets = (ctypes.c_uint32 * 6)()\n"
        "libc.capget(header, sets); sets[0] &= ~(1 << 14); sets[1] &= ~(1 << 14); libc.capset(header, sets)\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        "from tierkv.doctor import examine\n"
        "found = {finding.subject: finding for finding in examine()}\n"
        "assert found['locked memory'].state == 'degraded', found['locked memory']\n"
        "assert 'CAP_IPC_LOCK' in found['locked memory'].advice\n"
        "assert found['open files'].state == 'degraded', found['open files']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_one_broken_check_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Finding:
        raise RuntimeError("odd machine")

    monkeypatch.setattr(doctor, "_fuse", broken)
    found = by_subject(examine())
    assert "odd machine" in found["FUSE"].found
    assert len(found) > 10
