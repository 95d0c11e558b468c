"""A GPU through CUDA's driver API; the only importer of `cuda.bindings.driver`.

The driver's own API and not the runtime's: it needs no CUDA library beside the driver, works in the primary context
that PyTorch, DALI and nvJPEG share, and says plainly when there is no driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from shardkit.errors import CapabilityError, DeviceError
from shardkit.storage.reader import MemorySpace, address_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from shardkit.storage.device import Event

__all__ = ["CudaDevice", "CudaEvent", "CudaStream", "open_device", "take"]

_Foreign: TypeAlias = Any  # cuda.bindings has no types
_ALIGN = 4096
_CAPTURING = range(900, 909)
"""CUDA_ERROR_STREAM_CAPTURE_*: some thread records a graph, and nobody may ask meanwhile. The device is well."""
_REMEDY = "look at nvidia-smi and at `shardkit doctor`, or take device='cpu'"


def open_device(number: int = 0) -> CudaDevice:
    """Return a GPU of this process, its primary context made if nobody has yet.

    Args:
        number: as CUDA counts, after CUDA_VISIBLE_DEVICES.

    Raises:
        CapabilityError: there is no driver, no such GPU, or the package cuda-bindings is not installed.
    """
    try:
        library = ctypes.PyDLL("libcuda.so.1")
    except OSError as error:
        raise CapabilityError("there is no NVIDIA driver here", found=str(error), remedy=_REMEDY) from error
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CapabilityError(
            "a GPU is driven through the package cuda-bindings, which is not installed", found=str(error),
            remedy="pip install 'shardkit[gpu]', or take device='cpu'",
        ) from error  # fmt: skip
    try:
        take(driver, "cuInit", driver.cuInit(0))
        count = take(driver, "cuDeviceGetCount", driver.cuDeviceGetCount())
    except DeviceError as error:
        raise CapabilityError("CUDA cannot be used here", found=error.found, remedy=_REMEDY) from error
    if not 0 <= number < count:
        raise CapabilityError("there is no such GPU", expected=f"0..{count - 1}", found=number, remedy=_REMEDY)
    return CudaDevice(driver, library, number)


class _Held:
    """The primary context of a GPU, as this process has it: what a call needs that comes when its object is gone."""

    def __init__(self, driver: ModuleType, library: ctypes.PyDLL, place: int) -> None:
        self._driver, self._library, self._place = driver, library, place
        self._process = os.getpid()

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        if self._process != os.getpid():
            raise CapabilityError(
                "a GPU does not survive a fork", found=f"opened by process {self._process}, used in {os.getpid()}",
                remedy="open it in the child, and start children by the spawn method",
            )  # fmt: skip
        library, before = self._library, ctypes.c_void_p()
        self._require("cuCtxGetCurrent", library.cuCtxGetCurrent(ctypes.byref(before)))
        if before.value == self._place:
            yield
            return
        self._require("cuCtxPushCurrent", library.cuCtxPushCurrent_v2(ctypes.c_void_p(self._place)))
        try:
            yield
        finally:
            library.cuCtxPopCurrent_v2(ctypes.byref(before))

    def _require(self, call: str, code: int) -> None:
        if code:
            take(self._driver, call, (self._driver.CUresult(code),))

    def end(self, call: Callable[..., object], arguments: tuple[object, ...]) -> None:
        if self._process == os.getpid():
            with contextlib.suppress(DeviceError), self.current():
                call(*arguments)


class CudaDevice:
    """A GPU; see `shardkit.storage.device.Device`."""

    def __init__(self, driver: ModuleType, library: ctypes.PyDLL, number: int) -> None:
        """Take hold of the primary context of GPU `number`, which there is; made by `open_device`.

        Args:
            driver: the module `cuda.bindings.driver`.
            library: the driver's own, called with the interpreter's lock kept: for what is over at once. To get the
                lock back takes as long as some other thread works.
            number: of the GPU.
        """
        self.driver, self.library = driver, library
        self.number = number
        self.space: MemorySpace = f"cuda:{number}"
        self._device = take(driver, "cuDeviceGet", driver.cuDeviceGet(number))
        try:
            context = take(driver, "cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(self._device))
        except DeviceError as error:
            raise CapabilityError(f"GPU {number} cannot be used", found=error.found, remedy=_REMEDY) from error
        self._held = _Held(driver, library, int(context))
        # Nobody puts work on it: what it says is of the device. A stream of its own would keep the device.
        self._idle = self._new_stream(urgent=False)
        self.at_end_of(self, driver.cuStreamDestroy, self._idle)

    @property
    def name(self) -> str:
        """As the driver calls it."""
        raw: bytes = take(self.driver, "cuDeviceGetName", self.driver.cuDeviceGetName(128, self._device))
        return raw.split(b"\0")[0].decode()

    @property
    def cuda_version(self) -> str:
        """The newest CUDA that the driver knows: 13.0."""
        number = int(take(self.driver, "cuDriverGetVersion", self.driver.cuDriverGetVersion()))
        return f"{number // 1000}.{number % 1000 // 10}"

    @property
    def pci_address(self) -> str:
        """As sysfs has it: 0000:17:00.0."""
        raw: bytes = take(self.driver, "cuDeviceGetPCIBusId", self.driver.cuDeviceGetPCIBusId(32, self._device))
        return raw.split(b"\0")[0].decode().lower()

    @property
    def numa_node(self) -> int | None:
        """See `Device`."""
        try:
            node = int(Path(f"/sys/bus/pci/devices/{self.pci_address}/numa_node").read_text("ascii"))
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    def attribute(self, name: str) -> int:
        """Return one of the driver's numbers about the GPU, named as in CU_DEVICE_ATTRIBUTE_*."""
        which = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(take(self.driver, "cuDeviceGetAttribute", self.driver.cuDeviceGetAttribute(which, self._device)))

    @property
    def free_bytes(self) -> int:
        """Bytes of device memory that nobody has."""
        with self.current():
            return int(take(self.driver, "cuMemGetInfo", self.driver.cuMemGetInfo())[0])

    @property
    def lost(self) -> bool:
        """See `Device`."""
        try:
            with self.current():
                code = self.library.cuStreamQuery(ctypes.c_void_p(int(self._idle)))
        except (CapabilityError, DeviceError):  # a forked child; or the context is gone
            return True
        return bool(code) and code not in _CAPTURING

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Have the device current in this thread for a block; see `Device`.

        Raises:
            CapabilityError: this process is a fork of the one that opened it.
        """
        return self._held.current()

    def memory(self, nbytes: int) -> memoryview:
        """Return device memory; see `Device`."""
        with self.current():
            size = max(nbytes, 1) + _ALIGN  # the driver promises 256
            try:
                pointer = int(take(self.driver, "cuMemAlloc", self.driver.cuMemAlloc(size)))
            except DeviceError as error:
                raise self.full(nbytes, error.found) from error
            return self._owned(pointer, nbytes)

    def managed(self, nbytes: int) -> memoryview:
        """Return managed memory; see `Device`."""
        with self.current():
            driver, size = self.driver, max(nbytes, 1) + _ALIGN
            attach = driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value
            try:
                pointer = int(take(driver, "cuMemAllocManaged", driver.cuMemAllocManaged(size, attach)))
            except DeviceError as error:
                raise self.full(nbytes, error.found) from error
            memory = self._owned(pointer, nbytes)
            try:
                self._advise(pointer, size)
            except DeviceError as error:
                raise CapabilityError(
                    f"GPU {self.number} cannot touch managed memory while the host does", found=error.found,
                    remedy="take staging='pinned'",
                ) from error  # fmt: skip
            return memory

    def _advise(self, pointer: int, nbytes: int) -> None:
        """Say of managed memory that it belongs on the device, and that both sides may keep a copy to read."""
        driver = self.driver
        advise = _of_location(driver, "cuMemAdvise")
        for name in ("SET_PREFERRED_LOCATION", "SET_READ_MOSTLY"):
            advice = getattr(driver.CUmem_advise, f"CU_MEM_ADVISE_{name}")
            take(driver, "cuMemAdvise", advise(pointer, nbytes, advice, self.location()))

    def location(self) -> _Foreign:
        """Return where the device's memory is, as the driver names places."""
        location = self.driver.CUmemLocation()
        location.type = self.driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self.number
        return location

    def pin(self, memory: memoryview) -> None:
        """Pin host memory; see `Device`."""
        with self.current():
            where = address_of(memory)
            try:
                take(self.driver, "cuMemHostRegister", self.driver.cuMemHostRegister(where, memory.nbytes, 0))
            except DeviceError as error:
                found = error.found
                raise CapabilityError("host memory cannot be pinned", expected=memory.nbytes, found=found) from error
            self.at_end_of(memory.obj, self.driver.cuMemHostUnregister, where)

    def stream(self, *, urgent: bool = False) -> CudaStream:
        """Return a new stream; see `Device`."""
        stream = CudaStream(self, made := self._new_stream(urgent=urgent))
        self.at_end_of(stream, self.driver.cuStreamDestroy, made)
        return stream

    def _new_stream(self, *, urgent: bool) -> _Foreign:
        with self.current():
            driver = self.driver
            lowest, highest = take(driver, "cuCtxGetStreamPriorityRange", driver.cuCtxGetStreamPriorityRange())
            flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
            created = driver.cuStreamCreateWithPriority(flags, highest if urgent else lowest)
            return take(driver, "cuStreamCreateWithPriority", created)

    def at_end_of(self, owner: object, call: Callable[..., object], *arguments: object) -> None:
        """Make a call when an object has gone: in any thread, with the device current, and not in a forked child.

        Not when the process ends, either: then the driver takes all back.
        """
        weakref.finalize(owner, self._held.end, call, arguments).atexit = False

    def borrowed_stream(self, handle: int) -> CudaStream:
        """Return a stream that somebody else has made, and keeps."""
        return CudaStream(self, self.driver.CUstream(handle))

    def _owned(self, pointer: int, nbytes: int) -> memoryview:
        """Return the aligned part of an allocation, which is freed with its last view."""
        skipped = -pointer % _ALIGN
        memory = (ctypes.c_ubyte * nbytes).from_address(pointer + skipped)
        self.at_end_of(memory, self.driver.cuMemFree, pointer)
        return memoryview(memory).cast("B")

    def full(self, nbytes: int, found: object) -> CapabilityError:
        """Return what to raise when the device has no memory left for so many bytes, which somebody has found."""
        return CapabilityError(
            f"GPU {self.number} has no memory for a buffer", expected=f"{nbytes} bytes",
            found=f"{found}, {self.free_bytes} bytes are free",
            remedy="take a smaller batch_size or cache_gpu; what PyTorch only caches, torch.cuda.empty_cache() frees",
        )  # fmt: skip


