"""`shardkit convert` to another framework's dataset or a tree: one call, and what it made."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from shardkit.cli._progress import ItemBar
from shardkit.cli._render import byte_text, count_text, print_json, print_lines, quote
from shardkit.cli._shards import EXIT_REFUSED, labels_text
from shardkit.sizes import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.converting.foreign_result import ForeignConversion, ForeignPart
    from shardkit.converting.outputs import Output

__all__ = ["convert_to_foreign"]

_CALLED = {"source": "the paths that their sources state", "class": "their class and key"}
_READ_BY = {
    "mds": "streaming.StreamingDataset(local={0}, batch_size=32)",
    "litdata": "litdata.StreamingDataset({0})",
    "hf": "datasets.load_dataset({0})",
}


def convert_to_foreign(
    src: Sequence[str], output: Output, given: dict[str, Any], *, overwrite: bool, dry_run: bool, as_json: bool
) -> int:
    """Convert and print what came of it; return the exit code."""
    from shardkit.converting.foreign_run import run_foreign

    start = time.monotonic()
    with ItemBar(sys.stderr.isatty(), "convert") as bar:
        result = run_foreign(src, output, given, overwrite=overwrite, dry_run=dry_run, progress=bar)
    seconds = time.monotonic() - start
    if as_json:
        print_json(_document(result, seconds))
    else:
        print_lines(_plan_lines(result) if dry_run else _lines(result, seconds))
    return EXIT_REFUSED if result.refused else 0


def _plan_lines(plan: ForeignConversion) -> list[str]:
    lines = _passed_over(plan)
    for name, part in plan.parts.items():
        what = f"{_samples(plan, part)} would become {plan.kind}:DIR"
        lines += [what if name is None else f"{name}: {what}", *_refused(part)]
    if plan.layout is not None:
        lines.append(f"files would be called by {_CALLED[plan.layout]} (--layout {plan.layout})")
    return [*lines, "nothing was written; images are checked when they are converted"]


def _lines(result: ForeignConversion, seconds: float) -> list[str]:
    lines = _passed_over(result)
    for name, part in result.parts.items():
        what = f"wrote {_samples(result, part)} into {count(part.files, 'file')}"
        lines += [
            f"{what} of {byte_text(part.bytes)}" if name is None else f"{name}: {what} of {byte_text(part.bytes)}"
        ]
        lines += _refused(part, os.path.join(result.folder, name or "", "rejected.jsonl"))
    whole = result.kind == "hf" or None in result.parts
    folder = result.folder if whole else os.path.join(result.folder, next(iter(map(str, result.parts))))
    if result.layout is not None:
        lines.append(f"files are called by {_CALLED[result.layout]} (--layout {result.layout})")
    hint = f"; read it by {_READ_BY[result.kind].format(repr(folder))}" if result.kind in _READ_BY else ""
    return [*lines, f"in {seconds:.1f} s{hint}"]


def _samples(result: ForeignConversion, part: ForeignPart) -> str:
    labels = labels_text(part.labelled, part.samples, result.classes)
    return f"{count(part.samples, 'sample')} ({byte_text(part.payload)}, {labels})"


def _refused(part: ForeignPart, listed: str | None = None) -> list[str]:
    if not part.refused:
        return []
    where = "" if listed is None else f"; see {quote(listed)}"
    return [f"  refused     {part.refused.total():,}: {count_text(part.refused)}{where}"]


def _passed_over(result: ForeignConversion) -> list[str]:
    return [f"passed over {count_text(result.passed_over)}"] if result.passed_over else []


def _document(result: ForeignConversion, seconds: float) -> dict[str, Any]:
    parts = [
        {"part": name, "samples": part.samples, "payload": part.payload, "files": part.files, "bytes": part.bytes,
         "labelled": part.labelled, "refused": part.refused.total(), "refused_by_reason": dict(part.refused)}
        for name, part in result.parts.items()
    ]  # fmt: skip
    return {
        "format": result.kind, "layout": result.layout, "parts": parts,
        "classes": None if result.classes is None else list(result.classes),
        "samples": sum(part.samples for part in result.parts.values()),
        "refused": result.refused, "passed_over": dict(Counter(result.passed_over)), "seconds": round(seconds, 3),
    }  # fmt: skip
