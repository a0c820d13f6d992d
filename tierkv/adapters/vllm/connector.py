"""TierKVConnector: what vLLM sees. Thin: it reads vLLM's objects and hands them to the scheduler or worker side.

Nothing that goes wrong here reaches the engine once it has started: a look-up that fails is a miss, a load that fails
is reported, a save that fails is dropped.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tierkv.adapters.vllm import compat, hooks
from tierkv.adapters.vllm.announce import Announcer
from tierkv.adapters.vllm.attach import attach, process_name
from tierkv.adapters.vllm.clearing import Clearer
from tierkv.adapters.vllm.counters import Counters
from tierkv.adapters.vllm.events import EventLog
from tierkv.adapters.vllm.finder import Finder, Spaces
from tierkv.adapters.vllm.groups import fails_by_block
from tierkv.adapters.vllm.identity import Shard, keyspace_of, renewed, shard_of
from tierkv.adapters.vllm.layout import describe_group
from tierkv.adapters.vllm.lora import AdapterBook
from tierkv.adapters.vllm.messages import StepOrders, WorkerReport
from tierkv.adapters.vllm.renewals import RankSpaces, Renewals
from tierkv.adapters.vllm.scheduler import ConnectorScheduler, SchedulerOptions
from tierkv.adapters.vllm.settings import read_settings
from tierkv.adapters.vllm.staging import PathMaker
from tierkv.adapters.vllm.stats import TierKVPromMetrics, TierKVStats
from tierkv.adapters.vllm.worker import ConnectorWorker, Path
from tierkv.errors import ConfigError, TierKVError
from tierkv.keys import Keyspace, KeyspaceSpec

log = logging.getLogger("tierkv.vllm")

_CLEAR_WAIT_S = 10.0
_RENEW_WAIT_S = 1.0
_LAST_CLEAR_S = 2.0
_DRAIN_TIMEOUT_S = 5.0
_SOURCES = {
    "dram": CacheHitSource.HOST,
    "nvme": CacheHitSource.DISK,
    "dfs": CacheHitSource.DISK,
}


@dataclass
class TierKVMetadata(KVConnectorMetadata):
    """One step's orders, on their way to the workers."""

    orders: StepOrders


@dataclass
class TierKVWorkerMetadata(KVConnectorWorkerMetadata):
    """What workers report after a step."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Joins another rank's report to this one."""
        self.report.merge(other.report)
        return self


@dataclass
class TierKVHandshake(KVConnectorHandshakeMetadata):
    """A worker's keyspaces."""

    greetings: dict[tuple[int, int], bytes] = field(default_factory=dict)


