"""Any cut and any flipped byte, with the old indexes and without: what is untouched comes back, byte for byte."""

from __future__ import annotations

import dataclasses
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.errors import UnsupportedVersionError
from shardkit.extent import align_up
from shardkit.format.checksum import hex_digest
from shardkit.format.manifest import dump_manifest, load_manifest
from shardkit.testing.damage import append, cut, flip_byte, punch_hole, zero_page
from shardkit.testing.datasets import Draft, DraftSample, draft_shard, tiny_jpeg

SHARD = "tiny-000000.tar"
CALM = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
MASKS = st.sampled_from([1, 2, 0x10, 0x80, 0xFF])


def kept_of(whole, samples, keys):
    """The samples of `keys` are there and right; no other one is there with bytes that it never had."""
    assert {key: samples.get(key) for key in keys} == {key: whole.samples[key] for key in keys}
    for key, (label, _, image) in samples.items():
        assert (label, image) == (whole.samples[key][0], whole.samples[key][2])


@CALM
@given(data=st.data())
def test_a_flipped_byte_anywhere_in_the_dataset_costs_no_other_sample(whole, repaired, tmp_path, data):
    name = data.draw(st.sampled_from(sorted(whole.files)))
    at = data.draw(st.integers(0, len(whole.files[name]) - 1))
    folder = whole.copy(tmp_path / "damaged")
    flip_byte(folder / name, at, data.draw(MASKS))
    result, samples = repaired(folder)
    untouched = whole.untouched(name, at, at + 1)
    kept_of(whole, samples, untouched)
    assert result.lost == len(whole.samples) - len(samples)
    if len(samples) == len(whole.samples) and name != "rejected.jsonl":
        assert result.exit_code == (3 if any(s.proof == "json-damaged" for s in result.shards) else 0)
    else:
        assert result.exit_code == 3


@CALM
@given(data=st.data())
def test_a_flipped_byte_in_a_shard_without_indexes_costs_no_other_sample(whole, repaired, tmp_path, data):
    at = data.draw(st.integers(0, len(whole.files[SHARD]) - 1))
    folder = whole.copy(tmp_path / "damaged", indexes=False)
    flip_byte(folder / SHARD, at, data.draw(MASKS))
    _, samples = repaired(folder)
    untouched = whole.untouched(SHARD, at, at + 1)
    assert {key: samples.get(key) for key in untouched} == {key: whole.samples[key] for key in untouched}
    assert samples.keys() <= whole.samples.keys()


@pytest.mark.parametrize("at", [0, 1, -1, -2, 300])
def test_a_wrong_byte_in_an_image_costs_that_image(whole, repaired, tmp_path, at):
    for key, (shard, start, end) in whole.places.items():
        image = whole.samples[key][2]
        place = whole.files[shard].index(image, start, end) + at % len(image)
        folder = whole.copy(tmp_path / "damaged")
        flip_byte(folder / shard, place)
        result, samples = repaired(folder)
        assert samples == {other: sample for other, sample in whole.samples.items() if other != key}
        assert [(lost.key, lost.shard, lost.offset, lost.reason) for lost in result.first] == [
            (key, shard, start, "payload")
        ]


def test_a_row_finds_its_sample_behind_a_damaged_one_without_a_single_header(whole, repaired, tmp_path):
    folder = whole.copy(tmp_path / "damaged")
    _, start, end = whole.places["c/0001"]
    with open(folder / SHARD, "r+b") as file:
        os.pwrite(file.fileno(), bytes(end - start), start)
        _, start, end = whole.places["c/0002"]
        for at in range(start, end, 512):
            if whole.files[SHARD][at + 257 : at + 262] == b"ustar":
                os.pwrite(file.fileno(), bytes(512), at)
    result, samples = repaired(folder)
    assert samples == {key: sample for key, sample in whole.samples.items() if key != "c/0001"}
    assert result.counts == {"payload": 1}


def test_a_hole_over_many_samples_is_told_whole_without_indexes(make_whole, repaired, tmp_path):
    whole = make_whole((20,))
    folder = whole.copy(tmp_path / "damaged", indexes=False)
    (_, start, _), (_, _, end) = whole.places["c/0005"], whole.places["c/0014"]
    hole = whole.files[SHARD].index(whole.samples["c/0005"][2]) + 100  # of the first one the headers stay
    with open(folder / SHARD, "r+b") as file:
        os.pwrite(file.fileno(), bytes(end - hole), hole)
    result, samples = repaired(folder)
    assert samples.keys() == {f"c/{number:04}" for number in (*range(5), *range(15, 20))}
    first, gap = result.first
    assert (first.key, first.offset) == ("c/0005", start)
    assert (gap.key, gap.offset) == (None, whole.places["c/0006"][1])
    assert gap.detail.startswith(f"{end - gap.offset} bytes ")


