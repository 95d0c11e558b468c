"""`--where`: what people write means what Python would mean by it, and nothing else has a meaning."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import ConfigError
from shardkit.format.class_names import class_numbers
from shardkit.format.expression import iter_masks
from shardkit.format.index import SCHEMA, SampleRow, sample_batch
from shardkit.format.where import MAX_WHERE_CHARACTERS, parse_where

KINDS = [(16, 24, 0), (255, 256, 2), (256, 255, 0), (4000, 3000, 2), (1, 1, 255)]


def row(number, label):
    width, height, sof = KINDS[number % len(KINDS)]
    return SampleRow(
        key=f"c/{number:03}", label=label, offset=4096 * (number + 1), size=300 + number, crc32c=2**32 - 1 - number,
        sample_offset=4096 * number, sample_size=4096, json_offset=0, json_size=0, width=width, height=height, sof=sof,
        components=3 if number % 2 else 1, subsampling=3, precision=8, scans=1, restart_interval=0, orientation=0,
        adobe_transform=-1 if number % 3 else 2, media_type=1, source=f"c/été {number}.jpg",
    )  # fmt: skip


ROWS = [row(number, number * 5 % 9) for number in range(40)]
UNLABELLED = [row(number, None if number % 2 else 7) for number in range(6)]


def chosen(text, rows=ROWS):
    masks = [mask for (mask,) in iter_masks([sample_batch(rows)], [parse_where(text)])]
    return np.flatnonzero(np.concatenate(masks)).tolist()


def meant(text, rows=ROWS):
    """The rows for which Python, given the columns as variables, calls the text true."""
    return [at for at, one in enumerate(rows) if eval(text, {"__builtins__": {}}, one._asdict())]


@pytest.mark.parametrize(
    "text",
    [
        "width >= 256 and label != 7",
        "width > height",
        "100 < width <= 256",
        "not (width == 16 or label in (1, 2, 3))",
        "label not in [1, 2]",
        "key in ('c/003', 'c/007', 'nothing')",
        "key >= 'c/020' and source != 'c/été 21.jpg'",
        "source == 'c/\u00e9t\u00e9 3.jpg'",
        "sof == 300 or components >= -1",
        "sof in (300, -1, 2.5, 2)",
        "adobe_transform == -1",
        "adobe_transform in (-1,)",
        "crc32c > 4294967270",
        "offset < 9223372036854775807",
        "width < 255.5",
        "label == 7.0",
        "sof < 1.5",
        " width == 16 ",
        "label is None or label is not None",
        '"c/010" == key',
        " or ".join(f"label == {number}" for number in range(2000)),
    ],
)
def test_a_condition_chooses_what_python_would_choose(text):
    assert chosen(text) == meant(text.strip())


_COLUMNS = ["width", "height", "label", "sof", "size", "adobe_transform", "components"]
_NUMBERS = st.integers(-3, 300) | st.sampled_from([0.5, 2**31, -(2**40), 255.0])
_ATOMS = st.one_of(
    st.builds("{} {} {}".format, st.sampled_from(_COLUMNS), st.sampled_from(["==", "!=", "<", "<=", ">", ">="]),
              _NUMBERS | st.sampled_from(_COLUMNS)),
    st.builds("{} {} {}".format, st.sampled_from(_COLUMNS), st.sampled_from(["in", "not in"]),
              st.lists(_NUMBERS, min_size=1, max_size=4)),
)  # fmt: skip
_CONDITIONS = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.builds("({} and {})".format, inner, inner),
        st.builds("({} or {})".format, inner, inner),
        st.builds("not ({})".format, inner),
    ),
    max_leaves=8,
)


@given(_CONDITIONS)
def test_any_condition_chooses_what_python_would_choose(text):
    assert chosen(text) == meant(text)


@pytest.mark.parametrize("text", ["label != 8", "label not in (8,)", "label in (7,)", "label == 7", "not label == 8"])
def test_a_sample_without_label_fulfils_no_comparison_of_labels(text):
    assert chosen(text, UNLABELLED) == [0, 2, 4]


def test_a_label_that_is_not_there_can_be_asked_for():
    assert chosen("label is None", UNLABELLED) == [1, 3, 5]


@pytest.mark.parametrize("text", ["colour == 1", "width > 1 and colour in (1, 2)", "colour is None"])
def test_an_unknown_column_is_refused_with_the_list_of_columns(text):
    with pytest.raises(ConfigError, match=r"names a column that is not there.*found colour") as caught:
        parse_where(text)
    assert caught.value.exit_code == 2
    assert all(name in str(caught.value) for name in SCHEMA.names)


@pytest.mark.parametrize(
    "text",
    [
        "", "width", "width >=", "width = 3", "1", "1 == 1", "width == 'a'", "key > 3", "key in (1,)", "width in 'ab'",
        "width in ()", "width in key", "__import__('os').system('touch /tmp/x')", "width.real == 1", "width[0] == 1",
        "width + 1 == 2", "width if 1 else 2", "lambda: 1", "[x for x in key]", "f'{key}' == 'a'", "key == b'a'",
        "width == True", "width == None", "width is 3", "-key == 'a'", "key == -'a'", "~width == 1", "width := 3",
        "width == 1; 2", "width == 1e999", "width == 99999999999999999999", "width == 1j", "key == '\\ud800'",
        "width == 1\nor 1", "\0", "(" * 5000 + "width" + ")" * 5000, "not " * 60 + "width == 1",
        "width == " + "9" * 6000, "not " * 24_000 + "width", "-" * 99_000 + "1", "1" + "+1" * 49_000,
        "a" + ".b" * 49_000, "width" + "<1" * 49_000 + "<'a'",
    ],
)  # fmt: skip
def test_what_is_no_condition_is_refused(text):
    with pytest.raises(ConfigError) as caught:
        parse_where(text)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("text", ["label == 'amber'", "'amber' != label", "label in ('amber', 'ash')"])
def test_a_class_name_in_the_place_of_a_number_is_told_where_names_are(text):
    with pytest.raises(ConfigError, match=r"label is the class's number; .*class == 'NAME'.*inspect") as caught:
        parse_where(text)
    assert len(str(caught.value)) < 250


CLASSES = ["ash", "my class", "bay", "élan", "class", "fir", "yew", "oak", "elm"]


def of_classes(text, rows=ROWS, classes=CLASSES):
    condition = parse_where(text, number_of=class_numbers(classes, "ds"))
    return np.flatnonzero(np.concatenate([mask for (mask,) in iter_masks([sample_batch(rows)], [condition])])).tolist()


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ('class == "oak"', "label == 7"),
        ("'oak' == class", "label == 7"),
        ("class != 'élan' and width > 16", "label != 3 and width > 16"),
        ("class in ('oak', 'ash', 'oak')", "label in (7, 0)"),
        ("class not in ['my class', 'class']", "label not in [1, 4]"),
        ("not (class == 'class' or key == 'class')", "not (label == 4 or key == 'class')"),
        ("(key == 'é' or\n class == 'élan')", "label == 3"),
        ("(label < 3 or\r\n class == 'fir')", "label < 3 or label == 5"),
        ("'''class''' == class", "label == 4"),
        ("class is not None", "label is not None"),
    ],
)
def test_classes_are_asked_for_by_name(text, labels):
    assert of_classes(text) == meant(labels)


def test_a_sample_without_label_has_no_class():
    assert of_classes("class is None", UNLABELLED) == [1, 3, 5]
    assert of_classes("class != 'ash'", UNLABELLED) == [0, 2, 4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class == 'oka'", r"no class oka: ds; expected one of 9 names; did you mean oak\?"),
        ("class in ('oak', 'Yew')", r"no class Yew.*did you mean yew\?"),
        ("class == '\x1b'", r"no class \\x1b.*shardkit inspect"),
        ("class == 7", "compares class with something else than a 'name'.*found 7"),
        ("class in ('oak', 7)", "something else than a 'name'.*found 7"),
        ("class == key", "something else than a 'name'.*found key"),
        ("class == None", "something else than a 'name'.*found None"),
        ("class < 'oak'", "an order of classes.*found class"),
        ("class", "is no condition.*found class"),
        ("class in 'oak'", "something else than a list of values.*found 'oak'"),
        ("class in ()", "something else than a list of values"),
        ("'oak' in class", "something else than a list of values.*found class"),
        ("width = class", "cannot be read"),
        ("class(1) == 'oak'", "is no condition|wants a column"),
    ],
)
def test_what_no_class_can_be_asked_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        of_classes(text)


def test_without_class_names_a_condition_on_them_is_refused():
    with pytest.raises(ConfigError, match="the dataset has no class names: ds; found class oak; name classes by"):
        of_classes("class == 'oak'", classes=None)
    with pytest.raises(ConfigError, match="no class names"):
        parse_where("class == 'oak'")


_PIECES = ["class", "'oak'", "==", "\r", "\n", "(", ")", "in", "é", "\f", "'''", "#", "\\\n"]


@given(st.lists(st.sampled_from(_PIECES)).map(" ".join))
def test_no_text_with_class_in_it_raises_anything_else(text):
    with contextlib.suppress(ConfigError):
        of_classes(text)


def test_other_columns_of_another_kind_are_named():
    with pytest.raises(ConfigError, match=r"compares a text with a number; expected a text for key; found 3; e.g. "):
        parse_where("key > 3")


def test_an_endless_text_is_refused_before_it_is_parsed():
    with pytest.raises(ConfigError, match="too long"):
        parse_where("width == 1 or " * (MAX_WHERE_CHARACTERS // 10))


@given(st.text(max_size=40))
def test_no_text_raises_anything_else(text):
    with contextlib.suppress(ConfigError):
        parse_where(text)


def test_an_odd_escape_warns_nobody():
    assert chosen(r"key == '\d'") == []
