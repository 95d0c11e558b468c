"""Selections: the rows that plain Python finds, and a clear refusal of everything that selects nothing."""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardkit.dataset.selection import digest, select
from shardkit.dataset.shardset import open_dataset
from shardkit.errors import ConfigError, IndexFormatError
from shardkit.format import expression
from shardkit.format.expression import is_in, iter_masks
from shardkit.format.index import SCHEMA
from shardkit.format.where import parse_where
from shardkit.testing.datasets import draft_dataset

COUNTS = (3, 1, 5, 2, 30)
TOTAL = sum(COUNTS)
CLASSES = ("Ant", "ant lion", "bee", "tabby cat", "tiger cat", "dog", "7", "emu", "fox", "gnu", "hen", "ibex")


def without_addresses(value):
    """A name that is the same in every process: those that share the tests compare them."""
    return None if callable(value) else str(value)


def odd_draft():
    """Samples of many widths, some without a label."""
    draft = draft_dataset(COUNTS)
    draft.classes = CLASSES
    number = 0
    for shard in draft.shards:
        for at, row in enumerate(shard.rows):
            label = None if number % 9 == 4 else number % 7
            shard.rows[at] = row._replace(width=number * 37 % 100, label=label)
            number += 1
    return draft


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    with open_dataset(odd_draft().write(tmp_path_factory.mktemp("selection") / "ds")) as opened:
        yield opened


def rows_where(dataset, wanted):
    columns = {name: list(dataset.columns[name][:]) for name in ("width", "label", "key", "height", "size")}
    return [row for row in range(len(dataset)) if wanted({name: values[row] for name, values in columns.items()})]


def test_no_condition_and_a_condition_that_all_fulfil_select_every_sample(dataset):
    assert select(dataset) is None
    assert select(dataset, where=pc.field("width") >= 0) is None
    assert select(dataset, keys=dataset.columns["key"][:]) is None


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        (pc.field("width") >= 50, lambda s: s["width"] >= 50),
        (pc.field("width") * 2 < pc.field("height") * 5, lambda s: s["width"] * 2 < s["height"] * 5),
        ((pc.field("width") > 20) & ~(pc.field("label") == 3), lambda s: s["width"] > 20 and s["label"] not in (3, -1)),
        (pc.field("label") == 2, lambda s: s["label"] == 2),
        (pc.field("label").is_null(), lambda s: s["label"] == -1),
        (pc.field("label") != 2, lambda s: s["label"] not in (2, -1)),
        (pc.match_substring(pc.field("key"), "3"), lambda s: "3" in s["key"]),
        (pc.field(9) >= 50, lambda s: s["width"] >= 50),
        (pc.field("key") == "c/0005", lambda s: s["key"] == "c/0005"),
        (pc.field("size").isin([401, 700]), lambda s: s["size"] in (401, 700)),
        (pc.is_valid(pc.field("key")) & (pc.field("width") < 9), lambda s: s["width"] < 9),
    ],
    ids=without_addresses,
)
def test_where_selects_what_python_selects_and_no_null(dataset, where, wanted):
    found = select(dataset, where=where)
    assert found.dtype == np.int64
    assert found.tolist() == rows_where(dataset, wanted)


@pytest.mark.parametrize(
    ("labels", "numbers"),
    [
        ([2], {2}),
        ([5, 0, 5], {0, 5}),
        (["bee"], {2}),
        (["tiger cat", 0], {0, 4}),
        (["7"], {6}),
        (np.array([1, 2]), {1, 2}),
        ({1, 2}, {1, 2}),
        ([11, 3], {3}),
    ],
    ids=str,
)
def test_labels_are_numbers_or_names(dataset, labels, numbers):
    assert select(dataset, labels=labels).tolist() == rows_where(dataset, lambda s: s["label"] in numbers)


def test_keys_are_found_in_stored_order_whatever_order_they_come_in(dataset):
    wanted = [40, 0, 8, 9, 3, 11]
    keys = [dataset.columns["key"][row] for row in wanted]
    assert select(dataset, keys=keys).tolist() == sorted(wanted)
    assert select(dataset, keys=iter(keys)).tolist() == sorted(wanted)


