"""`tierkv doctor`: what this machine can do, and what to change."""

from __future__ import annotations

import argparse
from typing import Any

from rich.markup import escape
from rich.table import Table

from tierkv.commands import output

_STYLES = {"ok": "green", "degraded": "yellow", "missing": "red"}


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
    """0, whatever was found: tierkv works with less, and says so here."""
    from tierkv.doctor import examine

    output.check_writable(arguments.json)
    findings = examine(arguments.dir)
    output.write_json({"findings": findings}, arguments.json)
    human = output.console(arguments.json)
    made = Table.grid(padding=(0, 2))
    for finding in findings:
        style = _STYLES[finding.state]
        made.add_row(f"[{style}]{finding.state}[/{style}]", escape(finding.subject), escape(finding.found))
        if finding.advice:
            made.add_row("", "", f"[yellow]{escape(finding.advice)}[/yellow]")
    human.print(made)
    return 0
