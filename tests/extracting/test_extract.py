"""Pack, then extract: every byte comes back, and nothing is written where it does not belong."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import tarfile
from collections import Counter
from pathlib import Path

import pytest

import shardkit
from shardkit.errors import ConfigError, IntegrityError, LockedError, ShardkitError, StorageError, UnsafeError
from shardkit.extracting.payload import Payload, extract_payload
from shardkit.extracting.result import REASONS
from shardkit.extracting.run import extract
from shardkit.extracting.tree import Occupied, Tree
from shardkit.storage.lock import FolderLock
from shardkit.testing.awkward import awkward_files
from shardkit.testing.damage import flip_byte
from shardkit.testing.datasets import DraftSample, draft_dataset, draft_shard, tiny_jpeg
from shardkit.testing.foreign import write_tar
from shardkit.testing.packs import StopAfter, contents, tiny_tree
from shardkit.testing.photos import write


@pytest.fixture
def dataset(tmp_path):
    """Two shards of three samples: c/0000.jpg to c/0005.jpg."""
    return draft_dataset().write(tmp_path / "ds")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A tree of 60 images and its dataset; some sources are refused."""
    root = tmp_path_factory.mktemp("packed")
    tree = tiny_tree(root / "src", images=60)
    shardkit.pack(tree, root / "ds", shard_samples=7, jobs=1)
    return tree, root / "ds"


def samples(*drafts, classes=("c",), name="odd"):
    """A draft of one shard."""
    draft = draft_dataset((1,), name=name)
    draft.classes = classes
    draft.shards = [draft_shard(f"{name}-000000.tar", drafts, 4096)]
    return draft


def sample(key, source=None, number=0, label=0):
    return DraftSample(key=key, jpeg=tiny_jpeg(number), label=label, source=source)


def below(folder):
    """Everything below a folder as it lies there: links are not followed."""
    return {
        os.path.join(path, name).removeprefix(f"{folder}/")
        for path, folders, names in os.walk(folder) for name in (*folders, *names)
    }  # fmt: skip


# --- every byte


def test_every_byte_of_an_awkward_tree_comes_back(tmp_path, photographs, photo_tree):
    root = tmp_path / "src"
    shutil.copytree(photo_tree, root)
    odd = awkward_files(photographs)
    for file in odd:
        write(root, file)
    shardkit.pack(root, tmp_path / "ds", shard_size=400_000, jobs=1)
    result = extract(tmp_path / "ds", tmp_path / "out")
    for file in odd:
        if file.fate != "packed":
            os.remove(os.path.join(root, file.path))
    tree = {name.replace("\n", "%0A"): data for name, data in contents(root).items()}
    assert contents(tmp_path / "out") == tree
    assert (result.exit_code, result.made, result.kept, result.renamed) == (0, len(tree), 0, 1)
    assert result.folders == len([path for path in root.rglob("*") if path.is_dir()])


@pytest.mark.parametrize(("layout", "unstated"), [("source", 3), ("class", 0)])
def test_labels_that_names_do_not_state_are_counted(tmp_path, layout, unstated):
    members = [(f"{n}.{kind}", data) for n in range(3) for kind, data in (("jpg", tiny_jpeg(n)), ("cls", b"1"))]
    members += [("1/7.jpg", tiny_jpeg(7)), ("1/7.cls", b"1"), ("8.jpg", tiny_jpeg(8))]
    write_tar(tmp_path / "bare.tar", members)
    shardkit.index([tmp_path / "bare.tar"], out=tmp_path / "ds", labels="cls")
    result = extract(tmp_path / "ds", tmp_path / "out", layout=layout)
    assert (result.made, result.unstated) == (5, unstated)


@pytest.mark.parametrize("tool", ["tar", "bsdtar"])
def test_the_tree_by_class_is_what_tar_unpacks(tmp_path, require_tool, packed, tool):
    (tmp_path / "tar").mkdir()
    for shard in sorted(packed[1].glob("*.tar")):
        subprocess.run([require_tool(tool), "-xf", shard, "-C", tmp_path / "tar"], check=True)
    extract(packed[1], tmp_path / "out", layout="class")
    unpacked = contents(tmp_path / "tar")
    assert contents(tmp_path / "out") == {name: data for name, data in unpacked.items() if name.endswith(".jpg")}


