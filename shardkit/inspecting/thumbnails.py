"""Small pictures of samples; what cannot be one says why. The only importer of Pillow here."""

from __future__ import annotations

import io
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.errors import ShardkitError
from shardkit.format.media_type import PILLOW_FORMATS
from shardkit.looking.listing import Facts, read_facts

if TYPE_CHECKING:
    from shardkit.dataset.shardset import Dataset

__all__ = ["THUMBNAIL_PIXELS", "Thumbnail", "make_thumbnail"]

THUMBNAIL_PIXELS = 160
"""The longer side of a thumbnail."""
_QUALITY = 75
_MAX_BYTES = 256 << 20
"""Of the largest image that is read for a thumbnail: it is read whole."""
_ADDRESS = re.compile("<[^<>]* at 0x[0-9a-f]+>")


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """One sample on the sheet."""

    number: int
    """Of the sample in the dataset."""
    facts: Facts | None
    """None when the index cannot tell."""
    jpeg: bytes | None
    """The small picture, turned as EXIF says; None when there is none."""
    size: tuple[int, int]
    """Its width and height; (0, 0) without."""
    reason: str | None
    """Why there is none, in raw words; None when there is one."""


def make_thumbnail(dataset: Dataset, number: int) -> Thumbnail:
    """Read a sample, check its CRC-32C and shrink it; whatever goes wrong with it becomes the reason."""
    facts = None
    try:
        (facts,) = read_facts(dataset, [number])
        if facts.size > _MAX_BYTES:
            return Thumbnail(number, facts, None, (0, 0), "too large to be read for a thumbnail")
        jpeg, size = _shrink(dataset[number].jpeg)
    except ShardkitError as error:
        # Without the path: a page is shown to others.
        found = "" if error.found is None else f"; expected {error.expected}; found {error.found}"
        return Thumbnail(number, facts, None, (0, 0), error.what + found)
    except Exception as error:  # Pillow's plugins raise what their parsers do: OSError, ValueError, SyntaxError, ...
        told = _ADDRESS.sub("", str(error))  # an address is another one in every run
        return Thumbnail(number, facts, None, (0, 0), f"cannot be decoded: {type(error).__name__}: {told}"[:300])
    return Thumbnail(number, facts, jpeg, size, None)


def _shrink(data: bytes) -> tuple[bytes, tuple[int, int]]:
    """Return a JPEG of at most `THUMBNAIL_PIXELS` a side, and its size; a JPEG is decoded at an eighth where it can."""
    from PIL import Image, ImageOps  # a tenth of a second that only a page pays

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(data), formats=PILLOW_FORMATS) as image:
            image.draft("RGB", (2 * THUMBNAIL_PIXELS, 2 * THUMBNAIL_PIXELS))
            image.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
            small = ImageOps.exif_transpose(image).convert("RGB")
        out = io.BytesIO()
        Image.frombytes("RGB", small.size, small.tobytes()).save(out, "JPEG", quality=_QUALITY)  # without its EXIF
    return out.getvalue(), small.size
