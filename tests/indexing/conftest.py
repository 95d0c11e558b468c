from __future__ import annotations

import tarfile

import pytest

from shardkit.testing.foreign import foreign_files, write_tar

SAMPLES = 7
"""Of a tar of `shards`."""


@pytest.fixture
def shards(tmp_path):
    """A folder with three tars of `SAMPLES` samples each, in three formats; with long names in the last."""
    folder = tmp_path / "data"
    folder.mkdir()
    write_tar(folder / "t-000.tar", foreign_files(), tarfile.GNU_FORMAT)
    write_tar(folder / "t-001.tar", foreign_files(SAMPLES), tarfile.USTAR_FORMAT)
    write_tar(folder / "t-002.tar", {"deep/" * 40 + name: data for name, data in foreign_files(2 * SAMPLES).items()})
    return folder
