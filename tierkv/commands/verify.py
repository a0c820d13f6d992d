"""`tierkv verify`: every stored block of a directory is read and checked."""

from __future__ import annotations

import argparse
from typing import Any

from tierkv.commands import output
from tierkv.commands.directories import kind_of


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="check a directory's blocks against their checksums",
        description="Reads every block of an NVMe tier's or a shared tier's directory and checks it. Exit status 1 "
        "when any is bad. An NVMe directory must not be in use meanwhile; a shared one may be.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("directory", metavar="DIR", help="the tier's directory")
    parser.add_argument(
        "--repair", action="store_true", help="forget bad blocks, so that they are never looked at again"
    )
    output.add_json_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """0 when all is good, 1 when a block is bad."""
    import msgspec

    output.check_writable(arguments.json)
    kind = kind_of(arguments.directory)
    if kind == "dfs":
        from tierkv.tiers.dfs import verify_tree

        found = verify_tree(arguments.directory, repair=arguments.repair)
    else:
        from tierkv.tiers.nvme_check import verify_directory

        found = verify_directory(arguments.directory, repair=arguments.repair)
    facts = {"kind": kind, **msgspec.to_builtins(found)}
    output.write_json(facts, arguments.json)
    human = output.console(arguments.json)
    output.print_facts(human, f"{kind} {arguments.directory}", facts)
    return 1 if facts["bad"] else 0
