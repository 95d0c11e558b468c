"""From files to a dataset: what is kept byte for byte, what is re-encoded, and what the index and the tar say of it."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import crc32c
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from shardkit.format.jpeg import SUBSAMPLINGS
from shardkit.format.media_type import MEDIA_TYPES
from shardkit.packing.run import run_pack
from shardkit.packing.write import _BATCH_ROWS, BUFFER_BYTES
from shardkit.testing.awkward import awkward_files, stored_for_orientation
from shardkit.testing.photos import encode, write

ROOT = str(Path(__file__).parents[2])

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def photo(photographs):
    return Image.fromarray(photographs[0])  # 640 x 427


@pytest.fixture
def packed(tmp_path, make_options):
    """Return a function: pack a source, in this process if nothing else is said, and return the dataset's folder."""

    def run(source, name="ds", jobs=1, **given):
        run_pack(source, tmp_path / name, make_options(**given), jobs=jobs)
        return tmp_path / name

    return run


@pytest.fixture
def one(tmp_path, packed):
    """Return a function: pack one file of the bytes given; return its member and its index row, or its refusal."""

    def run(data, **given):
        for folder in ("src", "ds"):
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
        (tmp_path / "src").mkdir()
        (tmp_path / "src/a.jpg").write_bytes(data)
        (tmp_path / "src/good.jpg").write_bytes(encode(Image.new("L", (8, 8))))
        folder = packed(tmp_path / "src", **given)
        if (folder / "rejected.jsonl").exists():
            return json.loads((folder / "rejected.jsonl").read_text())["reason"]
        (row,) = (row for row in index(folder) if row["key"] == "a")
        return members(folder)["a.jpg"], row

    return run


def members(folder):
    """Return the payload of every member of every shard, by name, as Python's tarfile reads it."""
    found = {}
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            found |= {member.name: tar.extractfile(member).read() for member in tar}
    return found


def index(folder):
    """Return the rows of the dataset's index, as Arrow reads them."""
    return pa.ipc.open_file(pa.py_buffer((folder / "index.arrow").read_bytes())).read_all().to_pylist()


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def pillows_facts(data):
    """Return what Pillow knows of a JPEG, by the names of the index."""
    with Image.open(io.BytesIO(data)) as image:
        (_, *luma, _), (_, *chroma, _) = (*image.layer, *image.layer)[:2]
        ratio = luma[0] // chroma[0], luma[1] // chroma[1]
        return {
            "width": image.width, "height": image.height, "components": len(image.getbands()),
            "sof": 2 if image.info.get("progressive") else 0, "precision": 8,
            "orientation": image.getexif().get(0x0112, 0),
            "adobe_transform": image.info.get("adobe_transform", -1),
            "subsampling": "gray" if image.mode == "L" else {(1, 1): "4:4:4", (2, 1): "4:2:2", (2, 2): "4:2:0"}[ratio],
        }  # fmt: skip


# --- checks


def damaged_table(data):
    """Make a Huffman table one that cannot be; the markers are as they were."""
    table = data.index(b"\xff\xc4")
    return data[: table + 5] + b"\xff" * 16 + data[table + 21 :]


def flipped(data):
    middle = len(data) * 2 // 3
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]


