"""Tests that need a GPU: `pytest -m gpu tests/gpu`. Elsewhere they are skipped, or fail with SHARDKIT_REQUIRE_GPU=1."""

from __future__ import annotations

import os

import pytest

from shardkit.errors import CapabilityError
from shardkit.pipeline.kernels import CudaKernels
from shardkit.storage.cuda import CudaDevice, open_device


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
