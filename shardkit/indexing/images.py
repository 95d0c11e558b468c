"""What is noted about a sample's members while their shard passes by: facts of images, labels, metadata."""

from __future__ import annotations

import operator
import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardkit.format.checksum import crc32c
from shardkit.format.index import FACTS
from shardkit.format.jpeg import JpegRefusal, inspect_jpeg
from shardkit.format.media_type import sniff_media_type
from shardkit.format.plain_jpegs import plain_jpegs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

__all__ = [
    "HEAD_BYTES",
    "MAX_IMAGE_BYTES",
    "MAX_LABEL_BYTES",
    "NO_FACTS",
    "ImageFacts",
    "facts_columns",
    "head_facts",
    "parse_label",
    "parse_labels",
    "whole_facts",
]

MAX_IMAGE_BYTES = 128 << 20
"""Bytes of the largest image that is taken; one is in memory at a time for each job."""
MAX_LABEL_BYTES = 64
"""Bytes of the longest cls member that may be a class number."""
HEAD_BYTES = (4096, 64 << 10, 512 << 10)
"""How much of an image is read for its facts, until they are all seen."""
_SHORT_BYTES = 16 << 10
"""Of the longest payload that is looked at with others; in a longer one the walk is little beside the bytes."""
_TOGETHER = 64
"""As many are quicker looked at together than each alone."""

_FACTS_OF = operator.attrgetter(*FACTS)
_PLAIN_DIGITS = 9
"""Of a label, as many as no number above the largest label has."""
_LABELS = re.compile(rb"(?:[ \t\r\n]*[0-9]{1,9}[ \t\r\n]*,)*[ \t\r\n]*[0-9]{1,9}[ \t\r\n]*")
_LABEL = re.compile(rb"[ \t\r\n]*([0-9]{1,10})[ \t\r\n]*")
_MAX_LABEL = (1 << 31) - 1


class ImageFacts(NamedTuple):
    """What an index row states of an image's bytes."""

    crc32c: int
    """0 where not all bytes were read."""
    facts: tuple[int, ...]
    """`FACTS`."""
    whole: bool
    """False for a JPEG that is not one from its first marker to its last, as far as it was read."""


def _unknown(media_type: int) -> tuple[int, ...]:
    return tuple({"media_type": media_type, "adobe_transform": -1}.get(name, 0) for name in FACTS)


NO_FACTS = ImageFacts(0, _unknown(0), True)
"""Of an image that nobody has looked at."""
_JPEG_START = b"\xff\xd8\xff"
_JPEG = sniff_media_type(_JPEG_START)


def whole_facts(payload: memoryview | bytes) -> ImageFacts:
    """Return what there is to know of an image.

    Args:
        payload: all of it; host memory, not retained.
    """
    checksum = crc32c(payload)
    try:
        return ImageFacts(checksum, _FACTS_OF(inspect_jpeg(payload)), True)
    except JpegRefusal:
        kind = sniff_media_type(payload)
        return ImageFacts(checksum, _unknown(kind), kind != _JPEG)


def head_facts(head: memoryview | bytes, size: int) -> ImageFacts | None:
    """Return what the first bytes of an image say; None when more of them would say more.

    The number of scans of a JPEG that may have several is not known then: it stays 0.

    Args:
        head: the first bytes.
        size: of the whole image.
    """
    if head[:3] != _JPEG_START:
        return ImageFacts(0, _unknown(sniff_media_type(head)), True)
    try:
        facts = inspect_jpeg(head, strict=False)
    except JpegRefusal as refusal:
        if refusal.code == "truncated" and len(head) < min(size, HEAD_BYTES[-1]):
            return None
        return ImageFacts(0, _unknown(_JPEG), False)
    return ImageFacts(0, _FACTS_OF(facts._replace(scans=0) if facts.sof else facts), True)


def facts_columns(
    payloads: Sequence[memoryview | bytes], alone: Callable[[int], ImageFacts], *, whole: bool
) -> npt.NDArray[np.int64]:
    """Return what there is to know of images, those that are plain looked at all at once.

    Args:
        payloads: of each image all, or its first bytes; host memory, not retained.
        alone: looks at the image of a number, which is not plain.
        whole: the payloads are whole, and their checksums are wanted; else checksums are 0.

    Returns:
        Checksum, `ImageFacts.whole` and `FACTS` of each; shape [images, 2 + facts].
    """
    rows = np.empty((len(payloads), 2 + len(FACTS)), np.int64)
    left = np.ones(len(payloads), np.bool_)
    # What is no JPEG is told by its first bytes: to look at it twice would cost more than to look at it once.
    short = np.flatnonzero([len(payload) <= _SHORT_BYTES and payload[:3] == _JPEG_START for payload in payloads])
    if len(short) >= _TOGETHER:
        plain, facts = plain_jpegs([payloads[number] for number in short.tolist()], strict=whole)
        done = short[plain]
        left[done] = False
        rows[done, 0], rows[done, 1], rows[done, 2:] = 0, True, facts[plain]
        if whole:
            rows[done, 0] = [crc32c(payloads[number]) for number in done.tolist()]
    for number in np.flatnonzero(left).tolist():
        found = alone(number)
        rows[number] = found.crc32c, found.whole, *found.facts
    return rows


def parse_label(payload: memoryview | bytes) -> int | None:
    r"""Return the class number that a cls member states, None when it states none.

    >>> parse_label(b"12\n"), parse_label(b"cat"), parse_label(b"-1")
    (12, None, None)
    """
    text = bytes(payload)
    if len(text) <= _PLAIN_DIGITS and text.isdigit():
        return int(text)
    match = _LABEL.fullmatch(text)
    label = int(match[1]) if match else -1
    return label if 0 <= label <= _MAX_LABEL else None


def parse_labels(payloads: Sequence[memoryview | bytes]) -> list[int | None]:
    r"""Return what `parse_label` says of each of some payloads, none of them empty.

    Where all are plain numbers they are read at once, which takes a fifth of the time.

    >>> parse_labels([b"12\n", b"7"]), parse_labels([b"1,2", b"cat"])
    ([12, 7], [None, None])
    """
    joined = b",".join(payloads)
    # A payload with a comma in it would make more numbers than there are payloads.
    if joined.count(b",") == len(payloads) - 1 and _LABELS.fullmatch(joined):
        return list(map(int, joined.split(b",")))
    return [parse_label(payload) for payload in payloads]
