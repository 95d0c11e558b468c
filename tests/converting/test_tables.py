"""Other frameworks' datasets as inputs, by a table of our own in the place of the library's."""

from __future__ import annotations

import io
import json
import os
import signal
import sys

import pytest
from PIL import Image

import shardkit
from shardkit.cli.main import main
from shardkit.converting import tables
from shardkit.converting.columns import Column
from shardkit.errors import CapabilityError, ConfigError, FormatError, SourceError, UnsafeError
from shardkit.extracting.run import extract
from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.packs import StopAfter, contents

from .conftest import members_of, order_of, refusals_of, rows_of, whole

GIVEN = {"name": "t", "shards": 3, "jobs": 1}
IMAGE, LABEL, NAME = Column("image", "image"), Column("label", "class", ("a", "b", "c")), Column("name", "text")


class Table:
    """Rows in memory."""

    in_order = False

    def __init__(self, columns, rows, file):
        self.columns, self.rows, self.files = columns, rows, [file]

    def __len__(self):
        return len(self.rows)

    def row(self, number):
        if isinstance(self.rows[number], Exception):
            raise self.rows[number]
        return self.rows[number]


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Return a function: makes `mds:` stand for columns and rows."""

    def make(columns, rows):
        (tmp_path / "src").mkdir(exist_ok=True)
        file = tmp_path / "src" / "data"
        file.write_bytes(b"x")
        os.utime(file, ns=(5, 5))
        monkeypatch.setitem(tables.TABLES, "mds", lambda path: Table(columns, rows, str(file)))
        return f"mds:{tmp_path / 'src'}"

    return make


def code(command, arguments):
    """Run a command in this process, which keeps its signals' handlers; return its exit code."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit) as caught:
            command(arguments)
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    return caught.value.code


def rows(count=20, **more):
    return [
        {"image": tiny_jpeg(number), "label": number % 3, "name": f"n{number}"}
        | {name: value(number) for name, value in more.items()}
        for number in range(count)
    ]


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_become_samples_byte_for_byte(serve, tmp_path, shuffle):
    result = shardkit.convert(serve((IMAGE, LABEL, NAME), rows()), tmp_path / "out", shuffle=shuffle, **GIVEN)
    expected = {}
    for number in range(20):
        key = f"{number:09d}"
        expected |= {f"{key}.jpg": tiny_jpeg(number), f"{key}.cls": b"%d" % (number % 3)}
        expected |= {f"{key}.json": b'{"name":"n%d"}' % number}
    assert members_of(tmp_path / "out") == expected
    assert (order_of(tmp_path / "out") == sorted(order_of(tmp_path / "out"))) != shuffle
    assert list(result.manifests[None].classes) == ["a", "b", "c"]
    assert rows_of(tmp_path / "out")["000000004"]["source"] == "src/000000004.jpg"
    assert whole(tmp_path / "out")


def tiny_png():
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "PNG")
    return file.getvalue()


def sources_of(path):
    return [row["source"] for row in rows_of(path).values()]


def test_rows_are_extracted_under_the_extension_of_what_is_stored(serve, tmp_path):
    images = [tiny_jpeg(1), b"GIF89a and so on", b"\0\xff what nobody knows", tiny_png()]
    taken = [{"image": image, "label": None} for image in images]
    shardkit.convert(serve((IMAGE, LABEL), taken), tmp_path / "out", **{**GIVEN, "shards": 1}, check="none")
    names = [f"src/{n:09d}.{end}" for n, end in enumerate(("jpg", "gif", "bin", "png"))]
    assert sources_of(tmp_path / "out") == names
    assert members_of(tmp_path / "out")["000000001.json"] == b'{"source":"src/000000001.gif"}'
    assert extract(tmp_path / "out", tmp_path / "tree").renamed == 0
    assert contents(tmp_path / "tree") == dict(zip(names, images, strict=True))


def test_what_is_converted_is_called_as_what_it_becomes(serve, tmp_path):
    shardkit.convert(serve((IMAGE,), [{"image": tiny_png()}]), tmp_path / "out", convert=True, **{**GIVEN, "shards": 1})
    assert sources_of(tmp_path / "out") == ["src/000000000.jpg"]


