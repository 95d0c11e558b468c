"""What may be in the target, and what becomes of it."""

from __future__ import annotations

import dataclasses
import os
import shutil
import threading

import pytest

import shardkit
from shardkit.errors import (
    ConfigError,
    IntegrityError,
    LockedError,
    ManifestError,
    SourceError,
    UnsafeError,
    UnsupportedVersionError,
)
from shardkit.format.manifest import dump_manifest, load_manifest
from shardkit.packing.target import Target
from shardkit.testing.packs import StopAfter, contents, tiny_tree

OPTIONS = {"name": "t", "shards": 3, "jobs": 1}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_tree(tmp_path_factory.mktemp("tree") / "source")


@pytest.fixture
def target(tmp_path):
    return tmp_path / "dataset"


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "dataset"
    shardkit.pack(source, folder, **OPTIONS)
    return contents(folder)


@pytest.fixture
def finished(target, source):
    shardkit.pack(source, target, **OPTIONS)
    return contents(target)


@pytest.fixture
def unfinished(target, source):
    with pytest.raises(StopAfter.Stop):
        shardkit.pack(source, target, **OPTIONS, progress=StopAfter(2))
    left = contents(target)
    assert ".shardkit/journal" in left
    assert "manifest.json" not in left
    return left


def test_a_finished_dataset_is_not_touched_without_being_told(target, source, finished):
    with pytest.raises(ConfigError, match=r"finished dataset.*dataset.*--overwrite"):
        shardkit.pack(source, target, **OPTIONS)
    assert contents(target) == finished


def test_an_unfinished_pack_is_not_touched_without_being_told(target, source, unfinished):
    with pytest.raises(ConfigError, match=r"unfinished pack.*--resume.*--overwrite"):
        shardkit.pack(source, target, **OPTIONS)
    assert contents(target) == unfinished


def test_what_keeps_and_what_replaces_exclude_each_other(target, source):
    with pytest.raises(ConfigError, match="give one of them"):
        shardkit.pack(source, target, **OPTIONS, resume=True, overwrite=True)
    assert not target.exists()


def test_going_on_with_nothing_starts(target, source, whole):
    shardkit.pack(source, target, **OPTIONS, resume=True)
    assert contents(target) == whole


def test_going_on_with_what_is_finished_changes_nothing(target, source, finished):
    times = {path: path.stat().st_mtime_ns for path in target.iterdir()}
    manifest = shardkit.pack(source, target, **OPTIONS, resume=True)
    assert manifest == load_manifest((target / "manifest.json").read_bytes())
    assert contents(target) == finished
    assert {path: path.stat().st_mtime_ns for path in target.iterdir()} == times


@pytest.mark.parametrize("change", [{"seed": 1}, {"shards": 2}, {"digest": "sha256"}, {"classes": [*"abcd"]}])
def test_going_on_with_another_finished_dataset_is_refused(target, source, finished, change):
    (name,) = change
    with pytest.raises(ConfigError, match=rf"finished dataset.*{name.removesuffix('es')}.*--overwrite"):
        shardkit.pack(source, target, **OPTIONS | change, resume=True)
    assert contents(target) == finished


def test_going_on_with_a_finished_dataset_that_is_damaged_says_so(target, source, finished):
    (target / "t-000001.tar").unlink()
    with pytest.raises(IntegrityError, match=r"t-000001.tar.*verify") as caught:
        shardkit.pack(source, target, **OPTIONS, resume=True)
    assert caught.value.exit_code == 4


def test_going_on_with_a_damaged_manifest_says_so(target, source, finished):
    (target / "manifest.json").write_bytes(finished["manifest.json"][:-20])
    with pytest.raises(ManifestError):
        shardkit.pack(source, target, **OPTIONS, resume=True)
    assert "t-000002.tar" in contents(target)


@pytest.mark.parametrize("options", [{"name": "t", "shards": 1}, {"name": "other", "shards": 2}, {"name": "t-000001"}])
def test_replacing_leaves_nothing_of_a_finished_dataset(target, source, finished, tmp_path, options):
    shardkit.pack(source, tmp_path / "fresh", jobs=1, **options)
    shardkit.pack(source, target, jobs=1, overwrite=True, **options)
    assert contents(target) == contents(tmp_path / "fresh")


