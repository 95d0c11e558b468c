from __future__ import annotations

import io
import subprocess
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import TarFormatError
from shardkit.format.tar import (
    BLOCK,
    MAX_MEMBER_BYTES,
    PAX_NAME,
    Header,
    encode_header,
    encode_padding,
    parse_header,
    tail_bytes,
)

NAMES = st.text(st.characters(min_codepoint=1, max_codepoint=127), min_size=1, max_size=100)
SIZES = st.integers(0, MAX_MEMBER_BYTES) | st.sampled_from([0, 1, 511, 512, 513, 8**10, MAX_MEMBER_BYTES])


@given(NAMES, SIZES, st.booleans())
def test_a_parsed_header_is_what_was_written(name, size, padding):
    block = encode_header(name, size, padding=padding)
    assert len(block) == BLOCK
    assert parse_header(block) == Header(name, size, padding)


@given(NAMES, SIZES)
def test_python_tarfile_reads_every_field(name, size):
    info = tarfile.TarInfo.frombuf(encode_header(name, size), "ascii", "strict")
    fields = (info.size, info.mode, info.uid, info.gid, info.uname, info.gname, info.mtime, info.linkname, info.type)
    assert fields == (size, 0o644, 0, 0, "root", "root", 0, "", tarfile.REGTYPE)
    # tarfile takes slashes at the end of a name away
    assert info.name.rstrip("/") == name.rstrip("/")


@pytest.mark.parametrize("name", ["a.jpg", "a/b/c-x20.cls", "n" * 100])
@pytest.mark.parametrize("size", [0, 1, 512, 70_000])
def test_header_equals_that_of_gnu_tar_byte_for_byte(tmp_path, require_tool, name, size):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    command = [
        require_tool("tar"), "--create", "--format=ustar", "--owner=root:0", "--group=root:0", "--mode=0644",
        "--mtime=@0", f"--directory={tmp_path}", name,
    ]  # fmt: skip
    written = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    assert written[:BLOCK] == encode_header(name, size)


@pytest.mark.parametrize("size", [-1, MAX_MEMBER_BYTES + 1])
def test_a_size_that_octal_digits_cannot_state_is_refused(size):
    with pytest.raises(TarFormatError, match="8 GiB"):
        encode_header("a.jpg", size)


@pytest.mark.parametrize("name", ["", "n" * 101, "é.jpg", "a\0b.jpg"])
def test_a_name_that_ustar_cannot_state_is_refused(name):
    with pytest.raises(TarFormatError, match="1 to 100 ASCII"):
        encode_header(name, 1)


@pytest.mark.parametrize("length", [0, 511, 513, 1024])
def test_only_a_whole_block_is_a_header(length):
    with pytest.raises(TarFormatError, match="one block"):
        parse_header(bytes(length))


@pytest.mark.parametrize("padding", [False, True])
def test_every_flipped_bit_of_a_header_is_noticed(padding):
    block = encode_header("n01440764/n01440764_10026.jpg", 109_527, padding=padding)
    original = parse_header(block)
    for at in range(BLOCK):
        for bit in range(8):
            damaged = bytearray(block)
            damaged[at] ^= 1 << bit
            with pytest.raises(TarFormatError) as refusal:
                parse_header(damaged)
            assert 0 <= refusal.value.offset < BLOCK
    assert parse_header(block) == original


@given(st.binary(min_size=BLOCK, max_size=BLOCK))
def test_any_block_is_parsed_or_refused(block):
    try:
        header = parse_header(block)
    except TarFormatError:
        return
    assert encode_header(header.name, header.size, padding=header.padding) == block


@given(NAMES, SIZES, st.booleans(), st.integers(0, BLOCK - 1), st.integers(0, 255))
def test_another_byte_is_refused_or_states_another_member(name, size, padding, at, value):
    block = bytearray(encode_header(name, size, padding=padding))
    unchanged = block[at] == value
    block[at] = value
    try:
        header = parse_header(block)
    except TarFormatError:
        return
    assert (header == Header(name, size, padding)) == unchanged


@pytest.mark.parametrize(
    ("change", "offset"),
    [
        ((100, b"0000755\0"), 104),  # mode
        ((108, b"0001750\0"), 111),  # uid
        ((136, b"14000000000\0"), 136),  # mtime
        ((148, b"0000000\0"), 149),  # checksum
        ((156, b"5"), 156),  # type: a folder
        ((156, b"L"), 156),  # type: GNU long name
        ((257, b"ustar  \0"), 262),  # GNU magic
        ((345, b"folder"), 345),  # prefix
        ((124, b"\x80\0\0\0\0\0\0\0\0\0\0\1"), 124),  # base-256 size
        ((124, b"        144\0"), 124),  # size with spaces
    ],
)
def test_what_other_tars_write_is_refused_where_it_differs(change, offset):
    at, field = change
    block = bytearray(encode_header("a.jpg", 100))
    block[at : at + len(field)] = field
    if at != 148:
        block[148:156] = b"        "
        block[148:156] = b"%06o\0 " % sum(block)
    with pytest.raises(TarFormatError) as refusal:
        parse_header(block)
    # a field that the checksum covers may show in the checksum first; never later than in the field itself
    assert refusal.value.offset in {offset, *range(148, 156)}


PADDINGS = [1024, 1536, 3584, 4096, 4608, 10240, 64 * 1024, 512 * 1024, 512 * 1024 + 512]


@pytest.mark.parametrize("size", PADDINGS)
def test_padding_is_one_pax_header_with_one_comment(size):
    padding = encode_padding(size)
    assert len(padding) == size
    assert parse_header(padding[:BLOCK]) == Header(PAX_NAME, size - BLOCK, padding=True)
    record = padding[BLOCK:]
    length, _, rest = record.partition(b" ")
    assert int(length) == len(record)
    assert (rest[:8], rest[-1:], set(rest[8:-1])) == (b"comment=", b"\n", set(b"."))


@pytest.mark.parametrize("size", PADDINGS)
def test_python_tarfile_takes_padding_as_a_comment_of_the_next_member(size):
    data = encode_padding(size) + encode_header("a.jpg", 3) + b"abc" + bytes(tail_bytes(3)) + bytes(2 * BLOCK)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        (member,) = archive.getmembers()
        assert (member.name, member.size, member.offset_data) == ("a.jpg", 3, size + BLOCK)
        assert list(member.pax_headers) == ["comment"]
        assert archive.extractfile(member).read() == b"abc"


@pytest.mark.parametrize("size", [-1024, -512, 1, 511, 512, 513, 1023, 1025, 4097])
def test_padding_of_a_size_that_no_pax_header_has_is_refused(size):
    with pytest.raises(TarFormatError, match="1024"):
        encode_padding(size)


def test_no_padding_is_no_bytes():
    assert encode_padding(0) == b""


@given(st.integers(0, MAX_MEMBER_BYTES))
def test_a_payload_and_its_tail_are_whole_blocks(size):
    assert 0 <= tail_bytes(size) < BLOCK
    assert (size + tail_bytes(size)) % BLOCK == 0
