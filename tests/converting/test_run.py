"""A conversion changes what it was asked to change, and nothing else."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time

import pytest
from PIL import Image

import shardkit
from shardkit.converting import members as members_module
from shardkit.converting.run import make_options, plan_conversion
from shardkit.errors import (
    ConfigError,
    IntegrityError,
    LockedError,
    ShardkitError,
    SourceError,
    TarFormatError,
    UnsafeError,
)
from shardkit.storage.lock import FolderLock
from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.packs import StopAfter, contents

from .conftest import members_of, order_of, refusals_of, rows_of, whole

PLACE = ("offset", "sample_offset", "sample_size", "json_offset")


def shards_of(folder):
    return {name: data for name, data in contents(folder).items() if name != "manifest.json"}


def content_of(rows):
    """Index rows without where things lie."""
    return {key: {name: value for name, value in row.items() if name not in PLACE} for key, row in rows.items()}


# --- datasets of shardkit's


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


# --- the engine's promises


@pytest.mark.parametrize("reports", range(7))
def test_a_stopped_conversion_goes_on_to_the_same_bytes(packed, tmp_path, reports):
    given = {"name": "t", "shards": 6, "shuffle": True, "jobs": 1}
    shardkit.convert(packed, tmp_path / "whole", **given)
    if reports < 6:
        with pytest.raises(StopAfter.Stop):
            shardkit.convert(packed, tmp_path / "out", progress=StopAfter(reports), **given)
        assert not (tmp_path / "out" / "manifest.json").exists()
        with pytest.raises(ConfigError, match="--resume"):
            shardkit.convert(packed, tmp_path / "out", **given)
    result = shardkit.convert(packed, tmp_path / "out", resume=True, **given)
    assert result.parts[None].kept == (reports if reports < 6 else 0)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert shardkit.convert(packed, tmp_path / "out", resume=True, **given).parts[None].kept == 6


def test_only_the_same_conversion_goes_on(packed, listed, tmp_path):
    given = {"name": "t", "shards": 6, "jobs": 1}
    with pytest.raises(StopAfter.Stop):
        shardkit.convert(packed, tmp_path / "out", progress=StopAfter(2), **given)
    with pytest.raises(ConfigError, match=r"where was not given and is .*width > 0"):
        shardkit.convert(packed, tmp_path / "out", resume=True, where="width > 0", **given)
    with pytest.raises(ConfigError, match="another list of sources"):
        shardkit.convert(listed, tmp_path / "out", resume=True, **given)
    shutil.copytree(packed, tmp_path / "copy")
    os.utime(tmp_path / "copy" / "t-000001.tar", ns=(1, 1))
    with pytest.raises(ConfigError, match="sources were modified in the meantime"):
        shardkit.convert(tmp_path / "copy", tmp_path / "out", resume=True, **given)
    shardkit.convert(packed, tmp_path / "out", resume=True, **given)


def test_a_split_that_stopped_between_its_parts_goes_on(packed, tmp_path):
    given = {"name": "t", "shards": 2, "jobs": 1, "split": {"one": "0.5", "two": "0.5"}}
    shardkit.convert(packed, tmp_path / "whole", **given)
    for reports in range(4):
        with pytest.raises(StopAfter.Stop):
            shardkit.convert(packed, tmp_path / "out", progress=StopAfter(reports), overwrite=True, **given)
        finished = (tmp_path / "out" / "one" / "manifest.json").exists()
        assert finished == (reports >= 2)
        assert not finished or not (tmp_path / "out" / "one" / ".shardkit").exists()
        assert not (tmp_path / "out" / "two" / "manifest.json").exists()
        shardkit.convert(packed, tmp_path / "out", resume=True, **given)
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_killed_conversion_leaves_whole_shards_and_goes_on(tree, packed, tmp_path):
    options = ["--name", "t", "--shards", "30", "--jobs", "2"]
    shardkit.convert(packed, tmp_path / "whole", name="t", shards=30, jobs=1)
    expected = shards_of(tmp_path / "whole")
    out = tmp_path / "out"
    for wanted in (1, 6, 14):
        command = [sys.executable, "-m", "shardkit", "convert", str(packed), str(out), *options, "--resume"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            until = time.monotonic() + 20
            while process.poll() is None and len(list(out.glob("*.tar"))) < wanted and time.monotonic() < until:
                time.sleep(0.001)
            process.kill()
        assert process.returncode in (-signal.SIGKILL, 0)
        for name, data in shards_of(out).items():
            assert name.startswith(".shardkit") or data == expected[name]
    shardkit.convert(packed, out, name="t", shards=30, jobs=2, resume=True)
    assert shards_of(out) == expected


def test_one_run_at_a_time(packed, tmp_path):
    (tmp_path / "out" / ".shardkit").mkdir(parents=True)
    with FolderLock(os.fsencode(tmp_path / "out" / ".shardkit" / "lock")), pytest.raises(LockedError):
        shardkit.convert(packed, tmp_path / "out", jobs=1)


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


# --- damage


def test_damage_is_refused_and_never_given_a_fresh_checksum(packed, tmp_path):
    shardkit.convert(packed, tmp_path / "in", name="t", jobs=1)
    key, row = next(iter(rows_of(tmp_path / "in").items()))
    with open(tmp_path / "in" / "t-000000.tar", "r+b") as file:
        file.seek(row["offset"] + row["size"] - 3)
        file.write(b"\x55")
    result = shardkit.convert(tmp_path / "in", tmp_path / "out", jobs=1, check="none")
    (line,) = refusals_of(tmp_path / "out")
    assert (line["path"], line["reason"]) == (f"t-000000.tar/{key}", "damaged")
    assert result.manifests[None].totals.samples == 29
    assert key not in rows_of(tmp_path / "out")
    with pytest.raises(SourceError, match="damaged"):
        shardkit.convert(tmp_path / "in", tmp_path / "fail", jobs=1, on_error="fail")


@pytest.fixture(params=["aligned", "foreign"])
def two_shards(request, packed, tmp_path):
    """A dataset of two shards in stored order, packed or indexed."""
    folder = tmp_path / "in"
    if request.param == "aligned":
        shardkit.convert(packed, folder, name="t", shards=2, jobs=1)
    else:
        shardkit.convert(packed, tmp_path / "tars", name="t", shards=2, jobs=1)
        shardkit.index(sorted((tmp_path / "tars").glob("*.tar")), out=folder, jobs=1)
    return folder


@pytest.mark.parametrize("lost", [0, 1, 4])
def test_what_is_whole_of_a_shard_that_was_cut_is_taken(two_shards, tmp_path, lost):
    images = members_of(two_shards)
    rows = rows_of(two_shards)
    first = order_of(two_shards)[: shardkit.open(two_shards).manifest.shards[0].samples]
    last = rows[first[-lost - 1]]
    os.truncate(os.path.realpath(two_shards / "t-000000.tar"), last["offset"] + last["size"])
    with pytest.raises(IntegrityError, match=r"another size.*--on-error skip takes what is whole of it"):
        shardkit.convert(two_shards, tmp_path / "out", jobs=1, on_error="fail")
    assert not (tmp_path / "out").exists()
    shardkit.convert(two_shards, tmp_path / "out", jobs=1)
    gone = first[len(first) - lost :]
    assert [(line["path"], line["reason"]) for line in refusals_of(tmp_path / "out")] == [
        ("t-000000.tar", "damaged-shard"), *((f"t-000000.tar/{key}", "damaged") for key in gone),
    ]  # fmt: skip
    assert members_of(tmp_path / "out") == {name: images[name] for name in images if name[:-4] not in gone}
    assert whole(tmp_path / "out")


def test_a_shard_of_another_size_is_held_to_its_checksums(two_shards, tmp_path):
    with open(two_shards / "t-000000.tar", "r+b") as file:
        file.seek(rows_of(two_shards)[order_of(two_shards)[1]]["offset"] + 30)
        file.write(b"\x55")
        file.seek(0, os.SEEK_END)
        file.write(b"more")
    shardkit.convert(two_shards, tmp_path / "out", jobs=1)
    assert [line["reason"] for line in refusals_of(tmp_path / "out")] == ["damaged-shard", "damaged"]
    assert order_of(tmp_path / "out") == [key for n, key in enumerate(order_of(two_shards)) if n != 1]


def test_nothing_is_taken_of_a_shard_of_another_size_without_checksums(write_tar, sample, tmp_path):
    tars = [write_tar(f"in/{t}.tar", [m for n in range(3) for m in sample(n + 3 * t, label=0)]) for t in range(2)]
    shardkit.index(tars, out=tmp_path / "index", facts="none", jobs=1)
    before = members_of(tmp_path / "index")
    os.truncate(tars[0], os.path.getsize(tars[0]) - 512)
    shardkit.convert(tmp_path / "index", tmp_path / "out", jobs=1)
    assert [(line["path"], line["reason"]) for line in refusals_of(tmp_path / "out")] == [("0.tar", "damaged-shard")]
    kept = {f"{n:06}" for n in range(3, 6)}
    assert members_of(tmp_path / "out") == {name: data for name, data in before.items() if name[:6] in kept}


def test_a_json_member_behind_the_end_of_its_shard_is_not_there(write_tar, sample, tmp_path):
    tar = write_tar("in/x.tar", [m for n in range(3) for m in sample(n, label=0, metadata=b'{"n": 1}')])
    shardkit.index([tar], out=tmp_path / "index", jobs=1)
    os.truncate(tar, rows_of(tmp_path / "index")["000002"]["json_offset"] + 3)
    shardkit.convert(tmp_path / "index", tmp_path / "out", jobs=1)
    assert [line["path"] for line in refusals_of(tmp_path / "out")] == ["x.tar", "x.tar/000002"]
    assert order_of(tmp_path / "out") == ["000000", "000001"]
    os.truncate(tar, 100)
    with pytest.raises(SourceError, match="every source was refused"):
        shardkit.convert(tmp_path / "index", tmp_path / "none", jobs=1)


def test_a_shard_that_changes_after_the_plan_is_refused_sample_by_sample(write_tar, sample, tmp_path):
    one = write_tar("in/one.tar", [m for n in range(3) for m in sample(n, label=0)])
    two = write_tar("in/two.tar", [m for n in range(3, 6) for m in sample(n, label=0)])

    class Meddle(StopAfter):
        def begin(self, samples, source_bytes):
            os.utime(two, ns=(1, 1))

    shardkit.convert([one, two], tmp_path / "out", jobs=1, progress=Meddle(100))
    assert [line["reason"] for line in refusals_of(tmp_path / "out")] == ["changed"] * 3
    assert order_of(tmp_path / "out") == ["000000", "000001", "000002"]


def test_a_shard_that_changes_while_it_is_read_is_refused_from_there_on(write_tar, sample, tmp_path, monkeypatch):
    tar = write_tar("x.tar", [m for n in range(4) for m in sample(n, label=0)])
    read, reads = members_module.MemberPicture._fill, []

    def watched(*given):
        reads.append(given)
        if len(reads) == 3:
            os.utime(tar, ns=(1, 1))
        return read(*given)

    monkeypatch.setattr(members_module.MemberPicture, "_fill", watched)
    shardkit.convert(tar, tmp_path / "out", jobs=1)
    assert [line["reason"] for line in refusals_of(tmp_path / "out")] == ["changed"] * 2
    assert order_of(tmp_path / "out") == ["000000", "000001"]


@pytest.mark.parametrize("cut", [512, 700, 5000])
def test_a_damaged_tar_is_refused_as_a_whole_or_ends_the_run(write_tar, sample, tmp_path, cut):
    good = write_tar("in/good.tar", sample(1, label=0))
    bad = write_tar("in/bad.tar", [m for n in range(2, 9) for m in sample(n, label=0)])
    os.truncate(bad, cut)
    if cut == 512:
        bad.write_bytes(b"not a tar" * 200)
    result = shardkit.convert([bad, good], tmp_path / "out", jobs=1)
    (line,) = refusals_of(tmp_path / "out")
    assert (line["path"], line["reason"]) == ("bad.tar", "damaged-shard")
    assert str(tmp_path) not in line["detail"]
    assert result.manifests[None].totals.samples == 1
    with pytest.raises(TarFormatError, match=r"bad\.tar"):
        shardkit.convert([bad, good], tmp_path / "fail", jobs=1, on_error="fail")
    assert not (tmp_path / "fail").exists()


# --- tars of other tools


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_foreign_tars_become_a_dataset_that_webdataset_reads_alike(write_tar, sample, tmp_path, tar_format):
    tariterators = pytest.importorskip("webdataset.tariterators")
    texts = [b'{ "b" : 1.50,\n "a": "\\u00e9" }', b'{"source":"elsewhere/7.png","class":9}', b"{}"]
    numbers = range(9)
    for number, shard in itertools.groupby(numbers, lambda n: n // 3):
        found = [
            m for n in shard for m in sample(n, label=n % 2, metadata=texts[n % 3], extension=["jpg", "JPEG"][n % 2])
        ]
        write_tar(f"in/x-{number:03d}.tar", found, tar_format)
    shardkit.convert(str(tmp_path / "in" / "x-{000..002}.tar"), tmp_path / "out", shards=2, jobs=1)
    assert whole(tmp_path / "out")
    read = []
    for shard in sorted((tmp_path / "out").glob("*.tar")):
        with shard.open("rb") as file:
            members = tariterators.tar_file_iterator(file)
            read += tariterators.group_by_keys(dict(member) | {"__url__": "x"} for member in members)
    assert [each["__key__"] for each in read] == [f"{n:06d}" for n in numbers]
    for number, each in enumerate(read):
        assert each["jpg"] == tiny_jpeg(number)
        assert each["cls"] == b"%d" % (number % 2)
        assert each["json"] == texts[number % 3]
    rows = rows_of(tmp_path / "out")
    assert rows["000000"]["source"] == "x-000.tar/000000.jpg"
    assert rows["000001"]["source"] == "elsewhere/7.png"
    dataset = shardkit.open(tmp_path / "out")
    assert dataset.by_key("000003").metadata == {"b": 1.5, "a": "é"}


def test_a_shard_of_webdatasets_own_writer_is_taken(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "w.tar")) as writer:
        for number in range(5):
            writer.write(
                {"__key__": f"n{number}/é {number}", "jpg": tiny_jpeg(number), "cls": number, "json": {"n": number}}
            )
    shardkit.convert(tmp_path / "w.tar", tmp_path / "out", jobs=1)
    assert whole(tmp_path / "out")
    assert [(s.label, s.jpeg, s.metadata) for s in shardkit.open(tmp_path / "out")] == [
        (number, tiny_jpeg(number), {"n": number}) for number in range(5)
    ]
    assert order_of(tmp_path / "out")[0] == "n0/-xC3-xA9-x200"


def test_a_shard_of_our_own_as_a_mere_tar_keeps_its_members(listed, tmp_path):
    shardkit.convert(str(listed / "*.tar"), tmp_path / "out", name="l", shards=3, jobs=1)
    assert members_of(tmp_path / "out") == members_of(listed)
    assert content_of(rows_of(tmp_path / "out")) == content_of(rows_of(listed))


def test_a_sample_without_label_and_metadata_gets_a_json_member_that_names_its_source(write_tar, sample, tmp_path):
    write_tar("in/x.tar", sample(1))
    shardkit.convert(tmp_path / "in" / "x.tar", tmp_path / "out", jobs=1)
    assert members_of(tmp_path / "out")["000001.json"] == b'{"source":"x.tar/000001.jpg"}'
    assert whole(tmp_path / "out")


@pytest.mark.parametrize("label", [None, 2])
@pytest.mark.parametrize("source", ["100% wool.jpg", "a%20b.jpg", "http://x/y.jpg", "caf\u00e9 \u4e2d", "", 5])
def test_what_foreign_metadata_calls_source_and_class_is_kept_and_verified(write_tar, sample, tmp_path, source, label):
    data = json.dumps({"class": "tabby", "source": source}).encode()
    write_tar("in/x.tar", sample(1, label=label, metadata=data))
    shardkit.convert(tmp_path / "in" / "x.tar", tmp_path / "out", jobs=1)
    assert members_of(tmp_path / "out")["000001.json"] == data
    assert whole(tmp_path / "out")
    shardkit.convert(tmp_path / "in" / "x.tar", tmp_path / "named", labels=["p", "q", "tabby"], jobs=1)
    assert whole(tmp_path / "named")


REFUSED = {
    "bad-label": [("1.jpg", tiny_jpeg()), ("1.cls", b"cat")],
    "bad-json": [("1.jpg", tiny_jpeg()), ("1.json", b"[1]")],
    "no-image": [("1.cls", b"1")],
    "not-adjacent": [("1.jpg", tiny_jpeg()), ("2.jpg", tiny_jpeg()), ("1.cls", b"1")],
    "duplicate-key": [
        ("1.jpg", tiny_jpeg()),
        ("1.cls", b"1"),
        ("2.cls", b"1"),
        ("2.jpg", tiny_jpeg()),
        ("1.jpg", b"x"),
    ],
    "duplicate-member": [("1.jpg", tiny_jpeg()), ("1.jpg", tiny_jpeg())],
    "empty": [("1.jpg", b""), ("1.cls", b"1")],
    "not-jpeg": [("1.png", b"\x89PNG\r\n\x1a\n"), ("1.cls", b"1")],
    "truncated": [("1.jpg", tiny_jpeg()[:-2]), ("1.cls", b"1")],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_sample_that_is_none_is_refused_by_name(write_tar, sample, tmp_path, reason):
    write_tar("in/x.tar", [*REFUSED[reason], *sample(7, label=0)])
    shardkit.convert(tmp_path / "in" / "x.tar", tmp_path / "out", jobs=1)
    lines = refusals_of(tmp_path / "out")
    assert {line["reason"] for line in lines} == {reason}
    assert {line["path"] for line in lines} <= {"x.tar/1", "x.tar/2"}
    assert "000007" in rows_of(tmp_path / "out")
    assert whole(tmp_path / "out")


def test_a_link_in_a_sample_spoils_it_and_is_never_followed(tmp_path, sample):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name, data in (*sample(1, label=0), *sample(2, label=0)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        info = tarfile.TarInfo("000002.json")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(info)
    shardkit.convert(tmp_path / "x.tar", tmp_path / "out", jobs=1)
    assert [(line["path"], line["reason"]) for line in refusals_of(tmp_path / "out")] == [
        ("x.tar/000002", "refused-member"), ("x.tar/000002.json", "link"),
    ]  # fmt: skip
    assert order_of(tmp_path / "out") == ["000001"]


def test_a_tar_over_a_limit_is_unsafe(tmp_path, write_tar, sample):
    good = write_tar("good.tar", sample(1, label=0))
    with tarfile.open(tmp_path / "bomb.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("1.jpg")
        info.pax_headers = {"comment": "x" * (2 << 20)}
        tar.addfile(info)
    shardkit.convert([tmp_path / "bomb.tar", good], tmp_path / "out", jobs=1)
    assert [(line["path"], line["reason"]) for line in refusals_of(tmp_path / "out")] == [("bomb.tar", "unsafe-shard")]
    with pytest.raises(UnsafeError, match=r"bomb\.tar"):
        shardkit.convert([tmp_path / "bomb.tar", good], tmp_path / "fail", jobs=1, on_error="fail")


def test_numbers_that_json_does_not_have_and_lone_surrogates_are_bad_json(write_tar, sample, tmp_path):
    texts = [b'{"a": NaN}', b'{"source": "\\ud800"}', b"\xff", b'{"a":1,"a":2}', b'{"ok": "\\ud800"}']
    write_tar("x.tar", [m for n, text in enumerate(texts) for m in sample(n, label=0, metadata=text)])
    shardkit.convert(tmp_path / "x.tar", tmp_path / "out", jobs=1)
    assert [line["path"] for line in refusals_of(tmp_path / "out")] == [f"x.tar/{n:06d}" for n in range(4)]
    assert members_of(tmp_path / "out")["000004.json"] == texts[4]


def test_other_members_are_refused_or_dropped_and_counted(write_tar, sample, tmp_path):
    found = [*sample(1, label=0), ("000001.txt", b"a caption"), *sample(2, label=0), ("000002.TXT", b"x"),
             ("000002.seg.png", b"x")]  # fmt: skip
    write_tar("x.tar", found)
    with pytest.raises(ConfigError, match=r"found 2 \.txt, 1 \.seg\.png; .*--other-members drop"):
        shardkit.convert(tmp_path / "x.tar", tmp_path / "out", jobs=1)
    result = shardkit.convert(tmp_path / "x.tar", tmp_path / "out", jobs=1, other_members="drop")
    assert result.passed_over == {".txt members": 2, ".seg.png members": 1}
    assert set(members_of(tmp_path / "out")) == {f"00000{n}.{e}" for n in (1, 2) for e in ("jpg", "cls")}


# --- pictures


def picture(kind, size=(40, 30)):
    out = io.BytesIO()
    Image.linear_gradient("L").resize(size).convert("RGB").save(out, kind)
    return out.getvalue()


def test_other_formats_are_reencoded_when_asked(write_tar, sample, tmp_path):
    write_tar("x.tar", [("a.png", picture("PNG")), ("a.cls", b"3"), ("b.webp", picture("WEBP")), ("b.cls", b"4"),
                        *sample(1, label=5)])  # fmt: skip
    shardkit.convert(tmp_path / "x.tar", tmp_path / "out", jobs=1, convert=True)
    rows = rows_of(tmp_path / "out")
    assert {key: (row["label"], row["width"]) for key, row in rows.items()} == {
        "a": (3, 40), "b": (4, 40), "000001": (5, rows["000001"]["width"]),
    }  # fmt: skip
    assert members_of(tmp_path / "out")["000001.jpg"] == tiny_jpeg(1)
    assert whole(tmp_path / "out")


def test_large_images_are_scaled_down_and_small_ones_copied(write_tar, tmp_path):
    small = picture("JPEG", (30, 20))
    write_tar("x.tar", [("a.jpg", picture("JPEG", (300, 200))), ("a.cls", b"0"), ("b.jpg", small), ("b.cls", b"0")])
    shardkit.convert(tmp_path / "x.tar", tmp_path / "out", jobs=1, resize=50)
    rows = rows_of(tmp_path / "out")
    assert (rows["a"]["width"], rows["a"]["height"]) == (75, 50)
    assert members_of(tmp_path / "out")["b.jpg"] == small


def test_few_shards_are_open_at_a_time(write_tar, sample, tmp_path, monkeypatch):
    monkeypatch.setattr(members_module, "_OPEN_SHARDS", 2)
    for number in range(12):
        write_tar(f"in/{number:02d}.tar", [m for n in (number, number + 100) for m in sample(n, label=0)])
    opened, read = [], os.preadv

    def watched(fd, buffers, offset):
        links = (os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd"))
        opened.append(sum(link.startswith(str(tmp_path / "in")) for link in links))
        return read(fd, buffers, offset)

    monkeypatch.setattr(members_module.os, "preadv", watched)
    shardkit.convert(str(tmp_path / "in" / "*.tar"), tmp_path / "out", shuffle=True, jobs=1, shards=4)
    assert len(rows_of(tmp_path / "out")) == 24 <= len(opened)
    assert max(opened) == 2


def test_short_reads_are_put_together(packed, tmp_path, monkeypatch):
    read = os.preadv
    monkeypatch.setattr(members_module.os, "preadv", lambda fd, buffers, at: read(fd, [buffers[0][:7]], at))
    shardkit.convert(packed, tmp_path / "out", name="t", shards=4, jobs=1)
    assert shards_of(tmp_path / "out") == shards_of(packed)


def test_a_read_error_is_a_refusal_and_a_process_that_has_run_out_is_none(packed, tmp_path, monkeypatch):
    def failing(number):
        def preadv(fd, buffers, offset):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(members_module.os, "preadv", preadv)

    failing(errno.EIO)
    with pytest.raises(SourceError, match="30 unreadable"):
        shardkit.convert(packed, tmp_path / "out", jobs=1)
    failing(errno.ENOMEM)
    with pytest.raises(ShardkitError, match="cannot read a source"):
        shardkit.convert(packed, tmp_path / "more", jobs=1)
