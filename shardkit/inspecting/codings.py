"""What the images are: the JPEG facts of the index, counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from shardkit.format.jpeg import SUBSAMPLINGS, hardware_decodable
from shardkit.format.media_type import MEDIA_TYPES
from shardkit.inspecting.report import ImageFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    _Counts: TypeAlias = npt.NDArray[np.int64]
    _Block: TypeAlias = Mapping[str, npt.NDArray[np.integer]]

__all__ = ["COLUMNS", "CodingTally"]

_CODES = ("sof", "components", "subsampling", "precision", "orientation")
COLUMNS = ("media_type", *_CODES, "scans", "restart_interval")
"""What a block must have."""
_JPEG = MEDIA_TYPES.index("jpeg")
_FRAMES = ("baseline", "extended", "progressive", "lossless")


class CodingTally:
    """Counts what images are, in constant memory."""

    def __init__(self) -> None:
        """Start empty."""
        self._media: _Counts = np.zeros(256, np.int64)
        self._codes = {name: np.zeros(256, np.int64) for name in _CODES}
        self._restarts = self._several = self._unknown = self._decodable = 0

    def see(self, block: _Block) -> None:
        """Count the images of a block; columns [n] each."""
        media = block["media_type"]
        self._media += np.bincount(media, minlength=256)
        is_jpeg = media == _JPEG
        jpegs = block if is_jpeg.all() else {name: block[name][is_jpeg] for name in COLUMNS}
        for name, counts in self._codes.items():
            counts += np.bincount(jpegs[name], minlength=256)
        self._restarts += int(np.count_nonzero(jpegs["restart_interval"]))
        self._several += int(np.count_nonzero(jpegs["scans"] > 1))
        self._unknown += int(np.count_nonzero(jpegs["scans"] == 0))
        decodable = hardware_decodable(
            jpegs["sof"], jpegs["precision"], jpegs["scans"], jpegs["components"], jpegs["subsampling"]
        )
        self._decodable += int(np.count_nonzero(decodable))

    def facts(self) -> ImageFacts:
        """Return what was counted."""
        return ImageFacts(
            media_types=_named(self._media, _name_in(MEDIA_TYPES, "code {}")),
            jpegs=int(self._media[_JPEG]),
            hardware_decodable=self._decodable,
            frames=_named(self._codes["sof"], _name_in(_FRAMES, "SOF{}")),
            components=_named(self._codes["components"], str),
            subsamplings=_named(self._codes["subsampling"], _name_in(SUBSAMPLINGS, "code {}")),
            precisions=_named(self._codes["precision"], str),
            orientations=_named(self._codes["orientation"], str),
            restarts=self._restarts,
            several_scans=self._several,
            unknown_scans=self._unknown,
        )


def _named(counts: _Counts, name: Callable[[int], str]) -> dict[str, int]:
    """Return the counts that are not 0 by name, the greatest first."""
    codes = np.flatnonzero(counts)
    order = codes[np.argsort(-counts[codes], kind="stable")]
    return {name(code): int(counts[code]) for code in order.tolist()}


def _name_in(names: tuple[str, ...], other: str) -> Callable[[int], str]:
    return lambda code: names[code] if code < len(names) else other.format(code)
