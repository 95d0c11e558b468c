"""What a JPEG says about itself, read from its markers without decoding a pixel.

The markers are those of ITU-T T.81 (ISO/IEC 10918-1), orientation is tag 0x0112 of Exif 2.32, further images are
declared by the multi-picture format CIPA DC-007. The walk covers the whole primary image, entropy-coded data too, so an
accepted image has a frame, a scan and a proven end; a refusal says at which byte it was taken.

Stricter than libjpeg and Pillow, which guess where T.81 leaves no choice. Refused here although both may show a
picture: anything but fill bytes (FF) between two segments; RSTn, TEM, SOI, JPGn and reserved markers there, and all but
RSTn in entropy-coded data, where they are damage; an image without EOI. Left to the caller: whether there is a decoder
for this coding, precision and number of components, and how many pixels are too many.
"""

from __future__ import annotations

import functools
import re
import struct
from typing import TYPE_CHECKING, Final, NamedTuple, overload

from shardkit.errors import FormatError
from shardkit.format.entropy_coded import EntropyCodedData
from shardkit.format.media_type import MEDIA_TYPES, sniff_media_type

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from _typeshed import ReadableBuffer

    _Codes = npt.NDArray[np.integer]

__all__ = [
    "REFUSALS",
    "SAMPLING_FACTORS",
    "SUBSAMPLINGS",
    "JpegFacts",
    "JpegRefusal",
    "exif_orientation",
    "hardware_decodable",
    "inspect_jpeg",
    "subsampling_code",
]

SUBSAMPLINGS: Final = ("unknown", "4:4:4", "4:2:2", "4:2:0", "4:4:0", "4:1:1", "4:1:0", "gray")
"""The name of each chroma subsampling; its code is its position, stored in indexes: only append."""

_INCOMPLETE: Final = ("empty", "not-jpeg", "truncated", "no-frame", "no-scan")
REFUSALS: Final = (*_INCOMPLETE, "bad-marker", "two-frames", "bad-dimensions")
"""Every value of `JpegRefusal.code`; the names are stored: never change one."""

_JPEG: Final = MEDIA_TYPES.index("jpeg")
_RATIOS: Final = {(1, 1): 1, (2, 1): 2, (2, 2): 3, (1, 2): 4, (4, 1): 5, (4, 2): 6}

_SKIPPED, _FRAME, _SCAN, _RESTART, _APP1, _APP2, _APP14, _END, _FILL, _FORBIDDEN, _HIERARCHICAL = range(11)
_ROLES: Final = {
    **dict.fromkeys((0xC4, 0xCC, 0xDB, 0xDC, *range(0xE0, 0xF0), 0xFE), _SKIPPED),
    **dict.fromkeys((0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xCA, 0xCB), _FRAME),
    **dict.fromkeys((0xC5, 0xC6, 0xC7, 0xCD, 0xCE, 0xCF, 0xDE, 0xDF), _HIERARCHICAL),
    0xD9: _END,
    0xDA: _SCAN,
    0xDD: _RESTART,
    0xE1: _APP1,
    0xE2: _APP2,
    0xEE: _APP14,
    0xFF: _FILL,
}
"""The part that a marker's code plays between two segments; a code that is absent may not stand there."""
_SKIPPED_MARKERS: Final = frozenset(0xFF00 | code for code, role in _ROLES.items() if role == _SKIPPED)
_SEGMENT: Final = struct.Struct(">HH")
"""Marker and length."""
_EXTENT: Final = struct.Struct(">BHH")
SAMPLING_FACTORS: Final = frozenset(across << 4 | down for across in range(1, 5) for down in range(1, 5))
"""H << 4 | V of a component, as they may be."""
_FILL_BYTES: Final = re.compile(rb"\xff+")
_FURTHER_IMAGE: Final = re.compile(rb"\xff\xd8\xff")
_TRAILING_BYTES: Final = 4096
"""How far after EOI the start of a further image is looked for."""
_SATURATED: Final = 255


class JpegRefusal(FormatError):
    """Bytes that are not one whole JPEG; `code` is one of `REFUSALS`, `offset` counts from the image's first byte."""

    def __init__(
        self,
        what: str,
        code: str = "bad-marker",
        offset: int = 0,
        expected: object = None,
        found: object = None,
        *,
        media_type: int = _JPEG,
        errno: int | None = None,
    ) -> None:
        """State the reason; `media_type` is what the bytes are instead, `errno` is the error tree's and never set."""
        super().__init__(what, offset=offset, expected=expected, found=found, errno=errno)
        self.code = code
        self.media_type = media_type

    @property
    def detail(self) -> str:
        """The refusal on one line, without its code and the path."""
        named = (("expected", self.expected), ("found", self.found))
        told = [f"{name} {value}" for name, value in named if value is not None]
        return "; ".join([f"{self.what} at byte {self.offset}", *told])


