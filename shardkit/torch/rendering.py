"""From a decoded batch to the tensors that the training loop gets."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.dlpack import from_dlpack

from shardkit.errors import ShardkitError
from shardkit.pipeline.decoder import name_first_sample
from shardkit.torch.gpu import on_consumer_stream, to_device, told_as_ours

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from shardkit.pipeline.decoder import DecodedBatch, DecodeSpec
    from shardkit.storage.cuda import CudaDevice
    from shardkit.torch.epoch import Batch

__all__ = ["Renderer"]


class Renderer:
    """Makes (images, labels), and with fields (images, labels, extras), of decoded batches."""

    def __init__(self, spec: DecodeSpec, fields: tuple[str, ...], device: CudaDevice | None) -> None:
        """Prepare.

        Args:
            spec: of the pixels.
            fields: names of the extras.
            device: where the tensors are wanted; None for the CPU.
        """
        self._spec, self._fields, self._device = spec, fields, device

    def __call__(self, decoded: DecodedBatch) -> DecodedBatch:
        """Put the parts, a `Batch`, into the place of the pixels; a `Hand`.

        On a GPU they come in the order of the caller's current stream; the host never waits.

        Raises:
            DeviceError: the GPU is lost.
            CapabilityError: it has no memory left.
        """
        if self._device is None:
            return self._with_parts(decoded)
        try:
            with told_as_ours(self._device, decoded.batch.labels.nbytes):
                return self._with_parts(decoded)
        except ShardkitError as error:
            name_first_sample(error, decoded.batch)
            raise

    def _with_parts(self, decoded: DecodedBatch) -> DecodedBatch:
        return replace(decoded, pixels=self._parts(decoded), numbers=None)

    def _parts(self, decoded: DecodedBatch) -> Batch:
        batch, images = decoded.batch, self._images(decoded)
        labels, ids = decoded.numbers or (batch.labels, batch.ids)
        parts = images, self._placed_numbers(labels)
        if not self._fields:
            return parts
        extras: dict[str, Any] = {}
        for field in self._fields:
            if field == "key":
                extras[field] = batch.samples.keys(batch.ids)
            elif field == "index":
                extras[field] = self._placed_numbers(ids)
            else:
                extras[field] = batch.metadata
        return *parts, extras

    def _images(self, decoded: DecodedBatch) -> torch.Tensor | list[torch.Tensor]:
        pixels = decoded.pixels
        if self._device is not None and decoded.ready is not None:
            every = [*(pixels if isinstance(pixels, list) else [pixels]), *(decoded.numbers or ())]
            on_consumer_stream(self._device, every, decoded.ready)
            return pixels if isinstance(pixels, list) else self._shaped(pixels)
        if isinstance(pixels, list):
            return [self._placed(torch.from_numpy(image)) for image in pixels]
        return self._shaped(self._placed(from_dlpack(pixels)))

    def _shaped(self, images: torch.Tensor) -> torch.Tensor:
        return images.permute(0, 3, 1, 2) if self._spec.channels_last else images

    def _placed_numbers(self, values: npt.NDArray[np.int64] | torch.Tensor) -> torch.Tensor:
        if isinstance(values, torch.Tensor):  # a decoder on the GPU has sent them
            return values
        return torch.from_numpy(values) if self._device is None else to_device(self._device, values)

    def _placed(self, images: torch.Tensor) -> torch.Tensor:
        """Return what a decoder on the CPU made, where it is wanted."""
        if self._device is None:
            return images
        with told_as_ours(self._device, images.nbytes):
            return images.pin_memory().to(torch.device("cuda", self._device.number), non_blocking=True)
