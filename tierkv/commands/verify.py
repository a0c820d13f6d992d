"""`tierkv verify`: every stored block of a directory is read and checked."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tierkv.commands import output
from tierkv.commands.directories import kind_of, print_keyspaces


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

    from tierkv.observe import figures

    output.check_writable(arguments.json)
    kind = kind_of(arguments.directory)
    verify: Callable[..., Any]
    if kind == "dfs":
        from tierkv.tiers.dfs_check import verify_tree

        verify = verify_tree
    else:
        from tierkv.tiers.nvme_check import verify_directory

        verify = verify_directory
    with progress_bar() as progress:
        found = verify(arguments.directory, progress, repair=arguments.repair)
    facts: dict[str, Any] = {"kind": kind, **msgspec.to_builtins(found)}
    output.write_json(facts, arguments.json)
    human = output.console(arguments.json)
    print_keyspaces(human, facts["keyspaces"])
    style = "bold red" if facts["bad"] else "green"
    human.print(
        f"{figures.count(facts['checked'])} blocks checked: {figures.count(facts['good'])} good, "
        f"[{style}]{figures.count(facts['bad'])} bad[/{style}]",
        soft_wrap=True,
    )
    for reason, blocks in facts["reasons"].items():
        human.print(f"  {figures.count(blocks)}: {reason}", soft_wrap=True)
    if arguments.repair:
        human.print(f"{figures.count(facts['repaired'])} bad blocks were removed", soft_wrap=True)
    elif facts["bad"]:
        human.print("a store drops bad blocks when it meets them; --repair removes them now", soft_wrap=True)
    return 1 if facts["bad"] else 0


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on standard error where that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verify", total=None)
        yield lambda checked, total: bar.update(task, completed=checked, total=total)
