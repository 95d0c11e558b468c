"""What an export writes, leaves alone and refuses."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil

import numpy as np
import pytest

from shardkit.errors import (
    ConfigError,
    IntegrityError,
    LockedError,
    StorageError,
    TargetFullError,
    UnsafeError,
)
from shardkit.exporting.formats import FORMATS
from shardkit.exporting.run import export
from shardkit.packing.run import pack
from shardkit.storage.lock import FolderLock
from shardkit.testing.damage import flip_byte
from shardkit.testing.datasets import draft_dataset
from shardkit.testing.mounts import tmpfs
from shardkit.testing.packs import contents
from shardkit.verifying.run import verify

OTHERS = sorted(set(FORMATS) - {"dali"})


def states(report):
    return {file.name: file.state for file in report.files}


@pytest.mark.parametrize("name", FORMATS)
def test_the_report_names_every_file_that_is_there_afterwards(dataset, tmp_path, name):
    report = export(dataset, name, out=tmp_path / "new" / "out")
    found = contents(tmp_path / "new" / "out")
    assert {file.name: file.bytes for file in report.files} == {
        name: len(data) for name, data in found.items() if name != "exports.json"
    }
    assert set(states(report).values()) == {"written"}


@pytest.mark.parametrize("name", FORMATS)
def test_a_second_export_is_the_same_bytes_and_changes_nothing(dataset, tmp_path, name):
    export(dataset, name, out=tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert set(states(export(dataset, name, out=tmp_path / "out")).values()) == {"unchanged"}
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
    export(dataset, name, out=tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


def test_the_bytes_are_the_same_wherever_they_lie(dataset, tmp_path):
    before = contents(dataset)
    export(dataset, FORMATS, out=tmp_path / "out")
    assert contents(dataset) == before
    export(dataset, FORMATS)
    assert contents(dataset) == before | contents(tmp_path / "out")


def test_no_shard_is_opened(dataset, monkeypatch):
    opened = []
    true_open = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **more: opened.append(path) or true_open(path, *rest, **more))
    export(dataset, FORMATS)
    assert any(os.fsdecode(path).endswith("index.arrow") for path in opened)
    assert not any(os.fsdecode(path).endswith(".tar") for path in opened)


def test_a_dataset_with_all_exports_in_it_is_still_whole(dataset):
    export(dataset, FORMATS)
    assert verify(dataset).counts == {}
    (dataset / "tiny-000009.tar.idx").write_bytes(b"")
    assert verify(dataset).counts == {"extra-file": 1}


def test_one_name_and_several_names_are_taken_and_repeats_are_one(dataset):
    assert states(export(dataset, "timm")) == {"_info.json": "written"}
    report = export(dataset, ["timm", "openclip", "timm"])
    assert [(file.name, file.state) for file in report.files] == [
        ("_info.json", "unchanged"),
        ("sizes.json", "written"),
    ]


@pytest.mark.parametrize("names", ["tfrecord", [], ["wids", ""], ["wids", "\x1b[31m"]])
def test_an_unknown_format_is_refused_with_the_list_of_known_ones(dataset, names):
    before = contents(dataset)
    with pytest.raises(ConfigError, match="expected wids, energon, timm"):
        export(dataset, names)
    assert contents(dataset) == before


def test_all_unknown_formats_and_the_number_of_all_files_in_the_way_are_told(dataset):
    with pytest.raises(ConfigError, match=r"found tfrecord, \\x1b\[31m$"):
        export(dataset, ["tfrecord", "wids", "\x1b[31m"])
    names = ["shardindex.json", "README.md", "_info.json", "sizes.json", "aistore.jsonl", ".nv-meta/split.yaml"]
    (dataset / ".nv-meta").mkdir()
    for name in names:
        (dataset / name).write_text("mine")
    with pytest.raises(ConfigError, match=r"found shardindex\.json, .*, and 1 more; nothing was changed"):
        export(dataset, ["wids", "huggingface", "timm", "openclip", "aistore", "energon"])


def test_what_an_earlier_export_has_written_is_replaced(dataset, tmp_path):
    export(dataset, FORMATS, out=tmp_path / "out")
    shutil.rmtree(dataset)
    draft_dataset((3, 2, 2)).write(dataset)
    report = export(dataset, FORMATS, out=tmp_path / "out")
    found = states(report)
    assert found["shardindex.json"] == found[".nv-meta/index.sqlite"] == "replaced"
    assert found["tiny-000000.idx"] == "unchanged"
    fresh = export(dataset, FORMATS, out=tmp_path / "fresh")
    assert [(f.name, f.bytes) for f in fresh.files] == [(f.name, f.bytes) for f in report.files]
    assert contents(tmp_path / "fresh") == contents(tmp_path / "out")


@pytest.mark.parametrize("edited", [False, True], ids=["a-strangers", "ours-edited"])
def test_what_no_export_has_written_is_replaced_only_when_told(dataset, edited):
    if edited:
        export(dataset, OTHERS)
    (dataset / "README.md").write_text("mine")
    before = contents(dataset)
    with pytest.raises(ConfigError, match=r"found README\.md; nothing was changed; .*--overwrite"):
        export(dataset, OTHERS)
    assert contents(dataset) == before
    assert states(export(dataset, OTHERS, overwrite=True))["README.md"] == "replaced"
    assert (dataset / "README.md").read_text().startswith("---\n")


def test_a_record_of_somebody_elses_is_replaced_only_when_told(dataset):
    (dataset / "exports.json").write_text('{"mine": 1}')
    with pytest.raises(ConfigError, match=r"exports\.json"):
        export(dataset, "timm")
    export(dataset, "timm", overwrite=True)
    assert json.loads((dataset / "exports.json").read_text())["format"] == "shardkit-exports"


def test_the_record_keeps_what_other_exports_have_written(dataset):
    export(dataset, "timm")
    export(dataset, "openclip")
    assert set(json.loads((dataset / "exports.json").read_text())["files"]) == {"_info.json", "sizes.json"}


@pytest.mark.parametrize("kind", ["folder", "fifo", "link", "linked-folder"])
def test_something_else_under_the_name_of_a_file_is_refused_and_kept(dataset, tmp_path, kind):
    path = dataset / ".nv-meta" / "index.uuid"
    if kind == "linked-folder":
        (tmp_path / "elsewhere").mkdir()
        path.parent.symlink_to(tmp_path / "elsewhere")
    else:
        path.parent.mkdir()
        {"folder": path.mkdir, "fifo": lambda: os.mkfifo(path), "link": lambda: path.symlink_to("/etc/hostname")}[
            kind
        ]()
    with pytest.raises(UnsafeError, match="nothing was changed"):
        export(dataset, "energon", overwrite=True)
    assert not (dataset / "tiny-000000.tar.idx").exists()
    if kind == "linked-folder":
        assert contents(tmp_path / "elsewhere") == {}


def test_a_split_whose_name_leads_elsewhere_is_refused(dataset, change_manifest):
    change_manifest(dataset, splits={"../../x": ("tiny-000000.tar",)})
    for name in ("wids", "timm", "huggingface", "energon"):
        with pytest.raises(UnsafeError, match=r"found \.\./\.\./x"):
            export(dataset, name)


def test_an_index_of_another_content_is_refused(dataset):
    flip_byte(dataset / "index.arrow", (dataset / "index.arrow").read_bytes().index(b"c/0001"))
    with pytest.raises(IntegrityError, match="the index is not the manifest's"):
        export(dataset, "timm")


def test_a_shard_of_another_size_is_refused(dataset):
    with (dataset / "tiny-000001.tar").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(IntegrityError, match=r"tiny-000001\.tar"):
        export(dataset, "dali")
    (dataset / "tiny-000001.tar").unlink()
    with pytest.raises(StorageError, match=r"tiny-000001\.tar"):
        export(dataset, "dali")


# The row and what becomes of it; sample 0 is bytes 0 to 4608, sample 1 from there to 8704.
LIES = [
    ("a member that lies outside its sample", 0, {"offset": 16384}),
    ("a member that lies outside its sample", 1, {"offset": 4096}),
    ("a member that lies outside its sample", 1, {"sample_offset": 4096, "sample_size": 4608}),
    ("a key that some reader would misread", 1, {"key": "c/0001 \njpg 0 1"}),
    ("a sample that lies outside its shard", 1, {"sample_size": 1 << 20}),
]


@pytest.mark.parametrize(("what", "row", "fields"), LIES)
def test_a_row_that_would_mislead_a_reader_is_refused(tmp_path, what, row, fields):
    draft = draft_dataset((2,))
    draft.shards[0].rows[row] = draft.shards[0].rows[row]._replace(**fields)
    dataset = draft.write(tmp_path / "ds")
    before = contents(dataset)
    for name in ("dali", "aistore", "energon"):
        with pytest.raises(IntegrityError, match=what):
            export(dataset, name, overwrite=True)
    assert contents(dataset) == before


def test_a_key_that_stands_twice_is_refused_for_energon(tmp_path):
    draft = draft_dataset((2, 2))
    draft.shards[1].rows[0] = draft.shards[1].rows[0]._replace(key="c/0001")
    dataset = draft.write(tmp_path / "ds")
    with pytest.raises(IntegrityError, match=r"stands twice .*sample_key; nothing was changed"):
        export(dataset, "energon")


def test_a_dataset_that_is_replaced_meanwhile_is_not_exported(dataset, tmp_path, change_manifest):
    def replace(_name):
        change_manifest(dataset, classes=tuple("abcdefghijkl"))

    with pytest.raises(ConfigError, match=r"replaced while it was exported.*nothing was changed"):
        export(dataset, "timm", out=tmp_path / "out", progress=replace)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_dataset_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no manifest\.json"):
        export(tmp_path, "wids")
    assert contents(tmp_path) == {}


def test_another_export_into_the_folder_is_waited_for_by_nobody(dataset):
    (dataset / ".shardkit-export").mkdir()
    with FolderLock(os.fsencode(dataset / ".shardkit-export" / "lock")), pytest.raises(LockedError):
        export(dataset, "wids")
    assert not (dataset / "shardindex.json").exists()


def test_what_a_killed_export_has_left_is_swept(dataset):
    (dataset / ".shardkit-export").mkdir()
    (dataset / ".shardkit-export" / "sizes.json.tmp").write_text("half")
    export(dataset, "openclip")
    assert not (dataset / ".shardkit-export").exists()


def test_a_work_folder_that_is_a_link_is_refused(dataset, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("x")
    (dataset / ".shardkit-export").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeError, match="work folder"):
        export(dataset, "wids")
    assert contents(tmp_path / "elsewhere") == {"precious": b"x"}


def test_a_target_that_is_a_file_is_refused(dataset, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="not a folder"):
        export(dataset, "wids", out=tmp_path / "file")


def test_a_folder_that_may_not_be_written_names_the_way_out(open_folder, unprivileged):
    dataset = draft_dataset().write(open_folder / "ds")
    for path in [dataset, *dataset.iterdir()]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    with unprivileged(), pytest.raises(StorageError, match=re.escape("--out")):
        export(dataset, "wids")


@pytest.mark.parametrize(("name", "kib"), [("aistore", 800), ("energon", 800), ("energon", 2000)])
def test_a_full_target_is_told_and_left_as_it_was(tmp_path, name, kib):
    """The lines take 0.9 MB; the offsets 0.1 MB, and the database more than 2 MB."""
    dataset = draft_dataset((12_000,), sizes=(401,), metadata=False, align=512).write(tmp_path / "ds")
    with tmpfs(tmp_path / "small", size=kib << 10) as small:
        with pytest.raises(TargetFullError, match=r"nothing was changed; free space .*and run again$"):
            export(dataset, name, out=small / "out")
        assert contents(small) == {}
        export(dataset, "timm", out=small / "out")


def test_a_target_that_takes_no_more_files_is_told_as_full(dataset, tmp_path):
    """Whichever file it is that there is no room for."""
    for inodes in itertools.count(2):
        with tmpfs(tmp_path / "small", size=1 << 20, inodes=inodes) as small:
            told = ""
            try:
                export(dataset, "energon", out=small / "out")
            except TargetFullError as error:
                told = str(error)
            if not told:
                break
            assert re.search("; free space .*and run again$", told)
            assert contents(small) == {} or "nothing was changed" not in told
    assert inodes > 10


def test_a_packed_tree_is_exported(photo_tree, tmp_path):
    manifest = pack(photo_tree, tmp_path / "ds", shard_samples=15, jobs=1)
    report = export(tmp_path / "ds", FORMATS)
    assert (report.samples, report.generation) == (40, manifest.generation)
    assert {file.state for file in report.files if file.format == "dali"} == {"unchanged"}
    offsets = [np.fromfile(path, "<u8") for path in sorted((tmp_path / "ds").glob("*.tar.idx"))]
    assert sum(map(len, offsets)) == 40 + len(manifest.shards)
    assert verify(tmp_path / "ds").exit_code == 0