@given(st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_conditions_combine_by_and(dataset, data):
    labels = data.draw(st.none() | st.sets(st.integers(0, 11)))
    width = data.draw(st.none() | st.integers(0, 100))
    chosen = data.draw(st.none() | st.sets(st.integers(0, TOTAL - 1)))
    keys = None if chosen is None else [f"c/{row:04}" for row in chosen]
    where = None if width is None else pc.field("width") < width

    def wanted(s):
        return (
            (labels is None or s["label"] in labels)
            and (width is None or s["width"] < width)
            and (keys is None or s["key"] in keys)
        )

    expected = rows_where(dataset, wanted)
    if not expected:
        with pytest.raises(ConfigError, match="no sample"):
            select(dataset, labels=labels, where=where, keys=keys)
    else:
        found = select(dataset, labels=labels, where=where, keys=keys)
        assert (list(range(TOTAL)) if found is None else found.tolist()) == expected


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({"labels": []}, "labels leaves no sample"),
        ({"labels": [11], "where": pc.field("width") >= 0}, "labels leaves no sample.*0 for labels, 41 for where"),
        ({"where": pc.field("width") > 1000}, "where leaves no sample.*expected some of 41 samples"),
        ({"keys": []}, "keys leaves no sample"),
        ({"where": pc.field("width") > 1000, "keys": []}, "where and keys leaves no sample"),
        ({"where": pc.scalar(pa.scalar(None, pa.bool_()))}, "where leaves no sample"),
        (
            {"labels": [1], "keys": ["c/0000", "c/0002"]},
            "no sample fulfils all conditions at once.*found 5 for labels, 2 for keys",
        ),
    ],
    ids=str,
)
def test_a_selection_of_nothing_says_which_condition_left_nothing(dataset, conditions, message):
    with pytest.raises(ConfigError, match=message):
        select(dataset, **conditions)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("width >= ", r"where cannot be read"),
        ("height ? 3", r"where cannot be read"),
        (lambda row: True, "found function"),
        (True, "found bool"),
        (pc.field("colour") > 1, r"expected one of key, label.*FieldRef\.Name\(colour\)"),
        (pc.field("width", "x") > 1, "expected one of key"),
        (pc.field("width"), "expected true or false for each sample; found uint32"),
        (pc.field("width") + 1, "found int64"),
        (pc.field("key"), "found string"),
        (pc.scalar(None), "found null"),
        (pc.field("width") > "a", "cannot be asked of the index; found Function"),
        (pc.field("key") > 1, "cannot be asked of the index"),
        (pc.scalar(100) / pc.field("width") > 1, "cannot be computed for every sample; found divide by zero"),
        (pc.field("key").cast(pa.int32()) > 1, "cannot be computed for every sample"),
    ],
    ids=without_addresses,
)
def test_what_is_no_condition_is_refused(dataset, where, message):
    with pytest.raises(ConfigError, match=message):
        select(dataset, where=where)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["tabby"], "did you mean tabby cat"),
        (["TIGER CAT"], r"did you mean tiger cat\?"),
        (["dig"], "did you mean dog"),
        (["zzzz"], r"no class zzzz.*one of 12 names; the names are in ds\.classes"),
        (["\x1b[31m"], r"no class \\x1b\[31m"),
        ([12], r"expected 0\.\.11; found 12"),
        ([-1], r"expected 0\.\.11; found -1"),
        ([2**40], "no such class"),
        ([True], "neither a number nor a name"),
        ([1.0], "neither a number nor a name"),
        ("dog", r"labels is a list; found 'dog'; write labels=\['dog'\]"),
        (3, r"write labels=\[3\]"),
    ],
    ids=str,
)
def test_labels_that_are_not_there_are_refused(dataset, labels, message):
    with pytest.raises(ConfigError, match=message):
        select(dataset, labels=labels)


def test_a_condition_asks_for_classes_by_name_as_labels_does(dataset):
    assert (
        select(dataset, where="class in ('dog', 'tabby cat')").tolist()
        == select(dataset, labels=["dog", "tabby cat"]).tolist()
    )
    with pytest.raises(ConfigError, match=r"no class dig: .*did you mean dog"):
        select(dataset, where="class == 'dig'")


