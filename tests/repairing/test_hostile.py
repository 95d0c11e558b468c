"""Shards that are no shards: zeros, rubbish, tars that are made to mislead, and files that cost time."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.format.layout import place_sample
from shardkit.format.tar import encode_header, encode_padding, tail_bytes
from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.packs import snapshot

MIB = 1 << 20
FIRST = "tiny-000000.tar"


class Counter:
    """Counts the bytes that are read by pread, as every look at a damaged shard does."""

    def __init__(self, monkeypatch):
        self.bytes = 0
        real = os.preadv

        def preadv(fd, buffers, offset, *more):
            count = real(fd, buffers, offset, *more)
            self.bytes += count
            return count

        monkeypatch.setattr(os, "preadv", preadv)


def sample(key: str, number: int = 0, *, size: int = 401, align: int = 4096, start: int = 0) -> bytes:
    """A whole sample, as docs/format.md lays it down at a multiple of `align`."""
    json = b'{"source": "%s.jpg"}' % key.encode()
    place = place_sample(start, None, len(json), size, align)
    data = encode_header(f"{key}.json", len(json)) + json + bytes(tail_bytes(len(json)))
    data += encode_padding(place.padding) + encode_header(f"{key}.jpg", size)
    return data + tiny_jpeg(number, size) + bytes(tail_bytes(size))


def hostile(name: str, data: bytes = b"", **fields) -> bytes:
    """One member as tarfile writes it."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    pax = fields.pop("pax", {})
    for field, value in fields.items():
        setattr(info, field, value)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT, pax_headers=pax) as archive:
        archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()[:-1024].rstrip(b"\0") + bytes(512)


def patched(block: bytes, at: int, value: bytes) -> bytes:
    """A header with another field and a right checksum."""
    block = block[:at] + value + block[at + len(value) :]
    total = sum(block[:148]) + 8 * 32 + sum(block[156:])
    return block[:148] + b"%06o\0 " % total + block[156:]


def rounded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4096)


