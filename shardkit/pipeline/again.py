"""Batches that are in memory, as a source for a decoder: what it does without any reading."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from shardkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.dataset.batch import EncodedBatch

__all__ = ["Again"]


class Again:
    """A `BatchSource` that gives the same batches again and again; their memory stays their owner's."""

    def __init__(self, batches: Sequence[EncodedBatch], *, times: int | None = None) -> None:
        """Give batches.

        Args:
            batches: at least one.
            times: how often to give each of them; None: until `ended` is set.
        """
        rounds = itertools.repeat(batches) if times is None else itertools.repeat(batches, times)
        self._batches = itertools.chain.from_iterable(rounds)
        self.ended = False

    def get(self, *, wait: bool) -> EncodedBatch | None:
        """Return the next one; None after the last."""
        batch = None if self.ended else next(self._batches, None)
        # A list of its own: whoever releases the batch empties it.
        return None if batch is None else dataclasses.replace(batch, views=list(batch.views))

    def replace(self, batch: EncodedBatch, bad: object, /) -> EncodedBatch:
        """Refuse: there is no other image.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("an image cannot be decoded", found=bad, remedy="run shardkit verify --level decode")

    def check(self) -> None:
        """Nothing is read."""
