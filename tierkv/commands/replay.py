"""`tierkv replay`: a workload through a real store, every loaded byte checked, hits and bandwidth per
tier."""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierkv.commands import output
from tierkv.errors import ArgumentError, StorageError
from tierkv.observe import figures
from tierkv.types import SLOT_GRANULE_BYTES

if TYPE_CHECKING:
    from tierkv.config import StoreConfig
    from tierkv.store import Store
    from tierkv.workload.replay import Progress
    from tierkv.workload.result import ReplayResult
    from tierkv.workload.traces import Request

DEFAULT_BLOCK_BYTES = 256 << 10
DEFAULT_DRAM_BYTES = 256 << 20
_DEMOTE = ("on-evict", "write-through", "second-touch")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "replay",
        help="replay a trace, or generated agent sessions, through a real store",
        description="Replays a workload through a store with real bytes: each request's longest known prefix is "
        "loaded and checked byte by byte, then its blocks are saved. TRACE is a file of JSON lines with timestamp, "
        "input_length, output_length and hash_ids; without it, agent sessions are generated.",
    )
    parser.add_argument(
        "trace", metavar="TRACE", nargs="?", help="trace file; default: generated agent sessions"
    )
    parser.set_defaults(run=run)

    tiers = parser.add_argument_group("tiers")
    dram = tiers.add_mutually_exclusive_group()
    dram.add_argument("--dram-blocks", metavar="N", type=output.count_argument, help="DRAM tier, in blocks")
    dram.add_argument(
        "--dram", metavar="SIZE", type=output.size_argument, help="DRAM tier, in bytes (default 256MiB)"
    )
    nvme = tiers.add_mutually_exclusive_group()
    nvme.add_argument("--nvme-blocks", metavar="N", type=output.count_argument, help="NVMe tier, in blocks")
    nvme.add_argument("--nvme", metavar="SIZE", type=output.size_argument, help="NVMe tier, in bytes")
    tiers.add_argument(
        "--nvme-dir", metavar="DIR", help="where; default: a temporary directory, removed at the end"
    )
    tiers.add_argument(
        "--nvme-sync", choices=("power", "process"), default="power",
        help="what committed blocks survive: a power cut, or a killed process (default %(default)s)",
    )  # fmt: skip
    tiers.add_argument(
        "--dfs-dir", metavar="DIR", help="shared filesystem tier: a directory; made if missing"
    )
    tiers.add_argument(
        "--dfs", metavar="SIZE", type=output.size_argument, help="its capacity (default: no limit)"
    )
    tiers.add_argument("--dfs-codec", choices=("none", "zstd", "zstd-planes"), default="none")
    tiers.add_argument(
        "--dfs-admission", choices=_DEMOTE, default="write-through", help="default %(default)s"
    )
    tiers.add_argument(
        "--block-bytes", metavar="B", type=output.size_argument, default=DEFAULT_BLOCK_BYTES,
        help="bytes of a block (default 256KiB)",
    )  # fmt: skip

    policies = parser.add_argument_group("policies")
    policies.add_argument("--eviction", choices=("lru", "lru-in-order", "fifo"), default="lru")
    policies.add_argument(
        "--demote", choices=_DEMOTE, default="on-evict", help="DRAM to NVMe (default %(default)s)"
    )
    policies.add_argument(
        "--free-ahead",
        metavar="SHARE",
        type=float,
        help="share of DRAM that is kept free by demoting in the background",
    )
    policies.add_argument("--promote", choices=("on-hit", "never"), default="on-hit")

    sessions = parser.add_argument_group("agent sessions (without TRACE)")
    sessions.add_argument(
        "--sessions", metavar="N", type=output.count_argument, default=8, help="default %(default)s"
    )
    sessions.add_argument(
        "--turns", metavar="N", type=output.count_argument, default=30, help="default %(default)s"
    )
    sessions.add_argument("--seed", metavar="N", type=int, default=1)
    sessions.add_argument("--block-tokens", metavar="N", type=output.count_argument, default=512)

    how = parser.add_argument_group("replay")
    how.add_argument("--limit", metavar="N", type=output.count_argument, help="only the first N requests")
    how.add_argument(
        "--speed-up", metavar="X", type=float, default=0.0,
        help="1: at the trace's times, 10: ten times as fast, 0: one request after the other (default)",
    )  # fmt: skip
    how.add_argument(
        "--layers", metavar="N", type=output.count_argument,
        help="pieces that a block is scattered over in the engine's cache (default: 4 where that divides the block)",
    )  # fmt: skip
    how.add_argument(
        "--verify", action=argparse.BooleanOptionalAction, default=True, help="check loaded bytes"
    )
    how.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, default=None,
        help="a progress bar on standard error (default: when that is a terminal)",
    )  # fmt: skip
    output.add_json_option(how)
    how.add_argument("--report", metavar="FILE.html", help="write a report with plots (needs tierkv[report])")


