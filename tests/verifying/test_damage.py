"""What disks, copies and people do to whole files and pages of a dataset."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil

import pytest

from shardkit.errors import ConfigError, UnsupportedVersionError
from shardkit.format.checksum import hex_digest
from shardkit.format.manifest import dump_manifest, load_manifest
from shardkit.testing.damage import PAGE, cut, disturbed, exchange, flip_byte, punch_hole, swap_pages, zero_page
from shardkit.testing.datasets import draft_dataset, tiny_jpeg
from shardkit.verifying.run import verify

SHARDS = ("tiny-000000.tar", "tiny-000001.tar")


def counts(path, level="checksum"):
    return dict(verify(path, level, jobs=1, direct=False).counts)


def found(path, level="checksum"):
    return verify(path, level, jobs=1, direct=False).findings


def page(path, number):
    return path.read_bytes()[number * PAGE : (number + 1) * PAGE]


def test_a_whole_dataset_has_no_findings(dataset):
    report = verify(dataset, jobs=1, direct=False)
    assert (report.exit_code, report.shards, report.samples, report.total_findings) == (0, 2, 6, 0)
    assert report.bytes_read == sum(entry.stat().st_size for entry in dataset.iterdir())


def test_pages_that_changed_places_are_found(dataset):
    pages = [(dataset / name, number) for name in SHARDS for number in range((dataset / name).stat().st_size // PAGE)]
    assert len(pages) >= 10
    for (one, first), (other, second) in itertools.combinations(pages, 2):
        if page(one, first) == page(other, second):
            continue
        swap_pages(one, first, other, second)
        assert {f.shard for f in found(dataset)} <= {one.name, other.name}
        assert counts(dataset)
        swap_pages(one, first, other, second)
    assert counts(dataset) == {}


def test_a_zeroed_page_is_found_wherever_it_was_not_zero(dataset):
    for name in SHARDS:
        whole = (dataset / name).read_bytes()
        for number in range(len(whole) // PAGE):
            zero_page(dataset / name, number)
            assert bool(counts(dataset)) == any(page_of(whole, number)), number
            (dataset / name).write_bytes(whole)


def page_of(data, number):
    return data[number * PAGE : (number + 1) * PAGE]


@pytest.mark.parametrize("in_payload", [False, True])
def test_a_hole_is_named_as_one(tmp_path, in_payload):
    draft = draft_dataset((2,), align=65536, sizes=(40_000,))
    row = draft.shards[0].rows[1]
    at = row.offset + PAGE if in_payload else row.offset - 2 * PAGE  # the second is inside the padding
    path = draft.write(tmp_path / "ds")
    try:
        punch_hole(path / SHARDS[0], at // PAGE)
    except OSError as error:
        pytest.skip(f"this file system has no holes: {error}")
    (finding,) = found(path)
    assert (finding.region, finding.key) == ("payload" if in_payload else "padding", row.key)
    assert f"a hole at {at}" in finding.message


def test_shards_that_took_each_others_names_are_found(dataset):
    exchange(*(dataset / name for name in SHARDS))
    findings = found(dataset)
    assert {f.shard for f in findings} == set(SHARDS)
    assert {f.code for f in findings} >= {"header", "payload"}


def test_a_dataset_whose_files_all_took_each_others_names_is_found(dataset):
    for end in (".tar", ".arrow", ".idx"):
        exchange(dataset / f"tiny-000000{end}", dataset / f"tiny-000001{end}")
    assert counts(dataset, "index")["file-digest"] + counts(dataset, "index").get("file-size", 0) >= 2


@pytest.mark.parametrize("end", [".tar", ".arrow", ".idx"])
def test_a_stale_file_of_another_pack_is_found(tmp_path, end):
    draft = draft_dataset()
    path = draft.write(tmp_path / "ds")
    row = draft.shards[0].rows[1]
    other = draft_dataset((4, 3) if end == ".idx" else (3, 3))
    if end == ".tar":  # same sizes, same places, one other image
        other.shards[0].tar[row.offset : row.offset + row.size] = tiny_jpeg(3, row.size)
    if end == ".arrow":  # same size, one other row
        other.shards[0].rows[1] = row._replace(source="c/9.jpg")
    shutil.copy(other.write(tmp_path / "other") / f"tiny-000000{end}", path / f"tiny-000000{end}")
    (finding,) = found(path)
    assert finding.file == f"tiny-000000{end}"
    assert finding.code in {"payload", "file-digest", "file-size"}


@pytest.mark.parametrize(
    "name", ["index.arrow", "rejected.jsonl", *(f"tiny-000001{e}" for e in (".tar", ".arrow", ".idx"))]
)
def test_a_missing_file_is_named_and_the_rest_is_still_checked(dataset, name):
    (dataset / name).unlink()
    flip_byte(dataset / SHARDS[0], 100)
    report = verify(dataset, jobs=1, direct=False)
    assert report.counts == {"missing-file": 1, "header": 1}
    assert next(f for f in report.findings if f.code == "missing-file").file == name
    assert report.exit_code == 4


@pytest.mark.parametrize("name", ["more.tar", "more.arrow", "more.idx"])
def test_an_extra_file_is_named(dataset, name):
    (dataset / name).write_bytes(b"")
    (dataset / "README.md").write_text("not our business")
    (finding,) = found(dataset, "index")
    assert (finding.code, finding.file) == ("extra-file", name)


def test_a_list_of_refusals_that_the_manifest_does_not_know_is_extra(tmp_path):
    draft = draft_dataset()
    draft.rejected, draft.refused = None, 0
    path = draft.write(tmp_path / "ds")
    assert counts(path) == {}
    (path / "rejected.jsonl").write_text("{}\n")
    assert counts(path) == {"extra-file": 1}


def folder(path):
    path.mkdir()


@pytest.mark.parametrize("make", [folder, os.mkfifo])
@pytest.mark.parametrize("name", ["tiny-000000.tar", "tiny-000000.arrow", "index.arrow", "manifest.json"])
def test_what_is_no_file_is_never_opened(dataset, make, name):
    (dataset / name).unlink()
    make(dataset / name)
    assert counts(dataset)["not-a-file"] == 1


@pytest.mark.parametrize(
    "content", [b"", b"\0", bytes(512), bytes(20480), b"x" * 20480], ids=["0", "1", "512", "zeros", "x"]
)
@pytest.mark.parametrize("level", ["index", "structure", "checksum"])
def test_a_shard_of_something_else_is_found(dataset, content, level):
    size = (dataset / SHARDS[0]).stat().st_size
    (dataset / SHARDS[0]).write_bytes(content)
    expected = level != "index" or len(content) != size
    assert bool(counts(dataset, level)) == expected


def test_a_lost_index_is_replaced_by_the_rows_in_the_other_one(dataset):
    (dataset / "tiny-000000.arrow").write_bytes(b"gone")
    row_byte = draft_dataset().shards[0].rows[1].offset
    flip_byte(dataset / SHARDS[0], row_byte)
    assert [(f.code, f.file, f.key) for f in found(dataset)] == [
        ("file-size", "tiny-000000.arrow", None),
        ("payload", SHARDS[0], "c/0001"),
    ]
    flip_byte(dataset / "index.arrow", 2000)
    assert [(f.code, f.file) for f in found(dataset)] == [
        ("file-digest", "index.arrow"),
        ("file-size", "tiny-000000.arrow"),
        ("no-rows", SHARDS[0]),
        ("shard-digest", SHARDS[0]),
    ]


def test_an_index_that_is_no_index_is_found_though_its_digest_is_right(dataset):
    for name in ("tiny-000000.arrow", "index.arrow"):
        data = (dataset / name).read_bytes()
        (dataset / name).write_bytes(data[:-6] + b"ARROW2")
        reseal(dataset, name, (dataset / name).read_bytes())
    report = verify(dataset, jobs=1, direct=False)
    assert report.counts == {"index-format": 2, "no-rows": 1}
    assert report.exit_code == 4


def reseal(dataset, name, data):
    """Make the manifest agree with a damaged index."""
    manifest = load_manifest((dataset / "manifest.json").read_bytes())
    record = dataclasses.replace(manifest.index, bytes=len(data), digest=hex_digest("xxh3-128", data))
    if name == "index.arrow":
        manifest = dataclasses.replace(manifest, index=record)
    else:
        first, *others = manifest.shards
        manifest = dataclasses.replace(manifest, shards=[dataclasses.replace(first, index=record), *others])
    (dataset / "manifest.json").write_text(dump_manifest(manifest))


def test_a_damaged_manifest_is_told_and_the_files_are_held_against_each_other(dataset):
    flip_byte(dataset / "manifest.json", 300)
    assert counts(dataset) == {"manifest": 1}
    row = draft_dataset().shards[1].rows[2]
    flip_byte(dataset / SHARDS[1], row.offset + 50)
    report = verify(dataset, jobs=1, direct=False)
    assert [(f.code, f.shard, f.key) for f in report.findings] == [
        ("manifest", None, None),
        ("payload", SHARDS[1], row.key),
    ]
    assert (report.generation, report.shards, report.samples) == (None, 2, 6)


@pytest.mark.parametrize("index", ["other digest", "other shard", "no algorithm", "alignment"])
def test_without_a_manifest_an_index_must_still_fit_its_shard(tmp_path, index):
    fields = {
        "other digest": {"digest": "xxh3-128:" + "0" * 32},
        "other shard": {"shard": "tiny-000000.tar"},
        "no algorithm": {"digest": "md5:00"},
        "alignment": {"align": 1000},
    }[index]
    draft = draft_dataset()
    draft.headers[1] = lambda header: dataclasses.replace(header, **fields)
    path = draft.write(tmp_path / "ds")
    (path / "manifest.json").unlink()
    report = verify(path, jobs=1, direct=False)
    assert {f.shard for f in report.findings} == {None, SHARDS[1]}
    assert report.counts["no-manifest"] == 1


def test_a_folder_without_a_manifest_is_not_complete(dataset):
    (dataset / "manifest.json").unlink()
    assert counts(dataset) == {"no-manifest": 1}
    flip_byte(dataset / SHARDS[0], 100)
    assert counts(dataset) == {"no-manifest": 1, "header": 1}


def test_an_unfinished_pack_is_told_to_resume(dataset):
    (dataset / "manifest.json").unlink()
    (dataset / ".shardkit").mkdir()
    (finding,) = found(dataset)
    assert finding.code == "no-manifest"
    assert "--resume" in finding.message


def test_an_empty_folder_is_no_dataset(tmp_path):
    (finding,) = found(tmp_path)
    assert finding.code == "no-manifest"
    assert "right folder" in finding.message


def test_the_work_folder_of_a_finished_pack_is_no_finding(dataset):
    (dataset / ".shardkit").mkdir()
    assert counts(dataset) == {}


def test_a_newer_format_is_refused_not_judged(dataset):
    text = (dataset / "manifest.json").read_text()
    (dataset / "manifest.json").write_text(text.replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(UnsupportedVersionError, match=r"manifest\.json") as caught:
        verify(dataset)
    assert caught.value.exit_code == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "nowhere"}, "no such folder"),
        ({"path": "ds/manifest.json"}, "a dataset is a folder"),
        ({"path": "ds", "level": "all"}, "unknown level"),
        ({"path": "ds", "jobs": 0}, "at least one job"),
    ],
)
def test_what_cannot_be_asked_is_refused(dataset, monkeypatch, arguments, message):
    monkeypatch.chdir(dataset.parent)
    with pytest.raises(ConfigError, match=message):
        verify(**arguments)


def test_a_key_that_stands_twice_is_told_with_both_shards(tmp_path):
    draft = draft_dataset((3, 3, 3))
    draft.shards[2] = draft_dataset((3, 3)).shards[1]
    draft.shards[2].name = "tiny-000002.tar"
    findings = found(draft.write(tmp_path / "ds"), "index")
    assert [(f.code, f.shard, f.key) for f in findings] == [
        ("key-duplicate", "tiny-000002.tar", f"c/000{i}") for i in (3, 4, 5)
    ]
    assert all("tiny-000001.tar" in f.message for f in findings)


def test_a_shard_without_its_beginning_or_middle_is_found(dataset):
    whole = (dataset / SHARDS[0]).read_bytes()
    (dataset / SHARDS[0]).write_bytes(whole[PAGE:] + bytes(PAGE))  # as long as before
    assert counts(dataset)["header"] >= 3
    cut(dataset / SHARDS[0], 0)
    assert counts(dataset) == {"shard-size": 1}


def test_long_payloads_are_passed_over_by_a_level_that_does_not_look_at_them(tmp_path):
    draft = draft_dataset((6,), sizes=(300_000, 401, 700_000))
    path = draft.write(tmp_path / "ds")
    size = (path / SHARDS[0]).stat().st_size
    report = verify(path, "structure", jobs=1, direct=False)
    assert (report.counts, report.bytes_read < size / 10) == ({}, True)
    rows = draft.shards[0].rows
    flip_byte(path / SHARDS[0], rows[0].offset + 100_000)
    assert counts(path, "structure") == {}
    assert counts(path) == {"payload": 1}
    for row in rows:
        flip_byte(path / SHARDS[0], row.sample_offset + 10)
        flip_byte(path / SHARDS[0], row.offset - 10)
    flip_byte(path / SHARDS[0], size - 1)
    assert counts(path, "structure") == {"header": 12, "end": 1}


def test_samples_may_lie_across_any_number_of_blocks(tmp_path):
    path = draft_dataset((5, 2), sizes=(60_000, 401, 9_000), align=512).write(tmp_path / "ds")
    for block in (PAGE, 3 * PAGE, 1 << 20):
        opener = disturbed("none of them", id, block_bytes=block)
        assert verify(path, "decode", jobs=1, opener=opener).counts == {}
        flip_byte(path / SHARDS[0], 40_000)
        assert verify(path, jobs=1, opener=opener).counts == {"payload": 1}
        flip_byte(path / SHARDS[0], 40_000)