@pytest.mark.parametrize(("keys", "names"), [
    (["a.JPG", "b/c.png"], ["a.JPG", "b/c.png"]),
    (["a", "b.jpg/c"], ["a.jpg", "b.jpg/c.jpg"]),
    (["a", "a.jpg", "a.jpg.jpg"], ["a.jpg", "a.jpg.jpg", "a.jpg.jpg.jpg"]),
    (["a.txt", "b.jpg"], ["a.txt.jpg", "b.jpg.jpg"]),
])  # fmt: skip
def test_keys_that_all_name_images_are_names_of_files_and_no_two_rows_have_one(serve, tmp_path, keys, names):
    source = serve((IMAGE, NAME), [{"image": tiny_jpeg(n), "name": key} for n, key in enumerate(keys)])
    shardkit.convert(source, tmp_path / "out", key_column="name", **{**GIVEN, "shards": 1})
    assert sources_of(tmp_path / "out") == [f"src/{name}" for name in names]
    extract(tmp_path / "out", tmp_path / "tree")
    # Of files a JPEG is not called .png.
    assert contents(tmp_path / "tree") == {
        f"src/{name.replace('.png', '.jpg')}": tiny_jpeg(n) for n, name in enumerate(names)
    }


def test_keys_come_from_a_column(serve, tmp_path):
    source = serve((IMAGE, LABEL, NAME), rows(3))
    shardkit.convert(source, tmp_path / "out", key_column="name", **GIVEN)
    assert order_of(tmp_path / "out") == ["n0", "n1", "n2"]
    assert "n0.json" not in members_of(tmp_path / "out")
    source = serve((IMAGE, LABEL, NAME), [*rows(3), {"image": tiny_jpeg(1), "label": 0, "name": "n1"}])
    with pytest.raises(ConfigError, match="n1"):
        shardkit.convert(source, tmp_path / "twice", key_column="name", **GIVEN)


def test_what_is_not_clear_is_asked(serve, tmp_path, capsys):
    second, height = Column("mask", "bytes"), Column("height", "int")
    source = serve((IMAGE, second, LABEL, height), rows(3, mask=lambda _: b"m", height=lambda n: 9))
    assert code(main, ["convert", source, str(tmp_path / "out")]) == 2
    assert "image (image), mask (bytes)" in capsys.readouterr().err
    assert code(main, ["convert", source, str(tmp_path / "out"), "--image-column", "image"]) == 2
    message = capsys.readouterr().err
    assert "label (class), height (int)" in message
    assert "--label-column" in message
    columns = ["--image-column", "image", "--label-column", "label"]
    assert code(main, ["convert", source, str(tmp_path / "out"), *columns]) == 2
    assert "3 .mask" in capsys.readouterr().err
    assert (
        code(main, ["convert", source, str(tmp_path / "out"), *columns, "--other-members", "drop", "--jobs", "1"]) == 0
    )
    assert "3 .mask members" in capsys.readouterr().out
    assert members_of(tmp_path / "out")["000000000.json"] == b'{"height":9}'
    with pytest.raises(ConfigError, match=r"no column name that can be the label.*int or class"):
        shardkit.convert(source, tmp_path / "no", image_column="image", label_column="name", **GIVEN)
    shardkit.convert(source, tmp_path / "bare", image_column="image", label_column="", other_members="drop", **GIVEN)
    assert members_of(tmp_path / "bare")["000000001.json"] == b'{"label":1,"height":9}'


def test_a_bad_row_is_refused_and_the_others_go_on(serve, tmp_path):
    bad = [
        ValueError("torn"),
        {"image": None, "label": 0, "name": ""},
        {"image": tiny_jpeg(1), "label": 3, "name": ""},
        {"image": tiny_jpeg(1), "label": 1, "name": float("nan")},
        {"image": b"no jpeg", "label": 1, "name": ""},
        {"image": b"", "label": 1, "name": ""},
    ]
    source = serve((IMAGE, LABEL, NAME), [*rows(2), *bad, {"image": tiny_jpeg(9), "label": -1, "name": "z"}])
    result = shardkit.convert(source, tmp_path / "out", **{**GIVEN, "shards": 1})
    reasons = {line["path"]: line["reason"] for line in refusals_of(tmp_path / "out")}
    assert list(reasons.values()) == ["unreadable", "no-image", "bad-label", "bad-json", "not-jpeg", "empty"]
    assert sorted(reasons) == [f"src/{number:09d}" for number in range(2, 8)]
    assert result.refused == 6
    assert order_of(tmp_path / "out") == ["000000000", "000000001", "000000008"]
    assert rows_of(tmp_path / "out")["000000008"]["label"] is None
    with pytest.raises(SourceError, match="torn"):
        shardkit.convert(source, tmp_path / "stop", on_error="fail", **GIVEN)


