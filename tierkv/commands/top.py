"""`tierkv top`: what an agent does, live in the terminal."""

from __future__ import annotations

import argparse
import logging
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from tierkv.errors import ConfigError, TierKVError

if TYPE_CHECKING:
    from tierkv.agent.client import AgentStore
    from tierkv.agent.statistics import AgentStats
    from tierkv.observe.picture import Reading

MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 3600.0
_CALL_TIMEOUT_S = 3.0
_MAX_PAGE_BYTES = 16 << 20
_NAME = "tierkv top"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "top",
        help="watch an agent",
        description="Shows what an agent's tiers hold and do, refreshed until Ctrl-C. An agent that goes away is "
        "waited for.",
    )
    parser.set_defaults(run=run)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--socket", metavar="PATH", help="the agent's socket; this attaches as a client")
    source.add_argument(
        "--metrics", metavar="URL", help="the agent's metrics, such as http://127.0.0.1:9400/metrics"
    )
    parser.add_argument(
        "--interval",
        metavar="S",
        type=_interval,
        default=1.0,
        help="seconds between two readings (default 1)",
    )
    parser.add_argument(
        "--once", action="store_true", help="print what came together since the agent's start, and end"
    )


def run(arguments: argparse.Namespace) -> int:
    """0 at Ctrl-C, and after --once."""
    from rich.console import Console

    # The client's own warnings would be written across the picture, which says the same.
    logging.getLogger("tierkv").addHandler(logging.NullHandler())
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 80)
    source: _Source = _Socket(arguments.socket) if arguments.socket is not None else _Page(arguments.metrics)
    try:
        if arguments.once:
            _print_once(console, source)
        elif not console.is_terminal:
            raise ConfigError("top: standard output is not a terminal: use --once for one snapshot as text")
        else:
            _watch(console, source, arguments.interval)
    finally:
        source.close()
    return 0


def _blocks(console: Any) -> tuple[str, str]:
    """What bars are made of, where the terminal has it."""
    return ("█", "░") if console.encoding.lower().startswith("utf") else ("#", ".")


def _print_once(console: Any, source: _Source) -> None:
    from tierkv.observe.picture import Change, Reading, render

    reading = Reading(source.read(), time.monotonic())
    console.print(render(source.place, Change(reading, None), blocks=_blocks(console)))


def _watch(console: Any, source: _Source, interval_s: float) -> None:
    """Refreshes until Ctrl-C."""
    from rich.live import Live

    from tierkv.observe.picture import Change, Reading, render, render_absent

    before: Reading | None = None
    shown: Change | None = None
    gone_since_s = 0.0
    never = threading.Event()
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                started_s = time.monotonic()
                try:
                    now = Reading(source.read(), time.monotonic())
                except TierKVError as error:
                    gone_since_s = gone_since_s or started_s
                    reason = f"for {time.monotonic() - gone_since_s:.0f} s: {error}"
                    blocks = _blocks(console)
                    picture = (
                        render_absent(source.place, reason)
                        if shown is None
                        else render(source.place, shown, gone=reason, blocks=blocks)
                    )
                    before = None
                else:
                    gone_since_s = 0.0
                    shown, before = Change(now, before), now
                    picture = render(source.place, shown, blocks=_blocks(console))
                live.update(picture, refresh=True)
                never.wait(max(MIN_INTERVAL_S, interval_s - (time.monotonic() - started_s)))
    except KeyboardInterrupt:
        return


class _Source(Protocol):
    place: str

    def read(self) -> AgentStats:
        """TierKVError when the agent cannot be asked now."""
        ...

    def close(self) -> None: ...


class _Socket:
    """An agent, attached to."""

    def __init__(self, path: str) -> None:
        self.place = path
        self._client: AgentStore | None = None

    def read(self) -> AgentStats:
        from tierkv.agent.client import AgentStore

        if self._client is None:
            self._client = AgentStore(self.place, name=_NAME, call_timeout_s=_CALL_TIMEOUT_S, copy_threads=1)
        return self._client.stats()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


class _Page:
    """An agent's /metrics."""

    def __init__(self, url: str) -> None:
        from urllib.parse import urlsplit, urlunsplit

        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--metrics {url}: an address such as http://127.0.0.1:9400/metrics is needed")
        self.place = urlunsplit(parts._replace(path=parts.path if parts.path.strip("/") else "/metrics"))

    def read(self) -> AgentStats:
        import http.client
        from urllib.request import ProxyHandler, build_opener

        from tierkv.agent.connection import AgentUnavailable
        from tierkv.observe.exposition import parse

        try:
            # No proxy: the port is this host's, or one near by.
            with build_opener(ProxyHandler({})).open(self.place, timeout=_CALL_TIMEOUT_S) as answer:
                page = answer.read(_MAX_PAGE_BYTES)
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise AgentUnavailable(
                f"{self.place}: no metrics: {reason}: is metrics_port set, and the agent up?"
            ) from error
        return parse(page.decode("utf-8", "replace"))

    def close(self) -> None:
        pass


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not MIN_INTERVAL_S <= value <= MAX_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"{text!r}: seconds, from {MIN_INTERVAL_S} to {MAX_INTERVAL_S:.0f}")
    return value
