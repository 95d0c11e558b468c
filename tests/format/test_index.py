from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import IndexFormatError, UnsupportedVersionError
from shardkit.format.index import (
    FORMAT_VERSION,
    SCHEMA,
    DatasetIndexReader,
    IndexHeader,
    SampleRow,
    check_rows,
    decode_dataset_index,
    decode_shard_index,
    encode_shard_index,
    write_dataset_index,
)

HEADER = IndexHeader(shard="photos-000000.tar", shard_bytes=40960, digest="xxh3-128:" + "0" * 32, align=4096)


def row(number=0, **changes):
    values = {
        "key": f"cat/{number}", "label": number % 3, "offset": 4096 * (number + 1), "size": 900,
        "crc32c": 0xFFFFFFFF - number, "sample_offset": 4096 * number, "sample_size": 5120, "json_offset": 0,
        "json_size": 0, "width": 640, "height": 480, "sof": 2, "components": 3, "subsampling": 2, "precision": 8,
        "scans": 10, "restart_interval": 0, "orientation": 6, "adobe_transform": -1, "media_type": 1,
        "source": f"cat/{number} \u732b.jpg",
    }  # fmt: skip
    return SampleRow(**values | changes)


ROWS = [row(number) for number in range(3)]
DATA = encode_shard_index(ROWS, HEADER)


def as_rows(batch):
    return [SampleRow(**values) for values in batch.to_pylist()]


def numbers(bits, *, signed=False):
    return st.integers(-(1 << bits - 1), (1 << bits - 1) - 1) if signed else st.integers(0, (1 << bits) - 1)


BY_TYPE = {
    pa.utf8(): st.text(max_size=30), pa.int8(): numbers(8, signed=True), pa.int32(): numbers(32, signed=True),
    pa.uint8(): numbers(8), pa.uint16(): numbers(16), pa.uint32(): numbers(32), pa.uint64(): numbers(64),
}  # fmt: skip
ANY_ROW = st.builds(
    SampleRow, **{f.name: BY_TYPE[f.type] | st.none() if f.nullable else BY_TYPE[f.type] for f in SCHEMA}
)
ANY_ROWS = st.lists(ANY_ROW, max_size=6)


def test_the_rows_and_the_schema_have_the_same_fields():
    assert tuple(SCHEMA.names) == SampleRow._fields
    assert [field.name for field in SCHEMA if field.nullable] == ["label"]


@given(ANY_ROWS)
def test_a_decoded_index_is_what_was_encoded(rows):
    index = decode_shard_index(encode_shard_index(rows, HEADER))
    assert as_rows(index.rows) == rows
    assert index.header == HEADER


@given(st.lists(ANY_ROWS, max_size=4))
def test_the_dataset_index_is_the_shards_batches_in_order(shards):
    sink = io.BytesIO()
    write_dataset_index((decode_shard_index(encode_shard_index(rows, HEADER)).rows for rows in shards), sink)
    batches = decode_dataset_index(sink.getvalue())
    assert [as_rows(batch) for batch in batches] == shards
    reader = DatasetIndexReader(io.BytesIO(sink.getvalue()))
    assert [as_rows(reader.batch(number)) for number in range(len(reader))] == shards
    for number, batch in enumerate(batches):
        check_rows(batch, number)


def test_equal_rows_are_equal_bytes_in_another_process_too():
    code = "import sys; sys.path[:0] = sys.argv[1:]; import test_index; sys.stdout.buffer.write(test_index.DATA)"
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    assert subprocess.run([sys.executable, "-c", code, *folders], check=True, stdout=subprocess.PIPE).stdout == DATA


def test_any_arrow_reader_opens_it(tmp_path):
    (tmp_path / "a.arrow").write_bytes(DATA)
    with pa.memory_map(str(tmp_path / "a.arrow")) as file:
        table = pa.ipc.open_file(file).read_all()
        assert table.schema.equals(SCHEMA)
        assert table.schema.metadata[b"shardkit.shard"] == b"photos-000000.tar"
        assert [SampleRow(**values) for values in table.to_pylist()] == ROWS


def test_columns_are_views_into_the_file():
    buffer = pa.py_buffer(DATA)
    for batch in (decode_shard_index(buffer).rows, decode_dataset_index(buffer)[0]):
        for column in batch.columns:
            for part in column.buffers():
                assert part is None or buffer.address <= part.address < buffer.address + buffer.size
        offsets = batch.column("offset").to_numpy(zero_copy_only=True)
        assert offsets.dtype == np.uint64
        assert offsets.tolist() == [r.offset for r in ROWS]


def test_the_sink_stays_open():
    sink = io.BytesIO()
    write_dataset_index([], sink)
    assert not sink.closed
    assert decode_dataset_index(sink.getvalue()) == []


