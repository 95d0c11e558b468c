from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import logging
import mmap
import os
import platform
import re
import resource
import signal
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from shardkit.errors import CapabilityError, ConfigError, ShortReadError, StorageError
from shardkit.extent import Extent
from shardkit.storage import uring_abi, uring_causes, uring_drive, uring_ring
from shardkit.storage.coalesce import coalesce
from shardkit.storage.probe import mount_of
from shardkit.storage.reader import DIRECT, PAGE_CACHE, ReadOp, ReadOps
from shardkit.storage.uring import MAX_DEPTH, UringReader, uring_refusal
from shardkit.testing.faulty_files import faulty_files
from shardkit.testing.mounts import NoMountsError
from shardkit.testing.readers import ReaderContract
from shardkit.testing.reading import in_child, open_descriptors, read_extents

_REFUSED = uring_refusal()
pytestmark = pytest.mark.skipif(_REFUSED is not None, reason=f"io_uring cannot be had here: {_REFUSED}")
_NOBODY = 65534
_SWITCH = Path("/proc/sys/kernel/io_uring_disabled")


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder on a file system that has alignment rules: memory and holes take anything."""
    kind = mount_of(tmp_path).file_system
    if kind not in {"ext4", "xfs"}:
        pytest.skip(f"{tmp_path} is on {kind}; alignment means something on ext4 and XFS only (pytest --basetemp)")
    return tmp_path


class Contract(ReaderContract):
    @pytest.fixture(autouse=True)
    def fuse_is_let_in(self, monkeypatch):
        """The contract's errors come from FUSE; what the kernel does wrong with it (see UNFIT) is left out below."""
        monkeypatch.setattr(uring_causes, "UNFIT", ())

    # Short answers of FUSE are the very thing that the kernel continues wrongly, and it waits for them in the system
    # call that hands them over. Below, short reads are made in another way and a slow disk hangs.
    test_short_reads_are_continued = None
    test_reads_that_are_always_short_are_continued_to_the_last_byte = None
    test_the_oldest_read_is_told_while_it_hangs = None
    test_a_read_that_hangs_holds_up_no_other_call = None


class TestUringReader(Contract):
    def make_reader(self, paths):
        return UringReader(paths)

    @pytest.fixture
    def folder(self, disk):
        return disk

    @pytest.fixture
    def failing(self, lost_blocks):
        return lost_blocks, 0


class TestUringReaderWithPageAlignment(Contract):
    def make_reader(self, paths):
        return UringReader(paths, align=4096, depth=3, rings=1, max_open=2)

    folder = TestUringReader.folder
    failing = TestUringReader.failing


class TestUringReaderOnSectorsOf4096(Contract):
    def make_reader(self, paths):
        return UringReader(paths)

    @pytest.fixture
    def folder(self, blocks_of_4096):
        return blocks_of_4096

    failing = TestUringReader.failing


class TestUringReaderThroughThePageCache(Contract):
    def make_reader(self, paths):
        return UringReader(paths, direct=False)


class TestUringReaderWithOneDescriptor(Contract):
    def make_reader(self, paths):
        return UringReader(paths, direct=False, rings=3, depth=4, max_open=1)


def write(path: Path, data: bytes) -> Path:
    with path.open("wb") as file:
        file.write(data)
        os.fsync(file.fileno())
    return path


