"""All facts about a machine, as one value; nothing here judges, and nothing missing is an error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit.diagnosing.facts import CudaAnswer, Facts
from shardkit.diagnosing.gather_gpu import gather_gpu, has_driver
from shardkit.diagnosing.gather_host import gather_host
from shardkit.diagnosing.gather_software import gather_software
from shardkit.diagnosing.gather_storage import gather_storage
from shardkit.diagnosing.question import PATIENCE_S, CudaQuestion
from shardkit.diagnosing.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["gather"]


def gather(
    path: str | os.PathLike[str],
    *,
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
    cuda_command: Sequence[str] | None = None,
    patience_s: float = PATIENCE_S,
) -> Facts:
    """Return the facts about this machine and what lies behind a path.

    Args:
        path: a file or folder.
        root: below which /proc, /sys, /dev and /etc are looked at.
        environment: of this process.
        cuda_command: what prints a `CudaAnswer` as JSON; run where there is a GPU or its driver. None asks nothing.
        patience_s: when the command counts as one that does not answer.
    """
    tree = Tree(root)
    question, cuda = None, None
    if cuda_command is not None and has_driver(tree):
        try:
            question = CudaQuestion(cuda_command)  # a second of work, done beside ours
        except OSError as error:
            cuda = CudaAnswer(error=f"CUDA could not be asked: {error}")
    try:
        host = gather_host(tree, environment)
        storage = gather_storage(tree, os.fspath(path))
        software = gather_software()
        if question is not None:
            cuda = question.answer(patience_s)
    finally:
        if question is not None:
            question.close()
    return Facts(host=host, storage=storage, gpu=gather_gpu(tree, environment, host, cuda), software=software)
