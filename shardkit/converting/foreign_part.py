"""One part of a conversion to anything but shards: read and checked as for those, written by its writer."""

from __future__ import annotations

import mmap
import os
import time
from collections import Counter
from typing import TYPE_CHECKING

from shardkit.converting.foreign_result import ForeignPart
from shardkit.converting.huggingface_writer import HuggingFaceWriter, load_huggingface
from shardkit.converting.litdata_writer import LitDataWriter, load_litdata
from shardkit.converting.mds_writer import MdsWriter, load_mds
from shardkit.converting.outputs import size_limit
from shardkit.converting.side_files import split_name, write_classes, write_refusals
from shardkit.converting.tree_writer import TreeWriter
from shardkit.converting.whole_folder import raise_error
from shardkit.converting.writers import WrittenSample
from shardkit.errors import SourceError
from shardkit.escaping import escape
from shardkit.packing.admission import admit
from shardkit.packing.refusals import Refusal, RefusedError, stop_error
from shardkit.packing.write import read_ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardkit.converting.options import ConvertOptions
    from shardkit.converting.outputs import Output, OutputKind
    from shardkit.converting.supply import MemberSupply
    from shardkit.converting.writers import TableWriter, WrittenColumns
    from shardkit.packing.plan import Plan
    from shardkit.packing.result import PackProgress
    from shardkit.packing.supply import Picture
    from shardkit.storage.clone import Place

__all__ = ["LIBRARIES", "PartWriter", "refused_error"]

LIBRARIES: dict[OutputKind, Callable[[], object]] = {"mds": load_mds, "litdata": load_litdata, "hf": load_huggingface}
"""Kind to what imports its library, or raises why that is not to be had; a tree needs none."""

_ROOM_BYTES = 1 << 20
_REPORT_S = 0.05


def refused_error(refusal: Refusal) -> SourceError:
    """Return the error of a run that stops at its first refusal."""
    error = stop_error(refusal)
    error.kept = None  # no shard is
    return error


class PartWriter:
    """Writes parts, one after another."""

    def __init__(self, output: Output, columns: WrittenColumns, options: ConvertOptions) -> None:
        """Take what all parts have in common."""
        self._kind, self._layout = output.kind, output.layout
        self._columns, self._options = columns, options
        self._room = _Room()

    def write(
        self, part: str | None, supply: MemberSupply, plan: Plan, place: str, progress: PackProgress
    ) -> ForeignPart:
        """Write a part into an empty folder.

        Raises:
            SourceError: a sample was refused with `on_error="fail"`, or all were.
            OSError: the system failed a write.
            ShardkitError: the library is not here, or the system failed a read.
        """
        progress.begin(len(plan.order), plan.payload)
        writer = self._writer(place, part)
        count = _Count(progress, list(supply.refused))
        try:
            for number, rows in enumerate(supply.batches(plan)):
                writer.begin_file(number, plan.shards)
                with supply.origin.pictures(rows, self._options) as pictures:
                    for picture in read_ahead(pictures):
                        self._write_one(writer, picture, count)
                count.tell()
            if not count.samples:
                raise _nothing_left(part, count.refused)
            writer.finish()
        except BaseException:
            writer.discard()
            raise
        if self._kind != "hf" and self._columns.label and self._columns.classes is not None:
            write_classes(place, self._columns.classes)
        listed = os.walk(place, onerror=raise_error)
        sizes = [os.path.getsize(os.path.join(folder, name)) for folder, _, names in listed for name in names]
        write_refusals(place, count.refused)
        return ForeignPart(samples=count.samples, labelled=count.labelled, payload=count.payload, files=len(sizes),
                           bytes=sum(sizes), refused=Counter(refusal.reason for refusal in count.refused))  # fmt: skip

    def _writer(self, place: str, part: str | None) -> TableWriter:
        limit = size_limit(self._kind, self._options.shard_size)
        if self._kind == "mds":
            return MdsWriter(place, self._columns, limit)
        if self._kind == "litdata":
            return LitDataWriter(place, self._columns, limit)
        if self._kind == "tree":
            return TreeWriter(place, self._columns, self._layout)
        return HuggingFaceWriter(place, self._columns, split_name(part))

    def _write_one(self, writer: TableWriter, picture: Picture, count: _Count) -> None:
        try:
            # A tree has no place for json members, whatever they hold.
            text = "" if self._kind == "tree" else _text(picture)
            source_bytes = picture.read(self._room)
            size, _ = admit(self._room, source_bytes, self._options)
            writer.write(
                WrittenSample(self._room.buffer[:size], picture.label, picture.key, text, picture.source)
            )  # fmt: skip
        except RefusedError as error:
            refusal = Refusal(picture.number, picture.path, error.reason, error.detail)
            if self._options.on_error == "fail":
                raise refused_error(refusal) from error
            count.refuse(refusal)
            return
        count.add(size, source_bytes, labelled=picture.label is not None)


class _Count:
    """What has been done of a part, and told now and then."""

    def __init__(self, progress: PackProgress, refused: list[Refusal]) -> None:
        self.samples = self.labelled = self.payload = 0
        self.refused = refused
        self._progress = progress
        self._due = time.monotonic() + _REPORT_S
        self._untold = [0, 0, 0]

    def add(self, size: int, source_bytes: int, *, labelled: bool) -> None:
        self.samples += 1
        self.labelled += labelled
        self.payload += size
        self._note(source_bytes, 0)

    def refuse(self, refusal: Refusal) -> None:
        self.refused.append(refusal)
        self._note(0, 1)

    def _note(self, source_bytes: int, refusals: int) -> None:
        for place, more in enumerate((1, source_bytes, refusals)):
            self._untold[place] += more
        if time.monotonic() >= self._due:
            self.tell()

    def tell(self) -> None:
        self._progress.advance(*self._untold)
        self._untold = [0, 0, 0]
        self._due = time.monotonic() + _REPORT_S


class _Room:
    """Memory for one image at a time."""

    def __init__(self) -> None:
        self.buffer = mmap.mmap(-1, _ROOM_BYTES)
        self.start = 0

    def __call__(self, wanted: int) -> tuple[mmap.mmap, int]:
        if wanted >= len(self.buffer):
            self.buffer = mmap.mmap(-1, 1 << wanted.bit_length())
        return self.buffer, 0

    def share(self, source: Place, size: int) -> int:
        """Share nothing: these are no files of ours."""
        del source, size
        return 0


def _text(picture: Picture) -> str:
    """Return the json member of a sample.

    Raises:
        RefusedError: it cannot be read, or is no JSON object.
    """
    try:
        return (picture.json() or b"").decode("utf-8")
    except UnicodeDecodeError as error:
        raise RefusedError("bad-json", f"the json member is no UTF-8: {error}") from error


def _nothing_left(part: str | None, refused: Sequence[Refusal]) -> SourceError:
    reasons = Counter(refusal.reason for refusal in refused)
    whole = "every sample was refused" if part is None else f"every sample of the part {part} was refused"
    return SourceError(f"{whole}: there is no dataset",
                       found=", ".join(f"{count} {reason}" for reason, count in reasons.most_common()),
                       remedy=f"the first is {escape(refused[0].path)}: {escape(refused[0].detail)}")  # fmt: skip