class FailingDisk(io.BytesIO):
    """Fails every read after the footer's."""

    broken = False

    def read(self, size=-1, /):
        if self.broken:
            raise OSError(5, "Input/output error")
        return super().read(size)


def test_a_failed_read_is_named_as_the_cause():
    disk = FailingDisk(DATA)
    reader = DatasetIndexReader(disk)
    disk.broken = True
    with pytest.raises(IndexFormatError) as failure:
        reader.batch(0)
    assert isinstance(failure.value.__cause__, OSError)


def arrow_file(schema, *batches):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def metadata(**changes):
    texts = {"format_version": "1", "shard": "a.tar", "shard_bytes": "20480", "digest": "xxh3-128:0", "align": "4096"}
    return {f"shardkit.{name}": value for name, value in (texts | changes).items() if value is not None}


BATCH = decode_shard_index(DATA).rows


def with_metadata(**changes):
    schema = SCHEMA.with_metadata(metadata(**changes))
    return arrow_file(schema, BATCH.replace_schema_metadata(schema.metadata))


def test_metadata_that_we_write_is_taken():
    header = IndexHeader(shard="a.tar", shard_bytes=20480, digest="xxh3-128:0", align=4096)
    assert decode_shard_index(with_metadata()).header == header


@pytest.mark.parametrize(
    "changes",
    [{"format_version": v} for v in (None, "", "0", "-1", "01", " 1", "1.0", "\u0661", "9" * 5000)]
    + [{"shard": v} for v in (None, "")]
    + [{"digest": v} for v in (None, "")]
    + [{name: v} for name in ("shard_bytes", "align") for v in (None, "", "-1", "1_000", " 1", "0x10", "9" * 5000)],
    ids=lambda changes: "{}={!r:.12}".format(*next(iter(changes.items()))),
)
def test_metadata_that_we_never_write_is_refused(changes):
    with pytest.raises(IndexFormatError):
        decode_shard_index(with_metadata(**changes))


@pytest.mark.parametrize("decode", [decode_shard_index, decode_dataset_index])
def test_a_newer_format_is_refused_with_the_remedy_even_with_other_columns(decode):
    schema = pa.schema([("key", pa.utf8())], metadata=metadata(format_version=str(FORMAT_VERSION + 1)))
    with pytest.raises(UnsupportedVersionError, match="upgrade shardkit"):
        decode(arrow_file(schema))


@pytest.mark.parametrize("decode", [decode_shard_index, decode_dataset_index])
@pytest.mark.parametrize(
    "schema",
    [
        SCHEMA.remove(3), SCHEMA.append(pa.field("more", pa.int8())), SCHEMA.set(0, pa.field("key", pa.large_utf8())),
        SCHEMA.set(2, pa.field("offset", pa.uint32())), SCHEMA.set(0, pa.field("key", pa.utf8())),
        SCHEMA.set(0, pa.field("key", pa.dictionary(pa.int32(), pa.utf8()), nullable=False)),
    ],
    ids=["missing", "surplus", "large", "narrow", "nullable", "dictionary"],
)  # fmt: skip
def test_other_columns_are_refused(decode, schema):
    with pytest.raises(IndexFormatError, match="other columns"):
        decode(arrow_file(schema.with_metadata(metadata())))


@pytest.mark.parametrize("count", [0, 2])
def test_a_shard_index_of_other_than_one_batch_is_refused(count):
    schema = SCHEMA.with_metadata(metadata())
    with pytest.raises(IndexFormatError, match="one record batch"):
        decode_shard_index(arrow_file(schema, *[BATCH.replace_schema_metadata(schema.metadata)] * count))


@pytest.mark.parametrize("name", [name for name in SCHEMA.names if name != "label"])
def test_a_missing_value_is_refused(name):
    at = SCHEMA.names.index(name)
    hollow = pa.nulls(len(ROWS), SCHEMA.field(at).type)
    schema = SCHEMA.with_metadata(metadata())
    columns = [hollow if i == at else column for i, column in enumerate(BATCH.columns)]
    data = arrow_file(schema, pa.RecordBatch.from_arrays(columns, schema=schema))
    for decode in (decode_shard_index, decode_dataset_index):
        with pytest.raises(IndexFormatError, match=f"nulls.*{name}"):
            decode(data)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_buffers_are_refused_before_they_are_unpacked(compression):
    schema = SCHEMA.with_metadata(metadata())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(BATCH.replace_schema_metadata(schema.metadata))
    data = bytes(sink.getvalue())
    reader = DatasetIndexReader(io.BytesIO(data))
    unpacked = pa.total_allocated_bytes()
    for decode in (decode_shard_index, decode_dataset_index, lambda _: reader.batch(0)):
        with pytest.raises(IndexFormatError, match="is compressed"):
            decode(data)
    assert pa.total_allocated_bytes() == unpacked