@pytest.mark.parametrize("size", [3000, 60_000])
@pytest.mark.parametrize("back", [1, 512, 1700, 2900])
def test_a_sample_that_is_cut_off_is_listed_once(make_whole, repaired, tmp_path, size, back):
    whole = make_whole((5,), sizes=(3000, 3000, 3000, 3000, size))
    folder = whole.copy(tmp_path / "damaged", indexes=False)
    cut(folder / SHARD, whole.files[SHARD].index(whole.samples["c/0004"][2]) + size - back)
    result, samples = repaired(folder)
    assert len(samples) == 4
    assert [(lost.key, lost.offset, lost.reason) for lost in result.first] == [
        ("c/0004", whole.places["c/0004"][1], "truncated")
    ]


def test_a_gap_begins_where_the_sample_named_before_it_may_end(make_whole, repaired, tmp_path):
    whole = make_whole((20,))
    folder = whole.copy(tmp_path / "damaged", indexes=False)
    start, end = whole.places["c/0005"][1], whole.places["c/0014"][2]
    with open(folder / SHARD, "r+b") as file:
        os.pwrite(file.fileno(), bytes(end - start - 1024), start + 1024)  # the label's header stays
    result, _ = repaired(folder)
    first, gap = result.first
    longest = max(whole.places[f"c/{n:04}"][2] - whole.places[f"c/{n:04}"][1] for n in range(5))
    assert (first.key, first.offset, gap.key, gap.offset) == ("c/0005", start, None, start + 2 * longest)
    assert gap.detail.startswith(f"{end - gap.offset} bytes ")


def test_a_named_loss_hides_no_gap_behind_the_next_whole_sample(make_whole, repaired, tmp_path):
    whole = make_whole((7,), sizes=(60_000, 500, 500, 500, 500, 500, 500))
    folder = whole.copy(tmp_path / "damaged", indexes=False)
    with open(folder / SHARD, "r+b") as file:
        os.pwrite(file.fileno(), bytes(512), whole.files[SHARD].index(b"c/0003.jpg\0"))
        _, start, end = whole.places["c/0005"]
        os.pwrite(file.fileno(), bytes(end - start), start)
    result, samples = repaired(folder)
    assert len(samples) == 5
    assert [(lost.key, lost.offset) for lost in result.first] == [("c/0003", whole.places["c/0003"][1]), (None, start)]


def test_a_label_that_is_wiped_out_takes_its_sample_along(repaired, tmp_path):
    """Where the json member states no class, the rest would be a whole sample without a label."""
    drafts = [
        DraftSample(key=f"k{i}", jpeg=tiny_jpeg(0), label=i, metadata={"source": f"k{i}.jpg"}, source=f"k{i}.jpg")
        for i in range(3)
    ]
    draft = Draft(name="tiny", align=4096, classes=None, shards=[draft_shard(SHARD, drafts, 4096)])
    folder = draft.write(tmp_path / "damaged")
    for path in folder.iterdir():
        if path.suffix != ".tar":
            path.unlink()
    start = draft.shards[0].rows[1].sample_offset
    with open(folder / SHARD, "r+b") as file:
        os.pwrite(file.fileno(), bytes(1024), start)
    result, samples = repaired(folder)
    assert [(key, label) for key, (label, _, _) in samples.items()] == [("k0", 0), ("k2", 2)]
    assert [(lost.key, lost.reason) for lost in result.first] == [("k1", "headers")]


@pytest.mark.parametrize("indexes", [True, False])
@CALM
@given(data=st.data())
def test_a_cut_anywhere_keeps_what_was_before_it(whole, repaired, tmp_path, indexes, data):
    size = len(whole.files[SHARD])
    edges = [edge for shard, *ends in whole.places.values() if shard == SHARD for edge in ends]
    at = data.draw(st.one_of(st.integers(0, size - 1), st.sampled_from(edges).flatmap(
        lambda edge: st.integers(max(edge - 520, 0), min(edge + 520, size - 1))
    )))  # fmt: skip
    folder = whole.copy(tmp_path / "damaged", indexes=indexes)
    cut(folder / SHARD, at)
    result, samples = repaired(folder)
    kept_of(whole, samples, whole.untouched(SHARD, at, size))
    assert result.shards[1].samples == 3
    first = result.shards[0]
    assert result.exit_code == (4 if not first.samples else 3 if first.samples < 4 and first.lost else 0)


@pytest.mark.parametrize("indexes", [True, False])
@pytest.mark.parametrize("page", range(6))
@pytest.mark.parametrize("damage", [zero_page, punch_hole])
def test_a_page_of_zeros_costs_only_the_samples_in_it(make_whole, repaired, tmp_path, page, damage, indexes):
    whole = make_whole((4, 3), sizes=(3000, 5000, 9000))
    folder = whole.copy(tmp_path / "damaged", indexes=indexes)
    try:
        damage(folder / SHARD, page)
    except OSError as error:
        pytest.skip(str(error))
    _, samples = repaired(folder)
    kept_of(whole, samples, whole.untouched(SHARD, page * 4096, page * 4096 + 4096))


