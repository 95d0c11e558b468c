"""The list of refused sources, counted by reason; memory does not grow with it."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

from shardkit.errors import IntegrityError, from_os_error
from shardkit.format.dataset_record import REJECTED
from shardkit.format.strict_json import parse_json_object
from shardkit.inspecting.report import MAX_REJECTED, RejectedSource, Rejections
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from typing import BinaryIO

    from shardkit.format.manifest import Manifest

__all__ = ["read_rejected"]

_LINE_BYTES = 1 << 20
_FIELDS = ("path", "reason", "detail")


def read_rejected(folder: str, manifest: Manifest) -> Rejections:
    """Read `rejected.jsonl` of the dataset in a folder.

    Raises:
        IntegrityError: it is not what the manifest says, or a line of it is damaged.
        StorageError: the system failed to read it.
        UnsafeError: it is no regular file.
    """
    if manifest.rejected is None:
        return Rejections(total=manifest.totals.refused, reasons={}, first=())
    path = os.path.join(folder, REJECTED)
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != manifest.rejected.bytes:
                raise _damaged(path, None, f"{manifest.rejected.bytes} bytes", f"{size} bytes")
            reasons, first = _count(path, file)
    except FileNotFoundError as error:
        raise _damaged(path, None, f"{manifest.rejected.bytes} bytes", "no such file") from error
    except OSError as error:
        raise from_os_error(error, "cannot read the list of refused sources", path=path) from error
    if reasons.total() != manifest.totals.refused:
        raise _damaged(path, None, f"{manifest.totals.refused} lines", f"{reasons.total()} lines")
    return Rejections(total=reasons.total(), reasons=dict(reasons.most_common()), first=first)


def _count(path: str, file: BinaryIO) -> tuple[Counter[str], tuple[RejectedSource, ...]]:
    reasons: Counter[str] = Counter()
    first: list[RejectedSource] = []
    offset = 0
    while line := file.readline(_LINE_BYTES):
        try:
            document = parse_json_object(str(line, "utf-8"))
            source = RejectedSource(*(document[name] for name in _FIELDS))
            if not line.endswith(b"\n") or not all(isinstance(document[name], str) for name in _FIELDS):
                raise ValueError("a line with other fields, or too long")
        except (ValueError, KeyError) as error:
            raise _damaged(path, offset, "path, reason and detail", str(error)[:200]) from error
        reasons[source.reason] += 1
        if len(first) < MAX_REJECTED:
            first.append(source)
        offset += len(line)
    return reasons, tuple(first)


def _damaged(path: str, offset: int | None, expected: str, found: str) -> IntegrityError:
    return IntegrityError(
        "the list of refused sources is damaged", path=path, offset=offset, expected=expected, found=found,
        remedy="run shardkit verify",
    )  # fmt: skip
