"""What is asked of the reading half of a loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from shardkit.dataset.arguments import require_choice
from shardkit.dataset.arrangement import Shuffle
from shardkit.dataset.bad import OnBad
from shardkit.dataset.fetch import STUCK_AFTER_S
from shardkit.dataset.steps import LastBatch
from shardkit.errors import ConfigError
from shardkit.storage.backends import IO_NAMES
from shardkit.storage.device_backends import DEVICE_IO_NAMES
from shardkit.storage.reader import HOST

if TYPE_CHECKING:
    from shardkit.dataset.samples import Samples
    from shardkit.storage.reader import MemorySpace

__all__ = ["Check", "ReadOptions", "Staging"]

_WAITING_BYTES = 64 << 20
_LEAST_WAITING, _MOST_WAITING = 3, 8
_BEING_READ = 2  # by a fetcher's threads

Check: TypeAlias = Literal["none", "crc"]
"""What is compared while reading: nothing, or the CRC-32C of every image."""

Staging: TypeAlias = Literal["pinned", "managed"]
"""What stands between a disk and a GPU's memory where the disk does not write there itself: host memory that is pinned,
or memory that the driver moves (`cudaMallocManaged`)."""


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
    """The way of reading; one of `shardkit.storage.backends.IO_NAMES`, and "gds" into GPU memory."""
    prefetch: int | None = None
    """Batches that wait, read; None for as many as 64 MiB hold, 3 to 8: see `waiting`."""
    in_flight: int = 1
    """Batches that the consumer holds at the same time."""
    metadata: bool = False
    """Read the json members, too."""
    check: Check = "none"
    """What is compared while reading."""
    on_bad: OnBad = "substitute"
    """What becomes of samples that cannot be used."""
    space: MemorySpace = HOST
    """Where the images are wanted: "host", or "cuda:N" for a decoder that takes them from GPU memory."""
    staging: Staging = "pinned"
    """Of images that are wanted in GPU memory: by which way they come there."""
    cache_gpu: int = 0
    """Bytes of GPU memory for whole shards that stay there, so that they are read once a job."""
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
        if self.io == "gds" and self.space == HOST:
            raise ConfigError(
                "io='gds' reads into GPU memory, and this decoder takes images from host memory",
                remedy="take decoder='nvjpeg', or another io",
            )  # fmt: skip
        require_choice("io", self.io, IO_NAMES if self.space == HOST else DEVICE_IO_NAMES)
        require_choice("check", self.check, get_args(Check))
        require_choice("on_bad", self.on_bad, get_args(OnBad))
        require_choice("staging", self.staging, get_args(Staging))
        if self.cache_gpu < 0:
            raise ConfigError("cache_gpu is a number of bytes", expected="cache_gpu >= 0", found=self.cache_gpu)
        if self.staging != "pinned" and self.space == HOST:
            raise ConfigError(
                "staging is the way into GPU memory, and this decoder takes images from host memory",
                expected="staging='pinned', which does nothing here", found=repr(self.staging),
                remedy="take device='cuda' and decoder='nvjpeg', or leave staging out",
            )  # fmt: skip
        if self.cache_gpu and self.space == HOST:
            raise ConfigError(
                "cache_gpu keeps encoded images in GPU memory, and this decoder takes them from host memory",
                remedy="take decoder='nvjpeg', or leave cache_gpu out",
            )  # fmt: skip
        for name, number in (("prefetch", self.prefetch), ("in_flight", self.in_flight)):
            if number is not None and number < 1:
                raise ConfigError(f"{name} is too small", expected=f"{name} >= 1", found=number)
        for name, time_s in (("stuck_after_s", self.stuck_after_s), ("timeout_s", self.timeout_s)):
            if time_s is not None and not time_s > 0:
                raise ConfigError(f"{name} is a time in seconds", expected=f"{name} > 0", found=time_s)

    def waiting(self, samples: Samples) -> int:
        """Return how many batches wait, read: small ones are soon decoded, and cost little."""
        if self.prefetch is not None:
            return self.prefetch
        batch_bytes = self.batch_size * samples.total_payload // len(samples) if len(samples) else 0
        return min(max(_WAITING_BYTES // max(batch_bytes, 1), _LEAST_WAITING), _MOST_WAITING)

    def most_batches(self, samples: Samples) -> int:
        """Return how many batches there are at once: those that wait, read, those in the decoder, and being read."""
        return self.waiting(samples) + self.in_flight + _BEING_READ
