"""What an image is, held against its row; and whether Pillow decodes it. The only importer of Pillow here."""

from __future__ import annotations

import io
import operator
import re
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardkit.escaping import escape
from shardkit.format.index import FACTS
from shardkit.format.jpeg import JpegRefusal, inspect_jpeg
from shardkit.format.media_type import MEDIA_TYPES, PILLOW_FORMATS, sniff_media_type

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["decoding_problem", "facts_problem", "warnings_are_errors"]

_JPEG = MEDIA_TYPES.index("jpeg")
_MEDIA_TYPE, _WIDTH = FACTS.index("media_type"), FACTS.index("width")
_ADDRESS = re.compile("<[^<>]* at 0x[0-9a-f]+>")
_FACTS_OF = operator.attrgetter(*FACTS)


def facts_problem(payload: memoryview, stated: tuple[int, ...]) -> tuple[str, str, str] | None:
    """Return what a row says wrongly about its image: in words, as stated, as found; None when it is right.

    Args:
        payload: the encoded image, in host memory; not retained.
        stated: the row's `FACTS`. A width of 0 states nothing but the media type.
    """
    if stated[_MEDIA_TYPE] != _JPEG or not stated[_WIDTH]:
        actual = sniff_media_type(payload)
        if actual == stated[_MEDIA_TYPE]:
            return None
        return "another media type", _name(stated[_MEDIA_TYPE]), _name(actual)
    try:
        facts = inspect_jpeg(payload)
    except JpegRefusal as refusal:
        return "not a whole JPEG", "a JPEG", refusal.detail
    found = _FACTS_OF(facts)
    if found == stated:
        return None
    wrong = [i for i, pair in enumerate(zip(stated, found, strict=True)) if pair[0] != pair[1]]
    names = ", ".join(FACTS[i] for i in wrong)
    return f"other facts ({names})", _list(stated, wrong), _list(found, wrong)


def _name(code: int) -> str:
    return MEDIA_TYPES[code] if code < len(MEDIA_TYPES) else f"code {code}"


def _list(values: tuple[int, ...], at: list[int]) -> str:
    return ", ".join(str(values[i]) for i in at)


@contextmanager
def warnings_are_errors() -> Iterator[None]:
    """Make Pillow's warnings fail a decode for as long as this lasts, in every thread.

    The warning about many pixels stays silent: Pillow gives it at half of the limit that is an error.
    """
    with warnings.catch_warnings():
        from PIL import Image

        warnings.filterwarnings("error", module=r"PIL\.")
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        yield


def decoding_problem(payload: memoryview) -> tuple[str, str] | None:
    """Return a code (`bomb` or `decode`) and what Pillow says, or None when it decodes the whole image in silence."""
    from PIL import Image  # a tenth of a second that the other levels do not pay

    try:
        with Image.open(io.BytesIO(payload), formats=PILLOW_FORMATS) as image:
            image.load()
    except Image.DecompressionBombError as error:
        return "bomb", escape(str(error))[:200]
    except Exception as error:  # Pillow's plugins raise what their parsers do: OSError, ValueError, SyntaxError, ...
        told = _ADDRESS.sub("", str(error))  # an address is another one in every run
        return "decode", f"{type(error).__name__}: {escape(told)[:200]}"
    return None
