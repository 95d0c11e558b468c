"""What cuFile's status codes mean and what to do about them; pure, so that it serves machines without a GPU, too."""

from __future__ import annotations

import errno
import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CUFILE_CODES", "cufile_code_in", "errno_in", "explain_cufile_error"]

_DRIVER = "load nvidia-fs (modprobe nvidia-fs), or allow compatibility mode in cufile.json"
_VERSIONS = "install nvidia-fs and libcufile of one CUDA release"
_PLACE = "take io='auto', or move the data to ext4 or xfs on local NVMe, or to a file system that GPUDirect serves"
_MEMORY = "take memory of cudaMalloc on the GPU that reads; shardkit's pools are"
_BUG = "report it with the cuFile log (CUFILE_LOGFILE_PATH)"
_AGAIN = "try again; if it stays, take io='auto' and report it with the cuFile log (CUFILE_LOGFILE_PATH)"
_PINNED = "raise max_device_pinned_mem_size_kb in cufile.json, or take a smaller batch_size or cache_gpu"

CUFILE_CODES: dict[int, tuple[str, str, str]] = {
    # status: name, meaning, remedy
    0: ("CU_FILE_SUCCESS", "nothing went wrong", "nothing to do"),
    5001: ("CU_FILE_DRIVER_NOT_INITIALIZED", "the nvidia-fs kernel module is not there", _DRIVER),
    5002: ("CU_FILE_DRIVER_INVALID_PROPS", "a property of the driver has no valid value", "look at cufile.json"),
    5003: ("CU_FILE_DRIVER_UNSUPPORTED_LIMIT", "a limit of the driver is out of range", "look at cufile.json"),
    5004: ("CU_FILE_DRIVER_VERSION_MISMATCH", "nvidia-fs and libcufile do not belong together", _VERSIONS),
    5005: ("CU_FILE_DRIVER_VERSION_READ_ERROR", "nvidia-fs does not tell its version", _VERSIONS),
    5006: ("CU_FILE_DRIVER_CLOSING", "cuFile is being shut down", "close loaders before the program ends"),
    5007: ("CU_FILE_PLATFORM_NOT_SUPPORTED", "this platform has no GPUDirect Storage", "take io='auto'"),
    5008: ("CU_FILE_IO_NOT_SUPPORTED", "GPUDirect Storage does not serve this file", _PLACE),
    5009: ("CU_FILE_DEVICE_NOT_SUPPORTED", "GPUDirect Storage does not serve this GPU", "take io='auto'"),
    5010: ("CU_FILE_NVFS_DRIVER_ERROR", "a request to nvidia-fs failed", "look at dmesg; " + _VERSIONS),
    5011: ("CU_FILE_CUDA_DRIVER_ERROR", "a call of the CUDA driver failed", "look at the CUDA status beside it"),
    5012: ("CU_FILE_CUDA_POINTER_INVALID", "an address is not the GPU's", _MEMORY),
    5013: ("CU_FILE_CUDA_MEMORY_TYPE_INVALID", "memory of this kind cannot be read into", _MEMORY),
    5014: ("CU_FILE_CUDA_POINTER_RANGE_ERROR", "a read would leave its memory", _BUG),
    5015: ("CU_FILE_CUDA_CONTEXT_MISMATCH", "the memory belongs to another CUDA context", _MEMORY),
    5016: ("CU_FILE_INVALID_MAPPING_SIZE", "more memory is registered than may be pinned", _PINNED),
    5017: ("CU_FILE_INVALID_MAPPING_RANGE", "a read would leave its registered memory", _BUG),
    5018: ("CU_FILE_INVALID_FILE_TYPE", "this is no regular file on a local mount", _PLACE),
    5019: ("CU_FILE_INVALID_FILE_OPEN_FLAG", "the file was opened with flags that do not go", _BUG),
    5020: ("CU_FILE_DIO_NOT_SET", "the file was not opened with O_DIRECT", _PLACE),
    5022: ("CU_FILE_INVALID_VALUE", "an argument has no valid value", _BUG),
    5023: ("CU_FILE_MEMORY_ALREADY_REGISTERED", "this memory is registered already", "nothing to do"),
    5024: ("CU_FILE_MEMORY_NOT_REGISTERED", "this memory is not registered", _BUG),
    5025: ("CU_FILE_PERMISSION_DENIED", "the driver or the file may not be used", "check /dev/nvidia-fs* and the file"),
    5026: ("CU_FILE_DRIVER_ALREADY_OPEN", "cuFile is open already", "set its parameters before the first reader"),
    5027: ("CU_FILE_HANDLE_NOT_REGISTERED", "cuFile does not know this file", _BUG),
    5028: ("CU_FILE_HANDLE_ALREADY_REGISTERED", "cuFile knows this file already", _BUG),
    5029: ("CU_FILE_DEVICE_NOT_FOUND", "cuFile does not find the GPU", "look at nvidia-smi and /dev/nvidia*"),
    5030: ("CU_FILE_INTERNAL_ERROR", "something inside of cuFile failed", _AGAIN),
    5031: ("CU_FILE_GETNEWFD_FAILED", "no further descriptor is left", "raise it, e.g. ulimit -n 65536"),
    5033: ("CU_FILE_NVFS_SETUP_ERROR", "nvidia-fs could not be started", "look at dmesg; " + _DRIVER),
    5034: ("CU_FILE_IO_DISABLED", "cufile.json forbids GPUDirect Storage for this file", "look at cufile.json"),
    5035: ("CU_FILE_BATCH_SUBMIT_FAILED", "a batch was not accepted", _AGAIN),
    5036: ("CU_FILE_GPU_MEMORY_PINNING_FAILED", "no more memory of the GPU could be pinned", _PINNED),
    5037: ("CU_FILE_BATCH_FULL", "the queue of batches is full", "raise io_batchsize in cufile.json"),
    5038: ("CU_FILE_ASYNC_NOT_SUPPORTED", "reads cannot be put into a CUDA stream here", "nothing to do"),
    5039: ("CU_FILE_INTERNAL_BATCH_SETUP_ERROR", "a batch could not be made", _AGAIN),
    5040: ("CU_FILE_INTERNAL_BATCH_SUBMIT_ERROR", "a batch could not be started", _AGAIN),
    5041: ("CU_FILE_INTERNAL_BATCH_GETSTATUS_ERROR", "a batch does not tell how it goes", _AGAIN),
    5042: ("CU_FILE_INTERNAL_BATCH_CANCEL_ERROR", "a batch could not be cancelled", _AGAIN),
    5043: ("CU_FILE_NOMEM_ERROR", "cuFile has no memory left", "free memory of the host, or read less at a time"),
    5044: ("CU_FILE_IO_ERROR", "a read failed", "look at dmesg for the storage; run shardkit verify"),
    5045: ("CU_FILE_INTERNAL_BUF_REGISTER_ERROR", "memory could not be registered", _PINNED),
    5046: ("CU_FILE_HASH_OPR_ERROR", "a table inside of cuFile failed", _AGAIN),
    5047: ("CU_FILE_INVALID_CONTEXT_ERROR", "there is no valid CUDA context", "open the GPU before the reader"),
    5048: ("CU_FILE_NVFS_INTERNAL_DRIVER_ERROR", "something inside of nvidia-fs failed", "look at dmesg"),
    5049: ("CU_FILE_BATCH_NOCOMPAT_ERROR", "batches are not offered in compatibility mode", "nothing to do"),
    5050: ("CU_FILE_IO_MAX_ERROR", "no status: the number after the last one", _BUG),
}  # fmt: skip
"""Name, meaning and remedy of each status of libcufile 1.20; 5021 and 5032 are not used."""

