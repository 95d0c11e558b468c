"""What the image of a row is called: as a file, with the extension of what is stored, and never as another row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from shardkit.format.media_type import MEDIA_TYPES, extension_of, is_image_name, sniff_media_type
from shardkit.packing.admission import CONVERTIBLE_TYPES

if TYPE_CHECKING:
    from shardkit.format.index import RecordBatch

__all__ = ["RowNames", "stored_type"]

_JPEG = MEDIA_TYPES.index("jpeg")


def stored_type(image: bytes, *, convert: bool) -> int:
    """Return the code in `MEDIA_TYPES` of what is stored of an image.

    Args:
        image: as the row has it.
        convert: whether images of some other types are stored as JPEGs.
    """
    found = sniff_media_type(image)
    return _JPEG if convert and found in CONVERTIBLE_TYPES else found


class RowNames:
    """The sources of one dataset's rows: their keys where all of these are names of images, else with extensions.

    All or none: of the keys `a` and `a.jpg`, the first alone with an extension would be the second.
    """

    def __init__(self) -> None:
        """Begin without a row."""
        self._all_named = True

    def note(self, key: str) -> None:
        """Take the key of a row."""
        self._all_named = self._all_named and is_image_name(key)

    def named(self, rows: RecordBatch) -> RecordBatch:
        """Return rows whose `source` is without an extension, by their keys alone, with the names that they have.

        Args:
            rows: `shardkit.format.index.SCHEMA`, `media_type` as `stored_type`; all keys were noted.
        """
        if self._all_named:
            return rows
        place = rows.schema.get_field_index("source")
        kinds = rows.column("media_type").to_pylist()
        sources = rows.column("source").to_pylist()
        named = [f"{source}.{extension_of(kind)}" for source, kind in zip(sources, kinds, strict=True)]
        columns = rows.columns
        columns[place] = pa.array(named, rows.schema.field(place).type)
        return pa.RecordBatch.from_arrays(columns, schema=rows.schema)
