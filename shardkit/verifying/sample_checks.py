"""What must hold for the bytes of every sample; called in stored order while a shard streams by."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardkit.errors import TarFormatError
from shardkit.escaping import escape
from shardkit.extent import Extent
from shardkit.format.checksum import crc32c
from shardkit.format.keys import source_from_text
from shardkit.format.strict_json import MAX_JSON_BYTES, parse_json_object
from shardkit.format.tar import encode_header, encode_padding, parse_header, tail_bytes
from shardkit.verifying.images import decoding_problem, facts_problem
from shardkit.verifying.report import Finding, Level

__all__ = ["SAMPLE_CHECKS", "Sample", "SampleCheck", "zeros_finding"]


@dataclass(slots=True, kw_only=True)
class Sample:
    """One sample as its row states it, and its bytes."""

    shard: str
    key: str
    previous_key: str | None
    """Key of the sample before it in the shard."""
    label: int | None
    class_name: str | None
    """What the manifest calls the label; None without a label, a name for it, or a usable manifest."""
    source: str
    json_offset: int
    """Bytes from the start of the shard; 0 without a json member."""
    json_size: int
    padding: int
    """Bytes of PAX padding, from the layout."""
    offset: int
    """First byte of the payload in the shard."""
    size: int
    crc32c: int
    facts: tuple[int, ...]
    """`shardkit.format.index.FACTS`."""
    start: int
    """First byte of `before` in the shard: where the payload before it ended, or 0."""
    before: bytes
    """Everything from the end of the payload before it to the start of its own."""
    payload: memoryview
    """The encoded image, valid during the check; empty at a level that does not read it."""
    hole_in: Callable[[Extent], int | None]
    """Returns the first byte of an extent that the file system holds no data for."""

    def finding(
        self,
        code: str,
        offset: int,
        message: str,
        expected: str | int | None = None,
        found: str | int | None = None,
        *,
        region: str | None = None,
        key: str | None = None,
    ) -> Finding:
        """Return a finding in the shard's file."""
        return Finding(
            code=code, file=self.shard, shard=self.shard, offset=offset, region=region or code, key=key or self.key,
            message=message, expected=expected, found=found,
        )  # fmt: skip

    def json_bytes(self) -> bytes:
        """Return the payload of the json member."""
        at = self.json_offset - self.start
        return self.before[at : at + self.json_size]


SampleCheck = Callable[[Sample], Iterator[Finding]]


def check_framing(sample: Sample) -> Iterator[Finding]:
    """Headers, label and padding are exactly what the format writes around these payloads.

    Everything between two payloads is a function of the row, the json member's bytes apart: so it is written again and
    compared as a whole, and taken apart only where that fails.
    """
    try:
        pieces = _pieces(sample)
    except TarFormatError as error:
        yield sample.finding("header", sample.start, f"no header can state this member: {error.what}")
        return
    if b"".join([piece for _, piece in pieces]) == sample.before:
        return
    at = 0
    for region, piece in pieces:
        found = sample.before[at : at + len(piece)]
        if found != piece:
            yield _framing_finding(sample, region, at, piece, found)
        at += len(piece)


def _pieces(sample: Sample) -> list[tuple[str, bytes]]:
    """Return the regions before a payload and what must stand in each; the json member's own bytes are as found."""
    pieces = [("tail", bytes(tail_bytes(sample.start)))]
    members = [] if sample.label is None else [("cls", b"%d" % sample.label)]
    if sample.json_offset:
        members.append(("json", sample.json_bytes()))
    for extension, data in members:
        pieces.append(("header", encode_header(f"{sample.key}.{extension}", len(data))))
        pieces.append((extension, data))
        pieces.append(("padding", bytes(tail_bytes(len(data)))))
    pieces.append(("padding", _padding(sample.padding)))
    pieces.append(("header", encode_header(f"{sample.key}.jpg", sample.size)))
    return pieces


@functools.lru_cache(maxsize=16)  # a shard has few sizes of padding; the largest are half a MiB each
def _padding(size: int) -> bytes:
    return encode_padding(size)


def _framing_finding(sample: Sample, region: str, at: int, expected: bytes, found: bytes) -> Finding:
    first = next((i for i, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]), len(found))
    place = sample.start + at + first
    if region == "header":
        return sample.finding("header", place, "not the canonical header", _header(expected), _header(found))
    if region == "cls":
        message = "the cls member is not the sample's label"
        return sample.finding("cls", place, message, expected.decode(), ascii(found)[2:-1])
    code, key = ("padding", sample.previous_key) if region == "tail" else (region, sample.key)
    what = _with_hole(sample, "not the padding that the format writes", Extent(sample.start + at, len(expected)))
    return sample.finding(code, place, what, expected[first], found[first] if first < len(found) else None, key=key)


