"""Open files of a reader: opened when first read, shared by its threads, and never more of them than allowed."""

from __future__ import annotations

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
    from collections.abc import Sequence

__all__ = ["Descriptor", "DescriptorCache", "default_max_open", "short_read"]

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


class DescriptorCache:
    """Descriptors for a fixed list of paths: the least recently used idle one is closed when the limit is met.

    A descriptor that a thread reads from is never closed under it. A file keeps the size that it had when it was
    first opened: when it has another one at a later opening, it is another file, and that is an error.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], *, flags: int, max_open: int) -> None:
        """Open nothing yet.

        Args:
            paths: the files, addressed by their index.
            flags: for open(2), beside O_RDONLY and O_CLOEXEC.
            max_open: descriptors; >= 1.

        Raises:
            ConfigError: `max_open` is below 1.
        """
        if max_open < 1:
            raise ConfigError("a reader needs at least one descriptor", found=max_open)
        self._paths = [os.fspath(path) for path in paths]
        self._flags = os.O_RDONLY | os.O_CLOEXEC | flags
        self._max_open = max_open
        self._open: OrderedDict[int, Descriptor] = OrderedDict()
        self._sizes: dict[int, int] = {}
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
            StorageError: the file cannot be opened, is no regular file, or is not the one that was opened before.
            CapabilityError: the system forbids it.
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

    def give_back(self, entry: Descriptor) -> None:
        """End a loan."""
        with self._lock:
            entry.users -= 1
            if entry.users == 0:
                if entry.stale:
                    os.close(entry.number)
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
                os.close(entry.number)

    def close(self) -> None:
        """Close every descriptor, those in use as soon as they are given back; idempotent."""
        for file in list(self._open):
            self.discard(file)

    def forget_threads(self) -> None:
        """Be usable in a child process after a fork, where the threads that held the lock do not exist."""
        self._lock = threading.Lock()
        self._given_back = threading.Condition(self._lock)
        for entry in self._open.values():
            entry.users = 0

    def _open_or_wait(self, file: int) -> Descriptor | None:
        """Open a file, or wait for a descriptor in use and return None: meanwhile another thread may have opened it."""
        while len(self._open) >= self._max_open and self._evict():
            pass
        if len(self._open) >= self._max_open:
            self._given_back.wait()
            return None
        path = self._paths[file]
        try:
            mode = os.stat(path).st_mode  # before open, because opening a named pipe waits for a writer
            descriptor = os.open(path, self._flags) if stat.S_ISREG(mode) else -1
        except OSError as error:
            if error.errno not in _FULL:
                raise from_os_error(error, "cannot open a file", path=path) from error
            self._meet_limit(path, error)
            return None
        if descriptor < 0:
            raise StorageError("cannot read what is not a regular file", path=path, found=f"mode {mode:o}")
        entry = Descriptor(descriptor)
        try:
            self._require_same(file, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._open[file] = entry
        return entry

    def _meet_limit(self, path: str, error: OSError) -> None:
        """Make room after the system refused one more descriptor, or raise when this reader has none to give."""
        if self._evict():
            self._max_open = max(1, len(self._open) + 1)  # ask for no more than was granted
            return
        if self._open:
            self._given_back.wait()
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

    def _evict(self) -> bool:
        """Close the idle descriptor that was used longest ago; return whether there was one."""
        for file, entry in self._open.items():
            if not entry.users:
                del self._open[file]
                os.close(entry.number)
                return True
        return False

    def _require_same(self, file: int, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        first = self._sizes.setdefault(file, size)
        if size != first:
            raise StorageError(
                "a file was replaced or cut while it was being read",
                path=self._paths[file],
                expected=f"{first} bytes, as when it was first opened",
                found=f"{size} bytes",
                remedy="open the data set again",
            )


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
