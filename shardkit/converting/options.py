"""What a conversion is told to do: one frozen value, checked once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

from shardkit.errors import ConfigError
from shardkit.escaping import escape
from shardkit.packing.options import ShardOptions

__all__ = ["ConvertOptions", "KeyRule", "OtherMembers", "parse_split"]

KeyRule = Literal["keep", "shard", "index"]
OtherMembers = Literal["refuse", "drop"]

_CHOICES = {"key": ("keep", "shard", "index"), "other_members": ("refuse", "drop")}
_COLUMNS = ("image_column", "label_column", "key_column", "json_column")
_PART = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_MAX_DIGITS = 18
_SHARE = re.compile(rf"[0-9]{{1,3}}(\.[0-9]{{1,{_MAX_DIGITS}}})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions(ShardOptions):
    """Every option that shapes the converted bytes; recorded in the manifest."""

    shuffle: bool = False
    """Store in an order drawn from `seed` over all inputs, instead of theirs."""
    key: KeyRule = "keep"
    """What keys are: `keep` (as they are, made safe where they are not), `shard` (the shard's file name without .tar, a
    slash, the key), `index` (running number over all inputs)."""
    where: str | None = None
    """Condition on the columns of the inputs' indexes (`shardkit.format.where`)."""
    labels: Sequence[str] | Mapping[str, int | str | None] | None = None
    """Class names in label order; or what becomes of each class, by name or number: a name, a number, or None for the
    samples that are left out. None keeps labels and class names."""
    split: Mapping[str, str] | None = None
    """Name to share of each part, e.g. {"train": "0.98", "val": "0.02"}; the shares make 1. Numbers are taken too, a
    float as the decimal that it prints as."""
    part: str | None = None
    """The part of the split that these shards are; set for each by the conversion."""
    other_members: OtherMembers = "refuse"
    """What further members of foreign samples do (captions, masks): `refuse` the whole run, or are dropped."""
    image_column: str | None = None
    """Column of a foreign dataset that holds the images; None takes the only one that can."""
    label_column: str | None = None
    """Column that holds the labels; None takes the only one that can, "" none."""
    key_column: str | None = None
    """Column that holds the keys; None numbers the rows of each."""
    json_column: str | None = None
    """Column of texts, each a whole json member, or empty; None makes json members of the other columns."""

    def __post_init__(self) -> None:
        """Refuse what cannot be served.

        Raises:
            ConfigError: names the option, what it takes and what it got.
        """
        ShardOptions.__post_init__(self)  # `super()` does not see the class that slots have replaced
        self._check_choices(_CHOICES, ())
        if self.where is not None and not isinstance(self.where, str):
            raise ConfigError("where is a text", found=type(self.where).__name__, remedy="e.g. 'width >= 256'")
        for column in _COLUMNS:
            if not isinstance(getattr(self, column), str | None):
                raise ConfigError(f"{column} is the name of a column", found=ascii(getattr(self, column))[:80])
        if self.split is not None:
            object.__setattr__(self, "split", _checked_split(self.split))
        for part in self.split or ():
            if len(f"{self.name}-{part}") > 64 and self.part is None:
                raise ConfigError("the name of a part is too long with that of the dataset",
                                  expected="64 characters", found=f"{self.name}-{part}")  # fmt: skip

    def recorded(self) -> dict[str, Any]:
        """Return the options as the manifest records them: JSON values."""
        record = ShardOptions.recorded(self)
        if self.split is not None:
            record["split"] = dict(self.split)
        for column in _COLUMNS:
            if record[column] is None:  # most have no columns to choose from
                del record[column]
        return record


def parse_split(text: str) -> dict[str, str]:
    """Return name to share of `train=0.98,val=0.02`; `ConvertOptions` checks what they are.

    Raises:
        ConfigError: it is not written like that.

    >>> parse_split("train=0.98,val=0.02")
    {'train': '0.98', 'val': '0.02'}
    """
    parts = [piece.partition("=") for piece in text.split(",")]
    names = [name.strip() for name, _, _ in parts]
    if not all(equals for _, equals, _ in parts) or len(set(names)) < len(names):
        raise ConfigError("a split is NAME=SHARE,NAME=SHARE", found=escape(text[:80]), remedy=_EXAMPLE)
    return dict(zip(names, (share.strip() for _, _, share in parts), strict=True))


_EXAMPLE = "e.g. train=0.98,val=0.02"


def _checked_split(split: Mapping[str, Any]) -> dict[str, str]:
    if not isinstance(split, Mapping) or len(split) < 2:
        raise ConfigError("a split has two parts or more", found=ascii(split)[:80], remedy=_EXAMPLE)
    shares = {name: _decimal(share) for name, share in split.items()}
    for name, share in shares.items():
        if not isinstance(name, str) or not _PART.fullmatch(name):
            raise ConfigError("a part's name is a-z, 0-9, - and _, at most 32 of them", found=ascii(name)[:80])
        if not _SHARE.fullmatch(share) or not Fraction(share):
            raise ConfigError(f"the share of {name} is a decimal number above 0", found=_shown(split[name]),
                              remedy=_EXAMPLE)  # fmt: skip
    total = sum(map(Fraction, shares.values()))
    if total != 1:
        raise ConfigError("the shares of a split make 1", found=f"{float(total):.12g}", remedy=_EXAMPLE)
    return shares


def _decimal(share: object) -> str:
    """Return a share as decimal digits; an empty text for what is no number, or one that no share can be."""
    if isinstance(share, str):
        return share
    if isinstance(share, bool) or not isinstance(share, int | float | Decimal):
        return ""
    number = Decimal(float.__repr__(share)) if isinstance(share, float) else Decimal(share)
    if not number.is_finite() or not 0 < number <= 1 or number.adjusted() < -_MAX_DIGITS:
        return ""
    return format(number, "f")  # never with an exponent


def _shown(share: object) -> str:
    try:
        return ascii(share)[:80]
    except ValueError:  # Python does not print integers of thousands of digits
        return "a number of thousands of digits"
