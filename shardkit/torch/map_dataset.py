"""A packed dataset as PyTorch's map-style `Dataset`, for people who keep torch's DataLoader and their transforms."""

from __future__ import annotations

import logging
import operator
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeAlias, get_args

import torch
from torch.utils.data import Dataset as TorchDataset

from shardkit.dataset.arguments import require_choice
from shardkit.dataset.arrangement import tell_of_labels
from shardkit.dataset.reading import SampleReader
from shardkit.dataset.samples import Part, Samples
from shardkit.dataset.shardset import open_dataset
from shardkit.errors import ConfigError, FormatError, IntegrityError
from shardkit.pipeline.cpu import open_image
from shardkit.storage.backends import open_reader
from shardkit.torch.arguments import whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardkit.dataset.reading import Payloads, SampleReads
    from shardkit.pipeline.cpu import RgbImage

__all__ = ["ShardDataset"]

_Output: TypeAlias = Literal["jpeg", "tensor", "pil"]
_OnBad: TypeAlias = Literal["raise", "none"]
_Item: TypeAlias = tuple[Any, Any] | None
"""Image and label, Any: what `output` and the transforms make of them. None for a bad sample, if that is wanted."""

_log = logging.getLogger(__name__)


class ShardDataset(TorchDataset[_Item]):
    """A map-style dataset: `[i]` is `(image, label)`. Works with any sampler, and with DataLoader's worker processes.

    DataLoader asks for a whole batch at once (`__getitems__`), which is read through the page cache in few requests
    by several threads. The CRC-32C of every image is checked, but in a dataset without checksums (`shardkit index
    --facts header` or `none`). It pickles by path; each process opens the folder itself and reads with its own
    descriptors and threads. Threads may share it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[int], Any] | None = None,
        *,
        output: _Output | None = None,
        on_bad: _OnBad = "raise",
        threads: int = 8,
    ) -> None:
        """Open the dataset; no shard is opened before a sample is asked for.

        Args:
            path: the dataset's folder.
            transform: called with the image as `output` says (Any: it depends), its result becomes the image.
            target_transform: called with the label, its result becomes the label.
            output: "jpeg", the file's bytes, undecoded; "tensor", uint8 [3, H, W] RGB, memory in torch.channels_last
                order as torchvision's decoders leave it; "pil", a Pillow image in RGB. Decoded images are as they are
                shown: EXIF orientation is applied. None: "pil" with a transform, "jpeg" without one.
            on_bad: what becomes of a sample whose bytes are not those that were packed or that cannot be decoded:
                "raise" an error that names it, or None in its place ("none"), for a collate_fn that leaves such
                samples out, and a warning.
            threads: the most that read at the same time, in each process.

        Raises:
            ConfigError: an argument has no such value.
            ShardkitError: as `shardkit.open`.
        """
        given: _Output = ("jpeg" if transform is None else "pil") if output is None else output
        require_choice("output", given, get_args(_Output))
        require_choice("on_bad", on_bad, get_args(_OnBad))
        self.shards = open_dataset(path)
        """The dataset underneath: keys, columns, whole samples."""
        tell_of_labels([Part(self.shards)])
        self.transform = transform
        self.target_transform = target_transform
        self.output = given
        """What the transform gets."""
        self._on_bad = on_bad
        self._threads = whole("threads", threads, 1)
        self._forget()

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class names in label order; None without labels, or without names for them."""
        return self.shards.classes

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.shards)

    def __getitem__(self, index: SupportsIndex) -> _Item:
        """Return image and label of a sample; the label is -1 in a dataset without labels. See `__getitems__`."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[_Item]:
        """Return image and label of many samples, read together: what DataLoader calls for a batch.

        Raises:
            IndexError: there is no such sample.
            IntegrityError: the bytes are not those that were packed, also when read a second time past the page cache;
                names shard, offset and key.
            FormatError: the image cannot be decoded; likewise.
            StorageError: a shard cannot be read.
        """
        numbers = torch.tensor([self._number(index) for index in indices], dtype=torch.int64)
        reads, payloads = self._open().read_alone(numbers.numpy())
        return [self._item(reads, payloads, at) for at in range(len(numbers))]

    def close(self) -> None:
        """Give back descriptors and threads; idempotent. A sample that is asked for later is an error."""
        self.shards.close()
        with self._lock:
            self._closed = True
            if self._reader is not None:
                self._reader.reader.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what belongs to this process; Any: the attributes."""
        return {name: value for name, value in self.__dict__.items() if name not in _OF_A_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Be a dataset that has read nothing yet."""
        self.__dict__.update(state)
        self._forget()

    def _forget(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._reader: SampleReader | None = None
        self._closed = False
        self._warned: set[int] = set()

    def _open(self) -> SampleReader:
        if self._process != os.getpid():  # a forked child; the parent's threads may have held the lock, or be reading
            self._process, self._lock, self._reader = os.getpid(), threading.Lock(), None
        with self._lock:
            if self._closed:
                raise ConfigError("the dataset is closed", path=self.shards.path, remedy="open it again")
            if self._reader is None:
                reader, _ = open_reader("buffered", self.shards.shard_paths, threads=self._threads)
                weakref.finalize(self, reader.close).atexit = False
                crc = self.shards.manifest.has_checksums
                self._reader = SampleReader(Samples([Part(self.shards)]), reader, crc=crc, inspect=False)
            return self._reader

    def _number(self, index: SupportsIndex) -> int:
        number, total = operator.index(index), len(self)
        if not -total <= number < total:
            raise IndexError(f"sample {number} of a dataset with {total} samples")
        return number % total

    def _item(self, reads: SampleReads, payloads: Payloads, at: int) -> _Item:
        try:
            if at in payloads.bad:
                raise IntegrityError(
                    "an image is not what was packed", found=payloads.bad[at], remedy="run shardkit verify"
                )
            image = _render(payloads.views[at].data, self.output)
        except (IntegrityError, FormatError) as error:
            number, located = int(reads.ids[at]), reads.located
            error.path, error.offset = self.shards.shard_paths[int(located.shard[at])], int(located.offset[at])
            error.key = self.shards.columns.texts("key")[number]
            if self._on_bad == "raise":
                raise
            self._warn(number, error)
            return None
        label = int(reads.located.label[at])
        return (
            image if self.transform is None else self.transform(image),
            label if self.target_transform is None else self.target_transform(label),
        )

    def _warn(self, number: int, error: IntegrityError | FormatError) -> None:
        if number not in self._warned:
            self._warned.add(number)
            _log.warning("a sample is left out: %s", error)


_OF_A_PROCESS = {"_process", "_lock", "_reader", "_closed", "_warned"}


def _render(payload: memoryview, output: _Output) -> bytes | torch.Tensor | RgbImage:
    if output == "jpeg":
        return bytes(payload)
    image = open_image(payload)
    if output == "pil":
        return image
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)  # a bytearray: tensors are writable
    return pixels.view(image.height, image.width, 3).permute(2, 0, 1)
