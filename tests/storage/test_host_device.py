from __future__ import annotations

import pytest

from shardkit.errors import CapabilityError, DeviceError
from shardkit.storage.buffers import aligned_memory
from shardkit.storage.reader import address_of
from shardkit.testing.host_device import POISON, HostDevice
from shardkit.testing.reading import in_child


def filled(device: HostDevice, letter: bytes) -> memoryview:
    host, stream = aligned_memory(100, 4096), device.stream()
    host[:] = letter * 100
    memory = device.memory(100)
    stream.upload(address_of(memory), address_of(host), 100)
    stream.synchronize()
    return memory


def test_what_is_overwritten_before_the_copy_was_waited_for_arrives_wrong():
    for lazy, arrived in ((False, b"a"), (True, b"b")):
        device, host = HostDevice(lazy=lazy), aligned_memory(1, 4096)
        memory, stream = device.memory(1), device.stream()
        host[:] = b"a"
        stream.upload(address_of(memory), address_of(host), 1)
        event = stream.record()
        host[:] = b"b"
        event.wait()
        assert bytes(memory) == arrived


def test_fresh_memory_is_poisoned_page_aligned_and_counted():
    device = HostDevice()
    for make in (device.memory, device.managed):
        memory = make(5000)
        assert (set(memory), address_of(memory) % 4096, device.allocated_bytes) == ({POISON}, 0, 5000)
        del memory
        assert device.allocated_bytes == 0
    assert device.memory(0).nbytes == 0


def test_lazy_work_is_done_when_an_event_is_asked_twice():
    device = HostDevice(lazy=True)
    source, target = filled(device, b"s"), device.memory(100)
    stream = device.stream()
    stream.copy(address_of(target), address_of(source), 100)
    event = stream.record()
    assert (event.done(), target[0]) == (False, POISON)
    assert (event.done(), bytes(target)) == (True, b"s" * 100)


def test_an_event_holds_back_no_later_work_and_carries_out_none():
    device = HostDevice(lazy=True)
    source, target = filled(device, b"s"), device.memory(2)
    stream = device.stream()
    stream.copy(address_of(target), address_of(source), 1)
    event = stream.record()
    stream.copy(address_of(target) + 1, address_of(source), 1)
    event.wait()
    assert bytes(target) == b"s" + bytes([POISON])
    stream.synchronize()
    assert bytes(target) == b"ss"


def test_a_stream_that_waits_for_an_event_comes_after_it():
    device = HostDevice(lazy=True)
    source, middle, target = filled(device, b"s"), device.memory(100), device.memory(100)
    first, second = device.stream(), device.stream(urgent=True)
    first.copy(address_of(middle), address_of(source), 100)
    second.wait_for(first.record())
    second.copy(address_of(target), address_of(middle), 100)
    second.record().wait()
    assert bytes(target) == b"s" * 100


def test_work_on_memory_that_has_gone_fails_where_it_is_waited_for():
    device = HostDevice(lazy=True)
    source, target = filled(device, b"s"), device.memory(100)
    stream = device.stream()
    stream.copy(address_of(target), address_of(source), 100)
    event = stream.record()
    del target
    with pytest.raises(DeviceError, match="an address in the device's memory"):
        event.wait()
    stream.synchronize()  # the stream goes on


def test_a_copy_in_the_wrong_direction_fails():
    device, host = HostDevice(), aligned_memory(100, 4096)
    memory, managed, stream = device.memory(100), device.managed(100), device.stream()
    for call, target, source in (
        (stream.upload, host, memory), (stream.download, memory, host), (stream.copy, memory, host)
    ):  # fmt: skip
        with pytest.raises(DeviceError):
            call(address_of(target), address_of(source), 100)
    stream.upload(address_of(memory), address_of(managed), 100)
    stream.copy(address_of(managed), address_of(memory), 100)
    stream.prefetch(address_of(managed), 100)
    for elsewhere in (host, memory):
        with pytest.raises(DeviceError, match="managed"):
            stream.prefetch(address_of(elsewhere), 100)


@pytest.mark.parametrize("call", ["memory", "managed", "pin"])
def test_what_a_device_may_refuse_is_a_matter_of_capability(call):
    device = HostDevice()
    device.fail_next(call)
    argument = aligned_memory(4096, 4096) if call == "pin" else 4096
    with pytest.raises(CapabilityError):
        getattr(device, call)(argument)
    getattr(device, call)(argument)


def test_pinned_memory_is_known_until_it_goes_and_pinned_once():
    device, memory = HostDevice(), aligned_memory(8192, 4096)
    device.pin(memory)
    with pytest.raises(CapabilityError):
        device.pin(memory[4096:])
    assert device.pinned == {address_of(memory): 8192}
    del memory
    assert device.pinned == {}


def test_timed_events_tell_the_time_between_them():
    stream = HostDevice().stream()
    first, untimed, last = stream.record(timed=True), stream.record(), stream.record(timed=True)
    assert last.since(first) >= 0
    with pytest.raises(DeviceError):
        last.since(untimed)


def test_a_child_process_has_no_device():
    device = HostDevice()
    stream = device.stream()

    def refused() -> bool:
        for call in (lambda: device.memory(1), stream.record):
            with pytest.raises(CapabilityError, match="does not survive a fork"):
                call()
        return True

    assert in_child(refused)
