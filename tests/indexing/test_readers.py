"""Tars that were indexed: every reader of shardkit, and DALI, finds in them what webdataset finds."""

from __future__ import annotations

import ctypes
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image
from pyarrow import compute

import shardkit
from shardkit.dataset.encoded import EncodedLoader, ReadOptions
from shardkit.dataset.selection import select
from shardkit.dataset.state import Position
from shardkit.errors import CapabilityError, ConfigError
from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.foreign import COMMANDS, foreign_files, write_by_command, write_tar
from shardkit.testing.host_device import HostDevice

from .conftest import SAMPLES

IMAGES = ("jpg", "jpeg")
PYTHONS = {
    "python ustar": {"tar_format": tarfile.USTAR_FORMAT},
    "python gnu": {"tar_format": tarfile.GNU_FORMAT},
    "python pax": {"tar_format": tarfile.PAX_FORMAT},
    "python pax with records": {"mtime": 1234.5, "uname": "é" * 40},
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


@pytest.mark.parametrize("name", ["x y.jpg", "x\ty.jpg", "x\x7fy.jpg"])
def test_one_name_among_many_that_would_break_a_line_is_escaped(tmp_path, name):
    """Names are looked at some at a time."""
    image = tiny_jpeg(1)
    write_tar(tmp_path / "a.tar", {**{f"{number:020}.jpg": image for number in range(5000)}, name: image})
    shardkit.index(tmp_path, facts="none", labels="none", jobs=1)
    lines = (tmp_path / "a.idx").read_bytes().splitlines()
    assert len(lines) == 5002
    assert lines[-1].endswith(b" " + quote(name).encode())


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
