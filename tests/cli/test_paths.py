"""Paths that are not there, may not be read, or where nothing can be made: one code and one line in every command."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shardkit
from shardkit.cli.main import main
from shardkit.testing.mounts import NoMountsError, tmpfs
from shardkit.testing.packs import tiny_tree

ROOT = Path(__file__).parents[2]
READING = {
    "verify": ["verify", "PATH"],
    "inspect": ["inspect", "PATH"],
    "ls": ["ls", "PATH"],
    "show": ["show", "PATH", "a/00000"],
    "cat": ["cat", "PATH", "a/00000"],
    "extract": ["extract", "PATH", "OUT"],
    "export": ["export", "PATH", "--to", "wids", "--out", "OUT"],
    "repair": ["repair", "PATH", "--out", "OUT"],
    "pack": ["pack", "PATH", "OUT"],
    "pack --classes": ["pack", "SRC", "OUT", "--classes", "PATH"],
    "convert": ["convert", "PATH", "OUT"],
    "convert --labels": ["convert", "DS", "OUT", "--labels", "PATH"],
    "convert of a list": ["convert", "PATH.txt", "OUT"],
    "convert from hf": ["convert", "hf:PATH", "OUT"],
    "index": ["index", "PATH", "--out", "OUT"],
    "doctor": ["doctor", "PATH"],
}
SKIP = ["--on-error", "skip"]
FIRST = "a/00006"
"""Key of the first sample that a pack of the tiny tree stores."""
TARS = {
    "verify": ["verify", "DS"],
    "inspect --verify": ["inspect", "DS", "--verify", "checksum"],
    "show": ["show", "DS", FIRST],
    "cat": ["cat", "DS", FIRST],
    "extract": ["extract", "DS", "OUT", *SKIP],
    "repair": ["repair", "DS"],
    "repair --out": ["repair", "DS", "--out", "OUT"],
    "convert": ["convert", "DS", "OUT", *SKIP],
    "convert of tars": ["convert", "DS/*.tar", "OUT", *SKIP],
    "convert to a tree": ["convert", "DS", "tree:OUT", *SKIP],
    "index": ["index", "DS/*.tar", "--out", "OUT", *SKIP],
    "index --facts none": ["index", "DS/*.tar", "--out", "OUT", "--facts", "none", *SKIP],
}
"""Commands that read shards."""
WRITING = {
    "pack": ["pack", "SRC", "OUT"],
    "convert": ["convert", "DS", "OUT"],
    "convert --split": ["convert", "DS", "OUT", "--split", "a=0.5,b=0.5"],
    "index": ["index", "DS", "--out", "OUT"],
    "extract": ["extract", "DS", "OUT"],
    "export": ["export", "DS", "--to", "wids", "--out", "OUT"],
    "repair": ["repair", "DS", "--out", "OUT"],
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("paths")
    tree = tiny_tree(root / "src")
    shardkit.pack(tree, root / "ds", jobs=1)
    return {"SRC": root / "src", "DS": root / "ds", "OUT": root / "out"}


def filled(words, **places):
    for name, path in places.items():
        words = [word.replace(name, str(path)) for word in words]
    return words


def ended(capsys, words):
    with pytest.raises(SystemExit) as caught:
        main(words)
    return caught.value.code, capsys.readouterr().err


@pytest.mark.parametrize("words", READING.values(), ids=READING)
def test_what_is_not_there_is_2(capsys, places, words):
    for path in ("/no/such/place", "/dev/null/below"):
        code, err = ended(capsys, filled(words, PATH=path, **places))
        assert code == 2, err
        assert re.fullmatch(rf"shardkit: error: [^\n]*{path}[^\n]*\n", err), err


def run_without_rights(words):
    """Run a command that may read no more than others may: root, too."""
    program = [sys.executable, "-m", "shardkit"]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root may read everything")
        rights = ["--inh-caps=-all", "--bounding-set=-dac_override,-dac_read_search"]
        program = ["setpriv", *rights, *program]
    return subprocess.run(
        [*program, *words], capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.parametrize("words", READING.values(), ids=READING)
def test_what_may_not_be_looked_at_is_6(places, tmp_path, words):
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed").chmod(0)
    done = run_without_rights(filled(words, PATH=tmp_path / "closed/inner", **places))
    (tmp_path / "closed").chmod(0o755)
    assert done.returncode == 6, done.stderr
    told = r"shardkit: error: [^\n]*closed/inner[^\n]*EACCES[^\n]*check the owner, the mode and the mount[^\n]*\n"
    assert re.fullmatch(told, done.stderr), done.stderr


@pytest.mark.parametrize("words", TARS.values(), ids=TARS)
def test_a_tar_that_may_not_be_read_is_6_and_no_refusal(places, tmp_path, words):
    shardkit.pack(places["SRC"], tmp_path / "ds", shards=2, jobs=1)
    (tmp_path / "ds" / "ds-000000.tar").chmod(0)
    done = run_without_rights(filled(words, DS=tmp_path / "ds", OUT=tmp_path / "out"))
    assert done.returncode == 6, done.stderr
    assert re.search(r"ds-000000\.tar.*EACCES", done.stdout + done.stderr)
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("words", WRITING.values(), ids=WRITING)
def test_where_no_file_can_be_made_is_6_and_a_file_2(capsys, places, tmp_path, words):
    (tmp_path / "file").touch()
    places = {key: value for key, value in places.items() if key != "OUT"}
    for target in ("/proc/shardkit/new", tmp_path / "file", tmp_path / "file/below"):
        code, err = ended(capsys, filled(words, OUT=target, **places))
        assert code == (6 if "proc" in str(target) else 2), err
        said = "cannot create the target" if code == 6 else "the target is not a folder"
        assert re.fullmatch(rf"shardkit: error: {said}: {target}[^\n]*\n", err), err


@pytest.mark.parametrize("words", WRITING.values(), ids=WRITING)
def test_a_mount_that_is_read_only_is_6(capsys, places, tmp_path, words):
    places = {key: value for key, value in places.items() if key != "OUT"}
    try:
        with tmpfs(tmp_path / "ro", size=1 << 20) as folder:
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
            code, err = ended(capsys, filled(words, OUT=folder / "new", **places))
    except NoMountsError as error:
        pytest.skip(str(error))
    assert code == 6, err
    assert "EROFS" in err
