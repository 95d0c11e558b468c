from __future__ import annotations

import random

import pytest
from PIL import Image

import shardkit
from shardkit.format.checksum import crc32c
from shardkit.indexing import images, notes
from shardkit.indexing.images import HEAD_BYTES, facts_columns, head_facts, parse_label, parse_labels, whole_facts
from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.foreign import write_tar
from shardkit.testing.images import SPOILT, jpeg_bytes, spoilt

PLAIN = [b"0", b" 7\n", b"000000012", b"\t999999999\r\n"]


@pytest.mark.parametrize(
    "odd", [b"1,2", b"3,", b",", b"cat", b"-1", b"+1", b"1.0", b"1 2", b"1_0", b"\x0b1", b"2147483647", b"2147483648",
            b"0000000000", b"99999999999999999999", b"\xd9\xa4", b" " * 60, b"1\0"],
)  # fmt: skip
@pytest.mark.parametrize("before", range(len(PLAIN) + 1))
def test_labels_that_are_looked_at_together_are_told_like_each_alone(odd, before):
    payloads = [*PLAIN[:before], odd, *PLAIN[before:]]
    told = parse_labels(payloads)
    assert told == list(map(parse_label, payloads))
    assert told[:before] + told[before + 1 :] == [0, 7, 12, 999_999_999]


def test_no_label_is_lost_where_none_or_one_stands():
    assert parse_labels([memoryview(b"12")]) == [12]
    assert parse_labels(PLAIN) == [0, 7, 12, 999_999_999]
    assert parse_labels([b"1,2"]) == [None]


def payloads() -> list[bytes]:
    """Images of all kinds, in any order: most of them small and baseline."""
    small = [tiny_jpeg(number, size) for number in range(200) for size in (None, 500, 3900)]
    photo = jpeg_bytes(Image.effect_noise((90, 70), 60))
    odd = [spoilt(jpeg_bytes(Image.new("RGB", (64, 48))), how) for how in SPOILT if how != "empty"]
    large = [tiny_jpeg(7, size) for size in (4200, 16 << 10, (16 << 10) + 1, 70_000, 600_000)]
    turned = [jpeg_bytes(Image.new("RGB", (30, 20)), orientation=turn) for turn in range(1, 9)]
    others = [photo, photo[:-2], jpeg_bytes(Image.new("RGB", (9, 9)), progressive=True), b"\x89PNG\r\n\x1a\n", b"?"]
    found = [*small, *odd, *large, *turned, *others]
    random.Random(5).shuffle(found)
    return found


@pytest.mark.parametrize("facts", ["header", "full"])
def test_images_that_are_looked_at_together_are_told_like_each_alone(tmp_path, monkeypatch, facts):
    members = {f"{number:04d}.jpg": payload for number, payload in enumerate(payloads())}
    path = write_tar(tmp_path / "a.tar", members)
    looked = []
    for name, look in (("whole_facts", whole_facts), ("head_facts", head_facts)):
        monkeypatch.setattr(notes, name, lambda *given, look=look: looked.append(given) or look(*given))
    made = {}
    for least in (images._TOGETHER, 1 << 30):
        monkeypatch.setattr(images, "_TOGETHER", least)
        looked.clear()
        out = tmp_path / f"{least}"
        manifest = shardkit.index([path], out=out, labels="none", facts=facts, jobs=1, name="d")
        made[least] = (len(looked), (out / "index.arrow").read_bytes(), manifest.totals)
    (some, *together), (every, *alone) = made.values()
    assert together == alone
    assert every >= len(members) > 3 * some


def test_facts_of_whole_images_have_their_checksums_and_those_of_heads_none():
    known = [image for image in payloads() if image[:3] == b"\xff\xd8\xff"][:100]
    whole = facts_columns(known, lambda number: whole_facts(known[number]), whole=True)
    assert whole[:, 0].tolist() == list(map(crc32c, known))
    heads = [image[: HEAD_BYTES[0]] for image in known]
    cut = facts_columns(heads, lambda number: head_facts(heads[number], len(heads[number])), whole=False)
    assert not cut[:, 0].any()
    assert len(whole) == len(cut) == 100
