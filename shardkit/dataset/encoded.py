"""`EncodedLoader`: everything of a loader that comes before decoding. Batches of encoded images, epoch after epoch."""

from __future__ import annotations

import functools
import mmap
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from shardkit.dataset.arguments import require_choice
from shardkit.dataset.arrangement import MixedPaths, Path, Shuffle, arrange, open_samples, split_weights
from shardkit.dataset.bad import BadSamples, OnBad
from shardkit.dataset.budget import batch_budget, piece_bytes, pieces_held
from shardkit.dataset.fetch import STUCK_AFTER_S, Fetcher
from shardkit.dataset.reading import SampleReader
from shardkit.dataset.source import BatchReading, SampleSource, Step
from shardkit.dataset.state import Position, run_identity
from shardkit.dataset.steps import BatchPlan, LastBatch
from shardkit.dataset.window import WindowOrder
from shardkit.dataset.windowed import WindowReading
from shardkit.errors import ConfigError
from shardkit.storage.backends import IO_NAMES, open_reader
from shardkit.storage.buffers import BufferPool

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from shardkit.dataset.samples import Samples
    from shardkit.dataset.selection import Expression
    from shardkit.dataset.source import Reading
    from shardkit.storage.backends import Choice
    from shardkit.storage.reader import Reader

__all__ = ["Check", "EncodedLoader", "ReadOptions"]

Check: TypeAlias = Literal["none", "crc"]
"""What is compared while reading: nothing, or the CRC-32C of every image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Which samples a rank gets, in which order, and how they are read."""

    batch_size: int
    """Samples of a batch of this rank."""
    rank: int = 0
    """0..world_size - 1."""
    world_size: int = 1
    """Ranks."""
    lanes: int | None = None
    """A constant of the run that every world size divides; None: the global batch, with "window" the world size."""
    seed: int = 0
    """0..2**64 - 1; of order and substitutes."""
    shuffle: Shuffle = "global"
    """The order of an epoch."""
    extent_bytes: int = 4 << 20
    """Of "window": bytes of neighbouring images that are read together, about."""
    window_extents: int = 32
    """Of "window": extents whose samples are shuffled together."""
    last_batch: LastBatch = "drop"
    """The end of an epoch."""
    io: str = "auto"
    """The way of reading; one of `shardkit.storage.backends.IO_NAMES`."""
    prefetch: int = 3
    """Batches that wait, read."""
    in_flight: int = 1
    """Batches that the consumer holds at the same time."""
    metadata: bool = False
    """Read the json members, too."""
    check: Check = "none"
    """What is compared while reading."""
    on_bad: OnBad = "substitute"
    """What becomes of samples that cannot be used."""
    stuck_after_s: float = STUCK_AFTER_S
    """Seconds until a read that does not end is reported."""
    timeout_s: float | None = None
    """Seconds until such a read is an error; None waits."""

    def __post_init__(self) -> None:
        """Refuse what is out of range; ranks, lanes and orders are looked at where they are made.

        Raises:
            ConfigError: an option is.
        """
        require_choice("shuffle", self.shuffle, get_args(Shuffle))
        require_choice("last_batch", self.last_batch, get_args(LastBatch))
        require_choice("io", self.io, IO_NAMES)
        require_choice("check", self.check, get_args(Check))
        require_choice("on_bad", self.on_bad, get_args(OnBad))
        for name, number in (("prefetch", self.prefetch), ("in_flight", self.in_flight)):
            if number < 1:
                raise ConfigError(f"{name} is too small", expected=f"{name} >= 1", found=number)
        for name, time_s in (("stuck_after_s", self.stuck_after_s), ("timeout_s", self.timeout_s)):
            if time_s is not None and not time_s > 0:
                raise ConfigError(f"{name} is a time in seconds", expected=f"{name} > 0", found=time_s)


