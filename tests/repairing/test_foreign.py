"""Damaged tars of other tools: what is saved is what Python's tarfile reads of the tar before its damage."""

from __future__ import annotations

import errno
import io
import json
import os
import tarfile
import tracemalloc
from typing import TYPE_CHECKING

import pytest

import shardkit
from shardkit.cli.main import main
from shardkit.errors import ConfigError, FormatError
from shardkit.format.grouping import split_name
from shardkit.indexing.scan import scan
from shardkit.repairing.damaged_file import DamagedFile
from shardkit.repairing.foreign_walk import walk_foreign
from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.foreign import COMMANDS, write_by_command, write_tar
from shardkit.testing.packs import contents, snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardkit.repairing.result import RepairResult

LONG = "a folder with a name that is long/" * 5
PYTHON = {"ustar": tarfile.USTAR_FORMAT, "pax": tarfile.PAX_FORMAT, "python gnu": tarfile.GNU_FORMAT}
WRITERS = [*PYTHON, "gnu tar gnu", "gnu tar pax", "gnu tar ustar"]


def sample_files(folder: str = "", count: int = 9) -> dict[str, bytes]:
    """Return three members a sample, in another order each time."""
    files: dict[str, bytes] = {}
    for n in range(count):
        members = {"cls": b"%d" % n, "jpg": tiny_jpeg(n, 700 + 311 * n), "json": b'{"n": %d}' % n}
        names = sorted(members, key=lambda name: (name, len(name))[n % 2 :])
        files |= {f"{folder}{n:06}.{name}": members[name] for name in names[n % 3 :] + names[: n % 3]}
    return files


def write(path: Path, writer: str, folder: str = "", count: int = 9) -> dict[str, bytes]:
    """Write a tar; return its members."""
    path.parent.mkdir(exist_ok=True)
    files = sample_files(folder, count)
    if writer in PYTHON:
        write_tar(path, files, PYTHON[writer], mtime=1234567890.5)
    elif not write_by_command(path, files, COMMANDS[writer]):
        pytest.skip(f"no {writer}")
    return files


def grouped(files: Mapping[str, bytes]) -> dict[str, dict[str, bytes]]:
    samples: dict[str, dict[str, bytes]] = {}
    for name, data in files.items():
        key, extension = split_name(name) or ("", "")
        samples.setdefault(key, {})[extension] = data
    return samples


def read(path: Path) -> dict[str, bytes]:
    with tarfile.open(path, "r:") as tar:
        return {member.name: tar.extractfile(member).read() for member in tar.getmembers()}


def places(path: Path) -> dict[str, tuple[int, int, int]]:
    """Return where each member begins, where its own header is and where its payload is, as tarfile says."""
    with tarfile.open(path, "r:") as tar:
        return {m.name: (m.offset, m.offset_data - 512, m.offset_data) for m in tar.getmembers()}


