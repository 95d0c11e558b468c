"""`ShardLoader`: finished batches of a packed dataset for a training loop; the place where the parts are joined."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from typing import TYPE_CHECKING, Any

from shardkit import tracing
from shardkit.dataset.arguments import require_choice, require_flag
from shardkit.dataset.arrangement import open_samples, split_weights, tell_of_labels
from shardkit.dataset.encoded import EncodedLoader, ReadOptions
from shardkit.dataset.fetch import STUCK_AFTER_S
from shardkit.dataset.state import MAX_EPOCH, Position, dump_state, load_state
from shardkit.errors import ConfigError, ShardkitError
from shardkit.pipeline.decoder import IMAGENET_MEAN, IMAGENET_STD, Decoder, DecodeSpec
from shardkit.torch.arguments import (
    DECODERS,
    device_of,
    dtype_name,
    on_255,
    require_fields,
    seconds,
    size_in_bytes,
    whole,
)
from shardkit.torch.decoders import Chosen, cpu_decoder, gpu_decoder, open_gpu
from shardkit.torch.epoch import Ahead, Batch, Epoch, LoaderStats, Progress, Stream, outside
from shardkit.torch.ranks import require_own_process, require_rank, resolve_rank
from shardkit.torch.rendering import Renderer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    import torch

    from shardkit.dataset.arrangement import MixedPaths, Path, Shuffle
    from shardkit.dataset.bad import OnBad
    from shardkit.dataset.encoded import Check
    from shardkit.dataset.options import Staging
    from shardkit.dataset.samples import Samples
    from shardkit.dataset.selection import Expression
    from shardkit.dataset.shardset import Dataset
    from shardkit.dataset.steps import LastBatch
    from shardkit.pipeline.augment import Augment

__all__ = ["LoaderStats", "ShardLoader"]

_MAX_SIZE = 1 << 16  # pixels of a side; no JPEG has more

_log = logging.getLogger(__name__)


class ShardLoader:
    """Iterates over a packed dataset in finished batches: `for images, labels in loader`.

    images: [B, 3, size, size], normalised, on the CPU (float32 by default) or on a GPU (float16); each batch is memory
    of its own. labels: int64 [B], beside them; -1 for samples without a label, of which a warning tells once. With
    `fields` a third part follows, a dict.

    Each `for` is one epoch. An epoch has a number, 0 at first, which decides order and random crops; every new
    iteration takes the next one, unless `set_epoch` named it. The number is taken when the first batch is asked for:
    an iteration that was made and never used took none. A new iteration ends one that is still running.
    `state_dict` and `load_state_dict` continue an epoch exactly behind the last batch that was handed out.
    """

    def __init__(
        self,
        path: Path | MixedPaths,
        batch_size: int,
        *,
        size: int = 224,
        train: bool = True,
        device: str | torch.device = "cpu",
        seed: int = 0,
        shuffle: Shuffle | None = None,
        extent_bytes: int = 4 << 20,
        window_extents: int = 32,
        labels: Iterable[int | str] | None = None,
        where: Expression | str | None = None,
        keys: Iterable[str] | None = None,
        last_batch: LastBatch | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        lanes: int | None = None,
        prefetch: int | None = None,
        read_on: bool | None = None,
        io: str = "auto",
        staging: Staging = "pinned",
        cache_gpu: int | str = 0,
        check: Check = "none",
        on_bad: OnBad = "substitute",
        stuck_after: float = STUCK_AFTER_S,
        timeout: float | None = None,
        decoder: str = "auto",
        threads: int | None = None,
        dtype: str | torch.dtype | None = None,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        channels_last: bool = False,
        augment: Augment = None,
        fields: Sequence[str] = (),
    ) -> None:
        """Open the dataset and prepare to iterate; no shard is read before, but for a short measurement by io="auto".

        Args:
            path: the dataset's folder; or a mix, [(folder, weight), ...], of which every batch takes by weight.
            batch_size: samples of one batch of this process.
            size: pixels of a side of the images.
            train: random resized crop and mirroring; False resizes the shorter side to size * 256 / 224 and takes the
                centre.
            device: "cpu", or an NVIDIA GPU: "cuda", "cuda:1". There the images are decoded, and there the batches are,
                ordered into the stream that is torch's current one where the batch is asked for.
            seed: of order and crops; the same on every rank.
            shuffle: "global", a new random order of all samples each epoch; "window", a random order of extents whose
                samples are pooled and shuffled, for storage that wants long reads; or "none", the stored order. None:
                global for training, none otherwise.
            extent_bytes: of "window": bytes of neighbouring images that are read together, about.
            window_extents: of "window": extents that are pooled; memory for two such pools is taken for each lane.
            labels: only samples of these classes, numbers or names.
            where: only samples that fulfil this condition on the index: a text, "width >= 256 and label != 7", as
                `shardkit ls --where` takes it, or a `pyarrow.compute` expression.
            keys: only the samples with these keys.
            last_batch: what becomes of the samples that do not fill the last batch: "drop" them, "pad" with samples
                from the epoch's start, or a "partial" batch. None: drop for training, partial otherwise.
            rank: this process, 0..world_size - 1; None with world_size: from torch.distributed, else 0 of 1.
            world_size: processes that train together.
            lanes: a constant of the run that every world size divides; None: the global batch, with "window" the
                world size.
            prefetch: batches that wait, read, for the decoder; None for as many as 64 MiB hold, 3 to 8.
            read_on: when an epoch is over, go on with the next one's first batches, in the background, so that they are
                there when it starts. None: for training. Not with an `augment` that has a graph of DALI's.
            io: "auto", "buffered", "direct", "uring", or on a GPU "gds" (GPUDirect Storage, with decoder="nvjpeg");
                `stats()` says what auto took and why.
            staging: on a GPU with decoder="nvjpeg": how bytes that were read into host memory come to the GPU:
                "pinned", or "managed" for comparison.
            cache_gpu: on a GPU with decoder="nvjpeg": bytes of GPU memory ("16GiB") for encoded shards that stay there,
                so that they are read once a job.
            check: "crc" compares the CRC-32C of every image while reading; "none" does not.
            on_bad: "substitute" puts another sample of the epoch in the place of one that cannot be used, and names it
                in `stats()` and one warning; "raise" raises an error that names it.
            stuck_after: seconds until a read that does not end is reported by a warning.
            timeout: seconds until such a read is an error; None waits.
            decoder: "dali", "cpu" (Pillow), on a GPU "nvjpeg" (its JPEG engines, on bytes that lie in its memory), or
                "auto": on a GPU nvjpeg if the engines take 98 % of the images and it is no slower than dali, which is
                measured once, else dali.
            threads: that decode; None: as many as the process may use processors.
            dtype: "float32", "float16" or "uint8" (0..255, not normalised), or torch's names for them; None: float16 on
                a GPU, float32 on the CPU.
            mean: red, green, blue, on the scale 0..255.
            std: red, green, blue, on the scale 0..255.
            channels_last: the images' memory is in torch.channels_last order; the shape stays [B, 3, size, size].
            augment: "imagenet_train" and "imagenet_eval", what `train` means; "randaugment"; "none", a list of whole
                images, uint8 [h, w, 3]; or a function on DALI nodes, called with the squares, uint8 [size, size, 3].
            fields: of "key" (list of str), "index" (int64 [B], numbers in the dataset, or in the mix's datasets one
                after the other), "json" (list of dict).

        Raises:
            ConfigError: an argument has no such value, or they do not go together.
            CapabilityError: a library is not installed, or the device, decoder or way of reading cannot be had here.
            ShardkitError: as `shardkit.open`.
        """
        place, self._fields = device_of(device), require_fields(fields)
        # Python's integers: NumPy's would overflow in the arithmetic of orders.
        seed, batch_size = whole("seed", seed, 0), whole("batch_size", batch_size, 1)
        decoder, cache = require_choice("decoder", decoder, DECODERS), size_in_bytes("cache_gpu", cache_gpu)
        self._device = open_gpu(place.index, decoder=decoder) if place.type == "cuda" else None
        if dtype is None:
            dtype = "float32" if self._device is None else "float16"
        self._spec = DecodeSpec(
            size=whole("size", size, 1, _MAX_SIZE), train=train, dtype=dtype_name(dtype), channels_last=channels_last,
            mean=on_255("mean", mean), std=on_255("std", std), seed=seed,
            threads=0 if threads is None else whole("threads", threads, 1), augment=augment,
        )  # fmt: skip
        here = resolve_rank(rank, world_size)
        self._found_rank = here if rank is None else None
        paths, weights = split_weights(path)
        with contextlib.ExitStack() as undo:  # what was opened is closed again when something later fails
            samples = open_samples(paths, labels=labels, where=where, keys=keys)
            undo.callback(samples.close)
            tell_of_labels(samples.parts)
            self._chosen = self._choose(decoder, samples, batch_size, device_bytes=io == "gds" or cache > 0)
            undo.callback(self._decoder.close)
            options = ReadOptions(
                batch_size=batch_size, rank=here.rank, world_size=here.world_size,
                lanes=None if lanes is None else whole("lanes", lanes, 1), seed=seed,
                shuffle=("global" if train else "none") if shuffle is None else shuffle,
                extent_bytes=whole("extent_bytes", extent_bytes, 1),
                window_extents=whole("window_extents", window_extents, 1),
                last_batch=("drop" if train else "partial") if last_batch is None else last_batch,
                io=io, prefetch=None if prefetch is None else whole("prefetch", prefetch, 1),
                in_flight=self._decoder.in_flight, metadata="json" in self._fields, check=check, on_bad=on_bad,
                space=self._decoder.accepts,
                staging=staging, cache_gpu=cache, stuck_after_s=seconds("stuck_after", stuck_after),
                timeout_s=None if timeout is None else seconds("timeout", timeout),
            )  # fmt: skip
            self._encoded = EncodedLoader(samples, options, weights=weights, device=self._device)
            undo.pop_all()
        self._read_on = (train if read_on is None else require_flag("read_on", read_on)) and not self._spec.recipe.graph
        self._render = Renderer(self._spec, self._fields, self._device)
        _log.info(
            "decoder %s: %s; io %s: %s", self._decoder.name, self._chosen.reason, self._encoded.choice.backend,
            self._encoded.choice.reason,
        )  # fmt: skip
        self._progress, self._ahead = Progress(), Ahead()
        self._running: weakref.ref[Epoch] | None = None
        self._process = os.getpid()
        self._close = weakref.finalize(
            self, outside, self._process, _give_back, self._encoded, self._decoder, self._progress, self._ahead
        )
        self._close.atexit = False

    @property
    def dataset(self) -> Dataset:
        """The dataset underneath; the first one of a mix."""
        return self._encoded.samples.parts[0].dataset

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
        return self._encoded.options.batch_size

    @property
    def epoch(self) -> int:
        """The number that the next iteration takes."""
        return self._progress.next.epoch

    def set_epoch(self, epoch: int) -> None:
        """Name the epoch of the next iteration. It starts at its beginning, unless a state in it was just loaded.

        Then it keeps the state's position; nothing may be left of it, and the iteration gives no batch.

        Raises:
            ConfigError: it is no whole number from 0 on.
        """
        number = whole("epoch", epoch, 0, MAX_EPOCH)
        progress = self._progress
        if progress.loaded is not None and number == progress.loaded.epoch:
            progress.next = progress.loaded
        elif number != progress.next.epoch:
            progress.next = Position(number, 0)
        if self._running_epoch() is None:
            progress.position = progress.next

    def state_dict(self) -> dict[str, Any]:  # Any: JSON values
        """Return where the loader stands: behind the last batch that was handed out, whatever is read ahead.

        Plain values, under 2 kB as JSON. The same on every rank that has made the same number of steps, so it is
        enough to keep one. A loader of the same arguments, or of another number of ranks with the same global batch,
        goes on from it.
        """
        return dump_state(self._encoded.identity, self._progress.position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: the next iteration gives the rest of its epoch, the one after it the next epoch whole.

        Of an epoch whose last batch was handed out nothing is left: the next iteration is the next epoch.

        Args:
            state: from `state_dict`, perhaps through JSON (Any: whatever was kept).

        Raises:
            ConfigError: it is no state, it is of another dataset or run (both sides are shown), or an iteration is
                running.
        """
        running = self._running_epoch()
        if running is not None and running.used:
            raise ConfigError(
                "an iteration is running", remedy="load a state before the first batch, or after the loop was left"
            )
        self._stop_running("a state was loaded")
        progress = self._progress
        progress.loaded = position = load_state(state, self._encoded.identity, len(self))
        if 0 < position.step == len(self):
            position = Position(position.epoch + 1, 0)
        progress.position = progress.next = position

    def __len__(self) -> int:
        """Return the number of batches of an epoch: the same on every rank."""
        return self._encoded.plan.steps

    def __iter__(self) -> Iterator[Batch]:
        """Start an epoch: reading begins now, if it has not when the last one was over.

        Raises:
            ConfigError: the loader is closed, was made before this process joined others, or was made in another
                process, as in a worker of torch's DataLoader.
        """
        if not self._close.alive:
            raise ConfigError("the loader is closed", path=self.dataset.path)
        require_own_process(self._process)
        if self._found_rank is not None:
            require_rank(self._found_rank)
        self._stop_running("another one of the same loader was started")
        position = self._progress.next
        stream = self._ahead.take(position) or self._start(position)
        running = Epoch(stream, len(self), self._progress, self._ahead, self)
        self._running = weakref.ref(running)
        return running

    def stats(self) -> LoaderStats:
        """Return what was read, waited for and found unusable so far."""
        progress, encoded = self._progress, self._encoded
        return LoaderStats(
            batches=progress.batches, samples=progress.samples, bytes=dict(encoded.reader.counters),
            wait_read_s=progress.wait_read_s, wait_decode_s=progress.wait_decode_s, io=encoded.choice.backend,
            io_reason=encoded.choice.reason, decoder=self._decoder.name,
            decoder_reason=self._chosen.reason, decoded_by=dict(self._decoder.counts),
            bad=encoded.bad.by_key, substitutions=encoded.bad.substitutions, crc_retries=encoded.crc_retries,
            buffer_budget_bytes=encoded.pool.budget_bytes, buffer_bytes=encoded.pool.lent_bytes,
            memory=self._memory(),
            cache=encoded.cache_counts,
        )  # fmt: skip

    @contextlib.contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Record what every thread does, and a GPU's streams, inside of a `with` block; written when it ends.

        Of a GPU there is what this package puts on streams: copies from the pinned ring, the look at headers, nvJPEG's
        decoding, what finishes batches; with step and bytes, on the GPU's clock. What DALI, cuFile and PyTorch put
        there themselves is not seen.

        Args:
            path: of a file in Chrome's trace format, for https://ui.perfetto.dev. With SHARDKIT_NVTX=1 in the
                environment the same ranges go to Nsight Systems.

        Raises:
            ShardkitError: the file cannot be written.
        """
        tracer = tracing.start()
        try:
            tracer.write(path)  # a path that cannot be written is told before the epoch, not behind it
            yield
        except BaseException:
            with contextlib.suppress(ShardkitError):
                tracer.write(path)
            raise
        finally:
            tracing.stop(tracer)
        tracer.write(path)

    def close(self) -> None:
        """End a running iteration and give back threads, descriptors and buffers; idempotent."""
        self._stop_running("the loader was closed")
        self._close()

    def __enter__(self) -> ShardLoader:
        """Return the loader."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        """Refuse to be sent to another process.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "a ShardLoader does not go to another process",
            remedy="make one in each process, with its rank; in workers of torch's DataLoader take ShardDataset",
        )

    def __repr__(self) -> str:
        """Return samples, batches, way of reading, decoder and why "auto" took it, and the memory that is taken."""
        plan, encoded = self._encoded.plan, self._encoded
        return (
            f"<ShardLoader: {plan.n} samples, {plan.steps} steps of {plan.batch_size} on rank {plan.rank} of "
            f"{plan.world_size}, shuffle={encoded.options.shuffle!r}, io={encoded.choice.backend!r}, "
            f"decoder={self._chosen}, {_told(self._memory())}>"
        )

    def _memory(self) -> dict[str, int]:
        return {**self._encoded.memory, "gpu decoder": self._decoder.device_bytes}

    @property
    def _decoder(self) -> Decoder:
        return self._chosen.decoder

    def _choose(self, name: str, samples: Samples, batch_size: int, *, device_bytes: bool) -> Chosen:
        if self._device is None:
            if device_bytes:
                raise ConfigError("io='gds' and cache_gpu read into a GPU's memory", remedy="take device='cuda'")
            return cpu_decoder(name, self._spec, batch_size=batch_size)
        return gpu_decoder(name, self._spec, self._device, samples, batch_size=batch_size, device_bytes=device_bytes)

    def _start(self, position: Position) -> Stream:
        # Closed by the next start if Ctrl-C comes before the stream is there.
        fetcher = self._encoded.start(position, endless=self._read_on)
        decoding = self._decoder.decode(fetcher, position.epoch, self._render)
        return Stream(fetcher, decoding, position, self._progress, endless=self._read_on)

    def _running_epoch(self) -> Epoch | None:
        running = self._running() if self._running is not None else None
        return running if running is not None and running.alive else None

    def _stop_running(self, reason: str) -> None:
        running = self._running_epoch()
        if running is not None:
            running.close(reason)


def _told(memory: Mapping[str, int]) -> str:
    on_gpu = sum(nbytes for place, nbytes in memory.items() if place.startswith("gpu"))
    host = f"at most {sum(memory.values()) - on_gpu} bytes of encoded images"
    return host + (f" in host memory and {on_gpu} bytes of GPU memory" if on_gpu else "")


def _give_back(encoded: EncodedLoader, decoder: Decoder, progress: Progress, ahead: Ahead) -> None:
    with contextlib.ExitStack() as stack:  # whatever interrupts, every step is made
        stack.callback(lambda: encoded.close(wait=not progress.stuck))  # asked behind the stream's end
        stack.callback(decoder.close)
        ahead.close()
