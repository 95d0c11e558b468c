"""What is damaged, cut, changing or unreadable is refused, never taken over; what is whole beside it is kept."""

from __future__ import annotations

import errno
import itertools
import os

import pytest

import shardkit
from shardkit.converting import members as members_module
from shardkit.errors import IntegrityError, ManifestError, ShardkitError, SourceError, TarFormatError
from shardkit.testing.datasets import draft_dataset, tiny_jpeg
from shardkit.testing.packs import StopAfter

from .conftest import members_of, order_of, refusals_of, rows_of, shards_of, whole


def test_damage_is_refused_and_never_given_a_fresh_checksum(packed, tmp_path):
    shardkit.convert(packed, tmp_path / "in", name="t", jobs=1)
    key, row = next(iter(rows_of(tmp_path / "in").items()))
    with open(tmp_path / "in" / "t-000000.tar", "r+b") as file:
        file.seek(row["offset"] + row["size"] - 3)
        file.write(b"\x55")
    result = shardkit.convert(tmp_path / "in", tmp_path / "out", jobs=1, check="none")
    (line,) = refusals_of(tmp_path / "out")
    assert (line["path"], line["reason"]) == (f"t-000000.tar/{key}", "damaged")
    assert result.manifests[None].totals.samples == 29
    assert key not in rows_of(tmp_path / "out")
    with pytest.raises(SourceError, match="damaged"):
        shardkit.convert(tmp_path / "in", tmp_path / "fail", jobs=1, on_error="fail")


@pytest.fixture(params=["aligned", "foreign"])
def two_shards(request, packed, tmp_path):
    """A dataset of two shards in stored order, packed or indexed."""
    folder = tmp_path / "in"
    if request.param == "aligned":
        shardkit.convert(packed, folder, name="t", shards=2, jobs=1)
    else:
        shardkit.convert(packed, tmp_path / "tars", name="t", shards=2, jobs=1)
        shardkit.index(sorted((tmp_path / "tars").glob("*.tar")), out=folder, jobs=1)
    return folder


@pytest.mark.parametrize("lost", [0, 1, 4])
def test_what_is_whole_of_a_shard_that_was_cut_is_taken(two_shards, tmp_path, lost):
    images = members_of(two_shards)
    rows = rows_of(two_shards)
    first = order_of(two_shards)[: shardkit.open(two_shards).manifest.shards[0].samples]
    last = rows[first[-lost - 1]]
    os.truncate(os.path.realpath(two_shards / "t-000000.tar"), last["offset"] + last["size"])
    with pytest.raises(IntegrityError, match=r"another size.*--on-error skip takes what is whole of it"):
        shardkit.convert(two_shards, tmp_path / "out", jobs=1, on_error="fail")
    assert not (tmp_path / "out").exists()
    shardkit.convert(two_shards, tmp_path / "out", jobs=1)
    gone = first[len(first) - lost :]
    assert [(line["path"], line["reason"]) for line in refusals_of(tmp_path / "out")] == [
        ("t-000000.tar", "damaged-shard"), *((f"t-000000.tar/{key}", "damaged") for key in gone),
    ]  # fmt: skip
    assert members_of(tmp_path / "out") == {name: images[name] for name in images if name[:-4] not in gone}
    assert whole(tmp_path / "out")


def test_a_shard_of_another_size_is_held_to_its_checksums(two_shards, tmp_path):
    with open(two_shards / "t-000000.tar", "r+b") as file:
        file.seek(rows_of(two_shards)[order_of(two_shards)[1]]["offset"] + 30)
        file.write(b"\x55")
        file.seek(0, os.SEEK_END)
        file.write(b"more")
    shardkit.convert(two_shards, tmp_path / "out", jobs=1)
    assert [line["reason"] for line in refusals_of(tmp_path / "out")] == ["damaged-shard", "damaged"]
    assert order_of(tmp_path / "out") == [key for n, key in enumerate(order_of(two_shards)) if n != 1]


