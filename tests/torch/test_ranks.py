"""Which rank a process has: the one that was named, or torch.distributed's."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardkit.errors import ConfigError
from shardkit.testing.images import coloured, write_pictures
from shardkit.torch.ranks import Rank, resolve_rank

GROUP = """
import sys, torch.distributed
from shardkit.torch.ranks import resolve_rank
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
print(resolve_rank(None, None), resolve_rank(0, 5))
torch.distributed.barrier()  # who ends while another one still connects breaks it
torch.distributed.destroy_process_group()
"""


EARLY = """
import sys, torch.distributed
from shardkit.errors import ConfigError
from shardkit.torch import ShardLoader
made = [ShardLoader(sys.argv[3], 1, size=8, decoder="cpu", **rank) for rank in ({}, {"rank": 0, "world_size": 1})]
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
made.append(ShardLoader(sys.argv[3], 1, size=8, decoder="cpu"))
for loader in made:
    try:
        print(len(list(loader)))
    except ConfigError as error:
        print(error)
torch.distributed.barrier()  # who ends while another one still connects breaks it
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


def test_a_launched_process_that_has_not_joined_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE=2 in the environment, no process group"):
        resolve_rank(None, None)
    assert resolve_rank(1, 2) == Rank(1, 2)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert resolve_rank(None, None) == Rank(0, 1)


def test_a_process_group_is_asked(tmp_path):
    said = in_two_processes(GROUP, tmp_path / "group")
    assert said == [f"Rank(rank={rank}, world_size=2) Rank(rank=0, world_size=5)" for rank in range(2)]


def test_a_loader_that_was_made_before_the_process_group_does_not_read_everything_on_every_rank(tmp_path):
    folder = write_pictures(tmp_path / "ds", coloured(4))
    for rank, said in enumerate(in_two_processes(EARLY, tmp_path / "group", folder)):
        early, named, late = said.splitlines()
        assert f"expected rank {rank} of 2, as torch.distributed says; found rank 0 of 1" in early
        assert (named, late) == ("4", "2")


def in_two_processes(code, group, *arguments):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, *map(str, (group, rank, *arguments))], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    return [process.communicate(timeout=60)[0].strip() for process in ranks]
