"""Samples, the rows they make, and the table of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from peers.workload import BLOCK_TOKENS, KV_BYTES_PER_TOKEN, NEW_TOKENS, expected_hit

ROWS = {
    "none": "no cache",
    "local": "the engine's own cache, not lost",
    "tierkv_dram": "tierkv, DRAM",
    "tierkv_second_engine": "tierkv, DRAM, second engine",
    "tierkv_nvme": "tierkv, NVMe (agent restarted)",
    "offloading": "OffloadingConnector",
    "mooncake_embedded": "Mooncake, pool in the engine",
    "mooncake_pool": "Mooncake, pool process, tcp",
    "mooncake_second_engine": "Mooncake, the same, second engine",
}
"""Every row, in the order in which they are shown, and what it is."""

LOGPROB_TOLERANCE = 0.01
"""Runs over a cache differ from cold ones by rounding, of about 1e-5; what is beyond this is another context."""
_FROM_NVME = {"tierkv_dram": False, "tierkv_second_engine": False, "tierkv_nvme": True}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a session's turns answer without any cache."""

    first: list[int]
    second: list[int]
    logprobs: list[float]
    """Of the second turn's tokens."""

    def error(self, logprobs: Sequence[float]) -> float:
        """The largest difference of another run's logprobs."""
        return max(abs(one - other) for one, other in zip(self.logprobs, logprobs, strict=True))


@dataclass(slots=True)
class Sample:
    """One second turn."""

    row: str
    tokens: int
    ttft_ms: float
    cached_tokens: int
    tokens_equal: bool
    logprob_error: float
    sources: dict[str, int] = field(default_factory=dict)
    """Blocks read by tier, where the cache tells."""


def _row(name: str, tokens: int, samples: Sequence[Sample]) -> dict[str, Any]:
    expected = 0 if name == "none" else expected_hit(tokens)
    hits = [sample.cached_tokens for sample in samples]
    sources: dict[str, int] = {}
    for sample in samples:
        for tier, blocks in sample.sources.items():
            sources[tier] = sources.get(tier, 0) + blocks
    complete = all(hit == expected for hit in hits)
    problems = []
    if not complete:
        problems.append(f"cached {min(hits)} to {max(hits)} tokens, not {expected}")
    if name in _FROM_NVME and sources.get("nvme", 0) * BLOCK_TOKENS != (sum(hits) if _FROM_NVME[name] else 0):
        problems.append(f"not the tier that is meant: {sources} blocks read")
    if not all(sample.tokens_equal for sample in samples):
        problems.append("TOKENS DIFFER")
    error = max(sample.logprob_error for sample in samples)
    if error > LOGPROB_TOLERANCE:
        problems.append(f"LOGPROBS DIFFER by {error:.2g}")
    times_ms = [sample.ttft_ms for sample in samples]
    return {
        "name": name,
        "what": ROWS[name],
        "first_turn_tokens": tokens,
        "ttft_ms": statistics.median(times_ms),
        "ttft_ms_min": min(times_ms),
        "ttft_ms_max": max(times_ms),
        "samples_ms": [round(one, 2) for one in times_ms],
        "cached_tokens": min(hits),
        "expected_cached_tokens": expected,
        "loaded_bytes": min(hits) * KV_BYTES_PER_TOKEN if name != "local" else 0,
        "hit": complete,
        "tokens_equal": all(sample.tokens_equal for sample in samples),
        "logprob_error": error,
        "blocks_read_by_tier": sources or None,
        "problems": problems,
    }


def rows_of(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """A row for each cache and length. times_no_cache: the no-cache median over this one; over_local_ms: what it costs
    more than a hit in the engine's own cache, so the time of the look-up and the load."""
    rows = []
    for tokens in sorted({sample.tokens for sample in samples}):
        found = {}
        for name in ROWS:
            taken = [sample for sample in samples if sample.row == name and sample.tokens == tokens]
            if taken:
                found[name] = _row(name, tokens, taken)
        for row in found.values():
            for key in ("none", "local"):
                assert key in found, f"no row {key}: they are measured first"
            row["times_no_cache"] = found["none"]["ttft_ms"] / row["ttft_ms"]
            row["over_local_ms"] = row["ttft_ms"] - found["local"]["ttft_ms"]
            rows.append(row)
    return rows


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = []
    head = f"{'':34}{'ttft ms':>10}{'min to max':>19}{'of':>4}{'faster':>9}{'over local':>12}  cached"
    for tokens in sorted({row["first_turn_tokens"] for row in report["rows"]}):
        rows = [row for row in report["rows"] if row["first_turn_tokens"] == tokens]
        lines += [f"Second turn after {tokens:,} tokens, with {NEW_TOKENS} new ones; medians", head]
        for row in rows:
            spread = f"{row['ttft_ms_min']:,.1f} to {row['ttft_ms_max']:,.1f}"
            verdict = "; ".join(row["problems"]) or f"{row['cached_tokens']:,}, tokens equal"
            lines.append(
                f"{row['what']:34}{row['ttft_ms']:10,.1f}{spread:>19}{len(row['samples_ms']):4}{row['times_no_cache']:8.1f}x"
                f"{row['over_local_ms']:12,.1f}  {verdict}"
            )
        lines.append("")
    for absent in report["absent"]:
        lines.append(f"{absent['what']}: absent, {absent['why']}")
    lines += [f"note: {note}" for note in report["notes"]]
    return "\n".join(lines)


def failures(report: dict[str, Any]) -> list[str]:
    """What makes the run a failure: other tokens anywhere, or a row of tierkv without its hits."""
    failed = []
    for row in report["rows"]:
        wrong = not row["tokens_equal"] or row["logprob_error"] > LOGPROB_TOLERANCE
        ours = row["name"].startswith("tierkv") or row["name"] in {"none", "local"}
        if wrong or (ours and row["problems"]):
            failed.append(f"{row['what']}, {row['first_turn_tokens']} tokens: {'; '.join(row['problems'])}")
    failed += [f"{one['what']}: {one['why']}" for one in report["absent"] if one["name"].startswith("tierkv")]
    return failed
