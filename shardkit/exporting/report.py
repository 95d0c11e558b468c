"""What an export did."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ExportReport", "ExportedFile", "State"]

State = Literal["written", "replaced", "unchanged"]


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """One file of another tool's."""

    format: str
    """As `--to` names it."""
    name: str
    """Relative to the folder."""
    bytes: int
    state: State
    """`unchanged`: it was there with these very bytes."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """Every file that the dataset's export consists of."""

    dataset: str
    folder: str
    """Where the files lie."""
    generation: str
    """Of the dataset that they were made from."""
    samples: int
    files: Sequence[ExportedFile]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return dataclasses.asdict(self)
