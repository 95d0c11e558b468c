"""What the options make of an image that was read: checked, re-encoded, or made baseline, where it lies."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

from shardkit.format.jpeg import JpegFacts, JpegRefusal, inspect_jpeg
from shardkit.format.media_type import CONVERTIBLE, MEDIA_TYPES, sniff_media_type
from shardkit.packing.lossless import baseline_jpeg, can_be_baseline
from shardkit.packing.refusals import RefusedError

if TYPE_CHECKING:
    import mmap

    from shardkit.packing.options import ShardOptions

__all__ = ["CONVERTIBLE_TYPES", "ImageRoom", "admit"]

CONVERTIBLE_TYPES = frozenset(map(MEDIA_TYPES.index, CONVERTIBLE))


class ImageRoom(Protocol):
    """Holds one image."""

    @property
    def buffer(self) -> mmap.mmap:
        """Where it lies."""

    @property
    def start(self) -> int:
        """Where in the buffer it begins."""

    def __call__(self, wanted: int) -> tuple[mmap.mmap, int]:
        """Make room for another image instead; return buffer and start."""


def admit(room: ImageRoom, size: int, options: ShardOptions) -> tuple[int, JpegFacts | None]:
    """Make of an image what is stored; return its bytes, and its facts where they are known.

    Args:
        room: holds the image; afterwards what is stored instead.
        size: bytes of it.
        options: say what it must pass and what it becomes.

    Raises:
        RefusedError: why it is not taken.
    """
    encoded = _reencoded(room, size, options)
    if encoded is not None:
        size = _replace(room, encoded)
    facts = _checked(room, size, options)
    if options.baseline and facts is not None and can_be_baseline(facts):
        lossless = baseline_jpeg(_image(room, size), facts)
        if lossless is not None:
            size = _replace(room, lossless)
            facts = _checked(room, size, options)
    return size, facts


def _image(room: ImageRoom, size: int) -> bytes:
    return room.buffer[room.start : room.start + size]


def _replace(room: ImageRoom, data: bytes) -> int:
    buffer, start = room(len(data))
    buffer[start : start + len(data)] = data
    return len(data)


def _reencoded(room: ImageRoom, size: int, options: ShardOptions) -> bytes | None:
    """Return the JPEG that is stored instead of the source's bytes, or None to store those."""
    convert = options.convert and sniff_media_type(room.buffer, room.start, room.start + size) in CONVERTIBLE_TYPES
    if not convert and options.resize is None:
        return None
    # Our own reading of the orientation is what the index states, and it gets over broken EXIF.
    orientation = None if convert else _inspect(room, size, options).orientation
    from shardkit.packing.picture import CONVERTIBLE, JPEG, encode_jpeg  # Pillow: only who needs it waits for it

    return encode_jpeg(
        _image(room, size), resize=options.resize, quality=options.quality, max_pixels=options.max_pixels,
        formats=CONVERTIBLE if convert else JPEG, orientation=orientation,
    )  # fmt: skip


def _inspect(room: ImageRoom, size: int, options: ShardOptions) -> JpegFacts:
    try:
        facts = inspect_jpeg(room.buffer, room.start, room.start + size)
    except JpegRefusal as refusal:
        raise RefusedError(refusal.code, refusal.detail) from refusal
    if facts.pixels > options.max_pixels:
        detail = f"{facts.width} x {facts.height} pixels; at most {options.max_pixels}"
        raise RefusedError("too-many-pixels", detail)
    return facts


def _checked(room: ImageRoom, size: int, options: ShardOptions) -> JpegFacts | None:
    """Apply the content check; return the facts, or None for bytes that only `--check none` takes."""
    if options.check == "none":
        with contextlib.suppress(RefusedError):
            return _inspect(room, size, options)
        return None
    facts = _inspect(room, size, options)
    if options.check == "decode":
        from shardkit.packing.picture import check_decodes

        check_decodes(_image(room, size), options.max_pixels)
    return facts
