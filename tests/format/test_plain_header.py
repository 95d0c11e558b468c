"""The short way through plain headers, held against the careful one: what it takes, that one must take alike."""

from __future__ import annotations

import io
import subprocess
import tarfile

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardkit.errors import TarFormatError, UnsafeError
from shardkit.format import foreign_tar
from shardkit.format import plain_headers as plain_headers_module
from shardkit.format.foreign_header import ForeignHeader, name_refusal, parse_foreign_header
from shardkit.format.foreign_member import Member, MemberKind, as_members
from shardkit.format.foreign_tar import ArchiveEnd, ForeignTarParser
from shardkit.format.plain_headers import (
    HeaderBlocks,
    PlainRun,
    header_chain,
    plain_blocks,
    plain_header,
    plain_headers,
)

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def summed(block: bytes, layout: bytes = b"%06o\0 ", signed: bool = False) -> bytes:
    rest = block[:148] + block[156:]
    total = sum(rest) + 256 - (256 * sum(byte > 127 for byte in rest) if signed else 0)
    return block[:148] + (layout % total)[:8].ljust(8, b"\0") + block[156:]


def header(name: str = "a/b.jpg", size: int = 700, tar_format: int = tarfile.GNU_FORMAT) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tar_format, "utf-8", "surrogateescape")[-512:]


def patched(block: bytes, at: int, new: bytes) -> bytes:
    return (block[:at] + new + block[at + len(new) :])[:512]


def careful(block: bytes) -> tuple[bytes, int] | None:
    """Return name and size of a plain file, by the way that looks at everything."""
    try:
        found = parse_foreign_header(block, 512)
    except (TarFormatError, UnsafeError):
        return None
    plain = found == ForeignHeader(found.name, found.size, b"0", None, False)
    safe = name_refusal(found.name) is None and not found.name.endswith(b"/")
    return (found.name, found.size) if plain and safe else None


def assert_no_more_than_the_careful_way(block: bytes) -> None:
    if block == bytes(512):
        assert plain_header(block, 0) is None
        return
    taken = plain_header(block, 0)
    assert taken is None or (taken[0].encode("ascii"), taken[1]) == careful(block)
    assert plain_header(memoryview(b"12345" + block), 5) == taken
    has_magic = block[257:261] == b"usta"
    expected = [] if taken is None else [(taken[0], 3, taken[1])]
    assert rows(plain_blocks(HeaderBlocks(np.frombuffer(block, np.uint8)[None], np.array([3])), 3, 1 << 40)) == expected
    expected = expected if has_magic else []
    assert rows(plain_headers(b"123" + block, 3, 1 << 40)) == expected


def rows(run: PlainRun) -> list[tuple[str, int, int]]:
    return list(zip(map(bytes.decode, run.names.tolist()), run.starts.tolist(), run.sizes.tolist(), strict=True))


SPOTS = st.one_of(
    st.integers(0, 511),
    st.sampled_from([0, 1, 98, 99, 100, 124, 134, 135, 147, 148, 153, 154, 155, 156, 157, 257, 262, 344, 345, 511]),
)
NEW = st.one_of(
    st.binary(min_size=1, max_size=14),
    st.sampled_from([b"\0", b"/", b"..", b"/..", b"../", b"a..b", b" ", b"8", b"\x80", b"\xff", b"ustar\0",
                     b"ustar  \0", b"00000000010", b"0000000001 ", b"        10\0", b"777777777777", b"+1", b"0o7",
                     b"1_0", b"-1"]),
)  # fmt: skip
LAYOUTS = st.sampled_from([b"%06o\0 ", b"%06o \0", b"%07o\0", b"%06o\0\0", b"%6o\0 ", b"%08o", b"%o\0 ", b"%05o\0  "])
CHANGES = st.lists(st.tuples(SPOTS, NEW), max_size=4)


