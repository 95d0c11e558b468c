"""A list becomes sources: labels, paths and further columns; a cell that cannot be used is an error with its row."""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import json
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardkit.errors import ConfigError, ShardkitError
from shardkit.packing.lists import scan_list

pytestmark = pytest.mark.timeout(30)
KINDS = ["csv", "jsonl", "parquet"]


@pytest.fixture
def listed(tmp_path, plant, make_options):
    """Return a function: write rows as a list of one kind beside a few images, and scan it."""
    plant("a.jpg", "b.jpg", "c.jpg", "deep/d.jpg")

    def run(rows, kind="jsonl", **options):
        path = tmp_path / "src" / f"list.{kind}"
        if isinstance(rows, bytes):
            path.write_bytes(rows)
        elif isinstance(rows, pa.Table):
            pq.write_table(rows, path)
        elif kind == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif kind == "csv":
            names = list(dict.fromkeys(name for row in rows for name in row))
            text = io.StringIO()
            writer = csv.writer(text)
            writer.writerow(names)
            writer.writerows([[row.get(name) for name in names] for row in rows])
            path.write_text(text.getvalue())
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return scan_list(os.fsencode(path), make_options(**options))

    return run


def column(sources, name):
    return sources.table[name].to_pylist()


def metadata(sources):
    return [None if text is None else json.loads(text) for text in column(sources, "metadata")]


def refusals(sources):
    return [(r.number, r.path, r.reason) for r in sources.refused]


# --- labels


@pytest.mark.parametrize("kind", KINDS)
def test_rows_keep_their_order_and_their_numbers(listed, kind):
    sources = listed([{"path": "c.jpg"}, {"path": "gone.jpg"}, {"path": "a.jpg"}], kind)
    assert (column(sources, "path"), column(sources, "number")) == ([b"c.jpg", b"a.jpg"], [0, 2])
    assert refusals(sources) == [(1, b"gone.jpg", "missing")]
    assert (sources.count_labels().labelled, sources.classes, column(sources, "label")) == (False, None, [None, None])


