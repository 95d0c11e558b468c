"""The table and the picture of a comparison."""

from __future__ import annotations

import sys

import pytest

from shardkit.benching.case import Case
from shardkit.benching.plot import draw, require_matplotlib
from shardkit.benching.table import one_run, table
from shardkit.benching.turns import Row
from shardkit.errors import CapabilityError, ShardkitError


def run(images_s, **others):
    return {"images_s": images_s, "gb_s": images_s * 1e-4, "cpu_us": 80.0, "others": 0.0, **others}


def rows():
    auto = run(2000.0, io="uring", decoder="dali", first_s=1.5)
    return [
        Row(case=Case(kind="rival", threads=8), runs=[run(1000.0), run(1200.0), run(1100.0)]),
        Row(case=Case(kind="pipeline", io="auto", decoder="auto", shuffle="none"), runs=[auto]),
        Row(case=Case(kind="read", io="uring", shuffle="none"), refused="io_uring: forbidden by seccomp"),
        Row(case=Case(kind="decode", decoder="cpu"), failed="no result after 90 s"),
        Row(case=Case(kind="train", decoder="dali", io="auto"), runs=[run(500.0, gpu_idle=0.02, host_wait=0.125)]),
    ]


def test_both_sides_stand_together_the_fastest_first():
    lines = table(rows())
    at = next(number for number, line in enumerate(lines) if line.startswith("finished batches"))
    assert lines[at + 1].split("  ")[0] == "auto, auto, none"
    assert lines[at + 2].split("  ")[0] == "DALI readers.webdataset, 8 threads"
    assert "2,000" in lines[at + 1]
    assert "1.82" in lines[at + 1]  # 2000 over the median of the rival
    assert "auto: uring, dali" in lines[at + 1]
    assert "1,000-1,200" in lines[at + 2]


def test_what_is_missing_has_its_reason():
    lines = table(rows())
    assert lines[lines.index("cannot be had:") + 1] == "  read uring, none: io_uring: forbidden by seccomp"
    assert lines[lines.index("failed:") + 1] == "  decode cpu: no result after 90 s"


def test_training_tells_who_waited():
    (line,) = (line for line in table(rows()) if "GPU idle" in line)
    assert "GPU idle 2.0%; host waits 12.5%" in line


def test_columns_are_aligned_and_empty_ones_left_out():
    lines = table(rows())
    head = next(line for line in lines if line.startswith("training"))
    assert "first s" not in head
    block = lines[lines.index(head) : lines.index(head) + 2]
    assert len({line.index(text) + len(text) for line, text in zip(block, ("images/s", "500"), strict=True)}) == 1


def test_busy_machines_are_told_of():
    (_, line) = table([Row(case=Case(kind="decode", decoder="cpu"), runs=[run(5.0, others=0.4)])])
    assert line.endswith("others took 40%")


def test_a_line_about_one_run():
    assert [one_run(row) for row in rows()][:3] == [
        "rival DALI readers.webdataset, 8 threads: 1,100 images/s",
        "pipeline auto, auto, none: 2,000 images/s",
        "read uring, none: io_uring: forbidden by seccomp",
    ]


def test_nothing_measured_is_an_empty_table():
    assert table([]) == []


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from PIL import Image

    draw(rows(), tmp_path / "bench.png", "a title")
    with Image.open(tmp_path / "bench.png") as picture:
        assert picture.width > 1000
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 3
    with pytest.raises(CapabilityError, match=r"FILE\.png"):
        draw(rows(), tmp_path / "bench.xyz", "")
    with pytest.raises(ShardkitError, match="cannot write a plot"):
        draw(rows(), tmp_path / "gone" / "bench.png", "")


def test_without_matplotlib_the_remedy_is_a_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(CapabilityError, match=r"pip install 'shardkit\[plots\]'"):
        require_matplotlib()
