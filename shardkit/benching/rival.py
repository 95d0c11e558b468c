"""DALI's own way from a dataset to finished batches: its WebDataset reader, with the text indexes that were packed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from shardkit.benching.clock import shards_of
from shardkit.errors import CapabilityError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from shardkit.benching.case import Settings

__all__ = ["AHEAD", "rival_batches"]

_Foreign: TypeAlias = Any  # DALI has no types
_AREA, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
_MEAN, _STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
_FILL = 1024  # samples that its reader shuffles
_QUEUE = 2
AHEAD = _QUEUE + 1
"""Batches that wait or are on their way: DALI's queue, and the one that its iterator has asked for."""


def rival_batches(
    settings: Settings,
    *,
    threads: int,
    labelled: bool,
    decode: bool = True,
    channels_last: bool = False,
    **options: _Foreign,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches without end, of the same kind as a training loader's. Nothing is read before the first one.

    Args:
        settings: dataset, size, batch and device.
        threads: of DALI.
        labelled: the samples have the member cls.
        channels_last: memory order of the images; their shape is the same.
        decode: False gives the encoded images' first bytes in the place of pixels: what reading takes.
        options: further arguments of DALI's reader.

    Raises:
        CapabilityError: DALI is not installed.
    """
    try:
        import nvidia.dali
        import nvidia.dali.plugin.pytorch as to_torch
    except ImportError as error:
        raise CapabilityError(
            "DALI's reader needs DALI", found=str(error), remedy="pip install 'shardkit[dali]'"
        ) from error
    dali: _Foreign = nvidia.dali
    gpu = int(settings.device.partition(":")[2] or 0) if settings.on_gpu else None
    pipe: _Foreign = dali.Pipeline(
        batch_size=settings.batch_size, num_threads=threads, device_id=gpu, prefetch_queue_depth=_QUEUE, seed=1
    )
    with pipe:
        shards, members = shards_of(settings.dataset), ["jpg", "cls"] if labelled else ["jpg"]
        found = dali.fn.readers.webdataset(
            paths=shards, index_paths=[f"{path.removesuffix('.tar')}.idx" for path in shards], ext=members,
            random_shuffle=True, initial_fill=_FILL, missing_component_behavior="error", **options,
        )  # fmt: skip
        jpeg, label = found if labelled else (found, dali.types.Constant([0], dtype=dali.types.UINT8, shape=[1]))
        if decode:
            pixels = _finished(dali, jpeg, settings, "HWC" if channels_last else "CHW")
        else:
            pixels = dali.fn.slice(jpeg, 0, 2, axes=[0])
        pipe.set_outputs(pixels, dali.fn.pad(label, fill_value=0))
    pipe.build()
    iterator = to_torch.DALIGenericIterator(
        [pipe], ["images", "labels"], size=-1, auto_reset=False, prepare_first_batch=False
    )
    order = (0, 3, 1, 2) if channels_last else (0, 1, 2, 3)
    if not decode:
        return ((batch[0]["images"], batch[0]["labels"]) for batch in iterator)
    return ((batch[0]["images"].permute(order), batch[0]["labels"]) for batch in iterator)


def _finished(dali: _Foreign, jpeg: _Foreign, settings: Settings, layout: str) -> _Foreign:
    fn, types, size = dali.fn, dali.types, [settings.size, settings.size]
    if settings.on_gpu:
        whole = fn.decoders.image(jpeg, device="mixed", output_type=types.RGB, hw_decoder_load=1.0)
        square = fn.random_resized_crop(whole, size=size, random_area=_AREA, random_aspect_ratio=_RATIO)
    else:
        part = fn.decoders.image_random_crop(
            jpeg, output_type=types.RGB, random_area=_AREA, random_aspect_ratio=_RATIO
        )  # fmt: skip
        square = fn.resize(part, size=size)
    return fn.crop_mirror_normalize(
        square, mirror=fn.random.coin_flip(), dtype=types.FLOAT16 if settings.on_gpu else types.FLOAT,
        output_layout=layout, mean=list(_MEAN), std=list(_STD),
    )  # fmt: skip
