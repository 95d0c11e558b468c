"""An inspection counts what is there: held against Pillow, Arrow's own sums, and the files."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

import shardkit
from shardkit.errors import (
    CapabilityError,
    ConfigError,
    IndexFormatError,
    IntegrityError,
    ManifestError,
    StorageError,
    TargetFullError,
    UnsafeError,
)
from shardkit.inspecting import rejected, report, scan
from shardkit.testing.datasets import DraftSample, draft_dataset, draft_shard, tiny_jpeg
from shardkit.testing.mounts import tmpfs
from shardkit.testing.packs import contents, tiny_tree

PAGE = b"<!doctype html>"


@pytest.fixture
def dataset(tmp_path):
    """Six samples in two shards, with labels of twelve classes; one refused source."""
    return draft_dataset().write(tmp_path / "ds")


@pytest.fixture
def coded(tmp_path):
    """Images of every coding that Pillow writes; and the same as Pillow sees them."""
    root = tmp_path / "src"
    picture = Image.effect_noise((64, 48), 80)
    kinds = {
        "gray": {}, "progressive": {"progressive": True}, "restarts": {"restart_marker_blocks": 2},
        "444": {"subsampling": 0}, "422": {"subsampling": 1}, "420": {"subsampling": 2}, "cmyk": {}, "turned": {},
    }  # fmt: skip
    modes = {"gray": "L", "cmyk": "CMYK"}
    for number, (name, options) in enumerate(kinds.items()):
        image = picture.resize((64 + 10 * number, 48)).convert("RGB").convert(modes.get(name, "RGB"))
        exif = Image.Exif()
        if name == "turned":
            exif[0x0112] = 6
        (root / f"class{number % 3}").mkdir(parents=True, exist_ok=True)
        image.save(root / f"class{number % 3}" / f"{name}.jpg", exif=exif, **options)
    shardkit.pack(root, tmp_path / "ds", jobs=1, shard_samples=3)
    return tmp_path / "ds", sorted(root.rglob("*.jpg"))


def columns_of(folder, name):
    with pa.ipc.open_file(folder / "index.arrow") as reader:
        return reader.read_all().column(name).to_pylist()


# --- figures


def test_bytes_add_up_to_the_files(coded):
    folder, sources = coded
    found = shardkit.inspect(folder)
    assert found.bytes == sum(path.stat().st_size for path in folder.glob("*.tar"))
    assert found.payload == sum(path.stat().st_size for path in sources)
    assert found.payload + found.headers + found.padding == found.bytes
    assert (found.samples, found.shards, found.align) == (8, 3, 4096)


def test_facts_are_those_that_pillow_sees(coded):
    folder, sources = coded
    images = [Image.open(path) for path in sources]
    found = shardkit.inspect(folder)
    assert found.measures["width"].percentiles[0] == min(image.width for image in images)
    assert found.measures["width"].percentiles[-1] == max(image.width for image in images)
    assert found.images.jpegs == len(images)
    assert found.images.components == Counter(str(len(image.getbands())) for image in images)
    progressive = sum("progressive" in image.info for image in images)
    assert found.images.frames == {"baseline": len(images) - progressive, "progressive": progressive}
    assert found.images.several_scans == progressive
    assert found.images.restarts == sum(b"\xff\xdd\x00\x04" in path.read_bytes() for path in sources) == 1
    turned = Counter(str(image.getexif().get(0x0112, 0)) for image in images)
    assert found.images.orientations == turned
    assert found.images.turned == 1
    # progressive and CMYK are not for the engines
    assert found.images.hardware_decodable == len(images) - 2
    for image in images:
        image.close()


def test_labels_are_those_of_the_index(dataset):
    found = shardkit.inspect(dataset)
    labels = Counter(columns_of(dataset, "label"))
    assert {one.label: one.samples for one in found.classes} == labels
    assert {one.name for one in found.classes} == {f"class {label}" for label in labels}
    assert (found.class_names, found.labels, found.empty_classes, found.unlabelled) == (12, 6, 6, 0)


def test_classes_come_largest_first_and_then_by_label(tmp_path):
    labels = [3, 1, 1, 2, None, 3]
    samples = [DraftSample(key=f"k{i}", jpeg=tiny_jpeg(i), label=label, metadata={"source": f"k{i}.jpg"})
               for i, label in enumerate(labels)]  # fmt: skip
    draft = draft_dataset()
    draft.shards, draft.classes = [draft_shard("tiny-000000.tar", samples, 4096)], None
    found = shardkit.inspect(draft.write(tmp_path / "ds"))
    assert [(one.label, one.samples) for one in found.classes] == [(1, 2), (3, 2), (None, 1), (2, 1)]
    assert (found.class_names, found.labels, found.unlabelled, found.empty_classes) == (None, 3, 1, 0)


def test_a_dataset_without_labels(tmp_path):
    found = shardkit.inspect(draft_dataset(labels=False).write(tmp_path / "ds"), html=tmp_path / "page.html")
    assert (found.labels, found.unlabelled, found.class_names) == (0, 6, None)
    assert "No sample has a label." in (tmp_path / "page.html").read_text()


def test_a_dataset_without_samples(tmp_path):
    draft = draft_dataset()
    draft.shards = []
    found = shardkit.inspect(draft.write(tmp_path / "ds"), html=tmp_path / "page.html")
    assert (found.samples, found.shards, found.page.thumbnails) == (0, 0, 0)
    assert (found.labels, found.empty_classes) == (0, 12)
    assert all(measure.percentiles == () for measure in found.measures.values())
    assert "No thumbnails." in (tmp_path / "page.html").read_text()
    json.dumps(found.to_json())


def test_unknown_dimensions_are_counted_apart(tmp_path):
    draft = draft_dataset()
    rows = draft.shards[0].rows
    rows[0] = rows[0]._replace(width=0)
    rows[1] = rows[1]._replace(width=0, height=0)
    measures = shardkit.inspect(draft.write(tmp_path / "ds")).measures
    assert {name: measure.unknown for name, measure in measures.items()} == {
        "bytes": 0, "width": 2, "height": 1, "aspect": 2,
    }  # fmt: skip


def test_codes_that_nobody_knows_are_counted_as_codes(tmp_path):
    draft = draft_dataset()
    rows = draft.shards[0].rows
    rows[0] = rows[0]._replace(sof=200, subsampling=99)
    rows[1] = rows[1]._replace(media_type=250)
    images = shardkit.inspect(draft.write(tmp_path / "ds")).images
    assert images.frames == {"baseline": 4, "SOF200": 1}
    assert images.media_types == {"jpeg": 5, "code 250": 1}
    assert images.subsamplings["code 99"] == 1


@pytest.mark.parametrize("rows", [1, 2, 4, 5])
def test_blocks_change_nothing(coded, monkeypatch, rows):
    whole = shardkit.inspect(coded[0])
    monkeypatch.setattr(scan, "BLOCK_ROWS", rows)
    assert shardkit.inspect(coded[0]) == whole


def test_equal_datasets_give_equal_reports_and_pages(dataset, tmp_path):
    first = shardkit.inspect(dataset, html=tmp_path / "1.html")
    second = shardkit.inspect(dataset, html=tmp_path / "2.html")
    assert dataclasses.replace(first, page=None) == dataclasses.replace(second, page=None)
    assert (tmp_path / "1.html").read_bytes() == (tmp_path / "2.html").read_bytes()


def test_no_shard_is_read_without_a_page(dataset):
    whole = shardkit.inspect(dataset)
    for path in dataset.glob("*.tar"):
        size = path.stat().st_size
        path.write_bytes(b"")
        os.truncate(path, size)
    for path in (*dataset.glob("*.idx"), *dataset.glob("tiny-*.arrow")):
        path.unlink()
    assert shardkit.inspect(dataset) == whole


def test_the_index_does_not_become_resident(tmp_path):
    """Of 400,000 samples, 52 MB of index: each pass needs half of it, and gives it back block by block."""
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from bench_open import make_dataset, resident
import shardkit
from shardkit.inspecting import scan
make_dataset(Path(sys.argv[2]), 20, 20_000)
scan.BLOCK_ROWS = 20_000
before, grown = resident("RssFile"), []
shardkit.inspect(sys.argv[2], progress=lambda rows: grown.append(resident("RssFile") - before))
assert len(grown) == 40
print(max(grown))
"""
    scripts = Path(shardkit.__file__).parents[1] / "scripts"
    done = subprocess.run(
        [sys.executable, "-c", code, str(scripts), str(tmp_path / "ds")], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(scripts.parent)},
    )  # fmt: skip
    assert int(done.stdout) < 12_000_000


