"""Scratch: a thread's own page-aligned memory for bytes on their way, kept from one use to the next.

Thread safety: none; each thread has its own.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from tierkv.memory.arena import HUGE_PAGE_BYTES
from tierkv.types import UInt8Array


class Scratch:
    """Two buffers that grow on demand: `file` for what goes to and from a file, `raw` for what is encoded."""

    def __init__(self) -> None:
        self._file: UInt8Array = np.empty(0, np.uint8)
        self._raw: UInt8Array = np.empty(0, np.uint8)

    def file(self, size_bytes: int) -> UInt8Array:
        """(size_bytes,) uint8, aligned to pages; holds what it held before."""
        if len(self._file) < size_bytes:
            self._file = _aligned(size_bytes)
        return self._file[:size_bytes]

    def raw(self, size_bytes: int) -> UInt8Array:
        """(size_bytes,) uint8, aligned to pages; holds what it held before."""
        if len(self._raw) < size_bytes:
            self._raw = _aligned(size_bytes)
        return self._raw[:size_bytes]


def _aligned(size_bytes: int) -> UInt8Array:
    length = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if length >= HUGE_PAGE_BYTES:
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
