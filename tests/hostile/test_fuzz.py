"""Every parser of bytes from outside, fed with what resembles its own language: it answers, or raises its own error.

`make fuzz` gives each test a share of its time, half of it to tars, and other examples in every run; `make test` some
seconds and always the same examples.
"""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from shardkit.errors import ConfigError, FormatError, IndexFormatError, TarFormatError, UnsafeError
from shardkit.format.arrow_file import BatchBlocks
from shardkit.format.brace import expand_braces
from shardkit.format.checksum import hex_digest
from shardkit.format.dali_index import encode_dali_index, parse_dali_index
from shardkit.format.foreign_member import as_members
from shardkit.format.foreign_tar import MAX_EXTENDED_BYTES, ForeignTarParser
from shardkit.format.grouping import group_members
from shardkit.format.index import FACTS, SCHEMA
from shardkit.format.jpeg import JpegRefusal, inspect_jpeg
from shardkit.format.jpeg_header import fault, is_plain_jpeg
from shardkit.format.manifest import dump_manifest, load_manifest
from shardkit.format.plain_jpegs import plain_jpegs
from shardkit.format.strict_json import are_json_objects, parse_json_object
from shardkit.format.where import parse_where
from shardkit.indexing.images import HEAD_BYTES, head_facts, parse_label, parse_labels, whole_facts
from shardkit.testing.datasets import draft_dataset, tiny_jpeg
from shardkit.testing.fuzzing import SECONDS, fuzzed, mutated, share_s
from shardkit.testing.hostile_tars import hostile_tars, jpeg_bomb, tar_member
from shardkit.testing.photos import encode

pytestmark = pytest.mark.timeout(120 + SECONDS / 4)


# Tars

TAR_WEIGHT = 12
"""Of two tests; there are some 24 others."""
PIECES = [tar.parts[1] for tar in hostile_tars() if len(tar.parts) == 4 and len(tar.parts[1]) < 20_000]
MEMBERS = st.builds(
    tar_member,
    st.lists(
        st.sampled_from(["a", "b", "/", ".", "..", ".jpg", ".cls", "é", "\udcff", "n" * 99]), min_size=1, max_size=6
    ).map("".join),
    st.sampled_from([b"", b"1", b"x" * 511, b"y" * 513]),
    kind=st.sampled_from([b"0", b"\0", b"7", b"1", b"2", b"5", b"6", b"g"]),
    dialect=st.sampled_from(["pax", "gnu"]),
)
TARS = st.lists(MEMBERS | st.sampled_from(PIECES) | st.sampled_from(PIECES).flatmap(mutated), max_size=6).map(b"".join)


def resummed(data: bytes) -> bytes:
    """The tar with right checksums wherever a block looks like a header."""
    blocks = [bytearray(data[at : at + 512]) for at in range(0, len(data), 512)]
    for block in blocks:
        if len(block) == 512 and block[257:262] == b"ustar":
            block[148:156] = b"%06o\0 " % (sum(block[:148]) + 256 + sum(block[156:]))
    return b"".join(blocks)


def walked(data: bytes):
    """The members, or None after one of our errors."""
    members, at = [], -1
    try:
        parser = ForeignTarParser(len(data))
        while (wanted := parser.wanted) is not None:
            assert at < wanted.offset <= wanted.end <= len(data)
            assert wanted.length <= MAX_EXTENDED_BYTES
            at = wanted.offset
            member = parser.feed(data[wanted.offset : wanted.end])
            members += [member] if member else []
    except (TarFormatError, UnsafeError):
        return None
    return members


def placed(data: bytes, length: int):
    """The same by the short way of plain files, which is given so many bytes at a time; they may be fewer than one."""
    members, at = [], -1
    try:
        parser = ForeignTarParser(len(data))
        while (wanted := parser.wanted) is not None:
            assert at < wanted.offset
            at = wanted.offset
            run = list(as_members(parser.feed_plain(data[at : at + length], at)))
            if not run:
                member = parser.feed(data[wanted.offset : wanted.end])
                run = [member] if member else []
            members += run
    except (TarFormatError, UnsafeError):
        return None
    return members


@fuzzed(600, weight=TAR_WEIGHT)
@given(TARS, st.booleans())
def test_a_tar_is_placed_as_tarfile_places_it_or_refused(data, again):
    data = resummed(data) if again else data
    members = walked(data)
    assert placed(data, 4096) == members
    for sample in group_members(members or []):
        assert sample.members
    if members is None:
        return
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            listed = {member.offset_data: member for member in tar.getmembers()}
    except (tarfile.TarError, ValueError, OverflowError, RecursionError):  # fields that we do not read
        return
    for member in members:
        other = listed.get(member.offset)
        if other is not None and member.usable:
            assert (member.name.rstrip("/"), member.size) == (other.name.rstrip("/"), other.size)