def private_memory(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def blocks(memory: mmap.mmap, offsets: list[int], length: int) -> ReadOps:
    """Reads of file 0, one after the other into memory."""
    offset = np.array(offsets, np.int64)
    size = np.full(len(offset), length, np.int64)
    start = np.arange(len(offset)) * length
    return ReadOps(
        file=np.zeros_like(offset), offset=offset, length=size, need=size, start=start, buffer=memoryview(memory)
    )


def read_for_ever(reader: UringReader, ops: ReadOps) -> None:
    while True:
        reader.read_into(ops)


def status(key: str) -> int:
    """A number of /proc/self/status, in KiB."""
    return int(re.search(rf"^{key}:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)[1])


def rings_open() -> list[str]:
    return [number for number, name in open_descriptors().items() if name == "anon_inode:[io_uring]"]


# What arrives


@pytest.mark.parametrize("depth", [1, 2, 5, 64, 300])
@pytest.mark.parametrize("direct", [True, False])
def test_more_ops_than_fit_into_the_ring(disk, depth, direct):
    data = os.urandom(1 << 20)
    reader = UringReader([write(disk / "a", data)], direct=direct, depth=depth)
    random = np.random.default_rng(depth)
    wanted = [(0, int(offset), 3000) for offset in random.integers(0, len(data) - 3000, 400)]
    assert read_extents(reader, wanted, max_bytes=1) == [data[o : o + n] for _, o, n in wanted]
    reader.close()


def test_direct_bytes_do_not_come_from_the_page_cache(disk):
    data = os.urandom(50_000)
    reader = UringReader([write(disk / "a", data)])
    assert read_extents(reader, [(0, 100, 40_000)]) == [data[100:40_100]]
    assert reader.counters[DIRECT] >= 40_100
    assert reader.counters[PAGE_CACHE] == 0
    reader.close()
    reader = UringReader([disk / "a"], direct=False)
    assert reader.align == 1
    assert read_extents(reader, [(0, 100, 40_000)]) == [data[100:40_100]]
    assert reader.counters == {DIRECT: 0, PAGE_CACHE: 40_000}
    reader.close()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("most", [4096, 8192, 65_536])
def test_reads_longer_than_a_request_can_be_are_continued(disk, monkeypatch, direct, most):
    monkeypatch.setattr(uring_drive, "_MOST", most)
    data = os.urandom(200_001)
    reader = UringReader([write(disk / "a", data)], direct=direct)
    assert read_extents(reader, [(0, 5, 150_000), (0, 190_000, 10_001)]) == [data[5:150_005], data[190_000:]]
    with pytest.raises(ShortReadError, match="found 200001 bytes"):
        read_extents(reader, [(0, 0, 200_002)])
    assert sum(reader.counters.values()) >= 160_001
    reader.close()


def test_a_short_read_is_continued_at_a_block(disk):
    """Memory that may not be written ends a read early, as the kernel tells only at the next one."""
    data = os.urandom(64 * 1024)
    reader = UringReader([write(disk / "a", data)], direct=False)
    memory = private_memory(len(data))
    libc = ctypes.CDLL(None, use_errno=True)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(start + 32 * 1024), 4096, mmap.PROT_READ) == 0
    with pytest.raises(StorageError, match="EFAULT") as caught:
        reader.read_into(blocks(memory, [0], len(data)))
    assert caught.value.offset == 32 * 1024
    assert memory[: 32 * 1024] == data[: 32 * 1024]
    reader.close()


def answer(monkeypatch, change) -> list[tuple[int, int]]:
    """Let the kernel's results pass through `change(number, result)`; returns the (offset, length) of each request."""
    put, reap, asked, numbers = uring_ring.Ring.put, uring_ring.Ring.reap, list[tuple[int, int]](), itertools.count()

    def watched(self, tag, descriptor, place, offset, address, length):
        asked.extend(zip(offset.tolist(), length.tolist(), strict=True))
        put(self, tag, descriptor, place, offset, address, length)

    def changed(self):
        tags, results = reap(self)
        return tags, np.array([change(next(numbers), result) for result in results.tolist()], np.int64)

    monkeypatch.setattr(uring_ring.Ring, "put", watched)
    monkeypatch.setattr(uring_ring.Ring, "reap", changed)
    return asked


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("most", [512, 700, 4096, 5000])
def test_short_answers_are_continued_at_a_block(disk, monkeypatch, direct, most):
    data = os.urandom(60_000)
    reader = UringReader([write(disk / "a", data)], direct=direct, align=512)
    asked = answer(monkeypatch, lambda _, result: min(result, most))
    assert read_extents(reader, [(0, 1000, 59_000), (0, 0, 100)]) == [data[1000:], data[:100]]
    assert len(asked) >= 59_000 // most
    if direct:
        assert all(offset % 512 == 0 and length % 512 == 0 for offset, length in asked)
        assert reader.counters[PAGE_CACHE] == 0
    else:
        assert reader.counters == {DIRECT: 0, PAGE_CACHE: 59_100}
    reader.close()


def test_an_answer_shorter_than_a_block_sends_the_file_to_the_page_cache(disk, monkeypatch):
    data = os.urandom(60_000)
    reader = UringReader([write(disk / "a", data)], align=4096)
    answer(monkeypatch, lambda number, result: 100 if number == 0 else result)
    assert read_extents(reader, [(0, 0, 50_000)]) == [data[:50_000]]
    assert (reader.refused, reader.counters) == (1, {DIRECT: 0, PAGE_CACHE: 53_248})
    reader.close()


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR])
def test_what_is_to_be_tried_again_is_tried_again_but_not_for_ever(disk, monkeypatch, number):
    data = os.urandom(60_000)
    reader = UringReader([write(disk / "a", data)])
    answer(monkeypatch, lambda count, result: -number if count % 3 else result)
    wanted = [(0, offset, 4096) for offset in range(0, 50_000, 8192)]
    assert read_extents(reader, wanted) == [data[o : o + n] for _, o, n in wanted]
    monkeypatch.setattr(uring_drive, "_PAUSE_S", 0)
    answer(monkeypatch, lambda *_: -number)
    with pytest.raises(StorageError, match=errno.errorcode[number]):
        read_extents(reader, wanted)
    reader.close()


