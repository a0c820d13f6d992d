"""`tierkv agent`: what it takes, says and logs, how it ends, and what it tells systemd."""

from __future__ import annotations

import argparse
import json
import signal
import socket
import stat
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from runtime_harness import TIMEOUT_S, Agent, load_checked, make_spec, names, save

from tierkv.agent.client import AgentStore
from tierkv.cli import main
from tierkv.commands.agent import _serve
from tierkv.config import AgentConfig, DramConfig, NvmeConfig, StoreConfig
from tierkv.store import Store


def small(directory: Path, *more: str) -> list[str]:
    return ["--socket", str(directory / "agent.sock"), "--dram", "8MiB", *more]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("keep", [[], ["--keep-dram"]])
def test_it_serves_until_a_signal_and_ends_with_0(tmp_path: Path, how: int, keep: list[str]) -> None:
    with Agent(*small(tmp_path, *keep)) as agent:
        agent.wait_serving()
        path = tmp_path / "agent.sock"
        assert agent.said == [f"serving {path}"]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with AgentStore(str(path)) as store:
            space = store.open(make_spec())
            assert not save(store, space, names(0, 8)).any()
            assert load_checked(store, space, names(0, 8)).all()
        assert agent.end(how) == 0
        assert not path.exists()


def test_ending_writes_dram_to_the_next_tier(tmp_path: Path) -> None:
    arguments = small(tmp_path, "--nvme-dir", str(tmp_path / "nvme"), "--nvme", "8MiB")
    for saves in (True, False):
        with Agent(*arguments) as agent:
            agent.wait_serving()
            with AgentStore(str(tmp_path / "agent.sock")) as store:
                space = store.open(make_spec())
                if saves:
                    assert not save(store, space, names(0, 40)).any()
                assert load_checked(store, space, names(0, 40)).all()
            assert agent.end() == 0


def test_it_ends_when_nobody_was_attached_for_long_enough(tmp_path: Path) -> None:
    settings = {
        "socket": str(tmp_path / "agent.sock"), "store": {"dram": {"capacity_bytes": "8MiB"}}, "end_when_idle_s": 0.5,
    }  # fmt: skip
    (tmp_path / "agent.json").write_text(json.dumps(settings))
    with Agent("--config", str(tmp_path / "agent.json")) as agent:
        agent.wait_serving()
        with AgentStore(settings["socket"]) as store:  # type: ignore[arg-type]
            with pytest.raises(subprocess.TimeoutExpired):
                agent.process.wait(1.5)
            assert store.attached
        assert agent.process.wait(TIMEOUT_S) == 0
        assert not (tmp_path / "agent.sock").exists()


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text(
        'socket = "/nowhere/agent.sock"\nmax_clients = 1\n[store.dram]\ncapacity_bytes = "4MiB"\n'
        f'[store.nvme]\ndirectory = "{tmp_path}/nvme"\ncapacity_bytes = "4MiB"\n'
    )
    with Agent("--config", str(file), *small(tmp_path, "--nvme", "16MiB")) as agent:
        agent.wait_serving()
        with AgentStore(str(tmp_path / "agent.sock")) as store:
            tiers = store.stats().tiers
            assert tiers["dram"].capacity_bytes == 8 << 20
            assert tiers["nvme"].capacity_bytes == 16 << 20
        assert agent.end() == 0


def test_the_log_is_json_where_that_is_asked_for(tmp_path: Path) -> None:
    with Agent(*small(tmp_path, "--log-format", "json", "--log-level", "info")) as agent:
        agent.wait_serving()
        assert agent.end() == 0
        lines = [json.loads(line) for line in agent.errors]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    assert any("serving" in line["message"] and line["level"] == "info" for line in lines)


def test_metrics_and_health_are_served(tmp_path: Path) -> None:
    with Agent(*small(tmp_path, "--metrics-port", "0", "--log-format", "json")) as agent:
        agent.wait_serving()
        while not (found := [line for line in agent.errors if "/metrics" in line]):
            agent._read(TIMEOUT_S)
        address = json.loads(found[0])["message"].split()[-1]
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
            assert b"tierkv" in answer.read()
        with urllib.request.urlopen(address.replace("/metrics", "/healthz"), timeout=TIMEOUT_S) as answer:
            assert answer.status == 200
        assert agent.end() == 0


