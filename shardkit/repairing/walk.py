"""One pass over a damaged shard: every whole sample in it, where it lies, and the row that it gets.

Every step is taken from a block that was just looked at: a row of the old index whose payload has its CRC-32C, or
headers that agree with one another. No stated size decides where the next look is, but that of a sample that was found
whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardkit.errors import StorageError
from shardkit.extent import align_up
from shardkit.format.checksum import crc32c, hash64
from shardkit.format.index import FACTS, SampleRow
from shardkit.format.jpeg import JpegRefusal, inspect_jpeg
from shardkit.format.layout import shard_bytes
from shardkit.format.media_type import sniff_media_type
from shardkit.format.strict_json import MAX_JSON_BYTES
from shardkit.format.tar import BLOCK
from shardkit.repairing.lost import Lost
from shardkit.repairing.members import check_json
from shardkit.repairing.old_rows import row_fault
from shardkit.repairing.salvage import Salvage, SalvageBuilder
from shardkit.repairing.structure import Fault, Found, read_structure

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardkit.repairing.damaged_file import DamagedFile
    from shardkit.repairing.members import ClassNames
    from shardkit.repairing.old_rows import OldRows

__all__ = ["Rules", "walk"]

_FREE_WORK = 64 << 20
"""Bytes that failed looks may read beside twice the shard's size; then a look that fails is not repeated inside."""
_FACT_NAMES = [name for name in FACTS if name != "media_type"]
_NO_FACTS = {name: -1 if name == "adobe_transform" else 0 for name in _FACT_NAMES}


@dataclass(slots=True, kw_only=True)
class Rules:
    """What a sample must be, in the whole dataset."""

    align: int
    classes: ClassNames
    whole_images: bool
    """Without an old index: only whole JPEGs; False for a dataset that was packed without looking at them."""
    max_bytes: int
    """Of an image that no proven row vouches for: as much is held in memory."""
    labelled: bool
    """Whether a sample that begins with a json member may have lost its cls member."""
    keys: set[int] = field(default_factory=set)
    """Hashes of all keys that were taken without a proven row."""


def walk(
    file: DamagedFile, name: str, old: OldRows | None, rules: Rules, tell: Callable[[Lost], object],
    check: Callable[[], None],
) -> Salvage:  # fmt: skip
    """Find every whole sample of a shard.

    Args:
        file: the shard.
        name: file name of the shard that it is.
        old: rows of its index; None when none is left.
        rules: of the dataset.
        tell: takes what is lost, in the order of the old rows, else as it lies in the shard.
        check: called between two looks; may raise to end the walk.
    """
    walking = _Walk(file, name, old, rules, tell, check)
    walking.run()
    return walking.finish()


