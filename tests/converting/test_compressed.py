"""Compressed files that are not what their index states, without the libraries that write them."""

from __future__ import annotations

import bz2
import json
import struct
import tracemalloc

import pyarrow as pa
import pytest

from shardkit.converting.columns import class_names
from shardkit.converting.compressed import CompressedFiles
from shardkit.converting.labels import Relabelling, read_labels
from shardkit.converting.litdata import LitDataTable
from shardkit.converting.options import ConvertOptions
from shardkit.errors import ConfigError, FormatError, UnsafeError

CODECS = {"br": "brotli", "bz2": "bz2", "gz": "gzip", "snappy": "snappy", "zstd": "zstd"}
RAW = struct.pack("<4I", 2, 16, 19, 23) + b"abcdefg"
SIZE = len(RAW)


def packed(name, data=RAW):
    return bz2.compress(data) if name == "bz2" else pa.compress(data, codec=CODECS[name], asbytes=True)


@pytest.fixture
def sample(tmp_path):
    """Return a function that asks for a sample of a file of those bytes."""

    def call(data, compression, number=0, count=2, sizes=(SIZE, SIZE)):
        path = tmp_path / "packed"
        path.write_bytes(data)
        return CompressedFiles(lambda _: compression).sample(str(path), number, count, sizes)

    return call


@pytest.mark.parametrize("level", ["", ":3"])
@pytest.mark.parametrize("name", CODECS)
def test_samples_of_every_compression_are_read(sample, name, level):
    assert [sample(packed(name), name + level, number) for number in (0, 1)] == [b"abc", b"defg"]


@pytest.mark.parametrize("name", CODECS)
def test_no_more_is_unpacked_than_the_index_states(sample, name):
    bomb = packed(name, RAW + bytes(64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="compressed file"):
            sample(bomb, name)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(bomb) + (1 << 20)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "data",
    [b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 50) + b"\1\0\0", b"", packed("zstd")[:-3], packed("zstd", b"\2")],
)
def test_a_stream_that_lies_about_its_size_or_is_cut_is_refused(sample, data):
    with pytest.raises(FormatError, match="compressed file"):
        sample(data, "zstd")


def test_a_count_without_its_offsets_is_refused_once(sample):
    short = struct.pack("<2I", 3_000_000, 0)
    with pytest.raises(FormatError, match="not what the index states"):
        sample(packed("zstd", short), "zstd", 0, 3_000_000, (4 * 3_000_002, 1 << 25))


@pytest.mark.parametrize("name", ["lzma", "", None, ["zstd"], 3])
def test_an_unknown_compression_is_refused(sample, name):
    with pytest.raises(FormatError, match="no known compression"):
        sample(packed("zstd"), name)


@pytest.mark.parametrize("data", [b"", b"\xff" * 9, b"\xff\xff\xff\xff\x0fabc", packed("snappy")[:-1]])
def test_a_damaged_snappy_block_is_refused(sample, data):
    with pytest.raises(FormatError, match="cannot be unpacked"):
        sample(data, "snappy")


@pytest.mark.parametrize("size", [None, "9", 7, -1, 1 << 40])
@pytest.mark.parametrize("compression", [["zstd"], {}, 3, "zstd"])
def test_an_index_of_litdata_names_its_compression_and_sizes(tmp_path, compression, size):
    spec = {"type": "builtins.dict", "context": '["image"]'}
    leaf = {"type": None, "context": None, "children_spec": []}
    config = {"data_format": ["bytes"], "data_spec": json.dumps([1, {**spec, "children_spec": [leaf]}])}
    chunks = [{"filename": "a.bin", "chunk_size": 2, "chunk_bytes": size}]
    document = {"config": {**config, "compression": compression}, "chunks": chunks}
    (tmp_path / "index.json").write_text(json.dumps(document))
    (tmp_path / "a.bin").write_bytes(packed("zstd"))
    error, what = FormatError, r"states no size.*index\.json"
    if compression != "zstd":
        what = r"names no compression.*index\.json"
    elif size == 1 << 40:
        error, what = UnsafeError, r"too large.*a\.bin"
    with pytest.raises(error, match=what):
        LitDataTable(str(tmp_path))


# Names that are no text


@pytest.mark.parametrize("names", [None, 5, "ab", {}, [None, "b"], ["a", 5], [{}], ["a", "\ud800"]])
def test_class_names_are_texts_or_the_dataset_is_damaged(names):
    with pytest.raises(FormatError, match=r"class names that are no text.*/d.*other names"):
        class_names(names, "/d")


def test_labels_of_half_a_character_are_refused_by_the_file_that_states_them(tmp_path):
    path = tmp_path / "labels.json"
    path.write_text('{"0": "\\ud800", "1": "b", "2": null}')
    with pytest.raises(ConfigError, match=r"labels\.json.*another name"):
        read_labels(str(path))
    path.write_text('{"0": "\\ud83d\\ude00", "1": "b"}')
    assert read_labels(str(path)) == {"0": "\U0001f600", "1": "b"}


@pytest.mark.parametrize("labels", [{"0": "\ud800", "1": "b"}, ["\ud800", "b"]])
def test_labels_of_half_a_character_are_refused_from_python_too(labels):
    with pytest.raises(ConfigError):
        Relabelling(ConvertOptions(name="t", labels=labels), [])
