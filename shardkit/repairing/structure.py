"""A sample by its headers alone: found where a header names one, believed only when every part is where it must be."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.errors import TarFormatError
from shardkit.extent import align_up
from shardkit.format.keys import is_safe_key
from shardkit.format.layout import padding_bytes
from shardkit.format.strict_json import MAX_JSON_BYTES
from shardkit.format.tar import BLOCK, Header, parse_header

if TYPE_CHECKING:
    from shardkit.repairing.damaged_file import DamagedFile

__all__ = ["Fault", "Found", "read_structure"]

_MAX_LABEL = (1 << 31) - 1
_LABEL = re.compile(rb"0|[1-9][0-9]{0,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A sample whose headers agree; nothing is said about its bytes yet."""

    start: int
    key: str
    label: int | None
    json_offset: int
    """Payload of the json member; 0 when there is none."""
    json_size: int
    padding: int
    """Bytes between the small members and the image's header."""
    offset: int
    """Payload of the image; `offset + size` lies inside the file."""
    size: int

    @property
    def end(self) -> int:
        """First byte after the image's last block; the file may end before it."""
        return self.offset + align_up(self.size, BLOCK)

    @property
    def small_end(self) -> int:
        """First byte after the small members."""
        return self.offset - BLOCK - self.padding


class Fault(Exception):
    """Why there is no sample: a reason of `shardkit.repairing.lost.REASONS`; raised and caught within a walk."""

    def __init__(self, reason: str, detail: str, key: str | None = None) -> None:
        """Keep what is known."""
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail
        self.key = key


def read_structure(file: DamagedFile, start: int, align: int) -> Found:
    """Return the sample whose first header lies at `start`; reads headers and the label, no payload.

    The padding may be damaged: where the image's header must lie follows from the alignment. A shard of another
    alignment is found by what its padding states.

    Args:
        file: the shard.
        start: a multiple of 512.
        align: of the dataset.

    Raises:
        Fault: there is none.
        StorageError: the system failed a read.
    """
    header = _member(file, start)
    if header is None:
        raise Fault("headers", "no header of a sample")
    key, extension = _split(header.name)
    if not is_safe_key(key) or extension not in ("cls", "json"):
        raise Fault("headers", "the header does not begin a sample", key if is_safe_key(key) else None)
    label, position = None, start
    if extension == "cls":
        label = _label(file, start, header, key)
        position = start + 2 * BLOCK
        header = _member(file, position)
    json_offset = json_size = 0
    if header is not None and header.name == f"{key}.json":
        json_offset, json_size = position + BLOCK, header.size
        if json_size > MAX_JSON_BYTES or not json_size:
            raise Fault("json", f"a json member of {json_size} bytes", key)
        position = json_offset + align_up(json_size, BLOCK)
    image, size = _image(file, position, align, key)
    if image + BLOCK + size > file.size:
        raise Fault("truncated", f"{size} bytes of image at {image + BLOCK}, and the file ends at {file.size}", key)
    return Found(
        start=start, key=key, label=label, json_offset=json_offset, json_size=json_size, padding=image - position,
        offset=image + BLOCK, size=size,
    )  # fmt: skip


def _member(file: DamagedFile, position: int) -> Header | None:
    """Return what the canonical header of a file at `position` states, or None."""
    header = _header(file, position)
    return None if header is None or header.padding else header


def _header(file: DamagedFile, position: int) -> Header | None:
    try:
        return parse_header(file.read(position, BLOCK))
    except TarFormatError:
        return None


def _split(name: str) -> tuple[str, str]:
    key, _, extension = name.rpartition(".")
    return key, extension


def _label(file: DamagedFile, start: int, header: Header, key: str) -> int:
    block = file.read(start + BLOCK, BLOCK)
    digits = block[: header.size]
    if header.size > BLOCK or not _LABEL.fullmatch(digits) or int(digits) > _MAX_LABEL:
        raise Fault("headers", "the cls member is no label", key)
    return int(digits)


def _image(file: DamagedFile, position: int, align: int, key: str) -> tuple[int, int]:
    """Return where the image's header lies, and the size that it states."""
    places = [position + padding_bytes(position, align)]
    stated = _header(file, position)
    if stated is not None:  # of another alignment: its padding says so, or there is none
        places.append(position + (BLOCK + align_up(stated.size, BLOCK) if stated.padding else 0))
    if position >= file.size:
        raise Fault("truncated", f"the file ends at {file.size}, before the image", key)
    for place in places:
        header = _member(file, place)
        if header is not None and header.name == f"{key}.jpg" and 0 < header.size < 1 << 32:
            return place, header.size
    if places[0] + BLOCK > file.size:
        raise Fault("truncated", f"the file ends at {file.size}, before the image", key)
    raise Fault("headers", f"no header of the image at {places[0]}", key)