class JpegFacts(NamedTuple):
    """What the markers of one primary image say."""

    media_type: int
    """Code of `MEDIA_TYPES`; always that of JPEG."""
    width: int
    """Pixels a line as stored, before any orientation; 1 to 65535."""
    height: int
    """Lines as stored, before any orientation; 1 to 65535."""
    sof: int
    """n of SOFn: 0 baseline, 1 extended, 2 progressive, 3 lossless, 9 to 11 the last three arithmetic-coded."""
    components: int
    """1 to 255; decoders know 1, 3 and 4."""
    subsampling: int
    """Code of `SUBSAMPLINGS`; with four components that of the first three."""
    precision: int
    """Bits a sample."""
    scans: int
    """Number of SOS segments; 255 stands for more, too."""
    restart_interval: int
    """MCUs between two RSTn in the first scan; 0 without."""
    orientation: int
    """1 to 8, of the first Exif segment's IFD0; 0 without a valid tag."""
    adobe_transform: int
    """0 to 2, of the last Adobe segment; -1 without one or with an undefined value."""
    eoi: bool
    """The end was found; False only if a truncated image was asked for with `strict=False`."""
    trailing: int
    """Bytes after the primary image's EOI."""
    secondary: int
    """Further images that MPF declares, or 1 if one starts within 4 KiB after EOI; 255 stands for more, too."""

    @property
    def pixels(self) -> int:
        """Width times height."""
        return self.width * self.height

    @property
    def hardware_decodable(self) -> bool:
        """Whether a GPU's JPEG engine takes the image: the function of this name."""
        return hardware_decodable(self.sof, self.precision, self.scans, self.components, self.subsampling)


@overload
def hardware_decodable(sof: int, precision: int, scans: int, components: int, subsampling: int) -> bool: ...
@overload
def hardware_decodable(
    sof: _Codes, precision: _Codes, scans: _Codes, components: _Codes, subsampling: _Codes
) -> npt.NDArray[np.bool_]: ...
def hardware_decodable(
    sof: int | _Codes, precision: int | _Codes, scans: int | _Codes, components: int | _Codes, subsampling: int | _Codes
) -> bool | npt.NDArray[np.bool_]:
    """Return whether a GPU's JPEG engine takes it: baseline, 8 bit, one scan; gray, 4:4:4, 4:2:2, 4:2:0 or 4:4:0.

    Works on ints and, elementwise, on arrays of one shape and any integer dtype.

    >>> hardware_decodable(0, 8, 1, 3, SUBSAMPLINGS.index("4:2:0")), hardware_decodable(2, 8, 10, 3, 3)
    (True, False)
    """
    colour = (components == 3) & (subsampling >= 1) & (subsampling <= 4)
    return (sof == 0) & (precision == 8) & (scans == 1) & ((components == 1) | colour)


def inspect_jpeg(buffer: ReadableBuffer, start: int = 0, end: int | None = None, *, strict: bool = True) -> JpegFacts:
    """Walk the markers of the JPEG in `buffer[start:end]`: reads nothing outside, copies no payload, keeps no view.

    Args:
        buffer: contiguous bytes in host memory, e.g. bytes, a memoryview or an mmap.
        start: the image's first byte; >= 0.
        end: the byte after its last; the end of the buffer when absent.
        strict: refuse an image whose end is missing; otherwise say what is known once a first scan began.

    Raises:
        JpegRefusal: the bytes are not one whole JPEG.
    """
    # Released by hand: a refusal's traceback keeps these frames alive, and an mmap with a live view cannot be closed.
    with memoryview(buffer) as whole, whole.cast("B")[start:end] as view:
        seen = _Segments()
        try:
            _walk(view, seen)
        except JpegRefusal as refusal:
            if strict or refusal.code != "truncated" or not seen.scans:
                raise
        return _facts(view, seen)


class _Segments:
    """What a walk has met: values, and extents (first byte, byte after the last) of structures to read later."""

    sof = -1
    precision = height = width = 0
    factors = b""
    """Of each component of the frame, H << 4 | V."""
    names = b""
    """The identifiers of the frame's components."""
    scans = 0
    restart = 0
    adobe = -1
    exif = mpf = (0, 0)
    end = 0
    """The byte after EOI; 0 while none was met."""


