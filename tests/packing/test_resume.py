"""A pack that was stopped and goes on makes what an undisturbed one makes, byte for byte."""

from __future__ import annotations

import dataclasses
import os
import shutil

import pytest

import shardkit
from shardkit.errors import ConfigError, SourceError
from shardkit.packing.record import load_record
from shardkit.packing.run import make_options, run_pack
from shardkit.running.sealed_record import seal
from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.packs import StopAfter, contents, tiny_tree

SHARDS = 5
OPTIONS = {"name": "t", "shards": SHARDS}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_tree(tmp_path_factory.mktemp("tree") / "source", images=17)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "dataset"
    shardkit.pack(source, folder, **OPTIONS, jobs=1)
    return contents(folder)


@pytest.fixture
def target(tmp_path):
    return tmp_path / "dataset"


def stop(source, target, reports, **options):
    with pytest.raises(StopAfter.Stop) as caught:
        shardkit.pack(source, target, **{**OPTIONS, "jobs": 1, **options}, progress=StopAfter(reports))
    return caught.value


def go_on(source, target, *, jobs=1, **options):
    return run_pack(source, target, make_options(target, OPTIONS | options), jobs=jobs, resume=True)


@pytest.fixture
def stopped(source, target):
    """A target with three of five shards finished."""
    stop(source, target, 3)
    return target


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("reports", range(SHARDS))
def test_it_goes_on_after_any_shard(source, target, whole, reports, jobs):
    stopped = stop(source, target, reports)
    assert stopped.__notes__ == [
        f"{reports} of {SHARDS} shards are finished and kept", "run again with --resume to go on",
    ]  # fmt: skip
    assert not [name for name in contents(target) if name.endswith(".tmp")]
    result = go_on(source, target, jobs=jobs)
    assert contents(target) == whole
    assert result.kept == reports
    assert sum(result.refused.values()) == result.manifest.totals.refused == 3


def test_it_can_be_stopped_again_and_again(source, target, whole):
    stop(source, target, 1)
    for _ in range(SHARDS - 2):
        with pytest.raises(StopAfter.Stop):
            # What is kept is reported at once, a report a shard.
            shardkit.pack(source, target, **OPTIONS, jobs=1, resume=True, progress=StopAfter(_kept(target) + 1))
    assert _kept(target) == SHARDS - 1
    go_on(source, target)
    assert contents(target) == whole


class Counted:
    """Progress that adds up."""

    def __init__(self):
        self.whole, self.done = (), [0, 0, 0]

    def begin(self, *whole):
        self.whole = whole

    def advance(self, *more):
        self.done = [a + b for a, b in zip(self.done, more, strict=True)]


@pytest.mark.parametrize("more", [{}, {"resize": 4}])
def test_a_run_that_goes_on_counts_up_to_what_a_whole_one_does(source, target, tmp_path, more):
    whole, rest = Counted(), Counted()
    shardkit.pack(source, tmp_path / "other", **OPTIONS, **more, jobs=1, progress=whole)
    with pytest.raises(StopAfter.Stop):
        shardkit.pack(source, target, **OPTIONS, **more, jobs=1, progress=StopAfter(2))
    shardkit.pack(source, target, **OPTIONS, **more, jobs=1, resume=True, progress=rest)
    assert (rest.whole, rest.done) == (whole.whole, whole.done)


def _kept(target):
    return len([line for line in (target / ".shardkit" / "journal").read_bytes().split(b"\n") if line])


