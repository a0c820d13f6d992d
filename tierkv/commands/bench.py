"""`tierkv bench`: figures of one tier, each beside what the machine can do at best."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierkv.commands import output
from tierkv.errors import StorageError

if TYPE_CHECKING:
    from tierkv.benchmarks.common import Measurement

_TARGETS = {
    "dram": "saves and loads, beside a native copy of the same blocks",
    "nvme": "writes and reads, beside fio with io_uring and O_DIRECT",
    "dfs": "files on a shared filesystem, beside plain files",
    "match": "look-ups of long prefixes among a million blocks",
    "agent": "loads and look-ups through an agent, beside the same in process",
    "store": "loads of a prefix from DRAM, NVMe and both",
    "connector": "what the vLLM connector takes of the engine's thread",
}
_NEED_DIRECTORY = ("nvme", "dfs", "store")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure a tier beside the machine's own limit",
        description="Measures one tier beside the machine's limit, in turn and on the same memory and directory: "
        + "; ".join(f"{name}: {what}" for name, what in _TARGETS.items())
        + ".",
    )
    parser.set_defaults(run=run)
    parser.add_argument("target", choices=_TARGETS, help="what to measure")
    output.add_json_option(parser)
    parser.add_argument(
        "--dir", metavar="DIR", default="bench-out",
        help="where files go, on the medium to measure; all of them are removed (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="a few seconds: shows that it works, measures little"
    )
    parser.add_argument(
        "--block-bytes",
        metavar="B",
        type=output.size_argument,
        action="append",
        help="block size; may be repeated",
    )
    parser.add_argument("--rounds", metavar="N", type=output.count_argument, help="rounds of value and limit")
    parser.add_argument("--threads", metavar="N", type=output.count_argument, default=2, help="copy threads")
    parser.add_argument(
        "--entries", metavar="N", type=output.count_argument, help="blocks in the index (match, agent)"
    )


def run(arguments: argparse.Namespace) -> int:
    """0 when it was measured, whatever the figures are."""
    from tierkv.benchmarks.common import BenchOptions
    from tierkv.commands.machine import machine_facts

    output.check_writable(arguments.json)
    directory = None
    if arguments.target in _NEED_DIRECTORY:
        directory = Path(arguments.dir)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"--dir {directory}: cannot be made: {error.strerror}") from error
    options = BenchOptions(
        directory=str(directory) if directory else None, quick=arguments.quick,
        block_bytes=tuple(arguments.block_bytes) if arguments.block_bytes else None,
        rounds=arguments.rounds, threads=arguments.threads, entries=arguments.entries,
    )  # fmt: skip
    machine = machine_facts()
    results: list[Measurement] = importlib.import_module(f"tierkv.benchmarks.{arguments.target}").run(options)
    output.write_json({"results": results, "machine": machine}, arguments.json)
    print_results(output.console(arguments.json), arguments.target, results)
    return 0


def print_results(human: Any, target: str, results: list[Measurement]) -> None:
    """The table for people, and what to know about it."""
    from tierkv.observe import figures

    made = output.table(f"tierkv bench {target}", "", "block", "value", "limit", "ratio", "CPU s/GB")
    notes: dict[str, None] = {}
    for result in results:
        bound = "n/a" if result.limit is None else f"{result.limit:.3g} {result.unit}"
        value = "n/a" if result.value is None else f"{result.value:.3g} {result.unit}"
        made.add_row(
            result.name,
            figures.size(result.block_bytes) if result.block_bytes else "",
            value,
            bound,
            "n/a" if result.ratio is None else f"{result.ratio:.2f}",
            "n/a" if result.cpu_s_per_gb is None else f"{result.cpu_s_per_gb:.2f}",
        )
        if result.limit is not None and result.limit_name:
            notes[f"limit: {result.limit_name}"] = None
        if isinstance(result.pages, str):
            notes[f"pages: {result.pages}"] = None
        if isinstance(result.p99_ms, float) and isinstance(result.bytes_per_entry, float):
            notes[
                f"{result.name}: P99 {result.p99_ms:.3g} ms, {result.bytes_per_entry:.0f} bytes a block"
            ] = None
        if isinstance(result.note, str):
            notes[result.note] = None
    human.print(made)
    for note in notes:
        human.print(f"  {note}", soft_wrap=True)
