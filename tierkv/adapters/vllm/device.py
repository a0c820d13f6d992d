"""Devices: what moving blocks needs of an accelerator, and the two there are.

A mark stands for all that the engine's thread has ordered so far. A lane orders works after marks, one after the other,
without waiting for either, and tells when each has ended. CudaDevice does so by events and a stream of its own;
HostDevice does the same by a thread, for tensors in host memory, so that everything above is tested without an
accelerator.

**CudaDevice has never been run on a GPU**: its calls are tested against torch's signatures, in order, and no more.

Imports torch only when a device is made.

Thread safety: mark() is called by the engine's thread; run() of one lane by one thread at a time.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

from tierkv.errors import ConfigError, StorageError

log = logging.getLogger("tierkv.vllm")

Landed = Callable[[Exception | None], None]
"""Called once, when a work has ended: with None, or with what went wrong. Must be short and must not block."""
_PATIENCE_S = 5.0


class Lane(Protocol):
    """Works that follow each other, beside the engine's."""

    def run(self, after: Any, work: Callable[[], None], landed: Landed) -> None:
        """Orders `work` after the mark, and returns without waiting for it. Never raises.

        `landed` is called by the lane's thread when nothing of `work` is under way any more, whether it succeeded or
        not.
        """
        ...

    def close(self, timeout_s: float) -> bool:
        """Ends the lane after what was ordered; False if that is not done in time."""
        ...


class Device(Protocol):
    """An accelerator. Tensors are torch's."""

    def staging(self, size_bytes: int) -> Any:
        """A uint8 tensor in host memory that the device reads and writes by itself. StorageError if it cannot be."""
        ...

    def scratch(self, size_bytes: int) -> Any:
        """A uint8 tensor in the device's memory. StorageError if it cannot be."""
        ...

    def mark(self) -> Any:
        """All that this thread has ordered on the device so far. Does not wait."""
        ...

    def lane(self, name: str) -> Lane: ...


def device_kind(tensor: Any) -> str:
    """'cpu' or 'cuda'; ConfigError for memory of any other device."""
    device = getattr(tensor, "device", "cpu")
    kind = str(getattr(device, "type", device))
    if kind not in ("cpu", "cuda"):
        raise ConfigError(
            f"the engine's KV cache is on a {kind} device: the tierkv connector moves blocks of caches in host memory "
            f"(cpu) and on CUDA devices (cuda) only; run this engine without the connector"
        )
    return kind


class _Watched:
    """The thread of a lane, which sees works end in their order.

    Its queue is bounded by the lane's user, who has a staging slot for every work under way.
    """

    def __init__(self, name: str) -> None:
        self._works: queue.SimpleQueue[tuple[Callable[[], None], Landed] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._thread.start()

    def _put(self, ended: Callable[[], None], landed: Landed) -> None:
        """`ended` returns when the work has ended, and raises what went wrong."""
        self._works.put((ended, landed))

    def _watch(self) -> None:
        while True:
            try:
                work = self._works.get(timeout=_PATIENCE_S)
            except queue.Empty:
                continue
            if work is None:
                return
            ended, landed = work
            error: Exception | None = None
            try:
                ended()
            except Exception as problem:  # it is the work's outcome
                error = problem
            try:
                landed(error)
            except Exception:  # the lane must survive
                log.exception("the end of a transfer could not be told")

    def close(self, timeout_s: float) -> bool:
        """As Lane.close()."""
        self._works.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


class HostDevice:
    """Host memory, treated as if it were an accelerator's."""

    def __str__(self) -> str:
        return "host memory"

    def staging(self, size_bytes: int) -> Any:
        """A uint8 tensor of so many bytes."""
        return _empty(size_bytes, {"device": "cpu"})

    def scratch(self, size_bytes: int) -> Any:
        """A uint8 tensor of so many bytes."""
        return _empty(size_bytes, {"device": "cpu"})

    def mark(self) -> threading.Event:
        """On the host all is done when it was ordered."""
        mark = threading.Event()
        mark.set()
        return mark

    def lane(self, name: str) -> Lane:
        """A thread that does the works."""
        return _HostLane(name)


class _HostLane(_Watched):
    def run(self, after: threading.Event, work: Callable[[], None], landed: Landed) -> None:
        def ended() -> None:
            while not after.wait(_PATIENCE_S):
                pass
            work()

        self._put(ended, landed)


class CudaDevice:
    """A CUDA device of this process (ROCm's torch calls its devices so, too). Never run on a GPU.

    device: a torch.device, as tensors have it.
    """

    def __init__(self, device: Any) -> None:
        import torch

        self._torch = torch
        self._device = device

    def staging(self, size_bytes: int) -> Any:
        """Page-locked memory, or copies would neither be asynchronous nor fast."""
        return _empty(size_bytes, {"device": "cpu", "pin_memory": True})

    def scratch(self, size_bytes: int) -> Any:
        """Memory of the device, from torch's allocator."""
        return _empty(size_bytes, {"device": self._device})

    def __str__(self) -> str:
        return str(self._device)

    def mark(self) -> Any:
        """An event on this thread's current stream of the device."""
        return self._torch.cuda.current_stream(self._device).record_event()

    def lane(self, name: str) -> Lane:
        """A stream, and a thread that waits for its events."""
        return _CudaLane(name, self._torch, self._device)


class _CudaLane(_Watched):
    def __init__(self, name: str, torch: Any, device: Any) -> None:
        self._torch = torch
        self._device = device
        self._stream = torch.cuda.Stream(device=device)
        super().__init__(name)

    def run(self, after: Any, work: Callable[[], None], landed: Landed) -> None:
        cuda = self._torch.cuda
        problem: Exception | None = None
        event: Any = None
        try:
            with cuda.device(self._device), cuda.stream(self._stream):
                try:
                    self._stream.wait_event(after)
                    work()
                except Exception as error:  # what was ordered before it may still be under way: wait for that
                    problem = error
                event = cuda.Event(blocking=True)  # its waiter sleeps
                event.record(self._stream)
        except Exception as error:
            problem = problem or error
            event = None

        def ended() -> None:
            # Bounded by the device's progress alone: a transfer under way cannot be called back, and until it has
            # ended nothing may be said of it. An engine whose device hangs is lost anyway; deadlines are the pipes'.
            (self._stream if event is None else event).synchronize()
            if problem is not None:
                raise problem

        self._put(ended, landed)


def _empty(size_bytes: int, options: dict[str, Any]) -> Any:
    import torch

    try:
        return torch.empty(size_bytes, dtype=torch.uint8, **options)
    except RuntimeError as error:
        where = "page-locked host memory" if options.get("pin_memory") else "memory"
        raise StorageError(
            f"{size_bytes} bytes of {where} for staging cannot be had: set kv_connector_extra_config.staging_bytes "
            f"lower, or leave the device more ({error})"
        ) from error
