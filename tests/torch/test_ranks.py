"""Which rank a process has: the one that was named, or torch.distributed's."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardkit.errors import ConfigError
from shardkit.torch.ranks import Rank, resolve_rank

GROUP = """
import sys, torch.distributed
from shardkit.torch.ranks import resolve_rank
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
print(resolve_rank(None, None), resolve_rank(0, 5))
torch.distributed.destroy_process_group()
"""


def test_alone_a_process_is_the_only_one():
    assert resolve_rank(None, None) == Rank(0, 1)


def test_a_named_rank_is_taken():
    assert resolve_rank(3, 4) == Rank(3, 4)


@pytest.mark.parametrize(("rank", "size"), [(0, None), (None, 2), (2, 2), (-1, 2), (0, 0)])
def test_half_a_name_or_no_such_rank_is_refused(rank, size):
    with pytest.raises(ConfigError):
        resolve_rank(rank, size)


def test_a_process_group_is_asked(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", GROUP, str(tmp_path / "group"), str(rank)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=60)[0].strip() for process in ranks]
    assert said == [f"Rank(rank={rank}, world_size=2) Rank(rank=0, world_size=5)" for rank in range(2)]
