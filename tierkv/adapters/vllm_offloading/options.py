"""The tier's options: its entry in `secondary_tiers`, typed. Unknown keys are refused.

What finds or starts the agent goes by the same keys as in the tierkv connector, and means the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from tierkv.adapters.vllm.agent_options import AgentOptions, Seconds, read_options_as

WHERE = "secondary_tiers, type TierKVTier"
"""What stands before an option in messages."""


class TierOptions(AgentOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every key of the tier's entry beside those of vLLM, with its default."""

    where: ClassVar[str] = WHERE
    agent_wait_s: Seconds = 30.0
    """How long to wait for the agent when the engine starts. After that the engine goes on without it, and takes it
    up when it is there."""
    dram_bytes: int | str = "4GiB"
    """DRAM of an agent that is started here. It is beside the CPU tier of vLLM, and needs no more than what is on its
    way to or from a lower tier."""
    extra_identity: dict[str, str] = msgspec.field(default_factory=dict)
    """Texts by name: whatever else tells this engine's blocks from those of others, such as a weights' version of your
    own."""
    save: bool = True
    """Whether blocks are saved."""
    load: bool = True
    """Whether blocks are looked up and loaded."""
    lookup_keep_s: Seconds = 5.0
    """How long the answer to a look-up stands for other requests; after that the agent is asked again."""
    max_lookup_blocks: Annotated[int, msgspec.Meta(ge=1)] = 1 << 18
    """Blocks whose look-ups may be under way at a time; more are misses."""
    save_timeout_s: Seconds = 60.0
    """A save that takes longer is dropped."""
    max_saving_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    """The share of vLLM's CPU tier that saves may hold until they are read; more are dropped. A batch of blocks that
    comes when no other is being saved is always taken."""
    copy_threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    """Threads that copy blocks between vLLM's CPU tier and the agent's memory."""
    lora_paths_are_stable: bool = False
    """Keep blocks of an engine with LoRA: only if the files at an adapter's path never change. vLLM tells this tier of
    an adapter no more than its name and path."""
    shutdown_wait_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 5.0
    """How long the end of the engine waits for saves under way."""
    locality: Literal["LOCAL", "REMOTE"] | None = None
    """What KV cache events, vLLM's filters by tier and its default water marks of back-pressure take this tier for."""
    enable_kv_events: bool = False
    """Publish BlockStored events of saved blocks, where KV cache events are on at all."""


def read_options(given: Mapping[str, Any]) -> TierOptions:
    """Reads the tier's entry, without what vLLM takes out of it; ConfigError names the wrong key."""
    return read_options_as(TierOptions, given)