MEMBERS = {
    "a symbolic link": hostile("x.json", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "a hard link": hostile("x.jpg", type=tarfile.LNKTYPE, linkname="../../x"),
    "a device": hostile("x.jpg", type=tarfile.CHRTYPE),
    "a fifo": hostile("x.json", type=tarfile.FIFOTYPE),
    "a name that leads up": hostile("../../../tmp/x.json", b"{}"),
    "an absolute name": hostile("/tmp/x.json", b"{}"),
    "a size in PAX": hostile("x.json", b"{}", pax={"size": "99999999999"}),
    "a path in PAX": hostile("x.json", b"{}", pax={"path": "../y.json"}),
    "a negative size": patched(encode_header("x.json", 0), 124, b"\xff" * 12),
    "a size in base 256": patched(encode_header("x.json", 0), 124, b"\x80" + b"\0" * 3 + b"\xff" * 8),
    "the largest size": encode_header("x.json", 8**11 - 1),
    "the largest image": encode_header("x.json", 2) + b"{}" + bytes(510) + encode_header("x.jpg", 8**11 - 1),
    "no size": encode_header("x.json", 0),
    "a wrong checksum": patched(encode_header("x.json", 2), 0, b"y")[:148] + b"000000\0 " + bytes(356),
    "a label that is none": encode_header("x.cls", 3) + b"-1\n" + bytes(509),
    "a label of another size": encode_header("x.cls", 8**11 - 1) + b"1" + bytes(511),
    "padding without end": encode_header("x.json", 2) + b"{}" + bytes(510) + encode_header("p", 8**10, padding=True),
    "another source": sample("x").replace(b'x.jpg"}', b'\xff.jpg"}'),
    "json that is a list": sample("x").replace(b'{"source": "x.jpg"}', b'["source", "x.jpg" ]'[:19]),
}


@pytest.mark.parametrize("what", MEMBERS)
@pytest.mark.parametrize("where", ["before", "between", "after"])
def test_a_hostile_member_costs_no_sample_and_leads_nowhere(repaired, tmp_path, what, where):
    folder = tmp_path / "damaged"
    folder.mkdir()
    evil, good = rounded(MEMBERS[what]), [rounded(sample("a")), rounded(sample("b", 1))]
    parts = {"before": [evil, *good], "between": [good[0], evil, good[1]], "after": [*good, evil]}[where]
    (folder / FIRST).write_bytes(b"".join(parts) + bytes(20480))
    outside = snapshot(tmp_path)
    result, samples = repaired(folder)
    assert samples.keys() == {"a", "b"}
    assert result.exit_code == 3
    left = {name: data for name, data in snapshot(tmp_path).items() if not name.startswith("repaired")}
    assert left == outside


@pytest.mark.parametrize("kind", ["zeros", "random", "empty", "one byte", "magic", "text"])
@pytest.mark.parametrize("indexes", [True, False])
def test_a_file_without_a_sample_is_told_and_the_others_are_saved(whole, repaired, tmp_path, kind, indexes):
    data = {
        "zeros": bytes(4 * MIB),
        "random": np.random.default_rng(1).bytes(4 * MIB),
        "empty": b"",
        "one byte": b"x",
        "magic": (bytes(257) + b"ustar\x0000" + bytes(247)) * 2048,
        "text": b"a line of text\n" * 70_000,
    }[kind]
    folder = whole.copy(tmp_path / "damaged", indexes=indexes)
    (folder / FIRST).write_bytes(data)
    result, samples = repaired(folder)
    assert samples.keys() == {"c/0004", "c/0005", "c/0006"}
    assert (result.exit_code, result.shards[0].state) == (4, "nothing")


CHAINS = {
    "zeros": lambda size: bytes(size),
    "random": lambda size: np.random.default_rng(2).bytes(size),
    "headers": lambda size: encode_header("a.json", 100) * (size // 512),
    "headers of one long json": lambda size: encode_header("a.json", 32 * MIB) * (size // 512),
    "headers of one long image": lambda size: (
        (encode_header("a.json", 2) + b"{}" + bytes(510) + encode_header("a.jpg", size // 2)) * (size // 1536)
    ),
    "headers of long labels": lambda size: (encode_header("a.cls", 1) + b"7" + bytes(511)) * (size // 1024),
}


@pytest.mark.parametrize("kind", CHAINS)
def test_the_work_is_linear_in_the_size_whatever_is_there(tmp_path, monkeypatch, kind):
    read, seconds = [], []
    for size in (2 * MIB, 16 * MIB):
        folder = tmp_path / f"{kind} {size}"
        folder.mkdir()
        data = CHAINS[kind](size)
        (folder / FIRST).write_bytes(data)
        counter = Counter(monkeypatch)
        start = time.monotonic()
        assert shardkit.repair(folder, dry_run=True, max_bytes=1 << 31).exit_code == 4
        seconds.append(time.monotonic() - start)
        read.append(counter.bytes)
        monkeypatch.undo()
    assert read[1] < 20 * 16 * MIB + (256 << 20)
    assert seconds[1] < 20, f"{seconds[1]:.1f} s for 16 MiB"


def test_a_size_that_is_only_stated_takes_no_memory(tmp_path):
    """An image of 600 MiB of nothing in a sparse file, without an index that vouches for it."""
    folder = tmp_path / "damaged"
    folder.mkdir()
    with open(folder / FIRST, "wb") as file:
        file.write(rounded(sample("a")) + encode_header("b.json", 2) + b"{}" + bytes(510))
        file.write(encode_padding(2560) + encode_header("b.jpg", 600 << 20))
        file.truncate(700 << 20)
    code = """if True:
        import re, sys, shardkit
        result = shardkit.repair(sys.argv[1], out=sys.argv[2])
        peak = re.search("VmHWM: *([0-9]+)", open("/proc/self/status").read().replace("\\t", " "))[1]  # of this program
        print(dict(result.counts), result.shards[0].samples, peak)
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(shardkit.__file__).parents[1])}
    command = [sys.executable, "-c", code, folder, tmp_path / "out"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    counts, samples, kib = said.rsplit(maxsplit=2)
    assert ("too-large" in counts, samples) == (True, "1")
    assert int(kib) < 400 << 10


@pytest.mark.parametrize("indexes", [True, False])
def test_a_read_that_fails_costs_only_the_samples_there(whole, repaired, tmp_path, monkeypatch, indexes):
    """As a bad sector does: every read over bytes 4096 to 8191 of the first shard fails."""
    import errno

    folder = whole.copy(tmp_path / "damaged", indexes=indexes)
    bad = (folder / FIRST).stat().st_ino
    real = os.preadv

    def preadv(fd, buffers, offset, *more):
        end = offset + sum(len(buffer) for buffer in buffers)
        if os.fstat(fd).st_ino == bad and offset < 8192 and end > 4096:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset, *more)

    monkeypatch.setattr(os, "preadv", preadv)
    result, samples = repaired(folder)
    untouched = whole.untouched(FIRST, 4096, 8192)
    assert {key: samples.get(key) for key in untouched} == {key: whole.samples[key] for key in untouched}
    assert samples.keys() == untouched
    assert result.exit_code == 3
