from __future__ import annotations

import gc
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import StorageError, TargetFullError
from shardkit.running import spool as spool_module
from shardkit.running.spool import Spool, spans, spooled
from shardkit.testing.mounts import tmpfs

PIECES = st.lists(st.lists(st.integers(0, 2**63 - 1), max_size=9), max_size=12)


@pytest.fixture
def nothing_held(monkeypatch):
    monkeypatch.setattr(spool_module, "_HELD_BYTES", 0)


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@given(PIECES, st.sampled_from([np.int64, np.uint64]), st.sampled_from([0, 8, 100]), st.booleans())
def test_pieces_are_one_column_in_a_file_or_in_memory(tmp_path_factory, pieces, kind, held, on_disk):
    folder = os.fsencode(tmp_path_factory.getbasetemp()) if on_disk else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spool_module, "_HELD_BYTES", held)
        column = spooled(kind, folder, pieces)
    assert column.dtype == kind
    assert column.tolist() == [number for piece in pieces for number in piece]


@pytest.mark.usefixtures("nothing_held")
def test_marks_are_a_column_of_a_byte_each(tmp_path):
    column = spooled(np.bool_, os.fsencode(tmp_path), [[True, False], np.array([True])])
    assert (column.dtype, column.nbytes, column.tolist()) == (np.bool_, 3, [True, False, True])


@pytest.mark.usefixtures("nothing_held")
def test_a_file_has_no_name_and_ends_with_its_column(tmp_path):
    before = descriptors()
    spool = Spool(np.int64, os.fsencode(tmp_path))
    spool.append([1, 2])
    assert (descriptors(), os.listdir(tmp_path)) == (before + 1, [])
    column = spool.array()
    assert os.listdir(tmp_path) == []
    assert column[1:].tolist() == [2]
    with pytest.raises(ValueError, match="read-only"):
        column[0] = 3
    del spool, column
    assert descriptors() == before


def test_a_short_column_makes_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(spool_module, "nameless_file", None)
    assert spooled(np.int64, os.fsencode(tmp_path), [np.arange(1000)] * 9).tolist() == list(range(1000)) * 9


@pytest.mark.usefixtures("nothing_held")
def test_a_folder_that_is_full_or_gone_is_an_error_of_this_library(tmp_path):
    with pytest.raises(StorageError, match="cannot write the numbers of a plan"):
        spooled(np.int64, os.fsencode(tmp_path / "none"), [[1]])
    with tmpfs(tmp_path / "small", size=1 << 20) as small:
        with pytest.raises(TargetFullError) as caught:
            spooled(np.int64, os.fsencode(small), (np.arange(1 << 14) for _ in range(99)))
        assert caught.value.exit_code == 5
        del caught
        gc.collect()
        assert os.statvfs(small).f_bfree == os.statvfs(small).f_blocks


@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 700])
def test_spans_are_all_numbers_once_in_order(monkeypatch, count):
    monkeypatch.setattr(spool_module, "_SPAN", 7)
    assert [number for some in spans(count) for number in range(some.start, some.stop)] == list(range(count))
    assert all(0 < some.stop - some.start <= 7 for some in spans(count))