def run(arguments: argparse.Namespace) -> int:
    """0; 1 when a loaded block had wrong bytes."""
    from tierkv.workload.replay import Replayer, ReplayOptions, replay_spec

    output.check_writable(arguments.json)
    output.check_writable(arguments.report)
    if arguments.report:
        from tierkv.observe.report import check_requirements

        check_requirements()
    name, workload, requests = load_workload(arguments)
    layers = arguments.layers or (4 if arguments.block_bytes % 4 == 0 else 1)
    human = output.console(arguments.json)
    with ExitStack() as stack:
        nvme_directory = arguments.nvme_dir
        if nvme_directory is None and (arguments.nvme_blocks or arguments.nvme):
            nvme_directory = stack.enter_context(temporary_directory())
            human.print(
                f"NVMe tier in the temporary directory {nvme_directory}, removed at the end", soft_wrap=True
            )
        config = store_config(arguments, nvme_directory)
        options = ReplayOptions(
            verify=arguments.verify, speed_up=arguments.speed_up, layers=layers,
            threads=config.copy_threads, slab_bytes=config.dram.slab_bytes,
        )  # fmt: skip
        options.validate(arguments.block_bytes)
        store = stack.enter_context(
            opened_store(config, keep=arguments.nvme_dir is not None or config.dfs is not None)
        )
        space = store.open(replay_spec(workload, arguments.block_bytes, arguments.block_tokens, layers))
        replayer = stack.enter_context(Replayer(store, space, options))
        with progress_bar(arguments.progress, len(requests)) as on_request:
            result = replayer.run(
                requests, trace=name, config=described(arguments, config, layers), on_request=on_request
            )
    from tierkv.commands.machine import machine_facts

    result.machine = machine_facts()
    output.write_json(result, arguments.json)
    print_result(human, result)
    if arguments.report:
        import msgspec

        from tierkv.observe.report import write_report

        write_report(msgspec.to_builtins(result), arguments.report)
        human.print(f"report: {arguments.report}", soft_wrap=True)
    return 1 if result.wrong_blocks else 0


