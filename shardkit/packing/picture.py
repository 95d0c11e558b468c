"""What Pillow does for the packer: whole decodes, and re-encoding where the user asks for it.

The only file of the packer that imports Pillow, and only workers that need it do.
"""

from __future__ import annotations

import io
import re
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import numpy as np
from PIL import Image

from shardkit.packing.refusals import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CONVERTIBLE", "JPEG", "check_decodes", "encode_jpeg"]

CONVERTIBLE = ("PNG", "WEBP", "GIF")
"""Pillow's names of the formats that `convert` re-encodes."""
JPEG = ("JPEG",)
"""Pillow's name of the format that takes every JPEG; it calls one with further images behind it MPO afterwards."""

_ADDRESS = re.compile("<[^<>]* at 0x[0-9a-f]+>")
_ORIENTATION_TAG = 0x0112
_TO_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation to what makes the stored pixels upright."""
_PROFILE_SPACES = {"L": b"GRAY", "RGB": b"RGB ", "CMYK": b"CMYK"}
"""Mode to the colour space that an ICC profile for it states at byte 16."""


def check_decodes(data: bytes, max_pixels: int) -> None:
    """Decode a whole JPEG and throw the pixels away.

    libjpeg goes on over flipped bits in the image data, with a warning that Pillow does not hand on: what is found is
    what no decoder gets over (damaged or missing tables, a coding or precision that is not supported).

    Raises:
        RefusedError: `undecodable`, when Pillow fails or warns.
    """
    with _strict(max_pixels, "error"), Image.open(io.BytesIO(data), formats=JPEG) as image:
        image.load()


def encode_jpeg(
    data: bytes, *, resize: int | None, quality: int, max_pixels: int, formats: tuple[str, ...],
    orientation: int | None = None,
) -> bytes | None:  # fmt: skip
    """Return an image as a baseline JPEG, or None when nothing had to change.

    Args:
        data: the encoded image.
        resize: pixels of the shorter side; never enlarged. None keeps the size.
        quality: JPEG quality of the result.
        max_pixels: largest width x height that is decoded.
        formats: Pillow's names of the formats to take.
        orientation: EXIF orientation, 0 to 8, where the caller knows it; None asks Pillow.

    Returns:
        The JPEG: upright (orientation applied, EXIF dropped), the ICC profile kept where it fits the colours,
        transparency on white, 16 bits scaled to 8, RGB, grey or CMYK as it was. None for a JPEG that is small enough.

    Raises:
        RefusedError: `not-jpeg`, `too-many-pixels` or `undecodable`.
    """
    with _strict(max_pixels, "ignore"), Image.open(io.BytesIO(data), formats=formats) as image:
        width, height = image.size
        if width * height > max_pixels:
            raise RefusedError("too-many-pixels", f"{width} x {height} pixels; at most {max_pixels}")
        smaller = resize is not None and min(width, height) > resize
        if image.format in ("JPEG", "MPO") and not smaller:
            return None
        size = image.size
        if smaller and resize is not None:
            scale = resize / min(width, height)
            size = (max(1, round(width * scale)), max(1, round(height * scale)))
            # The DCT can be decoded at 1/2, 1/4 or 1/8; twice the target keeps the resampling honest.
            image.draft(None, (2 * size[0], 2 * size[1]))
        turn = _TO_UPRIGHT.get(_orientation(image) if orientation is None else orientation)
        pixels = _flat(image)
        if pixels.size != size:
            pixels = pixels.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)
        if turn is not None:
            pixels = pixels.transpose(turn)
        out = io.BytesIO()
        # The empty values keep Pillow from copying what the source carried.
        profile = _profile(image, pixels.mode)
        pixels.save(out, "JPEG", quality=quality, icc_profile=profile, exif=b"", comment=b"", xmp=b"")
        return out.getvalue()


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(_ORIENTATION_TAG)
    except Exception:  # broken EXIF, whatever Pillow's parser raises: viewers show such an image as it is stored
        return 0
    return value if isinstance(value, int) else 0


def _profile(image: Image.Image, mode: str) -> bytes | None:
    """Return the image's ICC profile if it is one for the mode: a grey one would spoil an RGB image."""
    profile = image.info.get("icc_profile")
    fits = isinstance(profile, bytes) and profile[16:20] == _PROFILE_SPACES[mode]
    return profile if fits else None


def _flat(image: Image.Image) -> Image.Image:
    """Return pixels in a mode that a JPEG holds."""
    if image.mode.startswith("I"):
        # Pillow's own conversion cuts off at 255, which makes nearly every pixel white.
        deep = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((deep * 255 + 32767) // 65535).astype(np.uint8))
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGB", rgba.size, "white")
        white.paste(rgba, mask=rgba.getchannel("A"))
        return white
    if image.mode in ("L", "RGB", "CMYK"):
        image.load()
        return image
    return image.convert("L" if image.mode == "1" else "RGB")


@contextmanager
def _strict(max_pixels: int, on_warning: Literal["error", "ignore"]) -> Iterator[None]:
    """Turn every failure of Pillow, and every warning if they are errors, into a refusal; the pixel limit is ours."""
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = max(max_pixels, 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(on_warning)
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            yield
    except (RefusedError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise RefusedError("too-many-pixels", str(error)) from error
    except Exception as error:  # whatever a parser of Pillow's raises: OSError, ValueError, SyntaxError, struct.error
        # Equal packs write equal refusals: no address in memory may be in one.
        what = _ADDRESS.sub("the data", str(error))[:200]
        raise RefusedError("undecodable", f"{type(error).__name__}: {what}") from error
    finally:
        Image.MAX_IMAGE_PIXELS = before
