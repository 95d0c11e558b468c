"""Which samples are taken, under which label, key and part."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkit
from shardkit.converting import gather
from shardkit.converting.labels import read_labels
from shardkit.converting.options import ConvertOptions, parse_split
from shardkit.converting.run import make_options, plan_conversion
from shardkit.converting.selection import part_of_key
from shardkit.errors import ConfigError, SourceError
from shardkit.extracting.run import extract
from shardkit.packing.options import ShardOptions
from shardkit.running import sorted_numbers, spool
from shardkit.testing.datasets import tiny_jpeg
from shardkit.testing.packs import StopAfter, contents, snapshot

from .conftest import members_of, order_of, refusals_of, rows_of, whole

# --- options


@pytest.mark.parametrize(
    ("option", "good", "bad"),
    [
        ("key", ["keep", "shard", "index"], ["stem", None]),
        ("other_members", ["refuse", "drop"], ["keep", None]),
        ("where", [None, "width > 1"], [1, b"x"]),
        ("split", [None, {"a": "0.5", "b": "0.5"}, {"a": "0.125", "b": "0.875"},
          {"a": 0.9, "b": 0.1}, {"a": Decimal("9E-1"), "b": "0.1"}, {"a": 1e-7, "b": Decimal("0.9999999")}],
         [{}, {"a": "1"}, {"a": "0.5", "b": "0.4"}, {"a": True, "b": "0.5"}, {"a": 1, "b": 1}, {"A": "0.5", "b": "0.5"},
          {"a": "0", "b": "1"},
          {"..": "0.5", "b": "0.5"}, {"a": "-1", "b": "2"}, {"a": "nan", "b": "1"}, "a=1",
          {"a": float("nan"), "b": 0.5}, {"a": float("inf"), "b": 0.5}, {"a": -0.5, "b": 1.5}, {"a": 0.0, "b": "1"},
          {"a": Decimal("sNaN"), "b": 0.5}, {"a": Decimal("1e-999999"), "b": 0.5}, {"a": 0.1, "b": 0.2, "c": 0.3},
          {"a": 10**400, "b": 0.5}, {"a": None, "b": 0.5}]),
    ],
)  # fmt: skip
def test_an_option_takes_what_it_takes_and_refuses_the_rest(option, good, bad):
    for value in good:
        ConvertOptions(**{"name": "t", option: value})
    for value in bad:
        with pytest.raises(ConfigError) as caught:
            ConvertOptions(**{"name": "t", option: value})
        assert str(caught.value).isprintable()


def test_what_pack_checks_is_checked():
    with pytest.raises(ConfigError, match="quality"):
        ConvertOptions(name="t", quality=0)
    assert issubclass(ConvertOptions, ShardOptions)
    assert not ConvertOptions(name="t").shuffle
    with pytest.raises(ConfigError, match="unexpected keyword argument 'colour'"):
        shardkit.convert("x", "y", colour=1)
    with pytest.raises(ConfigError, match="part"):
        shardkit.convert("x", "y", part="a")


def test_a_split_is_written_as_names_and_shares():
    assert parse_split("train=0.98, val=0.02") == {"train": "0.98", "val": "0.02"}
    for text in ("train", "a=0.5,a=0.5", "", "a=0.5;b=0.5"):
        with pytest.raises(ConfigError):
            ConvertOptions(name="t", split=parse_split(text))


def test_shares_as_numbers_are_the_decimals_that_they_print_as():
    texts = ConvertOptions(name="t", split={"a": "0.9", "b": "0.09999", "c": "0.00001"})
    numbers = ConvertOptions(name="t", split={"a": 0.9, "b": Decimal("0.09999"), "c": 1e-05})
    assert numbers.recorded() == texts.recorded()
    assert numbers == texts


# --- split


SPLIT = {"train": "0.7", "val": "0.2", "test": "0.1"}


def test_the_parts_of_a_split_are_datasets_that_share_no_sample(packed, tmp_path):
    result = shardkit.convert(packed, tmp_path / "out", name="t", split=SPLIT, jobs=1)
    keys = [set(rows_of(tmp_path / "out" / part)) for part in SPLIT]
    assert set.union(*keys) == set(rows_of(packed))
    assert sum(map(len, keys)) == 30
    for part in SPLIT:
        assert whole(tmp_path / "out" / part)
        manifest = result.manifests[part]
        assert (manifest.name, manifest.options["part"], manifest.options["split"]) == (f"t-{part}", part, SPLIT)
        assert {part_of_key(key, SPLIT) for key in rows_of(tmp_path / "out" / part)} == {list(SPLIT).index(part)}
        assert [shard.name.startswith(f"t-{part}-0") for shard in manifest.shards] == [True]


def test_a_sample_stays_in_its_part_whatever_is_added_or_changed(packed, tmp_path):
    split = {"train": "0.6", "val": "0.4"}

    def parts(inputs, number, **options):
        shardkit.convert(inputs, tmp_path / str(number), split=split, jobs=1, **options)
        return {key: part for part in split for key in rows_of(tmp_path / str(number) / part)}

    few = parts(packed, 0, where="label != 1")
    many = parts(packed, 1, shuffle=True, seed=9, shards=1)
    assert len(few) == 20
    assert many == {**many, **few}


def test_the_parts_of_known_keys_never_change():
    """Frozen: another hash would move samples between the parts of data that people have."""
    found = [part_of_key(f"n01440764/n01440764_{number}", SPLIT) for number in range(24)]
    assert found == FROZEN


FROZEN = [0, 0, 0, 0, 0, 1, 0, 1, 0, 2, 0, 1, 0, 2, 0, 1, 0, 0, 0, 0, 0, 0, 2, 0]


@given(st.text(min_size=1, max_size=30), st.integers(1, 99))
def test_a_larger_share_only_takes_samples_in(key, share):
    def part(hundredths):
        return part_of_key(key, {"a": f"0.{hundredths:02d}", "b": f"{1 - hundredths / 100:.2f}"})

    assert part(share) >= part(99)
    assert share == 1 or part(share) <= part(share - 1)


def test_shares_are_kept_to_within_chance():
    parts = [part_of_key(f"key/{number}", SPLIT) for number in range(20_000)]
    for number, share in enumerate(SPLIT.values()):
        assert abs(parts.count(number) / 20_000 - float(share)) < 0.012


def test_an_empty_part_is_an_error_before_anything_is_written(packed, tmp_path):
    with pytest.raises(ConfigError, match="no sample falls into the part tiny"):
        shardkit.convert(packed, tmp_path / "out", split={"all": "0.9999", "tiny": "0.0001"}, jobs=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("split", [{"train": "0.5", "val": "0.5"}, None])
@pytest.mark.parametrize("finished", [True, False])
def test_nothing_is_written_beside_a_part_of_another_split(packed, tmp_path, split, finished):
    three = {"train": "0.5", "val": "0.3", "test": "0.2"}
    shardkit.convert(packed, tmp_path / "out", split=three, jobs=1)
    if not finished:
        shutil.rmtree(tmp_path / "out" / "test")
        with pytest.raises(StopAfter.Stop):
            shardkit.convert(packed, tmp_path / "out", split=three, jobs=1, overwrite=True, progress=StopAfter(0))
        assert not (tmp_path / "out" / "test" / "manifest.json").exists()
    before = snapshot(tmp_path / "out")
    with pytest.raises(ConfigError, match="a part of another split"):
        shardkit.convert(packed, tmp_path / "out", split=split, jobs=1, overwrite=True)
    assert snapshot(tmp_path / "out") == before
    shardkit.convert(packed, tmp_path / "out", split=three, jobs=1, overwrite=True)


@pytest.mark.parametrize("rule", ["keep", "shard"])
def test_a_refused_sample_is_told_where_it_would_have_been(write_tar, tmp_path, rule):
    split = {"a": "0.5", "b": "0.5"}
    names = [f"{n:03d}" for n in range(19)] + ["no-utf8-\udcff"]
    for name, label in (("good/x.tar", b"1"), ("bad/x.tar", b"x")):
        other = [(f"other-{n}.jpg", tiny_jpeg()) for n in range(9)]
        write_tar(name, [*other, *(m for k in names for m in ((f"{k}.cls", label), (f"{k}.jpg", tiny_jpeg())))])
        shardkit.convert(tmp_path / name, tmp_path / "out" / name[:-6], split=split, key=rule, jobs=1, name="n")
    for part in split:
        kept = {row["source"] for row in rows_of(tmp_path / "out" / "good" / part).values()}
        left = {line["path"] + ".jpg" for line in refusals_of(tmp_path / "out" / "bad" / part)}
        assert left == {source for source in kept if "other" not in source}


# --- where


def test_conditions_choose_samples_as_ls_does(packed, tmp_path):
    result = shardkit.convert(packed, tmp_path / "out", where="label in (0, 2) and size >= 800", jobs=1)
    expected = {key for key, row in rows_of(packed).items() if row["label"] != 1 and row["size"] >= 800}
    assert set(rows_of(tmp_path / "out")) == expected != set()
    assert result.passed_over == {"by --where": 30 - len(expected)}
    with pytest.raises(ConfigError, match=r"no sample to convert.*30 left out by --where"):
        shardkit.convert(packed, tmp_path / "none", where="width > 100000", jobs=1)


def test_a_class_is_what_each_input_calls_so(packed, tree, write_tar, sample, tmp_path):
    for number, name in enumerate(("b/x.jpg", "d/y.jpg")):  # b is 0 here, and 1 in the other input
        (tmp_path / "more" / name).parent.mkdir(parents=True)
        (tmp_path / "more" / name).write_bytes((tree / "a" / f"{3 * number:05d}.jpg").read_bytes())
    both, options = [packed, f"tree:{tmp_path / 'more'}"], {"labels": list("abcd"), "jobs": 1}
    shardkit.convert(both, tmp_path / "out", where="class == 'b'", **options)
    assert set(rows_of(tmp_path / "out")) == {"b/x", *(key for key in rows_of(packed) if key.startswith("b/"))}
    with pytest.raises(ConfigError, match=r"no class a: tree:.*more; expected one of 2 names"):
        shardkit.convert(both, tmp_path / "none", where="class in ('a', 'b')", **options)
    tar = write_tar("x.tar", sample(1, label=1))
    with pytest.raises(ConfigError, match=r"the dataset has no class names: .*x\.tar; found class b"):
        shardkit.convert(tar, tmp_path / "none", where="class == 'b'", jobs=1)


def test_tars_without_an_index_are_asked_only_what_headers_tell(write_tar, sample, tmp_path, packed):
    write_tar("x.tar", [m for n in range(6) for m in sample(n, label=n)])
    shardkit.convert(tmp_path / "x.tar", tmp_path / "out", where="label > 2 and key != '000004'", jobs=1)
    assert order_of(tmp_path / "out") == ["000003", "000005"]
    for whole_image in ("scans", "crc32c"):
        where = f"{whole_image} > 0 and label == 1"
        with pytest.raises(ConfigError, match=rf"found {whole_image}; .*shardkit index"):
            shardkit.convert([packed, tmp_path / "x.tar"], tmp_path / "no", where=where, jobs=1)
    with pytest.raises(ConfigError, match="names a column that is not there"):
        shardkit.convert(tmp_path / "x.tar", tmp_path / "no", where="__import__ == 1", jobs=1)


def test_an_index_of_foreign_tars_answers_every_condition_and_knows_their_members(write_tar, sample, tmp_path):
    members = [
        m for n in range(6) for m in [*sample(n, label=n % 3, metadata=b'{"n": %d}' % n), (f"{n:06d}.txt", b"x")]
    ]
    tar = write_tar("in/a.tar", members)
    shardkit.index([tar], out=tmp_path / "index")
    with pytest.raises(ConfigError, match=r"6 \.txt"):
        shardkit.convert(tmp_path / "index", tmp_path / "out", jobs=1)
    given = {"where": "width > 0 and label != 1", "other_members": "drop", "jobs": 1}
    result = shardkit.convert(tmp_path / "index", tmp_path / "out", **given)
    assert result.passed_over == {"by --where": 2, ".txt members": 4}  # of those that are wanted
    kept = {name: data for name, data in members if name[5] in "0235" and not name.endswith("txt")}
    assert members_of(tmp_path / "out") == kept
    assert whole(tmp_path / "out")
    with tar.open("r+b") as file:  # of the same size: only the checksum tells
        file.seek(rows_of(tmp_path / "index")["000003"]["offset"] + 30)
        file.write(b"\x55")
    shardkit.convert(tmp_path / "index", tmp_path / "damaged", **given)
    assert [line["reason"] for line in refusals_of(tmp_path / "damaged")] == ["damaged"]


@pytest.mark.parametrize(
    ("facts", "good", "bad", "needed"),
    [
        ("header", "width > 0 and sof == 0", "crc32c", "full"),
        ("header", "sample_size > 0", "scans", "full"),
        ("none", "label < 3", "width", "header"),
        ("none", "label < 3", "scans", "full"),
    ],
)
def test_a_column_that_an_index_left_empty_chooses_nothing(write_tar, sample, tmp_path, facts, good, bad, needed):
    tar = write_tar("in/a.tar", [m for n in range(3) for m in sample(n, label=n)])
    shardkit.index([tar], out=tmp_path / "index", facts=facts)
    with pytest.raises(ConfigError, match=rf"the condition asks .*found {bad}; .*--facts {needed}, --overwrite"):
        shardkit.convert(tmp_path / "index", tmp_path / "out", where=f"{bad} == 0", jobs=1)
    shardkit.convert(tmp_path / "index", tmp_path / "out", where=good, jobs=1)
    assert len(order_of(tmp_path / "out")) == 3


# --- labels


def labels_of(folder):
    return {key: row["label"] for key, row in rows_of(folder).items()}


def test_a_list_of_class_names_renumbers_by_name(listed, tmp_path):
    result = shardkit.convert(listed, tmp_path / "out", labels=["c", "x", "a", "b"], jobs=1)
    new = {0: 2, 1: 3, 2: 0}
    assert labels_of(tmp_path / "out") == {key: new[label] for key, label in labels_of(listed).items()}
    assert result.manifests[None].classes == ["c", "x", "a", "b"]
    before, after = members_of(listed), members_of(tmp_path / "out")
    assert all(after[name] == data for name, data in before.items() if not name.endswith(".cls"))
    assert whole(tmp_path / "out")


def test_a_mapping_merges_renames_and_leaves_out(listed, tmp_path):
    result = shardkit.convert(listed, tmp_path / "out", labels={"a": "pet", "b": None, "c": "pät \u4e2d"}, jobs=1)
    assert result.manifests[None].classes == ["pet", "pät \u4e2d"]
    assert result.passed_over == {"by --labels": 10}
    members = members_of(tmp_path / "out")
    before = members_of(listed)
    for name in members:
        if name.endswith(".json"):
            assert json.loads(members[name])["class"] == {"a": "pet", "c": "pät \u4e2d"}[name[0]]
            assert json.loads(members[name]) == {
                **json.loads(before[name]),
                "class": json.loads(members[name])["class"],
            }
    assert whole(tmp_path / "out")


def test_the_plan_knows_how_long_the_renamed_json_members_are(listed, tmp_path):
    from shardkit.converting.run import make_options, plan_conversion

    given = {"labels": {"a": "x" * 600, "b": "y", "c": "z" * 511}, "shards": 2, "align": 512}
    plan = plan_conversion([listed], tmp_path / "out", make_options(tmp_path / "out", given))
    made = shardkit.convert(listed, tmp_path / "out", jobs=1, **given).manifests[None]
    assert list(plan.parts[None].bytes) == [shard.bytes for shard in made.shards]


def test_numbers_of_tars_get_names(write_tar, sample, tmp_path):
    write_tar("x.tar", [m for n in range(4) for m in sample(n, label=n)])
    result = shardkit.convert(tmp_path / "x.tar", tmp_path / "out", labels=["p", "q", "r", "s"], jobs=1)
    assert labels_of(tmp_path / "out") == {f"{n:06d}": n for n in range(4)}
    assert result.manifests[None].classes == ["p", "q", "r", "s"]
    shardkit.convert(tmp_path / "x.tar", tmp_path / "num", labels={"0": 7, "1": 7, "2": None, "3": 0}, jobs=1)
    assert labels_of(tmp_path / "num") == {"000000": 7, "000001": 7, "000003": 0}
    for labels in (["p"], {"0": "p"}):
        with pytest.raises(ConfigError, match="says nothing about"):
            shardkit.convert(tmp_path / "x.tar", tmp_path / "no", labels=labels, jobs=1)


def test_a_number_in_the_file_is_a_name_where_classes_are_called_by_numbers(tree, tmp_path):
    for number, name in enumerate(("0", "1", "10", "2")):  # sorted as texts: class "2" has label 3, and "10" label 2
        (tmp_path / "src" / name).mkdir(parents=True)
        (tmp_path / "src" / name / "x.jpg").write_bytes((tree / "a" / f"{3 * number:05d}.jpg").read_bytes())
    shardkit.pack(tmp_path / "src", tmp_path / "in", jobs=1)
    labels = {"0": 5, "1": 6, "2": 7}
    with pytest.raises(ConfigError, match="says nothing about; found 10"):
        shardkit.convert(tmp_path / "in", tmp_path / "out", labels=labels, jobs=1)
    shardkit.convert(tmp_path / "in", tmp_path / "out", labels={**labels, "10": 8}, jobs=1)
    assert labels_of(tmp_path / "out") == {"0/x": 5, "1/x": 6, "2/x": 7, "10/x": 8}


def test_inputs_with_other_classes_are_joined_only_when_labels_say_how(packed, tree, tmp_path):
    (tmp_path / "more" / "b").mkdir(parents=True)
    (tmp_path / "more" / "d").mkdir()
    for number, name in enumerate(("b/x.jpg", "d/y.jpg")):
        (tmp_path / "more" / name).write_bytes((tree / "a" / f"{3 * number:05d}.jpg").read_bytes())
    shardkit.pack(tmp_path / "more", tmp_path / "m", jobs=1)
    with pytest.raises(ConfigError, match="do not have the same classes"):
        shardkit.convert([packed, tmp_path / "m"], tmp_path / "out", jobs=1)
    shardkit.convert([packed, tmp_path / "m"], tmp_path / "out", labels=list("abcd"), jobs=1)
    labels = labels_of(tmp_path / "out")
    assert (labels["b/x"], labels["d/y"], len(labels)) == (1, 3, 32)
    assert whole(tmp_path / "out")


def test_a_file_of_labels_is_lines_or_a_json_object(tmp_path):
    path = tmp_path / "labels"
    path.write_text("cat\nsea lion\n")
    assert read_labels(str(path)) == ["cat", "sea lion"]
    path.write_text(' {"cat": "animal", "7": null}')
    assert read_labels(str(path)) == {"cat": "animal", "7": None}
    path.write_text('{"a": 1, "a": 2}')
    with pytest.raises(ConfigError, match="no JSON object"):
        read_labels(str(path))


@pytest.mark.parametrize("labels", [{}, {"a": None}, {"a": "x", "b": 1}, {"a": -1}, {"a": True}, {"a": 1.5}, {"a": ""},
                                    [], ["a", "a"], ["a", ""], "ab", 5, {1: "a"}])  # fmt: skip
def test_labels_that_are_none(packed, tmp_path, labels):
    with pytest.raises(ConfigError):
        shardkit.convert(packed, tmp_path / "out", labels=labels, jobs=1)
    assert not (tmp_path / "out").exists()


# --- keys


def test_two_samples_of_one_key_are_an_error_that_key_rules_solve(write_tar, sample, tmp_path):
    for name in ("one", "two"):
        write_tar(f"{name}.tar", sample(1, label=0))
    tars = [tmp_path / "one.tar", tmp_path / "two.tar"]
    with pytest.raises(ConfigError, match=r"two samples have one key: \[sample 000001\]; .*one\.tar and two\.tar"):
        shardkit.convert(tars, tmp_path / "out", jobs=1)
    shardkit.convert(tars, tmp_path / "shard", key="shard", jobs=1)
    assert order_of(tmp_path / "shard") == ["one/000001", "two/000001"]
    shardkit.convert(tars, tmp_path / "index", key="index", jobs=1)
    assert order_of(tmp_path / "index") == ["000000000", "000000001"]
    shardkit.convert(tars, tmp_path / "where", where="source == 'one.tar/000001.jpg'", jobs=1)
    assert order_of(tmp_path / "where") == ["000001"]


def test_against_two_samples_of_one_key_only_what_parts_them_is_offered(write_tar, sample, tmp_path):
    def offered(*inputs, **options):
        with pytest.raises(ConfigError, match="two samples have one key") as caught:
            shardkit.convert(inputs, tmp_path / "out", jobs=1, **options)
        return caught.value.remedy

    one, other = write_tar("one.tar", sample(1, label=0)), write_tar("other.tar", sample(1, label=0))
    (tmp_path / "far").mkdir()
    same = write_tar("far/one.tar", sample(1, label=0))
    assert offered(one, other) == "give --key shard or --key index"
    assert offered(one, same) == "give --key index"
    twins = write_tar("twins.tar", [("a.jpg", tiny_jpeg(0)), ("./a.jpg", tiny_jpeg(1))])
    assert offered(twins) == "give --key index"
    pq.write_table(pa.table({"image": [tiny_jpeg(0), tiny_jpeg(1)], "k": ["x", "x"]}), tmp_path / "t.parquet")
    table = f"hf:{tmp_path / 't.parquet'}"
    assert offered(table, key_column="k") == "give --key index or another --key-column, or none"
    assert offered(table, key_column="k", key="shard") == "give --key index or another --key-column, or none"


def test_nothing_left_is_wrong_usage_unless_something_was_refused(write_tar, sample, tmp_path):
    tar = write_tar("x.tar", [m for n in range(8) for m in sample(n, label=0)])
    cases = [
        ({"max_bytes": 1}, SourceError),
        ({"max_pixels": 1}, SourceError),
        ({"max_bytes": 1, "split": {"a": "0.5", "b": "0.5"}}, SourceError),
        ({"max_pixels": 1, "split": {"a": "0.5", "b": "0.5"}}, SourceError),
        ({"where": "size > 100000"}, ConfigError),
        ({"where": "size > 100000", "split": {"a": "0.5", "b": "0.5"}}, ConfigError),
        ({"split": {"a": "0.000001", "b": "0.999999"}}, ConfigError),
    ]
    for options, expected in cases:
        with pytest.raises((SourceError, ConfigError)) as caught:
            shardkit.convert(tar, tmp_path / "out", jobs=1, overwrite=True, **options)
        assert type(caught.value) is expected, options
        if expected is SourceError and "max_bytes" in options:
            with pytest.raises(SourceError):
                plan_conversion([tar], tmp_path / "out", make_options(tmp_path / "out", options))


def test_keys_that_not_every_reader_takes_are_made_safe(write_tar, tmp_path):
    from shardkit.testing.datasets import tiny_jpeg

    names = ["a b", "é/x", "-x41", "x" * 120, "ok/k-1", "v1.2/k"]
    write_tar("x.tar", [(f"{name}.jpg", tiny_jpeg(n)) for n, name in enumerate(names)])
    shardkit.convert(tmp_path / "x.tar", tmp_path / "out", jobs=1)
    keys = order_of(tmp_path / "out")
    assert keys[:3] == ["a-x20b", "-xC3-xA9/x", "-x41"]
    assert len(keys[3]) == 95
    assert keys[4:] == ["ok/k-1", "v1-x2E2/k"]
    assert whole(tmp_path / "out")
    shardkit.convert(tmp_path / "out", tmp_path / "again", jobs=1)
    assert order_of(tmp_path / "again") == keys


def test_a_leading_here_is_no_part_of_a_key(write_tar, tmp_path):
    folders = ["./", "././", "./a/", "..a/", "a./"]
    write_tar("x.tar", [(f"{folder}{n}.jpg", tiny_jpeg(n)) for n, folder in enumerate(folders)])
    for rule, expected in (("keep", ["0", "1", "a/2", "-x2E-x2Ea/3", "a-x2E/4"]), ("shard", None)):
        shardkit.convert(tmp_path / "x.tar", tmp_path / rule, key=rule, jobs=1)
        assert order_of(tmp_path / rule) == (expected or [f"x/{key}" for key in order_of(tmp_path / "keep")])
        assert whole(tmp_path / rule)
    assert extract(tmp_path / "keep", tmp_path / "files").renamed == 0
    assert (tmp_path / "files" / "x.tar" / "a" / "2.jpg").read_bytes() == tiny_jpeg(2)
    write_tar("twins.tar", [("a.jpg", tiny_jpeg(0)), ("./a.jpg", tiny_jpeg(1))])
    with pytest.raises(ConfigError, match=r"two samples have one key: \[sample a\]"):
        shardkit.convert(tmp_path / "twins.tar", tmp_path / "twins", jobs=1)


# --- memory


@pytest.mark.parametrize(
    "options",
    [{"shuffle": True, "seed": 5}, {"where": "size != 807 and label != 1"},
     {"labels": {"a": "x", "b": None, "c": "yy"}}, {"split": {"u": "0.6", "v": "0.4"}, "shuffle": True},
     {"max_bytes": 1100, "on_error": "skip", "shard_samples": 4}],
    ids=lambda options: "-".join(options),
)  # fmt: skip
def test_a_conversion_is_the_same_however_few_samples_are_looked_at_at_a_time(
    packed, write_tar, sample, tmp_path, monkeypatch, options
):
    """The tar has neither names of classes nor checksums, and members without a place."""
    members = [
        member for n in range(40, 60) for member in [*sample(n, label=n % 3), (f"{n:06d}.txt", b"t")][: 2 + n % 2]
    ]
    inputs = [packed, write_tar("x.tar", members)]
    options = {"labels": ["a", "b", "c"], "key": "shard", "other_members": "drop", "name": "t", **options}
    if isinstance(options["labels"], dict):
        options["labels"] |= {"0": "x", "1": None, "2": "yy"}
    whole = shardkit.convert(inputs, tmp_path / "whole", jobs=1, **options)
    for module, name, value in (
        (gather, "_ROWS", 3), (spool, "_SPAN", 5), (spool, "_HELD_BYTES", 16), (sorted_numbers, "_SORTED_BYTES", 32),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    made = shardkit.convert(inputs, tmp_path / "made", jobs=1, **options)
    assert made.passed_over == whole.passed_over
    assert made.passed_over[".txt members"] > 0
    assert contents(tmp_path / "made") == contents(tmp_path / "whole")
    with pytest.raises(ConfigError, match=r"one input is named twice: .*; name it once"):
        shardkit.convert([*inputs, packed], tmp_path / "twice", jobs=1, **options)


MEASURE = """
import os, re, sys, threading, time
import numpy as np, pyarrow as pa
import shardkit.running.sorted_numbers, shardkit.running.spool
from shardkit.converting.gather import Gathered, InputShard
from shardkit.converting.options import ConvertOptions
from shardkit.converting.selection import select
from shardkit.converting.supply import MemberSupply, plan_part
from shardkit.format.checksum import new_digest
from shardkit.format.index import SCHEMA
count, folder = int(sys.argv[1]), sys.argv[2]
shards = count // 4000
for s in range(shards):
    n = count // shards
    columns = []
    for field in SCHEMA:
        if field.name in ("key", "source"):
            columns.append(pa.array([f"n{i % 1000:08d}/n{i % 1000:08d}_{s * n + i}" for i in range(n)]))
        elif field.name == "label":
            columns.append(pa.array([0] * n, pa.int32()))
        else:
            columns.append(pa.array(np.full(n, 100), field.type))
    with pa.OSFile(f"{folder}/{s}.arrow", "wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
    del columns
# As with columns a thousand times as long.
shardkit.running.spool._HELD_BYTES = shardkit.running.spool._SPAN = 16 << 10
shardkit.running.sorted_numbers._SORTED_BYTES = 32 << 10
pa.default_memory_pool().release_unused()
peak, done = 0, threading.Event()

def anonymous():
    return int(re.search(r"RssAnon:\\s*([0-9]+) kB", open("/proc/self/status").read())[1])

def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, anonymous())

