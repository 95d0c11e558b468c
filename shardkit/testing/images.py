"""Datasets of real, small JPEGs whose pixels are known: what a loader must give back."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from shardkit.format.jpeg import JpegRefusal, inspect_jpeg
from shardkit.testing.datasets import Draft, DraftSample, DraftShard, draft_shard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

__all__ = [
    "COLOURS", "SPOILT", "Picture", "coloured", "corners", "jpeg_bytes", "jpeg_facts", "spoilt", "write_pictures",
]  # fmt: skip

COLOURS = ((220, 40, 40), (40, 200, 40), (40, 40, 220), (220, 220, 40), (40, 200, 200), (200, 40, 200), (128, 128, 128))
"""One a label: far enough apart that JPEG and resizing leave no doubt."""
SPOILT = (
    "truncated", "cut after the scan's first bytes", "empty", "text", "header", "start only",
    "a length that leads nowhere", "a broken PNG", "no frame", "a Huffman table that cannot be",
    "sampling that cannot be",
)  # fmt: skip
"""What `spoilt` knows."""
_ORIENTATION = 0x0112
_SOF, _DHT, _SOS = b"\xff\xc0", b"\xff\xc4", b"\xff\xda"


@dataclass(frozen=True, slots=True)
class Picture:
    """One sample of a dataset."""

    key: str
    jpeg: bytes
    label: int | None = None
    metadata: Mapping[str, Any] | None = None
    """The json member; Any: JSON values. None for no such member."""


def write_pictures(
    folder: Path, pictures: Sequence[Picture], *, per_shard: int = 10, align: int = 4096, strict: bool = True
) -> Path:
    """Write a dataset with the facts of its images in the index; return `folder`, which is made.

    Args:
        folder: does not exist yet.
        pictures: in stored order; without a label each needs metadata.
        per_shard: samples of a shard.
        align: of the images' payloads.
        strict: see `jpeg_facts`.
    """
    shards: list[DraftShard] = []
    for start in range(0, len(pictures), per_shard):
        drafts = [
            DraftSample(
                key=p.key, jpeg=p.jpeg, label=p.label, metadata=p.metadata, facts=jpeg_facts(p.jpeg, strict=strict)
            )
            for p in pictures[start : start + per_shard]
        ]
        shards.append(draft_shard(f"pictures-{len(shards):06}.tar", drafts, align))
    labels = [p.label for p in pictures if p.label is not None]
    classes = tuple(f"class-{number}" for number in range(max(labels) + 1)) if labels else None
    return Draft(name="pictures", align=align, classes=classes, shards=shards, rejected=None, refused=0).write(folder)


def coloured(count: int, *, seed: int = 0, sides: tuple[int, int] = (40, 90)) -> list[Picture]:
    """Return pictures of one colour each, `COLOURS[label]`, with sides drawn from a range of pixels."""
    rng = np.random.default_rng(seed)
    pictures = []
    for number in range(count):
        label = number % len(COLOURS)
        height, width = (int(side) for side in rng.integers(*sides, 2))
        pixels = np.full((height, width, 3), COLOURS[label], np.uint8)
        pictures.append(Picture(f"c{label}/{number:05}", jpeg_bytes(pixels), label, {"number": number}))
    return pictures


def corners(side: int = 64) -> npt.NDArray[np.uint8]:
    """Return pixels [side, side, 3] with a red, green, blue and white quarter: top left, top right, then below."""
    half = side // 2
    pixels = np.empty((side, side, 3), np.uint8)
    for (row, column), colour in zip(
        ((0, 0), (0, half), (half, 0), (half, half)), ((255, 0, 0), (0, 255, 0), (0, 0, 255), (255,) * 3), strict=True
    ):
        pixels[row : row + half, column : column + half] = colour
    return pixels


def jpeg_bytes(
    pixels: npt.NDArray[np.uint8] | Image.Image, *, orientation: int | None = None, **options: object
) -> bytes:
    """Encode pixels at quality 95.

    Args:
        pixels: uint8 [height, width, 3] or [height, width], or an image of any mode that JPEG has.
        orientation: EXIF orientation to state; the pixels are stored as they are.
        options: for Pillow's `save`.
    """
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    exif = Image.Exif()
    if orientation is not None:
        exif[_ORIENTATION] = orientation
    out = io.BytesIO()
    image.save(out, "JPEG", **({"quality": 95, "exif": exif} | options))
    return out.getvalue()


def jpeg_facts(jpeg: bytes, *, strict: bool = True) -> dict[str, int]:
    """Return the index's columns about an image; for what is not a whole JPEG those that mean "unknown".

    Args:
        jpeg: the encoded image.
        strict: one without its end is not whole; else the facts before it count, as `index` without a check has them.
    """
    names = ("media_type", "width", "height", "sof", "components", "subsampling", "precision", "scans",
             "restart_interval", "orientation", "adobe_transform")  # fmt: skip
    try:
        facts = inspect_jpeg(jpeg, strict=strict)
    except JpegRefusal:
        return dict.fromkeys(names, 0) | {"adobe_transform": -1}
    return {name: getattr(facts, name) for name in names}


def spoilt(jpeg: bytes, how: str) -> bytes:
    """Return what no decoder can use, made of a baseline JPEG.

    The last two ways of `SPOILT` leave the markers whole, so that only decoding finds them.
    """
    at, table = jpeg.index(_SOF), jpeg.index(_DHT)
    return {
        "truncated": jpeg[: len(jpeg) // 2],
        "cut after the scan's first bytes": jpeg[: jpeg.index(_SOS) + 30],
        "empty": b"",
        "text": b"no image at all" * 20,
        "header": jpeg[:30],
        "start only": jpeg[:2],
        "a length that leads nowhere": jpeg[:4] + b"\xff\xff" + jpeg[6:],
        "a broken PNG": b"\x89PNG\r\n\x1a\n" + bytes(50),
        "no frame": jpeg.replace(_SOF, b"\xff\xfe"),
        "a Huffman table that cannot be": jpeg[: table + 5] + b"\xff" * 16 + jpeg[table + 21 :],
        "sampling that cannot be": jpeg[: at + 11] + b"\x00" + jpeg[at + 12 :],
    }[how]