def _walk(view: memoryview, seen: _Segments) -> None:
    size = len(view)
    if bytes(view[:2]) != b"\xff\xd8":
        raise _not_a_jpeg(view)
    entropy = EntropyCodedData(view)
    segment, skipped = _SEGMENT.unpack_from, _SKIPPED_MARKERS
    pos = 2
    while True:
        # Most segments say nothing that is noted: they are passed first, and what is wrong with one is said below.
        while pos + 4 <= size:
            marker, length = segment(view, pos)
            if marker not in skipped or length < 2 or pos + 2 + length > size:
                break
            pos += 2 + length
        role = _ROLES.get(view[pos + 1], _FORBIDDEN) if pos + 1 < size and view[pos] == 0xFF else _FORBIDDEN
        if role == _END:
            break
        if role == _FILL:
            fill = _FILL_BYTES.match(view, pos)
            pos = fill.end() - 1 if fill else pos + 1
            continue
        body = pos + 4
        after = pos + 2 + (view[pos + 2] << 8 | view[pos + 3]) if body <= size else size + 1
        if role >= _FORBIDDEN or not body <= after <= size:
            raise _fault(view, pos)
        _note(bytes(view[body:after]), body, role, view[pos + 1], seen)
        pos = entropy.marker_from(after) if role == _SCAN else after
        if pos < 0:
            raise JpegRefusal("the image data has no end", "truncated", size, "a marker, at last EOI")
    if seen.sof < 0:
        raise JpegRefusal("the image ends too early", "no-frame", pos, "a frame header, SOFn", "EOI")
    if not seen.scans:
        raise JpegRefusal("the image ends too early", "no-scan", pos, "a scan, SOS", "EOI")
    seen.end = pos + 2


def _note(payload: bytes, body: int, role: int, code: int, seen: _Segments) -> None:
    """Check and remember a segment that tells something; APPn and DRI after the first scan's start do not count.

    Args:
        payload: of the segment.
        body: where it begins.
        role: that of its marker.
        code: of its marker.
        seen: takes what it says.
    """
    if role == _FRAME:
        _note_frame(payload, body, seen)
        seen.sof = code & 15
    elif role == _SCAN:
        _check_scan(payload, body, seen)
        seen.scans += 1
    elif role == _RESTART and len(payload) != 2:
        raise _wrong_length(body, payload, 4)
    elif seen.scans:
        return
    elif role == _RESTART:
        seen.restart = payload[0] << 8 | payload[1]
    elif role == _APP1 and not seen.exif[0] and payload.startswith(b"Exif\0\0"):
        seen.exif = (body + 6, body + len(payload))
    elif role == _APP2 and not seen.mpf[0] and payload.startswith(b"MPF\0"):
        seen.mpf = (body + 4, body + len(payload))
    elif role == _APP14 and len(payload) >= 12 and payload.startswith(b"Adobe"):
        seen.adobe = payload[11] if payload[11] <= 2 else -1


def _note_frame(payload: bytes, body: int, seen: _Segments) -> None:
    if seen.sof >= 0:
        raise JpegRefusal("a second frame", "two-frames", body - 4, "one frame")
    components = payload[5] if len(payload) >= 6 else 0
    if not components or len(payload) != 6 + 3 * components:
        raise _wrong_length(body, payload, "8 and 3 for each component, of which there is one")
    seen.precision, seen.height, seen.width = _EXTENT.unpack_from(payload)
    if not seen.width or not seen.height:
        expected = (
            "1 x 1 or more" if seen.height else "the number of lines (one in a DNL segment after the scan is not read)"
        )
        found = f"{seen.width} x {seen.height}"
        raise JpegRefusal("an image without extent", "bad-dimensions", body - 4, expected, found)
    seen.names, seen.factors = payload[6::3], payload[7::3]
    if not SAMPLING_FACTORS.issuperset(seen.factors):
        factors = next(one for one in seen.factors if one not in SAMPLING_FACTORS)
        found = f"{factors >> 4} x {factors & 15}"
        raise JpegRefusal("sampling factors that cannot be", "bad-marker", body - 4, "1 to 4", found)


def _check_scan(payload: bytes, body: int, seen: _Segments) -> None:
    if seen.sof < 0:
        raise JpegRefusal("a scan before its frame", "no-frame", body - 4, "a frame header, SOFn", "SOS")
    components = payload[0] if payload else 0
    if not 1 <= components <= 4 or len(payload) != 4 + 2 * components:
        raise _wrong_length(body, payload, "6 and 2 for each of 1 to 4 components")
    if payload[1:-3:2] != seen.names and not set(seen.names).issuperset(payload[1:-3:2]):
        raise JpegRefusal("a scan of a component that the frame does not have", "bad-marker", body - 4)