@pytest.mark.parametrize("options", [{"name": "t", "shards": 1}, {"name": "other", "shards": 2}])
def test_replacing_leaves_nothing_of_an_unfinished_pack(target, source, unfinished, tmp_path, options):
    shardkit.pack(source, tmp_path / "fresh", jobs=1, **options)
    shardkit.pack(source, target, jobs=1, overwrite=True, **options)
    assert contents(target) == contents(tmp_path / "fresh")


@pytest.mark.parametrize("stranger", ["theirs.tar", "theirs.idx", "t-9.tar", "t-00000x.arrow"])
@pytest.mark.parametrize(
    ("state", "flags"),
    [("fresh", ()), ("fresh", "overwrite"), ("fresh", "resume"), ("finished", "overwrite"), ("unfinished", "overwrite"),
     ("unfinished", "resume")],
)  # fmt: skip
def test_shards_of_somebody_else_are_neither_removed_nor_joined(request, target, source, stranger, state, flags):
    if state != "fresh":
        request.getfixturevalue(state)
    target.mkdir(exist_ok=True)
    (target / stranger).write_bytes(b"theirs")
    before = contents(target)
    with pytest.raises(ConfigError, match=stranger):
        shardkit.pack(source, target, **OPTIONS, **({flags: True} if flags else {}))
    assert contents(target) == before


@pytest.mark.parametrize("state", ["fresh", "finished", "unfinished"])
def test_other_files_of_somebody_else_stay(request, target, source, whole, state):
    if state != "fresh":
        request.getfixturevalue(state)
    (target / "notes").mkdir(parents=True)
    (target / "notes" / "x.tar").write_bytes(b"in a folder of its own")
    (target / "README.md").write_bytes(b"about")
    shardkit.pack(source, target, **OPTIONS, overwrite=True)
    assert contents(target) == whole | {"notes/x.tar": b"in a folder of its own", "README.md": b"about"}


def test_adopted_shards_of_another_tool_are_not_replaced(target, source, finished):
    manifest = load_manifest(finished["manifest.json"])
    (target / "manifest.json").write_text(dump_manifest(dataclasses.replace(manifest, layout="foreign")))
    before = contents(target)
    with pytest.raises(ConfigError, match="another tool"):
        shardkit.pack(source, target, **OPTIONS, overwrite=True)
    assert contents(target) == before


def test_a_damaged_manifest_can_be_replaced(target, source, finished, whole):
    (target / "manifest.json").write_bytes(finished["manifest.json"].replace(b'"samples"', b'"simples"', 1))
    shardkit.pack(source, target, **OPTIONS, overwrite=True)
    assert contents(target) == whole


def test_a_damaged_manifest_of_another_name_is_not_guessed_at(target, source, finished):
    (target / "manifest.json").write_bytes(b"{}")
    before = contents(target)
    with pytest.raises(ConfigError, match=r"t-000000\.arrow"):
        shardkit.pack(source, target, name="other", jobs=1, overwrite=True)
    assert contents(target) == before


def test_a_dataset_of_a_newer_shardkit_is_not_replaced(target, source, finished):
    newer = finished["manifest.json"].replace(b'"format_version": 1', b'"format_version": 99')
    assert newer != finished["manifest.json"]
    (target / "manifest.json").write_bytes(newer)
    before = contents(target)
    with pytest.raises(UnsupportedVersionError):
        shardkit.pack(source, target, **OPTIONS, overwrite=True)
    assert contents(target) == before


@pytest.mark.parametrize("damage", [b"", b"{}", b"\0" * 100, "edited"])
def test_a_damaged_record_stops_going_on_but_not_starting_again(target, source, unfinished, whole, damage):
    record = target / ".shardkit" / "plan.json"
    edited = record.read_bytes().replace(b'"seed": 0', b'"seed": 1')
    assert edited != record.read_bytes()
    record.write_bytes(edited if damage == "edited" else damage)
    before = contents(target)
    with pytest.raises(ConfigError, match=r"record.*damaged.*plan\.json.*--overwrite"):
        shardkit.pack(source, target, **OPTIONS, resume=True)
    assert contents(target) == before
    shardkit.pack(source, target, **OPTIONS, overwrite=True)
    assert contents(target) == whole


