"""The seam between encoded bytes and pixels: what a decoder is asked for, what it accepts and what it returns."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from shardkit.dataset.arguments import require_flag
from shardkit.errors import CapabilityError, ConfigError, DeviceError
from shardkit.pipeline.augment import Augment, Recipe, recipe_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    import numpy.typing as npt

    from shardkit.dataset.batch import EncodedBatch
    from shardkit.storage.device import Event
    from shardkit.storage.reader import MemorySpace

__all__ = [
    "DTYPES",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "BatchSource",
    "DecodeSpec",
    "DecodedBatch",
    "Decoder",
    "Hand",
    "Resize",
    "as_it_is",
    "name_first_sample",
]

DTYPES = ("float32", "float16", "uint8")
"""Names of the pixel types."""
IMAGENET_MEAN = (123.675, 116.28, 103.53)
"""Mean of ImageNet's training pixels, red, green, blue, on the scale 0..255."""
IMAGENET_STD = (58.395, 57.12, 57.375)
"""Their standard deviation, on the scale 0..255."""
_EVAL_MARGIN = 256 / 224
"""By how much the shorter side is larger than the centre crop in evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpec:
    """What becomes of an image, whichever decoder does it.

    EXIF orientation is applied and everything becomes RGB. Training: a random crop of 8 to 100 % of the area with an
    aspect ratio from 3/4 to 4/3, resized to `size` x `size` with antialiasing, mirrored half of the time. Evaluation:
    the shorter side is resized to `shorter`, the centre is cut out. Then (pixel - mean) / std. `augment` may say
    otherwise.
    """

    size: int
    """Pixels of a side of the result; >= 1."""
    train: bool
    """Random crop and mirroring instead of the centre crop."""
    dtype: str = "float32"
    """One of `DTYPES`. uint8 leaves the pixels as they are: 0..255, `mean` and `std` are not applied."""
    channels_last: bool = False
    """Memory order of the result: [n, size, size, 3] instead of [n, 3, size, size]."""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    """Red, green, blue, on the scale 0..255."""
    std: tuple[float, float, float] = IMAGENET_STD
    """Red, green, blue, on the scale 0..255; > 0."""
    seed: int = 0
    """With the epoch it decides every random choice, sample by sample: see `shardkit.pipeline.crops`."""
    threads: int = 0
    """Threads that decode; 0 for as many as the process may use processors."""
    augment: Augment = None
    """A preset's name: the whole recipe, whatever `train` says; "none" leaves images whole and uint8, each of its own
    size, so that `size`, `dtype`, `channels_last`, `mean` and `std` do nothing. Or a function on nodes of DALI's graph,
    called once a graph with the cropped and resized images, uint8 [size, size, 3], before they are mirrored and
    normalised."""

    def __post_init__(self) -> None:
        """Refuse what no decoder can do."""
        if self.size < 1:
            raise ConfigError("images have at least one pixel", expected="size >= 1", found=self.size)
        if self.dtype not in DTYPES:
            raise ConfigError("there is no such pixel type", expected=" or ".join(DTYPES), found=repr(self.dtype))
        if len(self.mean) != 3 or len(self.std) != 3:
            raise ConfigError("mean and std are a number for red, green and blue", found=f"{self.mean}, {self.std}")
        if min(self.std) <= 0:
            raise ConfigError("a standard deviation is above 0", found=self.std)
        if self.threads < 0:
            raise ConfigError("decoding takes at least one thread", found=self.threads)
        for name in ("train", "channels_last"):
            require_flag(name, getattr(self, name))
        recipe_of(self.augment, train=self.train)

    @property
    def recipe(self) -> Recipe:
        """What `augment` and `train` ask for."""
        return recipe_of(self.augment, train=self.train)

    @property
    def shorter(self) -> int:
        """Pixels of the shorter side from which evaluation cuts its centre."""
        return round(self.size * _EVAL_MARGIN)

    @property
    def thread_count(self) -> int:
        """Threads that decode."""
        return self.threads or len(os.sched_getaffinity(0))


class Resize(Protocol):
    """Resizes one image by Pillow's bilinear filter with antialiasing, on 8 bits: results differ by 1 of 255 at most.

    Threads call it at the same time. It starts none of its own, and keeps neither array.
    """

    def __call__(self, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> None:
        """Fill `target` with `source`.

        Args:
            source: [h, w, 3], dense, host memory; h and w from 1 on.
            target: [H, W, 3]: dense, or a view of dense memory [3, H, W].
        """


class BatchSource(Protocol):
    """Where a decoder takes its batches from."""

    def get(self, *, wait: bool) -> EncodedBatch | None:
        """Return the next batch, whose memory the caller releases.

        Args:
            wait: until there is one. Without it None means that none is ready, or that there is no further one.

        Returns:
            The batch; with `wait`, None means that there is no further one.

        Raises:
            ShardkitError: the batch could not be read; what came before it was handed out before.
        """

    def replace(self, batch: EncodedBatch, bad: Mapping[int, str], /) -> EncodedBatch:
        """Return a batch of the same size in which substitutes stand in for samples that cannot be used.

        The new batch has taken over the memory of `batch`, which must not be used or released any more. A substitute
        may turn out bad itself; then it is replaced in the same way. Called from another thread than `get`, also at the
        same time.

        Args:
            batch: from `get` or `replace`.
            bad: places in the batch, and why the samples there cannot be used, one clause each.

        Raises:
            FormatError: bad samples are to be raised, or no usable substitute was found; names shard, offset and key.
                The caller still has `batch` to release.
            StorageError: a substitute could not be read; likewise.
        """

    def check(self) -> None:
        """Look whether a read does not end, also one of `replace`: report it, or raise.

        Who waits for a decoder, and not in `get`, calls it about twice a second. Never waits itself.

        Raises:
            StorageError: a read has not ended in time; it may still be running, into memory that stays its own.
        """


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """Pixels, and the batch that they came from."""

    pixels: Any
    """An object with `__dlpack__` (Any: the decoder's own array type), dense, owned by whoever takes it: [n, 3, size,
    size], or [n, size, size, 3] with `channels_last`, of the spec's dtype; in host memory, or of a decoder on a GPU in
    the GPU's. With whole images a list of n such arrays, uint8 [height, width, 3]. Behind a `Hand` what that makes."""
    batch: EncodedBatch
    """Its memory is released: ids, labels and metadata are there, the encoded bytes are not."""
    ready: Event | None = None
    """On a GPU: what a stream must wait for before it looks at the pixels, which nothing else does. None: they are
    there."""
    numbers: Any = None
    """On a GPU two arrays beside the pixels, of their library, int64 [n] each: labels and ids. None: the batch's own
    are all there is."""

    def settle(self) -> None:
        """Wait until the pixels are there.

        Raises:
            DeviceError: work on them failed; names the first sample.
        """
        try:
            if self.ready is not None:
                self.ready.wait()
        except DeviceError as error:
            name_first_sample(error, self.batch)
            raise


