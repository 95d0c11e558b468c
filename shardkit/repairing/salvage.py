"""What a walk over a damaged shard has found, laid down as a new shard would have it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from shardkit.errors import StorageError
from shardkit.format.index import RecordBatch, SampleRow, sample_batch
from shardkit.format.layout import SampleLayout, place_sample, shard_bytes
from shardkit.format.tar import tail_bytes
from shardkit.packing.plan import cls_payload
from shardkit.repairing.members import sample_head

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardkit.repairing.damaged_file import DamagedFile

__all__ = ["Kept", "Salvage", "SalvageBuilder"]

_BATCH_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Kept:
    """A sample to write: its new row, and where its bytes lie in the damaged shard."""

    row: SampleRow
    json_offset: int
    offset: int


@dataclass(slots=True, kw_only=True)
class Salvage:
    """What a walk has found."""

    batches: list[RecordBatch] = field(default_factory=list)
    """The new rows."""
    json_offsets: array[int] = field(default_factory=lambda: array("q"))
    """Of each sample in the damaged shard."""
    offsets: array[int] = field(default_factory=lambda: array("q"))
    identical: bool = True
    """A new shard of these samples would be the old one, byte for byte."""
    without_source: int = 0
    """Samples whose path nobody knows any more."""
    end: int = 0
    """Where the last sample ends in the new shard."""
    lost: int = 0

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.offsets)

    def rows(self) -> RecordBatch:
        """Return the new rows, at least one, as one batch."""
        return pa.Table.from_batches(self.batches).combine_chunks().to_batches()[0]

    def kept(self) -> Iterator[Kept]:
        """Yield the samples in order; few are Python objects at a time."""
        number = 0
        for batch in self.batches:
            for values in batch.to_pylist():
                yield Kept(SampleRow(**values), self.json_offsets[number], self.offsets[number])
                number += 1


class SalvageBuilder:
    """Lays the samples that are found one after another, and sees whether that is the shard as it was."""

    def __init__(self, file: DamagedFile, align: int) -> None:
        """Begin with no sample."""
        self.salvage = Salvage()
        self._file = file
        self._align = align
        self._rows: list[SampleRow] = []

    def add(self, row: SampleRow, start: int, json_offset: int, offset: int) -> None:
        """Take a whole sample.

        Args:
            row: what it is; its offsets are replaced by those that it gets.
            start: where it begins in the damaged shard.
            json_offset: where its json member's payload lies there; 0 when there is none.
            offset: where its image lies there.
        """
        salvage = self.salvage
        small = None if row.label is None else len(cls_payload(row.label))
        json_size = row.json_size if json_offset else None
        place = place_sample(salvage.end, small, json_size, row.size, self._align)
        if salvage.identical:
            salvage.identical = start == place.start and offset == place.payload_offset and self._framed(row, place)
        salvage.end = place.end
        salvage.json_offsets.append(json_offset)
        salvage.offsets.append(offset)
        self._rows.append(
            row._replace(
                offset=place.payload_offset,
                sample_offset=place.start,
                sample_size=place.end - place.start,
                json_offset=place.json_offset,
            )
        )
        if len(self._rows) == _BATCH_ROWS:
            self._flush()

    def finish(self) -> Salvage:
        """Judge the end of the shard; return what was found."""
        self._flush()
        salvage, size = self.salvage, self._file.size
        whole = shard_bytes(salvage.end, self._align)
        salvage.identical = salvage.identical and size == whole and self._file.is_zero(salvage.end, size)
        return salvage

    def _framed(self, row: SampleRow, place: SampleLayout) -> bool:
        """Tell whether what stands around a sample's payloads is what the format writes there."""
        try:
            before = self._file.read(place.start, place.payload_offset - place.start)
            after = self._file.read(place.payload_offset + row.size, tail_bytes(row.size))
        except StorageError:
            return False
        at = place.json_offset - place.start
        json = before[at : at + row.json_size] if place.json_offset else None
        return before == sample_head(row.key, row.label, json, row.size, place) and after == bytes(tail_bytes(row.size))

    def _flush(self) -> None:
        if self._rows:
            self.salvage.batches.append(sample_batch(self._rows))
            self._rows = []
