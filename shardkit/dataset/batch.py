"""A batch of encoded images: where its bytes lie, what they are, and when the memory goes back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.dataset.shardset import Located
from shardkit.storage.reader import HOST

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from shardkit.dataset.samples import Samples
    from shardkit.storage.reader import MemorySpace

__all__ = ["EncodedBatch"]

_SIDEWAYS = 5  # EXIF orientations from here to 8 swap width and height


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBatch:
    """The encoded images of one step, read and not yet decoded. Whoever takes it calls `release` once."""

    samples: Samples
    """Where the samples come from."""
    epoch: int
    """Epoch of the step."""
    step: int
    """Step within the epoch, from 0; the loader's position after this batch is `step + 1`."""
    positions: npt.NDArray[np.int64]
    """[n] places of the samples in the epoch. A substitute has the place of the sample that it stands in for."""
    ids: npt.NDArray[np.int64]
    """[n] ids of the samples; see `Samples`."""
    located: Located
    """[n] shard, offset, size and label of each."""
    attempts: npt.NDArray[np.int64]
    """[n] substitutes that were tried for each place so far: 0 where the sample is the epoch's own."""
    addresses: npt.NDArray[np.int64]
    """[n] where the bytes of each image begin, in `space`; valid until `release`."""
    views: list[npt.NDArray[np.uint8]] = field(repr=False)
    """n arrays: the bytes of each image, read-only in effect; valid until `release`, which empties it. They are all
    that keeps the memory from being lent again. Outside of host memory only their sizes may be looked at: the processor
    that touches their bytes crashes the process."""
    metadata: list[dict[str, Any]] | None
    """n json members, `{}` for a sample without one (Any: JSON values); None when they were not asked for."""
    space: MemorySpace = HOST
    """Where the images lie."""

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """[n] class numbers; -1 for a sample without a label."""
        return self.located.label

    @property
    def width(self) -> npt.NDArray[np.int64]:
        """[n] pixels of the image as it is shown, EXIF orientation applied; 0 when unknown. Looked up at each call."""
        return self._side("width", "height")

    @property
    def height(self) -> npt.NDArray[np.int64]:
        """[n] likewise."""
        return self._side("height", "width")

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.ids)

    def key(self, at: int) -> str:
        """Return the key of sample `at` of the batch."""
        return self.samples.keys(self.ids[at : at + 1])[0]

    def place(self, at: int) -> tuple[str, int]:
        """Return the path of the shard and the byte offset of sample `at` of the batch."""
        return self.samples.shard_paths[int(self.located.shard[at])], int(self.located.offset[at])

    def substituted(self, others: Mapping[int, EncodedBatch]) -> EncodedBatch:
        """Return this batch with other samples in some places. It takes over this batch's memory.

        Args:
            others: by place, a batch of one sample in the same space; the places of this batch in the epoch stay.
        """
        views, metadata = list(self.views), self.metadata and list(self.metadata)
        columns = {name: getattr(self.located, name).copy() for name in ("shard", "offset", "size", "label")}
        ids, attempts, addresses = self.ids.copy(), self.attempts.copy(), self.addresses.copy()
        for at, one in others.items():
            views[at] = one.views[0]
            if metadata is not None and one.metadata is not None:
                metadata[at] = one.metadata[0]
            for name, column in columns.items():
                column[at] = getattr(one.located, name)[0]
            ids[at], attempts[at], addresses[at] = one.ids[0], one.attempts[0], one.addresses[0]
        self.views.clear()
        return replace(
            self, ids=ids, attempts=attempts, located=Located(**columns), addresses=addresses, views=views,
            metadata=metadata,
        )  # fmt: skip

    def release(self) -> None:
        """Drop the views; idempotent. The memory is lent again when nobody else looks at it, either."""
        self.views.clear()

    def _side(self, upright: str, sideways: str) -> npt.NDArray[np.int64]:
        turned = self.samples.gather("orientation", self.ids) >= _SIDEWAYS
        return np.where(turned, self.samples.gather(sideways, self.ids), self.samples.gather(upright, self.ids))
