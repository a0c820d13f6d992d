"""The block I/O engine seam: batches of reads and writes of one open file, done in the background.

Engines move bytes and report; they know nothing of slots, catalogs or checksums. Rules for all of them:
- Reads are begun before writes that wait, whatever the order of submission: a load never waits behind a
  save. A share of the depth is kept free of writes so that a read starts at once, and one operation is
  left to writes so that endless reads cannot starve them.
- submit() never blocks and never raises for a fault of the medium. The queue is bounded, for reads and
  for writes apart: blocks that find no room are settled as DROPPED at once (the first ones that fit are
  taken).
- Each block succeeds or fails alone: ENOSPC and EDQUOT give NO_SPACE, everything else IO_ERROR. A short
  read or write is continued; where it cannot be, IO_ERROR.
- A job is settled once, when its last block has ended, on a thread of the engine.

Thread safety: every method may be called from any thread. The caller keeps the memory behind the
addresses and the file descriptor valid until the job is done.
"""

from __future__ import annotations

import errno
import os
from enum import IntEnum
from typing import Protocol

from tierkv.jobs import Job
from tierkv.types import SLOT_GRANULE_BYTES, BlockStatus, Int64Array

QUEUE_BLOCKS = 65536
"""Blocks that may wait in an engine, reads and writes counted apart."""
PIECE_BYTES = 8 << 20
"""Longer blocks are cut into operations of this size. Cutting smaller ones gains nothing: the block layer
does it too."""
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Operation(IntEnum):
    """What a batch does. Lower numbers are served first."""

    READ = 0
    WRITE = 1


class BlockIO(Protocol):
    """One engine: `name` is how it is called in the config ('io_uring', 'threads')."""

    @property
    def name(self) -> str: ...

    def submit(
        self, operation: Operation, fd: int, offsets: Int64Array, addresses: Int64Array, lengths: Int64Array
    ) -> Job:
        """Moves lengths[i] bytes between file offset offsets[i] and memory at addresses[i], for each i of
        the (n,) arrays.

        With an O_DIRECT descriptor all three must be multiples of its alignment. Raises ArgumentError for
        arrays of different length or lengths below 1, and ClosedError after close().
        """
        ...

    def sync(self, fd: int) -> BlockStatus:
        """fdatasync on the caller's thread: OK once all writes that had ended before the call are durable."""
        ...

    def waiting(self) -> int:
        """Operations that wait or are in flight."""
        ...

    def close(self, timeout_s: float = 10.0) -> bool:
        """Lets what is in flight end, settles what still waits as CANCELLED, ends the threads.
        Idempotent.

        False: some operation had not ended after `timeout_s`; its job was settled CANCELLED and its
        memory must not be reused in this process.
        """
        ...


def status_of(error_number: int) -> BlockStatus:
    """What an errno means for a block."""
    return BlockStatus.NO_SPACE if error_number in _NO_SPACE else BlockStatus.IO_ERROR


def usable_progress(moved: int, done: int, length: int) -> int:
    """How far a transfer of `moved` bytes takes a piece: whole granules when not at its end, as O_DIRECT
    must go on where it is aligned. 0: no progress, as at the end of a file."""
    if done + moved >= length:
        return moved
    return moved // SLOT_GRANULE_BYTES * SLOT_GRANULE_BYTES or (moved if length < SLOT_GRANULE_BYTES else 0)


def sync_file(fd: int) -> BlockStatus:
    """fdatasync on this thread, its errno as a status."""
    try:
        os.fdatasync(fd)
    except OSError as error:
        return status_of(error.errno or 0)
    return BlockStatus.OK
