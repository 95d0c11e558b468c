"""The seam to what turns encoded images into whole pixels in a GPU's memory: nvJPEG's engines, or DALI's mixed decoder.

Both give whole images as they are stored. What is made of them, the cut, the orientation, the size and the type, is one
kernel's work for both, so that a sample's pixels do not depend on who decoded it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt

    from shardkit.storage.reader import MemorySpace

    _Ints = npt.NDArray[np.int64]

__all__ = [
    "Allocate",
    "Augmented",
    "Backend",
    "Decoded",
    "DeviceArray",
    "Job",
    "Share",
    "SquareAugmenter",
    "Undecodable",
]

_Pixels: TypeAlias = Any  # the consumer's own arrays: torch's, NumPy's


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Some images of one batch that are decoded together; at least one."""

    views: list[npt.NDArray[np.uint8]]
    """n payloads in the back end's space; the bytes of those in device memory must not be touched. They keep the
    memory; whoever made the job keeps the job until it is collected."""
    addresses: _Ints
    """[n] of the payloads, in that space; dense, as `sizes`."""
    sizes: _Ints
    """[n] bytes of each payload."""
    width: _Ints
    """[n] pixels a line as stored, before any orientation, from the index; 0 when unknown."""
    height: _Ints
    """[n] lines as stored, likewise."""
    orientation: _Ints
    """[n] EXIF orientation, 1 to 8, from the index."""
    plan: object = None
    """What the back end itself has planned for these sizes, in another thread; None where it plans nothing."""

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.sizes)


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """Whole images in device memory, interleaved RGB, for everybody: no work that writes them is left."""

    addresses: _Ints
    """[n] of each image's first pixel."""
    pitch: _Ints
    """[n] bytes from one line to the next."""
    width: _Ints
    """[n] pixels a line as they lie there."""
    height: _Ints
    """[n] lines."""
    orientation: _Ints
    """[n] what is still to be applied; 1 for nothing."""
    memory: object
    """Keeps the pixels alive; who drops it makes sure that nothing reads them any more."""

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.addresses)


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """Images of a batch that fit into one job."""

    numbers: _Ints
    """[m] which of those asked for."""
    plan: object = None
    """For `Job.plan`."""


Shares: TypeAlias = Callable[["_Ints", "_Ints"], list[Share]]
"""Says, by their width and height as stored (> 0), which images are decoded together; those in no share are not taken.
Pure, called by any thread."""


class Undecodable(Exception):
    """Some images of a job cannot be decoded; the others of the job were not decoded, either."""

    def __init__(self, bad: Mapping[int, str]) -> None:
        """Say which.

        Args:
            bad: by number within the job, one clause that says why; at least one.
        """
        super().__init__(bad)
        self.bad = dict(bad)


class Backend(Protocol):
    """Decodes jobs, in order. One thread calls `start` and `collect`; another one `close`, when that has ended."""

    @property
    def accepts(self) -> MemorySpace:
        """The memory in which payloads must lie."""

    @property
    def name(self) -> str:
        """Of the decoder and, in `Decoder.counts`, of the library: "nvjpeg" or "dali"."""

    @property
    def depth(self) -> int:
        """Jobs that may be started before the oldest is collected; >= 1."""

    @property
    def device_bytes(self) -> int:
        """Bytes of the device's memory that it keeps, as far as they can be known."""

    def start(self, job: Job) -> None:
        """Begin to decode; keeps the job until it is collected. May wait for memory that pixels are written to.

        Raises:
            DeviceError: the GPU or its library failed.
        """

    def collect(self) -> Decoded:
        """Wait for the oldest started job, and let go of it: nothing reads its payloads any more.

        Raises:
            Undecodable: some images cannot be decoded; the job is dropped.
            DeviceError: the GPU or its library failed otherwise; likewise.
        """

    def rest(self) -> None:
        """Let go of the payloads of jobs that were collected, if any are still looked at; nothing is started.

        Called by the thread that decodes when no batch is in the line: else whoever reads the next one could wait for
        their memory for ever.
        """

    def close(self) -> None:
        """Drop what was started and give memory back; idempotent."""


class DeviceArray(Protocol):
    """Device memory that becomes a batch's pixels."""

    @property
    def address(self) -> int:
        """Of its first byte, in the device's memory."""

    @property
    def pixels(self) -> _Pixels:
        """What `DecodedBatch.pixels` becomes."""

    def split(self, shapes: list[tuple[int, ...]], /) -> list[_Pixels]:
        """Return the arrays of given shapes that lie in it, dense and one behind the other."""


Allocate: TypeAlias = Callable[[tuple[int, ...], str], DeviceArray]
"""Returns memory for pixels of a shape and a dtype's name, dense. Whatever used it before is over, or is waited for by
what the decoder's `stream` does from now on."""


class Augmented(Protocol):
    """A batch that an augmenter has made; its memory stays while the object does."""

    @property
    def address(self) -> int:
        """Device memory, dense, as `DecodedBatch.pixels` says; no work that writes it is left."""

    @property
    def nbytes(self) -> int:
        """Its size."""


class SquareAugmenter(Protocol):
    """Works on finished squares in device memory; for one thread."""

    def close(self) -> None:
        """Let go of the library's threads and memory, also those of a device that is lost; idempotent."""

    def augmented_on_device(
        self, squares: int, ids: _Ints, epoch: int, mirror: npt.NDArray[np.int32] | None, /
    ) -> Augmented:
        """Augment, mirror and normalise a batch.

        Args:
            squares: device address of uint8 [n, size, size, 3]; no work that writes it is left, and it stays until this
                returns.
            ids: [n] numbers of the samples; n >= 1.
            epoch: of the batch.
            mirror: [n] 1 where left and right are swapped; None for nowhere.

        Raises:
            ConfigError: the user's function fails, or makes something else of it.
        """
