"""An engine that moves nothing and says OK at once: what is measured with it is everything but the I/O."""

from __future__ import annotations

import numpy as np

from tierkv.io.base import Operation
from tierkv.jobs import Job, finished_job
from tierkv.types import BlockStatus, Int64Array


class NullBlockIO:
    """Never touches the memory or the file."""

    name = "null"

    def submit(
        self, operation: Operation, fd: int, offsets: Int64Array, addresses: Int64Array, lengths: Int64Array
    ) -> Job:
        return finished_job(np.full(len(offsets), BlockStatus.OK, np.uint8))

    def sync(self, fd: int) -> BlockStatus:
        return BlockStatus.OK

    def waiting(self) -> int:
        return 0

    def close(self, timeout_s: float = 10.0) -> bool:
        return True
