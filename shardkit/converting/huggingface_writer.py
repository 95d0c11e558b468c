"""Hugging Face: Parquet files whose schema says what images and classes are, written by `datasets`."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from shardkit.converting.columns import missing
from shardkit.converting.writers import IMAGE, JSON, KEY, LABEL

if TYPE_CHECKING:
    from shardkit.converting.writers import WrittenColumns, WrittenSample

__all__ = ["HuggingFaceWriter", "load_huggingface"]

_GROUP_BYTES = 32 << 20
_GROUP_ROWS = 1000
"""A row group ends at either: readers hold one, and so does this writer."""


def load_huggingface() -> Any:  # noqa: ANN401 - the library has no types
    """Import the library.

    Raises:
        CapabilityError: it is not installed, or does not work.
    """
    try:
        import datasets
        from datasets.arrow_writer import ParquetWriter
    except Exception as error:  # it imports much that may fail in any way
        raise missing("Hugging Face datasets", "hf", error) from error
    return datasets, ParquetWriter


class HuggingFaceWriter:
    """One Parquet file for each planned shard."""

    def __init__(self, folder: str, columns: WrittenColumns, split: str) -> None:
        """Begin; no file is made yet.

        Raises:
            CapabilityError: `datasets` is not installed, or does not work.
        """
        datasets, parquet_writer = load_huggingface()
        kinds: dict[str, Any] = {IMAGE: datasets.Image()}
        if columns.label:
            names = columns.classes
            kinds[LABEL] = datasets.Value("int64") if names is None else datasets.ClassLabel(names=list(names))
        kinds[KEY] = datasets.Value("string")
        if columns.json:
            kinds[JSON] = datasets.Value("string")
        self._features = datasets.Features(kinds)
        self._writer_class: Any = parquet_writer
        self._folder, self._split = folder, split
        self._writer: Any = None
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    def begin_file(self, number: int, count: int) -> None:
        """End the file before, and begin one of the name that the hub gives."""
        self._end_file()
        name = f"{self._split}-{number:05d}-of-{count:05d}.parquet"
        self._writer = self._writer_class(path=os.path.join(self._folder, name), features=self._features)

    def write(self, sample: WrittenSample) -> None:
        """Write a sample."""
        row = {IMAGE: {"bytes": sample.image, "path": None}, LABEL: sample.label, KEY: sample.key}
        self._rows.append({**row, JSON: sample.json or None})
        self._bytes += len(sample.image)
        if self._bytes >= _GROUP_BYTES or len(self._rows) == _GROUP_ROWS:
            self._end_group()

    def _end_group(self) -> None:
        if self._rows:
            batch = {name: [row[name] for row in self._rows] for name in self._features}
            self._writer.write_batch(batch, writer_batch_size=len(self._rows))
        self._rows, self._bytes = [], 0

    def _end_file(self) -> None:
        if self._writer is not None:
            self._end_group()
            writer, self._writer = self._writer, None
            writer.finalize()

    def finish(self) -> None:
        """End the last file."""
        self._end_file()

    def discard(self) -> None:
        """Close what is open, in whatever state."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(Exception):  # it is thrown away, and what led here is what counts
                writer.close()
