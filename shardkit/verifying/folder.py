"""A dataset's folder as a verification reads it: counted, stoppable, and with every failure told as a finding."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.errors import StorageError
from shardkit.escaping import escape
from shardkit.extent import Extent
from shardkit.format.checksum import new_digest
from shardkit.verifying.report import Finding, ReadPath

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardkit.format.dataset_record import FileRecord
    from shardkit.storage.sequential import OpenSequential, SequentialReader

__all__ = ["Folder", "LoadedFile", "StoppedError", "trouble"]

MAX_UNRECORDED_BYTES = 1 << 30
"""Bytes of a file that is read whole although no manifest says how long it is."""


class StoppedError(Exception):
    """The run was told to stop: raised in its worker threads, never seen outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedFile:
    """A file beside the shards, read whole."""

    name: str
    shard: str | None
    """File name of the shard that it belongs to."""
    record: FileRecord | None
    """What the manifest says about it."""
    size: int
    """Bytes."""
    digest: str | None
    """Hex digest; None when it was not read because its size is wrong, or when no manifest names an algorithm."""
    data: bytes | None
    """Its bytes; None when they were not kept, or when its size is wrong."""


class Folder:
    """The files of one dataset. Its methods may be called from several threads at once."""

    def __init__(self, path: str, opener: OpenSequential, progress: Callable[[int], object] | None) -> None:
        """Read nothing yet.

        Args:
            path: the folder.
            opener: opens one of its files by path.
            progress: called with the number of bytes just read; one call at a time.
        """
        self.path = path
        self._opener = opener
        self._progress = progress
        self._lock = threading.Lock()
        self._paths: set[str] = set()
        self.stopped = threading.Event()
        """Set to end the run: the next block that arrives raises `StoppedError`."""
        self.bytes_read = 0

    @property
    def read_path(self) -> ReadPath:
        """How the bytes came so far."""
        if len(self._paths) > 1:
            return "mixed"
        return "none" if not self._paths else "direct" if self._paths == {"direct"} else "page cache"

    def join(self, name: str) -> str:
        """Return the path of a file."""
        return os.path.join(self.path, name)

    def arrived(self, count: int, reader: SequentialReader) -> None:
        """Count bytes that a reader delivered.

        Raises:
            StoppedError: the run is to end.
        """
        if self.stopped.is_set():
            raise StoppedError
        with self._lock:
            self.bytes_read += count
            self._paths.add(reader.read_path)
            if self._progress is not None:
                self._progress(count)

    def size_of(self, name: str, shard: str | None) -> int | Finding:
        """Return the bytes of a regular file, or why there are none."""
        try:
            status = os.stat(self.join(name))
        except OSError as error:
            return trouble(
                StorageError("cannot look at the file", found=error.strerror, errno=error.errno), name, shard
            )
        if stat.S_ISREG(status.st_mode):
            return status.st_size
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
        return Finding(code="not-a-file", file=name, shard=shard, message="not a regular file", found=kind)

    def open(self, name: str) -> SequentialReader:
        """Open a file.

        Raises:
            StorageError: it cannot be opened.
            CapabilityError: O_DIRECT was demanded and is not to be had.
        """
        return self._opener(self.join(name))

    def load(
        self,
        name: str,
        *,
        shard: str | None = None,
        record: FileRecord | None,
        algorithm: str | None,
        keep: bool = True,
    ) -> LoadedFile | Finding:
        """Read a file whole, or say why not.

        Args:
            name: file name in the folder.
            shard: shard that it belongs to.
            record: what the manifest says about it; a file of another size is not read.
            algorithm: digest to compute; None for none.
            keep: keep the bytes, not only their digest.
        """
        size = self.size_of(name, shard)
        if isinstance(size, Finding):
            return size
        read = size == record.bytes if record else size <= MAX_UNRECORDED_BYTES or not keep
        digest = new_digest(algorithm) if algorithm and read else None
        parts: list[bytes] = []
        problem = None
        try:
            with self.open(name) as reader:
                try:
                    with contextlib.closing(reader.blocks([Extent(0, reader.size)] if read else [])) as blocks:
                        for _, block in blocks:
                            self.arrived(len(block), reader)
                            if digest is not None:
                                digest.update(block)
                            if keep:
                                parts.append(bytes(block))
                except StorageError as error:
                    problem = trouble(error, name, shard)
                if reader.changed() or reader.size != size:
                    problem = changed(name, shard)
        except StorageError as error:
            problem = trouble(error, name, shard)
        if problem is not None:
            return problem
        return LoadedFile(
            name=name, shard=shard, record=record, size=size, digest=digest.hexdigest() if digest else None,
            data=b"".join(parts) if keep and read else None,
        )  # fmt: skip


def changed(name: str, shard: str | None) -> Finding:
    """Return the finding of a file that did not hold still."""
    return Finding(
        code="changed", file=name, shard=shard,
        message="its size, time or identity changed while it was verified; verify again when nothing writes to it",
    )  # fmt: skip


def trouble(error: StorageError, name: str, shard: str | None) -> Finding:
    """Return the finding of a failed system call: a file that is not there is damage, anything else is not."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return Finding(code="missing-file", file=name, shard=shard, message="the file is not there")
    found = None if error.found is None else str(error.found)
    return Finding(
        code="read-error", file=name, shard=shard, offset=error.offset, found=found,
        message=f"{escape(error.what)}: the bytes from here on are not proven",
    )  # fmt: skip