@settings(max_examples=1500)
@example([(345, b"p")], "gnu", b"%06o\0 ", False)
@example([(345, b"p")], "ustar", b"%06o\0 ", False)
@example([(500, b"p")], "ustar", b"%06o\0 ", False)
@example([(0, b"\xff" * 300)], "ustar", b"%06o\0 ", False)
@example([(0, b"\xe9")], "ustar", b"%06o\0 ", True)
@example([(0, b"a/\0\0\0\0\0\0")], "gnu", b"%06o\0 ", False)
@example([(0, b"/")], "gnu", b"%06o\0 ", False)
@example([(0, b"../")], "gnu", b"%06o\0 ", False)
@example([(50, b"x")], "gnu", b"%06o\0 ", False)
@example([(135, b"7")], "gnu", b"%06o\0 ", False)
@example([(124, b" ")], "gnu", b"%06o\0 ", False)
@example([(124, b"-0000010000")], "gnu", b"%06o\0 ", False)
@example([(124, b"00000000018\0")], "gnu", b"%06o\0 ", False)
@example([(124, bytes(12))], "gnu", b"%06o\0 ", False)
@given(CHANGES, st.sampled_from(sorted(FORMATS)), LAYOUTS, st.booleans())
def test_nothing_is_taken_of_a_mutated_header_that_the_careful_way_sees_otherwise(changes, tar_format, layout, signed):
    block = header(tar_format=FORMATS[tar_format])
    for at, new in changes:
        block = patched(block, at, new)
    assert_no_more_than_the_careful_way(block)
    assert_no_more_than_the_careful_way(summed(block, layout, signed))


@settings(max_examples=500)
@given(st.lists(st.tuples(CHANGES, LAYOUTS), min_size=2, max_size=5), st.booleans())
def test_headers_are_told_alike_whatever_stands_beside_them(several, last):
    blocks = []
    for number, (changes, layout) in enumerate(several):
        block = header(f"{number:0{20 * number + 1}}.jpg", 0)
        for at, new in changes:
            block = patched(block, at, new)
        blocks.append(summed(block, layout))
    blocks = [*blocks, header("a.jpg", 0)] if last else blocks
    expected, at = [], 0
    for block in blocks:
        if (taken := plain_header(block, 0)) is None:
            break
        expected.append((taken[0], at, taken[1]))
        at += 512 + (taken[1] + 511) // 512 * 512
    starts = np.array([start for _, start, _ in expected] + [at] * (len(blocks) - len(expected)))
    together = HeaderBlocks(np.frombuffer(b"".join(blocks), np.uint8).reshape(-1, 512), starts)
    assert rows(plain_blocks(together, 0, 1 << 60)) == expected


@settings(max_examples=300)
@given(st.binary(min_size=512, max_size=512))
def test_noise_with_a_right_checksum_is_no_plain_header(block):
    assert_no_more_than_the_careful_way(block)
    assert_no_more_than_the_careful_way(summed(patched(block, 156, b"0")))


@pytest.mark.parametrize("total_off_by", [-65521, -256, -1, 1, 65521])
@pytest.mark.parametrize("fill", [b"\x01", b"\x7f", b"\xff"])
def test_a_checksum_that_is_off_is_never_taken(total_off_by, fill):
    """Not by as much as a sum modulo 65521 would overlook, either."""
    block = patched(header("~" * 100, 700), 100, fill * 24)
    block = patched(patched(block, 136, fill * 12), 157, fill * 188)
    total = sum(block[:148]) + sum(block[156:]) + 256 + total_off_by
    wrong = patched(block, 148, b"%06o\0 " % max(total, 0))
    assert careful(wrong) is None
    assert plain_header(wrong, 0) is None
    assert not len(plain_headers(wrong, 0, 1 << 40))


@pytest.mark.parametrize("tool", [*(f"tar --format={name}" for name in FORMATS), "bsdtar --format=ustar"])
def test_the_plain_files_of_common_tools_go_the_short_way(tmp_path, require_tool, tool):
    """Else it would be right, and for nothing."""
    (tmp_path / "a.jpg").write_bytes(b"j" * 700)
    name, option = tool.split()
    command = [require_tool(name), option, "-cf", "a.tar", "a.jpg"]
    subprocess.run([*command, *(["--pax-option=delete=*time"] if "pax" in option else [])], cwd=tmp_path, check=True)
    data = (tmp_path / "a.tar").read_bytes()
    assert plain_header(data, data.index(b"a.jpg")) == ("a.jpg", 700)


