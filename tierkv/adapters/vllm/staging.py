"""Staging: the way of blocks between an accelerator and the store.

The client's threads copy between the store and host memory; what is on a device passes through staging memory that both
can reach. A kernel a plate brings the chosen blocks side by side in the device's memory (or from there to their
places), and one copy takes them over the bus, while the store is busy with another slot.

Staging is taken when the engine starts, before it captures graphs, and never grows.

An engine must not take the memory of its cache away (sleep) while saves are under way: as long as their jobs are not
done, the device may read it.

The CUDA side has never been run on a GPU (device.py).

A later step: the client maps the agent's arena; page-locked once for the device (cudaHostRegister), it could be copied
from and to directly, without staging and the client's copy. That needs the arena to be registered with the device each
time it is mapped, and the client's leases to be kept until the device's copies have ended.
"""

from __future__ import annotations

import copy
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import numpy as np

from tierkv.adapters.vllm.device import CudaDevice, Device, Lane, device_kind
from tierkv.adapters.vllm.identity import Shard
from tierkv.adapters.vllm.layout import GroupCache
from tierkv.adapters.vllm.pipes import MAX_CHUNK_BLOCKS, LoadPipe, Runs, SavePipe, Slot
from tierkv.adapters.vllm.plates import ALIGNMENT_BYTES, Rows, plan_plates
from tierkv.adapters.vllm.worker import HostPath, Path
from tierkv.errors import ArgumentError, ConfigError, StorageError
from tierkv.fragments import Fragments
from tierkv.jobs import Job
from tierkv.keys import Keyspace
from tierkv.store.calls import MoveCalls
from tierkv.types import HashArray, Int64Array

SLOTS = 4
"""Of each way: one with the store, one with the device, and one each that is just done."""
_TRIAL_TIMEOUT_S = 60.0


class Staging:
    """The staging memory of one worker on one device, and its pipes. Close it before the store."""

    def __init__(self, store: MoveCalls, device: Device, staging_bytes: int) -> None:
        """staging_bytes: of host memory, and as much of the device's. StorageError if that cannot be had."""
        self.store = store
        self.staging_bytes = staging_bytes
        self.slot_bytes = staging_bytes // (2 * SLOTS) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.device = device
        slots = [Slot(device, self.slot_bytes) for _ in range(2 * SLOTS)]
        self._trial = slots[0]
        self._in, self._out = device.lane("tierkv-vllm-to-device"), device.lane("tierkv-vllm-from-device")
        self.loads = LoadPipe(self._in, slots[:SLOTS])
        self.saves = SavePipe(self._out, slots[SLOTS:])

    def path(self, space: Keyspace, cache: GroupCache, shard: Shard) -> DevicePath:
        """The path of one group. Before anything is moved.

        ConfigError if a block does not fit a slot, StorageError if the device does not do what is asked of it.
        """
        path = DevicePath(self, space, cache, shard)
        self._try(path)
        return path

    def _try(self, path: DevicePath) -> None:
        """Block 0 is read, and its bytes written back to it: loads the kernels now, and fails at the start if ever."""
        block_ids = np.zeros(1, np.int64)
        slot = self._trial
        self._wait(self._out, lambda: path.copy_out(slot, block_ids))
        self._wait(self._in, lambda: path.copy_in(slot, block_ids, [(0, 1)]))

    def _wait(self, lane: Lane, work: Any) -> None:
        ended: Future[Exception | None] = Future()
        lane.run(self.device.mark(), work, ended.set_result)
        try:
            error = ended.result(_TRIAL_TIMEOUT_S)
        except FutureTimeout:
            error = TimeoutError(f"it took more than {_TRIAL_TIMEOUT_S:g} s")
        if error is not None:
            raise StorageError(
                f"a block of the KV cache cannot be copied to or from {self.device}: {error}; "
                f"with this device, run the engine without the connector"
            ) from error

    def close(self, timeout_s: float) -> bool:
        """Ends what is under way; False if some did not end in time."""
        deadline_s = time.monotonic() + timeout_s
        ended = True
        for part in (self.loads, self.saves, self._in, self._out):
            ended &= part.close(max(0.0, deadline_s - time.monotonic()))
        return ended


