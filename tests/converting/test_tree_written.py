"""What `convert` writes as a plain tree is what `extract` would, chosen, split, relabelled, and whole or not there."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

import shardkit
from shardkit.cli.main import main
from shardkit.converting import foreign_part
from shardkit.converting.known_files import dataset_files
from shardkit.converting.outputs import Output
from shardkit.converting.whole_folder import WholeFolder
from shardkit.errors import ConfigError, LockedError, SourceError
from shardkit.extracting.run import extract
from shardkit.format.keys import source_from_path
from shardkit.packing.refusals import REASONS
from shardkit.testing.datasets import draft_dataset, tiny_jpeg
from shardkit.testing.packs import StopAfter, contents

from .conftest import damaged_copy, refusals_of

BESIDE = {"classes.txt", "rejected.jsonl"}


def code(arguments):
    """Run the command in this process; return its exit code."""
    with pytest.raises(SystemExit) as caught:
        main([str(each) for each in arguments])
    return caught.value.code


def files_of(folder):
    """Return the bytes of every image of a tree, by its path."""
    return {name: data for name, data in contents(folder).items() if name not in BESIDE}


@pytest.mark.parametrize("wanted", [{"where": "width > 99"}, {"split": {"a": 0.999999, "b": 0.000001}}])
def test_nothing_is_left_beside_the_target_when_the_plan_fails(tree, tmp_path, wanted):
    with pytest.raises(ConfigError, match=r"no sample.*nothing was changed"):
        shardkit.convert_to("tree", f"tree:{tree}", tmp_path / "new" / "out", **wanted)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("layout", ["source", "class"])
def test_the_tree_is_that_of_extract(packed, tmp_path, layout):
    result = shardkit.convert_to("tree", packed, tmp_path / "out", layout=layout)
    extract(packed, tmp_path / "extracted", layout=layout)
    assert files_of(tmp_path / "out") == contents(tmp_path / "extracted")
    assert (tmp_path / "out" / "classes.txt").read_text() == "a\nb\nc\n"
    part = result.parts[None]
    assert (part.samples, part.files) == (30, 31)
    assert part.payload == sum(map(len, files_of(tmp_path / "out").values())) == part.bytes - 6


def test_pack_convert_and_pack_again_is_the_same_dataset(tree, packed, tmp_path):
    shardkit.convert_to("tree", packed, tmp_path / "out", shuffle=True)
    assert files_of(tmp_path / "out") == contents(tree)
    shardkit.pack(tmp_path / "out", tmp_path / "again", name="t", shards=4, jobs=1)
    for path in packed.glob("*.tar"):
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def test_it_is_the_selection_of_a_conversion_to_shards(packed, tree, write_tar, sample, tmp_path):
    tar = write_tar("x.tar", [m for n in range(4) for m in sample(n, label=n % 3)])
    given = {"where": "label != 1 and width > 0", "shuffle": True, "labels": {"a": "x", "c": "y", "b": None,
             "0": "x", "1": None, "2": "y"}, "split": {"train": "0.6", "val": "0.4"}}  # fmt: skip
    sources = [packed, tar]
    result = shardkit.convert_to("tree", sources, tmp_path / "out", layout="class", **given)
    shardkit.convert(sources, tmp_path / "ours", jobs=1, **given)
    assert dict(result.passed_over) == {"by --where": 11}
    assert sorted(os.listdir(tmp_path / "out")) == ["train", "val"]
    for part in ("train", "val"):
        extract(tmp_path / "ours" / part, tmp_path / f"extracted-{part}", layout="class")
        assert files_of(tmp_path / "out" / part) == contents(tmp_path / f"extracted-{part}")
        assert (tmp_path / "out" / part / "classes.txt").read_text() == "x\ny\n"
        assert {path.split("/")[0] for path in files_of(tmp_path / "out" / part)} == {"x", "y"}


def test_a_tree_to_a_tree(tree, tmp_path):
    result = shardkit.convert_to("tree", f"tree:{tree}", tmp_path / "out", where="size > 900 and label < 2")
    kept = {name: data for name, data in contents(tree).items() if len(data) > 900 and name[0] in "ab"}
    assert files_of(tmp_path / "out") == kept != {}
    assert result.parts[None].samples == len(kept)


@pytest.fixture
def hostile(tmp_path):
    """Return a function: writes a dataset of class 0 whose index states some sources; returns the folder."""

    def write(*sources):
        draft = draft_dataset((len(sources),), sizes=[400])
        (shard,) = draft.shards
        shard.rows[:] = [row._replace(source=source_from_path(os.fsencode(source)), label=0)
                         for row, source in zip(shard.rows, sources, strict=True)]  # fmt: skip
        return draft.write(tmp_path / "in")

    return write


def image(number):
    """Return that image of such a dataset."""
    return tiny_jpeg(number, 400)


def test_names_are_made_safe_and_nothing_leaves_the_tree(hostile, tmp_path):
    sources = ["../up.jpg", "/abs.jpg", "a/../../b.jpg", ".shardkit/x.jpg", "a\nb.jpg", "ok/x.jpg", "a//b.jpg"]
    result = shardkit.convert_to("tree", hostile(*sources), tmp_path / "new" / "out", layout="source")
    assert files_of(tmp_path / "new" / "out") == {
        **{f"class 0/c/{number:04d}.jpg": image(number) for number in (0, 1, 2, 3, 6)},
        "a%0Ab.jpg": image(4), "ok/x.jpg": image(5),
    }  # fmt: skip
    assert result.refused == 0
    assert sorted(os.listdir(tmp_path)) == ["in", "new"]
    assert os.listdir(tmp_path / "new") == ["out"]
    extract(tmp_path / "in", tmp_path / "extracted")
    assert files_of(tmp_path / "new" / "out") == contents(tmp_path / "extracted")


@pytest.mark.parametrize("metadata", [b'{"source": "flickr"}', b'{"source": "../x"}', b"[1]", b"\xff"])
@pytest.mark.parametrize("labels", [True, False])
def test_json_members_of_other_tools_name_no_file_and_refuse_none(write_tar, sample, tmp_path, metadata, labels):
    """They stay behind."""
    members = [sample(n, label=n % 2 if labels else None, metadata=metadata) for n in range(4)]
    tar = write_tar("x.tar", [member for each in members for member in each])
    own = {layout: shardkit.convert_to("tree", tar, tmp_path / f"out-{layout}", layout=layout).layout
           for layout in (None, "source", "class")}  # fmt: skip
    assert own[None] == ("class" if labels else "source")
    of_class = [f"{n % 2}/{n:06d}.jpg" if labels else f"{n:06d}.jpg" for n in range(4)]
    for layout, names in {"source": [f"x.tar/{n:06d}.jpg" for n in range(4)], "class": of_class}.items():
        assert files_of(tmp_path / f"out-{layout}") == dict(zip(names, map(tiny_jpeg, range(4)), strict=True))
    assert files_of(tmp_path / "out-None") == files_of(tmp_path / f"out-{own[None]}")


@pytest.mark.parametrize(
    "folders",
    [
        (b"50% off", b"ok"),
        (b"a\xffb", b"ok"),
        (b"caf\xc3\xa9", b"..."),
    ],
)
def test_classes_of_odd_names_keep_the_paths_that_were_packed(tmp_path, folders):
    for number, folder in enumerate(folders):
        os.makedirs(os.path.join(os.fsencode(tmp_path / "src"), folder))
        with open(os.path.join(os.fsencode(tmp_path / "src"), folder, b"%d.jpg" % number), "wb") as file:
            file.write(tiny_jpeg(number))
    shardkit.pack(tmp_path / "src", tmp_path / "ds", name="ds", jobs=1)
    result = shardkit.convert_to("tree", tmp_path / "ds", tmp_path / "out")
    extract(tmp_path / "ds", tmp_path / "extracted")
    assert result.layout == "source"
    assert files_of(tmp_path / "out") == contents(tmp_path / "extracted")


def test_an_image_that_becomes_a_jpeg_is_called_one(write_tar, tmp_path):
    png = io.BytesIO()
    Image.new("RGB", (9, 9)).save(png, "PNG")
    tar = write_tar("x.tar", [("0.png", png.getvalue()), ("1.jpg", tiny_jpeg(1)), ("2.JPEG", png.getvalue())])
    shardkit.convert_to("tree", tar, tmp_path / "out", convert=True, layout="source")
    assert sorted(files_of(tmp_path / "out")) == ["x.tar/0.jpg", "x.tar/1.jpg", "x.tar/2.JPEG"]
    assert all(data.startswith(b"\xff\xd8\xff") for data in files_of(tmp_path / "out").values())


def test_by_itself_a_tree_keeps_the_labels(packed, write_tar, tmp_path):
    """By sources only where those begin with the classes: those of a tar begin with its name."""
    tar = write_tar("x.tar", [(f"{at}.{name}", data) for at in range(4)
                              for name, data in (("jpg", tiny_jpeg(at)), ("cls", b"%d" % (at % 2)))])  # fmt: skip
    assert shardkit.convert_to("tree", tar, tmp_path / "tar").layout == "class"
    assert sorted(files_of(tmp_path / "tar")) == [f"{at % 2}/{at}.jpg" for at in (0, 2, 1, 3)]
    assert shardkit.convert_to("tree", packed, tmp_path / "packed", dry_run=True).layout == "source"
    names = tmp_path / "names.json"
    names.write_text(json.dumps(dict.fromkeys(shardkit.open(packed).classes, "all")))
    told = code(["convert", packed, f"tree:{tmp_path / 'all'}", "--labels", names])
    assert (told, sorted(os.listdir(tmp_path / "all"))) == (0, ["all", "classes.txt"])


def test_a_source_that_is_damaged_costs_a_name_and_not_the_run(tmp_path):
    draft = draft_dataset((2,))
    draft.shards[0].rows[0] = draft.shards[0].rows[0]._replace(source="%zz/x.jpg")
    folder = draft.write(tmp_path / "in")
    result = shardkit.convert_to("tree", folder, tmp_path / "out", check="none")
    assert (result.layout, result.refused, len(files_of(tmp_path / "out"))) == ("class", 0, 2)


def test_of_two_with_one_name_the_first_is_kept_and_the_other_told(hostile, tmp_path):
    sources = ["a/x.jpg", "a/x.jpg", "a", "a/x.jpg/y.jpg", "classes.txt", "rejected.jsonl/x.jpg", "b.jpg"]
    folder = hostile(*sources)
    assert code(["convert", folder, f"tree:{tmp_path / 'out'}", "--layout", "source"]) == 3
    assert files_of(tmp_path / "out") == {"a/x.jpg": image(0), "b.jpg": image(6)}
    lines = [(line["path"], line["reason"]) for line in refusals_of(tmp_path / "out")]
    assert lines == [(f"tiny-000000.tar/c/{number:04d}", reason) for number, reason in [
        (1, "same-name"), (2, "same-name"), (3, "same-name"), (4, "unsafe-name"), (5, "unsafe-name"),
    ]]  # fmt: skip
    assert [line["detail"] for line in refusals_of(tmp_path / "out")[:3]] == [
        "an earlier sample has a/x.jpg, as a file or a folder", "an earlier sample has a, as a file or a folder",
        "an earlier sample is called as a folder of a/x.jpg/y.jpg",
    ]  # fmt: skip
    assert {reason for _, reason in lines} <= set(REASONS)
    with pytest.raises(SourceError, match="same-name"):
        shardkit.convert_to("tree", folder, tmp_path / "fail", on_error="fail", layout="source")
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]
    shardkit.convert_to("tree", folder, tmp_path / "keys", layout="class")
    assert sorted(files_of(tmp_path / "keys")) == [f"class 0/c/{number:04d}.jpg" for number in range(7)]


def test_a_class_that_no_folder_can_be_called_by_is_left_out(packed, tmp_path):
    labels = {"a": "x" * 256, "b": "..", "c": "c/d"}
    result = shardkit.convert_to("tree", packed, tmp_path / "out", layout="class", labels=labels)
    assert {path.rpartition("/")[0] for path in files_of(tmp_path / "out")} == {"%2E%2E/b", "c%2Fd/c"}
    assert {line["reason"] for line in refusals_of(tmp_path / "out")} == {"unsafe-name"}
    assert (result.parts[None].samples, result.refused) == (20, 10)


def test_damage_and_what_fails_a_check_are_left_out_and_named(packed, tmp_path):
    source = damaged_copy(packed, tmp_path / "src")
    assert code(["convert", source, f"tree:{tmp_path / 'out'}"]) == 3
    assert [line["reason"] for line in refusals_of(tmp_path / "out")] == ["damaged"]
    assert len(files_of(tmp_path / "out")) == 29
    with pytest.raises(SourceError, match="every sample was refused"):
        shardkit.convert_to("tree", source, tmp_path / "no", max_pixels=1)
    assert sorted(os.listdir(tmp_path)) == ["out", "src"]


def test_images_are_reencoded_as_for_shards(tmp_path):
    (tmp_path / "src" / "k").mkdir(parents=True)
    for number in range(3):
        Image.effect_noise((80 + number, 60), 50).save(tmp_path / "src" / "k" / f"{number}.jpg", progressive=True)
    Image.new("RGB", (9, 9)).save(tmp_path / "src" / "k" / "png.jpg", "PNG")
    given = {"resize": 32, "convert": True}
    shardkit.convert_to("tree", f"tree:{tmp_path / 'src'}", tmp_path / "out", **given)
    shardkit.pack(tmp_path / "src", tmp_path / "ds", name="ds", jobs=1, **given)
    extract(tmp_path / "ds", tmp_path / "extracted")
    assert files_of(tmp_path / "out") == contents(tmp_path / "extracted")
    sizes = {min(Image.open(io.BytesIO(data)).size) for data in files_of(tmp_path / "out").values()}
    assert sizes == {32, 9}


def test_an_interruption_leaves_nothing(packed, tmp_path, monkeypatch):
    monkeypatch.setattr(foreign_part, "_REPORT_S", 0)
    for reports in (0, 2, 20):
        with pytest.raises(StopAfter.Stop):
            shardkit.convert_to("tree", packed, tmp_path / "out", progress=StopAfter(reports))
        assert os.listdir(tmp_path) == []


def test_a_tree_that_is_there_is_never_replaced(packed, tree, tmp_path, capsys):
    shardkit.convert_to("tree", packed, tmp_path / "out")
    before = contents(tmp_path)
    assert code(["convert", packed, f"tree:{tmp_path / 'out'}"]) == 2
    assert "a tree is never replaced" in capsys.readouterr().err
    assert code(["convert", packed, f"tree:{tmp_path / 'out'}", "--overwrite"]) == 2
    assert "--overwrite means nothing for tree:DIR: nothing in a folder" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="overwrite"):
        shardkit.convert_to("tree", packed, tmp_path / "out", overwrite=True)
    with pytest.raises(ConfigError, match="no tree dataset"):
        dataset_files("tree", str(tmp_path / "out"))
    assert contents(tmp_path) == before
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    shardkit.convert_to("tree", packed, tmp_path / "link")  # the caller named it; empty, it is filled
    assert len(files_of(tmp_path / "elsewhere")) == 30


def test_the_command_says_what_it_did_and_what_means_nothing(packed, tmp_path, capsys):
    target = f"tree:{tmp_path / 'out'}"
    assert code(["convert", packed, target, "--dry-run", "--layout", "class"]) == 0
    assert "30 samples (28.1 kB, 3 classes) would become tree:DIR" in capsys.readouterr().out
    assert os.listdir(tmp_path) == []
    given = [("--jobs", "2"), ("--align", "512"), ("--digest", "sha256"), ("--resume",), ("--reflink", "auto"),
             ("--name", "x"), ("--shards", "2"), ("--shard-samples", "2"), ("--shard-size", "1MB")]  # fmt: skip
    for option in given:
        assert code(["convert", packed, target, *option]) == 2
        assert f"{option[0]} means nothing for tree:DIR" in capsys.readouterr().err
    assert code(["convert", packed, tmp_path / "shards", "--layout", "class"]) == 2
    assert "--layout says how the files of tree:DIR are called" in capsys.readouterr().err
    assert code(["convert", packed, f"hf:{tmp_path / 'hf'}", "--layout", "class"]) == 2
    assert "--layout means nothing for hf:DIR" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="unknown layout"):
        shardkit.convert_to("tree", packed, tmp_path / "out", layout="flat")
    assert code(["convert", packed, target, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["format"], document["samples"], document["parts"][0]["files"]) == ("tree", 30, 31)
    assert code(["convert", packed, f"tree:{tmp_path / 'more'}"]) == 0
    assert "wrote 30 samples" in capsys.readouterr().out


RUN = "import sys; from shardkit.cli.main import main; main(sys.argv[1:])"


def start(*arguments, **more):
    environment = {**os.environ, "PYTHONPATH": str(Path(shardkit.__file__).parents[1])}
    command = [sys.executable, "-W", "ignore", "-c", RUN, *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, **more)


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "x.jpg").write_bytes(tiny_jpeg(1, 90_000))
    before = contents(tmp_path)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    with start("convert", f"tree:{tmp_path / 'src'}", f"tree:{tmp_path / 'out'}", preexec_fn=limit) as process:
        _, said = process.communicate()
    assert process.returncode == 5, said
    assert "nothing was changed" in said
    assert contents(tmp_path) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_it_and_the_next_run_begins_anew(packed, tmp_path, number):
    arguments = ["convert", *[packed] * 40, f"tree:{tmp_path / 'out'}", "--check", "decode", "--key", "index"]
    with start(*arguments, "--layout", "class") as process:
        while process.poll() is None and not (tmp_path / ".out.shardkit" / "new").exists():
            time.sleep(0.002)
        process.send_signal(number)
        _, said = process.communicate()
    if process.returncode != 0:  # else it was quicker
        assert process.returncode == (130 if number == signal.SIGINT else -9), said
        assert not (tmp_path / "out").exists()
        assert number == signal.SIGKILL or "nothing was changed" in said
        assert number == signal.SIGKILL or os.listdir(tmp_path) == []
        shardkit.convert_to("tree", packed, tmp_path / "out")
        assert os.listdir(tmp_path) == ["out"]
        assert len(files_of(tmp_path / "out")) == 30


def test_only_one_run_writes_a_target(packed, tmp_path):
    with WholeFolder(Output("tree", str(tmp_path / "out"))).hold(overwrite=False), pytest.raises(LockedError):
        shardkit.convert_to("tree", packed, tmp_path / "out")