@pytest.mark.parametrize("tar_format", FORMATS)
def test_the_plain_files_of_tarfile_go_the_short_way(tar_format):
    assert plain_header(header("x/0001.json", 8**11 - 1, FORMATS[tar_format]), 0) == ("x/0001.json", 8**11 - 1)


def walk(data: bytes, pieces: list[tuple[int, int]] | None) -> tuple[list[Member], object]:
    """Walk an archive header by header, or, with (bytes before the wanted ones, length), by pieces where they help."""
    members: list[Member] = []
    try:
        parser, turn = ForeignTarParser(len(data)), 0
        while (wanted := parser.wanted) is not None:
            if pieces is not None:
                before, length = pieces[turn % len(pieces)]
                start, turn = max(wanted.offset - before, 0), turn + 1
                run = as_members(parser.feed_plain(data[start : start + length], start))
                members += run
                if run:
                    continue
            member = parser.feed(data[wanted.offset : wanted.end].ljust(wanted.length, b"\0"))
            if member is not None:
                members.append(member)
    except (TarFormatError, UnsafeError) as error:
        return members, str(error)
    return members, (parser.end, parser.end_offset)


def archive(tar_format: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format) as tar:
        names = ["a.jpg", "a.cls", "b/c.jpg", "b/c.json", "é.jpg", "z" * 99 + "/y.jpg", "d", "e.jpg"]
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size = number * 300
            info.type, info.size = (tarfile.SYMTYPE, 0) if name == "d" else (tarfile.REGTYPE, info.size)
            if name == "e.jpg":
                info.mtime = 1.5
            tar.addfile(info, io.BytesIO(bytes(info.size)))
    return out.getvalue()[: 20 * 512 + 6000]


PIECES = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 9000)), min_size=1, max_size=5)


@settings(max_examples=500)
@given(
    st.sampled_from(sorted(FORMATS)), PIECES, st.booleans(), st.integers(0, 20 * 512),
    st.lists(st.tuples(st.integers(0, 30), SPOTS, NEW), max_size=3), st.integers(1, 3), st.integers(1, 9),
)  # fmt: skip
def test_pieces_of_an_archive_hold_the_same_members_and_the_same_errors(
    tar_format, pieces, repaired, cut, changes, many, most
):
    data = archive(FORMATS[tar_format])
    for block, at, new in changes:
        changed = patched(data[block * 512 : block * 512 + 512], at, new)
        data = data[: block * 512] + (summed(changed) if repaired else changed) + data[block * 512 + 512 :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_headers_module, "MANY", many)
        patch.setattr(plain_headers_module, "_MOST", most)
        patch.setattr(foreign_tar, "MANY", many)
        for some in (data, data[: len(data) - cut]):
            assert walk(some, pieces) == walk(some, None)


@pytest.mark.parametrize("count", [1, 47, 48, 49, 1022, 1023, 1024, 3116, 3117, 3118, 9000])
def test_a_whole_archive_of_plain_files_goes_the_short_way(count):
    data = b"".join(header(f"{number}.jpg", 600) + bytes(1024) for number in range(count)) + bytes(1024)
    parser, members, calls = ForeignTarParser(len(data)), [], 0
    while run := as_members(parser.feed_plain(memoryview(data), 0)):
        members += run
        calls += 1
    assert [(m.name, m.start, m.offset, m.size, m.kind, m.refusal) for m in members] == [
        (f"{number}.jpg", number * 1536, number * 1536 + 512, 600, MemberKind.FILE, None) for number in range(count)
    ]
    assert parser.wanted is not None
    assert parser.wanted.offset == count * 1536
    assert calls <= 2 + count // 1023


