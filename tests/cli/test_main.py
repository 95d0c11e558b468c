"""Whatever ends a command: one code, one line, and nothing of the interpreter's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardkit
from shardkit.testing.packs import contents, tiny_tree

MAIN = [sys.executable, "-m", "shardkit"]
BROKEN = """
import sys
import shardkit.packing.run as run
from shardkit.cli.main import main

def fail(*arguments, **options):
    raise {error}

run.run_pack = fail
main(sys.argv[1:])
"""


def run(*arguments, program=MAIN, **options):
    return subprocess.run(
        [*program, *map(str, arguments)], **{"capture_output": True, "text": True, **options}, timeout=60, check=False
    )


def run_broken(error, *options):
    program = [sys.executable, "-c", BROKEN.format(error=error)]
    return run(*options, "pack", "/nowhere", "/nowhere/else", program=program)


def run_into(output, *arguments):
    return run(*arguments, capture_output=False, stdout=output, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_tree(tmp_path_factory.mktemp("tree") / "source")


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["pack", "--help"], ["verify", "-h"], ["--version"]])
def test_help_is_no_error(arguments):
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "shardkit" in done.stdout


@pytest.mark.parametrize(
    "arguments", [["pack"], ["pack", "a"], ["pack", "a", "b", "--shards", "many"], ["unknown"], ["--unknown"], []]
)
def test_a_wrong_command_line_is_2_and_says_how_it_goes(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert "Usage: shardkit" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_command_line_is_2_in_json_too():
    done = run("pack", "a", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["exit_code"] == 2


def test_an_argument_with_control_characters_is_not_obeyed():
    done = run("pack", "a", "b", "c\x07\u202e")
    assert done.returncode == 2
    assert "c\\x07\\u202e" in done.stderr


def test_an_error_is_one_line_and_its_code(tmp_path):
    done = run("pack", tmp_path / "no\nwhere", tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr == f"shardkit: error: the source is not there: {tmp_path}/no\\nwhere\n"
    assert done.stdout == ""


def test_an_error_is_json_when_json_was_asked_for(tmp_path):
    done = run("pack", tmp_path / "nowhere", tmp_path / "out", "--json")
    answer = json.loads(done.stdout)
    assert answer["error"] == "ConfigError"
    assert answer["exit_code"] == done.returncode == 2
    assert f"shardkit: error: {answer['message']}\n" == done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("OSError(5, 'Input/output error', '/some/file')", 6),
        ("OSError(28, 'No space left on device', '/some/file')", 5),
        ("PermissionError(13, 'Permission denied', '/some/file')", 6),
    ],
)
def test_an_error_of_the_system_that_nobody_took_is_no_bug(error, code):
    done = run_broken(error)
    assert done.returncode == code
    assert done.stderr.startswith("shardkit: error: the system refused an operation: /some/file; found E")


def test_a_bug_is_1_and_shows_its_traceback_only_when_asked():
    done = run_broken("ZeroDivisionError('by \\x1b nothing')")
    assert done.returncode == 1
    assert "this is a bug in shardkit: ZeroDivisionError: by \\x1b nothing; --debug shows where" in done.stderr
    assert "Traceback" not in done.stderr
    done = run_broken("ZeroDivisionError", "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_a_reader_that_has_gone_is_no_error(source, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    done = run_into(writing, "pack", source, tmp_path / "out", "--jobs", "1")
    os.close(writing)
    assert (done.returncode, done.stderr) == (3, "")  # a source was refused, and that is still so
    assert shardkit.verify(tmp_path / "out").exit_code == 0


def test_a_reader_of_errors_that_has_gone_changes_no_code(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    for more in ([], ["--json"]):
        done = run(
            "pack", tmp_path / "nowhere", tmp_path, *more, capture_output=False, stdout=writing, stderr=writing
        )  # fmt: skip
        assert done.returncode == 2
    os.close(writing)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_an_output_without_room_is_an_error_of_the_output(source, tmp_path):
    with open("/dev/full", "w") as full:
        done = run_into(full, "pack", source, tmp_path / "out", "--jobs", "1")
    assert done.returncode == 6
    assert "cannot write to standard output; the work itself is done" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert shardkit.verify(tmp_path / "out").exit_code == 0


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_closed_standard_streams_are_no_file_numbers_for_shards(source, tmp_path, closed, jobs):
    shardkit.pack(source, tmp_path / "whole", name="t", shards=2, jobs=1)
    shell = " ".join(f"{fd}{'<' if fd == 0 else '>'}&-" for fd in closed)
    command = ["sh", "-c", f'exec "$@" {shell}', "sh", *MAIN]
    done = run("pack", source, tmp_path / "out", "--name", "t", "--shards", "2", "--jobs", jobs, program=command)
    assert done.returncode == 3
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_shell_gets_its_completions():
    done = run(env=os.environ | {"_SHARDKIT_COMPLETE": "bash_source"})
    assert done.returncode == 0
    assert "_SHARDKIT_COMPLETE=bash_complete" in done.stdout


def test_ctrl_c_while_commands_are_imported_is_130_without_a_traceback():
    program = """
import signal, sys
class Stopping:
    def find_spec(self, name, *_):
        if name == "shardkit.cli.main":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Stopping())
from shardkit.__main__ import main
main()
"""
    done = run(program=[sys.executable, "-c", program])
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "shardkit: interrupted\n")
