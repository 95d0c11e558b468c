"""Every error that shardkit raises, with the exit code of the command that meets it.

ShardkitError                     1    a bug, unless a class below says more
├── ConfigError (ValueError)      2    an argument, an option or a combination that cannot be served
├── SourceError                   3    a source was refused and the run was told to stop at the first
├── FormatError (ValueError)      4    bytes that are not what the format says
│   ├── TarFormatError
│   ├── IndexFormatError
│   ├── ManifestError
│   └── UnsupportedVersionError   7    written by a newer shardkit
├── IntegrityError                4    two records of the same thing disagree
├── TargetFullError (OSError)     5    no space, no inodes, a quota or a file size limit
├── StorageError (OSError)        6    the operating system failed a read or a write, or does not allow it
│   └── ShortReadError                 a file ended before the bytes that its index promises
├── WorkerError                   6    a worker died
├── CapabilityError               7    this machine or installation cannot do what was demanded
├── LockedError                   8    another run holds the target
└── UnsafeError                   9    refused as unsafe or over a limit
"""

from __future__ import annotations

import errno as _errno
import os
import traceback

from shardkit.escaping import escape

__all__ = [
    "FORBIDDEN",
    "CapabilityError",
    "ConfigError",
    "DeviceError",
    "FormatError",
    "IndexFormatError",
    "IntegrityError",
    "LockedError",
    "ManifestError",
    "ShardkitError",
    "ShortReadError",
    "SourceError",
    "StorageError",
    "TarFormatError",
    "TargetFullError",
    "UnsafeError",
    "UnsupportedVersionError",
    "WorkerError",
    "forget_frames",
    "from_os_error",
]

_MAX_SHOWN, _CUT = 4 * 4096, 200
_Name = str | bytes | os.PathLike[str] | os.PathLike[bytes]


class ShardkitError(Exception):
    """The root of the tree. Prints as one line: what, where, expected, found, kept, remedy."""

    exit_code = 1
    errno: int | None
    """The system's error number, where there is one."""

    def __init__(
        self,
        what: str,
        *,
        path: _Name | None = None,
        offset: int | None = None,
        key: str | None = None,
        expected: object = None,
        found: object = None,
        kept: str | None = None,
        remedy: str | None = None,
        errno: int | None = None,
    ) -> None:
        """State the fact and where it was met.

        Args:
            what: what happened, without a trailing period; already escaped where it quotes a name.
            path: the file or folder it happened to; escaped here.
            offset: byte offset in `path`.
            key: the sample's key; escaped here.
            expected: what the format or the record says.
            found: what was there instead.
            kept: what is still whole on disk.
            remedy: what to do now.
            errno: the system's error number, for the OSError branches.
        """
        super().__init__(what)
        self.what = what
        self.path = path
        self.offset = offset
        self.key = key
        self.expected = expected
        self.found = found
        self.kept = kept
        self.remedy = remedy
        self.errno = errno

    def __reduce__(self) -> tuple[object, ...]:
        """Cross a process border with every field: the default would keep only `what`."""
        return (_rebuild, (type(self), self.what, self.__dict__.copy(), self.errno))

    def __str__(self) -> str:
        """Return the one line that a command prints."""
        where = ""
        if self.path is not None:
            where = _shown(self.path) + ("" if self.offset is None else f":{self.offset}")
        if self.key is not None:
            where += f" [sample {_shown(self.key)}]"
        parts = [f"{self.what}: {where.strip()}" if where else self.what]
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        if self.found is not None:
            parts.append(f"found {self.found}")
        if self.kept is not None:
            parts.append(self.kept)
        if self.remedy is not None:
            parts.append(self.remedy)
        return "; ".join(parts)


def _shown(name: _Name) -> str:
    """Return a name escaped; one that no file can have, cut: a message is a line, and not a page."""
    text = escape(name)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_CUT]}... ({len(text)} characters)"


def _rebuild(cls: type[ShardkitError], what: str, state: dict[str, object], number: int | None) -> ShardkitError:
    error = cls(what, errno=number)
    error.__dict__.update(state)
    return error


class ConfigError(ShardkitError, ValueError):
    """An argument, an option or a combination that cannot be served."""

    exit_code = 2


class SourceError(ShardkitError):
    """A source was refused and the run was told to stop at the first."""

    exit_code = 3


class FormatError(ShardkitError, ValueError):
    """Bytes that are not what the format says."""

    exit_code = 4


class TarFormatError(FormatError):
    """A tar block that is not what the format says."""


class IndexFormatError(FormatError):
    """An index that cannot be decoded or that contradicts itself."""


class ManifestError(FormatError):
    """A manifest that cannot be decoded or that contradicts itself."""


class UnsupportedVersionError(FormatError):
    """Written by a newer shardkit."""

    exit_code = 7


class IntegrityError(ShardkitError):
    """Two records of the same thing disagree."""

    exit_code = 4


class TargetFullError(ShardkitError, OSError):
    """No space, no inodes, a quota or a file size limit."""

    exit_code = 5


class StorageError(ShardkitError, OSError):
    """The operating system failed a read or a write, or does not allow it."""

    exit_code = 6


class ShortReadError(StorageError):
    """A file ended before the bytes that its index promises."""


class WorkerError(ShardkitError):
    """A worker, a process or a thread, died."""

    exit_code = 6


class DeviceError(ShardkitError):
    """A GPU, or the library that drives it, failed an operation."""

    exit_code = 6


class CapabilityError(ShardkitError):
    """This machine or installation cannot do what was demanded."""

    exit_code = 7


class LockedError(ShardkitError):
    """Another run holds the target."""

    exit_code = 8


class UnsafeError(ShardkitError):
    """Refused as unsafe or over a limit."""

    exit_code = 9


_FULL = {_errno.ENOSPC, _errno.EDQUOT, _errno.EFBIG}
_NO_FILES = {_errno.EMFILE, _errno.ENFILE}
FORBIDDEN = frozenset({_errno.EROFS, _errno.EACCES, _errno.EPERM})
"""Numbers of what the system does not allow this user, or anybody."""


def from_os_error(
    error: OSError, what: str, *, path: _Name | None = None, offset: int | None = None, kept: str | None = None
) -> ShardkitError:
    """Map an OSError at the seam: a full target, or a failed operation, one that is not allowed among them.

    Args:
        error: what the system said.
        what: the operation that failed, e.g. "cannot write a shard".
        path: the file; taken from `error` when not given.
        offset: byte offset in `path`.
        kept: what is still whole on disk.
    """
    number = error.errno or 0
    name = _errno.errorcode.get(number, type(error).__name__)
    found = f"{name} ({error.strerror or error})"
    where = path if path is not None else error.filename
    if number in _FULL:
        room = "free space (or raise the quota or the file size limit) and run again with --resume"
        return TargetFullError(what, path=where, offset=offset, found=found, kept=kept, remedy=room, errno=number)
    remedy = "check the owner, the mode and the mount" if number in FORBIDDEN else None
    if number in _NO_FILES:
        remedy = "raise the number of files that may be open (ulimit -n), or let less be done at once"
    return StorageError(what, path=where, offset=offset, found=found, kept=kept, remedy=remedy, errno=number)


def forget_frames(error: BaseException | None) -> None:
    """Drop the local variables behind an error: someone may keep it, and they keep the memory that was worked on."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
