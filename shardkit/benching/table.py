"""The table of a comparison, as lines of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.benching.case import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.benching.case import Kind
    from shardkit.benching.turns import Row

__all__ = ["one_run", "table"]

_TITLES: dict[Kind, str] = {
    "plain": "plain reads of all shards", "read": "batches of encoded images", "engines": "decoding, from memory",
    "decode": "decoding, from memory", "pipeline": "finished batches", "rival": "finished batches",
    "first": "the first batch", "epochs": "the third epoch", "train": "training ResNet-50",
}  # fmt: skip
_HEAD = ("", "images/s", "lowest-highest", "GB/s", "CPU us", "x rival", "first s", "notes")


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines: a block a kind, the fastest first; what could not be had, and what failed, below."""
    lines: list[str] = []
    for title, kinds in _blocks():
        block = [row for row in rows if row.case.kind in kinds and row.runs]
        if block:
            rival = max((row.median("images_s") or 0 for row in block if _is_rival(row)), default=0.0)
            block.sort(key=lambda row: -(row.median("images_s") or 0))
            lines += ["", *_aligned([(title, *_HEAD[1:]), *(_cells(row, rival) for row in block)])]
    for word, pick in (("cannot be had", "refused"), ("failed", "failed")):
        for row in rows:
            if reason := getattr(row, pick):
                lines += ["", f"{word}:"] if f"{word}:" not in lines else []
                lines.append(f"  {row.case.kind} {row.case.name}: {reason}")
    return lines[1:]


def one_run(row: Row) -> str:
    """Return a line about the last run of a row."""
    name = f"{row.case.kind} {row.case.name}"
    if row.refused or row.failed:
        return f"{name}: {row.refused or row.failed}"
    return f"{name}: {row.runs[-1]['images_s']:,.0f} images/s"


def _blocks() -> list[tuple[str, tuple[Kind, ...]]]:
    """Return the titles and what stands below them: finished batches of both sides stand together."""
    titles = list(dict.fromkeys(_TITLES[kind] for kind in KINDS))
    return [(title, tuple(kind for kind in KINDS if _TITLES[kind] == title)) for title in titles]


def _is_rival(row: Row) -> bool:
    return row.case.kind == "rival" or row.case.decoder == "rival"


def _cells(row: Row, rival: float) -> tuple[str, ...]:
    rates = row.values("images_s")
    rate = row.median("images_s") or 0.0
    figures = (
        f"{rate:,.0f}", f"{min(rates):,.0f}-{max(rates):,.0f}", _number(row, "gb_s", "{:.2f}"),
        _number(row, "cpu_us", "{:.1f}"), f"{rate / rival:.2f}" if rival else "", _number(row, "first_s", "{:.2f}"),
    )  # fmt: skip
    return (row.case.name, *figures, _notes(row))


def _number(row: Row, name: str, form: str) -> str:
    value = row.median(name)
    return "" if value is None else form.format(value)


def _notes(row: Row) -> str:
    notes = []
    forms = (
        ("within_images_s", "within epochs {:,.0f}"),
        ("gpu_idle", "GPU idle {:.1%}"), ("host_wait", "host waits {:.1%}"),
        ("epoch_0_images_s", "first epoch {:,.0f} images/s"), ("epoch_1_images_s", "second {:,.0f}"),
    )  # fmt: skip
    for name, form in forms:
        if (value := row.median(name)) is not None:
            notes.append(form.format(value))
    if (taken := row.median("gpu_bytes")) is not None:
        notes.append(f"{taken / 1e9:.2f} GB of GPU memory")
    last = row.runs[-1]
    chosen = [str(last[name]) for name in ("io", "decoder") if getattr(row.case, name) == "auto" and name in last]
    if chosen:
        notes.append("auto: " + ", ".join(chosen))
    busy = max((run.get("others", 0.0) for run in row.counted), default=0.0)
    if busy > 0.1:
        notes.append(f"others took {busy:.0%}")
    return "; ".join(notes)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return lines of equal columns; one that is empty but for its title is left out."""
    kept = [at for at in range(len(rows[0])) if any(row[at] for row in rows[1:])]
    rows = [tuple(row[at] for at in kept) for row in rows]
    widths = [max(len(row[at]) for row in rows) for at in range(len(kept))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if at in (0, len(_HEAD) - 1) else cell.rjust(width)
            for at, cell, width in zip(kept, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
