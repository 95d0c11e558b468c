"""What a conversion to another framework's dataset did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping

    from shardkit.converting.outputs import OutputKind
    from shardkit.extracting.names import Layout

__all__ = ["ForeignConversion", "ForeignPart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignPart:
    """What was written of one part."""

    samples: int
    labelled: int
    """Samples that have a label."""
    payload: int
    """Bytes of all images."""
    files: int
    bytes: int
    """Of all files."""
    refused: Counter[str]
    """Reason code to number of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignConversion:
    """What a conversion to another framework's dataset did, or with `dry_run` would do."""

    kind: OutputKind
    folder: str
    layout: Layout | None
    """How the files of a tree are called, as in `shardkit.extract`; None for what is no tree."""
    parts: Mapping[str | None, ForeignPart]
    """Part of the split to what was written; one part None where nothing is split."""
    classes: tuple[str, ...] | None
    """Names of the labels of all parts; None where there are none."""
    passed_over: Counter[str]
    """Samples that nobody asked for, and further members that were dropped, by kind."""

    @property
    def refused(self) -> int:
        """Samples that are in a `rejected.jsonl`."""
        return sum(part.refused.total() for part in self.parts.values())
