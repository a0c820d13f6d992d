"""What CudaDevice asks of torch, against torch's own signatures. No GPU is here: its answers are not tested."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import staging_harness as harness
import torch
from staging_harness import SHARD, TIMEOUT_S, block_bytes, hashes_of, ids

from tierkv.adapters.vllm.device import CudaDevice
from tierkv.adapters.vllm.staging import Staging
from tierkv.errors import StorageError
from tierkv.types import BlockStatus

DEVICE = torch.device("cuda", 1)


class FakeCuda:
    """torch.cuda for tensors that are really on the host. Calls that torch would not take are TypeErrors."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.current = threading.local()
        self.stuck = threading.Event()
        self.stuck.set()
        self.problem: Exception | None = None
        fake = self
        real_stream, real_event = torch.cuda.Stream, torch.cuda.Event

        class Event:
            def __init__(self, *given: Any, **named: Any) -> None:
                inspect.signature(real_event.__new__).bind(real_event, *given, **named)
                self.blocking = bool(named.get("blocking"))
                self.stream: Any = None

            def record(self, *given: Any, **named: Any) -> None:
                inspect.signature(real_event.record).bind(self, *given, **named)
                (self.stream,) = given
                fake.calls.append(("record", self.stream))

            def synchronize(self) -> None:
                assert self.stream is not None
                assert self.blocking, "its waiter would spin"
                fake.wait(("synchronize", self.stream))

        class Stream:
            def __init__(self, *given: Any, **named: Any) -> None:
                inspect.signature(real_stream.__new__).bind(real_stream, *given, **named)
                self.device = named["device"]

            def wait_event(self, *given: Any, **named: Any) -> None:
                inspect.signature(real_stream.wait_event).bind(self, *given, **named)
                fake.calls.append(("wait_event", given[0]))

            def record_event(self, *given: Any, **named: Any) -> Event:
                inspect.signature(real_stream.record_event).bind(self, *given, **named)
                event = Event()
                event.record(self)
                fake.calls.append(("mark", event))
                return event

            def synchronize(self) -> None:
                fake.wait(("synchronize", self))

        self.Event, self.Stream = Event, Stream
        self.engine = Stream(device=DEVICE)

    def wait(self, call: tuple[str, Any]) -> None:
        """A thread waits for the device."""
        assert self.stuck.wait(TIMEOUT_S)
        self.calls.append(call)
        if self.problem is not None:
            raise self.problem

    def current_stream(self, device: Any = None) -> Any:
        """The calling thread's stream."""
        assert device == DEVICE
        return getattr(self.current, "stream", self.engine)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """torch.cuda.device()."""
        assert device == DEVICE
        yield

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """torch.cuda.stream()."""
        self.current.stream = stream
        try:
            yield
        finally:
            self.current.stream = self.engine


class FakeTorch:
    """torch, but for the device."""

    def __init__(self) -> None:
        self.cuda = FakeCuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    """A device whose torch.cuda is the fake, and memory that really is the host's."""
    made = FakeTorch()
    real_init, real_empty = CudaDevice.__init__, torch.empty

    def init(self: CudaDevice, device: Any) -> None:
        real_init(self, device)
        self._torch = made

    def empty(*size: Any, pin_memory: bool = False, device: Any = "cpu", **named: Any) -> torch.Tensor:
        assert not (pin_memory and device != "cpu"), "only host memory can be page-locked"
        if device != "cpu" or pin_memory:
            made.cuda.calls.append(("pinned" if pin_memory else "scratch", size[0]))
        return real_empty(*size, **named)

    monkeypatch.setattr(CudaDevice, "__init__", init)
    monkeypatch.setattr(torch, "empty", empty)
    return made


def watch_copies(fake: FakeTorch, staging: Staging, path: Any) -> None:
    """Notes on which stream the path's copies are ordered."""

    def noting(name: str, copy: Callable[..., None]) -> Callable[..., None]:
        def noted(*given: Any) -> None:
            fake.cuda.calls.append((name, fake.cuda.current_stream(DEVICE)))
            copy(*given)

        return noted

    for name in ("copy_in", "copy_out"):
        setattr(path, name, noting(name, getattr(path, name)))


