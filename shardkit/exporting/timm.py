"""timm: `_info.json`, the splits that its webdataset reader looks up in the folder of the shards.

The reader logs a sample that it cannot use, and goes on: one without the image or the label that it was told of. Where
no sample has those that it takes by itself, it must be told of others, and says so by reading nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.exporting.foreign import cannot
from shardkit.exporting.kinds import kinds_by_split
from shardkit.exporting.table import ForeignFile, Table, json_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardkit.exporting.kinds import Kind

__all__ = ["timm_files"]

_IMAGES = ("jpg", "png", "webp")
"""Extensions that the reader takes for the image, the first that is there, in lower case as all of its members."""
_LABEL = "cls"


def timm_files(table: Table) -> Iterator[ForeignFile]:
    """Yield the one file.

    Raises:
        ConfigError: timm would pass over some of the samples, or take another member for the image.
    """
    kinds = [kind for found in kinds_by_split(table).values() for kind in found]
    _require_images(kinds)
    _require_labels(kinds)
    splits = {
        split: {
            "name": split,
            "num_samples": sum(shard.samples for shard in shards),
            "filenames": [shard.name for shard in shards],
            "shard_lengths": [shard.samples for shard in shards],
        }
        for split, shards in table.splits().items()
    }
    yield json_file("_info.json", {"splits": splits})


def _require_images(kinds: Sequence[Kind]) -> None:
    taken = [next((image for image in _IMAGES if image in _lower(kind)), None) for kind in kinds]
    for kind, image in zip(kinds, taken, strict=True):
        if image is None and any(taken):
            why = "a sample without an image that timm takes would be passed over"
            raise cannot("timm", why, kind.shard, kind.image, kind.key, expected=" or ".join(_IMAGES))
        if image is not None and image != kind.image.lower():
            why = "timm would take another member for the image"
            raise cannot("timm", why, kind.shard, image, kind.key, expected=kind.image)


def _require_labels(kinds: Sequence[Kind]) -> None:
    labelled = [_LABEL in _lower(kind) for kind in kinds]
    if any(labelled) and not all(labelled):
        kind = kinds[labelled.index(False)]
        why = "a sample without a label would be passed over"
        raise cannot("timm", why, kind.shard, ", ".join(sorted(kind.extensions)), kind.key, expected=_LABEL,
                     instead="label all samples or none")  # fmt: skip


def _lower(kind: Kind) -> set[str]:
    return {extension.lower() for extension in kind.extensions}
