"""Extracting as a whole: plan, write in parallel, sync at the end."""

from __future__ import annotations

import itertools
import os
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from shardkit.errors import CapabilityError, ConfigError, IntegrityError, ShardkitError, TargetFullError
from shardkit.extent import DIRECT_ALIGN
from shardkit.extracting.names import LAYOUTS
from shardkit.extracting.payload import BUFFER_BYTES, Payload, extract_payload
from shardkit.extracting.plan import make_plan
from shardkit.extracting.result import ExtractProgress, ExtractResult, Failure, Tally
from shardkit.extracting.shards import open_for_extraction
from shardkit.extracting.tree import Occupied, Tree
from shardkit.extracting.unproven import vouch
from shardkit.local_path import local_path
from shardkit.running.first_error import FirstError
from shardkit.running.progress import Silent
from shardkit.storage.atomic import os_errors
from shardkit.storage.clone import Reflink, check_reflink, try_to_share
from shardkit.storage.regular import open_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    from shardkit.dataset.shardset import Dataset
    from shardkit.extracting.names import Layout
    from shardkit.extracting.plan import Plan

    _Ints: TypeAlias = npt.NDArray[np.int64]

__all__ = ["ExtractProgress", "ExtractResult", "OnError", "Reflink", "extract"]

OnError: TypeAlias = Literal["fail", "skip"]
_T = TypeVar("_T")
_FULL = "free space (or raise the quota or the file size limit) and run again: it goes on"
_PIECES_AHEAD = 2


def extract(
    dataset: str | os.PathLike[str], dst: str | os.PathLike[str], *, keys: Sequence[str] | None = None,
    layout: Layout = "source", jobs: int | None = None, on_error: OnError = "fail", overwrite: bool = False,
    reflink: Reflink = "auto", progress: ExtractProgress | None = None,
) -> ExtractResult:  # fmt: skip
    """Write the images of a dataset into a folder, one file a sample, each checked against its CRC-32C.

    Of shards that were indexed without checksums, the headers before each image must say what the index says of it, and
    its bytes are taken as they are; the result says so.

    A file gets its name when all of it is written. What is there already with the right bytes is kept, so the same call
    goes on with what an earlier one began.

    Args:
        dataset: folder of the dataset.
        dst: folder of the tree; made when it is not there. Other files in it stay.
        keys: of the samples wanted; None for all.
        layout: `source` for the paths that were packed, where they are known and safe; `class` for a folder a class.
        jobs: threads; default the number of usable CPUs. Any number gives the same tree.
        on_error: `fail` stops at the first sample that cannot be extracted, `skip` counts it and goes on.
        overwrite: replace files of other content that have the name of one of the tree.
        reflink: `auto` lets files share whole blocks with the shards where the file system does that, `always` fails
            where it does not, `never` copies.
        progress: told how far it is.

    Raises:
        ConfigError: an option, a key that is not there, or (`Occupied`) a name that something else has.
        IntegrityError: an image is not what was packed; names shard, offset and key.
        UnsafeError: a name leads out of the target, or a link has the name of a folder.
        TargetFullError: no space; what is written is kept.
        CapabilityError: blocks cannot be shared, with `reflink="always"`.
        StorageError: the system failed a read or a write, or does not allow it.
        LockedError: another extraction into `dst` runs.
    """
    if layout not in LAYOUTS or on_error not in ("fail", "skip"):
        raise ConfigError("unknown layout or on_error", found=ascii((layout, on_error)))
    check_reflink(reflink)
    jobs = len(os.sched_getaffinity(0)) if jobs is None else jobs
    if jobs < 1:
        raise ConfigError("jobs is at least 1", found=jobs)
    told = progress or Silent()
    with open_for_extraction(dataset) as source:
        target = _target(source, dst)
        plan = make_plan(source, layout, keys)
        if plan.refused and on_error == "fail":
            raise next(iter(plan.refused.values())).error
        if reflink == "always":
            _refuse_unshareable(plan, target)
        with Tree(target).hold() as tree:
            told.begin(len(plan.rows), plan.payload())
            return _Extraction(plan, tree, on_error, overwrite, reflink).run(jobs, told)