before, watcher, started = anonymous(), threading.Thread(target=watch), time.process_time()
watcher.start()
batches = [pa.ipc.open_file(pa.memory_map(f"{folder}/{s}.arrow")).get_batch(0) for s in range(shards)]
inputs = [
    InputShard(path=b"/in/%d.tar" % s, bytes=1, mtime_ns=1, rows=batch, classes=None, checked=True)
    for s, batch in enumerate(batches)
]
samples = Gathered(inputs, [], frozenset(), {}, os.fsencode(folder))
options = ConvertOptions(name="t", shards=shards, shuffle=True)
selection = select(samples, options)
plan = plan_part(samples, selection, None, options)
supply = MemberSupply(samples, selection, None, "keep")
digests = new_digest("xxh3-128"), new_digest("xxh3-128")
with pa.OSFile(f"{folder}/plan.arrow", "wb") as file, pa.ipc.new_file(file, supply.schema) as writer:
    for batch in supply.batches(plan):
        writer.write_batch(batch)
        supply.update_identity(batch, *digests)
done.set()
watcher.join()
print((peak - before) * 1024, time.process_time() - started)
"""


def test_a_shuffle_over_all_inputs_takes_no_more_memory_for_more_samples(tmp_path):
    """Beyond the pages of maps, of the index and of spooled numbers, which the kernel takes back when it needs them."""
    few, many, found = 40_000, 240_000, []
    for count in (few, many):
        (tmp_path / str(count)).mkdir()
        command = [sys.executable, "-c", MEASURE, str(count), str(tmp_path / str(count))]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peak, seconds = map(float, done.stdout.split())
        found.append(peak)
    assert (found[1] - found[0]) / (many - few) < 16
    assert seconds / many < 50e-6
