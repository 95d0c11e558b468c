"""A decoder's source whose substitutes are never read, as on a server that does not answer."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from shardkit.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardkit.dataset.batch import EncodedBatch
    from shardkit.pipeline.decoder import BatchSource

__all__ = ["HangingSource"]


class HangingSource:
    """A `BatchSource` whose `replace` waits until `let_go` is set; `check` finds that out at its second call."""

    def __init__(self, source: BatchSource) -> None:
        """Take batches from `source`."""
        self.get, self._replace = source.get, source.replace
        self.let_go, self.checks = threading.Event(), 0
        self.inside = threading.Event()
        """Set when somebody waits for a substitute."""

    def replace(self, batch: EncodedBatch, bad: Mapping[int, str], /) -> EncodedBatch:
        """Wait to be let go, at most half a minute, and replace."""
        self.inside.set()
        self.let_go.wait(30)
        return self._replace(batch, bad)

    def check(self) -> None:
        """Raise at the second call.

        Raises:
            StorageError: as for a read that does not end.
        """
        self.checks += 1
        if self.checks == 2:
            raise StorageError("a read does not end", path="/x", offset=7)
