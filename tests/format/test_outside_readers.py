"""Other people's tools judge our shards: each sees the same members with the same bytes."""

from __future__ import annotations

import functools
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from shardkit.format.keys import key_from_path

ALIGNS = [512, 4096, 65536, 524288]
SIDECARS = ["cls", "json", "both"]
PATHS = [
    b"cat/0001.jpg", b"cat/0002.v2.JPEG", "dog/\u00fc \n.jpg".encode(), b"__meta__/__all__.jpg", b"-dash/.hidden.jpg",
    b"n" * 150 + b".jpg", b"deep/er/still/__init__.jpg", b"100%\xff.jpg",
]  # fmt: skip
# Around the block and around the smallest alignments; one image of no bytes cannot be, one of one byte can.
IMAGE_BYTES = [1, 511, 512, 513, 3072, 3584, 5000, 70_001]


@functools.cache
def make(write_shard, noise, align, sidecars):
    samples = []
    for number, (path, size) in enumerate(zip(PATHS, IMAGE_BYTES, strict=True)):
        cls = str(number).encode() if sidecars in ("cls", "both") else None
        text = json.dumps({"source": "x" * (number * 100)}).encode() if sidecars in ("json", "both") else None
        samples.append((key_from_path(path), cls, text, noise(size, number)))
    return write_shard(samples, align)


@pytest.fixture(params=[(align, sidecars) for align in ALIGNS for sidecars in SIDECARS], ids="{0[0]}-{0[1]}".format)
def shard(request, write_shard, noise):
    return make(write_shard, noise, *request.param)


@pytest.fixture
def path(shard, tmp_path):
    path = tmp_path / "photos-000000.tar"
    path.write_bytes(shard.data)
    return path


def by_sample(shard):
    """Return key to {extension: payload}."""
    samples = {}
    for name, payload in shard.contents.items():
        key, _, extension = name.rpartition(".")
        samples.setdefault(key, {})[extension] = payload
    return samples


def run(*command, cwd=None):
    """Run a command that has nothing to complain about and return its output."""
    done = subprocess.run(command, cwd=cwd, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout


@pytest.mark.parametrize("tool", ["tar", "bsdtar"])
def test_tar_programs_list_and_extract_every_member_without_a_word(tool, shard, path, tmp_path, require_tool):
    tar = require_tool(tool)
    assert run(tar, "-tf", path).decode().splitlines() == list(shard.contents)
    folder = tmp_path / "out"
    folder.mkdir()
    run(tar, "-xf", path, "--no-same-owner", cwd=folder)
    extracted = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert extracted == shard.contents
    assert {p.stat().st_mtime for p in folder.rglob("*") if p.is_file()} == {0}


@pytest.mark.parametrize("mode", ["r:", "r|"])
def test_python_tarfile_reads_every_member(mode, shard):
    with tarfile.open(fileobj=io.BytesIO(shard.data), mode=mode) as archive:
        found = {member.name: archive.extractfile(member).read() for member in archive}
    assert found == shard.contents
    assert list(found) == list(shard.contents)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_webdataset_reads_every_sample(
    shard, path
):  # which leaves its file to the garbage collector: hence the filters
    import webdataset as wds

    found = {}
    for sample in wds.WebDataset(str(path), shardshuffle=False):
        found[sample["__key__"]] = {name: value for name, value in sample.items() if not name.startswith("__")}
    assert found == by_sample(shard)


def test_wids_reads_every_sample(shard, path, tmp_path):
    import wids

    expected = by_sample(shard)
    listing = {
        "__kind__": "wids-shard-index-v1", "wids_version": 1,
        "shardlist": [{"url": str(path), "nsamples": len(expected)}],
    }  # fmt: skip
    (tmp_path / "index.json").write_text(json.dumps(listing))
    samples = wids.ShardListDataset(str(tmp_path / "index.json"), cache_dir=str(tmp_path / "cache"), transformations=[])
    assert len(samples) == len(expected)
    found = {}
    for i in range(len(samples)):
        members = {name[1:]: value.read() for name, value in samples[i].items() if name.startswith(".")}
        found[samples[i]["__key__"]] = members
    assert found == expected


@pytest.mark.parametrize("indexed", [True, False], ids=["our-idx", "no-idx"])
def test_dali_reads_every_sample(indexed, shard, path):
    from nvidia import dali

    index = path.with_suffix(".idx")
    index.write_bytes(shard.idx)
    expected = by_sample(shard)

    @dali.pipeline_def(batch_size=len(expected), num_threads=1, device_id=None)
    def graph():
        return tuple(
            dali.fn.readers.webdataset(
                paths=[str(path)], index_paths=[str(index)] if indexed else [], ext=["cls", "json", "jpg"],
                missing_component_behavior="empty", dtypes=[dali.types.UINT8] * 3,
            )
        )  # fmt: skip

    pipeline = graph()
    pipeline.build()
    (reader,) = pipeline.reader_meta().values()
    assert reader["epoch_size"] == len(expected)
    columns = [[bytes(memoryview(output.at(i))) for i in range(len(expected))] for output in pipeline.run()]
    for expected_members, *payloads in zip(expected.values(), *columns, strict=True):
        found = dict(zip(("cls", "json", "jpg"), payloads, strict=True))
        assert {extension: payload for extension, payload in found.items() if payload} == expected_members


def test_our_idx_is_the_one_that_dali_makes(shard, path, tmp_path):
    made = tmp_path / "dali.idx"
    subprocess.run([Path(sys.executable).with_name("wds2idx"), path, made], check=True, stdout=subprocess.DEVNULL)
    assert made.read_bytes() == shard.idx