def test_an_op_before_one_that_failed_is_carried_on_and_raised_first(disk, monkeypatch):
    """The second op fails at once; the first is short, is read on, and fails only then."""
    reader = UringReader([write(disk / "a", os.urandom(60_000))])
    answers = iter([4096, -errno.EIO, -errno.ENODATA])
    asked = answer(monkeypatch, lambda *_: next(answers))
    with pytest.raises(StorageError, match="ENODATA") as caught:
        read_extents(reader, [(0, 0, 8192), (0, 16_384, 8192)])
    assert caught.value.offset == 4096
    assert asked == [(0, 8192), (16_384, 8192), (4096, 4096)]
    reader.close()


def test_a_ring_forgets_a_file_at_once(disk):
    before, ring = len(open_descriptors()), uring_ring.Ring(4, files=8)
    with (disk / "unmistakable").open("wb") as file:
        assert [ring.place_of(file.fileno()) for _ in range(2)] == [0, 0]
        information = Path(f"/proc/self/fdinfo/{rings_open()[0]}")
        if "unmistakable" not in information.read_text():
            pytest.skip("this kernel does not tell which files a ring knows")
        ring.forget_file(file.fileno())
        assert "unmistakable" not in information.read_text()
    ring.close(unregister=True)
    assert len(open_descriptors()) == before


def test_without_room_for_registered_files_plain_descriptors_do(disk):
    data = os.urandom(5000)
    paths = [write(disk / str(number), data) for number in range(5)]
    ring = uring_ring.Ring(4, files=2)
    files = [path.open("rb") for path in paths]
    assert [ring.place_of(file.fileno()) for file in files] == [0, 1, -1, -1, -1]
    ring.close(unregister=True)
    for file in files:
        file.close()


def test_a_file_cut_while_it_is_read_is_a_short_read(disk):
    data = os.urandom(4 << 20)
    path = write(disk / "a", data)
    reader = UringReader([path], depth=4)
    memory = private_memory(len(data))
    ops = blocks(memory, list(range(0, len(data), 8192)), 8192)
    cutter = threading.Timer(0.01, os.truncate, (path, 12_288))
    cutter.start()
    with pytest.raises(ShortReadError, match="the file has 12288, it had 4194304 when it was opened"):
        read_for_ever(reader, ops)
    cutter.join()
    assert read_extents(reader, [(0, 100, 12_000)]) == [data[100:12_100]]
    reader.close()


def test_a_file_that_refuses_the_read_is_served_by_the_page_cache_and_counted(blocks_of_4096, disk, caplog):
    data = os.urandom(30_000)
    paths = [write(blocks_of_4096 / "a", data), write(disk / "b", data), write(blocks_of_4096 / "c", data)]
    reader = UringReader(paths, align=512)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            wanted = [(0, 512, 700), (1, 512, 512), (2, 512, 700)]
            assert read_extents(reader, wanted) == [data[512:1212], data[512:1024], data[512:1212]]
    assert reader.refused == 2
    assert reader.counters[PAGE_CACHE] == 6 * 1024
    assert reader.counters[DIRECT] == 3 * 512
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "refuses direct reads of 1024 bytes at 512 (EINVAL)" in caplog.text
    reader.close()


