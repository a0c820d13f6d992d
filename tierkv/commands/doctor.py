"""`tierkv doctor`: what this machine can do, and what to change."""

from __future__ import annotations

import argparse
from typing import Any

from tierkv.commands import output


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what this machine can do and what to change",
        description="Tries what tierkv would like to use (io_uring, O_DIRECT, huge pages, locked memory, ...) and says "
        "what to change where it is not there.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("--dir", metavar="DIR", help="look at this directory's file system too")
    output.add_json_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """0, whatever was found: nothing that is missing keeps tierkv from working."""
    from tierkv.doctor import examine

    output.check_writable(arguments.json)
    found = examine(arguments.dir)
    output.write_json(found, arguments.json)
    return 0
