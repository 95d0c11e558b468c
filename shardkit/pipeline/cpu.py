"""Decoding by Pillow: the reference that other decoders are compared with, and what runs where DALI does not."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from PIL import Image, ImageOps

from shardkit.errors import ConfigError, FormatError
from shardkit.format.media_type import PILLOW_FORMATS
from shardkit.pipeline.crops import random_crops
from shardkit.pipeline.decoder import BatchSource, DecodedBatch, DecodeSpec
from shardkit.storage.reader import HOST, MemorySpace

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from shardkit.dataset.batch import EncodedBatch

__all__ = ["PillowDecoder", "RgbImage", "open_image"]

RgbImage: TypeAlias = Image.Image
"""What `open_image` returns."""
_Box: TypeAlias = tuple[float, float, float, float]  # left, top, right, bottom


class PillowDecoder:
    """A `Decoder` on Pillow, with a pool of threads."""

    accepts: MemorySpace = HOST
    in_flight = 1

    def __init__(self, spec: DecodeSpec) -> None:
        """Prepare to decode.

        Raises:
            ConfigError: `spec.augment`, which works on the nodes of another decoder's graph.
        """
        if spec.augment is not None:
            raise ConfigError("augment= is a function on DALI's nodes, and decoder='cpu' has none")
        self._spec = spec

    def decode(self, source: BatchSource, epoch: int) -> Iterator[DecodedBatch]:
        """Decode every batch of `source`, in order; see `Decoder`."""
        with ThreadPoolExecutor(self._spec.thread_count, thread_name_prefix="shardkit-pillow") as threads:
            while (batch := source.get(wait=True)) is not None:
                try:
                    pixels = self._pixels(batch, epoch, threads)
                finally:
                    batch.release()
                yield DecodedBatch(pixels, batch)

    def _pixels(self, batch: EncodedBatch, epoch: int, threads: ThreadPoolExecutor) -> npt.NDArray[Any]:
        spec, count = self._spec, len(batch)
        crops = random_crops(batch.ids, batch.width, batch.height, seed=spec.seed, epoch=epoch)
        out = np.empty((count, spec.size, spec.size, 3), spec.dtype)

        def one(at: int) -> None:
            try:
                image = open_image(batch.views[at].data)
            except FormatError as error:
                error.path, error.offset = batch.place(at)
                error.key = batch.key(at)
                raise
            box, mirror = _centre(image, spec), False
            if spec.train:
                box, mirror = _scaled(image, crops.anchor[at], crops.shape[at]), bool(crops.mirror[at])
            out[at] = _finished(image, box, spec, mirror=mirror)

        list(threads.map(one, range(count)))
        return out if spec.channels_last else np.ascontiguousarray(out.transpose(0, 3, 1, 2))


def open_image(data: bytes | bytearray | memoryview) -> RgbImage:
    """Decode an image file whole: RGB, EXIF orientation applied.

    Args:
        data: the file's bytes; not retained.

    Raises:
        FormatError: Pillow cannot decode it, or the file is truncated; the caller knows its name.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=PILLOW_FORMATS)
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # Pillow's plugins raise whatever they like on damaged files
        raise FormatError(
            "an image cannot be decoded", found=f"Pillow: {str(error) or type(error).__name__}",
            remedy="pack again with --check decode, which refuses such files",
        ) from error  # fmt: skip


def _scaled(image: RgbImage, anchor: npt.NDArray[np.float32], shape: npt.NDArray[np.float32]) -> _Box:
    top, left = (float(a) for a in anchor)
    height, width = (float(s) for s in shape)
    x, y = round(left * image.width), round(top * image.height)
    return x, y, x + max(round(width * image.width), 1), y + max(round(height * image.height), 1)


def _centre(image: RgbImage, spec: DecodeSpec) -> _Box:
    """Return the part of the image that becomes the centre crop: cutting first and resizing then is the same."""
    scale = min(image.width, image.height) / spec.shorter
    width, height = (max(round(side / scale), spec.size) for side in image.size)
    x, y = (width - spec.size + 1) // 2, (height - spec.size + 1) // 2  # half a pixel goes right and down, as in DALI
    fx, fy = image.width / width, image.height / height
    return x * fx, y * fy, (x + spec.size) * fx, (y + spec.size) * fy


def _finished(image: RgbImage, box: _Box, spec: DecodeSpec, *, mirror: bool) -> npt.NDArray[Any]:
    if spec.train:
        # Only what lies in the crop decides its pixels; `box` alone would look across its edges.
        image, box = image.crop(box), (0, 0, box[2] - box[0], box[3] - box[1])
    square = image.resize((spec.size, spec.size), Image.Resampling.BILINEAR, box=box)
    pixels = np.asarray(square)
    pixels = pixels[:, ::-1] if mirror else pixels
    if spec.dtype == "uint8":
        return pixels
    return (pixels.astype(np.float32) - np.asarray(spec.mean, np.float32)) / np.asarray(spec.std, np.float32)