def test_the_report_is_frozen_and_is_json(dataset):
    found = shardkit.inspect(dataset, verify="index")
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.samples = 1
    document = json.loads(json.dumps(found.to_json()))
    assert set(document) == {field.name for field in dataclasses.fields(found)} | {"exit_code"}
    assert document["measures"]["bytes"]["p50"] == sorted(columns_of(dataset, "size"))[2]
    assert document["verification"]["level"] == "index"


def test_splits(dataset):
    from shardkit.format.manifest import dump_manifest, load_manifest

    file = dataset / "manifest.json"
    manifest = load_manifest(file.read_bytes())
    splits = {"train": ["tiny-000000.tar", "tiny-000001.tar"], "val": ["tiny-000001.tar"], "none": []}
    file.write_text(dump_manifest(dataclasses.replace(manifest, splits=splits)))
    told = {split.name: (split.shards, split.samples) for split in shardkit.inspect(dataset).splits}
    assert told == {"train": (2, 6), "val": (1, 3), "none": (0, 0)}


# --- refused sources


def test_refused_sources_are_those_of_the_pack(tmp_path, monkeypatch):
    shardkit.pack(tiny_tree(tmp_path / "src"), tmp_path / "ds", jobs=1)
    lines = [json.loads(line) for line in (tmp_path / "ds" / "rejected.jsonl").read_text().splitlines()]
    found = shardkit.inspect(tmp_path / "ds").rejected
    assert found.reasons == Counter(line["reason"] for line in lines)
    assert [dataclasses.asdict(one) for one in found.first] == lines
    monkeypatch.setattr(rejected, "MAX_REJECTED", 2)
    capped = shardkit.inspect(tmp_path / "ds").rejected
    assert (capped.total, len(capped.first)) == (3, 2)