@pytest.mark.parametrize("kind", KINDS)
def test_whole_numbers_are_label_numbers(listed, kind):
    sources = listed([{"path": "a.jpg", "label": 7}, {"path": "b.jpg", "label": 0}], kind)
    assert (column(sources, "label"), sources.classes, sources.count_labels().labelled) == ([7, 0], None, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_numbered_in_sorted_order(listed, kind):
    sources = listed([{"path": "a.jpg", "label": "dog"}, {"path": "b.jpg", "label": "cat"}], kind)
    assert (column(sources, "label"), sources.classes) == ([1, 0], ("cat", "dog"))


def test_numbers_among_names_are_names(listed):
    sources = listed([{"path": "a.jpg", "label": 10}, {"path": "b.jpg", "label": "cat"}, {"path": "c.jpg", "label": 9}])
    assert (column(sources, "label"), sources.classes) == ([0, 2, 1], ("10", "9", "cat"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("labels", [(3, None, 1), ("dog", None, "cat")])
def test_a_row_may_lack_its_label(listed, kind, labels):
    rows = [{"path": f"{name}.jpg", "label": label} for name, label in zip("abc", labels, strict=True)]
    found = column(listed(rows, kind), "label")
    assert found == ([3, None, 1] if labels[0] == 3 else [1, None, 0])


def test_an_empty_label_is_a_missing_one(listed):
    assert column(listed([{"path": "a.jpg", "label": ""}, {"path": "b.jpg", "label": "cat"}]), "label") == [None, 0]


def test_label_numbers_that_a_tool_made_floats_are_label_numbers(listed):
    # As pandas writes a column of integers with gaps.
    rows = pa.table({"path": ["a.jpg", "b.jpg"], "label": pa.array([3.0, float("nan")])})
    assert column(listed(rows, "parquet"), "label") == [3, None]
    assert column(listed(b"path,label\na.jpg,3.0\nb.jpg,\nc.jpg,10.0\n", "csv"), "label") == [3, None, 10]
    assert column(listed([{"path": "a.jpg", "label": 3.0}]), "label") == [3]


@pytest.mark.parametrize("kind", KINDS)
def test_labels_none_leaves_labels_to_the_metadata(listed, kind):
    sources = listed([{"path": "a.jpg", "label": "cat"}], kind, labels="none")
    assert (sources.count_labels().labelled, metadata(sources)) == (False, [{"label": "cat"}])


def test_labels_column_demands_labels(listed):
    with pytest.raises(ConfigError, match="no label in a column 'label'"):
        listed([{"path": "a.jpg"}], labels="column")
    with pytest.raises(ConfigError, match="--labels dir needs a folder"):
        listed([{"path": "a.jpg"}], labels="dir")


@pytest.mark.parametrize(
    ("label", "found"), [(-1, "-1"), (True, "True"), (1.5, "1.5"), ([1], "[1]"), ({"a": 1}, "{'a': 1}")]
)
def test_what_is_no_label_is_an_error_with_its_row(listed, label, found):
    with pytest.raises(ConfigError) as caught:
        listed([{"path": "a.jpg", "label": 1}, {"path": "b.jpg", "label": label}])
    assert str(caught.value).startswith("row 2 of the list: a label is a whole number from 0 on, or a class name")
    assert str(caught.value).endswith(f"found {found}")


@pytest.mark.parametrize("label", [b"-1", b"-0007", b"2147483648", b"9" * 5000, b"9" * 99])
def test_label_numbers_beyond_the_index_are_errors(listed, label):
    with pytest.raises(ConfigError, match=r"row 2 of the list has a label that is no class.*expected 0 to 2147483647"):
        listed(b"path,label\na.jpg,1\nb.jpg," + label + b"\n", "csv")


def test_the_largest_label_is_taken(listed):
    assert column(listed([{"path": "a.jpg", "label": 2**31 - 1}]), "label") == [2**31 - 1]


def test_a_class_list_pins_names(listed):
    rows = [{"path": "a.jpg", "label": "cat"}, {"path": "b.jpg", "label": "dog"}]
    sources = listed(rows, classes=("zebra", "dog", "cat"))
    assert (column(sources, "label"), sources.classes) == ([2, 1], ("zebra", "dog", "cat"))
    with pytest.raises(ConfigError, match=r"a class that the class list does not have: .*list\.jsonl; found cat"):
        listed(rows, classes=("dog",))


def test_a_class_list_bounds_label_numbers(listed):
    rows = [{"path": "a.jpg", "label": 1}]
    sources = listed(rows, classes=("cat", "dog"))
    assert (column(sources, "label"), sources.classes) == ([1], ("cat", "dog"))
    with pytest.raises(ConfigError, match="expected 0 to 0; found 1"):
        listed(rows, classes=("cat",))


def test_a_class_list_whose_names_are_the_numbers_names_them(listed):
    assert column(listed([{"path": "a.jpg", "label": 10}], classes=("9", "10")), "label") == [1]


def test_a_class_list_without_labels_is_an_error(listed):
    with pytest.raises(ConfigError, match="a class list, but no labels"):
        listed([{"path": "a.jpg"}], classes=("cat",))


def test_class_names_are_written_as_those_of_folders(listed):
    sources = listed(b"path,label\na.jpg,100%\nb.jpg,caf\xe9\nc.jpg,\xc3\xa9\n", "csv")
    assert sources.classes == ("100%25", "caf%E9", "\u00e9")
    assert column(listed(b"path,label\na.jpg,100%\n", "csv", classes=sources.classes), "label") == [0]


# --- further columns


def test_csv_columns_are_texts_and_empty_cells_are_left_away(listed):
    sources = listed(b'path,caption,n\na.jpg,"two\nlines, ""quoted""",7\nb.jpg,,\n', "csv")
    assert metadata(sources) == [{"caption": 'two\nlines, "quoted"', "n": "7"}, None]


def test_jsonl_columns_keep_their_types(listed):
    row = {"n": 7, "x": 0.1, "t": True, "none": None, "nested": {"a": [1, {"b": "\u96ea\x00"}]}, "big": 2**80}
    assert metadata(listed([{"path": "a.jpg", **row}])) == [row]


def test_numbers_that_json_does_not_have_become_null(listed):
    sources = listed(b'{"path": "a.jpg", "x": NaN, "y": [-Infinity, 1e999, 2.5], "z": {"k": NaN}}\n')
    assert metadata(sources) == [{"x": None, "y": [None, None, 2.5], "z": {"k": None}}]


def test_parquet_columns_keep_their_types(listed):
    nanoseconds = 1_700_000_000_123_456_789
    table = pa.table(
        {
            "path": ["a.jpg"],
            "i": pa.array([2**64 - 1], pa.uint64()),
            "half": pa.array(np.array([1.5], np.float16)),
            "nan": [float("nan")],
            "nested": [[{"a": float("inf"), "b": "x"}]],
            "map": pa.array([[("k", float("nan"))]], pa.map_(pa.utf8(), pa.float64())),
            "word": pa.array(["w"]).dictionary_encode(),
            "day": [datetime.date(2024, 2, 29)],
            "time": pa.array([nanoseconds], pa.timestamp("ns")),
            "zoned": pa.array([nanoseconds], pa.timestamp("ns", "UTC")),
            "clock": pa.array([1], pa.time64("ns")),
            "took": pa.array([5], pa.duration("ns")),
            "price": [decimal.Decimal("1.50")],
        }
    )
    assert metadata(listed(table, "parquet")) == [
        {
            "i": 2**64 - 1, "half": 1.5, "nan": None, "nested": [{"a": None, "b": "x"}], "map": [["k", None]],
            "word": "w", "day": "2024-02-29", "time": "2023-11-14 22:13:20.123456789",
            "zoned": "2023-11-14 22:13:20.123456789Z", "clock": "00:00:00.000000001", "took": 5, "price": "1.50",
        }
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_a_column_of_bytes_is_an_error_before_a_row_is_read(listed, kind):
    table = pa.table({"path": ["nowhere.jpg"], "thumb": pa.array([b"\xff"], kind)})
    with pytest.raises(ConfigError, match="the column 'thumb' of the list holds bytes"):
        listed(table, "parquet")


def test_nested_bytes_are_an_error_with_the_row(listed):
    table = pa.table({"path": ["a.jpg"], "thumbs": [[b"\xff"]]})
    with pytest.raises(ConfigError, match="row 1 of the list cannot be kept as JSON: a column of bytes"):
        listed(table, "parquet")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["source", "class"])
def test_names_that_the_json_member_uses_are_refused(listed, kind, name):
    with pytest.raises(ConfigError, match=f"the column '{name}' of the list would hide shardkit's own.*rename it"):
        listed([{"path": "a.jpg", name: "x"}], kind)


@pytest.mark.parametrize("text", [b"path,x\na.jpg,caf\xe9\n", b"path,\xe9\na.jpg,x\n"])
def test_further_columns_that_are_not_utf8_are_an_error(listed, text):
    with pytest.raises(ConfigError, match="row 1 of the list has text that is not UTF-8"):
        listed(text, "csv")


def test_a_row_too_large_for_a_member_is_an_error(listed):
    with pytest.raises(ConfigError, match=r"row 1 of the list is too large.*at most 16777216 bytes"):
        listed([{"path": "a.jpg", "x": "x" * (16 << 20)}])


# --- paths


def test_paths_start_from_the_lists_folder(listed, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    (tmp_path / "src/deep/up.jpg").symlink_to("../a.jpg")
    absolute = tmp_path / "src/b.jpg"
    rows = [{"path": name} for name in ("deep/d.jpg", str(absolute), "deep/../c.jpg", "./a.jpg", "deep/up.jpg")]
    sources = listed(rows)
    assert not sources.refused
    assert sources.root == os.fsencode(tmp_path / "src")
    assert column(sources, "size") == [os.stat(tmp_path / "src" / row["path"]).st_size for row in rows]


def test_paths_may_lead_upwards(listed, tmp_path):
    (tmp_path / "up.jpg").write_bytes(b"x")
    assert column(listed([{"path": "../up.jpg"}]), "path") == [b"../up.jpg"]


def test_a_path_that_is_not_utf8_is_taken_from_csv_and_parquet(listed, tmp_path):
    with open(os.fsencode(tmp_path / "src") + b"/\xff.jpg", "wb"):
        pass
    assert column(listed(b"path\n\xff.jpg\n", "csv"), "path") == [b"\xff.jpg"]
    assert column(listed(pa.table({"path": [b"\xff.jpg"]}), "parquet"), "path") == [b"\xff.jpg"]


def test_paths_that_no_file_has_are_refused(listed, tmp_path):
    os.mkfifo(tmp_path / "src/fifo.jpg")
    (tmp_path / "src/loop.jpg").symlink_to("loop.jpg")
    names = {
        "": "bad-path", "a\0.jpg": "bad-path", "gone.jpg": "missing", "a.jpg/b.jpg": "missing", "deep": "not-a-file",
        "fifo.jpg": "not-a-file", "/dev/null": "not-a-file", "loop.jpg": "unreadable", "x" * 300: "unreadable",
    }  # fmt: skip
    sources = listed([{"path": name} for name in names])
    assert refusals(sources) == [(i, name.encode(), reason) for i, (name, reason) in enumerate(names.items())]
    assert not sources.table.num_rows


@pytest.mark.parametrize("path", [None, 7, ["a.jpg"]])
def test_a_row_without_a_path_is_an_error(listed, path):
    with pytest.raises(ConfigError, match="row 2 of the list has no text in column 'path'"):
        listed([{"path": "a.jpg"}, {"path": path}])


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_without_paths_is_an_error_that_names_its_columns(listed, kind):
    with pytest.raises(ConfigError, match=r"row 1 of the list has no column 'path'.*columns 'file', 'label'"):
        listed([{"file": "a.jpg", "label": 1}], kind)


def test_text_that_no_encoding_has_is_an_error(listed):
    for row in ({"path": "\ud800.jpg"}, {"path": "a.jpg", "label": "\ud800"}, {"path": "a.jpg", "x": "\ud800"}):
        with pytest.raises(ConfigError, match=r"row 1 of the list has .*not (text|UTF-8).*\\ud800"):
            listed([row])


# --- files


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_list_is_an_error(listed, kind):
    empty = pa.table({"path": pa.array([], pa.utf8())}) if kind == "parquet" else b"path\n" if kind == "csv" else b"\n"
    with pytest.raises(ConfigError, match="the list has no rows"):
        listed(empty, kind)


def test_a_list_of_no_bytes_is_an_error(listed):
    for kind in ("csv", "jsonl"):
        with pytest.raises(ConfigError, match="the list has no rows"):
            listed(b"", kind)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_byte_order_mark_is_passed_over(listed, kind):
    text = b"path\na.jpg\n" if kind == "csv" else b'{"path": "a.jpg"}\n'
    assert column(listed(b"\xef\xbb\xbf" + text, kind), "path") == [b"a.jpg"]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_lines_may_end_as_on_windows(listed, newline):
    csv_text = newline.join([b"path,label", b"a.jpg,cat", b"", b"b.jpg,cat", b""])
    assert listed(csv_text, "csv").classes == ("cat",)
    lines = newline.join([b'{"path": "a.jpg"}', b"  ", b'{"path": "b.jpg"}'])
    assert column(listed(lines), "path") == [b"a.jpg", b"b.jpg"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"path,label\na.jpg\n", "line 2 of the list has another number of cells.*expected 2; found 1"),
        (b"path\na.jpg\nb.jpg,1\n", "line 3 of the list has another number of cells.*expected 1; found 2"),
        (b'path\n"a"b.jpg\n', "line 2 of the list is not CSV"),
        (b'path\n"a.jpg\n', "of the list is not CSV: unexpected end of data"),
        (b"path\n" + b"x" * 200_000, "line 2 of the list is not CSV: field larger than field limit"),
        (b"path,x,x\na.jpg,1,2\n", "the list has two columns 'x'"),
        ("path\na.jpg\n".encode("utf-16"), "row 1 of the list has no column 'path'"),
    ],
)
def test_what_is_no_csv_is_an_error_with_its_line(listed, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        listed(text, "csv")
    assert str(caught.value).isprintable()


def test_a_nameless_column_is_kept(listed):
    # pandas writes its index so.
    assert metadata(listed(b",path\n0,a.jpg\n", "csv")) == [{"": "0"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"path": "a.jpg"}\n{"path"\n', "line 2 of the list is not JSON"),
        (b'["a.jpg"]\n', "line 1 of the list is not a JSON object"),
        (b'{"path": "a.jpg", "n": ' + b"9" * 5000 + b"}", "line 1 of the list is not JSON: Exceeds the limit"),
        (b'{"path": ' + b"[" * 200_000, "line 1 of the list is not JSON"),
        (b"PAR1", "line 1 of the list is not JSON"),
    ],
)
def test_what_is_no_json_is_an_error_with_its_line(listed, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        listed(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["empty", "text", "half", "footer", "pages"])
def test_what_is_no_parquet_is_an_error(listed, tmp_path, damage):
    path = tmp_path / "whole.parquet"
    pq.write_table(pa.table({"path": [f"{i}.jpg" for i in range(1000)]}), path, compression="none")
    data = path.read_bytes()
    damaged = {
        "empty": b"", "text": b"path\na.jpg\n", "half": data[: len(data) // 2],
        "footer": data[:-8] + b"\xff" * 4 + b"PAR1",
        "pages": data[:4] + b"\xff" * 200 + data[204:],
    }[damage]  # fmt: skip
    with pytest.raises(ConfigError, match="the list cannot be read as Parquet") as caught:
        listed(damaged, "parquet")
    assert "\n" not in str(caught.value)


def test_two_parquet_columns_of_one_name_are_an_error(listed):
    table = pa.Table.from_arrays([pa.array(["a.jpg"]), pa.array([1]), pa.array([2])], names=["path", "x", "x"])
    with pytest.raises(ConfigError, match="the list has two columns 'x'"):
        listed(table, "parquet")


def test_a_parquet_list_may_have_any_name(tmp_path, plant, make_options):
    root = os.fsencode(plant("a.jpg"))
    pq.write_table(pa.table({"path": ["a.jpg"]}), tmp_path / "src/x.parquet")
    os.rename(root + b"/x.parquet", root + b"/\xff.parquet")
    assert column(scan_list(root + b"/\xff.parquet", make_options()), "path") == [b"a.jpg"]


def test_a_list_that_is_no_file_is_refused_without_waiting(tmp_path, make_options):
    os.mkfifo(tmp_path / "x.csv")
    with pytest.raises(ConfigError, match="the list is not a regular file"):
        scan_list(os.fsencode(tmp_path / "x.csv"), make_options())


def test_a_list_that_may_not_be_read_is_an_error(open_folder, unprivileged, make_options):
    for kind in KINDS:
        path = open_folder / f"x.{kind}"
        path.write_bytes(b"path\n")
        path.chmod(0)
        with unprivileged(), pytest.raises(ShardkitError, match=r"cannot read the list.*EACCES") as caught:
            scan_list(os.fsencode(path), make_options())
        assert caught.value.exit_code == 6


MEASURE = """
import os, resource, sys
from shardkit.packing.lists import scan_list
from shardkit.packing.options import PackOptions
import pyarrow.parquet
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
scan_list(os.fsencode(sys.argv[1]), PackOptions(name="t"))
before = peak()
table = scan_list(os.fsencode(sys.argv[2]), PackOptions(name="t")).table
print(table.num_rows, peak() - before)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_streamed(listed, tmp_path, kind):
    # Forty megabytes of a column that is left with the rows that are refused.
    rows = 20_000
    for name, count in (("small", 10), ("large", rows)):
        table = pa.table({"path": ["gone.jpg"] * count, "caption": [f"{i:2000d}" for i in range(count)]})
        path = tmp_path / f"{name}.{kind}"
        if kind == "parquet":
            pq.write_table(table, path, row_group_size=2000)
        elif kind == "csv":
            path.write_text("path,caption\n" + "".join(f"gone.jpg,{i:2000d}\n" for i in range(count)))
        else:
            lines = (json.dumps({"path": "gone.jpg", "caption": f"{i:2000d}"}) for i in range(count))
            path.write_text("\n".join(lines))
    arguments = [sys.executable, "-c", MEASURE, *(str(tmp_path / f"{name}.{kind}") for name in ("small", "large"))]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    count, grown = map(int, done.stdout.split())
    assert count == 0
    assert grown < 20_000_000 + 400 * rows  # refusals are Python objects