@fuzzed(100, weight=TAR_WEIGHT)
@given(data=TARS)
def test_what_is_taken_gnu_tar_and_bsdtar_list_alike(tmp_path_factory, require_tool, data):
    data = resummed(data)
    members = [one for one in walked(data) or [] if one.usable and one.name.isascii() and one.name.isprintable()]
    taken = {(one.name, str(one.size)) for one in members if " " not in one.name and "\\" not in one.name}
    if not taken:
        return
    path = tmp_path_factory.getbasetemp() / "fuzzed.tar"
    path.write_bytes(data)
    for tool, column in (("tar", 2), ("bsdtar", 4)):
        done = subprocess.run([require_tool(tool), "--numeric-owner", "-tvf", path], check=False, capture_output=True)
        lines = [line.split() for line in done.stdout.decode("ascii", "replace").splitlines()]
        if not done.returncode:
            assert taken <= {(words[-1], words[column]) for words in lines if len(words) > column}


# Texts

BRACES = st.lists(st.sampled_from([*"{},.-a0", "..", "{0..9}", "{a,b}", "999999999999", "{1..9..0}"]), max_size=30)


@fuzzed(800)
@given(BRACES.map("".join))
def test_a_brace_expression_stands_for_few_names_or_is_refused(text):
    try:
        names = expand_braces(text, 500)
    except UnsafeError:
        return
    assert 1 <= len(names) <= 500


WHERE = st.sampled_from(
    [
        *SCHEMA.names[:6],
        "and",
        "or",
        "not",
        "in",
        "is",
        "None",
        "(",
        ")",
        "[",
        "]",
        ",",
        "==",
        "<",
        ">=",
        "1",
        "-",
        "1e999",
        "'x'",
        "__import__('os')",
        ".",
        "lambda:",
        "0x" + "f" * 40,
        "{",
        "}",
        "*",
        "=",
        ":=",
        "await",
        "f''",
        "\n",
        "#",
        "'\\ud800'",
    ]
)


@fuzzed(600)
@example([r"size < 1 and not '\ud800' == key"])
@given(st.lists(WHERE, max_size=12))
def test_a_condition_is_an_expression_or_an_error_of_configuration(words):
    try:
        assert parse_where(" ".join(words)) is not None
    except ConfigError as error:
        said = str(error)
    else:
        return
    assert said.isprintable()


JSON = st.lists(
    st.sampled_from(
        [
            '{"a": ',
            "}",
            "[",
            "]",
            ",",
            ":",
            '"a"',
            '"\\ud800"',
            "1",
            "1e999",
            "-0",
            "NaN",
            "null",
            "9" * 5000,
            "[" * 2000,
            " ",
        ]
    ),
    max_size=12,
)


@fuzzed(600)
@example('{"a": {"b": 1, "b": 2}}')
@given(JSON.map("".join) | JSON.map(lambda words: '{"a": ' + "".join(words) + "}"))
def test_json_is_what_every_reader_takes_it_for_or_refused(text):
    try:
        document = parse_json_object(text)
    except ValueError:
        document = None
    assert are_json_objects([text.encode()]) == [document is not None]
    if document is not None:
        assert json.loads(text, object_pairs_hook=once) == document


@fuzzed(600)
@example(['{"a": 1}', '{"b": 2}] ['])
@example(["[1", "2]", "1, 2, 3"])
@example(['{"c": 3', '"d": 4}'])
@given(st.lists(JSON.map("".join) | st.sampled_from(['{"a": 1}', " {} ", "[]", '{"a": {"b": "]"}}']), max_size=5))
def test_jsons_that_are_looked_at_together_are_what_each_one_is_alone(texts):
    alone = [are_json_objects([text.encode()])[0] for text in texts]
    assert are_json_objects([text.encode() for text in texts]) == alone


def once(pairs):
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


MANIFEST = draft_dataset((2, 1)).files()["manifest.json"]
DIGEST = MANIFEST[MANIFEST.index(b' "digest": "xxh3-128:') :].split(b"\n")[0] + b"\n"


@fuzzed(600)
@given(
    mutated(MANIFEST, [b"-1", b"9" * 40, b'"', b"null", b"..", b"/", b"\\u0000", b"1.5", b"[" * 2000]), st.booleans()
)
def test_a_manifest_is_the_one_that_was_written_or_refused(data, sealed):
    if sealed:
        rest = data.replace(DIGEST, b"")
        data = data.replace(DIGEST, b' "digest": "xxh3-128:%s",\n' % hex_digest("xxh3-128", rest).encode())
    try:
        manifest = load_manifest(data)
    except FormatError:
        return
    assert dump_manifest(manifest).encode() == data
    assert all("/" not in shard.name and "\0" not in shard.name for shard in manifest.shards)


LINES = draft_dataset((2, 1)).files()["tiny-000000.idx"]


@fuzzed(600)
@given(mutated(LINES, [b" ", b"\n", b"-1", b"9" * 30, b"\xff", b"v1.1", b"\r"]))
def test_an_index_of_dali_is_read_as_it_is_written_or_refused(data):
    try:
        samples = parse_dali_index(data)
    except IndexFormatError:
        return
    assert encode_dali_index(samples) == data


LABELS = st.binary(max_size=70) | st.text("0123456789 \t\n+-_.,\u0664").map(str.encode)


