from __future__ import annotations

import io
import os
import random
import subprocess
import tarfile
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import TarFormatError, UnsafeError
from shardkit.format.foreign_header import Refusal, pax_records
from shardkit.format.foreign_member import Member, MemberKind
from shardkit.format.foreign_tar import MAX_EXTENDED_BYTES, ArchiveEnd, ForeignTarParser

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
KINDS = {
    tarfile.REGTYPE: MemberKind.FILE, tarfile.AREGTYPE: MemberKind.FILE, tarfile.CONTTYPE: MemberKind.FILE,
    tarfile.GNUTYPE_SPARSE: MemberKind.FILE, tarfile.DIRTYPE: MemberKind.DIRECTORY, tarfile.LNKTYPE: MemberKind.LINK,
    tarfile.SYMTYPE: MemberKind.LINK, tarfile.CHRTYPE: MemberKind.DEVICE, tarfile.BLKTYPE: MemberKind.DEVICE,
    tarfile.FIFOTYPE: MemberKind.FIFO, b"V": MemberKind.LABEL,
}  # fmt: skip
PAYLOADS = {"a.jpg": 511, "d/b.cls": 1, "empty.json": 0, "d/c.PNG": 513, "d/whole.txt": 1024}
LONG = {"p" * 90 + "/" + "n" * 60 + ".jpg": 700}  # ustar has a prefix for it
LONGER = {"q" * 180 + ".jpg": 30, "r/" * 120 + "é.jpg": 1500, "bytes-\udcff.jpg": 9}


def walk(data: bytes, file_bytes: int | None = None) -> tuple[list[Member], ForeignTarParser]:
    """Feed an archive whose bytes beyond `data` are zeros."""
    parser = ForeignTarParser(len(data) if file_bytes is None else file_bytes)
    members = []
    while parser.wanted is not None:
        wanted = parser.wanted
        member = parser.feed(data[wanted.offset : wanted.end].ljust(wanted.length, b"\0"))
        if member is not None:
            members.append(member)
    return members, parser


def archive(entries, tar_format=tarfile.PAX_FORMAT) -> bytes:
    """Return a tar of (TarInfo, payload) pairs and of blocks that are already bytes."""
    out = io.BytesIO()
    for entry in entries:
        if isinstance(entry, bytes):
            out.write(entry)
            continue
        info, payload = entry
        out.write(info.tobuf(tar_format, "utf-8", "surrogateescape"))
        out.write(payload + bytes(-len(payload) % 512))
    return out.getvalue() + bytes(1024)


def entry(name, payload=b"", *, kind=tarfile.REGTYPE, size=None, pax=None):
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(payload) if size is None else size
    info.linkname = "target" if kind in (tarfile.LNKTYPE, tarfile.SYMTYPE) else ""
    info.pax_headers = pax or {}
    return info, payload


def with_checksum(block: bytes) -> bytes:
    total = sum(block[:148]) + sum(block[156:512]) + 256
    return block[:148] + b"%06o\0 " % total + block[156:]


def patched(block: bytes, at: int, data: bytes) -> bytes:
    return with_checksum(block[:at] + data + block[at + len(data) :])


def header(name="a.jpg", size=0, kind=tarfile.REGTYPE, tar_format=tarfile.USTAR_FORMAT) -> bytes:
    return entry(name, kind=kind, size=size)[0].tobuf(tar_format, "utf-8", "surrogateescape")[-512:]


def extended(kind: bytes, payload: bytes, size: int | None = None) -> bytes:
    block = header("././@Header", len(payload) if size is None else size)
    return patched(block, 156, kind) + payload + bytes(-len(payload) % 512)


def record(keyword: str, value: bytes) -> bytes:
    rest = b" " + keyword.encode() + b"=" + value + b"\n"
    length = len(rest) + 1
    while len(b"%d" % length) + len(rest) != length:
        length += 1
    return b"%d" % length + rest


def with_tarfile(data: bytes) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        return tar.getmembers()


