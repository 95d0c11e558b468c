"""`shardkit export`: exit codes, texts and JSON, as a shell sees them."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardkit.cli.export import FORMATS, export
from shardkit.cli.main import main
from shardkit.exporting import formats
from shardkit.testing.damage import flip_byte
from shardkit.testing.datasets import draft_dataset

ROOT = Path(__file__).parents[2]


@pytest.fixture
def dataset(tmp_path):
    return draft_dataset().write(tmp_path / "ds")


@pytest.fixture
def run(capsys):
    """Return a function that runs the command and returns its exit code, standard output and standard error."""

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(["export", *map(str, arguments)])
        return (caught.value.code, *capsys.readouterr())

    return call


def test_the_command_knows_the_formats_that_there_are():
    assert tuple(formats.FORMATS) == FORMATS


def test_an_export_ends_with_0_and_says_what_it_wrote(run, dataset):
    code, out, err = run(dataset, "--to", "wids, dali", "--to", "energon")
    assert (code, err) == (0, "")
    first, *lines = out.splitlines()
    assert first.startswith("exported 6 samples for wids, dali, energon in ")
    assert first.endswith(f" into {dataset}")
    assert lines[0] == "  wids        1 file (1 written), 249 B: shardindex.json"
    assert lines[1] == "  dali        2 files (2 unchanged), 442 B: tiny-000000.idx, tiny-000001.idx"
    assert lines[2].startswith("  energon     7 files (7 written), ")
    assert lines[2].endswith(": tiny-000000.tar.idx, tiny-000001.tar.idx, ...")


def test_json_lists_every_file(run, dataset, tmp_path):
    code, out, err = run(dataset, "--to", "timm,openclip", "--out", tmp_path / "out", "--json")
    document = json.loads(out)
    assert (code, err, document["samples"]) == (0, "", 6)
    assert document["folder"] == str(tmp_path / "out")
    assert document["files"] == [
        {"format": name, "name": file, "bytes": (tmp_path / "out" / file).stat().st_size, "state": "written"}
        for name, file in (("timm", "_info.json"), ("openclip", "sizes.json"))
    ]
    assert document["seconds"] >= 0


@pytest.mark.parametrize(
    "arguments", [("--to", "wids"), (".",), (".", "--to", "wids"), (".", "--to", "tfrecord"), (".", "--to", ",")]
)
def test_what_cannot_be_asked_ends_with_2(run, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err


@pytest.mark.parametrize("names", [("",), (".", "--out", "")])
def test_an_empty_name_is_not_the_current_folder(run, dataset, monkeypatch, names):
    monkeypatch.chdir(dataset)
    code, out, err = run(*names, "--to", "wids")
    assert (code, out) == (2, "")
    assert "DATASET and --out are names of folders; found an empty one" in err
    assert not (dataset / "shardindex.json").exists()


def test_a_file_in_the_way_ends_with_2_and_overwrite_replaces_it(run, dataset):
    (dataset / "README.md").write_text("mine")
    code, _, err = run(dataset, "--to", "huggingface")
    assert (code, (dataset / "README.md").read_text()) == (2, "mine")
    assert "found README.md; nothing was changed; move them away, or replace them with --overwrite" in err
    code, out, _ = run(dataset, "--to", "huggingface", "--overwrite")
    assert (code, "(1 replaced)" in out) == (0, True)


def test_a_damaged_index_ends_with_4_and_json_says_so(run, dataset):
    flip_byte(dataset / "index.arrow", (dataset / "index.arrow").read_bytes().index(b"c/0001"))
    code, out, err = run(dataset, "--to", "wids", "--json")
    assert (code, json.loads(out)["error"]) == (4, "IntegrityError")
    assert "the index is not the manifest's" in err


def test_a_dangerous_name_ends_with_9(run, dataset):
    (dataset / ".shardkit-export").write_text("")
    assert run(dataset, "--to", "wids")[0] == 9
    (dataset / ".shardkit-export").unlink()
    (dataset / "_info.json").symlink_to("/etc/hostname")
    assert run(dataset, "--to", "timm", "--overwrite")[0] == 9


def test_the_help_names_every_exit_code_of_the_command_and_every_format():
    text = " ".join(CliRunner().invoke(export, ["--help"]).output.split())
    assert all(f"{code}: " in text for code in (0, 2, 4))
    assert all(name in text for name in FORMATS)


def test_progress_is_drawn_on_a_terminal_only(dataset):
    command = [sys.executable, "-m", "shardkit", "export", str(dataset), "--to", "wids"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    piped = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert piped.stderr == b""
    reader, terminal = pty.openpty()
    # Without a width there is no bar.
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, env=environment, check=True)
    os.close(terminal)
    drawn = os.read(reader, 10_000)
    os.close(reader)
    assert b"export: " in drawn
