"""A child process that answers, hangs, crashes or talks nonsense."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from shardkit.diagnosing.facts import CudaAnswer
from shardkit.diagnosing.question import CudaQuestion, answer_of

ASK = [sys.executable, "-m", "shardkit.cli._ask_cuda"]


def answer(script, patience_s=20.0):
    with CudaQuestion(["sh", "-c", script]) as question:
        return question.answer(patience_s)


def test_an_answer_survives_the_way():
    whole = CudaAnswer(version=13000, devices=("A", "B"), memory=(1, 2), engines=(7, 1), gds_mode="POSIX")
    assert answer_of(json.loads(json.dumps(asdict(whole)))) == whole


def test_the_last_line_counts():
    assert answer("""echo '{"error": "first"}'; echo '{"version": 12040}'""") == CudaAnswer(version=12040)


@pytest.mark.parametrize("end", ["kill -SEGV $$", "exec sleep 60", "echo nonsense; exit 3"])
def test_what_was_said_before_the_end_counts(end):
    started = time.monotonic()
    assert answer(f"""echo '{{"gds_error": "silent"}}'; {end}""", 1.0) == CudaAnswer(gds_error="silent")
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo no room >&2; exit 3", "asking CUDA ended with code 3: no room"),
        ("kill -SEGV $$", "asking CUDA ended with code -11"),
        ("echo '[1]'; echo '{\"what\": 1}'", "asking CUDA ended with code 0"),
    ],
)
def test_a_child_that_says_nothing_is_an_error(script, message):
    assert answer(script).error == message


def test_a_child_that_hangs_is_an_error_and_ends():
    with CudaQuestion(["sleep", "60"]) as question:
        assert "did not answer within 0.2 s" in question.answer(0.2).error
        child = question._child
    assert child.returncode is not None


def test_the_child_runs_in_an_empty_folder_that_goes(tmp_path):
    with CudaQuestion(["sh", "-c", f"touch cufile.log; pwd > {tmp_path}/where"]) as question:
        question.answer()
    where = (tmp_path / "where").read_text().strip()
    assert where != os.getcwd()
    assert not Path(where).exists()


def test_the_child_finds_what_its_parent_has_imported(monkeypatch, tmp_path):
    (tmp_path / "only_here.py").write_text("""print('{"version": 5}')""")
    monkeypatch.syspath_prepend(tmp_path)
    with CudaQuestion([sys.executable, "-c", "import only_here"]) as question:
        assert question.answer() == CudaAnswer(version=5)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a driver here")
def test_without_a_driver_the_library_is_named():
    with CudaQuestion(ASK) as question:
        found = question.answer()
    assert "libcuda.so.1" in found.error
    assert "libnvcuvid.so.1" in found.video_error
    assert (found.engines, found.gds_mode) == (None, "")


def test_what_libraries_print_is_no_answer():
    code = "import os, shardkit.cli._ask_cuda as child\nchild.ask = lambda say: os.write(1, b'noise')\nchild.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"noise")
