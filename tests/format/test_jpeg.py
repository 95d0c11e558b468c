from __future__ import annotations

import gzip
import io
import mmap
import pickle
import struct
import tempfile
import zipfile
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, JpegImagePlugin

from shardkit.errors import FormatError
from shardkit.format import plain_jpegs as plain_jpegs_module
from shardkit.format.index_columns import FACTS
from shardkit.format.jpeg import (
    REFUSALS,
    SUBSAMPLINGS,
    JpegRefusal,
    hardware_decodable,
    inspect_jpeg,
)
from shardkit.format.media_type import MEDIA_TYPES, sniff_media_type
from shardkit.format.plain_jpegs import plain_jpegs

EOI = b"\xff\xd9"
ORDERS = {"II": "<", "MM": ">"}


# The oracle: T.81 read byte by byte, as slowly and as plainly as it can be written.


class Refused(Exception):
    pass


class Octets:
    def __init__(self, data):
        self.data, self.at, self.marker = data, 0, 0

    def next(self):
        if self.at == len(self.data):
            raise Refused("truncated")
        self.at += 1
        return self.data[self.at - 1]


def oracle(data):
    """The facts as a dict, or the code and the offset of the refusal."""
    octets = Octets(data)
    try:
        return oracle_facts(octets)
    except Refused as refused:
        return str(refused), octets.marker


def oracle_facts(octets):
    data, frame = octets.data, None
    if not data:
        raise Refused("empty")
    if data[:2] != b"\xff\xd8":
        raise Refused("not-jpeg")
    octets.at = 2
    seen = {"scans": 0, "restart_interval": 0, "adobe_transform": -1, "exif": None, "mpf": None}
    while True:
        octets.marker = octets.at
        if octets.next() != 0xFF:
            raise Refused("bad-marker")
        code = octets.next()
        while code == 0xFF:
            octets.marker += 1
            code = octets.next()
        if code == 0xD9:
            break
        payload = oracle_payload(octets, code)
        if code in (0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xCA, 0xCB):
            frame = oracle_frame(code, payload, frame)
        elif code == 0xDA:
            oracle_scan(octets, payload, frame)
            seen["scans"] += 1
        elif code == 0xDD and len(payload) != 2:
            raise Refused("bad-marker")
        elif not seen["scans"]:
            oracle_note(code, payload, seen)
    if frame is None or not seen["scans"]:
        raise Refused("no-frame" if frame is None else "no-scan")
    after = data[octets.at :]
    orientation, images = oracle_tag(seen.pop("exif"), 0x0112, 3), oracle_tag(seen.pop("mpf"), 0xB001, 4)
    further = max(images - 1, int(b"\xff\xd8\xff" in after[:4096]))
    orientation = orientation if orientation in range(1, 9) else 0
    facts = {key: value for key, value in {**frame, **seen}.items() if key != "names"}
    facts |= {"media_type": 1, "orientation": orientation, "eoi": True, "scans": min(seen["scans"], 255)}
    return facts | {"trailing": len(after), "secondary": min(further, 255)}


def oracle_payload(octets, code):
    if code in (0xC5, 0xC6, 0xC7, 0xCD, 0xCE, 0xCF, 0xDE, 0xDF):
        raise Refused("two-frames")
    if code < 0xC0 or code == 0xC8 or 0xD0 <= code <= 0xD8 or 0xF0 <= code <= 0xFD:
        raise Refused("bad-marker")
    length = octets.next() * 256 + octets.next()
    if length < 2:
        raise Refused("bad-marker")
    return bytes(octets.next() for _ in range(length - 2))


