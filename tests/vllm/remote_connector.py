"""A connector as those that move caches from prefill to decode engines, whose transfers end when the test says so.

A request asks for one with kv_transfer_params {"remote_tokens": N}, once: it waits until end(). What then lies in its
blocks are the bytes of the last request that ended with {"remote_keep": true}, or, without one, whatever was there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

from tierkv.adapters.vllm.compat import blocks_of


@dataclass
class _Remote:
    """What the scheduler side, the worker side and the test share."""

    caches: list[Any] = field(default_factory=list)
    """A tensor a layer, blocks first."""
    kept: list[Any] = field(default_factory=list)
    """The bytes of some blocks, a tensor a layer."""
    waiting: dict[str, list[int]] = field(default_factory=dict)
    """Requests that wait for their transfer -> their blocks."""
    ended: KVConnectorTransferResults = field(default_factory=KVConnectorTransferResults)


_remote = _Remote()


def end(engine: Any, failed: bool = False) -> int:
    """Ends all transfers, well or not; how many. The engine hears of it in its next step."""
    waiting, _remote.waiting = _remote.waiting, {}
    for request_id, blocks in waiting.items():
        _remote.ended.finished_recving.add(request_id)
        if failed:
            _remote.ended.failed_recving.add(request_id)
            continue
        for cache, kept in zip(_remote.caches, _remote.kept, strict=False):
            cache[blocks] = kept[: len(blocks)]
    return len(waiting)


class RemoteConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._offered: set[str] = set()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        blocks = self._kv_cache_config.num_blocks
        _remote.caches = [blocks_of(cache, blocks) for cache in kv_caches.values()]
        _remote.kept, _remote.waiting, _remote.ended = [], {}, KVConnectorTransferResults()

    def start_load_kv(self, forward_context: Any, **options: Any) -> None:
        """Transfers go on by themselves."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nobody waits."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **options: Any) -> None:
        """It does not save."""

    def wait_for_save(self) -> None:
        """It does not save."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = (request.kv_transfer_params or {}).get("remote_tokens", 0) - num_computed_tokens
        if tokens <= 0 or request.request_id in self._offered:
            return 0, False
        return tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self._offered.add(request.request_id)
            _remote.waiting[request.request_id] = [block.block_id for block in blocks.blocks[0]]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        if (request.kv_transfer_params or {}).get("remote_keep"):
            _remote.kept = [cache[block_ids[0]].clone() for cache in _remote.caches]
        return False, None

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        ended, _remote.ended = _remote.ended, KVConnectorTransferResults()
        return ended
