"""`CudaDevice` on a stand-in for the driver: which context is current where. What a real one does is in tests/gpu."""

from __future__ import annotations

import ctypes
import enum
import gc
import os
import threading
import weakref
from types import SimpleNamespace

import pytest

from shardkit.errors import CapabilityError, DeviceError
from shardkit.storage.cuda import CudaDevice

OURS, OTHER = 0x7000, 0x9000
SIZE = 8192


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


class Handle:
    def __init__(self, value):
        self.value = value

    def __int__(self):
        return self.value


class Driver:
    """The driver's calls, each noted with the context that it met. A thread has a stack of contexts, as in CUDA."""

    CUresult = CUresult
    CUmemAttach_flags = SimpleNamespace(CU_MEM_ATTACH_GLOBAL=SimpleNamespace(value=1))
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=SimpleNamespace(value=1))
    CUevent_flags = SimpleNamespace(
        CU_EVENT_BLOCKING_SYNC=SimpleNamespace(value=1), CU_EVENT_DISABLE_TIMING=SimpleNamespace(value=2)
    )
    CUmem_advise = SimpleNamespace(CU_MEM_ADVISE_SET_PREFERRED_LOCATION=3, CU_MEM_ADVISE_SET_READ_MOSTLY=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemLocation = SimpleNamespace
    CUstream = CUevent = Handle

    def __init__(self):
        self.thread = threading.local()
        self.calls = []
        self.refused = {}
        self.memory = bytearray(4 * SIZE)
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self.memory))
        self.answers = {
            "cuDeviceGet": 0, "cuDevicePrimaryCtxRetain": Handle(OURS), "cuMemGetInfo": (5, 6),
            "cuCtxGetStreamPriorityRange": (0, -5), "cuStreamCreateWithPriority": Handle(11),
            "cuEventCreate": Handle(12), "cuGetErrorString": b"text", "cuMemAlloc": Handle(self.address),
            "cuMemAllocManaged": Handle(self.address),
        }  # fmt: skip

    @property
    def stack(self):
        if not hasattr(self.thread, "stack"):
            self.thread.stack = []
        return self.thread.stack

    def met(self, call):
        return [context for name, context in self.calls if name == call]

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*_):
            self.calls.append((name, self.stack[-1] if self.stack else None))
            if name in self.refused:
                return (self.refused[name],)
            answer = self.answers.get(name)
            return (CUresult.CUDA_SUCCESS, *(answer if isinstance(answer, tuple) else (answer,)))

        return call


class Library:
    """The same calls as the driver's own library has them."""

    def __init__(self, driver):
        self.driver = driver

    def cuStreamQuery(self, _):
        return self.driver.refused.get("cuStreamQuery", CUresult.CUDA_SUCCESS)

    def cuCtxGetCurrent(self, place):
        place._obj.value = self.driver.stack[-1] if self.driver.stack else None
        return 0

    def cuCtxPushCurrent_v2(self, context):
        self.driver.stack.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, place):
        place._obj.value = self.driver.stack.pop()
        return 0


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def device(driver):
    return CudaDevice(driver, Library(driver), 0)


def use_all(device):
    """Make every call that a device, its streams and events have."""
    memory, managed, host = device.memory(SIZE), device.managed(SIZE), memoryview((ctypes.c_ubyte * SIZE)())
    device.pin(host)
    stream = device.stream(urgent=True)
    stream.upload(1, 2, 3)
    stream.download(1, 2, 3)
    stream.copy(1, 2, 3)
    stream.prefetch(1, 2)
    event = stream.record(timed=True)
    stream.wait_for(event)
    stream.synchronize()
    event.wait()
    assert event.done()
    assert device.free_bytes == 5
    del memory, managed, host, stream, event
    gc.collect()


@pytest.mark.parametrize("before", [[], [OTHER], [OTHER, OURS], [OURS]])
def test_every_call_has_the_device_current_and_leaves_what_was_before(device, driver, before):
    """A thread of PyTorch's that works with another GPU, or with none yet, does not notice; nor does a finaliser's."""
    driver.stack[:] = before
    driver.calls.clear()
    use_all(device)
    assert driver.stack == before
    made = dict(driver.calls)
    assert {"cuMemAlloc", "cuMemAllocManaged", "cuMemHostRegister", "cuEventRecord"} <= set(made)
    assert {"cuMemFree", "cuMemHostUnregister", "cuStreamDestroy", "cuEventDestroy"} <= set(made)
    assert {context for _, context in driver.calls} == {OURS}


def test_memory_that_another_thread_drops_is_freed_in_the_context_that_it_came_from(device, driver):
    held = [device.memory(SIZE)]
    seen = []

    def drop():
        driver.stack[:] = [OTHER]
        held.clear()
        seen.extend(driver.stack)

    thread = threading.Thread(target=drop)
    thread.start()
    thread.join()
    assert (driver.met("cuMemFree"), seen) == ([OURS], [OTHER])


def test_an_error_leaves_what_was_before(device, driver):
    driver.stack[:] = [OTHER]
    driver.refused["cuMemAlloc"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(CapabilityError, match=r"(?s)8192 bytes.*5 bytes are free.*smaller batch_size"):
        device.memory(SIZE)
    stream = device.stream()
    driver.refused["cuStreamSynchronize"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DeviceError, match="cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS"):
        stream.synchronize()
    assert driver.stack == [OTHER]


def test_managed_memory_that_takes_no_advice_is_refused_and_freed(device, driver):
    driver.refused["cuMemAdvise_v2"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(CapabilityError, match=r"(?s)cannot touch managed memory.*staging='pinned'"):
        device.managed(SIZE)
    gc.collect()
    assert driver.met("cuMemFree") == [OURS]


def test_a_device_is_lost_when_its_idle_stream_says_so(device, driver):
    assert not device.lost
    driver.refused["cuStreamQuery"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    assert device.lost


def test_a_device_that_nobody_has_any_more_gives_its_stream_back(driver):
    device = CudaDevice(driver, Library(driver), 0)
    gone, stream = weakref.ref(device), device.stream()
    del device
    assert gone() is not None
    del stream
    assert gone() is None
    assert driver.met("cuStreamDestroy") == [OURS, OURS]


def test_a_device_is_not_lost_while_some_thread_records_a_graph(device, driver):
    driver.refused["cuStreamQuery"] = 900  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    assert not device.lost


def test_a_device_whose_context_is_gone_is_lost_and_finalisers_may_ask(device, monkeypatch):
    monkeypatch.setattr(Library, "cuCtxGetCurrent", lambda *_: CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
    assert device.lost


def test_a_forked_child_is_refused_and_gives_nothing_back(device, driver, monkeypatch):
    memory = device.memory(SIZE)
    process = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    with pytest.raises(CapabilityError, match="does not survive a fork"), device.current():
        pass
    assert device.lost
    del memory
    gc.collect()
    assert not driver.met("cuMemFree")
