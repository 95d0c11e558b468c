"""LitData, written by the `BinaryWriter` that `litdata.optimize` runs in its workers."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from shardkit.converting.columns import missing

if TYPE_CHECKING:
    from shardkit.converting.writers import WrittenColumns, WrittenSample

__all__ = ["LitDataWriter", "load_litdata"]


def load_litdata() -> Any:  # noqa: ANN401 - the library has no types
    """Import the library.

    Raises:
        CapabilityError: it is not installed, or does not work.
    """
    try:
        from litdata.streaming.writer import BinaryWriter
    except Exception as error:  # it imports much that may fail in any way
        raise missing("LitData", "litdata", error) from error
    return BinaryWriter


class LitDataWriter:
    """Samples are flat dicts in one folder of chunks."""

    def __init__(self, folder: str, columns: WrittenColumns, limit: int) -> None:
        """Begin.

        Raises:
            CapabilityError: `litdata` is not installed, or does not work.
        """
        self._columns = columns
        self._writer: Any = load_litdata()(folder, chunk_bytes=limit)
        self._count = 0

    def begin_file(self, number: int, count: int) -> None:
        """Do nothing: the library cuts."""

    def write(self, sample: WrittenSample) -> None:
        """Write a sample."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a sample is larger than a chunk
            self._writer.add_item(self._count, sample.row(self._columns))
        self._count += 1

    def finish(self) -> None:
        """Write the last chunk and the index."""
        self._writer.done()
        self._writer.merge(1)

    def discard(self) -> None:
        """Do nothing: no file stays open between two calls."""
