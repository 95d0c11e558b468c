"""A whole comparison: which rows can be had, their turns, and everything about them as one document."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from shardkit.benching.case import Case, split_usable
from shardkit.benching.clock import drop_pages, read_all, shards_of
from shardkit.benching.machine import describe_machine, versions
from shardkit.benching.turns import Row, command_for, spawn, take_turns
from shardkit.errors import CapabilityError, ConfigError, DeviceError
from shardkit.storage.probe import probe
from shardkit.storage.residency import cached_share
from shardkit.storage.uring import uring_refusal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardkit.benching.case import Settings
    from shardkit.errors import ShardkitError

__all__ = ["Comparison"]

_COLD_SHARE = 0.05
_ON_DEVICE = ("read", "engines", "decode", "pipeline", "rival", "first", "epochs", "train")
"""Kinds of rows that need the settings' device."""


@dataclass(slots=True, kw_only=True)
class Comparison:
    """What was asked for, and what was measured so far: whole after an interrupt, too."""

    settings: Settings
    """What all rows share."""
    rows: list[Row] = field(default_factory=list)
    """In the order in which they were planned; those that cannot be had, too."""
    device: dict[str, Any] = field(default_factory=dict)
    """What the GPU says; Any: JSON values."""
    notes: list[str] = field(default_factory=list)
    """What a reader of the figures must know."""
    planned: int = 0
    """Rows that are measured: those that can be had."""
    samples: int = 0
    """Of the dataset."""
    mean_bytes: float = 0.0
    """Of an encoded image."""

    def run(self, cases: Sequence[Case], *, rounds: int, timeout_s: float) -> Iterator[Row]:
        """Measure; yield the row of each run when it is done.

        Args:
            cases: rows, see `plan`.
            rounds: runs of each.
            timeout_s: for one run.

        Raises:
            ConfigError: there is no row to measure, or no sample in the dataset.
            CapabilityError: there is no such GPU, and every row needs it.
            DeviceError: the GPU cannot be looked at, and every row needs it.
            ShardkitError: the dataset cannot be opened.
        """
        if not cases:
            raise ConfigError("there is nothing to measure with these options")
        self._open()
        usable, refused = split_usable(cases, self._refusals(cases, timeout_s))
        rows = {case: Row(case=case, refused=refused.get(case, "")) for case in cases}
        self.rows, self.planned = list(rows.values()), len(usable)
        self._prepare()
        commands = take_turns(
            usable, lambda case: command_for(case, self.settings), rounds=rounds, timeout_s=timeout_s
        )  # fmt: skip
        for row in commands:
            ours = rows[row.case]
            ours.runs, ours.refused, ours.failed = row.runs, row.refused, row.failed
            yield ours

    def to_json(self) -> dict[str, Any]:  # Any: JSON values
        """Return everything: machine, versions, options, and every run."""
        return {
            "machine": describe_machine(self.settings.dataset) | self.device, "versions": versions(),
            "settings": asdict(self.settings), "samples": self.samples, "mean_bytes": round(self.mean_bytes),
            "notes": self.notes, "auto": self.choices(), "rows": [row.to_json() for row in self.rows],
        }  # fmt: skip

    def choices(self) -> list[dict[str, str]]:
        """Return what "auto" took and why, for each row that had it to decide."""
        found = []
        for row in self.rows:
            if "auto" in (row.case.io, row.case.decoder) and row.runs:
                last = row.runs[-1]
                left = [name for name in ("io", "decoder") if getattr(row.case, name) == "auto"]
                names = [part for name in left for part in (name, f"{name}_reason")]
                found.append({"row": row.case.name} | {name: str(last[name]) for name in names if name in last})
        return found

    def _open(self) -> None:
        from shardkit.dataset.shardset import open_dataset

        with open_dataset(self.settings.dataset) as dataset:
            self.samples, totals = len(dataset), dataset.manifest.totals
        if not self.samples:
            raise ConfigError("the dataset has no samples", path=self.settings.dataset)
        self.mean_bytes = totals.payload / self.samples

    def _refusals(self, cases: Sequence[Case], timeout_s: float) -> dict[str, str]:
        """Return what cannot be had here, and why: by a way to read, a decoder or a kind."""
        found: dict[str, str] = {}
        if (why := uring_refusal()) is not None:
            found["uring"] = f"io_uring: {why}"
        facts = probe(shards_of(self.settings.dataset)[0])
        if facts.direct_refusal is not None or facts.direct_align == 0:
            found["direct"] = f"{facts.mount.file_system} has no direct reads: {facts.direct_refusal or 'says statx'}"
        if not self.settings.on_gpu:
            found |= {
                "gds": "it reads into GPU memory: --device cuda", "nvjpeg": "it decodes on a GPU: --device cuda",
                "engines": "they are a GPU's: --device cuda",
                "train": "the training step is one for a GPU: --device cuda",
            }  # fmt: skip
            return found
        lost = self._look_at_gpu(timeout_s)
        if lost is not None:
            if all(case.kind in _ON_DEVICE for case in cases):
                raise lost
            found |= dict.fromkeys(_ON_DEVICE, str(lost))
        return found

    def _look_at_gpu(self, timeout_s: float) -> ShardkitError | None:
        """Note what the GPU says of itself, or return why it cannot be had, as a loader would raise it."""
        # In a child: a context in this process would take memory of the GPU for nothing.
        self.device = spawn(command_for(Case(kind="device"), self.settings), timeout_s)
        if "refused" in self.device:
            return CapabilityError(self.device.pop("refused"))
        if "failed" in self.device:
            return DeviceError("the GPU cannot be looked at", found=self.device.pop("failed"))
        return None

    def _prepare(self) -> None:
        """Fill the page cache, or see that it can be emptied."""
        shards = shards_of(self.settings.dataset)
        if not self.settings.cold:
            read_all(shards)
            return
        drop_pages(shards)
        share = cached_share([(path, os.stat(path).st_size) for path in shards], seed=1)
        if share is not None and share > _COLD_SHARE:
            self.notes.append(
                f"{share:.0%} of the shards stayed in memory after their pages were dropped: these figures are not cold"
            )
