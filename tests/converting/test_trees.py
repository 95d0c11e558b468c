"""A plain tree as an input is what `pack` makes of it, beside other inputs, chosen, split and shuffled."""

from __future__ import annotations

import os
import shutil

import pytest

import shardkit
from shardkit.converting import trees as trees_module
from shardkit.converting.run import make_options, plan_conversion, run_conversion
from shardkit.converting.selection import part_of_key
from shardkit.errors import CapabilityError, ConfigError, SourceError
from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.extents import shared_bytes
from shardkit.testing.packs import StopAfter, contents

from .conftest import members_of, order_of, refusals_of, rows_of, whole


def shards_of(folder):
    return {name: data for name, data in contents(folder).items() if name != "manifest.json"}


@pytest.fixture
def odd(tree, tmp_path):
    """The tree with what pack refuses, what it passes over, and names that are no keys."""
    root = tmp_path / "odd"
    shutil.copytree(tree, root)
    (root / "a" / "no image.jpg").write_bytes(b"x")
    (root / "b" / "é.v2.JPEG").write_bytes(tiny_jpeg(90))
    (root / "b" / "inner").mkdir()
    (root / "b" / "inner" / "__x.jpg").write_bytes(tiny_jpeg(91))
    os.mkdir(os.fsencode(root / "c") + b"/\xff")
    with open(os.fsencode(root / "c") + b"/\xff/100%.jpg", "wb") as file:
        file.write(tiny_jpeg(92))
    (root / "lone.jpg").write_bytes(tiny_jpeg(93))
    (root / "a" / "passwd.jpg").symlink_to("/etc/passwd")
    (root / "a" / "inside.jpg").symlink_to(root / "a" / "00000.jpg")
    (root / "b" / "gone.jpg").symlink_to("nothing")
    (root / "b" / "around").symlink_to(root / "b")
    os.mkfifo(root / "c" / "fifo.jpg")
    (root / "c" / "large.jpg").write_bytes(tiny_jpeg(94, 5000))
    (root / "c" / "empty.jpg").write_bytes(b"")
    (root / ".hidden.jpg").write_bytes(tiny_jpeg())
    (root / "a" / "notes.txt").write_text("x")
    return root


REASONS = {"not-jpeg", "no-class", "outside-link", "broken-link", "not-a-file", "too-large", "empty"}


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("label_column", [None, ""])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_tree_becomes_the_shards_that_pack_makes_of_it(odd, tmp_path, jobs, label_column, shuffle):
    given = {"name": "n", "shards": 4, "shuffle": shuffle, "seed": 3, "max_bytes": 4000}
    labels = "none" if label_column == "" else None
    shardkit.pack(odd, tmp_path / "packed", labels=labels, jobs=1, **given)
    result = shardkit.convert(f"tree:{odd}", tmp_path / "out", label_column=label_column, jobs=jobs, **given)
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "packed")
    assert {line["reason"] for line in refusals_of(tmp_path / "out")} == REASONS - ({"no-class"} if labels else set())
    assert shardkit.open(tmp_path / "out").classes == shardkit.open(tmp_path / "packed").classes
    assert result.passed_over == {"hidden": 1, ".txt": 1}
    assert whole(tmp_path / "out")


@pytest.mark.parametrize("options", [{"resize": 8, "quality": 70}, {"convert": True, "check": "decode"}])
def test_images_become_what_pack_makes_of_them(odd, tmp_path, options):
    shardkit.pack(odd, tmp_path / "packed", name="n", jobs=1, shuffle=False, **options)
    shardkit.convert(f"tree:{odd}", tmp_path / "out", name="n", jobs=1, **options)
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "packed")


def test_many_files_are_taken_some_at_a_time(odd, tmp_path, monkeypatch):
    monkeypatch.setattr(trees_module, "_ROWS", 4)
    shardkit.pack(odd, tmp_path / "packed", name="n", shards=3, jobs=1)
    shardkit.convert(f"tree:{odd}", tmp_path / "out", name="n", shards=3, shuffle=True, jobs=2)
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "packed")


