"""state_dict and load_state_dict: whatever happened in between, the rest of an epoch is exactly the rest."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys

import pytest
import torch

from shardkit.errors import ConfigError
from shardkit.testing.images import Picture, coloured, write_pictures
from shardkit.torch import ShardLoader

COUNT = 61
ORDERS = {
    "global": {"shuffle": "global"},
    "window": {"shuffle": "window", "extent_bytes": 2000, "window_extents": 3, "lanes": 4},
    "none": {"shuffle": "none"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("resume") / "ds", coloured(COUNT))


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("resume") / "other", coloured(COUNT + 3))


@pytest.fixture
def load(folder):
    """A function that makes loaders, closed at the end; the Pillow decoder starts faster than DALI's graph."""
    made = []

    def make(batch_size=8, path=folder, **options):
        options = {"size": 8, "decoder": "cpu", "threads": 1, "fields": ("index",), "last_batch": "partial"} | options
        made.append(ShardLoader(path, batch_size, **options))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def told(batch):
    """What a batch holds: ids in order, and pixels, so that crops are compared, too."""
    images, _, extras = batch
    return extras["index"].tolist(), images.double().sum(dim=(1, 2, 3)).tolist()


def epoch_of(loader):
    return [told(batch) for batch in loader]


def through_json(state):
    text = json.dumps(state)
    assert len(text) < 2000
    return json.loads(text)


def take(loader, count):
    """Hand out some batches of a new iteration and leave it."""
    batches = iter(loader)
    found = [told(next(batches)) for _ in range(count)]
    batches.close()
    return found


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("epoch", [0, 3])
def test_the_rest_is_the_rest_from_every_step_on(load, order, epoch):
    whole = load(**ORDERS[order])
    whole.set_epoch(epoch)
    expected, following = epoch_of(whole), epoch_of(whole)
    assert expected != following or order == "none"
    for step in range(len(expected) + 1):
        before, after = load(**ORDERS[order]), load(**ORDERS[order])
        before.set_epoch(epoch)
        assert take(before, step) == expected[:step]
        state = through_json(before.state_dict())
        assert (state["epoch"], state["step"]) == (epoch, step)
        after.load_state_dict(state)
        over = step == len(expected)  # nothing is left: the next iteration is the next epoch
        assert after.epoch == epoch + over
        assert over or epoch_of(after) == expected[step:]
        assert epoch_of(after) == following  # whole, and another one


def test_a_second_and_a_third_resume(load):
    expected = epoch_of(load())
    loader, seen = load(), []
    for count in (2, 1, 3):
        seen += take(loader, count)
        state = through_json(loader.state_dict())
        loader = load()
        loader.load_state_dict(state)
    assert seen + epoch_of(loader) == expected


@pytest.mark.parametrize("step", range(9))
def test_the_position_is_the_last_batch_that_was_handed_out_whatever_is_read_ahead(load, step):
    loader = load(prefetch=7)
    batches = iter(loader)
    for _ in range(step):
        next(batches)
    assert loader.state_dict()["step"] == step
    assert loader.state_dict()["epoch"] == 0
    batches.close()


def test_the_end_of_an_epoch_is_the_start_of_the_next(load):
    loader = load()
    first, second = epoch_of(loader), epoch_of(load(seed=0, path=loader.dataset.path))
    assert first == second
    state = through_json(loader.state_dict())
    assert (state["epoch"], state["step"]) == (1, 0)
    again = load()
    again.load_state_dict(state)
    assert epoch_of(again) == epoch_of(loader)


def test_an_iteration_that_was_never_used_moves_nothing_and_a_state_may_follow_it(load):
    loader = load()
    take(loader, 3)
    state = loader.state_dict()
    unused = iter(loader)
    assert loader.state_dict() == state
    loader.load_state_dict(state)
    with pytest.raises(ConfigError, match="a state was loaded"):
        next(unused)
    assert epoch_of(loader) == epoch_of(load())[3:]


