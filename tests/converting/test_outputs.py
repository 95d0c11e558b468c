"""Which targets mean another framework's dataset, and what is refused before a library is asked."""

from __future__ import annotations

import os
import sys

import pytest

import shardkit
from shardkit.cli.main import main
from shardkit.converting.outputs import find_output
from shardkit.errors import ConfigError


def code(arguments):
    with pytest.raises(SystemExit) as caught:
        main([str(each) for each in arguments])
    return caught.value.code


def test_a_name_that_is_there_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (find_output("mds:x").kind, find_output("mds:x").path) == ("mds", str(tmp_path / "x"))
    assert find_output("x") is find_output("./mds:x") is find_output("a/b:x") is find_output("C:") is None
    (tmp_path / "mds:x").mkdir()
    assert find_output("mds:x") is None
    for wrong in ("mds:", "hf:", "tfrecord:x", "s3://bucket/x", "HF:x"):
        with pytest.raises(ConfigError, match=r"no place.*hf:DIR.*\./"):
            find_output(wrong)


@pytest.mark.parametrize(("kind", "library"), [("mds", "streaming"), ("litdata", "litdata"), ("hf", "datasets")])
def test_a_missing_library_is_named_before_anything_is_written(packed, tmp_path, capsys, monkeypatch, kind, library):
    monkeypatch.setitem(sys.modules, library, None)
    assert code(["convert", packed, f"{kind}:{tmp_path / 'out'}"]) == 7
    assert f"pip install 'shardkit[{kind}]'" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_what_means_nothing_there_is_a_usage_error(packed, tmp_path, capsys):
    assert code(["convert", packed, f"mds:{tmp_path / 'out'}", "--align", "512"]) == 2
    assert "--align means nothing for mds:DIR" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"convert_to\('mds', src, dst\)"):
        shardkit.convert(packed, f"mds:{tmp_path / 'out'}")
    with pytest.raises(ConfigError, match="unknown kind"):
        shardkit.convert_to("tfrecord", packed, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_one_input_that_is_named_twice_is_called_so(write_tar, sample, tmp_path):
    tar = write_tar("x.tar", sample(1, label=0))
    (tmp_path / "y.tar").symlink_to(tar)
    for second in (tar, tmp_path / "y.tar"):
        with pytest.raises(ConfigError, match=r"one input is named twice.*--key index") as caught:
            shardkit.convert([tar, second], tmp_path / "out")
        assert "--key shard" not in str(caught.value)
    shardkit.convert([tar, tar], tmp_path / "out", key="index", jobs=1)
    assert len(shardkit.open(tmp_path / "out")) == 2


def test_a_parquet_file_says_how_it_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"Parquet file is no tar.*hf:/"):
        shardkit.convert(tmp_path / "a.parquet", tmp_path / "out")


@pytest.mark.parametrize(("kind", "file"), [("mds", "index.json"), ("litdata", "index.json"), ("hf", "0.parquet")])
def test_a_folder_of_splits_names_them_and_no_dataset_is_called_so(tmp_path, kind, file):
    for split in ("val", "train"):
        (tmp_path / "parts" / split).mkdir(parents=True)
        (tmp_path / "parts" / split / file).write_bytes(b"{}")
    with pytest.raises(ConfigError, match=rf"several splits.*train, val.*{kind}:DIR/train"):
        shardkit.convert(f"{kind}:{tmp_path / 'parts'}", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="dataset of"):
        shardkit.convert(f"{kind}:{tmp_path / 'empty'}", tmp_path / "out")
