"""A loader's position as JSON: small, exact, and refused by every run that would not go on with the same samples."""

from __future__ import annotations

import json

import numpy as np
import pytest

from shardkit.dataset.arrangement import arrange
from shardkit.dataset.order import ORDER_VERSION
from shardkit.dataset.samples import Part, Samples
from shardkit.dataset.shardset import open_dataset
from shardkit.dataset.state import Position, dump_state, load_state, run_identity
from shardkit.dataset.steps import BatchPlan
from shardkit.errors import ConfigError
from shardkit.testing.datasets import draft_dataset

U64 = 2**64 - 1


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    with open_dataset(draft_dataset((20,)).write(tmp_path_factory.mktemp("state") / "ds")) as opened:
        yield opened


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    with open_dataset(draft_dataset((20,), sizes=(450,)).write(tmp_path_factory.mktemp("state") / "other")) as opened:
        yield opened


def identity(
    *datasets, rows=None, shuffle="global", seed=7, weights=None, batch=4, world=1, rank=0, lanes=None, last="drop",
    extent_bytes=1000, window_extents=2,
):  # fmt: skip
    samples = Samples([Part(one, None if rows is None else np.asarray(rows, np.int64)) for one in datasets])
    plan = BatchPlan(
        n=len(samples), batch_size=batch, world_size=world, rank=rank, lanes=lanes or batch * world, last_batch=last
    )
    order = arrange(
        samples, shuffle, seed=seed, weights=weights, lanes=plan.lanes, extent_bytes=extent_bytes,
        window_extents=window_extents,
    )  # fmt: skip
    return run_identity(samples, order, plan, seed=seed, shuffle=shuffle)


@pytest.mark.parametrize("position", [Position(0, 0), Position(3, 5), Position(2**40, 0)])
@pytest.mark.parametrize("datasets", [1, 16, 17, 200])
def test_a_state_is_small_json_and_comes_back(dataset, position, datasets):
    given = {"seed": U64, "rows": range(0, 20, 2), "last": "partial", "batch": 2**20}
    weights = None if datasets == 1 else [1 / 3 + number / 700 for number in range(datasets)]
    mine = identity(*[dataset] * datasets, weights=weights, **given)
    text = json.dumps(dump_state(mine, position))
    assert len(text) < 2048
    assert load_state(json.loads(text), mine, 5) == position
    assert json.loads(text) == dump_state(mine, position)  # plain values only


def test_the_size_does_not_depend_on_the_position_or_the_selection(dataset):
    sizes = {
        len(json.dumps(dump_state(identity(dataset, rows=rows), Position(epoch, 2))))
        for rows in (range(4), range(5, 9)) for epoch in (1, 2)
    }  # fmt: skip
    assert len(sizes) == 1