def _guarded(otherwise: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A method whose faults are logged; its result is then otherwise()."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def guarded(self: Any, *arguments: Any, **options: Any) -> Any:
            try:
                return method(self, *arguments, **options)
            except TierKVError as error:
                log.warning("%s: %s", method.__name__, error)
            except Exception:
                log.exception("%s failed; the engine goes on without", method.__name__)
            return otherwise()

        return guarded

    return decorate


class TierKVConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's connector to tierkv; docs/vllm.md."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Attaches to the agent, and starts one where it is told so. TierKVError for what cannot work."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        compat.check_engine(vllm_config, kv_cache_config, self._settings)
        self._groups = compat.groups_of(vllm_config, kv_cache_config, self._settings)
        # Both sides go by it: what cannot fail block by block must not be loaded synchronously.
        self._by_block = fails_by_block(self._groups) and len(kv_cache_config.kv_cache_groups) == 1
        transfer = self._kv_transfer_config
        self._save = transfer.is_kv_producer if self._settings.save is None else self._settings.save
        self._load = transfer.is_kv_consumer if self._settings.load is None else self._settings.load
        self._scheduler: ConnectorScheduler | None = None
        self._worker: ConnectorWorker | None = None
        self._specs: dict[tuple[int, int], list[KeyspaceSpec | None]] = {}
        self._announcer: Announcer | None = None
        self._generation = 0
        """Of what the announcer follows."""
        scheduling = role == KVConnectorRole.SCHEDULER
        name = "scheduler" if scheduling else f"worker {vllm_config.parallel_config.rank}"
        self._counters = Counters(name)
        self._store = attach(
            self._settings, process_name(name), call_timeout_s=self._settings.lookup_timeout_s,
            copy_threads=self._settings.copy_threads, load_timeout_s=self._settings.load_timeout_s,
            save_timeout_s=self._settings.save_timeout_s,
        )  # fmt: skip
        self._paths = PathMaker(self._store, self._settings.staging())
        if scheduling:
            self._start_scheduler(vllm_config, kv_cache_config)

    def _start_scheduler(self, vllm_config: Any, kv_cache_config: Any) -> None:
        settings = self._settings
        options = SchedulerOptions(
            groups=self._groups,
            hash_block_tokens=compat.hash_block_tokens(vllm_config, kv_cache_config),
            ranks=vllm_config.parallel_config.world_size,
            max_held_blocks=max(1, int(kv_cache_config.num_blocks * settings.max_held_share)),
            load=self._load,
            save=self._save,
            load_async=settings.load_async or not self._by_block,
            lookup_wait_s=settings.lookup_wait_s,
            lookup_timeout_s=settings.lookup_timeout_s,
            save_alarm_s=4 * settings.save_timeout_s,
        )
        self._finder = Finder(self._store, self._groups, settings.lease_s, settings.min_load_tokens)
        self._clearer = Clearer(self._store)
        self._renewals = Renewals(self._store, self._clearer)
        self._events = EventLog.from_config(vllm_config, kv_cache_config)
        announcer = Announcer(self._events, self._groups, self._store) if self._events.enabled else None
        self._announcer = announcer
        adapters = AdapterBook(hooks.adapter_settings(vllm_config))
        self._scheduler = ConnectorScheduler(options, self._finder, self._counters, announcer, adapters)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not saved is computed again."""
        return False

    # The worker side

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Describes this rank's caches and opens its keyspaces. TierKVError for caches that cannot be described."""
        config = self._kv_cache_config
        ranks = (get_pp_group().rank_in_group, get_tp_group().rank_in_group)
        facts = compat.facts_of(self._vllm_config, config, self._settings, ranks[1], ranks[0])
        paths: list[Path | None] = []
        shards: list[Shard] = []
        sizes: list[int] = []
        specs: list[KeyspaceSpec | None] = []
        for group in self._groups:
            described = config.kv_cache_groups[group.index]
            layers = [layer for layer in described.layer_names if layer in kv_caches]
            replicas = compat.replicas_of(self._vllm_config, described.kv_cache_spec)
            if replicas == 1 and facts.tensor_size > 1:
                replicas = hooks.kv_head_replicas(
                    self._vllm_config.compilation_config.static_forward_context, layers
                )
            shard = shard_of(facts, replicas)
            shards.append(shard)
            if not layers:
                paths.append(None)
                sizes.append(0)
                specs.append(None)
                continue
            blocks = {layer: compat.blocks_of(kv_caches[layer], config.num_blocks) for layer in layers}
            cache = describe_group(layers, blocks, config.num_blocks)
            spec = keyspace_of(facts, group, compat.spec_detail(described.kv_cache_spec), cache, shard)
            paths.append(self._paths.path(self._store.open(spec), cache, shard))
            sizes.append(cache.block_bytes)
            specs.append(spec)
        greeting = json.dumps(
            [None if spec is None else spec.canonical().decode() for spec in specs]
        ).encode()
        self._greetings = {ranks: greeting}
        self._worker = ConnectorWorker(
            self._store, paths, shards, sizes, self._counters,
            load_timeout_s=self._settings.load_timeout_s, save_timeout_s=self._settings.save_timeout_s,
            report_blocks=self._by_block, greeting=self._greetings, spaces_of=RankSpaces(self._store, specs),
            adapters=hooks.loaded_adapters(self._vllm_config),
        )  # fmt: skip

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """This rank's keyspaces, for the scheduler side."""
        return TierKVHandshake(self._greetings) if self._worker is not None else None

    def _orders(self) -> StepOrders | None:
        metadata = self._connector_metadata
        return metadata.orders if isinstance(metadata, TierKVMetadata) else None

    @_guarded(lambda: None)
    def start_load_kv(self, forward_context: Any, **options: Any) -> None:
        """Begins this step's loads."""
        orders = self._orders()
        if orders is not None and self._worker is not None:
            self._worker.start_loads(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads that a step waits for are done before it begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **options: Any) -> None:
        """Blocks are saved whole, when all layers are done."""

    @_guarded(lambda: None)
    def wait_for_save(self) -> None:
        """Begins this step's saves; they go on in the background."""
        orders = self._orders()
        if orders is not None and self._worker is not None:
            self._worker.start_saves(orders)

    @_guarded(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The loads that have ended."""
        results = KVConnectorTransferResults()
        if self._worker is not None:
            results.finished_recving, results.failed_recving = self._worker.poll()
        return results

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """As get_transfer_results(), for engines that ask this way."""
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving or None

    @_guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were promised and did not come."""
        return self._worker.take_bad_blocks() if self._worker is not None else set()

    @_guarded(lambda: None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What the scheduler side is to know."""
        report = self._worker.take_report() if self._worker is not None else None
        return TierKVWorkerMetadata(report) if report is not None else None

    # The scheduler side

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """The engine's block tables and block pool."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.bind(kv_cache_manager)
            hooks.watch_resets(kv_cache_manager, self._before_reset, self._scheduler.was_reset)

    @_guarded(lambda: None)
    def _before_reset(self) -> None:
        """Whoever resets would have to step the engine first, so that saves are reported and give their blocks back.
        Where the only worker is in this process it is asked now, which takes as long as the saves, and not for ever."""
        assert self._scheduler is not None
        local = hooks.local_connector(TierKVConnector, self._vllm_config)
        if local is not None and local._worker is not None and self._scheduler.has_unsent_work():
            report = local._worker.end_saves(self._scheduler.orders_now(), _DRAIN_TIMEOUT_S)
            if report is not None:
                self._take_report(report)
        self._scheduler.before_reset()

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """The workers' keyspaces, of a single pipeline stage."""
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): value for rank, value in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """The workers' keyspaces; another connector's metadata is not ours to read."""
        for value in metadata.values():
            if isinstance(value, TierKVHandshake):
                self._greet(value.greetings)

    def _greet(self, greetings: Mapping[tuple[int, int], bytes]) -> None:
        """Takes ranks' keyspaces in; when all are there, look-ups and saves begin."""
        for ranks, greeting in greetings.items():
            self._specs[ranks] = [
                None if text is None else KeyspaceSpec.from_json(text) for text in json.loads(greeting)
            ]
        parallel = self._vllm_config.parallel_config
        stages = range(parallel.pipeline_parallel_size)
        tensors = range(parallel.tensor_parallel_size)
        missing = [(stage, rank) for stage in stages for rank in tensors if (stage, rank) not in self._specs]
        if missing or self._scheduler is None or self._scheduler.serving:
            return
        for stage in stages:
            if any(self._specs[stage, rank] != self._specs[stage, 0] for rank in tensors):
                raise ConfigError(
                    f"the tensor-parallel ranks of pipeline stage {stage} arrange their KV caches differently: "
                    f"nothing is cached"
                )
        self._scheduler.serving = True
        self._serve()

    def _serve(self) -> None:
        """Has blocks looked up in the keyspaces in use."""
        self._finder.serve(partial(self._open_spaces, self._renewals.word, self._generation))

    def _open_spaces(self, renewal: str, generation: int) -> Spaces:
        """Opens the keyspaces of all stages; AgentUnavailable while the agent is away."""

        def opened(spec: KeyspaceSpec | None) -> Keyspace | None:
            return None if spec is None else self._store.open(renewed(spec, renewal))

        spaces = tuple(tuple(opened(spec) for spec in specs) for specs in self._stages())
        if self._announcer is not None:
            self._announcer.serve(spaces, generation)
        return spaces

    def _stages(self) -> list[list[KeyspaceSpec | None]]:
        """The groups' keyspaces of each pipeline stage, as they were at the start."""
        return [
            self._specs[stage, 0] for stage in range(self._vllm_config.parallel_config.pipeline_parallel_size)
        ]

    @_guarded(lambda: None)
    def on_new_request(self, request: Any) -> None:
        """A request has arrived."""
        if self._scheduler is not None:
            self._scheduler.new_request(request)

    @_guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond the computed ones; None: not known yet."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has its blocks, and waits for what was promised."""
        assert self._scheduler is not None
        try:
            self._scheduler.allocated(request, blocks, num_external_tokens)
        except Exception:
            log.exception("%s: its load cannot be ordered", request.request_id)
            if num_external_tokens:
                self._scheduler.refuse(request.request_id, blocks)

    @_guarded(dict)
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Where the tokens of the request's load come from."""
        found: dict[CacheHitSource, int] = {}
        if num_external_tokens and self._scheduler is not None:
            for tier, tokens in self._scheduler.hit_sources(request, num_external_tokens).items():
                found[_SOURCES[tier]] = found.get(_SOURCES[tier], 0) + tokens
        return found

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """This step's orders."""
        assert self._scheduler is not None
        return TierKVMetadata(self._scheduler.step(scheduler_output))

    @_guarded(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        """One step's reports."""
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, TierKVWorkerMetadata) and self._scheduler is not None:
            self._take_report(metadata.report)

    def _take_report(self, report: WorkerReport) -> None:
        assert self._scheduler is not None
        if report.greetings:
            self._greet(report.greetings)
        self._scheduler.reported(report)
        if self._scheduler.end_clear():  # what was still being saved at the last reset is there now
            self._renewals.clear(saved=True, forget=self._settings.on_reset == "renew")

    @_guarded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended; what its saves still read is held by them, so its blocks may go."""
        if self._scheduler is not None:
            self._scheduler.finished(request)
        return False, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As request_finished_all_groups(), for engines without hybrid caches."""
        result: tuple[bool, dict[str, Any] | None] = self.request_finished_all_groups(request, (block_ids,))
        return result

    def has_pending_push_work(self) -> bool:
        """Whether saves are still to be sent or reported."""
        return self._scheduler is not None and self._scheduler.has_unsent_work()

    def has_pending_block_frees(self) -> bool:
        """Whether saves will give blocks back soon."""
        return self._scheduler is not None and self._scheduler.frees_blocks_soon()

    @_guarded(lambda: False)
    def reset_cache(self) -> bool:
        """Clears the keyspaces that were used so far, in every tier and on every node that shares one, and goes on with
        others: the engine may have other weights now. Nothing depends on when it is done, so it is waited for a moment
        only, and True. Or less, see on_reset: where the names stay, False says that the agent has not confirmed it."""
        if self._scheduler is None or self._settings.on_reset == "keep":
            return self._scheduler is not None
        renew = self._settings.on_reset == "renew"
        self._renewals.give_up(self._used_spaces(), renew=renew)
        self._scheduler.begin_clear(self._renewals.word)
        if self._announcer is not None:
            self._generation = self._announcer.cleared()
        if self._scheduler.serving:
            self._serve()
        wait_s = (_RENEW_WAIT_S if renew else _CLEAR_WAIT_S) * self._store.attached
        return self._renewals.clear(saved=self._scheduler.end_clear(), forget=renew, wait_s=wait_s) or renew

    def _used_spaces(self) -> list[Keyspace]:
        """None before they are known: nothing was saved to them."""
        if self._scheduler is None or not self._scheduler.serving:
            return []
        return self._renewals.used([spec for specs in self._stages() for spec in specs])

    def take_events(self) -> Iterable[Any]:
        """KV cache events for routers."""
        return self._events.take() if self._scheduler is not None else ()

    # Figures

    @_guarded(lambda: None)
    def get_kv_connector_stats(self) -> TierKVStats | None:
        """What was counted since the last call."""
        return TierKVStats.taken_from(self._counters)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TierKVStats:
        """Figures that came as plain data."""
        return TierKVStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TierKVPromMetrics:  # fmt: skip
        """vllm:tierkv_* in vLLM's own registry."""
        return TierKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @_guarded(lambda: None)
    def shutdown(self) -> None:
        """Lets the saves under way end, for a moment, and detaches."""
        if self._worker is not None:
            self._worker.drain(_DRAIN_TIMEOUT_S)
        self._paths.close(_DRAIN_TIMEOUT_S)
        if self._scheduler is not None:
            self._finder.stop()
            if self._renewals.word and self._store.attached:  # nobody will ever find them
                self._clearer.clear(self._used_spaces(), wait_s=_LAST_CLEAR_S)
            self._clearer.stop()
            if self._announcer is not None:
                self._announcer.close()
        self._store.close()


compat.register(TierKVConnector.__name__, "tierkv.adapters.vllm")
