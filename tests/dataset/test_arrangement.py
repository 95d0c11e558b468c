"""What a loader iterates over: paths and weights, datasets and selections, orders."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest

from shardkit.dataset.arrangement import arrange, open_samples, split_weights
from shardkit.dataset.mixing import MixedOrder
from shardkit.dataset.order import GlobalOrder, StoredOrder
from shardkit.dataset.window import WindowOrder
from shardkit.errors import ConfigError, ShardkitError
from shardkit.testing.datasets import draft_dataset
from shardkit.testing.reading import open_descriptors

TOTAL = 9


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("arrangement")
    return [draft_dataset((4, 5), name=name, sizes=(1000,)).write(root / name) for name in ("a", "b")]


@pytest.fixture
def samples(folders):
    """A function that opens some of the folders; closed at the end."""
    opened = []

    def make(*numbers, **conditions):
        opened.append(open_samples([folders[number] for number in numbers], **conditions))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


# --- paths and weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["ds/", Path("ds")])
def test_a_single_path_has_no_weight(path):
    assert split_weights(path) == ([path], None)


@pytest.mark.parametrize("pairs", [[("a/", 0.7), (Path("b"), 3)], (("a/", 0.7), (Path("b"), np.float32(3)))])
def test_pairs_are_paths_and_weights(pairs):
    assert split_weights(pairs) == (["a/", Path("b")], [0.7, 3.0])


@pytest.mark.parametrize(
    "path", [None, 3, [], ["a/", "b/"], [("a/", "much")], [("a/", None)], [("a/", 0.5, 1)], [("a/",)], {"a/": 0.5}]
)
def test_what_is_neither_is_refused(path):
    with pytest.raises(ConfigError, match=r"\[\(path, weight\), \.\.\.\]"):
        split_weights(path)


# --- opening and selecting -------------------------------------------------------------------------------------------


def test_samples_are_those_of_all_datasets(samples, folders):
    both = samples(0, 1)
    assert len(both) == 2 * TOTAL
    assert [part.dataset.path for part in both.parts] == [str(folder) for folder in folders]
    assert [part.rows for part in both.parts] == [None, None]


@pytest.mark.parametrize("give", [list, tuple, set, iter, lambda values: (value for value in values)])
def test_a_selection_is_made_of_each_dataset(samples, give):
    chosen = samples(0, 1, labels=give([0, "class 5"]), keys=give([f"c/{number:04}" for number in range(3)]))
    assert [part.rows.tolist() for part in chosen.parts] == [[0, 1], [0, 1]]


def test_a_condition_is_applied_to_each_dataset(samples):
    chosen = samples(0, 1, where=pc.field("width") > 8)
    assert [part.rows.tolist() for part in chosen.parts] == [[1, 3, 5, 7]] * 2


@pytest.mark.parametrize("conditions", [{"labels": "class 5"}, {"keys": "c/0001"}, {"labels": 5}])
def test_a_lone_value_is_refused_as_such(samples, conditions):
    with pytest.raises(ConfigError, match="is a list"):
        samples(0, **conditions)


@pytest.mark.parametrize("conditions", [{}, {"keys": ["c/0001"]}, {"labels": [0], "where": pc.field("width") > 99}])
def test_an_error_leaves_no_descriptor_open(folders, tmp_path, conditions):
    paths = folders if "where" in conditions else [*folders, tmp_path / "missing"]
    before = open_descriptors()
    for _ in range(3):
        with pytest.raises(ShardkitError):
            open_samples(paths, **conditions)
    assert open_descriptors() == before


def test_datasets_of_a_failed_opening_are_closed(folders, tmp_path):
    with pytest.raises(ConfigError) as caught:
        open_samples([*folders, tmp_path])
    opened = next(entry.locals["opened"] for entry in caught.traceback if entry.name == "open_samples")
    assert [one.path for one in opened] == [str(folder) for folder in folders]
    for one in opened:
        with pytest.raises(ConfigError, match="is closed"):
            one[0]


# --- orders ----------------------------------------------------------------------------------------------------------


def order_of(samples, shuffle="global", **changes):
    given = {"seed": 3, "weights": None, "lanes": 2, "extent_bytes": 2500, "window_extents": 3}
    return arrange(samples, shuffle, **{**given, **changes})


def test_one_dataset_is_ordered_as_asked(samples):
    one = samples(0)
    assert order_of(one, "global") == GlobalOrder(TOTAL, 3)
    assert order_of(one, "none") == StoredOrder(TOTAL)
    assert order_of(one, "window") == WindowOrder(n=TOTAL, seed=3, lanes=2, extent_samples=2, window_extents=3)


@pytest.mark.parametrize(
    ("extent_bytes", "samples_of_one"), [(1, 1), (999, 1), (1000, 1), (2999, 2), (1 << 40, 1 << 40)]
)
def test_an_extent_has_about_as_many_samples_as_its_bytes(samples, extent_bytes, samples_of_one):
    order = order_of(samples(0), "window", extent_bytes=extent_bytes)
    assert order.extent_samples == max(samples_of_one if extent_bytes < 1 << 40 else extent_bytes // 1000, 1)


def test_a_selection_is_ordered_by_itself(samples):
    chosen = samples(0, keys=["c/0001", "c/0003", "c/0005"])
    assert order_of(chosen, "global").n == order_of(chosen, "window").n == 3


@pytest.mark.parametrize("shuffle", ["global", "none"])
def test_a_mix_takes_from_every_dataset_by_its_weight(samples, shuffle):
    order = order_of(samples(0, 1), shuffle, weights=[3.0, 1.0])
    assert isinstance(order, MixedOrder)
    assert (order.n, order.shares) == (2 * TOTAL, (768, 256))
    found = np.concatenate([order.at(epoch, np.arange(order.n)) for epoch in range(400)])
    assert 0.7 < np.mean(found < TOTAL) < 0.8
    assert set(found.tolist()) == set(range(2 * TOTAL))


def test_the_datasets_of_a_mix_are_not_shuffled_alike(samples):
    order = order_of(samples(0, 1), weights=[1.0, 1.0])
    first, second = [], []
    for epoch in range(4):
        drawn = order.at(epoch, np.arange(order.n))
        first.append(drawn[drawn < TOTAL].tolist()[:4])
        second.append((drawn[drawn >= TOTAL] - TOTAL).tolist()[:4])
    assert first != second


def test_a_mix_of_one_is_a_mix(samples):
    assert order_of(samples(0), weights=[0.2]).shares == (1024,)


def test_a_mix_is_not_shuffled_by_windows(samples):
    with pytest.raises(ConfigError, match=r"2 datasets and shuffle='window'"):
        order_of(samples(0, 1), "window", weights=[1.0, 1.0])


@pytest.mark.parametrize("shuffle", ["random", "", None, "Global"])
def test_a_shuffle_that_there_is_not_is_refused(samples, shuffle):
    with pytest.raises(ConfigError, match="global or window or none"):
        order_of(samples(0), shuffle)


@pytest.mark.parametrize(
    ("classes", "told"),
    [((None, ("a", "b")), None), ((("a", "b"), ("a", "b")), None), ((("a",), ("a", "b")), None),
     ((("a", "b"), ("a", "c")), r"label 1 is b in .*0 and c in .*1: the classes of a mix are not joined"),
     ((("a\n",), None, ("b",)), r"label 0 is a\\n in .*0 and b in .*2")],
)  # fmt: skip
def test_datasets_that_number_other_classes_alike_are_told(tmp_path, caplog, classes, told):
    for number, names in enumerate(classes):
        draft = draft_dataset((2,), labels=names is not None)
        if names is not None:
            draft = dataclasses.replace(draft, classes=names)
            draft.shards[0].rows[:] = [row._replace(label=0) for row in draft.shards[0].rows]
        draft.write(tmp_path / str(number))
    open_samples([tmp_path / str(number) for number in range(len(classes))]).close()
    assert (len(caplog.messages) == 1 and re.search(told, caplog.messages[0])) if told else caplog.messages == []
