"""Samples that cannot be used: what is told without a decoder, who they were, and who stands in for them."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from shardkit.errors import FormatError
from shardkit.escaping import escape
from shardkit.format.jpeg_header import DECODED_SOFS
from shardkit.format.media_type import MEDIA_TYPES, sniff_media_type
from shardkit.splitmix import STEP, U64, mix

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from shardkit.dataset.samples import Samples
    from shardkit.dataset.shardset import Located

    _Ints = npt.NDArray[np.int64]

__all__ = ["ATTEMPTS", "BadSamples", "OnBad", "inspect_facts", "inspect_payloads", "substitute_position"]

OnBad: TypeAlias = Literal["substitute", "raise"]
"""Put another sample of the epoch into the place of a bad one, or raise an error that names it."""
ATTEMPTS = 64
"""Substitutes that are tried for one place. With half of a dataset bad, one place in 2**64 is not filled."""

_JPEG = MEDIA_TYPES.index("jpeg")
_NO_IMAGES = ("pdf", "zip", "html", "xml", "text", "gzip")
_START = (0xFF, 0xD8, 0xFF)
_FACTS = ("media_type", "sof", "precision")
_DECODED = np.isin(np.arange(256), DECODED_SOFS)  # a table: looked up for every sample of every step
_SALT = 0x6261640000  # keeps these choices apart from others that are drawn from the same seed

_log = logging.getLogger(__name__)


class BadSamples:
    """The record of the samples that could not be used, over all epochs of a loader. Threads may share it."""

    def __init__(self, samples: Samples, on_bad: OnBad) -> None:
        """Start with none.

        Args:
            samples: where ids count.
            on_bad: what `note` does.
        """
        self._samples = samples
        self._on_bad = on_bad
        self._reasons: dict[int, str] = {}
        self._lasting: dict[int, str] = {}
        self._lock = threading.Lock()
        self.substitutions = 0
        """How often another sample stood in for a bad one."""

    @property
    def by_key(self) -> Mapping[str, str]:
        """Why each bad sample could not be used."""
        reasons = dict(self._reasons)
        return dict(zip(self._samples.keys(np.asarray(list(reasons), np.int64)), reasons.values(), strict=True))

    def known(self, ids: npt.NDArray[np.int64]) -> dict[int, str]:
        """Return the places among `ids` that hold a sample whose bytes are known to be bad, with its reason."""
        reasons = self._lasting
        if not reasons:
            return {}
        return {at: reasons[number] for at, number in enumerate(ids.tolist()) if number in reasons}

    def note(self, number: int, reason: str, located: tuple[str, int], *, lasting: bool) -> None:
        """Write a sample down, and say so when it is new.

        Args:
            number: its id.
            reason: one clause.
            located: path of the shard and offset of the payload.
            lasting: the reason lies in the stored bytes alone, so it holds in every epoch. A decoder's verdict may
                depend on the crop; it is asked again in each epoch, so that what comes out never depends on what was
                found before.

        Raises:
            FormatError: `on_bad` is "raise".
        """
        path, offset = located
        key = self._samples.keys(np.asarray([number], np.int64))[0]
        if self._on_bad == "raise":
            raise FormatError(
                "a sample cannot be used", path=path, offset=offset, key=key, found=reason,
                remedy="take on_bad='substitute' to go on without it, and run shardkit verify --level decode",
            )  # fmt: skip
        with self._lock:
            new = number not in self._reasons
            self._reasons.setdefault(number, reason)
            if lasting:
                self._lasting.setdefault(number, reason)
        if new:
            _log.warning(
                "%s:%d [sample %s] cannot be used, another sample stands in for it: %s",
                escape(path), offset, escape(key), reason,
            )  # fmt: skip

    def count_substitutions(self, count: int) -> None:
        """Add to the number of substitutes that were put into a batch."""
        with self._lock:
            self.substitutions += count


def substitute_position(position: int, attempt: int, n: int, *, seed: int, epoch: int) -> int:
    """Return the place in the epoch whose sample stands in for the bad sample at `position`.

    A function of its arguments alone, so that every rank, every batch size and every resumed run takes the same one.

    Args:
        position: place of the bad sample.
        attempt: 0 for the first substitute, 1 when that one is bad, too, and so on.
        n: samples of the epoch.
        seed: of the order.
        epoch: its number.
    """
    return mix((mix(mix(mix(_SALT) + seed) + epoch) + position * ATTEMPTS * STEP + attempt) & U64) % n


def inspect_payloads(
    samples: Samples, ids: npt.NDArray[np.int64], located: Located, whole: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
) -> dict[int, str]:  # fmt: skip
    """Return the places whose payload no decoder will take, with the reason, by the index's facts and its first bytes.

    Args:
        samples: where ids count.
        ids: [n].
        located: [n].
        whole: the memory that the payloads lie in.
        starts: [n] first byte of each payload in `whole`.
    """
    kind, sof, precision = (samples.gather(name, ids) for name in _FACTS)
    odd = np.zeros(len(ids), np.bool_)
    if whole.size:
        for number, byte in enumerate(_START):
            odd |= whole[np.minimum(starts + number, whole.size - 1)] != byte
    odd |= _unusual(located, kind, sof, precision)
    bad = {}
    for at in np.flatnonzero(odd).tolist():
        start, size = int(starts[at]), int(located.size[at])
        reason = _reason(whole[start : start + size], int(kind[at]), int(sof[at]), int(precision[at]))
        if reason is not None:
            bad[at] = reason
    return bad


def inspect_facts(samples: Samples, ids: npt.NDArray[np.int64], located: Located) -> dict[int, str]:
    """Return the places whose payload no decoder will take, with the reason, by the index's facts alone.

    For payloads that the host does not see. Those that are not what the index says are a decoder's to refuse.

    Args:
        samples: where ids count.
        ids: [n].
        located: [n].
    """
    kind, sof, precision = (samples.gather(name, ids) for name in _FACTS)
    bad = {}
    for at in np.flatnonzero(_unusual(located, kind, sof, precision)).tolist():
        stated = _stated(int(kind[at]))
        reason = "the payload is empty" if not located.size[at] else None
        if stated in _NO_IMAGES:
            reason = reason or f"it is no image, the index says {stated}"
        reason = reason or _jpeg_reason(stated, int(sof[at]), int(precision[at]))
        if reason is not None:
            bad[at] = reason
    return bad


def _unusual(located: Located, kind: _Ints, sof: _Ints, precision: _Ints) -> npt.NDArray[np.bool_]:
    """Return which samples deserve a closer look."""
    jpeg = kind == _JPEG
    odd: npt.NDArray[np.bool_] = (located.size < len(_START)) | ~jpeg
    odd |= jpeg & (((precision != 8) & (precision != 0)) | ~_DECODED[sof])
    return odd


def _reason(payload: npt.NDArray[np.uint8], kind: int, sof: int, precision: int) -> str | None:
    if not payload.size:
        return "the payload is empty"
    stated = _stated(kind)
    found = MEDIA_TYPES[sniff_media_type(payload.data)]
    if stated not in ("unknown", found):
        return f"the index says {stated}, the first bytes say {found}"
    if found in _NO_IMAGES:
        return f"it is no image, the first bytes say {found}"
    return _jpeg_reason(stated, sof, precision)


def _stated(kind: int) -> str:
    return MEDIA_TYPES[kind] if kind < len(MEDIA_TYPES) else "unknown"


def _jpeg_reason(stated: str, sof: int, precision: int) -> str | None:
    if stated == "jpeg" and precision not in (0, 8):
        return f"a JPEG of {precision} bits a component"
    if stated == "jpeg" and sof not in DECODED_SOFS:
        return f"a JPEG whose frame is SOF{sof}, neither baseline, extended nor progressive"
    return None
