"""What a damaged dataset still says about itself: its manifest, its indexes, and which of them can be believed."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO

from shardkit.errors import (
    FORBIDDEN,
    ConfigError,
    FormatError,
    ManifestError,
    ShardkitError,
    UnsafeError,
    UnsupportedVersionError,
    from_os_error,
)
from shardkit.escaping import escape
from shardkit.format.checksum import DIGESTS, hex_digest, new_digest
from shardkit.format.dataset_record import DATASET_INDEX, MANIFEST
from shardkit.format.index import DatasetIndexReader, ShardIndex, decode_shard_index
from shardkit.format.layout import check_align
from shardkit.format.manifest import MAX_MANIFEST_BYTES, load_manifest, load_without_version
from shardkit.format.remedy import remedy_without_manifest
from shardkit.repairing.damaged_file import is_regular
from shardkit.repairing.old_rows import OldRows
from shardkit.storage.atomic import os_errors
from shardkit.storage.regular import folders_with, open_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardkit.format.index import RecordBatch
    from shardkit.format.manifest import Manifest, ShardRecord

__all__ = ["LogicalShard", "Survey", "survey"]

_SHARD = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]{0,190})-([0-9]{6,18})\.tar", re.ASCII)
_MAX_INDEX_BYTES = 1 << 34
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class LogicalShard:
    """A shard that the dataset has, or had."""

    number: int
    """Its place; the record batch of `index.arrow` that held its rows."""
    name: str
    record: ShardRecord | None
    """Of the manifest; None without a usable one."""
    digest: str | None
    """`ALGORITHM:HEX` that the file had; None when nothing says so."""
    size: int | None
    """Bytes that the file had."""

    @property
    def stem(self) -> str:
        """The name without `.tar`."""
        return self.name.removesuffix(".tar")


@dataclass(slots=True)
class Survey:
    """A dataset before its shards are read. A context manager that closes the index."""

    folder: bytes
    entries: Sequence[bytes]
    manifest: Manifest | None
    name: str
    """Of the dataset; shards are called after it."""
    shards: list[LogicalShard] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is damaged beside the shards, for a person."""
    manifest_whole: bool = False
    """Whether the manifest is there as it was written."""
    algorithm: str = DIGESTS[0]
    align: int | None = None
    """None when nothing says it."""
    _index: DatasetIndexReader | None = None
    _index_proven: bool = False
    _file: BinaryIO | None = None
    _reading: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Survey:
        """Return the survey."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the index."""
        if self._file is not None:
            self._file.close()

    def rows(self, shard: LogicalShard) -> OldRows | None:
        """Return what the indexes say of a shard; None when none of them can be read. Threads may ask."""
        own, proven = self._own(shard)
        if own is not None and proven:
            return OldRows([own.rows], proven=True)
        listed = self._listed(shard)
        if listed is not None and self._index_proven:
            return OldRows([listed], proven=True)
        batches = [batch for batch in (None if own is None else own.rows, listed) if batch is not None]
        if len(batches) == 2 and batches[0].equals(batches[1]):
            return OldRows(batches[:1], proven=True)
        return OldRows(batches, proven=False) if batches else None

    def _own(self, shard: LogicalShard) -> tuple[ShardIndex | None, bool]:
        path = os.path.join(self.folder, shard.stem.encode() + b".arrow")
        data = _load(path)
        if data is None:
            return None, False
        record = shard.record
        proven = record is not None and hex_digest(self.algorithm, data) == record.index.digest
        try:
            return decode_shard_index(data), proven
        except FormatError as error:
            if isinstance(error, UnsupportedVersionError) and (proven or record is None):
                error.path = path
                raise
            return None, False

    def _listed(self, shard: LogicalShard) -> RecordBatch | None:
        if self._index is None or len(self._index) != len(self.shards):
            return None
        try:
            with self._reading:
                return self._index.batch(shard.number)
        except FormatError:
            return None


def survey(folder: bytes, progress: Callable[[int], object]) -> Survey:
    """Read what lies beside the shards.

    Args:
        folder: of the dataset.
        progress: told of bytes that were read.

    Raises:
        ConfigError: it is no folder, or holds nothing to begin with, or shards of another tool.
        UnsupportedVersionError: written by a newer shardkit; an index that the manifest proves damaged is not.
        ShardkitError: it cannot be listed.
    """
    try:
        with os_errors("cannot list the dataset", folder):
            entries = sorted(os.listdir(folder))
    except ShardkitError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise ConfigError("the dataset is not a folder", path=folder) from error
        raise
    notes: list[str] = []
    manifest = _manifest(folder, entries, notes)
    found = Survey(folder, entries, manifest, "", notes=notes, manifest_whole=not notes)
    if manifest is not None:
        found.name, found.algorithm, found.align = manifest.name, manifest.digest_algorithm, manifest.align
        found.shards = [
            LogicalShard(i, s.name, s, f"{manifest.digest_algorithm}:{s.digest}", s.bytes)
            for i, s in enumerate(manifest.shards)
        ]
    else:
        _from_files(found)
    _open_index(found, progress)
    return found