class _Walk:
    def __init__(
        self, file: DamagedFile, name: str, old: OldRows | None, rules: Rules, tell: Callable[[Lost], object],
        check: Callable[[], None],
    ) -> None:  # fmt: skip
        self.file, self.name, self.old, self.rules = file, name, old, rules
        self._builder = SalvageBuilder(file, rules.align)
        self.salvage = self._builder.salvage
        self._tell, self._check = tell, check
        self._used = bytearray(0 if old is None else len(old))
        self._faults: dict[int, Fault] = {}  # of rows
        self._work = 2 * file.size + _FREE_WORK
        self._gap: int | None = None  # where the gap began that the walk is in
        self._gap_key: str | None = None  # of the last sample that was told in it
        self._told_to = 0  # up to where what was told accounts for the gap
        self._largest = 0  # bytes of the largest whole sample so far
        self._skip = 0  # bytes of a failed look that are not looked at again
        self._buffer = bytearray()

    @property
    def proven(self) -> bool:
        return self.old is not None and self.old.proven

    def run(self) -> None:
        """Go from sample to sample, and where there is none from header to header."""
        position: int | None = 0
        while position is not None and position < self.file.size:
            self._check()
            end = self._row_at(position) or self._sample_at(position)
            if end is not None:
                position = end
            else:
                if self._gap is None:
                    self._gap = position
                    self._told_to = max(self._told_to, position)
                position = self._next(position)

    def _next(self, position: int) -> int | None:
        """Return the next offset that is worth a look."""
        after = position + max(BLOCK, self._skip)
        self._skip = 0
        header = self.file.next_header(after)
        row = self.old.next_start(after - 1) if self.proven and self.old is not None else None
        return min((offset for offset in (header, row) if offset is not None), default=None)

    def _charge(self, position: int, count: int) -> None:
        """Pay for bytes that a failed look has read: shards made to be slow must not be looked through many times."""
        self._work -= count
        if self._work < 0:
            self._skip = count // BLOCK * BLOCK

    # A sample by its row

    def _row_at(self, position: int) -> int | None:
        """Take the sample whose proven row says that it starts here; return its end, None when it is not whole."""
        number = self.old.at(position) if self.proven and self.old is not None else None
        if number is None or self.old is None or self._used[number]:
            return None
        row = self.old.row(number)
        try:
            self._check_row(row)
        except Fault as fault:
            self._faults[number] = fault
            self._charge(position, row.size + row.json_size)
            return None
        self._used[number] = 1
        self._keep(row, position, row.json_offset, row.offset)
        return row.offset + align_up(row.size, BLOCK)

    def _check_row(self, row: SampleRow) -> None:
        wrong = row_fault(row) or self.rules.classes.label_fault(row.label)
        if wrong:
            raise Fault("index", wrong)
        if row.json_size > MAX_JSON_BYTES:
            raise Fault("json", f"a json member of {row.json_size} bytes")
        if row.offset + row.size > self.file.size:
            raise Fault(
                "truncated", f"{row.size} bytes of image at {row.offset}, and the file ends at {self.file.size}"
            )
        found = crc32c(self._read(row.offset, row.size))
        if found != row.crc32c:
            raise Fault("payload", f"crc32c {found:08x}, expected {row.crc32c:08x}")
        if row.json_offset:
            check_json(bytes(self._read(row.json_offset, row.json_size)), row.label, row.source, self.rules.classes)

    # A sample by its headers

    def _sample_at(self, position: int) -> int | None:
        """Take the sample whose headers begin here; return its end, None when it is none, or not whole."""
        found: Found | None = None
        try:
            found = read_structure(self.file, position, self.rules.align)
            row, number = self._judge(found)
        except Fault as fault:
            self._fault(position, found, fault)
            return None
        except StorageError as error:
            self._fault(position, found, Fault("read-error", str(error.found)))
            return None
        if number is not None and number >= 0:
            self._used[number] = 1
        if self.old is None:
            self._close_gap(position)
        self._keep(row, position, found.json_offset, found.offset)
        return found.end

    def _judge(self, found: Found) -> tuple[SampleRow, int | None]:
        """Return the row of a sample whose headers agree, and its number in the old rows.

        Raises:
            Fault: it is none of the dataset, or damaged.
            StorageError: the system failed a read.
        """
        wrong = self.rules.classes.label_fault(found.label)
        if wrong:
            raise Fault("headers", wrong, found.key)
        old = None
        if self.old is not None:
            old = self.old.with_key(found.key)
            if old is None and self.proven:
                raise Fault("headers", "a sample that the index does not name", found.key)
        if old is not None and old[0] >= 0 and self._used[old[0]]:
            raise Fault("duplicate", "the sample stands in the shard twice", found.key)
        if old is not None and old[0] in self._faults and old[1][0].offset == found.offset:
            raise self._faults[old[0]]  # its row has just led to the same bytes
        if not self.proven:
            self._check_start(found)
        row = self._row_of(found, old)
        if not self.proven:
            self._take_key(found.key)
        return row, None if old is None else old[0]

    def _check_start(self, found: Found) -> None:
        if self._gap is not None and found.label is None and self.rules.labelled:
            raise Fault("headers", "the sample may begin before this json member", found.key)
        if found.size > self.rules.max_bytes:
            raise Fault("too-large", f"{found.size} bytes; at most {self.rules.max_bytes}", found.key)
        if hash64(found.key.encode()) in self.rules.keys:
            raise Fault("duplicate", "an earlier sample has this key", found.key)

    def _take_key(self, key: str) -> None:
        self.rules.keys.add(hash64(key.encode()))

    def _row_of(self, found: Found, old: tuple[int, list[SampleRow]] | None) -> SampleRow:
        said = [] if old is None else [row for row in old[1] if row.size == found.size]
        if old is not None and not said:
            raise Fault("payload", f"{found.size} bytes, expected {old[1][0].size}", found.key)
        if self.proven and (said[0].label != found.label or bool(said[0].json_offset) != bool(found.json_offset)):
            raise Fault("headers", "other members than the index states", found.key)
        payload = self._read(found.offset, found.size)
        checksum = crc32c(payload)
        said = [row for row in said if row.crc32c == checksum]
        if old is not None and not said:
            raise Fault("payload", f"crc32c {checksum:08x}, expected {old[1][0].crc32c:08x}", found.key)
        facts = said[0]._asdict() if self.proven else self._facts(payload, checked=old is not None, key=found.key)
        source = said[0].source if said else None
        if found.json_offset:
            json = bytes(self._read(found.json_offset, found.json_size))
            stated = check_json(json, found.label, source if self.proven else None, self.rules.classes)
            source = source if stated is None else stated
        if source is None:
            self.salvage.without_source += 1
        return SampleRow(**{
            **facts, "key": found.key, "label": found.label, "offset": found.offset, "size": found.size,
            "crc32c": checksum, "sample_offset": found.start, "sample_size": found.end - found.start,
            "json_offset": found.json_offset, "json_size": found.json_size, "source": source or "",
        })  # fmt: skip

    def _facts(self, payload: memoryview, *, checked: bool, key: str) -> dict[str, int]:
        """Return what an image is; without a CRC-32C to say that it is right it must at least be a whole JPEG."""
        try:
            facts = inspect_jpeg(payload)
        except JpegRefusal as refusal:
            if self.rules.whole_images and not checked:
                raise Fault("image", f"{refusal.code}: {refusal.detail}", key) from None
            return {**_NO_FACTS, "media_type": sniff_media_type(payload)}
        return {name: getattr(facts, name) for name in FACTS}

    def _fault(self, position: int, found: Found | None, fault: Fault) -> None:
        if found is not None:
            self._charge(position, found.size + found.json_size)
        key = fault.key or (found.key if found is not None else None)
        known = self.old.with_key(key) if key is not None and self.old is not None else None
        if known is not None and known[0] >= 0:
            self._faults.setdefault(known[0], fault)
        elif key is not None and not self.proven:
            # Where its headers do not say how far a sample goes, it is taken to be twice the largest one at most.
            unknown = (
                self.file.size if fault.reason == "truncated" else position + (2 * self._largest or self.file.size)
            )
            end = unknown if found is None else found.end
            if found is not None or key != self._gap_key:
                self._told_to = max(self._told_to, end)
            if key != self._gap_key:
                self._gap_key = key
                self._lose(Lost(key, self.name, position, fault.reason, fault.detail))

    # What comes of it

    def _read(self, offset: int, size: int) -> memoryview:
        """Return bytes of the file, valid until the next call.

        Raises:
            Fault: they cannot be read.
        """
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        view = memoryview(self._buffer)[:size]
        try:
            count = self.file.read_into(view, offset)
        except StorageError as error:
            raise Fault("read-error", str(error.found)) from error
        if count < size:
            raise Fault("truncated", f"the file ends at {offset + count}")
        return view

    def _keep(self, row: SampleRow, start: int, json_offset: int, offset: int) -> None:
        self._builder.add(row, start, json_offset, offset)
        self._largest = max(self._largest, row.sample_size)
        self._gap, self._told_to = None, 0

    def _lose(self, lost: Lost) -> None:
        self.salvage.lost += 1
        self._tell(lost)

    def _close_gap(self, end: int) -> None:
        """Tell of the rest of a gap, in which no header named a sample."""
        if self._gap is not None and self._told_to < end:
            detail = f"{end - self._told_to} bytes in which no header names a sample"
            self._lose(Lost(None, self.name, self._told_to, "headers", detail))
        self._gap_key = None

    def finish(self) -> Salvage:
        """Tell what is lost; return what was found."""
        size = self.file.size
        if self.old is not None:
            self._tell_rows()
        elif self._gap is not None and (
            size > shard_bytes(self._told_to, self.rules.align) or not self.file.is_zero(self._told_to, size)
        ):
            self._close_gap(size)
        return self._builder.finish()

    def _tell_rows(self) -> None:
        assert self.old is not None
        for number in range(len(self.old)):
            if not self._used[number]:
                row = self.old.row(number)
                fault = self._faults.get(number) or Fault("headers", "nothing of it was found")
                if number not in self._faults and row.sample_offset >= self.file.size:
                    fault = Fault("truncated", f"the file ends at {self.file.size}")
                self._lose(Lost(row.key, self.name, row.sample_offset, fault.reason, fault.detail))
