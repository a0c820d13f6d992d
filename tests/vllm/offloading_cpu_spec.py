"""vLLM's tiered offloading on CPU: the same spec with a worker that copies between CPU tensors.

vLLM's own worker copies with a GPU's DMA engines and refuses to start without one. All else, the connector, its
scheduler side, the CPU tier's shared region and the tiers below it, is vLLM's own.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

ZERO_LOADS = "test_zero_loads"
"""An extra config key: what is loaded is set to zeros instead, to see that tokens depend on it."""


class CopyWorker(OffloadingWorker):
    """Copies blocks between the engine's cache and rows of the region, at once."""

    def __init__(self, caches: Any, blocks_per_row: int, region: Any, zero_loads: bool) -> None:
        self._blocks_per_row = blocks_per_row
        self._region = region
        self._zero_loads = zero_loads
        self._groups = caches.group_data_refs
        self._cache = [tensor.tensor for tensor in caches.tensors]
        self._rows = []
        for tensor in caches.tensors:
            view = region.create_next_worker_view(tensor.page_size_bytes * blocks_per_row)
            self._rows.append(view.unflatten(1, (blocks_per_row, tensor.page_size_bytes)))
        self._finished: list[TransferResult] = []

    def _copy(self, job_id: int, blocks: Any, rows: Any, store: bool) -> bool:
        block_at = row_at = 0
        for group, (count, first) in enumerate(zip(blocks.group_sizes, blocks.block_indices, strict=True)):
            if not count:
                continue
            place = torch.arange(count) + first % self._blocks_per_row
            row_count = int(place[-1]) // self._blocks_per_row + 1
            block_ids = torch.as_tensor(blocks.block_ids[block_at : block_at + count]).long()
            row_ids = torch.as_tensor(rows.chunk_ids[row_at : row_at + row_count]).long()
            block_at, row_at = block_at + count, row_at + row_count
            where = (row_ids[place // self._blocks_per_row], place % self._blocks_per_row)
            for ref in self._groups[group]:
                size = ref.page_size_bytes
                cache, row = self._cache[ref.tensor_idx][:, :size], self._rows[ref.tensor_idx][:, :, :size]
                if store:
                    row[where] = cache[block_ids]
                else:
                    cache[block_ids] = 0 if self._zero_loads else row[where]
        assert row_at == len(rows.chunk_ids)
        self._finished.append(TransferResult(job_id=job_id, success=True))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """All is done at once."""

    def shutdown(self) -> None:
        self._rows.clear()
        self._cache.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """TieringOffloadingSpec for the CPU platform."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id, num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk, cpu_page_size=self.cpu_page_size_per_worker,
            )  # fmt: skip
            zero_loads = bool(self.extra_config.get(ZERO_LOADS, False))
            self._worker = CopyWorker(kv_caches, self.blocks_per_chunk, region, zero_loads)
        return self._worker
