"""vLLM's OffloadingConnector on a CPU: its own CPUOffloadingSpec, with a worker that copies between host memories.

vLLM's worker drives a GPU's copy engines and refuses to start without one. All else, the connector, its scheduler side
and its eviction, is vLLM's own. The copies run on background threads, as many as tierkv's connector has by default,
into memory on huge pages where the kernel gives them: as good as a host can do it.
"""

from __future__ import annotations

import mmap
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

COPY_THREADS = 2


def _host_rows(rows: int, row_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Zeroed host memory, touched, as (rows, row_bytes)."""
    memory = mmap.mmap(-1, max(1, rows * row_bytes))
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, dtype=np.uint8, count=rows * row_bytes).reshape(rows, row_bytes)
    array[:] = 0
    return array


class HostCopyWorker(OffloadingWorker):
    """Copies blocks between the engine's cache and rows of host memory."""

    def __init__(self, caches: Any, row_count: int) -> None:
        self._groups = caches.group_data_refs
        self._cache = [tensor.tensor.view(torch.uint8).numpy() for tensor in caches.tensors]
        self._host = [_host_rows(row_count, tensor.page_size_bytes) for tensor in caches.tensors]
        self._pool = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="offloading-copy")
        self._lock = threading.Lock()
        self._open: dict[int, Future[None]] = {}
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """From the engine's cache to host memory."""
        return self._submit(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """From host memory to the engine's cache."""
        return self._submit(job_id, dst_spec, src_spec, store=False)

    def _submit(self, job_id: int, blocks: Any, rows: Any, store: bool) -> bool:
        pieces = self._pieces(blocks, rows)
        done: Future[None] = Future()
        with self._lock:
            self._open[job_id] = done
        shares = [pieces[start::COPY_THREADS] for start in range(min(COPY_THREADS, max(1, len(pieces))))]
        left = len(shares)
        size_bytes = sum(piece[0].nbytes for piece in pieces)
        began_s = time.perf_counter()

        def copy(share: list[tuple[Any, Any]]) -> None:
            nonlocal left
            for cache, host in share:
                np.copyto(*((host, cache) if store else (cache, host)))
            with self._lock:
                left -= 1
                if left:
                    return
                took_s = time.perf_counter() - began_s
                self._finished.append(TransferResult(job_id, True, size_bytes, took_s))
                del self._open[job_id]
            done.set_result(None)

        for share in shares:
            self._pool.submit(copy, share)
        return True

    def _pieces(self, blocks: Any, rows: Any) -> list[tuple[Any, Any]]:
        """(view of the cache, view of host memory) of each page of the transfer."""
        groups = [group for group, count in enumerate(blocks.group_sizes) for _ in range(count)]
        pieces = []
        for group, block, row in zip(groups, blocks.block_ids, rows.chunk_ids, strict=True):
            for ref in self._groups[group]:
                cache, host = self._cache[ref.tensor_idx], self._host[ref.tensor_idx]
                pieces.append((cache[block, : ref.page_size_bytes], host[row, : ref.page_size_bytes]))
        return pieces

    def get_finished(self) -> list[TransferResult]:
        """The transfers that have ended since the last call."""
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Returns when these transfers have ended."""
        with self._lock:
            waited = [self._open[job] for job in job_ids if job in self._open]
        for done in waited:
            done.result(timeout=60)

    def shutdown(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()


class HostOffloadingSpec(CPUOffloadingSpec):
    """CPUOffloadingSpec for engines on a CPU."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """The worker, made at the first call."""
        if self._worker is None:
            if self.blocks_per_chunk != 1:
                raise ValueError(
                    "this spec's rows hold one block each: leave block_size out of the extra config"
                )
            self._worker = HostCopyWorker(kv_caches, self.num_chunks)
        return self._worker