def test_a_row_that_changes_between_the_readings_is_refused(serve, tmp_path, monkeypatch):
    taken = rows(3)
    source = serve((IMAGE, LABEL, NAME), taken)
    plan_part = shardkit.converting.run.plan_part

    def change(*arguments):
        taken[1] = {**taken[1], "image": tiny_jpeg(50)}
        return plan_part(*arguments)

    monkeypatch.setattr(shardkit.converting.run, "plan_part", change)
    shardkit.convert(source, tmp_path / "out", **GIVEN)
    assert [line["reason"] for line in refusals_of(tmp_path / "out")] == ["changed"]


def test_an_interrupted_conversion_goes_on(serve, tmp_path):
    source = serve((IMAGE, LABEL, NAME), rows())
    shardkit.convert(source, tmp_path / "whole", **GIVEN)
    with pytest.raises(StopAfter.Stop):
        shardkit.convert(source, tmp_path / "out", progress=StopAfter(1), **GIVEN)
    result = shardkit.convert(source, tmp_path / "out", resume=True, **GIVEN)
    assert result.parts[None].kept == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    with pytest.raises(StopAfter.Stop):
        shardkit.convert(source, tmp_path / "out", progress=StopAfter(1), overwrite=True, **GIVEN)
    os.utime(tmp_path / "src" / "data", ns=(6, 6))
    with pytest.raises(ConfigError, match="modified in the meantime"):
        shardkit.convert(source, tmp_path / "out", resume=True, **GIVEN)


def test_nothing_of_a_foreign_dataset_is_tried_for_shared_blocks(serve, tmp_path):
    source = serve((IMAGE, LABEL, NAME), rows())
    (tmp_path / "src" / "data").write_bytes(bytes(1 << 20))
    given = {**GIVEN, "reflink": "auto"}
    assert shardkit.convert(source, tmp_path / "out", **given).parts[None].shared_bytes == 0
    assert whole(tmp_path / "out")


def test_a_dataset_and_a_foreign_one_become_one(serve, packed, tmp_path):
    source = serve((IMAGE, LABEL, NAME), rows(3))
    given = {**GIVEN, "split": {"x": "0.5", "y": "0.5"}}
    result = shardkit.convert([packed, source], tmp_path / "out", **{**given, "shards": 1})
    assert sum(manifest.totals.samples for manifest in result.manifests.values()) == 33
    with pytest.raises(ConfigError, match="lie in one another"):
        shardkit.convert(source, tmp_path / "src" / "out", **GIVEN)
    with pytest.raises(ConfigError, match="no input has columns"):
        shardkit.convert(packed, tmp_path / "no", image_column="jpg", **GIVEN)
    with pytest.raises(ConfigError, match="cannot be shared"):
        shardkit.convert(source, tmp_path / "no", reflink="always", **GIVEN)
    with pytest.raises(UnsafeError, match="only local files"):
        shardkit.convert("hf://datasets/x", tmp_path / "no", **GIVEN)
    with pytest.raises(ConfigError, match="no such input"):
        shardkit.convert("hf:nothing", tmp_path / "no", **GIVEN)
    assert not (tmp_path / "no").exists()


# --- indexes that are looked at before any library is


def mds_index(encoding="jpeg", basename="shard.00000.mds", samples=1, **more):
    shard = {
        "column_encodings": [encoding], "column_names": ["image"], "column_sizes": [None], "compression": None,
        "format": "mds", "hashes": [], "raw_data": {"basename": basename, "bytes": 99, "hashes": {}},
        "samples": samples, "size_limit": None, "version": 2, "zip_data": None,
    }  # fmt: skip
    return {"version": 2, "shards": [shard | more]}