def test_without_order_of_loads_the_bytes_are_the_same(disk, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    data = os.urandom(300_000)
    reader = UringReader([write(disk / "a", data)], depth=4)
    wanted = [(0, offset, 5000) for offset in range(0, 290_000, 7000)]
    assert read_extents(reader, wanted) == [data[o : o + n] for _, o, n in wanted]
    reader.close()


# Registered memory


def test_registered_memory_is_what_the_reads_go_to(disk, monkeypatch):
    """After MADV_DONTNEED a process sees fresh pages, while fixed reads go to those that were pinned before."""
    monkeypatch.setattr(uring_ring, "_PIECE", 64 * 1024)
    data = os.urandom(256 * 1024)
    reader = UringReader([write(disk / "a", data)])
    memory = private_memory(256 * 1024)
    pinned = status("VmPin")
    reader.register(memoryview(memory))
    ops = blocks(memory, list(range(0, len(data), 8192)), 8192)
    reader.read_into(ops)
    assert memory[:] == data
    assert reader.registered == [len(data)]
    assert status("VmPin") == pinned + 256
    memory.madvise(mmap.MADV_DONTNEED)
    reader.read_into(ops)
    assert memory[:] == bytes(len(data))
    across = np.arange(64 * 1024 - 4096, len(data) - 8192, 64 * 1024)  # those lie in two pieces, so in no buffer
    reader.read_into(
        ReadOps(
            file=np.zeros_like(across), offset=across, length=np.full_like(across, 8192),
            need=np.full_like(across, 8192), start=across, buffer=memoryview(memory),
        )
    )  # fmt: skip
    for start in across.tolist():
        assert memory[start : start + 8192] == data[start : start + 8192]
    reader.close()
    assert status("VmPin") == pinned
    memory.madvise(mmap.MADV_DONTNEED)


def test_memory_that_is_not_registered_is_read_into_as_well(disk):
    data = os.urandom(256 * 1024)
    reader = UringReader([write(disk / "a", data)], rings=1)
    known, unknown, later = (private_memory(len(data)) for _ in range(3))
    reader.register(memoryview(known))
    offsets = list(range(0, len(data), 4096))
    for memory in (known, unknown, later):
        reader.read_into(blocks(memory, offsets, 4096))
        assert memory[:] == data
    reader.register(memoryview(later))
    for memory in (later, known, unknown):
        memory[:] = bytes(len(data))
        reader.read_into(blocks(memory, offsets, 4096))
        assert memory[:] == data
    assert reader.registered == [2 * len(data)]
    reader.close()


def as_nobody(function) -> str:
    """What a function returns in a child process without rights, or the error that it raises."""
    reads, writes = os.pipe()

    def law() -> bool:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        try:
            answer = str(function())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        return os.write(writes, answer.encode()) > 0

    assert in_child(law)
    os.close(writes)
    with open(reads, encoding="utf-8") as file:
        return file.read()


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can take rights away and turn the switch")


@needs_root
def test_too_little_lockable_memory_is_said_once_and_read_without(disk, monkeypatch):
    data = os.urandom(1 << 20)
    write(disk / "a", data)
    disk.chmod(0o755)
    monkeypatch.chdir(disk)  # the folders above are root's

    def law() -> str:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (256 * 1024, 256 * 1024))
        said = list[str]()
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("shardkit.storage.uring_pool").addHandler(handler)
        reader = UringReader(["a"], rings=2)
        memory = private_memory(len(data))
        reader.register(memoryview(memory))
        for _ in range(3):
            reader.read_into(blocks(memory, list(range(0, len(data), 8192)), 8192))
        right, counters = memory[:] == data, reader.counters[DIRECT]
        reader.close()
        return f"{right} {counters} {reader.registered} {said}"

    answer = as_nobody(law)
    assert answer.startswith(f"True {3 << 20} [] ['io_uring does not register 1048576 bytes for up to 2 rings (ENOMEM)")
    assert "(RLIMIT_MEMLOCK) is 256 KiB; raise it: ulimit -l 2048" in answer
    assert answer.count("ulimit") == 1


# Where io_uring is forbidden


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
            write(files.backing / "a", b"abc" * 1000)
            yield files.path
    except NoMountsError as error:
        pytest.skip(f"FUSE needs root: {error}")