DAMAGES = [
    b"",
    b'{"path": "a", "reason": "x", "detail": "d"}\n{"path": "a", "reason": "x", "detail": "d"}\n',
    b'{"path": "a", "reason": "x"}\n',
    b'{"path": "a", "reason": "x", "detail": 5}\n',
    b'["path"]\n',
    b'{"path": "a", "reason": "x", "detail": "d"}',
    b'{"path": "\xff", "reason": "x", "detail": "d"}\n',
]


@pytest.mark.parametrize("data", DAMAGES)
def test_a_damaged_list_is_told(tmp_path, data):
    draft = draft_dataset()
    draft.rejected = data
    with pytest.raises(IntegrityError, match=r"rejected\.jsonl"):
        shardkit.inspect(draft.write(tmp_path / "ds"))


def test_a_list_that_is_gone_or_no_file_is_told(dataset):
    file = dataset / "rejected.jsonl"
    file.write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(IntegrityError, match="bytes"):
        shardkit.inspect(dataset)
    file.unlink()
    with pytest.raises(IntegrityError, match="no such file"):
        shardkit.inspect(dataset)
    os.mkfifo(file)
    with pytest.raises(UnsafeError):
        shardkit.inspect(dataset)


# --- verification


def test_damage_does_not_stop_an_inspection(dataset, tmp_path):
    (dataset / "tiny-000000.idx").write_text("v1.2 0\n")
    found = shardkit.inspect(dataset, verify="index", html=tmp_path / "page.html")
    assert found.exit_code == 4
    assert found.verification.total_findings == 1
    page = (tmp_path / "page.html").read_text()
    assert "Damaged: 1 finding" in page
    assert found.verification.findings[0].code in page
    assert shardkit.inspect(dataset).exit_code == 0


def test_a_page_says_that_nothing_was_verified_or_found(dataset, tmp_path):
    shardkit.inspect(dataset, html=tmp_path / "1.html")
    assert "Not verified" in (tmp_path / "1.html").read_text()
    shardkit.inspect(dataset, html=tmp_path / "2.html", verify="decode")
    assert "Nothing is damaged (level decode, 6 samples, 2 shards)" in (tmp_path / "2.html").read_text()


# --- what cannot be served


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"thumbnails": -1}, "0 to 1000"),
        ({"thumbnails": 1001}, "0 to 1000"),
        ({"verify": "all"}, "unknown level"),
        ({"html": "page.txt"}, r"ends in \.html"),
        ({"html": "manifest.json", "overwrite": True}, r"ends in \.html"),
        ({"html": "gone/page.html"}, "folder of the page is not there"),
    ],
)
def test_arguments_that_cannot_be_served(dataset, monkeypatch, arguments, message):
    monkeypatch.chdir(dataset)
    before = contents(dataset)
    with pytest.raises(ConfigError, match=message):
        shardkit.inspect(dataset, **arguments)
    assert contents(dataset) == before