def litdata_index(data_format="jpeg", filename="chunk-0-0.bin", type_name="builtins.dict", **more):
    leaf = {"type": None, "context": None, "children_spec": []}
    spec = json.dumps([1, {"type": type_name, "context": '["image"]', "children_spec": [leaf]}])
    config = {"compression": None, "data_format": [data_format], "data_spec": spec, "item_loader": "PyTreeLoader"}
    return {"chunks": [{"chunk_bytes": 99, "chunk_size": 1, "filename": filename}], "config": config | more}


def hf_state(name="data.arrow"):
    return {"_data_files": [{"filename": name}]}


REFUSED = [
    ("mds", mds_index("pkl"), UnsafeError, "pickles"),
    ("mds", mds_index(basename="../x"), UnsafeError, "outside"),
    ("mds", mds_index(basename="/etc/passwd"), UnsafeError, "outside"),
    ("mds", mds_index(basename="gone.mds", zip_data={"basename": "../x.zstd"}), UnsafeError, "outside"),
    ("mds", mds_index(basename="gone.mds", zip_data={"basename": "x.zstd"}), FormatError, "not there"),
    ("mds", mds_index("jpeg", "gone.mds", 25, zip_data={"basename": "data.arrow"}), FormatError, "samples fit into"),
    ("mds", mds_index(basename="gone.mds"), FormatError, "not there"),
    ("mds", mds_index(samples=1 << 30), FormatError, "too short"),
    ("mds", {"shards": [3]}, FormatError, "no shards"),
    ("litdata", litdata_index("pickle"), UnsafeError, "pickles"),
    ("litdata", litdata_index("graph:pickle"), UnsafeError, "pickles"),
    ("litdata", litdata_index("graph:any"), UnsafeError, "pickles"),
    ("litdata", litdata_index(filename="a/../../x"), UnsafeError, "outside"),
    ("litdata", litdata_index(type_name="os.system"), ConfigError, "flat dicts"),
    ("litdata", litdata_index(encryption={"level": "chunk"}), ConfigError, "encryption"),
    ("litdata", litdata_index(filename="gone.zstd.bin", compression="zstd"), FormatError, "not there"),
    ("litdata", litdata_index(item_loader="TokensLoader"), ConfigError, "flat dicts"),
    ("litdata", {"chunks": []}, FormatError, "no chunks"),
    ("hf", hf_state("../data.arrow"), UnsafeError, "outside"),
    ("hf", hf_state("gone.arrow"), FormatError, "not there"),
]


@pytest.fixture
def folder(tmp_path):
    """Return a function: a folder with an index as `kind` has it, and files it may name."""

    def make(kind, index):
        path = tmp_path / "foreign"
        path.mkdir()
        (path / ("state.json" if kind == "hf" else "index.json")).write_text(json.dumps(index))
        for name in ("shard.00000.mds", "chunk-0-0.bin", "data.arrow"):
            (path / name).write_bytes(bytes(99))
        return f"{kind}:{path}"

    return make


@pytest.mark.parametrize(("kind", "index", "error", "message"), REFUSED)
def test_a_dataset_that_would_run_or_reach_something_is_refused(folder, tmp_path, kind, index, error, message):
    with pytest.raises(error, match=message):
        shardkit.convert(folder(kind, index), tmp_path / "out", **GIVEN)
    assert not (tmp_path / "out").exists()


def test_several_splits_are_named(tmp_path, capsys):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert code(main, ["convert", f"hf:{tmp_path}", str(tmp_path.parent / "out")]) == 2
    assert "train, test" in capsys.readouterr().err


LIBRARIES = [
    ("mds", "streaming", mds_index()), ("litdata", "litdata", litdata_index()), ("hf", "datasets", hf_state()),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "library", "index"), LIBRARIES)
def test_a_missing_library_is_named(folder, tmp_path, capsys, monkeypatch, kind, library, index):
    monkeypatch.setitem(sys.modules, library, None)
    source = folder(kind, index)
    assert code(main, ["convert", source, str(tmp_path / "out")]) == 7
    assert f"pip install 'shardkit[{kind}]'" in capsys.readouterr().err
    with pytest.raises(CapabilityError):
        shardkit.convert(source, tmp_path / "out", **GIVEN)
    assert not (tmp_path / "out").exists()