@pytest.mark.parametrize("indexes", [True, False])
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("align", [512, 4096, 65536])
def test_every_header_in_turn_is_wiped(make_whole, repaired, tmp_path, align, labels, indexes):
    whole = make_whole((3,), align=align, labels=labels)
    blocks = [
        at for at in range(0, len(whole.files[SHARD]), 512) if whole.files[SHARD][at + 257 : at + 262] == b"ustar"
    ]
    for at in blocks:
        folder = whole.copy(tmp_path / "damaged", indexes=indexes)
        with open(folder / SHARD, "r+b") as file:
            os.pwrite(file.fileno(), bytes(512), at)
        result, samples = repaired(folder)
        kept_of(whole, samples, whole.untouched(SHARD, at, at + 512))
        if indexes:  # a header says nothing that its row does not
            assert (result.exit_code, result.shards[0].proof) == (0, "digest")
            assert samples == whole.samples


@pytest.mark.parametrize("at", [4608, 8704])
@pytest.mark.parametrize("missing", [512, 4096])
@pytest.mark.parametrize("indexes", [True, False])
def test_blocks_that_vanished_from_the_middle_cost_only_what_lay_there(whole, repaired, tmp_path, at, missing, indexes):
    folder = whole.copy(tmp_path / "damaged", indexes=indexes)
    data = whole.files[SHARD]
    (folder / SHARD).write_bytes(data[:at] + data[at + missing :])
    _, samples = repaired(folder)
    kept_of(whole, samples, whole.untouched(SHARD, at, at + missing))


def test_what_was_appended_is_left_out_and_the_shard_proved(whole, repaired, tmp_path):
    folder = whole.copy(tmp_path / "damaged")
    append(folder / SHARD, b"rubbish" * 10_000)
    result, samples = repaired(folder)
    assert samples == whole.samples
    assert (result.exit_code, result.shards[0].proof, result.shards[0].state) == (0, "digest", "salvaged")


def test_a_repaired_shard_is_read_by_webdataset(whole, repaired, tmp_path):
    tariterators = pytest.importorskip("webdataset.tariterators")
    folder = whole.copy(tmp_path / "damaged")
    flip_byte(folder / SHARD, 4200, 0xFF)
    cut(folder / "tiny-000001.tar", align_up(9000, 512))
    _, samples = repaired(folder)
    read = {}
    for path in (tmp_path / "repaired").glob("*.tar"):
        with open(path, "rb") as stream:
            for one in tariterators.group_by_keys(
                tariterators.tar_file_expander([{"url": str(path), "stream": stream}])
            ):
                read[one["__key__"]] = (int(one["cls"]), one["json"], one["jpg"])
    assert read == samples
    assert len(read) == 5


def make_newer(path):
    """Flip one bit of the version that an index states: 1 becomes 9."""
    flip_byte(path, path.read_bytes().rindex(b"\x01\0\0\x001\0") + 4, ord("1") ^ ord("9"))


INDEXES = ["tiny-000001.arrow", "index.arrow"]


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_the_manifest_proves_damaged_is_not_of_a_newer_format(whole, repaired, tmp_path, name):
    folder = whole.copy(tmp_path / "damaged")
    make_newer(folder / name)
    result, samples = repaired(folder)
    assert (result.exit_code, samples) == (0, whole.samples)
    assert {path.name: path.read_bytes() for path in (tmp_path / "repaired").iterdir()} == whole.files


@pytest.mark.parametrize("manifest", ["proves it", "is gone"])
@pytest.mark.parametrize("name", INDEXES)
def test_an_index_of_a_newer_format_is_named_where_nothing_says_it_is_damaged(whole, tmp_path, name, manifest):
    folder = whole.copy(tmp_path / "damaged")
    make_newer(folder / name)
    if manifest == "is gone":
        (folder / "manifest.json").unlink()
    else:
        old = load_manifest(whole.files["manifest.json"])
        digest = hex_digest(old.digest_algorithm, (folder / name).read_bytes())
        first, second = old.shards
        if name == "index.arrow":
            new = dataclasses.replace(old, index=dataclasses.replace(old.index, digest=digest))
        else:
            second = dataclasses.replace(second, index=dataclasses.replace(second.index, digest=digest))
            new = dataclasses.replace(old, shards=[first, second])
        (folder / "manifest.json").write_text(dump_manifest(new))
    with pytest.raises(UnsupportedVersionError, match="an index of a newer format") as caught:
        shardkit.repair(folder, out=tmp_path / "out")
    assert caught.value.path == os.fsencode(folder / name)
