"""Which samples of a dataset fulfil a condition, and what the index says about each."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shardkit.errors import ConfigError
from shardkit.format.class_names import class_numbers
from shardkit.format.expression import iter_masks
from shardkit.format.index import FACTS
from shardkit.format.jpeg import SUBSAMPLINGS, hardware_decodable
from shardkit.format.keys import key_from_path
from shardkit.format.media_type import MEDIA_TYPES
from shardkit.format.where import parse_where, require_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from shardkit.dataset.shardset import Dataset

    _Ints: TypeAlias = npt.NDArray[np.int64]

__all__ = ["Facts", "find_key", "find_rows", "image_text", "read_facts"]

_FRAMES = {0: "baseline", 1: "extended", 2: "progressive", 3: "lossless"}
_UPRIGHT = (0, 1)
_JPEG = MEDIA_TYPES.index("jpeg")
_MEMBERS = ("sample_offset", "sample_size", "json_offset", "json_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the index says about one sample."""

    number: int
    """Of the sample in the dataset, from 0."""
    key: str
    label: int | None
    class_name: str | None
    shard: str
    """File name."""
    offset: int
    size: int
    """Bytes of the image; at `offset` in the shard."""
    crc32c: int | None
    """None where foreign shards were indexed without."""
    source: str
    members: dict[str, int]
    """Bytes: `sample_offset` and `sample_size`, `json_offset` and `json_size`; these are 0 without a json member."""
    image: dict[str, int | None]
    """The columns `shardkit.format.index.FACTS`; None for what nobody has found out."""

    @property
    def hardware_decodable(self) -> bool | None:
        """Whether nvJPEG's engines take it; None when nobody has looked at it."""
        if self.image["media_type"] is None:
            return None
        coding = [self.image[name] or 0 for name in ("sof", "precision", "scans", "components", "subsampling")]
        return self.image["media_type"] == _JPEG and hardware_decodable(*coding)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; codes by their names, null for what is not known."""
        return {
            "number": self.number, "key": self.key, "label": self.label, "class": self.class_name,
            "shard": self.shard, "offset": self.offset, "size": self.size,
            "crc32c": None if self.crc32c is None else f"{self.crc32c:08x}",
            "source": self.source, **self.members, **self.image,
            "media_type": _named(MEDIA_TYPES, self.image["media_type"]),
            "subsampling": _named(SUBSAMPLINGS, self.image["subsampling"]),
            "hardware_decodable": self.hardware_decodable,
        }  # fmt: skip


def find_rows(dataset: Dataset, where: str | None) -> _Ints:
    """Return the samples that fulfil a condition, int64 [k], rising; all for None.

    Raises:
        ConfigError: the condition cannot be read, or names a class or column that is not there or says nothing.
        IndexFormatError: a text of the index is damaged, and the condition asks for texts.
    """
    if where is None:
        return np.arange(len(dataset), dtype=np.int64)
    condition = parse_where(where, number_of=class_numbers(dataset.classes, dataset.path))
    require_columns(where, dataset.manifest.known_columns)
    rows, first = [np.empty(0, np.int64)], 0
    for (mask,) in iter_masks(dataset.columns.batches, [condition]):
        rows.append(np.flatnonzero(mask) + first)
        first += len(mask)
    return np.concatenate(rows)


def find_key(dataset: Dataset, key: str) -> int:
    """Return the number of the sample with a key.

    Raises:
        ConfigError: there is none.
    """
    try:
        number = dataset.columns.texts("key").find(key)
    except UnicodeEncodeError:  # bytes on the command line that are not UTF-8: no index has them
        number = -1
    if number < 0:
        raise ConfigError("there is no such sample", path=dataset.path, key=key, remedy=_meant(dataset, key))
    return number


def _meant(dataset: Dataset, name: str) -> str:
    """Return what to try instead of a name that is no key: the key of the file that is called so, if there is one."""
    path = os.fsencode(name)
    for key in (key_from_path(path + b".jpg"), key_from_path(path)) if path else ():
        if dataset.columns.texts("key").find(key) >= 0:
            return f"did you mean {key}? Keys are paths without the extension, and what they cannot hold is escaped"
    return "shardkit ls lists the keys"


def read_facts(dataset: Dataset, numbers: Sequence[int] | _Ints) -> list[Facts]:
    """Return what the index says about samples, by their numbers.

    Raises:
        IndexFormatError: a text of the index is damaged.
        IntegrityError: the index points outside a shard.
    """
    rows = np.asarray(numbers, np.int64)
    columns, located, classes = dataset.columns, dataset.locate(rows), dataset.classes
    looked_at = "media_type" in dataset.manifest.known_columns
    images, members = (
        zip(*(columns.numbers(name)[rows].tolist() for name in names), strict=True) for names in (FACTS, _MEMBERS)
    )
    stored = (rows, located.shard, located.offset, located.size, located.label, columns.numbers("crc32c")[rows])
    texts, known = (columns.texts("key")[rows], columns.texts("source")[rows]), dataset.manifest.has_checksums
    return [
        Facts(
            number=number, key=key, label=None if label < 0 else label, class_name=_class_name(classes, label),
            shard=dataset.manifest.shards[shard].name, offset=offset, size=size, source=source,
            crc32c=checksum if known else None,
            members=dict(zip(_MEMBERS, member, strict=True)), image=_image(image, looked_at),
        )
        for number, shard, offset, size, label, checksum, key, source, image, member in zip(
            *(values.tolist() for values in stored), *texts, images, members, strict=True
        )
    ]  # fmt: skip


def _image(values: Sequence[int], looked_at: bool) -> dict[str, int | None]:
    """Return the facts of an image by name: the index has 0 for what is not known, and all is when there is a width."""
    image: dict[str, int | None] = dict(zip(FACTS, values, strict=True))
    if not looked_at:
        return dict.fromkeys(FACTS)
    if not image["width"]:
        return {**dict.fromkeys(FACTS), "media_type": image["media_type"]}
    return {**image, "scans": image["scans"] or None}


def image_text(facts: Facts) -> str:
    """Return in some words what an image is: `baseline 4:2:0`, `progressive gray, 12 bits, turned (6)`, `png`.

    It is `-` when nobody has looked at it.
    """
    image = facts.image
    kind = _named(MEDIA_TYPES, image["media_type"])
    if kind != "jpeg" or image["sof"] is None:
        return kind or "-"
    frame = _FRAMES.get(image["sof"], f"SOF{image['sof']}")
    parts = [f"{frame} {_named(SUBSAMPLINGS, image['subsampling'])}"]
    if image["components"] == 4:
        parts.append("4 components")
    if image["precision"] not in (0, 8):
        parts.append(f"{image['precision']} bits")
    if image["restart_interval"]:
        parts.append("restarts")
    if image["orientation"] not in _UPRIGHT:
        parts.append(f"turned ({image['orientation']})")
    return ", ".join(parts)


def _named(names: tuple[str, ...], code: int | None) -> str | None:
    if code is None:
        return None
    return names[code] if code < len(names) else f"code {code}"


def _class_name(classes: tuple[str, ...] | None, label: int) -> str | None:
    return classes[label] if classes is not None and 0 <= label < len(classes) else None
