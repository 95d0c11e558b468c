"""A plain tree of images as an input: found and judged by pack's own scan, its files as index rows."""

from __future__ import annotations

import os
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardkit.converting.facts import NOT_LOOKED_AT, facts_of
from shardkit.errors import ConfigError
from shardkit.format.index import SampleRow, sample_batch
from shardkit.format.keys import key_from_path, source_from_path
from shardkit.packing.files import FileOrigin
from shardkit.packing.options import PackOptions
from shardkit.packing.refusals import RefusedError
from shardkit.packing.scan import names_taken, scan_tree
from shardkit.packing.source import lies_inside, open_source

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

    from shardkit.converting.options import ConvertOptions
    from shardkit.format.index import RecordBatch
    from shardkit.packing.options import Labels
    from shardkit.packing.refusals import Refusal
    from shardkit.packing.scan import Sources

__all__ = ["ScannedTree", "TreeFiles", "tree_name", "walk_tree"]

Ints = npt.NDArray[np.int64]
_ROWS = 1 << 16
"""Files of one batch: all that are Python objects at a time."""


@dataclass(frozen=True, slots=True)
class TreeFiles:
    """How the rows of a tree are read."""

    origin: FileOrigin
    """Crosses to worker processes."""
    mtimes: Ints
    """int64 [n], ns; of each row's file."""


def tree_name(path: str) -> bytes:
    """Return what stands for the path of a shard."""
    return os.fsencode(f"tree:{path}")


class ScannedTree:
    """The files of a folder, in the order of their paths' bytes."""

    def __init__(self, sources: Sources) -> None:
        """Take what the scan has found."""
        self._sources = sources
        self.classes = sources.classes
        self.origin = FileOrigin(root=sources.root, inside=sources.inside)

    @property
    def skipped(self) -> Counter[str]:
        """Entries that are not images by name, counted by kind."""
        return self._sources.skipped

    def refused(self) -> Iterator[tuple[int, str, Refusal]]:
        """Yield what could not become a source: number of the row that would have been there, key, refusal."""
        paths = self._sources.table["path"]
        for one in self._sources.refused:
            row = bisect_left(range(len(paths)), one.path, key=lambda row: paths[row].as_py())
            yield row, key_from_path(one.path), one

    def batches(self, *, facts: bool) -> Iterator[tuple[TreeFiles, RecordBatch]]:
        """Yield the files as rows of `shardkit.format.index.SCHEMA`, some thousand at a time.

        Checksums are not known, and facts only where they are asked for: then each file's header is read.
        """
        table = self._sources.table
        for first in range(0, table.num_rows, _ROWS):
            part = table.slice(first, _ROWS)
            columns = (part[name].to_pylist() for name in ("path", "label", "size"))
            rows = [self._row(*row, facts=facts) for row in zip(*columns, strict=True)]
            yield TreeFiles(self.origin, part["mtime_ns"].to_numpy()), sample_batch(rows)

    def _row(self, path: bytes, label: int | None, size: int, *, facts: bool) -> SampleRow:
        found = self._facts(path) if facts else NOT_LOOKED_AT
        return SampleRow(
            key=key_from_path(path), label=label, offset=0, size=size, crc32c=0, sample_offset=0, sample_size=0,
            json_offset=0, json_size=0, source=source_from_path(path), **found,
        )  # fmt: skip

    def _facts(self, path: bytes) -> dict[str, int]:
        """Return what a file's header says; nothing where it cannot be read, which its conversion would tell."""
        try:
            fd, status = open_source(os.path.join(self.origin.root, path))
        except RefusedError:
            return NOT_LOOKED_AT
        try:
            if self.origin.inside is not None and not lies_inside(fd, self.origin.inside):
                return NOT_LOOKED_AT
            return facts_of(lambda count: os.pread(fd, count, 0), status.st_size)
        except OSError:
            return NOT_LOOKED_AT
        finally:
            os.close(fd)


def walk_tree(path: str, options: ConvertOptions) -> ScannedTree:
    """Walk a folder as `pack` does.

    Args:
        path: absolute.
        options: `max_bytes` and `convert` count here, and a `label_column` of "", by which folders are no classes.

    Raises:
        ConfigError: there is no image in it.
        UnsafeError: links that make paths without end.
        ShardkitError: it cannot be read.
    """
    labels: Labels | None = "none" if options.label_column == "" else None
    given = PackOptions(name="tree", labels=labels, max_bytes=options.max_bytes, convert=options.convert)
    sources = scan_tree(os.fsencode(path), given)
    if not sources.table.num_rows and not sources.refused:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sources.skipped.most_common(5))
        raise ConfigError("there is no JPEG in the folder", path=path, found=kinds or "nothing",
                          remedy=names_taken(sources.skipped))  # fmt: skip
    return ScannedTree(sources)
