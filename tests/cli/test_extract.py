"""`shardkit extract`: exit codes, texts, JSON and signals, as a shell sees them."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import resource
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardkit.cli.extract import extract
from shardkit.cli.main import main
from shardkit.testing.commands import Commands, NoTracerError
from shardkit.testing.damage import flip_byte
from shardkit.testing.datasets import DraftSample, draft_dataset, draft_shard, tiny_jpeg
from shardkit.testing.packs import contents

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def dataset(tmp_path):
    return draft_dataset().write(tmp_path / "ds")


@pytest.fixture(scope="module")
def commands():
    with Commands() as running:
        yield running


@pytest.fixture
def inject(commands):
    """Return a function: runs an extraction while strace makes a system call fail, or sends a signal at it."""

    def call(rule, *arguments):
        try:
            done = commands.run("extract", *arguments, inject=[rule])
        except NoTracerError as error:
            pytest.skip(str(error))
        assert done.injected or "SIGINT" in done.trace or "SIGTERM" in done.trace
        return done

    return call


@pytest.fixture
def run(capsys):
    """Return a function that runs the command and returns its exit code, standard output and standard error."""

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(["extract", *map(str, arguments)])
        return (caught.value.code, *capsys.readouterr())

    return call


def test_a_whole_dataset_ends_with_0(run, dataset, tmp_path):
    code, out, err = run(dataset, tmp_path / "out")
    assert (code, err) == (0, "")
    assert out.startswith(f"extracted 6 of 6 samples into {tmp_path}/out: 3.2 kB in ")
    # The classes of this dataset are no folders of its names.
    assert out.splitlines()[1:] == ["  labels      those of 6 are not in their names; --layout class has CLASS/KEY"]


def test_a_second_run_says_what_was_there(run, dataset, tmp_path):
    run(dataset, tmp_path / "out")
    (tmp_path / "out/c/0003.jpg").unlink()
    code, out, _ = run(dataset, tmp_path / "out")
    assert code == 0
    assert out.startswith("extracted 6 of 6 samples")
    assert "  kept        5 files that were there with the right bytes\n" in out


def test_damage_ends_with_4_and_is_told_with_its_place(run, dataset, tmp_path):
    offset = draft_dataset().shards[1].rows[1].offset
    flip_byte(dataset / "tiny-000001.tar", offset)
    code, out, err = run(dataset, tmp_path / "out", "-j", 1)
    assert (code, out) == (4, "")
    assert f"tiny-000001.tar:{offset} [sample c/0004]; expected CRC-32C " in err
    assert "4 whole files are kept; restore the shard; --on-error skip leaves" in err


def test_damage_that_is_skipped_ends_with_3_and_is_listed(run, dataset, tmp_path):
    rows = draft_dataset().shards[0].rows
    for row in rows:
        flip_byte(dataset / "tiny-000000.tar", row.offset)
    code, out, err = run(dataset, tmp_path / "out", "--on-error", "skip")
    assert (code, err) == (3, "")
    assert [line.split(":")[0] for line in out.splitlines()[:3]] == ["damaged"] * 3
    assert "extracted 3 of 6 samples" in out
    assert "  left out    3: 3 damaged\n" in out


def test_json_is_the_whole_result_on_standard_output(run, dataset, tmp_path):
    flip_byte(dataset / "tiny-000000.tar", draft_dataset().shards[0].rows[0].offset)
    code, out, err = run(dataset, tmp_path / "out", "--json", "--on-error", "skip", "--layout", "class")
    document = json.loads(out)
    assert (code, err) == (3, "")
    assert document["seconds"] >= 0
    assert document["failures"][0].pop("message").startswith("an image is not what was packed")
    assert document == {
        "exit_code": 3, "samples": 6, "checksums": True, "written": 5, "bytes": document["bytes"], "bytes_shared": 0,
        "bytes_copied": document["bytes"], "kept": 0, "folders": 12,
        "renamed": 0, "labels_unstated": 0, "left_out": 1,
        "counts": {"damaged": 1}, "failures": [{"key": "c/0000", "reason": "damaged"}],
        "seconds": document["seconds"],
    }  # fmt: skip


def test_reflinks_are_told_and_demanded(run, folder_on):
    disk = folder_on("xfs")
    ds = draft_dataset((2,), sizes=(20_000,)).write(disk / "ds")
    code, out, err = run(ds, disk / "out", "--reflink", "always")
    assert (code, err) == (0, "")
    assert "  reflinks    32.8 kB are blocks of the shards, 7.2 kB copied\n" in out
    document = json.loads(run(ds, disk / "json", "--json")[1])
    assert (document["bytes_shared"], document["bytes_copied"]) == (32_768, 7_232)
    code, out, err = run(ds, folder_on("ext4") / "out", "--reflink", "always")
    assert (code, out) == (7, "")
    assert "different file systems" in err


def test_chosen_keys(run, dataset, tmp_path):
    assert run(dataset, tmp_path / "out", "--key", "c/0001", "--key", "c/0004")[0] == 0
    assert contents(tmp_path / "out").keys() == {"c/0001.jpg", "c/0004.jpg"}
    assert run(dataset, tmp_path / "out", "--key", "c/9")[0] == 2


def test_an_unsafe_name_ends_with_9_and_is_escaped(run, tmp_path):
    draft = draft_dataset((1,))
    draft.shards = [draft_shard("tiny-000000.tar", [DraftSample(key="../\x1b[31m", jpeg=tiny_jpeg(), label=0)], 4096)]
    code, _, err = run(draft.write(tmp_path / "ds"), tmp_path / "out")
    assert code == 9
    assert "\\x1b[31m" in err
    assert "\x1b" not in err


@pytest.mark.parametrize(
    "arguments",
    [("nowhere", "out"), ("a",), ("a", "b", "--layout", "flat"), ("a", "b", "-j", "0"), ("", "b"), ("a", "")],
)
def test_what_cannot_be_asked_ends_with_2(run, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments)[0] == 2
    assert os.listdir(tmp_path) == []


def test_a_target_without_room_ends_with_5_and_says_what_is_kept(tmp_path):
    ds = draft_dataset((4,), sizes=(500, 600, 700, 50_000)).write(tmp_path / "ds")

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    command = [sys.executable, "-m", "shardkit", "extract", ds, tmp_path / "out", "-j", "1"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, preexec_fn=limit, check=False)
    assert done.returncode == 5
    assert "3 whole files are kept; free space" in done.stderr
    assert "run again: it goes on" in done.stderr
    assert contents(tmp_path / "out").keys() == {f"c/000{number}.jpg" for number in range(3)}
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert "kept        3 files" in done.stdout


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ("renameat:error=ENOSPC:when=3", 5), ("fsync:error=EIO:when=4", 6),
        ("preadv2:error=EIO:when=2", 6), ("renameat:error=EROFS:when=2", 6),
    ],
)  # fmt: skip
def test_a_call_that_fails_ends_the_run_with_its_code(inject, dataset, tmp_path, rule, code):
    done = inject(rule, dataset, tmp_path / "out", "-j", "1")
    assert done.code == code
    assert len(done.stderr.splitlines()) == 1
    assert "kept" in done.stderr
    there = contents(tmp_path / "out")
    assert not any(name.startswith(".shardkit") for name in there)
    assert all(data == tiny_jpeg(int(name[2:6]), len(data)) for name, data in there.items())


def test_a_read_that_fails_can_be_skipped(inject, dataset, tmp_path):
    done = inject("preadv2:error=EIO:when=2", dataset, tmp_path / "out", "-j", "1", "--on-error", "skip", "--json")
    document = json.loads(done.stdout)
    assert (done.code, document["counts"], document["written"]) == (3, {"read-error": 1}, 5)


@pytest.mark.parametrize(("number", "code"), [("INT", 130), ("TERM", 143)])
def test_a_signal_ends_it_clean_and_it_goes_on(inject, run, dataset, tmp_path, number, code):
    done = inject(f"renameat:signal={number}:when=3", dataset, tmp_path / "out", "-j", "1")
    assert done.code == code
    assert "files are kept; run again to go on" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert ".shardkit" not in os.listdir(tmp_path / "out")
    assert run(dataset, tmp_path / "out")[0] == 0
    assert len(contents(tmp_path / "out")) == 6


@pytest.mark.parametrize("when", [1, 4])
def test_a_killed_run_leaves_whole_files_and_the_next_one_sweeps(inject, run, dataset, tmp_path, when):
    done = inject(f"renameat:signal=KILL:when={when}", dataset, tmp_path / "out", "-j", "1")
    assert done.code == -9
    there = contents(tmp_path / "out")
    assert any(name.startswith(".shardkit/run-") for name in there)
    assert all(
        data == tiny_jpeg(int(name[2:6]), len(data)) for name, data in there.items() if name.startswith("c/") and data
    )
    assert run(dataset, tmp_path / "out")[0] == 0
    assert contents(tmp_path / "out").keys() == {f"c/000{number}.jpg" for number in range(6)}


def test_every_file_and_every_folder_is_synced_before_the_end(commands, dataset, tmp_path):
    try:
        seen = commands.run("extract", dataset, tmp_path / "out", inject=["fsync"])
    except NoTracerError as error:
        pytest.skip(str(error))
    assert seen.code == 0
    for name in [*(f"out/c/000{number}.jpg" for number in range(6)), "out/c", "out"]:
        assert f"<{tmp_path / name}>" in seen.trace


def test_the_help_names_every_exit_code_of_the_command():
    text = CliRunner().invoke(extract, ["--help"]).output
    assert all(f"{code}: " in " ".join(text.split()) for code in (0, 3, 4, 5, 9))


def test_progress_is_drawn_on_a_terminal_only(dataset, tmp_path):
    command = [sys.executable, "-m", "shardkit", "extract", str(dataset)]
    piped = subprocess.run([*command, tmp_path / "a"], capture_output=True, env=ENVIRONMENT, check=True)
    assert piped.stderr == b""
    reader, terminal = pty.openpty()
    # Without a width there is no bar.
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    subprocess.run([*command, tmp_path / "b"], stdout=subprocess.PIPE, stderr=terminal, env=ENVIRONMENT, check=True)
    os.close(terminal)
    drawn = os.read(reader, 10_000)
    os.close(reader)
    assert b"extract: " in drawn
