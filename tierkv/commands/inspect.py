"""`tierkv inspect`: what a tier's directory holds, without reading the blocks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from tierkv.commands import output
from tierkv.commands.directories import kind_of, print_keyspaces


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="list what a directory holds",
        description="Lists the keyspaces of an NVMe tier's or a shared tier's directory, their blocks, bytes and ages. "
        "Reads no blocks; the directory may be in use.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("directory", metavar="DIR", help="the tier's directory")
    output.add_json_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """0."""
    import msgspec

    output.check_writable(arguments.json)
    kind = kind_of(arguments.directory)
    inspect: Callable[[str], Any]
    if kind == "dfs":
        from tierkv.tiers.dfs_check import inspect_tree

        inspect = inspect_tree
    else:
        from tierkv.tiers.nvme_check import inspect_directory

        inspect = inspect_directory
    facts: dict[str, Any] = {"kind": kind, **msgspec.to_builtins(inspect(arguments.directory))}
    output.write_json(facts, arguments.json)
    human = output.console(arguments.json)
    shown = {name: value for name, value in facts.items() if name not in ("keyspaces", "created_s")}
    if "created_s" in facts:
        shown["created"] = datetime.fromtimestamp(facts["created_s"], UTC).isoformat(" ", "seconds")
    output.print_facts(human, shown)
    print_keyspaces(human, facts["keyspaces"])
    return 0
