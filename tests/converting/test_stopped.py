"""A conversion that was stopped or killed leaves whole shards, and goes on to the same bytes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

import shardkit
from shardkit.errors import ConfigError, LockedError
from shardkit.storage.lock import FolderLock
from shardkit.testing.packs import StopAfter, contents

from .conftest import shards_of


@pytest.mark.parametrize("reports", range(7))
def test_a_stopped_conversion_goes_on_to_the_same_bytes(packed, tmp_path, reports):
    given = {"name": "t", "shards": 6, "shuffle": True, "jobs": 1}
    shardkit.convert(packed, tmp_path / "whole", **given)
    if reports < 6:
        with pytest.raises(StopAfter.Stop):
            shardkit.convert(packed, tmp_path / "out", progress=StopAfter(reports), **given)
        assert not (tmp_path / "out" / "manifest.json").exists()
        with pytest.raises(ConfigError, match="--resume"):
            shardkit.convert(packed, tmp_path / "out", **given)
    result = shardkit.convert(packed, tmp_path / "out", resume=True, **given)
    assert result.parts[None].kept == (reports if reports < 6 else 0)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert shardkit.convert(packed, tmp_path / "out", resume=True, **given).parts[None].kept == 6


def test_only_the_same_conversion_goes_on(packed, listed, tmp_path):
    given = {"name": "t", "shards": 6, "jobs": 1}
    with pytest.raises(StopAfter.Stop):
        shardkit.convert(packed, tmp_path / "out", progress=StopAfter(2), **given)
    with pytest.raises(ConfigError, match=r"where was not given and is .*width > 0"):
        shardkit.convert(packed, tmp_path / "out", resume=True, where="width > 0", **given)
    with pytest.raises(ConfigError, match="another list of sources"):
        shardkit.convert(listed, tmp_path / "out", resume=True, **given)
    shutil.copytree(packed, tmp_path / "copy")
    os.utime(tmp_path / "copy" / "t-000001.tar", ns=(1, 1))
    with pytest.raises(ConfigError, match="sources were modified in the meantime"):
        shardkit.convert(tmp_path / "copy", tmp_path / "out", resume=True, **given)
    shardkit.convert(packed, tmp_path / "out", resume=True, **given)


def test_a_split_that_stopped_between_its_parts_goes_on(packed, tmp_path):
    given = {"name": "t", "shards": 2, "jobs": 1, "split": {"one": "0.5", "two": "0.5"}}
    shardkit.convert(packed, tmp_path / "whole", **given)
    for reports in range(4):
        with pytest.raises(StopAfter.Stop):
            shardkit.convert(packed, tmp_path / "out", progress=StopAfter(reports), overwrite=True, **given)
        finished = (tmp_path / "out" / "one" / "manifest.json").exists()
        assert finished == (reports >= 2)
        assert not finished or not (tmp_path / "out" / "one" / ".shardkit").exists()
        assert not (tmp_path / "out" / "two" / "manifest.json").exists()
        shardkit.convert(packed, tmp_path / "out", resume=True, **given)
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_killed_conversion_leaves_whole_shards_and_goes_on(tree, packed, tmp_path):
    options = ["--name", "t", "--shards", "30", "--jobs", "2"]
    shardkit.convert(packed, tmp_path / "whole", name="t", shards=30, jobs=1)
    expected = shards_of(tmp_path / "whole")
    out = tmp_path / "out"
    for wanted in (1, 6, 14):
        command = [sys.executable, "-m", "shardkit", "convert", str(packed), str(out), *options, "--resume"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            until = time.monotonic() + 20
            while process.poll() is None and len(list(out.glob("*.tar"))) < wanted and time.monotonic() < until:
                time.sleep(0.001)
            process.kill()
        assert process.returncode in (-signal.SIGKILL, 0)
        for name, data in shards_of(out).items():
            assert name.startswith(".shardkit") or data == expected[name]
    shardkit.convert(packed, out, name="t", shards=30, jobs=2, resume=True)
    assert shards_of(out) == expected


def test_one_run_at_a_time(packed, tmp_path):
    (tmp_path / "out" / ".shardkit").mkdir(parents=True)
    with FolderLock(os.fsencode(tmp_path / "out" / ".shardkit" / "lock")), pytest.raises(LockedError):
        shardkit.convert(packed, tmp_path / "out", jobs=1)
