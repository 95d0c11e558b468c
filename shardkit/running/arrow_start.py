"""What Arrow brings into a process with the first Python object that it converts: pandas, where that is installed.

It does so in case the object is one of pandas', which here none is. The import takes 0.3 to 1 s, in every process.
"""

from __future__ import annotations

import contextlib
import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["with_pandas", "without_pandas"]


class _NoPandas(MetaPathFinder):
    def find_spec(self, fullname: str, *_: object) -> None:
        # None would have the next finder asked. So who looks for it by `importlib.util.find_spec` gets an error, too.
        if fullname == "pandas":
            raise ModuleNotFoundError("shardkit does without pandas", name=fullname)


_FINDER = _NoPandas()


@contextlib.contextmanager
def without_pandas() -> Iterator[None]:
    """Let nothing import pandas. Only where nothing but shardkit runs: Arrow does without it for good then.

    A None in `sys.modules` would do for the import system, but not for Arrow, which takes it for the module.
    """
    sys.meta_path.insert(0, _FINDER)
    try:
        yield
    finally:
        with_pandas()


def with_pandas() -> None:
    """Let a library that needs pandas import it after all."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
