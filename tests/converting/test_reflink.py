"""Conversions whose shards share blocks with the inputs'."""

from __future__ import annotations

import pytest

import shardkit
from shardkit.converting.run import make_options, run_conversion
from shardkit.errors import CapabilityError
from shardkit.testing.damage import flip_byte
from shardkit.testing.datasets import draft_dataset
from shardkit.testing.extents import shared_bytes
from shardkit.testing.packs import contents

BLOCK = 4096
SIZES = (400, 4095, 4096, 4097, 60_000, 100_001, 300_000, 8191)
WHOLE = sum(size // BLOCK * BLOCK for size in SIZES)


@pytest.fixture(params=["xfs", "btrfs"])
def place(request, folder_on):
    """A folder where files can share blocks."""
    return folder_on(request.param)


def inputs_in(folder, **draft):
    return draft_dataset((4, 4), sizes=SIZES, name="in", **draft).write(folder / "in")


def convert(src, dst, reflink, **options):
    chosen = make_options(dst, {"name": "out", **options})
    return run_conversion([src], dst, chosen, jobs=1, reflink=reflink).parts


@pytest.mark.parametrize("options", [{"shards": 1, "shuffle": True}, {"shards": 3}])
def test_the_same_bytes_in_blocks_of_the_inputs(place, options):
    src = inputs_in(place)
    (part,) = convert(src, place / "out", "always", **options).values()
    convert(src, place / "never", "never", **options)
    assert contents(place / "out") == contents(place / "never")
    assert part.shared_bytes == WHOLE == sum(shared_bytes(path) for path in (place / "out").glob("*.tar"))
    assert shardkit.verify(place / "out").exit_code == 0


def test_parts_of_a_split_share_too(place):
    src = inputs_in(place)
    parts = convert(src, place / "out", "always", split={"train": "0.5", "val": "0.5"})
    assert sum(part.shared_bytes for part in parts.values()) == WHOLE


def test_damage_is_refused_all_the_same(place):
    draft = draft_dataset((4, 4), sizes=SIZES, name="in")
    src = draft.write(place / "in")
    flip_byte(src / "in-000001.tar", draft.shards[1].rows[0].offset + 5000)
    (part,) = convert(src, place / "out", "always").values()
    assert dict(part.refused) == {"damaged": 1}
    assert shardkit.verify(place / "out").exit_code == 0


def test_images_between_blocks_are_copied_and_always_names_one(place):
    src = inputs_in(place, align=512)
    (part,) = convert(src, place / "out", "auto").values()
    convert(src, place / "never", "never")
    assert contents(place / "out") == contents(place / "never")
    assert part.shared_bytes < WHOLE
    with pytest.raises(CapabilityError, match=r"does not start where a block does shares none.*in-00000\d\.tar:\d+"):
        convert(src, place / "always", "always")


def test_ext4_copies_with_auto_and_refuses_always_before_anything_is_made(folder_on):
    folder = folder_on("ext4")
    src = inputs_in(folder)
    (part,) = convert(src, folder / "out", "auto").values()
    assert part.shared_bytes == 0
    with pytest.raises(CapabilityError, match="does not share blocks between files"):
        convert(src, folder / "always", "always")
    assert not (folder / "always").exists()
