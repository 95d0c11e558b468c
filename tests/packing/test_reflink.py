"""Shards that share their blocks with the sources: the same bytes, really shared, checked where they are stored."""

from __future__ import annotations

import json
import os
import shutil

import pytest

import shardkit
from shardkit.errors import CapabilityError, ConfigError
from shardkit.packing import sharing
from shardkit.packing.run import make_options, run_pack
from shardkit.storage import sequential_writer
from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.extents import shared_bytes, shared_extents
from shardkit.testing.packs import StopAfter, contents, tiny_tree

BLOCK = 4096
SIZES = (400, 4095, 4096, 4097, 60_000, 65_536, 100_001, 300_000, 8191)
WHOLE = sum(size // BLOCK * BLOCK for size in SIZES)
OPTIONS = {"name": "t", "shards": 3, "jobs": 1}


@pytest.fixture(params=["xfs", "btrfs"])
def place(request, folder_on):
    """A folder where files can share blocks."""
    return folder_on(request.param)


def tree_in(folder, sizes=SIZES):
    """Images of the given sizes and three that are refused."""
    root = tiny_tree(folder / "src", images=0)
    for number, size in enumerate(sizes):
        (root / f"{'abc'[number % 3]}/{number:05d}.jpg").write_bytes(tiny_jpeg(number, size))
    for path in root.rglob("*.jpg"):
        os.utime(path, ns=(1, 1))
    return root


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What a pack without sharing makes, on another file system."""
    folder = tmp_path_factory.mktemp("expected")
    shardkit.pack(tree_in(folder), folder / "ds", **OPTIONS, reflink="never")
    return contents(folder / "ds")


def result_of(src, dst, **options):
    run = {name: options.pop(name) for name in ("jobs", "reflink", "resume", "progress") if name in options}
    chosen = make_options(dst, {"name": "t", "shards": 3, **options})
    return run_pack(src, dst, chosen, **{"jobs": 1, "reflink": "auto", **run})


@pytest.mark.parametrize("reflink", ["auto", "always"])
def test_the_same_bytes_in_blocks_of_the_sources(place, expected, reflink):
    result = result_of(tree_in(place), place / "ds", reflink=reflink)
    assert contents(place / "ds") == expected
    assert (result.made_payload, result.shared_bytes) == (sum(SIZES), WHOLE)
    assert shardkit.verify(place / "ds", level="decode").exit_code == 0
    for number, size in enumerate(SIZES):
        assert shared_bytes(place / f"src/{'abc'[number % 3]}/{number:05d}.jpg") >= size // BLOCK * BLOCK
    assert sum(shared_bytes(path) for path in (place / "ds").glob("*.tar")) == WHOLE


def test_payloads_are_shared_where_the_index_says(place):
    shardkit.pack(tree_in(place), place / "ds", **{**OPTIONS, "shards": 1}, reflink="auto")
    extents = shared_extents(place / "ds/t-000000.tar")
    with shardkit.open(place / "ds") as ds:
        located = ds.locate(range(len(ds)))
        for offset, size in zip(located.offset.tolist(), located.size.tolist(), strict=True):
            inside = [e for e in extents if e.offset < offset + size and e.end > offset]
            assert sum(extent.length for extent in inside) == size // BLOCK * BLOCK


def test_without_a_word_nothing_is_shared(place, expected):
    """What is shared lies all over the disk: whoever packs to read fast must not get that unasked."""
    shardkit.pack(tree_in(place), place / "ds", **OPTIONS)
    assert contents(place / "ds") == expected
    assert not any(shared_bytes(path) for path in (place / "ds").glob("*.tar"))


def test_any_number_of_jobs_packs_the_same_bytes(place, expected):
    result = result_of(tree_in(place), place / "ds", jobs=3)
    assert contents(place / "ds") == expected
    assert result.shared_bytes == WHOLE


def test_a_source_larger_than_a_buffer(place, monkeypatch):
    src = place / "src"
    src.mkdir()
    for number, size in enumerate((20 << 20, 5000, (16 << 20) + 1)):
        (src / f"{number}.jpg").write_bytes(tiny_jpeg(number, size))
    shardkit.pack(src, place / "never", name="t", jobs=1, reflink="never")
    result = result_of(src, place / "ds", shards=None)
    assert contents(place / "ds") == contents(place / "never")
    assert result.shared_bytes == (36 << 20) + BLOCK


def test_ext4_copies_with_auto_and_refuses_always_before_anything_is_made(folder_on, expected):
    folder = folder_on("ext4")
    src = tree_in(folder)
    assert result_of(src, folder / "ds").shared_bytes == 0
    assert contents(folder / "ds") == expected
    with pytest.raises(CapabilityError, match="does not share blocks between files") as caught:
        shardkit.pack(src, folder / "new" / "other", **OPTIONS, reflink="always")
    assert caught.value.exit_code == 7
    assert sorted(os.listdir(folder)) == ["ds", "src"]


def test_another_file_system_copies_with_auto_and_refuses_always(folder_on, place, expected):
    src = tree_in(folder_on("ext4"))
    assert result_of(src, place / "ds").shared_bytes == 0
    assert contents(place / "ds") == expected
    with pytest.raises(CapabilityError, match="different file systems"):
        shardkit.pack(src, place / "always", **OPTIONS, reflink="always")
    assert not (place / "always").exists()


def test_a_list_of_two_file_systems_shares_what_it_can(folder_on, place):
    near, far = place / "near.jpg", folder_on("ext4") / "far.jpg"
    near.write_bytes(tiny_jpeg(0, 50_000))
    far.write_bytes(tiny_jpeg(1, 60_000))
    table = place / "list.jsonl"
    table.write_text("".join(json.dumps({"path": str(path), "label": 0}) + "\n" for path in (near, far)))
    result = result_of(table, place / "ds", shards=1)
    assert result.shared_bytes == 50_000 // BLOCK * BLOCK
    assert shardkit.verify(place / "ds", level="decode").exit_code == 0
    with pytest.raises(CapabilityError, match="different file systems") as caught:
        result_of(table, place / "always", shards=1, reflink="always")
    assert "--resume" in str(caught.value)


@pytest.mark.parametrize("options", [{"resize": 8}, {"align": 512}])
def test_options_by_which_nothing_can_be_shared(place, options):
    src = tree_in(place)
    assert result_of(src, place / "ds", **options).shared_bytes == 0
    assert shardkit.verify(place / "ds").exit_code == 0
    with pytest.raises(ConfigError, match="could share no blocks with their sources"):
        result_of(src, place / "always", reflink="always", **options)
    assert not (place / "always").exists()


def test_reencoded_images_are_written_and_the_others_shared(place):
    from PIL import Image

    src = tree_in(place)
    noise = Image.frombytes("RGB", (200, 200), os.urandom(120_000))
    noise.save(src / "a/large.jpg", "PNG")
    Image.new("RGB", (9, 9)).save(src / "b/small.jpg", "PNG")
    result = result_of(src, place / "ds", convert=True)
    result_of(src, place / "never", convert=True, reflink="never")
    assert contents(place / "ds") == contents(place / "never")
    assert result.shared_bytes == WHOLE


def test_images_made_baseline_are_written_and_the_others_shared(place, require_tool):
    from PIL import Image

    require_tool("jpegtran")  # whose package brings the library
    src = tree_in(place)
    noise = Image.frombytes("RGB", (200, 200), os.urandom(120_000))
    noise.save(src / "a/large.jpg", progressive=True)
    result = result_of(src, place / "ds", baseline=True, reflink="always")
    result_of(src, place / "never", baseline=True, reflink="never")
    assert contents(place / "ds") == contents(place / "never")
    assert result.shared_bytes == WHOLE


@pytest.mark.parametrize("where", ["between", "last"])
def test_a_refused_image_leaves_no_trace(place, where):
    """Its blocks are shared before it is looked at; what comes next takes their place, and the end is cut off."""
    src = place / "src"
    src.mkdir()
    names = ("0.jpg", "1.jpg", "2.jpg")
    for number, name in enumerate(names):
        (src / name).write_bytes(tiny_jpeg(number, 9000))
    (src / {"between": "0a.jpg", "last": "9.jpg"}[where]).write_bytes(b"\xff\xd8 no image" + os.urandom(3_000_000))
    options = {"shards": 1, "shuffle": False}
    result = result_of(src, place / "ds", **options)
    result_of(src, place / "never", **options, reflink="never")
    assert result.refused.total() == 1
    assert contents(place / "ds") == contents(place / "never")
    assert shared_bytes(place / "ds/t-000000.tar") == 3 * 8192


def test_holes_in_a_source_are_packed_as_zeros(place):
    src = place / "src"
    src.mkdir()
    jpeg = tiny_jpeg(0, 900)
    whole = jpeg[:-2] + bytes(300_000) + jpeg[-2:]
    with open(src / "0.jpg", "wb") as file:
        file.write(jpeg[:-2])
        file.seek(300_000, os.SEEK_CUR)
        file.write(jpeg[-2:])
    assert (src / "0.jpg").stat().st_blocks * 512 < len(whole)
    shardkit.pack(src, place / "ds", name="t", jobs=1, check="none", reflink="always")
    shardkit.pack(src, place / "never", name="t", jobs=1, check="none", reflink="never")
    assert contents(place / "ds") == contents(place / "never")
    assert whole in contents(place / "ds")["t-000000.tar"]


def test_sources_that_may_only_be_read(place, expected):
    src = tree_in(place)
    for path in src.rglob("*.jpg"):
        path.chmod(0o400)
    assert result_of(src, place / "ds", reflink="always").shared_bytes == WHOLE
    assert contents(place / "ds") == expected


# --- sources that change


def test_what_is_checked_is_what_is_stored(place, monkeypatch):
    """Somebody writes into a source after its blocks are shared, and hides it: the shard has, and states, the old."""
    src = place / "src"
    src.mkdir()
    (src / "0.jpg").write_bytes(tiny_jpeg(0, 50_000))
    os.utime(src / "0.jpg", ns=(1, 1))
    share = sequential_writer.share_blocks

    def share_then_change(*arguments):
        share(*arguments)
        if arguments[0].path.endswith(b"0.jpg"):
            with open(src / "0.jpg", "r+b") as file:
                file.write(b"\0" * 8192)
            os.utime(src / "0.jpg", ns=(1, 1))

    shardkit.pack(src, place / "before", name="t", jobs=1, reflink="never")
    monkeypatch.setattr(sequential_writer, "share_blocks", share_then_change)
    shardkit.pack(src, place / "ds", name="t", jobs=1, reflink="always")
    assert contents(place / "ds") == contents(place / "before")
    assert shardkit.verify(place / "ds", level="decode").exit_code == 0


def test_a_source_that_changes_before_its_blocks_are_shared_is_read_again(place, monkeypatch):
    src = place / "src"
    src.mkdir()
    (src / "0.jpg").write_bytes(tiny_jpeg(0, 50_000))
    changed = []
    share = sharing.Room.share

    def change_then_share(room, source, size):
        if not changed:
            changed.append(1)
            (src / "0.jpg").write_bytes(tiny_jpeg(2, 30_000))
        return share(room, source, size)

    monkeypatch.setattr(sharing.Room, "share", change_then_share)
    shardkit.pack(src, place / "ds", name="t", jobs=1, reflink="always")
    with shardkit.open(place / "ds") as ds:
        assert ds[0].jpeg == tiny_jpeg(2, 30_000)


def test_a_source_that_always_changes_is_refused(place, monkeypatch):
    src = tree_in(place)
    share = sharing.Room.share

    def share_then_change(room, source, size):
        done = share(room, source, size)
        if source.path.endswith(b"00007.jpg"):
            os.utime(source.path)
        return done

    monkeypatch.setattr(sharing.Room, "share", share_then_change)
    result = result_of(src, place / "ds", reflink="always")
    assert result.refused["changed"] == 1
    assert shardkit.verify(place / "ds", level="decode").exit_code == 0


# --- going on


@pytest.mark.parametrize("modes", [("always", "never"), ("never", "always")])
def test_a_pack_goes_on_with_another_wish(place, expected, modes):
    src = tree_in(place)
    with pytest.raises(StopAfter.Stop):
        shardkit.pack(src, place / "ds", **OPTIONS, reflink=modes[0], progress=StopAfter(2))
    result = result_of(src, place / "ds", resume=True, reflink=modes[1])
    assert result.kept == 2
    assert contents(place / "ds") == expected


def test_a_finished_dataset_does_not_care(place, expected):
    src = tree_in(place)
    shardkit.pack(src, place / "ds", **OPTIONS, reflink="always")
    assert result_of(src, place / "ds", resume=True, reflink="never").kept == 3


def test_a_pack_that_would_not_fit_as_a_copy_fits(folder_on):
    place = folder_on("xfs")
    src = place / "src"
    src.mkdir()
    free = shutil.disk_usage(place).free
    size = 8 << 20
    count = free * 6 // 10 // size
    for number in range(count):
        (src / f"{number:03d}.jpg").write_bytes(tiny_jpeg(number, size))
    try:
        result = result_of(src, place / "ds", reflink="always")
        assert result.shared_bytes == count * size
        with pytest.raises(OSError, match=r"free|space"):
            shardkit.pack(src, place / "never", **OPTIONS, reflink="never")
    finally:
        for folder in ("src", "ds", "never"):
            shutil.rmtree(place / folder, ignore_errors=True)