def _target(dataset: Dataset, dst: str | os.PathLike[str]) -> bytes:
    target = local_path(dst)
    inside = os.path.realpath(os.fsencode(dataset.path)).rstrip(b"/") + b"/"
    if (os.path.realpath(target) + b"/").startswith(inside):
        raise ConfigError("the target lies inside the dataset", path=target, remedy="choose a folder outside")
    return target


def _refuse_unshareable(plan: Plan, target: bytes) -> None:
    """Refuse to begin what could not share its blocks."""
    if not len(plan.rows):
        return
    try_to_share(os.fsencode(plan.shard_of(int(plan.rows[0]))), target)
    columns = plan.dataset.columns
    sizes, offsets = columns.numbers("size")[plan.rows], columns.numbers("offset")[plan.rows]
    between = plan.rows[(sizes >= DIRECT_ALIGN) & (offsets % DIRECT_ALIGN != 0)]
    if len(between):
        row = int(between[0])
        raise CapabilityError(
            "images that do not start where a block does share none with a file", path=plan.shard_of(row),
            offset=columns.numbers("offset")[row], key=columns.texts("key")[row], found=f"{len(between)} of them",
            remedy="shardkit convert makes aligned shards; else leave --reflink always away",
        )  # fmt: skip


class _Extraction:
    """One extraction, as its threads share it."""

    def __init__(self, plan: Plan, tree: Tree, on_error: OnError, overwrite: bool, reflink: Reflink) -> None:
        self._plan, self._tree, self._reflink = plan, tree, reflink
        self._on_error, self._overwrite = on_error, overwrite
        self._proven = plan.dataset.manifest.has_checksums
        self._tally = Tally()
        self._stop = threading.Event()
        self._buffers = threading.local()

    def run(self, jobs: int, progress: ExtractProgress) -> ExtractResult:
        """Write every file, then sync every file and folder."""
        keys = self._plan.dataset.columns.texts("key")
        for row, refusal in self._plan.refused.items():
            self._tally.fail(row, Failure(keys[row], refusal.reason, str(refusal.error)))
        try:
            self._in_threads(jobs, self._extract_piece, lambda done: progress.advance(*done))
            self._in_threads(jobs, self._sync_piece, lambda _: None)
            folders = self._tree.sync_folders()
        except ShardkitError as error:
            error.kept = self._kept_text()
            if isinstance(error, TargetFullError):
                error.remedy = _FULL
            raise
        except BaseException as error:  # Ctrl-C, SIGTERM, a bug
            error.add_note(f"{self._kept_text()}; run again to go on")
            raise
        tally = self._tally
        return ExtractResult(
            samples=len(self._plan.rows), checksums=self._proven, made=tally.made, made_bytes=tally.made_bytes,
            shared_bytes=tally.shared_bytes, kept=tally.kept, folders=folders, renamed=self._plan.renamed,
            unstated=self._plan.unstated, counts=dict(sorted(tally.counts.items())),
            failures=tuple(failure for _, failure in sorted(tally.failures.items())),
        )  # fmt: skip

    def _kept_text(self) -> str:
        whole = self._tally.made + self._tally.kept
        return f"{whole} whole {'file is' if whole == 1 else 'files are'} kept"

    def _in_threads(self, jobs: int, work: Callable[[_Ints], _T], done: Callable[[_T], object]) -> None:
        pool = ThreadPoolExecutor(jobs, "extract")
        try:
            for result in _results(pool, work, self._plan.pieces(), jobs + _PIECES_AHEAD):
                done(result)
        except BaseException:
            self._stop.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _extract_piece(self, rows: _Ints) -> tuple[int, int]:
        """Extract samples of one shard; return their number and bytes."""
        if self._stop.is_set():
            return 0, 0
        shard = self._plan.shard_of(int(rows[0]))
        names = self._plan.names(rows)
        total = 0
        with os_errors("cannot open a shard", os.fsencode(shard)), open_regular(shard) as file:
            for row, name in zip(rows.tolist(), names, strict=True):
                if self._stop.is_set():
                    break
                if row not in self._plan.refused:
                    total += self._extract_one(file.fileno(), row, name.path)
        return len(rows), total

    def _extract_one(self, shard: int, row: int, path: bytes) -> int:
        """Make, or keep, one file; return its bytes."""
        payload = None
        try:
            payload = self._payload(row)
            payload = payload if self._proven else self._vouched(shard, payload)
            state = self._tree.state(path, payload.size, payload.checksum)
            if state == "other" and not self._overwrite:
                there = os.path.join(self._tree.folder, path)
                raise Occupied(
                    "the target holds another file", path=there, key=payload.key,
                    remedy="choose another folder, or move what is there away; --overwrite replaces files, not folders"
                    if os.path.isdir(there) else "choose another folder, or give --overwrite to replace it",
                )  # fmt: skip
            shared = None
            if state != "same":
                shared = extract_payload(shard, payload, self._tree, path, self._buffer(), self._reflink)
            self._tally.add(payload.size, shared)
        except ShardkitError as error:
            key = self._plan.dataset.columns.texts("key")[row]
            reason = _reason(error, payload)
            if reason is None or self._on_error == "fail":
                error.key = error.key or key
                raise
            self._tally.fail(row, Failure(key, reason, str(error)))
        return 0 if payload is None else payload.size

    def _payload(self, row: int) -> Payload:
        dataset = self._plan.dataset
        located = dataset.locate([row])
        return Payload(
            row=row, key=dataset.columns.texts("key")[row], shard=dataset.shard_paths[int(located.shard[0])],
            offset=int(located.offset[0]), size=int(located.size[0]), checksum=dataset.columns.numbers("crc32c")[row],
        )  # fmt: skip

    def _vouched(self, shard: int, payload: Payload) -> Payload:
        columns = self._plan.dataset.columns
        return vouch(
            shard, payload, self._buffer(), start=int(columns.numbers("sample_offset")[payload.row]),
            shard_bytes=self._plan.shard_bytes(payload.row), source=columns.texts("source")[payload.row],
        )  # fmt: skip

    def _buffer(self) -> memoryview:
        if not hasattr(self._buffers, "memory"):
            self._buffers.memory = memoryview(bytearray(BUFFER_BYTES))
        memory: memoryview = self._buffers.memory
        return memory

    def _sync_piece(self, rows: _Ints) -> None:
        if not self._stop.is_set():
            for row, name in zip(rows.tolist(), self._plan.names(rows), strict=True):
                if row not in self._tally.failed:
                    self._tree.sync_file(name.path)


def _reason(error: ShardkitError, payload: Payload | None) -> str | None:
    """Return why one sample is left out; None for what concerns the whole run."""
    if isinstance(error, Occupied):
        return "occupied"
    if isinstance(error, IntegrityError):
        return "damaged"
    if payload is not None and isinstance(error.path, str | bytes):
        return "read-error" if os.fsencode(error.path) == os.fsencode(payload.shard) else None
    return None


def _results(
    pool: ThreadPoolExecutor, work: Callable[[_Ints], _T], pieces: Iterable[_Ints], ahead: int
) -> Iterator[_T]:
    """Yield what the pieces give, as they end; so many are under way or waiting at a time.

    Raises:
        ShardkitError: of the first piece, in their order, at which there was one.
    """
    waiting = enumerate(pieces)
    running: dict[Future[_T], int] = {}
    failed = FirstError()
    while True:
        if failed.error is None:
            for number, piece in itertools.islice(waiting, ahead - len(running)):
                running[pool.submit(work, piece)] = number
        failed.raise_unless_open(running.values())
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            number = running.pop(future)
            try:
                yield future.result()
            except ShardkitError as error:
                failed.note(number, error)
