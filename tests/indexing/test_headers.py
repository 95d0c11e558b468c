"""Headers that lie apart are gathered and looked at together: held against the way that takes them one by one."""

from __future__ import annotations

import io
import itertools
import os
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import ShortReadError, TarFormatError, UnsafeError
from shardkit.format import foreign_tar
from shardkit.format.foreign_member import Member, as_members
from shardkit.format.foreign_tar import ForeignTarParser
from shardkit.format.plain_headers import HeaderBlocks, PlainRun
from shardkit.indexing import headers as headers_module
from shardkit.indexing.headers import Headers
from shardkit.indexing.scan import member_runs


def stored(data: bytes | list[tuple[int, bytes]], size: int = 0) -> int:
    """Return a descriptor of a file that is nowhere; of pieces, one with holes between them."""
    fd = os.memfd_create("shard")
    for at, piece in [(0, data)] if isinstance(data, bytes) else data:
        os.pwrite(fd, piece, at)
    os.truncate(fd, max(size, os.fstat(fd).st_size))
    return fd


def header(name: str, size: int, tar_format: int = tarfile.GNU_FORMAT, **fields: object) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tar_format, "utf-8", "surrogateescape")


def samples(count: int, image_bytes: int) -> tuple[list[tuple[int, bytes]], int]:
    """Return the pieces of a shard that are no zeros, and its size."""
    pieces, at = [], 0
    for number in range(count):
        for end, payload in (("jpg", b"\xff\xd8\xff%d" % number), ("cls", b"%d" % number), ("json", b"{}")):
            size = image_bytes if end == "jpg" else len(payload)
            pieces.append((at, header(f"{number:05d}.{end}", size) + payload))
            at += 512 + -(-size // 512) * 512
    return pieces, at + 1024


class Watched(Headers):
    """Keeps what was held."""

    def __init__(self, fd: int, ahead: int = 0) -> None:
        super().__init__(fd, ahead)
        self.gathered: list[HeaderBlocks] = []

    def held(self, offset: int) -> tuple[memoryview, int] | HeaderBlocks:
        found = super().held(offset)
        if isinstance(found, HeaderBlocks):
            self.gathered.append(found)
        return found


def careful(data: bytes) -> tuple[list[Member], object]:
    members: list[Member] = []
    try:
        parser = ForeignTarParser(len(data))
        while (wanted := parser.wanted) is not None:
            member = parser.feed(data[wanted.offset : wanted.end])
            members += [] if member is None else [member]
    except (TarFormatError, UnsafeError) as error:
        return members, str(error)
    return members, (parser.end, parser.end_offset)


def through(data: bytes, ahead: int, lengths: list[int]) -> tuple[list[Member], object]:
    """Return what `careful` does, and look at some bytes of each member's payload on the way, as notes are taken."""
    members: list[Member] = []
    fd, turn = stored(data), 0
    try:
        parser, source = ForeignTarParser(len(data)), Headers(fd, ahead)
        for run in member_runs(parser, source):
            some = as_members(run)
            members += some
            # Twice over those that stand in columns: labels first, then images.
            for member in (*(some[:-1] * 2 if isinstance(run, PlainRun) else some[:-1]), some[-1]):
                length, turn = min(lengths[turn % len(lengths)], member.size), turn + 1
                assert source.read(member.offset, length) == data[member.offset : member.offset + length]
    except (TarFormatError, UnsafeError) as error:
        return members, str(error)
    finally:
        os.close(fd)
    return members, (parser.end, parser.end_offset)


def archive(sizes: list[int], odd: dict[int, str]) -> bytes:
    """Return a tar whose payloads look like headers, with members of some other kind among the plain ones."""
    out, inner = io.BytesIO(), header("x/inner.jpg", 3000)[-512:]
    for number, size in enumerate(sizes):
        kind = odd.get(number, "")
        tar_format = tarfile.PAX_FORMAT if kind == "pax" else tarfile.GNU_FORMAT
        name = "z" * 120 + ".jpg" if kind == "long" else f"é{number}.jpg" if kind == "é" else f"{number}.jpg"
        fields = {"mtime": 1.5} if kind == "pax" else {}
        if kind in ("link", "folder"):
            fields["type"], size = tarfile.SYMTYPE if kind == "link" else tarfile.DIRTYPE, 0
        out.write(header(name, size, tar_format, **fields))
        out.write((inner * (size // 512 + 1))[:size].ljust(-(-size // 512) * 512, b"\0"))
    return out.getvalue() + bytes(1024)


SIZES = st.lists(st.sampled_from([0, 1, 500, 511, 512, 513, 1500, 4096, 9000, 30_000]), min_size=1, max_size=40)
ODD = st.dictionaries(st.integers(0, 39), st.sampled_from(["pax", "long", "é", "link", "folder"]), max_size=4)
PLACES = [0, 1, 99, 124, 130, 134, 135, 148, 156, 257, 345, 511]
CHANGES = st.lists(
    st.tuples(
        st.integers(0, 60), st.sampled_from(PLACES),
        st.sampled_from([b"\0", b"8", b"7", b"1", b" ", b"-", b"_", b"/", b"L", b"\xff", b"00000000000", b"-0000001000",
                         b"77777777777", b"00000010000", b"\x80\0\0\0\0\0\0\0\0\0\x08"]),
    ), max_size=3,
)  # fmt: skip


def damaged(data: bytes, changes: list[tuple[int, int, bytes]], repaired: bool) -> bytes:
    """Change headers of an archive, and set their checksums right or leave them."""
    starts = [member.offset - 512 for member in careful(data)[0]]
    for number, at, new in changes:
        start = starts[number % len(starts)]
        block = bytearray(data[start : start + 512])
        block[at : at + len(new)] = new[: 512 - at]
        if repaired:
            block[148:156] = b"%06o\0 " % (sum(block[:148]) + sum(block[156:]) + 256)
        data = data[:start] + bytes(block) + data[start + 512 :]
    return data


@settings(max_examples=600, deadline=None)
@given(SIZES, ODD, CHANGES, st.booleans(), st.integers(0, 20_000), st.sampled_from([0, 512, 4096]),
       st.lists(st.sampled_from([0, 3, 600, 4096, 40_000]), min_size=1, max_size=5), st.sampled_from([0, 700, 5000]),
       st.integers(1, 6), st.integers(1, 30), st.sampled_from([512, 4096]),
       st.sampled_from([16 << 10, 1 << 20]))  # fmt: skip
def test_what_is_gathered_holds_the_same_members_bytes_and_errors(
    sizes, odd, changes, repaired, cut, ahead, lengths, near, many, together, page, chunk
):
    data = damaged(archive(sizes, odd), changes, repaired)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_NEAR_BYTES": near, "MANY": many, "_TOGETHER": together, "_READ_BYTES": page,
                            "_CHUNK_BYTES": chunk, "_GATHERED_BYTES": chunk}.items():  # fmt: skip
            patch.setattr(headers_module, name, value)
        patch.setattr(foreign_tar, "MANY", many)
        for some in (data, data[: max(len(data) - cut, 512)]):
            assert through(some, ahead, lengths) == careful(some)


@pytest.mark.parametrize("ahead", [0, 4096])
@pytest.mark.parametrize("count", [20, 1200])
def test_headers_that_lie_apart_are_read_once_in_rising_order_and_looked_at_together(monkeypatch, ahead, count):
    pieces, size = samples(count, 1_000_000)
    fd, read, reads = stored(pieces, size), os.preadv, []
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, at: reads.append((at, len(buffers[0]))) or read(fd, buffers, at)
    )
    monkeypatch.setattr(os, "pread", None)
    source, runs, heads = Watched(fd, ahead), [], []
    for run in member_runs(ForeignTarParser(size), source):
        runs.append(run)
        images = [member for member in as_members(run) if member.name.endswith("jpg")]
        heads += [bytes(source.read(member.offset, ahead or 3)) for member in images[:-1]]
        if images:
            heads.append(bytes(source.read(images[-1].offset, ahead or 3)))
    os.close(fd)
    assert [head[:3] for head in heads] == [b"\xff\xd8\xff"] * count
    assert sum(map(len, runs)) == 3 * count
    # The first one, before anybody knows that they lie apart, and those behind the last piece that is full.
    assert sum(len(run) for run in runs if isinstance(run, PlainRun)) >= 3 * count - 50
    assert len(runs) <= 3 + 3 * count // 700 + 16
    assert [at for at, _ in reads] == sorted(at for at, _ in reads)
    assert all(start + length <= after for (start, length), (after, _) in itertools.pairwise(reads))
    assert len(reads) <= count + 3
    assert all(length <= 16384 for _, length in reads)
    assert len(source._buffer) <= 2 << 20
    assert all(len(headers.starts) <= 1023 for headers in source.gathered)


def test_what_was_not_gathered_is_read_beside_what_was(monkeypatch):
    """A longer head of an image, say: the pieces that follow are still there afterwards."""
    pieces, size = samples(200, 1_000_000)
    fd, read, reads = stored(pieces, size), os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: reads.append(at) or read(fd, buffers, at))
    source, runs = Watched(fd, 4096), []
    for run in member_runs(ForeignTarParser(size), source):
        runs.append(run)
        for member in as_members(run):
            if member.name.endswith("jpg"):
                assert source.read(member.offset, 50_000) == os.pread(fd, 50_000, member.offset)
    os.close(fd)
    assert len(reads) < 200 + 30
    assert sum(len(run) for run in runs if isinstance(run, PlainRun)) > 500


@pytest.mark.parametrize("image_bytes", [3000, 1_000_000])
def test_what_stands_before_the_last_header_stays_as_it_was_read_until_the_next_run(image_bytes):
    pieces, size = samples(300, image_bytes)
    fd, checked = stored(pieces, size), 0
    source = Headers(fd, 4096)
    for run in member_runs(ForeignTarParser(size), source):
        members = as_members(run)[:-1]
        held = [source.read(member.offset, min(member.size, 9000)) for member in members]
        for member, view in zip(members, held, strict=True):
            assert view == os.pread(fd, min(member.size, 9000), member.offset)
        checked += len(held)
    os.close(fd)
    assert checked > 700


def test_an_odd_one_among_those_gathered_costs_one_look_and_the_rest_goes_one_by_one(monkeypatch):
    pieces, size = samples(80, 1_000_000)
    at, block = pieces[100]
    odd = bytearray(block)
    odd[156:157] = b"7"
    odd[148:156] = b"%06o\0 " % (sum(odd[:148]) + sum(odd[156:512]) + 256)
    fd, fed, feed = stored([*pieces, (at, bytes(odd))], size), [], ForeignTarParser.feed
    monkeypatch.setattr(ForeignTarParser, "feed", lambda self, data: fed.append(self.wanted) or feed(self, data))
    source = Watched(fd)
    runs = list(member_runs(ForeignTarParser(size), source))
    os.close(fd)
    assert sum(map(len, runs)) == 240
    assert [wanted.offset for wanted in fed] == [at, size - 1024]  # a hole follows
    assert len(source.gathered) == 1


def test_headers_that_lie_close_are_not_gathered():
    pieces, size = samples(300, 20_000)
    fd = stored(pieces, size)
    source = Watched(fd)
    assert sum(map(len, member_runs(ForeignTarParser(size), source))) == 900
    os.close(fd)
    assert source.gathered == []


def test_few_far_ones_among_close_ones_do_not_make_long_reads_short(monkeypatch):
    pieces, at = [], 0
    for number in range(400):
        size = 1_000_000 if number == 50 else 3000
        pieces.append((at, header(f"{number}.jpg", size)))
        at += 512 + -(-size // 512) * 512
    fd, read, reads = stored(pieces, at), os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: reads.append(at) or read(fd, buffers, at))
    assert sum(map(len, member_runs(ForeignTarParser(at), Headers(fd)))) == 400
    os.close(fd)
    assert len(reads) < 20


def test_a_chain_that_led_elsewhere_is_not_followed_again(monkeypatch):
    """A PAX record states the size, the header another one, behind which headers stand that nobody else sees.

    They lead past the next member: without an end to it each one would be walked past from all those before.
    """
    pieces, at, false = [], 0, header("f.jpg", 400_000)
    for number in range(40):
        record = b"16 size=3000000\n"
        extended = header("x", len(record), type=tarfile.XHDTYPE) + record.ljust(512, b"\0")
        pieces.append((at, extended + header(f"{number}.jpg", 0)))
        pieces += [(at + 1536 + step * 400_896, false) for step in range(8)]
        at += 1536 + -(-3_000_000 // 512) * 512
    fd, read, reads = stored(pieces, at), os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: reads.append(at) or read(fd, buffers, at))
    members = [member for run in member_runs(ForeignTarParser(at), Headers(fd)) for member in as_members(run)]
    os.close(fd)
    assert [(member.name, member.size) for member in members] == [(f"{number}.jpg", 3_000_000) for number in range(40)]
    assert len(reads) < 40 + 20


def test_a_place_that_cannot_be_read_fails_only_when_it_is_wanted(monkeypatch):
    pieces, size = samples(40, 1_000_000)
    start = pieces[60][0]
    for damage, error in ((False, OSError), (True, TarFormatError)):
        block = b"\0\1" + pieces[31][1][2:]
        fd, read = stored([*pieces, (pieces[31][0], block)] if damage else pieces, size), os.preadv

        def failing(fd, buffers, at, read=read):
            if at + len(buffers[0]) > start:
                raise OSError(5, "broken")
            return read(fd, buffers, at)

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", failing)
            runs = member_runs(ForeignTarParser(size), Headers(fd))
            found: list[Member] = []
            with pytest.raises(error):
                found.extend(itertools.chain.from_iterable(map(as_members, runs)))
        os.close(fd)
        assert len(found) == (31 if damage else sum(at < start - 2048 for at, _ in pieces))


@pytest.mark.parametrize("far", [10_000_000, 60_000_000])
def test_a_file_that_is_cut_meanwhile_ends_as_one_that_was_read_header_by_header(monkeypatch, far):
    pieces, size = samples(100, 1_000_000)
    fd, read = stored(pieces, size), os.preadv

    def cutting(fd, buffers, at):
        if at > 5_000_000:
            os.truncate(fd, far)
        return read(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", cutting)
    with pytest.raises(ShortReadError, match="a shard ended while it was scanned") as raised:
        list(member_runs(ForeignTarParser(size), Headers(fd)))
    os.close(fd)
    assert raised.value.offset == min(at for at, _ in pieces if at + 512 > far)