def _header(block: bytes) -> str:
    """Describe a header: what it states when it is canonical, else why it is not."""
    try:
        header = parse_header(block)
    except TarFormatError as error:
        return f"{error.what}, byte {error.offset} of the header" if error.offset is not None else error.what
    return f"{escape(header.name)}, {header.size} bytes"


def _with_hole(sample: Sample, message: str, extent: Extent) -> str:
    hole = sample.hole_in(extent)
    return message if hole is None else f"{message}; the file has a hole at {hole}: no data was ever written there"


def check_json(sample: Sample) -> Iterator[Finding]:
    """A json member is one JSON object; a source or a class that it names is that of its row."""
    if not sample.json_offset:
        return
    if sample.json_size > MAX_JSON_BYTES:
        yield sample.finding("json", sample.json_offset, "too large", f"at most {MAX_JSON_BYTES}", sample.json_size)
        return
    try:
        document = parse_json_object(sample.json_bytes().decode("utf-8"))
    except ValueError as error:
        yield sample.finding("json", sample.json_offset, "not a JSON object", found=ascii(str(error))[1:-1][:200])
        return
    # What `convert` took over from another tool's shards says nothing of either, or means something else by it.
    source, name = document.get("source"), document.get("class")
    if isinstance(source, str) and sample.source not in (source, _as_source(source)):
        wrong = "source", sample.source, source
    elif isinstance(name, str) and sample.class_name not in (None, name):
        wrong = "class", str(sample.class_name), name
    else:
        return
    what, expected, found = wrong
    message = f"another {what} than that of the row"
    yield sample.finding("json", sample.json_offset, message, ascii(expected)[:200], ascii(found)[:200])


def _as_source(text: str) -> str | None:
    try:
        return source_from_text(text)
    except UnicodeEncodeError:
        return None


def check_payload(sample: Sample) -> Iterator[Finding]:
    """An image's bytes have the CRC-32C of their row."""
    actual = crc32c(sample.payload)
    if actual != sample.crc32c:
        message = _with_hole(sample, "the bytes do not have their checksum", Extent(sample.offset, sample.size))
        yield sample.finding("payload", sample.offset, message, f"crc32c {sample.crc32c:08x}", f"{actual:08x}")


def check_facts(sample: Sample) -> Iterator[Finding]:
    """An image is what its row says."""
    problem = facts_problem(sample.payload, sample.facts)
    if problem is not None:
        what, expected, found = problem
        yield sample.finding("facts", sample.offset, f"the image is not what its row says: {what}", expected, found,
                             region="payload")  # fmt: skip


def check_decoding(sample: Sample) -> Iterator[Finding]:
    """Pillow decodes an image whole and without a warning."""
    problem = decoding_problem(sample.payload)
    if problem is not None:
        code, found = problem
        yield sample.finding(code, sample.offset, "Pillow does not decode it cleanly", found=found, region="payload")


SAMPLE_CHECKS: dict[str, tuple[Level, SampleCheck]] = {
    "framing": ("structure", check_framing),
    "json": ("structure", check_json),
    "payload": ("checksum", check_payload),
    "facts": ("checksum", check_facts),
    "decoding": ("decode", check_decoding),
}
"""What must hold for every sample, and the cheapest level that looks."""


def zeros_finding(shard: str, start: int, data: bytes, image_end: int, last_key: str | None) -> Finding | None:
    """Return where the zeros after the last payload of a shard are not zero, or None.

    Args:
        shard: file name.
        start: offset of `data` in the shard, the end of the last payload.
        data: everything from there to the shard's end.
        image_end: end of the last image's block padding.
        last_key: key of the last sample.
    """
    place = start + len(data) - len(data.lstrip(b"\0"))
    if place == start + len(data):
        return None
    code, key = ("padding", last_key) if place < image_end else ("end", None)
    message = "not zero after the last image" if code == "padding" else "not zero in or after the end blocks"
    return Finding(
        code=code, file=shard, shard=shard, offset=place, region=code, key=key, message=message,
        expected=0, found=data[place - start],
    )  # fmt: skip
