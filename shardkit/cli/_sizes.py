"""A type of option for sizes: 256MB, 1GiB."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from shardkit.sizes import parse_size

if TYPE_CHECKING:
    _ParamType = click.ParamType[int]
else:
    _ParamType = click.ParamType  # generic in click's newer releases only

__all__ = ["BYTE_SIZE", "ByteSize"]


class ByteSize(_ParamType):
    """A click type for a number of bytes."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of bytes, or fail with what a size looks like."""
        size = value if isinstance(value, int) else parse_size(str(value))
        if size is None:
            self.fail(f"{value!r} is not a size; write 4096, 256MB or 1GiB", param, ctx)
        return size


BYTE_SIZE = ByteSize()
