"""`ShardLoader`: finished batches of a packed dataset for a training loop; the place where the parts are joined."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch.utils.dlpack import from_dlpack

from shardkit.dataset.fetch import Fetcher, budget_bytes
from shardkit.dataset.order import LastBatch, LoaderOrder, Shuffle
from shardkit.dataset.shardset import Dataset, open_dataset
from shardkit.errors import ConfigError
from shardkit.pipeline.cpu import PillowDecoder
from shardkit.pipeline.dali import DaliDecoder
from shardkit.pipeline.decoder import IMAGENET_MEAN, IMAGENET_STD, DecodedBatch, Decoder, DecodeSpec
from shardkit.storage.backends import open_reader
from shardkit.storage.buffers import BufferPool
from shardkit.torch.arguments import (
    DECODERS,
    dtype_name,
    require_choice,
    require_cpu,
    require_fields,
    three,
    whole,
)
from shardkit.torch.epoch import Batch, Epoch, LoaderStats, Totals
from shardkit.torch.ranks import resolve_rank

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from shardkit.storage.reader import Reader

__all__ = ["LoaderStats", "ShardLoader"]


class ShardLoader:
    """Iterates over a packed dataset in finished batches: `for images, labels in loader`.

    images: [B, 3, size, size], float32 by default, normalised, on the CPU; each batch is memory of its own. labels:
    int64 [B]; -1 for samples without a label. With `fields` a third part follows, a dict.

    Each `for` is one epoch. An epoch has a number, 0 at first, which decides order and random crops; every new
    iteration takes the next one, unless `set_epoch` named it. A new iteration ends one that is still running.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        batch_size: int,
        *,
        size: int = 224,
        train: bool = True,
        device: str | torch.device = "cpu",
        seed: int = 0,
        shuffle: Shuffle | None = None,
        last_batch: LastBatch | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        lanes: int | None = None,
        prefetch: int = 3,
        io: str = "auto",
        decoder: str = "auto",
        threads: int | None = None,
        dtype: str | torch.dtype = "float32",
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        channels_last: bool = False,
        augment: Callable[[Any], Any] | None = None,
        fields: Sequence[str] = (),
    ) -> None:
        """Open the dataset and prepare to iterate; nothing is read before.

        Args:
            path: the dataset's folder.
            batch_size: samples of one batch of this process.
            size: pixels of a side of the images.
            train: random resized crop and mirroring; False resizes the shorter side to size * 256 / 224 and takes the
                centre.
            device: "cpu"; this version has no other.
            seed: of order and crops; the same on every rank.
            shuffle: "global", a new random order of all samples each epoch, or "none", the stored order. None: global
                for training, none otherwise.
            last_batch: what becomes of the samples that do not fill the last batch: "drop" them, "pad" with samples
                from the epoch's start, or a "partial" batch. None: drop for training, partial otherwise.
            rank: this process, 0..world_size - 1; None with world_size: from torch.distributed, else 0 of 1.
            world_size: processes that train together.
            lanes: a constant of the run that every world size divides; None: the global batch.
            prefetch: batches that wait, read, for the decoder.
            io: "auto", "buffered" or "direct"; `stats()` says what auto took and why.
            decoder: "dali", "cpu" (Pillow) or "auto", which is dali.
            threads: that decode; None: as many as the process may use processors.
            dtype: "float32", "float16" or "uint8" (0..255, not normalised), or torch's names for them.
            mean: red, green, blue, on the scale 0..255.
            std: red, green, blue, on the scale 0..255.
            channels_last: the images' memory is in torch.channels_last order; the shape stays [B, 3, size, size].
            augment: a function on DALI nodes, called with the cropped images, uint8 [size, size, 3].
            fields: of "key" (list of str), "index" (int64 [B], numbers in the dataset), "json" (list of dict).

        Raises:
            ConfigError: an argument has no such value, or they do not go together.
            CapabilityError: DALI is not installed, or the device or way of reading cannot be had here.
            ShardkitError: as `shardkit.open`.
        """
        require_cpu(device)
        self._fields = require_fields(fields)
        require_choice("shuffle", shuffle, get_args(Shuffle))
        require_choice("decoder", decoder, DECODERS)
        # Python's integers: NumPy's would overflow in the arithmetic of orders.
        seed, batch_size, size = whole("seed", seed, 0), whole("batch_size", batch_size, 1), whole("size", size, 1)
        threads = 0 if threads is None else whole("threads", threads, 1)
        spec = DecodeSpec(
            size=size, train=train, dtype=dtype_name(dtype), channels_last=channels_last, mean=three("mean", mean),
            std=three("std", std), seed=seed, threads=threads, augment=augment,
        )  # fmt: skip
        self._spec = spec
        self._prefetch = whole("prefetch", prefetch, 1)
        place = resolve_rank(rank, world_size)
        self.dataset: Dataset = open_dataset(path)
        """The dataset underneath."""
        self._order = LoaderOrder(
            n=len(self.dataset), batch_size=batch_size, rank=place.rank, world_size=place.world_size,
            lanes=batch_size * place.world_size if lanes is None else whole("lanes", lanes, 1),
            last_batch=last_batch or ("drop" if train else "partial"),
            shuffle=shuffle or ("global" if train else "none"), seed=seed,
        )  # fmt: skip
        self._decoder: Decoder = PillowDecoder(spec) if decoder == "cpu" else DaliDecoder(spec, batch_size=batch_size)
        self._decoder_name = "cpu" if decoder == "cpu" else "dali"
        self._reader, self._choice = open_reader(io, self.dataset.shard_paths)
        self._pool = BufferPool(self._budget())
        self._next_epoch = 0
        self._totals = Totals()
        self._running: weakref.ref[Epoch] | None = None
        self._close = weakref.finalize(self, _give_back, self._reader, self._pool, self.dataset)
        self._close.atexit = False

    @property
    def mean(self) -> tuple[float, float, float]:
        """Red, green, blue, on the scale 0..255, as subtracted."""
        return self._spec.mean

    @property
    def std(self) -> tuple[float, float, float]:
        """Red, green, blue, on the scale 0..255, as divided by."""
        return self._spec.std

    @property
    def batch_size(self) -> int:
        """Samples of one batch of this process."""
        return self._order.batch_size

    @property
    def epoch(self) -> int:
        """The number that the next iteration takes."""
        return self._next_epoch

    def set_epoch(self, epoch: int) -> None:
        """Name the epoch of the next iteration.

        Raises:
            ConfigError: it is no whole number from 0 on.
        """
        self._next_epoch = whole("epoch", epoch, 0)

    def __len__(self) -> int:
        """Return the number of batches of an epoch: the same on every rank."""
        return self._order.steps

    def __iter__(self) -> Iterator[Batch]:
        """Start an epoch: reading begins now.

        Raises:
            ConfigError: the loader is closed.
        """
        if not self._close.alive:
            raise ConfigError("the loader is closed", path=self.dataset.path)
        self._stop_running()
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        order = self._order
        fetcher = Fetcher(
            self.dataset, self._reader, self._pool, ((step, order.batch(epoch, step)) for step in range(order.steps)),
            epoch=epoch, depth=self._prefetch, metadata="json" in self._fields,
        )  # fmt: skip
        running = Epoch(fetcher, self._decoder.decode(fetcher, epoch), self._render, self._totals)
        self._running = weakref.ref(running)
        return running

    def stats(self) -> LoaderStats:
        """Return what was read and waited for so far."""
        totals = self._totals
        return LoaderStats(
            batches=totals.batches, samples=totals.samples, bytes=dict(self._reader.counters),
            wait_read_s=totals.wait_read_s, wait_decode_s=totals.wait_decode_s, io=self._choice.backend,
            io_reason=self._choice.reason, decoder=self._decoder_name, buffer_budget_bytes=self._pool.budget_bytes,
            buffer_bytes=self._pool.mapped_bytes,
        )  # fmt: skip

    def close(self) -> None:
        """End a running iteration and give back threads, descriptors and buffers; idempotent."""
        self._stop_running()
        self._close()

    def __enter__(self) -> ShardLoader:
        """Return the loader."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _stop_running(self) -> None:
        running = self._running() if self._running is not None else None
        if running is not None:
            running.close()

    def _budget(self) -> int:
        # Waiting for the decoder, inside it, and the one that is being read.
        slots = self._prefetch + self._decoder.in_flight + 1
        return budget_bytes(
            self.dataset, batch_size=self.batch_size, slots=slots, align=self._reader.align,
            metadata="json" in self._fields,
        )  # fmt: skip

    def _render(self, decoded: DecodedBatch) -> Batch:
        batch = decoded.batch
        images = from_dlpack(decoded.pixels)
        if self._spec.channels_last:
            images = images.permute(0, 3, 1, 2)
        parts = images, torch.from_numpy(batch.labels)
        if not self._fields:
            return parts
        extras: dict[str, Any] = {}
        for field in self._fields:
            if field == "key":
                extras[field] = self.dataset.columns.texts("key")[batch.ids]
            elif field == "index":
                extras[field] = torch.from_numpy(batch.ids)
            else:
                extras[field] = batch.metadata
        return *parts, extras


def _give_back(reader: Reader, pool: BufferPool, dataset: Dataset) -> None:
    reader.close()
    pool.close()
    dataset.close()
