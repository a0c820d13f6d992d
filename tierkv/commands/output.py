"""What commands share: where results go, and the types of arguments."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from tierkv.config import parse_bytes
from tierkv.errors import ConfigError, StorageError


def add_json_option(parser: argparse._ActionsContainer) -> None:
    """--json [FILE]: FILE or, without it or as '-', standard output, which then holds nothing else."""
    parser.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const="-",
        help="write the result as JSON to FILE; '-' is standard output",
    )


def check_writable(target: str | None) -> None:
    """Raises StorageError when FILE cannot be written, before the work whose result would be lost."""
    if target is None or target == "-":
        return
    place = Path(target)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("ab"):
            pass
    except OSError as error:
        raise StorageError(f"{place}: cannot be written: {error.strerror}") from error


def write_json(value: Any, target: str | None) -> None:
    """Writes `value` (msgspec structs allowed) where --json says; nothing when it was not given."""
    if target is None:
        return
    text = msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    if target == "-":
        sys.stdout.write(text.decode())
        sys.stdout.flush()
        return
    try:
        Path(target).write_bytes(text)
    except OSError as error:
        raise StorageError(f"{target}: cannot be written: {error.strerror}") from error


def console(json_target: str | None) -> Any:
    """A rich Console for people, silent when standard output is for JSON."""
    from rich.console import Console

    return Console(quiet=json_target == "-", highlight=False)


def table(title: str, *columns: str) -> Any:
    """A rich table; the first column is text, the others are figures."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for position, column in enumerate(columns):
        made.add_column(column, justify="left" if position == 0 else "right", no_wrap=position > 0)
    return made


def size_argument(text: str) -> int:
    """argparse type: bytes as '256KiB' or a number, 1 or more."""
    try:
        value = parse_bytes(int(text) if text.isdigit() else text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: 1 byte or more")
    return value


def count_argument(text: str) -> int:
    """argparse type: an integer of 1 or more."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 1 or more")
    return int(text)


def print_facts(human: Any, title: str, facts: dict[str, Any]) -> None:
    """A mapping as a table; what is nested goes in rows of its own, lists of mappings in tables of their own."""
    from tierkv.observe import figures

    made = table(title, "", "")
    lists: list[tuple[str, list[dict[str, Any]]]] = []

    def add(prefix: str, fields: dict[str, Any]) -> None:
        for name, value in fields.items():
            if isinstance(value, dict):
                add(f"{prefix}{name}: ", value)
            elif isinstance(value, list) and value and isinstance(value[0], dict):
                lists.append((f"{prefix}{name}", value))
            else:
                made.add_row(f"{prefix}{name}".replace("_", " "), figures.plain(value))

    add("", facts)
    human.print(made)
    for name, rows in lists:
        inner = table(name, *(key.replace("_", " ") for key in rows[0]))
        for row in rows:
            inner.add_row(*(figures.plain(value) for value in row.values()))
        human.print(inner)
