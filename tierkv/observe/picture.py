"""What `tierkv top` shows: an agent's statistics on one screen of 80 columns, as rates between two readings.

Without an earlier reading, or when the agent was started anew since, it shows what came together since its start.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tierkv.agent.statistics import AgentStats
from tierkv.observe.figures import MISSING, size
from tierkv.observe.health import judge
from tierkv.store import LATENCY_BOUNDS_S, LatencyStats, TierStats
from tierkv.tiers.dfs import UNLIMITED_BYTES

_BAR_WIDTH = 12
_CLIENTS_SHOWN = 8
_SHOWN_OPERATIONS = ("match", "load", "save")
_STATUS_STYLES = {"ok": "bold green", "degraded": "bold yellow", "unavailable": "bold red"}


@dataclass(frozen=True, slots=True)
class Reading:
    """Statistics and when they were read (time.monotonic())."""

    stats: AgentStats
    at_s: float


class Change:
    """What happened between two readings; since the agent's start if there is no earlier one of the same agent."""

    def __init__(self, now: Reading, before: Reading | None) -> None:
        same = before is not None and before.stats.started_s == now.stats.started_s and before.at_s < now.at_s
        self.now = now.stats
        self._before = before.stats if before is not None and same else None
        self._seconds = now.at_s - before.at_s if before is not None and same else 0.0

    @property
    def is_rate(self) -> bool:
        """Whether figures are per second."""
        return self._before is not None

    def growth(self, counter: Callable[[AgentStats], float]) -> float:
        """By how much a counter grew."""
        return max(0.0, counter(self.now) - (counter(self._before) if self._before is not None else 0.0))

    def per_s(self, counter: Callable[[AgentStats], float]) -> float:
        """A counter's growth per second, or all of it if this is no rate."""
        return self.growth(counter) / (self._seconds if self.is_rate else 1.0)

    def latency(self, histogram: Callable[[AgentStats], LatencyStats]) -> LatencyStats:
        """What a histogram took in."""
        now = histogram(self.now)
        if self._before is None:
            return now
        before = histogram(self._before)
        counts = [max(0, new - old) for new, old in zip(now.counts, before.counts, strict=True)]
        return LatencyStats(counts=counts, sum_s=max(0.0, now.sum_s - before.sum_s))


def quantile_s(latency: LatencyStats, share: float) -> float:
    """The latency that `share` of what was observed did not exceed, interpolated within its bucket; NaN for none.

    What is beyond the last bound is taken to be at it.
    """
    rank, below, low = share * latency.count, 0.0, 0.0
    for bound, count in zip(LATENCY_BOUNDS_S, latency.counts, strict=False):
        if count and below + count >= rank:
            return low + (bound - low) * (rank - below) / count
        below, low = below + count, bound
    return LATENCY_BOUNDS_S[-1] if latency.count else math.nan


def render(
    place: str, change: Change, *, gone: str = "", blocks: tuple[str, str] = ("█", "░")
) -> RenderableType:
    """The whole picture. `gone`: why the agent cannot be asked now; then the figures are of the last reading."""
    parts: list[RenderableType] = [_headline(place, change.now, gone)]
    if gone:
        parts.append(Text(gone, style="red"))
    else:
        parts += [Text(reason, style="yellow") for reason in judge(change.now).reasons]
    parts += [Text(""), _tiers(change, blocks), Text(""), _facts(change)]
    clients = _clients(change.now)
    if clients is not None:
        parts += [Text(""), clients]
    return Group(*parts)


def render_absent(place: str, reason: str) -> RenderableType:
    """Before the first reading."""
    return Group(
        Text.assemble(("tierkv  ", "bold"), ("no agent: looking for it", "bold red"), (f"\n{place}", "dim")),
        Text(reason, style="red"),
    )


def _headline(place: str, stats: AgentStats, gone: str) -> Text:
    status = judge(stats).status
    shown = ("agent gone: looking for it", "bold red") if gone else (status, _STATUS_STYLES[status])
    line = Text.assemble((f"tierkv {stats.version}", "bold"), "  ", shown)
    if not gone:
        line.append(f"  {stats.client_count:,} of {stats.max_clients:,} clients")
        line.append(f"  up {_duration(max(0.0, time.time() - stats.started_s))}" if stats.started_s else "")
    line.append(f"\n{place}", style="dim")
    return line


