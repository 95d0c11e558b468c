from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from shardkit.errors import IntegrityError, StorageError, TarFormatError, UnsafeError
from shardkit.format.foreign_header import Refusal
from shardkit.format.foreign_tar import ArchiveEnd
from shardkit.format.grouping import SampleVerdict
from shardkit.indexing import scan as scan_module
from shardkit.indexing.scan import scan


def write_tar(path: Path, files: dict[str, bytes], tar_format: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def files_of(count: int, image_bytes: int) -> dict[str, bytes]:
    files = {}
    for number in range(count):
        files[f"n/{number:05d}.cls"] = b"%d" % (number % 10)
        files[f"n/{number:05d}.json"] = b'{"number": %d}' % number
        files[f"n/{number:05d}.jpg"] = os.urandom(image_bytes + number)
    return files


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_bytes_at_each_place_are_the_ones_that_webdataset_gives(tmp_path, tar_format):
    tariterators = pytest.importorskip("webdataset.tariterators")
    path = write_tar(tmp_path / "a.tar", files_of(30, 1000) | {"x/" * 40 + "é" * 30 + ".JPG": b"last"}, tar_format)
    data, found = path.read_bytes(), scan(path)
    files = tariterators.tar_file_expander([{"url": "a.tar", "stream": io.BytesIO(data)}])
    theirs = list(tariterators.group_by_keys(files))
    assert [sample.key for sample in found.usable] == [sample["__key__"] for sample in theirs]
    for ours, sample in zip(found.usable, theirs, strict=True):
        assert {end: data[m.offset : m.offset + m.size] for end, m in ours.members.items()} == {
            name: value for name, value in sample.items() if not name.startswith("__")
        }
    assert (found.refused, found.end, found.file_bytes) == ([], ArchiveEnd.TWO_ZERO_BLOCKS, len(data))


def test_dalis_own_indexer_finds_every_member_at_the_same_place(tmp_path):
    wds2idx = Path(sys.executable).with_name("wds2idx")
    if not wds2idx.exists():
        pytest.skip("wds2idx is not installed")
    path = write_tar(tmp_path / "a.tar", files_of(20, 3000), tarfile.GNU_FORMAT)
    subprocess.run([wds2idx, path, tmp_path / "a.idx"], check=True, stdout=subprocess.DEVNULL)
    lines = (tmp_path / "a.idx").read_text().splitlines()[1:]
    assert lines == [
        " ".join(f"{end} {m.offset} {m.size} {m.name}" for end, m in sample.members.items())
        for sample in scan(path).usable
    ]


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_payloads_are_passed_over(tmp_path):
    path = write_tar(tmp_path / "a.tar", files_of(8, 2 << 20))
    before = bytes_read()
    assert len(scan(path).usable) == 8
    assert bytes_read() - before < 8 * 3 * 4096 + 20_000 < path.stat().st_size / 100


def test_small_members_share_a_read(tmp_path):
    path = write_tar(tmp_path / "a.tar", files_of(200, 600))
    before = int(Path("/proc/self/io").read_text().split("syscr: ")[1].split()[0])
    assert len(scan(path).usable) == 200
    calls = int(Path("/proc/self/io").read_text().split("syscr: ")[1].split()[0]) - before
    assert calls < path.stat().st_size / 4096 + 20


def test_what_cannot_be_taken_is_told_with_its_reason(tmp_path):
    for name in ("a.jpg", "b.cls", "b.jpg"):
        (tmp_path / name).write_bytes(b"1")
    (tmp_path / "a.cls").symlink_to("b.cls")
    names = ["a.jpg", "a.cls", "b.cls", "b.jpg"]
    subprocess.run(["tar", "-C", tmp_path, "-cf", tmp_path / "a.tar", *names], check=True)
    found = scan(tmp_path / "a.tar")
    assert [(m.name, m.refusal) for m in found.refused] == [("a.cls", Refusal.LINK)]
    assert [(s.key, set(s.verdicts)) for s in found.samples] == [("a", {SampleVerdict.REFUSED_MEMBER}), ("b", set())]
    assert [s.key for s in found.usable] == ["b"]


def test_a_tar_behind_a_tar_is_told_with_its_place(tmp_path):
    one = write_tar(tmp_path / "a.tar", {"a.jpg": b"1"}).read_bytes()
    assert (scan(tmp_path / "a.tar").end_offset, len(one)) == (1024, 10240)
    (tmp_path / "b.tar").write_bytes(one + one)
    with pytest.raises(TarFormatError, match=r"follows the zeros that end a tar.*b\.tar:10240;.*found a header"):
        scan(tmp_path / "b.tar")


def test_a_hole_behind_the_end_is_not_read(tmp_path, monkeypatch):
    path = write_tar(tmp_path / "a.tar", {"a.jpg": b"1"})
    os.truncate(path, 1 << 43)
    left, read = [1 << 20], os.preadv

    def preadv(fd, buffers, at):
        left[0] -= len(buffers[0])
        assert left[0] >= 0
        return read(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", preadv)
    assert (scan(path).end_offset, scan(path).end) == (1024, ArchiveEnd.TWO_ZERO_BLOCKS)
    with path.open("r+b") as file:
        file.seek((1 << 42) + 7)
        file.write(b"?")
    with pytest.raises(TarFormatError, match=rf"a\.tar:{1 << 42};"):
        scan(path)


def test_where_holes_cannot_be_asked_for_zeros_are_read(tmp_path, monkeypatch):
    path = write_tar(tmp_path / "a.tar", {"a.jpg": b"1"})
    os.truncate(path, 3 << 20)

    def refuse(*_):
        raise OSError(errno.EINVAL, "no such way to seek")

    monkeypatch.setattr(os, "lseek", refuse)
    assert scan(path).end is ArchiveEnd.TWO_ZERO_BLOCKS
    with path.open("ab") as file:
        file.write(b"?")
    with pytest.raises(TarFormatError, match=rf"a\.tar:{3 << 20};"):
        scan(path)


def test_an_error_names_file_and_place(tmp_path):
    path = write_tar(tmp_path / "a\n.tar", {"a.jpg": b"1" * 600, "b.jpg": b"2"})
    damaged = bytearray(path.read_bytes())
    damaged[1536 + 3] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(TarFormatError, match=r"checksum is wrong: .*a\\n\.tar:1536; expected checksum"):
        scan(path)


def test_a_fifo_is_refused_and_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.tar")
    with pytest.raises(UnsafeError, match="not a regular file"):
        scan(tmp_path / "a.tar")


def test_a_file_that_is_not_there_is_an_error_of_the_storage(tmp_path):
    with pytest.raises(StorageError, match="ENOENT"):
        scan(tmp_path / "a.tar")


@pytest.mark.parametrize("action", ["grow", "shrink"])
def test_a_shard_that_changes_meanwhile_is_noticed(tmp_path, monkeypatch, action):
    path = write_tar(tmp_path / "a.tar", files_of(3, 9000))
    read, once = os.preadv, threading.Lock()

    def preadv(fd, buffers, offset):
        count = read(fd, buffers, offset)
        if once.acquire(blocking=False):
            os.truncate(path, path.stat().st_size + 512 if action == "grow" else 1024)
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(IntegrityError if action == "grow" else StorageError, match="while it was scanned"):
        scan(path)


def test_a_shard_has_a_limit_of_members(tmp_path, monkeypatch):
    path = write_tar(tmp_path / "a.tar", files_of(3, 10))
    monkeypatch.setattr(scan_module, "MAX_MEMBERS", 8)
    with pytest.raises(UnsafeError, match="too many members"):
        scan(path)
    monkeypatch.setattr(scan_module, "MAX_MEMBERS", 9)
    assert len(scan(path).usable) == 3
