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

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, overload

import numpy as np

from shardkit.errors import FormatError
from shardkit.format.media_type import MEDIA_TYPES, sniff_media_type

if TYPE_CHECKING:
    import numpy.typing as npt
    from _typeshed import ReadableBuffer

    _Codes = npt.NDArray[np.integer]

__all__ = [
    "REFUSALS",
    "SUBSAMPLINGS",
    "JpegFacts",
    "JpegRefusal",
    "hardware_decodable",
    "inspect_jpeg",
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
_FILL_BYTES: Final = re.compile(rb"\xff+")
_WINDOW_BYTES: Final = 1 << 18
"""Searched in one numpy step: much against the fixed cost of a step, little against a core's L2 cache."""
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


@dataclass(frozen=True, slots=True)
class JpegFacts:
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


@dataclass(slots=True)
class _Segments:
    """What a walk has met: values, and extents (first byte, byte after the last) of structures to read later."""

    sof: int = -1
    frame: int = 0
    """First byte of the frame's payload."""
    names: frozenset[int] = frozenset()
    """The identifiers of the frame's components."""
    scans: int = 0
    restart: int = 0
    adobe: int = -1
    exif: tuple[int, int] = (0, 0)
    mpf: tuple[int, int] = (0, 0)
    end: int = 0
    """The byte after EOI; 0 while none was met."""


def _walk(view: memoryview, seen: _Segments) -> None:
    size = len(view)
    if bytes(view[:2]) != b"\xff\xd8":
        raise _not_a_jpeg(view)
    entropy = _EntropyCodedData(view)
    pos = 2
    while True:
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
        if role != _SKIPPED:
            _note(view, body, after, role, seen)
        pos = entropy.marker_from(after) if role == _SCAN else after
        if pos < 0:
            raise JpegRefusal("the image data has no end", "truncated", size, "a marker, at last EOI")
    if seen.sof < 0:
        raise JpegRefusal("the image ends too early", "no-frame", pos, "a frame header, SOFn", "EOI")
    if not seen.scans:
        raise JpegRefusal("the image ends too early", "no-scan", pos, "a scan, SOS", "EOI")
    seen.end = pos + 2


def _note(view: memoryview, body: int, after: int, role: int, seen: _Segments) -> None:
    """Check and remember a segment that tells something; APPn and DRI after the first scan's start do not count."""
    if role == _FRAME:
        _check_frame(view, body, after, seen)
        seen.sof, seen.frame, seen.names = view[body - 3] & 15, body, frozenset(view[body + 6 : after : 3])
    elif role == _SCAN:
        _check_scan(view, body, after, seen)
        seen.scans += 1
    elif role == _RESTART and after - body != 2:
        raise _wrong_length(body, after, 4)
    elif seen.scans:
        return
    elif role == _RESTART:
        seen.restart = view[body] << 8 | view[body + 1]
    elif role == _APP1 and not seen.exif[0] and bytes(view[body : body + 6]) == b"Exif\0\0":
        seen.exif = (body + 6, after)
    elif role == _APP2 and not seen.mpf[0] and bytes(view[body : body + 4]) == b"MPF\0":
        seen.mpf = (body + 4, after)
    elif role == _APP14 and after - body >= 12 and bytes(view[body : body + 5]) == b"Adobe":
        seen.adobe = view[body + 11] if view[body + 11] <= 2 else -1


def _check_frame(view: memoryview, body: int, after: int, seen: _Segments) -> None:
    if seen.sof >= 0:
        raise JpegRefusal("a second frame", "two-frames", body - 4, "one frame")
    components = view[body + 5] if after - body >= 6 else 0
    if not components or after - body != 6 + 3 * components:
        raise _wrong_length(body, after, "8 and 3 for each component, of which there is one")
    _, height, width = struct.unpack_from(">BHH", view, body)
    if not width or not height:
        expected = (
            "1 x 1 or more" if height else "the number of lines (one in a DNL segment after the scan is not read)"
        )
        raise JpegRefusal("an image without extent", "bad-dimensions", body - 4, expected, f"{width} x {height}")
    for factors in bytes(view[body + 7 : after : 3]):
        if not (1 <= factors >> 4 <= 4 and 1 <= factors & 15 <= 4):
            found = f"{factors >> 4} x {factors & 15}"
            raise JpegRefusal("sampling factors that cannot be", "bad-marker", body - 4, "1 to 4", found)


def _check_scan(view: memoryview, body: int, after: int, seen: _Segments) -> None:
    if seen.sof < 0:
        raise JpegRefusal("a scan before its frame", "no-frame", body - 4, "a frame header, SOFn", "SOS")
    components = view[body] if after > body else 0
    if not 1 <= components <= 4 or after - body != 4 + 2 * components:
        raise _wrong_length(body, after, "6 and 2 for each of 1 to 4 components")
    if not seen.names.issuperset(view[body + 1 : after - 3 : 2]):
        raise JpegRefusal("a scan of a component that the frame does not have", "bad-marker", body - 4)


class _EntropyCodedData:
    """Finds the marker that ends entropy-coded data: an FF before anything but 00 (stuffing), RSTn and FF (fill).

    A byte is searched once however many scans there are. Only an array of its own survives a call: the caller could not
    release `view` while a numpy array exports it.
    """

    __slots__ = ("_base", "_hits", "_view")

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._base = 0
        self._hits: npt.NDArray[np.bool_] = np.empty(0, np.bool_)
        """Shape [window]; True at i where byte base + i is FF and the next one is not 00."""

    def marker_from(self, pos: int) -> int:
        """Return the offset of the first such marker at or after `pos`, or -1."""
        while pos + 1 < len(self._view):
            if not self._base <= pos < self._base + self._hits.size:
                self._load(pos)
            rest = self._hits[pos - self._base :]
            first = int(rest.argmax())
            if not rest[first]:
                pos += rest.size
                continue
            pos += first
            code = self._view[pos + 1]
            if code != 0xFF and not 0xD0 <= code <= 0xD7:
                return pos
            self._drop_restarts()
        return -1

    def _load(self, pos: int) -> None:
        octets = np.frombuffer(self._view, np.uint8, min(_WINDOW_BYTES + 1, len(self._view) - pos), pos)
        # A comparison is 0 or 1: its minimum with the next byte says in one pass "this is FF and that one is not 0".
        hits = (octets[:-1] == 0xFF).view(np.uint8)
        np.minimum(hits, octets[1:], out=hits)
        self._base, self._hits = pos, hits.view(np.bool_)

    def _drop_restarts(self) -> None:
        """Clear RSTn and fill bytes from the window, all at once: there may be thousands."""
        codes = np.frombuffer(self._view, np.uint8, self._hits.size, self._base + 1)
        self._hits &= (codes & 0xF8 != 0xD0) & (codes != 0xFF)


def _facts(view: memoryview, seen: _Segments) -> JpegFacts:
    precision, height, width, components = struct.unpack_from(">BHHB", view, seen.frame)
    orientation = _ifd0_value(view[slice(*seen.exif)], 0x0112, "H") if seen.exif[0] else 0
    declared = _ifd0_value(view[slice(*seen.mpf)], 0xB001, "I") if seen.mpf[0] else 0
    trailing = len(view) - seen.end if seen.end else 0
    held = trailing > 2 and b"\xff\xd8\xff" in bytes(view[seen.end : seen.end + _TRAILING_BYTES])
    return JpegFacts(
        media_type=_JPEG,
        width=width,
        height=height,
        sof=seen.sof,
        components=components,
        subsampling=_subsampling(bytes(view[seen.frame + 7 : seen.frame + 6 + 3 * components : 3])),
        precision=precision,
        scans=min(seen.scans, _SATURATED),
        restart_interval=seen.restart,
        orientation=orientation if orientation <= 8 else 0,
        adobe_transform=seen.adobe,
        eoi=seen.end > 0,
        trailing=trailing,
        secondary=min(max(declared - 1, int(held)), _SATURATED),
    )


def _subsampling(factors: bytes) -> int:
    """Return the code for each component's sampling factors, H << 4 | V."""
    if len(factors) == 1:
        return SUBSAMPLINGS.index("gray")
    if len(factors) not in (3, 4) or factors[1] != factors[2]:
        return 0
    across, odd_across = divmod(factors[0] >> 4, factors[1] >> 4)
    down, odd_down = divmod(factors[0] & 15, factors[1] & 15)
    return 0 if odd_across or odd_down else _RATIOS.get((across, down), 0)


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
        return _wrong_length(pos + 4, pos + 2 + length, "2 or more")
    return JpegRefusal("the image ends inside a segment", "truncated", pos)


def _wrong_length(body: int, after: int, expected: object) -> JpegRefusal:
    return JpegRefusal("a segment length that cannot be", "bad-marker", body - 4, expected, after - body + 2)


def _not_a_jpeg(view: memoryview) -> JpegRefusal:
    if not len(view):
        return JpegRefusal("no bytes at all", "empty", media_type=0)
    media_type = sniff_media_type(view)
    found = MEDIA_TYPES[media_type] if media_type else bytes(view[:8]).hex(" ").upper()
    return JpegRefusal("not a JPEG", "not-jpeg", 0, "FF D8", found, media_type=media_type)
