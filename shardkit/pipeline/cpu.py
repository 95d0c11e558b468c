"""Decoding by Pillow: the reference that other decoders are compared with, and what runs where DALI does not."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from PIL import Image, ImageOps

from shardkit.errors import ConfigError, FormatError
from shardkit.format.jpeg import JpegRefusal, inspect_jpeg
from shardkit.format.jpeg_header import fault
from shardkit.format.media_type import PILLOW_FORMATS
from shardkit.pipeline.decoder import BatchSource, DecodedBatch, DecodeSpec, Hand, Resize, as_it_is
from shardkit.pipeline.finish import Canvas, Finisher
from shardkit.pipeline.workers import Workers
from shardkit.storage.reader import HOST, MemorySpace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import numpy.typing as npt

    from shardkit.dataset.batch import EncodedBatch
    from shardkit.pipeline.crops import Crops

__all__ = ["PillowDecoder", "RgbImage", "image_or_reason", "open_image", "put_by_pillow", "resize_by_pillow"]

RgbImage: TypeAlias = Image.Image
"""What `open_image` returns."""


class PillowDecoder:
    """A `Decoder` on Pillow, with a pool of threads."""

    name = "cpu"
    accepts: MemorySpace = HOST
    in_flight = 1
    device_bytes = 0

    def __init__(self, spec: DecodeSpec, *, resize: Resize | None = None) -> None:
        """Prepare to decode; without `resize` Pillow resizes.

        Raises:
            ConfigError: `spec.augment` asks for what another decoder's graph does.
        """
        if spec.recipe.graph:
            raise ConfigError("randaugment and functions work on DALI's nodes, and decoder='cpu' has none")
        self._spec = spec
        self._finisher = Finisher(spec, resize or resize_by_pillow)
        self._decoded = 0

    @property
    def counts(self) -> Mapping[str, int]:
        """How many images were decoded so far; see `Decoder`."""
        return {"pillow": self._decoded}

    def decode(self, source: BatchSource, epoch: int, hand: Hand = as_it_is) -> Iterator[DecodedBatch]:
        """Decode every batch of `source`, in order; see `Decoder`."""
        with contextlib.ExitStack() as stack:  # every step is made, also when Ctrl-C comes in one of them
            stack.callback(self._finisher.forget)
            workers = Workers(self._spec.thread_count, "shardkit-pillow")
            stack.callback(workers.close)
            while (batch := source.get(wait=True)) is not None:
                canvas = self._finisher.begin(len(batch))
                try:
                    places: Iterable[int] = range(len(batch))
                    while bad := self._put(canvas, batch, places, workers):
                        # In a thread, so that this one sees when its read does not end.
                        replaced = workers.submit(_replaced, source, batch, bad, workers)
                        batch, places = replaced.wait(source.check), list(bad)
                finally:
                    if not workers.in_read:
                        batch.release()
                yield hand(DecodedBatch(canvas.pixels, batch))

    def close(self) -> None:
        """Let go of memory; see `Decoder`."""
        self._finisher.forget()

    def _put(self, canvas: Canvas, batch: EncodedBatch, places: Iterable[int], workers: Workers) -> dict[int, str]:
        """Decode places of a batch; return those that cannot be, with the reason."""
        crops = self._finisher.crops(batch)

        def one(at: int) -> str | None:
            return fault(batch.views[at]) or put_by_pillow(canvas, at, batch.views[at], crops)

        tasks = [(at, workers.submit(one, at)) for at in places]
        bad = {at: why for at, task in tasks if (why := task.wait()) is not None}
        self._decoded += len(tasks) - len(bad)
        return bad


def _replaced(source: BatchSource, batch: EncodedBatch, bad: Mapping[int, str], workers: Workers) -> EncodedBatch:
    with workers.reading():
        try:
            batch = source.replace(batch, bad)
        finally:
            if workers.closed:  # nobody waits any more
                batch.release()
    return batch


def resize_by_pillow(source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> None:
    """Fill `target` with `source`; see `Resize`."""
    height, width = target.shape[:2]
    target[...] = np.asarray(Image.fromarray(source).resize((width, height), Image.Resampling.BILINEAR))


def put_by_pillow(canvas: Canvas, at: int, payload: npt.NDArray[np.uint8], crops: Crops | None) -> str | None:
    """Decode, cut and finish one image of a batch.

    Args:
        canvas: of the batch.
        at: place in it.
        payload: the image file's bytes; not retained.
        crops: of the batch; None leaves images whole.

    Returns:
        Why it cannot be decoded, one clause, by the file's structure where that tells; None when it could.
    """
    image = image_or_reason(payload)
    if isinstance(image, str):
        return image
    if crops is None:
        canvas.put(at, np.array(image), mirror=False)
        return None
    (x,), (y,), (w,), (h,) = crops.boxes([image.width], [image.height], slice(at, at + 1))
    canvas.put(at, np.array(image.crop((x, y, x + w, y + h))), mirror=bool(crops.mirror[at]))
    return None


def image_or_reason(payload: npt.NDArray[np.uint8]) -> RgbImage | str:
    """Decode an image whole, or return why it cannot be decoded, by the file's structure where that tells.

    Args:
        payload: the image file's bytes, host memory; not retained.
    """
    try:
        return open_image(payload.data)
    except FormatError as error:
        return _damage(payload) or str(error.found)


def _damage(payload: npt.NDArray[np.uint8]) -> str | None:
    try:
        inspect_jpeg(payload.data)
    except JpegRefusal as refusal:
        return None if refusal.code == "not-jpeg" else refusal.detail
    return None


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
            "an image cannot be decoded", found=f"Pillow: {str(error).partition(' <_io')[0] or type(error).__name__}",
            remedy="pack again with --check decode, which refuses such files",
        ) from error  # fmt: skip