def test_without_class_names_labels_are_numbers(tmp_path):
    draft = odd_draft()
    draft.classes = None
    with open_dataset(draft.write(tmp_path / "ds")) as nameless:
        assert select(nameless, labels=[2]).tolist() == rows_where(nameless, lambda s: s["label"] == 2)
        with pytest.raises(ConfigError, match=r"no class names.*; name classes by their numbers"):
            select(nameless, labels=["dog"])
        with pytest.raises(ConfigError, match="labels leaves no sample"):
            select(nameless, labels=[2**31 - 1])
        with pytest.raises(ConfigError, match="no such class"):
            select(nameless, labels=[2**31])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["c/0001", "c/9999"], "1 of 2 keys are not in the dataset.*found c/9999"),
        ([f"x{i}" for i in range(7)], "7 of 7 keys.*found x0, x1, x2, x3, x4 and 2 more"),
        (["c/0001", "c/0002", "c/0001"], "more than once.*found c/0001"),
        (["c/0001", "\udc80"], r"1 of 2 keys.*found \\x80"),
        (["c/0001", ""], "1 of 2 keys"),
        (["c/0001\0"], r"found c/0001\\x00"),
        (["c/0001", 2], r"a key is a text; found 2 \(int\)"),
        ("c/0001", r"write keys=\['c/0001'\]"),
    ],
    ids=str,
)
def test_keys_that_are_not_there_or_come_twice_are_refused(dataset, keys, message):
    with pytest.raises(ConfigError, match=message):
        select(dataset, keys=keys)


def test_an_unknown_key_is_named_even_where_another_condition_drops_the_rest(dataset):
    with pytest.raises(ConfigError, match=r"1 of 2 keys.*found nothing-like-it"):
        select(dataset, labels=[0], keys=["c/0001", "nothing-like-it"])


def test_damaged_texts_are_found_before_arrow_follows_them_and_only_when_asked_for(tmp_path):
    folder = odd_draft().write(tmp_path / "ds")
    path = folder / "index.arrow"
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("<6i", 0, 6, 12, 18, 24, 30)) + 8
    data[at : at + 4] = struct.pack("<i", 1 << 30)
    path.write_bytes(data)
    with open_dataset(folder) as damaged:
        assert select(damaged, where=pc.field("width") >= 50).size
        assert select(damaged, labels=[1]).size
        for conditions in (
            {"keys": ["c/0000"]},
            {"where": pc.match_substring(pc.field("key"), "0")},
            {"where": pc.field("source") == "a"},
            {"where": pc.field("width") >= 50, "keys": ["c/0000"]},
        ):
            with pytest.raises(IndexFormatError, match="batch 2"):
                select(damaged, **conditions)


@pytest.mark.parametrize("condition", [pc.field("width") > 3, is_in("key", ["c/0001", "c/0020"])])
def test_masks_come_in_bounded_runs_that_make_up_all_rows(dataset, condition, monkeypatch):
    batches = dataset.columns.batches
    runs = [masks[0] for masks in iter_masks(batches * 3, [condition])]
    assert [len(run) for run in runs] == list(COUNTS) * 3
    assert all(run.dtype == np.bool_ for run in runs)
    big = pa.RecordBatch.from_arrays(
        [pa.array(["x"] * 70_000 if field.type == pa.utf8() else np.zeros(70_000), field.type) for field in SCHEMA],
        schema=SCHEMA,
    )
    runs = [masks[0] for masks in iter_masks([big, big], [condition])]
    assert sum(map(len, runs)) == 140_000
    assert max(map(len, runs)) <= 32768


def test_texts_are_not_read_for_a_condition_on_numbers(dataset, monkeypatch):
    checked = []
    monkeypatch.setattr(expression, "check_rows", lambda rows, number: checked.append(number))
    select(dataset, where=pc.field("width") >= 50, labels=[1, 2])
    assert checked == []
    select(dataset, where=pc.field("key") != "c/0001")
    assert checked == [0, 1, 2, 3, 4]


# --- digest ----------------------------------------------------------------------------------------------------------


def test_the_digest_is_that_of_little_endian_int64():
    xxhash = pytest.importorskip("xxhash")
    rows = np.array([0, 5, 2**40], np.int64)
    expected = xxhash.xxh3_128_hexdigest(struct.pack("<3q", 0, 5, 2**40))
    assert digest(rows) == f"xxh3-128:{expected}"
    assert digest(rows.astype(">i8")) == digest(rows)
    assert digest(np.arange(20)[::2]) == digest(np.arange(0, 20, 2))


def test_other_selections_have_other_digests():
    found = {digest(rows) for rows in (None, np.arange(0), np.arange(1), np.arange(2), np.array([0, 2]))}
    assert len(found) == 5


@pytest.mark.parametrize("text", ["label == 3", "label in (1, 2) and size > 500", "key == 'c/0001'"])
def test_a_condition_may_be_a_text_as_on_the_command_line(dataset, text):
    assert select(dataset, where=text).tolist() == select(dataset, where=parse_where(text)).tolist()