def test_health_is_told_until_what_dram_holds_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draining, go_on, flush = threading.Event(), threading.Event(), Store.flush

    def slow_flush(store: Store, timeout_s: float = 60.0) -> bool:
        draining.set()
        return go_on.wait(TIMEOUT_S) and flush(store, timeout_s)

    class Told:
        """Signals: it is told to end at once."""

        def started(self) -> None:
            pass

        def wait(self, fds: list[int], timeout_s: float | None = None) -> list[int]:
            return fds

    monkeypatch.setattr(Store, "flush", slow_flush)
    caplog.set_level("INFO")
    slab_bytes = 1 << 20
    nvme = NvmeConfig(directory=str(tmp_path / "nvme"), capacity_bytes=slab_bytes, slab_bytes=slab_bytes)
    store = StoreConfig(dram=DramConfig(capacity_bytes=slab_bytes, slab_bytes=slab_bytes), nvme=nvme)
    config = AgentConfig(store=store, socket=str(tmp_path / "agent.sock"), metrics_port=0)
    arguments = argparse.Namespace(arena_fd=None, roster_fd=None, ready_fd=None, end_with_fd=None)
    serving = threading.Thread(target=_serve, args=(config, arguments, Told()))
    serving.start()
    try:
        assert draining.wait(TIMEOUT_S)
        (metrics,) = [record.message.split()[-1] for record in caplog.records if "/metrics" in record.message]
        with pytest.raises(urllib.error.HTTPError, match="503") as told:
            urllib.request.urlopen(metrics.replace("/metrics", "/healthz"), timeout=TIMEOUT_S)
        with told.value as answer:
            assert "stopping" in json.loads(answer.read())["reasons"][0]
        with urllib.request.urlopen(metrics, timeout=TIMEOUT_S) as answer:
            assert b"tierkv_accepting 0.0" in answer.read()
    finally:
        go_on.set()
        serving.join(TIMEOUT_S)
    assert not serving.is_alive()
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(metrics, timeout=TIMEOUT_S)


@pytest.mark.parametrize("keep", [[], ["--keep-dram"]])
@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told(tmp_path: Path, keep: list[str], abstract: bool) -> None:
    address = f"\0{tmp_path}/notify" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(address)
        receiver.settimeout(TIMEOUT_S)
        variable = {"NOTIFY_SOCKET": address.replace("\0", "@")}
        with Agent(*small(tmp_path, *keep), environment=variable) as agent:
            assert receiver.recv(64) == b"READY=1"
            agent.wait_serving()
            assert agent.end() == 0
            assert receiver.recv(64) == b"STOPPING=1"
            receiver.setblocking(False)
            with pytest.raises(BlockingIOError):
                receiver.recv(64)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--socket"),
        (["--socket", "/tmp/x"], "--dram"),
        (["--config", "/nowhere.toml"], "/nowhere.toml"),
        (["--socket", "/nowhere/s", "--dram", "1MiB"], "/nowhere"),
        (["--socket", "/" + "x" * 200, "--dram", "1MiB"], "socket is longer"),
        (["--socket", "s", "--dram", "1MiB", "--nvme", "1MiB"], "--nvme-dir"),
        (["--socket", "s", "--dram", "1MiB", "--dfs", "1MiB"], "--dfs-dir"),
        (["--socket", "s", "--dram", "1000"], "dram.capacity_bytes"),
        (["--socket", "s", "--dram", "1MiB", "--dfs-dir", "/nowhere/dfs"], "/nowhere/dfs"),
        (["--socket", "s", "--dram", "1MiB", "--metrics-port", "99999"], "metrics_port"),
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
    assert main(["agent", *arguments]) == 2
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("tierkv:")]
    assert len(lines) == 1
    assert says in lines[0]


@pytest.mark.parametrize("keep", [[], ["--keep-dram"]])
def test_a_second_agent_at_the_same_socket_is_refused(tmp_path: Path, keep: list[str]) -> None:
    with Agent(*small(tmp_path)) as agent:
        agent.wait_serving()
        with Agent(*small(tmp_path, *keep)) as second:
            assert second.end(0) == 2
            assert any("another agent serves" in line for line in second.errors)
        with AgentStore(str(tmp_path / "agent.sock")) as store:
            assert store.stats().tiers
        assert agent.end() == 0
