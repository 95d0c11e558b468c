"""What is read of a shard's members while they pass by: labels, metadata, facts of images."""

from __future__ import annotations

from array import array
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardkit.format.foreign_member import MemberKind, as_members
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
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import TypeAlias

    import numpy.typing as npt

    from shardkit.format.foreign_member import Member
    from shardkit.indexing.options import IndexOptions
    from shardkit.indexing.scan import Source

    Ints: TypeAlias = npt.NDArray[np.int64]
    _Read: TypeAlias = Callable[[list[int], list[int]], list[bytes | memoryview]]

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

    def extend(self, places: list[int], values: npt.ArrayLike) -> None:
        """Take rows of numbers, shape [places, numbers], or [places] where a row is one number."""
        self._places.extend(places)
        self._values.frombytes(np.asarray(values, np.int64).tobytes())

    def at(self, places: Ints) -> Ints:
        """Return the rows of some offsets, shape [offsets, numbers]."""
        known = np.append(np.array(self._places), _NOTHING)
        rows = np.append(np.array(self._values), self._none).reshape(-1, len(self._none))
        found = np.searchsorted(known[:-1], places)
        return rows[np.where(known[found] == places, found, len(known) - 1)]


class _Take(NamedTuple):
    """What is done with members of some extensions."""

    most: int
    """Bytes of the largest that is looked at; an empty one is not."""
    look: Callable[[list[int], list[int], _Read], None]
    """Takes offsets and sizes, and what reads members with such."""


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
        self._takes = {"json": _Take(MAX_JSON_BYTES, self._take_objects)}
        if options.labels == "cls":
            self._takes["cls"] = _Take(MAX_LABEL_BYTES, self._take_labels)
        if options.facts != "none":
            self._takes |= dict.fromkeys(options.image_extensions, _Take(MAX_IMAGE_BYTES, self._take_images))

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
            take = None if parts is None else self._takes.get(parts[1])
            if take is not None and 0 < size <= take.most:
                take.look([offset], [size], self._read)

    def take_run(self, run: PlainRun, codes: Ints, extensions: Mapping[str, int]) -> None:
        """Read the members of the run that came last from the source.

        Args:
            run: the members.
            codes: shape [members], of each one's extension; -1 for a member that is of no sample.
            extensions: the code of each.
        """
        read = self._reader(int(run.starts[0]))
        # All but the last one stand before a header that is at hand.
        offsets, sizes, codes = run.offsets[:-1], run.sizes[:-1], codes[:-1]
        for take in dict.fromkeys(self._takes.values()):
            wanted = [code for extension, code in extensions.items() if self._takes.get(extension) == take]
            if not wanted:
                continue
            taken = np.logical_or.reduce([codes == code for code in wanted]) & (sizes > 0) & (sizes <= take.most)
            if taken.any():
                take.look(offsets[taken].tolist(), sizes[taken].tolist(), read)
        self.take(as_members(PlainRun(run.names[-1:], run.starts[-1:], run.sizes[-1:])))

    def _read(self, offsets: list[int], sizes: list[int]) -> list[bytes | memoryview]:
        return list(map(self._source.read, offsets, sizes))

    def _reader(self, offset: int) -> _Read:
        """Return what reads members whose headers are at hand, from the one at `offset` on."""
        held = self._source.held(offset)
        if isinstance(held, HeaderBlocks):
            return self._read
        # Where headers lie close, so do the members between them, and there are many to be cut out.
        data, start = held

        def cut(offsets: list[int], sizes: list[int]) -> list[bytes | memoryview]:
            return [data[offset - start : offset - start + size] for offset, size in zip(offsets, sizes, strict=True)]

        return cut

    def _take_labels(self, offsets: list[int], sizes: list[int], read: _Read) -> None:
        labels = parse_labels(read(offsets, sizes))
        self._labels.extend(offsets, [_NOTHING if label is None else label for label in labels])

    def _take_objects(self, offsets: list[int], sizes: list[int], read: _Read) -> None:
        for some in _together(sizes, MAX_JSON_BYTES):
            self._objects.extend(offsets[some], are_json_objects(read(offsets[some], sizes[some])))

    def _take_images(self, offsets: list[int], sizes: list[int], read: _Read) -> None:
        most = MAX_IMAGE_BYTES if self._full else HEAD_BYTES[0]
        for some in _together(sizes, most):
            places, lengths = offsets[some], sizes[some]
            payloads = read(places, [min(length, most) for length in lengths])
            alone = partial(self._image, places, lengths, payloads, read)
            self._images.extend(places, facts_columns(payloads, alone, whole=self._full))

    def _image(
        self, offsets: list[int], sizes: list[int], payloads: list[bytes | memoryview], read: _Read, number: int
    ) -> ImageFacts:
        """Look at one image, at as much of it as that takes."""
        if self._full:
            return whole_facts(payloads[number])
        offset, size = offsets[number], sizes[number]
        for length in HEAD_BYTES:
            head = payloads[number] if length == HEAD_BYTES[0] else read([offset], [min(length, size)])[0]
            found = head_facts(head, size)
            if found is not None:
                return found
        raise AssertionError("the longest head says all that it can")


def _together(sizes: list[int], most: int) -> Iterator[slice]:
    """Yield which members to look at together: up to `_TOGETHER_BYTES`, larger ones alone.

    Args:
        sizes: of the members, bytes.
        most: bytes that are read of one.
    """
    ends = np.minimum(sizes, most).cumsum()
    first = passed = 0
    while first < len(sizes):
        after = max(int(np.searchsorted(ends, passed + _TOGETHER_BYTES, "right")), first + 1)
        yield slice(first, after)
        first, passed = after, int(ends[after - 1])
