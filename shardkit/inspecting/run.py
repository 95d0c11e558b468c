"""`shardkit.inspect`: what a dataset holds, from its index alone; and a page that shows it."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import numpy as np

from shardkit.dataset.shardset import open_dataset
from shardkit.errors import ConfigError
from shardkit.inspecting.charts import require_matplotlib
from shardkit.inspecting.gallery import MAX_THUMBNAILS, class_name, fill_gallery
from shardkit.inspecting.page import render_page
from shardkit.inspecting.rejected import read_rejected
from shardkit.inspecting.report import MAX_CLASSES, ClassCount, Inspection, PageFacts, SplitFacts
from shardkit.inspecting.scan import scan_index
from shardkit.inspecting.target import check_target, write_page
from shardkit.verifying.report import LEVELS
from shardkit.verifying.run import verify as run_verify

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardkit.dataset.shardset import Dataset
    from shardkit.format.manifest import Manifest
    from shardkit.inspecting.scan import Scan
    from shardkit.verifying.report import Level, Report

__all__ = ["inspect"]


def inspect(
    path: str | os.PathLike[str],
    *,
    html: str | os.PathLike[str] | None = None,
    thumbnails: int = 60,
    seed: int = 0,
    overwrite: bool = False,
    verify: Level | None = None,
    progress: Callable[[int], object] | None = None,
    verified: Callable[[int], object] | None = None,
) -> Inspection:
    """Return what a dataset holds; write a page of it when one is asked for.

    Figures come from the index alone, in two passes over its numbers; memory follows the number of shards and classes,
    not of samples. Only thumbnails and the verification read shards.

    Args:
        path: the dataset's folder.
        html: file that the page is written to; needs matplotlib (extra `plots`). Its name ends in `.html`.
        thumbnails: samples that the page shows, chosen from every class; at most 1000.
        seed: another one chooses others.
        overwrite: replace the file `html`.
        verify: level at which the dataset is verified, too; damage does not stop the inspection.
        progress: called with the number of rows or thumbnails just done: twice the samples, and the thumbnails.
        verified: called with the number of bytes that the verification has just read, from any thread.

    Raises:
        ConfigError: an argument that cannot be served, no finished dataset, or the page is there already.
        CapabilityError: a page was asked for without matplotlib.
        FormatError: the manifest or the index is damaged, or made by a newer shardkit.
        IntegrityError: manifest, index, list of refused sources and shards disagree.
        ShardkitError: a file cannot be read, or the page not be written; as `from_os_error` maps it.
    """
    target = None if html is None else os.fsencode(html)
    _check_arguments(thumbnails, verify)
    if target is not None:
        require_matplotlib()
        check_target(target, overwrite=overwrite)
    with open_dataset(path) as dataset:
        scan = scan_index(
            dataset, thumbnails=thumbnails if target is not None else 0, seed=seed, progress=progress
        )  # fmt: skip
        report = None if verify is None else run_verify(path, verify, progress=verified)
        found = _report(os.fspath(path), dataset, scan, report)
        if target is None:
            return found
        gallery = fill_gallery(dataset, scan, seed=seed, progress=progress)
    page = render_page(found, gallery)
    write_page(target, page, overwrite=overwrite)
    facts = PageFacts(os.fsdecode(target), len(page), gallery.shown, gallery.failed)
    return dataclasses.replace(found, page=facts)


def _check_arguments(thumbnails: int, verify: str | None) -> None:
    if not 0 <= thumbnails <= MAX_THUMBNAILS:
        raise ConfigError("a page cannot have so many thumbnails", expected=f"0 to {MAX_THUMBNAILS}", found=thumbnails)
    if verify is not None and verify not in LEVELS:
        raise ConfigError("unknown level", expected=" or ".join(LEVELS), found=repr(verify))


def _report(path: str, dataset: Dataset, scan: Scan, verification: Report | None) -> Inspection:
    manifest, totals, names = dataset.manifest, dataset.manifest.totals, dataset.classes
    labelled = scan.labels >= 0
    known = int(np.count_nonzero(labelled & (scan.labels < len(names)))) if names is not None else 0
    largest = np.lexsort((scan.labels, -scan.counts))[:MAX_CLASSES]
    return Inspection(
        dataset=path, name=manifest.name, generation=dataset.generation, layout=manifest.layout, align=manifest.align,
        shards=totals.shards, samples=totals.samples, bytes=totals.bytes, payload=totals.payload,
        headers=totals.headers, padding=totals.padding, splits=_splits(manifest),
        class_names=None if names is None else len(names), labels=int(np.count_nonzero(labelled)),
        unlabelled=int(scan.counts[~labelled].sum()), empty_classes=0 if names is None else len(names) - known,
        classes=tuple(
            ClassCount(None if label < 0 else label, class_name(names, label), samples)
            for label, samples in zip(scan.labels[largest].tolist(), scan.counts[largest].tolist(), strict=True)
        ),
        measures=scan.measures, images=scan.images if "media_type" in manifest.known_columns else None,
        rejected=read_rejected(dataset.path, manifest), verification=verification,
    )  # fmt: skip


def _splits(manifest: Manifest) -> tuple[SplitFacts, ...]:
    shards = {shard.name: shard for shard in manifest.shards}
    return tuple(
        SplitFacts(
            name, len(members), sum(shards[member].samples for member in members),
            sum(shards[member].bytes for member in members),
        )
        for name, members in manifest.splits.items()
    )  # fmt: skip