_NAMES = {name.removeprefix("CU_FILE_"): code for code, (name, _, _) in CUFILE_CODES.items() if code}


def explain_cufile_error(code: int) -> tuple[str, str, str]:
    """Return name, meaning and remedy of a status of cuFile's, whatever its sign.

    >>> explain_cufile_error(-5001)[0]
    'CU_FILE_DRIVER_NOT_INITIALIZED'
    """
    unknown = (f"cuFile status {abs(code)}", "a status that this version does not know", _BUG)
    return CUFILE_CODES.get(abs(code), unknown)


def cufile_code_in(text: str, words: Mapping[str, int] | None = None) -> int | None:
    """Return the status that a message names, by number, by name, or by its words; None when it names none.

    Args:
        text: what a library said.
        words: the status for each text that libcufile has for one.

    >>> cufile_code_in("INTERNAL_ERROR (5030): internal error"), cufile_code_in("CU_FILE_DIO_NOT_SET")
    (5030, 5020)
    >>> cufile_code_in("error at: x.hpp:7: batch error", {"batch error": 5035}), cufile_code_in("no idea")
    (5035, None)
    """
    for number in re.findall(r"\b50\d\d\b", text):
        if int(number) in CUFILE_CODES:
            return int(number)
    names = (name.removeprefix("CU_FILE_") for name in re.findall(r"[A-Z][A-Z_0-9]+", text))
    named = next((_NAMES[name] for name in names if name in _NAMES), None)
    if named is not None or not words:
        return named
    ends = [known for known in words if known and text.strip().endswith(known)]
    return words[max(ends, key=len)] if ends else None


def errno_in(text: str) -> int | None:
    """Return the error number whose words end a message, as those of C++'s std::system_error do; None when none does.

    >>> errno_in("Unable to open file. No such file or directory") == errno.ENOENT, errno_in("cuFile error")
    (True, None)
    """
    end = text.strip().removesuffix("]").lower()
    found = [code for code in errno.errorcode if end.endswith(os.strerror(code).lower())]
    return max(found, key=lambda code: len(os.strerror(code)), default=None)
