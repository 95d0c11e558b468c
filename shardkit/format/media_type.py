"""What bytes are by their first few, whatever the file's name says."""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = [
    "CONVERTIBLE",
    "MEDIA_TYPES",
    "PILLOW_FORMATS",
    "extension_of",
    "is_image_name",
    "sniff_media_type",
]

_IMAGES: Final = ("jpeg", "png", "gif", "webp", "bmp", "tiff", "heif", "jxl", "jpeg2000")
MEDIA_TYPES: Final = ("unknown", *_IMAGES, "pdf", "zip", "html", "xml", "text", "gzip")
"""The name of each media type; its code is its position, stored in indexes: only append. `heif` includes AVIF."""

CONVERTIBLE: Final = ("png", "webp", "gif")
"""Names of the media types, and extensions of the files, that `--convert` takes and stores as JPEGs."""
PILLOW_FORMATS: Final = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF")
"""Pillow's names of the formats that it may be shown. Never EPS: Pillow starts another program for it."""

_EXTENSIONS: Final = {
    **{name: name for name in MEDIA_TYPES},
    "jpeg": "jpg",
    "tiff": "tif",
    "heif": "heic",
    "jpeg2000": "jp2",
    "unknown": "bin",
    "text": "txt",
}
_OF_IMAGES: Final = frozenset(("jpeg", "tiff", "heif", "avif", "j2k", *(_EXTENSIONS[name] for name in _IMAGES)))
_SNIFFED_BYTES: Final = 512
_SIGNATURES: Final = re.compile(
    rb"""(?sx)
      (?P<jpeg> \xff\xd8\xff)
    | (?P<png> \x89PNG\r\n\x1a\n)
    | (?P<gif> GIF8[79]a)
    | (?P<webp> RIFF....WEBP)
    | (?P<bmp> BM....\0{4}....[\x0c\x28\x6c\x7c]\0{3})
    | (?P<tiff> II[*+]\0 | MM\0[*+])
    | (?P<heif> ....ftyp(?:hei[cmsx]|hev[cmsx]|mif[12]|miaf|msf1|avi[fs]))
    | (?P<jxl> \xff\x0a | \0\0\0\x0cJXL\x20\r\n\x87\n)
    | (?P<jpeg2000> \xff\x4f\xff\x51 | \0\0\0\x0cjP\x20\x20\r\n\x87\n)
    | (?P<pdf> %PDF-)
    | (?P<zip> PK(?:\x03\x04|\x05\x06))
    | (?P<gzip> \x1f\x8b\x08)
    | (?:\xef\xbb\xbf)?\s*<(?i:(?P<html> (?:!doctype\s+)?html\b|head\b|body\b|script\b)|(?P<xml> \?xml\b|svg\b))
    """
)
_CONTROLS: Final = bytes({*range(32), 127} - set(b"\t\n\f\r\x1b"))


def extension_of(code: int) -> str:
    """Return the extension of files of a media type; `bin` of an unknown one, and of a code that is none.

    >>> extension_of(1), extension_of(0), extension_of(200)
    ('jpg', 'bin', 'bin')
    """
    return _EXTENSIONS[MEDIA_TYPES[code] if code < len(MEDIA_TYPES) else "unknown"]


def is_image_name(name: str) -> bool:
    """Tell whether a name ends as those of images' files do.

    >>> is_image_name("a/b.JPEG"), is_image_name("a.jpg/b"), is_image_name(".jpg")
    (True, False, False)
    """
    stem, dot, extension = name.rpartition("/")[2].rpartition(".")
    return bool(stem and dot) and extension.lower() in _OF_IMAGES


def sniff_media_type(data: ReadableBuffer, start: int = 0, end: int | None = None) -> int:
    """Return what `data[start:end]` is by its first 512 bytes, a code of `MEDIA_TYPES`.

    >>> MEDIA_TYPES[sniff_media_type(b"GIF89a")]
    'gif'
    """
    with memoryview(data) as whole, whole.cast("B")[start:end] as view:
        head = bytes(view[:_SNIFFED_BYTES])
    known = _SIGNATURES.match(head)
    if known:
        return MEDIA_TYPES.index(known.lastgroup or "")
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # incremental: the last character may be cut off
    except UnicodeDecodeError:
        return 0
    return MEDIA_TYPES.index("text") if head.strip() and head == head.translate(None, _CONTROLS) else 0
