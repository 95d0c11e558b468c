"""Where everything in a shard lies, known before a byte is written.

A sample is its small members (`KEY.cls`, `KEY.json`), then a PAX header that pads, then `KEY.jpg` whose payload
starts at a multiple of `align`. Samples follow one another without a gap; two zero blocks and zeros up to a multiple
of lcm(10240, align) end the shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardkit.errors import ConfigError
from shardkit.extent import align_up
from shardkit.format.tar import BLOCK, END_BLOCKS

__all__ = [
    "DEFAULT_ALIGN",
    "MAX_ALIGN",
    "RECORD",
    "SampleLayout",
    "check_align",
    "padding_bytes",
    "place_sample",
    "sample_bytes",
    "shard_bytes",
]

DEFAULT_ALIGN = 4096
"""Bytes. Right for ext4, XFS and GPUDirect Storage."""
MAX_ALIGN = 512 * 1024
"""Bytes. Above it one padding record passes 1 MiB, which libarchive refuses."""
RECORD = 10240
"""Bytes of a tar record (20 blocks); an archive is a whole number of them."""


@dataclass(frozen=True, slots=True)
class SampleLayout:
    """Absolute byte offsets of one sample in its shard."""

    start: int
    """First byte of the sample's first header."""
    cls_offset: int
    """Payload of `KEY.cls`; 0 when there is none."""
    json_offset: int
    """Payload of `KEY.json`; 0 when there is none."""
    padding_offset: int
    """First byte of the PAX header that pads (where it would be, when `padding` is 0)."""
    padding: int
    """Bytes of the PAX header and its record: 0, or a multiple of 512 from 1024 on."""
    payload_offset: int
    """Payload of `KEY.jpg`; a multiple of the alignment."""
    end: int
    """First byte after the image's last block: where the next sample starts."""


def check_align(align: int) -> int:
    """Return `align` when it is a power of two from 512 to 512 KiB.

    Raises:
        ConfigError: it is not.
    """
    if not BLOCK <= align <= MAX_ALIGN or align & (align - 1):
        raise ConfigError("the alignment is a power of two from 512 to 524288 bytes", found=align)
    return align


def padding_bytes(position: int, align: int) -> int:
    """Return how many bytes of padding put the payload after a header at `position` onto a multiple of `align`.

    A PAX header takes at least two blocks, so a gap of one block is widened by `align`.

    >>> padding_bytes(3584, 4096), padding_bytes(3072, 4096), padding_bytes(0, 4096)
    (0, 4608, 3584)
    """
    padding = -(position + BLOCK) % align
    return padding + align if 0 < padding < 2 * BLOCK else padding


def place_sample(start: int, cls_size: int | None, json_size: int | None, size: int, align: int) -> SampleLayout:
    """Return where the parts of a sample lie when its first header starts at `start`.

    Args:
        start: a multiple of 512.
        cls_size: payload bytes of `KEY.cls`; None for no such member.
        json_size: payload bytes of `KEY.json`; None for no such member. One of the two is present: a shard starts
            with a plain header, never with padding.
        size: payload bytes of `KEY.jpg`.
        align: what the image's payload offset is a multiple of.

    Raises:
        ConfigError: a sample with neither small member.

    >>> place_sample(0, 1, None, 5000, 4096)
    SampleLayout(start=0, cls_offset=512, json_offset=0, padding_offset=1024, padding=2560, payload_offset=4096, end=9216)
    """  # noqa: E501
    if cls_size is None and json_size is None:
        raise ConfigError("a sample has a cls or a json member before its image")
    position, offsets = start, [0, 0]
    for i, member_size in enumerate((cls_size, json_size)):
        if member_size is not None:
            offsets[i] = position + BLOCK
            position = offsets[i] + align_up(member_size, BLOCK)
    padding = padding_bytes(position, align)
    payload = position + padding + BLOCK
    return SampleLayout(start, offsets[0], offsets[1], position, padding, payload, payload + align_up(size, BLOCK))


def shard_bytes(end: int, align: int) -> int:
    """Return the size of a shard whose last sample ends at `end`.

    >>> shard_bytes(9216, 4096)
    20480
    """
    return align_up(end + END_BLOCKS * BLOCK, math.lcm(RECORD, align))


def sample_bytes(small: npt.NDArray[np.int64], size: npt.NDArray[np.int64], align: int) -> npt.NDArray[np.int64]:
    """Return the bytes that each of a run of samples takes, from its first header to its last block.

    A sample's padding depends on where the one before it ended, and that only on the size of its image: so the whole
    run is computed at once.

    Args:
        small: int64 [n], bytes of each sample's small members, headers and block padding included.
        size: int64 [n], payload bytes of each image.
        align: the shard's alignment.

    Returns:
        int64 [n]; the first sample is taken to start a shard.
    """
    blocks = -(-size // BLOCK) * BLOCK
    start = np.concatenate([np.zeros(1, np.int64), blocks[:-1]])
    padding = -(start + small + BLOCK) % align
    padding[(padding > 0) & (padding < 2 * BLOCK)] += align
    total: npt.NDArray[np.int64] = small + padding + BLOCK + blocks
    return total
