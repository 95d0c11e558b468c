"""SIGTERM at every step of taking and leaving a target: nothing is left that was not there, but what can be resumed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shardkit
from shardkit.testing.foreign import foreign_files, write_tar
from shardkit.testing.packs import tiny_tree

SWEEP = """
import io, json, os, signal, sys
import shardkit.converting.run, shardkit.converting.foreign_run, shardkit.exporting.run, shardkit.extracting.run
import shardkit.indexing.run, shardkit.packing.run, shardkit.repairing.run
from shardkit.cli.main import main

FILES = ("/running/work_folder.py", "/storage/lock.py")
STEPS = {"make_folders", "hold", "_clear", "sweep", "_sweep"}

def stop_at(step):
    def count(frame, event, _):
        nonlocal step
        # Where Python looks for signals: what a call has made is there, and the caller does not know of it yet.
        if event in ("call", "c_return"):
            step -= frame.f_code.co_filename.endswith(FILES) or frame.f_code.co_name in STEPS
            if not step:
                sys.setprofile(None)
                os.kill(os.getpid(), signal.SIGTERM)
    sys.setprofile(count)

for line in sys.stdin:
    step, arguments = json.loads(line)
    child = os.fork()
    if not child:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        try:
            stop_at(step)
            main(arguments)
        except SystemExit as end:
            sys.setprofile(None)
            os._exit(end.code)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""
COMMANDS = {
    "pack": ["pack", "SRC", "OUT", "--jobs", "1"],
    "convert": ["convert", "DS", "OUT", "--split", "one=0.5,two=0.5", "--jobs", "1"],
    "convert to a tree": ["convert", "DS", "tree:OUT"],
    "index": ["index", "TARS", "--out", "OUT", "--jobs", "1"],
    "extract": ["extract", "DS", "OUT", "--jobs", "1"],
    "export": ["export", "DS", "--to", "energon", "--out", "OUT"],
    "repair": ["repair", "DS", "--out", "OUT"],
}
RECORDS = {"plan.json", "index.json", "repair.json"}
"""What a work folder holds of a run that can be resumed."""
MOST = 5000


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("stopped")
    shardkit.pack(tiny_tree(root / "src", images=4), root / "ds", jobs=1)
    (root / "tars").mkdir()
    write_tar(root / "tars" / "t-000.tar", foreign_files())
    return {"SRC": root / "src", "DS": root / "ds", "TARS": root / "tars"}


@pytest.fixture(scope="module")
def run_until():
    """Return a function that runs a command up to a step, and returns its exit code."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", SWEEP], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True, env=environment) as server:  # fmt: skip

        def run(step, words):
            server.stdin.write(json.dumps([step, words]) + "\n")
            server.stdin.flush()
            return int(server.stdout.readline())

        yield run
        server.stdin.close()


def leftovers(folder):
    """Return what an interrupted run may not leave: empty folders, and a work folder without a record of a run."""
    found = []
    for place, folders, names in os.walk(folder):
        if not folders and not names and place != str(folder):
            found.append(place)
        if ".shardkit" in os.path.basename(place) and not RECORDS & set(names):
            found.append(place)
        if "repair.json" in names and not any(Path(folder).rglob("*.tar")):
            found.append(place)
    return found


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_nothing_is_left_that_nobody_can_resume(places, run_until, tmp_path, words):
    root = tmp_path / "root"
    for name, path in {**places, "OUT": root / "new" / "out"}.items():
        words = [word.replace(name, str(path)) for word in words]
    for step in range(1, MOST):
        root.mkdir()
        code = run_until(step, words)
        assert not leftovers(root), step
        shutil.rmtree(root)
        if code != 143:
            break
    assert code in (0, 3)
    assert 20 < step < MOST - 1
