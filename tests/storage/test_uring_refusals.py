from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import platform
import re
import struct
from pathlib import Path

import pytest

from shardkit.errors import CapabilityError, ConfigError, StorageError
from shardkit.extent import Extent
from shardkit.storage import uring_abi
from shardkit.storage.reader import ReadOp
from shardkit.storage.uring import MAX_DEPTH, UringReader, polling_refusal, uring_refusal
from shardkit.storage.uring_ring import keeps_store_order
from shardkit.testing.faulty_files import faulty_files
from shardkit.testing.mounts import NoMountsError
from shardkit.testing.reading import open_descriptors, read_extents
from shardkit.testing.rings import as_nobody, needs_root, needs_uring, write_through

pytestmark = needs_uring
_SWITCH = Path("/proc/sys/kernel/io_uring_disabled")


@contextlib.contextmanager
def switched(value: str):
    if not _SWITCH.exists():
        pytest.skip("kernel.io_uring_disabled is there since Linux 6.6")
    before = _SWITCH.read_text()
    try:
        _SWITCH.write_text(value)
        yield
    finally:
        _SWITCH.write_text(before)


@needs_root
def test_the_switch_at_1_forbids_it_to_people_without_rights():
    with switched("1"):
        assert uring_refusal() is None  # root
        refusal = as_nobody(uring_refusal)
        error = as_nobody(lambda: UringReader([]))
    assert "kernel.io_uring_disabled is 1" in refusal
    assert "neither root nor in kernel.io_uring_group (-1)" in refusal
    assert error.startswith("CapabilityError: io_uring cannot be had here; found EPERM: kernel.io_uring_disabled is 1")
    assert error.endswith("sysctl kernel.io_uring_disabled=0, or join that group, or take io='direct'")


@needs_root
def test_the_switch_at_2_forbids_it_to_everybody():
    with switched("2"):
        refusal = uring_refusal()
        with pytest.raises(CapabilityError, match=r"sysctl kernel\.io_uring_disabled=0") as caught:
            UringReader([])
    assert refusal == "EPERM: kernel.io_uring_disabled is 2, which forbids it to everybody"
    assert (caught.value.exit_code, caught.value.errno) == (7, errno.EPERM)


def forbid(call: int, answer: int) -> None:
    """Let a system call of this process fail, as the seccomp profile of a container does."""
    instructions = [
        (0x20, 0, 0, 0),  # the number of the call
        (0x15, 0, 1, call),  # if it is that one
        (0x06, 0, 0, 0x00050000 | answer),  # it fails
        (0x06, 0, 0, 0x7FFF0000),  # others go on
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *code) for code in instructions))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(instructions), ctypes.addressof(program)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert prctl(22, 2, header, 0, 0) == 0  # PR_SET_SECCOMP


@needs_root
@pytest.mark.parametrize(
    ("call", "answer", "expected"),
    [
        (425, errno.ENOSYS, "ENOSYS: Linux .* is older than 5.11, or built without it, or seccomp hides it"),
        (425, errno.EPERM, "EPERM: a policy .seccomp of a container, SELinux. forbids its system calls"),
        (426, errno.EPERM, "EPERM: a policy"),
        (425, errno.ENOMEM, r"ENOMEM: the limit of locked memory .RLIMIT_MEMLOCK. is .*raise ulimit -l"),
        (425, errno.EMFILE, "EMFILE .*free descriptors"),
    ],
)
def test_a_policy_that_forbids_a_system_call_is_named(call, answer, expected):
    def law() -> str:
        forbid(call, answer)
        UringReader([])
        return "made"

    assert re.match(f"CapabilityError: io_uring cannot be had here; found {expected}", as_nobody(law))


def test_a_ring_that_does_not_read_is_not_taken(monkeypatch):
    monkeypatch.setattr(uring_abi, "OP_READ", 0)  # a request that does nothing
    before = open_descriptors()
    with pytest.raises(CapabilityError, match=r"does not read right here; expected 64 known bytes; found result \[0\]"):
        UringReader([])
    assert open_descriptors() == before


@pytest.fixture
def fuse(tmp_path):
    try:
        with faulty_files(tmp_path / "faulty") as files:
            write_through(files.backing / "a", b"abc" * 1000)
            yield files.path
    except NoMountsError as error:
        pytest.skip(f"FUSE needs root: {error}")


def test_fuse_is_refused_because_the_kernel_reads_it_wrongly(fuse, disk):
    with pytest.raises(CapabilityError, match=r"does not read this file system right: .*/a; .* found fuse"):
        UringReader([fuse / "a"])
    near = write_through(disk / "near", b"abc")
    (disk / "link").symlink_to(fuse / "a")  # looks like a neighbour
    reader = UringReader([near, disk / "link"])
    with pytest.raises(CapabilityError, match=r"does not read this file system right: .*/link"):
        read_extents(reader, [(0, 0, 3), (1, 0, 3)])
    assert read_extents(reader, [(0, 0, 3)]) == [b"abc"]
    reader.close()


def test_a_file_system_without_direct_reads_is_named(ramfs, disk):
    write_through(ramfs / "a", b"abc")
    with pytest.raises(CapabilityError, match=r"ram/a; .* found ramfs: EINVAL .* at open"):
        UringReader([ramfs / "a"])
    near = write_through(disk / "near", b"abc")
    (disk / "link").symlink_to(ramfs / "a")
    reader = UringReader([near, disk / "link"])
    with pytest.raises(CapabilityError, match=r"link; .* found ramfs: EINVAL .* at open"):
        read_extents(reader, [(1, 0, 3)])
    reader.close()


def test_a_missing_file_is_no_matter_of_capability(disk):
    with pytest.raises(StorageError, match="ENOENT"):
        UringReader([disk / "gone"])


def test_no_paths_at_all_is_a_reader_with_nothing_to_read():
    reader = UringReader([])
    assert reader.align == 4096
    with pytest.raises(ConfigError, match="was not given"):
        reader.read_into([ReadOp(0, Extent(0, 4096), memoryview(mmap.mmap(-1, 4096)), 1)])
    reader.close()


@pytest.mark.parametrize("numbers", [{"depth": 0}, {"depth": MAX_DEPTH + 1}, {"rings": 0}])
def test_numbers_out_of_range_are_refused(numbers):
    with pytest.raises(ConfigError, match=rf"depth 1\.\.{MAX_DEPTH}, rings >= 1"):
        UringReader([], **numbers)


def test_polling_is_refused_where_stores_are_not_ordered(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(CapabilityError, match=r"polling for requests is not offered on this processor.*found aarch64"):
        UringReader([], sqpoll=True)
    assert polling_refusal() == "not offered on aarch64"


@pytest.mark.skipif(not keeps_store_order(), reason="polling is not offered here")
def test_polling_may_be_asked_about_before_it_is_used():
    descriptors = open_descriptors()
    refusal = polling_refusal()
    assert open_descriptors() == descriptors
    opened = False
    with contextlib.suppress(CapabilityError):
        UringReader([], sqpoll=True).close()
        opened = True
    assert opened == (refusal is None)


@pytest.mark.skipif(not keeps_store_order(), reason="polling is not offered here")
def test_a_kernel_that_wants_rights_for_polling_is_named(monkeypatch):
    make = uring_abi.setup

    def old_kernel(depth, params):
        if uring_abi.SETUP_SQPOLL & ctypes.c_uint32.from_address(params + 8).value:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return make(depth, params)

    monkeypatch.setattr(uring_abi, "setup", old_kernel)
    assert uring_refusal() is None
    assert polling_refusal() == "EPERM: before Linux 5.13 it needs CAP_SYS_NICE"
