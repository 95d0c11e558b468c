"""The journal of an unfinished run: one synced line a finished piece of work."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from shardkit.errors import FormatError, ShardkitError
from shardkit.format.checksum import hex_digest
from shardkit.storage.atomic import fsync_dir, os_errors
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Document", "Journal"]

_DIGEST = "xxh3-128"
_T = TypeVar("_T")

Document: TypeAlias = dict[str, Any]
"""JSON values."""


class Journal(Generic[_T]):
    """An append-only file of numbered entries; what was appended is on the disk when `append` returns.

    A line is a digest and a JSON object. The digest covers the run's identity too: a line that a crash has torn, that
    was damaged later, or that belongs to another run is no line of this journal.
    """

    def __init__(
        self, path: bytes, identity: bytes, *, dump: Callable[[_T], Document], load: Callable[[Document], _T]
    ) -> None:
        """Use `path`, which need not exist, for the run of this identity.

        Args:
            path: of the file.
            identity: what makes the run this one.
            dump: makes a JSON object of an entry.
            load: makes the entry of it again; raises a `FormatError`, KeyError, TypeError or ValueError for an object
                that is none.
        """
        self.path = path
        self._identity, self._dump, self._load = identity, dump, load
        self._unsynced: set[int] = set()  # a line was begun: it may be read here, and be gone after a power cut
        self._failed: set[int] = set()  # of these, those whose write or sync failed

    def append(self, number: int, entry: _T) -> None:
        """Write one line and sync it.

        Raises:
            ShardkitError: as `from_os_error` maps it.
        """
        self.extend({number: entry})

    def extend(self, entries: Mapping[int, _T]) -> None:
        """Write a line for each entry, by its number, and sync them all at once.

        Raises:
            ShardkitError: as `from_os_error` maps it.
        """
        texts = [json.dumps([number, self._dump(entry)]).encode() for number, entry in entries.items()]
        # The newline in front parts it from a torn line that a crash may have left.
        lines = b"".join([b"\n%s %s\n" % (self._check(text), text) for text in texts])
        self._unsynced.update(entries)
        try:
            with os_errors("cannot write the journal", self.path):
                fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
                try:
                    new = not os.fstat(fd).st_size
                    while lines:
                        lines = lines[os.write(fd, lines) :]
                    os.fsync(fd)
                finally:
                    os.close(fd)
            if new:
                fsync_dir(os.path.dirname(self.path))
        except ShardkitError:
            self._failed.update(entries)
            raise
        self._unsynced.difference_update(entries)
        self._failed.difference_update(entries)

    def read(self) -> dict[int, _T]:
        """Return the last entry of each number; lines that are not whole count as not there.

        Raises:
            ShardkitError: as `from_os_error` maps it.
        """
        entries: dict[int, _T] = {}
        with os_errors("cannot read the journal", self.path):
            try:
                file = open_regular(self.path)
            except FileNotFoundError:
                return {}
            with file:
                for line in file:
                    check, _, text = line.removesuffix(b"\n").partition(b" ")
                    if check == self._check(text):
                        entries.update(self._entry(text))
        return entries

    def _entry(self, text: bytes) -> dict[int, _T]:
        """Return the entry of a line by its number; none when somebody else wrote it, who knows the digest too."""
        try:
            number, document = json.loads(text)
            if type(number) is int and number >= 0 and isinstance(document, dict):
                return {number: self._load(document)}
        except (FormatError, KeyError, TypeError, ValueError, RecursionError):
            pass
        return {}

    def synced(self) -> set[int]:
        """Return the numbers of entries that are on the disk for sure.

        What an interrupt has left between a write and its sync is synced. What a failed sync has left is not counted:
        a second one that succeeds proves nothing.

        Raises:
            ShardkitError: as `from_os_error` maps it.
        """
        numbers = set(self.read()) - self._failed
        if numbers & self._unsynced:
            with os_errors("cannot sync the journal", self.path):
                fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
            fsync_dir(os.path.dirname(self.path))
        return numbers

    def _check(self, text: bytes) -> bytes:
        return hex_digest(_DIGEST, self._identity + text).encode()
