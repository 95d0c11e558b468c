"""A packed dataset as PyTorch's map-style `Dataset`, for people who keep torch's DataLoader and their transforms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset as TorchDataset

from shardkit.dataset.shardset import open_dataset
from shardkit.errors import FormatError
from shardkit.pipeline.cpu import open_image

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from shardkit.dataset.shardset import Sample
    from shardkit.pipeline.cpu import RgbImage

__all__ = ["ShardDataset"]


class ShardDataset(TorchDataset[tuple[Any, int]]):
    """A map-style dataset: `[i]` is `(image, label)`. Works with any sampler, and with DataLoader's worker processes.

    It pickles by path; each process opens the folder itself and reads with its own descriptors. The CRC-32C of every
    image is checked.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        transform: Callable[[RgbImage], Any] | None = None,
        target_transform: Callable[[int], Any] | None = None,
    ) -> None:
        """Open the dataset.

        Args:
            path: the dataset's folder.
            transform: called with the decoded image (Pillow, RGB, EXIF orientation applied), its result becomes the
                image (Any: what the transform returns); None gives the JPEG's bytes undecoded.
            target_transform: called with the label, its result becomes the label.

        Raises:
            ShardkitError: as `shardkit.open`.
        """
        self.shards = open_dataset(path)
        """The dataset underneath: keys, columns, whole samples."""
        self.transform = transform
        self.target_transform = target_transform

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class names in label order; None without labels, or without names for them."""
        return self.shards.classes

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.shards)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return image and label of a sample; the label is -1 in a dataset without labels.

        Raises:
            IndexError: there is no such sample.
            IntegrityError: the bytes are not those that were packed.
            FormatError: there is a transform, and the image cannot be decoded; names shard, offset and key.
            StorageError: the shard cannot be read.
        """
        sample = self.shards[index]
        image = sample.jpeg if self.transform is None else self.transform(self._decoded(index, sample))
        label = -1 if sample.label is None else sample.label
        return image, label if self.target_transform is None else self.target_transform(label)

    def _decoded(self, index: int, sample: Sample) -> RgbImage:
        try:
            return open_image(sample.jpeg)
        except FormatError as error:
            located = self.shards.locate([index])
            error.path, error.offset = self.shards.shard_paths[int(located.shard[0])], int(located.offset[0])
            error.key = sample.key
            raise
