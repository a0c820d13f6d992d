"""The command line: parses arguments, runs one command and turns what went wrong into one clear line.

Exit status: 0 done; 1 a check found something bad; 2 wrong usage, or an error that the message explains; 130
and 143 stopped by Ctrl-C or SIGTERM; 141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from types import FrameType

from tierkv.commands import agent, bench, demo, doctor, inspect, replay, size, top, verify
from tierkv.errors import TierKVError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_PIPE_CLOSED = 128 + signal.SIGPIPE
EXIT_TERMINATED = 128 + signal.SIGTERM


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="tierkv", description="A tiered store of KV-cache blocks: DRAM, NVMe and shared filesystem."
    )
    parser.add_argument("--version", action="version", version=f"tierkv {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (agent, top, demo, replay, bench, verify, inspect, size, doctor):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status; usage errors and --help leave by SystemExit."""
    arguments = build_parser().parse_args(argv)
    try:
        with _termination_unwinds():
            status: int = arguments.run(arguments)
            sys.stdout.flush()
            return status
    except TierKVError as error:
        print(f"tierkv: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("tierkv: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return EXIT_PIPE_CLOSED


def _version() -> str:
    try:
        return metadata.version("tierkv")
    except metadata.PackageNotFoundError:
        return "(not installed)"


@contextmanager
def _termination_unwinds() -> Iterator[None]:
    """Makes SIGTERM leave like an exception, so that stores are closed and temporary directories removed."""

    def leave(_signal: int, _frame: FrameType | None) -> None:
        raise SystemExit(EXIT_TERMINATED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _discard_stdout() -> None:
    """Points stdout to nowhere, or the interpreter fails once more when it flushes at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    finally:
        os.close(nowhere)
