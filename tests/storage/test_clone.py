"""Shared blocks, on file systems that have them and on others: planned right, really shared, refused by name."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import subprocess
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import CapabilityError, ConfigError, ShortReadError, StorageError, TargetFullError, UnsafeError
from shardkit.storage import clone
from shardkit.storage.clone import (
    BlockPlan,
    Place,
    block_bytes,
    can_share,
    check_reflink,
    plan_blocks,
    share_blocks,
    try_to_share,
)
from shardkit.testing.extents import shared_extents

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 4096


@pytest.fixture(params=["xfs", "btrfs"])
def kind(request):
    """Of a file system that shares blocks."""
    return request.param


@pytest.fixture
def sharing(folder_on, kind):
    return folder_on(kind)


@pytest.fixture
def ext4(folder_on):
    return folder_on("ext4")


@contextlib.contextmanager
def places(source: Path, target: Path, source_offset=0, target_offset=0):
    with open(source, "rb") as first, open(target, "r+b" if target.exists() else "w+b") as second:
        yield (
            Place(first.fileno(), source_offset, os.fsencode(source)),
            Place(second.fileno(), target_offset, os.fsencode(target)),
        )


# --- the plan


@given(
    source=st.integers(0, 1 << 44), shift=st.integers(-(1 << 30), 1 << 30), length=st.integers(0, 1 << 30),
    block=st.sampled_from([4096, 65536]),
)  # fmt: skip
def test_a_plan_covers_every_byte_and_shares_whole_blocks_only(source, shift, length, block):
    target = abs(source + shift)
    plan = plan_blocks(source, target, length, block)
    assert plan.head + plan.shared + plan.tail == length
    assert min(plan.head, plan.shared, plan.tail) >= 0
    if plan.shared:
        for start in (source, target):
            assert (start + plan.head) % block == plan.shared % block == 0
        assert max(plan.head, plan.tail) < block


@pytest.mark.parametrize(
    ("source", "target", "length", "expected"),
    [
        (0, 0, 0, (0, 0, 0)),
        (0, 0, 4095, (4095, 0, 0)),
        (0, 0, 4096, (0, 4096, 0)),
        (8192, 0, 4097, (0, 4096, 1)),
        (1, 0, 100_000, (100_000, 0, 0)),
        (1, 4097, 8190, (8190, 0, 0)),
        (1, 4097, 8191, (4095, 4096, 0)),
        (1, 4097, 8192, (4095, 4096, 1)),
    ],
)
def test_plans_at_their_boundaries(source, target, length, expected):
    assert plan_blocks(source, target, length, BLOCK) == BlockPlan(*expected)


# --- really shared


def test_blocks_are_the_same_bytes_and_the_same_place_on_the_disk(sharing):
    data = os.urandom(10 * BLOCK)
    (sharing / "a").write_bytes(data)
    with places(sharing / "a", sharing / "b", BLOCK, 2 * BLOCK) as (source, target):
        share_blocks(source, target, 3 * BLOCK)
    assert (sharing / "b").read_bytes() == bytes(2 * BLOCK) + data[BLOCK : 4 * BLOCK]
    assert sum(extent.length for extent in shared_extents(sharing / "b")) == 3 * BLOCK
    (there,) = shared_extents(sharing / "a")  # btrfs calls all of an extent shared when a part of it is
    assert there.offset <= BLOCK
    assert there.end >= 4 * BLOCK


def test_a_later_write_to_the_source_is_not_seen(sharing):
    (sharing / "a2").write_bytes(b"1" * (2 * BLOCK))
    with places(sharing / "a2", sharing / "b2") as (source, target):
        share_blocks(source, target, 2 * BLOCK)
        with open(sharing / "a2", "r+b") as file:
            file.write(b"2" * BLOCK)
    assert (sharing / "b2").read_bytes() == b"1" * (2 * BLOCK)


def test_holes_stay_holes_and_read_as_zeros(sharing):
    with open(sharing / "holes", "wb") as file:
        file.truncate(64 * BLOCK)
        os.pwrite(file.fileno(), b"x" * BLOCK, 32 * BLOCK)
    with places(sharing / "holes", sharing / "whole") as (source, target):
        os.pwrite(target.descriptor, b"y" * (64 * BLOCK), 0)
        share_blocks(source, target, 64 * BLOCK)
    assert (sharing / "whole").read_bytes() == (sharing / "holes").read_bytes()


def test_a_source_that_may_only_be_read_is_shared(sharing):
    (sharing / "mine").write_bytes(b"z" * BLOCK)
    (sharing / "mine").chmod(0o400)
    with places(sharing / "mine", sharing / "copy") as (source, target):
        share_blocks(source, target, BLOCK)
    assert (sharing / "copy").read_bytes() == b"z" * BLOCK


def test_a_file_size_limit_is_told_as_full(sharing):
    """Sharing takes no space but for what describes it; a file that would pass its limit is full all the same."""
    (sharing / "limited").write_bytes(b"1" * BLOCK)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with places(sharing / "limited", sharing / "beyond", 0, BLOCK) as (source, target):
        resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK, limit[1]))
        try:
            with pytest.raises(TargetFullError, match=r"cannot share blocks.*EFBIG") as caught:
                share_blocks(source, target, BLOCK)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert caught.value.offset == BLOCK


def test_subvolumes_share(folder_on, require_tool):
    folder = folder_on("btrfs")
    subprocess.run([require_tool("btrfs"), "subvolume", "create", folder / "other"], check=True, capture_output=True)
    (folder / "a").write_bytes(b"1" * BLOCK)
    assert (folder / "a").stat().st_dev != (folder / "other").stat().st_dev
    assert can_share("auto", os.fsencode(folder / "a"), os.fsencode(folder / "other"))


# --- refused


def test_ext4_refuses_by_name(ext4):
    (ext4 / "a").write_bytes(b"1" * BLOCK)
    with places(ext4 / "a", ext4 / "b", 0, BLOCK) as (source, target), pytest.raises(CapabilityError) as caught:
        share_blocks(source, target, BLOCK)
    assert (caught.value.exit_code, caught.value.errno) == (7, errno.EOPNOTSUPP)
    assert (caught.value.path, caught.value.offset) == (os.fsencode(ext4 / "b"), BLOCK)
    assert "XFS (mkfs.xfs -m reflink=1) and btrfs share blocks" in str(caught.value)


def test_two_file_systems_refuse_by_name(sharing, ext4):
    (ext4 / "far").write_bytes(b"1" * BLOCK)
    with (
        places(ext4 / "far", sharing / "near") as (source, target),
        pytest.raises(CapabilityError, match="on different file systems") as caught,
    ):
        share_blocks(source, target, BLOCK)
    assert caught.value.errno == errno.EXDEV


def test_half_a_block_is_refused(sharing):
    (sharing / "half").write_bytes(b"1" * (2 * BLOCK))
    with (
        places(sharing / "half", sharing / "other", 512, 0) as (source, target),
        pytest.raises(CapabilityError, match="does not share these blocks"),
    ):
        share_blocks(source, target, BLOCK)


def test_a_file_without_checksums_shares_none_with_one_that_has_them(folder_on, require_tool):
    folder = folder_on("btrfs")
    (folder / "without").touch()
    subprocess.run([require_tool("chattr"), "+C", folder / "without"], check=True)
    (folder / "without").write_bytes(b"1" * BLOCK)
    with (
        places(folder / "without", folder / "with") as (source, target),
        pytest.raises(CapabilityError, match="lacks checksums"),
    ):
        share_blocks(source, target, BLOCK)


def test_a_source_that_ends_before_is_a_short_read(sharing):
    (sharing / "short").write_bytes(b"1" * (2 * BLOCK))
    with (
        places(sharing / "short", sharing / "long") as (source, target),
        pytest.raises(ShortReadError, match=r"ended early.*expected 12288 bytes from there on; found 8192 bytes"),
    ):
        share_blocks(source, target, 3 * BLOCK)


def test_a_swap_file_is_refused_by_name(sharing, kind, require_tool):
    (sharing / "data").write_bytes(b"1" * BLOCK)
    swap = sharing / "swap"
    swap.touch(0o600)
    (sharing / "from-swap").touch()
    if kind == "btrfs":  # takes no other file for swap, and such a file shares with its like only
        subprocess.run([require_tool("chattr"), "+C", swap, sharing / "from-swap"], check=True)
    swap.write_bytes(os.urandom(1 << 20))
    subprocess.run([require_tool("mkswap"), swap], check=True, capture_output=True)
    if subprocess.run([require_tool("swapon"), swap], capture_output=True, check=False).returncode:
        pytest.skip("no swap files here")
    try:
        with (
            places(swap, sharing / "from-swap") as (source, target),
            pytest.raises(CapabilityError, match="a swap file shares no blocks"),
        ):
            share_blocks(source, target, BLOCK)
    finally:
        subprocess.run([require_tool("swapoff"), swap], check=True)


@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [
        (errno.EOPNOTSUPP, CapabilityError, "does not share blocks between files"),
        (errno.EXDEV, CapabilityError, "different file systems"),
        (errno.EINVAL, CapabilityError, "does not share these blocks"),
        (errno.ETXTBSY, CapabilityError, "swap file"),
        (errno.EPERM, CapabilityError, "immutable, append-only or sealed"),
        (errno.ENOSPC, TargetFullError, "cannot share blocks"),
        (errno.EDQUOT, TargetFullError, "cannot share blocks"),
        (errno.EIO, StorageError, "cannot share blocks"),
        (errno.EROFS, StorageError, "cannot share blocks"),
    ],
)
def test_what_the_system_says_is_told_with_path_and_offset(tmp_path, monkeypatch, number, kind, text):
    (tmp_path / "a").write_bytes(b"1" * BLOCK)

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    with places(tmp_path / "a", tmp_path / "b", 0, 8192) as (source, target), pytest.raises(kind, match=text) as caught:
        share_blocks(source, target, BLOCK)
    assert (caught.value.path, caught.value.offset) == (os.fsencode(tmp_path / "b"), 8192)
    assert errno.errorcode[number] in str(caught.value)
    assert caught.value.remedy or kind is StorageError


# --- whether it works at all


def test_trying_leaves_nothing(sharing):
    folder = sharing / "empty"
    folder.mkdir()
    (sharing / "try").write_bytes(b"1" * 5000)
    try_to_share(os.fsencode(sharing / "try"), os.fsencode(folder / "not" / "yet"))
    assert can_share("always", os.fsencode(sharing / "try"), os.fsencode(folder))
    assert list(folder.iterdir()) == []


def test_trying_says_no_on_ext4_and_always_raises(ext4):
    source, folder = ext4 / "try", os.fsencode(ext4)
    source.write_bytes(b"1" * BLOCK)
    before = os.listdir(ext4)
    assert not can_share("auto", os.fsencode(source), folder)
    with pytest.raises(CapabilityError, match="does not share blocks"):
        can_share("always", os.fsencode(source), folder)
    assert os.listdir(ext4) == before
    assert not can_share("never", b"/nowhere", folder)


def test_less_than_a_block_has_nothing_to_share(ext4):
    (ext4 / "tiny").write_bytes(b"1" * (BLOCK - 1))
    try_to_share(os.fsencode(ext4 / "tiny"), os.fsencode(ext4))


def test_trying_never_waits_for_a_fifo(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UnsafeError):
        try_to_share(os.fsencode(tmp_path / "fifo"), os.fsencode(tmp_path))


def test_blocks_have_at_least_4096_bytes(sharing):
    with open(sharing / "x", "wb") as file:
        assert block_bytes(file.fileno()) == BLOCK


def test_an_unknown_wish_is_refused():
    with pytest.raises(ConfigError, match=r"unknown reflink; expected auto or always or never; found 'maybe'"):
        check_reflink("maybe")
    for wish in clone.REFLINKS:
        check_reflink(wish)