def test_a_tree_stands_beside_other_inputs(tree, listed, write_tar, sample, tmp_path):
    tar = write_tar("x.tar", [m for n in range(100, 104) for m in sample(n, label=n % 3)])
    sources = [f"tree:{tree}", tar, listed]
    given = {"labels": ["c", "a", "b"], "shuffle": True, "seed": 2, "key": "shard", "shards": 3}
    for jobs in (1, 2):
        shardkit.convert(sources, tmp_path / str(jobs), name="n", jobs=jobs, **given)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    rows = rows_of(tmp_path / "1")
    assert len(rows) == 64
    stated = {key: row["label"] for key, row in rows.items() if key.startswith("src/")}
    assert stated == {f"src/{c}/{n:05d}": {"c": 0, "a": 1, "b": 2}[c] for n in range(30) for c in ["abc"[n % 3]]}
    images = {name: data for name, data in members_of(tmp_path / "1").items() if name.startswith("src/")}
    assert {data for name, data in images.items() if name.endswith(".jpg")} == {
        path.read_bytes() for path in tree.rglob("*.jpg")
    }
    assert whole(tmp_path / "1")
    with pytest.raises(ConfigError, match="do not have the same classes"):
        shardkit.convert(sources, tmp_path / "no", key="shard")


def test_files_are_chosen_by_what_their_headers_and_folders_say(odd, tmp_path):
    where = "label in (0, 2) and width > 2 and 500 < size <= 1200"
    shardkit.pack(odd, tmp_path / "packed", name="n", jobs=1)
    expected = {row["key"] for row in rows_of(tmp_path / "packed").values()
                if row["label"] in (0, 2) and row["width"] > 2 and 500 < row["size"] <= 1200}  # fmt: skip
    result = shardkit.convert(f"tree:{odd}", tmp_path / "out", where=where, jobs=1)
    assert set(rows_of(tmp_path / "out")) == expected != set()
    sources = 30 + 7  # of what the scan does not refuse
    assert result.passed_over["by --where"] == sources - len(expected)
    assert "not-jpeg" not in {line["reason"] for line in refusals_of(tmp_path / "out")}  # it has no width


def test_what_is_refused_is_in_the_part_where_its_key_falls(odd, tmp_path):
    split = {"one": "0.5", "two": "0.5"}
    shardkit.convert(f"tree:{odd}", tmp_path / "out", split=split, jobs=1)
    shardkit.convert(f"tree:{odd}", tmp_path / "all", jobs=1)
    lines = {part: refusals_of(tmp_path / "out" / part) for part in split}
    assert sorted(str(line) for part in lines.values() for line in part) == sorted(
        map(str, refusals_of(tmp_path / "all"))
    )
    for number, part in enumerate(split):
        assert lines[part]
        for path in (line["path"] for line in lines[part]):
            key = path.removesuffix(".jpg").replace(" ", "-x20")
            assert part_of_key(key, split) == number
        assert {part_of_key(key, split) for key in rows_of(tmp_path / "out" / part)} == {number}


@pytest.mark.parametrize("reports", range(4))
def test_a_stopped_conversion_goes_on_if_the_tree_is_the_same(tree, tmp_path, reports):
    copy = tmp_path / "tree"
    shutil.copytree(tree, copy)
    given = {"name": "t", "shards": 4, "shuffle": True, "jobs": 1, "where": "width > 0"}
    shardkit.convert(f"tree:{copy}", tmp_path / "whole", **given)
    with pytest.raises(StopAfter.Stop):
        shardkit.convert(f"tree:{copy}", tmp_path / "out", progress=StopAfter(reports), **given)
    before = os.stat(copy / "b" / "00004.jpg")
    os.utime(copy / "b" / "00004.jpg", ns=(1, 1))
    with pytest.raises(ConfigError, match="sources were modified in the meantime"):
        shardkit.convert(f"tree:{copy}", tmp_path / "out", resume=True, **given)
    os.utime(copy / "b" / "00004.jpg", ns=(before.st_atime_ns, before.st_mtime_ns))
    result = shardkit.convert(f"tree:{copy}", tmp_path / "out", resume=True, **given)
    assert result.parts[None].kept == reports
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_files_that_vanish_or_lead_out_after_the_plan_are_refused(tree, tmp_path):
    copy = tmp_path / "tree"
    shutil.copytree(tree, copy)

    class Meddle(StopAfter):
        def begin(self, samples, source_bytes):
            (copy / "a" / "00000.jpg").unlink()
            (copy / "a" / "00003.jpg").unlink()
            (copy / "a" / "00003.jpg").symlink_to("/etc/passwd")

    shardkit.convert(f"tree:{copy}", tmp_path / "out", jobs=1, progress=Meddle(100))
    assert [(line["path"], line["reason"]) for line in refusals_of(tmp_path / "out")] == [
        ("a/00000.jpg", "missing"), ("a/00003.jpg", "outside-link"),
    ]  # fmt: skip


