"""The index of a shard, made of its samples as columns, and what of them is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardkit.escaping import is_unicode
from shardkit.format.dali_index import encode_dali_columns, listed_word
from shardkit.format.index import FACTS, column_batch
from shardkit.format.keys import source_from_path
from shardkit.format.tar import BLOCK
from shardkit.indexing.images import MAX_IMAGE_BYTES
from shardkit.indexing.refusals import sample_refusal, verdict_refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from shardkit.format.index import RecordBatch
    from shardkit.format.sample_columns import Ints, SampleColumns, Texts
    from shardkit.indexing.notes import Notes
    from shardkit.indexing.refusals import IndexRefusal

__all__ = ["ShardRows", "sample_labels", "sample_refusals", "shard_rows"]

_LOOK_BYTES = 1 << 16
_PERCENT, _SPACE, _DELETE = b"% \x7f"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRows:
    """What is written of a shard, and counted."""

    batch: RecordBatch
    dali_index: bytes
    payload: int
    """Bytes of the images."""
    padding: int
    """Bytes behind them, up to the next block."""
    odd_images: int
    """Rows whose image is a JPEG without its end, or with bytes that are none."""
    odd_metadata: int
    """Rows whose json member is not one JSON object."""


def sample_labels(samples: SampleColumns, notes: Notes) -> Ints:
    """Return the class number of each sample, -1 without one; shape [samples]."""
    return np.where(samples.labels < 0, -1, notes.labels(samples.offsets[samples.labels]))


def sample_refusals(shard: str, samples: SampleColumns, labels: Ints | None) -> dict[int, IndexRefusal]:
    """Return why samples are not taken, by their number.

    Args:
        shard: file name.
        samples: of the shard.
        labels: as `sample_labels` gives them; None when nobody asks for them.
    """
    keys, starts, sizes = samples.keys, samples.starts, samples.sizes[samples.images]
    found = {
        number: verdict_refusal(shard, _text(keys[number]), int(starts[number]), verdicts)
        for number, verdicts in samples.obstacles.items()
    }
    bad_keys = [] if keys.dtype.kind == "S" else [n for n, key in enumerate(keys) if not is_unicode(key)]
    bad_labels = [] if labels is None else np.flatnonzero((samples.labels >= 0) & (labels < 0)).tolist()
    for numbers, reason, detail in (
        (bad_keys, "bad-key", "the key is not UTF-8"),
        (np.flatnonzero(sizes == 0).tolist(), "empty", "the image has no bytes"),
        (np.flatnonzero(sizes > MAX_IMAGE_BYTES).tolist(), "too-large", f"{{}} bytes; at most {MAX_IMAGE_BYTES}"),
        (bad_labels, "bad-label", "the cls member is no class number"),
    ):
        for number in numbers:
            if number not in found:
                told = detail.format(sizes[number])
                found[number] = sample_refusal(shard, _text(keys[number]), int(starts[number]), reason, told)
    return found


def shard_rows(samples: SampleColumns, notes: Notes, taken: Ints, labels: Ints | None) -> ShardRows:
    """Return the rows and the DALI index of some samples, and what is counted of them.

    Args:
        samples: of the shard.
        notes: what was read of their members.
        taken: shape [rows], number of each sample that becomes a row; rising, at least one.
        labels: as `sample_labels` gives them; None for rows without labels.
    """
    images, objects = samples.images[taken], samples.objects[taken]
    stated = objects >= 0
    known = stated & notes.objects(samples.offsets[objects])
    checksums, whole, facts = notes.images(samples.offsets[images])
    sizes, starts = samples.sizes[images], samples.starts[taken]
    columns = {
        "key": samples.keys[taken], "label": np.full(len(taken), -1) if labels is None else labels[taken],
        "offset": samples.offsets[images], "size": sizes, "crc32c": checksums, "sample_offset": starts,
        "sample_size": samples.ends[taken] - starts, "json_offset": np.where(known, samples.offsets[objects], 0),
        "json_size": np.where(known, samples.sizes[objects], 0), **dict(zip(FACTS, facts.T, strict=True)),
        "source": _sources(samples.names[images]),
    }  # fmt: skip
    return ShardRows(
        batch=column_batch(columns, absent={"label": columns["label"] < 0}), dali_index=_dali_index(samples, taken),
        payload=int(sizes.sum()), padding=int((-sizes % BLOCK).sum()), odd_images=int((~whole).sum()),
        odd_metadata=int((stated & ~known).sum()),
    )  # fmt: skip


def _sources(names: Texts) -> Texts:
    if names.dtype.kind == "S" and not (names.view(np.uint8) == _PERCENT).any():
        return names
    return _changed(names, lambda name: source_from_path(name.encode("utf-8", "surrogateescape")))


def _dali_index(samples: SampleColumns, taken: Ints) -> bytes:
    ends: Texts = np.array(samples.extensions, np.object_)
    of_taken = np.zeros(len(samples), np.bool_)
    of_taken[taken] = True
    rows = of_taken[samples.owners] & (ends != "")[samples.codes]
    places = (samples.owners[rows], samples.offsets[rows], samples.sizes[rows])
    names = samples.names[rows]
    if names.dtype.kind == "O" or _breaks_lines(names.view(np.uint8)):
        names, ends = _changed(names, listed_word), _changed(ends, listed_word)
    return encode_dali_columns(len(taken), *places, ends[samples.codes[rows]], names)


def _breaks_lines(octets: npt.NDArray[np.uint8]) -> bool:
    # NUL is what fills a column. All at once would take fresh memory each time, whose pages cost more than the look.
    parts = (octets[start : start + _LOOK_BYTES] for start in range(0, len(octets), _LOOK_BYTES))
    return any(((part - np.uint8(1) < _SPACE) | (part == _DELETE)).any() for part in parts)


def _changed(texts: Texts, change: Callable[[str], str]) -> Texts:
    return np.fromiter((change(_text(text)) for text in texts), np.object_, len(texts))


def _text(text: str | bytes) -> str:
    return text.decode() if isinstance(text, bytes) else text
