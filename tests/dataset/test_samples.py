"""Several datasets and selections as one numbered collection: each sample is what its own dataset says."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardkit.dataset.samples import Part, Samples
from shardkit.dataset.shardset import open_dataset
from shardkit.errors import ConfigError, IntegrityError
from shardkit.format.index import SCHEMA
from shardkit.testing.datasets import draft_dataset
from shardkit.testing.steps import lines_run

SHARDS = ((3, 1, 5, 2), (4,), (2, 6))
NUMBERS = [name for name in SCHEMA.names if name not in ("key", "source")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("samples")
    sizes = ((401, 512, 700), (4096, 9001), (450, 3000))
    return [
        draft_dataset(counts, name=f"d{at}", sizes=sizes[at]).write(root / f"d{at}") for at, counts in enumerate(SHARDS)
    ]


@pytest.fixture(scope="module")
def datasets(folders):
    opened = [open_dataset(folder) for folder in folders]
    yield opened
    for dataset in opened:
        dataset.close()


def rows(*numbers):
    return np.array(numbers, np.int64)


def truth(samples):
    """(dataset, row) of every selected sample, one at a time."""
    return [
        (part.dataset, row)
        for part in samples.parts
        for row in (range(len(part.dataset)) if part.rows is None else part.rows.tolist())
    ]


@pytest.fixture(params=["one", "one selected", "three", "selected", "same twice", "one empty"])
def samples(request, datasets):
    a, b, c = datasets
    return Samples(
        {
            "one": [Part(a)],
            "one selected": [Part(a, rows(1, 3, 8, 10))],
            "three": [Part(a), Part(b), Part(c)],
            "selected": [Part(c, rows(0, 7)), Part(a), Part(b, rows(2))],
            "same twice": [Part(a, rows(0, 4)), Part(a, rows(4, 10))],
            "one empty": [Part(a), Part(b, rows()), Part(c)],
        }[request.param]
    )


def test_every_number_is_the_sample_of_its_own_dataset(samples):
    expected = truth(samples)
    numbers = np.random.default_rng(0).permutation(np.repeat(np.arange(len(samples)), 3))
    ids = samples.ids(numbers)
    found, keys = samples.locate(ids), samples.keys(ids)
    assert len(samples) == len(expected)
    assert [found.shard.dtype, found.offset.dtype, found.size.dtype, found.label.dtype] == [np.int32] + [np.int64] * 3
    for at, number in enumerate(numbers.tolist()):
        dataset, row = expected[number]
        own = dataset.locate([row])
        assert samples.shard_paths[found.shard[at]] == dataset.shard_paths[own.shard[0]]
        assert (found.offset[at], found.size[at], found.label[at]) == (own.offset[0], own.size[0], own.label[0])
        assert keys[at] == dataset.columns["key"][row]


@pytest.mark.parametrize("name", NUMBERS)
def test_gathered_values_are_those_of_the_columns(samples, name):
    found = samples.gather(name, samples.ids(np.arange(len(samples))))
    assert found.dtype == np.int64
    assert found.tolist() == [dataset.columns[name][row] for dataset, row in truth(samples)]


def test_an_id_counts_all_samples_of_the_datasets_before(samples):
    before, expected = 0, []
    for part in samples.parts:
        expected += [before + row for row in (range(len(part.dataset)) if part.rows is None else part.rows.tolist())]
        before += len(part.dataset)
    assert samples.ids(np.arange(len(samples))).tolist() == expected


def test_with_one_dataset_an_id_is_the_row_whatever_is_selected(datasets):
    selected = rows(2, 5, 6)
    assert Samples([Part(datasets[0], selected)]).ids(np.arange(3)).tolist() == selected.tolist()
    numbers = np.arange(11)
    assert Samples([Part(datasets[0])]).ids(numbers) is numbers


def test_parts_start_where_the_ones_before_end(samples):
    assert samples.starts.tolist() == [0, *np.cumsum([len(part) for part in samples.parts]).tolist()]


@pytest.mark.parametrize("name", ["size", "json_size"])
def test_chunks_of_sizes_are_those_of_the_selected_samples_in_order(samples, name):
    chunks = list(samples.size_chunks(name))
    assert np.concatenate(chunks).tolist() == [dataset.columns[name][row] for dataset, row in truth(samples)]


def test_a_large_selection_comes_in_pieces(datasets, monkeypatch):
    monkeypatch.setattr("shardkit.dataset.samples._ROWS_AT_ONCE", 4)
    samples = Samples([Part(datasets[0], rows(0, 1, 2, 3, 4, 8, 9, 10)), Part(datasets[1], rows(1))])
    assert [len(chunk) for chunk in samples.size_chunks("size")] == [4, 4, 1]


def test_total_payload_is_the_sum_of_the_selected_sizes(samples):
    expected = sum(dataset.columns["size"][row] for dataset, row in truth(samples))
    assert [samples.total_payload, samples.total_payload] == [expected, expected]


def test_nothing_asked_is_nothing_found(samples):
    none = samples.ids(rows())
    assert none.dtype == np.int64
    found = samples.locate(none)
    assert [len(found.shard), len(found.offset), len(found.size), len(found.label)] == [0, 0, 0, 0]
    assert samples.gather("size", none).tolist() == samples.keys(none) == []


@pytest.mark.parametrize("past", [-1, 0, 1 << 40])
def test_a_number_outside_is_an_index_error(samples, past):
    total = sum(len(part.dataset) for part in samples.parts)
    with pytest.raises(IndexError, match=f"of {len(samples)} samples"):
        samples.ids(rows(0, past if past < 0 else len(samples) + past))
    wrong = rows(0, past if past < 0 else total + past)
    for call in (samples.locate, samples.keys, lambda ids: samples.gather("size", ids)):
        with pytest.raises(IndexError, match=f"of {total} samples"):
            call(wrong)


def test_columns_that_are_not_there_or_hold_texts_are_refused(samples):
    with pytest.raises(KeyError):
        samples.gather("colour", rows(0))
    with pytest.raises(TypeError, match="texts"):
        samples.gather("key", rows(0))


@given(st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_selections_of_any_datasets_are_numbered_through(datasets, data):
    parts = []
    for at in data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4)):
        total = len(datasets[at])
        chosen = data.draw(st.none() | st.sets(st.integers(0, total - 1)))
        parts.append(Part(datasets[at], None if chosen is None else rows(*sorted(chosen))))
    samples = Samples(parts)
    expected = truth(samples)
    if expected:
        numbers = np.array(data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=20)), np.int64)
        ids = samples.ids(numbers)
        found = samples.locate(ids)
        for number, shard, offset in zip(numbers.tolist(), found.shard, found.offset, strict=True):
            dataset, row = expected[number]
            own = dataset.locate([row])
            assert (samples.shard_paths[shard], offset) == (dataset.shard_paths[own.shard[0]], own.offset[0])


def test_a_damaged_index_is_told_with_the_shard_of_its_dataset(tmp_path, datasets):
    draft = draft_dataset((2, 2), name="bad")
    damaged = draft.dataset_rows[1] = list(draft.shards[1].rows)
    damaged[0] = damaged[0]._replace(offset=10**6)
    with open_dataset(draft.write(tmp_path / "bad")) as bad:
        samples = Samples([Part(datasets[0]), Part(bad)])
        with pytest.raises(IntegrityError, match=r"bad-000001\.tar:1000000 \[sample c/0002\]"):
            samples.locate(np.arange(15))
        assert len(samples.locate(np.arange(13)).shard) == 13


@pytest.mark.parametrize(
    ("selected", "message"),
    [
        (rows(1, 1), "rising"),
        (rows(2, 1), "rising"),
        (rows(-1, 1), "rising"),
        (rows(0, 11), r"0\.\.10"),
        (np.array([[0], [1]]), "int64"),
        (np.array([0, 1], np.int32), "int32"),
        (np.array([True, False]), "bool"),
    ],
)
def test_rows_that_are_no_selection_are_refused(datasets, selected, message):
    with pytest.raises(ConfigError, match=message):
        Part(datasets[0], selected)


def test_no_dataset_is_refused():
    with pytest.raises(ConfigError, match="no dataset"):
        Samples([])


def test_closing_closes_every_dataset(folders):
    opened = [open_dataset(folder) for folder in folders[:2]]
    samples = Samples([Part(dataset) for dataset in opened])
    for dataset in opened:
        assert dataset[0].key == "c/0000"
    descriptors = len(os.listdir("/proc/self/fd"))
    samples.close()
    samples.close()
    assert len(os.listdir("/proc/self/fd")) < descriptors
    for dataset in opened:
        with pytest.raises(ConfigError, match="closed"):
            dataset[0]


def test_a_collection_takes_no_step_for_each_sample(tmp_path):
    """Samples are numbered and located as columns: the same lines of Python run for 4096 of them as for 64."""
    big = [open_dataset(draft_dataset((500, 500), name=name).write(tmp_path / name)) for name in "ab"]
    samples = Samples([Part(big[0]), Part(big[1], np.arange(0, 1000, 2))])
    numbers = np.random.default_rng(0).integers(0, len(samples), 4096)

    def steps(count):
        return lines_run(lambda: samples.locate(samples.ids(numbers[:count])))

    steps(64)  # what is done once, at the first use
    assert steps(4096) == steps(64) > 0
    samples.close()


@pytest.mark.parametrize(("chosen", "unlabelled"), [(None, 3), (rows(0, 2, 3), 3), (rows(1, 2), 1), (rows(1, 4), 0)])
def test_samples_without_a_label_are_counted_among_the_selected(tmp_path, chosen, unlabelled):
    draft = draft_dataset((3, 2))
    for shard in draft.shards:
        shard.rows[::2] = [row._replace(label=None) for row in shard.rows[::2]]
    with open_dataset(draft.write(tmp_path / "ds")) as dataset:
        assert Part(dataset, chosen).unlabelled() == unlabelled


def test_labels_are_not_looked_at_where_nothing_is_selected(tmp_path):
    draft = draft_dataset((3, 2), labels=False)
    with open_dataset(draft.write(tmp_path / "ds")) as dataset:
        assert Part(dataset).unlabelled() == 5
        assert "label" not in dataset.columns._made