def overwrite(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.fixture
def salvaged(tmp_path):
    """Return a function that repairs a folder of tars, and holds the result against everything that is always true."""

    def call(folder: Path, files: Mapping[str, bytes], **options: object) -> tuple[RepairResult, set[str], list[dict]]:
        out, before = tmp_path / "new", snapshot(folder)
        looked = shardkit.repair(folder, out=out, dry_run=True)
        assert not out.exists()
        result = shardkit.repair(folder, out=out, **options)
        assert snapshot(folder) == before, "a tar was changed"
        assert (looked.shards, looked.counts, looked.first) == (result.shards, result.counts, result.first)
        saved = {name: data for path in sorted(out.glob("*.tar")) for name, data in read(path).items()}
        wanted, found = grouped(files), grouped(saved)
        assert all(found[key] == wanted[key] for key in found), "a sample is not what it was"
        assert [shard.bytes for shard in result.shards] == [
            os.path.getsize(out / shard.name) if shard.state != "nothing" else 0 for shard in result.shards
        ]
        lines = (out / "lost.jsonl").read_text().splitlines() if result.lost else []
        assert (out / "lost.jsonl").exists() == bool(lines)
        assert set(os.listdir(out)) == {*result.written}
        lost = [json.loads(line) for line in lines]
        assert len(lost) == result.lost == sum(shard.lost for shard in result.shards)
        assert shardkit.index([out]).totals.refused == 0
        with shardkit.open(out) as ds:
            assert {sample.key: bytes(sample.jpeg) for sample in ds} == {k: v["jpg"] for k, v in found.items()}
        return result, found.keys(), lost

    return call


def test_whole_tars_are_copied_as_they_are(tmp_path, salvaged):
    folder = tmp_path / "ds"
    files = write(folder / "a.tar", "pax", "a/") | write(folder / "b.tar", "gnu tar gnu", "b/")
    before = contents(folder)
    result, kept, lost = salvaged(folder, files)
    assert (result.exit_code, kept, lost) == (0, grouped(files).keys(), [])
    assert {name: data for name, data in contents(tmp_path / "new").items() if name.endswith(".tar")} == before
    assert {shard.state for shard in result.shards} == {"whole"}


@pytest.mark.parametrize("folder", ["", LONG])
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(
    "damage", ["cut payload", "cut header", "cut boundary", "byte", "first", "inserted", "garbage", "zeroed", "removed"]
)
def test_every_sample_is_saved_that_no_damage_reaches(tmp_path, salvaged, writer, folder, damage):
    path = tmp_path / "ds" / "x.tar"
    files = write(path, writer, folder)
    names, where, data = [*files], places(path), path.read_bytes()
    # The second member of sample 4, which has three.
    start, header, payload = where[names[13]]
    changed, numbers = {
        "cut payload": (data[: payload + 1], {4, *range(5, 9)}), "cut header": (data[: header + 100], {*range(4, 9)}),
        "cut boundary": (data[: where[names[15]][0]], {*range(5, 9)}),
        "byte": (data[: header + 130] + b"?" + data[header + 131 :], {4}),
        "first": (b"?" + data[1:], {0}),
        "inserted": (data[:start] + os.urandom(1536) + data[start:], set[int]()),
        "garbage": (data[: payload - 700] + b"x" * 4096 + data[payload - 700 + 4096 :], None),
        "zeroed": (data[: start - 600] + bytes(2048) + data[start - 600 + 2048 :], None),
        "removed": (data[: payload - 1024] + data[payload + 512 :], None),
    }[damage]  # fmt: skip
    path.write_bytes(changed)
    result, kept, lost = salvaged(tmp_path / "ds", files)
    keys = [*grouped(files)]
    named = {line["key"] for line in lost} - {None}
    assert named <= set(keys)
    assert result.exit_code == 3
    if numbers is None:
        assert {keys[n] for n in (0, 1, 2, 6, 7, 8)} <= kept
        assert keys[4] not in kept
    else:
        assert {*keys} - kept == {keys[n] for n in numbers}
    if not damage.startswith("cut"):
        assert {*keys} - kept - named <= {keys[5]}
    assert all(line["shard"] == "x.tar" and 0 <= line["offset"] <= len(changed) for line in lost)


def test_a_member_that_the_file_cuts_off_is_lost_by_its_long_name(tmp_path, salvaged):
    path = tmp_path / "ds" / "x.tar"
    files = write(path, "pax", LONG)
    name = [*files][15]
    path.write_bytes(path.read_bytes()[: places(path)[name][2] + 1])
    _, kept, lost = salvaged(tmp_path / "ds", files)
    assert [(line["key"], line["reason"]) for line in lost] == [(f"{LONG}000005", "truncated")]
    assert len(kept) == 5


def test_headers_in_a_payload_are_no_members(tmp_path, salvaged):
    inner = write_tar(tmp_path / "inner.tar", sample_files("inner/", 2)).read_bytes()
    files = {}
    for n in range(6):
        files |= {f"{n}.jpg": tiny_jpeg(n, 600), f"{n}.bin": b"!" * 512 + inner, f"{n}.cls": b"1"}
    path = tmp_path / "ds" / "x.tar"
    path.parent.mkdir()
    write_tar(path, files, tarfile.GNU_FORMAT)
    overwrite(path, places(path)["3.cls"][1] + 130, b"?")
    _, kept, lost = salvaged(tmp_path / "ds", files)
    assert kept == {*"01245"}
    assert [line["key"] for line in lost] == ["3", None]
    # The last member is cut off: nothing behind its header is one.
    path.write_bytes(path.read_bytes()[: places_before_damage(files, tmp_path)["4.bin"][2] + len(inner)])
    with DamagedFile(os.fsencode(path)) as file:
        members, _ = walk_foreign(file)
    assert [member.name for member in members if "inner" in member.name] == []


def places_before_damage(files: Mapping[str, bytes], folder: Path) -> dict[str, tuple[int, int, int]]:
    return places(write_tar(folder / "again.tar", files, tarfile.GNU_FORMAT))


def test_a_name_that_lost_its_extended_header_is_not_believed(tmp_path, salvaged):
    path = tmp_path / "ds" / "x.tar"
    folder = "f" * 90 + "/" + "e.x/" * 5  # cut at 100 bytes it has a dot
    files = {f"{folder}{n}.jpg": tiny_jpeg(n, 600) for n in range(6)}
    path.parent.mkdir()
    write_tar(path, files, tarfile.PAX_FORMAT)
    overwrite(path, places(path)[f"{folder}3.jpg"][0] + 130, b"?")
    _, kept, lost = salvaged(tmp_path / "ds", files)
    assert kept == {f"{folder}{n}" for n in (0, 1, 2, 4, 5)}
    assert [line["key"] for line in lost] == [None]


def test_a_name_that_fills_its_field_may_have_lost_the_only_extended_header(tmp_path, salvaged):
    path = tmp_path / "ds" / "x.tar"
    names = [f"{n}.jpg" for n in range(3)] + ["f" * 88 + "/e.x/e.x/e.x/3.jpg"] + [f"{n}.jpg" for n in range(4, 6)]
    files = {name: tiny_jpeg(n, 600) for n, name in enumerate(names)}
    path.parent.mkdir()
    write_tar(path, files, tarfile.GNU_FORMAT)
    overwrite(path, places(path)[names[3]][0] + 130, b"?")
    _, kept, lost = salvaged(tmp_path / "ds", files)
    assert kept == {*"01245"}
    assert [line["key"] for line in lost] == [None]


def test_what_tar_readers_disagree_about_is_passed_over_alone(tmp_path, salvaged):
    path = tmp_path / "ds" / "x.tar"
    path.parent.mkdir()
    files = sample_files()
    with tarfile.open(path, "w") as tar:
        for n, (name, data) in enumerate(files.items()):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            if n == 13:  # a folder with a payload
                info.type = tarfile.DIRTYPE
            tar.addfile(info, io.BytesIO(data))
    _, kept, lost = salvaged(tmp_path / "ds", files)
    assert {*grouped(files)} - kept == {"000004"}
    assert "disagree" in str(lost)


def test_what_cannot_be_read_is_lost_alone(tmp_path, salvaged, monkeypatch):
    path = tmp_path / "ds" / "x.tar"
    files = write(path, "gnu tar gnu")
    bad = places(path)["000006.jpg"][2] + 700
    preadv = os.preadv

    def failing(fd, buffers, offset, *flags):
        if "/ds/" in os.readlink(f"/proc/self/fd/{fd}") and offset <= bad < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "Input/output error")
        return preadv(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", failing)
    _, kept, lost = salvaged(tmp_path / "ds", files)
    assert {*grouped(files)} - kept == {"000006"}
    assert [(line["key"], line["reason"]) for line in lost] == [("000006", "read-error")]


@pytest.mark.parametrize("filling", [b"x", b"\0"])
@pytest.mark.parametrize("size", [1000, 1100, 1530])
def test_a_payload_that_a_damage_reaches_into_is_not_taken_for_whole(tmp_path, salvaged, filling, size):
    path = tmp_path / "ds" / "x.tar"
    path.parent.mkdir()
    files = {f"{n}.{kind}": tiny_jpeg(n, size) if kind == "jpg" else b"1" for n in range(6) for kind in ("cls", "jpg")}
    write_tar(path, files, tarfile.USTAR_FORMAT)
    overwrite(path, places(path)["2.jpg"][2] + size - 9, filling * 1024)
    _, kept, lost = salvaged(tmp_path / "ds", files)
    assert kept == {*"0145"}
    assert [line["key"] for line in lost] == ["2", None, "3"]


def test_a_cut_that_took_nothing_but_padding_loses_no_sample(tmp_path, salvaged):
    path = tmp_path / "ds" / "x.tar"
    files = write(path, "ustar")
    path.write_bytes(path.read_bytes()[: places(path)[[*files][-1]][2] + len([*files.values()][-1]) + 1])
    result, kept, lost = salvaged(tmp_path / "ds", files)
    assert (result.exit_code, kept) == (3, grouped(files).keys())
    assert [(line["key"], line["reason"]) for line in lost] == [(None, "truncated")]


def test_a_sample_with_a_member_that_is_cut_off_is_lost_whatever_others_have(tmp_path, salvaged):
    path = tmp_path / "ds" / "x.tar"
    path.parent.mkdir()
    files = {f"{n}.{kind}": tiny_jpeg(n, 600) for n in range(4) for kind in ("jpg", "seg.png")} | {"3.txt": b"x" * 600}
    data = write_tar(path, files).read_bytes()
    path.write_bytes(data[: places(path)["3.txt"][2] + 512])
    _, kept, lost = salvaged(tmp_path / "ds", files)
    assert kept == {*"012"}
    assert [(line["key"], line["reason"]) for line in lost] == [("3", "truncated")]


def test_one_kind_of_image_is_as_good_as_another(tmp_path):
    path = tmp_path / "ds" / "x.tar"
    path.parent.mkdir()
    files = {f"{n}.{kind}": tiny_jpeg(n, 600) for n, kind in enumerate(["jpg", "jpeg", "jpg", "jpeg", "jpg"])}
    data = write_tar(path, files).read_bytes()
    at = places(path)["2.jpg"][0]
    path.write_bytes(data[:at] + b"x" * 1024 + data[at:])
    result = shardkit.repair(tmp_path / "ds", out=tmp_path / "new")
    assert read(tmp_path / "new" / "x.tar") == files
    assert (result.shards[0].samples, result.lost) == (5, 1)


def test_what_stands_behind_the_end_and_is_no_header_is_a_gap(tmp_path, salvaged):
    path = tmp_path / "ds" / "x.tar"
    files = write(path, "ustar")
    data = path.read_bytes()
    path.write_bytes(data + b"?" + data[1:512])
    result, kept, lost = salvaged(tmp_path / "ds", files)
    assert (result.exit_code, kept) == (3, grouped(files).keys())
    assert [(line["key"], line["reason"]) for line in lost] == [(None, "headers")]


def test_the_last_member_whose_header_became_zeros_takes_its_sample_along(tmp_path, salvaged):
    path = tmp_path / "ds" / "x.tar"
    files = write(path, "ustar")
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1]
    data = bytearray(path.read_bytes())
    data[last.offset : last.offset_data] = bytes(512)
    path.write_bytes(data)
    with pytest.raises(FormatError, match="follows the zeros"):
        scan(path)
    result, kept, _ = salvaged(tmp_path / "ds", files)
    key = last.name.split(".")[0]
    assert (result.exit_code, kept) == (3, grouped(files).keys() - {key})


