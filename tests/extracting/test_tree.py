"""The folder that is extracted into, step by step."""

from __future__ import annotations

import os

import pytest

from shardkit.extracting.tree import Tree


class Stop(BaseException):
    """A signal."""


def enter(tree):
    with tree.folder_of(b"a/b/c/d.jpg"):
        pass


@pytest.mark.parametrize("step", range(4))
def test_a_signal_behind_any_close_closes_no_descriptor_twice(tmp_path, monkeypatch, step):
    really, closed = os.close, []

    def close(fd):
        really(fd)  # of one that is closed: EBADF, or another's file
        closed.append(fd)
        if len(closed) == step + 1:
            raise Stop

    with Tree(os.fsencode(tmp_path / "out")).hold() as tree:
        with monkeypatch.context() as patch:
            patch.setattr(os, "close", close)
            with pytest.raises(Stop):
                enter(tree)
        with tree.folder_of(b"a/b/c/d.jpg") as (folder, last):
            assert (os.listdir(folder), last) == ([], b"d.jpg")
