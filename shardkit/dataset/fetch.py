"""The reading side of a loader: a thread that keeps a bounded number of batches read ahead of whoever decodes them."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.dataset.batch import EncodedBatch
from shardkit.dataset.shardset import parse_metadata
from shardkit.errors import ConfigError, ShardkitError, ShortReadError
from shardkit.storage.coalesce import ReadPlan, coalesce

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    from shardkit.dataset.columns import Column
    from shardkit.dataset.shardset import Dataset, Located
    from shardkit.storage.buffers import BufferPool
    from shardkit.storage.reader import Reader

    _Ints = npt.NDArray[np.int64]

__all__ = ["GAP_BYTES", "SPAN_BYTES", "Fetcher", "budget_bytes", "read_batch"]

GAP_BYTES = 32 * 1024
"""Bytes between two wanted ranges that are read along: about what a further request costs."""
SPAN_BYTES = 1 << 20
"""Bytes of one request when neighbours are joined: large enough for the device, small enough to share out."""
_SIDEWAYS = 5  # EXIF orientations from here to 8 swap width and height


class Fetcher:
    """Reads the batches of an epoch ahead, in a thread of its own, until `depth` of them wait; then it rests.

    One consumer calls `get`; `close` may be called from any thread. The consumer releases each batch that it took:
    the thread waits when the pool's budget is used up. So a consumer may wait for a batch (`get(wait=True)`) only
    while it holds none, else both would wait for each other.
    """

    def __init__(
        self, dataset: Dataset, reader: Reader, pool: BufferPool, steps: Iterable[tuple[int, _Ints]], *,
        epoch: int, depth: int, metadata: bool = False,
    ) -> None:  # fmt: skip
        """Start to read.

        Args:
            dataset: whose samples; stays the caller's.
            reader: over its shards; stays the caller's.
            pool: lends the memory; a batch must fit into its budget (`budget_bytes`). Stays the caller's.
            steps: number of the step, sample numbers int64 [n]; consumed in the thread.
            epoch: of all these steps.
            depth: batches that may wait; >= 1.
            metadata: read the json members, too.

        Raises:
            ConfigError: `depth` is below 1.
        """
        if depth < 1:
            raise ConfigError("at least one batch is read ahead", expected=">= 1", found=depth)
        self._dataset, self._reader, self._pool = dataset, reader, pool
        self._epoch, self._depth, self._metadata = epoch, depth, metadata
        self._ready: deque[EncodedBatch | BaseException] = deque()
        self._changed = threading.Condition()
        self._ended = self._closed = False
        self.waited_s = 0.0
        """Seconds for which `get` has waited so far."""
        self._thread = threading.Thread(target=self._run, args=(iter(steps),), name="shardkit-fetch", daemon=True)
        self._thread.start()

    def get(self, *, wait: bool) -> EncodedBatch | None:
        """Return the next batch, in the order of the steps; see `shardkit.pipeline.decoder.BatchSource`."""
        started = time.perf_counter()
        with self._changed:
            while wait and not self._ready and not self._ended and not self._closed:
                self._changed.wait()
            item = self._ready.popleft() if self._ready else None
            self._changed.notify_all()
        if wait:
            self.waited_s += time.perf_counter() - started
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Stop the thread, wait for the read in progress, and release what was not taken; idempotent.

        Batches that were taken must be released before, or the thread could wait for their memory.
        """
        with self._changed:
            self._closed = True
            self._drop_ready()
            self._changed.notify_all()
        self._thread.join()
        self._drop_ready()

    def _run(self, steps: Iterator[tuple[int, _Ints]]) -> None:
        try:
            for step, ids in steps:
                if self._closed:
                    return
                batch = read_batch(
                    self._dataset, self._reader, self._pool, ids, epoch=self._epoch, step=step, metadata=self._metadata
                )
                if not self._hand_over(batch):
                    return
        except BaseException as error:  # whatever it is, the consumer has to see it
            with self._changed:
                self._ready.append(error)
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _hand_over(self, batch: EncodedBatch) -> bool:
        with self._changed:
            while len(self._ready) >= self._depth and not self._closed:
                self._changed.wait()
            if self._closed:
                batch.release()
                return False
            self._ready.append(batch)
            self._changed.notify_all()
            return True

    def _drop_ready(self) -> None:
        while self._ready:
            item = self._ready.popleft()
            if isinstance(item, EncodedBatch):
                item.release()


