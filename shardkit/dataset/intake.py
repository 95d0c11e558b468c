"""Where encoded images come in: the reader of a loader, and all memory that it reads into.

What that takes is counted from the index and taken before anything is read; `Intake.memory` tells it.
"""

from __future__ import annotations

import logging
import mmap
from typing import TYPE_CHECKING, Literal

from shardkit.dataset.budget import batch_budget, piece_bytes, pieces_held, pieces_wanted
from shardkit.dataset.resident import ResidentShards
from shardkit.dataset.space import device_memory
from shardkit.dataset.window import WindowOrder
from shardkit.errors import CapabilityError, ConfigError
from shardkit.extent import align_up
from shardkit.storage.backends import FAST_ENOUGH, open_reader
from shardkit.storage.buffers import BufferPool
from shardkit.storage.device_backends import ENGINES_GBPS, RING_BYTES, open_device_reader
from shardkit.storage.reader import HOST
from shardkit.storage.ring import host_ring
from shardkit.storage.staged import StagedReader

if TYPE_CHECKING:
    from shardkit.dataset.options import ReadOptions
    from shardkit.dataset.order import Order
    from shardkit.dataset.samples import Samples
    from shardkit.dataset.steps import BatchPlan
    from shardkit.storage.backends import Choice
    from shardkit.storage.device import Device
    from shardkit.storage.reader import Reader

__all__ = ["Intake"]

_HUGE = 2 << 20

_log = logging.getLogger(__name__)


class Intake:
    """Reader and memory of a loader, whose they are: it closes the reader, the pool, and what stays."""

    def __init__(
        self, samples: Samples, options: ReadOptions, plan: BatchPlan, order: Order, device: Device | None
    ) -> None:
        """Open the reader, count, and take the memory.

        Args:
            samples: to be read; the caller's, as everything here.
            options: how.
            plan: the steps of this rank.
            order: of an epoch.
            device: that decodes; None without one.

        Raises:
            ConfigError: images are wanted in the memory of another device.
            CapabilityError: the way of reading cannot be had here, or there is no memory for the batches.
        """
        if options.space != HOST and (device is None or device.space != options.space):
            found = "no device" if device is None else device.space
            raise ConfigError("images in GPU memory need that GPU", expected=options.space, found=found)
        self._samples, self._options, self._plan, self._order = samples, options, plan, order
        self._for_gpu = device is not None  # threads that drive one need the interpreter's lock
        self.device = device if options.space != HOST else None
        """Whose memory the images come into; None for host memory."""
        self.reader: Reader
        self.choice: Choice
        self.reader, self.choice = self._open()
        try:
            self.resident = self._keep_shards()
            """The shards that stay in GPU memory; None without any."""
            self.piece_bytes = 0
            """Bytes of a piece of a windowed order that comes into the pool; 0 where none does."""
            if isinstance(order, WindowOrder) and not (self.resident is not None and self.resident.holds_all):
                self.piece_bytes = piece_bytes(samples, order, align=self.reader.align)
            self._pinned = False  # not the ring itself, which goes with the pool
            self.pool = self._make_pool(device)
            self.reader.register(self.pool.memory)  # and not what stays: each byte of that is read into once
        except BaseException:
            self.reader.close()
            raise
        self.memory = self._taken()
        """Bytes that were taken, none of which grows: "host" and "pinned" of host memory; "gpu encoded" of the device's
        for images on their way, "gpu cache" for shards that stay."""

    def _open(self) -> tuple[Reader, Choice]:
        options, paths = self._options, self._samples.shard_paths
        pattern: Literal["random", "sequential"] = "random" if options.shuffle == "global" else "sequential"
        if self.device is None:
            enough = ENGINES_GBPS if self._for_gpu else FAST_ENOUGH
            return open_reader(options.io, paths, pattern=pattern, batched=self._for_gpu, enough=enough)
        ring_bytes = min(RING_BYTES, align_up(max(self._samples.total_payload, 1), _HUGE))
        return open_device_reader(
            options.io, paths, self.device, pattern=pattern, staging=options.staging, ring_bytes=ring_bytes
        )

    def _keep_shards(self) -> ResidentShards | None:
        device, align = self.device, self.reader.align
        if device is None or not self._options.cache_gpu:
            return None
        kept = ResidentShards(
            self._samples, budget_bytes=self._options.cache_gpu, align=align,
            allocate=lambda nbytes: device_memory(device, nbytes, align),
        )  # fmt: skip
        if kept.shards:
            return kept
        least, given = int(self._samples.shard_bytes.min()), self._options.cache_gpu
        _log.warning("cache_gpu keeps nothing: the smallest shard has %d bytes, not %d", least, given)
        return None

    def _pool_bytes(self, *, least: bool = False) -> int:
        """Return the bytes with which reading seldom waits for memory, or the least with which it ends at all."""
        samples, options, align = self._samples, self._options, self.reader.align
        page = max(align, mmap.PAGESIZE)
        if self.resident is not None and self.resident.holds_all:
            return page  # nothing comes into the pool
        if isinstance(self._order, WindowOrder):
            pieces = (pieces_held if least else pieces_wanted)(self._plan, self._order)
            return pieces * (self.piece_bytes + page)
        batch_size = options.batch_size if options.last_batch == "pad" else min(options.batch_size, len(samples))
        slots = 2 if least else options.most_batches(samples)
        return batch_budget(samples, batch_size=batch_size, slots=slots, align=align, metadata=options.metadata)

    def _make_pool(self, device: Device | None) -> BufferPool:
        wanted = self._pool_bytes()
        try:
            pool = self._pool_of(wanted, device)
        except CapabilityError:
            least = self._pool_bytes(least=True)
            if least >= wanted:
                raise
            pool = self._pool_of(least, device)
            _log.warning("reading has to do with %d bytes of memory for images, not %d: it may wait", least, wanted)
        if pool.budget_bytes < wanted and pool.budget_bytes < (least := self._pool_bytes(least=True)):
            raise CapabilityError(
                "there is no memory for the batches", expected=f"{least} bytes", found=pool.budget_bytes,
                remedy="take a smaller batch_size, or with shuffle='window' smaller extent_bytes",
            )  # fmt: skip
        return pool

    def _pool_of(self, nbytes: int, device: Device | None) -> BufferPool:
        """Return a pool where the images come in; a ring near a device may be smaller than asked for."""
        align = self.reader.align
        if device is None:
            return BufferPool(nbytes, align=align)
        if self.device is not None:
            return BufferPool(nbytes, align=align, memory=lambda size: device_memory(device, size, align))
        ring = host_ring(nbytes, device)
        self._pinned = ring.pinned
        return BufferPool(nbytes, align=align, memory=lambda _: ring.memory)

    def _taken(self) -> dict[str, int]:
        taken = {"host": 0, "pinned": 0, "gpu encoded": 0, "gpu cache": 0}
        kind = "gpu encoded" if self.device is not None else "pinned" if self._pinned else "host"
        taken[kind] = self.pool.budget_bytes
        if isinstance(self.reader, StagedReader):
            managed = self._options.staging == "managed"
            kind = "gpu encoded" if managed else "pinned" if self.reader.pinned else "host"
            taken[kind] += self.reader.ring_bytes
        if self.resident is not None:
            taken["gpu cache"] = self.resident.nbytes
        return taken