class DevicePath:
    """One group's blocks on a device; worker.Path. A route of the pipes."""

    def __init__(self, staging: Staging, space: Keyspace, cache: GroupCache, shard: Shard) -> None:
        import torch

        self._torch = torch
        self._staging = staging
        self._space = space
        self._cache = cache
        self._part = shard.part
        storages = {storage.data_ptr(): storage for storage in map(_storage, cache.tensors)}
        memories = [(address, storage.nbytes()) for address, storage in storages.items()]
        plates = plan_plates(cache, memories)
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        device = cache.tensors[0].device
        self._views: list[Any] = []
        """A plate each: (blocks, *sizes, items of a run), of the engine's own memory."""
        for plate in plates:
            item = plate.item_bytes
            address = memories[plate.memory][0]
            self._views.append(
                torch.empty(0, dtype=integers[item], device=device).set_(
                    storages[address], (plate.base - address) // item,
                    (cache.blocks, *plate.sizes, plate.length // item),
                    (plate.stride // item, *(step // item for step in plate.steps), 1),
                )
            )  # fmt: skip
        self._rows = Rows.of(plates)
        self._chunk_blocks = min(MAX_CHUNK_BLOCKS, self._rows.fitting(staging.slot_bytes))
        if not self._chunk_blocks:
            needed = (cache.block_bytes + ALIGNMENT_BYTES * len(plates)) * 2 * SLOTS
            raise ConfigError(
                f"a block of {cache.block_bytes} bytes does not fit in {2 * SLOTS} slots of staging_bytes "
                f"{staging.staging_bytes}: set kv_connector_extra_config.staging_bytes to {needed} or more"
            )

    @property
    def plates(self) -> int:
        """How many kernels move a chunk."""
        return len(self._views)

    @property
    def chunk_blocks(self) -> int:
        """How many blocks a slot takes."""
        return self._chunk_blocks

    def load(self, hashes: HashArray, block_ids: Int64Array, timeout_s: float) -> Job:
        """Brings (n,) blocks into the cache, after what this thread has ordered on the device so far."""
        block_ids = self._checked(hashes, block_ids)
        return self._staging.loads.submit(self, hashes, block_ids, self._staging.device.mark(), timeout_s)

    def save(self, hashes: HashArray, block_ids: Int64Array, timeout_s: float) -> Job:
        """Hands (n,) blocks of the cache to the store, as they are after what this thread has ordered so far.

        The blocks must keep their bytes until the job is done.
        """
        block_ids = self._checked(hashes, block_ids)
        return self._staging.saves.submit(self, hashes, block_ids, self._staging.device.mark(), timeout_s)

    def renewed(self, space: Keyspace) -> DevicePath:
        """See worker.Path: what is under way has the route that it began with."""
        path = copy.copy(self)
        path._space = space
        return path

    def _checked(self, hashes: HashArray, block_ids: Int64Array) -> Int64Array:
        """A copy of the ids; ArgumentError if one is not in the cache."""
        if len(hashes) != len(block_ids):
            raise ArgumentError(f"{len(hashes)} hashes but {len(block_ids)} block ids: they must be as many")
        return self._cache.fragments(block_ids).block_ids.copy()

    # The route

    def store_load(self, hashes: HashArray, slot: Slot, timeout_s: float) -> Job:
        """From the store into the slot."""
        staged = self._staged(slot, len(hashes))
        return self._staging.store.load(self._space, hashes, staged, self._part, timeout_s)

    def store_save(self, hashes: HashArray, slot: Slot, timeout_s: float) -> Job:
        """From the slot to the store."""
        staged = self._staged(slot, len(hashes))
        return self._staging.store.save(self._space, hashes, staged, self._part, timeout_s)

    def _staged(self, slot: Slot, blocks: int) -> Fragments:
        rows, (offsets, _) = self._rows.row_bytes, self._rows.offsets(blocks)
        return Fragments(slot.address + offsets, rows, rows, np.arange(blocks), (slot.host,))

    def copy_out(self, slot: Slot, block_ids: Int64Array) -> None:
        """Orders the copies from the engine's blocks to the slot's rows, on the current stream."""
        with self._torch.inference_mode():
            index = self._index(slot, block_ids)
            windows, total = self._windows(slot, len(block_ids))
            for view, window in zip(self._views, windows, strict=True):
                self._torch.index_select(view, 0, index, out=window)
            slot.host[:total].copy_(slot.scratch[:total], non_blocking=True)

    def copy_in(self, slot: Slot, block_ids: Int64Array, runs: Runs) -> None:
        """Orders the copies from these of the slot's rows to the engine's blocks, on the current stream."""
        with self._torch.inference_mode():
            index = self._index(slot, block_ids)
            windows, total = self._windows(slot, len(block_ids))
            slot.scratch[:total].copy_(slot.host[:total], non_blocking=True)
            for view, window in zip(self._views, windows, strict=True):
                for first, end in runs:
                    view.index_copy_(0, index[first:end], window[first:end])

    def _index(self, slot: Slot, block_ids: Int64Array) -> Any:
        """The ids on the device."""
        count = len(block_ids)
        slot.ids[:count].copy_(self._torch.from_numpy(block_ids))
        return slot.device_ids[:count].copy_(slot.ids[:count], non_blocking=True)

    def _windows(self, slot: Slot, blocks: int) -> tuple[list[Any], int]:
        """A plate's rows each, in the device's memory, and the bytes of all."""
        offsets, total = self._rows.offsets(blocks)
        return [
            slot.scratch[offset : offset + blocks * size].view(view.dtype).view(blocks, *view.shape[1:])
            for offset, size, view in zip(
                offsets.tolist(), self._rows.row_bytes.tolist(), self._views, strict=True
            )
        ], total


class PathMaker:
    """Chooses the groups' paths by where their caches are. Paths are made before anything is moved."""

    def __init__(self, store: MoveCalls, staging_bytes: int) -> None:
        self._store = store
        self._staging_bytes = staging_bytes
        self._staging: Staging | None = None
        self._device: Any = None

    def path(self, space: Keyspace, cache: GroupCache, shard: Shard) -> Path:
        """The path of one group. ConfigError for caches on a device that is not known, or on several."""
        kinds = {device_kind(tensor) for tensor in cache.tensors}
        if kinds == {"cpu"}:
            return HostPath(self._store, space, cache, shard)
        devices = {tensor.device for tensor in cache.tensors} | ({self._device} if self._device else set())
        if len(devices) > 1:
            raise ConfigError(
                f"one worker's KV cache is spread over {', '.join(sorted(map(str, devices)))}: the tierkv connector "
                f"moves blocks of one device a worker; run this engine without the connector"
            )
        if self._staging is None:
            (self._device,) = devices
            self._staging = Staging(self._store, self._open(self._device), self._staging_bytes)
        return self._staging.path(space, cache, shard)

    def _open(self, device: Any) -> Device:
        return CudaDevice(device)

    def close(self, timeout_s: float) -> bool:
        """As Staging.close()."""
        return self._staging is None or self._staging.close(timeout_s)


def _storage(tensor: Any) -> Any:
    return tensor.untyped_storage()