def test_finished_shards_are_not_made_again(source, stopped):
    before = {path.name: path.stat().st_ino for path in stopped.glob("t-*")}
    assert len(before) == 9
    go_on(source, stopped)
    assert before.items() <= {path.name: path.stat().st_ino for path in stopped.glob("t-*")}.items()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"shards": 4}, "shards was 5 and is 4"),
        ({"shards": None, "shard_samples": 3}, "shard_samples was not given and is 3"),
        ({"shuffle": False}, "shuffle was true and is false"),
        ({"align": 512}, "align was 4096 and is 512"),
        ({"check": "decode"}, 'check was "header" and is "decode"'),
        ({"key": "index"}, 'key was "relpath" and is "index"'),
        ({"labels": "none"}, "labels was not given and is"),
        ({"digest": "sha256"}, 'digest was "xxh3-128" and is "sha256"'),
        ({"name": "u"}, 'name was "t" and is "u"'),
        ({"resize": 8}, "resize was not given and is 8"),
        ({"max_pixels": 1000}, "max_pixels was 178956970 and is 1000"),
        ({"classes": ["c", "b", "a"]}, "another class list"),
        ({"classes": ["a", "b", "c", "empty"]}, "another class list"),
        ({"seed": 1, "align": 512}, "align was 4096 and is 512, seed was 0 and is 1"),
    ],
    ids=str,
)
def test_another_option_is_named_and_nothing_is_changed(source, stopped, change, named):
    before = contents(stopped)
    with pytest.raises(ConfigError, match="other sources or options") as caught:
        go_on(source, stopped, **change)
    assert caught.value.found.startswith(named)
    assert "list of sources" not in caught.value.found  # it is the same one, in another order at most
    assert contents(stopped) == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda root: (root / "a" / "new.jpg").write_bytes(tiny_jpeg()), "another list of sources"),
        (lambda root: (root / "a" / "00000.jpg").unlink(), "another list of sources"),
        (lambda root: (root / "a" / "00000.jpg").rename(root / "a" / "renamed.jpg"), "another list of sources"),
        (lambda root: (root / "a" / "00000.jpg").write_bytes(tiny_jpeg(0, 3000)), "another list of sources"),
        (lambda root: os.utime(root / "a" / "00000.jpg", ns=(0, 1)), "sources were modified"),
        (lambda root: shutil.move(root / "c", root / "d"), "another class list"),
    ],
)
def test_other_sources_are_refused_and_nothing_is_changed(tmp_path, target, change, named):
    source = tiny_tree(tmp_path / "source", images=17)
    stop(source, target, 3)
    before = contents(target)
    change(source)
    with pytest.raises(ConfigError, match=named):
        go_on(source, target)
    assert contents(target) == before


def test_the_sources_may_have_moved(tmp_path, target, source, whole):
    """Where they lie shapes no byte."""
    shutil.copytree(source, tmp_path / "first")
    stop(tmp_path / "first", target, 3)
    os.rename(tmp_path / "first", tmp_path / "second")
    go_on(tmp_path / "second", target)
    assert contents(target) == whole


def test_another_version_is_refused_and_named(source, stopped):
    path = stopped / ".shardkit" / "plan.json"
    path.write_bytes(seal(dataclasses.replace(load_record(path.read_bytes()), shardkit="0.0.7")))
    with pytest.raises(ConfigError, match=rf"shardkit was 0\.0\.7 and is {shardkit.__version__}"):
        go_on(source, stopped)


def test_a_list_goes_on_too_with_its_metadata_and_its_refusals(tmp_path, target):
    source = tiny_tree(tmp_path / "source", images=9)
    rows = [f"source/{'abc'[n % 3]}/{n:05d}.jpg,{n % 3},caption {n}" for n in range(9)]
    rows[4:4] = ["nowhere.jpg,1,gone", "source/c/empty.jpg,0,nothing"]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,caption", *rows]))
    shardkit.pack(tmp_path / "list.csv", tmp_path / "whole", name="t", shards=4, jobs=1)
    stop(tmp_path / "list.csv", target, 2, shards=4)
    go_on(tmp_path / "list.csv", target, shards=4)
    assert contents(target) == contents(tmp_path / "whole")
    assert b"nowhere.jpg" in contents(target)["rejected.jsonl"]
    assert source.exists()


def test_refusals_with_any_name_are_the_same_afterwards(source, stopped, whole):
    go_on(source, stopped)
    rejected = contents(stopped)["rejected.jsonl"]
    assert rejected == whole["rejected.jsonl"]
    assert b"a/broken %FF\\n.jpg" in rejected
    assert b"b/100%2525.jpg" in rejected
    assert contents(stopped)["manifest.json"] == whole["manifest.json"]


