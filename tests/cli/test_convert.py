"""`shardkit convert`: what a shell sees of it."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import click
import pytest

import shardkit
from shardkit.cli._sizes import parse_size
from shardkit.cli.convert import convert
from shardkit.converting import options as convert_options
from shardkit.converting.options import ConvertOptions
from shardkit.extracting.names import LAYOUTS
from shardkit.packing import options as packing_options
from shardkit.storage.clone import REFLINKS
from shardkit.testing.datasets import draft_dataset, tiny_jpeg

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
RUN = {"labels_file", "jobs", "resume", "overwrite", "reflink", "dry_run", "as_json", "layout"}
"""Options of the run; the others are fields of `ConvertOptions`."""


def run(*arguments):
    """Run the command; return its exit code, standard output and standard error."""
    command = [sys.executable, "-m", "shardkit", "convert", *map(os.fspath, arguments)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=50, env=ENVIRONMENT, text=True
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def tar(tmp_path):
    samples = [[(f"{n}.jpg", tiny_jpeg(n)), (f"{n}.cls", b"%d" % (n % 2))] for n in range(8)]
    return write_tar(tmp_path / "in.tar", [member for sample in samples for member in sample])


def test_every_option_can_be_given_and_has_the_default_that_help_tells():
    given = {p.name for p in convert.params if isinstance(p, click.Option)} - RUN | {"labels", "part"}
    assert given == {field.name for field in dataclasses.fields(ConvertOptions)}
    fields = {field.name: field.default for field in dataclasses.fields(ConvertOptions)}
    told = {}
    for option in convert.params:
        match = re.search(r"\[default: (.+)\]$", getattr(option, "help", None) or "")
        if match and option.name in fields:
            told[option.name] = match[1]
    assert told.pop("shuffle") == "no-shuffle"
    assert not fields["shuffle"]
    for name, text in told.items():
        if fields[name] not in (None, dataclasses.MISSING):
            assert (parse_size(text) if isinstance(fields[name], int) else text) == fields[name], name


def test_the_choices_are_those_of_the_options():
    known = {**packing_options._CHOICES, **convert_options._CHOICES, "reflink": REFLINKS, "layout": LAYOUTS}
    for option in convert.params:
        if isinstance(option.type, click.Choice):
            assert set(option.type.choices) == set(known[option.name])


def test_a_conversion_in_words_and_as_json(tar, tmp_path):
    code, out, err = run(tar, tmp_path / "out", "--shards", "2", "--where", "label == 1", "--jobs", "1")
    assert (code, err) == (0, "")
    assert out.splitlines()[1].startswith("converted 4 samples into 2 shards in ")
    assert out.splitlines()[0] == "passed over 4 by --where"
    assert out.splitlines()[-1] == f"next: shardkit verify {tmp_path / 'out'}"
    code, out, err = run(tar, tmp_path / "out", "--json", "--overwrite", "--split", "a=0.5,b=0.5", "--jobs", "1")
    assert code == 2
    code, out, err = run(tar, tmp_path / "two", "--json", "--split", "a=0.5,b=0.5", "--jobs", "1")
    document = json.loads(out)
    assert (code, err, document["samples"], document["refused"]) == (0, "", 8, 0)
    assert [part["part"] for part in document["parts"]] == ["a", "b"]
    assert shardkit.verify(tmp_path / "two" / "a").exit_code == 0


def test_the_seconds_of_a_split_are_told_once(tar, tmp_path):
    code, out, err = run(tar, tmp_path / "out", "--split", "a=0.5,b=0.5", "--jobs", "1")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line for line in lines if re.search(r" in [0-9.]+ s \(", line)] == [lines[-1]]
    assert re.fullmatch(r"in all: 8 samples in [0-9.]+ s \([0-9.]+ [kMG]?B/s\)", lines[-1])
    made = [line for line in lines if line.startswith("converted ")]
    assert len(made) == 2
    assert all(re.fullmatch(r"converted \d samples? into 1 shard", line) for line in made)
    document = json.loads(run(tar, tmp_path / "two", "--split", "a=0.5,b=0.5", "--jobs", "1", "--json")[1])
    assert document["seconds"] >= 0
    assert not any("seconds" in part for part in document["parts"])


@pytest.mark.parametrize("target", ["out", "tree:out"])
def test_how_many_samples_are_labelled_is_said(tar, tmp_path, target):
    bare = write_tar(tmp_path / "bare.tar", [(f"x{n}.jpg", tiny_jpeg(n)) for n in range(3)])
    names = tmp_path / "classes"
    names.write_text("cat\ndog\n")
    for number, (given, words, labelled, classes) in enumerate([
        ((bare,), "no labels", 0, None),
        ((tar,), "labels without names", 8, None),
        ((tar, bare), "labels without names, 8 of 11 labelled", 8, None),
        ((tar, bare, "--labels", names), "2 classes, 8 of 11 labelled", 8, ["cat", "dog"]),
    ]):  # fmt: skip
        sources, options = given[: 1 + (bare in given[1:])], given[1 + (bare in given[1:]) :]
        kind, _, name = target.rpartition(":")
        place = f"{kind}{':' if kind else ''}{tmp_path / name}{number}"
        assert f", {words}) would become" in run(*sources, place, *options, "--dry-run")[1]
        code, out, err = run(*sources, place, *options)
        assert (code, err) == (0, "")
        assert (f", {words}) into" if kind else f"  labels      {words}\n") in out
        document = json.loads(run(*sources, f"{place}-again", *options, "--json")[1])
        assert document["parts"][0]["labelled"] == labelled
        assert (document if kind else document["parts"][0])["classes"] == classes


def test_classes_that_a_part_has_no_sample_of_are_named(tmp_path):
    folder = draft_dataset((3,)).write(tmp_path / "ds")  # labels 0, 5 and 10 of 12
    only = ("--where", "label == 5")
    empty = "  empty       11 of 12 classes without a sample: class 0, class 1, "
    assert empty in run(folder, tmp_path / "out", *only, "--dry-run")[1]
    assert empty in run(folder, tmp_path / "out", *only)[1]
    document = json.loads(run(folder, tmp_path / "again", *only, "--json")[1])
    assert document["parts"][0]["classes_without_samples"] == [f"class {n}" for n in range(12) if n != 5]


def test_refused_samples_are_exit_code_3(tar, tmp_path):
    bad = write_tar(tmp_path / "bad.tar", [("x.jpg", b"no image"), ("x.cls", b"0")])
    code, out, err = run(tar, bad, tmp_path / "out", "--jobs", "1")
    assert (code, err) == (3, "")
    assert "refused     1: 1 not-jpeg; see " in out
    code, _, err = run(tar, bad, tmp_path / "fail", "--jobs", "1", "--on-error", "fail")
    assert code == 3
    assert re.match(r"shardkit: error: refused a source \(not-jpeg\): .*bad\.tar/x.*--on-error skip$", err)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["pipe:touch owned"], 9, "nothing is run"),
        (["https://example.org/x.tar"], 9, "only local files"),
        (["x-{0..99999999}.tar"], 9, "too many names"),
        (["gone.tar"], 2, "no such input"),
        (["."], 2, "not a dataset"),
        (
            ["notes.md"],
            3,
            "there is no sample to convert; found 0 samples in the inputs, 1 refused, such as notes.md (damaged-shard",
        ),
        (["notes.md", "--on-error", "fail"], 4, "notes.md"),
        (["in.tar", "--where", "scans > 3"], 2, "shardkit index"),
        (["in.tar", "--where", "__import__('os')"], 2, "--where"),
        (["in.tar", "--split", "a=1"], 2, "two parts"),
        (["in.tar", "--shards", "99"], 2, "more shards than images"),
        (["in.tar", "--resume", "--overwrite"], 2, "one of them"),
        (["in.tar", "--jobs", "0"], 2, "jobs"),
        ([""], 2, "an empty one"),
    ],
)
def test_what_cannot_be_served_says_why_and_leaves_no_target(tar, tmp_path, monkeypatch, arguments, code, message):
    (tmp_path / "notes.md").write_text("# no tar" * 200)
    monkeypatch.chdir(tmp_path)
    out = tmp_path.parent / f"{tmp_path.name}-out"
    found, _, err = run(*arguments, out)
    assert (found, message in err) == (code, True), err
    assert err.startswith("shardkit: error: ")
    assert not list(out.glob("*.tar"))
    assert not (tmp_path / "owned").exists()


def test_labels_come_from_a_file(tar, tmp_path):
    (tmp_path / "names").write_text("even\nodd\n")
    (tmp_path / "map").write_text('{"0": null, "1": "odd"}')
    assert run(tar, tmp_path / "a", "--labels", tmp_path / "names", "--jobs", "1")[0] == 0
    assert shardkit.open(tmp_path / "a").classes == ("even", "odd")
    code, out, _ = run(tar, tmp_path / "b", "--labels", tmp_path / "map", "--jobs", "1", "--json")
    assert (code, json.loads(out)["passed_over"]) == (0, {"by --labels": 4})
    assert shardkit.open(tmp_path / "b").classes == ("odd",)


def test_labels_from_a_pipe_are_told_to_go_into_a_file(tar, tmp_path):
    os.mkfifo(tmp_path / "names")
    code, _, err = run(tar, tmp_path / "out", "--labels", tmp_path / "names", "--jobs", "1")
    assert code == 9
    assert "not a regular file" in err
    assert "into a file" in err
    assert "remove" not in err


def test_what_was_passed_over_counts_for_all_parts_and_stands_before_them(tar, tmp_path):
    arguments = (tar, tmp_path / "out", "--split", "a=0.5,b=0.5", "--where", "label == 1")
    for more in (["--dry-run"], ["--jobs", "1"]):
        lines = run(*arguments, *more)[1].splitlines()
        assert lines[:2] == ["passed over 4 by --where", "a:"]
        assert sum("passed over" in line for line in lines) == 1


def test_a_dry_run_knows_labels_without_names(tar, tmp_path):
    bare = write_tar(tmp_path / "bare.tar", [("x.jpg", tiny_jpeg(1))])
    assert ", labels without names) would become" in run(tar, tmp_path / "out", "--dry-run")[1]
    assert ", no labels) would become" in run(bare, tmp_path / "out", "--dry-run")[1]


def test_a_dry_run_writes_nothing(tar, tmp_path):
    code, out, err = run(tar, tmp_path / "out", "--dry-run", "--split", "a=0.5,b=0.5")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "nothing was written; images are checked when they are converted"
    document = json.loads(run(tar, tmp_path / "out", "--dry-run", "--json")[1])
    assert document["parts"][0]["samples"] == 8
    assert os.listdir(tmp_path) == ["in.tar"]
