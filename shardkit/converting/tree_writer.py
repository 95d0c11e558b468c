"""A plain tree, written through the folder of `extract`: its names, and no link ever followed."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from shardkit.converting.writers import CLASSES
from shardkit.errors import StorageError
from shardkit.escaping import escape
from shardkit.extracting.names import WORK, class_folders, folder_of, name
from shardkit.extracting.tree import Occupied, Tree
from shardkit.format.dataset_record import REJECTED
from shardkit.format.media_type import sniff_media_type
from shardkit.packing.refusals import RefusedError
from shardkit.storage.atomic import os_errors

if TYPE_CHECKING:
    from shardkit.converting.writers import WrittenColumns, WrittenSample
    from shardkit.extracting.names import Layout

__all__ = ["TreeWriter"]

_OURS = (os.fsencode(CLASSES), os.fsencode(REJECTED))
"""Names at the root that no image gets."""


class TreeWriter:
    """One file a sample; of two with one name the first is kept, and the second refused."""

    def __init__(self, folder: str, columns: WrittenColumns, layout: Layout | None) -> None:
        """Begin in an empty folder of one's own."""
        self._layout: Layout = layout or "source"
        self._folders = class_folders(columns.classes or ())
        self._open = contextlib.ExitStack()
        self._tree = self._open.enter_context(Tree(os.fsencode(folder)).hold())
        self._count = 0

    def begin_file(self, number: int, count: int) -> None:
        """Do nothing: each sample is a file."""

    def write(self, sample: WrittenSample) -> None:
        """Write a sample.

        Raises:
            RefusedError: it has no safe name, or one that an earlier sample has.
            ShardkitError: the system failed a write.
        """
        path = self._path(sample)
        try:
            if self._tree.has(path):
                raise RefusedError("same-name", f"an earlier sample has {escape(path)}, as a file or a folder")
        except Occupied as error:
            raise RefusedError("same-name", f"an earlier sample is called as a folder of {escape(path)}") from error
        fd, temporary = self._tree.create(self._count)
        self._count += 1
        with os_errors("cannot write", os.path.join(self._tree.folder, path)):
            try:
                _write(fd, sample.image)
            finally:
                os.close(fd)  # some file systems say only here that there was no room
        self._tree.place(temporary, path)

    def _path(self, sample: WrittenSample) -> bytes:
        folder = folder_of(sample.label, self._folders)
        kind = sniff_media_type(sample.image)
        found = name(self._layout, key=sample.key, source=sample.source, media_type=kind, folder=folder)
        if found.fault is not None:
            raise RefusedError("unsafe-name", f"{escape(found.path[:200])}: {found.fault}")
        if found.path.split(b"/")[0] in _OURS:
            raise RefusedError("unsafe-name", f"{escape(found.path[:200])}: so is a list beside the images called")
        return found.path

    def finish(self) -> None:
        """Remove what is temporary.

        Raises:
            StorageError: the system did not let it.
        """
        self._open.close()
        work = os.path.join(self._tree.folder, WORK)
        if os.path.lexists(work):
            raise StorageError("what is temporary cannot be removed from a tree", path=work)

    def discard(self) -> None:
        """Do the same."""
        self._open.close()


def _write(fd: int, data: bytes) -> None:
    with memoryview(data) as view:
        written = 0
        while written < len(view):
            written += os.write(fd, view[written:])
