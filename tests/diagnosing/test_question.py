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

from shardkit.diagnosing.facts import CudaAnswer, KvikAnswer
from shardkit.diagnosing.question import Question, answer_of

ROOT = Path(__file__).parents[2]
ASK_KVIKIO = [sys.executable, "-m", "shardkit.cli._ask_kvikio"]
ASK = [sys.executable, "-m", "shardkit.cli._ask_cuda"]


def asking(command):
    return Question(command, CudaAnswer, "CUDA")


def answer(script, patience_s=20.0):
    with asking(["sh", "-c", script]) as question:
        return question.answer(patience_s)


def test_an_answer_survives_the_way():
    whole = CudaAnswer(version=13000, devices=("A", "B"), memory=(1, 2), engines=(7, 1), gds_mode="POSIX")
    assert answer_of(json.loads(json.dumps(asdict(whole))), CudaAnswer) == whole
    settings = KvikAnswer(settings={"compat_mode": "AUTO", "num_threads": 1, "auto_direct_io_read": False})
    assert answer_of(json.loads(json.dumps(asdict(settings))), KvikAnswer) == settings


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
    with asking(["sleep", "60"]) as question:
        assert "did not answer within 0.2 s" in question.answer(0.2).error
        child = question._child
    assert child.returncode is not None


def test_the_child_runs_in_an_empty_folder_that_goes(tmp_path):
    with asking(["sh", "-c", f"touch cufile.log; pwd > {tmp_path}/where"]) as question:
        question.answer()
    where = (tmp_path / "where").read_text().strip()
    assert where != os.getcwd()
    assert not Path(where).exists()


def test_the_child_finds_what_its_parent_has_imported(monkeypatch, tmp_path):
    (tmp_path / "only_here.py").write_text("""print('{"version": 5}')""")
    monkeypatch.syspath_prepend(tmp_path)
    with asking([sys.executable, "-c", "import only_here"]) as question:
        assert question.answer() == CudaAnswer(version=5)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a driver here")
def test_without_a_driver_the_library_is_named():
    with asking(ASK) as question:
        found = question.answer()
    assert "libcuda.so.1" in found.error
    assert "libnvcuvid.so.1" in found.video_error
    assert (found.engines, found.gds_mode) == (None, "")


def ask_kvikio(**environment):
    found = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    child = {**os.environ, "PYTHONPATH": found, **environment}
    done = subprocess.run(ASK_KVIKIO, env=child, capture_output=True, timeout=20, check=True)
    return answer_of(json.loads(done.stdout), KvikAnswer)


needs_kvikio = pytest.mark.gpu  # it comes with the extra for GPUs, and tells its settings without one


@needs_kvikio
def test_kvikio_tells_its_settings_without_a_gpu():
    code = "from kvikio.defaults import get; print(get('compat_mode').name, get('num_threads'), get('task_size'))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True).stdout
    found = ask_kvikio()
    assert found.error == ""
    settings = [str(found.settings[name]) for name in ("compat_mode", "num_threads", "task_size")]
    assert settings == told.split()


@needs_kvikio
def test_the_environment_wins_over_kvikios_defaults():
    settings = ask_kvikio(KVIKIO_NTHREADS="7", KVIKIO_COMPAT_MODE="ON", KVIKIO_TASK_SIZE="1048576").settings
    assert (settings["num_threads"], settings["compat_mode"], settings["task_size"]) == (7, "ON", 1 << 20)


@needs_kvikio
def test_a_setting_that_kvikio_does_not_take_is_named():
    found = ask_kvikio(KVIKIO_NTHREADS="many")
    assert found == KvikAnswer(error="KvikIO's settings cannot be read: unknown config value KVIKIO_NTHREADS=many")


def test_a_kvikio_that_cannot_be_loaded_says_why(tmp_path):
    (tmp_path / "kvikio.py").write_text("raise RuntimeError('no libcufile here')")
    error = ask_kvikio(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}").error
    assert error == "KvikIO's settings cannot be read: no libcufile here"


def test_what_libraries_print_is_no_answer():
    code = "import os, shardkit.cli._ask_cuda as child\nchild.ask = lambda say: os.write(1, b'noise')\nchild.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"noise")
