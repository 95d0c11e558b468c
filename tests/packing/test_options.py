"""Options are checked once, before anything is touched, and recorded as they are."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from shardkit.errors import ConfigError
from shardkit.packing.options import PackOptions


def test_the_defaults_are_those_of_the_documentation():
    assert PackOptions(name="t").recorded() == {
        "name": "t", "shard_size": 1 << 30, "shard_samples": None, "shards": None, "labels": None, "key": "relpath",
        "align": 4096, "shuffle": True, "seed": 0, "check": "header", "max_pixels": 178_956_970, "max_bytes": 1 << 27,
        "on_error": "skip", "convert": False, "resize": None, "quality": 90, "follow_symlinks": False,
        "digest": "xxh3-128",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("option", "good", "bad"),
    [
        ("name", ["a", "0", "a-b_c", "x" * 64],
         ["", "A", "-a", "_a", "a.b", "a/b", "x" * 65, "\u00e9", "a\n", b"a", None]),
        ("shard_size", [1, 1 << 62], [0, -1, "1GiB", 1.5, True]),
        ("shard_samples", [1, None], [0, -1, 2.0]),
        ("shards", [1, None], [0, -1]),
        ("labels", [None, "dir", "column", "none"], ["", "Dir", 0, "\x1b"]),
        ("key", ["relpath", "stem", "index"], ["path", None]),
        ("align", [512, 4096, 524288], [0, 511, 513, 1 << 20, None, "4096", 4096.0]),
        ("shuffle", [True, False], [0, 1, None, "no"]),
        ("seed", [0, 2**64 - 1], [-1, 2**64, None, "0", 0.5]),
        ("check", ["header", "decode", "none"], ["full", None, False]),
        ("max_pixels", [1, 1 << 40], [0, None]),
        ("max_bytes", [1, (1 << 32) - 1], [0, 1 << 32, None]),
        ("on_error", ["skip", "fail"], ["raise", None]),
        ("convert", [True], ["png", None]),
        ("baseline", [True, False], ["yes", 1, None]),
        ("resize", [1, 256, None], [0, -1, 1.5, True]),
        ("quality", [1, 100], [0, 101, None, 90.0]),
        ("follow_symlinks", [True], [1]),
        ("digest", ["xxh3-128", "sha256"], ["md5", None]),
        ("classes", [None, ("a",), ["b", "a"]], [(), "ab", ("a", "a"), (1,), ("",), ("a", None), 5]),
    ],
)  # fmt: skip
def test_an_option_takes_what_it_takes_and_refuses_the_rest_by_name(option, good, bad):
    for value in good:
        PackOptions(**{"name": "t", option: value})
    for value in bad:
        with pytest.raises(ConfigError, match=option.replace("classes", "class")) as caught:
            PackOptions(**{"name": "t", option: value})
        assert str(caught.value).isprintable()
        assert caught.value.exit_code == 2


def test_every_option_is_tested_above():
    marks = test_an_option_takes_what_it_takes_and_refuses_the_rest_by_name.pytestmark
    tested = {row[0] for row in marks[0].args[1]}
    assert tested == {field.name for field in dataclasses.fields(PackOptions)}


def test_whole_numbers_of_numpy_are_recorded_as_json():
    options = PackOptions(name="t", seed=np.int64(3), shards=np.uint8(2), quality=np.int32(80))
    assert json.loads(json.dumps(options.recorded()))["seed"] == 3
    assert options == PackOptions(name="t", seed=3, shards=2, quality=80)


def test_one_limit_at_a_time_and_at_least_one():
    with pytest.raises(ConfigError, match="give one of --shard-size, --shard-samples and --shards"):
        PackOptions(name="t", shards=1, shard_samples=1)
    with pytest.raises(ConfigError, match="give one of --shard-size, --shard-samples and --shards"):
        PackOptions(name="t", shard_size=None)


def test_a_class_list_needs_labels():
    with pytest.raises(ConfigError, match="a class list needs labels"):
        PackOptions(name="t", classes=("a",), labels="none")


def test_a_class_that_stands_twice_is_named():
    with pytest.raises(ConfigError, match=r"found c\\x1bat$"):
        PackOptions(name="t", classes=("dog", "c\x1bat", "c\x1bat"))


def test_the_class_list_is_kept_in_its_order_and_not_among_the_options():
    options = PackOptions(name="t", classes=["b", "a"])
    assert options.classes == ("b", "a")
    assert "classes" not in options.recorded()
