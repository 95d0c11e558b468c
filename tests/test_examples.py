"""The examples, each run as a reader of the pages runs it: in a process of its own, on a small packed dataset."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.testing.images import COLOURS, coloured, write_pictures

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
COUNT, BATCH, EPOCHS = 84, 8, 3
STEPS = COUNT // BATCH
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Pictures of one colour each: a class a colour, which the smallest network learns in no time."""
    return write_pictures(tmp_path_factory.mktemp("examples") / "ds", coloured(COUNT))


def command(name, dataset, *options, batch_size=BATCH, launcher=()):
    arguments = (dataset, "--batch-size", batch_size, "--size", 32, "--epochs", EPOCHS, *options)
    return [sys.executable, *map(str, (*launcher, EXAMPLES / name, *arguments))]


def run(*arguments, **options):
    """Run an example to its end and return what it printed."""
    done = subprocess.run(
        command(*arguments, **options), env=ENVIRONMENT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run_here_and_named_on_the_page():
    here, page = Path(__file__).read_text("utf-8"), (ROOT / "docs" / "loader.md").read_text("utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in here
        assert f"../examples/{path.name}" in page


def test_plain_training_learns(dataset):
    printed = run("train.py", dataset)
    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss (\S+), ", printed, re.M)]
    assert len(losses) == EPOCHS
    assert losses[-1] < losses[0] / 2
    assert float(printed.split()[-1]) > 2 / len(COLOURS)  # accuracy


def test_two_ranks_learn_what_one_process_learns(dataset):
    losses = []
    for ranks in (1, 2):
        printed = run("train_ddp.py", dataset, batch_size=BATCH // ranks, launcher=(*LAUNCHER, ranks))
        said = re.findall(r"^epoch (\d): (\d+) samples in (\d+) steps of (\d) ranks, loss (\S+)$", printed, re.M)
        assert [entry[:4] for entry in said] == [
            (str(epoch), str(STEPS * BATCH), str(STEPS), str(ranks)) for epoch in range(EPOCHS)
        ]
        losses.append([float(entry[4]) for entry in said])
    assert losses[0] == pytest.approx(losses[1], abs=0.01)  # the same global batches in the same order


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_large_training_run_learns_and_goes_on_inside_an_epoch(dataset, tmp_path, ranks):
    options = ("train_resnet.py", dataset, "--model", "tiny", "--lr", 0.02 / ranks)
    parts = {"batch_size": BATCH // ranks, "launcher": (*LAUNCHER, ranks) if ranks > 1 else ()}
    checkpoint = ("--checkpoint", tmp_path / "last.pt", "--every", 2 * STEPS + 4)
    first = epochs_told(run(*options, *checkpoint, **parts))
    assert [told[:3] for told in first] == [(epoch, STEPS, ranks) for epoch in range(EPOCHS)]
    assert first[-1][3] < first[0][3]
    again = epochs_told(run(*options, *checkpoint, **parts))
    assert [told[:3] for told in again] == [(2, STEPS - 4, ranks)]  # what the checkpoint had not seen


def epochs_told(printed):
    found = re.findall(r"^epoch (\d): (\d+) steps of (\d) ranks, loss (\S+), \d+ images/s$", printed, re.M)
    return [(int(epoch), int(steps), int(ranks), float(loss)) for epoch, steps, ranks, loss in found]


def test_lightning_goes_on_inside_an_epoch(dataset, tmp_path):
    pytest.importorskip("pytorch_lightning")
    every = 2 * STEPS + 4
    first = run("train_lightning.py", dataset, "--folder", tmp_path, "--every", every)
    whole = STEPS * BATCH
    assert samples(first) == [(0, whole), (1, whole), (2, whole)]
    again = run("train_lightning.py", dataset, "--folder", tmp_path, "--resume", tmp_path / "last.ckpt")
    assert samples(again) == [(2, (STEPS - 4) * BATCH)]


def samples(printed):
    return [(int(epoch), int(n)) for epoch, n in re.findall(r"epoch (\d): (\d+) samples on rank 0", printed)]


def test_a_killed_run_goes_on_as_if_nothing_had_happened(dataset, tmp_path):
    undisturbed = run("resume.py", dataset, "--checkpoint", tmp_path / "undisturbed.pt", "--every", 7).splitlines()
    assert len(undisturbed) == EPOCHS * STEPS

    seen = {}
    for kill_at in (STEPS // 2, 2 * STEPS + 5, None):
        for line in killed_at(kill_at, command("resume.py", dataset, "--checkpoint", tmp_path / "c.pt", "--every", 3)):
            step = int(line.split()[3])
            assert seen.setdefault(step, line) == line  # what was done since the checkpoint is done again alike
    assert [seen[step] for step in sorted(seen)] == undisturbed  # keys, their order, and the loss to the last digit


def killed_at(step, arguments):
    """Run until a step is printed, kill, and return the lines; None runs to the end."""
    lines = []
    with subprocess.Popen(arguments, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if step is not None and int(line.split()[3]) >= step:
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == (0 if step is None else -signal.SIGKILL)
    assert step is None or int(lines[0].split()[3]) < step
    return lines