@pytest.mark.parametrize(
    ("change", "header", "decode", "none"),
    [
        (lambda data: data, None, None, None),
        (damaged_table, None, "undecodable", None),
        (lambda data: data[: len(data) // 2], "truncated", "truncated", None),
        (lambda data: data[:-2], "truncated", "truncated", None),
        (lambda data: data[:2] + b"\0" + data[2:], "bad-marker", "bad-marker", None),
        (lambda data: b"", "empty", "empty", "empty"),
        (lambda data: b"GIF89a", "not-jpeg", "not-jpeg", None),
        (lambda data: data + b"\0" * 100, None, None, None),
        # What libjpeg gets over with a warning that Pillow does not hand on is beyond every check.
        (flipped, None, None, None),
        (lambda data: data[: len(data) // 2] + b"\xff\xd9", None, None, None),
    ],
)  # fmt: skip
def test_what_each_check_finds(one, jpeg, change, header, decode, none):
    data = change(jpeg(5, width=64, height=64))
    for check, expected in (("header", header), ("decode", decode), ("none", none)):
        found = one(data, check=check)
        assert found == expected if isinstance(found, str) else expected is None, check
        if not isinstance(found, str):
            assert found[0] == data


def test_without_a_check_the_index_says_what_it_can(one, jpeg, photo):
    png = encode(photo, "PNG")
    _, row = one(png, check="none")
    assert (MEDIA_TYPES[row["media_type"]], row["width"], row["adobe_transform"]) == ("png", 0, -1)
    _, row = one(jpeg(1)[:-2], check="none")
    assert (MEDIA_TYPES[row["media_type"]], row["width"], row["sof"]) == ("jpeg", 0, 0)
    _, row = one(jpeg(1), check="none")
    assert (row["width"], row["height"]) == (24, 16)
    _, row = one(b"\0", check="none")
    assert (MEDIA_TYPES[row["media_type"]], row["size"]) == ("unknown", 1)


# --- kept


@pytest.mark.parametrize(
    ("mode", "given"),
    [
        ("RGB", {"subsampling": "4:2:0"}),
        ("RGB", {"subsampling": "4:2:2"}),
        ("RGB", {"subsampling": "4:4:4"}),
        ("RGB", {"progressive": True}),
        ("RGB", {"icc_profile": b"x" * 70_000}),
        ("L", {}),
        ("CMYK", {}),
        ("CMYK", {"progressive": True}),
    ],
)
@pytest.mark.parametrize("check", ["header", "decode"])
def test_odd_jpegs_are_kept_with_their_facts(one, photo, mode, given, check):
    data = encode(photo.convert(mode), quality=90, **given)
    payload, row = one(data, check=check)
    assert payload == data
    facts = pillows_facts(data)
    assert SUBSAMPLINGS[row["subsampling"]] == facts.pop("subsampling")
    assert {name: row[name] for name in facts} == facts
    assert MEDIA_TYPES[row["media_type"]] == "jpeg"
    assert (row["scans"] == 1) == (facts["sof"] == 0)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_orientation_is_indexed_and_left_alone(one, photo, orientation):
    data = stored_for_orientation(photo, orientation)
    payload, row = one(data)
    assert (payload, row["orientation"]) == (data, orientation)


def test_restart_markers_are_indexed(one, photo):
    data = encode(photo, restart_marker_rows=1)
    _, row = one(data)
    assert row["restart_interval"] == math.ceil(640 / 16)


# --- re-encoded


def small(image):
    return np.asarray(image.convert("RGB").resize((16, 16), Image.Resampling.BOX), float)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
def test_other_images_are_refused_unless_converted(one, photo, kind):
    data = encode(photo, kind)
    assert one(data) == "not-jpeg"
    payload, row = one(data, convert=True)
    image = Image.open(io.BytesIO(payload))
    assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (640, 427))
    assert np.abs(small(image) - small(photo)).mean() < 5
    facts = pillows_facts(payload)
    assert SUBSAMPLINGS[row["subsampling"]] == facts.pop("subsampling") == "4:2:0"
    assert {name: row[name] for name in facts} == facts
    assert (MEDIA_TYPES[row["media_type"]], row["size"], row["sof"]) == ("jpeg", len(payload), 0)
    assert row["crc32c"] == crc32c.crc32c(payload)


@pytest.mark.parametrize("kind", ["BMP", "TIFF"])
def test_types_that_convert_does_not_name_stay_refused(one, photo, kind):
    assert one(encode(photo, kind), convert=True) == "not-jpeg"


def test_convert_leaves_jpegs_alone(one, jpeg):
    assert one(jpeg(3), convert=True)[0] == jpeg(3)


@pytest.mark.parametrize("check", ["header", "decode", "none"])
def test_resize_scales_what_is_larger_and_keeps_the_rest(one, photo, check):
    payload, row = one(stored_for_orientation(photo, 6), resize=100, check=check)
    image = Image.open(io.BytesIO(payload))
    assert (image.size, row["width"], row["height"], row["orientation"]) == ((150, 100), 150, 100, 0)
    assert np.abs(small(image) - small(photo)).mean() < 3
    data = stored_for_orientation(photo, 6)
    assert one(data, resize=427, check=check)[0] == data


def test_resize_converts_and_scales_at_once(one, photo):
    payload, _ = one(encode(photo, "PNG"), resize=100, convert=True)
    assert Image.open(io.BytesIO(payload)).size == (150, 100)
    assert one(encode(photo, "PNG"), resize=100) == "not-jpeg"


def test_resize_refuses_what_is_damaged_before_it_decodes(one, photo):
    assert one(encode(photo)[:-2], resize=100) == "truncated"
    assert one(damaged_table(encode(photo)), resize=100) == "undecodable"


def test_a_result_larger_than_its_source_is_packed_whole(one):
    # What repeats is short as a PNG and more than a buffer holds as a JPEG.
    noise = np.tile(np.random.default_rng(0).integers(0, 256, (50, 50), np.uint8), (80, 80))
    data = encode(Image.fromarray(noise), "PNG")
    payload, row = one(data, convert=True, quality=100)
    assert len(data) < 1 << 20
    assert len(payload) == row["size"] > BUFFER_BYTES
    assert np.abs(np.asarray(Image.open(io.BytesIO(payload)), float) - noise).mean() < 2


# --- round trip


@pytest.fixture(scope="module")
def tree(tmp_path_factory, photographs, photo_tree):
    """Photographs of five classes and one of each awkward file. Only read it."""
    root = tmp_path_factory.mktemp("tree") / "src"
    shutil.copytree(photo_tree, root)
    for file in awkward_files(photographs):
        write(root, file)
    return root


GIVEN = {"shard_size": 900_000, "seed": 3}


def test_every_member_equals_its_source(tree, packed):
    folder = packed(tree, **GIVEN)
    rows, found = index(folder), members(folder)
    assert len(found) == 2 * len(rows)
    classes = sorted(path.name for path in tree.iterdir())
    sources = {}
    for row in rows:
        source = os.fsencode(tree) + b"/" + from_text(row["source"])
        with open(source, "rb") as file:
            sources[source] = file.read()
        assert found[row["key"] + ".jpg"] == sources[source]
        assert found[row["key"] + ".cls"] == str(classes.index(row["source"].split("/")[0])).encode()
        assert row["label"] == int(found[row["key"] + ".cls"])
    expected = {
        os.fsencode(path) for path in tree.rglob("*")
        if path.is_file() and path.name not in REFUSED | IGNORED
    }  # fmt: skip
    assert sources.keys() == expected
    refused = [json.loads(line) for line in (folder / "rejected.jsonl").read_text().splitlines()]
    assert [line["path"] for line in refused] == sorted(f"odd/{name}" for name in REFUSED)


REFUSED = {"truncated.jpg", "screenshot.jpg", "empty.jpg"}
IGNORED = {".hidden.jpg", "._two words.jpg", "Thumbs.db", "readme.txt"}


def from_text(source):
    """Undo the escapes of a source's text."""
    head, *rest = source.encode().split(b"%")
    return head + b"".join(bytes([int(part[:2], 16)]) + part[2:] for part in rest)


def test_index_rows_say_where_the_bytes_lie(tree, packed):
    folder = packed(tree, **GIVEN)
    by_shard = pa.ipc.open_file(pa.py_buffer((folder / "index.arrow").read_bytes()))
    shards = sorted(folder.glob("*.tar"))
    assert by_shard.num_record_batches == len(shards) > 3
    for number, shard in enumerate(shards):
        data = shard.read_bytes()
        with tarfile.open(shard) as tar:
            headers = {member.name: member for member in tar}
        rows = by_shard.get_batch(number).to_pylist()
        assert pa.ipc.open_file(folder / f"{shard.stem}.arrow").get_batch(0).to_pylist() == rows
        end = 0
        for row in rows:
            payload = data[row["offset"] : row["offset"] + row["size"]]
            assert row["offset"] == headers[row["key"] + ".jpg"].offset_data
            assert row["offset"] % 4096 == 0
            assert (row["crc32c"], row["sample_offset"]) == (crc32c.crc32c(payload), end)
            assert data[end : end + 100].rstrip(b"\0").decode() == row["key"] + ".cls"
            end += row["sample_size"]
            assert end == row["offset"] + -(-row["size"] // 512) * 512
            assert not any(data[row["offset"] + row["size"] : end])
            facts = pillows_facts(payload)
            facts["subsampling"] = SUBSAMPLINGS.index(facts["subsampling"])
            assert {name: row[name] for name in facts} == facts
        # A plain header first, two blocks of zeros and whole records last.
        assert (data[156:157], data[257:265]) == (b"0", b"ustar\x0000")
        assert data[end:] == bytes(len(data) - end)
        assert len(data) - end >= 1024
        assert len(data) % math.lcm(10240, 4096) == 0


@pytest.mark.parametrize("labels", [None, "none"])
def test_a_list_gives_every_sample_its_json(plant, packed, labels):
    root = plant(b"\xff.jpg", "b.jpg", "c.jpg")
    (root / "list.csv").write_bytes(b"path,label,caption\n\xff.jpg,dog,one\nb.jpg,cat,\nc.jpg,,three\n")
    folder = packed(root / "list.csv", labels=labels)
    found = {name: json.loads(data) for name, data in members(folder).items() if name.endswith(".json")}
    if labels is None:
        # A sample has a json member when there is something to say, or when it has no label.
        assert found == {
            "-xFF.json": {"source": "%FF.jpg", "class": "dog", "caption": "one"},
            "c.json": {"source": "c.jpg", "caption": "three"},
        }  # fmt: skip
    else:
        assert found == {
            "-xFF.json": {"source": "%FF.jpg", "label": "dog", "caption": "one"},
            "b.json": {"source": "b.jpg", "label": "cat"},
            "c.json": {"source": "c.jpg", "caption": "three"},
        }  # fmt: skip
    for row in index(folder):
        stored = members(folder).get(row["key"] + ".json", b"")
        assert row["json_size"] == len(stored)
        if stored:
            shard = (folder / "t-000000.tar").read_bytes()
            assert shard[row["json_offset"] : row["json_offset"] + row["json_size"]] == stored
        else:
            assert row["json_offset"] == 0
    assert [row["label"] for row in sorted(index(folder), key=lambda row: row["key"])] == (
        [1, 0, None] if labels is None else [None] * 3
    )


def test_the_number_of_workers_changes_no_byte(tree, packed):
    expected = contents(packed(tree, **GIVEN))
    for jobs in (2, 3):
        assert contents(packed(tree, name=f"jobs{jobs}", jobs=jobs, **GIVEN)) == expected


def test_a_copy_of_the_tree_changes_no_byte(tree, packed, tmp_path):
    expected = contents(packed(tree, **GIVEN))
    copy = os.fsencode(tmp_path / "copy")
    top = os.fsencode(tree)
    files = [os.path.relpath(os.path.join(folder, name), top) for folder, _, names in os.walk(top) for name in names]
    for path in sorted(files, reverse=True):
        os.makedirs(os.path.dirname(os.path.join(copy, path)), exist_ok=True)
        shutil.copyfile(os.path.join(top, path), os.path.join(copy, path))  # with other times
    assert contents(packed(copy, name="again", **GIVEN)) == expected


def test_a_shard_of_thousands_of_samples_is_indexed_whole(plant, packed):
    root = plant("a.jpg")
    count = 2 * _BATCH_ROWS + 1
    (root / "list.csv").write_text("path,label\n" + "".join(f"a.jpg,{i}\n" for i in range(count)))
    folder = packed(root / "list.csv", key="index", shuffle=False)
    rows = index(folder)
    assert [row["label"] for row in rows] == list(range(count))
    assert [row["key"] for row in rows] == [f"{i:09d}" for i in range(count)]
    lines = (folder / "t-000000.idx").read_text().splitlines()
    assert lines[0] == f"v1.2 {count}"
    with tarfile.open(folder / "t-000000.tar") as tar:
        expected = [f"{m.name[10:]} {m.offset_data} {m.size} {m.name}" for m in tar]
    assert " ".join(lines[1:]) == " ".join(expected)


def padded(data, size):
    """Return a whole JPEG of about `size` bytes: application segments behind its SOI."""
    segment = b"\xff\xef\xff\xff" + bytes(65533)
    return data[:2] + segment * (size // len(segment)) + data[2:]


def test_a_worker_stays_below_300_mb(tmp_path, jpeg):
    """With sources of every size: the largest that are allowed, camera images, and small ones."""
    source = tmp_path / "src"
    source.mkdir()
    for kind, size, links in (("largest", 127 << 20, 6), ("camera", 20 << 20, 20), ("small", 90_000, 1000)):
        (source / f"{kind}-0.jpg").write_bytes(padded(jpeg(), size))
        for number in range(1, links):
            os.link(source / f"{kind}-0.jpg", source / f"{kind}-{number}.jpg")
    code = (
        "import re, sys; from shardkit.packing.run import pack;"
        "pack(sys.argv[1], sys.argv[2], jobs=1, shard_size=4 << 30);"
        "print(re.search(r'VmHWM:\\s*([0-9]+) kB', open('/proc/self/status').read())[1])"
    )
    command = [sys.executable, "-c", code, source, tmp_path / "ds"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": ROOT})
    assert int(done.stdout) * 1024 < 300_000_000
