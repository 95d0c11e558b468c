"""What is not packed has a stable reason, made here from real files; the run goes on, and nothing is padded or cut."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import resource
import stat
import struct
import tarfile
import threading
import time

import pytest
from PIL import Image

from shardkit.errors import SourceError, StorageError
from shardkit.format.foreign_header import Refusal as MemberRefusal
from shardkit.format.jpeg import REFUSALS
from shardkit.packing import source as reading
from shardkit.packing.refusals import REASONS, Refusal, encode_refusals, stop_error
from shardkit.packing.run import pack, run_pack
from shardkit.testing.photos import encode

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def packed(tmp_path, make_options):
    """Return a function: pack a source into `tmp_path/ds` in this process; return what was refused, from the file."""

    def run(source, target=None, **given):
        target = target or tmp_path / "ds"
        result = run_pack(source, target, make_options(**given), jobs=1)
        rejected = target / "rejected.jsonl"
        lines = rejected.read_text("utf-8").splitlines() if rejected.exists() else []
        documents = [json.loads(line) for line in lines]
        assert result.manifest.totals.refused == len(documents) == sum(result.refused.values())
        assert {document["reason"] for document in documents} == set(result.refused)
        assert all(document.keys() == {"path", "reason", "detail"} and document["detail"] for document in documents)
        return documents

    return run


def members(folder):
    """Return the payload of every member of every shard, by name."""
    found = {}
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            found |= {member.name: tar.extractfile(member).read() for member in tar}
    return found


# --- every reason


def segment(marker, body=b""):
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


FRAME = struct.pack(">BHHB", 8, 8, 8, 1) + b"\1\x11\0"
SCAN = b"\1\1\0\0\x3f\0"
COLOUR_FRAME = struct.pack(">BHHB", 8, 65500, 65500, 3) + b"\1\x11\0\2\x11\1\3\x11\1"
COLOUR_SCAN = b"\3\1\0\2\x11\3\x11\0\x3f\0"
BROKEN = {
    "empty": b"",
    "not-jpeg": b"<html>not found</html>",
    "no-frame": b"\xff\xd8\xff\xd9",
    "no-scan": b"\xff\xd8" + segment(0xC0, FRAME) + b"\xff\xd9",
    "two-frames": b"\xff\xd8" + segment(0xC0, FRAME) * 2 + segment(0xDA, SCAN) + b"\xff\xd9",
    "bad-dimensions": b"\xff\xd8" + segment(0xC0, FRAME[:1] + bytes(4) + FRAME[5:]) + segment(0xDA, SCAN) + b"\xff\xd9",
    "bad-marker": b"\xff\xd8" + segment(0xE0, b"JFIF\0") + b"junk" + b"\xff\xd9",
    "too-many-pixels":
        b"\xff\xd8" + segment(0xC0, COLOUR_FRAME) + segment(0xDA, COLOUR_SCAN) + bytes(250) + b"\xff\xd9",
}  # fmt: skip


@pytest.mark.parametrize("reason", [*BROKEN, "truncated", "undecodable", "too-large"])
def test_what_a_file_holds_can_be_a_reason(plant, packed, jpeg, tmp_path, reason):
    path = plant("c/a.jpg", "c/good.jpg") / "c/a.jpg"
    whole, given = jpeg(1), {}
    if reason == "truncated":
        path.write_bytes(whole[:-2])
    elif reason == "undecodable":
        table = whole.index(b"\xff\xc4")
        path.write_bytes(whole[: table + 5] + b"\xff" * 16 + whole[table + 21 :])
        given = {"check": "decode"}
    elif reason == "too-large":
        path.write_bytes(jpeg(2, width=200, height=200))
        given = {"max_bytes": 10_000}
    else:
        path.write_bytes(BROKEN[reason])
    (refused,) = packed(tmp_path / "src", **given)
    assert (refused["path"], refused["reason"]) == ("c/a.jpg", reason)
    assert members(tmp_path / "ds").keys() == {"c/good.cls", "c/good.jpg"}


def test_where_a_file_lies_can_be_a_reason(plant, packed, tmp_path):
    top = plant("c/good.jpg", "stray.jpg")
    outside = plant("a.jpg", root="outside")
    (top / "c/out.jpg").symlink_to(outside / "a.jpg")
    (top / "c/gone.jpg").symlink_to("nothing")
    os.mkfifo(top / "c/fifo.jpg")
    assert {document["path"]: document["reason"] for document in packed(top)} == {
        "stray.jpg": "no-class", "c/out.jpg": "outside-link", "c/gone.jpg": "broken-link", "c/fifo.jpg": "not-a-file",
    }  # fmt: skip


def test_what_a_list_says_can_be_a_reason(plant, packed):
    list_file = plant("a.jpg") / "list.jsonl"
    list_file.write_text("\n".join(json.dumps({"path": path}) for path in ("gone.jpg", "", "a.jpg")))
    assert [(document["path"], document["reason"]) for document in packed(list_file)] == [
        ("gone.jpg", "missing"), ("", "bad-path"),
    ]  # fmt: skip


def test_a_file_that_may_not_be_read_is_refused(open_folder, unprivileged, packed, jpeg):
    (open_folder / "src").mkdir()
    (open_folder / "ds").mkdir()
    (open_folder / "ds").chmod(0o777)
    for name in ("closed", "good"):
        (open_folder / f"src/{name}.jpg").write_bytes(jpeg())
    (open_folder / "src/closed.jpg").chmod(0)
    with unprivileged():
        (refused,) = packed(open_folder / "src", open_folder / "ds")
    assert (refused["path"], refused["reason"], refused["detail"]) == (
        "closed.jpg", "unreadable", "Permission denied (EACCES)",
    )  # fmt: skip


CONVERTED = {"damaged", "damaged-shard", "unsafe-shard", "bad-label", "bad-json", "not-adjacent", "duplicate-key",
             "duplicate-member", "refused-member", "no-image", "no-samples", "unsafe-name", "same-name",
             *(refusal.code for refusal in MemberRefusal)}  # fmt: skip
"""Only conversions have these; test_foreign.py and test_tree_written.py in tests/converting, and
tests/hostile/test_tars.py, make each."""


def test_every_reason_is_made_by_a_test():
    here = {*BROKEN, "truncated", "undecodable", "too-large", "no-class", "outside-link", "broken-link", "not-a-file"}
    assert here | {"missing", "bad-path", "unreadable", "changed"} | CONVERTED == set(REASONS)
    assert set(REFUSALS) < set(REASONS)


# --- what becomes of it


def test_refusals_stand_in_source_order_and_odd_paths_are_escaped(plant, packed, tmp_path):
    names = [b"b/\xff\n.jpg", "b/100%.jpg", "a/\u00e9.jpg", "a/z.jpg"]
    top = plant(*names, "a/good.jpg", "stray.jpg")
    for name in names:
        with open(os.path.join(os.fsencode(top), os.fsencode(name)), "wb"):
            pass
    documents = packed(top)
    assert [document["path"] for document in documents] == [
        "a/z.jpg", "a/\u00e9.jpg", "b/100%25.jpg", "b/%FF\n.jpg", "stray.jpg",
    ]  # fmt: skip
    assert (tmp_path / "ds/rejected.jsonl").read_bytes().count(b"\n") == 5


def test_refusals_of_a_list_stand_in_its_order():
    refusals = [Refusal(2, b"a", "empty", "x"), Refusal(10, b"b", "empty", "x"), Refusal(1, b"c", "empty", "x")]
    assert [json.loads(line)["path"] for line in encode_refusals(refusals).splitlines()] == ["c", "a", "b"]


def test_a_detail_that_is_no_text_is_still_json():
    (line,) = encode_refusals([Refusal(0, b"a", "undecodable", "\udcff\ud800 \u2028\x1b")]).splitlines()
    assert json.loads(line)["detail"] == "\udcff\ud800 \u2028\x1b"


def test_when_all_are_refused_there_is_no_dataset(plant, tmp_path, make_options):
    top = plant("c/a.jpg", "c/b.jpg")
    for name in ("a", "b"):
        (top / f"c/{name}.jpg").write_bytes(b"")
    with pytest.raises(SourceError, match=r"every source was refused.*found 2 empty") as caught:
        run_pack(top, tmp_path / "ds", make_options(), jobs=1)
    assert caught.value.exit_code == 3
    assert [path.name for path in (tmp_path / "ds").iterdir() if path.name != ".shardkit"] == ["rejected.jsonl"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_on_error_fail_stops_at_the_first(plant, tmp_path, make_options, jobs):
    top = plant(*(f"c/{i}.jpg" for i in range(5)))
    (top / "c/3.jpg").write_bytes(b"")
    with pytest.raises(SourceError, match=r"refused a source \(empty\).*c/3\.jpg.*--on-error skip") as caught:
        run_pack(top, tmp_path / "ds", make_options(on_error="fail", shuffle=False), jobs=jobs)
    assert caught.value.exit_code == 3
    assert not (tmp_path / "ds/manifest.json").exists()


def test_on_error_fail_stops_at_a_source_that_was_refused_unread(plant, tmp_path, make_options):
    top = plant("c/a.jpg", "stray.jpg")
    with pytest.raises(SourceError, match=r"no-class.*stray\.jpg"):
        run_pack(top, tmp_path / "ds", make_options(on_error="fail"), jobs=1)


def test_the_error_names_the_source_escaped():
    text = str(stop_error(Refusal(0, b"a\x1b\n.jpg", "empty", "no bytes")))
    assert "a\\x1b\\n.jpg" in text
    assert text.isprintable()


# --- sizes


def read_bytes():
    """Return the bytes that this process has asked the system for."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def test_a_huge_sparse_file_is_refused_unread(plant, packed):
    top = plant("c/good.jpg")
    (top / "c/x.jpg").touch()
    os.truncate(top / "c/x.jpg", 9 << 30)
    before, peak, started = read_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    (refused,) = packed(top)
    assert (refused["reason"], refused["detail"]) == ("too-large", f"{9 << 30} bytes; at most {128 << 20}")
    assert read_bytes() - before < 10 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100 << 10  # KiB
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("over", [0, 1])
def test_the_limit_of_bytes_is_exact(plant, packed, jpeg, over):
    top = plant("c/a.jpg", "c/b.jpg")
    size = max(os.stat(top / f"c/{name}.jpg").st_size for name in "ab")
    (top / "c/a.jpg").write_bytes(jpeg(1).ljust(size + over, b"\0"))
    assert len(packed(top, max_bytes=size)) == over


