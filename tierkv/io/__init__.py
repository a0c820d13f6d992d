"""Block I/O engines: io_uring, a thread pool for where io_uring is blocked, and one that does nothing."""

from tierkv.io.base import BlockIO, Operation, status_of
from tierkv.io.null import NullBlockIO
from tierkv.io.posix import PosixBlockIO
from tierkv.io.uring import UringBlockIO, io_uring_available

__all__ = [
    "BlockIO",
    "NullBlockIO",
    "Operation",
    "PosixBlockIO",
    "UringBlockIO",
    "io_uring_available",
    "open_engine",
    "status_of",
]


def open_engine(kind: str, queue_depth: int) -> tuple[BlockIO, str]:
    """(engine, reason) for a setting of 'auto', 'io_uring' or 'threads'.

    The reason says why this one was taken. With 'io_uring' StorageError is raised where the kernel
    refuses it.
    """
    from tierkv.errors import ConfigError, StorageError

    if kind == "threads":
        return PosixBlockIO(queue_depth), "engine = threads is set"
    if kind not in {"auto", "io_uring"}:
        raise ConfigError(f"engine is {kind!r}: it must be 'auto', 'io_uring' or 'threads'")
    available, reason = io_uring_available()
    if available:
        return UringBlockIO(queue_depth), reason
    if kind == "io_uring":
        raise StorageError(
            f"engine = io_uring is set, but {reason}; allow it, or set engine = auto or threads"
        )
    return PosixBlockIO(queue_depth), reason