def oracle_frame(code, payload, earlier):
    if earlier is not None:
        raise Refused("two-frames")
    if len(payload) < 6 or payload[5] == 0 or len(payload) != 6 + 3 * payload[5]:
        raise Refused("bad-marker")
    height, width = payload[1] * 256 + payload[2], payload[3] * 256 + payload[4]
    if height == 0 or width == 0:
        raise Refused("bad-dimensions")
    factors = [(payload[i] // 16, payload[i] % 16) for i in range(7, len(payload), 3)]
    if not all(1 <= h <= 4 and 1 <= v <= 4 for h, v in factors):
        raise Refused("bad-marker")
    name = "unknown"
    if len(factors) == 1:
        name = "gray"
    elif len(factors) in (3, 4) and factors[1] == factors[2]:
        ratio = factors[0][0] / factors[1][0], factors[0][1] / factors[1][1]
        names = {(1, 1): "4:4:4", (2, 1): "4:2:2", (2, 2): "4:2:0", (1, 2): "4:4:0", (4, 1): "4:1:1", (4, 2): "4:1:0"}
        name = names.get(ratio, "unknown")
    facts = {"width": width, "height": height, "sof": code - 0xC0, "components": len(factors), "precision": payload[0]}
    return {**facts, "subsampling": SUBSAMPLINGS.index(name), "names": payload[6::3]}


def oracle_scan(octets, payload, frame):
    if frame is None:
        raise Refused("no-frame")
    if not payload or not 1 <= payload[0] <= 4 or len(payload) != 4 + 2 * payload[0]:
        raise Refused("bad-marker")
    if any(payload[1 + 2 * i] not in frame["names"] for i in range(payload[0])):
        raise Refused("bad-marker")
    octets.marker = len(octets.data)
    while True:
        if octets.next() != 0xFF:
            continue
        code = octets.next()
        while code == 0xFF:
            code = octets.next()
        if code != 0 and not 0xD0 <= code <= 0xD7:
            octets.at -= 2
            return


def oracle_note(code, payload, seen):
    if code == 0xDD:
        seen["restart_interval"] = payload[0] * 256 + payload[1]
    if code == 0xE1 and payload[:6] == b"Exif\0\0" and seen["exif"] is None:
        seen["exif"] = payload[6:]
    if code == 0xE2 and payload[:4] == b"MPF\0" and seen["mpf"] is None:
        seen["mpf"] = payload[4:]
    if code == 0xEE and payload[:5] == b"Adobe" and len(payload) >= 12:
        seen["adobe_transform"] = payload[11] if payload[11] <= 2 else -1


def oracle_tag(tiff, tag, kind):
    if tiff is None or tiff[:4] not in (b"II*\0", b"MM\0*"):
        return 0
    order = "little" if tiff[:1] == b"I" else "big"
    at = int.from_bytes(tiff[4:8], order)
    if len(tiff) < 8 or at < 8 or at + 2 > len(tiff):
        return 0
    for number in range(int.from_bytes(tiff[at : at + 2], order)):
        entry = tiff[at + 2 + 12 * number : at + 14 + 12 * number]
        found = [int.from_bytes(entry[i:j], order) for i, j in ((0, 2), (2, 4), (4, 8))]
        if len(entry) == 12 and found == [tag, kind, 1]:
            return int.from_bytes(entry[8 : 10 if kind == 3 else 12], order)
    return 0


def ours(data):
    try:
        return inspect_jpeg(data)._asdict()
    except JpegRefusal as caught:
        refusal = caught
    assert refusal.code in REFUSALS
    assert 0 <= refusal.offset <= len(data)
    assert refusal.detail
    return refusal.code, refusal.offset


def code_of(data):
    found = ours(data)
    assert not isinstance(found, dict), found
    return found[0]


# The corpus: what encoders really write.


def encode(image, form="JPEG", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def segment(code, payload):
    return struct.pack(">BBH", 0xFF, code, len(payload) + 2) + payload


def insert(data, *segments):
    """`data` with segments right behind SOI."""
    return data[:2] + b"".join(segments) + data[2:]


def patch(data, at, new):
    return data[:at] + new + data[at + len(new) :]


def exif(byte_order, orientation, *, kind=3, count=1, entries=None, directory=8):
    """An Exif segment; `entries` is what the directory claims, of which there are two."""
    order = ORDERS[byte_order]
    head = byte_order.encode() + struct.pack(order + "HI", 42, directory)
    make = struct.pack(order + "HHI4s", 0x010F, 2, 4, b"abc\0")
    value = struct.pack(order + "H2x", orientation) if kind == 3 else struct.pack(order + "I", orientation)
    turn = struct.pack(order + "HHI", 0x0112, kind, count) + value
    return segment(0xE1, b"Exif\0\0" + head + struct.pack(order + "H", entries or 2) + make + turn + bytes(4))


def drawing(width, height, mode="RGB"):
    image = Image.new(mode, (width, height), "white" if mode != "CMYK" else (0, 20, 0, 0))
    ImageDraw.Draw(image).ellipse((0, 0, width, height), fill="teal" if mode != "CMYK" else (90, 0, 30, 10))
    return image


@pytest.fixture(scope="session")
def corpus(photographs):
    photo = Image.fromarray(photographs[0]).crop((200, 100, 248, 132))
    flower = Image.fromarray(photographs[1]).crop((300, 150, 348, 190))
    thumbnail = encode(flower.resize((8, 6)))
    small = encode(drawing(9, 7))
    cmyk = encode(drawing(20, 13, "CMYK"))
    return {
        **{f"baseline {name}": encode(photo, subsampling=number) for number, name in enumerate(("444", "422", "420"))},
        **{f"{w}x{h}": encode(drawing(w, h)) for w, h in ((1, 1), (1, 17), (33, 1), (15, 31))},
        "gray": encode(photo.convert("L"), quality=95),
        "progressive": encode(flower, progressive=True, quality=90),
        "gray progressive": encode(flower.convert("L"), progressive=True),
        "optimized": encode(flower, optimize=True, quality=40),
        "rgb": encode(photo, keep_rgb=True),
        "cmyk": cmyk,
        "ycck": patch(cmyk, cmyk.index(b"Adobe") + 11, b"\x02"),
        "restart blocks": encode(photo, restart_marker_blocks=1),
        "restart rows": encode(flower, restart_marker_rows=1, progressive=True),
        "mpo": encode(photo, "MPO", save_all=True, append_images=[flower, drawing(8, 8)]),
        "concatenated": small + thumbnail,
        "padded": small + bytes(513),
        "thumbnail": insert(small, segment(0xE1, exif("MM", 6)[4:] + thumbnail), segment(0xE2, thumbnail)),
        "comment with markers": encode(photo, comment=b"\xff\xd9\xff\xda\xff\xc0"),
        "progressive with EOI in a comment": splice_comment(encode(photo, progressive=True)),
        **{f"exif {o} {n}": insert(small, exif(o, n)) for o, n in product(ORDERS, range(1, 9))},
    }


def splice_comment(data):
    """A comment that holds EOI and SOI behind the first scan of a progressive image."""
    at = data.index(b"\xff\xc4", data.index(b"\xff\xda"))
    return data[:at] + segment(0xFE, EOI + b"\xff\xd8\xff\xe0") + data[at:]


@pytest.fixture(scope="session")
def small():
    return encode(drawing(9, 7))


# Agreement with Pillow and with the oracle.


def test_pillow_sees_the_same_in_every_image_of_the_corpus(corpus):
    for name, data in corpus.items():
        facts = inspect_jpeg(data)
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            info, layers = image.info, image.layers
            sampling = JpegImagePlugin.get_sampling(image)
            assert (facts.width, facts.height) == image.size, name
            assert facts.components == layers == len(image.getbands()), name
            assert (facts.sof == 2) == bool(info.get("progressive")), name
            assert facts.precision == image.bits, name
            assert facts.orientation == image.getexif().get(0x0112, 0), name
            assert facts.adobe_transform == info.get("adobe_transform", -1), name
            if layers == 3:
                assert SUBSAMPLINGS[facts.subsampling] == ("4:4:4", "4:2:2", "4:2:0")[sampling], name
        assert facts == type(facts)(**oracle(data)), name


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("gray", {"components": 1, "subsampling": SUBSAMPLINGS.index("gray"), "hardware_decodable": True}),
        ("baseline 420", {"sof": 0, "scans": 1, "restart_interval": 0, "adobe_transform": -1, "trailing": 0}),
        ("baseline 444", {"hardware_decodable": True, "pixels": 48 * 32, "media_type": 1, "secondary": 0}),
        ("progressive", {"sof": 2, "scans": 10, "hardware_decodable": False}),
        ("gray progressive", {"sof": 2, "scans": 6}),
        ("rgb", {"adobe_transform": 0, "subsampling": SUBSAMPLINGS.index("4:4:4")}),
        ("cmyk", {"components": 4, "adobe_transform": 0, "hardware_decodable": False}),
        ("restart blocks", {"restart_interval": 1, "scans": 1}),
        ("thumbnail", {"width": 9, "height": 7, "orientation": 6, "trailing": 0, "secondary": 0}),
        ("padded", {"trailing": 513, "secondary": 0}),
        ("concatenated", {"width": 9, "secondary": 1}),
        ("progressive with EOI in a comment", {"scans": 10, "trailing": 0}),
    ],
)
def test_facts_that_the_encoder_was_told(corpus, name, known):
    facts = inspect_jpeg(corpus[name])
    assert {key: getattr(facts, key) for key in known} == known


def test_mpo_counts_the_further_images_and_ends_where_its_directory_says(corpus):
    data = corpus["mpo"]
    with Image.open(io.BytesIO(data)) as image:
        first = image.mpinfo[0xB002][0]["Size"]
        frames = image.n_frames
    facts = inspect_jpeg(data)
    assert (facts.secondary, facts.trailing) == (frames - 1, len(data) - first)


KINDS = ("flip", "insert", "delete", "truncate", "copy")
POINTED = [
    bytes([0xFF, code]) for code in (0, 1, 0xC0, 0xC2, 0xC4, 0xD0, 0xD7, 0xD8, 0xD9, 0xDA, 0xDC, 0xDD, 0xE1, 0xFF)
]
PIECES = st.sampled_from([*POINTED, b"\xff", b"\0", b"\0\0"]) | st.binary(min_size=1, max_size=3)
MUTATIONS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 1 << 16), PIECES), min_size=1, max_size=4)


