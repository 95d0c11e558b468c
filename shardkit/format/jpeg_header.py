"""What a payload's first and last bytes say, before a decoder sees it; in some microseconds, whatever its size.

DALI 2.4 ends the whole process with SIGSEGV, at once or some batches later, when nvImageCodec cannot make out what a
payload is: text, an empty payload, a header that is cut off or whose lengths lead nowhere, a damaged PNG. Behind a
header that can be followed, damage becomes an error that can be caught. So each header is followed first, and by tables
of its own: `shardkit.format.jpeg` says what a JPEG may hold, these say what DALI was tried with.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["DECODED_SOFS", "MAX_PIXELS", "fault", "is_plain_jpeg"]

DECODED_SOFS = (0, 1, 2)
"""n of the frames SOFn that every decoder in use takes: baseline, extended, progressive."""

MAX_PIXELS = 178_956_970
"""Of an image that is decoded: what Pillow takes at most. A header of a few bytes can ask for gigabytes."""

_START = b"\xff\xd8"
_END = re.compile(rb"\xff\xd9")
_SOS = 0xDA
_FRAMES = frozenset(0xC0 + n for n in DECODED_SOFS)
_TABLES = frozenset((0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)))
_COMPONENTS = (1, 3, 4)
_BITS = 8
_TAIL = 64


def fault(payload: npt.NDArray[np.uint8]) -> str | None:
    """Return why no decoder should see these bytes; None when they may be an image.

    A JPEG without an end is refused whole: whether a decoder misses what was cut off depends on the crop.

    Args:
        payload: [size] host memory; not retained.
    """
    if not payload.size:
        return "the payload is empty"
    if payload[:2].tobytes() != _START:
        return None
    view = payload.data  # searched from its start only when something follows the end
    if _END.search(view, max(len(view) - _TAIL, 0)) or _END.search(view):
        return None
    return "a truncated JPEG: it has no end marker (EOI)"


def is_plain_jpeg(payload: npt.NDArray[np.uint8]) -> bool:
    """Return whether the bytes are a JPEG whose markers lead to its first scan: what DALI may be given.

    Args:
        payload: [size] host memory; not retained.
    """
    view = payload.data
    size, pos, framed = len(view), 2, False
    if size < 4 or view[0] != 0xFF or view[1] != 0xD8:
        return False
    while pos + 4 <= size and view[pos] == 0xFF:
        code, body = view[pos + 1], pos + 4
        pos += 2 + (view[pos + 2] << 8 | view[pos + 3])
        if not body <= pos <= size:
            return False
        if code == _SOS:
            return framed
        if code in _FRAMES and not framed:
            framed = _is_frame(view[body:pos])
            if not framed:
                return False
        elif code not in _TABLES:
            return False
    return False


def _is_frame(body: memoryview) -> bool:
    if len(body) < 6 or body[5] not in _COMPONENTS or len(body) != 6 + 3 * body[5]:
        return False
    height, width = body[1] << 8 | body[2], body[3] << 8 | body[4]
    return body[0] == _BITS and 0 < height * width <= MAX_PIXELS
