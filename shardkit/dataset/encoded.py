"""`EncodedLoader`: everything of a loader that comes before decoding. Batches of encoded images, epoch after epoch."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

from shardkit.dataset.arrangement import MixedPaths, Path, arrange, open_samples, split_weights
from shardkit.dataset.bad import BadSamples
from shardkit.dataset.fetch import Fetcher
from shardkit.dataset.intake import Intake
from shardkit.dataset.options import Check, ReadOptions
from shardkit.dataset.reading import SampleReader
from shardkit.dataset.source import BatchReading, SampleSource, Step
from shardkit.dataset.state import MAX_EPOCH, Position, run_identity
from shardkit.dataset.steps import BatchPlan
from shardkit.dataset.window import WindowOrder
from shardkit.dataset.windowed import WindowReading

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType

    from shardkit.dataset.samples import Samples
    from shardkit.dataset.selection import Expression
    from shardkit.dataset.source import Reading
    from shardkit.storage.backends import Choice
    from shardkit.storage.buffers import BufferPool
    from shardkit.storage.device import Device
    from shardkit.storage.reader import Reader

__all__ = ["Check", "EncodedLoader", "ReadOptions"]


class EncodedLoader:
    """The reading half of a loader: a dataset, or a mix of them, as batches of encoded images.

    >>> with EncodedLoader.open("ds/", ReadOptions(batch_size=256)) as loader:  # doctest: +SKIP
    ...     fetcher = loader.start(Position(0, 0))
    ...     while (batch := fetcher.get(wait=True)) is not None:
    ...         images = batch.views  # NumPy arrays of bytes, valid until the release
    ...         batch.release()
    ...     fetcher.close()
    """

    def __init__(
        self, samples: Samples, options: ReadOptions, *, weights: Sequence[float] | None = None,
        device: Device | None = None,
    ) -> None:  # fmt: skip
        """Work out order and memory; nothing of a shard is read.

        Args:
            samples: what is iterated over; taken over: `close` closes it, and so does an error here.
            options: everything else.
            weights: of the datasets of a mix; None without a mix.
            device: that decodes; stays the caller's. Host memory is then pinned for it; GPU memory is its own.

        Raises:
            ConfigError: an option is out of its range, or they do not go together.
            CapabilityError: the way of reading cannot be had here, or there is no memory for the batches.
        """
        self.options = options
        self._fetchers: list[Fetcher] = []
        self.samples, self._weights = samples, weights
        try:
            self._arrange()
            self._prepare_reading(device)
        except BaseException:
            samples.close()
            raise

    @classmethod
    def open(
        cls, path: Path | MixedPaths, options: ReadOptions, *,
        labels: Iterable[int | str] | None = None, where: Expression | str | None = None,
        keys: Iterable[str] | None = None, device: Device | None = None,
    ) -> EncodedLoader:  # fmt: skip
        """Open the datasets, too.

        Args:
            path: the dataset's folder, or [(folder, weight), ...].
            options: everything else.
            labels: only samples of these classes, numbers or names.
            where: only samples that fulfil this condition on the index, a text or a `pyarrow.compute` expression.
            keys: only the samples with these keys.
            device: as for the constructor.

        Raises:
            ShardkitError: as the constructor and `shardkit.open`.
        """
        paths, weights = split_weights(path)
        samples = open_samples(paths, labels=labels, where=where, keys=keys)
        return cls(samples, options, weights=weights, device=device)

    def start(self, position: Position, *, endless: bool = False) -> Fetcher:
        """Begin to read the batches of an epoch from a step on; one at a time, since they share the memory.

        Args:
            position: of the first batch.
            endless: whether the batches of the next epochs follow, for who takes them in their turn.
        """
        self._close_fetchers()  # one that an interrupt has left behind would keep its memory
        options = self.options
        return Fetcher(
            self._reading(endless), self._steps(position, endless), depth=options.waiting(self.samples),
            replace=self._source.replace, oldest=self._source.reader.oldest, opened=self._fetchers,
            stuck_after_s=options.stuck_after_s, timeout_s=options.timeout_s,
        )  # fmt: skip

    @functools.cached_property
    def identity(self) -> dict[str, Any]:  # Any: JSON values
        """What decides which samples come at which step; see `shardkit.dataset.state.run_identity`."""
        return run_identity(self.samples, self._order, self.plan, seed=self.options.seed, shuffle=self.options.shuffle)

    @property
    def crc_retries(self) -> int:
        """Images whose CRC was wrong in what was read first, and right past the page cache."""
        return self._source.reader.crc_retries

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that encoded images take at most, all of it taken when the loader is made.

        "host" and "pinned" of host memory; of the GPU's "gpu encoded" for images on their way to the decoder, and
        "gpu cache" for shards that stay there. For a moment there is more: a substitute, and what is compared with its
        CRC.
        """
        return dict(self._intake.memory)

    @property
    def cache_counts(self) -> dict[str, int]:
        """What `cache_gpu` was worth so far; see `ResidentShards.counts`. Empty where nothing is kept."""
        return {} if self._intake.resident is None else self._intake.resident.counts

    def close(self, *, wait: bool = True) -> None:
        """Give back descriptors, threads and memory; idempotent.

        Args:
            wait: for reads in progress. Without it they are waited for in a thread of its own.
        """
        memory = self.pool.memory  # stays mapped until the reader is closed, as `register` demands
        self.pool.close()
        wait &= self._close_fetchers()
        if self._intake.resident is not None:
            self._intake.resident.close()
        if wait:
            self.reader.close()
        else:
            closing = threading.Thread(target=_close, args=(self.reader, memory), name="shardkit-close", daemon=True)
            closing.start()
        self.samples.close()

    def __enter__(self) -> EncodedLoader:
        """Return the loader."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _close_fetchers(self) -> bool:
        """Close all that were started; return whether no read hangs."""
        ended = True
        while self._fetchers:
            ended &= self._fetchers[-1].close()
            self._fetchers.pop()
        return ended

    def _arrange(self) -> None:
        options = self.options
        lanes = options.lanes
        if lanes is None:
            share = 1 if options.shuffle == "window" else options.batch_size
            lanes = options.world_size * share
        self.plan = BatchPlan(
            n=len(self.samples), batch_size=options.batch_size, rank=options.rank, world_size=options.world_size,
            lanes=lanes, last_batch=options.last_batch,
        )  # fmt: skip
        """The steps of this rank."""
        self._order = arrange(
            self.samples, options.shuffle, seed=options.seed, weights=self._weights, lanes=lanes,
            extent_bytes=options.extent_bytes, window_extents=options.window_extents,
        )  # fmt: skip

    def _prepare_reading(self, device: Device | None) -> None:
        options = self.options
        self._intake = intake = Intake(self.samples, options, self.plan, self._order, device)
        self.reader: Reader = intake.reader
        """Of the shards."""
        self.choice: Choice = intake.choice
        """Which reader that is, and why."""
        self.pool: BufferPool = intake.pool
        """What batches are read into."""
        self.bad = BadSamples(self.samples, options.on_bad)
        try:
            reader = SampleReader(
                self.samples, self.reader, metadata=options.metadata, crc=options.check == "crc",
                device=intake.device, resident=intake.resident,
            )  # fmt: skip
        except BaseException:
            self.reader.close()
            raise
        self._source = SampleSource(reader, self._order, self.bad, seed=options.seed)

    def _steps(self, position: Position, endless: bool) -> Iterator[Step]:
        plan = self.plan
        for epoch in range(position.epoch, (MAX_EPOCH if endless else position.epoch) + 1):
            for at in range(position.step if epoch == position.epoch else 0, plan.steps):
                yield Step(epoch, at, plan.positions(at))

    def _reading(self, endless: bool) -> Reading:
        if isinstance(self._order, WindowOrder):
            piece_bytes = self._intake.piece_bytes
            return WindowReading(
                self._source, self.pool, self._order, self.plan, piece_bytes=piece_bytes, endless=endless
            )
        return BatchReading(self._source, self.pool)


def _close(reader: Reader, memory: memoryview) -> None:
    """Close a reader, and let go of the memory that was registered with it."""
    reader.close()
    del memory
