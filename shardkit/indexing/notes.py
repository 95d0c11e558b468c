"""What is read of a shard's members while they pass by: labels, metadata, facts of images."""

from __future__ import annotations

from array import array
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from shardkit.format.foreign_tar import MemberKind, as_members
from shardkit.format.grouping import sample_parts
from shardkit.format.plain_headers import HeaderBlocks, PlainRun
from shardkit.format.strict_json import MAX_JSON_BYTES, are_json_objects
from shardkit.indexing.images import (
    HEAD_BYTES,
    MAX_IMAGE_BYTES,
    MAX_LABEL_BYTES,
    NO_FACTS,
    ImageFacts,
    facts_columns,
    head_facts,
    parse_labels,
    whole_facts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import TypeAlias

    import numpy.typing as npt

    from shardkit.format.foreign_tar import Member
    from shardkit.indexing.options import IndexOptions
    from shardkit.indexing.scan import Source

    Ints: TypeAlias = npt.NDArray[np.int64]
    _Read: TypeAlias = Callable[[int, int], bytes | memoryview]
    _Take: TypeAlias = Callable[[list[int], list[int], _Read], None]

__all__ = ["Notes"]


_TOGETHER_BYTES = 1 << 20
"""Of members that are looked at together, json members and images: of larger ones the look itself takes time."""
_NOTHING = -1
_NO_ROW = (NO_FACTS.crc32c, NO_FACTS.whole, *NO_FACTS.facts)


class _Column:
    """Rows of numbers by payload offset, which rises."""

    def __init__(self, none: tuple[int, ...]) -> None:
        self._none = none
        self._places = array("q")
        self._values = array("q")

    def extend(self, places: Iterable[int], values: Iterable[int]) -> None:
        """Take rows, their numbers one after the other."""
        self._places.extend(places)
        self._values.extend(values)

    def at(self, places: Ints) -> Ints:
        """Return the rows of some offsets, shape [offsets, numbers]."""
        known = np.append(np.array(self._places), _NOTHING)
        rows = np.append(np.array(self._values), self._none).reshape(-1, len(self._none))
        found = np.searchsorted(known[:-1], places)
        return rows[np.where(known[found] == places, found, len(known) - 1)]


class Notes:
    """What was read, by the payload offset of each member."""

    def __init__(self, options: IndexOptions, source: Source) -> None:
        """Begin with nothing.

        Args:
            options: say of which extensions there is something to ask.
            source: of the members' bytes.
        """
        self._source = source
        self._full = options.facts == "full"
        self._labels = _Column((_NOTHING,))
        self._objects = _Column((0,))
        self._images = _Column(_NO_ROW)
        self._takes: dict[str, _Take] = {"json": self._take_objects}
        if options.labels == "cls":
            self._takes["cls"] = self._take_labels
        if options.facts != "none":
            self._takes |= dict.fromkeys(options.image_extensions, self._take_images)

    def labels(self, places: Ints) -> Ints:
        """Return the class numbers that cls members state, -1 of one that states none."""
        return self._labels.at(places)[:, 0]

    def objects(self, places: Ints) -> npt.NDArray[np.bool_]:
        """Return whether json members are one JSON object each."""
        return np.asarray(self._objects.at(places)[:, 0] == 1)

    def images(self, places: Ints) -> tuple[Ints, npt.NDArray[np.bool_], Ints]:
        """Return CRC-32C, `ImageFacts.whole` and `FACTS` (shape [images, facts]) of images, looked at or not."""
        rows = self._images.at(places)
        return rows[:, 0], rows[:, 1] == 1, rows[:, 2:]

    def take(self, members: Sequence[Member]) -> None:
        """Read members one by one, all behind those that were read before."""
        for name, kind, _, offset, size, refusal in members:
            parts = None if refusal is not None or kind is not MemberKind.FILE else sample_parts(name)
            if parts is not None and parts[1] in self._takes:
                self._takes[parts[1]]([offset], [size], self._source.read)

    def take_run(self, run: PlainRun, codes: Ints, extensions: Mapping[str, int]) -> None:
        """Read the members of the run that came last from the source.

        Args:
            run: the members.
            codes: shape [members], of each one's extension; -1 for a member that is of no sample.
            extensions: the code of each.
        """
        read = self._reader(int(run.starts[0]))
        # All but the last one stand before a header that is at hand.
        for take in dict.fromkeys(self._takes.values()):
            wanted = [code for extension, code in extensions.items() if self._takes.get(extension) == take]
            rows = np.flatnonzero(np.logical_or.reduce([codes[:-1] == code for code in wanted])) if wanted else ()
            if len(rows):
                take(run.offsets[rows].tolist(), run.sizes[rows].tolist(), read)
        self.take(as_members(PlainRun(run.names[-1:], run.starts[-1:], run.sizes[-1:])))

    def _reader(self, offset: int) -> _Read:
        """Return what reads members whose headers are at hand, from the one at `offset` on."""
        held = self._source.held(offset)
        if isinstance(held, HeaderBlocks):
            return self._source.read
        # Where headers lie close, so do the members between them, and there are many to be cut out.
        data, start = held
        return lambda at, length: data[at - start : at - start + length]

    def _take_labels(self, offsets: list[int], sizes: list[int], read: _Read) -> None:
        pairs = [pair for pair in zip(offsets, sizes, strict=True) if 0 < pair[1] <= MAX_LABEL_BYTES]
        labels = parse_labels([read(offset, size) for offset, size in pairs])
        self._labels.extend([at for at, _ in pairs], [_NOTHING if label is None else label for label in labels])

    def _take_objects(self, offsets: list[int], sizes: list[int], read: _Read) -> None:
        pairs = [pair for pair in zip(offsets, sizes, strict=True) if 0 < pair[1] <= MAX_JSON_BYTES]
        for some in _together(pairs, MAX_JSON_BYTES):
            self._objects.extend([at for at, _ in some], are_json_objects([read(at, size) for at, size in some]))

    def _take_images(self, offsets: list[int], sizes: list[int], read: _Read) -> None:
        pairs = [pair for pair in zip(offsets, sizes, strict=True) if 0 < pair[1] <= MAX_IMAGE_BYTES]
        most = MAX_IMAGE_BYTES if self._full else HEAD_BYTES[0]
        for some in _together(pairs, most):
            payloads = [read(at, min(size, most)) for at, size in some]
            rows = facts_columns(payloads, partial(self._image, some, payloads, read), whole=self._full)
            self._images.extend([at for at, _ in some], array("q", rows.tobytes()))

    def _image(
        self, members: list[tuple[int, int]], payloads: list[bytes | memoryview], read: _Read, number: int
    ) -> ImageFacts:
        """Look at one image, at as much of it as that takes."""
        if self._full:
            return whole_facts(payloads[number])
        offset, size = members[number]
        for length in HEAD_BYTES:
            head = payloads[number] if length == HEAD_BYTES[0] else read(offset, min(length, size))
            found = head_facts(head, size)
            if found is not None:
                return found
        raise AssertionError("the longest head says all that it can")


def _together(members: Iterable[tuple[int, int]], most: int) -> Iterator[list[tuple[int, int]]]:
    """Yield (offset, size) of members in groups of up to `_TOGETHER_BYTES`, larger ones alone.

    Args:
        members: to be read.
        most: bytes that are read of one.
    """
    group: list[tuple[int, int]] = []
    room = _TOGETHER_BYTES
    for member in members:
        length = min(member[1], most)
        if length > room and group:
            yield group
            group, room = [], _TOGETHER_BYTES
        group.append(member)
        room -= length
    if group:
        yield group
