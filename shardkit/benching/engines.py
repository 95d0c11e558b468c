"""The ceiling of decoding on a GPU: nvJPEG's engines on images that lie in its memory, and nothing else."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from shardkit.benching.clock import Clock
from shardkit.benching.loading import gpu_number
from shardkit.dataset.shardset import open_dataset
from shardkit.errors import ConfigError
from shardkit.extent import align_up
from shardkit.format.jpeg import hardware_decodable
from shardkit.storage.reader import address_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.benching.case import Settings

__all__ = ["measure_engines"]

_BATCHES = 32  # that lie in the GPU's memory, and are decoded again and again
_ALIGN = 4096
_PIXEL_ALIGN = 256


def measure_engines(settings: Settings) -> dict[str, Any]:  # Any: JSON values
    """Decode whole batches by one call each, into one packed slab; what the engines do not take is left out.

    Raises:
        ConfigError: the settings name no GPU, or the dataset has no batch of images for the engines.
        CapabilityError: the engines cannot be had.
    """
    if not settings.on_gpu:
        raise ConfigError("the engines are a GPU's", expected="device='cuda'", found=settings.device)
    from shardkit.pipeline.nvjpeg_library import DESTINATION, open_nvjpeg
    from shardkit.storage.cuda import open_device

    device = open_device(gpu_number(settings))
    library, stream = open_nvjpeg(device), device.stream()
    payloads, width, height = _images(settings)
    sizes = np.fromiter(map(len, payloads), np.int64, len(payloads))
    starts = _places(sizes, _ALIGN)
    host = np.zeros(int(starts[-1]), np.uint8)
    for payload, start in zip(payloads, starts[:-1].tolist(), strict=True):
        host[start : start + len(payload)] = np.frombuffer(payload, np.uint8)
    encoded = device.memory(host.nbytes)
    stream.upload(address_of(encoded), host.ctypes.data, host.nbytes)
    stream.synchronize()
    pixels = [slice(at, at + settings.batch_size) for at in range(0, len(payloads), settings.batch_size)]
    places = [_places(3 * width[part] * height[part], _PIXEL_ALIGN) for part in pixels]
    slab = device.memory(max(int(place[-1]) for place in places) + (1 << 20))
    jobs = []
    for part, place in zip(pixels, places, strict=True):
        targets = np.zeros(settings.batch_size, DESTINATION)
        targets["channel"][:, 0] = place[:-1] + address_of(slab)
        targets["pitch"][:, 0] = 3 * width[part]
        jobs.append(
            ((starts[:-1][part] + address_of(encoded)).astype(np.uint64), sizes[part].astype(np.uint64), targets)
        )
    again = itertools.cycle(jobs)
    for job in itertools.islice(again, settings.warm_up):
        library.decode(*job, stream)
    clock, batches = Clock(), 0
    while batches < settings.batches or (not settings.batches and clock.seconds < settings.seconds):
        library.decode(*next(again), stream)
        batches += 1
    images = batches * settings.batch_size
    result = clock.stop(images)
    return result | {"engines": library.engines()[0], "gb_s": images * float(sizes.mean()) / result["seconds"] / 1e9}


def _places(sizes: npt.NDArray[np.int64], align: int) -> npt.NDArray[np.int64]:
    """Return where pieces of these sizes begin, one behind the other, and where the last one ends; int64 [n + 1]."""
    ends = np.cumsum([align_up(size, align) for size in sizes.tolist()], dtype=np.int64)
    return np.concatenate([np.zeros(1, np.int64), ends])


def _images(settings: Settings) -> tuple[list[bytes], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return encoded images in whole batches, their widths and heights as stored."""
    with open_dataset(settings.dataset) as dataset:
        names = ("sof", "precision", "scans", "components", "subsampling", "width", "height")
        facts = {name: np.asarray(dataset.columns.numbers(name)[:], np.int64) for name in names}
        fit = hardware_decodable(*(facts[name] for name in names[:5]))
        numbers = np.flatnonzero(fit & (facts["width"] > 0) & (facts["height"] > 0))
        count = min(len(numbers) // settings.batch_size, _BATCHES) * settings.batch_size
        if not count:
            raise ConfigError("no batch of images for the engines", expected=settings.batch_size, found=len(numbers))
        taken = numbers[:count]
        return [dataset[number].jpeg for number in taken.tolist()], facts["width"][taken], facts["height"][taken]
