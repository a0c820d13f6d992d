"""TierKVTier: what vLLM's TieringOffloadingSpec sees. It translates and nothing more; core.py decides.

vLLM calls it on the scheduler's thread. What the agent cannot serve is a miss or a failed job, never an exception; only
settings that cannot work raise, when the engine starts, and shutdown() where memory must not be unmapped yet.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any, ClassVar

import msgspec
import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from tierkv.adapters.vllm.attach import attach
from tierkv.adapters.vllm.facts import check_version
from tierkv.adapters.vllm_offloading.core import Finished, Rows, TierCore
from tierkv.adapters.vllm_offloading.engine import facts_of, hashing
from tierkv.adapters.vllm_offloading.keyspaces import keyspaces_of, with_hashing
from tierkv.adapters.vllm_offloading.lookups import Answer
from tierkv.adapters.vllm_offloading.options import WHERE, TierOptions, read_options
from tierkv.agent.client import AgentStore
from tierkv.agent.connection import AgentUnavailable
from tierkv.errors import TierKVError

log = logging.getLogger("tierkv.vllm")

BLOCKS_METRIC = "vllm:kv_offload_tierkv_blocks"
ATTACHED_METRIC = "vllm:kv_offload_tierkv_attached"
_RETRY_WAIT_S = 1.0
"""How long one attempt to find the agent again may take, in the background."""
_ANSWERS = {Answer.MISS: LookupResult.MISS, Answer.HIT: LookupResult.HIT, Answer.RETRY: LookupResult.RETRY}


class TierKVTier(SecondaryTierManager):
    """A tier below vLLM's CPU tier that keeps blocks in a tierkv agent."""

    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **given: Any,
    ) -> None:
        """As vLLM's tier factory calls it; `given` are the options (options.py). ConfigError, KeyspaceError or
        StorageError when they cannot work."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        options = read_options(given)
        check_version(options.allow_untested_vllm, WHERE)
        self.locality = None if options.locality is None else Locality(options.locality)
        rows = _rows(primary_kv_view)
        specs = keyspaces_of(facts_of(offloading_spec, rows.row_bytes, options))
        self._events: list[Any] | None = None
        if options.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = []
        self._told: dict[str, int] = {}
        self._told_attached: bool | None = None
        self.core = TierCore(
            options,
            rows,
            lambda: with_hashing(specs, *hashing()),
            partial(_connect, options, _RETRY_WAIT_S),
            _first_store(options),
        )
        for number, spec in specs.items():
            log.info("group %d: rows of %d bytes for %d tokens", number, spec.block_bytes, spec.block_tokens)

    # Look-ups

    def on_new_request(self, req_context: Any) -> Any:
        """Every new block is offered as it comes."""
        self.core.start_request()
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT, MISS, or RETRY while the agent is being asked."""
        return _ANSWERS[self.core.lookup(key, req_context.req_id)]

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Used, in whatever tier."""
        self.core.touch(keys)

    def on_schedule_end(self, context: Any) -> None:
        """Sends what this step asked for."""
        self.core.end_step()

    def on_request_finished(self, req_context: Any) -> None:
        """It asks no more."""
        self.core.end_request(req_context.req_id)

    # Jobs

    def submit_store(self, job_metadata: Any) -> None:
        """Starts saving rows of the CPU tier."""
        self.core.save(job_metadata.job_id, list(job_metadata.keys), _row_numbers(job_metadata))

    def submit_load(self, job_metadata: Any) -> None:
        """Starts loading into rows of the CPU tier."""
        self.core.load(job_metadata.job_id, list(job_metadata.keys), _row_numbers(job_metadata))

    def get_finished_jobs(self) -> Iterable[Any]:
        """Results of what has ended since the last call."""
        return [self._result(finished) for finished in self.core.finished()]

    def _result(self, finished: Finished) -> Any:
        if self._events is not None and not finished.load and finished.done:
            self._events.append(
                OffloadingEvent(
                    keys=list(finished.done), medium=self.medium, removed=False, locality=self.locality
                )
            )
        partly = finished.load and not finished.ok and finished.done
        return JobResult(
            job_id=finished.job,
            success=finished.ok,
            successful_keys=tuple(finished.done) if partly else None,
            transfer_time=finished.seconds,
            transfer_bytes=finished.size_bytes,
        )

    def take_events(self) -> Iterable[Any]:
        """Blocks that were saved since the last call."""
        events: list[Any] = []
        if self._events:
            events, self._events = self._events, []
        return events

    # Ending

    def drain_jobs(self) -> None:
        """Waits for all transfers; called when the engine resets its cache, so the store forgets its blocks too."""
        self.core.drain()
        self.core.reset()

    def shutdown(self) -> None:
        """Detaches. RuntimeError if a copy still runs: vLLM then leaves the CPU tier mapped."""
        if not self.core.close():
            raise RuntimeError("a transfer to or from tierkv did not end: the CPU tier must stay mapped")

    # Figures

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """The figures that vLLM has none for."""
        definitions: dict[str, OffloadingMetricMetadata] = {
            BLOCKS_METRIC: OffloadingCounterMetadata(
                documentation="Blocks that tierkv was asked for, found, saved and loaded, and why others were not.",
                labelnames=("event",),
            ),
            ATTACHED_METRIC: OffloadingGaugeMetadata(
                documentation="1 while tierkv's agent can be asked, else 0."
            ),
        }
        return definitions

    def get_stats(self) -> Any:
        """What has changed since the last call, or None."""
        stats = OffloadingConnectorStats()
        counts = self.core.stats()
        for event, count in counts.items():
            if more := count - self._told.get(event, 0):
                stats.increase_counter(BLOCKS_METRIC, more, (event,))
        self._told = counts
        attached = self.core.attached
        if attached is not self._told_attached:
            stats.set_gauge(ATTACHED_METRIC, int(attached))
            self._told_attached = attached
        return None if stats.is_empty() else stats


def _rows(view: memoryview) -> Rows:
    """Where the CPU tier lies. No reference is kept: vLLM unmaps it after shutdown()."""
    if view.ndim != 2 or not view.c_contiguous:
        raise TierKVError(f"vLLM's CPU tier is a view of shape {view.shape}: contiguous rows are needed")
    rows = np.asarray(view)
    return Rows(int(rows.__array_interface__["data"][0]), rows.strides[0], rows.shape[0])


def _row_numbers(job: Any) -> Any:
    return np.asarray(job.chunk_ids, np.int64)


def _connect(options: TierOptions, wait_s: float) -> AgentStore:
    return attach(
        msgspec.structs.replace(options, agent_wait_s=wait_s),
        f"vllm offloading tier {os.getpid()}",
        revive=False,  # the attachment looks after that
        call_timeout_s=options.lookup_timeout_s,
        copy_threads=options.copy_threads,
        load_timeout_s=options.load_timeout_s,
        save_timeout_s=options.save_timeout_s,
    )


def _first_store(options: TierOptions) -> AgentStore | None:
    """The agent, or None if it is not there in time: the engine starts without it. StorageError if it was to be
    started and could not be."""
    try:
        return _connect(options, options.agent_wait_s)
    except AgentUnavailable as error:
        log.warning("starting without the agent, all look-ups miss until it is there: %s", error)
        return None
