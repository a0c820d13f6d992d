"""TierCore: the tier without vLLM. Looks blocks up, and moves rows of the CPU tier to and from the agent.

The rows are read and written where they lie: a job is Fragments over them. Nothing here waits but drain() and close(),
and nothing raises for what the agent does or does not: what it cannot serve is a miss, a failed job, a dropped save.

Thread safety: all methods belong to the engine's thread; jobs end on the agent client's threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tierkv.adapters.vllm_offloading.attachment import Attached, Attachment
from tierkv.adapters.vllm_offloading.keyspaces import pack_keys
from tierkv.adapters.vllm_offloading.lookups import Answer, Lookups
from tierkv.adapters.vllm_offloading.options import TierOptions
from tierkv.agent.client import AgentStore
from tierkv.agent.protocol import MAX_BLOCKS
from tierkv.errors import ArgumentError, TierKVError
from tierkv.fragments import Fragments
from tierkv.jobs import Job
from tierkv.keys import Keyspace, KeyspaceSpec, pack_hashes
from tierkv.types import BlockStatus, BoolArray, Int64Array, UInt8Array

log = logging.getLogger("tierkv.vllm")

_REPORT_S = 5.0


@dataclass(frozen=True, slots=True)
class Rows:
    """vLLM's CPU tier: `count` rows of `row_bytes`, one after the other. Whoever gives it keeps the memory valid until
    drain() or close() says that nothing uses it any more."""

    address: int
    row_bytes: int
    count: int

    def __post_init__(self) -> None:
        if self.address <= 0 or self.row_bytes < 1 or self.count < 1:
            raise ArgumentError(f"{self}: an address, a size and a count of one or more are needed")


@dataclass(frozen=True, slots=True)
class Finished:
    """A job that has ended. For a load that failed, `loaded` are the keys that are there all the same."""

    job: int
    load: bool
    ok: bool
    done: Sequence[bytes]
    """The keys that were saved or loaded."""
    seconds: float
    size_bytes: int
    """Of those keys."""


@dataclass(slots=True, eq=False)
class _Transfer:
    job: int
    load: bool
    keys: Sequence[bytes]
    started_s: float
    parts: list[tuple[Int64Array, Job]] = field(default_factory=list)
    """(positions of its blocks among the keys, the job) by group."""
    open_parts: int = 0


class TierCore:
    """One tier of one engine.

    specs(): the keyspaces by group; it is asked once, at the first request, and what it raises is logged: the tier then
    holds nothing. connect(), store: see Attachment.
    """

    def __init__(
        self,
        options: TierOptions,
        rows: Rows,
        specs: Callable[[], Mapping[int, KeyspaceSpec]],
        connect: Callable[[], AgentStore],
        store: AgentStore | None = None,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._rows = rows
        self._specs: Callable[[], Mapping[int, KeyspaceSpec]] | None = specs
        self._max_saving = max(1, int(options.max_saving_share * rows.count))
        self._saving = 0
        """Blocks whose rows saves hold."""
        self._under_way: set[_Transfer] = set()
        self._ended: deque[_Transfer] = deque()
        self._condition = threading.Condition()
        self._closed = False
        self._counts: Counter[str] = Counter()
        """Blocks since the start: looked_up, found, saved, loaded, save_STATUS and load_STATUS of what failed."""
        self._attachment = Attachment(connect, store)
        self._lookups = Lookups(
            self._ask,
            self._touched,
            timeout_s=options.lookup_timeout_s,
            keep_s=options.lookup_keep_s,
            max_blocks=options.max_lookup_blocks,
            now_s=now_s,
        )

    @property
    def attached(self) -> bool:
        """Whether the agent can be asked now."""
        return self._attachment.current is not None

    def stats(self) -> dict[str, int]:
        """The counts, and whether the deadline or bound of look-ups was passed: lookup_late, lookup_refused."""
        with self._condition:
            counts = dict(self._counts)
        counts["lookup_late"] = self._lookups.late
        counts["lookup_refused"] = self._lookups.refused
        return counts

    # Requests

    def start_request(self) -> None:
        """A request is coming: blocks are hashed by now, so the keyspaces can be named."""
        specs, self._specs = self._specs, None
        if specs is None:
            return
        try:
            self._attachment.open(specs())
        except Exception as error:  # the engine goes on without the tier
            log.error("the tier holds nothing: %s", error)

    def lookup(self, key: bytes, request: str) -> Answer:
        """Whether a block is in the store. Costs no call: RETRY means that it is asked for with end_step()."""
        if not self._options.load or (self._attachment.current is None and not self._attachment.soon):
            return Answer.MISS
        return self._lookups.find(key, request)

    def touch(self, keys: Collection[bytes]) -> None:
        """These blocks were used in some tier above."""
        if self._attachment.current is not None:
            self._lookups.touch(keys)

    def end_step(self) -> None:
        """The engine's step is planned: sends what it asked for."""
        self._lookups.end_step()

    def end_request(self, request: str) -> None:
        """The request asks no more."""
        self._lookups.forget(request)

    def _ask(self, keys: Sequence[bytes]) -> BoolArray:
        found = np.zeros(len(keys), np.bool_)
        attached = self._attachment.wait(self._options.lookup_timeout_s)
        if attached is None:
            return found
        for start in range(0, len(keys), MAX_BLOCKS):
            wheres, queries = [], []
            for number, (positions, hashes) in pack_keys(keys[start : start + MAX_BLOCKS]).items():
                space = attached.spaces.get(number)
                if space is not None:
                    wheres.append(np.array(positions, np.int64) + start)
                    queries.append((space, pack_hashes(hashes)))
            for where, masks in zip(wheres, attached.store.lookup(queries), strict=True):
                found[where] = masks != 0
        with self._condition:
            self._counts["looked_up"] += len(keys)
            self._counts["found"] += int(np.count_nonzero(found))
        return found

    def _touched(self, keys: Sequence[bytes]) -> None:
        attached = self._attachment.current
        if attached is None:
            return
        for number, (_, hashes) in pack_keys(keys).items():
            space = attached.spaces.get(number)
            if space is not None:
                attached.store.touch(space, pack_hashes(hashes))

    # Jobs

    def save(self, job: int, keys: Sequence[bytes], rows: Int64Array) -> None:
        """Saves the blocks `keys` from `rows`, (n,) row numbers, which must not change until the job is finished().

        What the bound for saves has no place for is dropped, from the end; a job that is alone is taken whole.
        """
        room = self._max_saving - self._saving if self._saving else len(keys)
        count = min(len(keys), max(0, room)) if self._options.save else 0
        self._submit(_Transfer(job, False, keys, time.monotonic()), rows, count)

    def load(self, job: int, keys: Sequence[bytes], rows: Int64Array) -> None:
        """Loads the blocks `keys` into `rows`, (n,) row numbers, undefined until it is finished()."""
        self._submit(_Transfer(job, True, keys, time.monotonic()), rows, len(keys))

    def _submit(self, transfer: _Transfer, rows: Int64Array, count: int) -> None:
        """Takes the first `count` blocks of a job."""
        attached = self._attachment.current
        if attached is not None and count:
            try:
                self._check(transfer, rows)
                for number, (positions, hashes) in pack_keys(transfer.keys[:count]).items():
                    space = attached.spaces.get(number)
                    if space is not None:
                        where = np.array(positions, np.int64)
                        job = self._start(attached, space, transfer.load, hashes, rows[where])
                        transfer.parts.append((where, job))
            except TierKVError as error:  # mostly: the client was closed just now
                log.warning("%s", error)
        transfer.open_parts = len(transfer.parts)
        if not transfer.load:
            self._saving += sum(job.count for _, job in transfer.parts)
        with self._condition:
            if transfer.parts:
                self._under_way.add(transfer)
            else:
                self._ended.append(transfer)
        for _, job in transfer.parts:
            job.add_done_callback(lambda _: self._part_ended(transfer))

    def _check(self, transfer: _Transfer, rows: Int64Array) -> None:
        if len(rows) != len(transfer.keys) or (
            len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self._rows.count
        ):
            raise ArgumentError(
                f"job {transfer.job} has {len(transfer.keys)} keys and rows {rows}: as many are needed, within "
                f"0..{self._rows.count - 1}"
            )

    def _start(
        self, attached: Attached, space: Keyspace, load: bool, hashes: Sequence[bytes], rows: Int64Array
    ) -> Job:
        size = np.array([self._rows.row_bytes], np.int64)
        memory = Fragments(np.array([self._rows.address], np.int64), size, size, rows)
        packed = pack_hashes(hashes)
        if load:
            return attached.store.load(space, packed, memory, timeout_s=self._options.load_timeout_s)
        return attached.store.save(space, packed, memory, timeout_s=self._options.save_timeout_s)

    def _part_ended(self, transfer: _Transfer) -> None:
        with self._condition:
            transfer.open_parts -= 1
            if not transfer.open_parts:
                self._under_way.discard(transfer)
                self._ended.append(transfer)
                self._condition.notify_all()

    def finished(self) -> list[Finished]:
        """The jobs that have ended since the last call; each is told once."""
        ended = []
        while self._ended:
            ended.append(self._result(self._ended.popleft()))
        return ended

    def _result(self, transfer: _Transfer) -> Finished:
        status: UInt8Array = np.full(len(transfer.keys), BlockStatus.DROPPED, np.uint8)
        for where, job in transfer.parts:
            status[where] = job.status
            if not transfer.load:
                self._saving -= job.count
        good = status == BlockStatus.OK
        done = transfer.keys if good.all() else [transfer.keys[i] for i in np.flatnonzero(good).tolist()]
        way = "load" if transfer.load else "save"
        with self._condition:
            self._counts["loaded" if transfer.load else "saved"] += len(done)
            for value, count in Counter(status[~good].tolist()).items():
                self._counts[f"{way}_{BlockStatus(value).name.lower()}"] += count
        if transfer.load and len(done) < len(transfer.keys):
            self._lookups.miss([transfer.keys[i] for i in np.flatnonzero(~good).tolist()])
        return Finished(
            job=transfer.job,
            load=transfer.load,
            ok=len(done) == len(transfer.keys),
            done=done,
            seconds=time.monotonic() - transfer.started_s,
            size_bytes=len(done) * self._rows.row_bytes,
        )

    # Ending

    def drain(self) -> None:
        """Waits until nothing reads or writes the rows; every job submitted is then finished(). Each job has a deadline
        of its own, and stuck copies must be waited for."""
        while not self._idle(_REPORT_S):
            log.warning("waiting for %d transfers to end before the CPU tier is reset", len(self._under_way))

    def _idle(self, timeout_s: float) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: not self._under_way, timeout_s)

    def reset(self) -> None:
        """The engine's cache was reset, maybe since its weights change: see on_reset."""
        if self._options.on_reset == "keep":
            return
        self._attachment.clear(renew=self._options.on_reset == "renew")
        self._lookups.forget_answers()

    def close(self) -> bool:
        """Waits a little for saves, then detaches. False: a copy still runs, the rows must stay mapped. Idempotent."""
        if not self._closed:
            self._closed = True
            if not self._idle(self._options.shutdown_wait_s):
                log.info("the engine ends, %d transfers are given up", len(self._under_way))
            self._lookups.close()
            self._attachment.close()
        return self._idle(0.0)