@pytest.mark.parametrize("direct", [True, False])
def test_fuse_is_refused_because_the_kernel_reads_it_wrongly(fuse, disk, direct):
    with pytest.raises(CapabilityError, match=r"does not read this file system right: .*/a; .* found fuse"):
        UringReader([fuse / "a"], direct=direct)
    near = write(disk / "near", b"abc")
    (disk / "link").symlink_to(fuse / "a")  # looks like a neighbour
    reader = UringReader([near, disk / "link"], direct=direct)
    with pytest.raises(CapabilityError, match=r"does not read this file system right: .*/link"):
        read_extents(reader, [(0, 0, 3), (1, 0, 3)])
    assert read_extents(reader, [(0, 0, 3)]) == [b"abc"]
    reader.close()


def test_a_file_system_without_direct_reads_is_named(ramfs, disk):
    write(ramfs / "a", b"abc")
    with pytest.raises(CapabilityError, match=r"ram/a; .* found ramfs: EINVAL .* at open"):
        UringReader([ramfs / "a"])
    near = write(disk / "near", b"abc")
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


# Polling


@pytest.mark.parametrize("direct", [True, False])
def test_a_polling_ring_reads_the_same(disk, direct):
    data = os.urandom(1 << 20)
    path = write(disk / "a", data)
    reader = UringReader([path], direct=direct, depth=8, rings=1, sqpoll=True)
    for start in range(5):
        wanted = [(0, offset, 5000) for offset in range(start, 1_000_000, 9000)]
        assert read_extents(reader, wanted, max_bytes=1) == [data[o : o + n] for _, o, n in wanted]
        time.sleep(0.03 * start)  # longer in the end than the kernel's thread stays awake
    with pytest.raises(ShortReadError):
        read_extents(reader, [(0, 0, len(data) + 1)])
    reader.close()


