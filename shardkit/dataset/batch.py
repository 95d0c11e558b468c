"""A batch of encoded images on loan: where its bytes lie, what they are, and when the memory goes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from shardkit.dataset.shardset import Dataset, Located
    from shardkit.storage.buffers import Lease

__all__ = ["EncodedBatch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBatch:
    """The encoded images of one step, read and not yet decoded. Whoever takes it calls `release` once."""

    dataset: Dataset
    """Where the samples come from."""
    epoch: int
    """Epoch of the step."""
    step: int
    """Step within the epoch, from 0; the loader's position after this batch is `step + 1`."""
    ids: npt.NDArray[np.int64]
    """[n] numbers of the samples in the dataset."""
    located: Located
    """[n] shard, offset, size and label of each."""
    width: npt.NDArray[np.int64]
    """[n] pixels of the image as it is shown, EXIF orientation applied; 0 when unknown."""
    height: npt.NDArray[np.int64]
    """[n] likewise."""
    views: list[npt.NDArray[np.uint8]]
    """n arrays: the bytes of each image, host memory, read-only in effect; valid until `release`, which empties it."""
    metadata: list[dict[str, Any]] | None
    """n json members, `{}` for a sample without one (Any: JSON values); None when they were not asked for."""
    lease: Lease
    """The memory that `views` look at."""

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """[n] class numbers; -1 for a sample without a label."""
        return self.located.label

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.ids)

    def key(self, at: int) -> str:
        """Return the key of sample `at` of the batch."""
        return self.dataset.columns.texts("key")[int(self.ids[at])]

    def place(self, at: int) -> tuple[str, int]:
        """Return the path of the shard and the byte offset of sample `at` of the batch."""
        return self.dataset.shard_paths[int(self.located.shard[at])], int(self.located.offset[at])

    def release(self) -> None:
        """Give the memory back; idempotent. Views that others still hold keep it from being lent again."""
        self.views.clear()
        self.lease.release()