def test_copies_are_ordered_after_the_engines_work_and_waited_for(fake: FakeTorch) -> None:
    cache, raw = harness.PLAIN.make(1)
    with harness.open_store() as store:
        space = harness.open_space(store, cache)
        staging = Staging(store, CudaDevice(DEVICE), 1 << 20)
        assert [name for name, _ in fake.cuda.calls] == ["pinned", "scratch"] * 16
        path = staging.path(space, cache, SHARD)
        watch_copies(fake, staging, path)
        expected = block_bytes(cache, raw, 3)
        streams = []
        for move, copy, block in ((path.save, "copy_out", 3), (path.load, "copy_in", 5)):
            fake.cuda.calls.clear()
            job = move(hashes_of(1), ids(block), TIMEOUT_S)
            assert job.wait(TIMEOUT_S)
            assert job.ok()
            calls = fake.cuda.calls
            names = [name for name, _ in calls]
            assert names == ["record", "mark", "wait_event", copy, "record", "synchronize"]
            assert calls[0][1] is fake.cuda.engine, "the mark is of the engine's stream"
            assert calls[2][1] is calls[1][1], "it is waited for"
            own = calls[3][1]
            assert calls[4][1] is calls[5][1] is own is not fake.cuda.engine
            streams.append(own)
        assert streams[0] is not streams[1], "loads do not queue behind saves"
        assert block_bytes(cache, raw, 5) == expected
        assert staging.close(TIMEOUT_S)


def test_nothing_is_settled_before_the_device_is_done(fake: FakeTorch) -> None:
    cache, _ = harness.PLAIN.make(1)
    store = harness.ScriptedStore()
    store.answer = harness.complete(harness.content(256))
    staging = Staging(store, CudaDevice(DEVICE), 1 << 20)
    path = staging.path(None, cache, SHARD)  # type: ignore[arg-type]
    fake.cuda.stuck.clear()
    load = path.load(hashes_of(1), ids(5), TIMEOUT_S)
    save = path.save(hashes_of(1), ids(6), TIMEOUT_S)
    harness.eventually(lambda: [name for name, _ in fake.cuda.calls].count("wait_event") == 4, "copies")
    assert not load.done()
    assert not save.done()
    assert not store.saves
    fake.cuda.stuck.set()
    assert load.wait(TIMEOUT_S)
    assert load.ok()
    assert save.wait(TIMEOUT_S)
    assert len(store.saves) == 1
    assert staging.close(TIMEOUT_S)


@pytest.mark.parametrize("when", ["ordering", "recording", "waiting"])
def test_a_fault_of_the_device_is_the_copys_end(
    fake: FakeTorch, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And even then what had been ordered before is waited for."""
    cache, _ = harness.PLAIN.make(1)
    store = harness.ScriptedStore()
    store.answer = harness.complete(harness.content(256))
    staging = Staging(store, CudaDevice(DEVICE), 1 << 20)
    path = staging.path(None, cache, SHARD)  # type: ignore[arg-type]
    problem = RuntimeError("CUDA error: an illegal memory access was encountered")

    def failing(*given: Any, **named: Any) -> None:
        raise problem

    fake.cuda.calls.clear()
    if when == "ordering":
        monkeypatch.setattr(path, "copy_in", failing)
        monkeypatch.setattr(path, "copy_out", failing)
    elif when == "recording":
        mark = staging.device.mark()
        monkeypatch.setattr(staging.device, "mark", lambda: mark)
        monkeypatch.setattr(fake.cuda.Event, "record", failing)
    else:
        fake.cuda.problem = problem
    load = path.load(hashes_of(1), ids(5), TIMEOUT_S)
    assert load.wait(TIMEOUT_S)
    assert load.status.tolist() == [BlockStatus.IO_ERROR]
    save = path.save(hashes_of(1), ids(5), TIMEOUT_S)
    assert save.wait(TIMEOUT_S)
    assert save.status.tolist() == [BlockStatus.DROPPED]
    assert [name for name, _ in fake.cuda.calls].count("synchronize") == 2
    assert not store.saves
    assert staging.close(TIMEOUT_S)


def test_memory_that_cannot_be_had_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice(DEVICE)
    with pytest.raises(StorageError, match=r"4096 bytes of page-locked .*staging_bytes"):
        device.staging(4096)  # this torch really refuses it

    def full(*given: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(StorageError, match="out of memory"):
        device.scratch(4096)
