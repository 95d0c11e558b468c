"""Parquet as people publish it, written by pyarrow with what `datasets` puts into its schema."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardkit
from shardkit.cli.main import main
from shardkit.converting.parquet import ParquetTable
from shardkit.errors import ConfigError, FormatError, UnsafeError
from shardkit.testing.datasets import tiny_jpeg

from .conftest import members_of, order_of, refusals_of, rows_of, whole

GIVEN = {"name": "t", "shards": 2, "jobs": 1}
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
FEATURES = {"image": {"_type": "Image"}, "label": {"names": ["a", "b", "c"], "_type": "ClassLabel"}}


def schema_of(features=FEATURES, **more):
    metadata = {"huggingface": json.dumps({"info": {"features": features}})} if features else None
    kinds = {"image": IMAGE, "label": pa.int64(), "caption": pa.string(), **more}
    return pa.schema(list(kinds.items()), metadata=metadata)


def rows(numbers):
    return [{"image": {"bytes": tiny_jpeg(n), "path": f"{n}.jpg"}, "label": n % 3, "caption": f"é{n}"} for n in numbers]


def write(path, numbers, schema=None, group=4):
    path.parent.mkdir(exist_ok=True)
    table = pa.Table.from_pylist(list(numbers) if isinstance(numbers, list) else rows(numbers), schema or schema_of())
    pq.write_table(table, path, row_group_size=group)


@pytest.fixture
def published(tmp_path):
    """A folder of two files: 9 and 6 rows, in groups of 4."""
    write(tmp_path / "src" / "train-00000-of-00002.parquet", range(9))
    write(tmp_path / "src" / "train-00001-of-00002.parquet", range(9, 15))
    return f"hf:{tmp_path / 'src'}"


@pytest.mark.parametrize("jobs", [1, 2])
def test_rows_come_over_byte_for_byte_in_order(published, tmp_path, jobs):
    result = shardkit.convert(published, tmp_path / "out", **{**GIVEN, "jobs": jobs})
    members = members_of(tmp_path / "out")
    assert order_of(tmp_path / "out") == [f"{n:09d}" for n in range(15)]
    assert [members[f"{n:09d}.jpg"] for n in range(15)] == [tiny_jpeg(n) for n in range(15)]
    assert members["000000010.json"] == '{"caption":"é10"}'.encode()
    assert [row["label"] for row in rows_of(tmp_path / "out").values()] == [n % 3 for n in range(15)]
    assert list(result.manifests[None].classes) == ["a", "b", "c"]
    assert whole(tmp_path / "out")


def test_files_are_inputs_by_themselves_too(published, tmp_path):
    del published
    shardkit.convert(f"hf:{tmp_path}/src/train-*1-of-*.parquet", tmp_path / "out", **GIVEN)
    assert members_of(tmp_path / "out")["000000000.jpg"] == tiny_jpeg(9)


def test_without_words_of_datasets_labels_are_numbers(tmp_path):
    write(tmp_path / "src" / "x.parquet", range(3), schema_of(None))
    assert shardkit.convert(f"hf:{tmp_path}/src", tmp_path / "out", **GIVEN).manifests[None].classes is None


def test_a_json_column_is_the_member_itself_and_minus_one_no_label(tmp_path):
    texts = ['{"source":"x/1.jpg",  "a": 1e5}', "", None, "[1]"]
    given = [{**row, "caption": text, "label": -1} for row, text in zip(rows(range(4)), texts, strict=True)]
    write(tmp_path / "src" / "x.parquet", given)
    shardkit.convert(f"hf:{tmp_path}/src", tmp_path / "out", json_column="caption", **GIVEN)
    members = members_of(tmp_path / "out")
    assert members["000000000.json"] == texts[0].encode()
    assert members["000000002.json"] == b'{"source":"src/000000002.jpg"}'
    assert rows_of(tmp_path / "out")["000000000"]["source"] == "x/1.jpg"
    assert [line["reason"] for line in refusals_of(tmp_path / "out")] == ["bad-json"]
    assert {row["label"] for row in rows_of(tmp_path / "out").values()} == {None}
    write(tmp_path / "src" / "x.parquet", [{**row, "more": 1.5} for row in given], schema_of(more=pa.float32()))
    with pytest.raises(ConfigError, match=r"no place for; found 4 \.more"):
        shardkit.convert(f"hf:{tmp_path}/src", tmp_path / "no", json_column="caption", **GIVEN)


def test_a_path_in_the_place_of_bytes_is_not_opened(tmp_path):
    (tmp_path / "secret.jpg").write_bytes(tiny_jpeg(1))
    row = {**rows([1])[0], "image": {"bytes": None, "path": str(tmp_path / "secret.jpg")}}
    write(tmp_path / "src" / "x.parquet", [*rows(range(2)), row])
    shardkit.convert(f"hf:{tmp_path}/src", tmp_path / "out", **GIVEN)
    assert [line["reason"] for line in refusals_of(tmp_path / "out")] == ["no-image"]


def test_what_cannot_be_one_dataset_is_refused(published, tmp_path):
    with pytest.raises(ConfigError, match="in order"):
        shardkit.convert(published, tmp_path / "out", shuffle=True, **GIVEN)
    write(tmp_path / "src" / "test-00000-of-00001.parquet", range(3))
    with pytest.raises(ConfigError, match=r"several splits.*test, train"):
        shardkit.convert(published, tmp_path / "out", **GIVEN)
    (tmp_path / "src" / "test-00000-of-00001.parquet").unlink()
    write(tmp_path / "src" / "train-00001-of-00002.parquet", range(3), schema_of(None))
    with pytest.raises(FormatError, match=r"different columns or classes: .*00001"):
        shardkit.convert(published, tmp_path / "out", **GIVEN)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["cut", "inside", "link"])
def test_damage_ends_the_run_with_the_name_of_the_file(published, tmp_path, damage, capsys):
    path = tmp_path / "src" / "train-00001-of-00002.parquet"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    elif damage == "inside":
        data = bytearray(path.read_bytes())
        data[4:200] = b"\xff" * 196
        path.write_bytes(data)
    else:
        path.unlink()
        path.mkdir()
    with pytest.raises((FormatError, UnsafeError), match="00001-of"):
        shardkit.convert(published, tmp_path / "out", **GIVEN)
    with pytest.raises(SystemExit) as caught:
        main(["convert", published, str(tmp_path / "out")])
    assert caught.value.code == (9 if damage == "link" else 4)
    assert "bug" not in capsys.readouterr().err


@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("compression", ["zstd", "snappy", "gzip", "none"])
def test_a_row_group_that_is_a_bomb_is_unpacked_row_by_row(tmp_path, dictionary, compression):
    image, path = tiny_jpeg(1) + bytes(8 << 20), tmp_path / "x.parquet"
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 60, pa.int32()), pa.array([image]))
    table = pa.table({"image": column if dictionary else column.dictionary_decode()})
    pq.write_table(table, path, use_dictionary=dictionary, dictionary_pagesize_limit=1 << 30, compression=compression,
                   store_schema=False, write_batch_size=1)  # fmt: skip
    del table, column
    assert dictionary or compression == "none" or path.stat().st_size < 32 << 20
    parquet, before = ParquetTable([str(path)]), pa.total_allocated_bytes()
    for number in (0, 30, 30, 59, 2):
        assert parquet.row(number) == {"image": image}
        assert pa.total_allocated_bytes() - before < 100 << 20


@pytest.mark.parametrize(("compression", "many"), [("snappy", True), ("none", True), ("gzip", True), ("zstd", False)])
def test_rows_that_cannot_be_large_are_unpacked_many_at_a_time(tmp_path, monkeypatch, compression, many):
    path, counts = tmp_path / "x.parquet", []
    pq.write_table(pa.table({"image": pa.nulls(3000, IMAGE)}), path, compression=compression)

    class Watched(pq.ParquetFile):
        def iter_batches(self, *arguments, **options):
            for batch in super().iter_batches(*arguments, **options):
                counts.append(batch.num_rows)
                yield batch

    monkeypatch.setattr(pq, "ParquetFile", Watched)
    parquet = ParquetTable([str(path)])
    assert [parquet.row(number) for number in range(3000)] == [{"image": None}] * 3000
    assert sum(counts) == 3000
    assert (len(counts) < 150) == many


def test_class_names_that_are_no_text_end_the_run(tmp_path, capsys):
    write(tmp_path / "src" / "x.parquet", range(3), schema_of({"label": {"names": ["a", "\ud800", "c"]}}))
    with pytest.raises(SystemExit) as caught:
        main(["convert", f"hf:{tmp_path}/src", str(tmp_path / "out")])
    assert caught.value.code == 4
    assert "no text" in capsys.readouterr().err