def test_only_what_follows_without_a_gap_is_a_run():
    one, last = header("a.jpg", 10) + bytes(512), header("b.jpg", 1000) + bytes(1024)
    assert rows(plain_headers(bytes(512) + one, 0, 1 << 40)) == []
    assert rows(plain_headers(one + bytes(512) + last, 0, 1 << 40)) == [("a.jpg", 0, 10)]
    for room, count in ((2559, 1), (2560, 2)):
        assert len(plain_headers(one + last, 0, room)) == count


def test_a_payload_that_is_a_tar_itself_is_passed_over():
    inner = b"".join(header(f"{number}.jpg", 0) for number in range(9))
    block = header("a.tar", len(inner)) + inner
    data = block * 40 + bytes(1024)
    assert rows(plain_headers(data, 0, len(data))) == [("a.tar", 0, len(inner))]
    assert walk(data, [(0, len(data))]) == walk(data, None)


def test_a_member_beyond_the_end_is_left_to_the_careful_way():
    data = header("a.jpg", 10) + bytes(512) + header("b.jpg", 1000) + bytes(512)
    assert [m.name for m in as_members(ForeignTarParser(len(data)).feed_plain(data, 0))] == ["a.jpg"]
    assert walk(data, [(0, 4096)]) == walk(data, None)
    assert "beyond the end" in str(walk(data, None)[1])


@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=8), st.integers(0, 7), st.sampled_from([-512, -1, 0, 1, 512])
)
def test_blocks_are_a_run_as_far_as_each_stands_behind_the_one_before(sizes, number, moved):
    ends = np.cumsum([512 + -(-size // 512) * 512 for size in sizes]) + 1024
    starts = np.array([1024, *ends[:-1]])
    blocks = np.frombuffer(b"".join(header("a.jpg", size) for size in sizes), np.uint8).reshape(-1, 512)
    good = number % len(sizes) if moved else len(sizes)
    starts[number % len(sizes)] += moved
    run = plain_blocks(HeaderBlocks(blocks, starts), 1024, 1 << 40)
    assert rows(run) == [("a.jpg", start, size) for start, size in zip(starts, sizes, strict=True)][:good]
    for room, count in ((ends[-1] - 1, len(sizes) - 1), (ends[-1], len(sizes))):
        assert len(plain_blocks(HeaderBlocks(blocks, starts), 1024, int(room))) == min(good, count)


def test_a_chain_goes_from_size_to_size_and_nowhere_else():
    data = header("a.jpg", 10) + bytes(512) + patched(header("b.jpg", 1024), 148, b"wrong sum") + bytes(1024)
    assert header_chain(data, 0) == ([0, 1024], 2560)
    assert header_chain(data[:1535], 0) == ([0], 1024)
    assert header_chain(b"12345" + data, 5) == ([5, 1029], 2565)
    assert header_chain(b"", 0) == ([], 0)
    assert header_chain(data + bytes(512), 0) == ([0, 1024], None)


@pytest.mark.parametrize("digits", [b"-0000000100", b"+0000000100", b"0o000000100", b"0000_000100", b" 0000000100",
                                    b"00000000108", b"\0" * 11, b"\x80" + bytes(10)])  # fmt: skip
def test_a_chain_ends_where_a_size_is_not_eleven_octal_digits(digits):
    assert header_chain(patched(header(), 124, digits), 0) == ([], None)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("count", [1, 2, 60, 200])
def test_an_archive_that_ends_with_its_last_member_has_an_end(count):
    data = b"".join(header(f"{number}.jpg", 600) + bytes(1024) for number in range(count))
    assert walk(data, [(0, 9000)]) == walk(data, None)
    parser, members = ForeignTarParser(len(data)), 0
    while run := parser.feed_plain(data, 0):
        members += len(run)
    assert (members, parser.wanted, parser.end, parser.end_offset) == (
        count, None, ArchiveEnd.NO_ZERO_BLOCK, len(data),
    )  # fmt: skip
