"""The seam between encoded bytes and pixels: what a decoder is asked for, what it accepts and what it returns."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from shardkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardkit.dataset.batch import EncodedBatch
    from shardkit.storage.reader import MemorySpace

__all__ = ["DTYPES", "IMAGENET_MEAN", "IMAGENET_STD", "BatchSource", "DecodeSpec", "DecodedBatch", "Decoder"]

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
    the shorter side is resized to `shorter`, the centre is cut out. Then (pixel - mean) / std.
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
    augment: Callable[[Any], Any] | None = None
    """A function on nodes of the decoder's graph (Any: the decoder's own type), called once a graph with the cropped
    and resized images, uint8 [size, size, 3], before they are mirrored and normalised."""

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

    @property
    def shorter(self) -> int:
        """Pixels of the shorter side from which evaluation cuts its centre."""
        return round(self.size * _EVAL_MARGIN)

    @property
    def thread_count(self) -> int:
        """Threads that decode."""
        return self.threads or len(os.sched_getaffinity(0))


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


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """Pixels, and the batch that they came from."""

    pixels: Any
    """An object with `__dlpack__` (Any: the decoder's own array type), in host memory, dense, owned by whoever takes
    it: [n, 3, size, size], or [n, size, size, 3] with `channels_last`, of the spec's dtype."""
    batch: EncodedBatch
    """Its memory is released: ids, labels and metadata are there, the encoded bytes are not."""


class Decoder(Protocol):
    """Turns batches of encoded images into arrays."""

    @property
    def accepts(self) -> MemorySpace:
        """The memory in which the encoded bytes must lie."""

    @property
    def in_flight(self) -> int:
        """The most batches whose encoded bytes it holds at the same time."""

    def decode(self, source: BatchSource, epoch: int) -> Iterator[DecodedBatch]:
        """Decode every batch of `source`, in order, one epoch's random choices.

        Closing the iterator releases every batch that it took; it waits for the one that is being decoded.

        Raises:
            FormatError: an image cannot be decoded; names shard, offset and key.
            ShardkitError: what `source` raised.
        """