def test_a_shard_of_which_everything_was_refused_is_kept_as_nothing(tmp_path, target):
    source = tmp_path / "source"
    source.mkdir()
    for number in range(8):
        (source / f"{number}.jpg").write_bytes(b"no image" if number in (2, 3) else tiny_jpeg(number))
    options = {"shards": None, "shard_samples": 2, "shuffle": False}
    shardkit.pack(source, tmp_path / "whole", name="t", jobs=1, **options)
    assert not (tmp_path / "whole" / "t-000001.tar").exists()
    stop(source, target, 3, **options)
    assert go_on(source, target, **options).kept == 3
    assert contents(target) == contents(tmp_path / "whole")


@pytest.mark.parametrize("extension", ["tar", "arrow", "idx"])
@pytest.mark.parametrize("damage", ["removed", "cut", "longer", "folder", "link"])
def test_a_finished_shard_that_is_not_as_it_was_is_made_again(source, stopped, whole, tmp_path, extension, damage):
    path = stopped / f"t-000001.{extension}"
    data = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(data[:-512])
    elif damage == "longer":
        path.write_bytes(data + bytes(512))
    elif damage == "link":
        path.symlink_to(tmp_path / "nothing")
    if damage == "folder":
        path.mkdir()
        with pytest.raises(shardkit.ShardkitError, match=path.name):
            go_on(source, stopped)
        path.rmdir()
    assert go_on(source, stopped).kept == 2
    assert contents(stopped) == whole


def test_a_changed_index_of_a_finished_shard_is_noticed(source, stopped, whole):
    path = stopped / "t-000002.arrow"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert go_on(source, stopped).kept == 2
    assert contents(stopped) == whole


@pytest.mark.parametrize("journal", [None, b"", b"\0" * 1000, os.urandom(1000), "torn", "shuffled", "twice"])
def test_whatever_the_journal_says_the_result_is_the_same(source, stopped, whole, journal):
    path = stopped / ".shardkit" / "journal"
    data = path.read_bytes()
    lines = [line for line in data.split(b"\n") if line]
    assert len(lines) == 3
    if journal is None:
        path.unlink()
    elif isinstance(journal, bytes):
        path.write_bytes(journal)
    elif journal == "torn":
        path.write_bytes(data[:-30])
    else:
        path.write_bytes(b"\n".join([lines[2], lines[0], lines[1]]) if journal == "shuffled" else data * 2)
    assert go_on(source, stopped).kept == {"torn": 2, "shuffled": 3, "twice": 3}.get(journal, 0)
    assert contents(stopped) == whole


def test_the_journal_of_an_earlier_plan_does_not_count(source, target, whole):
    stop(source, target, 3, seed=1)
    journal = (target / ".shardkit" / "journal").read_bytes()
    stop(source, target, 0, overwrite=True)
    assert not (target / ".shardkit" / "journal").exists()
    (target / ".shardkit" / "journal").write_bytes(journal)
    assert go_on(source, target).kept == 0
    assert contents(target) == whole


def test_a_shard_that_was_made_but_not_acknowledged_leaves_nothing_when_it_becomes_empty(tmp_path, target):
    """Its images were damaged meanwhile, behind the back of size and time."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(4):
        (source / f"{number}.jpg").write_bytes(tiny_jpeg(number))
        os.utime(source / f"{number}.jpg", ns=(0, 0))
    options = {"shards": 4, "shuffle": False}
    stop(source, target, 2, **options)
    assert (target / "t-000001.tar").exists()
    (target / ".shardkit" / "journal").unlink()
    (source / "1.jpg").write_bytes(bytes((source / "1.jpg").stat().st_size))
    os.utime(source / "1.jpg", ns=(0, 0))
    go_on(source, target, **options)
    assert not list(target.glob("t-000001.*"))
    assert shardkit.verify(target).exit_code == 0


def test_a_pack_that_stopped_at_a_refused_source_can_go_on_without_stopping(source, target, whole):
    with pytest.raises(SourceError) as caught:
        shardkit.pack(source, target, **OPTIONS, jobs=1, on_error="fail")
    kept = int(caught.value.kept.split()[0])
    assert f"{kept} of {SHARDS} shards are finished and kept" in str(caught.value)
    assert go_on(source, target).kept == kept
    assert contents(target) == whole
