"""What the writers of other frameworks' datasets, and of trees, have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["CLASSES", "IMAGE", "JSON", "KEY", "LABEL", "NO_LABEL", "TableWriter", "WrittenColumns", "WrittenSample"]

IMAGE, LABEL, KEY, JSON = "image", "label", "key", "json"
"""Names of the columns."""
NO_LABEL = -1
"""Label of a sample without one, in formats that have no null."""
CLASSES = "classes.txt"
"""Class names in label order, one a line, beside a dataset whose format has no place for them."""


@dataclass(frozen=True, slots=True)
class WrittenColumns:
    """Which columns a dataset has, besides image and key."""

    label: bool
    json: bool
    classes: tuple[str, ...] | None
    """Class names in label order, for columns that can state them."""


@dataclass(frozen=True, slots=True)
class WrittenSample:
    """What is written of a sample."""

    image: bytes
    label: int | None
    key: str
    json: str
    """Text of its json member; empty for none."""
    source: str
    """As an index states it."""

    def row(self, columns: WrittenColumns) -> dict[str, bytes | int | str]:
        """Return the sample in columns that have no null."""
        row: dict[str, bytes | int | str] = {IMAGE: self.image, KEY: self.key}
        if columns.label:
            row[LABEL] = NO_LABEL if self.label is None else self.label
        if columns.json:
            row[JSON] = self.json
        return row


class TableWriter(Protocol):
    """Writes one dataset into an empty folder, by the framework's own writer."""

    def begin_file(self, number: int, count: int) -> None:
        """Take that the samples of the planned file `number` of `count` follow."""

    def write(self, sample: WrittenSample) -> None:
        """Write a sample, or keep it until there are enough for a file.

        Raises:
            RefusedError: there is no place for it.
        """

    def finish(self) -> None:
        """Write what is missing, and what names the files."""

    def discard(self) -> None:
        """Let go of everything open; idempotent, and after `finish` nothing."""
