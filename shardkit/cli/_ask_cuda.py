"""A process that asks CUDA, the JPEG engines and cuFile what they can do, and prints it; `shardkit doctor` starts it.

It prints a `CudaAnswer` as JSON before every question, the one to come told as not answered: a library that hangs or
crashes leaves the right line behind.
"""

from __future__ import annotations

import ctypes
import json
import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from shardkit.diagnosing.facts import CudaAnswer
from shardkit.errors import ShardkitError

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardkit.storage.cuda import CudaDevice

__all__ = ["ask"]

_VIDEO = "libnvcuvid.so.1"
_SILENT = "did not answer: it hung or crashed"


def ask(say: Callable[[CudaAnswer], None]) -> None:
    """Ask everything, from what is least likely to fail to what is most; `say` gets what is known so far."""
    from shardkit.storage.cuda import open_device

    answer = CudaAnswer(error=f"the driver {_SILENT}", video_error=_refusal(_VIDEO))
    say(answer)
    try:
        device = open_device(0)
        answer = replace(answer, error="", **_devices(device.driver), engines_error=f"nvJPEG {_SILENT}")
    except ShardkitError as error:
        say(replace(answer, error=_clause(error)))
        return
    say(answer)
    answer = replace(answer, **_engines(device), gds_error=f"cuFile {_SILENT}")
    say(answer)
    say(replace(answer, **_gds_mode(device)))


def _refusal(library: str) -> str:
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    return ""


def _devices(driver: Any) -> dict[str, Any]:  # noqa: ANN401 - cuda.bindings has no types
    count = int(driver.cuDeviceGetCount()[1])
    handles = [driver.cuDeviceGet(number)[1] for number in range(count)]
    return {
        "version": int(driver.cuDriverGetVersion()[1]),
        "devices": tuple(driver.cuDeviceGetName(128, handle)[1].split(b"\0")[0].decode() for handle in handles),
        "memory": tuple(int(driver.cuDeviceTotalMem(handle)[1]) for handle in handles),
    }


def _engines(device: CudaDevice) -> dict[str, Any]:
    try:
        from shardkit.pipeline.nvjpeg_library import open_nvjpeg

        return {"engines": open_nvjpeg(device).engines(), "engines_error": ""}
    except (ShardkitError, ImportError) as error:
        return {"engines_error": _clause(error)}


def _gds_mode(device: Any) -> dict[str, Any]:  # noqa: ANN401 - a CudaDevice, which is a Device at run time
    try:
        from shardkit.storage.gds import GdsReader

        return {"gds_mode": GdsReader((), device, threads=1).mode, "gds_error": ""}
    except (ShardkitError, ImportError, RuntimeError, OSError) as error:  # KvikIO raises a RuntimeError
        return {"gds_error": _clause(error)}


def _clause(error: Exception) -> str:
    """Return what happened without the remedy, which the doctor words for this machine."""
    if isinstance(error, ShardkitError):
        return error.what if error.found is None else f"{error.what}: {error.found}"
    return str(error)


def main() -> None:
    """Print the answers, and end without the libraries' leave: some crash when they are unloaded."""
    output = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer

    def say(answer: CudaAnswer) -> None:
        os.write(output, json.dumps(asdict(answer)).encode() + b"\n")

    ask(say)
    os._exit(0)


if __name__ == "__main__":
    main()
