"""The demo as a newcomer runs it, on a small folder with an unfriendly class name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.testing.photos import photo_file

ROOT = Path(__file__).parent.parent
UNFRIENDLY = "<b>cats & dogs"


def demo(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/demo.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory, photographs):
    root = tmp_path_factory.mktemp("source")
    for number in range(12):
        folder = root / (UNFRIENDLY, "plain")[number % 2]
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(photo_file(photographs, number, classes=2).data)
    return root


def facts(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in (root, *root.rglob("*"))}


def test_the_demo_runs_twice_and_only_reads_the_source(source, tmp_path):
    before = facts(source)
    for _ in range(2):
        done = demo("--work", tmp_path / "work", "--src", source)
        assert done.returncode == 0, done.stderr
        assert "$ shardkit pack " in done.stdout
        assert "$ shardkit verify " in done.stdout
        assert len(re.findall(r"^epoch \d: 12 images in .* images/s$", done.stdout, re.M)) == 2
    assert facts(source) == before
    page = (tmp_path / "work/contact-sheet.html").read_text("utf-8")
    assert page.count("<img ") == 12
    assert page.count("<figcaption>&lt;b&gt;cats &amp; dogs</figcaption>") == 6
    assert "<b>" not in page
    assert not re.search(r'(?:src|href)="(?!data:)', page)  # nothing is fetched


def test_a_work_folder_inside_the_source_is_refused(source):
    done = demo("--work", source / "work", "--src", source)
    assert (done.returncode, (source / "work").exists()) == (2, False)
    assert "inside --src" in done.stderr
