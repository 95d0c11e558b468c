"""Which file holds which shard: by its digest, else by the keys in it, else by its name."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardkit.errors import CapabilityError, ShardkitError, StorageError, TarFormatError
from shardkit.escaping import escape
from shardkit.extent import Extent
from shardkit.format.checksum import new_digest
from shardkit.format.foreign_header import parse_foreign_header
from shardkit.format.layout import DEFAULT_ALIGN, MAX_ALIGN, padding_bytes
from shardkit.format.strict_json import parse_json_object
from shardkit.format.tar import BLOCK, parse_header
from shardkit.repairing.damaged_file import DamagedFile, is_regular
from shardkit.repairing.structure import Fault, Found, read_structure
from shardkit.storage.sequential import SequentialReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardkit.repairing.members import ClassNames
    from shardkit.repairing.survey import LogicalShard, Survey
    from shardkit.repairing.threads import Threads

__all__ = ["ShardFile", "assign", "count_classes", "infer_align", "is_foreign", "look_at_files"]

_PROBES = 64
"""Samples of a file whose keys and places are looked at before it is read as a shard."""
_FOREIGN_BYTES = 1 << 20
"""Bytes of a file in which the header of another tool is looked for."""


@dataclass(slots=True)
class ShardFile:
    """A file that may hold a shard."""

    name: bytes
    size: int
    digest: str | None
    """`ALGORITHM:HEX`; None when the system could not read all of it."""
    trouble: str | None
    """Why not."""
    probes: list[Found] = field(default_factory=list)
    """The first samples that its headers name."""


def look_at_files(survey: Survey, threads: Threads, progress: Callable[[int], object]) -> list[ShardFile]:
    """Read every `.tar` file once.

    Args:
        survey: the dataset; takes notes of names that are no files.
        threads: read several at a time.
        progress: told of bytes that were read, from any thread, one call at a time.

    Raises:
        ShardkitError: one cannot be opened: for want of a right, for example.
    """
    names = [name for name in survey.entries if name.endswith(b".tar")]
    others = [name for name in names if not is_regular(os.path.join(survey.folder, name))]
    survey.notes += [f"{escape(name)} is no file" for name in others]
    telling = threading.Lock()

    def tell(count: int) -> None:
        threads.check()
        with telling:
            progress(count)

    def look(name: bytes) -> ShardFile:
        path = os.path.join(survey.folder, name)
        with DamagedFile(path) as file:
            digest, trouble = _digest(path, survey.algorithm, tell)
            return ShardFile(name, file.size, digest, trouble, list(_probe(file, survey.align or DEFAULT_ALIGN)))

    passed_over = set(others)
    return list(threads.in_order(look, [name for name in names if name not in passed_over]))


def is_foreign(survey: Survey, files: list[ShardFile]) -> bool:
    """Tell whether a folder holds other tools' tars, and nothing says that there is, or was, a shard of this format.

    The walk over shards of this format would call all their samples lost.
    """
    indexed = survey.manifest is not None or any(name.endswith(b".arrow") for name in survey.entries)
    if indexed or any(file.probes for file in files):
        return False
    for path in (os.path.join(survey.folder, file.name) for file in files):
        with DamagedFile(path) as file:
            if _has_foreign_header(file):
                return True
    return False


def assign(survey: Survey, files: list[ShardFile]) -> list[ShardFile | None]:
    """Return the file that holds each shard of the survey; None where it is missing.

    A file that no shard has taken is a stray, and noted. Other indexes are only read when a file is not what its name
    says: then each of them once.
    """
    holders: list[ShardFile | None] = [None] * len(survey.shards)
    free = list(files)

    def take(number: int, file: ShardFile) -> None:
        holders[number] = file
        free.remove(file)

    by_name = {os.fsencode(shard.name): shard for shard in survey.shards}
    by_digest = {(shard.digest, shard.size): shard for shard in survey.shards if shard.digest is not None}
    for file in sorted(files, key=lambda f: f.name not in by_name):
        shard = by_digest.get((file.digest, file.size)) if file.digest else None
        if shard is not None and holders[shard.number] is None:
            take(shard.number, file)
    for file in list(free):
        own = by_name.get(file.name)
        if own is not None and holders[own.number] is None and _fits(survey, own, file):
            take(own.number, file)
    _by_keys(survey, holders, free, take)
    for file in list(free):  # nothing speaks against the name
        own = by_name.get(file.name)
        unknown = own is not None and (not file.probes or survey.rows(own) is None)
        if own is not None and unknown and holders[own.number] is None:
            take(own.number, file)
    if survey.manifest is None:
        for shard in survey.shards:
            if holders[shard.number] is None and free and shard.digest is None:
                take(shard.number, next((f for f in free if f.name == os.fsencode(shard.name)), free[0]))
    _note(survey, holders, free)
    return holders


def _note(survey: Survey, holders: list[ShardFile | None], free: list[ShardFile]) -> None:
    survey.notes += [f"{escape(file.name)} belongs to no shard: left alone" for file in free]
    survey.notes += [
        f"{escape(holder.name)} holds {survey.shards[number].name}"
        for number, holder in enumerate(holders)
        if holder is not None and holder.name != os.fsencode(survey.shards[number].name)
    ]


def _fits(survey: Survey, shard: LogicalShard, file: ShardFile) -> bool:
    rows = survey.rows(shard) if file.probes else None
    return rows is not None and any(rows.with_key(probe.key) is not None for probe in file.probes)


def _by_keys(
    survey: Survey, holders: list[ShardFile | None], free: list[ShardFile], take: Callable[[int, ShardFile], None]
) -> None:
    """Give the shards that have no file one that has some of their keys."""
    for shard in survey.shards:
        if not any(file.probes for file in free):
            return
        rows = survey.rows(shard) if holders[shard.number] is None else None
        if rows is None:
            continue
        for file in free:
            if any(rows.with_key(probe.key) is not None for probe in file.probes):
                take(shard.number, file)
                break


def infer_align(files: list[ShardFile]) -> int:
    """Return the alignment that most samples have, where nothing states it: 4096 when that is one of several."""
    powers = [1 << power for power in range(9, MAX_ALIGN.bit_length())]
    votes = dict.fromkeys(powers, 0)
    for probe in (probe for file in files for probe in file.probes):
        for align in powers:
            votes[align] += padding_bytes(probe.small_end, align) == probe.padding
    most = max(votes.values())
    if votes[DEFAULT_ALIGN] == most:
        return DEFAULT_ALIGN
    return max(align for align, count in votes.items() if count == most)


def count_classes(survey: Survey, files: list[ShardFile], classes: ClassNames, align: int) -> None:
    """Let every json member say what its class is called."""
    for file in files:
        with DamagedFile(os.path.join(survey.folder, file.name)) as opened:
            for found in _samples(opened, align):
                if found.label is not None and found.json_offset:
                    _count(opened, found, classes)


def _count(file: DamagedFile, found: Found, classes: ClassNames) -> None:
    try:
        document = parse_json_object(file.read(found.json_offset, found.json_size).decode("utf-8"))
    except (ValueError, StorageError):
        return
    if found.label is not None:
        classes.count(found.label, document.get("class"))


def _has_foreign_header(file: DamagedFile) -> bool:
    return any(
        _is_foreign(data[at : at + BLOCK])
        for _, data in file.chunks(0, _FOREIGN_BYTES)
        for at in range(0, len(data) - BLOCK + 1, BLOCK)
    )


def _is_foreign(block: bytes) -> bool:
    """Tell whether a block is the header of a tar, and not one that this format has."""
    try:
        parse_foreign_header(block, 0)
    except ShardkitError:
        return False
    try:
        parse_header(block)
    except TarFormatError:
        return True
    return False


def _probe(file: DamagedFile, align: int) -> Iterator[Found]:
    for number, found in enumerate(_samples(file, align)):
        yield found
        if number + 1 >= _PROBES:
            return


def _samples(file: DamagedFile, align: int) -> Iterator[Found]:
    """Yield the samples whose headers agree; looks at no payload."""
    position: int | None = 0
    while position is not None and position < file.size:
        try:
            found = read_structure(file, position, align)
        except (Fault, StorageError):
            position = file.next_header(position + BLOCK)
            continue
        yield found
        position = found.end


def _digest(path: bytes, algorithm: str, progress: Callable[[int], object]) -> tuple[str | None, str | None]:
    digest = new_digest(algorithm)
    try:
        with SequentialReader(os.fsdecode(path)) as reader:
            for _, block in reader.blocks([Extent(0, reader.size)] if reader.size else []):
                digest.update(block)
                progress(len(block))
    except (StorageError, CapabilityError) as error:
        return None, f"{error.what}: {error.found}"
    return f"{algorithm}:{digest.hexdigest()}", None
