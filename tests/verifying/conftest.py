"""A small whole dataset for every test that damages one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardkit.testing.datasets import draft_dataset

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Two shards of three samples; labels and metadata; one refusal."""
    return draft_dataset().write(tmp_path / "ds")
