"""`shardkit inspect`: what it prints, and what it ends with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardkit
from shardkit.cli._choices import LEVELS
from shardkit.cli.main import main
from shardkit.testing.datasets import DraftSample, draft_dataset, draft_shard, tiny_jpeg
from shardkit.testing.foreign import foreign_files, write_tar
from shardkit.testing.hostile import HOSTILE_TEXTS
from shardkit.verifying import report

ROOT = Path(__file__).parents[2]


@pytest.fixture
def dataset(tmp_path):
    """Six samples with labels, gray and colour in turn; one refused source."""
    return draft_dataset().write(tmp_path / "ds")


@pytest.fixture
def run(capfd):
    """Return a function that runs the command and returns its exit code, standard output and standard error."""

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(["inspect", *map(str, arguments)])
        out, err = capfd.readouterr()
        return caught.value.code, out, err

    return call


def test_the_text(run, dataset):
    code, out, err = run(dataset, "--classes", 2)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    with shardkit.open(dataset) as opened:
        totals, generation = opened.manifest.totals, opened.generation
    assert lines[:11] == [
        "tiny",
        "  samples     6",
        "  shards      2",
        f"  all shards  {totals.bytes / 1000:.1f} kB",
        f"  images      {totals.payload / 1000:.1f} kB ({100 * totals.payload / totals.bytes:.1f} %)",
        f"  headers     {totals.headers / 1000:.1f} kB ({100 * totals.headers / totals.bytes:.1f} %)",
        f"  padding     {totals.padding / 1000:.1f} kB ({100 * totals.padding / totals.bytes:.1f} %)",
        "  align       4,096 bytes",
        "  classes     12, 6 of them without a sample",
        "  refused     1 source",
        f"  generation  {generation}",
    ]
    assert lines[12:] == [
        "samples by class, the largest first",
        "  0  class 0            1   16.7 %  ##############################",
        "  1  class 1            1   16.7 %  ##############################",
        "  ... and 4 more with 4 samples; --classes 0 lists them",
        "",
        "percentiles         min    5 %   50 %   95 %   99 %    max",
        "  file size       401 B  401 B  512 B  700 B  700 B  700 B",
        "  width               8      8      8     16     16     16",
        "  height              8      8      8     24     24     24",
        "  width / height  0.667  0.667  0.667      1      1      1",
        "",
        "images",
        "  type           jpeg 6 (100.0 %)",
        "  JPEG engines   6 (100.0 %) of the JPEGs are taken by those of a GPU",
        "  frame          baseline 6 (100.0 %)",
        "  components     1: 3 (50.0 %), 3: 3 (50.0 %)",
        "  subsampling    4:2:0 3 (50.0 %), gray 3 (50.0 %)",
        "  precision      8 bits 6 (100.0 %)",
        "  scans          0 (0.0 %) with more than one",
        "  restarts       0 (0.0 %) with restart markers",
        "  orientation    0 (0.0 %) turned by EXIF",
        "",
        "refused: 1 source",
        "        1  not-jpeg",
        "",
        "not verified; --verify LEVEL does it",
        lines[-1],
    ]
    assert lines[-1].startswith("inspected in ")


def test_bars_are_as_long_as_the_classes_are_large(run, tmp_path):
    labels = [0] * 10 + [1] * 5 + [2]
    draft = draft_dataset()
    samples = [DraftSample(key=f"k{i}", jpeg=tiny_jpeg(i), label=label) for i, label in enumerate(labels)]
    draft.shards = [draft_shard("tiny-000000.tar", samples, 4096)]
    _, out, _ = run(draft.write(tmp_path / "ds"), "--classes", 0)
    bars = [line.count("#") for line in out.splitlines() if line.endswith("#")]
    assert bars == [30, 15, 3]


def test_json_has_everything(run, dataset):
    code, out, err = run(dataset, "--json", "--verify", "checksum")
    assert (code, err) == (0, "")
    document = json.loads(out)
    seconds = document.pop("seconds")
    assert seconds >= 0
    assert document == json.loads(json.dumps(shardkit.inspect(dataset, verify="checksum").to_json())) | {
        "dataset": str(dataset)
    }


def test_the_page_is_named_with_its_size(run, dataset, tmp_path):
    page = tmp_path / "a page.html"
    code, out, _ = run(dataset, "--html", page, "--thumbnails", 4)
    assert code == 0
    assert f"page: '{page}', {page.stat().st_size / 1000:.1f} kB, 4 thumbnails" in out.splitlines()
    code, _, err = run(dataset, "--html", page)
    assert (code, err.count("--overwrite")) == (2, 1)
    assert run(dataset, "--html", page, "--overwrite", "--json")[0] == 0


def test_damage_ends_with_4_and_is_shown(run, dataset):
    (dataset / "tiny-000001.idx").write_text("v1.2 0\n")
    code, out, _ = run(dataset, "--verify", "index")
    assert code == 4
    assert "DAMAGED: 1 finding at level index:" in out.splitlines()
    assert "tiny-000001.idx" in out


def test_undamaged_is_told(run, dataset):
    code, out, _ = run(dataset, "--verify", "decode")
    assert code == 0
    assert "verified at level decode: nothing is damaged" in out.splitlines()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["gone"], 2),
        (["--verify", "all"], 2),
        (["--thumbnails", "1001"], 2),
        (["--html", "page.txt"], 2),
        (["--html", "gone/page.html"], 2),
    ],
)
def test_what_cannot_be_served_has_its_exit_code(run, dataset, arguments, code):
    given = arguments if arguments == ["gone"] else [dataset, *arguments]
    found, out, err = run(*given)
    assert (found, out) == (code, "")
    assert "Traceback" not in err


def test_hostile_texts_do_not_reach_the_terminal(run, tmp_path):
    draft = draft_dataset()
    draft.classes = (*HOSTILE_TEXTS, "\ud800", "\udcff")
    lines = [{"path": text, "reason": text, "detail": text} for text in HOSTILE_TEXTS]
    draft.rejected, draft.refused = b"".join(json.dumps(line).encode() + b"\n" for line in lines), len(lines)
    code, out, _ = run(draft.write(tmp_path / "ds"), "--classes", 0)
    assert code == 0
    assert {character for character in out if not character.isprintable()} == {"\n"}
    assert r"\u202egpj.exe\u2066" in out


def test_progress_is_silent_where_no_terminal_is(dataset):
    done = subprocess.run(
        [sys.executable, "-m", "shardkit", "inspect", str(dataset), "--verify", "index"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""


def test_what_nobody_looked_at_is_a_dash_and_null(run, tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()
    write_tar(shards / "a.tar", foreign_files(0, 3))
    shardkit.index(shards, facts="none")
    code, out, _ = run(shards, "--html", tmp_path / "page.html")
    lines = out.splitlines()
    first = lines.index("images")
    assert (code, {line[16:].strip() for line in lines[first + 1 : first + 10]}) == (0, {"-"})
    assert "0.0 %" not in "\n".join(lines[first:])
    page = (tmp_path / "page.html").read_text()
    coding = page[page.index("<h2>Coding</h2>") : page.index("<h2>Classes</h2>")]
    assert coding.count("<dd>-</dd>") == 4
    assert "0 (" not in coding
    assert "0x0" not in page
    images = json.loads(run(shards, "--json")[1])["images"]
    assert {"jpegs", "hardware_decodable", "orientations", "several_scans"} < set(images)
    assert set(images.values()) == {None}


def test_one_is_singular(capfd, tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()
    one = write_tar(shards / "a.tar", foreign_files(0, 1))
    (shards / "b.tar").write_bytes(b"no tar")
    told = ""
    key = "train/n0/00000"
    commands = (
        ("index", shards), ("inspect", shards), ("verify", shards), ("ls", shards), ("show", shards, key),
        ("convert", one, tmp_path / "new", "--other-members", "drop"),
    )  # fmt: skip
    for command in commands:
        with pytest.raises(SystemExit) as caught:
            main([*map(str, command)])
        assert caught.value.code in (0, 3), capfd.readouterr()
        told += capfd.readouterr().out
    for part in ("1 sample in 1 shard", "1 whole shard among", "1 sample into 1 shard", "1 scan,"):
        assert part in told
    assert not re.findall(r"(?<![0-9,.])1 (?:whole )?(?:shards|samples|bytes|scans|components|findings|files)", told)


def test_the_command_knows_the_levels_that_there_are():
    assert LEVELS == report.LEVELS


@pytest.mark.parametrize("names", [("",), (".", "--html", "")])
def test_an_empty_name_is_not_the_current_folder(run, dataset, monkeypatch, names):
    monkeypatch.chdir(dataset)
    code, out, err = run(*names)
    assert (code, out) == (2, "")
    assert "DATASET and --html are names; found an empty one" in err
