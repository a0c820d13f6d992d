"""Whether an agent serves, and what is wrong if not: the answer of /healthz."""

from __future__ import annotations

from typing import Literal

import msgspec

from tierkv.agent.statistics import AgentStats

_REQUIRED = ("dram",)
"""A store works without its other tiers, with fewer hits."""


class Health(msgspec.Struct, kw_only=True, frozen=True):
    """`unavailable`: clients are not served. `degraded`: they are, but an optional tier takes no writes."""

    status: Literal["ok", "degraded", "unavailable"]
    reasons: list[str]
    tiers: dict[str, bool]

    @property
    def serving(self) -> bool:
        return self.status != "unavailable"


def judge(stats: AgentStats) -> Health:
    """The health that an agent's statistics tell."""
    reasons = [] if stats.accepting else ["the agent is stopping and takes no clients"]
    tiers = {name: tier.healthy for name, tier in stats.tiers.items()}
    sick = [name for name, healthy in tiers.items() if not healthy]
    reasons += [f"{name}: writes are stopped after errors or a stall" for name in sick]
    unavailable = not stats.accepting or any(name in _REQUIRED for name in sick)
    return Health(
        status="unavailable" if unavailable else "degraded" if sick else "ok", reasons=reasons, tiers=tiers
    )