def test_every_cut_is_refused():
    for length in range(len(DATA)):
        with pytest.raises(IndexFormatError):
            decode_shard_index(DATA[:length])


@settings(max_examples=200)
@given(st.binary(max_size=100) | st.binary(max_size=100).map(b"ARROW1\0\0".__add__))
def test_any_bytes_are_refused_and_nothing_else_happens(data):
    for decode in (decode_shard_index, decode_dataset_index):
        with pytest.raises(IndexFormatError):
            decode(data)


def text_offsets_at(name):
    """Return where in DATA the int32 offsets of a text column lie."""
    base = pa.py_buffer(DATA)
    return decode_dataset_index(base)[0].column(name).buffers()[1].address - base.address


@pytest.mark.parametrize("name", ["key", "source"])
@pytest.mark.parametrize("wild", [-1, -(2**31), 2**31 - 1, 1000])
def test_a_wild_text_offset_is_never_followed(name, wild):
    damaged = bytearray(DATA)
    at = text_offsets_at(name) + 4  # the end of the first text; Arrow's cheap check looks at the outer two only
    damaged[at : at + 4] = wild.to_bytes(4, "little", signed=True)
    with pytest.raises(IndexFormatError, match="damaged"):
        decode_shard_index(bytes(damaged))
    (batch,) = decode_dataset_index(bytes(damaged))
    with pytest.raises(IndexFormatError, match="batch 7 of the index is damaged"):
        check_rows(batch, 7)
    with pytest.raises(IndexFormatError, match="damaged"):
        DatasetIndexReader(io.BytesIO(damaged)).batch(0)


def test_a_text_that_is_not_utf8_is_refused():
    damaged = DATA.replace("\u732b".encode(), b"\xff\xff\xff")
    with pytest.raises(IndexFormatError, match="UTF8"):
        decode_shard_index(damaged)
    with pytest.raises(IndexFormatError, match="UTF8"):
        check_rows(decode_dataset_index(damaged)[0], 0)


# Runs alone, so that a crash inside Arrow is a failed test and not the end of all tests.
HOSTILE = """
import io, random, sys, traceback
from shardkit.errors import IndexFormatError, UnsupportedVersionError
from shardkit.format.index import (
    SCHEMA, DatasetIndexReader, check_rows, decode_dataset_index, decode_shard_index
)

DATA = open(sys.argv[1], "rb").read()

def use(data):
    for decode in (shard_index, dataset_index, reader):
        try:
            decode(data)
        except (IndexFormatError, UnsupportedVersionError):
            pass

def shard_index(data):
    decode_shard_index(data).rows.to_pylist()

def reader(data):
    reader = DatasetIndexReader(io.BytesIO(data))
    for number in range(len(reader)):
        reader.batch(number).to_pylist()

def dataset_index(data):
    for number, batch in enumerate(decode_dataset_index(data)):
        for name in SCHEMA.names:
            column = batch.column(name)
            if name not in ("key", "source"):
                column.to_numpy(zero_copy_only=False).sum()
        check_rows(batch, number)
        batch.to_pylist()

def flips():
    for at in range(len(DATA)):
        for mask in (1 << at % 8, 0xFF):
            yield at, bytes([DATA[at] ^ mask])

def numbers(count):
    draw = random.Random(5)
    values = [-(2**63), -(2**31), -1, 0, 1, 2, 7, len(DATA), 2**31 - 1, 2**32, 2**62, 2**63 - 1]
    for _ in range(count):
        size = draw.choice((1, 2, 4, 8))
        value = draw.choice(values) + draw.choice((-1, 0, 1))
        yield draw.randrange(0, len(DATA), size), (value % (1 << 8 * size)).to_bytes(size, "little")

for at, piece in (*flips(), *numbers(3000)):
    try:
        use(DATA[:at] + piece + DATA[at + len(piece):])
    except BaseException:
        print("at", at, piece, flush=True)
        traceback.print_exc(file=sys.stdout)
        sys.exit(1)
print("survived")
"""


def test_no_changed_byte_crashes_hangs_or_raises_another_error(tmp_path):
    rows = [row(number, label=None if number == 1 else number) for number in range(3)]
    (tmp_path / "a.arrow").write_bytes(encode_shard_index(rows, HEADER))
    root = str(Path(__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", HOSTILE, str(tmp_path / "a.arrow")], cwd=root, timeout=100,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert run.stdout.strip() == "survived", f"exit {run.returncode}: {run.stdout[-3000:]}"
