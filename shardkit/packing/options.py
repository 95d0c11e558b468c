"""What a pack is told to do: one frozen value, checked once."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardkit.errors import ConfigError
from shardkit.escaping import escape
from shardkit.format.checksum import DIGESTS
from shardkit.format.layout import DEFAULT_ALIGN, check_align

__all__ = ["Check", "KeyRule", "Labels", "OnError", "PackOptions", "ShardOptions"]

Check = Literal["header", "decode", "none"]
KeyRule = Literal["relpath", "stem", "index"]
Labels = Literal["dir", "column", "none"]
OnError = Literal["skip", "fail"]

_CHOICES = {"check": ("header", "decode", "none"), "on_error": ("skip", "fail"), "digest": DIGESTS}
_PACK_CHOICES = {"key": ("relpath", "stem", "index"), "labels": (None, "dir", "column", "none")}
_OPTIONAL = ("shard_size", "shard_samples", "shards", "resize")
_WHOLE = (*_OPTIONAL, "align", "seed", "max_pixels", "max_bytes", "quality")
_SWITCHES = ("shuffle", "convert", "baseline")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """The options that shape shards, wherever their images come from; recorded in the manifest."""

    name: str
    """Name of the dataset, the start of every shard's name: a-z, 0-9, `-` and `_`; at most 64 characters."""
    shard_size: int | None = 1 << 30
    """Largest size of a shard in bytes; a single larger image gets a shard of its own."""
    shard_samples: int | None = None
    """Largest number of samples in a shard."""
    shards: int | None = None
    """Number of shards, instead of a limit."""
    align: int = DEFAULT_ALIGN
    """Bytes that every image's payload offset is a multiple of; a power of two from 512 to 524288."""
    shuffle: bool = True
    """Pack in an order drawn from `seed` instead of source order."""
    seed: int = 0
    """Seed of the order; 0 to 2^64 - 1."""
    check: Check = "header"
    """What an image must pass: `header` (JPEG markers to the end), `decode` (Pillow decodes it and gives no warning),
    `none`. No check sees flipped bits that still decode to a picture."""
    max_pixels: int = 178_956_970
    """Largest width x height; Pillow's own limit."""
    max_bytes: int = 128 << 20
    """Largest source file. A worker holds one source at a time, so this bounds its memory."""
    on_error: OnError = "skip"
    """What a refused source does: `skip` records it, `fail` stops the run."""
    convert: bool = False
    """Re-encode PNG, WebP and GIF images that are named as JPEGs, instead of refusing them."""
    resize: int | None = None
    """Pixels of the shorter side; larger images are scaled down and re-encoded, smaller ones kept."""
    quality: int = 90
    """JPEG quality of what is re-encoded, 1 to 100."""
    baseline: bool = False
    """Store JPEGs that a GPU's engines do not take because they are progressive, extended or of several scans as
    baseline ones with the same coefficients and markers; what `resize` or `convert` encodes is baseline anyway."""
    digest: str = DIGESTS[0]
    """Digest algorithm of shards and indexes."""

    def __post_init__(self) -> None:
        """Refuse what cannot be served.

        Raises:
            ConfigError: names the option, what it takes and what it got.
        """
        self._check_choices(_CHOICES, _SWITCHES)
        for option in _WHOLE:
            self._take_whole(option)
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError("a dataset's name is a-z, 0-9, - and _", found=ascii(self.name), remedy="give --name")
        self._check_limits()
        check_align(self.align)

    def _check_choices(self, choices: Mapping[str, Sequence[str | None]], switches: Sequence[str]) -> None:
        for option, known in choices.items():
            given = getattr(self, option)
            if given not in known:
                raise ConfigError(f"unknown {option}", expected=" or ".join(str(c) for c in known if c),
                                  found=ascii(given))  # fmt: skip
        for option in switches:
            if not isinstance(getattr(self, option), bool):
                raise ConfigError(f"{option} is True or False", found=repr(getattr(self, option)))

    def _take_whole(self, option: str) -> None:
        """Make a whole number of numpy's, too, the int that the manifest can record."""
        value = getattr(self, option)
        if value is None and option in _OPTIONAL:
            return
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise ConfigError(f"{option} is a whole number", found=ascii(value))
        object.__setattr__(self, option, operator.index(value))

    def _check_limits(self) -> None:
        if self.shard_samples is not None and self.shards is not None:
            raise ConfigError("give one of --shard-size, --shard-samples and --shards")
        if self.shard_size is None and self.shard_samples is None and self.shards is None:
            raise ConfigError("give one of --shard-size, --shard-samples and --shards")
        for option in (*_OPTIONAL, "max_pixels", "max_bytes"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ConfigError(f"{option} is at least 1", found=value)
        if not 1 <= self.quality <= 100:
            raise ConfigError("quality is 1 to 100", found=self.quality)
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError("seed is 0 to 2^64 - 1", found=self.seed)
        if self.max_bytes >= 1 << 32:
            raise ConfigError("max_bytes is below 4 GiB, the format's limit for an image", found=self.max_bytes)

    def recorded(self) -> dict[str, Any]:
        """Return the options as the manifest records them: JSON values."""
        record = dataclasses.asdict(self)
        if not self.baseline:  # younger than the first packs, whose bytes stay as they are
            del record["baseline"]
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions(ShardOptions):
    """Every option that shapes the packed bytes; recorded in the manifest."""

    labels: Labels | None = None
    """Where labels come from: `dir` (first folder level), `column` (of a list), `none`. Default: `dir` for a folder
    that has folders, `column` for a list that has one."""
    classes: tuple[str, ...] | None = None
    """Class names in label order, as manifests state them (a byte that is not UTF-8, and the percent sign, as `%HH`);
    None takes them from the source, sorted."""
    key: KeyRule = "relpath"
    """Where keys come from: path without extension, file name without extension, or running number."""
    follow_symlinks: bool = False
    """Follow symbolic links to outside the source folder too."""

    def __post_init__(self) -> None:
        """Refuse what cannot be served.

        Raises:
            ConfigError: names the option, what it takes and what it got.
        """
        ShardOptions.__post_init__(self)  # `super()` does not see the class that slots have replaced
        self._check_choices(_PACK_CHOICES, ("follow_symlinks",))
        self._check_classes()

    def _check_classes(self) -> None:
        classes: Any = self.classes  # Any: checked here
        if classes is None:
            return
        listed = isinstance(classes, Sequence) and not isinstance(classes, str)
        if not listed or not all(isinstance(name, str) and name for name in classes):
            raise ConfigError("the class list is a sequence of names", found=ascii(classes)[:80])
        if not classes:
            raise ConfigError("the class list is empty")
        twice = [name for name, count in Counter(classes).items() if count > 1]
        if twice:
            raise ConfigError("a class name stands twice in the class list", found=escape(twice[0]))
        if self.labels == "none":
            raise ConfigError("a class list needs labels", remedy="leave the class list or --labels none away")
        object.__setattr__(self, "classes", tuple(classes))

    def recorded(self) -> dict[str, Any]:
        """Return the options as the manifest records them; the classes have a field of their own there."""
        record = ShardOptions.recorded(self)
        del record["classes"]
        return record
