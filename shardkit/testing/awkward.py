"""The awkward files that real folders of photographs contain, one of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from PIL import Image

from shardkit.testing.photos import Photographs, TreeFile, encode, picture

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["AwkwardFile", "Fate", "awkward_files", "stored_for_orientation"]

Fate: TypeAlias = Literal["packed", "refused", "ignored"]
"""What `shardkit pack` with default options does: ignored files are counted by kind, refused ones get a reason code."""

_UPRIGHT = 1
_ORIENTATION_TAG = 0x0112
_INVERSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
"""What to do to an upright picture, so that a viewer who obeys the orientation shows it upright again."""


@dataclass(frozen=True, slots=True)
class AwkwardFile(TreeFile):
    """A file with what is odd about it."""

    oddity: str
    """What is odd, in a few words."""
    fate: Fate
    """What the default options do with it."""


def awkward_files(photographs: Photographs, *, folder: str = "odd", seed: int = 0) -> tuple[AwkwardFile, ...]:
    """Return one file of each kind, all below `folder`, in a stable order.

    Args:
        photographs: at least one picture to cut from.
        folder: the class that the files belong to.
        seed: another seed gives other pictures.
    """
    pictures = (picture(photographs, number, seed=seed) for number in range(1_000_000, 2_000_000))
    return tuple(
        AwkwardFile(f"{folder}/{name}", data, oddity, fate)
        for makers in (_kinds, _names, _strangers, _broken)
        for name, data, oddity, fate in makers(pictures)
    )


def stored_for_orientation(image: Image.Image, orientation: int) -> bytes:
    """Return a JPEG that shows `image` upright when its EXIF orientation, 1 to 8, is obeyed."""
    exif = Image.Exif()
    exif[_ORIENTATION_TAG] = orientation
    stored = image if orientation == _UPRIGHT else image.transpose(_INVERSE[orientation])
    return encode(stored, quality=90, exif=exif)


_Row: TypeAlias = tuple[str, bytes, str, Fate]


def _kinds(pictures: Iterator[Image.Image]) -> Iterator[_Row]:
    yield "grayscale.jpg", encode(next(pictures).convert("L"), quality=90), "one component", "packed"
    yield "cmyk.jpg", encode(next(pictures).convert("CMYK"), quality=90), "four components, inverted", "packed"
    yield "progressive.jpg", encode(next(pictures), quality=90, progressive=True), "many scans", "packed"
    upright = next(pictures)
    for orientation in range(1, 9):
        data = stored_for_orientation(upright, orientation)
        yield f"orientation-{orientation}.jpg", data, f"EXIF orientation {orientation}", "packed"


def _names(pictures: Iterator[Image.Image]) -> Iterator[_Row]:
    for name, oddity in (
        ("capitals.JPEG", "extension in capitals"),
        ("short.jpe", "a rare extension"),
        ("interchange.jfif", "a rare extension"),
        ("nested/deeper/leaf.jpg", "folders below the class"),
        ("two words.jpg", "a space in the name"),
        ("caf\u00e9-\u96ea.jpg", "accents and ideographs in the name"),
        ("two\nlines.jpg", "a line break in the name"),
        ("latin-\udce9.jpg", "a byte in the name that is not UTF-8"),
    ):
        yield name, encode(next(pictures), quality=90), oddity, "packed"


def _strangers(pictures: Iterator[Image.Image]) -> Iterator[_Row]:
    yield ".hidden.jpg", encode(next(pictures), quality=90), "hidden", "ignored"
    yield "._two words.jpg", b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        ", "AppleDouble", "ignored"
    yield "Thumbs.db", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(504), "a thumbnail cache", "ignored"
    yield "readme.txt", b"the photographs of the summer\n", "another type", "ignored"


def _broken(pictures: Iterator[Image.Image]) -> Iterator[_Row]:
    whole = encode(next(pictures), quality=90)
    yield "truncated.jpg", whole[: len(whole) // 2], "cut in the middle of the scan", "refused"
    yield "screenshot.jpg", encode(next(pictures).resize((160, 120)), "PNG"), "a PNG under another name", "refused"
    yield "empty.jpg", b"", "zero bytes", "refused"
