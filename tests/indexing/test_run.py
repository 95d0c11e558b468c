"""`shardkit.index`: what comes out is what webdataset finds in the same tars, and every reader of shardkit takes it."""

from __future__ import annotations

import ctypes
import io
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pyarrow import compute

import shardkit
from shardkit.dataset.encoded import EncodedLoader, ReadOptions
from shardkit.dataset.selection import select
from shardkit.dataset.state import Position
from shardkit.errors import (
    CapabilityError,
    ConfigError,
    IntegrityError,
    LockedError,
    SourceError,
    TarFormatError,
    UnsafeError,
    WorkerError,
)
from shardkit.format.foreign_tar import ForeignTarParser
from shardkit.format.index import decode_shard_index
from shardkit.format.manifest import load_manifest
from shardkit.indexing import crew
from shardkit.indexing.refusals import REASONS
from shardkit.indexing.rows import index_shard
from shardkit.indexing.run import run_index
from shardkit.indexing.workers import Workers
from shardkit.storage.lock import FolderLock
from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.foreign import COMMANDS, foreign_files, write_by_command, write_tar
from shardkit.testing.host_device import HostDevice
from shardkit.testing.packs import contents

IMAGES = ("jpg", "jpeg")
SAMPLES = 7
LONG = 20.0
"""Seconds: longer than any machine takes to start a process."""
PYTHONS = {
    "python ustar": {"tar_format": tarfile.USTAR_FORMAT},
    "python gnu": {"tar_format": tarfile.GNU_FORMAT},
    "python pax": {"tar_format": tarfile.PAX_FORMAT},
    "python pax with records": {"mtime": 1234.5, "uname": "é" * 40},
}

CREWS = {
    "processes": {"WORTH_PROCESSES_S": 0.0, "_LOOK_S": 60.0},
    "processes beside the first shard": {"WORTH_PROCESSES_S": 0.0, "index_shard": lambda *given: late(*given)},
    "threads": {"WORTH_PROCESSES_S": 2.0},
    "threads from the beginning": {"_LOOK_S": 1e-5, "threads_worth": lambda jobs, *_: jobs},
}


def write(writer: str, path: Path, files: dict[str, bytes]) -> None:
    if writer in PYTHONS:
        write_tar(path, files, **PYTHONS[writer])
    elif writer in COMMANDS:
        if not write_by_command(path, files, COMMANDS[writer]):
            pytest.skip(f"{COMMANDS[writer][0]} is not installed")
    else:
        wds = pytest.importorskip("webdataset")
        samples: dict[str, dict[str, object]] = {}
        for name, data in files.items():
            key, _, extension = name.partition(".")
            samples.setdefault(key, {"__key__": key})[extension] = data
        with wds.TarWriter(str(path), encoder=False) as sink:
            for sample in samples.values():
                sink.write(sample)


def webdataset_samples(path: Path) -> list[dict[str, object]]:
    """Return what webdataset itself yields."""
    tariterators = pytest.importorskip("webdataset.tariterators")
    stream = io.BytesIO(path.read_bytes())
    return list(tariterators.group_by_keys(tariterators.tar_file_expander([{"url": str(path), "stream": stream}])))


def refusals(folder: Path) -> list[dict[str, str]]:
    path = folder / "rejected.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def image_of(sample: dict[str, object]) -> bytes:
    return next(sample[extension] for extension in IMAGES if extension in sample)


@pytest.mark.parametrize("writer", [*PYTHONS, *COMMANDS, "webdataset"])
def test_samples_are_the_ones_that_webdataset_yields_in_their_order(tmp_path, writer):
    path = tmp_path / "a.tar"
    write(writer, path, foreign_files(count=12))
    manifest = shardkit.index(path)
    assert (manifest.layout, manifest.totals.samples, manifest.totals.refused) == ("foreign", 12, 0)
    theirs = webdataset_samples(path)
    with shardkit.open(tmp_path) as dataset:
        assert [sample.key for sample in dataset] == [sample["__key__"] for sample in theirs]
        for ours, sample in zip(dataset, theirs, strict=True):
            assert ours.jpeg == image_of(sample)
            assert (ours.label, ours.metadata) == (int(sample["cls"]), json.loads(sample["json"]))
    assert shardkit.verify(tmp_path, "decode").findings == ()


