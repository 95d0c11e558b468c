"""Columns of numbers and texts as the lines of a file, without a Python object for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    Column: TypeAlias = npt.NDArray[np.bytes_] | npt.NDArray[np.object_] | npt.NDArray[np.integer] | bytes

__all__ = ["joined"]

_ROWS = 16384
"""Joined at a time: far from the 2 GiB that one Arrow array of texts holds, whatever the texts."""


def joined(columns: Sequence[Column], between: bytes, ends: Column) -> list[memoryview]:
    r"""Return the rows of some columns, the columns' texts joined in each, one row behind the other.

    Args:
        columns: each [rows]: bytes without a NUL at their end, bytes objects, or numbers, which become decimal digits;
            or one text for every row. At least one is an array.
        between: what stands between two columns.
        ends: what stands behind each row.

    Returns:
        Pieces in host memory that are the text together.

    >>> import numpy as np
    >>> b"".join(joined([b"at", np.array([5, 10]), np.array([b"a", b"b"])], b" ", b"\n"))
    b'at 5 a\nat 10 b\n'
    """
    count = next(len(column) for column in columns if not isinstance(column, bytes))
    pieces = []
    for first in range(0, count, _ROWS):
        *texts, end = [_texts(column, slice(first, first + _ROWS)) for column in (*columns, ends)]
        rows = pc.binary_join_element_wise(*texts, pa.scalar(between, pa.binary()))
        rows = pc.binary_join_element_wise(rows, end, pa.scalar(b"", pa.binary()))
        bounds = memoryview(rows.buffers()[1]).cast("i")
        pieces.append(memoryview(rows.buffers()[2])[bounds[rows.offset] : bounds[rows.offset + len(rows)]])
    return pieces


def _texts(column: Column, rows: slice) -> pa.Array | pa.Scalar:
    if isinstance(column, bytes):
        return pa.scalar(column, pa.binary())
    if column.dtype.kind in "iu":
        return pa.array(column[rows]).cast(pa.utf8()).cast(pa.binary())
    return pa.array(column[rows], pa.binary())
