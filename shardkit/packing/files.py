"""Pictures that are files of their own, in a tree or named by a list."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.format.keys import source_from_path
from shardkit.packing.plan import PLAN_SCHEMA, plan_batches, update_identity
from shardkit.packing.refusals import RefusedError
from shardkit.packing.source import ATTEMPTS, announce, identity, lies_inside, open_source, read_source
from shardkit.storage.clone import Place

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

    import pyarrow as pa

    from shardkit.format.checksum import Digest
    from shardkit.packing.options import KeyRule, ShardOptions
    from shardkit.packing.plan import Plan
    from shardkit.packing.refusals import Refusal
    from shardkit.packing.scan import Sources
    from shardkit.packing.supply import MakeRoom

__all__ = ["FileOrigin", "FilePicture", "FileSupply"]

_ROWS = 4096
"""Planned sources that are Python objects at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOrigin:
    """A folder that the sources' paths start from."""

    root: bytes
    inside: bytes | None
    """Real path of the folder that every source must lie in; None for anywhere."""

    @contextlib.contextmanager
    def pictures(self, rows: pa.RecordBatch, options: ShardOptions) -> Iterator[Iterator[FilePicture]]:
        """Give the pictures of a shard's plan, in stored order."""
        yield self._pictures(rows.select(["key", "path", "label", "json", "number"]), options.max_bytes)

    def _pictures(self, rows: pa.RecordBatch, max_bytes: int) -> Iterator[FilePicture]:
        for first in range(0, rows.num_rows, _ROWS):
            columns = rows.slice(first, _ROWS).to_pydict().values()
            yield from (FilePicture(self, max_bytes, *row) for row in zip(*columns, strict=True))


class FilePicture:
    """A file, read once and whole."""

    __slots__ = ("_file", "_inside", "_max_bytes", "_text", "key", "label", "number", "path")

    def __init__(
        self, origin: FileOrigin, max_bytes: int, key: str, path: bytes, label: int | None, text: bytes | None,
        number: int,
    ) -> None:  # fmt: skip
        """Take what the plan says of it; nothing is opened."""
        self._file = os.path.join(origin.root, path)
        self._inside = origin.inside
        self._max_bytes = max_bytes
        self._text = text
        self.key = key
        self.path = path
        self.label = label
        self.number = number

    @property
    def source(self) -> str:
        """The path as text."""
        return source_from_path(self.path)

    def announce(self) -> None:
        """Let the kernel start to read."""
        announce(self._file)

    def json(self) -> bytes | None:
        """Return what was planned."""
        return self._text

    def read(self, make_room: MakeRoom) -> int:
        """Read the file, again when it changes meanwhile.

        Raises:
            RefusedError: why it is not taken.
            ShardkitError: this process has run out of descriptors or memory.
        """
        path, inside = self._file, self._inside
        for _ in range(ATTEMPTS):
            fd, status = open_source(path)
            try:
                size = status.st_size
                if inside is not None and not lies_inside(fd, inside):
                    raise RefusedError("outside-link", "it leads out of the source folder since it was found")
                if size > self._max_bytes:
                    raise RefusedError("too-large", f"{size} bytes; at most {self._max_bytes}")
                buffer, start = make_room(size)
                shared = make_room.share(Place(fd, 0, path), size)
                after = read_source(fd, path, size, buffer, start, shared)
            finally:
                with contextlib.suppress(OSError):  # nothing was written through it
                    os.close(fd)
            if after == identity(status):
                if not size:  # whatever the check: no reader takes an image of no bytes
                    raise RefusedError("empty", "no bytes at all")
                return size
        raise RefusedError("changed", "its size, time or identity changed while it was read, twice")


class FileSupply:
    """Scanned sources, as shards are planned of them."""

    def __init__(self, sources: Sources, key: KeyRule) -> None:
        """Take the sources and the rule of their keys."""
        self._sources = sources
        self._key = key
        self.origin = FileOrigin(root=sources.root, inside=sources.inside)
        self.schema = PLAN_SCHEMA

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class names in label order; None without names."""
        return self._sources.classes

    @property
    def refused(self) -> list[Refusal]:
        """What could not even become a source."""
        return self._sources.refused

    @property
    def skipped(self) -> Counter[str]:
        """Entries that are not images by name, counted by kind."""
        return self._sources.skipped

    def a_file(self, least: int) -> bytes | None:
        """Return the first of some thousand sources that is a file of so many bytes at least."""
        for path in self._sources.table.column("path").slice(0, _ROWS).to_pylist():
            file = os.path.join(self._sources.root, path)
            with contextlib.suppress(OSError):
                if os.path.isfile(file) and os.path.getsize(file) >= least:
                    return file
        return None

    def batches(self, plan: Plan) -> Iterator[pa.RecordBatch]:
        """Yield the plan of each shard."""
        return plan_batches(self._sources, plan, self._key)

    def update_identity(self, batch: pa.RecordBatch, full: Digest, portable: Digest) -> None:
        """Add a shard's plan to two digests."""
        update_identity(batch, full, portable)
