"""`shardkit.index`: what it writes, what it leaves alone, and how it goes on after a stop."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from PIL import Image

import shardkit
from shardkit.errors import ConfigError, IntegrityError, LockedError, SourceError
from shardkit.format.foreign_tar import ForeignTarParser
from shardkit.format.index import decode_shard_index
from shardkit.format.manifest import load_manifest
from shardkit.indexing.run import run_index
from shardkit.storage.lock import FolderLock
from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.foreign import write_tar
from shardkit.testing.packs import contents

from .conftest import SAMPLES


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


def test_a_scan_of_headers_reads_no_payload(tmp_path):
    write_tar(tmp_path / "a.tar", {f"{number}.jpg": tiny_jpeg(number) + bytes(1 << 20) for number in range(8)})
    before = int(Path("/proc/self/io").read_text().split()[1])
    shardkit.index(tmp_path, facts="header")
    assert int(Path("/proc/self/io").read_text().split()[1]) - before < 200_000


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


@pytest.mark.parametrize("facts", ["none", "header", "full"])
def test_the_short_way_through_plain_headers_writes_the_same_bytes(shards, tmp_path, monkeypatch, facts):
    write_tar(shards / "t-003.tar", {f"big/{n}.{end}": data for n in range(60) for end, data in
              {"jpg": tiny_jpeg(n) + bytes(n * 9000), "cls": b"%d" % n, "json": b"{}"}.items()})  # fmt: skip
    shardkit.index(shards, out=tmp_path / "short", name="d", facts=facts, jobs=1)
    monkeypatch.setattr(ForeignTarParser, "feed_plain", lambda self, data, start: [])
    monkeypatch.setattr(ForeignTarParser, "feed_blocks", lambda self, headers: [])
    shardkit.index(shards, out=tmp_path / "careful", name="d", facts=facts, jobs=1)
    assert contents(tmp_path / "short") == contents(tmp_path / "careful")


@pytest.mark.parametrize("name", ["a b.tar", "index.tar", "shard"])
def test_a_name_that_no_shard_of_a_dataset_has_is_told_with_the_path(tmp_path, name):
    path = write_tar(tmp_path / name, {"1.jpg": tiny_jpeg(1)})
    with pytest.raises(ConfigError, match="cannot have") as caught:
        shardkit.index(path, out=tmp_path / "out")
    assert caught.value.path == str(path)
    assert "rename it" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_name_that_no_file_has_is_told():
    with pytest.raises(ConfigError, match="the name of a file"):
        shardkit.index("a\0b.tar")