def mutate(data, mutations):
    for kind, where, piece in mutations:
        at = where % (len(data) + 1)
        changed = {
            "flip": patch(data, at, piece)[: len(data)],
            "insert": data[:at] + piece + data[at:],
            "delete": data[:at] + data[at + len(piece) :],
            "truncate": data[:at],
            "copy": data[:at] + data[at // 2 : at // 2 + 40] + data[at:],
        }
        data = changed[kind]
    return data


@settings(max_examples=400)
@given(which=st.integers(0, 1 << 16), mutations=MUTATIONS)
def test_the_oracle_agrees_on_damaged_images(corpus, which, mutations):
    data = mutate(list(corpus.values())[which % len(corpus)], mutations)
    assert ours(data) == oracle(data)


@settings(max_examples=200)
@given(st.binary(max_size=300))
@example(b"")
@example(b"\xff")
@example(b"\xff\xff\xff")
def test_the_oracle_agrees_on_noise_behind_soi(noise):
    data = b"\xff\xd8" + noise
    assert ours(data) == oracle(data)
    assert ours(noise) == oracle(noise)


FRAME = segment(0xC0, b"\x08\0\x01\0\x01\x01\x01\x11\0")
SCAN = segment(0xDA, b"\x01\x01\0\0\x3f\0")
BARE = b"\xff\xd8" + FRAME + SCAN
CODES = st.sampled_from((0xC0, 0xC2, 0xC4, 0xDA, 0xDC, 0xDD, 0xDF, 0xE1, 0xE2, 0xEE, 0xFE))
WORDS = st.sampled_from((b"", b"\x08\0\x01\0\x01", b"\x01\x01", b"\x02", b"Exif\0\0II*\0", b"MPF\0MM\0*", b"Adobe"))
ODD = st.builds(lambda code, word, rest: segment(code, word + rest), CODES, WORDS, st.binary(max_size=14))
TURNS = st.builds(
    exif, st.sampled_from(("II", "MM")), st.integers(0, 9), kind=st.sampled_from((3, 4)), entries=st.integers(1, 3)
)
PARTS = st.sampled_from([FRAME, SCAN, *POINTED, segment(0xFE, EOI), b"\x12\x34", b"\xff\0\xff\xd3"]) | ODD | TURNS


@settings(max_examples=300)
@given(st.lists(PARTS, max_size=10))
def test_the_oracle_agrees_on_any_order_of_segments(parts):
    for data in (b"\xff\xd8" + b"".join(parts), BARE + b"".join(parts) + EOI, insert(BARE + EOI, *parts)):
        assert ours(data) == oracle(data)


@pytest.mark.parametrize("shift", range(-3, 4))
@pytest.mark.parametrize("tail", [EOI, b"\xff" + EOI, b"\xff\xff\0\xff\xd5" + EOI, SCAN + b"\xff\0" + EOI, b"\xff"])
@pytest.mark.parametrize("windows", [1, 2])
def test_a_marker_is_found_across_the_border_of_two_search_windows(shift, tail, windows):
    data = BARE + bytes(windows * 2**18 + shift) + tail
    assert ours(data) == oracle(data)


# The short way, held against the careful one: what it takes, that one must take alike.


def taken(heads, strict):
    """The facts of each image that the short way takes, None of the others; checked against the careful one."""
    plain, facts = plain_jpegs(heads, strict=strict)
    assert plain.shape == (len(heads),)
    assert facts.shape == (len(heads), len(FACTS))
    found = [tuple(row) if one else None for one, row in zip(plain.tolist(), facts.tolist(), strict=True)]
    for head, row in zip(heads, found, strict=True):
        if row is not None:
            careful = inspect_jpeg(head, strict=strict)
            assert row == tuple(getattr(careful, name) for name in FACTS)
    return found


NOT_PLAIN = ("progressive", "cmyk", "ycck", "splice")


@pytest.mark.parametrize("strict", [True, False])
def test_the_short_way_takes_what_is_baseline(corpus, strict):
    images = {name: image for name, image in corpus.items() if name != "restart rows"}
    for name, row in zip(images, taken(list(images.values()), strict), strict=True):
        assert (row is None) == any(word in name for word in NOT_PLAIN), name
    assert taken([], strict) == []
    assert taken([images["gray"]], strict) != [None]


@pytest.mark.parametrize("strict", [True, False])
def test_an_image_that_goes_on_has_its_facts_the_short_way_unless_its_end_is_wanted(corpus, strict):
    photo = corpus["restart blocks"]
    start = photo.index(b"\xff\xda") + 14
    heads = [photo[:end] for end in range(len(photo))]
    rows = taken(heads, strict)
    assert set(rows[:start]) == {None}
    assert (set(rows[start:]) == {None}) == strict
    assert len(set(rows[start:])) == 1


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 1 << 16), MUTATIONS, st.integers(0, 1 << 12)), min_size=1, max_size=12))
def test_the_short_way_takes_nothing_else_of_damaged_images(corpus, damage):
    whole = list(corpus.values())
    heads = [mutate(whole[which % len(whole)], mutations) for which, mutations, _ in damage]
    cut = [head[: len(head) - cut % (len(head) + 1)] for head, (_, _, cut) in zip(heads, damage, strict=True)]
    for strict in (True, False):
        together = taken([*heads, *cut], strict)
        assert together == [row for head in (*heads, *cut) for row in taken([head], strict)]