@pytest.mark.parametrize("flags", [{}, {"overwrite": True}, {"resume": True}])
@pytest.mark.parametrize("state", ["finished", "unfinished"])
def test_what_cannot_be_packed_costs_nothing_that_is_there(request, target, tmp_path, source, state, flags):
    before = request.getfixturevalue(state)
    (tmp_path / "empty").mkdir()
    for bad in (tmp_path / "nothing", tmp_path / "empty"):
        with pytest.raises(ConfigError):
            shardkit.pack(bad, target, **OPTIONS, **flags)
        assert contents(target) == before
    with pytest.raises((ConfigError, SourceError)):
        shardkit.pack(source, target, **OPTIONS, classes=["z"], **flags)
    assert contents(target) == before


def test_a_run_that_never_had_a_plan_leaves_no_trace(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no JPEG"):
        shardkit.pack(tmp_path / "empty", tmp_path / "a" / "b" / "c", jobs=1)
    assert os.listdir(tmp_path) == ["empty"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match="no JPEG"):
        shardkit.pack(tmp_path / "empty", tmp_path / "mine", jobs=1)
    assert contents(tmp_path) == {"empty/": b"", "mine/": b""}


def test_two_packs_at_once_exclude_each_other_from_the_first_moment(target, source, whole):
    """The one that comes too late must not clean up after the one that is at work."""
    holder = Target(os.fsencode(target))
    with holder.hold():
        for flags in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(LockedError, match=rf"process {os.getpid()} on ") as caught:
                shardkit.pack(source, target, **OPTIONS, **flags)
            assert caught.value.exit_code == 8
        assert os.path.exists(os.path.join(holder.work, b"lock"))
        assert os.path.isdir(holder.scratch)
    shardkit.pack(source, target, **OPTIONS)
    assert contents(target) == whole


def test_many_that_come_and_go_never_meet_anything_but_the_lock(target):
    """Each makes and removes the folders that the others are about to use."""
    inside, most, troubles = 0, 0, []
    start = threading.Barrier(4)

    def visit():
        nonlocal inside, most
        start.wait()
        for _ in range(60):
            try:
                with Target(os.fsencode(target)).hold():
                    inside += 1
                    most = max(most, inside)
                    inside -= 1
            except LockedError:
                pass
            except BaseException as error:
                troubles.append(error)

    threads = [threading.Thread(target=visit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not troubles
    assert most == 1
    assert not (target / ".shardkit").exists()


def test_a_link_to_a_folder_is_that_folder(target, tmp_path, source, whole):
    (tmp_path / "disk").mkdir()
    target.symlink_to(tmp_path / "disk")
    shardkit.pack(source, target, **OPTIONS)
    assert target.is_symlink()
    assert contents(tmp_path / "disk") == whole
    with pytest.raises(ConfigError, match="no JPEG"):
        shardkit.pack(_empty(tmp_path), target, **OPTIONS, overwrite=True)
    assert target.is_symlink()


def test_a_link_to_nothing_is_refused(target, tmp_path, source):
    target.symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="link to nothing"):
        shardkit.pack(source, target, **OPTIONS)
    assert sorted(os.listdir(tmp_path)) == ["dataset"]


@pytest.mark.parametrize("below", ["", "deeper", "deeper/still"])
def test_a_file_is_no_target(target, source, below):
    target.write_bytes(b"mine")
    with pytest.raises(ConfigError, match="not a folder"):
        shardkit.pack(source, target / below, **OPTIONS)
    assert target.read_bytes() == b"mine"


def test_a_work_folder_that_leads_elsewhere_is_not_followed(target, tmp_path, source):
    precious = tmp_path / "precious"
    (precious / "run-0123abcd").mkdir(parents=True)
    (precious / "run-0123abcd" / "photo.raw").write_bytes(b"precious")
    (precious / "plan.json").write_bytes(b"mine")
    before = contents(precious)
    target.mkdir()
    (target / ".shardkit").symlink_to(precious)
    for flags in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(UnsafeError, match=r"\.shardkit"):
            shardkit.pack(source, target, **OPTIONS, **flags)
    assert contents(precious) == before


def test_a_scratch_folder_that_leads_elsewhere_is_not_swept(target, tmp_path, source, unfinished):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "photo.raw").write_bytes(b"precious")
    (target / ".shardkit" / "run-0123abcd").symlink_to(precious)
    shardkit.pack(source, target, **OPTIONS, resume=True)
    assert (precious / "photo.raw").read_bytes() == b"precious"


def test_scratch_of_a_crashed_run_is_swept(target, source, unfinished, whole):
    crashed = target / ".shardkit" / "run-0123abcd"
    crashed.mkdir()
    (crashed / "t-000000.tar.tmp").write_bytes(b"half")
    shardkit.pack(source, target, **OPTIONS, resume=True)
    assert contents(target) == whole


def test_a_work_folder_beside_a_manifest_belongs_to_a_finished_dataset(target, source, finished, unfinished_record):
    """A run was killed between its manifest and its clean-up."""
    shutil.copytree(unfinished_record, target / ".shardkit")
    with pytest.raises(ConfigError, match="finished dataset"):
        shardkit.pack(source, target, **OPTIONS)
    assert shardkit.verify(target).exit_code == 0
    shardkit.pack(source, target, **OPTIONS, resume=True)
    assert contents(target) == finished
    shutil.copytree(unfinished_record, target / ".shardkit")
    shardkit.pack(source, target, **OPTIONS, overwrite=True)
    assert contents(target) == finished


@pytest.fixture
def unfinished_record(source, tmp_path):
    with pytest.raises(StopAfter.Stop):
        shardkit.pack(source, tmp_path / "stopped", **OPTIONS, progress=StopAfter(2))
    return tmp_path / "stopped" / ".shardkit"


def test_what_somebody_else_keeps_in_the_work_folder_stays_there(target, source, unfinished, whole):
    (target / ".shardkit" / "notes.txt").write_bytes(b"mine")
    shardkit.pack(source, target, **OPTIONS, resume=True)
    assert contents(target) == whole | {".shardkit/notes.txt": b"mine"}


def _empty(tmp_path):
    (tmp_path / "empty").mkdir(exist_ok=True)
    return tmp_path / "empty"


def test_a_planted_record_removes_nothing_outside(tmp_path, plant):
    from shardkit.errors import UnsafeError
    from shardkit.packing.target import Target

    victim = tmp_path / "victim.txt"
    victim.write_text("mine")
    target = Target(os.fsencode(tmp_path / "ds"))
    with target.hold():
        for name in ("../victim.txt", str(victim), "notes.txt"):
            with pytest.raises(UnsafeError):
                target.remove_files([name])
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("name", ["manifest.json", ".shardkit/plan.json"])
def test_a_fifo_in_the_target_is_an_error_and_no_hang(tmp_path, plant, name):
    from shardkit.errors import UnsafeError
    from shardkit.packing.run import pack

    (tmp_path / "ds" / ".shardkit").mkdir(parents=True)
    os.mkfifo(tmp_path / "ds" / name)
    with pytest.raises(UnsafeError, match="not a regular file"):
        pack(plant("a/1.jpg"), tmp_path / "ds", jobs=1, overwrite=True)


def test_a_stranger_s_list_of_refusals_is_not_removed(tmp_path, plant):
    from shardkit.errors import ConfigError
    from shardkit.packing.run import pack

    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "rejected.jsonl").write_text("mine\n")
    with pytest.raises(ConfigError, match=r"rejected\.jsonl"):
        pack(plant("a/1.jpg"), tmp_path / "ds", jobs=1)
    assert (tmp_path / "ds" / "rejected.jsonl").read_text() == "mine\n"
