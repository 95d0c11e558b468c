"""`shardkit bench`: every way to read and decode a dataset, side by side on this machine."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from typing import TYPE_CHECKING

import click

from shardkit.benching.case import IO, KINDS, SHUFFLES, Settings, plan
from shardkit.cli._choices import PATH
from shardkit.cli._render import byte_text, print_json, print_lines, quote, warn
from shardkit.errors import ConfigError, StorageError, from_os_error
from shardkit.escaping import escape
from shardkit.sizes import count

if TYPE_CHECKING:
    from shardkit.benching.case import Case, Kind
    from shardkit.benching.run import Comparison

__all__ = ["bench"]

_EXTRA_S = 60.0
"""What a run may take beyond its measurement: starting Python, torch and CUDA, and the first batches."""
_GPU = "/dev/nvidiactl"
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,4})?")
_DEFAULT_KINDS: tuple[Kind, ...] = ("read", "decode", "pipeline", "rival")


@click.command(short_help="Measure every way to read and decode a dataset.")
@click.argument("dataset", type=PATH)
@click.option("--what", multiple=True, type=click.Choice(KINDS),
              help="Rows; may be given again.  [default: engines, read, decode, pipeline, rival]")  # fmt: skip
@click.option("--io", multiple=True, type=click.Choice(("auto", *IO)),
              help="Way to read; may be given again.  [default: all, and auto]")  # fmt: skip
@click.option("--decoder", multiple=True, type=click.Choice(("auto", "nvjpeg", "dali", "cpu")),
              help="Decoder; may be given again.  [default: all of the device, and auto]")  # fmt: skip
@click.option("--shuffle", multiple=True, type=click.Choice(SHUFFLES),
              help="Order of the samples; may be given again.  [default: all]")  # fmt: skip
@click.option(
    "--device", help="What makes the batches: cpu, cuda or cuda:N.  [default: cuda if there is an NVIDIA GPU]"
)
@click.option("--batch-size", type=click.IntRange(1), default=256, show_default=True, help="Images of a batch.")
@click.option("--size", type=click.IntRange(1), default=224, show_default=True, help="Pixels of a side.")
@click.option("--threads", type=click.IntRange(0), default=0,
              help="Threads that decode.  [default: CPUs; of DALI several]")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=3.0, show_default=True,
              help="How long each run measures.")  # fmt: skip
@click.option("--batches", type=click.IntRange(1), help="Batches that each run measures, instead of the time.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Runs of each row, taking turns.")
@click.option("--cold/--warm", default=False, help="From the storage, one epoch at most; or from the page cache.  "
              "[default: warm]")  # fmt: skip
@click.option("--train", is_flag=True, help="Feed a ResNet-50 in bfloat16, too, and tell how long its GPU is idle.")
@click.option("--timeout", type=click.FloatRange(1), help="Seconds for one run.  [default: 60 + 10 x --seconds]")
@click.option("--json", "json_file", type=PATH, help="File for everything as JSON; - is standard output.")
@click.option("--plot", type=PATH, help="File for a picture, e.g. bench.png; needs matplotlib.")
def bench(
    dataset: str, what: tuple[Kind, ...], io: tuple[str, ...], decoder: tuple[str, ...], shuffle: tuple[str, ...],
    device: str | None, batch_size: int, size: int, threads: int, seconds: float, batches: int | None, rounds: int,
    cold: bool, train: bool, timeout: float | None, json_file: str | None, plot: str | None,
) -> int:  # fmt: skip
    """Measure reading, decoding and whole pipelines of a DATASET, and DALI's own reader as the rival.

    Each run is a process of its own; the rows take turns. Ctrl-C ends it, and what was measured is shown. Rows that
    this machine cannot have are listed with the reason.

    Exit code 0: done, whether or not rows failed. 7: there is no such GPU, and every row needs it.
    """
    from shardkit.benching.run import Comparison

    # Better now than after minutes.
    if plot is not None:
        from shardkit.benching.plot import require_format

        require_format(plot)
    _require_places([plot, None if json_file == "-" else json_file])
    if not math.isfinite(seconds) or (timeout is not None and not math.isfinite(timeout)):
        raise ConfigError("a run has an end", expected="finite --seconds and --timeout", found=(seconds, timeout))
    if device is None:
        device = "cuda" if os.path.exists(_GPU) else "cpu"
    if not _DEVICE.fullmatch(device):
        raise ConfigError("there is no such device", expected="cpu, cuda or cuda:N", found=escape(device))
    settings = Settings(
        dataset=dataset, device=device, batch_size=batch_size, size=size, seconds=seconds, batches=batches or 0,
        cold=cold,
    )  # fmt: skip
    kinds: list[Kind] = list(what or (("engines", *_DEFAULT_KINDS) if settings.on_gpu else _DEFAULT_KINDS))
    if train and "train" not in kinds:
        kinds.append("train")
    cases = plan(kinds, device=device, io=io, decoders=decoder, shuffles=shuffle, threads=threads)
    comparison = Comparison(settings=settings)
    try:
        _measure(comparison, cases, rounds, _EXTRA_S + 10 * seconds if timeout is None else timeout)
    finally:
        if comparison.rows:
            _show(comparison, json_file, plot)
    return 0


def _measure(comparison: Comparison, cases: list[Case], rounds: int, timeout_s: float) -> None:
    from shardkit.benching.table import one_run

    shown = sys.stderr.isatty()
    for done, row in enumerate(comparison.run(cases, rounds=rounds, timeout_s=timeout_s), 1):
        if shown:
            warn(f"{done}/{rounds * comparison.planned} {one_run(row)}")


def _show(comparison: Comparison, json_file: str | None, plot: str | None) -> None:
    from shardkit.benching.table import table

    document = comparison.to_json()
    if json_file == "-":
        print_json(document)
    else:
        print_lines([*_about(comparison), "", *table(comparison.rows), *_choices(comparison)])
        if json_file is not None:
            _write(json_file, json.dumps(document, indent=1))
    if plot is not None and any(row.runs for row in comparison.rows):
        from shardkit.benching.plot import draw

        draw(comparison.rows, plot, " · ".join(_about(comparison)[:2]))


def _about(comparison: Comparison) -> list[str]:
    document = comparison.to_json()
    machine, settings = document["machine"], comparison.settings
    gpu = f", {machine['gpu']}" if "gpu" in machine else ""
    cache = "cold: the shards' pages are dropped before each run" if settings.cold else "warm: from the page cache"
    asked, lies_at = machine["asked"], machine["lies_at"]
    linked = "" if lies_at == asked else f" (asked of {quote(asked)}, which lies at {quote(lies_at)})"
    images = f"{count(comparison.samples, 'image')} of {byte_text(comparison.mean_bytes)}"
    return [
        f"{images} on {machine['file_system']}{linked}; {cache}",
        f"{machine['processors']} processors, {machine['processor']}{gpu}",
        f"batches of {settings.batch_size}, {settings.size} x {settings.size} {settings.dtype} on {settings.device}; "
        "medians, each run a process of its own",
        ", ".join(f"{name} {version}" for name, version in document["versions"].items()),
        *comparison.notes,
    ]


def _choices(comparison: Comparison) -> list[str]:
    lines = []
    for choice in comparison.choices():
        for name in ("io", "decoder"):
            reason = choice.get(f"{name}_reason")
            if reason is not None:
                lines.append(f"  {choice['row']}: {name} {choice[name]}, because {reason}")
    return ["", "what auto takes:", *dict.fromkeys(lines)] if lines else []


def _require_places(paths: list[str | None]) -> None:
    """Refuse files that surely cannot be written; none is made or touched.

    Raises:
        ConfigError: there is no folder for one, or a folder has its name.
        StorageError: one may not be written.
    """
    for path in filter(None, paths):
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder) or os.path.isdir(path):
            raise ConfigError("no file can be written there", path=path, remedy="name a file in a folder that exists")
        if not os.access(path if os.path.exists(path) else folder, os.W_OK):
            raise StorageError(
                "the file may not be written", path=path, remedy="check the owner, the mode and the mount"
            )


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise from_os_error(error, "cannot write the figures", path=path) from error
