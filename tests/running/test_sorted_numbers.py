from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import TargetFullError
from shardkit.running import sorted_numbers
from shardkit.running import spool as spool_module
from shardkit.running.sorted_numbers import repeated, sorted_pieces
from shardkit.testing.mounts import tmpfs

EDGES = [0, 1, 2**61 - 1, 2**61, 2**62, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1]
HASHES = st.lists(st.integers(0, 2**64 - 1) | st.sampled_from(EDGES), max_size=60)


def folder_of(factory, on_disk):
    return os.fsencode(factory.getbasetemp()) if on_disk else None


@given(HASHES, st.sampled_from([16, 64, 10_000]), st.integers(1, 9), st.booleans())
def test_hashes_come_in_order_whatever_is_sorted_at_once(tmp_path_factory, hashes, at_once, span, on_disk):
    column = np.array(hashes, np.uint64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_numbers, "_SORTED_BYTES", at_once)
        patch.setattr(spool_module, "_SPAN", span)
        folder = folder_of(tmp_path_factory, on_disk)
        pieces = [piece.tolist() for piece in sorted_pieces(column, folder)]
        twice = repeated(column, folder)
    assert [number for piece in pieces for number in piece] == sorted(hashes)
    assert column.tolist() == hashes
    assert twice.dtype == np.uint64
    assert twice.tolist() == sorted(number for number, count in Counter(hashes).items() if count > 1)


def test_hashes_that_are_spread_evenly_are_sorted_a_few_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(sorted_numbers, "_SORTED_BYTES", 8 << 10)
    column = np.random.default_rng(7).integers(0, 2**64, 100_000, np.uint64, endpoint=False)
    pieces = list(sorted_pieces(column, os.fsencode(tmp_path)))
    assert max(piece.nbytes for piece in pieces) < 12 << 10
    assert np.array_equal(np.concatenate(pieces), np.sort(column))
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_an_error_of_this_library(tmp_path, monkeypatch):
    monkeypatch.setattr(sorted_numbers, "_SORTED_BYTES", 1 << 10)
    with tmpfs(tmp_path / "small", size=1 << 20) as small, pytest.raises(TargetFullError, match="sort the hashes"):
        list(sorted_pieces(np.arange(1 << 19, dtype=np.uint64) << np.uint64(45), os.fsencode(small)))
