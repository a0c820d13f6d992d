"""Aside: memory beside the arena, through which one client gets blocks when all of DRAM is held.

In process such blocks go through staging memory; a client's go through a memfd of its session's own, mapped by both
sides from the start. It takes real memory only while it is lent. One load has it at a time, under its lease: until that
is released, its time has passed or the session ends, and never while something is still being read into it.

Thread safety: all methods may be called from any thread.
"""

from __future__ import annotations

import mmap
import threading

import numpy as np

from tierkv.fragments import Fragments
from tierkv.keys import Keyspace
from tierkv.memory import Arena, slot_bytes_for


class Aside:
    """`size_bytes` of memory for one session."""

    def __init__(self, size_bytes: int) -> None:
        """StorageError when no descriptor or address space is to be had."""
        self._arena = Arena.create(
            slot_bytes_for(size_bytes), shared=True, huge_pages="off", lock_memory="off", first_touch="never",
            name="tierkv-aside",
        )  # fmt: skip
        assert self._arena.fd is not None  # it is shared
        self.fd: int = self._arena.fd
        """The memfd, to be passed to the client."""
        self.size_bytes = self._arena.size_bytes
        try:
            self._pages = mmap.mmap(self.fd, self.size_bytes)  # to give pages back by
        except BaseException:
            self._arena.close()
            raise
        self._lock = threading.Lock()
        self._lease = 0
        self._until_s = 0.0
        self._filling = False
        self._closed = False

    def take(self, lease: int, until_s: float, now_s: float) -> bool:
        """Lends it to a load until its lease ends, at `until_s` at the latest, and lets it be filled; False if another
        load has it."""
        with self._lock:
            if self._closed or self._filling or (self._lease and now_s < self._until_s):
                return False
            self._lease, self._until_s, self._filling = lease, until_s, True
            return True

    def room(self, space: Keyspace, part: int, count: int) -> tuple[Fragments, np.ndarray]:
        """For up to `count` blocks' parts, at least one: (where to load them to, (n,) int64 their offsets in it)."""
        step, length = slot_bytes_for(space.part_bytes[part]), space.part_bytes[part]
        blocks = np.arange(min(count, self.size_bytes // step), dtype=np.int64)
        bases, strides, lengths = (
            np.array([value], np.int64) for value in (self._arena.address, step, length)
        )
        return Fragments(bases, strides, lengths, blocks, (self._arena,)), blocks * step

    def filled(self) -> None:
        """What was read into it has ended, well or not."""
        with self._lock:
            self._filling = False
            self._tidy()

    def extend(self, lease: int, until_s: float) -> None:
        """The lease lasts longer, or shorter, than was said."""
        with self._lock:
            if lease == self._lease:
                self._until_s = until_s

    def give_back(self, lease: int) -> None:
        """The lease has ended."""
        with self._lock:
            if lease == self._lease:
                self._lease = 0
                self._tidy()

    def close(self) -> None:
        """The session has ended. The memory goes when nothing is read into it any more."""
        with self._lock:
            self._closed, self._lease = True, 0
            self._tidy()

    def _tidy(self) -> None:
        """Gives back to the system what nobody uses. Under the lock."""
        if self._filling or self._lease:
            return
        if self._pages.closed:
            return
        # Also where a client keeps it mapped: what it held is not counted as the agent's any more.
        self._pages.madvise(mmap.MADV_REMOVE)
        if self._closed:
            self._pages.close()
            self._arena.close()