def assert_agrees_with_tarfile(data: bytes) -> list[Member]:
    members, _ = walk(data)
    outside = with_tarfile(data)
    listed = [(m.name, m.offset_data, KINDS[m.type]) for m in outside]
    sizes = {m.name: m.size for m in outside if m.isreg() and not m.issparse()}
    assert [(m.name.rstrip("/"), m.offset, m.kind) for m in members if m.kind is not MemberKind.LABEL] == [
        one for one in listed if one[2] is not MemberKind.LABEL
    ]
    assert {m.name: m.size for m in members if m.usable} == sizes
    assert all(before.end == after.start for before, after in pairwise(members))
    return members


@pytest.mark.parametrize("tar_format", FORMATS)
def test_every_member_kind_of_python_tarfile_is_placed_where_tarfile_places_it(tar_format):
    names = PAYLOADS | LONG | (LONGER if tar_format != "ustar" else {})
    entries = [entry(name, os.urandom(size)) for name, size in names.items()]
    entries[2:2] = [
        entry("d", kind=tarfile.DIRTYPE), entry("h.jpg", kind=tarfile.LNKTYPE), entry("s.jpg", kind=tarfile.SYMTYPE),
        entry("c", kind=tarfile.CHRTYPE), entry("b", kind=tarfile.BLKTYPE), entry("f", kind=tarfile.FIFOTYPE),
        entry("cont.jpg", b"x", kind=tarfile.CONTTYPE), entry("old.jpg", b"y", kind=tarfile.AREGTYPE),
        entry("olddir/", kind=tarfile.AREGTYPE),
    ]  # fmt: skip
    members = assert_agrees_with_tarfile(archive(entries, FORMATS[tar_format]))
    assert [m.refusal for m in members if m.refusal] == [
        Refusal.LINK, Refusal.LINK, Refusal.DEVICE, Refusal.DEVICE, Refusal.FIFO,
    ]  # fmt: skip
    assert sum(m.usable for m in members) == len(names) + 2


NAMES = st.lists(st.text("ab.é_", min_size=1, max_size=60), min_size=1, max_size=6).map("/".join)


@given(st.lists(st.tuples(NAMES, st.integers(0, 1100)), max_size=6), st.sampled_from(["gnu", "pax"]))
def test_any_names_and_sizes_are_read_as_tarfile_reads_them(files, tar_format):
    data = archive([entry(name, bytes([1]) * size) for name, size in files], FORMATS[tar_format])
    found = [(m.name, m.offset, m.size) for m in walk(data)[0]]
    assert found == [(m.name, m.offset_data, m.size) for m in with_tarfile(data)]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    root = tmp_path_factory.mktemp("tree")
    for name, size in (PAYLOADS | {"long-" + "n" * 80 + "/" + "m" * 90 + ".jpg": 777}).items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(os.urandom(size))
    (root / "link.jpg").symlink_to("a.jpg")
    os.link(root / "a.jpg", root / "other-name-of-a.jpg")
    os.mkfifo(root / "pipe")
    return root


def check_outside_archive(data: bytes, tree) -> None:
    members = assert_agrees_with_tarfile(data)
    files = [m for m in members if m.usable]
    assert len(files) >= len(PAYLOADS)
    for member in files:
        assert data[member.offset : member.offset + member.size] == (tree / member.name).read_bytes()
    assert {m.refusal for m in members if m.refusal} >= {Refusal.LINK}


