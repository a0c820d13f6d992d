"""AsyncAgentStore: a client of the agent for asyncio, with the same calls as AgentStore.

Look-ups, leases and the like run on a few threads of the client's own, each with a deadline that counts the wait for
a thread too; loads, saves and stagings are submitted at once and give an AsyncJob to await. Nothing runs on the event
loop but callbacks that complete futures.

Thread safety: use one from the event loop that made it. A cancelled call is given up: a lease that it would have
got is released.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from tierkv.agent.client import AgentLease, AgentStore
from tierkv.agent.connection import AgentUnavailable
from tierkv.agent.embedded import connect
from tierkv.agent.statistics import AgentStats
from tierkv.config import StoreConfig
from tierkv.errors import ClosedError
from tierkv.fragments import Fragments
from tierkv.jobs import Job
from tierkv.keys import Keyspace, KeyspaceSpec
from tierkv.store import CHANGES_KEPT, ChangePlace, Changes, Match, Query
from tierkv.types import BoolArray, HashArray, UInt8Array

_THREADS = 4
_CLOSE_TIMEOUT_S = 60.0
_MARGIN_S = 1.0
"""How much longer than its own deadline a call may take before it is given up."""

Result = TypeVar("Result")


class AsyncJob:
    """A Job to await: `status = await job` gives (n,) uint8 BlockStatus when every block is settled.

    Jobs end by themselves at their deadline; a task that stops waiting does not end the job.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        """The job itself, for its statuses so far."""
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        job.add_done_callback(self._settled)

    def _settled(self, _job: Job) -> None:
        """On a thread of the client's: only tells the loop, which may be closed by now."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._complete)

    def _complete(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """As Job.wait."""
        if self.job.done():
            return True
        await asyncio.wait([self._done], timeout=timeout_s)
        return self.job.done()

    def __await__(self) -> Generator[Any, None, UInt8Array]:
        yield from asyncio.shield(self._done).__await__()
        return self.job.status

    def __repr__(self) -> str:
        return f"<Async{repr(self.job)[1:]}"


class AsyncAgentLease:
    """As AgentLease; `async with` releases it."""

    def __init__(self, client: AsyncAgentStore, lease: AgentLease) -> None:
        self._client = client
        self.lease = lease

    @property
    def held(self) -> list[BoolArray]:
        """For each query (n,) bool: which blocks were there and are now held."""
        return self.lease.held

    async def extend(self, ttl_s: float) -> bool:
        """As AgentLease.extend."""
        return await self._client._call(self._client.call_timeout_s, self.lease.extend, ttl_s)

    async def release(self) -> bool:
        """As AgentLease.release."""
        return await self._client._call(self._client.call_timeout_s, self.lease.release)

    async def __aenter__(self) -> AsyncAgentLease:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


class AsyncAgentStore:
    """What tierkv.connect_async() returns. Owns the AgentStore that it is given."""

    def __init__(self, client: AgentStore, call_timeout_s: float = 1.0) -> None:
        self.client = client
        self.call_timeout_s = call_timeout_s
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="tierkv-aio")

    async def _call(
        self,
        timeout_s: float,
        call: Callable[..., Result],
        *arguments: Any,
        undo: Callable[[Result], object] | None = None,
    ) -> Result:
        """Runs a call that has a deadline of its own on a thread; AgentUnavailable if it cannot even begin in time,
        ClosedError if the client is closed before.

        The result of a call that nobody waits for any more is undone.
        """
        try:
            future: Future[Result] = self._executor.submit(call, *arguments)
        except RuntimeError:
            raise _closed() from None
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s + _MARGIN_S)
        except TimeoutError:
            self._give_up(future, undo)
            raise AgentUnavailable(f"no answer within {timeout_s} s") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if future.cancelled() and task is not None and not task.cancelling():
                raise _closed() from None  # it was waiting for a thread
            self._give_up(future, undo)
            raise

    @staticmethod
    def _give_up(future: Future[Result], undo: Callable[[Result], object] | None) -> None:
        def late(done: Future[Result]) -> None:
            if undo is not None and not done.cancelled() and done.exception() is None:
                undo(done.result(0))

        if not future.cancel():
            future.add_done_callback(late)

    # Keyspaces and look-ups

    async def open(self, spec: KeyspaceSpec) -> Keyspace:
        """As AgentStore.open."""
        return await self._call(self.call_timeout_s, self.client.open, spec)

    async def match(self, space: Keyspace, hashes: HashArray) -> Match:
        """As AgentStore.match; nothing while the agent cannot be asked."""
        try:
            return await self._call(self.call_timeout_s, self.client.match, space, hashes)
        except AgentUnavailable:
            return Match(0, np.empty(0, np.uint8))

    async def lookup(self, queries: Sequence[Query]) -> list[UInt8Array]:
        """As AgentStore.lookup; zeros while the agent cannot be asked."""
        try:
            return await self._call(self.call_timeout_s, self.client.lookup, queries)
        except AgentUnavailable:
            return [np.zeros(len(hashes), np.uint8) for _, hashes in queries]

    async def touch(self, space: Keyspace, hashes: HashArray) -> None:
        """As AgentStore.touch."""
        with contextlib.suppress(AgentUnavailable):
            await self._call(self.call_timeout_s, self.client.touch, space, hashes)

    async def changes(
        self, spaces: Sequence[Keyspace], after: ChangePlace | None = None, count: int = CHANGES_KEPT
    ) -> Changes:
        """As AgentStore.changes."""
        return await self._call(self.call_timeout_s, self.client.changes, spaces, after, count)

    # Leases

    async def lease(self, queries: Sequence[Query], ttl_s: float) -> AsyncAgentLease:
        """As AgentStore.lease."""

        def release(late: AgentLease) -> None:
            late.release()

        found = await self._call(self.call_timeout_s, self.client.lease, queries, ttl_s, undo=release)
        return AsyncAgentLease(self, found)

    def stage(
        self, lease: AsyncAgentLease, timeout_s: float | None = None, *, make_room: bool = True
    ) -> AsyncJob:
        """As AgentStore.stage: the job is to be awaited."""
        return AsyncJob(self.client.stage(lease.lease, timeout_s, make_room=make_room))

    # Moving

    def load(
        self,
        space: Keyspace,
        hashes: HashArray,
        into: Fragments,
        part: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncJob:
        """As AgentStore.load: the job is to be awaited; the memory must stay valid until it is done."""
        return AsyncJob(self.client.load(space, hashes, into, part, timeout_s))

    def save(
        self,
        space: Keyspace,
        hashes: HashArray,
        from_: Fragments,
        part: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncJob:
        """As AgentStore.save: the job is to be awaited; the memory must stay as it is until it is done."""
        return AsyncJob(self.client.save(space, hashes, from_, part, timeout_s))

    # Removing

    async def remove(self, space: Keyspace, hashes: HashArray, timeout_s: float = 60.0) -> int:
        """As AgentStore.remove."""
        return await self._call(timeout_s, self.client.remove, space, hashes, timeout_s)

    async def clear(self, space: Keyspace, timeout_s: float = 30.0) -> int:
        """As AgentStore.clear."""
        return await self._call(timeout_s + 60.0, self.client.clear, space, timeout_s)

    async def flush(self, timeout_s: float = 60.0) -> bool:
        """As AgentStore.flush."""
        try:
            return await self._call(timeout_s + _MARGIN_S, self.client.flush, timeout_s)
        except AgentUnavailable:
            return False

    async def stats(self) -> AgentStats:
        """As AgentStore.stats."""
        return await self._call(self.call_timeout_s, self.client.stats)

    # Ending

    async def close(self) -> None:
        """As AgentStore.close. Idempotent."""
        await asyncio.wait_for(asyncio.to_thread(self._close), _CLOSE_TIMEOUT_S)

    def _close(self) -> None:
        self.client.close()  # every call under way ends with it
        self._executor.shutdown(wait=True, cancel_futures=True)

    async def __aenter__(self) -> AsyncAgentStore:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _closed() -> ClosedError:
    return ClosedError("the client is closed: connect again")


async def connect_async(
    address: str | None = None, *, config: StoreConfig | None = None, timeout_s: float = 30.0, **options: Any
) -> AsyncAgentStore:
    """See tierkv.connect_async()."""

    def make() -> AgentStore:
        return connect(address, config=config, timeout_s=timeout_s, **options)

    client = await _or_close(asyncio.get_running_loop().run_in_executor(None, make))
    return AsyncAgentStore(client, float(options.get("call_timeout_s", 1.0)))


async def _or_close(connecting: Awaitable[AgentStore]) -> AgentStore:
    """The client; one that is ready only after its task was cancelled is closed."""
    future = asyncio.ensure_future(connecting)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:

        def ready(done: asyncio.Future[AgentStore]) -> None:
            if not done.cancelled() and done.exception() is None:
                asyncio.get_running_loop().run_in_executor(None, done.result().close)  # bounded: it is done

        future.add_done_callback(ready)
        raise
