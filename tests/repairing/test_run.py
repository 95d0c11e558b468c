"""Shards that are missing, swapped, renamed or strange; indexes that are gone; and what may lie in the target."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
import xxhash

import shardkit
from shardkit.errors import ConfigError, LockedError, ShardkitError, StorageError, UnsafeError, UnsupportedVersionError
from shardkit.format.checksum import hex_digest
from shardkit.format.manifest import load_manifest
from shardkit.repairing.lost import LOST, REASONS
from shardkit.repairing.write import place_new
from shardkit.storage.lock import FolderLock
from shardkit.testing.damage import append, cut, exchange, flip_byte
from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.packs import contents, snapshot, tiny_tree

from .conftest import read_all

ROOT = Path(__file__).parents[2]
FIRST, SECOND = "tiny-000000.tar", "tiny-000001.tar"


@pytest.fixture
def damaged(whole, tmp_path):
    return whole.copy(tmp_path / "damaged")


def test_a_whole_dataset_is_copied_as_it_is(whole, damaged, repaired, tmp_path):
    result, samples = repaired(damaged)
    assert (result.exit_code, result.lost, samples) == (0, 0, whole.samples)
    assert contents(tmp_path / "repaired") == whole.files
    assert [shard.proof for shard in result.shards] == ["digest", "digest"]


def test_whole_shards_may_be_linked(whole, damaged, tmp_path):
    flip_byte(damaged / SECOND, 4100, 0xFF)
    result = shardkit.repair(damaged, out=tmp_path / "out", link=True)
    assert result.exit_code == 3
    assert (tmp_path / "out" / FIRST).samefile(damaged / FIRST)
    assert not (tmp_path / "out" / SECOND).samefile(damaged / SECOND)
    assert shardkit.verify(tmp_path / "out").exit_code == 0


@pytest.mark.parametrize("indexes", [True, False])
def test_a_missing_shard_is_named_with_all_its_samples(whole, repaired, tmp_path, indexes):
    folder = whole.copy(tmp_path / "damaged")
    (folder / FIRST).unlink()
    if not indexes:
        (folder / "tiny-000000.arrow").unlink()
        (folder / "index.arrow").unlink()
    result, samples = repaired(folder)
    assert result.exit_code == 4
    assert samples.keys() == {"c/0004", "c/0005", "c/0006"}
    lines = [json.loads(line) for line in (tmp_path / "repaired" / LOST).read_text().splitlines()]
    assert {line["reason"] for line in lines} == {"missing-shard"}
    assert [line["key"] for line in lines] == (["c/0000", "c/0001", "c/0002", "c/0003"] if indexes else [None])


def test_two_shards_that_were_swapped_get_their_names_back(whole, damaged, repaired, tmp_path):
    exchange(damaged / FIRST, damaged / SECOND)
    result, _ = repaired(damaged)
    assert result.exit_code == 0
    assert contents(tmp_path / "repaired") == whole.files
    assert result.notes == (f"{SECOND} holds {FIRST}", f"{FIRST} holds {SECOND}")


def test_two_shards_that_were_swapped_and_damaged_are_known_by_their_keys(whole, damaged, repaired):
    exchange(damaged / FIRST, damaged / SECOND)
    flip_byte(damaged / FIRST, 4100, 0xFF)
    cut(damaged / SECOND, 9000)
    result, samples = repaired(damaged)
    assert [(shard.name, shard.samples) for shard in result.shards] == [(FIRST, 2), (SECOND, 2)]
    assert samples.keys() == {"c/0000", "c/0001", "c/0005", "c/0006"}


@pytest.mark.parametrize(
    "name", ["elsewhere.tar", "tiny-000007.tar", "a \n\x1b[31mred.tar", os.fsdecode(b"\xff\xfe.tar")]
)
@pytest.mark.parametrize("damage", [False, True])
def test_a_renamed_shard_is_found_under_any_name(whole, damaged, repaired, name, damage):
    (damaged / FIRST).rename(damaged / name)
    if damage:
        cut(damaged / name, 9000)
    result, samples = repaired(damaged)
    assert len(samples) == (5 if damage else 7)
    assert result.exit_code == (3 if damage else 0)
    assert "\x1b" not in "".join(result.notes)


def test_stray_files_are_left_alone_and_named(whole, damaged, repaired, tmp_path):
    (damaged / "copy of tiny-000000.tar").write_bytes(whole.files[FIRST])
    (damaged / "other.tar").write_bytes(bytes(10240))
    (damaged / "notes.txt").write_bytes(b"mine")
    os.mkfifo(damaged / "fifo.tar")
    (damaged / "folder.tar").mkdir()
    (damaged / "lost.tar").symlink_to("nowhere")
    result, samples = repaired(damaged)
    assert (result.exit_code, samples) == (0, whole.samples)
    assert contents(tmp_path / "repaired") == whole.files
    told = "\n".join(result.notes)
    for name in ("copy of tiny-000000.tar", "other.tar", "fifo.tar", "folder.tar", "lost.tar"):
        assert name in told


def test_a_whole_copy_serves_instead_of_a_damaged_shard(whole, damaged, repaired):
    (damaged / "backup.tar").write_bytes(whole.files[FIRST])
    cut(damaged / FIRST, 9000)
    result, samples = repaired(damaged)
    assert (result.exit_code, samples) == (0, whole.samples)
    assert result.shards[0].file == b"backup.tar"


def test_a_copy_among_shards_without_indexes_gives_no_sample_twice(whole, repaired, tmp_path):
    folder = whole.copy(tmp_path / "damaged", indexes=False)
    (folder / "tiny-000002.tar").write_bytes(whole.files[FIRST])
    result, samples = repaired(folder)
    assert samples == whole.samples
    assert (result.counts, result.shards[2].state, result.exit_code) == ({"duplicate": 4}, "nothing", 4)


ONLY = [
    ["manifest.json"],
    ["index.arrow"],
    ["tiny-000000.arrow"],
    ["tiny-000001.idx"],
    ["manifest.json", "index.arrow"],
    ["manifest.json", "tiny-000000.arrow", "tiny-000001.arrow"],
    ["index.arrow", "tiny-000000.arrow", "tiny-000000.idx", "tiny-000001.idx"],
]


@pytest.mark.parametrize("names", ONLY, ids=" ".join)
@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_indexes_are_made_again_from_the_shards_and_what_is_left(whole, damaged, repaired, tmp_path, names, how):
    for name in names:
        (damaged / name).unlink()
        if how == "damaged":
            (damaged / name).write_bytes(whole.files[name][:200] + b"rubbish" + whole.files[name][207:])
    result, samples = repaired(damaged)
    assert (result.exit_code, samples) == (0, whole.samples)
    again = contents(tmp_path / "repaired")
    assert again.keys() == whole.files.keys()
    assert {name for name in again if again[name] != whole.files[name]} <= {"manifest.json"} & set(names)
    old, new = (load_manifest(files["manifest.json"]) for files in (whole.files, again))
    assert new.shards == old.shards
    only_index = how == "gone" and {"manifest.json", "tiny-000000.arrow"} <= set(names)  # which no digest vouches for
    assert [shard.proof for shard in result.shards] == 2 * ["some-payloads" if only_index else "digest"]


@pytest.mark.parametrize("names", ONLY, ids=" ".join)
def test_missing_indexes_are_written_beside_the_shards(whole, damaged, names):
    for name in names:
        (damaged / name).unlink()
    before = snapshot(damaged)
    result = shardkit.repair(damaged)
    assert set(result.written) == set(names)
    after = snapshot(damaged)
    assert {name: after[name] for name in before} == before
    assert after.keys() == whole.files.keys()
    assert shardkit.verify(damaged).exit_code == 0
    if "manifest.json" not in names:
        assert contents(damaged) == whole.files
    again = shardkit.repair(damaged)
    assert (again.exit_code, again.written, snapshot(damaged)) == (0, (), after)


def test_everything_but_the_shards_is_made_again_beside_them(whole, tmp_path):
    folder = whole.copy(tmp_path / "damaged", indexes=False)
    result = shardkit.repair(folder)
    assert result.exit_code == 0
    assert [shard.proof for shard in result.shards] == ["structure", "structure"]
    assert shardkit.verify(folder, level="decode").exit_code == 0
    made = contents(folder)
    same = {name for name in made if made[name] == whole.files.get(name)}
    assert same == {n for n in whole.files if n not in ("manifest.json", "rejected.jsonl")}
    assert shardkit.open(folder).classes[5] == "class 5"


DAMAGES = {
    "a shard": lambda folder: flip_byte(folder / FIRST, 4100),
    "the end of a shard": lambda folder: append(folder / FIRST, bytes(512)),
    "an index": lambda folder: flip_byte(folder / "tiny-000000.arrow", 900),
    "the text index": lambda folder: flip_byte(folder / "tiny-000000.idx", 2),
    "the dataset's index": lambda folder: flip_byte(folder / "index.arrow", 900),
    "the manifest": lambda folder: flip_byte(folder / "manifest.json", 20),
    "the refusals": lambda folder: flip_byte(folder / "rejected.jsonl", 12),
    "a name": lambda folder: exchange(folder / FIRST, folder / SECOND),
    "a shard that is gone": lambda folder: (folder / FIRST).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_never_touched_without_out(damaged, damage):
    DAMAGES[damage](damaged)
    (damaged / "tiny-000001.idx").unlink()
    before = snapshot(damaged)
    with pytest.raises(ConfigError, match=r"more than missing index files.*nothing was changed.*--out"):
        shardkit.repair(damaged)
    assert snapshot(damaged) == before


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_dry_run_writes_nothing_and_says_the_same(damaged, repaired, damage, tmp_path):
    DAMAGES[damage](damaged)
    before = snapshot(tmp_path)
    dry = shardkit.repair(damaged, out=tmp_path / "elsewhere", dry_run=True)
    assert snapshot(tmp_path) == before
    real, _ = repaired(damaged)
    assert dry.counts == real.counts
    assert [(s.name, s.state, s.samples, s.lost) for s in dry.shards] == [
        (s.name, s.state, s.samples, s.lost) for s in real.shards
    ]
    assert (dry.first, dry.notes, dry.written) == (real.first, real.notes[: len(dry.notes)], ())


def test_samples_without_a_json_member_keep_their_path_only_by_an_index(make_whole, repaired, tmp_path):
    whole = make_whole((3,), metadata=False)
    folder = whole.copy(tmp_path / "damaged")
    (folder / "manifest.json").unlink()
    flip_byte(folder / FIRST, 4100, 0xFF)
    _, samples = repaired(folder)
    assert list(shardkit.open(tmp_path / "repaired").columns.texts("source")[:2]) == ["c/0001.jpg", "c/0002.jpg"]
    result, samples = repaired(whole.copy(tmp_path / "damaged", indexes=False))
    assert samples == whole.samples
    assert result.shards[0].without_source == 3


@pytest.mark.parametrize("gone", [[], ["*.arrow"], ["*.arrow", "manifest.json"]], ids=["damaged", "rows", "all"])
@pytest.mark.parametrize("metadata", [{"caption": "x"}, {"source": "100% wool.jpg"}, {"source": 5, "class": 7}])
def test_json_members_of_another_tool_cost_no_sample(repaired, tmp_path, gone, metadata):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        members = [(f"{n}.jpg", tiny_jpeg(n)) for n in range(4)]
        members += [(f"{n}.cls", b"%d" % n) for n in range(4)]
        members += [(f"{n}.json", json.dumps(metadata).encode()) for n in range(4)]
        for name, data in sorted(members):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    folder = tmp_path / "ds"
    shardkit.convert(tmp_path / "x.tar", folder, jobs=1)
    kept = read_all(folder)
    sources = list(shardkit.open(folder).columns["source"][:])
    for path in [path for pattern in gone for path in folder.glob(pattern)]:
        path.unlink()
    if not gone:
        flip_byte(folder / "ds-000000.tar", (folder / "ds-000000.tar").stat().st_size - 1, 0xFF)
    result, samples = repaired(folder)
    assert (result.lost, samples) == (0, kept)
    again = list(shardkit.open(tmp_path / "repaired").columns["source"][:])
    assert again == (sources if not gone or isinstance(metadata.get("source"), str) else [""] * 4)


def test_nothing_at_all_leaves_no_dataset(whole, repaired, tmp_path):
    folder = whole.copy(tmp_path / "damaged")
    for name in (FIRST, SECOND):
        cut(folder / name, 100)
    result, _ = repaired(folder)
    assert (result.exit_code, result.lost, result.manifest, result.written) == (4, 7, None, ())


def test_the_manifest_says_what_was_lost(whole, damaged, repaired, tmp_path):
    cut(damaged / FIRST, 9000)
    result, _ = repaired(damaged)
    old = load_manifest(whole.files["manifest.json"])
    new = result.manifest
    assert new.options["repair"]["generation"] == old.generation != new.generation
    assert new.options["repair"]["lost"] == 2
    listed = xxhash.xxh3_128_hexdigest((tmp_path / "repaired" / LOST).read_bytes())
    assert new.options["repair"]["lost_list"] == f"xxh3-128:{listed}"
    assert (new.classes, new.totals.refused) == (old.classes, old.totals.refused)


def test_a_row_of_the_index_that_lies_loses_its_sample_only(make_whole, repaired, tmp_path):
    """Sealed: every digest is right."""
    from shardkit.testing.datasets import draft_dataset

    draft = draft_dataset((4,))
    draft.shards[0].rows[1] = draft.shards[0].rows[1]._replace(crc32c=1)
    folder = draft.write(tmp_path / "lie")
    append(folder / FIRST, b"x")
    result, samples = repaired(folder)
    assert (result.counts, len(samples)) == ({"payload": 1}, 3)


def test_a_manifest_whose_indexes_cannot_be_made_again_is_not_replaced(make_whole, repaired, tmp_path):
    """Without json members only an index knows the original paths, and the manifest has its digest."""
    whole = make_whole((3,), metadata=False)
    folder = whole.copy(tmp_path / "damaged")
    for name in ("tiny-000000.arrow", "index.arrow"):
        (folder / name).unlink()
    before = snapshot(folder)
    with pytest.raises(ConfigError, match=r"manifest.json states other files than can be made again.*--out"):
        shardkit.repair(folder)
    assert snapshot(folder) == before
    result, samples = repaired(folder)
    assert (result.exit_code, samples, result.shards[0].without_source) == (0, whole.samples, 3)


@pytest.mark.parametrize("where", ["", "inside", "link"])
def test_the_target_lies_outside_the_dataset(damaged, tmp_path, where):
    (tmp_path / "link").symlink_to(damaged)
    target = tmp_path / "link" / "x" if where == "link" else damaged / where
    before = snapshot(damaged)
    with pytest.raises(ConfigError, match="the target lies inside the dataset"):
        shardkit.repair(damaged, out=target)
    assert snapshot(damaged) == before


@pytest.mark.parametrize("name", ["manifest.json", FIRST, "x.arrow", "index.arrow", LOST])
def test_a_target_that_holds_a_dataset_is_refused(damaged, whole, tmp_path, name):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_bytes(whole.files.get(name, b"mine"))
    before = snapshot(out)
    with pytest.raises(ConfigError, match="the target holds"):
        shardkit.repair(damaged, out=out)
    assert snapshot(out) == before


def test_a_target_that_somebody_holds_is_refused(damaged, tmp_path):
    (tmp_path / "out" / ".shardkit").mkdir(parents=True)
    with FolderLock(os.fsencode(tmp_path / "out" / ".shardkit" / "lock")), pytest.raises(LockedError) as caught:
        shardkit.repair(damaged, out=tmp_path / "out")
    assert caught.value.exit_code == 8


def test_a_record_that_names_other_files_removes_nothing(damaged, tmp_path):
    (tmp_path / "out" / ".shardkit").mkdir(parents=True)
    (tmp_path / "precious.txt").write_bytes(b"mine")
    record = {"dataset": str(damaged), "names": ["../precious.txt"]}
    (tmp_path / "out" / ".shardkit" / "repair.json").write_text(json.dumps(record))
    with pytest.raises(UnsafeError):
        shardkit.repair(damaged, out=tmp_path / "out")
    assert (tmp_path / "precious.txt").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "is damaged"), ("[]", "is damaged"), ('{"dataset": 1, "names": [1]}', "is damaged"),
        ('{"dataset": "/other", "names": []}', "unfinished repair of another dataset"),
    ],
)  # fmt: skip
def test_a_record_of_something_else_is_refused(damaged, tmp_path, text, what):
    (tmp_path / "out" / ".shardkit").mkdir(parents=True)
    (tmp_path / "out" / ".shardkit" / "repair.json").write_text(text)
    with pytest.raises(ConfigError, match=what):
        shardkit.repair(damaged, out=tmp_path / "out")


@pytest.mark.parametrize("mine", ["t-000000.tar", "x.tar", "y.idx"])
def test_a_file_that_no_interrupted_repair_has_left_is_nobodys_to_replace(damaged, tmp_path, mine):
    out = tmp_path / "out"
    (out / ".shardkit").mkdir(parents=True)
    record = {"dataset": str(damaged), "names": ["t-000001.tar"]}
    (out / ".shardkit" / "repair.json").write_text(json.dumps(record))
    (out / "t-000001.tar").write_bytes(b"left")
    (out / mine).write_bytes(b"mine")
    with pytest.raises(ConfigError, match=f"the target holds.*{mine}"):
        shardkit.repair(damaged, out=out)
    assert (out / mine).read_bytes() == b"mine"
    (out / mine).unlink()
    shardkit.repair(damaged, out=out)
    assert not (out / ".shardkit" / "repair.json").exists()


def test_an_unfinished_pack_is_saved_elsewhere_and_left_as_it_is(tmp_path):
    from shardkit.testing.packs import StopAfter

    source = tiny_tree(tmp_path / "tree")
    with pytest.raises(StopAfter.Stop):
        shardkit.pack(source, tmp_path / "ds", name="t", shards=3, jobs=1, progress=StopAfter(2))
    before = snapshot(tmp_path / "ds")
    with pytest.raises(ConfigError, match="an unfinished pack lies here"):
        shardkit.repair(tmp_path / "ds")
    assert snapshot(tmp_path / "ds") == before
    result = shardkit.repair(tmp_path / "ds", out=tmp_path / "out")
    assert result.exit_code == 0
    assert shardkit.verify(tmp_path / "out").exit_code == 0
    assert snapshot(tmp_path / "ds") == before
    shardkit.pack(source, tmp_path / "ds", name="t", shards=3, jobs=1, resume=True)


def test_a_packed_tree_with_odd_names_comes_back_without_any_index(tmp_path):
    source = tiny_tree(tmp_path / "tree")
    (source / "a" / os.fsdecode(b"odd \xff\n%.jpg")).write_bytes((source / "a" / "00000.jpg").read_bytes())
    shardkit.pack(source, tmp_path / "ds", name="t", shards=3, jobs=1)
    before = contents(tmp_path / "ds")
    for name in before:
        if not name.endswith((".tar", "rejected.jsonl")):
            (tmp_path / "ds" / name).unlink()
    result = shardkit.repair(tmp_path / "ds")
    after = contents(tmp_path / "ds")
    assert result.exit_code == 0
    assert {name for name in after if after[name] != before[name]} <= {"manifest.json"} | {
        name for name in before if name.endswith(".arrow") and result.shards[0].without_source
    }
    assert shardkit.verify(tmp_path / "ds").exit_code == 0


@pytest.mark.parametrize("path", ["nowhere", "file", "empty"])
def test_no_dataset_is_a_usage_error(tmp_path, path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        shardkit.repair(tmp_path / path, out=tmp_path / "out")
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def of_newer_format(folder, *, indexes):
    """Let the manifest state format 9, sealed as a newer shardkit would, and so the indexes that can be read."""
    file = folder / "manifest.json"
    text = re.sub('"format_version": 1', '"format_version": 9', file.read_text())
    bare = re.sub(r'^ "digest": .*\n', "", text, flags=re.MULTILINE)
    file.write_text(text.replace(re.search(r'^ "digest": "(.*)"', text, re.MULTILINE)[1], f"xxh3-128:{xxh3(bare)}"))
    for path in folder.glob("*.arrow") if indexes else ():
        flip_byte(path, path.read_bytes().rindex(b"\x01\0\0\x001\0") + 4, ord("1") ^ ord("9"))


def xxh3(text):
    return hex_digest("xxh3-128", text.encode())


@pytest.mark.parametrize("gone", ["nothing", "index.arrow", "all indexes"])
def test_a_newer_format_is_refused_by_name(damaged, tmp_path, gone):
    of_newer_format(damaged, indexes=True)
    for path in damaged.glob({"nothing": "-", "index.arrow": "index.arrow", "all indexes": "*.arrow"}[gone]):
        path.unlink()
    with pytest.raises(UnsupportedVersionError, match=r"newer format: .*/manifest\.json; expected at most 1; found 9"):
        shardkit.repair(damaged, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bit", range(8))
@pytest.mark.parametrize("indexes", ["whole", "gone"])
def test_a_flipped_bit_in_the_manifests_format_version_is_not_believed(
    whole, damaged, repaired, tmp_path, bit, indexes
):
    file = damaged / "manifest.json"
    flip_byte(file, file.read_bytes().index(b'"format_version": 1') + 18, 1 << bit)
    for path in damaged.glob("*.arrow" if indexes == "gone" else "-"):
        path.unlink()
    result, samples = repaired(damaged)
    assert (result.exit_code, samples) == (0, whole.samples)
    assert result.notes[0] == "manifest.json: its format_version is damaged, as its digest proves: not believed"
    if indexes == "whole":
        assert contents(tmp_path / "repaired") == whole.files
        with pytest.raises(ConfigError, match=r"found manifest\.json is damaged; .*give --out"):
            shardkit.repair(damaged)


def test_a_number_that_the_indexes_contradict_is_not_believed(whole, damaged, repaired):
    of_newer_format(damaged, indexes=False)
    result, samples = repaired(damaged)
    assert (result.exit_code, samples) == (0, whole.samples)
    told = "manifest.json: a dataset of a newer format, 9: not believed, since the indexes are of a known one"
    assert result.notes[0] == told


def test_a_shard_that_changes_meanwhile_stops_the_repair(damaged, tmp_path):
    cut(damaged / FIRST, 9000)

    class Writer:
        def begin(self, total):
            pass

        def advance(self, count):
            append(damaged / SECOND, b"x")

    with pytest.raises(StorageError, match="changed while it was"):
        shardkit.repair(damaged, out=tmp_path / "out", progress=Writer())
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_read_only_dataset_is_repaired_elsewhere(damaged, repaired):
    cut(damaged / FIRST, 9000)
    for path in damaged.iterdir():
        path.chmod(0o444)
    damaged.chmod(0o555)
    assert repaired(damaged)[0].exit_code == 3


def run_as_nobody(code, *arguments):
    """Root may do everything: what others may not is seen by a process that is somebody else."""
    load = "import os, sys, numpy.ma, pyarrow, shardkit; from shardkit.repairing.run import repair; "
    drop = (
        f"{load}os.geteuid() or (os.setgid(65534), os.setuid(65534)); "  # who may not read Python's own files, either
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", drop + code, *arguments], capture_output=True, text=True, check=False, env=environment
    )


@pytest.fixture
def reachable(damaged):
    """The dataset where anybody may pass: pytest's own folders are its user's alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(shutil.copytree(damaged, Path(folder, "ds")))