def test_nothing_is_taken_of_a_shard_of_another_size_without_checksums(write_tar, sample, tmp_path):
    tars = [write_tar(f"in/{t}.tar", [m for n in range(3) for m in sample(n + 3 * t, label=0)]) for t in range(2)]
    shardkit.index(tars, out=tmp_path / "index", facts="none", jobs=1)
    before = members_of(tmp_path / "index")
    os.truncate(tars[0], os.path.getsize(tars[0]) - 512)
    shardkit.convert(tmp_path / "index", tmp_path / "out", jobs=1)
    assert [(line["path"], line["reason"]) for line in refusals_of(tmp_path / "out")] == [("0.tar", "damaged-shard")]
    kept = {f"{n:06}" for n in range(3, 6)}
    assert members_of(tmp_path / "out") == {name: data for name, data in before.items() if name[:6] in kept}


@pytest.mark.parametrize("facts", ["none", "header"])
def test_a_tar_that_was_exchanged_for_one_of_its_size_is_not_taken(write_tar, tmp_path, facts):
    """Else each image would get another one's key and label, and a fresh checksum."""
    members = [[(f"{at}.jpg", tiny_jpeg(at).ljust(900, b"\0")), (f"{at}.cls", b"%d" % at)] for at in range(8)]
    tar, other = (
        write_tar(name, list(itertools.chain.from_iterable(some)))
        for name, some in (("a.tar", members), ("b.tar", members[::-1]))
    )
    shardkit.index(tar, out=tmp_path / "in", facts=facts, jobs=1)
    shardkit.convert(tmp_path / "in", tmp_path / "fine", jobs=1, check="none")
    assert os.path.getsize(tar) == os.path.getsize(other)
    os.replace(other, tar)
    with pytest.raises(IntegrityError, match=r"not the one that was indexed.*index --overwrite"):
        shardkit.convert(tmp_path / "in", tmp_path / "out", jobs=1, on_error="fail", check="none")
    with pytest.raises(SourceError, match="damaged-shard"):
        shardkit.convert(tmp_path / "in", tmp_path / "out", jobs=1, check="none")


def test_a_json_member_behind_the_end_of_its_shard_is_not_there(write_tar, sample, tmp_path):
    tar = write_tar("in/x.tar", [m for n in range(3) for m in sample(n, label=0, metadata=b'{"n": 1}')])
    shardkit.index([tar], out=tmp_path / "index", jobs=1)
    os.truncate(tar, rows_of(tmp_path / "index")["000002"]["json_offset"] + 3)
    shardkit.convert(tmp_path / "index", tmp_path / "out", jobs=1)
    assert [line["path"] for line in refusals_of(tmp_path / "out")] == ["x.tar", "x.tar/000002"]
    assert order_of(tmp_path / "out") == ["000000", "000001"]
    os.truncate(tar, 100)
    with pytest.raises(SourceError, match="every source was refused"):
        shardkit.convert(tmp_path / "index", tmp_path / "none", jobs=1)


def test_a_shard_that_changes_after_the_plan_is_refused_sample_by_sample(write_tar, sample, tmp_path):
    one = write_tar("in/one.tar", [m for n in range(3) for m in sample(n, label=0)])
    two = write_tar("in/two.tar", [m for n in range(3, 6) for m in sample(n, label=0)])

    class Meddle(StopAfter):
        def begin(self, samples, source_bytes):
            os.utime(two, ns=(1, 1))

    shardkit.convert([one, two], tmp_path / "out", jobs=1, progress=Meddle(100))
    assert [line["reason"] for line in refusals_of(tmp_path / "out")] == ["changed"] * 3
    assert order_of(tmp_path / "out") == ["000000", "000001", "000002"]


