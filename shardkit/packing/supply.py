"""What shards are made of, wherever it comes from: planned as a table, then read picture by picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import mmap
    from collections import Counter
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import pyarrow as pa

    from shardkit.format.checksum import Digest
    from shardkit.packing.options import ShardOptions
    from shardkit.packing.plan import Plan
    from shardkit.packing.refusals import Refusal
    from shardkit.storage.clone import Place

__all__ = ["MakeRoom", "Origin", "Picture", "Supply"]


class MakeRoom(Protocol):
    """Says where a payload goes."""

    def __call__(self, wanted: int) -> tuple[mmap.mmap, int]:
        """Return a buffer and where in it so many bytes go; one byte more than that is writable."""

    def share(self, source: Place, size: int) -> int:
        """Fill what of the room the shard can share with a file, and return how many bytes that is; 0 for none.

        Raises:
            RefusedError: the file cannot be read.
            ShardkitError: the target failed, or nothing can be shared and has to be.
        """


class Picture(Protocol):
    """One planned sample: a file of its own, or a member of a shard."""

    @property
    def key(self) -> str:
        """The sample's key in the shard."""

    @property
    def label(self) -> int | None:
        """Class number; None for none."""

    @property
    def number(self) -> int:
        """Place among the sources, for the order of refusals."""

    @property
    def path(self) -> bytes:
        """What a refusal calls it."""

    @property
    def source(self) -> str:
        """What the index records as its source; asked for after `json`."""

    def announce(self) -> None:
        """Let the kernel start to read what is wanted soon; never fails."""

    def json(self) -> bytes | None:
        """Return the payload of its json member, or None for none.

        Raises:
            RefusedError: it cannot be read, or is none.
            ShardkitError: this process has run out of something.
        """

    def read(self, make_room: MakeRoom) -> int:
        """Read the payload, whole, to where `make_room` says; return its size in bytes, at least 1.

        Raises:
            RefusedError: why it is not taken.
            ShardkitError: this process has run out of something.
        """


class Origin(Protocol):
    """Where planned pictures are read; crosses to worker processes."""

    def pictures(self, rows: pa.RecordBatch, options: ShardOptions) -> AbstractContextManager[Iterator[Picture]]:
        """Return the pictures of one shard's plan, in stored order; few are Python objects at a time."""


class Supply(Protocol):
    """All sources of a dataset, and what is planned of them."""

    @property
    def origin(self) -> Origin:
        """Reads them."""

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class names in label order; None without names."""

    @property
    def refused(self) -> list[Refusal]:
        """What could not even become a source."""

    @property
    def skipped(self) -> Counter[str]:
        """What was passed over, counted by kind."""

    @property
    def schema(self) -> pa.Schema:
        """Of the plan's rows."""

    def a_file(self, least: int) -> bytes | None:
        """Return a file that pictures are read from, with so many bytes at least, to try things with; None for none."""

    def batches(self, plan: Plan) -> Iterator[pa.RecordBatch]:
        """Yield the plan of each shard as one record batch of `schema`."""

    def update_identity(self, batch: pa.RecordBatch, full: Digest, portable: Digest) -> None:
        """Add a shard's plan to two digests of the sources: with their times and without."""
