"""tierkv.connect(): an agent of one's own, which ends with whoever started it, and one that runs already."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from runtime_harness import TIMEOUT_S, Agent, eventually, load_checked, make_spec, names, python, save

import tierkv
from tierkv import DfsConfig, DramConfig, NvmeConfig, StoreConfig
from tierkv.agent.embedded import OwnAgentStore

SMALL = StoreConfig(dram=DramConfig(capacity_bytes=8 << 20, first_touch="never", lock_memory="off"))
OWNER = """
import sys, tierkv
from tierkv import *
store = tierkv.connect(config=StoreConfig(dram=DramConfig(capacity_bytes=8 << 20)))
print(store.agent_pid, flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_importing_tierkv_does_not_import_the_agent() -> None:
    code = "import sys, tierkv; sys.exit(any(name.startswith('tierkv.agent') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT_S, check=False).returncode == 0


def test_an_agent_of_ones_own_serves_and_ends_with_close(tmp_path: Path) -> None:
    with tierkv.connect(config=SMALL, name="test") as store:
        assert isinstance(store, OwnAgentStore)
        (directory,) = tmp_path.iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
        space = store.open(make_spec())
        assert not save(store, space, names(0, 16)).any()
        assert load_checked(store, space, names(0, 16)).all()
        pid = store.agent_pid
    assert not psutil.pid_exists(pid)
    assert not list(tmp_path.iterdir())
    store.close()


def test_closing_writes_dram_below(tmp_path: Path) -> None:
    nvme = NvmeConfig(directory=str(tmp_path / "nvme"), capacity_bytes=8 << 20)
    config = StoreConfig(dram=SMALL.dram, nvme=nvme)
    for saves in (True, False):
        with tierkv.connect(config=config) as store:
            space = store.open(make_spec())
            if saves:
                assert not save(store, space, names(0, 16)).any()
            assert load_checked(store, space, names(0, 16)).all()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None])
def test_the_agent_ends_with_its_owner_however_that_ends(tmp_path: Path, how: int | None) -> None:
    with python(OWNER) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        if how is None:
            assert owner.stdin is not None
            owner.stdin.write("\n")  # without close()
            owner.stdin.flush()
        else:
            owner.send_signal(how)
        owner.wait(TIMEOUT_S)
        eventually(lambda: gone(pid), "the agent ends")
        eventually(lambda: not list(tmp_path.iterdir()), "its directory is removed")


def test_the_agent_outlives_the_thread_that_started_it() -> None:
    made: list[tierkv.agent.client.AgentStore] = []
    thread = threading.Thread(target=lambda: made.append(tierkv.connect(config=SMALL)))
    thread.start()
    thread.join(TIMEOUT_S)
    with made[0] as store:
        assert store.stats().tiers["dram"].capacity_bytes == 8 << 20


def test_a_killed_agent_leaves_misses_and_nothing_behind(tmp_path: Path) -> None:
    with tierkv.connect(config=SMALL) as store:
        assert isinstance(store, OwnAgentStore)
        space = store.open(make_spec())
        assert not save(store, space, names(0, 4)).any()
        os.kill(store.agent_pid, signal.SIGKILL)
        assert not load_checked(store, space, names(0, 4)).any()
        assert store.match(space, names(0, 4)).length == 0
    assert not list(tmp_path.iterdir())


def test_an_agent_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    config = StoreConfig(dram=SMALL.dram, dfs=DfsConfig(directory=str(tmp_path / "missing")))
    with pytest.raises(tierkv.StorageError, match=r"last words:\n.*missing"):
        tierkv.connect(config=config)
    assert not list(tmp_path.iterdir())
    with pytest.raises(tierkv.StorageError, match="did not come up within"):
        tierkv.connect(config=SMALL, timeout_s=0.001)
    assert not list(tmp_path.iterdir())


def test_a_long_temporary_path_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with tierkv.connect(config=SMALL) as store:
        assert store.stats().tiers
    assert not list(deep.iterdir())


@pytest.mark.parametrize("prefix", ["", "unix:"])
def test_attaching_to_an_agent_that_runs(tmp_path: Path, prefix: str) -> None:
    path = tmp_path / "agent.sock"
    with Agent("--socket", str(path), "--dram", "8MiB") as agent:
        agent.wait_serving()
        with tierkv.connect(f"{prefix}{path}") as first, tierkv.connect(f"{prefix}{path}") as second:
            assert not save(first, first.open(make_spec()), names(0, 4)).any()
            assert load_checked(second, second.open(make_spec()), names(0, 4)).all()
        assert agent.end() == 0


def test_wrong_addresses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(tierkv.TierKVError, match="no agent answers"):
        tierkv.connect(f"unix:{tmp_path}/nobody.sock")
    for address in ("", "unix:", "tcp://localhost:1"):
        with pytest.raises(tierkv.ArgumentError, match="not an address"):
            tierkv.connect(address)
    with pytest.raises(tierkv.ArgumentError, match="config"):
        tierkv.connect(f"unix:{tmp_path}/a.sock", config=SMALL)