def load_workload(arguments: argparse.Namespace) -> tuple[str, str, list[Request]]:
    """(name for people, name in the keyspace, requests). The latter tells apart traces whose ids clash."""
    from tierkv.workload.sessions import SessionSpec, generate_sessions
    from tierkv.workload.traces import read_trace

    if arguments.trace is not None:
        requests = list(read_trace(arguments.trace, arguments.limit))
        if not requests:
            raise ArgumentError(f"trace {arguments.trace}: holds no requests")
        name = Path(arguments.trace).name
        with open(arguments.trace, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        return name, f"trace {digest}", requests
    spec = SessionSpec(
        sessions=arguments.sessions,
        turns=arguments.turns,
        seed=arguments.seed,
        block_tokens=arguments.block_tokens,
    )
    requests = generate_sessions(spec)[: arguments.limit]
    shape = f"{spec.sessions} x {spec.turns} turns, seed {spec.seed}"
    return f"agent sessions, {shape}", f"agent sessions {shape}", requests


def store_config(arguments: argparse.Namespace, nvme_directory: str | None) -> StoreConfig:
    """The store's settings; ArgumentError when options do not fit together."""
    import msgspec

    from tierkv.config import DfsConfig, DramConfig, NvmeConfig, StoreConfig, validate
    from tierkv.memory import DEFAULT_SLAB_BYTES, capacity_for, slot_bytes_for

    block_bytes = arguments.block_bytes
    slab_bytes = max(DEFAULT_SLAB_BYTES, slot_bytes_for(block_bytes))

    def capacity(blocks: int | None, size_bytes: int | None) -> int | None:
        if blocks is not None:
            return capacity_for(blocks, block_bytes, slab_bytes)
        if size_bytes is None:
            return None
        if size_bytes < slot_bytes_for(block_bytes):
            raise ArgumentError(
                f"a tier of {size_bytes} bytes does not hold one block of {block_bytes} bytes"
            )
        return size_bytes // SLOT_GRANULE_BYTES * SLOT_GRANULE_BYTES

    dram_bytes = capacity(arguments.dram_blocks, arguments.dram)
    if dram_bytes is None:
        dram_bytes = max(DEFAULT_DRAM_BYTES, slab_bytes)
    nvme_bytes = capacity(arguments.nvme_blocks, arguments.nvme)
    if nvme_directory is not None and nvme_bytes is None:
        raise ArgumentError("--nvme-dir needs the tier's size: add --nvme-blocks N or --nvme SIZE")
    if arguments.dfs is not None and arguments.dfs_dir is None:
        raise ArgumentError("--dfs needs a directory: add --dfs-dir DIR")
    nvme = dfs = None
    if nvme_directory is not None and nvme_bytes is not None:
        nvme = NvmeConfig(
            directory=nvme_directory, capacity_bytes=nvme_bytes, slab_bytes=slab_bytes,
            admission=arguments.demote, sync=arguments.nvme_sync,
        )  # fmt: skip
    if arguments.dfs_dir is not None:
        try:
            Path(arguments.dfs_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"--dfs-dir {arguments.dfs_dir}: cannot be made: {error.strerror}") from error
        dfs = DfsConfig(
            directory=arguments.dfs_dir, capacity_bytes=arguments.dfs, codec=arguments.dfs_codec,
            admission=arguments.dfs_admission,
        )  # fmt: skip
    dram = DramConfig(capacity_bytes=dram_bytes, slab_bytes=slab_bytes)
    if arguments.free_ahead is not None:
        if not 0 <= arguments.free_ahead <= 0.5:
            raise ArgumentError(f"--free-ahead is {arguments.free_ahead:g}: a share of 0 to 0.5 is possible")
        dram = msgspec.structs.replace(dram, free_ahead=arguments.free_ahead)
    config = StoreConfig(
        dram=dram,
        nvme=nvme,
        dfs=dfs,
        eviction=arguments.eviction,
        promote=arguments.promote,
        staging_bytes=slab_bytes,
    )
    validate(config, "options")
    return config


def described(arguments: argparse.Namespace, config: StoreConfig, layers: int) -> dict[str, Any]:
    """The settings as they go into the result."""
    import msgspec

    return {
        "store": msgspec.to_builtins(config),
        "block_bytes": arguments.block_bytes,
        "block_tokens": arguments.block_tokens,
        "layers": layers,
        "limit": arguments.limit,
        "speed_up": arguments.speed_up,
        "verify": arguments.verify,
    }


@contextmanager
def opened_store(config: StoreConfig, *, keep: bool) -> Iterator[Store]:
    """A store that writes down what only DRAM holds when it ends well and `keep` says that it is of use."""
    from tierkv.store import Store

    store = Store(config)
    try:
        yield store
    except BaseException:
        store.close(0)
        raise
    if keep:
        store.close()
    else:
        store.close(0)


@contextmanager
def temporary_directory() -> Iterator[str]:
    """A directory that is removed at the end, also after Ctrl-C and SIGTERM."""
    with tempfile.TemporaryDirectory(prefix="tierkv-nvme-", ignore_cleanup_errors=True) as directory:
        yield directory


@contextmanager
def progress_bar(wanted: bool | None, total: int) -> Iterator[Callable[[Progress], None] | None]:
    """A bar with the hit rate so far, on standard error; yields None where none is wanted."""
    if wanted is None:
        wanted = sys.stderr.isatty()
    if not wanted:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("replay"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[found]}"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=5) as bar:
        task = bar.add_task("replay", total=total, found="")

        def on_request(progress: Any) -> None:
            tiers = " ".join(f"{name} {hits:,}" for name, hits in progress.hits.items() if hits)
            rate = progress.hit_blocks / progress.blocks if progress.blocks else None
            bar.update(task, completed=progress.requests, found=f"hits {figures.percent(rate)} {tiers}")

        yield on_request


def print_result(human: Any, result: ReplayResult) -> None:
    """The tables for people."""
    block_size = figures.size(result.block_bytes)
    title = f"{result.trace}: {result.requests:,} requests, {result.blocks:,} blocks of {block_size}"
    columns = ("hits", "of all blocks", "read", "read rate", "written", "write rate", "holds", "evicted")
    tiers = output.table(title, "tier", *columns)
    for name, tier in result.tiers.items():
        share = tier.hit_blocks / result.blocks if result.blocks else None
        tiers.add_row(
            name, figures.count(tier.hit_blocks), figures.percent(share), figures.size(tier.read_bytes),
            figures.gb_s(tier.read_gb_s), figures.size(tier.written_bytes), figures.gb_s(tier.write_gb_s),
            figures.count(tier.blocks), figures.count(tier.evicted_blocks),
        )  # fmt: skip
    human.print(tiers)
    calls = output.table("", "a request", "median", "P99", "calls")
    for name, latency in (("match", result.match_ms), ("load", result.load_ms), ("save", result.save_ms)):
        calls.add_row(
            name,
            figures.milliseconds(latency.p50),
            figures.milliseconds(latency.p99),
            figures.count(latency.count),
        )
    human.print(calls)
    failed = {**result.failed_loads, **{f"save {reason}": n for reason, n in result.failed_saves.items()}}
    checked = "not verified" if result.wrong_blocks is None else f"{result.verified_blocks:,} verified"
    style = "bold red" if result.wrong_blocks else "green"
    rate = f"prefix-hit rate [bold]{figures.percent(result.prefix_hit_rate)}[/bold]"
    loaded = f"loaded {figures.size(result.loaded_bytes)} at {figures.gb_s(result.load_gb_s)}"
    wrong = f"wrong blocks [{style}]{figures.count(result.wrong_blocks)}[/{style}] ({checked})"
    human.print(f"{rate}; {loaded}; {wrong}; {result.seconds:.1f} s", soft_wrap=True)
    if failed:
        human.print("not delivered: " + ", ".join(f"{n:,} {reason}" for reason, n in failed.items()))
