"""Memory for blocks: Arena (where the bytes lie) and SlotMap (which parts of an arena or file are taken)."""

from tierkv.memory.arena import HUGE_PAGE_BYTES, Arena
from tierkv.memory.scratch import Scratch
from tierkv.memory.slots import DEFAULT_SLAB_BYTES, SlotMap, capacity_for, slot_bytes_for

__all__ = [
    "DEFAULT_SLAB_BYTES",
    "HUGE_PAGE_BYTES",
    "Arena",
    "Scratch",
    "SlotMap",
    "capacity_for",
    "slot_bytes_for",
]
