"""Open files of a reader: opened when first read, shared by its threads, and never more of them than allowed."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.errors import ConfigError, ShortReadError, StorageError, from_os_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Descriptor", "DescriptorCache", "Loan", "default_max_open", "short_read"]

_Identity = tuple[int, int, int]
"""Device, inode, and time of the last change in nanoseconds."""

_FULL = {errno.EMFILE, errno.ENFILE}


def default_max_open() -> int:
    """Return half of this process's descriptor limit, between 16 and 4096: the other half is the program's."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if soft == resource.RLIM_INFINITY else min(max(soft // 2, 16), 4096)


@dataclass(slots=True)
class Descriptor:
    """An open file, and how many threads read from it now."""

    number: int
    """What the system calls it."""
    users: int = 0
    """Borrowers; while there is one it is not closed."""
    stale: bool = False
    """The cache has let go of it: the last borrower closes it."""


class _BusyError(Exception):
    """Every descriptor is in use."""


class DescriptorCache:
    """Descriptors for a fixed list of paths: the least recently used idle one is closed when the limit is met.

    A descriptor that a thread reads from is never closed under it. A file must be the same at every opening: of the
    same size, and of the same inode or time of change. (Some network file systems give a file a new inode number when
    it was not in use for a while.)
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        flags: int,
        max_open: int,
        advice: int = os.POSIX_FADV_NORMAL,
        closing: Callable[[int], None] | None = None,
    ) -> None:
        """Open nothing yet.

        Args:
            paths: the files, addressed by their index.
            flags: for open(2), beside O_RDONLY and O_CLOEXEC.
            max_open: descriptors; >= 1.
            advice: for posix_fadvise(2) about the whole of each file.
            closing: called with a descriptor just before it is closed, while the cache waits: for who has made it
                known elsewhere. It must not call the cache.

        Raises:
            ConfigError: `max_open` is below 1.
        """
        if max_open < 1:
            raise ConfigError("a reader needs at least one descriptor", found=max_open)
        self._paths = [os.fspath(path) for path in paths]
        self._flags = os.O_RDONLY | os.O_CLOEXEC | flags
        self._max_open = max_open
        self._advice = advice
        self._closing = closing
        self._open: OrderedDict[int, Descriptor] = OrderedDict()
        self._sizes: dict[int, int] = {}
        self._identities: dict[int, _Identity] = {}
        self._waiting = 0
        self._lock = threading.Lock()
        self._given_back = threading.Condition(self._lock)
        _LIVE.add(self)

    @property
    def paths(self) -> Sequence[str]:
        """The files, addressed by their index."""
        return self._paths

    def __len__(self) -> int:
        """Return the number of descriptors that are open now."""
        return len(self._open)

    def borrow(self, file: int) -> Descriptor:
        """Return an open descriptor of a file, which stays open until it is given back.

        Raises:
            StorageError: the file cannot or may not be opened, is no regular file, or is not the one that was opened
                before.
        """
        with self._lock:
            while True:
                entry = self._open.get(file)
                if entry is None:
                    entry = self._open_or_wait(file)
                if entry is not None:
                    entry.users += 1
                    self._open.move_to_end(file)
                    return entry

    def try_borrow(self, file: int) -> Descriptor | None:
        """Do as `borrow`, but return None where that would wait for a descriptor that somebody uses.

        Raises:
            ShardkitError: as `borrow` does.
        """
        with self._lock, contextlib.suppress(_BusyError):
            while True:
                entry = self._open.get(file) or self._open_or_wait(file, patient=False)
                if entry is not None:
                    entry.users += 1
                    self._open.move_to_end(file)
                    return entry
        return None

    def give_back(self, entry: Descriptor) -> None:
        """End a loan."""
        with self._lock:
            entry.users -= 1
            if entry.users == 0:
                if entry.stale:
                    self._close(entry)
                if self._waiting:
                    self._given_back.notify_all()

    def size_at_open(self, file: int) -> int | None:
        """Return the bytes that the file had when it was first opened, or None before that."""
        return self._sizes.get(file)

    def discard(self, file: int) -> None:
        """Let the next use of this file open it anew; who reads from the old descriptor finishes first."""
        with self._lock:
            entry = self._open.pop(file, None)
            if entry is not None and entry.users:
                entry.stale = True
            elif entry is not None:
                self._close(entry)

    def close(self) -> None:
        """Close every descriptor, those in use as soon as they are given back; idempotent."""
        for file in list(self._open):
            self.discard(file)

    def forget_threads(self) -> None:
        """Be usable in a child process after a fork, where the threads that held the lock do not exist."""
        self._lock = threading.Lock()
        self._given_back = threading.Condition(self._lock)
        self._waiting = 0
        for entry in self._open.values():
            entry.users = 0

    def _open_or_wait(self, file: int, *, patient: bool = True) -> Descriptor | None:
        """Open a file, or wait for a descriptor in use and return None: meanwhile another thread may have opened it."""
        while len(self._open) >= self._max_open and self._evict():
            pass
        if len(self._open) >= self._max_open:
            self._wait(patient)
            return None
        path = self._paths[file]
        try:
            mode = os.stat(path).st_mode  # before open, because opening a named pipe waits for a writer
            descriptor = os.open(path, self._flags) if stat.S_ISREG(mode) else -1
        except OSError as error:
            if error.errno not in _FULL:
                raise from_os_error(error, "cannot open a file", path=path) from error
            self._meet_limit(path, error, patient)
            return None
        if descriptor < 0:
            raise StorageError("cannot read what is not a regular file", path=path, found=f"mode {mode:o}")
        entry = Descriptor(descriptor)
        try:
            self._require_same(file, descriptor)
            if self._advice != os.POSIX_FADV_NORMAL:
                with contextlib.suppress(OSError):  # a hint, which not every file system takes
                    os.posix_fadvise(descriptor, 0, 0, self._advice)
        except BaseException:
            os.close(descriptor)
            raise
        self._open[file] = entry
        return entry

    def _meet_limit(self, path: str, error: OSError, patient: bool) -> None:
        """Make room after the system refused one more descriptor, or raise when this reader has none to give."""
        if self._evict():
            self._max_open = max(1, len(self._open) + 1)  # ask for no more than was granted
            return
        if self._open:
            self._wait(patient)
            return
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        scope = "this process (ulimit -n)" if error.errno == errno.EMFILE else "the system (fs.file-max)"
        raise StorageError(
            "no descriptor is left to open a file",
            path=path,
            expected="room for at least 1 file, better one for each shard that a batch touches",
            found=f"the limit of {scope} is met; this process may have {soft}, this reader holds none",
            remedy="raise it, e.g. ulimit -n 65536, or close other files",
            errno=error.errno,
        ) from error

    def _wait(self, patient: bool) -> None:
        if not patient:
            raise _BusyError
        self._waiting += 1
        try:
            self._given_back.wait()
        finally:
            self._waiting -= 1

    def _close(self, entry: Descriptor) -> None:
        if self._closing is not None:
            self._closing(entry.number)
        with contextlib.suppress(OSError):  # of a file that was only read, it tells nothing about what was read
            os.close(entry.number)

    def _evict(self) -> bool:
        """Close the idle descriptor that was used longest ago; return whether there was one."""
        for file, entry in self._open.items():
            if not entry.users:
                del self._open[file]
                self._close(entry)
                return True
        return False

    def _require_same(self, file: int, descriptor: int) -> None:
        status = os.fstat(descriptor)
        size, identity = status.st_size, (status.st_dev, status.st_ino, status.st_mtime_ns)
        first, before = self._sizes.setdefault(file, size), self._identities.setdefault(file, identity)
        if size == first and (identity[:2] == before[:2] or identity[2] == before[2]):
            return
        raise StorageError(
            "a file was replaced or cut while it was being read",
            path=self._paths[file],
            expected=f"{first} bytes, inode {before[1]}, as when it was first opened",
            found=f"{size} bytes, inode {identity[1]}",
            remedy="open the data set again",
        )


class Loan:
    """The descriptor that one thread holds: of the file that it read last, because ops mostly come file by file."""

    __slots__ = ("_cache", "_entry", "_file")

    def __init__(self, cache: DescriptorCache) -> None:
        """Borrow nothing yet."""
        self._cache = cache
        self._entry: Descriptor | None = None
        self._file = -1

    def number(self, file: int) -> int:
        """Return an open descriptor of a file, good until the next call of a method.

        Raises:
            ShardkitError: as `DescriptorCache.borrow` does.
        """
        entry = self._entry
        if entry is None or file != self._file:
            self.give_back()  # first: whoever waits for a descriptor while holding one could wait for ever
            entry = self._entry = self._cache.borrow(file)
            self._file = file
        return entry.number

    def reopen(self, file: int) -> int:
        """Open a file anew by its name, for every thread that borrows it from now on.

        Raises:
            ShardkitError: as `DescriptorCache.borrow` does.
        """
        self.give_back()
        self._cache.discard(file)
        return self.number(file)

    def give_back(self) -> None:
        """End the loan, if there is one."""
        entry, self._entry = self._entry, None
        if entry is not None:
            self._cache.give_back(entry)


def short_read(cache: DescriptorCache, file: int, descriptor: int, offset: int, need: int, got: int) -> ShortReadError:
    """Return the error for a file that ended early, with what became of the file since it was opened.

    Args:
        cache: where the file was opened.
        file: index of the file.
        descriptor: the one that was read from.
        offset: first byte of the span.
        need: bytes that had to arrive.
        got: bytes that arrived.
    """
    path, size, first = cache.paths[file], os.fstat(descriptor).st_size, cache.size_at_open(file)
    found = f"{got} bytes; the file has {size}"
    if size != first:
        found += f", it had {first} when it was opened"
    try:
        current = os.stat(path)
        replaced = not os.path.samestat(current, os.fstat(descriptor))
        if replaced:
            found += f"; another file of {current.st_size} bytes has its name now"
    except OSError as error:
        found += f"; its name is gone ({errno.errorcode.get(error.errno or 0, 'unknown error')})"
    return ShortReadError(
        "a file ended early",
        path=path,
        offset=offset,
        expected=f"{need} bytes",
        found=found,
        remedy="run shardkit verify",
    )


_LIVE: weakref.WeakSet[DescriptorCache] = weakref.WeakSet()


def _forget_threads() -> None:
    for cache in list(_LIVE):
        cache.forget_threads()


os.register_at_fork(after_in_child=_forget_threads)
