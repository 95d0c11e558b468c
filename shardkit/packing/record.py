"""What an unfinished pack was told: only a pack that is told the same may go on with it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardkit.format.checksum import hex_digest
from shardkit.format.strict_json import dump_json
from shardkit.running.sealed_record import are_file_names, are_texts, unseal

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PackRecord", "difference", "load_record"]

_DIGEST = "xxh3-128"
_FREE = "on_error"
"""The option that does not shape a byte: a pack that stopped at a refused source may go on without stopping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackRecord:
    """Everything that the bytes of a pack follow from."""

    shardkit: str
    """Version."""
    options: Mapping[str, Any]
    """As the manifest records them, with the digest of the source list."""
    classes: list[str] | None
    """Class names in label order."""
    plan: str
    """Digest of the plan, with the times of the sources."""
    replaces: list[str] = field(default_factory=list, compare=False)
    """Names of an earlier pack's files, which this one removes before it makes its own."""

    @property
    def identity(self) -> bytes:
        """A digest that parts this plan's journal from any other's."""
        return hex_digest(_DIGEST, dump_json([self.shardkit, self.shaping, self.classes, self.plan]).encode()).encode()

    @property
    def shaping(self) -> dict[str, Any]:
        """The options that shape the bytes."""
        return {name: value for name, value in self.options.items() if name != _FREE}


def load_record(data: bytes) -> PackRecord | None:
    """Return the record whose `seal` this is; None when it is damaged, or of a shardkit that records more."""
    try:
        record = PackRecord(**(unseal(data) or {}))
    except TypeError:
        return None
    lists = (record.classes is None or are_texts(record.classes)) and are_file_names(record.replaces)
    texts = isinstance(record.shardkit, str) and isinstance(record.plan, str)
    return record if isinstance(record.options, dict) and lists and texts else None


def difference(before: PackRecord, now: PackRecord) -> str:
    """Say in what two packs differ; an empty text when one may go on with the other.

    An option changes the order of the sources, too, so the sources are named only when nothing else differs.
    """
    old, new = before.shaping, now.shaping
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    texts = [
        f"{name} was {_shown(old.get(name))} and is {_shown(new.get(name))}" for name in names if name != "source_list"
    ]
    if before.shardkit != now.shardkit:
        texts.append(f"shardkit was {before.shardkit} and is {now.shardkit}")
    if before.classes != now.classes:
        texts.append("another class list")
    if not texts and "source_list" in names:
        texts.append("another list of sources")
    if not texts and before.plan != now.plan:
        texts.append("sources were modified in the meantime")
    return ", ".join(texts)


def _shown(value: object) -> str:
    return "not given" if value is None else json.dumps(value)
