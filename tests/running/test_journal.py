from __future__ import annotations

import errno
import os

import pytest

from shardkit.errors import ShardkitError, StorageError, UnsafeError
from shardkit.format.manifest import FileRecord, ShardRecord
from shardkit.packing.journal import pack_journal
from shardkit.packing.refusals import Refusal
from shardkit.packing.write import ShardResult

PLAN = b"0123456789abcdef"


def entry(number, *, bytes=20480, refused=()):
    file = FileRecord(bytes=4, digest="cd" * 16)
    record = ShardRecord(
        name=f"t-{number:06d}.tar", bytes=bytes, digest="ab" * 16, samples=3, payload=900, padding=10000, index=file,
        dali_index=file, first_key="a/1", last_key="c/3",
    )  # fmt: skip
    return number, ShardResult(record=record, refused=list(refused))


@pytest.fixture
def path(tmp_path):
    return os.fsencode(tmp_path / "journal")


@pytest.fixture
def journal(path):
    return pack_journal(path, PLAN)


def test_a_journal_that_is_not_there_says_that_nothing_is_finished(journal):
    assert journal.read() == {}


def test_what_was_appended_is_read_back(journal):
    entries = [entry(3), entry(0), entry(7)]
    for each in entries:
        journal.append(*each)
    assert journal.read() == dict(entries)


def test_entries_that_are_written_together_are_read_back_one_by_one(journal, path):
    journal.append(*entry(3))
    journal.extend(dict([entry(0), entry(7), entry(5)]))
    assert journal.read() == dict([entry(3), entry(0), entry(7), entry(5)])
    assert journal.synced() == {3, 0, 7, 5}
    with open(path, "r+b") as file:
        file.truncate(os.path.getsize(path) - 9)
    assert journal.read() == dict([entry(3), entry(0), entry(7)])


def test_entries_that_are_written_together_share_a_sync(journal, monkeypatch):
    journal.append(*entry(3))
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), sync(fd)))
    journal.extend(dict([entry(0), entry(7), entry(5)]))
    assert len(synced) == 1


def test_a_shard_without_a_file_is_kept_too(journal):
    empty = (2, ShardResult(record=None, refused=[Refusal(0, b"a/b.jpg", "empty", "no bytes")]))
    journal.append(*empty)
    assert journal.read() == dict([empty])


@pytest.mark.parametrize(
    "name", [b"\xff\xfe", b"a/\n", b"100%", b"100%25", b"\xc3\xa9", b"\\x1b\x1b", b"\xed\xa0\x80", b"\xf0\x9f\x93\xb7"]
)
def test_any_name_of_a_refused_source_survives(journal, name):
    refused = [Refusal(5, name, "not-jpeg", "it starts with \x1b \ud800 and \u202e")]
    journal.append(*entry(1, refused=refused))
    assert journal.read() == dict([entry(1, refused=refused)])


def test_the_last_word_on_a_shard_counts(journal):
    journal.append(*entry(1, bytes=10240))
    journal.append(*entry(1, bytes=20480))
    assert journal.read() == dict([entry(1, bytes=20480)])


def test_a_line_torn_at_any_byte_is_no_line_and_spoils_no_other(journal, path):
    journal.append(*entry(0))
    whole = os.stat(path).st_size
    journal.append(*entry(1))
    with open(path, "rb") as file:
        data = file.read()
    for length in range(whole, len(data)):
        with open(path, "wb") as file:
            file.write(data[:length])
        found = list(journal.read().items())
        # Without its last line break, and with it, the second line is whole.
        assert found == ([entry(0)] if length < len(data) - 1 else [entry(0), entry(1)])
        journal.append(*entry(2))
        assert journal.read() == dict([*found, entry(2)])


def test_a_flipped_bit_anywhere_makes_a_line_no_line(journal, path):
    journal.append(*entry(0))
    with open(path, "rb") as file:
        data = file.read()
    for position in range(1, len(data) - 1):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with open(path, "wb") as file:
            file.write(damaged)
        assert journal.read() == {}, position


@pytest.mark.parametrize(
    "garbage", [b"\0" * 4096, os.urandom(5000), b'{"number": 0}', b"[1]", b"null", b"\n\n\n", b"{" * 100_000]
)
def test_garbage_between_lines_is_passed_over(journal, path, garbage):
    journal.append(*entry(0))
    with open(path, "ab") as file:
        file.write(garbage)
    journal.append(*entry(1))
    assert journal.read() == dict([entry(0), entry(1)])


def test_the_journal_of_another_plan_counts_for_nothing(journal, path):
    journal.append(*entry(0))
    other = pack_journal(path, b"another plan")
    assert other.read() == {}
    other.append(*entry(1))
    assert other.read() == dict([entry(1)])
    assert journal.read() == dict([entry(0)])


def test_a_line_is_on_the_disk_and_has_a_name_when_append_returns(journal, path, tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    journal.append(*entry(0))
    assert synced == [os.fsdecode(path), str(tmp_path)]
    journal.append(*entry(1))
    assert synced[2:] == [os.fsdecode(path)]


def test_a_failure_to_read_or_write_names_the_journal(tmp_path):
    journal = pack_journal(os.fsencode(tmp_path), PLAN)
    with pytest.raises(StorageError, match=tmp_path.name):
        journal.append(*entry(0))
    with pytest.raises(UnsafeError, match=tmp_path.name):
        journal.read()


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_line_whose_sync_failed_does_not_count_though_it_can_be_read(journal, call, monkeypatch):
    """The page cache still has it, and the disk may not; a second sync that succeeds proves nothing."""
    first, second = entry(0), entry(1)
    journal.append(*first)
    stopped_in(call, OSError(errno.EIO, "made up"), journal, second, monkeypatch, ShardkitError)
    assert journal.read() == dict([first, second])
    assert journal.synced() == {0}
    journal.append(*second)
    assert journal.synced() == {0, 1}


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_line_that_an_interrupt_left_is_synced_before_it_counts(journal, call, path, tmp_path, monkeypatch):
    journal.append(*entry(0))
    stopped_in(call, KeyboardInterrupt(), journal, entry(1), monkeypatch, KeyboardInterrupt)
    synced, fsync = [], os.fsync
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
        assert journal.synced() == {0, 1}
    assert synced == [os.fsdecode(path), str(tmp_path)]
    monkeypatch.setattr(os, "fsync", failing(OSError(errno.EIO, "made up")))
    with pytest.raises(ShardkitError):
        journal.synced()


def failing(error):
    def fail(*_):
        raise error

    return fail


def stopped_in(call, error, journal, what, monkeypatch, expected):
    """Append an entry, of which the line is written, and something comes before it is synced."""
    write, fail = os.write, failing(error)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail if call == "fsync" else lambda fd, data: (write(fd, data), fail()))
        with pytest.raises(expected):
            journal.append(*what)
