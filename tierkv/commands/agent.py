"""`tierkv agent`: the process that owns a host's tiers and serves them to engines at a Unix socket."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierkv.commands import output
from tierkv.errors import ConfigError

if TYPE_CHECKING:
    from tierkv.agent.signals import StopSignals
    from tierkv.config import AgentConfig

log = logging.getLogger("tierkv.agent")

_NVME_HINT = "the NVMe tier needs both --nvme-dir DIR and --nvme SIZE (or nvme in the file)"
MAX_SETTINGS_BYTES = 1 << 20
_LEVELS = ("debug", "info", "warning", "error")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "agent",
        help="own this host's tiers and serve them to engines at a Unix socket",
        description="Serves one store to any number of engine processes, which map its DRAM and move their own "
        "bytes. Says 'serving PATH' when clients can attach. SIGTERM and SIGINT write what only DRAM holds to the "
        "next tier and end it with status 0. What is given here wins over FILE.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("--config", metavar="FILE", help="settings, .toml or .json (docs/configuration.md)")
    parser.add_argument("--socket", metavar="PATH", help="the Unix socket")
    tiers = parser.add_argument_group("tiers")
    size = output.size_argument
    tiers.add_argument("--dram", metavar="SIZE", type=size, help="the DRAM tier's size, such as 1GiB")
    tiers.add_argument("--nvme-dir", metavar="DIR", help="the NVMe tier's directory; made if missing")
    tiers.add_argument("--nvme", metavar="SIZE", type=size, help="the NVMe tier's size")
    tiers.add_argument("--dfs-dir", metavar="DIR", help="the shared tier's directory")
    tiers.add_argument("--dfs", metavar="SIZE", type=size, help="its size (default: no limit)")
    tiers.add_argument(
        "--keep-dram", action="store_true", default=None,
        help="let a supervisor process hold DRAM, so that a restarted agent finds its blocks",
    )  # fmt: skip
    serving = parser.add_argument_group("serving")
    serving.add_argument("--max-clients", metavar="N", type=output.count_argument)
    serving.add_argument(
        "--metrics-port", metavar="P", type=int, help="serve /metrics and /healthz there; 0: any free port"
    )
    serving.add_argument("--metrics-host", metavar="HOST", help="default 127.0.0.1")
    serving.add_argument(
        "--drain-timeout", metavar="SECONDS", type=float, help="how long ending may take to write DRAM below"
    )
    serving.add_argument("--log-format", choices=("text", "json"), default="text")
    serving.add_argument("--log-level", choices=_LEVELS, default="info")
    # Between tierkv's own processes: descriptors that were inherited.
    for name in ("--settings-fd", "--end-with-fd", "--ready-fd", "--arena-fd", "--roster-fd"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--remove-directory", help=argparse.SUPPRESS)


def settings(arguments: argparse.Namespace) -> AgentConfig:
    """The file's settings with the command line's over them; ConfigError says what is wrong or missing."""
    from tierkv.config import agent_config_from_mapping, load_agent_config

    if arguments.settings_fd is not None:
        return agent_config_from_mapping(json.loads(os.pread(arguments.settings_fd, MAX_SETTINGS_BYTES, 0)))
    given = {
        ("socket",): arguments.socket,
        ("store", "dram", "capacity_bytes"): arguments.dram,
        ("store", "nvme", "directory"): arguments.nvme_dir,
        ("store", "nvme", "capacity_bytes"): arguments.nvme,
        ("store", "dfs", "directory"): arguments.dfs_dir,
        ("store", "dfs", "capacity_bytes"): arguments.dfs,
        ("keep_dram",): arguments.keep_dram,
        ("max_clients",): arguments.max_clients,
        ("metrics_port",): arguments.metrics_port,
        ("metrics_host",): arguments.metrics_host,
        ("drain_timeout_s",): arguments.drain_timeout,
    }
    overrides: dict[str, Any] = {}
    for path, value in given.items():
        if value is not None:
            place = overrides
            for key in path[:-1]:
                place = place.setdefault(key, {})
            place[path[-1]] = value
    if arguments.config is None:
        if arguments.socket is None or arguments.dram is None:
            raise ConfigError("agent: say --socket PATH and --dram SIZE, or --config FILE")
        if (arguments.nvme is None) != (arguments.nvme_dir is None):
            raise ConfigError(f"agent: {_NVME_HINT}")
        if arguments.dfs is not None and arguments.dfs_dir is None:
            raise ConfigError("agent: --dfs needs --dfs-dir DIR")
    return load_agent_config(arguments.config, overrides)


def run(arguments: argparse.Namespace) -> int:
    """0 after SIGTERM or SIGINT; 1 when the agent kept dying; errors of the settings are raised."""
    from tierkv.agent.logs import configure_logging
    from tierkv.agent.signals import StopSignals

    config = settings(arguments)
    configure_logging(arguments.log_format, arguments.log_level)
    with StopSignals() as signals:
        if config.keep_dram and arguments.arena_fd is None:
            return _supervise(config, arguments, signals)
        try:
            status = _serve(config, arguments, signals)
        except BaseException:
            if not signals.wait(_watched(arguments), 0.0):
                raise  # who started it removes the directory, once it has read there what was wrong
            status = 1
    if arguments.remove_directory:
        remove_own_directory(Path(arguments.remove_directory))
    return status


def _watched(arguments: argparse.Namespace) -> list[int]:
    """The descriptor that tells of the end of the process for which this one works."""
    return [] if arguments.end_with_fd is None else [arguments.end_with_fd]


def _serve(config: AgentConfig, arguments: argparse.Namespace, signals: StopSignals) -> int:
    from tierkv.agent.server import AgentServer
    from tierkv.memory import Roster

    with contextlib.ExitStack() as stack:
        roster = None
        if arguments.arena_fd is not None and arguments.roster_fd is not None:
            capacity_bytes = config.store.dram.capacity_bytes
            roster = Roster(arguments.roster_fd, arguments.arena_fd, capacity_bytes)
        server = stack.enter_context(AgentServer(config, roster=roster))
        for note in server.store.notes:
            log.warning("%s", note)
        if config.metrics_port is not None:
            from tierkv.observe.metrics import MetricsServer

            metrics = stack.enter_context(MetricsServer(server, config.metrics_host, config.metrics_port))
            log.info("metrics at http://%s:%d/metrics", config.metrics_host, metrics.port)
            stack.callback(
                server.stop
            )  # before the metrics: /healthz says that it is stopping until it has stopped
        signals.started()
        print(f"serving {config.socket}", flush=True)
        if arguments.ready_fd is not None:
            _tell(arguments.ready_fd, b"ready\n")
        else:
            notify("READY=1")
        if config.end_when_idle_s is None:
            signals.wait(_watched(arguments))
        elif server.wait_until_idle(
            config.end_when_idle_s,
            lambda timeout_s: bool(signals.wait(_watched(arguments), timeout_s)) or signals.stopped,
        ):
            log.info("nobody was attached for %g s", config.end_when_idle_s)
        log.info("ending")
        if arguments.ready_fd is None:
            notify("STOPPING=1")
    return 0


def _supervise(config: AgentConfig, arguments: argparse.Namespace, signals: StopSignals) -> int:
    """The process that holds DRAM; the agent itself is its child, with the settings as they were read once."""
    from tierkv.agent.supervisor import Supervisor

    child = ["--log-format", arguments.log_format, "--log-level", arguments.log_level]
    with Supervisor(config, child, signals, notify) as supervisor:
        return supervisor.run()


def _tell(fd: int, message: bytes) -> None:
    """Tells the process that started this one."""
    with contextlib.suppress(OSError):  # it may be gone: then end_with_fd says so
        os.write(fd, message)
    os.close(fd)


def notify(state: str) -> None:
    """Tells systemd, where it asked to be told (Type=notify)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(5.0)
            sender.sendto(state.encode(), address)
    except OSError as error:
        print(f"tierkv: {address!r} could not be notified: {error.strerror}", file=sys.stderr)


def remove_own_directory(directory: Path) -> None:
    """Removes the private directory of an agent that a client started, with the files that belong there."""
    from tierkv.agent.embedded import OWN_FILES

    for name in OWN_FILES:
        with contextlib.suppress(OSError):
            (directory / name).unlink()
    with contextlib.suppress(OSError):
        directory.rmdir()
