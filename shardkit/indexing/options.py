"""What an indexing run is told to do: one frozen value, checked once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardkit.errors import ConfigError
from shardkit.format.checksum import DIGESTS
from shardkit.format.grouping import IMAGE_EXTENSIONS

__all__ = ["Facts", "IndexOptions", "Labels"]

Facts = Literal["full", "header", "none"]
Labels = Literal["cls", "none"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "facts": ("full", "header", "none"),
    "labels": ("cls", "none"),
    "digest": DIGESTS,
}
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_EXTENSION = re.compile(r"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*")
_TAKEN = ("cls", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexOptions:
    """Every option that shapes the written bytes; recorded in the manifest."""

    name: str
    """Name of the dataset: a-z, 0-9, `-` and `_`; at most 64 characters."""
    facts: Facts = "full"
    """What is found out about images: `full` reads every byte once, for CRC-32C, digests and JPEG facts; `header` reads
    the beginning of each image, for its facts; `none` reads no image."""
    image_extensions: tuple[str, ...] = IMAGE_EXTENSIONS
    """What may be a sample's image, the preferred first; lower case, without the first dot."""
    labels: Labels = "cls"
    """Where labels come from: the number in the `cls` member, or nowhere."""
    digest: str = DIGESTS[0]
    """Digest algorithm of shards and indexes."""

    def __post_init__(self) -> None:
        """Refuse what cannot be served.

        Raises:
            ConfigError: names the option, what it takes and what it got.
        """
        for option, choices in _CHOICES.items():
            if getattr(self, option) not in choices:
                raise ConfigError(
                    f"unknown {option}", expected=" or ".join(choices), found=ascii(getattr(self, option))
                )
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError("a dataset's name is a-z, 0-9, - and _", found=ascii(self.name), remedy="give --name")
        given: Any = self.image_extensions  # Any: checked here
        if not isinstance(given, Sequence) or isinstance(given, str) or not given:
            raise ConfigError("the image extensions are a sequence of texts", found=ascii(given)[:80])
        extensions = tuple(text.lower() if isinstance(text, str) else text for text in given)
        for extension in extensions:
            if not isinstance(extension, str) or not _EXTENSION.fullmatch(extension) or extension in _TAKEN:
                raise ConfigError("not the extension of an image", expected="such as jpg or left.jpg; not cls or json",
                                  found=ascii(extension)[:80])  # fmt: skip
        object.__setattr__(self, "image_extensions", tuple(dict.fromkeys(extensions)))

    def recorded(self) -> dict[str, Any]:
        """Return the options as the manifest records them: JSON values."""
        return dataclasses.asdict(self) | {"image_extensions": list(self.image_extensions)}
