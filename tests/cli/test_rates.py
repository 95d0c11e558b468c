"""How fast a run was is told where it has moved bytes, and not as 0 B/s where it has moved none."""

from __future__ import annotations

import re
import shutil

import pytest

import shardkit
from shardkit.cli.main import main
from shardkit.testing.packs import tiny_tree

COMMANDS = {
    "pack": ["pack", "src", "packed", "--jobs", "1"],
    "convert": ["convert", "dataset", "converted", "--jobs", "1"],
    "extract": ["extract", "dataset", "tree"],
    "index": ["index", "tars", "--jobs", "1"],
}
AGAIN = {"extract": []}
"""Options with which a command that is through is run again; --resume where nothing is said."""


@pytest.fixture
def told(capsys, tmp_path, monkeypatch):
    """Return a function that runs a command and returns how long it says that took, and how fast it was."""
    monkeypatch.chdir(tmp_path)
    shardkit.pack(tiny_tree(tmp_path / "src"), tmp_path / "dataset", jobs=1)
    (tmp_path / "tars").mkdir()
    shutil.copy(next((tmp_path / "dataset").glob("*.tar")), tmp_path / "tars")

    def call(words, codes=(0, 3)):
        with pytest.raises(SystemExit) as caught:
            main(words)
        out, err = capsys.readouterr()
        assert caught.value.code in codes, err
        (text,) = re.findall(r"in [0-9.]+ s\b.*", out)
        return text

    return call


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_that_found_all_done_has_no_rate(told, command):
    words = COMMANDS[command]
    assert re.fullmatch(r"in [0-9.]+ s \([0-9.]+ [kMG]B/s\)", told(words))
    text = told([*words, *AGAIN.get(command, ["--resume"])])
    assert re.fullmatch(r"in [0-9.]+ s(, [^(]*)?", text)


def test_a_folder_with_nothing_to_read_has_no_rate(told, tmp_path):
    (tmp_path / "empty").mkdir()
    assert re.fullmatch(r"in [0-9.]+ s", told(["verify", "empty"], codes=(4,)))