def _tiers(change: Change, blocks: tuple[str, str]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", expand=False)
    unit = " GB/s" if change.is_rate else ""
    for name in ("tier", "used", "", "blocks", "hits"):
        table.add_column(name, justify="left" if name in ("tier", "used") else "right", no_wrap=True)
    for name in (f"read{unit}", f"write{unit}", "evict/s" if change.is_rate else "evicted"):
        table.add_column(name, justify="right", no_wrap=True)
    asked = sum(change.growth(_of(tier, "hit_blocks")) for tier in change.now.tiers)
    asked += change.growth(lambda stats: sum(stats.load_misses.values()))
    for name, tier in change.now.tiers.items():
        hits = change.growth(_of(name, "hit_blocks"))
        table.add_row(
            Text(name, style="" if tier.healthy else "bold red"),
            _bar(tier, blocks),
            _fill(tier),
            f"{tier.blocks:,}" if tier.blocks < 10_000_000 else short(tier.blocks),
            f"{hits / asked:.1%}" if asked else MISSING,
            _bytes(change, _of(name, "read_bytes")),
            _bytes(change, _of(name, "written_bytes")),
            short(change.per_s(_of(name, "evicted_blocks"))),
        )
    return table


def _of(name: str, field: str) -> Callable[[AgentStats], float]:
    """A counter of one tier."""

    def value(stats: AgentStats) -> float:
        return float(getattr(stats.tiers[name], field)) if name in stats.tiers else 0.0

    return value


def _bar(tier: TierStats, blocks: tuple[str, str]) -> Text:
    if tier.capacity_bytes >= UNLIMITED_BYTES:
        return Text("no limit".ljust(_BAR_WIDTH), style="dim")
    filled = round(_BAR_WIDTH * min(1.0, tier.used_bytes / max(1, tier.capacity_bytes)))
    return Text.assemble((blocks[0] * filled, "cyan"), (blocks[1] * (_BAR_WIDTH - filled), "dim"))


def _fill(tier: TierStats) -> str:
    """'1.2/4 GiB' or '512M/4G'; at most 15 characters up to a pebibyte."""
    if tier.capacity_bytes >= UNLIMITED_BYTES:
        return size(tier.used_bytes)
    (used, unit), (capacity, whole) = size(tier.used_bytes).split(), size(tier.capacity_bytes).split()
    return f"{used}/{capacity} {unit}" if unit == whole else f"{used}{unit[0]}/{capacity}{whole[0]}"


def _bytes(change: Change, counter: Callable[[AgentStats], float]) -> str:
    return f"{change.per_s(counter) / 1e9:.2f}" if change.is_rate else size(change.growth(counter))


def _facts(change: Change) -> Table:
    now, unit = change.now, "/s" if change.is_rate else ""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    asked = change.growth(lambda stats: stats.match_requested_blocks)
    found = change.growth(lambda stats: stats.match_found_blocks)
    asked_shown = short(change.per_s(lambda stats: stats.match_requested_blocks))
    found_shown = f"{found / asked:.1%} of {asked_shown} blocks{unit}" if asked else "nothing asked"
    table.add_row("match", found_shown)
    table.add_row("misses", _reasons(change, lambda stats: stats.load_misses, now.load_misses))
    saved, known = (
        short(change.per_s(lambda stats: stats.saved_blocks)),
        short(change.per_s(lambda stats: stats.known_blocks)),
    )
    table.add_row("saves", f"{saved}{unit} stored, {known}{unit} known already")
    table.add_row("drops", _reasons(change, lambda stats: stats.drops, now.drops))
    table.add_row(
        "queues",
        f"load {short(now.load_queue_blocks)}, save {short(now.save_queue_blocks)}, write "
        f"{short(now.write_queue_blocks)} blocks",
    )
    table.add_row(
        "held",
        f"{now.leases:,} leases of {size(now.leased_bytes)}, {size(now.reserved_bytes)} reserved, "
        f"{short(now.pins)} pins",
    )
    table.add_row("index", f"{now.index_entries:,} blocks in {size(now.index_bytes)}")
    table.add_row("p50/p99", ", ".join(_quantiles(change, operation) for operation in _SHOWN_OPERATIONS))
    return table


def _reasons(change: Change, counter: Callable[[AgentStats], dict[str, int]], now: dict[str, int]) -> Text:
    """Each reason with its rate, and the total since the start."""
    unit = "/s" if change.is_rate else ""
    shown = []
    for reason, total in now.items():

        def count(stats: AgentStats, reason: str = reason) -> float:
            return counter(stats).get(reason, 0)

        total_shown = f" ({short(total)})" if change.is_rate else ""
        if total:
            shown.append(f"{reason.replace('_', ' ')} {short(change.per_s(count))}{unit}{total_shown}")
    return Text(", ".join(shown), style="yellow") if shown else Text("none")


def _quantiles(change: Change, operation: str) -> str:
    latency = change.latency(lambda stats: stats.latency.get(operation, LatencyStats()))
    if not latency.count:
        return f"{operation} {MISSING}"
    return f"{operation} {_time(quantile_s(latency, 0.5))}/{_time(quantile_s(latency, 0.99))}"


def _time(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError


def _clients(stats: AgentStats) -> Table | None:
    if not stats.clients:
        return None
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("client", no_wrap=True, overflow="ellipsis", max_width=50)
    table.add_column("leased", justify="right", no_wrap=True)
    table.add_column("reserved", justify="right", no_wrap=True)
    for client in stats.clients[:_CLIENTS_SHOWN]:
        table.add_row(Text(_printable(client.name)), size(client.leased_bytes), size(client.reserved_bytes))
    if stats.client_count > _CLIENTS_SHOWN:
        table.add_row(Text(f"and {stats.client_count - _CLIENTS_SHOWN:,} more", style="dim"))
    return table


def _printable(name: str) -> str:
    """A client chooses its name; it must not move the cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def short(value: float) -> str:
    """A count in at most 6 characters: 950, 12.3k, 4.56M."""
    if 0 < value < 0.01:
        return "<0.01"
    for factor, unit in ((1, ""), (1e3, "k"), (1e6, "M"), (1e9, "G")):
        scaled = value / factor
        if scaled < 999.5 or unit == "G":
            if not unit and scaled == int(scaled):
                return f"{scaled:.0f}"
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{unit}"
    raise AssertionError


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m {rest}s" if minutes else f"{rest}s"
