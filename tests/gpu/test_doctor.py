"""`shardkit doctor` where there is a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from shardkit.storage.cuda import CudaDevice

pytestmark = pytest.mark.gpu


def test_the_gpu_and_its_engines_are_found(device: CudaDevice, tmp_path):
    command = [sys.executable, "-m", "shardkit", "doctor", str(tmp_path), "--require", "gpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    side = document["facts"]["gpu"]
    assert side["cuda"]["devices"][0] == device.name
    assert device.pci_address in {card["address"] for card in side["gpus"]}
    assert side["driver"]
    assert side["cuda"]["gds_mode"] in {"GDS", "cuFile compat", "POSIX"}, side["cuda"]["gds_error"]
    lines = {line["name"]: line for line in document["sections"]["gpu"]}
    assert lines["CUDA"]["status"] == "ok"
    engines = side["cuda"]["engines"]
    assert engines is not None or side["cuda"]["engines_error"]
    assert side["kvikio"]["error"] == ""
    assert side["kvikio"]["settings"]["task_size"] > 0
    assert lines["KvikIO"]["found"].startswith(f"compat_mode {side['kvikio']['settings']['compat_mode']}, ")
    assert {"/run/udev", "IOMMU", "libcufile", "GDS by nvidia-fs", "GDS by P2PDMA", "cuFile configuration"} <= set(
        lines
    )
    assert list(tmp_path.iterdir()) == []  # cuFile leaves no log here
