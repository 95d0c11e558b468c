"""A conversion changes what it was asked to change, and nothing else."""

from __future__ import annotations

import json
import os
import shutil

import pytest

import shardkit
from shardkit.converting.run import make_options, plan_conversion
from shardkit.errors import ConfigError
from shardkit.testing.packs import contents

from .conftest import content_of, members_of, order_of, refusals_of, rows_of, shards_of, whole


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_dataset_converted_to_itself_is_what_pack_made(packed, tmp_path, jobs):
    result = shardkit.convert(packed, tmp_path / "out", name="t", shards=4, jobs=jobs)
    assert shards_of(tmp_path / "out") == shards_of(packed)
    before = json.loads((packed / "manifest.json").read_text())
    assert result.manifests[None].generation == before["generation"]
    assert whole(tmp_path / "out")


def test_the_same_with_json_members(listed, tmp_path):
    shardkit.convert(str(listed), tmp_path / "out", name="l", shards=3, jobs=1)
    assert shards_of(tmp_path / "out") == shards_of(listed)


def test_a_packing_order_can_be_had_from_shards_that_have_another(tree, packed, tmp_path):
    """Pack shuffles sources sorted by path; so does convert when its input is stored in that order."""
    shardkit.pack(tree, tmp_path / "plain", name="t", shards=7, shuffle=False, jobs=1)
    shardkit.convert(tmp_path / "plain", tmp_path / "out", name="t", shards=4, shuffle=True, jobs=1)
    assert shards_of(tmp_path / "out") == shards_of(packed)


def test_images_and_json_members_are_copied_byte_for_byte(listed, tmp_path):
    shardkit.convert(listed, tmp_path / "out", shard_samples=4, align=512, shuffle=True, seed=5, jobs=2)
    assert members_of(tmp_path / "out") == members_of(listed)
    assert content_of(rows_of(tmp_path / "out")) == content_of(rows_of(listed))
    assert order_of(tmp_path / "out") != order_of(listed)
    assert whole(tmp_path / "out")


def test_shuffling_mixes_all_inputs_and_follows_the_seed(packed, listed, tmp_path):
    orders = []
    for number, seed in enumerate((1, 1, 2)):
        out = tmp_path / str(number)
        shardkit.convert([packed, listed], out, shards=2, shuffle=True, seed=seed, key="index", jobs=1)
        orders.append(order_of(out))
    assert orders[0] == orders[1] != orders[2]
    from_first = [int(key) < 30 for key in orders[0]]
    assert 5 < sum(from_first[:30]) < 25
    assert sorted(orders[0]) == [f"{number:09d}" for number in range(60)]


@pytest.mark.parametrize("align", [512, 8192])
def test_images_start_where_they_are_asked_to(packed, tmp_path, align):
    shardkit.convert(packed, tmp_path / "out", align=align, jobs=1)
    assert {row["offset"] % align for row in rows_of(tmp_path / "out").values()} == {0}
    assert whole(tmp_path / "out")


def test_any_number_of_jobs_makes_the_same_bytes(packed, write_tar, sample, tmp_path):
    broken = [("000900.jpg", b"no image"), *sample(901, label="x"), *sample(902, label=4)]
    tar = write_tar("in/more.tar", broken)
    given = {"name": "t", "shard_samples": 5, "shuffle": True, "seed": 3, "labels": list("abcde"), "max_bytes": 1400}
    made = []
    for jobs in (1, 2, 5):
        result = shardkit.convert([packed, tar], tmp_path / str(jobs), jobs=jobs, **given)
        made.append(contents(tmp_path / str(jobs)))
    assert made[0] == made[1] == made[2]
    assert {line["reason"] for line in refusals_of(tmp_path / "1")} == {"not-jpeg", "bad-label", "too-large"}
    assert result.refused == len(refusals_of(tmp_path / "1"))
    assert result.manifests[None].totals.samples == 33 - result.refused


def test_two_copies_of_the_inputs_make_one_dataset_and_other_keys_another(write_tar, sample, tmp_path):
    members = [m for n in range(4) for m in sample(n, label=0)]
    write_tar("one/x.tar", members)
    (tmp_path / "two").mkdir()
    shutil.copy(tmp_path / "one" / "x.tar", tmp_path / "two")
    write_tar("three/x.tar", [("1" + name[1:], data) for name, data in members])
    for name in ("one", "two", "three"):
        shardkit.convert(tmp_path / name / "x.tar", tmp_path / f"out-{name}", name="t", key="index", jobs=1)
    assert contents(tmp_path / "out-one") == contents(tmp_path / "out-two")
    lists = [json.loads((tmp_path / f"out-{n}" / "manifest.json").read_text())["options"] for n in ("one", "three")]
    assert lists[0]["source_list"] != lists[1]["source_list"]


def test_a_dry_run_says_what_would_come_and_touches_nothing(packed, tmp_path):
    chosen = make_options(tmp_path / "out", {"shards": 3, "where": "label == 1"})
    plan = plan_conversion([packed], tmp_path / "out", chosen)
    assert os.listdir(tmp_path) == []
    made = shardkit.convert(packed, tmp_path / "out", shards=3, where="label == 1", jobs=1).manifests[None]
    assert list(plan.parts[None].bytes) == [shard.bytes for shard in made.shards]
    assert plan.parts[None].samples == made.totals.samples == 10
    assert plan.passed_over == {"by --where": 20}


def test_what_lies_in_the_target_is_not_taken_for_ours(packed, tmp_path):
    shardkit.convert(packed, tmp_path / "out", jobs=1)
    with pytest.raises(ConfigError, match="--overwrite"):
        shardkit.convert(packed, tmp_path / "out", jobs=1)
    with pytest.raises(ConfigError, match="finished dataset"):
        shardkit.convert(packed, tmp_path / "out", jobs=1, split={"a": "0.5", "b": "0.5"})
    assert not (tmp_path / "out" / "a").exists()
    shardkit.convert(packed, tmp_path / "out", jobs=1, shards=2, overwrite=True)
    assert len(list((tmp_path / "out").glob("*.tar"))) == 2


@pytest.mark.parametrize("target", ["", "inner", ".."])
def test_a_target_in_an_input_or_around_it_is_refused(packed, tmp_path, target):
    folder = tmp_path / "in"
    shardkit.convert(packed, folder / "t", jobs=1)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="lie in one another"):
        shardkit.convert(folder / "t", folder / "t" / target, jobs=1, overwrite=True)
    assert contents(tmp_path) == before
