"""Extracted files that share their blocks with the shards: the same bytes, really shared, checked all the same."""

from __future__ import annotations

import contextlib
import os

import pytest

import shardkit
from shardkit.errors import CapabilityError, ConfigError, IntegrityError, ShortReadError, TargetFullError
from shardkit.extracting import payload as payload_module
from shardkit.extracting.run import extract
from shardkit.extracting.tree import Tree
from shardkit.testing.damage import flip_byte
from shardkit.testing.datasets import DraftSample, draft_dataset, draft_shard, tiny_jpeg
from shardkit.testing.extents import shared_bytes
from shardkit.testing.mounts import tmpfs
from shardkit.testing.packs import contents

BLOCK = 4096
SIZES = (4095, 4096, 4097, 65_536, 100_001, 3_000_001)
WHOLE = sum(size // BLOCK * BLOCK for size in SIZES)


@pytest.fixture(params=["xfs", "btrfs"])
def place(request, folder_on):
    """A folder where files can share blocks."""
    return folder_on(request.param)


def dataset_in(folder, sizes=SIZES):
    return draft_dataset((3, 3), sizes=sizes).write(folder / "ds")


def files(sizes=SIZES):
    return {f"c/{number:04d}.jpg": tiny_jpeg(number, size) for number, size in enumerate(sizes)}


@pytest.mark.parametrize("reflink", ["auto", "always"])
def test_the_same_bytes_in_blocks_of_the_shards(place, reflink):
    result = extract(dataset_in(place), place / "out", reflink=reflink)
    assert contents(place / "out") == files()
    assert (result.made_bytes, result.shared_bytes) == (sum(SIZES), WHOLE)
    for number, size in enumerate(SIZES):
        assert shared_bytes(place / f"out/c/{number:04d}.jpg") == size // BLOCK * BLOCK
    assert sum(shared_bytes(path) for path in (place / "ds").glob("*.tar")) >= WHOLE


def test_never_shares_nothing(place):
    result = extract(dataset_in(place), place / "out", reflink="never")
    assert contents(place / "out") == files()
    assert result.shared_bytes == 0
    assert not any(shared_bytes(path) for path in (place / "out").rglob("*.jpg"))


def test_any_number_of_jobs_gives_the_same_result(place):
    ds = dataset_in(place)
    results = [extract(ds, place / str(jobs), jobs=jobs) for jobs in (1, 5)]
    assert results[0] == results[1]
    assert contents(place / "1") == contents(place / "5")


def test_a_packed_tree_comes_back(place, photo_tree):
    shardkit.pack(photo_tree, place / "ds", shard_samples=7, jobs=1)
    result = extract(place / "ds", place / "out", reflink="always")
    assert contents(place / "out") == contents(photo_tree)
    assert 0 < result.made_bytes - result.shared_bytes < BLOCK * result.made


def test_ext4_copies_with_auto_and_refuses_always_before_anything_is_made(folder_on):
    folder = folder_on("ext4")
    ds = dataset_in(folder)
    result = extract(ds, folder / "out")
    assert contents(folder / "out") == files()
    assert result.shared_bytes == 0
    with pytest.raises(CapabilityError, match="does not share blocks between files") as caught:
        extract(ds, folder / "other" / "place", reflink="always")
    assert caught.value.exit_code == 7
    assert sorted(os.listdir(folder)) == ["ds", "out"]


def test_another_file_system_copies_with_auto_and_refuses_always(folder_on, place):
    ds = dataset_in(folder_on("ext4"))
    assert extract(ds, place / "out").shared_bytes == 0
    assert contents(place / "out") == files()
    with pytest.raises(CapabilityError, match="different file systems"):
        extract(ds, place / "always", reflink="always")
    assert not (place / "always").exists()


def test_images_between_blocks_are_copied_and_always_names_one(place):
    sizes = (5000, 9000, 20_000)
    ds = draft_dataset((3,), sizes=sizes, align=512).write(place / "ds")
    result = extract(ds, place / "out")
    assert contents(place / "out") == files(sizes)
    assert result.shared_bytes == 0
    with pytest.raises(CapabilityError, match=r"do not start where a block does.*\[sample c/000\d\]; found \d of them"):
        extract(ds, place / "always", reflink="always")
    assert not (place / "always").exists()


@pytest.mark.parametrize("at", [0, 8191, 8192, 9999])
def test_damage_is_found_in_shared_blocks_and_in_the_tail(place, at):
    draft = draft_dataset((1,), sizes=(10_000,))
    ds = draft.write(place / "ds")
    offset = draft.shards[0].rows[0].offset
    flip_byte(ds / "tiny-000000.tar", offset + at)
    with pytest.raises(IntegrityError, match="CRC-32C") as caught:
        extract(ds, place / "out", reflink="always")
    assert (caught.value.offset, caught.value.key) == (offset, "c/0000")
    assert contents(place / "out") == {"c/": b""}


def test_what_is_checked_is_what_is_stored(place, monkeypatch):
    """Somebody writes into the shard between the sharing and the check: the file keeps what it got."""
    draft = draft_dataset((1,), sizes=(10_000,))
    ds = draft.write(place / "ds")
    share = payload_module.share_blocks

    def share_then_damage(*arguments):
        share(*arguments)
        flip_byte(ds / "tiny-000000.tar", draft.shards[0].rows[0].offset)

    monkeypatch.setattr(payload_module, "share_blocks", share_then_damage)
    extract(ds, place / "out", reflink="always")
    assert contents(place / "out") == files((10_000,))


def test_a_shard_that_ends_early_is_told_as_such(place):
    draft = draft_dataset((1,), sizes=(50_000,))
    ds = draft.write(place / "ds")
    offset = draft.shards[0].rows[0].offset
    monstrous = payload_module.Payload(
        row=0, key="k", shard=str(ds / "tiny-000000.tar"), offset=offset, size=1 << 20, checksum=0
    )
    buffer = memoryview(bytearray(1 << 16))
    with (
        Tree(os.fsencode(place / "out")).hold() as tree,
        open(monstrous.shard, "rb") as shard,
        pytest.raises(ShortReadError, match="ended early"),
    ):
        payload_module.extract_payload(shard.fileno(), monstrous, tree, b"a", buffer, "auto")
    assert not (place / "out").exists()


def test_holes_in_a_shard_come_back_as_zeros(place):
    """A shard that was copied with `cp --sparse` has none of the zeros in it."""
    jpeg = tiny_jpeg(0, 900)
    middle = jpeg[:-2] + bytes(300_000) + jpeg[-2:]
    draft = draft_dataset((1,), sizes=(1000,))
    draft.shards = [draft_shard("tiny-000000.tar", [DraftSample(key="c/0000", jpeg=middle, label=0)], BLOCK)]
    ds = draft.write(place / "ds")
    tar = ds / "tiny-000000.tar"
    data = tar.read_bytes()
    with open(tar, "wb") as file:
        file.truncate(len(data))
        for at in range(0, len(data), BLOCK):
            if data[at : at + BLOCK].strip(b"\0"):
                os.pwrite(file.fileno(), data[at : at + BLOCK], at)
    assert tar.stat().st_blocks * 512 < len(data)
    extract(ds, place / "out", reflink="always")
    assert contents(place / "out") == {"c/0000.jpg": middle}


def test_a_full_disk_ends_as_ever_and_the_next_run_goes_on(folder_on):
    place = folder_on("xfs")
    ds = draft_dataset((400,), sizes=(BLOCK + 4000,)).write(place / "ds")
    with open(place / "filler", "wb") as filler:
        for step in (64 << 20, 1 << 20, 1 << 16, BLOCK):
            with contextlib.suppress(OSError):
                while True:
                    os.posix_fallocate(filler.fileno(), os.fstat(filler.fileno()).st_size, step)
        try:
            with pytest.raises(TargetFullError, match=r"(\d+) whole files are kept; free space") as caught:
                extract(ds, place / "out", reflink="always", jobs=1)
        finally:
            (place / "filler").unlink()
            filler.truncate(0)
    assert caught.value.exit_code == 5
    kept = int((caught.value.kept or "").split()[0])
    caught.value.__traceback__ = None
    result = extract(ds, place / "out", reflink="always")
    assert (result.kept, result.made) == (kept, 400 - kept)
    assert contents(place / "out") == {f"c/{number:04d}.jpg": tiny_jpeg(number, BLOCK + 4000) for number in range(400)}


def test_blocks_larger_than_the_alignment_share_nothing(folder_on, monkeypatch):
    """As XFS and btrfs have them on some machines."""
    place = folder_on("xfs")
    ds = draft_dataset((2,), sizes=(100_000,)).write(place / "ds")
    monkeypatch.setattr(payload_module, "block_bytes", lambda _: 65_536)
    assert extract(ds, place / "out").shared_bytes == 0
    assert contents(place / "out") == files((100_000, 100_000))
    with pytest.raises(CapabilityError, match=r"does not start where a block does.*a multiple of 65536"):
        extract(ds, place / "always", reflink="always")


def test_a_shard_that_may_only_be_read(place):
    ds = dataset_in(place)
    for path in ds.iterdir():
        path.chmod(0o400)
    assert extract(ds, place / "out", reflink="always").shared_bytes == WHOLE


def test_memory_shares_nothing(tmp_path):
    with tmpfs(tmp_path / "memory", size=64 << 20) as folder:
        ds = dataset_in(folder)
        assert extract(ds, folder / "out").shared_bytes == 0
        assert contents(folder / "out") == files()


def test_an_unknown_wish_is_refused(tmp_path):
    ds = draft_dataset().write(tmp_path / "ds")
    with pytest.raises(ConfigError, match="unknown reflink"):
        extract(ds, tmp_path / "out", reflink="perhaps")  # type: ignore[arg-type]
