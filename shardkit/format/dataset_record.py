"""What a dataset consists of: the values of the manifest, and what may not be in one."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardkit.errors import ConfigError, ManifestError
from shardkit.format.checksum import DIGESTS, hex_digest
from shardkit.format.index import FORMAT_VERSION, HEADER_COLUMNS, SCHEMA, WHOLE_IMAGE_COLUMNS
from shardkit.format.layout import check_align
from shardkit.format.strict_json import dump_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "DATASET_INDEX",
    "LAYOUTS",
    "MANIFEST",
    "REJECTED",
    "SHARD_FILES",
    "FileRecord",
    "Manifest",
    "ShardRecord",
    "Totals",
    "brace_spec",
    "check_dataset",
    "check_shard_name",
    "is_file_name",
    "shown",
]

MANIFEST = "manifest.json"
DATASET_INDEX = "index.arrow"
REJECTED = "rejected.jsonl"
SHARD_FILES = (".tar", ".arrow", ".idx")
"""Extensions of a shard and of its two indexes."""
LAYOUTS = ("aligned", "foreign")
"""`aligned`: shards in shardkit's own layout. `foreign`: another tool's shards, indexed where they lie."""
_HEX_DIGITS = {"xxh3-128": 32, "sha256": 64}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")
_NUMBERED = re.compile(r"(.+-)([0-9]{1,18})\.tar", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file beside the shards."""

    bytes: int
    digest: str
    """Hex digest of the whole file, by the manifest's `digest_algorithm`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """One shard and its two index files (`NAME.arrow`, `NAME.idx`)."""

    name: str
    """File name, e.g. `photos-000000.tar`."""
    bytes: int
    digest: str
    """Hex digest of the whole shard."""
    samples: int
    payload: int
    """Bytes of all image payloads."""
    padding: int
    """Bytes of PAX padding, block padding and the zeros at the end."""
    index: FileRecord
    dali_index: FileRecord
    first_key: str
    last_key: str

    @property
    def stem(self) -> str:
        """The file name without `.tar`; the index files are named after it."""
        return self.name.removesuffix(".tar")


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over all shards, in bytes where nothing else is said."""

    shards: int
    samples: int
    """Number of samples."""
    payload: int
    """Image payloads."""
    headers: int
    """ustar headers and the small members (cls, json)."""
    padding: int
    """PAX padding, block padding and the zeros at the end of each shard."""
    bytes: int
    """Size of all shards: payload + headers + padding."""
    refused: int
    """Number of sources in `rejected.jsonl`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A dataset: its shards in order, and how they were made."""

    shardkit: str
    """Version of shardkit that packed it."""
    name: str
    """Name of the dataset; the shards' names start with it."""
    layout: str = "aligned"
    """`aligned` for shards in shardkit's own layout."""
    align: int
    """Bytes; every image's payload offset is a multiple of it."""
    digest_algorithm: str
    seed: int
    """Seed of the order in which the sources were packed."""
    options: Mapping[str, Any]
    """Every option that shaped the bytes; JSON values."""
    classes: Sequence[str] | None
    """Class names in label order; None without labels, or when a list gave them as numbers only."""
    splits: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Split name to names of shards."""
    index: FileRecord
    """`index.arrow`."""
    rejected: FileRecord | None
    """`rejected.jsonl`; None when nothing was refused."""
    shards: Sequence[ShardRecord]
    totals: Totals

    @property
    def generation(self) -> str:
        """UUID (version 8) of the content: equal shards and classes have the same, whoever packed them.

        The indexes are left out: they follow from the shards, but Arrow's own bytes may change with its version.
        """
        content = [FORMAT_VERSION, [[s.name, s.digest] for s in self.shards], self.classes]
        hexes = hex_digest(DIGESTS[0], dump_json(content).encode())
        return str(uuid.UUID(hexes[:12] + "8" + hexes[13:16] + "8" + hexes[17:]))

    @property
    def has_checksums(self) -> bool:
        """Whether the index has each image's CRC-32C, and the manifest each shard's digest.

        Foreign shards may be indexed without a look at their images: then both are only names for what was seen.
        """
        return self.layout == "aligned" or self.options.get("facts") == "full"

    @property
    def known_columns(self) -> frozenset[str]:
        """Columns of the index that say something; the others are 0 in every row."""
        if self.has_checksums:
            return frozenset(SCHEMA.names)
        return HEADER_COLUMNS if self.options.get("facts") == "none" else frozenset(SCHEMA.names) - WHOLE_IMAGE_COLUMNS

    @property
    def brace(self) -> str:
        """The shards as one brace expression, as webdataset takes it."""
        return brace_spec([s.name for s in self.shards])


def brace_spec(names: Sequence[str]) -> str:
    """Return one brace expression that expands to `names`, in their order.

    >>> brace_spec(["a-000000.tar", "a-000001.tar", "a-000003.tar"])
    'a-{{000000..000001},000003}.tar'
    >>> brace_spec(["train.tar", "more.tar"])
    '{train.tar,more.tar}'
    """
    parts = [match.groups() for name in names if (match := _NUMBERED.fullmatch(name))]
    if len(parts) != len(names) or len({prefix for prefix, _ in parts}) != 1:
        return _braced(names)
    runs: list[list[str]] = []
    for _, digits in parts:
        if runs and len(digits) == len(runs[-1][-1]) and int(digits) == int(runs[-1][-1]) + 1:
            runs[-1] = [runs[-1][0], digits]
        else:
            runs.append([digits])
    numbers = _braced([run[0] if len(run) == 1 else "{" + "..".join(run) + "}" for run in runs])
    return f"{parts[0][0]}{numbers}.tar"


def _braced(parts: Sequence[str]) -> str:
    return "{" + ",".join(parts) + "}" if len(parts) > 1 else "".join(parts)


def check_dataset(manifest: Manifest) -> None:
    """Refuse what contradicts itself, and names that would lead out of the dataset's folder.

    Raises:
        ManifestError: the first such value.
    """
    if manifest.layout not in LAYOUTS:
        raise ManifestError("an unknown layout", expected=" or ".join(LAYOUTS), found=shown(manifest.layout))
    if manifest.digest_algorithm not in DIGESTS:
        raise ManifestError(
            "an unknown digest algorithm", expected=" or ".join(DIGESTS), found=shown(manifest.digest_algorithm)
        )
    try:
        check_align(manifest.align)
    except ConfigError as error:
        raise ManifestError(error.what, found=manifest.align) from error
    if not _NAME.fullmatch(manifest.name):
        raise ManifestError("the dataset's name is not a plain file name", found=shown(manifest.name))
    names = [shard.name for shard in manifest.shards]
    for name in names:
        check_shard_name(name)
    if len(set(names)) != len(names):
        raise ManifestError("two shards have one name")
    known = set(names)
    for split, members in manifest.splits.items():
        if not set(members) <= known:
            raise ManifestError(f"the split {shown(split)} names a shard that is not there")
    _check_digests(manifest)
    _check_totals(manifest)


def check_shard_name(name: str) -> None:
    """Refuse a name that must not become a path; those of the shard's index files come from it.

    Raises:
        ManifestError: it is none of a shard.
    """
    if not is_file_name(name) or not name.endswith(".tar") or name in (".tar", "index.tar"):
        raise ManifestError("a shard's name is a plain file name that ends in .tar", found=shown(name))


def is_file_name(name: object) -> bool:
    """Tell whether a value from a file is a name that a file of a dataset may have."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _check_digests(manifest: Manifest) -> None:
    records = [manifest.index, *([manifest.rejected] if manifest.rejected else [])]
    records += [record for shard in manifest.shards for record in (shard.index, shard.dali_index)]
    digits = _HEX_DIGITS[manifest.digest_algorithm]
    for digest in [shard.digest for shard in manifest.shards] + [record.digest for record in records]:
        if len(digest) != digits or digest.strip("0123456789abcdef"):
            raise ManifestError(
                "not a digest", expected=f"{digits} hex digits ({manifest.digest_algorithm})", found=shown(digest)
            )


def _check_totals(manifest: Manifest) -> None:
    shards, totals = manifest.shards, manifest.totals
    sums = {name: sum(getattr(s, name) for s in shards) for name in ("samples", "payload", "padding", "bytes")}
    sums |= {"shards": len(shards), "headers": sums["bytes"] - sums["payload"] - sums["padding"]}
    for name, expected in sums.items():
        if getattr(totals, name) != expected:
            raise ManifestError(f"the total {name!r} is not that of the shards", expected=expected,
                                found=getattr(totals, name))  # fmt: skip


def shown(value: object) -> str:
    """Return a few printable characters of a value from a file."""
    return repr(value)[:80] if isinstance(value, str | int | float | None) else type(value).__name__
