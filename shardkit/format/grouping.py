"""Members of a foreign shard, joined to samples after WebDataset's rules.

A name is cut at the first dot of its base name: before it the key, after it the extension, lower-cased. Members of one
key that follow each other are a sample; directories, names without a dot and WebDataset's own `__meta__` names are
passed over and part nothing.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.format.foreign_tar import MemberKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardkit.format.foreign_tar import Member

__all__ = ["IMAGE_EXTENSIONS", "ForeignSample", "SampleVerdict", "group_members", "split_name"]

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
"""What may be a sample's image, in the order in which one of several is chosen."""

_META = re.compile(r"__[^/]*__($|/)")


class SampleVerdict(enum.Enum):
    """What is wrong with a sample. The value is the sentence, `code` the word for reports."""

    NOT_ADJACENT = "other samples stand between its members"
    DUPLICATE_KEY = "a sample of the same key stands before"
    DUPLICATE_MEMBER = "two members have the same extension"
    REFUSED_MEMBER = "one of its members was refused"
    NO_IMAGE = "there is no jpg, jpeg, png or webp"
    SEVERAL_IMAGES = "there are several images; one was chosen"

    @property
    def code(self) -> str:
        """Lower-case words joined by hyphens, stable.

        >>> SampleVerdict.NOT_ADJACENT.code
        'not-adjacent'
        """
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignSample:
    """Members of one key that follow each other."""

    key: str
    members: Mapping[str, Member]
    """By extension without its dot, lower-cased, in stored order; of a repeated extension the first."""
    image: str | None
    """The extension of the member that is the image; all others are further members."""
    end: int
    """The first byte after its last member's last block."""
    verdicts: frozenset[SampleVerdict]

    @property
    def start(self) -> int:
        """Offset in the file of its first header; bytes."""
        return next(iter(self.members.values())).start

    @property
    def usable(self) -> bool:
        """Whether it may be loaded: several images are no obstacle."""
        return self.verdicts <= {SampleVerdict.SEVERAL_IMAGES}


@dataclass(slots=True)
class _Group:
    """A sample that members are still added to."""

    key: str
    members: dict[str, Member]
    end: int
    verdicts: set[SampleVerdict]


def split_name(name: str) -> tuple[str, str] | None:
    """Return key and extension of a member, None when it belongs to no sample.

    >>> split_name("train/n01/0001.Left.JPG"), split_name("v1.2/readme")
    (('train/n01/0001', 'left.jpg'), None)
    """
    base = name.rfind("/") + 1
    dot = name.find(".", base)
    if dot < 0:
        return None
    # A hidden file: WebDataset takes its folder for the key, as long as no dot is in the folder's own name.
    if dot == base and (not base or "." in name[: base - 1].rpartition("/")[2]):
        return None
    return name[:dot], name[dot + 1 :].lower()


def group_members(members: Iterable[Member]) -> Sequence[ForeignSample]:
    """Join members to samples, in stored order; nothing is dropped but what belongs to no sample.

    Every group of adjacent members is a sample of its own, also where its key stood before: the verdicts tell. Of
    samples with the same key and the same extensions the first is usable; of one that was torn apart no piece is.

    Args:
        members: of one archive, in stored order; refused ones spoil the sample that their name belongs to.
    """
    groups: list[_Group] = []
    seen: dict[str, list[_Group]] = {}
    refused: set[str] = set()
    for member in members:
        parts = None if _META.match(member.name) else split_name(member.name)
        if parts is None:
            continue
        key, extension = parts
        if member.refusal is not None:
            refused.add(key)
        elif member.kind is MemberKind.FILE:
            if not groups or groups[-1].key != key:
                groups.append(_Group(key, {}, member.end, set()))
                seen.setdefault(key, []).append(groups[-1])
            _add(groups[-1], extension, member)
    for pieces in seen.values():
        _compare(pieces)
    for key in refused & seen.keys():
        for group in seen[key]:
            group.verdicts.add(SampleVerdict.REFUSED_MEMBER)
    return [_sample(group) for group in groups]


def _add(group: _Group, extension: str, member: Member) -> None:
    if extension in group.members:
        group.verdicts.add(SampleVerdict.DUPLICATE_MEMBER)
    group.members.setdefault(extension, member)
    group.end = member.end


def _compare(pieces: Sequence[_Group]) -> None:
    """Judge the groups of one key: a repeated extension is another sample, all else a piece of the first."""
    first, *others = pieces
    extensions = set(first.members)
    for piece in others:
        if extensions.isdisjoint(piece.members):
            first.verdicts.add(SampleVerdict.NOT_ADJACENT)
            piece.verdicts.add(SampleVerdict.NOT_ADJACENT)
            extensions |= piece.members.keys()
        else:
            piece.verdicts.add(SampleVerdict.DUPLICATE_KEY)


def _sample(group: _Group) -> ForeignSample:
    images = [extension for extension in IMAGE_EXTENSIONS if extension in group.members]
    if len(images) != 1:
        group.verdicts.add(SampleVerdict.SEVERAL_IMAGES if images else SampleVerdict.NO_IMAGE)
    return ForeignSample(
        key=group.key, members=group.members, image=images[0] if images else None, end=group.end,
        verdicts=frozenset(group.verdicts),
    )  # fmt: skip
