"""The samples of a foreign shard as columns: what `grouping` makes of its members, for many of them at once.

`grouping` has the word. Here only shards are joined where it has nothing to say: samples whose keys all differ, members
that follow each other, extensions that differ within a sample, names in plain ASCII. One thing that is otherwise, and
the whole shard goes the careful way, to the same columns.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from shardkit.format.foreign_member import MemberKind, as_members
from shardkit.format.grouping import SampleVerdict, group_members, sample_parts
from shardkit.format.plain_headers import NAME_BYTES, PlainRun
from shardkit.format.tar import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    from shardkit.format.foreign_member import Member, Run
    from shardkit.format.grouping import ForeignSample

    Texts: TypeAlias = npt.NDArray[np.bytes_] | npt.NDArray[np.object_]
    Ints: TypeAlias = npt.NDArray[np.int64]

__all__ = ["SampleColumns", "SampleJoiner", "columns_of"]

_EXTENSION_BYTES = 16
_MOST_EXTENSIONS = 60
"""Told apart by a bit each."""
_TOGETHER = 1024
"""Members that came one by one are cut together."""
_COLUMNS = np.arange(128, dtype=np.uint8)
_UNDERSCORE, _SLASH, _DOT = b"_/."


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleColumns:
    """Samples, and their members sample by sample, both in stored order."""

    keys: Texts
    """Shape [samples]: ASCII bytes where all of them are, else texts."""
    starts: Ints
    """Shape [samples], offset of the first header; bytes."""
    ends: Ints
    """Shape [samples], the first byte after the last member's last block."""
    images: Ints
    """Shape [samples], row of the member that is the image; -1 without one."""
    labels: Ints
    """Shape [samples], row of the cls member; -1 without one."""
    objects: Ints
    """Shape [samples], row of the json member; -1 without one."""
    obstacles: Mapping[int, frozenset[SampleVerdict]]
    """Of each sample that may not be loaded: why."""
    owners: Ints
    """Shape [rows], the sample that each member belongs to; rising."""
    names: Texts
    """Shape [rows], of the members: as the keys, bytes that are not UTF-8 as lone surrogates."""
    codes: Ints
    """Shape [rows], which of `extensions`."""
    offsets: Ints
    """Shape [rows], of the payloads; bytes."""
    sizes: Ints
    """Shape [rows], payload bytes."""
    extensions: Sequence[str]
    """Lower-cased, without the first dot."""

    def __len__(self) -> int:
        """Return how many samples there are."""
        return len(self.starts)


def columns_of(samples: Sequence[ForeignSample]) -> SampleColumns:
    """Return samples that were joined one by one."""
    members = [member for sample in samples for member in sample.members.values()]
    codes: dict[str, int] = {}
    for sample in samples:
        for extension in sample.members:
            codes.setdefault(extension, len(codes))
    counts = [len(sample.members) for sample in samples]
    firsts = np.cumsum([0, *counts])[:-1].tolist()
    rows = []
    for sample, first in zip(samples, firsts, strict=True):
        place = {name: first + at for at, name in enumerate(sample.members)}
        image = -1 if sample.image is None else place[sample.image]
        rows.append([image, place.get("cls", -1), place.get("json", -1)])
    images, labels, objects = np.array(rows, np.int64).reshape(-1, 3).T
    return SampleColumns(
        keys=_objects(sample.key for sample in samples), starts=_ints(sample.start for sample in samples),
        ends=_ints(sample.end for sample in samples), images=images, labels=labels, objects=objects,
        obstacles={number: sample.verdicts for number, sample in enumerate(samples) if not sample.usable},
        owners=np.repeat(np.arange(len(samples)), counts), names=_objects(member.name for member in members),
        codes=_ints(codes[extension] for sample in samples for extension in sample.members),
        offsets=_ints(member.offset for member in members), sizes=_ints(member.size for member in members),
        extensions=tuple(codes),
    )  # fmt: skip


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int64)


def _objects(values: Iterable[str]) -> npt.NDArray[np.object_]:
    return np.fromiter(values, np.object_)


class _Part(NamedTuple):
    """Members of samples; each column [members]."""

    names: npt.NDArray[np.bytes_]
    starts: Ints
    offsets: Ints
    sizes: Ints
    codes: Ints
    begins: npt.NDArray[np.bool_]
    """Whether the key is another one than that of the member before."""
    keys: npt.NDArray[np.bytes_]
    """Of the members that begin a sample."""