@settings(max_examples=300)
@given(st.lists(st.lists(PARTS, max_size=10), min_size=1, max_size=6))
def test_the_short_way_takes_nothing_else_of_any_order_of_segments(images):
    for strict in (True, False):
        taken([b"\xff\xd8" + b"".join(parts) for parts in images], strict)
        taken([BARE + b"".join(parts) + EOI for parts in images], strict)
        taken([insert(BARE + EOI, *parts) for parts in images], strict)


GRAY, GRAY_SCAN = b"\x08\0\x01\0\x01\x01\x01\x11\0", b"\x01\x01\0\0\x3f\0"
COLOUR = b"\x08\0\x01\0\x01\x03\x01\x11\0\x02\x11\0\x03\x11\0"
COLOUR_SCAN = b"\x03\x01\0\x02\0\x03\0\0\x3f\0"
ADOBE = segment(0xEE, b"Adobe" + bytes(6) + b"\x01")
NEARLY = {
    "a length of 0": (b"\xff\xfe\0\0",),
    "a length of 1": (b"\xff\xfe\0\1",),
    "a long frame": (segment(0xC0, GRAY + b"\0"), segment(0xDA, GRAY_SCAN)),
    "a short frame": (segment(0xC0, GRAY[:-1]), segment(0xDA, GRAY_SCAN)),
    "a frame of nothing": (b"\xff\xc0\0\0",),
    "no lines": (segment(0xC0, patch(GRAY, 1, b"\0\0")), segment(0xDA, GRAY_SCAN)),
    "no columns": (segment(0xC0, patch(GRAY, 3, b"\0\0")), segment(0xDA, GRAY_SCAN)),
    "a long scan": (segment(0xC0, GRAY), segment(0xDA, GRAY_SCAN + b"\0")),
    "a short scan": (segment(0xC0, GRAY), segment(0xDA, GRAY_SCAN[:-1])),
    "a scan of nothing": (segment(0xC0, GRAY), b"\xff\xda\0\1"),
    "a scan of another component": (segment(0xC0, GRAY), segment(0xDA, patch(GRAY_SCAN, 1, b"\x02"))),
    "a scan of one of three": (segment(0xC0, COLOUR), segment(0xDA, GRAY_SCAN)),
    "a scan of one of three, long": (segment(0xC0, COLOUR), segment(0xDA, b"\x01" + COLOUR_SCAN[1:])),
    "a scan of three of one": (segment(0xC0, GRAY), segment(0xDA, COLOUR_SCAN)),
    "a scan in another order": (segment(0xC0, COLOUR), segment(0xDA, patch(COLOUR_SCAN, 3, b"\x03\0\x02"))),
    "a scan of one thrice": (segment(0xC0, COLOUR), segment(0xDA, patch(COLOUR_SCAN, 5, b"\x01"))),
    "a scan before its frame": (segment(0xDA, GRAY_SCAN), segment(0xC0, GRAY)),
    "no scan": (segment(0xC0, GRAY),),
}
NOTED = {
    "gray": ((segment(0xC0, GRAY), segment(0xDA, GRAY_SCAN)), {}),
    "colour": ((segment(0xC0, COLOUR), segment(0xDA, COLOUR_SCAN)), {"subsampling": 1}),
    "restarts": ((segment(0xDD, b"\1\2"), segment(0xC0, GRAY), segment(0xDA, GRAY_SCAN)), {"restart_interval": 258}),
    "Adobe": ((ADOBE, segment(0xC0, GRAY), segment(0xDA, GRAY_SCAN)), {"adobe_transform": 1}),
    "an odd Adobe": (
        (ADOBE, segment(0xEE, b"Adobe" + bytes(6) + b"\x07"), segment(0xC0, GRAY), segment(0xDA, GRAY_SCAN)),
        {"adobe_transform": -1},
    ),
    "a short Adobe": (
        (ADOBE, segment(0xEE, b"Adobe" + bytes(4)), segment(0xFE, b""), segment(0xC0, GRAY), segment(0xDA, GRAY_SCAN)),
        {"adobe_transform": 1},
    ),
    "a short Exif": ((segment(0xE1, b"Exif\0"), segment(0xC0, GRAY), segment(0xDA, GRAY_SCAN)), {"orientation": 0}),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("what", NEARLY)
def test_the_short_way_leaves_alone_what_is_nearly_plain(what, strict):
    assert taken([b"\xff\xd8" + b"".join(NEARLY[what]) + b"\0\0" + EOI], strict) == [None]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("what", NOTED)
def test_the_short_way_notes_what_segments_say(what, strict):
    parts, known = NOTED[what]
    (row,) = taken([b"\xff\xd8" + b"".join(parts) + b"\0\0" + EOI], strict)
    assert known.items() <= dict(zip(FACTS, row, strict=True)).items()


def test_the_short_way_reads_no_marker_across_the_border_of_two_images():
    assert taken([BARE + b"\0\xff", EOI[1:], BARE + b"\0\xff", b"\xfe"], True) == [None] * 4
    first, _, second, _ = taken([BARE + b"\0\xff", EOI[1:], BARE + b"\0\xff", b"\xfe"], False)
    assert first is not None
    assert first == second


@pytest.mark.parametrize("factors", range(256))
def test_the_short_way_knows_the_sampling_factors_that_may_be(factors):
    gray, colour = bytes([1, 1, factors, 0]), bytes([3, 1, 0x22, 0, 2, factors, 0, 3, factors, 0])
    heads = [
        b"\xff\xd8" + segment(0xC0, b"\x08\0\x01\0\x01" + frame) + segment(0xDA, scan + b"\0\x3f\0")
        for frame, scan in ((gray, b"\x01\x01\0"), (colour, b"\x03\x01\0\x02\0\x03\0"))
    ]
    sides = {1, 2, 3, 4}
    assert [row is not None for row in taken(heads, False)] == 2 * [{factors >> 4, factors & 15} <= sides]


@pytest.mark.parametrize("shift", range(-3, 4))
@pytest.mark.parametrize("tail", [EOI, b"\xff" + EOI, b"\xff\xff\0\xff\xd5" + EOI, b"\xff", b"\xff\xd8" + EOI])
@pytest.mark.parametrize("windows", [1, 2])
def test_the_short_way_finds_a_marker_across_the_border_of_two_search_windows(shift, tail, windows):
    data = BARE + b"\0" * (windows * (1 << 16) - len(BARE) + shift) + tail
    for strict in (True, False):
        ends = tail not in (b"\xff", b"\xff\xd8" + EOI)
        assert (taken([data], strict) == [None]) == (not ends and (strict or tail != b"\xff"))


def test_no_image_is_held_up_by_one_of_many_segments(small, monkeypatch):
    many = insert(small, *[segment(0xFE, b"")] * 10_000)
    few = insert(small, *[segment(0xFE, b"")] * 20)
    steps, number = [], plain_jpegs_module._number
    monkeypatch.setattr(plain_jpegs_module, "_number", lambda pairs: steps.append(len(pairs)) or number(pairs))
    rows = taken([small, many, few], True)
    assert [row is None for row in rows] == [False, True, False]
    assert len(steps) < 50


# Refusals.


def test_every_truncation_is_refused_as_such(corpus):
    for data in (corpus["1x1"], corpus["gray progressive"], corpus["restart blocks"]):
        codes = [code_of(data[:length]) for length in range(len(data))]
        assert codes == ["empty", "not-jpeg"] + ["truncated"] * (len(data) - 2)


def test_a_missing_eoi_is_refused_and_pillow_agrees_until_bytes_follow(corpus):
    data = corpus["baseline 420"][:-2]
    assert code_of(data) == "truncated"
    with pytest.raises(OSError, match="truncated"):
        Image.open(io.BytesIO(data)).load()
    followed = data + bytes(10)  # Pillow shows it; that it ends here cannot be proven
    Image.open(io.BytesIO(followed)).load()
    assert code_of(followed) == "truncated"


def test_an_image_without_end_has_facts_when_asked_for(corpus):
    data = corpus["progressive"]
    whole = inspect_jpeg(data)._asdict()
    cut = inspect_jpeg(data[:-2], strict=False)._asdict()
    assert cut == {**whole, "eoi": False}
    assert inspect_jpeg(data, strict=False).eoi
    early = data.index(b"\xff\xda") + 4
    with pytest.raises(JpegRefusal, match="ends inside a segment"):
        inspect_jpeg(data[:early], strict=False)
    with pytest.raises(JpegRefusal, match="may not stand here"):
        inspect_jpeg(data[:-2] + b"\xff\x01", strict=False)


def sof_at(data):
    return data.index(b"\xff\xc0")


def sos_at(data):
    return data.index(b"\xff\xda")


# What stands at the places of an image where a marker may begin, and what becomes of it there.
BETWEEN = {
    "fill bytes": (b"\xff\xff\xff", None, True),
    "an empty comment": (segment(0xFE, b""), None, True),
    "DNL": (segment(0xDC, b"\0\x07"), None, True),
    "junk": (b"abc", "bad-marker", True),
    "stuffing": (b"\xff\0", "bad-marker", True),
    "RST0": (b"\xff\xd0", "bad-marker", True),
    "TEM": (b"\xff\x01", "bad-marker", False),
    "a reserved marker": (b"\xff\x50", "bad-marker", False),
    "JPG0": (b"\xff\xf0\0\x02", "bad-marker", False),
    "JPG": (b"\xff\xc8\0\x02", "bad-marker", False),
    "SOI": (b"\xff\xd8", "bad-marker", False),
    "a length of 0": (b"\xff\xfe\0\0", "bad-marker", True),
    "a length of 1": (b"\xff\xfe\0\x01", "bad-marker", True),
    "DRI of 1 byte": (segment(0xDD, b"\x01"), "bad-marker", False),
    "a second frame": (segment(0xC0, b"\x08\0\x07\0\x09\x01\x01\x11\0"), "two-frames", False),
    "DHP": (segment(0xDE, b"\x08\0\x07\0\x09\x01\x01\x11\0"), "two-frames", False),
    "EXP": (segment(0xDF, b"\x11"), "two-frames", False),
    "DRI of 3 bytes": (segment(0xDD, b"\0\x01\0"), "bad-marker", False),
}


@pytest.mark.parametrize(("piece", "code", "pillow_goes_on"), BETWEEN.values(), ids=BETWEEN.keys())
def test_what_may_stand_between_two_segments_and_where_pillow_is_milder(small, piece, code, pillow_goes_on):
    at = sos_at(small)
    data = small[:at] + piece + small[at:]
    assert ours(data) == ((code, at) if code else ours(small))
    try:
        Image.open(io.BytesIO(data)).load()
        assert pillow_goes_on
    except OSError:
        assert not pillow_goes_on


@pytest.mark.parametrize(
    ("at", "new", "code", "word"),
    [
        (5, b"\0\0", "bad-dimensions", "DNL"),
        (7, b"\0\0", "bad-dimensions", "1 x 1"),
        (2, b"\0\x10", "bad-marker", "length"),
        (9, b"\0", "bad-marker", "length"),
        (11, b"\x02", "bad-marker", "sampling"),
        (11, b"\x20", "bad-marker", "sampling"),
        (11, b"\x51", "bad-marker", "sampling"),
        (11, b"\x15", "bad-marker", "sampling"),
        (10, b"\x77", "bad-marker", "scan"),
        (16, b"\x77", "bad-marker", "scan"),
    ],
)
def test_a_broken_frame_is_refused_and_pillow_refuses_too(small, at, new, code, word):
    data = patch(small, sof_at(small) + at, new)
    with pytest.raises(JpegRefusal) as caught:
        inspect_jpeg(data)
    assert caught.value.code == code
    assert word in caught.value.detail
    with pytest.raises(OSError, match=r"cannot identify|broken data"):
        Image.open(io.BytesIO(data)).load()


@pytest.mark.parametrize("sof", [5, 6, 7, 13, 14, 15])
def test_a_differential_frame_is_hierarchical(small, sof):
    assert code_of(patch(small, sof_at(small) + 1, bytes([0xC0 + sof]))) == "two-frames"


@pytest.mark.parametrize("sof", [1, 2, 3, 9, 10, 11])
def test_the_coding_is_reported_not_judged(small, sof):
    facts = inspect_jpeg(patch(small, sof_at(small) + 1, bytes([0xC0 + sof])))
    assert facts.sof == sof
    assert not facts.hardware_decodable


def test_a_lack_is_named(small):
    sof, sos = sof_at(small), sos_at(small)
    frame = small[sof : sof + 19]
    assert ours(small[:sof] + small[sof + 19 :]) == ("no-frame", sos - 19)
    assert ours(small[:sof] + EOI) == ("no-frame", sof)
    assert ours(small[:sos] + EOI) == ("no-scan", sos)
    assert ours(small[:-2] + frame + EOI) == ("two-frames", len(small) - 2)
    assert ours(small[:sos] + small[sos : sos + 14] + EOI) == ours(small)


@pytest.mark.parametrize(
    "piece",
    [
        segment(0xC0, b"\x08\0\x01\0\x01\0"),
        segment(0xC0, b"\x08\0\x01\0\x01"),
        segment(0xC0, b""),
        FRAME + segment(0xDA, b"\0\0\x3f\0"),
        FRAME + segment(0xDA, b"\x05" + b"\x01\0" * 5 + b"\0\x3f\0"),
        FRAME + segment(0xDA, b"\x01\x01\0\0\x3f"),
        FRAME + segment(0xDA, b""),
    ],
)
def test_a_frame_or_a_scan_without_its_components_is_refused(piece):
    data = b"\xff\xd8" + piece + SCAN + EOI
    assert ours(data) == oracle(data)
    assert code_of(data) == "bad-marker"


def test_the_offset_counts_from_the_first_byte_of_the_image(small):
    at = sos_at(small)
    data = bytes(100) + small[:at] + b"junk" + small[at:] + bytes(100)
    with pytest.raises(JpegRefusal) as caught:
        inspect_jpeg(data, 100, len(data) - 100)
    assert caught.value.offset == at
    assert f"at byte {at}" in caught.value.detail


def test_a_refusal_crosses_a_process_border_whole():
    with pytest.raises(FormatError) as caught:
        inspect_jpeg(b"GIF89a" + bytes(20))
    error, copy = caught.value, pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copy, JpegRefusal)
    assert (copy.code, copy.media_type) == ("not-jpeg", MEDIA_TYPES.index("gif"))
    assert (copy.offset, copy.detail, str(copy)) == (error.offset, error.detail, str(error))
    assert "gif" in copy.detail