def test_an_iteration_that_was_never_used_takes_no_epoch(load):
    """Frameworks call iter() to see whether an object can be iterated, Lightning before and after it loads a state."""
    plain, loader = load(), load()
    for epoch in range(2):
        iter(loader)
        iter(loader)
        assert loader.epoch == loader.state_dict()["epoch"] == epoch
        expected = epoch_of(plain)
        assert epoch_of(loader) == expected
    loader.load_state_dict(load().state_dict() | {"epoch": 1, "step": 2})
    iter(loader)
    assert epoch_of(loader) == expected[2:]


def test_an_epoch_that_is_named_after_iter_is_the_one_after_it(load):
    plain, loader = load(), load()
    batches = iter(loader)
    loader.set_epoch(4)
    plain_first = epoch_of(plain)
    assert [told(batch) for batch in batches] == plain_first
    plain.set_epoch(4)
    assert epoch_of(loader) == epoch_of(plain)


def test_before_the_first_batch_the_state_is_the_start(load):
    state = through_json(load().state_dict())
    assert (state["epoch"], state["step"]) == (0, 0)
    loader = load()
    loader.load_state_dict(state)
    assert epoch_of(loader) == epoch_of(load())


def test_naming_the_same_epoch_keeps_the_position_and_another_one_does_not(load):
    loader = load()
    take(loader, 3)
    state = loader.state_dict()
    same, other = load(), load()
    for again, epoch in ((same, 0), (other, 5)):
        again.load_state_dict(state)
        again.set_epoch(epoch)
    assert len(epoch_of(same)) == len(loader) - 3
    assert other.state_dict() | {"epoch": 5, "step": 0} == other.state_dict()
    assert len(epoch_of(other)) == len(loader)


def test_who_names_the_finished_epoch_of_a_state_gets_the_nothing_that_is_left_of_it(load):
    loader = load()
    take(loader, len(loader))
    again = load()
    again.load_state_dict(loader.state_dict())
    assert again.epoch == 1
    again.set_epoch(0)  # a training loop that counts epochs itself and was stopped behind the last batch of epoch 0
    assert epoch_of(again) == []
    again.set_epoch(1)
    assert epoch_of(again) == epoch_of(loader)


@pytest.mark.parametrize("changed", [{"prefetch": 1}, {"io": "buffered"}, {"io": "direct"}, {"io": "uring"}])
def test_how_it_is_read_does_not_matter(load, changed):
    expected = epoch_of(load())
    loader = load(prefetch=5)
    take(loader, 4)
    again = load(**changed)
    again.load_state_dict(through_json(loader.state_dict()))
    assert epoch_of(again) == expected[4:]


def global_batches(loaders):
    """The sets of samples that all ranks together get in each step."""
    steps = [[ids for ids, _ in epoch_of(loader)] for loader in loaders]
    return [sorted(itertools.chain(*parts)) for parts in zip(*steps, strict=True)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (4, 2), (1, 4)])