def test_facts_are_pillows(tmp_path):
    image = Image.new("RGB", (41, 23), "red")
    files = {}
    for number, options in enumerate(({}, {"progressive": True}, {"exif": b"Exif\0\0" + b"II*\0" + b"\0" * 40_000})):
        data = io.BytesIO()
        image.save(data, "JPEG", **options)
        files[f"{number}.jpg"] = data.getvalue()
    write_tar(tmp_path / "a.tar", files)
    for facts in ("full", "header"):
        shardkit.index(tmp_path, facts=facts, overwrite=True)
        with shardkit.open(tmp_path) as dataset:
            columns = dataset.columns
            assert columns["width"][:].tolist() == [41] * 3
            assert columns["height"][:].tolist() == [23] * 3
            assert columns["sof"][:].tolist() == [0, 2, 0]
            assert columns["scans"][:].tolist() == [1, 10 if facts == "full" else 0, 1]
            assert (columns["crc32c"][:] != 0).all() == (facts == "full")


@pytest.mark.parametrize("facts", ["header", "none"])
def test_without_checksums_samples_load_and_nothing_claims_to_have_proven_them(shards, facts):
    manifest = shardkit.index(shards, facts=facts)
    assert not manifest.has_checksums
    with shardkit.open(shards) as dataset:
        assert dataset[3].jpeg == foreign_files()["train/n0/00003.JPG"]
    with pytest.raises(ConfigError, match="without checksums"):
        EncodedLoader.open(shards, ReadOptions(batch_size=2, check="crc"))
    report = shardkit.verify(shards, "decode")
    assert (report.findings, report.checksums) == ((), False)


def test_a_scan_of_headers_reads_no_payload(tmp_path):
    write_tar(tmp_path / "a.tar", {f"{number}.jpg": tiny_jpeg(number) + bytes(1 << 20) for number in range(8)})
    before = int(Path("/proc/self/io").read_text().split()[1])
    shardkit.index(tmp_path, facts="header")
    assert int(Path("/proc/self/io").read_text().split()[1]) - before < 200_000


def epoch(folder: Path, io_mode: str, **options: object) -> dict[str, bytes]:
    found = {}
    with EncodedLoader.open(folder, ReadOptions(**{"batch_size": 4, "io": io_mode, **options})) as loader:
        fetcher = loader.start(Position(0, 0))
        while (batch := fetcher.get(wait=True)) is not None:
            for key, view in zip(loader.samples.keys(batch.ids), batch.views, strict=True):
                found[key] = view.tobytes()
            batch.release()
        fetcher.close()
        assert loader.bad.by_key == {}
    return found


@pytest.mark.parametrize("shuffle", ["global", "window", "none"])
@pytest.mark.parametrize("io_mode", ["buffered", "direct", "uring"])
@pytest.mark.parametrize("place", ["beside", "out"])
def test_an_epoch_gives_every_byte(shards, tmp_path, io_mode, shuffle, place):
    folder = shards if place == "beside" else tmp_path / "out"
    shardkit.index(shards, out=folder)
    try:
        found = epoch(folder, io_mode, shuffle=shuffle, check="crc", metadata=True, last_batch="partial")
    except CapabilityError as error:
        pytest.skip(str(error))
    expected = {
        sample["__key__"]: image_of(sample)
        for path in sorted(shards.glob("*.tar"))
        for sample in webdataset_samples(path)
    }
    assert found == expected


@pytest.mark.parametrize("facts", ["full", "header", "none"])
@pytest.mark.parametrize("train", [True, False])
def test_shard_loader_gives_pixels_and_labels(tmp_path, facts, train):
    torch = pytest.importorskip("torch")
    pytest.importorskip("nvidia.dali")
    from shardkit.torch import ShardLoader

    files = {}
    for number in range(8):
        data = io.BytesIO()
        Image.new("RGB", (64 + number, 48), ("red", "lime")[number % 2]).save(data, "JPEG", quality=95)
        files[f"{number}.png" if number == 5 else f"{number}.jpg"] = data.getvalue()
        files[f"{number}.cls"] = b"%d" % (number % 2)
    write_tar(tmp_path / "a.tar", files)
    shardkit.index(tmp_path, facts=facts)
    with ShardLoader(tmp_path, batch_size=4, size=32, train=train, device="cpu", fields=("key",)) as loader:
        seen = []
        for images, labels, extras in loader:
            assert images.dtype == torch.float32
            shown = images.mean(dim=(2, 3)).numpy() * loader.std + loader.mean
            assert (shown.argmax(axis=1) == labels.numpy()).all()
            seen += extras["key"]
        assert sorted(seen) == [str(number) for number in range(8)]
        assert loader.stats().bad == {}


