"""Where things are written is a path of this machine: a URL never becomes a folder."""

from __future__ import annotations

import pytest

import shardkit
from shardkit.errors import ConfigError
from shardkit.extracting.run import extract
from shardkit.local_path import local_path
from shardkit.testing.images import coloured, write_pictures

URL = "s3://bucket/ds"


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_pictures(tmp_path / "ds", coloured(2))


@pytest.mark.parametrize(
    "write",
    [
        lambda ds: shardkit.pack(ds.parent, URL),
        lambda ds: extract(ds, URL),
        lambda ds: shardkit.index(ds, out=URL),
        lambda ds: shardkit.repair(ds, out=URL),
        lambda ds: shardkit.convert(ds, URL),
        lambda ds: shardkit.export(ds, to=["wids"], out=URL),
    ],
    ids=["pack", "extract", "index", "repair", "convert", "export"],
)
def test_nothing_is_written_to_a_url(dataset, write):
    before = sorted(dataset.parent.rglob("*"))
    with pytest.raises(ConfigError, match=r"a folder of this (very )?name is \./s3://bucket"):
        write(dataset)
    assert sorted(dataset.parent.rglob("*")) == before


def test_a_folder_of_such_a_name_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert local_path("./s3://bucket/ds") == str(tmp_path / "s3:/bucket/ds").encode()
    (tmp_path / "s3:/bucket").mkdir(parents=True)
    assert local_path("s3://bucket") == str(tmp_path / "s3:/bucket").encode()
