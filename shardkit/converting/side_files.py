"""What lies beside the files of a foreign dataset: class names, refusals, and the card of the hub."""

from __future__ import annotations

import codecs
import os
from typing import TYPE_CHECKING

from shardkit.converting.known_files import CARD, CARD_MARK
from shardkit.converting.writers import CLASSES
from shardkit.errors import ConfigError, FormatError
from shardkit.escaping import escape
from shardkit.format.dataset_record import REJECTED
from shardkit.format.keys import path_from_source
from shardkit.packing.refusals import encode_refusals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.packing.refusals import Refusal

__all__ = ["check_class_names", "split_name", "write_card", "write_classes", "write_refusals"]


_REMEDY = "give the classes other names by --labels"


def check_class_names(classes: Sequence[str]) -> None:
    """Refuse class names that a list with one a line cannot state, or not so that it is read back.

    Raises:
        ConfigError: names one.
    """
    for name in classes:
        if b"\n" in _bytes(name) or _bytes(name).endswith(b"\r"):
            raise ConfigError(f"a class name with a line break has no place in {CLASSES}", found=escape(name[:80]),
                              remedy=_REMEDY)  # fmt: skip
    first = _bytes(classes[0]) if classes else b""
    if first.lstrip().startswith(b"{") or first.startswith(codecs.BOM_UTF8):
        # --labels and --classes would take the list for a JSON object, or the mark for no part of the name.
        raise ConfigError(f"a first class in {CLASSES} that would be read otherwise", found=escape(classes[0][:80]),
                          remedy=_REMEDY)  # fmt: skip


def write_classes(folder: str, classes: Sequence[str]) -> None:
    """Write class names as `--labels` takes them: one a line, in label order."""
    with open(os.path.join(folder, CLASSES), "xb") as file:
        file.write(b"".join(_bytes(name) + b"\n" for name in classes))


def write_refusals(folder: str, refused: Sequence[Refusal]) -> None:
    """Write `rejected.jsonl`, where there is something to say."""
    if refused:
        with open(os.path.join(folder, REJECTED), "xb") as file:
            file.write(encode_refusals(refused))


def split_name(part: str | None) -> str:
    """Return what Hugging Face calls a part: letters, digits and `_`.

    >>> split_name(None), split_name("hard-val")
    ('train', 'hard_val')
    """
    return "train" if part is None else part.replace("-", "_")


def write_card(folder: str, parts: Sequence[str | None]) -> None:
    """Write the card that says which Parquet files are which split; what else lies in the folder is then no data."""
    files = [
        f"  - split: {split_name(part)}\n    path: {'' if part is None else f'{part}/'}{split_name(part)}-*.parquet\n"
        for part in parts
    ]
    text = f"---\nconfigs:\n- config_name: default\n  data_files:\n{''.join(files)}---\n\n{CARD_MARK}.\n"
    with open(os.path.join(folder, CARD), "x", encoding="utf-8") as file:
        file.write(text)


def _bytes(name: str) -> bytes:
    try:
        return path_from_source(name)
    except FormatError:  # a name that somebody made up, with a percent sign that stands for itself
        return name.encode("utf-8", "surrogatepass")