def test_shard_dataset_gives_the_bytes(shards):
    pytest.importorskip("torch")
    from shardkit.torch import ShardDataset

    shardkit.index(shards)
    dataset = ShardDataset(shards)
    assert len(dataset) == 3 * SAMPLES
    assert tuple(dataset[4])[:2] == (tiny_jpeg(4, 300 + 977 * 4), 1)


def test_the_dali_index_is_that_of_wds2idx(tmp_path):
    wds2idx = Path(sys.executable).with_name("wds2idx")
    if not wds2idx.exists():
        pytest.skip("wds2idx is not installed")
    path = write_tar(
        tmp_path / "a.tar", {name.lower(): data for name, data in foreign_files().items()}, tarfile.GNU_FORMAT
    )
    shardkit.index(path)
    subprocess.run([wds2idx, path, tmp_path / "theirs"], check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "a.idx").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_names_that_would_break_the_lines_of_the_dali_index_are_escaped_and_dali_takes_it(tmp_path):
    dali = pytest.importorskip("nvidia.dali")
    files = {"a b/é\n1.jpg": tiny_jpeg(1), "a b/é\n1.cls": b"3", "2.jpg": tiny_jpeg(2), "2.cls": b"4"}
    path = write_tar(tmp_path / "a.tar", files)
    shardkit.index(path)
    assert b"a%20b/%C3%A9%0A1.jpg" in (tmp_path / "a.idx").read_bytes()

    @dali.pipeline_def(batch_size=2, num_threads=1, device_id=None)
    def pipe():
        index = [str(tmp_path / "a.idx")]
        return tuple(dali.fn.readers.webdataset(paths=[str(path)], index_paths=index, ext=["jpg", "cls"]))

    built = pipe()
    built.build()
    images, labels = built.run()
    assert [np.asarray(images[i]).tobytes() for i in range(2)] == [tiny_jpeg(1), tiny_jpeg(2)]
    assert [np.asarray(labels[i]).tobytes() for i in range(2)] == [b"3", b"4"]


def late(shard, options, temporary, arrived):
    """Index a shard; in a thread only once there are processes, which know nothing of this."""
    arrived(1)
    until, children = time.monotonic() + LONG, Path(f"/proc/self/task/{os.getpid()}/children")
    while threading.current_thread() is not threading.main_thread() and not children.read_text():
        assert time.monotonic() < until, "no process began"
        time.sleep(0.01)
    return index_shard(shard, options, temporary, arrived)


@pytest.mark.parametrize("how", CREWS)
def test_all_jobs_write_the_same_bytes(shards, tmp_path, monkeypatch, how):
    """Whoever does them."""
    for constant, value in CREWS[how].items():
        monkeypatch.setattr(crew, constant, value)
    found = []
    for jobs in (1, 2, 5):
        shardkit.index(shards, out=tmp_path / str(jobs), name="d", jobs=jobs)
        found.append(contents(tmp_path / str(jobs)))
    assert found[0] == found[1] == found[2]
    assert set(found[0]) == {
        "index.arrow", "manifest.json", *(f"t-{n:03d}{end}" for n in range(3) for end in (".tar", ".arrow", ".idx"))
    }  # fmt: skip


def test_the_shards_are_not_touched(shards):
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino) for path in shards.iterdir()}
    shardkit.index(shards)
    shardkit.index(shards, overwrite=True)
    after = {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino) for path in shards.glob("*.tar")
    }
    assert after == before