class SampleJoiner:
    """Takes the members of a shard as they come, and joins them when all are there."""

    def __init__(self) -> None:
        """Begin without a member."""
        self.runs: list[Run] = []
        """What came so far."""
        self.refused: list[Member] = []
        """Members that were not taken, in stored order; whole once the columns were asked for."""
        self.extensions: dict[str, int] = {}
        """The code of each extension that was met, lower-cased."""
        self._words: dict[tuple[int, int], int] = {}
        """The code of each extension as it is written, 16 bytes in two words."""
        self._waiting: list[Member] = []
        self._parts: list[_Part] = []
        self._last_key = np.bytes_(b"")
        self._odd = False
        """Whether something was met that is for the careful way."""

    def add(self, run: Run) -> Ints | None:
        """Take the next members.

        Returns:
            For a run in columns the code of each one's extension, -1 for a member that is of no sample; None for other
            runs, and when something was met that has to be asked one by one.
        """
        self.runs.append(run)
        if isinstance(run, PlainRun):
            self._settle()
            return self._take(run.names, run.starts, run.offsets, run.sizes)
        self._waiting += run
        if len(self._waiting) >= _TOGETHER:
            self._settle()
        return None

    def columns(self, image_extensions: Sequence[str]) -> SampleColumns:
        """Return the samples of all members.

        Args:
            image_extensions: as `group_members` takes them.
        """
        self._settle()
        found = None if self._odd or not self._parts else self._joined(image_extensions)
        if found is None:
            members = itertools.chain.from_iterable(map(as_members, self.runs))
            found = columns_of(group_members(members, image_extensions))
        return found

    def _settle(self) -> None:
        """Take the members that came one by one."""
        members, self._waiting = self._waiting, []
        self.refused += [member for member in members if member.refusal is not None]
        # Names that belong to a sample, or spoil one: for the careful way.
        self._odd |= any(one.refusal is not None and sample_parts(one.name) is not None for one in members)
        files = [member for member in members if member.refusal is None and member.kind is MemberKind.FILE]
        names = [member.name for member in files]
        if self._odd or not files:
            return
        if not all(map(str.isascii, names)) or max(map(len, names)) > NAME_BYTES:
            self._odd = True
            return
        texts = np.array([name.encode() for name in names], f"S{NAME_BYTES}")
        places = np.array([(member.start, member.offset, member.size) for member in files], np.int64)
        self._take(texts, *np.ascontiguousarray(places.T))

    def _take(self, names: npt.NDArray[np.bytes_], starts: Ints, offsets: Ints, sizes: Ints) -> Ints | None:
        if self._odd:
            return None
        length = names.dtype.itemsize
        # Behind the longest name there are zeros for an extension, and whatever is looked at of it.
        octets = np.zeros((len(names), length + _EXTENSION_BYTES + 1), np.uint8)
        octets[:, :length] = names.view(np.uint8).reshape(-1, length)
        split = self._split(octets)
        if split is None:
            self._odd = True
            return None
        dots, codes = split
        keys = (octets[:, :length] * (dots[:, None] > _COLUMNS[:length])).view(f"S{length}")[:, 0]
        in_sample = codes >= 0
        if not in_sample.any():
            return codes
        rows = slice(None) if in_sample.all() else in_sample
        columns, keys = (names[rows], starts[rows], offsets[rows], sizes[rows], codes[rows]), keys[rows]
        begins = np.concatenate(([not self._parts or keys[0] != self._last_key], keys[1:] != keys[:-1]))
        self._parts.append(_Part(*columns, begins, keys[begins]))
        self._last_key = keys[-1]
        return codes

    def _split(self, octets: npt.NDArray[np.uint8]) -> tuple[Ints, Ints] | None:
        """Return of each name (shape [n, bytes]) where its key ends, and its extension's code; None if one is odd."""
        columns = _COLUMNS[: octets.shape[1]]
        bases = ((octets == _SLASH) * (columns + np.uint8(1))).max(axis=1)
        dots = ((octets == _DOT) & (bases[:, None] <= columns)).argmax(axis=1)
        flat, at = octets.reshape(-1), np.arange(0, octets.size, octets.shape[1]) + dots
        dotted = (flat[at] == _DOT) & (dots >= bases)
        # Hidden files, and extensions that are longer; then what WebDataset keeps for itself.
        odd = dotted & ((dots == bases) | (flat[at + 1 + _EXTENSION_BYTES] != 0))
        if (odd | ((octets[:, 0] == _UNDERSCORE) & (octets[:, 1] == _UNDERSCORE))).any():
            return None
        words = np.ndarray((flat.size - 7,), "<u8", flat, 0, (1,))
        codes = self._codes(words[at + 1], words[at + 9], dotted)
        return None if codes is None else (dots, codes)

    def _codes(
        self, first: npt.NDArray[np.uint64], second: npt.NDArray[np.uint64], dotted: npt.NDArray[np.bool_]
    ) -> Ints | None:
        codes = np.full(len(first), -1)
        for (low, high), code in self._words.items():
            codes[(first == low) & (second == high) & dotted] = code
        while (left := np.flatnonzero(dotted & (codes < 0))).size:
            low, high = int(first[left[0]]), int(second[left[0]])
            text = (low | high << 64).to_bytes(_EXTENSION_BYTES, "little").rstrip(b"\0").decode().lower()
            if len(self._words) == _MOST_EXTENSIONS:
                return None
            code = self._words[low, high] = self.extensions.setdefault(text, len(self.extensions))
            codes[(first == low) & (second == high) & dotted] = code
        return codes

    def _joined(self, image_extensions: Sequence[str]) -> SampleColumns | None:
        """Return the samples, None when some are for the careful way."""
        names, starts, offsets, sizes, codes, begins, keys = map(np.concatenate, zip(*self._parts, strict=True))
        firsts, owners, bits = np.flatnonzero(begins), np.cumsum(begins) - 1, 1 << codes
        # A sum has the bits of all that was added unless one came twice.
        if (np.add.reduceat(bits, firsts) != np.bitwise_or.reduceat(bits, firsts)).any():
            return None
        if len(set(keys.tolist())) < len(keys):
            return None

        def rows(extension: str) -> Ints:
            found, where = np.full(len(firsts), -1), np.flatnonzero(codes == self.extensions.get(extension, -1))
            found[owners[where]] = where
            return found

        images = np.full(len(firsts), -1)
        for extension in reversed(image_extensions):
            there = rows(extension)
            images = np.where(there < 0, images, there)
        lasts = np.append(firsts[1:], len(names)) - 1
        none = frozenset({SampleVerdict.NO_IMAGE})
        return SampleColumns(
            keys=keys, starts=starts[firsts], ends=(offsets[lasts] + sizes[lasts] + BLOCK - 1) & -BLOCK,
            images=images, labels=rows("cls"), objects=rows("json"),
            obstacles=dict.fromkeys(np.flatnonzero(images < 0).tolist(), none), owners=owners, names=names,
            codes=codes, offsets=offsets, sizes=sizes, extensions=tuple(self.extensions),
        )  # fmt: skip
