"""Members of a foreign shard, joined to samples after WebDataset's rules.

A name is cut at the first dot of its base name: before it the key, after it the extension, lower-cased. Members of one
key that follow each other are a sample; directories, names without a dot and WebDataset's own `__meta__` names are
passed over and part nothing.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shardkit.format.foreign_member import MemberKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardkit.format.foreign_member import Member

__all__ = ["IMAGE_EXTENSIONS", "ForeignSample", "SampleVerdict", "group_members", "split_name"]

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
"""What may be a sample's image, in the order in which one of several is chosen."""

_META = re.compile(r"__[^/]*__($|/)")
_PLAIN_FILE = MemberKind.FILE


class SampleVerdict(enum.Enum):
    """What is wrong with a sample. The value is the sentence, `code` the word for reports."""

    NOT_ADJACENT = "other samples stand between its members"
    DUPLICATE_KEY = "a sample of the same key stands before"
    DUPLICATE_MEMBER = "two members have the same extension"
    REFUSED_MEMBER = "one of its members was refused"
    NO_IMAGE = "no member has the extension of an image"
    SEVERAL_IMAGES = "there are several images; one was chosen"

    @property
    def code(self) -> str:
        """Lower-case words joined by hyphens, stable.

        >>> SampleVerdict.NOT_ADJACENT.code
        'not-adjacent'
        """
        return self.name.lower().replace("_", "-")


class ForeignSample(NamedTuple):
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
        return self.verdicts <= _NO_OBSTACLE


_NO_VERDICT: frozenset[SampleVerdict] = frozenset()
_NO_OBSTACLE = frozenset({SampleVerdict.SEVERAL_IMAGES})


@dataclass(slots=True)
class _Group:
    """A sample that members are still added to."""

    key: str
    members: dict[str, Member]
    last: Member
    verdicts: frozenset[SampleVerdict] = _NO_VERDICT


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


def sample_parts(name: str) -> tuple[str, str] | None:
    """Return what `split_name` does, but None for the names that WebDataset keeps for itself, too."""
    return None if name.startswith("__") and _META.match(name) else split_name(name)


def group_members(
    members: Iterable[Member], image_extensions: Sequence[str] = IMAGE_EXTENSIONS
) -> Sequence[ForeignSample]:
    """Join members to samples, in stored order; nothing is dropped but what belongs to no sample.

    Every group of adjacent members is a sample of its own, also where its key stood before: the verdicts tell. Of
    samples with the same key and the same extensions the first is usable; of one that was torn apart no piece is.

    Args:
        members: of one archive, in stored order; refused ones spoil the sample that their name belongs to.
        image_extensions: what may be a sample's image, lower-cased, in the order in which one of several is chosen.
    """
    groups = _Grouping()
    for member in members:
        groups.add(member)
    return groups.samples(image_extensions)


class _Grouping:
    """Joins members as they come."""

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._last: _Group | None = None
        self._first: dict[str, _Group] = {}
        self._pieces: dict[str, list[_Group]] = {}
        """The groups of each key that stands more than once."""
        self._refused: set[str] = set()

    def add(self, member: Member) -> None:
        parts = sample_parts(member.name)
        if parts is None:
            return
        key, extension = parts
        if member.refusal is not None:
            self._refused.add(key)
            return
        if member.kind is not _PLAIN_FILE:
            return
        group = self._last
        if group is None or group.key != key:
            group = self._begin(key, member)
        if extension in group.members:
            group.verdicts |= {SampleVerdict.DUPLICATE_MEMBER}
        else:
            group.members[extension] = member
        group.last = member

    def _begin(self, key: str, member: Member) -> _Group:
        group = self._last = _Group(key, {}, member)
        self._groups.append(group)
        first = self._first.setdefault(key, group)
        if first is not group:
            self._pieces.setdefault(key, [first]).append(group)
        return group

    def samples(self, image_extensions: Sequence[str]) -> Sequence[ForeignSample]:
        for pieces in self._pieces.values():
            _compare(pieces)
        for key in self._refused & self._first.keys():
            for group in self._pieces.get(key) or [self._first[key]]:
                group.verdicts |= {SampleVerdict.REFUSED_MEMBER}
        return [_sample(group, image_extensions) for group in self._groups]


def _compare(pieces: Sequence[_Group]) -> None:
    """Judge the groups of one key: a repeated extension is another sample, all else a piece of the first."""
    first, *others = pieces
    extensions = set(first.members)
    for piece in others:
        if extensions.isdisjoint(piece.members):
            first.verdicts |= {SampleVerdict.NOT_ADJACENT}
            piece.verdicts |= {SampleVerdict.NOT_ADJACENT}
            extensions |= piece.members.keys()
        else:
            piece.verdicts |= {SampleVerdict.DUPLICATE_KEY}


def _sample(group: _Group, image_extensions: Sequence[str]) -> ForeignSample:
    members, verdicts = group.members, group.verdicts
    images = [extension for extension in image_extensions if extension in members]
    if len(images) != 1:
        verdicts |= {SampleVerdict.SEVERAL_IMAGES if images else SampleVerdict.NO_IMAGE}
    return ForeignSample(group.key, members, images[0] if images else None, group.last.end, verdicts)
