"""The foreign formats by the names that `--to` takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.exporting.aistore import aistore_files
from shardkit.exporting.dali import dali_files
from shardkit.exporting.energon import energon_files
from shardkit.exporting.huggingface import huggingface_files
from shardkit.exporting.openclip import openclip_files
from shardkit.exporting.timm import timm_files
from shardkit.exporting.wids import wids_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from shardkit.exporting.table import ForeignFile, Table

__all__ = ["FORMATS"]

FORMATS: Mapping[str, Callable[[Table], Iterable[ForeignFile]]] = {
    "wids": wids_files,
    "energon": energon_files,
    "timm": timm_files,
    "openclip": openclip_files,
    "huggingface": huggingface_files,
    "aistore": aistore_files,
    "dali": dali_files,
}