def test_with_out_only_links_stand_beside_the_indexes_and_shards_of_several_folders_may_meet(shards, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (shards / "t-001.tar").rename(other / "t-001.tar")
    with pytest.raises(ConfigError, match="several folders"):
        shardkit.index([shards, other])
    shardkit.index([shards / "t-002.tar", other], out=tmp_path / "x/out")
    assert sorted(path.name for path in shards.iterdir()) == ["t-000.tar", "t-002.tar"]
    links = {path.name: os.readlink(path) for path in (tmp_path / "x/out").glob("*.tar")}
    assert links == {"t-001.tar": "../../other/t-001.tar", "t-002.tar": "../../data/t-002.tar"}
    (tmp_path / "x").rename(tmp_path / "y")  # links are relative
    with shardkit.open(tmp_path / "y/out") as dataset:
        assert [shard.name for shard in dataset.manifest.shards] == ["t-002.tar", "t-001.tar"]
        assert dataset[SAMPLES].key == "train/n1/00007"
    assert shardkit.verify(tmp_path / "y/out").findings == ()


def test_a_brace_expression_is_its_names_in_order(shards):
    manifest = shardkit.index(f"{shards}/t-{{002,000}}.tar")
    assert [shard.name for shard in manifest.shards] == ["t-002.tar", "t-000.tar"]


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("pipe:touch {marker}", UnsafeError),
        ("https://example.com/a.tar", ConfigError),
        ("s3://bucket/{{0..9}}.tar", ConfigError),
        ("a-{{0..99999999999}}.tar", UnsafeError),
        ("{{0..999}}{{0..999}}{{0..999}}.tar", UnsafeError),
        ("{{a,b}}" * 40, UnsafeError),
        ("{{a," * 30 + "b" + "}}" * 30, UnsafeError),
        ("/dev/zero", UnsafeError),
        ("missing.tar", ConfigError),
        ("", ConfigError),
    ],
)
def test_what_is_no_local_file_is_refused_and_nothing_runs(tmp_path, spec, error):
    marker = tmp_path / "marker"
    with pytest.raises(error):
        shardkit.index(spec.format(marker=marker), out=tmp_path / "out")
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


def test_a_fifo_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.tar")
    with pytest.raises(UnsafeError, match="not a regular file"):
        shardkit.index(tmp_path / "a.tar")


def test_two_shards_of_one_name_are_refused(shards, tmp_path):
    with pytest.raises(ConfigError, match="given twice"):
        shardkit.index([shards, shards / "t-000.tar"])
    (tmp_path / "b").mkdir()
    (tmp_path / "b/t-000.tar").write_bytes((shards / "t-000.tar").read_bytes())
    with pytest.raises(ConfigError, match="one name"):
        shardkit.index([shards, tmp_path / "b"], out=tmp_path / "out")


