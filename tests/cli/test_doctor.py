"""`shardkit doctor`: exit codes, texts and JSON, as a shell sees them."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardkit.cli.doctor import doctor
from shardkit.cli.main import main

ROOT = Path(__file__).parents[2]
NO_GPU = not Path("/dev/nvidiactl").exists() and not Path("/proc/driver/nvidia").exists()
COMMAND = [sys.executable, "-m", "shardkit", "doctor"]


@pytest.fixture
def run(capsys):
    """Return a function that runs the command and returns its exit code, standard output and standard error."""

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(["doctor", *map(str, arguments)])
        return (caught.value.code, *capsys.readouterr())

    return call


def test_a_report_is_text_in_four_parts(run, tmp_path):
    code, out, err = run(tmp_path)
    assert (code, err) == (0, "")
    titles = [line for line in out.splitlines()[:-1] if not line.startswith(" ")]
    assert titles == ["host", f"storage of {tmp_path}", "gpu", "software"]
    assert "\x1b" not in out


def test_the_last_line_counts_the_lines(run, tmp_path):
    out = run(tmp_path)[1].splitlines()
    words = [line.split()[0] for line in out if line.startswith("  ") and not line.startswith("   ")]
    counts = {word: int(number) for number, word in (part.split() for part in out[-1].split(", "))}
    assert counts == {status: words.count(status) for status in ("ok", "warn", "fail", "info")}


def test_json_is_one_document_with_the_facts(run, tmp_path):
    code, out, err = run(tmp_path, "--json")
    document = json.loads(out)
    assert (code, err, document["schema"], document["exit_code"]) == (0, "", 1, 0)
    assert document["path"] == str(tmp_path)
    assert document["facts"]["software"]["python"] == sys.version.split()[0]
    shown = run(tmp_path)[1]
    for lines in document["sections"].values():
        assert all(f"  {line['name']}  " in shown for line in lines)


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
@pytest.mark.parametrize("demand", ["gpu", "gds"])
def test_what_is_required_and_not_there_ends_with_7(run, tmp_path, demand):
    code, out, err = run(tmp_path, "--require", demand, "--json")
    (required,) = json.loads(out)["required"]
    assert (code, required["met"], json.loads(out)["exit_code"]) == (7, False, 7)
    assert err.startswith(f"shardkit: error: {demand} is required and cannot be had: there is no NVIDIA GPU; ")
    assert len(err.splitlines()) == 1


@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
def test_what_needs_no_gpu_is_told_without_one(tmp_path):
    config = tmp_path / "cufile.json"
    config.write_text('{"properties": {"allow_compat_mode": false}} // mine')
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUFILE_ENV_PATH_JSON": str(config), "KVIKIO_NTHREADS": "3"}
    command = [*COMMAND, str(tmp_path), "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = {line["name"]: line for line in json.loads(done.stdout)["sections"]["gpu"]}
    assert {"/run/udev", "IOMMU", "GPUDirect Storage", "libcufile"} <= set(lines)
    assert lines["cuFile configuration"]["found"].startswith(f"{config}; compatibility mode allowed: no")
    assert lines["KvikIO"]["found"].endswith("; the environment says KVIKIO_NTHREADS=3")
    assert {line["status"] for line in lines.values()} <= {"ok", "info"}


def test_what_is_required_and_there_ends_with_0(run):
    path = next(folder for folder in (Path.home(), ROOT, Path("/var/tmp")) if _opens_direct(folder))
    code, out, err = run(path, "--require", "direct")
    assert (code, err) == (0, "")
    assert "required\n  ok    direct" in out


def _opens_direct(folder):
    try:
        os.close(os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT, 0o600))
    except OSError:
        return False
    return True


def test_memory_has_no_direct_reads(run):
    if not os.path.ismount("/dev/shm"):
        pytest.skip("/dev/shm is no file system of its own")
    code, out, _ = run("/dev/shm", "--json")
    document = json.loads(out)
    line = next(line for line in document["sections"]["storage"] if line["name"] == "direct reads")
    assert code == 0
    assert line["status"] in {"info", "ok"}  # tmpfs takes O_DIRECT since Linux 6.6


@pytest.mark.parametrize("arguments", [("nowhere",), ("--require", "speed", "."), ("a", "b")])
def test_what_cannot_be_asked_ends_with_2(run, arguments):
    assert run(*arguments)[0] == 2


def test_names_are_escaped(run, tmp_path):
    odd = tmp_path / "a\x1b[31m\u202e"
    odd.mkdir()
    _, out, _ = run(odd)
    assert "a\\x1b[31m\\u202e" in out
    assert "\x1b" not in out
    assert json.loads(run(odd, "--json")[1])["path"] == str(odd)


@pytest.mark.parametrize("text", ["5033", "-5033", "CU_FILE_NVFS_SETUP_ERROR", "cuFile error: 5033 in a message"])
def test_an_error_of_cufile_is_explained(run, text):
    code, out, err = run("--explain", text)
    assert (code, err) == (0, "")
    assert out.startswith("5033 CU_FILE_NVFS_SETUP_ERROR\n")
    document = json.loads(run("--explain", text, "--json")[1])
    assert (document["code"], set(document)) == (5033, {"code", "name", "meaning", "remedy"})


def test_an_unknown_error_of_cufile_is_said_to_be_unknown(run):
    assert run("--explain", "5999")[0] == 0
    code, _, err = run("--explain", "what\x1b")
    assert code == 2
    assert "found what\\x1b" in err


def test_colours_are_for_terminals_only(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "70"}
    environment.pop("NO_COLOR", None)
    assert b"\x1b[32mok" in on_a_terminal(environment, tmp_path)
    assert b"\x1b" not in on_a_terminal({**environment, "NO_COLOR": "1"}, tmp_path)
    assert b"\x1b" not in on_a_terminal({**environment, "TERM": "dumb"}, tmp_path)


def on_a_terminal(environment, path):
    reader, terminal = pty.openpty()
    child = subprocess.Popen([*COMMAND, str(path)], stdout=terminal, env=environment)
    os.close(terminal)
    shown = b""
    try:
        while chunk := os.read(reader, 4096):
            shown += chunk
    except OSError:  # how Linux says that the other side has gone
        pass
    os.close(reader)
    assert child.wait(60) == 0
    assert max(map(len, shown.replace(b"\r", b"").splitlines())) < 140  # wrapped, a long word and colours aside
    return shown


@pytest.mark.skipif(not NO_GPU, reason="a driver may take seconds to start")
def test_it_ends_within_two_seconds(tmp_path):
    def seconds():
        started = time.monotonic()
        subprocess.run([*COMMAND, str(tmp_path)], check=True, capture_output=True)
        return time.monotonic() - started

    assert min(seconds() for _ in range(3)) < 2


def test_any_user_may_ask(unprivileged, open_folder, run):
    with unprivileged():
        assert run(open_folder)[0] == 0


def test_the_help_names_every_exit_code_of_the_command():
    text = CliRunner().invoke(doctor, ["--help"]).output
    assert "Exit code 0" in text
    assert "7: " in text


@pytest.mark.parametrize("text", ["--5", "9" * 5000, "-", ""])
def test_what_is_no_number_is_no_error_of_cufile(run, text):
    code, _, err = run(f"--explain={text}")
    assert code == 2
    assert "no error of cuFile's" in err


def test_errors_that_nobody_reads_change_no_code():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*COMMAND, "--require", "uring", "/proc/self"], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=writing, check=False
    )  # fmt: skip
    os.close(writing)
    assert done.returncode == 7  # a missing demand may not look as if it were met
