"""MosaicML's MDS, written by `MDSWriter`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardkit.converting.columns import missing
from shardkit.converting.writers import IMAGE, JSON, KEY, LABEL

if TYPE_CHECKING:
    from shardkit.converting.writers import WrittenColumns, WrittenSample

__all__ = ["MdsWriter", "load_mds"]


def load_mds() -> Any:  # noqa: ANN401 - the library has no types
    """Import the library.

    Raises:
        CapabilityError: it is not installed, or does not work.
    """
    try:
        from streaming import MDSWriter
    except Exception as error:  # it imports torchvision, which may fail in any way
        raise missing("MosaicML streaming", "mds", error) from error
    return MDSWriter


class MdsWriter:
    """One stream in a folder; images are a column of `bytes`, since MDS's `jpeg` takes files or encodes anew."""

    def __init__(self, folder: str, columns: WrittenColumns, limit: int) -> None:
        """Begin.

        Raises:
            CapabilityError: `streaming` is not installed, or does not work.
        """
        encodings = {IMAGE: "bytes", KEY: "str"}
        encodings |= {LABEL: "int"} if columns.label else {}
        encodings |= {JSON: "str"} if columns.json else {}
        self._columns = columns
        self._writer: Any = load_mds()(columns=encodings, out=folder, size_limit=limit)
        self._open = True

    def begin_file(self, number: int, count: int) -> None:
        """Do nothing: the library cuts."""

    def write(self, sample: WrittenSample) -> None:
        """Write a sample."""
        self._writer.write(sample.row(self._columns))

    def finish(self) -> None:
        """Write the last shard and the index."""
        self._open = False
        self._writer.finish()

    def discard(self) -> None:
        """End the library's threads."""
        if self._open:
            self._open = False
            # What they have left to do is nothing, since no cloud is there; cancelled, they would print tracebacks.
            self._writer.executor.shutdown()
