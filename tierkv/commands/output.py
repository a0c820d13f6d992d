"""What commands share: where results go, and the types of arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tierkv.config import parse_bytes
from tierkv.errors import ConfigError, StorageError

_WIDTH_WITHOUT_SCREEN = 140


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
    """A rich Console for people, silent when standard output is for JSON. In a pipe or a log it is as wide as the
    tables: there is no screen to fit."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDTH_WITHOUT_SCREEN
    return Console(quiet=json_target == "-", highlight=False, width=width)


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


def print_facts(human: Any, facts: Mapping[str, Any]) -> None:
    """A flat mapping as two columns; what ends in _bytes as a size."""
    from rich.table import Table

    from tierkv.observe import figures

    made = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        label = name.removesuffix("_bytes") if name.endswith("_bytes") else name
        shown = figures.size(value) if name.endswith("_bytes") else figures.plain(value)
        made.add_row(label.replace("_", " "), shown)
    human.print(made)
