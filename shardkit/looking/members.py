"""The members of one sample, as they lie in its shard."""

from __future__ import annotations

import io
import os
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.errors import ConfigError, IntegrityError
from shardkit.escaping import escape
from shardkit.storage.atomic import os_errors
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.dataset.shardset import Dataset

__all__ = ["MAX_SAMPLE_BYTES", "Member", "list_members", "read_member"]

MAX_SAMPLE_BYTES = 1 << 30
"""Bytes of the largest sample whose members are looked at: it is read whole."""
_MAX_NAMED = 20


@dataclass(frozen=True, slots=True)
class Member:
    """A file in a shard."""

    name: str
    """As the shard states it; a byte that is not UTF-8 as a lone surrogate."""
    offset: int
    """Bytes from the start of the shard to the payload."""
    size: int
    is_image: bool
    """Whether it is the image that the index means."""

    @property
    def field(self) -> str:
        """What follows the first dot of the file name: `jpg`, `cls`, `json`."""
        return self.name.rpartition("/")[2].partition(".")[2]


def list_members(dataset: Dataset, number: int) -> list[Member]:
    """Return the regular files of a sample, in stored order; padding is none.

    Raises:
        IntegrityError: the shard does not hold what the index says.
        StorageError: the shard cannot be read.
    """
    return [member for member, _ in _members(dataset, number)]


def read_member(dataset: Dataset, number: int, field: str | None) -> bytes:
    """Return the bytes of a member of a sample; those of the image are checked against their CRC-32C.

    Args:
        dataset: whose sample.
        number: of the sample.
        field: `Member.field`; None for the image.

    Raises:
        ConfigError: the sample has no such member; names those that it has.
        IntegrityError: the image is not what was packed, or the shard does not hold what the index says.
        StorageError: the shard cannot be read.
    """
    if field is None:
        return dataset[number].jpeg
    found = _members(dataset, number)
    for member, data in found:
        if member.field == field:
            return dataset[number].jpeg if member.is_image else data
    raise ConfigError(
        f"the sample has no member {escape(field)}", key=dataset.columns.texts("key")[number],
        expected=_some([escape(member.field) for member, _ in found]),
    )  # fmt: skip


def _members(dataset: Dataset, number: int) -> list[tuple[Member, bytes]]:
    columns = dataset.columns
    start, size = (columns.numbers(name)[number] for name in ("sample_offset", "sample_size"))
    located, key = dataset.locate([number]), columns.texts("key")[number]
    shard = int(located.shard[0])
    path, image = dataset.shard_paths[shard], int(located.offset[0])
    if size > MAX_SAMPLE_BYTES or start + size > dataset.manifest.shards[shard].bytes:
        raise IntegrityError("the index states a sample that its shard cannot hold", path=path, offset=start, key=key,
                             found=f"{size} bytes", remedy="run shardkit verify")  # fmt: skip
    with os_errors("cannot read a shard", os.fsencode(path), start), open_regular(path) as file:
        file.seek(start)
        data = file.read(size)
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:", errors="surrogateescape") as tar:
            found = [
                (Member(one.name, start + one.offset_data, one.size, start + one.offset_data == image),
                 data[one.offset_data : one.offset_data + one.size])
                for one in tar if one.isreg()
            ]  # fmt: skip
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise _damaged(path, start, key, str(error)) from error
    if not any(member.is_image for member, _ in found):
        raise _damaged(path, start, key, "no image where the index says")
    return found


def _damaged(path: str, offset: int, key: str, found: str) -> IntegrityError:
    return IntegrityError("the members of a sample cannot be read", path=path, offset=offset, key=key,
                          found=escape(found[:200]), remedy="run shardkit verify")  # fmt: skip


def _some(names: Sequence[str]) -> str:
    """Return names for a message: a foreign shard may have thousands of one sample."""
    more = len(names) - _MAX_NAMED
    return " or ".join(names[:_MAX_NAMED]) + (f" or one of {more} others" if more > 0 else "")