@pytest.mark.parametrize("over", [0, 1])
def test_the_limit_of_pixels_is_exact(plant, packed, jpeg, over):
    top = plant("c/a.jpg", "c/b.jpg")  # 24 x 16
    (top / "c/a.jpg").write_bytes(jpeg(1, width=24 + over, height=16))
    documents = packed(top, max_pixels=24 * 16)
    assert [document["detail"] for document in documents] == ["25 x 16 pixels; at most 384"] * over


def test_an_image_larger_than_the_buffers_is_packed_whole(plant, packed, jpeg, tmp_path):
    top = plant("c/a.jpg", "c/b.jpg", "c/d.jpg")
    data = jpeg(1) + os.urandom(1 << 20) * 20  # trailing bytes are the image's
    (top / "c/b.jpg").write_bytes(data)
    assert packed(top) == []
    assert members(tmp_path / "ds")["c/b.jpg"] == data


# --- changes while it is read


@pytest.fixture
def meddle(monkeypatch):
    """Return a function: have `change` called after each of the first `times` reads of the file of that name."""

    def install(name, change, times=1):
        left = [times]
        read = os.preadv

        def watched(fd, buffers, offset):
            count = read(fd, buffers, offset)
            path = os.readlink(f"/proc/self/fd/{fd}")
            if path.endswith(name) and offset == 0 and left[0]:
                left[0] -= 1
                change(path)
            return count

        monkeypatch.setattr(reading.os, "preadv", watched)

    return install