def test_another_world_size_goes_on_with_the_same_global_batches(load, order, before, after):
    def ranks(world_size):
        options = {"lanes": 4} | ORDERS[order]
        return [load(12 // world_size, rank=rank, world_size=world_size, **options) for rank in range(world_size)]

    expected = global_batches(ranks(1))
    first = ranks(before)
    for loader in first:
        take(loader, 2)
    states = [through_json(loader.state_dict()) for loader in first]
    assert states[1:] == states[:-1]  # one is enough
    resumed = ranks(after)
    for loader in resumed:
        loader.load_state_dict(states[0])
    assert global_batches(resumed) == expected[2:]


def test_a_mix_and_a_selection_are_resumed_too(load, folder, other_folder):
    for path, options in (
        ([(folder, 0.7), (other_folder, 0.3)], {}),
        ([(folder, 1), (other_folder, 2)], {"shuffle": "none"}),
        (folder, {"labels": [0, 2]}),
    ):
        expected = epoch_of(load(4, path=path, **options))
        loader, again = load(4, path=path, **options), load(4, path=path, **options)
        take(loader, 3)
        again.load_state_dict(through_json(loader.state_dict()))
        assert epoch_of(again) == expected[3:]


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"seed": 1}, r"expected seed 1 \(this loader\); found seed 0 \(the state\)"),
        ({"batch_size": 4}, r"expected global_batch 4.*found global_batch 8.*keep batch_size \* world_size"),
        ({"shuffle": "none"}, 'shuffle "none".*shuffle "global"'),
        ({"last_batch": "pad"}, 'last_batch "pad".*last_batch "partial"'),
        ({"lanes": 4}, r"lanes 4 \(this loader\); found lanes 8"),
        ({"labels": [0]}, "datasets .*xxh3-128:.*datasets .* all 1"),
    ],
)
def test_a_state_of_another_run_is_refused_with_both_sides(load, changed, match):
    state = load().state_dict()
    loader = load(**changed)
    with pytest.raises(ConfigError, match=match):
        loader.load_state_dict(state)
    assert loader.state_dict()["step"] == 0
    assert len(epoch_of(loader)) == len(loader)


def test_another_dataset_is_refused_by_its_generation(load, other_folder):
    one, other = load(), load(path=other_folder)
    with pytest.raises(ConfigError) as caught:
        other.load_state_dict(one.state_dict())
    for loader in (one, other):
        assert loader.dataset.generation in str(caught.value)
    assert "open the dataset" in str(caught.value)


def test_another_edition_of_the_same_samples_is_refused(load, tmp_path):
    pictures = coloured(COUNT)
    pictures[7] = Picture(pictures[7].key, pictures[8].jpeg, 0)
    edition = load(path=write_pictures(tmp_path / "ds", pictures))
    with pytest.raises(ConfigError, match="another run"):
        edition.load_state_dict(load().state_dict())


def test_a_state_is_not_loaded_into_a_running_iteration(load):
    loader = load()
    state = loader.state_dict()
    batches = iter(loader)
    next(batches)
    with pytest.raises(ConfigError, match="an iteration is running"):
        loader.load_state_dict(state)
    batches.close()
    loader.load_state_dict(state)
    assert len(epoch_of(loader)) == len(loader)


KILLED = """
import json, sys
from shardkit.torch import ShardLoader
loader = ShardLoader(sys.argv[1], 4, size=8, decoder="cpu", fields=("index",), seed=9)
if len(sys.argv) > 2:
    loader.load_state_dict(json.loads(sys.argv[2]))
for epoch in range(loader.epoch, 2):
    loader.set_epoch(epoch)
    for _, _, extras in loader:
        print(json.dumps([loader.state_dict(), extras["index"].tolist()]), flush=True)
"""


def test_sigkill_in_mid_epoch_and_the_last_state_that_was_seen(folder):
    def run(*state, kill_after=None):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(folder), *state], stdout=subprocess.PIPE, text=True
        )
        rows = []
        for line in process.stdout:
            rows.append(json.loads(line))
            if len(rows) == kill_after:
                process.send_signal(signal.SIGKILL)
                break
        process.stdout.close()
        assert process.wait(timeout=60) == (0 if kill_after is None else -signal.SIGKILL)
        return rows

    undisturbed = [ids for _, ids in run()]
    assert len(undisturbed) == 30
    first = run(kill_after=7)
    second = run(json.dumps(first[-1][0]), kill_after=11)
    third = run(json.dumps(second[-1][0]))
    assert [ids for _, ids in [*first, *second, *third]] == undisturbed


def test_dali_goes_on_with_the_same_pixels(load):
    def pixels(loader):
        return [images for images, _, _ in loader]

    expected = pixels(load(decoder="dali"))
    loader, again = load(decoder="dali"), load(decoder="dali")
    take(loader, 3)
    again.load_state_dict(through_json(loader.state_dict()))
    for one, other in zip(pixels(again), expected[3:], strict=True):
        assert torch.equal(one, other)
