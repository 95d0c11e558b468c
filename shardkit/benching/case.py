"""What is measured: one row of the table, what all rows share, and which rows there are."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["IO", "KINDS", "SHUFFLES", "Case", "Kind", "Settings", "decoders_for", "plan", "split_usable"]

Kind: TypeAlias = Literal[
    "device", "plain", "read", "engines", "decode", "pipeline", "rival", "first", "epochs", "train"
]
"""What the device is; plain preadv of all shards; batches of encoded images; nvJPEG's engines alone; decoding of images
in memory; finished batches; finished batches by DALI's own reader; the first batch of a process; one epoch after the
other; finished batches into a training step."""
KINDS: tuple[Kind, ...] = (
    "plain", "read", "engines", "decode", "pipeline", "rival", "first", "epochs", "train",
)  # fmt: skip
"""Those that are rows of the table."""
IO = ("buffered", "direct", "uring", "gds")
"""Ways to read, "auto" aside."""
SHUFFLES = ("none", "window", "global")
_SYNTHETIC = "synthetic"
_RIVAL = "DALI readers.webdataset"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table. What a kind does not have is empty."""

    kind: Kind
    """What is measured."""
    io: str = ""
    """The way to read, or "auto"."""
    decoder: str = ""
    """What decodes, or "auto"; of "train" also "synthetic", one batch again and again, and "rival"."""
    shuffle: str = ""
    """The order of the samples."""
    threads: int = 0
    """Threads that read ("plain") or decode; 0 for the default."""
    chunk_bytes: int = 0
    """Of "plain": bytes of one read."""
    options: tuple[tuple[str, Any], ...] = ()
    """Further arguments of `ShardLoader`, of DALI's reader, or of `PlainReads`; Any: JSON values."""

    @property
    def name(self) -> str:
        """What the row is called."""
        if self.kind == "plain":
            parts = [f"preadv, {self.io}, {self.threads} x {self.chunk_bytes >> 10} KiB"]
            return ", ".join([*parts, *(f"{name}={value}" for name, value in self.options)])
        if self.kind == "engines":
            return "nvjpegDecodeBatched alone"
        if self.kind == "rival" or self.decoder == "rival":
            parts = [_RIVAL, self.shuffle]
        elif self.decoder == _SYNTHETIC:
            parts = ["one batch again and again"]
        else:
            parts = [self.io, self.decoder, self.shuffle]
        if self.threads:
            parts.append(f"{self.threads} threads")
        return ", ".join([*filter(None, parts), *(f"{name}={value}" for name, value in self.options)])

    def to_json(self) -> dict[str, Any]:  # Any: JSON values
        """Return the fields that are not empty."""
        found = {key: value for key, value in asdict(self).items() if value}
        return found | ({"options": dict(self.options)} if self.options else {}) | {"name": self.name}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Case:
        """Return what `to_json` was made of."""
        fields = {key: value for key, value in values.items() if key not in {"name", "options"}}
        return cls(**fields, options=tuple(values.get("options", {}).items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all rows share."""

    dataset: str
    """Folder of the dataset."""
    device: str = "cpu"
    """"cpu", "cuda" or "cuda:N"."""
    batch_size: int = 256
    """Samples of a batch."""
    size: int = 224
    """Pixels of a side of the finished images."""
    seconds: float = 3.0
    """How long each run measures."""
    batches: int = 0
    """How many batches each run measures, instead of the time; 0 for the time."""
    warm_up: int = 8
    """Batches before the clock starts, at the most; of a small dataset one epoch."""
    cold: bool = False
    """Drop the shards' pages first, and measure one epoch at the most: a second one would come from memory."""

    @property
    def on_gpu(self) -> bool:
        """Whether the batches are made on a GPU."""
        return self.device.startswith("cuda")

    @property
    def dtype(self) -> str:
        """The type of the pixels: what training on such a device takes."""
        return "float16" if self.on_gpu else "float32"


def decoders_for(device: str) -> tuple[str, ...]:
    """Return the decoders that work for a device, "auto" aside."""
    return ("nvjpeg", "dali") if device.startswith("cuda") else ("dali", "cpu")


def plan(
    kinds: Iterable[Kind], *, device: str, io: Sequence[str] = (), decoders: Sequence[str] = (),
    shuffles: Sequence[str] = (), threads: int = 0,
) -> list[Case]:  # fmt: skip
    """Return the rows that were asked for, whether this machine can have them or not.

    Args:
        kinds: kinds of rows.
        device: what makes the batches.
        io: ways to read; empty for all of the device, and "auto" in pipelines.
        decoders: likewise.
        shuffles: orders; empty for all.
        threads: of the decoders; 0 for the default.
    """
    wanted, on_gpu = set(kinds), device.startswith("cuda")
    ways = [name for name in io or IO if io or on_gpu or name != "gds"]
    decode = list(decoders or decoders_for(device))
    orders = list(shuffles or SHUFFLES)
    auto = [] if io or decoders else ["auto"]
    found: list[Case] = []
    if "plain" in wanted:
        found += [
            Case(kind="plain", io=name, threads=count, chunk_bytes=1 << 20)
            for name, count in itertools.product(("buffered", "direct"), (4, 16))
        ]
    if "read" in wanted:
        found += [Case(kind="read", io=name, shuffle=order) for order in orders for name in [*auto, *ways]]
    if "engines" in wanted:
        found.append(Case(kind="engines"))
    if "decode" in wanted:
        found += [Case(kind="decode", decoder=name, threads=threads) for name in decode]
    pairs = [*((name, name) for name in auto), *itertools.product(ways, decode)]
    if "pipeline" in wanted:
        found += [
            Case(kind="pipeline", io=name, decoder=decoder, shuffle=order, threads=threads)
            for order in orders
            for name, decoder in pairs
        ]
    if "rival" in wanted:
        found += [Case(kind="rival", threads=count) for count in ((threads,) if threads else _rival_threads(on_gpu))]
    if "first" in wanted:
        found += [Case(kind="first", io=auto[0] if auto else ways[0], decoder=name) for name in (*decode, "rival")]
    if "epochs" in wanted:
        found += [Case(kind="epochs", io=name, decoder=decoder, threads=threads) for name, decoder in pairs]
    if "train" in wanted:
        names = ["synthetic", *(("auto",) if auto else decode), "rival"]
        found += [
            Case(kind="train", decoder=name, io="" if name in {"synthetic", "rival"} else "auto") for name in names
        ]
    return found


def _rival_threads(on_gpu: bool) -> tuple[int, ...]:
    return (2, 4, 8) if on_gpu else (0,)


def split_usable(cases: Iterable[Case], refusals: Mapping[str, str]) -> tuple[list[Case], dict[Case, str]]:
    """Return the rows that can be measured, and why the others cannot.

    Args:
        cases: all rows.
        refusals: reason by a way to read, a decoder or a kind of row that cannot be had.
    """
    usable: list[Case] = []
    refused: dict[Case, str] = {}
    for case in cases:
        reason = next((refusals[name] for name in (case.kind, case.io, case.decoder) if name in refusals), None)
        if reason is None:
            usable.append(case)
        else:
            refused[case] = reason
    return usable, refused