def test_what_cannot_be_used_is_left_out_and_told_shard_by_shard(tmp_path):
    jpeg = tiny_jpeg(1)
    members = [
        ("good.jpg", jpeg), ("good.cls", b"1"),
        ("torn.jpg", jpeg), ("between.jpg", jpeg), ("torn.cls", b"1"),
        ("twice.jpg", jpeg), ("x.jpg", jpeg), ("twice.jpg", jpeg),
        ("same.jpg", jpeg), ("same.jpg", jpeg),
        ("text.txt", b"no image"),
        ("void.jpg", b""),
        ("word.jpg", jpeg), ("word.cls", b"cat"),
        ("../up.jpg", jpeg),
        ("/abs.jpg", jpeg),
    ]  # fmt: skip
    path = write_tar(tmp_path / "a.tar", members)
    with tarfile.open(path, "a") as tar:
        link = tarfile.TarInfo("link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        tar.addfile(tarfile.TarInfo("bad\udcff.txt"))
        tail = tarfile.TarInfo("bad\udcff.jpg")
        tail.size = len(jpeg)
        tar.addfile(tail, io.BytesIO(jpeg))
    write_tar(tmp_path / "b.tar", {"fine.jpg": jpeg})
    result = run_index([tmp_path])
    with shardkit.open(tmp_path) as dataset:
        assert list(dataset.columns["key"][:]) == ["good", "between", "twice", "x", "fine"]
    told = [(line["path"], line["reason"]) for line in refusals(tmp_path)]
    assert told == [
        ("a.tar/torn", "not-adjacent"), ("a.tar/torn", "not-adjacent"), ("a.tar/twice", "duplicate-key"),
        ("a.tar/same", "duplicate-member"), ("a.tar/text", "no-image"), ("a.tar/void", "empty"),
        ("a.tar/word", "bad-label"), ("a.tar/../up.jpg", "parent-in-name"), ("a.tar//abs.jpg", "absolute-name"),
        ("a.tar/link.jpg", "link"), ("a.tar/bad%FF", "bad-key"),
    ]  # fmt: skip
    assert list(result.by_shard) == ["a.tar"]
    assert result.by_shard["a.tar"]["not-adjacent"] == 2
    assert result.manifest.totals.refused == len(told) == sum(result.refused.values())
    assert {reason for _, reason in told} <= set(REASONS)
    assert shardkit.verify(tmp_path).findings == ()
    with pytest.raises(SourceError, match=r"not-adjacent\): a\.tar/torn"):
        run_index([tmp_path], on_error="fail", overwrite=True)


def test_a_place_in_a_refusal_is_a_byte_of_the_shard(tmp_path):
    path = write_tar(tmp_path / "a.tar", {"a.jpg": tiny_jpeg(0), "b.txt": b""})
    shardkit.index(path)
    (line,) = refusals(tmp_path)
    at = int(line["detail"].rpartition("at byte ")[2])
    assert path.read_bytes()[at : at + 5] == b"b.txt"


@pytest.mark.parametrize("on_error", ["skip", "fail"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gzip", "bomb"])
def test_a_shard_that_is_no_whole_tar_is_left_out_whole_or_ends_the_run(shards, damage, on_error):
    path = shards / "t-001.tar"
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[-11_000:]
    elif damage == "flip":
        data[0] ^= 1
    elif damage == "gzip":
        data[:3] = b"\x1f\x8b\x08"
    else:  # GNU long name of 2 GiB
        info = tarfile.TarInfo("././@LongLink")
        info.type, info.size = b"L", 2 << 30
        data[:512] = info.tobuf(tarfile.GNU_FORMAT)
    path.write_bytes(data)
    kind = UnsafeError if damage == "bomb" else TarFormatError
    if on_error == "fail":
        with pytest.raises(kind) as caught:
            shardkit.index(shards, on_error="fail", jobs=1)
        assert str(path) in str(caught.value)
        return
    result = run_index([shards])
    assert [shard.name for shard in result.manifest.shards] == ["t-000.tar", "t-002.tar"]
    assert [(line["path"], line["reason"]) for line in refusals(shards)] == [
        ("t-001.tar", "unsafe-shard" if damage == "bomb" else "damaged-shard")
    ]
    assert str(shards) not in (shards / "rejected.jsonl").read_text()
    with pytest.raises(kind):
        shardkit.index(path, overwrite=True)


def test_random_bytes_and_flips_never_do_worse_than_a_refusal(tmp_path):
    rng = random.Random(7)
    whole = write_tar(tmp_path / "whole.tar", foreign_files(count=2), tarfile.PAX_FORMAT, mtime=1.5).read_bytes()
    for number in range(150):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path = tmp_path / str(number) / "a.tar"
        path.parent.mkdir()
        path.write_bytes(data[: rng.randrange(len(data))] if number % 3 == 0 else data)
        try:
            shardkit.index(path, jobs=1)
        except (TarFormatError, UnsafeError, SourceError):
            assert [entry.name for entry in path.parent.iterdir()] == ["a.tar"]
        else:
            assert shardkit.verify(path.parent, "structure").findings == ()


def test_labels_may_be_left_away(tmp_path):
    write_tar(tmp_path / "a.tar", {"a.jpg": tiny_jpeg(0), "a.cls": b"cat"})
    with pytest.raises(SourceError, match="--labels none"):
        shardkit.index(tmp_path)
    result = run_index([tmp_path], labels="none")
    assert (result.unlabelled, result.manifest.totals.samples) == (1, 1)


def test_the_image_is_chosen_by_the_order_of_the_extensions(tmp_path):
    left, right = tiny_jpeg(0), tiny_jpeg(1)
    write_tar(tmp_path / "a.tar", {"a.left.jpg": left, "a.right.JPG": right, "b.right.jpg": right})
    shardkit.index(tmp_path, image_ext=["left.jpg", "right.jpg"])
    with shardkit.open(tmp_path) as dataset:
        assert [sample.jpeg for sample in dataset] == [left, right]
        assert list(dataset.columns["source"][:]) == ["a.left.jpg", "b.right.jpg"]
    for wrong in (["cls"], [], ["a b"], [3]):
        with pytest.raises(ConfigError):
            shardkit.index(tmp_path, image_ext=wrong, overwrite=True)


def test_json_that_is_not_one_object_is_no_metadata(tmp_path):
    files = {"a.jpg": tiny_jpeg(0), "a.json": b"[1]", "b.jpg": tiny_jpeg(1), "b.json": b"{", "c.jpg": tiny_jpeg(2),
             "c.json": b'{"x": NaN}', "d.jpg": tiny_jpeg(3), "d.json": b'{"x": 1}'}  # fmt: skip
    write_tar(tmp_path / "a.tar", files)
    result = run_index([tmp_path])
    with shardkit.open(tmp_path) as dataset:
        assert [sample.metadata for sample in dataset] == [None, None, None, {"x": 1}]
    assert result.odd_metadata == 3


def test_a_damaged_jpeg_is_a_sample_and_counted(tmp_path):
    write_tar(tmp_path / "a.tar", {"a.jpg": tiny_jpeg(0)[:-40], "b.jpg": tiny_jpeg(1), "c.png": b"\x89PNG\r\n\x1a\n"})
    result = run_index([tmp_path])
    assert (result.manifest.totals.samples, result.odd_images) == (3, 1)
    assert shardkit.verify(tmp_path).findings == ()


def test_a_folder_with_indexes_of_others_is_not_written_to_unless_told(shards):
    (shards / "t-001.idx").write_text("mine")
    with pytest.raises(ConfigError, match=r"t-001\.idx"):
        shardkit.index(shards)
    assert (shards / "t-001.idx").read_text() == "mine"
    assert not (shards / ".shardkit").exists()
    shardkit.index(shards, overwrite=True)
    assert shardkit.verify(shards).findings == ()


def test_an_indexed_folder_is_replaced_only_when_told_and_nothing_old_stays(shards):
    shardkit.index(shards)
    with pytest.raises(ConfigError, match="--overwrite"):
        shardkit.index(shards)
    shardkit.index(shards / "t-001.tar", overwrite=True)
    assert sorted(path.name for path in shards.iterdir()) == [
        "index.arrow", "manifest.json", "t-000.tar", "t-001.arrow", "t-001.idx", "t-001.tar", "t-002.tar"
    ]  # fmt: skip


def test_a_dataset_that_shardkit_packed_keeps_its_indexes(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.jpg").write_bytes(tiny_jpeg(0))
    shardkit.pack(tmp_path / "src", tmp_path / "ds")
    before = contents(tmp_path / "ds")
    with pytest.raises(ConfigError, match="packed"):
        shardkit.index(tmp_path / "ds", overwrite=True)
    assert contents(tmp_path / "ds") == before
    shardkit.index(tmp_path / "ds", out=tmp_path / "out")
    with shardkit.open(tmp_path / "out") as dataset:
        assert dataset[0].jpeg == tiny_jpeg(0)


def test_a_file_of_the_name_of_a_link_is_never_replaced(shards, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "t-001.tar").write_bytes(b"somebody's shard")
    with pytest.raises(ConfigError):
        shardkit.index(shards, out=out, overwrite=True)
    assert (out / "t-001.tar").read_bytes() == b"somebody's shard"


@pytest.mark.parametrize("how", CREWS)
def test_what_a_worker_meets_ends_the_run_and_leaves_no_process(shards, monkeypatch, how):
    for constant, value in CREWS[how].items():
        monkeypatch.setattr(crew, constant, value)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    (shards / "t-002.tar").write_bytes(b"no tar")
    with pytest.raises(TarFormatError, match="too short for a tar"):
        shardkit.index(shards, on_error="fail", jobs=2)
    assert not list((shards / ".shardkit").glob("run-*"))
    assert children.read_text() == before
    write_tar(shards / "t-002.tar", foreign_files(14))
    shardkit.index(shards, resume=True, jobs=2)
    assert shardkit.verify(shards).findings == ()


def test_a_worker_that_dies_is_told_with_its_shard(shards, monkeypatch):
    monkeypatch.setattr(crew, "WORTH_PROCESSES_S", 0.0)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    received = Workers._receive

    def kill_and_receive(self, connection, shard):
        for pid in children.read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        return received(self, connection, shard)

    monkeypatch.setattr(Workers, "_receive", kill_and_receive)
    # Of three shards a thread may take two before there are processes.
    for number in range(3, 9):
        write_tar(shards / f"t-{number:03}.tar", foreign_files(7 * number))
    with pytest.raises(WorkerError, match=r"a worker died: .*/t-\d{3}\.tar; .*signal SIGKILL"):
        shardkit.index(shards, jobs=3)


def test_a_second_run_is_refused_while_one_holds_the_folder(shards):
    (shards / ".shardkit").mkdir()
    with FolderLock(os.fsencode(shards / ".shardkit/lock")), pytest.raises(LockedError):
        shardkit.index(shards)


def test_a_shard_that_changes_meanwhile_ends_the_run(shards):
    class Touch:
        def begin(self, shards: int, shard_bytes: int) -> None:
            pass

        def advance(self, shards_done: int, shard_bytes: int) -> None:
            os.utime(shards / "t-000.tar", ns=(1, 1))

    with pytest.raises(IntegrityError, match="changed while it was read"):
        shardkit.index(shards, jobs=1, progress=Touch())


def test_a_resumed_run_keeps_what_was_finished_and_gives_the_same_bytes(shards, tmp_path):
    shardkit.index(shards, out=tmp_path / "whole", name="d")

    class Stop(BaseException):
        pass

    class StopAfterOne:
        def begin(self, shards: int, shard_bytes: int) -> None:
            pass

        def advance(self, shards: int, shard_bytes: int) -> None:
            if shards:
                raise Stop

    out = tmp_path / "out"
    with pytest.raises(Stop) as caught:
        shardkit.index(shards, out=out, name="d", jobs=1, progress=StopAfterOne())
    assert "1 of 3 shards are indexed and kept" in caught.value.__notes__
    with pytest.raises(ConfigError, match="unfinished"):
        shardkit.index(shards, out=out, name="d")
    with pytest.raises(ConfigError, match=r'facts was "full" and is "none"'):
        shardkit.index(shards, out=out, name="d", resume=True, facts="none")
    inode = (out / "t-000.arrow").stat().st_ino
    assert run_index([shards], out=out, name="d", resume=True).kept == 1
    assert (out / "t-000.arrow").stat().st_ino == inode
    assert contents(out) == contents(tmp_path / "whole")
    again = run_index([shards], out=out, name="d", resume=True)
    assert (again.kept, again.manifest) == (3, load_manifest((out / "manifest.json").read_bytes()))


def test_a_shard_that_was_touched_since_is_read_again(shards):
    class Stop(BaseException):
        pass

    class StopAfterOne:
        def begin(self, shards: int, shard_bytes: int) -> None:
            pass

        def advance(self, shards: int, shard_bytes: int) -> None:
            if shards:
                raise Stop

    with pytest.raises(Stop):
        shardkit.index(shards, jobs=1, progress=StopAfterOne())
    data = (shards / "t-000.tar").read_bytes()
    (shards / "t-000.tar").write_bytes(data.replace(b"a caption", b"A CAPTION"))
    assert run_index([shards], resume=True).kept == 0
    assert shardkit.verify(shards).findings == ()


def test_the_index_names_its_layout(shards):
    shardkit.index(shards, facts="none")
    header = decode_shard_index((shards / "t-000.arrow").read_bytes()).header
    assert (header.layout, header.align) == ("foreign", 512)
    assert header.digest.startswith("members-xxh3-128:")


def test_pack_does_not_take_the_folder_for_its_own(shards, tmp_path):
    shardkit.index(shards)
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.jpg").write_bytes(tiny_jpeg(0))
    before = contents(shards)
    with pytest.raises(ConfigError):
        shardkit.pack(tmp_path / "src", shards, overwrite=True)
    assert contents(shards) == before


@pytest.fixture
def gappy(tmp_path):
    """Shards whose images lie far apart, behind and before members of all sizes."""
    folder = tmp_path / "gappy"
    folder.mkdir()
    for shard in range(2):
        files = {}
        for number in range(9):
            key = f"{shard}{number}"
            files[f"{key}.npy"] = bytes(400_000 if number % 3 else 13)
            files[f"{key}.jpg"] = tiny_jpeg(number, 700 + 5001 * (number % 4))
            files[f"{key}.txt"] = bytes(70_000)
        write_tar(folder / f"g-{shard}.tar", files)
    shardkit.index(folder)
    return folder


@pytest.mark.parametrize("shuffle", ["global", "window", "none"])
@pytest.mark.parametrize("io_mode", ["buffered", "direct", "uring"])
def test_images_that_lie_far_apart_are_all_read(gappy, io_mode, shuffle):
    try:
        found = epoch(gappy, io_mode, shuffle=shuffle, check="crc", last_batch="partial", extent_bytes=20_000)
    except CapabilityError as error:
        pytest.skip(str(error))
    assert found == {f"{s}{n}": tiny_jpeg(n, 700 + 5001 * (n % 4)) for s in range(2) for n in range(9)}


@pytest.mark.parametrize("cache", [0, 1 << 30])
@pytest.mark.parametrize("shuffle", ["global", "window"])
@pytest.mark.parametrize("io_mode", ["buffered", "direct"])
def test_batches_in_device_memory_are_those_of_host_memory(gappy, io_mode, shuffle, cache):
    """The device is made of host memory: what is asked for is where each image lies, cached shards among them."""
    device = HostDevice(lazy=True)
    options = {"batch_size": 5, "io": io_mode, "shuffle": shuffle, "last_batch": "partial", "extent_bytes": 20_000}
    try:
        loader = EncodedLoader.open(gappy, ReadOptions(**options, space=device.space, cache_gpu=cache), device=device)
    except CapabilityError as error:
        pytest.skip(str(error))
    with loader:
        for number in range(2):
            fetcher, found = loader.start(Position(number, 0)), {}
            while (batch := fetcher.get(wait=True)) is not None:
                rows = zip(batch.addresses.tolist(), batch.located.size.tolist(), strict=True)
                found |= dict(
                    zip(loader.samples.keys(batch.ids), (ctypes.string_at(*row) for row in rows), strict=True)
                )
                batch.release()
            fetcher.close()
            assert found == {f"{s}{n}": tiny_jpeg(n, 700 + 5001 * (n % 4)) for s in range(2) for n in range(9)}


@pytest.mark.parametrize("facts", ["none", "header", "full"])
def test_the_short_way_through_plain_headers_writes_the_same_bytes(shards, tmp_path, monkeypatch, facts):
    write_tar(shards / "t-003.tar", {f"big/{n}.{end}": data for n in range(60) for end, data in
              {"jpg": tiny_jpeg(n) + bytes(n * 9000), "cls": b"%d" % n, "json": b"{}"}.items()})  # fmt: skip
    shardkit.index(shards, out=tmp_path / "short", name="d", facts=facts, jobs=1)
    monkeypatch.setattr(ForeignTarParser, "feed_plain", lambda self, data, start: [])
    monkeypatch.setattr(ForeignTarParser, "feed_blocks", lambda self, headers: [])
    shardkit.index(shards, out=tmp_path / "careful", name="d", facts=facts, jobs=1)
    assert contents(tmp_path / "short") == contents(tmp_path / "careful")


@pytest.mark.parametrize(("facts", "unknown"), [("none", "width"), ("none", "sof"), ("header", "scans")])
def test_a_loaders_condition_on_facts_that_nobody_looked_for_is_refused(tmp_path, facts, unknown):
    write_tar(tmp_path / "a.tar", {f"{n}.jpg": tiny_jpeg(n) for n in range(3)})
    shardkit.index([tmp_path / "a.tar"], facts=facts)
    with shardkit.open(tmp_path) as dataset:
        with pytest.raises(ConfigError, match=f"facts of images not looked at.*{unknown}.*--facts"):
            select(dataset, where=compute.field(unknown) < 200)
        with pytest.raises(ConfigError, match=f"found {unknown}"):
            select(dataset, where=(compute.field("size") > 1) | (compute.field(unknown) == 0))
        assert select(dataset, where=compute.field("size") > 1) is None
