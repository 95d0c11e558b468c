"""Chunks of LitData that end with their rows in Arrow's format, made without the library."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from shardkit.converting import litdata_footer
from shardkit.converting.litdata_footer import LitDataFooter, has_footer
from shardkit.errors import FormatError, UnsafeError

NAMES = ["image", "label"]
MAGIC = b"LDARW01\0"
FLIP = """
import sys
from shardkit.converting.litdata_footer import LitDataFooter

path, read, refused = sys.argv[1], 0, 0
whole = open(path, "rb").read()
for place in range(0, 8 * (len(whole) - 12), 3):
    data = bytearray(whole)
    data[place // 8] ^= 1 << place % 8
    with open(path, "wb") as file:
        file.write(data)
    try:
        footer = LitDataFooter(path, 6, ["image", "label"])
        read += len([footer.row(number) for number in range(6)])
    except Exception:  # refused, or a row that cannot be read
        refused += 1
assert read and refused, (read, refused)
print("survived")
"""


def rows_of(count):
    return [{"image": b"\xff\xd8" + bytes([number % 256]) * number, "label": number} for number in range(count)]


def chunk(path, rows, *, stream=False, batch=256, codec=None):
    """Write what LitData does: a number, offsets that lead to nothing, the rows, their length."""
    table, sink, options = (
        pa.Table.from_pylist(rows),
        pa.BufferOutputStream(),
        pa.ipc.IpcWriteOptions(compression=codec),
    )
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=batch)
    arrow = sink.getvalue().to_pybytes()
    header = struct.pack("<I", len(rows)) + struct.pack("<I", 4 * (len(rows) + 2)) * (len(rows) + 1)
    path.write_bytes(header + arrow + struct.pack("<I", len(arrow)) + MAGIC)
    return str(path)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [1, 255, 256, 257, 600])
def test_rows_come_in_any_order(tmp_path, count, stream):
    rows = rows_of(count)
    path = chunk(tmp_path / "chunk", rows, stream=stream)
    assert has_footer(path)
    footer = LitDataFooter(path, count, NAMES)
    assert [footer.row(number) for number in range(count)] == rows
    assert [footer.row(number) for number in reversed(range(count))] == rows[::-1]


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("stream", [False, True])
def test_compressed_rows_come_in_any_order(tmp_path, stream, codec):
    rows = rows_of(600)
    footer = LitDataFooter(chunk(tmp_path / "chunk", rows, stream=stream, codec=codec), 600, NAMES)
    assert [footer.row(number) for number in (*range(600), 0, 599, 300)] == [*rows, rows[0], rows[599], rows[300]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch, stream):
    image = bytes(40 << 20)
    path = chunk(tmp_path / "chunk", [{"image": image, "label": 1}] * 3, stream=stream, codec="zstd")
    del image
    assert Path(path).stat().st_size < 1 << 18
    monkeypatch.setattr(litdata_footer, "MAX_BYTES", 100 << 20)
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    with pytest.raises(UnsafeError, match=r"too large for memory: .*chunk; expected at most 104857600 bytes; found 12"):
        LitDataFooter(path, 3, NAMES).row(0)
    assert pool.bytes_allocated() == before
    monkeypatch.setattr(litdata_footer, "MAX_BYTES", 130 << 20)
    assert LitDataFooter(path, 3, NAMES).row(2) == {"image": bytes(40 << 20), "label": 1}


@pytest.mark.parametrize(("stated", "error"), [
    (1 << 50, UnsafeError), ((1 << 32) + 1, UnsafeError), (-2, FormatError), (-(1 << 62), FormatError),
    (1 << 10, FormatError), (1 << 24, FormatError),
])  # fmt: skip
def test_a_size_that_lies_is_no_size(tmp_path, stated, error):
    path = tmp_path / "chunk"
    rows = [{"image": bytes(1 << 20), "label": n} for n in range(3)]
    data = Path(chunk(path, rows, codec="zstd")).read_bytes()
    size = struct.pack("<q", 3 << 20)
    at = data.rindex(size)  # the one before it is the last of the offsets
    path.write_bytes(data[:at] + struct.pack("<q", stated) + data[at + 8 :])
    with pytest.raises(error):
        LitDataFooter(str(path), 3, NAMES).row(0)


def test_a_damaged_offset_is_found_before_a_value_is_read(tmp_path):
    path = tmp_path / "chunk"
    chunk(path, rows_of(6))
    data = path.read_bytes()
    offsets = struct.pack("<7i", *[0, 2, 5, 9, 14, 20, 27])
    assert data.count(offsets) == 1
    path.write_bytes(data.replace(offsets, struct.pack("<7i", *[0, 2, 5, 9, 14, 20, 67])))
    with pytest.raises(FormatError, match="rows of a chunk cannot be read"):
        LitDataFooter(str(path), 6, NAMES).row(5)


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_no_flipped_bit_ends_the_process(tmp_path, codec):
    path = chunk(tmp_path / "chunk", rows_of(6), codec=codec)
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", FLIP, path], cwd=Path(__file__).parents[2], timeout=100,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "survived", f"exit {done.returncode}: {done.stdout[-2000:]}"


@pytest.mark.parametrize(
    ("count", "names"), [(5, NAMES), (7, NAMES), (6, ["image", "lapel"]), (6, ["image"]), (6, [*NAMES, "more"])]
)
def test_a_footer_of_other_rows_than_the_index_states_is_refused(tmp_path, count, names):
    path = chunk(tmp_path / "chunk", rows_of(6))
    with pytest.raises(FormatError, match="not what the index states"):
        LitDataFooter(path, count, names).row(0)


def test_a_footer_that_states_more_than_the_file_is_refused(tmp_path):
    path = tmp_path / "chunk"
    path.write_bytes(struct.pack("<I", 1) + MAGIC)
    assert has_footer(str(path))
    with pytest.raises(FormatError, match="too short for its footer"):
        LitDataFooter(str(path), 0, NAMES)
    for data in (MAGIC, b"", bytes(20)):
        path.write_bytes(data)
        assert not has_footer(str(path))


@pytest.mark.parametrize(
    "footer", [b"", b"ARROW1", b"ARROW1\0\0", b"\xff\xff\xff\xff\0\0\0\0", b"ARROW1\0\0\xff\xff\xff\xff\0\0\0\0"]
)
def test_a_footer_without_a_row_or_a_schema_is_refused(tmp_path, footer):
    path = tmp_path / "chunk"
    path.write_bytes(bytes(20) + footer + struct.pack("<I", len(footer)) + MAGIC)
    with pytest.raises(FormatError, match="cannot be read"):
        LitDataFooter(str(path), 1, ["image"]).row(0)


@pytest.mark.parametrize("data", [b"", b"12345", MAGIC])
def test_a_file_that_is_shorter_than_a_footer_is_refused(tmp_path, data):
    (tmp_path / "chunk").write_bytes(data)
    with pytest.raises(FormatError, match="too short for its footer"):
        LitDataFooter(str(tmp_path / "chunk"), 1, ["image"])