def test_a_folder_that_may_not_be_written_is_told_with_the_way_out(reachable):
    (reachable / "index.arrow").unlink()
    reachable.chmod(0o555)
    before = snapshot(reachable)
    done = run_as_nobody("repair(sys.argv[1])", reachable)
    assert re.search(r"StorageError: cannot create the target.*EACCES.*give --out", done.stderr), done.stderr
    assert snapshot(reachable) == before


def test_a_shard_that_may_not_be_read_stops_the_repair(reachable):
    (reachable / FIRST).chmod(0)
    done = run_as_nobody("repair(sys.argv[1], dry_run=True)", reachable)
    assert re.search(r"StorageError: cannot open a shard: .*tiny-000000.tar; found EACCES", done.stderr), done.stderr


def test_every_reason_is_documented():
    page = (ROOT / "docs" / "repair.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (.+) \|$", page, re.M))
    assert {code: rows.get(code) for code in REASONS} == REASONS
    from shardkit.repairing.result import PROOFS

    assert {code: rows.get(code) for code in PROOFS} == PROOFS


def test_errors_keep_the_dataset(damaged, tmp_path):
    with pytest.raises(ShardkitError, match="lies inside"):
        shardkit.repair(damaged, out=damaged)
    with pytest.raises(ConfigError, match="max_bytes"):
        shardkit.repair(damaged, out=tmp_path / "out", max_bytes=0)


def test_a_name_that_is_taken_is_never_given_again(tmp_path):
    """Another program may have made the file between the look and the deed."""
    (tmp_path / "staged").write_bytes(b"ours")
    (tmp_path / "final").write_bytes(b"theirs")
    with pytest.raises(ConfigError, match="has appeared under a name that was free"):
        place_new(os.fsencode(tmp_path / "staged"), os.fsencode(tmp_path / "final"))
    assert (tmp_path / "final").read_bytes() == b"theirs"
    place_new(os.fsencode(tmp_path / "staged"), os.fsencode(tmp_path / "free"))
    assert contents(tmp_path) == {"final": b"theirs", "free": b"ours"}
