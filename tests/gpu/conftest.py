"""Tests that need a GPU: `pytest -m gpu tests/gpu`. Elsewhere they are skipped, or fail with SHARDKIT_REQUIRE_GPU=1."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from shardkit.errors import CapabilityError
from shardkit.pipeline.kernels import CudaKernels
from shardkit.storage.cuda import CudaDevice, open_device

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session", autouse=True)
def measurements(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where decoders that were compared are remembered: not in the home of who runs the tests."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder / "shardkit" / "decoders.json"


@pytest.fixture(scope="session")
def device() -> CudaDevice:
    try:
        return open_device(0)
    except CapabilityError as error:
        if os.environ.get("SHARDKIT_REQUIRE_GPU") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def kernels(device: CudaDevice) -> CudaKernels:
    return CudaKernels(device)
