"""Hashes in rising order, and those that stand twice, without all of them in memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from shardkit.running.spool import nameless_file, spans
from shardkit.storage.atomic import os_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    Hashes = npt.NDArray[np.uint64]

__all__ = ["repeated", "sorted_pieces"]

_SORTED_BYTES = 32 << 20
"""Of what is sorted at once."""
_FAILED = "cannot sort the hashes of a plan"


def sorted_pieces(hashes: Hashes, folder: bytes | None) -> Iterator[Hashes]:
    """Yield hashes in rising order, some at a time, equal ones together.

    Args:
        hashes: uint64 [n], spread evenly: those that begin with the same bits are sorted together.
        folder: for a file of as many bytes; None sorts all at once in memory.

    Raises:
        ShardkitError: the file cannot be written or read; as `from_os_error` maps it.
    """
    bits = (hashes.nbytes // _SORTED_BYTES).bit_length()
    if folder is None or not bits:
        yield np.sort(hashes)
        return
    shift = np.uint64(64 - bits)
    counts = np.zeros(1 << bits, np.int64)
    for some in spans(len(hashes)):
        counts += np.bincount((hashes[some] >> shift).astype(np.int64), minlength=len(counts))
    ends = np.cumsum(counts)
    places = ends - counts
    firsts = np.arange(1, len(counts), dtype=np.uint64) << shift
    with nameless_file(folder) as file, os_errors(_FAILED, folder):
        for some in spans(len(hashes)):
            in_order = np.sort(hashes[some])
            for number, piece in enumerate(np.split(in_order, np.searchsorted(in_order, firsts))):
                if len(piece):
                    file.seek(8 * int(places[number]))
                    file.write(piece.data)
                    places[number] += len(piece)
        assert places.tolist() == ends.tolist()
        file.flush()
        os.fsync(file.fileno())  # what is read back is then what was written
        file.seek(0)
        for count in counts[counts > 0].tolist():
            yield np.sort(np.frombuffer(file.read(8 * count), np.uint64))


def repeated(hashes: Hashes, folder: bytes | None) -> Hashes:
    """Return the hashes that stand more than once, each once, in rising order.

    Raises:
        ShardkitError: as `sorted_pieces`.

    >>> repeated(np.array([5, 3, 5, 9, 5], np.uint64), None).tolist()
    [5]
    """
    found = [np.unique(piece[1:][piece[1:] == piece[:-1]]) for piece in sorted_pieces(hashes, folder)]
    return np.concatenate([np.zeros(0, np.uint64), *found])
