"""`shardkit bench`: what it prints, what it writes, and what is left of it after Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardkit.cli.main import main
from shardkit.errors import CapabilityError
from shardkit.testing.images import coloured, write_pictures

ROOT = Path(__file__).parents[2]
SHORT = ("--device", "cpu", "--batch-size", 8, "--size", 16, "--batches", 3, "--rounds", 1)
READS = ("--what", "read", "--io", "buffered")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("bench") / "ds", coloured(36))


@pytest.fixture
def run(capsys):
    """Return a function that runs the command and returns its exit code, standard output and standard error."""

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(["bench", *map(str, arguments)])
        return (caught.value.code, *capsys.readouterr())

    return call


def test_rows_are_measured_and_written(run, dataset, tmp_path):
    file = tmp_path / "bench.json"
    what = ("--what", "read", "--what", "pipeline", "--what", "train", "--decoder", "cpu", "--decoder", "nvjpeg")
    code, out, err = run(dataset, *SHORT, *what, "--io", "buffered", "--shuffle", "none", "--json", file)
    assert (code, err) == (0, "")
    assert out.startswith("36 images of ")
    assert re.search(r"^buffered, none +[\d,]+ ", out, re.M)
    assert re.search(r"^buffered, cpu, none +[\d,]+ ", out, re.M)
    assert "  pipeline buffered, nvjpeg, none: it decodes on a GPU: --device cuda\n" in out
    document = json.loads(file.read_text())
    assert document["versions"].keys() >= {"shardkit", "python", "numpy", "torch"}
    assert document["machine"].keys() >= {"processor", "processors", "linux", "file_system"}
    assert document["settings"]["batches"] == 3
    measured = {row["case"]["name"]: row for row in document["rows"] if row["runs"]}
    assert measured.keys() == {"buffered, none", "buffered, cpu, none"}
    assert measured["buffered, cpu, none"]["runs"][0]["images"] == 24
    assert measured["buffered, none"]["median"]["images_s"] > 0


def test_json_to_standard_output_is_all_there_is_on_it(run, dataset):
    code, out, _ = run(dataset, *SHORT, *READS, "--shuffle", "none", "--cold", "--json", "-")
    assert code == 0
    document = json.loads(out)
    assert document["settings"]["cold"] is True
    assert [row["case"]["io"] for row in document["rows"]] == ["buffered"]


def test_what_auto_takes_is_told_with_the_reason(run, dataset):
    code, out, _ = run(dataset, *SHORT, "--what", "read", "--io", "auto", "--shuffle", "global")
    assert code == 0
    assert re.search(r"^what auto takes:\n  auto, global: io buffered, because .+", out, re.M)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nowhere", *READS), 2, "nowhere"),
        (("{}", "--device", "tpu"), 2, "no such device"),
        (("{}", "--io", "carrier-pigeon"), 2, "carrier-pigeon"),
        (("{}", "--what", "nothing"), 2, "nothing"),
        (("{}", "--rounds", "0"), 2, "--rounds"),
        (("{}", "--device", "cuda:x"), 2, "no such device"),
        (("{}", "--device", "cuda:-1"), 2, "no such device"),
        (("{}", "--seconds", "nan"), 2, "has an end"),
        (("{}", "--timeout", "inf"), 2, "has an end"),
        (("{}", "--json", "{}"), 2, "no file can be written there"),
        (("{}", "--json", "{}/no/such/folder.json"), 2, "no file can be written there"),
        ((), 2, "DATASET"),
    ],
)
def test_what_cannot_be_asked_ends_with_its_code(run, dataset, arguments, code, message):
    found, out, err = run(*(argument.format(dataset) for argument in arguments))
    assert (found, out) == (code, "")
    assert message in err


@pytest.fixture
def no_gpu():
    """Return what a loader says of a GPU that no machine has."""
    from shardkit.storage.cuda import open_device

    with pytest.raises(CapabilityError) as refused:
        open_device(99)
    return str(refused.value)


def test_without_the_gpu_that_is_demanded_nothing_is_measured(run, dataset, tmp_path, no_gpu):
    what, file = ("--what", "engines", "--what", "pipeline"), tmp_path / "bench.json"
    found = run(dataset, *SHORT[2:], "--device", "cuda:99", *what, "--json", file)
    assert found == (7, "", f"shardkit: error: {no_gpu}\n")
    assert not file.exists()


def test_rows_that_need_no_gpu_are_measured_and_the_others_have_the_reason(run, dataset, no_gpu):
    what = ("--what", "plain", "--what", "pipeline", "--io", "gds")
    code, out, _ = run(dataset, *SHORT[2:], "--device", "cuda:99", *what)
    assert code == 0
    assert re.search(r"^preadv, buffered, 4 x 1024 KiB +[\d,]+ ", out, re.M)
    reasons = re.findall(r"^  pipeline [^:]*: (.+)$", out, re.M)
    assert reasons == [no_gpu] * 6


def test_a_plot_that_cannot_be_drawn_is_refused_before_anything_is_measured(run, dataset, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = run(dataset, *SHORT, "--plot", tmp_path / "bench.png")
    assert (code, out) == (7, "")
    assert "pip install 'shardkit[plots]'" in err


def test_a_picture_of_an_unknown_kind_is_refused_before_anything_is_measured(run, dataset, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, err = run(dataset, *SHORT, "--plot", tmp_path / "bench.carrier-pigeon")
    assert (code, out) == (7, "")
    assert "does not know such a picture" in err


def test_a_plot_is_written(run, dataset, tmp_path):
    pytest.importorskip("matplotlib")
    assert run(dataset, *SHORT, *READS, "--shuffle", "none", "--plot", tmp_path / "bench.png")[0] == 0
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_takes_too_long_is_told_and_no_error(run, dataset):
    code, out, _ = run(dataset, *SHORT, "--batches", 10**9, *READS, "--shuffle", "none", "--timeout", 3)
    assert code == 0
    assert "failed:\n  read buffered, none: no result after 3 s" in out


def test_ctrl_c_shows_what_was_measured_so_far(dataset, tmp_path):
    file = tmp_path / "bench.json"
    command = [sys.executable, "-m", "shardkit", "bench", dataset, *SHORT[:-2], "--rounds", 500, *READS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*map(str, command), "--json", str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment,
    ) as process:  # fmt: skip
        time.sleep(8)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "shardkit: interrupted\n"
    assert re.search(r"^buffered, \w+ +[\d,]+ ", out, re.M)
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 3
    assert any(row["runs"] for row in rows)


def test_the_file_system_is_that_of_the_shards_behind_links(run, dataset, tmp_path):
    links = tmp_path / "links"
    links.mkdir()
    for file in dataset.iterdir():
        if file.suffix == ".tar":
            (links / file.name).symlink_to(file)
        else:
            (links / file.name).write_bytes(file.read_bytes())
    first = min(dataset.glob("*.tar"))
    code, out, _ = run(links, *READS, *SHORT)
    assert code == 0
    assert f" (asked of {links / first.name}, which lies at {first})" in out.splitlines()[0]
    code, out, _ = run(links, *READS, *SHORT, "--json", "-")
    machine = json.loads(out)["machine"]
    assert (machine["asked"], machine["lies_at"]) == (str(links / first.name), str(first))
    assert "which lies at" not in run(dataset, *READS, *SHORT)[1]