def test_any_number_of_jobs_gives_the_same_tree(tmp_path, packed):
    results = [extract(packed[1], tmp_path / str(jobs), jobs=jobs) for jobs in (1, 7)]
    assert contents(tmp_path / "1") == contents(tmp_path / "7")
    assert results[0] == results[1]


def test_chosen_keys_only(tmp_path, packed):
    extract(packed[1], tmp_path / "out", keys=["b/00001", "a/00003"])
    wanted = {name: (packed[0] / name).read_bytes() for name in ("b/00001.jpg", "a/00003.jpg")}
    assert contents(tmp_path / "out") == wanted


def test_a_key_that_is_not_there_is_refused_before_anything_is_made(tmp_path, packed):
    with pytest.raises(ConfigError, match=r"1 of 2 keys are not in the dataset.*found a/nothing"):
        extract(packed[1], tmp_path / "out", keys=["b/00001", "a/nothing"])
    assert not (tmp_path / "out").exists()


def test_files_have_the_modes_that_the_umask_leaves(tmp_path, dataset):
    before = os.umask(0o027)
    try:
        extract(dataset, tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out/c/0000.jpg").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "out/c").stat().st_mode & 0o777 == 0o750


def test_an_image_larger_than_the_buffer_comes_back(tmp_path):
    draft = draft_dataset((2,), sizes=(3_000_001, (1 << 20)))
    extract(draft.write(tmp_path / "ds"), tmp_path / "out")
    assert (tmp_path / "out/c/0000.jpg").read_bytes() == tiny_jpeg(0, 3_000_001)
    assert (tmp_path / "out/c/0001.jpg").read_bytes() == tiny_jpeg(1, 1 << 20)


# --- names


HOSTILE = ["../evil.jpg", "/tmp/shardkit-evil.jpg", "a/../../evil.jpg", "a%00b.jpg", ".shardkit/lock", "x" * 300]


@pytest.mark.parametrize("source", HOSTILE)
def test_a_hostile_source_is_no_path(tmp_path, source):
    ds = samples(sample("k", source)).write(tmp_path / "in/ds")
    result = extract(ds, tmp_path / "in/out")
    assert below(tmp_path / "in/out") == {"c", "c/k.jpg"}
    assert os.listdir(tmp_path) == ["in"]
    assert result.renamed == 1
    assert not Path("/tmp/shardkit-evil.jpg").exists()


@pytest.mark.parametrize("key", ["../../evil", "c//evil", "c/../../evil", "/evil"])
def test_a_hostile_key_is_refused(tmp_path, key):
    ds = samples(sample("good"), sample(key, "../s"), sample("last", number=2)).write(tmp_path / "ds")
    with pytest.raises(UnsafeError, match="a sample's name is refused") as caught:
        extract(ds, tmp_path / "out")
    assert (caught.value.exit_code, caught.value.key) == (9, key)
    assert not (tmp_path / "out").exists()
    result = extract(ds, tmp_path / "out", on_error="skip")
    assert below(tmp_path / "out") == {"good.jpg", "last.jpg"}
    assert (result.exit_code, result.counts) == (3, {"unsafe-name": 1})
    assert result.failures[0].key == key


def test_two_samples_with_one_name_are_told_and_the_first_stays(tmp_path):
    drafts = [sample("a", "same.jpg", 0), sample("b", "other.jpg", 1), sample("c", "same.jpg", 2)]
    ds = samples(*drafts).write(tmp_path / "ds")
    with pytest.raises(ConfigError, match=r"two samples would be one file: same.jpg \[sample c\]; found sample a"):
        extract(ds, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    result = extract(ds, tmp_path / "out", on_error="skip")
    assert contents(tmp_path / "out") == {"same.jpg": tiny_jpeg(0), "other.jpg": tiny_jpeg(1)}
    assert [(one.key, one.reason) for one in result.failures] == [("c", "same-name")]
    assert extract(ds, tmp_path / "by class", layout="class").made == 3


@pytest.mark.parametrize("layout", ["source", "class"])
def test_no_terminal_takes_orders_from_the_names_of_a_tars_members(tmp_path, layout):
    write_tar(tmp_path / "x.tar", {"x\x1b[31my.jpg": tiny_jpeg(0), "x%1B[31mz.jpg": tiny_jpeg(1)})
    shardkit.index([tmp_path / "x.tar"], out=tmp_path / "ds")
    assert extract(tmp_path / "ds", tmp_path / "out", layout=layout).renamed == (1 if layout == "source" else 0)
    assert contents(tmp_path / "out") == {"x%1B[31my.jpg": tiny_jpeg(0), "x%1B[31mz.jpg": tiny_jpeg(1)}


def test_a_name_that_control_bytes_become_is_never_given_twice(tmp_path):
    write_tar(tmp_path / "x.tar", {"a\n.jpg": tiny_jpeg(0), "a%0A.jpg": tiny_jpeg(1)})
    shardkit.index([tmp_path / "x.tar"], out=tmp_path / "ds")
    with pytest.raises(ConfigError, match=r"two samples would be one file: a%0A\.jpg"):
        extract(tmp_path / "ds", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tar_of_a_whole_folder_comes_back_as_that_folder(tmp_path, require_tool):
    tar = require_tool("tar")
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / f"in/{number:06d}.jpg").write_bytes(tiny_jpeg(number))
    subprocess.run([tar, "-C", tmp_path / "in", "-cf", tmp_path / "x.tar", "."], check=True)
    shardkit.index([tmp_path / "x.tar"], out=tmp_path / "ds")
    assert {sample.key for sample in shardkit.open(tmp_path / "ds")} == {f"./{number:06d}" for number in range(3)}
    for layout in ("source", "class"):
        assert extract(tmp_path / "ds", tmp_path / layout, layout=layout).made == 3
        assert contents(tmp_path / layout) == contents(tmp_path / "in")


LONG = "a folder with a name that is long/" * 5
AWKWARD = {
    f"{LONG}1.jpg": tiny_jpeg(1, 2_000_000), "b/\u00e9%.PNG": b"\x89PNG\r\n\x1a\n", "c/1.cls": b"0",
    "c/1.jpeg": tiny_jpeg(2), "d/2.jpg": tiny_jpeg(3),
}  # fmt: skip


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("facts", ["header", "none", "full"])
def test_tars_are_extracted_whatever_was_found_out_about_their_images(tmp_path, facts, form):
    path = write_tar(tmp_path / "x.tar", AWKWARD, form)
    shardkit.index([path], out=tmp_path / "ds", facts=facts)
    images = {name: data for name, data in AWKWARD.items() if not name.endswith(".cls")}
    result = extract(tmp_path / "ds", tmp_path / "out")
    assert (result.made, result.exit_code, result.checksums) == (4, 0, facts == "full")
    assert contents(tmp_path / "out") == images
    (tmp_path / "out/d/2.jpg").unlink()
    assert (extract(tmp_path / "ds", tmp_path / "out").kept, contents(tmp_path / "out")) == (3, images)
    (tmp_path / "out/d/2.jpg").write_bytes(tiny_jpeg(4))
    with pytest.raises(Occupied):
        extract(tmp_path / "ds", tmp_path / "out")
    extract(tmp_path / "ds", tmp_path / "class", layout="class")
    named = {"jpg": 3, "png": 1} if facts != "none" else {"jpg": 2, "jpeg": 1, "png": 1}
    assert Counter(name.rpartition(".")[2] for name in contents(tmp_path / "class")) == named


def test_of_a_size_that_an_extended_header_states_every_byte_comes_back(tmp_path):
    data = tiny_jpeg(1, 900)
    info = tarfile.TarInfo("1.jpg")
    header = info._create_pax_generic_header({"size": str(len(data))}, tarfile.XHDTYPE, "utf-8")
    tar = header + info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512) + bytes(1024)
    (tmp_path / "x.tar").write_bytes(tar)
    shardkit.index([tmp_path / "x.tar"], out=tmp_path / "ds", facts="none")
    extract(tmp_path / "ds", tmp_path / "out")
    assert contents(tmp_path / "out") == {"1.jpg": data}


@pytest.mark.parametrize("change", ["another name", "another size", "a link", "no header", "a damaged header"])
def test_headers_that_say_something_else_than_the_index_are_damage(tmp_path, change):
    files = {"1.jpg": tiny_jpeg(1), "2.jpg": tiny_jpeg(2), "3.jpg": tiny_jpeg(3)}
    path = write_tar(tmp_path / "x.tar", files)
    shardkit.index([path], out=tmp_path / "ds", facts="none")
    with tarfile.open(path) as tar:
        info = tar.getmember("2.jpg")
    at = info.offset
    data = bytearray(path.read_bytes())
    if change == "another name":
        info.name = "4.jpg"
    elif change == "another size":
        info.size -= 1
    elif change == "a link":
        info.type, info.size, info.linkname = tarfile.SYMTYPE, 0, "/etc/passwd"
    data[at : at + 512] = bytes(512) if change == "no header" else info.tobuf(tarfile.USTAR_FORMAT)[:512]
    if change == "a damaged header":
        data[at + 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"headers.*x\.tar:\d+ \[sample 2\]") as caught:
        extract(tmp_path / "ds", tmp_path / "out", jobs=1)
    assert caught.value.exit_code == 4
    result = extract(tmp_path / "ds", tmp_path / "out", on_error="skip")
    assert (result.exit_code, [(one.key, one.reason) for one in result.failures]) == (3, [("2", "damaged")])
    assert contents(tmp_path / "out") == {name: files[name] for name in ("1.jpg", "3.jpg")}


def test_one_key_in_two_shards_is_told_with_the_way_out(tmp_path):
    tars = [write_tar(tmp_path / f"{name}.tar", {"k.jpg": tiny_jpeg(n)}) for n, name in enumerate("ab")]
    shardkit.index(tars, out=tmp_path / "ds")
    for layout in ("source", "class"):
        with pytest.raises(ConfigError, match=r"two samples would be one file.*shardkit convert --key shard.*class"):
            extract(tmp_path / "ds", tmp_path / "out", layout=layout)
    shardkit.convert(tmp_path / "ds", tmp_path / "new", key="shard", jobs=1)
    extract(tmp_path / "new", tmp_path / "out", layout="class")
    assert contents(tmp_path / "out") == {"a/k.jpg": tiny_jpeg(0), "b/k.jpg": tiny_jpeg(1)}


def test_classes_that_only_differ_before_they_are_safe_are_told(tmp_path):
    drafts = [sample("k", "k.jpg", 0, 0), sample("a/k", "l.jpg", 1, 1)]
    ds = samples(*drafts, classes=("a", "x")).write(tmp_path / "ds")
    assert extract(ds, tmp_path / "out", layout="class").made == 2
    drafts = [sample("k", "k.jpg", 0, 0), sample("-x2E-x2E/k", "l.jpg", 1, 1)]
    ds = samples(*drafts, classes=("%252E%252E", "..")).write(tmp_path / "ds2")
    with pytest.raises(ConfigError, match="two samples would be one file"):
        extract(ds, tmp_path / "out2", layout="class")


def test_a_file_where_another_sample_needs_a_folder_is_told(tmp_path):
    ds = samples(sample("a", "x", 0), sample("b", "x/y.jpg", 1)).write(tmp_path / "ds")
    with pytest.raises(Occupied, match="something else has a name that is needed"):
        extract(ds, tmp_path / "out", jobs=1)
    result = extract(ds, tmp_path / "out", jobs=1, on_error="skip")
    assert contents(tmp_path / "out") == {"x": tiny_jpeg(0)}
    assert result.counts == {"occupied": 1}


# --- what lies in the target


def test_a_link_under_a_files_name_is_not_followed(tmp_path, dataset):
    secret = tmp_path / "secret"
    secret.write_bytes(b"mine")
    (tmp_path / "out/c").mkdir(parents=True)
    (tmp_path / "out/c/0001.jpg").symlink_to(secret)
    with pytest.raises(Occupied, match=r"another file: .*0001.jpg \[sample c/0001\].*--overwrite"):
        extract(dataset, tmp_path / "out")
    assert (tmp_path / "out/c/0001.jpg").is_symlink()
    extract(dataset, tmp_path / "out", overwrite=True)
    assert secret.read_bytes() == b"mine"
    assert not (tmp_path / "out/c/0001.jpg").is_symlink()
    assert (tmp_path / "out/c/0001.jpg").read_bytes() == tiny_jpeg(1, 512)


def test_a_link_to_the_right_bytes_is_not_taken_for_the_file(tmp_path, dataset):
    (tmp_path / "right.jpg").write_bytes(tiny_jpeg(1, 512))
    (tmp_path / "out/c").mkdir(parents=True)
    (tmp_path / "out/c/0001.jpg").symlink_to(tmp_path / "right.jpg")
    assert extract(dataset, tmp_path / "out", on_error="skip").counts == {"occupied": 1}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_link_under_a_folders_name_is_not_followed(tmp_path, dataset, overwrite):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/c").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Occupied, match="something else has a name"):
        extract(dataset, tmp_path / "out", overwrite=overwrite)
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_link_under_the_work_folders_name_is_not_followed(tmp_path, dataset):
    (tmp_path / "elsewhere/run-1").mkdir(parents=True)
    (tmp_path / "elsewhere/run-1/precious").write_bytes(b"x")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/.shardkit").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeError, match="work folder"):
        extract(dataset, tmp_path / "out")
    assert below(tmp_path / "elsewhere") == {"run-1", "run-1/precious"}


@pytest.mark.parametrize("kind", ["other", "longer", "folder", "fifo"])
def test_what_has_a_files_name_stays_unless_told_otherwise(tmp_path, dataset, kind):
    place = tmp_path / "out/c/0002.jpg"
    place.parent.mkdir(parents=True)
    {"other": lambda: place.write_bytes(tiny_jpeg(7, 700)), "longer": lambda: place.write_bytes(bytes(701)),
     "folder": place.mkdir, "fifo": lambda: os.mkfifo(place)}[kind]()  # fmt: skip
    before = place.lstat()
    result = extract(dataset, tmp_path / "out", on_error="skip")
    assert (result.exit_code, result.counts, result.made) == (3, {"occupied": 1}, 5)
    assert place.lstat() == before
    if kind == "folder":
        with pytest.raises(Occupied):
            extract(dataset, tmp_path / "out", overwrite=True)
    else:
        assert extract(dataset, tmp_path / "out", overwrite=True).made == 1
        assert place.read_bytes() == tiny_jpeg(2, 700)


def test_a_folder_under_a_files_name_is_not_to_be_replaced(tmp_path, dataset):
    extract(dataset, tmp_path / "out")
    (tmp_path / "out/c/0001.jpg").unlink()
    (tmp_path / "out/c/0001.jpg").mkdir()
    with pytest.raises(Occupied, match="move what is there away; --overwrite replaces files, not folders"):
        extract(dataset, tmp_path / "out")


@pytest.mark.parametrize("kind", ["link", "folder in it"])
def test_what_has_the_name_of_an_earlier_runs_folder_is_named(tmp_path, dataset, kind):
    run = tmp_path / "out/.shardkit/run-1"
    run.parent.mkdir(parents=True)
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        run.symlink_to(tmp_path / "elsewhere")
    else:
        (run / "inner").mkdir(parents=True)
    with pytest.raises(UnsafeError, match=r"earlier run's folder: .*/out/\.shardkit/run-1; .*look at what it is"):
        extract(dataset, tmp_path / "out")


def test_strangers_in_the_target_stay(tmp_path, dataset):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_bytes(b"x")
    extract(dataset, tmp_path / "out")
    assert contents(tmp_path / "out").keys() == {"mine", *(f"c/000{number}.jpg" for number in range(6))}


@pytest.mark.parametrize("inside", ["", "tree", "a/b"])
def test_the_target_is_not_the_dataset(tmp_path, dataset, inside):
    (tmp_path / "link").symlink_to(dataset)
    before = contents(dataset)
    with pytest.raises(ConfigError, match="inside the dataset"):
        extract(dataset, tmp_path / "link" / inside)
    assert contents(dataset) == before


def test_a_target_that_is_a_file_or_a_dead_link_is_refused(tmp_path, dataset):
    (tmp_path / "file").touch()
    (tmp_path / "dead").symlink_to("nowhere")
    for name in ("file", "dead", "file/below"):
        with pytest.raises(ConfigError):
            extract(dataset, tmp_path / name)


def test_one_extraction_at_a_time(tmp_path, dataset):
    (tmp_path / "out/.shardkit").mkdir(parents=True)
    with FolderLock(os.fsencode(tmp_path / "out/.shardkit/lock")), pytest.raises(LockedError):
        extract(dataset, tmp_path / "out")
    assert extract(dataset, tmp_path / "out").made == 6
    assert ".shardkit" not in os.listdir(tmp_path / "out")


# --- damage


def test_a_damaged_image_is_named_and_leaves_no_file(tmp_path):
    draft = draft_dataset()
    row = draft.shards[1].rows[1]
    ds = draft.write(tmp_path / "ds")
    flip_byte(ds / "tiny-000001.tar", row.offset + 30)
    with pytest.raises(IntegrityError, match="not what was packed") as caught:
        extract(ds, tmp_path / "out", jobs=1)
    error = caught.value
    assert (error.exit_code, error.path, error.offset, error.key) == (
        4, str(ds / "tiny-000001.tar"), row.offset, row.key
    )  # fmt: skip
    assert "4 whole files are kept" in str(error)
    assert not (tmp_path / "out/c/0004.jpg").exists()
    result = extract(ds, tmp_path / "out", on_error="skip")
    assert (result.exit_code, result.counts, result.kept, result.made) == (3, {"damaged": 1}, 4, 1)
    assert [(one.key, one.reason) for one in result.failures] == [(row.key, "damaged")]
    assert f"tiny-000001.tar:{row.offset} [sample c/0004]" in result.failures[0].message
    assert set(result.counts) <= set(REASONS)


def test_a_row_that_points_outside_its_shard_is_damage(tmp_path):
    draft = draft_dataset()
    rows = draft.shards[0].rows
    rows[1] = rows[1]._replace(offset=1 << 40)
    ds = draft.write(tmp_path / "ds")
    with pytest.raises(IntegrityError, match="points outside"):
        extract(ds, tmp_path / "out")
    result = extract(ds, tmp_path / "out", on_error="skip")
    assert (result.counts, result.made + result.kept) == ({"damaged": 1}, 5)


def test_a_shard_that_shrinks_meanwhile_is_a_failed_read(tmp_path, dataset):
    class Shrink:
        def begin(self, samples, payload):
            os.truncate(dataset / "tiny-000001.tar", 4096)

        def advance(self, samples, payload):
            pass

    with pytest.raises(StorageError, match="a shard ended early") as caught:
        extract(dataset, tmp_path / "out", progress=Shrink())
    assert caught.value.exit_code == 6


WHOLE = "restore the shard from a copy, or save what is whole: shardkit repair {} --out DIR"


@pytest.mark.parametrize("on_error", ["fail", "skip"])
@pytest.mark.parametrize(("change", "what", "found"), [
    (lambda path, row: os.truncate(path, row.offset + 7), "a shard ends early: {}:{} [sample c/0004]",
     "found {} bytes, with 1 of the samples"),
    (lambda path, row: os.truncate(path, row.offset + 512 * -(-row.size // 512)), "a shard ends early: {}:{}; ",
     "found {} bytes, with all of the samples"),
    (lambda path, row: os.truncate(path, 100), "a shard ends early: {}:{} [sample c/0003]",
     "found {} bytes, with 0 of the samples"),
    (lambda path, row: os.truncate(path, path.stat().st_size + 512), "a shard goes on behind its end: {}:20480; ",
     "found {} bytes, with all of the samples"),
    (lambda path, row: path.unlink(), "a shard of the dataset is missing: {}; ", "found no such file"),
    (lambda path, row: (path.unlink(), os.mkfifo(path)), "something else has the name of a shard: {}; ",
     "found prw-r--r--"),
])  # fmt: skip
def test_a_shard_that_is_not_whole_is_told_with_what_of_it_is(tmp_path, on_error, change, what, found):
    draft = draft_dataset((3, 2))
    ds = draft.write(tmp_path / "ds")
    path = ds / "tiny-000001.tar"
    change(path, draft.shards[1].rows[-1])
    size = path.stat().st_size if path.exists() else None
    with pytest.raises((IntegrityError, StorageError)) as caught:
        extract(ds, tmp_path / "out", on_error=on_error)
    text = str(caught.value)
    assert text.startswith(what.format(path, size))
    assert "; expected 20480 bytes" in text
    assert "20480 bytes, 2 samples, c/0003 to c/0004; " in text or "prw" in found
    assert text.endswith(f"; {found.format(size)}; nothing was extracted; {WHOLE.format(ds)}")
    assert caught.value.exit_code == (6 if size is None else 4)
    assert not (tmp_path / "out").exists()


def test_an_indexed_tar_that_is_not_whole_is_told_what_index_can_do(tmp_path):
    path = write_tar(tmp_path / "a.tar", {"1.jpg": tiny_jpeg(1, 700), "\x1b[31m2.jpg": tiny_jpeg(2, 700)})
    shardkit.index(tmp_path)
    os.truncate(path, 1536 + 600)
    with pytest.raises(
        IntegrityError, match=r"a\.tar:2136 \[sample \\x1b\[31m2\].*with 1 of the samples; .*put the whole tar"
    ):
        extract(tmp_path, tmp_path.parent / "out")


def test_a_damaged_index_beside_a_cut_shard_is_no_traceback(tmp_path, dataset):
    os.truncate(dataset / "tiny-000001.tar", 4096)
    flip_byte(dataset / "index.arrow", 100)
    with pytest.raises(ShardkitError):
        extract(dataset, tmp_path / "out")


def test_a_damaged_image_takes_no_room_while_the_run_goes_on(tmp_path):
    (tmp_path / "shard").write_bytes(bytes(600))
    wrong = Payload(row=3, key="k", shard=str(tmp_path / "shard"), offset=100, size=500, checksum=1)
    with Tree(os.fsencode(tmp_path / "out")).hold() as tree, open(tmp_path / "shard", "rb") as shard:
        with pytest.raises(IntegrityError):
            extract_payload(shard.fileno(), wrong, tree, b"a/b", memoryview(bytearray(64)))
        assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file() and path.name != "lock"]


# --- going on


def test_a_stopped_extraction_goes_on(tmp_path, packed):
    tree, ds = packed
    with pytest.raises(StopAfter.Stop) as caught:
        extract(ds, tmp_path / "out", jobs=1, progress=StopTwo())
    there = contents(tmp_path / "out")
    assert 0 < len(there) < 60
    assert all(data == (tree / name).read_bytes() for name, data in there.items())
    assert caught.value.__notes__ == [f"{len(there)} whole files are kept; run again to go on"]
    result = extract(ds, tmp_path / "out")
    assert (result.kept, result.made) == (len(there), 60 - len(there))
    assert len(contents(tmp_path / "out")) == 60


class StopTwo(StopAfter):
    def __init__(self):
        super().__init__(2)

    def advance(self, samples, payload):
        super().advance(samples, payload, 0)


def test_the_end_of_a_run_makes_the_same_result_whatever_was_there(tmp_path, packed):
    first = extract(packed[1], tmp_path / "out")
    again = extract(packed[1], tmp_path / "out")
    assert again == dataclasses.replace(first, made=0, made_bytes=0, kept=60)


def test_leftovers_of_a_killed_run_are_swept(tmp_path, dataset):
    run = tmp_path / "out/.shardkit/run-dead"
    run.mkdir(parents=True)
    (run / "3").write_bytes(b"half")
    extract(dataset, tmp_path / "out")
    assert ".shardkit" not in os.listdir(tmp_path / "out")


def test_arguments_that_cannot_be_served(tmp_path, dataset):
    for wrong in ({"layout": "flat"}, {"on_error": "ignore"}, {"jobs": 0}):
        with pytest.raises(ConfigError):
            extract(dataset, tmp_path / "out", **wrong)
    assert not (tmp_path / "out").exists()


def test_every_reason_is_documented():
    page = Path(__file__).parents[2].joinpath("docs", "extract.md").read_text("utf-8")
    assert set(re.findall(r"^\| `([a-z-]+)` \| .* \| [0-9] \|$", page, re.M)) == set(REASONS)
