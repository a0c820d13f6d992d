"""Memory for blocks: Arena (where the bytes lie), SlotMap (which parts of an arena or file are taken) and Roster (what
lies there, for a process that is restarted)."""

from tierkv.memory.arena import HUGE_PAGE_BYTES, Arena
from tierkv.memory.roster import Roster, create_roster
from tierkv.memory.scratch import Scratch
from tierkv.memory.slots import DEFAULT_SLAB_BYTES, SlotMap, capacity_for, slot_bytes_for

__all__ = [
    "DEFAULT_SLAB_BYTES",
    "HUGE_PAGE_BYTES",
    "Arena",
    "Roster",
    "Scratch",
    "SlotMap",
    "capacity_for",
    "create_roster",
    "slot_bytes_for",
]
