"""A batch on its way through a GPU, in parts, and what was counted on it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardkit.pipeline.decoder import name_first_sample
from shardkit.pipeline.workers import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from shardkit.dataset.batch import EncodedBatch
    from shardkit.pipeline.decoder import DecodedBatch
    from shardkit.pipeline.gpu_backend import Job
    from shardkit.pipeline.gpu_canvas import Facts, GpuCanvas

    _Ints = npt.NDArray[np.int64]
    _Images = list[npt.NDArray[np.uint8]]

__all__ = ["GpuFlight", "GpuTally", "HostPart", "Part"]


@dataclass(slots=True)
class GpuTally:
    """What a decoder's lines have done so far; counted by one thread at a time."""

    backend: int = 0
    """Images that the back end decoded."""
    pillow: int = 0
    """Images that Pillow decoded: what the engines do not take, or refused."""


@dataclass(slots=True, eq=False)
class GpuFlight:
    """A batch in the line."""

    batch: EncodedBatch
    """With the substitutes that it has so far; its memory is released when all of it is decoded."""
    left: int
    """Images that are not finished yet; the finishing thread's."""
    canvas: GpuCanvas | None = None
    """None before the first part is finished; the finishing thread's."""
    held: list[_Images] = field(default_factory=list)
    """Views of encoded memory beside the batch's; emptied when that is released."""
    done: Outcome[DecodedBatch] = field(default_factory=Outcome)

    @property
    def over(self) -> bool:
        """See `shardkit.pipeline.run.Waited`."""
        return self.done.done

    def wait(self, look: Callable[[], object] | None = None) -> DecodedBatch:
        """Return it when its last work is on the GPU; see `shardkit.pipeline.run.Waited`."""
        return self.done.wait(look)

    def release(self) -> None:
        """Let go of encoded memory; idempotent."""
        for views in self.held:
            views.clear()
        self.batch.release()

    def fail(self, error: BaseException) -> None:
        """Give whoever waits an error; one of the device gets the name of the batch's first sample."""
        name_first_sample(error, self.batch)
        self.done.fail(error)


@dataclass(slots=True, eq=False)
class Part:
    """Images of a flight that are decoded together by the back end."""

    flight: GpuFlight
    places: _Ints
    """[m] in the batch."""
    facts: Facts
    """[m]."""
    job: Job


@dataclass(slots=True, eq=False)
class HostPart:
    """Images of a flight that Pillow decodes, one by one, in threads."""

    flight: GpuFlight
    places: _Ints
    """[m] in the batch."""
    facts: Facts
    """[m]."""
    payloads: _Images
    """m files in host memory."""
    images: list[npt.NDArray[np.uint8] | str] = field(default_factory=list)
    """m results: pixels [h, w, 3] as shown, or why there are none; "" before."""
    left: int = 0
    """Those that are not there yet."""
    _turn: threading.Lock = field(default_factory=threading.Lock)  # of threads of ours, which no Ctrl-C interrupts

    def __post_init__(self) -> None:
        """Start without results."""
        self.left = len(self.places)
        self.images = [""] * self.left

    def put(self, number: int, image: npt.NDArray[np.uint8] | str) -> bool:
        """Take a result; return whether it was the last one."""
        self.images[number] = image
        with self._turn:
            self.left -= 1
            return not self.left