@pytest.mark.parametrize("tar_format", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_gnu_tar_archives(tmp_path, require_tool, tree, tar_format):
    leave = ["--exclude=long-*"] if tar_format == "v7" else []
    command = [require_tool("tar"), f"--format={tar_format}", "-C", tree, *leave, "-cf", tmp_path / "a.tar", "."]
    subprocess.run(command, check=False, stderr=subprocess.PIPE)  # 2 where a format cannot hold a FIFO
    check_outside_archive((tmp_path / "a.tar").read_bytes(), tree)


@pytest.mark.parametrize("tar_format", ["ustar", "gnutar", "pax", "paxr", "v7"])
def test_bsdtar_archives(tmp_path, require_tool, tree, tar_format):
    leave = ["--exclude=long-*"] if tar_format == "v7" else []
    command = [require_tool("bsdtar"), f"--format={tar_format}", "-C", tree, *leave, "-cf", tmp_path / "a.tar", "."]
    subprocess.run(command, check=False, stderr=subprocess.PIPE)  # 1 where a format cannot hold a FIFO
    check_outside_archive((tmp_path / "a.tar").read_bytes(), tree)


@pytest.mark.parametrize(
    "options", [["--format=gnu"], *([f"--sparse-version={v}", "--format=posix"] for v in ("0.0", "0.1", "1.0"))]
)
def test_a_sparse_file_of_gnu_tar_is_refused_and_passed_over(tmp_path, require_tool, options):
    with (tmp_path / "holes.jpg").open("wb") as file:
        for at in range(60):  # more pieces than the header's own map holds
            file.seek(at * 1_000_000)
            file.write(b"piece")
    (tmp_path / "z.cls").write_bytes(b"7")
    command = [require_tool("tar"), *options, "--sparse", "-C", tmp_path, "-cf", tmp_path / "a.tar", "holes.jpg"]
    subprocess.run([*command, "z.cls"], check=True)
    members, _ = walk((tmp_path / "a.tar").read_bytes())
    assert [(m.refusal, m.size) for m in members][1:] == [(None, 1)]
    assert members[0].refusal is Refusal.SPARSE
    with tarfile.open(tmp_path / "a.tar") as tar:
        assert tar.getmembers()[1].offset_data == members[1].offset


def test_a_volume_label_is_no_member_of_a_sample(tmp_path, require_tool):
    (tmp_path / "z.cls").write_bytes(b"7")
    command = [require_tool("tar"), "--label=vol.jpg", "-C", tmp_path, "-cf", tmp_path / "a.tar", "z.cls"]
    subprocess.run(command, check=True)
    label, member = walk((tmp_path / "a.tar").read_bytes())[0]
    assert (label.kind, label.usable, member.usable) == (MemberKind.LABEL, False, True)


@pytest.mark.parametrize("tar_format", ["gnu", "pax"])
def test_a_size_beyond_octal_digits_moves_the_next_header(tar_format):
    size, large = 9 * 2**30 + 5, entry("large.jpg", size=9 * 2**30 + 5)[0]
    start = large.tobuf(FORMATS[tar_format], "utf-8", "strict")
    members, parser = walk(start, len(start) + size + 507 + 1024)
    assert [(m.size, m.offset) for m in members] == [(size, len(start))]
    assert parser.end_offset == len(start) + size + 507


def test_a_git_archive_with_its_global_comment_is_read():
    data = archive([extended(b"g", record("comment", b"5" * 40)), entry("a.jpg", b"1")])
    (member,) = assert_agrees_with_tarfile(data)
    assert (member.start, member.offset) == (0, 1536)


def test_our_own_padding_is_part_of_the_member_behind_it():
    data = archive([entry("a.cls", b"1"), extended(b"x", record("comment", b"." * 1000)), entry("a.jpg", b"1")])
    first, second = assert_agrees_with_tarfile(data)
    assert second.start == first.end


NAME_REFUSALS = [
    ("/etc/passwd", Refusal.ABSOLUTE_NAME), ("../a.jpg", Refusal.PARENT_IN_NAME), ("a/..", Refusal.PARENT_IN_NAME),
    ("a/../b.jpg", Refusal.PARENT_IN_NAME), ("n" * 4097, Refusal.LONG_NAME), ("a/b/", Refusal.NO_NAME),
    ("a..b/c.jpg", None), ("./a.jpg", None), ("n" * 4096, None), ("a\\..\\b.jpg", None), ("a\x1b[31m.jpg", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "refusal"), NAME_REFUSALS, ids=range(len(NAME_REFUSALS)))
@pytest.mark.parametrize("tar_format", ["gnu", "pax"])
def test_only_safe_names_are_taken_and_the_next_member_is_found_anyway(name, refusal, tar_format):
    tar_format = FORMATS[tar_format]
    start = entry(name)[0].tobuf(tar_format, "utf-8", "strict")
    members, _ = walk(archive([start[:-512] + patched(start[-512:], 124, b"00000000001\0") + bytes(512), entry("z")]))
    assert [m.refusal for m in members] == [refusal, None]
    assert len(members[0].name) <= 4096


HIDDEN = [
    patched(header("a"), 0, b"a.jpg\0b"),
    patched(header("a"), 345, b"d\0e"),
    extended(b"L", b"a.jpg\0b\0") + header("a.jpg"),
    extended(b"x", record("path", b"a.jpg\0b")) + header("a.jpg"),
]


@pytest.mark.parametrize("blocks", HIDDEN, ids=range(4))
def test_a_name_with_a_nul_inside_is_refused(blocks):
    assert [m.refusal for m in walk(archive([blocks]))[0]] == [Refusal.NUL_IN_NAME]


def test_a_name_that_readers_disagree_about_is_refused():
    # Times of an incremental GNU archive stand where tarfile looks for a prefix.
    block = patched(header(tar_format=tarfile.GNU_FORMAT), 345, b"14000000000\0")
    assert [m.refusal for m in walk(archive([block]))[0]] == [Refusal.AMBIGUOUS_NAME]
    assert [m.name for m in with_tarfile(archive([block]))] == ["14000000000/a.jpg"]


@pytest.mark.parametrize("before", [b"", extended(b"L", b"a.jpg\0"), extended(b"x", record("path", b"a.jpg"))])
def test_a_size_that_readers_disagree_about_is_refused(tmp_path, require_tool, before):
    # libarchive takes the second size of a GNU header for the size, also where nothing is sparse.
    block = patched(header(size=600, tar_format=tarfile.GNU_FORMAT), 483, b"00000000001\0") + b"x" * 600 + bytes(424)
    with pytest.raises(UnsafeError, match="disagree about the size"):
        walk(archive([before + block]))
    (tmp_path / "a.tar").write_bytes(archive([before + block]))
    for tool, column, size in (("tar", 2, "600"), ("bsdtar", 4, "1")):
        command = [require_tool(tool), "-tvf", tmp_path / "a.tar"]
        assert subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[column] == size


@pytest.mark.parametrize(("kind", "refusal"), [(b"M", Refusal.CONTINUATION), (b"D", Refusal.UNKNOWN_KIND),
                                               (b"Z", Refusal.UNKNOWN_KIND)])  # fmt: skip
def test_an_unusual_kind_is_passed_over_by_its_size(kind, refusal):
    members, _ = walk(archive([patched(header(size=600), 156, kind) + bytes(1024), entry("z")]))
    assert [(m.refusal, m.offset) for m in members] == [(refusal, 512), (None, 2048)]


MALFORMED = {
    "checksum": (patched(header(), 0, b"b")[:148] + b"0000001\0" + header()[156:], "not a tar"),
    "no checksum": (header()[:148] + bytes(8) + header()[156:], "not a tar"),
    "negative": (patched(header(), 124, b"\xff" * 12), "negative"),
    "blank size": (patched(header(), 124, b" " * 12), "no number"),
    "NUL size": (patched(header(), 124, bytes(12)), "no number"),
    "digit 8": (patched(header(), 124, b"00000000008\0"), "no number"),
    "underscore": (patched(header(), 124, b"0000000_010\0"), "no number"),
    "sign": (patched(header(), 124, b"-0000000010\0"), "no number"),
    "text behind the size": (patched(header(), 124, b"0000010\0junk"), "no number"),
    "beyond the end": (header(size=10_000), "beyond the end"),
    "8 EiB": (patched(header(), 124, b"\x80" + bytes(3) + b"\x80" + bytes(7)), "beyond the end"),
    "largest": (patched(header(), 124, b"\x80" + b"\xff" * 11), "beyond the end"),
    "extended beyond the end": (extended(b"x", b"", 100_000), "beyond the end"),
    "no member behind": (extended(b"x", record("path", b"a")), "between an extended header"),
    "PAX size": (extended(b"x", record("size", b"-1")) + header(), "no number"),
    "PAX size with sign": (extended(b"x", record("size", b"+1")) + header(), "no number"),
    "PAX size empty": (extended(b"x", record("size", b"")) + header(), "no number"),
    "PAX size huge": (extended(b"x", record("size", b"9" * 5000)) + header(), "no number"),
    "PAX size beyond": (extended(b"x", record("size", b"99999")) + header(), "beyond the end"),
}
UNSAFE = {
    "link with payload": (header("l", 600, tarfile.SYMTYPE) + bytes(1024), "disagree"),
    "folder with payload": (header("d", 600, tarfile.DIRTYPE) + bytes(1024), "disagree"),
    "old folder with payload": (patched(header("d/", 600), 156, b"\0") + bytes(1024), "disagree"),
    "PAX size of a link": (extended(b"x", record("size", b"5")) + header("l", 0, tarfile.LNKTYPE) + bytes(512),
                           "disagree"),
    "two sizes": (extended(b"x", record("size", b"5")) + header(size=600) + bytes(1024), "two sizes"),
    "x of x": (extended(b"x", record("path", b"a")) * 2 + header(), "extended headers of extended"),
    "X of x": (extended(b"x", b"") + extended(b"X", b"") + header(), "extended headers of extended"),
    "L of L": (extended(b"L", b"a\0") * 2 + header(), "extended headers of extended"),
    "g of x": (extended(b"x", b"") + extended(b"g", b"") + header(), "extended headers of extended"),
    "L without an end": (extended(b"L", b"a.jpg") + header(), "no NUL ends"),
    "empty L": (extended(b"L", b"") + header(), "no NUL ends"),
    "L that hides an old folder": (extended(b"L", b"a.jpg\0") + patched(header("d/", 600), 156, b"\0") + bytes(1024),
                                   "a file or a folder"),
    "path that hides an old folder": (extended(b"x", record("path", b"a")) + patched(header("d/"), 156, b"\0"),
                                      "a file or a folder"),
    "L and path": (extended(b"L", b"a\0") + extended(b"x", record("path", b"b")) + header(), "PAX and a GNU"),
    "path and L": (extended(b"x", record("path", b"b")) + extended(b"L", b"a\0") + header(), "PAX and a GNU"),
    "endless": (extended(b"g", record("comment", b"a")) * 17 + header(), "too many"),
    "global path": (extended(b"g", record("path", b"b")) + header(), "every member"),
    "global size": (extended(b"g", record("size", b"0")) + header(), "every member"),
    "over-long": (extended(b"L", b"", MAX_EXTENDED_BYTES + 1), "over the limit"),
    "over-long link": (extended(b"K", b"", MAX_EXTENDED_BYTES + 1), "over the limit"),
    "sparse map": (patched(patched(header(), 156, b"S"), 482, b"\1") + (bytes(504) + b"\1" + bytes(7)) * 1025,
                   "no end"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_what_is_malformed_ends_the_archive_with_its_place(case):
    blocks, message = MALFORMED[case]
    with pytest.raises(TarFormatError, match=message) as caught:
        walk(archive([blocks]))
    assert caught.value.offset is not None


@pytest.mark.parametrize("case", UNSAFE)
def test_what_readers_disagree_about_or_what_has_no_end_is_unsafe(case):
    blocks, message = UNSAFE[case]
    with pytest.raises(UnsafeError, match=message) as caught:
        walk(archive([blocks]))
    assert caught.value.offset is not None


@pytest.mark.parametrize("size_field", [b"     000001 ", b"000000000001", b"1           ", b"0000001\0    "])
def test_sizes_as_old_tars_wrote_them(size_field):
    data = archive([patched(header(), 124, size_field) + bytes(512)])
    assert [m.size for m in walk(data)[0]] == [m.size for m in with_tarfile(data)] == [1]


def test_a_checksum_over_signed_characters_is_right_too():
    block = header("\udcff\udcfe.jpg")
    signed = sum(b - 256 * (b > 127) for b in block[:148] + block[156:]) + 256
    data = archive([block[:148] + b"%06o\0 " % signed + block[156:]])
    assert [m.name for m in walk(data)[0]] == [m.name for m in with_tarfile(data)] == ["\udcff\udcfe.jpg"]


@pytest.mark.parametrize("data", [b"5 a=b\n", b"06a=b\n", b"6 a=bX", b"7 a=b\n", b"6 =ab\n", b"x a=b\n", b"6 a=b\n\0\0",
                                  b"-6 a=b\n", b"6 a-b\n", b"2 \n", b" 6 a=b\n", b"0 a=b\n", b"\t7 a=b\n", b"1 a=b\n",
                                  b"99999999999 a=b\n", "٦ a=b\n".encode()])  # fmt: skip
def test_pax_records_fill_their_header_exactly(data):
    with pytest.raises(TarFormatError, match="PAX record"):
        list(pax_records(data, 0))


@given(st.lists(st.tuples(st.text("abc.", min_size=1), st.binary(max_size=120))))
def test_pax_records_come_out_as_written(pairs):
    data = b"".join(record(keyword, value) for keyword, value in pairs)
    assert list(pax_records(data, 0)) == [(keyword.encode(), value) for keyword, value in pairs]


NONE, ONE, TWO = ArchiveEnd.NO_ZERO_BLOCK, ArchiveEnd.ONE_ZERO_BLOCK, ArchiveEnd.TWO_ZERO_BLOCKS
ENDS = [(0, NONE), (100, NONE), (512, ONE), (700, ONE), (1024, TWO), (10240, TWO)]


@pytest.mark.parametrize(("zeros", "end"), ENDS)
def test_missing_end_blocks_are_tolerated_as_gnu_tar_does(tmp_path, require_tool, zeros, end):
    data = archive([entry("a.jpg", b"x" * 512)])[:-1024] + bytes(zeros)
    members, parser = walk(data)
    assert (len(members), parser.end, parser.end_offset) == (1, end, 1024)
    (tmp_path / "a.tar").write_bytes(data)
    subprocess.run([require_tool("tar"), "-tf", tmp_path / "a.tar"], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("zeros", [512, 1024, 1536, 10240, 204_800])
def test_a_header_behind_zeros_is_an_error_though_readers_stop_before_it(tmp_path, require_tool, zeros):
    one = archive([entry("a.jpg", b"x")])[:1024]
    data = one + bytes(zeros) + one + bytes(1024)
    names = [member.name for member in with_tarfile(data)]
    (tmp_path / "a.tar").write_bytes(data)
    with_tar = [subprocess.run([require_tool("tar"), *options, "-tf", tmp_path / "a.tar"], check=True,
                               capture_output=True, text=True).stdout.split() for options in ([], ["-i"])]  # fmt: skip
    assert (names, *with_tar) == (["a.jpg"], ["a.jpg"], ["a.jpg"] * 2)
    message = "follows the zeros that end a tar.*expected zeros from byte 1024 to the end; found a header"
    with pytest.raises(TarFormatError, match=message) as caught:
        walk(data)
    assert caught.value.offset == 1024 + zeros


@pytest.mark.parametrize(
    ("zeros", "odd", "offset"), [(512, 0, 1536), (512, 511, 1536), (1024, 1, 2048), (307_200, 88, 308_224)]
)
@pytest.mark.parametrize("more", [0, 1, 511, 512, 400_000])
def test_any_byte_behind_the_end_that_is_not_zero_is_an_error(zeros, odd, offset, more):
    data = archive([entry("a.jpg", b"x")])[:1024] + bytes(zeros + odd) + b"?" + bytes(more)
    with pytest.raises(TarFormatError, match="found bytes that are no header") as caught:
        walk(data)
    assert caught.value.offset == offset
    assert walk(data[:offset])[1].end_offset == 1024


@given(st.integers(512, 400_000), st.integers(0, 2**62))
def test_zeros_that_are_known_are_not_asked_for(zeros, seed):
    data = archive([entry("a.jpg", b"x")])[:1024] + bytes(zeros)
    parser, draw, asked = ForeignTarParser(len(data)), random.Random(seed), 0
    while (wanted := parser.wanted) is not None:
        if parser.end is not None and draw.random() < 0.5:
            parser.pass_zeros(draw.randint(wanted.offset, len(data)))
        else:
            asked += wanted.length
            assert wanted.length <= MAX_EXTENDED_BYTES
            parser.feed(data[wanted.offset : wanted.end])
    assert (parser.end_offset, asked <= len(data)) == (1024, True)
    assert parser.end is (TWO if zeros >= 1024 else ONE)


def test_a_compressed_tar_says_so():
    with pytest.raises(TarFormatError, match=r"compressed.*found gzip; decompress"):
        walk(b"\x1f\x8b" + bytes(2000))


SAMPLE = archive(
    [entry("a.cls", b"7"), extended(b"x", record("comment", b"." * 600)), entry("a.jpg", b"j" * 900),
     entry("n" * 150 + ".jpg", b"k" * 5), entry("l.jpg", kind=tarfile.SYMTYPE), entry("b.jpg", b"z" * 512)],
    tarfile.GNU_FORMAT,
)  # fmt: skip


def test_a_truncation_at_any_byte_loses_members_but_never_invents_one():
    whole, _ = walk(SAMPLE)
    for length in range(len(SAMPLE)):
        found = []
        try:
            parser = ForeignTarParser(length)
            while parser.wanted is not None:
                wanted = parser.wanted
                assert wanted.end <= length
                member = parser.feed(SAMPLE[wanted.offset : wanted.end])
                found += [member] if member else []
        except TarFormatError:
            pass
        else:
            # Only where a member ends does GNU tar not notice either.
            assert (
                length - max((m.end for m in whole if m.end <= length), default=-512) < 512 or length >= whole[-1].end
            )
        assert found == whole[: len(found)]
        assert len(found) == sum(m.end <= length for m in whole)


def walk_hostile(data: bytes) -> list[Member] | None:
    """Walk to the end or to one of our errors, holding every step against its bounds."""
    members, steps = [], 0
    try:
        parser = ForeignTarParser(len(data))
        at = -1
        while parser.wanted is not None:
            wanted, steps = parser.wanted, steps + 1
            assert at < wanted.offset
            assert wanted.end <= len(data)
            assert wanted.length <= MAX_EXTENDED_BYTES
            at = wanted.offset
            member = parser.feed(data[wanted.offset : wanted.end])
            if member is not None:
                assert member.start < member.offset <= member.end <= len(data)
                members.append(member)
    except (TarFormatError, UnsafeError):
        return None
    finally:
        assert steps <= len(data) // 512 + 1
    return members


SPOTS = st.one_of(st.integers(0, 511), st.sampled_from([0, 99, 124, 125, 135, 156, 257, 263, 345, 482, 499, 504, 508]))
BYTES = st.one_of(
    st.binary(min_size=1, max_size=12), st.sampled_from([bytes([c]) for c in b"\0gxXLKS12567VMD/.\x80\xff"])
)
CHANGES = st.lists(st.tuples(st.integers(0, len(SAMPLE) // 512 - 1), SPOTS, BYTES), min_size=1, max_size=4)


@settings(max_examples=400)
@given(CHANGES, st.booleans(), st.integers(0, len(SAMPLE)))
def test_no_mutation_gets_out_of_bounds(changes, repaired, cut):
    data = bytearray(SAMPLE)
    for block, at, new in changes:
        data[block * 512 + at : block * 512 + at + len(new)] = new
        if repaired:
            data[block * 512 : block * 512 + 512] = with_checksum(bytes(data[block * 512 : block * 512 + 512]))
    walk_hostile(bytes(data[: len(SAMPLE)]))
    walk_hostile(bytes(data[:cut]))


@settings(max_examples=400)
@given(CHANGES)
def test_what_is_taken_of_a_mutated_archive_tarfile_finds_at_the_same_place(changes):
    data = bytearray(SAMPLE)
    for block, at, new in changes:
        data[block * 512 + at : block * 512 + at + len(new)] = new
        data[block * 512 : block * 512 + 512] = with_checksum(bytes(data[block * 512 : block * 512 + 512]))
    data = bytes(data[: len(SAMPLE)])
    members = walk_hostile(data)
    if members is None:
        return
    try:
        listed = {m.offset_data: m for m in with_tarfile(data)}
    except (tarfile.TarError, ValueError, OverflowError):  # fields that we do not read, such as times
        return
    for member in members:
        other = listed.get(member.offset)
        if other is not None and member.usable:
            assert (member.name.rstrip("/"), member.size) == (other.name.rstrip("/"), other.size)
            assert other.isreg() or other.type not in tarfile.SUPPORTED_TYPES


ARCHIVES = {
    "gnu": SAMPLE,
    "pax": archive(
        [entry("a.cls", b"7"), entry("a.jpg", b"j" * 900), entry("n" * 150 + ".jpg", b"k" * 5, pax={"size": "5"}),
         entry("l.jpg", kind=tarfile.SYMTYPE), entry("b.jpg", b"z" * 512)],
    ),
    "ustar": archive(
        [entry("d/" + "e" * 80 + "/" + "m" * 80 + ".jpg", b"kkk"), entry("l.jpg", kind=tarfile.SYMTYPE),
         entry("b.jpg", b"z" * 512)], tarfile.USTAR_FORMAT,
    ),
}  # fmt: skip
LISTERS = {"tar": 2, "bsdtar": 4}
KIND_BYTES = [bytes([c]) for c in b"\0gxXLKS12567VMDN\x80\xff/."]
FIELDS = [b"0000000001\0", b"00000002000\0", b"d\0", b"a/b", b"ustar\0", b"ustar  \0", bytes(8), b"9 path=q\n"]


def listed_by(command: list[str], size_column: int) -> tuple[set[tuple[str, str]], bool]:
    """Return the last word and the size of each line, and whether the tool was content."""
    done = subprocess.run(command, check=False, capture_output=True)
    lines = [line.split() for line in done.stdout.decode("ascii", "replace").splitlines()]
    return {(words[-1], words[size_column]) for words in lines if len(words) > size_column}, done.returncode == 0


@pytest.mark.parametrize("tar_format", ARCHIVES)
@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_what_is_taken_of_a_mutated_archive_gnu_tar_and_bsdtar_list_alike(tmp_path, require_tool, tar_format, count):
    path, chance, compared = tmp_path / "a.tar", random.Random(f"{tar_format} {count}"), 0
    tools = [([require_tool(name), "--numeric-owner", "-tvf", path], column) for name, column in LISTERS.items()]
    for _ in range(count):
        data = bytearray(ARCHIVES[tar_format])
        changes = []
        for _ in range(chance.randint(1, 3)):
            at = chance.choice([0, 99, 124, 125, 135, 156, 257, 262, 345, 386, 482, 483, 499, 504, 508])
            start, new = chance.randrange(len(data) // 512) * 512, chance.choice(chance.choice([KIND_BYTES, FIELDS]))
            data[start + at : start + min(at + len(new), 512)] = new[: 512 - at]
            data[start : start + 512] = with_checksum(bytes(data[start : start + 512]))
            changes.append((start, at, new))
        path.write_bytes(data)
        plain = [m for m in walk_hostile(bytes(data)) or [] if m.usable and m.name.isascii() and m.name.isprintable()]
        taken = {(m.name, str(m.size)) for m in plain if " " not in m.name}
        for command, column in tools if taken else []:
            listed, content = listed_by(command, column)
            compared += content
            assert not content or taken <= listed, changes
    assert compared > count // 4


@given(st.binary(max_size=3000))
def test_noise_is_no_tar(data):
    assert not walk_hostile(data)


@pytest.mark.parametrize("length", [0, 1, 511])
def test_less_than_a_block_is_no_tar(length):
    with pytest.raises(TarFormatError, match="too short"):
        ForeignTarParser(length)


def test_only_the_wanted_bytes_are_taken():
    with pytest.raises(TarFormatError, match="wanted"):
        ForeignTarParser(2048).feed(bytes(511))