def test_a_shard_that_changes_while_it_is_read_is_refused_from_there_on(write_tar, sample, tmp_path, monkeypatch):
    tar = write_tar("x.tar", [m for n in range(4) for m in sample(n, label=0)])
    read, reads = members_module.MemberPicture._fill, []

    def watched(*given):
        reads.append(given)
        if len(reads) == 3:
            os.utime(tar, ns=(1, 1))
        return read(*given)

    monkeypatch.setattr(members_module.MemberPicture, "_fill", watched)
    shardkit.convert(tar, tmp_path / "out", jobs=1)
    assert [line["reason"] for line in refusals_of(tmp_path / "out")] == ["changed"] * 2
    assert order_of(tmp_path / "out") == ["000000", "000001"]


@pytest.mark.parametrize("cut", [512, 700, 5000])
def test_a_damaged_tar_is_refused_as_a_whole_or_ends_the_run(write_tar, sample, tmp_path, cut):
    good = write_tar("in/good.tar", sample(1, label=0))
    bad = write_tar("in/bad.tar", [m for n in range(2, 9) for m in sample(n, label=0)])
    os.truncate(bad, cut)
    if cut == 512:
        bad.write_bytes(b"not a tar" * 200)
    result = shardkit.convert([bad, good], tmp_path / "out", jobs=1)
    (line,) = refusals_of(tmp_path / "out")
    assert (line["path"], line["reason"]) == ("bad.tar", "damaged-shard")
    assert str(tmp_path) not in line["detail"]
    assert result.manifests[None].totals.samples == 1
    with pytest.raises(TarFormatError, match=r"bad\.tar"):
        shardkit.convert([bad, good], tmp_path / "fail", jobs=1, on_error="fail")
    assert not (tmp_path / "fail").exists()


def test_few_shards_are_open_at_a_time(write_tar, sample, tmp_path, monkeypatch):
    monkeypatch.setattr(members_module, "_OPEN_SHARDS", 2)
    for number in range(12):
        write_tar(f"in/{number:02d}.tar", [m for n in (number, number + 100) for m in sample(n, label=0)])
    opened, read = [], os.preadv

    def watched(fd, buffers, offset):
        links = (os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd"))
        opened.append(sum(link.startswith(str(tmp_path / "in")) for link in links))
        return read(fd, buffers, offset)

    monkeypatch.setattr(members_module.os, "preadv", watched)
    shardkit.convert(str(tmp_path / "in" / "*.tar"), tmp_path / "out", shuffle=True, jobs=1, shards=4)
    assert len(rows_of(tmp_path / "out")) == 24 <= len(opened)
    assert max(opened) == 2


def test_short_reads_are_put_together(packed, tmp_path, monkeypatch):
    read = os.preadv
    monkeypatch.setattr(members_module.os, "preadv", lambda fd, buffers, at: read(fd, [buffers[0][:7]], at))
    shardkit.convert(packed, tmp_path / "out", name="t", shards=4, jobs=1)
    assert shards_of(tmp_path / "out") == shards_of(packed)


def test_a_read_error_is_a_refusal_and_a_process_that_has_run_out_is_none(packed, tmp_path, monkeypatch):
    def failing(number):
        def preadv(fd, buffers, offset):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(members_module.os, "preadv", preadv)

    failing(errno.EIO)
    with pytest.raises(SourceError, match="30 unreadable"):
        shardkit.convert(packed, tmp_path / "out", jobs=1)
    failing(errno.ENOMEM)
    with pytest.raises(ShardkitError, match="cannot read a source"):
        shardkit.convert(packed, tmp_path / "more", jobs=1)


@pytest.mark.parametrize("target", ["out", "tree:out"])
def test_a_class_name_that_is_half_a_character_is_told(tmp_path, monkeypatch, target):
    draft = draft_dataset()
    draft.classes = (*draft.classes[:-1], "\ud800")
    folder = draft.write(tmp_path / "in")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ManifestError, match=r"a class name is no text: .*manifest.json; found \\ud800"):
        shardkit.convert_to("tree", folder, "out") if ":" in target else shardkit.convert(folder, target, jobs=1)
    assert os.listdir(tmp_path) == ["in"]
