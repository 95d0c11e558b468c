"""Long reads past the page cache: the same headers and payloads as through it, and no more trouble."""

from __future__ import annotations

import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.errors import ShortReadError
from shardkit.format.foreign_member import as_members
from shardkit.format.foreign_tar import ForeignTarParser
from shardkit.format.plain_headers import PlainRun
from shardkit.indexing import ahead
from shardkit.indexing import headers as headers_module
from shardkit.indexing.ahead import ReadAhead
from shardkit.indexing.headers import Headers
from shardkit.indexing.scan import member_runs
from shardkit.testing.foreign import foreign_files, write_tar

from .test_headers import careful

PIECE, SHARED = 16 << 10, 4 << 10


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of a few pages, and no page that the cache is said to hold; returns what was read past the cache."""
    return small(monkeypatch)


def small(patch):
    for module, name, value in (
        (ahead, "PIECE_BYTES", PIECE), (ahead, "SHARED_BYTES", SHARED), (headers_module, "SHARED_BYTES", SHARED),
        (headers_module, "_CHUNK_BYTES", PIECE), (headers_module, "_READ_BYTES", 4096),
    ):  # fmt: skip
        patch.setattr(module, name, value)
    patch.setattr(ahead, "cached_bytes", lambda *_: 0)
    taken, take = [], ReadAhead.take
    patch.setattr(ReadAhead, "take", lambda self, offset: taken.append(offset) or take(self, offset))
    return taken


def tar_of(path, sizes):
    names = (f"{number:05d}.{end}" for number in range(len(sizes)) for end in ("jpg", "cls", "json"))
    write_tar(path, {name: (b"%5d" % k * (1 + sizes[k // 3] // 5))[: sizes[k // 3]] for k, name in enumerate(names)})
    return path.read_bytes()


def walked(path, data, lengths=(600,)):
    """Return members and the end of a file, and look at bytes of each member's payload on the way."""
    members, turn = [], 0
    with open(path, "rb") as file, Headers(file.fileno()) as source:
        parser = ForeignTarParser(len(data))
        for run in member_runs(parser, source):
            some = as_members(run)
            members += some
            held = []
            for member in some[:-1] * 2 if isinstance(run, PlainRun) else some[:-1]:
                length, turn = min(lengths[turn % len(lengths)], member.size), turn + 1
                held.append((source.read(member.offset, length), data[member.offset : member.offset + length]))
            assert all(view == right for view, right in held)
            assert source.read(some[-1].offset, some[-1].size) == data[some[-1].offset :][: some[-1].size]
    return members, (parser.end, parser.end_offset)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 511, 512, 513, 1500, 4096, 9000, 30_000]), min_size=20, max_size=60),
    st.lists(st.sampled_from([0, 3, 600, 4096, 5000, 40_000]), min_size=1, max_size=5),
)
def test_what_is_read_past_the_cache_holds_the_same_members_and_bytes(tmp_path_factory, sizes, lengths):
    path = tmp_path_factory.getbasetemp() / "some.tar"
    data = tar_of(path, sizes)
    with pytest.MonkeyPatch.context() as patch:
        taken = small(patch)
        assert walked(path, data, lengths) == careful(data)
        assert taken or len(data) < 200_000


def test_reads_are_few_long_in_rising_order_and_end_with_the_scan(tmp_path, small_pieces, monkeypatch):
    data = tar_of(tmp_path / "a.tar", [3000] * 60)
    reads, read = [], ReadAhead._read
    monkeypatch.setattr(
        ReadAhead, "_read", lambda self, start, buffer: reads.append(start) or read(self, start, buffer)
    )
    before, threads = sorted(os.listdir("/proc/self/fd")), threading.active_count()
    assert walked(tmp_path / "a.tar", data) == careful(data)
    assert (sorted(os.listdir("/proc/self/fd")), threading.active_count()) == (before, threads)
    assert small_pieces
    assert reads == [reads[0] + number * (PIECE - SHARED) for number in range(len(reads))]
    # All but the pieces that led here, and those that wait in line at the end.
    assert len(data) // (PIECE - SHARED) - 3 <= len(reads) <= len(data) // (PIECE - SHARED) + 3


@pytest.mark.parametrize("cached", [None, ahead.PIECE_BYTES // 2 + 1, ahead.PIECE_BYTES])
def test_what_the_cache_has_or_may_have_is_read_through_it(tmp_path, monkeypatch, cached):
    monkeypatch.setattr(ahead, "cached_bytes", lambda *_: cached)
    with open(write_tar(tmp_path / "a.tar", foreign_files()), "rb") as file:
        assert ReadAhead.where_it_pays(file.fileno(), 0) is None


@pytest.mark.parametrize("fails", ["open", "first read", "later read"])
def test_a_file_system_that_refuses_is_read_through_the_cache(tmp_path, small_pieces, monkeypatch, fails):
    data = tar_of(tmp_path / "a.tar", [3000] * 60)
    opened, read, reads = os.open, ReadAhead._read, []

    def refused(path, flags, *rest, **given):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, *rest, **given)

    def broken(self, start, buffer):
        reads.append(start)
        if fails == "first read" or len(reads) > 4:
            raise OSError(5, "Input/output error")
        return read(self, start, buffer)

    monkeypatch.setattr(*((os, "open", refused) if fails == "open" else (ReadAhead, "_read", broken)))
    assert walked(tmp_path / "a.tar", data) == careful(data)
    assert (len(small_pieces), bool(reads)) == {"open": (0, False), "first read": (1, True)}.get(
        fails, (len(small_pieces), True)
    )


@pytest.mark.parametrize("left", [40_000, 200_000, 200_300])
def test_a_file_that_is_cut_meanwhile_ends_as_through_the_cache(tmp_path, small_pieces, left):
    path = tmp_path / "a.tar"
    data = tar_of(path, [3000] * 60)

    def scan():
        with open(path, "rb") as file, Headers(file.fileno()) as source:
            for _ in member_runs(ForeignTarParser(len(data)), source):
                if small_pieces and os.path.getsize(path) > left:
                    os.truncate(path, left)

    with pytest.raises(ShortReadError, match="a shard ended while it was scanned") as caught:
        scan()
    assert small_pieces
    assert left - 512 < caught.value.offset <= max(left, small_pieces[-1] + PIECE)


def test_a_cold_file_is_indexed_without_a_page_of_it_in_the_cache(tmp_path):
    """As far as this file system can be read past the cache, and the kernel tells what it holds."""
    path = write_tar(tmp_path / "a.tar", {f"{n:06d}.{end}": b"7" * 3000 for n in range(4000) for end in ("jpg", "txt")})
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.path.getsize(path)
        before = ahead.cached_bytes(file.fileno(), 0, size)
        assert before is not None
        assert before < size // 10
        assert shardkit.index([path], out=tmp_path / "out", facts="none", jobs=1).totals.samples == 4000
        after = ahead.cached_bytes(file.fileno(), 0, size)
    assert after is not None
    assert after < size // 3