def test_a_sample_twice_or_torn_apart_is_no_sample_of_a_damaged_tar(tmp_path, salvaged):
    names = ["0.jpg", "0.cls", "1.jpg", "2.jpg", "2.cls", "1.cls", "0.jpg", "0.cls", "3.jpg", "3.cls", "4.jpg", "4.cls"]
    files = {name: tiny_jpeg(1, 600) if "jpg" in name else b"1" for name in names}
    path = tmp_path / "ds" / "x.tar"
    path.parent.mkdir()
    write_tar(path, [(name, files[name]) for name in names])
    path.write_bytes(path.read_bytes()[: 6 * 1536 + 6 * 1024])
    _, kept, lost = salvaged(tmp_path / "ds", files)
    assert kept == {"0", "2", "3", "4"}
    assert [(line["key"], line["reason"]) for line in lost] == [
        ("1", "members"), ("1", "members"), ("0", "duplicate"), (None, "truncated"),
    ]  # fmt: skip


def test_several_tars_are_saved_by_any_number_of_jobs(tmp_path):
    folder = tmp_path / "ds"
    for n in range(5):
        write(folder / f"{n}.tar", "python gnu", f"{n}/")
    overwrite(folder / "1.tar", 5000, b"x" * 9000)
    (folder / "2.tar").write_bytes((folder / "2.tar").read_bytes()[:9000])
    (folder / "3.tar").write_bytes(os.urandom(5000))
    found = []
    for jobs in (1, 4):
        out = tmp_path / f"new{jobs}"
        found.append((shardkit.repair(folder, out=out, jobs=jobs), contents(out)))
    assert found[0] == found[1]
    assert [shard.state for shard in found[0][0].shards] == ["whole", "salvaged", "salvaged", "nothing", "whole"]
    assert found[0][0].exit_code == 4
    assert not (tmp_path / "new1" / ".shardkit").exists()
    assert not (tmp_path / "new1" / "3.tar").exists()


