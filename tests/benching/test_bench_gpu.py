"""The script for a GPU machine, as far as a CPU carries it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_script_packs_measures_and_writes_every_run(tmp_path):
    options = ("--dry-run", "--work", tmp_path / "work", "--out", tmp_path / "out.jsonl")
    parts = ("--stage", "cold", "decode", "--only", "plain", "engines", "read auto, none")
    done = subprocess.run(
        [sys.executable, *map(str, (ROOT / "scripts" / "bench_gpu.py", *options, *parts))],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert lines[0]["machine"]["processors"] >= 1
    kinds = [(line["stage"], line["case"]["kind"]) for line in lines[1:]]
    assert sorted(set(kinds)) == [("cold", "plain"), ("cold", "read"), ("decode", "engines")]
    assert all("images_s" in line for line in lines[1:] if line["stage"] == "cold" and "failed" not in line)
    assert not [line for line in lines if "failed" in line]
    assert lines[-1]["refused"].startswith("the engines are a GPU's")
    assert "plain reads of all shards" in done.stdout
    assert {path.name for path in (tmp_path / "work").iterdir()} >= {"tree", "full", "repeated"}