@fuzzed(500)
@given(LABELS)
def test_a_label_is_a_number_of_a_class_or_none(data):
    label = parse_label(data)
    assert label is None or (0 <= label < 2**31 and data.strip(b" \t\r\n").isdigit() and label == int(data))


@fuzzed(500)
@given(st.lists(LABELS | st.integers(0, 2**31).map(b" %d\n".__mod__), min_size=1, max_size=5))
def test_labels_that_are_looked_at_together_are_what_each_one_is_alone(payloads):
    assert parse_labels(payloads) == list(map(parse_label, payloads))


# Images


def with_exif() -> bytes:
    """A progressive JPEG with an orientation, an Adobe segment and restarts."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return encode(Image.new("CMYK", (40, 24)), exif=exif, progressive=True, restart_marker_blocks=1)


IMAGES = [tiny_jpeg(0), tiny_jpeg(1), jpeg_bomb(), tiny_jpeg(1, 3000), with_exif()]
MARKERS = [b"\xff" + bytes([code]) for code in (0xC0, 0xC2, 0xC4, 0xD8, 0xD9, 0xDA, 0xDD, 0xE1, 0xEE, 0xFF, 0)]


@fuzzed(900)
@given(st.sampled_from(IMAGES).flatmap(lambda image: mutated(image, [*MARKERS, b"\0\0", b"\xff\xff", b"\0\x02"])))
def test_the_parsers_of_jpegs_answer_or_refuse(data):
    payload = np.frombuffer(data, np.uint8)
    refused = None
    try:
        inspect_jpeg(data)
    except JpegRefusal as refusal:
        refused = refusal.code
    assert whole_facts(data).whole or refused
    assert fault(payload) is None or isinstance(fault(payload), str)
    assert is_plain_jpeg(payload) in (True, False)
    assert any(head_facts(data[:length], len(data)) for length in (*HEAD_BYTES, len(data)))


@fuzzed(500)
@given(st.lists(st.sampled_from(IMAGES).flatmap(lambda image: mutated(image, MARKERS)), min_size=1, max_size=6))
def test_images_that_are_looked_at_together_are_what_each_one_is_alone(images):
    for strict in (True, False):
        plain, facts = plain_jpegs(images, strict=strict)
        for number in np.flatnonzero(plain):
            alone = inspect_jpeg(images[number], strict=strict)
            assert facts[number].tolist() == [getattr(alone, name) for name in FACTS]


# Arrow: its own reader is C++, and a crash in it must be a failed test and not the end of all.

INDEX = draft_dataset((2, 1)).files()["index.arrow"]
ARROW_NUMBERS = [
    (value % (1 << 8 * size)).to_bytes(size, "little")
    for size in (2, 4, 8)
    for value in (-1, 0, 1, 1 << 30, -(1 << 31))
]


@fuzzed(800)
@given(mutated(INDEX, ARROW_NUMBERS))
def test_where_batches_lie_is_found_or_refused(data):
    try:
        blocks = BatchBlocks(lambda offset, length: data[offset : offset + length], len(data))
        blocks.refuse_compressed(0)
    except IndexFormatError:
        return


OPENS = """
import io, random, sys, time
import pyarrow as pa
from shardkit.errors import FormatError
from shardkit.format.index import SCHEMA, DatasetIndexReader, check_rows, decode_dataset_index, decode_shard_index
from shardkit.testing.datasets import draft_dataset

seconds, start = float(sys.argv[1]), int(sys.argv[2])
files = [data for name, data in draft_dataset((2, 1)).files().items() if name.endswith(".arrow")]
wild = [-(2**63), -(2**31), -1, 0, 1, 2, 4096, 2**31 - 1, 2**32, 2**62, 2**63 - 1]

def dataset_index(data):
    for number, batch in enumerate(decode_dataset_index(data)):
        check_rows(batch, number)
        batch.to_pylist()

def reader(data):
    found = DatasetIndexReader(io.BytesIO(data))
    for number in range(len(found)):
        found.batch(number).to_pylist()

until, count = time.monotonic() + seconds, 0
while time.monotonic() < until or count < 4000:
    draw = random.Random(start + count)
    print(start + count, end="\\r", flush=True)
    data = bytearray(draw.choice(files))
    for _ in range(draw.randint(1, 4)):
        size = draw.choice((1, 2, 4, 8))
        value = draw.choice((draw.choice(wild), draw.getrandbits(64)))
        at = draw.randrange(0, len(data), draw.choice((1, size)))
        data[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
    for use in (dataset_index, reader, lambda data: decode_shard_index(data).rows.to_pylist()):
        try:
            use(bytes(data))
        except FormatError:
            pass
    assert pa.total_allocated_bytes() < 64 << 20
    count += 1
print("survived")
"""


@fuzzed(0)
def test_opening_an_index_ends_well_or_in_our_own_error():
    start = random.getrandbits(40) if SECONDS else 0
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", OPENS, str(share_s()), str(start)], timeout=100 + SECONDS,
        cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip().endswith("survived"), f"exit {done.returncode}: {done.stdout[-3000:]}"
