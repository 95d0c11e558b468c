"""All facts about a machine, as one value; nothing here judges, and nothing missing is an error."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from shardkit.diagnosing.facts import CudaAnswer, Facts, KvikAnswer
from shardkit.diagnosing.gather_gpu import gather_gpu, has_driver
from shardkit.diagnosing.gather_host import gather_host
from shardkit.diagnosing.gather_software import gather_software
from shardkit.diagnosing.gather_storage import gather_storage
from shardkit.diagnosing.question import PATIENCE_S, Question
from shardkit.diagnosing.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["gather"]

_Answer = TypeVar("_Answer", bound=CudaAnswer | KvikAnswer)


def gather(
    path: str | os.PathLike[str],
    *,
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
    cuda_command: Sequence[str] | None = None,
    kvikio_command: Sequence[str] | None = None,
    patience_s: float = PATIENCE_S,
) -> Facts:
    """Return the facts about this machine and what lies behind a path.

    Args:
        path: a file or folder.
        root: below which /proc, /sys, /dev and /etc are looked at.
        environment: of this process.
        cuda_command: what prints a `CudaAnswer` as JSON; run where there is a GPU or its driver. None asks nothing.
        kvikio_command: what prints a `KvikAnswer` as JSON; run where KvikIO is installed. None asks nothing.
        patience_s: when a command counts as one that does not answer.
    """
    tree = Tree(root)
    software = gather_software()
    with contextlib.ExitStack() as stack:  # a second of the children's work, done beside ours
        asked = _ask(stack, cuda_command if has_driver(tree) else None, CudaAnswer, "the driver")
        settings = _ask(stack, kvikio_command if software.has("KvikIO") else None, KvikAnswer, "KvikIO")
        host = gather_host(tree, environment)
        storage = gather_storage(tree, os.fspath(path))
        cuda, kvikio = asked(patience_s), settings(patience_s)
    side = gather_gpu(tree, environment, host, cuda=cuda, kvikio=kvikio)
    return Facts(host=host, storage=storage, gpu=side, software=software)


def _ask(
    stack: contextlib.ExitStack, command: Sequence[str] | None, kind: type[_Answer], whom: str
) -> Callable[[float], _Answer | None]:
    """Start to ask, and return what waits for the answer; `stack` ends the asking."""
    if command is None:
        return lambda _: None
    try:
        return stack.enter_context(Question(command, kind, whom)).answer
    except OSError as error:
        refusal = kind(error=f"{whom} could not be asked: {error}")
        return lambda _: refusal