def test_damaged_manifest_and_index_are_told(dataset):
    index = dataset / "index.arrow"
    data = index.read_bytes()
    index.write_bytes(b"x" * len(data))
    with pytest.raises(IndexFormatError):
        shardkit.inspect(dataset)
    index.write_bytes(data)
    (dataset / "manifest.json").write_text("{}")
    with pytest.raises(ManifestError):
        shardkit.inspect(dataset)


def test_a_page_without_matplotlib_is_refused_before_the_work(dataset, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(CapabilityError, match=r"shardkit\[plots\]"):
        shardkit.inspect(dataset, html=tmp_path / "page.html")
    assert shardkit.inspect(dataset).samples == 6


# --- the file


def test_a_page_is_not_replaced_unless_told(dataset, tmp_path):
    file = tmp_path / "page.html"
    file.write_text("mine")
    with pytest.raises(ConfigError, match="--overwrite"):
        shardkit.inspect(dataset, html=file)
    assert file.read_text() == "mine"
    found = shardkit.inspect(dataset, html=file, overwrite=True)
    assert file.read_bytes().startswith(PAGE)
    assert found.page == report.PageFacts(str(file), file.stat().st_size, 6, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ds", "page.html"]


def test_a_page_that_has_no_room_is_told_and_nothing_is_left(dataset, tmp_path):
    with tmpfs(tmp_path / "small", size=16 << 10) as small:
        with pytest.raises(TargetFullError, match=r"cannot write the page: .*small/p\.html; .*or name another file$"):
            shardkit.inspect(dataset, html=small / "p.html")
        assert list(small.iterdir()) == []


def test_a_folder_that_may_not_be_written_is_told_before_the_work(open_folder, unprivileged):
    dataset = draft_dataset().write(open_folder / "ds")
    (open_folder / "shut").mkdir(mode=0o555)
    looked = []
    shardkit.inspect(dataset, html=open_folder / "p.html")  # imports what the user below may not read
    with unprivileged(), pytest.raises(StorageError, match="the folder of the page may not be written"):
        shardkit.inspect(dataset, html=open_folder / "shut" / "p.html", progress=looked.append)
    assert looked == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_links_and_folders_are_never_replaced(dataset, tmp_path, overwrite):
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "link.html").symlink_to("mine.txt")
    (tmp_path / "dangling.html").symlink_to("gone")
    for name in ("folder.html", "link.html", "dangling.html"):
        with pytest.raises(ConfigError, match="something else"):
            shardkit.inspect(dataset, html=tmp_path / name, overwrite=overwrite)
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_failed_write_leaves_the_old_page_and_nothing_else(dataset, tmp_path, monkeypatch, call):
    file = tmp_path / "page.html"
    file.write_text("mine")

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StorageError):
        shardkit.inspect(dataset, html=file, overwrite=True)
    monkeypatch.undo()
    assert file.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ds", "page.html"]


def test_progress_counts_rows_twice_and_thumbnails(dataset, tmp_path):
    seen = []
    shardkit.inspect(dataset, html=tmp_path / "page.html", thumbnails=4, progress=seen.append)
    assert sum(seen) == 2 * 6 + 4


def test_label_counts_survive_many_blocks():
    from shardkit.inspecting.labels import LabelTally

    random = np.random.default_rng(0)
    blocks = [random.integers(-1, 50_000, 1000) for _ in range(30)]
    tally = LabelTally()
    for number, block in enumerate(blocks):
        tally.see(block)
        if number == 10:
            tally.totals()
    labels, counts = np.unique(np.concatenate(blocks), return_counts=True)
    assert [array.tolist() for array in tally.totals()] == [labels.tolist(), counts.tolist()]


@pytest.mark.parametrize(("facts", "several", "unknown"), [("full", 2, 0), ("header", 0, 2)])
def test_scans_that_nobody_counted_are_unknown(tmp_path, facts, several, unknown):
    pictures = []
    for number in range(5):
        out = io.BytesIO()
        Image.new("RGB", (40, 30), (number * 9, 3, 7)).save(out, "JPEG", progressive=number < 2)
        pictures.append(out.getvalue())
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for number, data in enumerate(pictures):
            info = tarfile.TarInfo(f"{number}.jpg")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    shardkit.index([tmp_path / "x.tar"], out=tmp_path / "ds", facts=facts)
    images = shardkit.inspect(tmp_path / "ds").images
    assert (images.frames, images.several_scans, images.unknown_scans) == (
        {"baseline": 3, "progressive": 2}, several, unknown,
    )  # fmt: skip
    command = [sys.executable, "-m", "shardkit", "inspect", tmp_path / "ds"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ("with more than one, 2 unknown" in done.stdout) == (unknown > 0)