def read_batch(
    dataset: Dataset, reader: Reader, pool: BufferPool, ids: _Ints, *, epoch: int, step: int, metadata: bool
) -> EncodedBatch:
    """Read the images of `ids` into one leased buffer; not a byte of a payload is copied after the read.

    Args:
        dataset: whose samples.
        reader: over its shards, in host memory.
        pool: lends the buffer.
        ids: int64 [n].
        epoch: carried by the batch.
        step: carried by the batch.
        metadata: read the json members, too.

    Raises:
        StorageError: a shard cannot be read; names shard, offset and the first sample that it hit.
        IntegrityError: the index points outside a shard, or a json member is damaged.
    """
    located, json_offset, json_size = _locate(dataset, ids, metadata)
    plan = coalesce(
        np.concatenate([located.shard, located.shard]) if metadata else located.shard,
        np.concatenate([located.offset, json_offset]) if metadata else located.offset,
        np.concatenate([located.size, json_size]) if metadata else located.size,
        align=reader.align, gap_bytes=GAP_BYTES, max_bytes=SPAN_BYTES,
    )  # fmt: skip
    lease = pool.acquire(plan.buffer_bytes)
    try:
        reader.read_into(plan.ops(lease.view))
        views = _views(lease.view, plan, np.concatenate([located.size, json_size]))
        parsed = _parse(dataset, ids, located, json_offset, views[len(ids) :]) if metadata else None
    except BaseException as error:
        lease.release()
        if isinstance(error, ShardkitError) and error.key is None:
            _name_sample(error, dataset, ids, located)
        raise
    width, height = _shown_size(dataset, ids)
    return EncodedBatch(
        dataset=dataset, epoch=epoch, step=step, ids=ids, located=located, width=width, height=height,
        views=views[: len(ids)], metadata=parsed, lease=lease,
    )  # fmt: skip


def budget_bytes(dataset: Dataset, *, batch_size: int, slots: int, align: int, metadata: bool) -> int:
    """Return the memory for `slots` batches of usual size, and in any case for the largest that can come.

    Looks once at the sizes of all samples: about 10 ms a million.

    Args:
        dataset: whose sizes.
        batch_size: samples of a batch.
        slots: batches that hold memory at the same time.
        align: of the reader.
        metadata: whether json members are read, too.
    """
    parts = ("size", "json_size") if metadata else ("size",)
    largest = sum(_sum_of_largest(dataset.columns.numbers(name), batch_size) for name in parts)
    mean = dataset.manifest.totals.payload // max(len(dataset), 1)
    # An extent is widened to the alignment at both ends, and read together with the gap to the next one.
    extra = batch_size * len(parts) * (2 * align + GAP_BYTES)
    need = max(slots * batch_size * mean * 5 // 4, largest) + slots * extra
    return need + need // 8 + (64 << 10) * slots  # the pool rounds up by at most an eighth


def _sum_of_largest(column: Column, count: int) -> int:
    """Return the sum of the `count` largest values of a column."""
    top = np.zeros(0, np.int64)
    for chunk in column.chunks():
        kept = chunk if len(chunk) <= count else np.partition(chunk, len(chunk) - count)[-count:]
        top = np.concatenate([top, kept.astype(np.int64)])
        if len(top) > 64 * count:
            top = np.partition(top, len(top) - count)[-count:]
    return int(np.sort(top)[-count:].sum())


def _locate(dataset: Dataset, ids: _Ints, metadata: bool) -> tuple[Located, _Ints, _Ints]:
    located = dataset.locate(ids)
    if not metadata:
        return located, np.zeros(0, np.int64), np.zeros(0, np.int64)
    offset, size = (dataset.columns.numbers(name)[ids].astype(np.int64) for name in ("json_offset", "json_size"))
    return located, offset, size


def _shown_size(dataset: Dataset, ids: _Ints) -> tuple[_Ints, _Ints]:
    width, height = (dataset.columns.numbers(name)[ids].astype(np.int64) for name in ("width", "height"))
    sideways = dataset.columns.numbers("orientation")[ids] >= _SIDEWAYS
    return np.where(sideways, height, width), np.where(sideways, width, height)


def _views(buffer: memoryview, plan: ReadPlan, sizes: _Ints) -> list[npt.NDArray[np.uint8]]:
    whole = np.frombuffer(buffer, np.uint8)
    starts = plan.buffer_start.tolist()
    return [whole[start : start + size] for start, size in zip(starts, sizes.tolist(), strict=True)]


def _parse(
    dataset: Dataset, ids: _Ints, located: Located, offset: _Ints, texts: list[npt.NDArray[np.uint8]]
) -> list[dict[str, Any]]:  # Any: JSON values
    keys = dataset.columns.texts("key")[ids]
    paths = [dataset.shard_paths[shard] for shard in located.shard.tolist()]
    return [
        parse_metadata(text.tobytes(), path=path, offset=start, key=key) if text.size else {}
        for text, path, start, key in zip(texts, paths, offset.tolist(), keys, strict=True)
    ]


def _name_sample(error: ShardkitError, dataset: Dataset, ids: _Ints, located: Located) -> None:
    """Give an error of a read the key of the first sample that it hit; a read serves several samples."""
    path = os.fspath(error.path) if error.path is not None else ""
    if path not in dataset.shard_paths:
        return
    end = located.offset + located.size
    lost = os.stat(path).st_size if isinstance(error, ShortReadError) and os.path.exists(path) else error.offset or 0
    hit = np.flatnonzero((located.shard == dataset.shard_paths.index(path)) & (end > lost))
    if hit.size:
        first = hit[np.argmin(located.offset[hit])]
        error.key, error.offset = dataset.columns.texts("key")[int(ids[first])], int(located.offset[first])