def test_polling_is_refused_where_stores_are_not_ordered(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(CapabilityError, match=r"polling for requests is not offered on this processor.*found aarch64"):
        UringReader([], sqpoll=True)


# Descriptors and rings


def test_a_file_whose_descriptor_is_evicted_is_unregistered(disk):
    paths = [write(disk / name, name.encode() * 100) for name in ("first", "second", "third")]
    reader = UringReader(paths, max_open=2, rings=1)

    def known() -> set[str]:
        # A line of a registered file is "    3: first" or, on newer kernels, has its whole path.
        ring = rings_open()[0]
        text = Path(f"/proc/self/fdinfo/{ring}").read_text()
        return {name for name in ("first", "second", "third") if re.search(rf"^\s+\d+: .*{name}$", text, re.MULTILINE)}

    assert read_extents(reader, [(0, 0, 5)]) == [b"first"]
    if not known():
        pytest.skip("this kernel does not tell which files a ring knows")
    for files, expected in [((1,), {"first", "second"}), ((2,), {"second", "third"}), ((0, 1, 2), None)]:
        wanted = [(file, 0, 5) for file in files]
        assert read_extents(reader, wanted) == [paths[file].read_bytes()[:5] for file in files]
        assert known() == expected if expected else len(known()) == 2
    reader.close()


def test_a_file_replaced_under_a_registered_descriptor_is_opened_anew(disk):
    paths = [write(disk / "a", b"a" * 5000), write(disk / "b", b"b" * 5000)]
    reader = UringReader(paths, max_open=1, rings=1)
    assert read_extents(reader, [(0, 0, 3)]) == [b"aaa"]
    assert read_extents(reader, [(1, 0, 3)]) == [b"bbb"]
    write(disk / "new", b"c" * 5001)
    (disk / "new").replace(paths[0])
    with pytest.raises(StorageError, match="replaced or cut"):
        read_extents(reader, [(0, 0, 3)])
    reader.close()


def test_nothing_leaks_over_200_readers(disk):
    data = os.urandom(50_000)
    path = write(disk / "a", data)
    memory = private_memory(1 << 20)

    def once(direct: bool) -> None:
        reader = UringReader([path], direct=direct)
        reader.register(memoryview(memory))
        reader.read_into(blocks(memory, [0, 4096, 8192], 4096))
        assert memory[:12_288] == data[:12_288]
        reader.close()

    once(True)
    once(False)
    before = open_descriptors(), threading.active_count(), status("VmPin")
    resident = status("VmRSS")
    for number in range(200):
        once(number % 2 == 0)
    assert (open_descriptors(), threading.active_count(), status("VmPin")) == before
    assert status("VmRSS") < resident + 4096


def test_callers_take_further_rings_up_to_the_limit(disk):
    data = os.urandom(8 << 20)
    reader = UringReader([write(disk / "a", data)], rings=2, depth=2)
    one = len(rings_open())  # a mapping holds a descriptor of its own
    offsets = list(range(0, len(data), 65_536))

    def work() -> bool:
        memory = private_memory(len(data))
        return all(reader.read_into(blocks(memory, offsets, 65_536)) or memory[:] == data for _ in range(3))

    results = list[bool]()
    threads = [threading.Thread(target=lambda: results.append(work())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 6
    assert len(rings_open()) == 2 * one
    reader.close()
    assert rings_open() == []


def test_a_child_process_makes_rings_of_its_own_and_closes_its_copies(disk):
    data = os.urandom(50_000)
    reader = UringReader([write(disk / "a", data)])
    memory = private_memory(1 << 16)
    reader.register(memoryview(memory))
    reader.read_into(blocks(memory, [0], 4096))
    one = len(rings_open())

    def law() -> bool:
        nothing = rings_open() == []
        reader.read_into(blocks(memory, [8192], 4096))
        own = len(rings_open()) == one and reader.registered == [1 << 16]
        reader.close()
        return nothing and own and memory[:4096] == data[8192:12_288] and rings_open() == []

    for _ in range(3):
        assert in_child(law)
        reader.read_into(blocks(memory, [4096], 4096))
        assert memory[:4096] == data[4096:8192]
    reader.close()


def test_the_oldest_read_is_told_while_reads_run(disk):
    data = os.urandom(16 << 20)
    path = write(disk / "a", data)
    reader = UringReader([path], depth=1)
    assert reader.oldest() is None
    memory = private_memory(len(data))
    seen, stop = list[object](), threading.Event()

    def look() -> None:
        while not stop.is_set():
            pending = reader.oldest()
            if pending is not None:
                seen.append(pending)
            time.sleep(0.0005)

    looker = threading.Thread(target=look)
    looker.start()
    for _ in range(3):
        reader.read_into(blocks(memory, list(range(0, len(data), 1 << 20)), 1 << 20))
    stop.set()
    looker.join()
    assert seen
    assert all(pending.path == str(path) and pending.offset % (1 << 20) == 0 for pending in seen)
    assert all(0 <= pending.seconds < 10 for pending in seen)
    assert len({pending.offset for pending in seen}) > 1
    assert reader.oldest() is None
    reader.close()


# Ctrl-C


@pytest.mark.parametrize("direct", [True, False])
def test_ctrl_c_waits_for_the_kernel_and_leaves_the_reader_usable(disk, direct):
    data = os.urandom(4 << 20)
    path = write(disk / "a", data)
    offsets = list(range(0, len(data), 65_536))
    before = open_descriptors()
    reader = UringReader([path], direct=direct, depth=16, rings=1 if direct else 2)
    memory = private_memory(len(data))
    reader.register(memoryview(memory))
    random = np.random.default_rng(1)

    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    try:
        for delay in random.uniform(0.0005, 0.008, 40).tolist():
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                read_for_ever(reader, blocks(memory, offsets, 65_536))
            except KeyboardInterrupt:
                interrupted += 1
            memory[:] = b"\xa5" * len(data)
            time.sleep(0.002)
            assert memory[:] == b"\xa5" * len(data), "the kernel has written after the read was given up"
            reader.read_into(blocks(memory, offsets[:40], 65_536))
            assert memory[: 40 * 65_536] == data[: 40 * 65_536]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert interrupted == 40
    assert reader.oldest() is None
    reader.close()
    assert open_descriptors() == before


def test_no_object_an_op_is_made(disk, monkeypatch):
    data = os.urandom(1 << 20)
    reader = UringReader([write(disk / "a", data)])
    offsets = np.arange(0, len(data), 8192)
    memory = mmap.mmap(-1, len(data))
    plan = coalesce(
        np.zeros_like(offsets), offsets, np.full_like(offsets, 8192), align=reader.align, gap_bytes=0, max_bytes=1
    )
    ops = plan.ops(memoryview(memory))
    monkeypatch.setattr(ReadOps, "__getitem__", lambda *_: pytest.fail("an op was made"))
    reader.read_into(ops)
    assert memory[:] == data
    reader.close()
