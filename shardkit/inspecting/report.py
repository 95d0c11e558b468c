"""What an inspection found: counts, percentiles and lists, frozen; equal datasets give equal reports."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardkit.verifying.report import Report

__all__ = [
    "MAX_CLASSES",
    "MAX_REJECTED",
    "PERCENTILES",
    "ClassCount",
    "ImageFacts",
    "Inspection",
    "Measure",
    "PageFacts",
    "RejectedSource",
    "Rejections",
    "SplitFacts",
]

PERCENTILES = (0, 5, 50, 95, 99, 100)
"""Per cent of the samples that are not above the value; 0 is the least value and 100 the greatest."""
MAX_CLASSES = 100_000
"""Classes that a report keeps, the largest; all are counted."""
MAX_REJECTED = 1000
"""Refused sources that a report keeps, the first; all are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """How one number is spread over the samples."""

    known: int
    """Samples that have it."""
    unknown: int
    """Samples whose row states none, e.g. a width of 0."""
    percentiles: tuple[float, ...]
    """At `PERCENTILES`, each the value of a sample (nearest rank), exact; empty when no sample has one."""
    edges: tuple[float, ...]
    """Of n bars, n + 1 rising values, evenly spaced on a logarithmic scale; a value on an edge is in the bar above."""
    counts: tuple[int, ...]
    """Samples in each of the n bars; the last one holds its upper edge, too."""


@dataclass(frozen=True, slots=True)
class ClassCount:
    """One class."""

    label: int | None
    """None for the samples that have none."""
    name: str | None
    samples: int


@dataclass(frozen=True, slots=True)
class SplitFacts:
    """One split of the manifest."""

    name: str
    shards: int
    samples: int
    bytes: int


@dataclass(frozen=True, slots=True)
class RejectedSource:
    """One line of `rejected.jsonl`."""

    path: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejections:
    """Which sources were refused when the dataset was packed."""

    total: int
    reasons: Mapping[str, int]
    """Reason to number of sources, the most frequent first."""
    first: tuple[RejectedSource, ...]
    """The first `MAX_REJECTED`, in source order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """What the images are. Mappings hold numbers of images, the most frequent first; all but the first of JPEGs."""

    media_types: Mapping[str, int]
    jpegs: int
    hardware_decodable: int
    """JPEGs that a GPU's JPEG engines take."""
    frames: Mapping[str, int]
    """`baseline`, `progressive`, `extended`, `lossless`, else `SOFn`."""
    components: Mapping[str, int]
    subsamplings: Mapping[str, int]
    precisions: Mapping[str, int]
    """Bits a component."""
    orientations: Mapping[str, int]
    """EXIF orientation; 0 for none."""
    restarts: int
    """JPEGs with restart markers."""
    several_scans: int
    """JPEGs with more than one scan."""
    unknown_scans: int
    """JPEGs whose scans nobody has counted: `shardkit index --facts header` reads only where an image begins."""

    @property
    def turned(self) -> int:
        """JPEGs that EXIF turns or mirrors."""
        return sum(count for code, count in self.orientations.items() if code not in ("0", "1"))


@dataclass(frozen=True, slots=True)
class PageFacts:
    """The page that was written."""

    path: str
    """As it was given."""
    bytes: int
    thumbnails: int
    """Samples that are shown."""
    failed: int
    """Those of them without a picture; the page says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What a dataset holds."""

    dataset: str
    """Path as it was given."""
    name: str
    generation: str
    layout: str
    align: int
    """Bytes."""
    shards: int
    samples: int
    bytes: int
    """Of all shards: payload + headers + padding."""
    payload: int
    headers: int
    padding: int
    splits: tuple[SplitFacts, ...]
    class_names: int | None
    """Number of classes that the manifest names; None when it names none."""
    labels: int
    """Distinct labels that samples have."""
    unlabelled: int
    """Samples without a label."""
    empty_classes: int
    """Classes of the manifest that no sample has."""
    classes: tuple[ClassCount, ...]
    """The `MAX_CLASSES` largest, by falling number of samples, then by label."""
    measures: Mapping[str, Measure]
    """`bytes` (of an image's file), `width`, `height` (pixels as stored) and `aspect` (width / height)."""
    images: ImageFacts | None
    """None where nobody has looked at the images: `shardkit index --facts none` reads tar headers only."""
    rejected: Rejections
    verification: Report | None = None
    """What `shardkit verify` found, when it was asked for."""
    page: PageFacts | None = None
    """When one was written."""

    @property
    def exit_code(self) -> int:
        """0, or what the verification ends with."""
        return 0 if self.verification is None else self.verification.exit_code

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; the schema is in docs/inspect.md."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        document: dict[str, Any] = fields | {
            "splits": [dataclasses.asdict(split) for split in self.splits],
            "classes": [dataclasses.asdict(one) for one in self.classes],
            "measures": {name: _measure(measure) for name, measure in self.measures.items()},
            "images": {
                field.name: None if self.images is None else _plain(getattr(self.images, field.name))
                for field in dataclasses.fields(ImageFacts)
            },
            "rejected": {
                "total": self.rejected.total, "reasons": dict(self.rejected.reasons),
                "first": [dataclasses.asdict(source) for source in self.rejected.first],
            },
            "verification": None if self.verification is None else self.verification.to_json(),
            "page": None if self.page is None else dataclasses.asdict(self.page), "exit_code": self.exit_code,
        }  # fmt: skip
        return document


def _measure(measure: Measure) -> dict[str, Any]:
    names = ("min", *(f"p{percent}" for percent in PERCENTILES[1:-1]), "max")
    values = dict(zip(names, measure.percentiles, strict=True)) if measure.known else {}
    return {
        "known": measure.known, "unknown": measure.unknown, **values,
        "histogram": {"edges": list(measure.edges), "counts": list(measure.counts)},
    }  # fmt: skip


def _plain(value: Mapping[str, int] | int) -> dict[str, int] | int:
    return value if isinstance(value, int) else dict(value)