def test_no_payload_is_in_memory(tmp_path):
    folder = tmp_path / "ds"
    folder.mkdir()
    files = {f"{n}.{kind}": bytes(9 << 20) if kind == "bin" else b"1" for n in range(4) for kind in ("bin", "cls")}
    path = write_tar(folder / "x.tar", files)
    path.write_bytes(path.read_bytes()[:-20000])
    del files
    tracemalloc.start()
    result = shardkit.repair(folder, out=tmp_path / "new", jobs=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(shard.samples for shard in result.shards) >= 3
    assert peak < 6 << 20


@pytest.mark.parametrize("dry_run", [True, False])
def test_without_a_new_folder_it_says_so(tmp_path, dry_run):
    write(tmp_path / "ds" / "x.tar", "pax")
    before = contents(tmp_path / "ds")
    with pytest.raises(ConfigError, match=r"in a new folder only.*shardkit index.*--out") as caught:
        shardkit.repair(tmp_path / "ds", dry_run=dry_run)
    assert caught.value.exit_code == 2
    assert contents(tmp_path / "ds") == before


@pytest.mark.parametrize("name", ["x.tar", "lost.jsonl", "index.arrow"])
def test_a_target_that_holds_something_is_refused(tmp_path, name):
    write(tmp_path / "ds" / "x.tar", "pax")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / name).write_text("mine")
    with pytest.raises(ConfigError):
        shardkit.repair(tmp_path / "ds", out=tmp_path / "new")
    assert contents(tmp_path / "new") == {name: b"mine"}


def test_nothing_saved_leaves_no_folder(tmp_path):
    write(tmp_path / "ds" / "x.tar", "pax", count=1)
    path = tmp_path / "ds" / "x.tar"
    path.write_bytes(path.read_bytes()[:1200])
    result = shardkit.repair(tmp_path / "ds", out=tmp_path / "new")
    assert (result.exit_code, result.written) == (4, ())
    assert not (tmp_path / "new").exists()


def test_the_command_says_what_is_next(tmp_path, capsys):
    path = tmp_path / "ds" / "x.tar"
    write(path, "ustar")
    overwrite(path, places(path)["000004.jpg"][1] + 130, b"?")
    with pytest.raises(SystemExit) as caught:
        main(["repair", str(tmp_path / "ds"), "--out", str(tmp_path / "new")])
    lines = capsys.readouterr().out.splitlines()
    assert caught.value.code == 3
    assert lines[0].startswith("x.tar: salvaged, 8 samples, 2 lost: structure proved")
    assert lines[-2:] == [f"wrote 2 files into {tmp_path}/new", f"next: shardkit index {tmp_path}/new"]
    with pytest.raises(SystemExit) as caught:
        main(["index", str(tmp_path / "new")])
    assert caught.value.code == 0