def _manifest(folder: bytes, entries: Sequence[bytes], notes: list[str]) -> Manifest | None:
    path = os.path.join(folder, MANIFEST.encode())
    if MANIFEST.encode() not in entries:
        notes.append(f"{MANIFEST} is not there")
        return None
    data = _load(path, MAX_MANIFEST_BYTES)
    try:
        if data is None:
            raise ManifestError("the manifest cannot be read")
        manifest = load_manifest(data)
    except (ManifestError, UnsupportedVersionError) as error:
        mended = None if data is None else load_without_version(data)
        if mended is not None:
            notes.append(f"{MANIFEST}: its format_version is damaged, as its digest proves: not believed")
            manifest = mended
        elif not isinstance(error, UnsupportedVersionError):
            notes.append(f"{MANIFEST}: {escape(error.what)}")
            return None
        elif _is_of_known_indexes(folder, entries):
            notes.append(f"{MANIFEST}: {error.what}, {error.found}: not believed, since the indexes are of a known one")
            return None
        else:
            error.path = path
            raise
    if manifest.layout != "aligned":
        raise ConfigError(
            "shards that another tool made are indexed again, not repaired", path=path,
            found=f"layout {escape(manifest.layout)}",
            remedy="shardkit convert takes what is whole; to save tars, repair a folder with links to them alone; "
            "shardkit index --overwrite writes their indexes anew",
        )  # fmt: skip
    return manifest


def _is_of_known_indexes(folder: bytes, entries: Sequence[bytes]) -> bool:
    """Tell whether the indexes contradict a manifest of a newer format: one number counts for all of a dataset's files.

    Some index must be readable, and none may state a newer format.
    """
    known = False
    for name in (name for name in entries if name.endswith(b".arrow")):
        try:
            with open_regular(os.path.join(folder, name), _MAX_INDEX_BYTES) as file:
                DatasetIndexReader(file)
            known = True
        except UnsupportedVersionError:
            return False
        except (FormatError, OSError, UnsafeError):
            continue
    return known


def _from_files(found: Survey) -> None:
    """Take the shards from the names of files, and what they were from their indexes."""
    stems = {name.rpartition(b".")[0] for name in found.entries if name.endswith((b".tar", b".arrow"))}
    names = sorted(os.fsdecode(stem) + ".tar" for stem in stems if stem + b".arrow" != DATASET_INDEX.encode())
    matches = [match for name in names if (match := _SHARD.fullmatch(name))]
    prefixes = Counter(match[1] for match in matches).most_common(1)
    if prefixes:
        found.name = prefixes[0][0]
        ordered = sorted((m for m in matches if m[1] == found.name), key=lambda m: (int(m[2]), m[0]))
        once = {int(match[2]): match[0] for match in reversed(ordered)}
        names = [once[number] for number in sorted(once)]
    else:
        base = os.path.basename(os.path.abspath(found.folder)).decode("ascii", "replace").lower()
        found.name = re.sub(r"[^a-z0-9_-]+", "-", base).strip("-_")[:64] or "data"
        names = [
            f"{found.name}-{number:06}.tar" for number in range(sum(name.endswith(b".tar") for name in found.entries))
        ]
    aligns: Counter[int] = Counter()
    for number, name in enumerate(names):
        shard = LogicalShard(number, name, None, None, None)
        with contextlib.suppress(FormatError):
            header = None if (own := found._own(shard)[0]) is None else own.header
            if header is not None and header.digest.partition(":")[0] in DIGESTS:
                shard = LogicalShard(number, name, None, header.digest, header.shard_bytes)
                found.algorithm = header.digest.partition(":")[0]
                aligns[header.align] += 1
        found.shards.append(shard)
    for align, _ in aligns.most_common(1):
        with contextlib.suppress(ConfigError):
            found.align = check_align(align)
    if not names:
        inner = folders_with(os.fsdecode(found.folder), MANIFEST)
        raise ConfigError("there is no shard and no index here", path=found.folder,
                          remedy=remedy_without_manifest((), inner) or "is this the right folder?")  # fmt: skip


def _open_index(found: Survey, progress: Callable[[int], object]) -> None:
    path = os.path.join(found.folder, DATASET_INDEX.encode())
    if not is_regular(path):
        found.notes.append(f"{DATASET_INDEX} is not there")
        return
    try:
        file = open_regular(path)
    except (OSError, UnsafeError):
        found.notes.append(f"{DATASET_INDEX} cannot be opened")
        return
    try:
        if found.manifest is not None:
            digest = new_digest(found.algorithm)
            while block := file.read(_CHUNK):
                digest.update(block)
                progress(len(block))
            found._index_proven = digest.hexdigest() == found.manifest.index.digest
            if not found._index_proven:
                found.notes.append(f"{DATASET_INDEX} is damaged, or of another dataset")
        found._index = DatasetIndexReader(file)
        found._file = file
    except (FormatError, OSError) as error:
        file.close()
        if isinstance(error, UnsupportedVersionError) and (found._index_proven or found.manifest is None):
            error.path = path
            raise
        found.notes.append(f"{DATASET_INDEX} cannot be read")


def _load(path: bytes, limit: int = _MAX_INDEX_BYTES) -> bytes | None:
    """Return a file's bytes; None when it is not there, no file, too large, or cannot be read.

    Raises:
        StorageError: it may not be read: then it is not damaged.
    """
    try:
        with open_regular(path, limit) as file:
            return file.read()
    except UnsafeError:
        return None
    except OSError as error:
        if error.errno in FORBIDDEN:
            raise from_os_error(error, "cannot read a file of the dataset", path=path) from error
        return None