def _facts(view: memoryview, seen: _Segments) -> JpegFacts:
    orientation = exif_orientation(view[slice(*seen.exif)]) if seen.exif[0] else 0
    declared = _ifd0_value(view[slice(*seen.mpf)], 0xB001, "I") if seen.mpf[0] else 0
    trailing = len(view) - seen.end if seen.end else 0
    held = trailing > 2 and _FURTHER_IMAGE.search(view, seen.end, seen.end + _TRAILING_BYTES) is not None
    # By place, in the order of the fields: by name it takes thrice as long.
    return JpegFacts(
        _JPEG,
        seen.width,
        seen.height,
        seen.sof,
        len(seen.factors),
        subsampling_code(seen.factors),
        seen.precision,
        min(seen.scans, _SATURATED),
        seen.restart,
        orientation,
        seen.adobe,
        seen.end > 0,
        trailing,
        min(max(declared - 1, int(held)), _SATURATED),
    )


@functools.lru_cache(64)
def subsampling_code(factors: bytes) -> int:
    """Return the code of `SUBSAMPLINGS` for each component's sampling factors, H << 4 | V; 0 for no name.

    Args:
        factors: each of `SAMPLING_FACTORS`.

    >>> SUBSAMPLINGS[subsampling_code(bytes([0x22, 0x11, 0x11]))]
    '4:2:0'
    """
    if len(factors) == 1:
        return SUBSAMPLINGS.index("gray")
    if len(factors) not in (3, 4) or factors[1] != factors[2]:
        return 0
    across, odd_across = divmod(factors[0] >> 4, factors[1] >> 4)
    down, odd_down = divmod(factors[0] & 15, factors[1] & 15)
    return 0 if odd_across or odd_down else _RATIOS.get((across, down), 0)


def exif_orientation(tiff: memoryview) -> int:
    """Return 1 to 8, or 0 where a TIFF structure states none, or none that there is.

    Args:
        tiff: what follows the name Exif and two zeros in its segment; host memory, not retained.
    """
    orientation = _ifd0_value(tiff, 0x0112, "H")
    return orientation if orientation <= 8 else 0


def _ifd0_value(tiff: memoryview, tag: int, kind: str) -> int:
    """Return the value of a tag of count 1 in a TIFF structure's first directory, or 0 whatever is wrong with it.

    A directory that is cut off counts as far as it goes. `kind` is "H" for SHORT (type 3) or "I" for LONG (type 4).
    """
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(bytes(tiff[:4]))
    if order is None or len(tiff) < 8:
        return 0
    (directory,) = struct.unpack_from(order + "I", tiff, 4)
    if directory < 8 or directory + 2 > len(tiff):
        return 0
    (count,) = struct.unpack_from(order + "H", tiff, directory)
    entries = bytes(tiff[directory + 2 : directory + 2 + 12 * count])
    wanted = struct.pack(order + "HHI", tag, 3 if kind == "H" else 4, 1)
    at = entries.find(wanted)
    while at >= 0 and at % 12:
        at = entries.find(wanted, at + 1)
    if at < 0 or at + 12 > len(entries):
        return 0
    return int(struct.unpack_from(order + kind, entries, at + 8)[0])


def _fault(view: memoryview, pos: int) -> JpegRefusal:
    """Say why no segment stands at `pos`, or none that may."""
    found = bytes(view[pos : pos + 2]).hex(" ").upper()
    if found and view[pos] != 0xFF:
        return JpegRefusal("no marker where one must be", "bad-marker", pos, "FF", found)
    if pos + 2 > len(view):
        return JpegRefusal("the image ends between two segments", "truncated", pos, "a marker, at last EOI")
    role = _ROLES.get(view[pos + 1], _FORBIDDEN)
    if role == _HIERARCHICAL:
        return JpegRefusal("a hierarchical JPEG", "two-frames", pos, "one frame", found)
    if role == _FORBIDDEN:
        return JpegRefusal("a marker that may not stand here", "bad-marker", pos, found=found)
    length = int.from_bytes(view[pos + 2 : pos + 4], "big")
    if pos + 4 <= len(view) and length < 2:
        return _bad_length(pos, "2 or more", length)
    return JpegRefusal("the image ends inside a segment", "truncated", pos)


def _wrong_length(body: int, payload: bytes, expected: object) -> JpegRefusal:
    return _bad_length(body - 4, expected, len(payload) + 2)


def _bad_length(pos: int, expected: object, found: int) -> JpegRefusal:
    return JpegRefusal("a segment length that cannot be", "bad-marker", pos, expected, found)


def _not_a_jpeg(view: memoryview) -> JpegRefusal:
    if not len(view):
        return JpegRefusal("no bytes at all", "empty", media_type=0)
    media_type = sniff_media_type(view)
    found = MEDIA_TYPES[media_type] if media_type else bytes(view[:8]).hex(" ").upper()
    return JpegRefusal("not a JPEG", "not-jpeg", 0, "FF D8", found, media_type=media_type)
