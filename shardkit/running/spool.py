"""Columns of numbers that memory need not hold: appended to a file without a name, then mapped.

What is mapped the kernel drops when it needs the memory, and reads again; of a column that is short no file is made.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import weakref
from typing import IO, TYPE_CHECKING, Generic, TypeVar

import numpy as np

from shardkit.storage.atomic import os_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

__all__ = ["Spool", "mapped", "nameless_file", "spans", "spooled"]

Number = TypeVar("Number", bound=np.generic)

_HELD_BYTES = 16 << 20
"""Of a column that stays in memory."""
_SPAN = 1 << 18
"""Numbers that are computed with at a time."""
_FAILED = "cannot write the numbers of a plan"


def spans(count: int) -> Iterator[slice]:
    """Yield slices that make up `[0, count)`, each short enough for a few columns of it to be in memory."""
    for first in range(0, count, _SPAN):
        yield slice(first, min(first + _SPAN, count))


def mapped(path: bytes) -> mmap.mmap:
    """Return a file that is not empty, mapped to be read. Arrow's own map takes no path that is not UTF-8.

    Raises:
        OSError: it cannot be opened, or mapped.
    """
    with open(path, "rb") as file:
        return _mapped(file)


def _mapped(file: IO[bytes]) -> mmap.mmap:
    # With length 0 it would ask for the size itself, and take a failure of that for an empty file.
    return mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size, access=mmap.ACCESS_READ)


@contextlib.contextmanager
def nameless_file(folder: bytes) -> Iterator[IO[bytes]]:
    """Give a new file in a folder that has no name, or soon none: afterwards it is gone, also when the process dies.

    Raises:
        ShardkitError: as `from_os_error` maps it.
    """
    with os_errors(_FAILED, folder):
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it ends here
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):  # what is still to be written nobody needs
            file.close()


class Spool(Generic[Number]):
    """One column that grows."""

    def __init__(self, kind: type[Number], folder: bytes | None) -> None:
        """Begin with nothing.

        Args:
            kind: of the numbers.
            folder: for the file; None keeps all in memory.
        """
        self._kind = np.dtype(kind)
        self._folder = folder
        self._pieces: list[npt.NDArray[Number]] = []
        self._held_bytes = 0
        self._file: IO[bytes] | None = None
        self._files = contextlib.ExitStack()
        weakref.finalize(self, self._files.close)  # after an error, too

    def append(self, numbers: npt.ArrayLike) -> None:
        """Take numbers, shape [n]; an array may be kept, so nobody must change it afterwards.

        Raises:
            ShardkitError: the file cannot be written; as `from_os_error` maps it.
        """
        piece = np.ascontiguousarray(numbers, self._kind)
        self._pieces.append(piece)
        self._held_bytes += piece.nbytes
        if self._folder is not None and self._held_bytes > _HELD_BYTES:
            self._write(self._folder)

    def array(self) -> npt.NDArray[Number]:
        """Return all numbers, shape [n], not to be written to; nothing can be appended any more.

        Raises:
            ShardkitError: as `append`.
        """
        if self._file is None:
            return np.concatenate([np.zeros(0, self._kind), *self._pieces])
        assert self._folder is not None
        self._write(self._folder)
        with self._files, os_errors(_FAILED, self._folder):
            self._file.flush()
            os.fsync(self._file.fileno())  # a write that fails later would leave zeros in the map
            # The map keeps the file.
            return np.frombuffer(_mapped(self._file), self._kind)

    def _write(self, folder: bytes) -> None:
        if self._file is None:
            self._file = self._files.enter_context(nameless_file(folder))
        try:
            with os_errors(_FAILED, folder):
                for piece in self._pieces:
                    self._file.write(piece.data)
        except BaseException:
            self._files.close()  # the space is wanted now, not when nobody looks at the error any more
            raise
        self._pieces, self._held_bytes = [], 0


def spooled(kind: type[Number], folder: bytes | None, pieces: Iterable[npt.ArrayLike]) -> npt.NDArray[Number]:
    """Return pieces of a column as one array, as `Spool` does.

    Raises:
        ShardkitError: as `Spool`.
    """
    spool = Spool(kind, folder)
    for piece in pieces:
        spool.append(piece)
    return spool.array()