class CudaStream:
    """Work in order; see `shardkit.storage.device.Stream`."""

    def __init__(self, device: CudaDevice, stream: _Foreign) -> None:
        """Wrap a stream of the driver's; made by `CudaDevice.stream`."""
        self._device, self._driver, self._stream = device, device.driver, stream
        self.handle = int(stream)

    def upload(self, target: int, source: int, nbytes: int) -> None:
        """Copy to the device."""
        with self._device.current():
            take(self._driver, "cuMemcpyHtoD", self._driver.cuMemcpyHtoDAsync(target, source, nbytes, self._stream))

    def download(self, target: int, source: int, nbytes: int) -> None:
        """Copy from the device."""
        with self._device.current():
            take(self._driver, "cuMemcpyDtoH", self._driver.cuMemcpyDtoHAsync(target, source, nbytes, self._stream))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy within the device."""
        with self._device.current():
            take(self._driver, "cuMemcpyDtoD", self._driver.cuMemcpyDtoDAsync(target, source, nbytes, self._stream))

    def prefetch(self, address: int, nbytes: int) -> None:
        """Move managed memory to the device."""
        with self._device.current():
            move = _of_location(self._driver, "cuMemPrefetchAsync")
            moving = move(address, nbytes, self._device.location(), 0, self._stream)
            take(self._driver, "cuMemPrefetchAsync", moving)

    def record(self, *, timed: bool = False) -> CudaEvent:
        """Return an event behind all work so far."""
        with self._device.current():
            event = CudaEvent(self._device, timed=timed)
            take(self._driver, "cuEventRecord", self._driver.cuEventRecord(event.event, self._stream))
            return event

    def wait_for(self, event: Event) -> None:
        """Let later work wait for an event."""
        with self._device.current():
            waiting = self._driver.cuStreamWaitEvent(self._stream, self._driver.CUevent(event.handle), 0)
            take(self._driver, "cuStreamWaitEvent", waiting)

    def synchronize(self) -> None:
        """Wait for all work."""
        with self._device.current():
            take(self._driver, "cuStreamSynchronize", self._driver.cuStreamSynchronize(self._stream))


class CudaEvent:
    """A point in a stream's work; see `shardkit.storage.device.Event`."""

    def __init__(self, device: CudaDevice, *, timed: bool) -> None:
        """Make one; `CudaStream.record` does, and the device is current."""
        driver = device.driver
        flags = driver.CUevent_flags.CU_EVENT_BLOCKING_SYNC.value  # who waits sleeps
        if not timed:
            flags |= driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
        self._device, self._driver = device, driver
        self.event = take(driver, "cuEventCreate", driver.cuEventCreate(flags))
        """The driver's event."""
        self.handle = int(self.event)
        device.at_end_of(self, driver.cuEventDestroy, self.event)

    def done(self) -> bool:
        """Return whether it has come."""
        with self._device.current():
            result = self._driver.cuEventQuery(self.event)
            if result[0] == self._driver.CUresult.CUDA_ERROR_NOT_READY:
                return False
            take(self._driver, "cuEventQuery", result)
            return True

    def wait(self) -> None:
        """Wait until it has come."""
        with self._device.current():
            take(self._driver, "cuEventSynchronize", self._driver.cuEventSynchronize(self.event))

    def since(self, earlier: Event) -> float:
        """Return the seconds between two timed events."""
        with self._device.current():
            elapsed = self._driver.cuEventElapsedTime(self._driver.CUevent(earlier.handle), self.event)
            return float(take(self._driver, "cuEventElapsedTime", elapsed)) / 1e3


def _of_location(driver: ModuleType, call: str) -> Callable[..., tuple[_Foreign, ...]]:
    """Return a call in the form that takes a location: the only one from CUDA 13 on, `_v2` before."""
    found: Callable[..., tuple[_Foreign, ...]] = getattr(driver, f"{call}_v2", None) or getattr(driver, call)
    return found


def take(driver: ModuleType, call: str, result: tuple[_Foreign, ...]) -> _Foreign:
    """Return what a call of the driver returned, or raise what it failed with."""
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(error)
        said = text.decode() if text else "unknown"
        raise DeviceError("a GPU failed an operation", found=f"{call}: {getattr(error, 'name', error)} ({said})")
    return values[0] if len(values) == 1 else tuple(values)
