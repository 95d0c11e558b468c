"""Progressive JPEGs become baseline without loss, by libjpeg-turbo's own library: no Python package offers that.

The functions are those of TurboJPEG 2, which version 3 has, too.
"""

from __future__ import annotations

import ctypes
from functools import cache

from shardkit.errors import CapabilityError
from shardkit.format.jpeg import JpegFacts, JpegRefusal, hardware_decodable, inspect_jpeg
from shardkit.packing.refusals import RefusedError

__all__ = ["baseline_jpeg", "can_be_baseline", "require_turbojpeg"]

_LIBRARY = "libturbojpeg.so.0"
_LIMIT_SCANS = 32768  # TJFLAG_LIMITSCANS: an error from 501 scans on, which only make work
_HUFFMAN_FRAMES = (0, 1, 2)  # baseline, extended, progressive
_KEPT = ("width", "height", "components", "subsampling", "precision", "orientation", "trailing")


class _Transform(ctypes.Structure):
    """The library's tjtransform. Zeros: no operation, every marker copied, sequential, the standard Huffman tables."""

    _fields_ = [
        ("x", ctypes.c_int), ("y", ctypes.c_int), ("w", ctypes.c_int), ("h", ctypes.c_int),
        ("op", ctypes.c_int), ("options", ctypes.c_int), ("data", ctypes.c_void_p), ("filter", ctypes.c_void_p),
    ]  # fmt: skip


@cache
def require_turbojpeg() -> ctypes.CDLL:
    """Return the library.

    Raises:
        CapabilityError: it is not here.
    """
    try:
        library = ctypes.CDLL(_LIBRARY)
        for name in ("tjInitTransform", "tjTransform", "tjDestroy", "tjFree", "tjGetErrorStr2"):
            getattr(library, name)
    except (OSError, AttributeError) as error:
        raise CapabilityError(
            "--baseline needs libjpeg-turbo's TurboJPEG library", expected=_LIBRARY, found=str(error)[:200],
            remedy="apt-get install libturbojpeg0 (Fedora: dnf install turbojpeg), or leave --baseline away",
        ) from error  # fmt: skip
    library.tjInitTransform.restype = ctypes.c_void_p
    library.tjTransform.argtypes = (
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_ulong), ctypes.POINTER(_Transform), ctypes.c_int,
    )  # fmt: skip
    library.tjDestroy.argtypes = library.tjFree.argtypes = library.tjGetErrorStr2.argtypes = (ctypes.c_void_p,)
    library.tjGetErrorStr2.restype = ctypes.c_char_p
    return library


def can_be_baseline(facts: JpegFacts) -> bool:
    """Return whether a GPU's JPEG engines do not take it, and would if it were baseline in one scan.

    One with further images behind it is left alone: its directory says at which byte they start.
    """
    would = hardware_decodable(0, facts.precision, 1, facts.components, facts.subsampling)
    return would and facts.sof in _HUFFMAN_FRAMES and not facts.hardware_decodable and not facts.secondary


def baseline_jpeg(data: bytes, facts: JpegFacts) -> bytes | None:
    """Return a JPEG with the same coefficients, markers and trailing bytes, baseline in one scan.

    Args:
        data: the whole JPEG, for which `can_be_baseline` holds.
        facts: of it.

    Returns:
        None for one that baseline cannot hold: with quantization tables of 16 bits.

    Raises:
        RefusedError: `undecodable`, when the library fails or warns, or makes another image of it.
        CapabilityError: the library is not here.
        MemoryError: too little for the image's coefficients.
    """
    end = len(data) - facts.trailing
    made = _transformed(data[:end]) + data[end:]
    try:
        after = inspect_jpeg(made)
    except JpegRefusal as refusal:
        raise RefusedError("undecodable", f"as baseline: {refusal.detail}") from refusal
    changed = [name for name in _KEPT if getattr(after, name) != getattr(facts, name)]
    if changed or not (after.hardware_decodable or after.sof == 1):
        raise RefusedError("undecodable", f"TurboJPEG made another image of it: {', '.join(changed) or 'no baseline'}")
    return made if after.hardware_decodable else None


def _transformed(data: bytes) -> bytes:
    """Run one image through a handle of its own, so that threads share none and no memory stays."""
    library = require_turbojpeg()
    handle = library.tjInitTransform()
    if not handle:
        raise MemoryError("TurboJPEG has no memory for a handle")
    made, size, transform = ctypes.c_void_p(), ctypes.c_ulong(), _Transform()
    try:
        failed = library.tjTransform(
            handle, data, len(data), 1, ctypes.byref(made), ctypes.byref(size), ctypes.byref(transform), _LIMIT_SCANS
        )
        if failed:
            text = (library.tjGetErrorStr2(handle) or b"").decode("ascii", "backslashreplace")[:200]
            if "memory" in text.lower():
                raise MemoryError(text)
            raise RefusedError("undecodable", f"TurboJPEG: {text}")
        return ctypes.string_at(made, size.value)
    finally:
        library.tjFree(made)
        library.tjDestroy(handle)
