"""`shardkit.pack` as a whole: what it takes, what it answers, what it leaves."""

from __future__ import annotations

import os

import pytest

import shardkit
from shardkit.errors import ConfigError, SourceError
from shardkit.format.manifest import load_manifest
from shardkit.packing.run import make_options, plan_pack, run_pack
from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.packs import contents, tiny_tree


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_tree(tmp_path_factory.mktemp("tree") / "source", images=13)


@pytest.fixture
def target(tmp_path):
    return tmp_path / "dataset"


def test_what_was_packed_is_proven_and_holds_the_sources(source, target):
    manifest = shardkit.pack(source, target, shards=4, jobs=2)
    assert manifest == load_manifest((target / "manifest.json").read_bytes())
    assert shardkit.verify(target, level="decode").exit_code == 0
    dataset = shardkit.open(target)
    found = {sample.key: bytes(sample.jpeg) for sample in dataset}
    keys = [f"{'abc'[number % 3]}/{number:05d}" for number in range(13)]
    assert found == {key: (source / f"{key}.jpg").read_bytes() for key in keys}
    assert not (target / ".shardkit").exists()


def test_the_result_counts_what_was_refused_by_reason(source, target):
    result = run_pack(source, target, make_options(target, {}), jobs=1)
    assert sum(result.refused.values()) == result.manifest.totals.refused == 3
    assert result.kept == 0


def test_a_plan_writes_nothing(source, target):
    plan = plan_pack(source, target, make_options(target, {"shards": 4}))
    assert not target.exists()
    assert sum(plan.counts) == plan.samples == 16
    assert len(plan.bytes) == 4


def test_the_same_sources_elsewhere_make_the_same_bytes(source, tmp_path):
    again = tiny_tree(tmp_path / "copy", images=13)
    for path in again.rglob("*.jpg"):
        os.utime(path, ns=(7, 7))
    shardkit.pack(source, tmp_path / "one", name="t", shards=3, jobs=1)
    shardkit.pack(again, tmp_path / "two", name="t", shards=3, jobs=3)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.parametrize(
    ("folder", "name"),
    [("photos", "photos"), ("My Photos", "my-photos"), ("-_-", "data"), ("\u96ea", "data"), ("a.b", "a-b")],
)
def test_the_name_comes_from_the_target(tmp_path, folder, name):
    assert make_options(tmp_path / folder, {}).name == name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jobs": 0}, "jobs is at least 1"),
        ({"jobs": -1}, "jobs is at least 1"),
        ({"shards": 2, "shard_size": 1000}, "one of"),
        ({"shards": 2, "shard_samples": 1000}, "one of"),
        ({"colour": "blue"}, "pack.*colour"),
        ({"shards": 17}, "more shards than images"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_written(source, target, options, message):
    with pytest.raises(ConfigError, match=message):
        shardkit.pack(source, target, **options)
    assert not target.exists()


@pytest.mark.parametrize("inside", ["source", "source/new", "source/a/deeper/new", "."])
def test_source_and_target_do_not_lie_in_each_other(tmp_path, inside):
    tiny_tree(tmp_path / "source")
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="inside"):
        shardkit.pack(tmp_path / "source", tmp_path / inside, jobs=1)
    (tmp_path / "link").symlink_to(tmp_path / "source")
    with pytest.raises(ConfigError, match="inside"):
        shardkit.pack(tmp_path / "source", tmp_path / "link" / "new", jobs=1)
    (tmp_path / "link").unlink()
    assert contents(tmp_path) == before


def test_when_every_source_is_refused_there_is_no_dataset_but_a_list_of_reasons(tmp_path, target):
    source = tmp_path / "source"
    source.mkdir()
    for number in range(5):
        (source / f"{number}.jpg").write_bytes(b"no image")
    for jobs in (1, 2):
        with pytest.raises(SourceError, match=r"every source was refused.*rejected\.jsonl.*5 not-jpeg") as caught:
            shardkit.pack(source, target, jobs=jobs, shards=2)
        assert caught.value.exit_code == 3
        assert "--resume" not in str(caught.value)
        assert list(contents(target)) == ["rejected.jsonl"]
    (source / "5.jpg").write_bytes(tiny_jpeg())
    shardkit.pack(source, target, jobs=1)
    assert shardkit.verify(target).exit_code == 0


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_stops_at_the_first_refusal_names_it(source, target, jobs):
    with pytest.raises(SourceError, match=r"refused a source \([a-z-]+\)") as caught:
        shardkit.pack(source, target, jobs=jobs, shards=4, on_error="fail")
    assert caught.value.exit_code == 3
    assert not (target / "manifest.json").exists()


def test_a_refusal_before_the_first_image_is_read_stops_the_run_too(tmp_path, target):
    source = tiny_tree(tmp_path / "source")
    (source / "a" / "dangling.jpg").symlink_to("nowhere")
    with pytest.raises(SourceError, match="dangling"):
        shardkit.pack(source, target, jobs=1, on_error="fail")
    assert not target.exists()
