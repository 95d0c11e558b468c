"""A mapped index is looked at some shards at a time: every shard is compared, and nothing of it stays in memory."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from shardkit.dataset.folder import DATASET_INDEX
from shardkit.dataset.shardset import open_dataset
from shardkit.errors import IntegrityError
from shardkit.testing.datasets import draft_dataset

COUNTS = (30, 1, 50, 20)


@pytest.fixture
def dataset(tmp_path):
    with open_dataset(draft_dataset(COUNTS).write(tmp_path / "ds")) as opened:
        yield opened


def resident(dataset):
    """The kernel's own count of the map's resident bytes."""
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    mine = [part for part in parts if f"{dataset.path}/{DATASET_INDEX}" in part]
    assert len(mine) == 1
    return 1024 * int(re.search(r"^Rss: +([0-9]+) kB", mine[0], re.MULTILINE)[1])


def test_an_open_dataset_holds_nothing_of_its_index_resident(dataset):
    assert resident(dataset) == 0
    dataset.locate([0])
    assert resident(dataset) > 0


def test_a_pass_over_a_whole_column_leaves_nothing_resident_and_its_values_right(dataset):
    column = dataset.columns.numbers("size")
    views, seen = [], 0
    for view in column.chunks():
        views.append(view)
        seen += int(view.sum())
    assert seen > 0
    assert resident(dataset) == 0
    assert np.concatenate(views).tolist() == [column[i] for i in range(len(dataset))]


def test_a_pass_over_a_part_of_a_column_leaves_it_resident(dataset):
    assert sum(int((view > 0).sum()) for view in dataset.columns.numbers("size").chunks(1, 90)) == 89
    assert resident(dataset) > 0


def test_a_key_that_is_not_there_was_looked_for_without_a_trace(dataset):
    with pytest.raises(KeyError):
        dataset.by_key("not a key")
    assert resident(dataset) == 0
    assert dataset.by_key("c/0007").key == "c/0007"


@pytest.mark.parametrize("shard", [0, 14, 15, 16, 17, 31, 32, 40])
def test_of_many_shards_each_is_compared(tmp_path, shard):
    draft = draft_dataset([2, 1, 3] * 14)
    with open_dataset(draft.write(tmp_path / "right")) as opened:
        assert opened.columns.texts("key")[:] == [row.key for part in draft.shards for row in part.rows]
    rows = draft.dataset_rows[shard] = list(draft.shards[shard].rows)
    rows[-1] = rows[-1]._replace(key="c/other")
    with pytest.raises(IntegrityError, match=f"key of tiny-{shard:06d}.tar in the index is another one"):
        open_dataset(draft.write(tmp_path / "wrong"))