def test_a_link_out_of_the_tree_is_not_followed_for_its_facts(tree, tmp_path, monkeypatch):
    copy = tmp_path / "tree"
    shutil.copytree(tree, copy)
    scan, wide = trees_module.scan_tree, tmp_path / "wide.jpg"
    wide.write_bytes((copy / "a" / "00000.jpg").read_bytes())

    def swapped(*given):
        sources = scan(*given)
        (copy / "a" / "00000.jpg").unlink()
        (copy / "a" / "00000.jpg").symlink_to(wide)
        return sources

    monkeypatch.setattr(trees_module, "scan_tree", swapped)
    result = shardkit.convert(f"tree:{copy}", tmp_path / "out", where="width > 0", jobs=1)
    assert result.passed_over == {"by --where": 1}


def test_one_refusal_ends_the_run_where_it_shall(odd, tmp_path):
    with pytest.raises(SourceError, match="refused a source"):
        shardkit.convert(f"tree:{odd}", tmp_path / "out", on_error="fail")
    assert not (tmp_path / "out").exists()


def test_a_dry_run_says_what_would_come(odd, tmp_path):
    chosen = make_options(tmp_path / "out", {"shards": 3, "where": "width > 0"})
    plan = plan_conversion([f"tree:{odd}"], tmp_path / "out", chosen).parts[None]
    made = shardkit.convert(f"tree:{odd}", tmp_path / "out", shards=3, where="width > 0", jobs=1).manifests[None]
    assert list(plan.bytes) == [shard.bytes for shard in made.shards]
    assert plan.keys[0] == ("a/00000", "a/00000.jpg")


def test_two_files_with_one_key_and_a_tree_twice_are_named(tree, tmp_path):
    copy = tmp_path / "tree"
    shutil.copytree(tree, copy)
    shutil.copy(copy / "a" / "00003.jpg", copy / "a" / "00003.jpeg")
    with pytest.raises(ConfigError, match=r"one key.*a/00003.jpeg and a/00003.jpg.*rename one"):
        shardkit.convert(f"tree:{copy}", tmp_path / "out")
    with pytest.raises(ConfigError, match="named twice"):
        shardkit.convert([f"tree:{tree}"] * 2, tmp_path / "out")
    shardkit.convert([f"tree:{tree}"] * 2, tmp_path / "out", key="index", jobs=1)
    assert order_of(tmp_path / "out") == [f"{n:09d}" for n in range(60)]


def test_what_is_no_tree_says_so(tree, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "x.png").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"no JPEG in the folder.*1 \.png"):
        shardkit.convert(f"tree:{tmp_path / 'empty'}", tmp_path / "out")
    with pytest.raises(ConfigError, match="no such folder"):
        shardkit.convert(f"tree:{tmp_path / 'empty' / 'x.png'}", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"convert tree:DIR"):
        shardkit.convert(tree, tmp_path / "out")
    for option in ("image_column", "key_column", "label_column"):
        with pytest.raises(ConfigError, match="no input has columns"):
            shardkit.convert(f"tree:{tree}", tmp_path / "out", **{option: "x"})
    with pytest.raises(ConfigError, match="lie in one another"):
        shardkit.convert(f"tree:{tree}", tree / "out")
    assert sorted(os.listdir(tmp_path)) == ["empty"]


@pytest.mark.parametrize("system", ["xfs", "btrfs"])
def test_shards_share_blocks_with_files(folder_on, system):
    place = folder_on(system)
    sizes = (300, 4096, 60_000, 100_001)
    (place / "tree").mkdir()
    for number, size in enumerate(sizes):
        (place / "tree" / f"{number}.jpg").write_bytes(tiny_jpeg(number, size))
    for reflink in ("always", "auto", "never"):
        chosen = make_options(place / reflink, {"name": "n"})
        (part,) = run_conversion(
            [f"tree:{place / 'tree'}"], place / reflink, chosen, jobs=1, reflink=reflink
        ).parts.values()
        expected = sum(size // 4096 * 4096 for size in sizes) if reflink != "never" else 0
        assert part.shared_bytes == expected == sum(shared_bytes(path) for path in (place / reflink).glob("*.tar"))
    assert contents(place / "always") == contents(place / "auto") == contents(place / "never")


def test_ext4_refuses_always_before_anything_is_made(folder_on):
    place = folder_on("ext4")
    (place / "tree").mkdir()
    (place / "tree" / "x.jpg").write_bytes(tiny_jpeg(1, 9000))
    chosen = make_options(place / "out", {"name": "n"})
    with pytest.raises(CapabilityError, match="does not share blocks between files"):
        run_conversion([f"tree:{place / 'tree'}"], place / "out", chosen, jobs=1, reflink="always")
    assert not (place / "out").exists()