@pytest.mark.parametrize(
    ("world", "batch"), [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
)  # fmt: skip
def test_other_numbers_of_ranks_with_the_same_global_batch_are_the_same_run(dataset, world, batch):
    for rank in range(world):
        mine = identity(dataset, world=world, batch=batch, rank=rank, lanes=12)
        assert mine == identity(dataset, batch=12, lanes=12)


def test_weights_that_come_to_the_same_shares_are_the_same_run(dataset, other):
    given = identity(dataset, other, weights=[0.7, 0.3])
    assert given == identity(dataset, other, weights=[7, 3])
    assert given != identity(dataset, other, weights=[0.7, 0.301])


@pytest.mark.parametrize(
    ("name", "changes", "remedy"),
    [
        ("shuffle", {"shuffle": "none"}, "arguments"),
        ("seed", {"seed": 8}, "arguments"),
        ("datasets", {"rows": range(19)}, "selection"),
        ("global_batch", {"batch": 5, "lanes": 1}, "batch_size \\* world_size"),
        ("last_batch", {"last": "pad"}, "arguments"),
        ("lanes", {"lanes": 2}, "lanes=[12], the constant"),
        ("extent_samples", {"shuffle": "window"}, "arguments"),
        ("window_extents", {"shuffle": "window"}, "arguments"),
    ],
)
def test_a_state_of_another_run_is_refused_with_both_sides(dataset, name, changes, remedy):
    mine, theirs = identity(dataset, lanes=1), identity(dataset, **{"lanes": 1, **changes})
    differing = [field for field in {**mine, **theirs} if mine.get(field) != theirs.get(field)]
    assert name in differing
    for state, here in ((theirs, mine), (mine, theirs)):
        with pytest.raises(ConfigError, match=remedy) as caught:
            load_state(dump_state(state, Position(0, 1)), here, 5)
        for field in differing:
            assert f"{field} {json.dumps(here.get(field))}" in caught.value.expected
            assert f"{field} {json.dumps(state.get(field))}" in caught.value.found
        agreed = [field for field in mine if field not in differing]
        assert not any(field in caught.value.expected for field in agreed)


def test_another_selection_of_the_same_size_is_another_run(dataset):
    mine, theirs = identity(dataset, rows=range(19)), identity(dataset, rows=range(1, 20))
    with pytest.raises(ConfigError, match="selection"):
        load_state(dump_state(theirs, Position(0, 1)), mine, 5)


@pytest.mark.parametrize("changes", [{"extent_bytes": 4000}, {"window_extents": 3}])
def test_other_windows_are_another_run(dataset, changes):
    mine, theirs = identity(dataset, shuffle="window"), identity(dataset, **{"shuffle": "window", **changes})
    with pytest.raises(ConfigError, match="another run"):
        load_state(dump_state(theirs, Position(0, 1)), mine, 5)


def test_another_dataset_is_refused_with_both_generations(dataset, other):
    with pytest.raises(ConfigError, match="open the dataset") as caught:
        load_state(dump_state(identity(other), Position(0, 1)), identity(dataset), 5)
    assert dataset.generation in caught.value.expected
    assert other.generation in caught.value.found


@pytest.mark.parametrize("count", [2, 30])
def test_the_order_and_the_number_of_datasets_count(dataset, other, count):
    mine = identity(*[dataset, other] * (count // 2), weights=[1] * count)
    for datasets in ([other, dataset] * (count // 2), [dataset, other] * (count // 2) + [other]):
        with pytest.raises(ConfigError, match="datasets"):
            load_state(dump_state(identity(*datasets, weights=[1] * len(datasets)), Position(0, 1)), mine, 5)


@pytest.mark.parametrize(
    "field", ["order_version", "shuffle", "seed", "datasets", "global_batch", "last_batch", "lanes"]
)
@pytest.mark.parametrize("value", [None, "gone", 99, ["x"], 0.5])
def test_every_field_of_the_run_is_compared(dataset, field, value):
    mine = identity(dataset)
    state = json.loads(json.dumps(dump_state(mine, Position(0, 1))))
    state["run"][field] = value
    if value == "gone":
        del state["run"][field]
    with pytest.raises(ConfigError, match="another run"):
        load_state(state, mine, 5)


def test_a_field_that_is_not_known_here_is_refused(dataset):
    mine = identity(dataset)
    assert mine["order_version"] == ORDER_VERSION
    with pytest.raises(ConfigError, match=r"salt null \(this loader\).*salt 5 \(the state\)"):
        load_state(dump_state(mine | {"salt": 5}, Position(0, 1)), mine, 5)


@pytest.mark.parametrize(
    "state", [None, 3, "state", [], {}, {"epoch": 0, "step": 0}, {"run": 3}, {"version": 1, "run": []}]
)
def test_what_is_no_state_is_refused(dataset, state):
    with pytest.raises(ConfigError, match="no state of a loader"):
        load_state(state, identity(dataset), 5)


@pytest.mark.parametrize("version", [2, 0, None, "1", object()])
def test_another_version_is_refused(dataset, version):
    mine = identity(dataset)
    with pytest.raises(ConfigError, match=r"version that is not known.*expected 1"):
        load_state(dump_state(mine, Position(0, 1)) | {"version": version}, mine, 5)


@pytest.mark.parametrize("step", [0, 5])
def test_a_position_may_be_at_both_ends(dataset, step):
    mine = identity(dataset)
    assert load_state(dump_state(mine, Position(9, step)), mine, 5) == Position(9, step)


@pytest.mark.parametrize(
    "position",
    [{"step": 6}, {"step": -1}, {"step": 1.0}, {"step": True}, {"step": None}, {"step": "2"},
     {"epoch": -1}, {"epoch": 0.5}, {"epoch": False}, {"epoch": None}, {"epoch": [0]}],
)  # fmt: skip
def test_what_is_no_position_is_refused(dataset, position):
    mine = identity(dataset)
    with pytest.raises(ConfigError, match=r"holds no position.*step 0\.\.5"):
        load_state(dump_state(mine, Position(0, 1)) | position, mine, 5)
