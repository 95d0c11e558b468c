"""`shardkit verify`: exit codes, texts and JSON, as a shell sees them."""

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

from shardkit.cli.main import main
from shardkit.cli.verify import verify
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
            main(["verify", *map(str, arguments)])
        return (caught.value.code, *capsys.readouterr())

    return call


def test_a_whole_dataset_ends_with_0(run, dataset):
    code, out, err = run(dataset)
    assert (code, err) == (0, "")
    assert out.startswith("verified 6 samples in 2 shards at level checksum: nothing is damaged\n")


def test_damage_ends_with_4_and_is_told_with_its_place(run, dataset):
    flip_byte(dataset / "tiny-000001.tar", 20)
    code, out, _ = run(dataset)
    assert code == 4
    assert "header: tiny-000001.tar:20 [sample c/0003] header: not the canonical header" in out
    assert "DAMAGED: 1 finding in 6 samples in 2 shards at level checksum: 1 header\n" in out
    assert out.endswith(f"next: shardkit repair {dataset} --dry-run\n")


@pytest.mark.parametrize(("limit", "shown"), [(0, 0), (2, 2), (50, 6)])
def test_all_findings_are_counted_and_so_many_printed(run, tmp_path, limit, shown):
    draft = draft_dataset()
    path = draft.write(tmp_path / "ds")
    for shard in draft.shards:
        for row in shard.rows:
            flip_byte(path / shard.name, row.offset)
    code, out, _ = run(path, "--max-findings", limit)
    lines = out.splitlines()
    assert code == 4
    assert sum(line.startswith("payload: ") for line in lines) == shown
    assert (f"... and {6 - shown} further findings" in out) == (shown < 6)
    assert "DAMAGED: 6 findings" in out


@pytest.mark.parametrize("level", ["index", "structure", "checksum", "decode"])
def test_json_is_the_whole_report_on_standard_output(run, dataset, level):
    code, out, err = run(dataset, "--level", level, "--json", "--jobs", 2)
    document = json.loads(out)
    assert (code, err, document["level"], document["exit_code"], document["samples"]) == (0, "", level, 0, 6)
    assert document["seconds"] >= 0


@pytest.mark.parametrize("arguments", [("nowhere",), ("--level", "all", "."), ("--jobs", "0", "."), ()])
def test_what_cannot_be_asked_ends_with_2(run, arguments):
    assert run(*arguments)[0] == 2


def test_an_unfinished_pack_is_no_damage_in_words_but_4_in_code(run, dataset):
    (dataset / "manifest.json").unlink()
    (dataset / ".shardkit").mkdir()
    code, out, _ = run(dataset)
    assert code == 4
    assert "--resume" in out
    assert "NOT A COMPLETE DATASET" in out
    assert "DAMAGED" not in out


def test_a_newer_dataset_ends_with_7(run, dataset):
    text = (dataset / "manifest.json").read_text()
    (dataset / "manifest.json").write_text(text.replace('"format_version": 1', '"format_version": 9'))
    code, out, err = run(dataset)
    assert (code, out) == (7, "")
    assert "upgrade shardkit" in err


def test_no_direct_reads_through_the_page_cache(run, dataset):
    assert json.loads(run(dataset, "--no-direct", "--json")[1])["read_path"] == "page cache"


def test_the_help_names_every_exit_code_of_the_command():
    text = CliRunner().invoke(verify, ["--help"]).output
    assert all(f"{code}: " in text for code in (0, 4, 6))


def test_progress_is_drawn_on_a_terminal_only(dataset):
    command = [sys.executable, "-m", "shardkit", "verify", str(dataset)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    piped = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert piped.stderr == b""
    reader, terminal = pty.openpty()
    # Without a width there is no bar.
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, env=environment, check=True)
    os.close(terminal)
    drawn = os.read(reader, 10_000)
    os.close(reader)
    assert b"verify: " in drawn
    assert done.stdout.splitlines()[0] == piped.stdout.splitlines()[0]
