"""Conditions on what images' headers say, of inputs without an index."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import shardkit
from shardkit.converting import facts as facts_module
from shardkit.dataset.selection import select as pick
from shardkit.format.where import parse_where
from shardkit.indexing.images import head_facts
from shardkit.testing.datasets import tiny_jpeg

from .conftest import order_of

FACTS = [
    "width >= 40", "height < 20", "components == 1", "sof == 2 or orientation == 6", "media_type != 1", "width == 0",
    "subsampling > 1 and precision == 8", "adobe_transform == -1", "restart_interval == 0 and label > 1",
]  # fmt: skip


def pictures():
    """Images that differ in what their headers say, one with a long EXIF block before it, one that is none."""
    for number, (mode, size) in enumerate([("L", (50, 10)), ("RGB", (30, 40)), ("RGB", (64, 64)), ("CMYK", (48, 16))]):
        out, exif = io.BytesIO(), Image.Exif()
        exif[0x0112], exif[0x010E] = 6, "x" * (20_000 * number)
        Image.new(mode, size).save(out, "JPEG", progressive=number == 2, subsampling=2, exif=exif if number else b"")
        yield f"n{number}", out.getvalue()
    out = io.BytesIO()
    Image.new("RGB", (70, 9)).save(out, "PNG")
    yield "png", out.getvalue()
    yield "cut", tiny_jpeg(3)[:20]


@pytest.mark.parametrize("where", FACTS)
def test_what_has_no_index_is_asked_for_the_facts_of_headers(write_tar, tmp_path, where):
    """As the index of those tars answers, from their first bytes."""
    images = dict(pictures())
    members = [m for n, (key, data) in enumerate(images.items())
               for m in ((f"{key}.jpg", data), (f"{key}.cls", b"%d" % n))]  # fmt: skip
    tar = write_tar("in/a.tar", members)
    shardkit.index([tar], out=tmp_path / "index", facts="header", jobs=1)
    opened = shardkit.open(tmp_path / "index")
    chosen = [opened[number].key for number in pick(opened, where=parse_where(where))]
    assert 0 < len(chosen) < len(images)
    rows = [{"image": {"bytes": data, "path": None}, "label": n, "key": key}
            for n, (key, data) in enumerate(images.items())]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "tree").mkdir()
    for key, data in images.items():
        (tmp_path / "tree" / f"{key}.jpg").write_bytes(data)
    sources = [tar, f"hf:{tmp_path / 'rows.parquet'}"]
    sources += [] if "label" in where else [f"tree:{tmp_path / 'tree'}"]
    for number, source in enumerate(sources):
        given = {"check": "none", "jobs": 1} | ({"key_column": "key"} if number == 1 else {})
        out = tmp_path / f"out{number}"
        shardkit.convert(source, out, where=where, **given)
        assert sorted(order_of(out)) == sorted(chosen)


def test_headers_are_read_only_for_a_condition_on_them(write_tar, sample, tmp_path, monkeypatch):
    looked = []
    monkeypatch.setattr(facts_module, "head_facts", lambda *given: looked.append(given) or head_facts(*given))
    tar = write_tar("x.tar", [m for n in range(3) for m in sample(n, label=n)])
    shardkit.convert(tar, tmp_path / "one", where="label < 2 and size > 1", jobs=1)
    assert looked == []
    shardkit.convert(tar, tmp_path / "two", where="label < 2 and width > 1", jobs=1)
    assert [len(head) for head, _ in looked] == [len(tiny_jpeg(n)) for n in range(3)]