Hand: TypeAlias = Callable[[DecodedBatch], DecodedBatch]
"""Makes of a batch what its consumer gets, in the consumer's thread."""


def as_it_is(decoded: DecodedBatch) -> DecodedBatch:
    """Hand a batch over without a change."""
    return decoded


def name_first_sample(error: BaseException, batch: EncodedBatch) -> None:
    """Let an error of the device, or of its memory, say in which batch it was met, unless it says so already."""
    if isinstance(error, DeviceError | CapabilityError) and error.key is None and len(batch):
        error.path, error.offset = batch.place(0)
        error.key = batch.key(0)


class Decoder(Protocol):
    """Turns batches of encoded images into arrays."""

    @property
    def accepts(self) -> MemorySpace:
        """The memory in which the encoded bytes must lie."""

    @property
    def name(self) -> str:
        """What `decoder=` calls it."""

    @property
    def in_flight(self) -> int:
        """The most batches whose encoded bytes it holds at the same time."""

    @property
    def device_bytes(self) -> int:
        """Bytes of a GPU's memory that it keeps, the batches' and what libraries do not tell aside; 0 on the CPU."""

    @property
    def counts(self) -> Mapping[str, int]:
        """How many images were decoded so far, by the name of the library that did it."""

    def decode(self, source: BatchSource, epoch: int, hand: Hand = as_it_is) -> Iterator[DecodedBatch]:
        """Decode every batch of `source`, in order.

        What `hand` makes of a batch is handed over. It is called while the decoder's threads have the least to do,
        before further batches are let in: threads that begin to work want the interpreter's lock, and each call of
        `hand` that gives it up for a moment would have to wait for them.

        Random choices are those of each batch's epoch; but a recipe with a graph knows one epoch only, that of `epoch`.

        A sample that cannot be decoded is replaced by `source`, until all of the batch's can. Closing the iterator
        releases every batch that it took; it waits for what is being decoded, but for a substitute's read only a
        moment: a thread that stays in one is left behind, and so is its batch.

        Raises:
            ShardkitError: what `source` raised, after the batches before it.
            ConfigError: the function `augment` does not do what it must.
        """

    def close(self) -> None:
        """Let go of memory that is kept for later batches; idempotent. Not while a run is going on."""