def grow(path):
    with open(path, "ab") as file:
        file.write(b"more")


def shrink(path):
    os.truncate(path, os.stat(path).st_size - 100)


def rewrite(path):
    with open(path, "r+b") as file:
        file.write(b"\0\0\0")


def touch(path):
    status = os.stat(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def replace(path):
    status = os.stat(path)
    with open(path, "rb") as file, open(path + ".new", "wb") as new:
        new.write(file.read()[::-1])
    os.utime(path + ".new", ns=(status.st_atime_ns, status.st_mtime_ns))
    os.rename(path + ".new", path)


def swap(path):
    """Remove it and make it again, as an editor that saves."""
    with open(path, "rb") as file:
        data = file.read()
    os.unlink(path)
    with open(path, "wb") as file:
        file.write(data)


CHANGES = [grow, shrink, rewrite, touch, replace, swap]


@pytest.mark.parametrize("change", CHANGES)
def test_a_source_that_changes_at_every_read_is_refused(plant, packed, meddle, change, tmp_path):
    top = plant("c/a.jpg", "c/good.jpg")
    meddle("/a.jpg", change, times=9)
    (refused,) = packed(top, check="none")
    assert (refused["path"], refused["reason"]) == ("c/a.jpg", "changed")
    assert members(tmp_path / "ds").keys() == {"c/good.cls", "c/good.jpg"}


@pytest.mark.parametrize("change", CHANGES)
def test_a_source_that_changed_once_is_read_again_whole(plant, packed, meddle, change, tmp_path):
    top = plant("c/a.jpg", "c/good.jpg")
    before = (top / "c/a.jpg").read_bytes()
    meddle("/a.jpg", change)
    assert packed(top, check="none") == []
    after = (top / "c/a.jpg").read_bytes()
    assert members(tmp_path / "ds")["c/a.jpg"] == after
    assert (after == before) == (change in (touch, swap))


def test_a_source_that_vanishes_is_missing(plant, packed, meddle):
    top = plant("c/a.jpg", "c/good.jpg")
    meddle("/a.jpg", os.unlink)
    (refused,) = packed(top)
    assert (refused["path"], refused["reason"]) == ("c/a.jpg", "missing")


def test_a_source_without_a_name_for_a_moment_is_read_again(plant, packed, monkeypatch, tmp_path):
    top = plant("c/a.jpg", "c/good.jpg")
    path, asked = os.fsencode(top / "c/a.jpg"), []
    status_of = os.stat

    def away(name, **given):
        if name != path or asked:
            return status_of(name, **given)
        asked.append(name)
        os.rename(path, path + b".away")
        try:
            return status_of(name, **given)
        finally:
            os.rename(path + b".away", path)

    monkeypatch.setattr(reading.os, "stat", away)
    assert packed(top) == []
    assert asked


def test_a_source_that_becomes_a_fifo_is_refused_without_waiting(plant, packed, meddle, tmp_path):
    top = plant("c/a.jpg", "c/good.jpg")

    def become_fifo(path):
        os.unlink(path)
        os.mkfifo(path)

    meddle("/a.jpg", become_fifo)
    (refused,) = packed(top)
    assert (refused["path"], refused["reason"]) == ("c/a.jpg", "not-a-file")


def test_a_read_error_is_a_refusal_with_its_place(plant, packed, monkeypatch):
    top = plant("c/a.jpg", "c/good.jpg")
    read = os.preadv

    def failing(fd, buffers, offset):
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/a.jpg"):
            raise OSError(5, "Input/output error")
        return read(fd, buffers, offset)

    monkeypatch.setattr(reading.os, "preadv", failing)
    (refused,) = packed(top)
    assert (refused["reason"], refused["detail"]) == ("unreadable", "Input/output error (EIO) at byte 0")


def test_short_reads_are_put_together(plant, packed, monkeypatch, tmp_path):
    top = plant("c/a.jpg")
    read = os.preadv
    monkeypatch.setattr(reading.os, "preadv", lambda fd, buffers, at: read(fd, [buffers[0][:7]], at))
    assert packed(top) == []
    assert members(tmp_path / "ds")["c/a.jpg"] == (top / "c/a.jpg").read_bytes()


LYING = [path for path in ("/proc/version", "/sys/kernel/uevent_seqnum") if os.path.exists(path)]


@pytest.mark.parametrize("path", LYING)
def test_a_file_whose_size_lies_is_neither_padded_nor_cut(plant, packed, path, tmp_path):
    # The kernel states 0 bytes for the one and a page for the other.
    with open(path, "rb") as file:
        content = file.read()
    assert stat.S_ISREG(os.stat(path).st_mode)
    assert len(content) not in (0, os.stat(path).st_size)
    list_file = plant("a.jpg") / "list.jsonl"
    list_file.write_text(f'{{"path": "a.jpg"}}\n{{"path": "{path}"}}\n')
    (refused,) = packed(list_file, check="none")
    assert (refused["path"], refused["reason"]) == (path, "changed")
    assert members(tmp_path / "ds").keys() == {"a.json", "a.jpg"}


@contextlib.contextmanager
def meanwhile(work):
    """Call `work` again and again in a thread."""
    stop = threading.Event()

    def loop():
        while not stop.is_set():
            work()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_a_growing_file_is_packed_as_it_was_or_refused(plant, packed, tmp_path, jpeg):
    whole = jpeg(7, width=300, height=300)
    names = [f"c/{i}.jpg" for i in range(60)]
    top = plant(*names, "c/good.jpg")
    file = open(top / "c/0.jpg", "wb", buffering=0)  # noqa: SIM115 - the thread's
    file.write(whole)
    for name in names[1:]:
        (top / name).unlink()
        os.link(top / "c/0.jpg", top / name)

    def append():
        file.write(b"x" * 100)
        time.sleep(0.0002)

    with file, meanwhile(append):
        documents = packed(top)
    assert {document["reason"] for document in documents} <= {"changed"}
    found = members(tmp_path / "ds")
    for name in {name for name in found if name.endswith(".jpg") and name != "c/good.jpg"}:
        assert found[name].rstrip(b"x") == whole
        # Between two appends; or within one that goes over the end of a page, where the kernel states the size, too.
        assert (len(found[name]) - len(whole)) % 100 == 0 or len(found[name]) % mmap.PAGESIZE == 0


def test_a_file_that_is_replaced_again_and_again_is_one_of_both(plant, packed, tmp_path, jpeg):
    both = [jpeg(1, width=300, height=300), jpeg(2, width=250, height=333)]
    top = plant(*(f"c/{i}.jpg" for i in range(60)), "c/good.jpg")
    turn = iter(range(10**9))

    def exchange():
        number = next(turn)
        (tmp_path / "new").write_bytes(both[number % 2])
        os.rename(tmp_path / "new", top / f"c/{number % 60}.jpg")

    for _ in range(60):
        exchange()
    with meanwhile(exchange):
        documents = packed(top)
    assert {document["reason"] for document in documents} <= {"changed"}
    found = members(tmp_path / "ds")
    images = [name for name in found if name.endswith(".jpg") and name != "c/good.jpg"]
    assert len(images) + len(documents) == 60
    assert all(found[name] in both for name in images)


def test_an_image_of_a_refused_type_is_named_by_what_it_is(plant, packed):
    top = plant("c/good.jpg", "c/a.jpg")
    (top / "c/a.jpg").write_bytes(encode(Image.new("RGB", (8, 8)), "PNG"))
    (refused,) = packed(top)
    assert refused["reason"] == "not-jpeg"
    assert "png" in refused["detail"]


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_machine_that_has_run_out_is_no_fault_of_the_source(tmp_path, plant, monkeypatch, call):
    real = getattr(os, call)

    def fail(what, *rest, **given):
        if call == "preadv" or os.fsencode(what).endswith(b".jpg"):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(what, *rest, **given)

    source = plant("a/1.jpg")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StorageError, match=r"cannot read a source.*1\.jpg.*EMFILE"):
        pack(source, tmp_path / "ds", jobs=1)