class EncodedLoader:
    """The reading half of a loader: a dataset, or a mix of them, as batches of encoded images.

    >>> with EncodedLoader("ds/", ReadOptions(batch_size=256)) as loader:  # doctest: +SKIP
    ...     fetcher = loader.start(Position(0, 0))
    ...     while (batch := fetcher.get(wait=True)) is not None:
    ...         images = batch.views  # NumPy arrays of bytes, valid until the release
    ...         batch.release()
    ...     fetcher.close()
    """

    def __init__(
        self, path: Path | MixedPaths, options: ReadOptions, *,
        labels: Iterable[int | str] | None = None, where: Expression | None = None, keys: Iterable[str] | None = None,
    ) -> None:  # fmt: skip
        """Open the datasets and work out order and memory; nothing of a shard is read.

        Args:
            path: the dataset's folder, or [(folder, weight), ...].
            options: everything else.
            labels: only samples of these classes, numbers or names.
            where: only samples for which this `pyarrow.compute` expression over the index is true.
            keys: only the samples with these keys.

        Raises:
            ConfigError: an option is out of its range, or they do not go together.
            CapabilityError: the way of reading cannot be had here, or there is no memory for the batches.
            ShardkitError: as `shardkit.open`.
        """
        self.options = options
        self._fetchers: list[Fetcher] = []
        paths, self._weights = split_weights(path)
        self.samples: Samples = open_samples(paths, labels=labels, where=where, keys=keys)
        """What is iterated over."""
        try:
            self._arrange()
            self._prepare_reading()
        except BaseException:
            self.samples.close()
            raise

    def start(self, position: Position) -> Fetcher:
        """Begin to read the batches of an epoch from a step on; one at a time, since they share the memory."""
        self._close_fetchers()  # one that an interrupt has left behind would keep its memory
        plan = self.plan
        steps = (Step(position.epoch, at, plan.positions(at)) for at in range(position.step, plan.steps))
        options = self.options
        return Fetcher(
            self._reading(), steps, depth=options.prefetch, replace=self._source.replace,
            oldest=self._source.reader.oldest, opened=self._fetchers, stuck_after_s=options.stuck_after_s,
            timeout_s=options.timeout_s,
        )  # fmt: skip

    @functools.cached_property
    def identity(self) -> dict[str, Any]:  # Any: JSON values
        """What decides which samples come at which step; see `shardkit.dataset.state.run_identity`."""
        return run_identity(self.samples, self._order, self.plan, seed=self.options.seed, shuffle=self.options.shuffle)

    @property
    def crc_retries(self) -> int:
        """Images whose CRC was wrong in what was read first, and right past the page cache."""
        return self._source.reader.crc_retries

    def close(self, *, wait: bool = True) -> None:
        """Give back descriptors, threads and memory; idempotent.

        Args:
            wait: for reads in progress. Without it they are waited for in a thread of its own.
        """
        memory = self.pool.memory  # stays mapped until the reader is closed, as `register` demands
        self.pool.close()
        wait &= self._close_fetchers()
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

    def _prepare_reading(self) -> None:
        options = self.options
        pattern: Literal["random", "sequential"] = "random" if options.shuffle == "global" else "sequential"
        self.reader: Reader
        self.choice: Choice
        self.reader, self.choice = open_reader(options.io, self.samples.shard_paths, pattern=pattern)
        try:
            self.pool = BufferPool(self._budget(), align=self.reader.align)
            self.reader.register(self.pool.memory)
        except BaseException:
            self.reader.close()
            raise
        self.bad = BadSamples(self.samples, options.on_bad)
        reader = SampleReader(self.samples, self.reader, metadata=options.metadata, crc=options.check == "crc")
        self._source = SampleSource(reader, self._order, self.bad, seed=options.seed)

    def _budget(self) -> int:
        """Return the bytes of the pool, and keep what a piece of a windowed order takes."""
        options, align = self.options, self.reader.align
        batch_size = options.batch_size if options.last_batch == "pad" else min(options.batch_size, len(self.samples))
        self._piece_bytes = 0
        if isinstance(self._order, WindowOrder):
            self._piece_bytes = piece_bytes(self.samples, self._order, align=align)
            return pieces_held(self.plan, self._order) * (self._piece_bytes + max(align, mmap.PAGESIZE))
        # Those that wait, those inside of the decoder, and the two that are being read.
        slots = options.prefetch + options.in_flight + 2
        return batch_budget(self.samples, batch_size=batch_size, slots=slots, align=align, metadata=options.metadata)

    def _reading(self) -> Reading:
        if isinstance(self._order, WindowOrder):
            return WindowReading(self._source, self.pool, self._order, piece_bytes=self._piece_bytes)
        return BatchReading(self._source, self.pool)


def _close(reader: Reader, memory: memoryview) -> None:
    """Close a reader, and let go of the memory that was registered with it."""
    reader.close()
    del memory
