"""Shards of other tools, adopted by `shardkit.index`: exported as each tool's own indexer sees them, or refused."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

import shardkit
from shardkit.errors import ConfigError, IntegrityError, StorageError, TarFormatError
from shardkit.exporting.formats import FORMATS
from shardkit.exporting.run import export
from shardkit.format.checksum import hex_digest
from shardkit.format.manifest import load_manifest
from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.exports import database_rows, payloads_by_key, read_json, tar_members
from shardkit.testing.foreign import foreign_files, write_tar
from shardkit.testing.packs import contents

OTHERS = [name for name in FORMATS if name not in ("huggingface", "timm")]
"""`foreign_files` have images of several extensions, which those two do not read."""
NAMES = ["t-000.tar", "t-001.tar"]
JPEG = tiny_jpeg(1)


@pytest.fixture(params=["in place", "links"])
def adopt(request, tmp_path):
    """Return a function that indexes a folder, where it lies or with links elsewhere, and returns the dataset."""

    def call(folder, **options):
        if request.param == "links":
            options["out"] = tmp_path / "links" / "ds"
        shardkit.index(folder, **options)
        return options.get("out", folder)

    return call


@pytest.fixture
def dataset(tmp_path, adopt):
    (tmp_path / "data").mkdir()
    for number, name in enumerate(NAMES):
        write_tar(tmp_path / "data" / name, foreign_files(7 * number), tarfile.GNU_FORMAT)
    return adopt(tmp_path / "data")


def program(name):
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        pytest.skip(f"{name} is not installed")
    return path


@pytest.mark.parametrize("facts", ["full", "none"])
def test_wids_counts_the_samples_that_we_count(every_writer, tmp_path, facts):
    shardkit.index(every_writer, facts=facts)
    export(every_writer, "wids")
    made, names = tmp_path / "made.json", sorted(path.name for path in every_writer.glob("*.tar"))
    subprocess.run([program("widsindex"), "create", "-o", made, *names], cwd=every_writer, check=True,
                   capture_output=True)  # fmt: skip
    theirs = [{name: value for name, value in s.items() if name != "md5sum"} for s in read_json(made)["shardlist"]]
    assert read_json(every_writer / "shardindex.json")["shardlist"] == theirs


def test_wids_reads_every_sample_also_through_links(dataset, wids_samples):
    export(dataset, "wids")
    expected = payloads_by_key(dataset)
    assert wids_samples(dataset / "shardindex.json") == expected
    assert len(expected) == 14


def test_dali_reads_every_sample_by_an_index_that_lies_elsewhere(dataset, tmp_path):
    dali = pytest.importorskip("nvidia.dali")
    export(dataset, "dali", out=tmp_path / "idx")
    assert contents(tmp_path / "idx").keys() == {"t-000.idx", "t-001.idx", "exports.json"}

    @dali.pipeline_def(batch_size=14, num_threads=1, device_id=None)
    def graph():
        return tuple(
            dali.fn.readers.webdataset(
                paths=[str(dataset / name) for name in NAMES],
                index_paths=[str(tmp_path / "idx" / name.replace(".tar", ".idx")) for name in NAMES],
                ext=["txt", "cls", "jpg;jpeg"], dtypes=[dali.types.UINT8] * 3,
            )
        )  # fmt: skip

    pipeline = graph()
    pipeline.build()
    captions, labels, images = pipeline.run()
    expected = payloads_by_key(dataset).values()
    for column, ends in ((captions, ["txt"]), (labels, ["cls"]), (images, ["jpg", "jpeg", "JPG"])):
        found = [np.asarray(column.at(i)).tobytes() for i in range(14)]
        assert found == [next(sample[end] for end in ends if end in sample) for sample in expected]


def test_the_index_for_dali_is_the_one_that_stands_beside_the_shard_and_wds2idx_makes(tmp_path):
    files = {name.lower(): data for name, data in foreign_files().items()}
    path = write_tar(tmp_path / "data.tar", files, tarfile.GNU_FORMAT)
    shardkit.index(path)
    export(tmp_path, "dali", out=tmp_path / "out")
    subprocess.run([program("wds2idx"), path, tmp_path / "theirs"], check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "out" / "data.idx").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert [file.state for file in export(tmp_path, "dali").files] == ["unchanged"]


def test_energon_finds_each_sample_and_each_part_where_the_tar_has_it(every_writer):
    shardkit.index(every_writer, facts="none")
    export(every_writer, "energon")
    database = every_writer / ".nv-meta" / "index.sqlite"
    keys = {(shard, index): key for shard, key, index, _, _ in database_rows(database, "samples")}
    for number, path in enumerate(sorted(every_writer.glob("*.tar"))):
        parts = [row for row in database_rows(database, "sample_parts") if row[0] == number]
        found = [(f"{keys[shard, index]}.{part}", at, size) for shard, index, part, at, size in parts]
        assert found == [(member, at, len(data)) for member, at, data in tar_members(path)]
        assert written_offsets(path) == energon_offsets(path)


def written_offsets(path):
    return np.fromfile(path.with_suffix(".tar.idx"), "<u8").tolist()


def energon_offsets(path):
    """Return what Energon's own pass over a shard writes: first headers as Python's tarfile sees them, and the end."""
    with tarfile.open(path) as tar:
        files = [member for member in tar.getmembers() if member.isreg()]
        starts = {member.name.rpartition(".")[0]: member.offset for member in reversed(files)}
        return [*sorted(starts.values()), tar.offset]


@pytest.mark.parametrize(("files", "crude"), [
    ({"1.JPG": JPEG, "1.cls": b"1"}, False),
    ({"1.jpg": JPEG, "1.cls": b"1", "2.jpeg": JPEG, "2.cls": b"1"}, True),
    ({"1.jpg": JPEG, "1.cls": b"1", "2.jpg": JPEG}, True),
    ({"1.jpg": JPEG, "1.CLS": b"1"}, True),
])  # fmt: skip
def test_energon_is_told_of_image_and_label_where_all_samples_have_them_under_one_name(tmp_path, files, crude):
    write_tar(tmp_path / "a.tar", files)
    shardkit.index(tmp_path)
    export(tmp_path, "energon")
    assert ("CrudeWebdataset" in (tmp_path / ".nv-meta" / "dataset.yaml").read_text()) == crude


def test_folders_in_a_tar_are_nobodys_samples(tmp_path, wids_samples):
    for name, data in {"cats/1.jpg": JPEG, "cats/1.cls": b"1", "dogs/2.jpg": JPEG, "dogs/2.cls": b"0"}.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes(data)
    (tmp_path / "tree" / "zebras").mkdir()
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "a.tar"
    subprocess.run(["tar", "--sort=name", "-cf", path, "-C", tmp_path / "tree", "."], check=True)
    shardkit.index(path)
    export(tmp_path / "data", ["wids", "energon", "aistore"])
    assert list(wids_samples(tmp_path / "data" / "shardindex.json")) == ["./cats/1", "./dogs/2"]
    assert written_offsets(path) == energon_offsets(path)
    samples = database_rows(tmp_path / "data" / ".nv-meta" / "index.sqlite", "samples")
    assert [row[3] + row[4] for row in samples] == energon_offsets(path)[1:]
    lines = (tmp_path / "data" / "aistore.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"objname": "a.tar", "archpath": "./cats/1.cls"}


def test_names_come_out_as_the_tar_has_them(tmp_path):
    key = 'a b/\u00e9\n\x1b[31m%20"\\\u00a01'
    files = {f"{key}.jpg": JPEG, f"{key}.Left.PNG": b"x", f"{key}.cls": b"1", "100%.jpg": JPEG, "%41.jpg": JPEG,
             "A.jpg": JPEG, "v1.2/a.jpg": JPEG}  # fmt: skip
    write_tar(tmp_path / "a.tar", files)
    shardkit.index(tmp_path)
    export(tmp_path, "aistore")
    lines = [json.loads(line) for line in (tmp_path / "aistore.jsonl").read_bytes().split(b"\n")[:-1]]
    assert [line["archpath"] for line in lines] == list(files)


def test_the_lists_count_the_samples_that_can_be_used(tmp_path):
    write_tar(tmp_path / "a.tar", [("1.jpg", JPEG), ("2.txt", b"no image"), ("3.jpg", JPEG)])
    shardkit.index(tmp_path)
    export(tmp_path, ["timm", "openclip"])
    assert read_json(tmp_path / "sizes.json") == {"a.tar": 2}
    assert read_json(tmp_path / "_info.json")["splits"]["train"]["shard_lengths"] == [2]


def test_webdataset_reads_the_shards_by_the_names_in_a_list(dataset):
    wds = pytest.importorskip("webdataset")
    export(dataset, "openclip")
    names = list(read_json(dataset / "sizes.json"))
    sources = [{"url": name, "stream": io.BytesIO((dataset / name).read_bytes())} for name in names]
    read = wds.tariterators.group_by_keys(wds.tariterators.tar_file_expander(sources))
    assert [sample["__key__"] for sample in read] == list(payloads_by_key(dataset))


WIDS, ENERGON, AISTORE, HUGGINGFACE, TIMM = ["wids"], ["energon"], ["aistore"], ["huggingface"], ["timm"]
EIGHT = {f"{number}.{end}": data for number in range(8) for end, data in (("cls", b"1"), ("jpg", JPEG))}


@pytest.mark.parametrize(("refused", "files", "told"), [
    (WIDS, {"\u00e9.jpg": JPEG}, r"no export for wids: .* ASCII .*a\.tar \[sample \u00e9\].*found \u00e9\.jpg"),
    (WIDS, {"d/" * 48 + "long.jpg": JPEG}, "names of up to 100 ASCII"),
    (WIDS + ENERGON, {"a\nb.jpg": JPEG}, r"line.*found a\\nb\.jpg"),
    (WIDS, {"1.jpg": JPEG, "v1.0/README": b"x", "2.jpg": JPEG}, r"a\.tar.*found v1\.0/README"),
    (WIDS + HUGGINGFACE, {"__meta__/x.txt": b"x", "1.jpg": JPEG}, r"found __meta__/x\.txt"),
    (WIDS + ENERGON + HUGGINGFACE, {"0.txt": b"no image", "1.jpg": JPEG},
     r"in no sample of the dataset would be in one .*found 0\.txt"),
    (WIDS + ENERGON + HUGGINGFACE, {"1.jpg": JPEG, "1.cls": b"1", "2.cls": b"cat", "2.jpg": JPEG}, r"found 2\.cls"),
    (WIDS + ENERGON + HUGGINGFACE, {"1.jpg": JPEG, "2.jpg": b""}, r"found 2\.jpg"),
    (WIDS, {"1.jpg": JPEG, "v1.2/readme": b"x", "1.cls": b"1"}, r"found v1\.2/readme"),
    (WIDS + ENERGON + HUGGINGFACE, {"1.jpg": JPEG, "../2.jpg": JPEG, "1.cls": b"1"}, r"found \.\./2\.jpg"),
    (WIDS + ENERGON + HUGGINGFACE, {"1.jpg": JPEG, "readme": b"x", "/2.jpg": JPEG, "1.cls": b"1"}, r"found /2\.jpg"),
    (WIDS + ENERGON + HUGGINGFACE, {"1.": b"x", "1.jpg": JPEG, "1.cls": b"1"}, r"found 1\."),
    (WIDS + ENERGON + HUGGINGFACE, {"1.jpg": JPEG, "1.cls": b"1", "1.": b"x"}, r"found 1\."),
    (WIDS + ENERGON + AISTORE, {"1.jpg": JPEG, "1.a b": b"x"}, r"known only with escapes.*found 1\.a%20b"),
    (WIDS + ENERGON + AISTORE, {"1.jpg": JPEG, "1.a%20b": b"x"}, r"known only with escapes.*found 1\.a%20b"),
    (HUGGINGFACE, {"1.jpg": JPEG, "2.jpg": JPEG, "3.jpg": JPEG, "3.txt": b"x"},
     r"same extensions: a\.tar \[sample 3\]; expected jpg; found jpg, txt"),
    (HUGGINGFACE, {"1.jpg": JPEG, "2.JPG": JPEG}, "same extensions"),
    (HUGGINGFACE, EIGHT | {"8.jpg": JPEG, "8.cls": b"1", "8.txt": b"x"},
     r"the first 5 samples of a\.tar lack .*a\.tar \[sample 8\]; expected cls, jpg; found txt"),
    (HUGGINGFACE + TIMM, EIGHT | {"8.jpeg": JPEG, "8.cls": b"1"}, r"a\.tar \[sample 8\]; expected .*; found jpeg"),
    (HUGGINGFACE, {f"{n}.{end}": JPEG for n in range(6) for end in ("jpg", "png")[n > 4 :]},
     r"another column: a\.tar \[sample 5\]; expected jpg; found png"),
    (HUGGINGFACE, {"a/__1.jpg": JPEG}, r"begins with \. or __ .*a\.tar \[sample a/__1\]"),
    (TIMM, EIGHT | {"8.jpg": JPEG}, r"without a label .*\[sample 8\]; expected cls; found jpg; .*label all samples"),
    (TIMM, {"1.jpeg": JPEG, "1.png": JPEG}, r"another member for the image: .*expected jpeg; found png"),
])  # fmt: skip
def test_what_a_tool_would_read_otherwise_is_refused_for_it_alone(tmp_path, refused, files, told):
    write_tar(tmp_path / "a.tar", files)
    shardkit.index(tmp_path)
    before = contents(tmp_path)
    for name in refused:
        with pytest.raises(ConfigError, match=told) as caught:
            export(tmp_path, [name, "openclip"])
        assert "nothing was changed; leave " + name + " out of --to" in str(caught.value)
        assert contents(tmp_path) == before
    export(tmp_path, [name for name in FORMATS if name not in refused])


def test_all_refused_formats_are_told_at_once(tmp_path):
    files = {"1.jpg": JPEG, "1.cls": b"1", "1.a%20b": b"x", "2.jpg": JPEG}
    write_tar(tmp_path / "a.tar", files)
    shardkit.index(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ConfigError) as caught:
        export(tmp_path, list(FORMATS))
    text = str(caught.value)
    refused = ["wids", "energon", "timm", "huggingface", "aistore"]
    assert text.startswith("5 of 7 formats are refused: no export for wids: ")
    for name in refused:
        assert text.count(f"no export for {name}: ") == text.count(f"leave {name} out of --to") == 1
    assert text.endswith("nothing was changed; what can be exported is --to openclip,dali")
    assert contents(tmp_path) == before
    with pytest.raises(ConfigError, match=r"^2 of 2 formats are refused: .*; nothing was changed$"):
        export(tmp_path, refused[:2])
    export(tmp_path, ["openclip", "dali"])


@pytest.mark.parametrize(("records", "field", "kept"), [
    ({"path": "d/1.jpg"}, "name", "1.jpg"),
    ({"size": str(len(JPEG))}, "size", 0),
])  # fmt: skip
def test_a_name_or_size_that_an_extended_header_alone_states_is_refused_for_wids_alone(tmp_path, records, field, kept):
    info = tarfile.TarInfo("1.jpg")
    info.size = len(JPEG)
    setattr(info, field, kept)
    header = info._create_pax_generic_header(records, tarfile.XHDTYPE, "utf-8")
    padded = JPEG + bytes(-len(JPEG) % 512)
    (tmp_path / "a.tar").write_bytes(header + info.tobuf(tarfile.USTAR_FORMAT) + padded + bytes(1024))
    shardkit.index(tmp_path)
    with pytest.raises(ConfigError, match=r"no export for wids: .* extended header .*a\.tar.*found (d/)?1\.jpg"):
        export(tmp_path, "wids")
    export(tmp_path, [name for name in FORMATS if name != "wids"])


def test_a_key_that_stands_in_two_shards_is_refused_for_energon_alone(tmp_path):
    for name in NAMES:
        write_tar(tmp_path / name, {"000000.jpg": JPEG})
    shardkit.index(tmp_path)
    with pytest.raises(ConfigError, match="no export for energon: it wants every key once"):
        export(tmp_path, "energon")
    export(tmp_path, [name for name in FORMATS if name != "energon"])
    assert not (tmp_path / ".nv-meta").exists()


@pytest.mark.parametrize("formats", [["energon"], ["dali", "energon"], ["energon", "dali"]])
def test_no_export_takes_the_name_of_an_index(tmp_path, formats):
    for name in ("a.tar", "a.tar.tar"):
        write_tar(tmp_path / name, {f"{len(name)}.jpg": JPEG})
    shardkit.index(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"two files of one name: a\.tar\.idx"):
        export(tmp_path, formats, overwrite=True)
    assert contents(tmp_path) == before
    export(tmp_path, ["wids", "dali"])


def test_a_refused_link_is_in_nobodys_way(tmp_path, wids_samples):
    write_tar(tmp_path / "a.tar", {"1.jpg": JPEG})
    with tarfile.open(tmp_path / "a.tar", "a") as tar:
        link = tarfile.TarInfo("2.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    shardkit.index(tmp_path)
    export(tmp_path, ["wids", "energon"])
    assert len(wids_samples(tmp_path / "shardindex.json")) == 1
    assert written_offsets(tmp_path / "a.tar") == energon_offsets(tmp_path / "a.tar")


def test_no_payload_is_read(dataset, monkeypatch):
    read, true_pread = [], os.pread

    def pread(fd, size, at):
        read.append((Path(f"/proc/self/fd/{fd}").resolve(), at, size))
        return true_pread(fd, size, at)

    monkeypatch.setattr(os, "pread", pread)
    export(dataset, OTHERS)
    assert 0 < sum(size for _, _, size in read) <= len(NAMES) * 3 * 2 * 512  # wids, and energon for both its files
    for path, at, size in read:
        assert not any(offset < at + size and at < offset + len(data) for _, offset, data in tar_members(path))


@pytest.mark.parametrize("name", ["energon", "wids", "huggingface"])
def test_headers_that_do_not_lead_to_the_next_member_are_told(tmp_path, name):
    path = write_tar(tmp_path / "a.tar", {"1.jpg": JPEG, "readme": b"x", "1.cls": b"1"}, tarfile.GNU_FORMAT)
    shardkit.index(path)
    at = tar_members(path)[1][1] - 512
    data = path.read_bytes()
    path.write_bytes(data[:at] + bytes(512) + data[at + 512 :])
    with pytest.raises(TarFormatError, match=rf"do not lead to a member .*a\.tar:{at}; .*run shardkit verify"):
        export(tmp_path, name)


@pytest.mark.parametrize("name", ["dali", "aistore", "energon", "wids", "timm", "huggingface"])
def test_a_missing_or_damaged_index_of_dali_is_told(dataset, name):
    path = dataset / "t-001.idx"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"cls", b"clt", 1))
    with pytest.raises(IntegrityError, match=r"is not the manifest's.*t-001\.idx.*shardkit index --overwrite"):
        export(dataset, name)
    path.unlink()
    with pytest.raises(StorageError, match=r"t-001\.idx.*shardkit index --overwrite"):
        export(dataset, name)
    export(dataset, "openclip")


@pytest.mark.parametrize(("change", "told"), [
    ((b"jpg 512 ", b"jpg 99999488 "), "a member that lies outside its sample"),
    ((b" a.jpg", b" b.jpg"), "a key that the DALI index does not have"),
    ((b"jpg 512 %d " % len(JPEG), b"jpg 512 7 "), "an image that the DALI index does not have"),
    ((b"v1.2 1\n", b"v1.2 2\njpg 512 1 a.jpg\n"), "not one row a line of the DALI index"),
    ((b"jpg ", b"png "), "a key that the DALI index does not have"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["dali", "aistore", "energon", "wids", "timm", "huggingface"])
def test_an_index_that_lies_is_refused(tmp_path, change_manifest, change, told, name):
    write_tar(tmp_path / "a.tar", {"a.jpg": JPEG})
    shardkit.index(tmp_path)
    lying = (tmp_path / "a.idx").read_bytes().replace(*change)
    (tmp_path / "a.idx").write_bytes(lying)
    manifest = load_manifest((tmp_path / "manifest.json").read_bytes())
    record = dataclasses.replace(manifest.shards[0].dali_index, bytes=len(lying), digest=hex_digest("xxh3-128", lying))
    change_manifest(tmp_path, shards=[dataclasses.replace(manifest.shards[0], dali_index=record)])
    with pytest.raises(IntegrityError, match=told):
        export(tmp_path, name, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