def test_sources_are_announced_before_they_are_read(tmp_path, plant, monkeypatch):
    told = []
    real_advise, real_read = os.posix_fadvise, os.preadv
    monkeypatch.setattr(os, "posix_fadvise", lambda *given: told.append("announced") or real_advise(*given))
    monkeypatch.setattr(os, "preadv", lambda *given: told.append("read") or real_read(*given))
    pack(plant(*(f"a/{number}.jpg" for number in range(20))), tmp_path / "ds", jobs=1)
    assert told.count("announced") == 20
    assert told.index("read") == 17  # sixteen wait while one is read


def test_a_link_that_takes_a_file_s_place_after_the_scan_is_refused(tmp_path, plant):
    source = plant("a/1.jpg", "a/2.jpg")
    outside = plant("secret.jpg", root="outside") / "secret.jpg"

    class Swap:
        def begin(self, *_):
            (source / "a/1.jpg").unlink()
            (source / "a/1.jpg").symlink_to(outside)

        def advance(self, *_):
            pass

    pack(source, tmp_path / "ds", jobs=1, progress=Swap())
    (line,) = (tmp_path / "ds" / "rejected.jsonl").read_text().splitlines()
    assert (json.loads(line)["path"], json.loads(line)["reason"]) == ("a/1.jpg", "outside-link")


def test_a_file_that_is_too_large_needs_no_space(tmp_path, plant):
    source = plant("a/1.jpg")
    with open(source / "a" / "huge.jpg", "wb") as file:
        file.truncate(200 << 30)
    assert pack(source, tmp_path / "ds", jobs=1).totals.samples == 1
    assert json.loads((tmp_path / "ds" / "rejected.jsonl").read_text())["reason"] == "too-large"