@pytest.mark.parametrize(
    "filler", [b"\xff", b"\xff\xd0", b"\0", b"\xff\xfe\0\x04\xff\xff", b"\xff\xda\0\x08\x01\x01\0\0\x3f\0"]
)
def test_hostile_repetition_ends(filler):
    header = b"\xff\xd8" + FRAME
    for start in (b"\xff\xd8", header, header + SCAN):
        data = start + filler * (300_000 // len(filler))
        assert ours(data) == oracle(data)


def test_more_scans_than_a_byte_can_count_saturate():
    data = b"\xff\xd8" + FRAME + SCAN * 300 + EOI
    assert inspect_jpeg(data).scans == 255


def test_a_declared_giant_costs_no_pixels(monkeypatch):
    gray = encode(drawing(8, 8, "L"), optimize=True)
    data = patch(gray, sof_at(gray) + 5, struct.pack(">HH", 65500, 65500))
    assert len(data) < 350
    facts = inspect_jpeg(data)
    assert facts.pixels == 65500**2
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert Image.open(io.BytesIO(data)).size == (facts.width, facts.height)


# Single facts.


FACTORS = {
    ("11", "11", "11"): "4:4:4",
    ("21", "11", "11"): "4:2:2",
    ("22", "11", "11"): "4:2:0",
    ("12", "11", "11"): "4:4:0",
    ("41", "11", "11"): "4:1:1",
    ("42", "11", "11"): "4:1:0",
    ("22", "22", "22"): "4:4:4",
    ("22", "12", "12"): "4:2:2",
    ("42", "22", "22"): "4:2:2",
    ("44", "22", "22"): "4:2:0",
    ("22", "21", "21"): "4:4:0",
    ("22", "21", "12"): "unknown",
    ("11", "22", "22"): "unknown",
    ("31", "21", "21"): "unknown",
    ("14", "11", "11"): "unknown",
    ("13", "12", "12"): "unknown",
    ("33", "11", "11"): "unknown",
    ("22", "11", "11", "22"): "4:2:0",
    ("11", "11", "11", "11"): "4:4:4",
    ("22",): "gray",
    ("22", "11"): "unknown",
    ("11", "11", "11", "11", "11"): "unknown",
}


@pytest.mark.parametrize(("factors", "name"), FACTORS.items())
def test_subsampling_is_the_ratio_of_luma_to_chroma(factors, name):
    layers = b"".join(bytes([1, int(factor, 16), 0]) for factor in factors)
    frame = segment(0xC0, b"\x08\0\x01\0\x01" + bytes([len(factors)]) + layers)
    facts = inspect_jpeg(b"\xff\xd8" + frame + SCAN + EOI)
    assert SUBSAMPLINGS[facts.subsampling] == name
    assert facts.hardware_decodable == (name == "gray" or (len(factors) == 3 and name in SUBSAMPLINGS[1:5]))


def test_hardware_decodable_is_the_same_on_ints_and_on_arrays():
    rows = list(product((0, 1, 2), (8, 12), (1, 2), (1, 3, 4), range(8)))
    columns = [np.array(column, np.uint8) for column in zip(*rows, strict=True)]
    found = hardware_decodable(*columns)
    assert found.dtype == np.bool_
    assert found.tolist() == [hardware_decodable(*row) for row in rows]
    assert sum(found) == 8 + 4  # gray whatever its code, and four subsamplings in colour


BROKEN = {
    "wrong type": exif("II", 6, kind=4),
    "huge count": exif("MM", 6, count=0xFFFFFFFF),
    "value 0": exif("II", 0),
    "value 9": exif("MM", 9),
    "directory past the end": exif("II", 6, directory=0xFFFFFFF0),
    "directory inside the header": segment(0xE1, b"Exif\0\0II*\0\x02" + bytes(11) + exif("II", 6)[-16:]),
    "no TIFF": segment(0xE1, b"Exif\0\0" + b"JUNK" * 5),
    "no bytes": segment(0xE1, b"Exif\0\0"),
    "half a header": segment(0xE1, b"Exif\0\0II*\0\x08"),
    "half a directory": segment(0xE1, b"Exif\0\0II*\0\x08\0\0\0\x01"),
    "cut inside the entry": segment(0xE1, exif("II", 6)[4:-6]),
    "not counted": exif("II", 6, entries=1),
    "behind the segment": exif("II", 6, directory=100) + segment(0xFE, exif("II", 6)[18:] * 8),
    "not Exif": segment(0xE1, b"Exif\0\x01" + exif("II", 6)[10:]),
    "another segment": segment(0xE3, exif("II", 6)[4:]),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_exif_has_no_orientation(small, broken):
    assert inspect_jpeg(insert(small, broken)) == inspect_jpeg(small)


def test_a_directory_that_is_cut_off_counts_as_far_as_it_goes(small):
    data = insert(small, exif("II", 6, entries=60000))
    assert inspect_jpeg(data).orientation == 6
    with pytest.warns(UserWarning, match="Corrupt EXIF"):
        assert Image.open(io.BytesIO(data)).getexif()[0x0112] == 6


def test_the_pattern_of_a_tag_inside_another_value_is_no_tag(small):
    tag = struct.pack("<HHIH2x", 0x0112, 3, 1, 6)
    shifted = struct.pack("<HHI", 0x010F, 2, 12) + tag
    data = insert(small, segment(0xE1, b"Exif\0\0II*\0\x08\0\0\0\x02\0" + shifted[:24].ljust(24, b"\0")))
    assert inspect_jpeg(data).orientation == 0 == oracle(data)["orientation"]


def test_segments_behind_the_first_scan_do_not_change_the_facts(corpus):
    data = corpus["progressive"]
    at = data.index(b"\xff\xc4", sos_at(data))
    late = exif("II", 6) + segment(0xDD, b"\0\x09") + segment(0xEE, b"Adobe" + bytes(6) + b"\x01")
    assert inspect_jpeg(data[:at] + late + data[at:]) == inspect_jpeg(data)
    early = {"orientation": 6, "restart_interval": 9, "adobe_transform": 1}
    assert inspect_jpeg(insert(data, late))._asdict() == inspect_jpeg(data)._asdict() | early


def test_the_first_exif_the_first_mpf_and_the_last_adobe_segment_count(small):
    mpf = [segment(0xE2, b"MPF\0" + exif("MM", n, kind=4)[10:].replace(b"\x01\x12\0", b"\xb0\x01\0")) for n in (3, 9)]
    adobe = [segment(0xEE, b"Adobe" + bytes(6) + bytes([n])) for n in (1, 2)]
    facts = inspect_jpeg(insert(small, exif("II", 6), exif("II", 3), *mpf, *adobe, segment(0xEE, b"Adobe" + bytes(6))))
    assert (facts.orientation, facts.secondary, facts.adobe_transform) == (6, 2, 2)
    many = segment(0xE2, b"MPF\0" + exif("II", 70000, kind=4)[10:].replace(b"\x12\x01\x04", b"\x01\xb0\x04"))
    assert inspect_jpeg(insert(small, many)).secondary == 255


def test_a_short_adobe_segment_at_the_very_end_is_read_in_its_bounds():
    data = b"\xff\xd8" + segment(0xEE, b"Adobe" + bytes(6))
    assert ours(data) == ("truncated", len(data))


@pytest.mark.parametrize(("transform", "known"), [(0, 0), (1, 1), (2, 2), (3, -1), (255, -1)])
def test_an_undefined_adobe_transform_is_none(small, transform, known):
    data = insert(small, segment(0xEE, b"Adobe" + bytes(6) + bytes([transform])))
    assert inspect_jpeg(data).adobe_transform == known


# Buffers.


def test_a_region_of_any_buffer_is_read_like_the_bytes_alone(corpus):
    data = corpus["progressive"]
    around = corpus["mpo"]
    whole = around + data + around
    start, end = len(around), len(around) + len(data)
    known = inspect_jpeg(data)
    with tempfile.TemporaryFile() as file:
        file.write(whole)
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            for buffer in (whole, bytearray(whole), memoryview(whole), np.frombuffer(whole, np.uint8), mapped):
                assert inspect_jpeg(buffer, start, end) == known
            assert inspect_jpeg(memoryview(mapped)[start:end]) == known
            # EOI lies right behind these ends, and nothing behind an end is looked at.
            for cut in (1, 2, 3):
                with pytest.raises(JpegRefusal, match="no end"):
                    inspect_jpeg(mapped, start, end - cut)
            assert sniff_media_type(mapped, start, end) == 1


def test_a_mapping_can_be_closed_while_a_refusal_is_alive(small):
    mapped = mmap.mmap(-1, len(small))
    mapped.write(small[:-2])
    inspect_jpeg(mapped, strict=False)
    with pytest.raises(JpegRefusal) as caught:
        inspect_jpeg(mapped)
    mapped.close()
    assert caught.value.code == "truncated"


def others():
    image = drawing(8, 8)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a.jpg", b"x")
    Image.init()
    forms = {"PNG": "png", "GIF": "gif", "BMP": "bmp", "TIFF": "tiff", "PDF": "pdf", "WEBP": "webp"}
    forms |= {"JPEG2000": "jpeg2000", "AVIF": "heif"}
    return [
        *((name, encode(image, form)) for form, name in forms.items() if form in Image.SAVE),
        *(("zip", archive.getvalue()), ("gzip", gzip.compress(b"x")), ("jpeg", encode(image))),
        *(("heif", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"), ("unknown", b"\0\0\0\x18ftypisom\0\0\0\0")),
        *(("jxl", b"\xff\x0a\x10"), ("jxl", b"\0\0\0\x0cJXL \r\n\x87\n"), ("jpeg2000", b"\xff\x4f\xff\x51\0")),
        *(("html", b"<!DOCTYPE html><html>"), ("html", b"\xef\xbb\xbf\n <HTML lang=en>"), ("html", b"<body>")),
        *(("xml", b"<?xml version='1.0'?><Error/>"), ("xml", b"<svg width='1'>")),
        *(("text", b"404: not found\n"), ("text", "é".encode() * 300), ("text", b'{"message": "gone"}')),
        *(
            ("unknown", bytes(600)),
            ("unknown", b""),
            ("unknown", b" \n"),
            ("unknown", b"caf\xe9 ole"),
            ("unknown", b"a\0b"),
        ),
    ]


@pytest.mark.parametrize(
    ("name", "data"), [pytest.param(*other, id=f"{n} {other[0]}") for n, other in enumerate(others())]
)
def test_what_is_not_a_jpeg_is_called_by_its_name(name, data):
    code = sniff_media_type(data)
    assert MEDIA_TYPES[code] == name
    if data and name != "jpeg":
        with pytest.raises(JpegRefusal) as caught:
            inspect_jpeg(data)
        assert (caught.value.code, caught.value.media_type) == ("not-jpeg", code)


def test_stored_codes_never_change():
    assert MEDIA_TYPES[:10] == ("unknown", "jpeg", "png", "gif", "webp", "bmp", "tiff", "heif", "jxl", "jpeg2000")
    assert MEDIA_TYPES[10:] == ("pdf", "zip", "html", "xml", "text", "gzip")
    assert SUBSAMPLINGS == ("unknown", "4:4:4", "4:2:2", "4:2:0", "4:4:0", "4:1:1", "4:1:0", "gray")
