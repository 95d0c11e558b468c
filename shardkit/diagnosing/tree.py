"""Small files of /proc, /sys and /etc below a root, where a missing one is no error."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Tree"]

_ENOUGH = 64 << 20
_CHUNK = 64 << 10
"""A sysctl refuses a longer read."""


class Tree:
    """The file system of a machine, or of a picture of one: every path is taken below `root`."""

    def __init__(self, root: Path) -> None:
        """Look below `root`; "/" is this machine."""
        self.root = root

    def raw(self, path: str) -> bytes:
        """Return a file's bytes; empty when it cannot be read."""
        found = bytearray()
        with contextlib.suppress(OSError, ValueError):
            descriptor = os.open(self.root / path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                while len(found) < _ENOUGH and (chunk := os.read(descriptor, _CHUNK)):
                    found += chunk
            finally:
                os.close(descriptor)
        return bytes(found)

    def read(self, path: str) -> str:
        """Return a file's text, the space around it removed; empty when it cannot be read."""
        return self.raw(path).decode("utf-8", "surrogateescape").strip("\0 \n\t")

    def number(self, path: str) -> int | None:
        """Return the number that a file holds; None when there is none."""
        try:
            return int(self.read(path))
        except ValueError:
            return None

    def names(self, path: str) -> tuple[str, ...]:
        """Return what a folder holds, sorted; nothing when it cannot be listed."""
        try:
            return tuple(sorted(os.listdir(self.root / path)))
        except OSError:
            return ()

    def exists(self, path: str) -> bool:
        """Return whether there is such a path, links followed."""
        try:
            return (self.root / path).exists()
        except OSError:
            return False

    def readable(self, path: str) -> bool:
        """Return whether this process may list a folder or read a file."""
        return os.access(self.root / path, os.R_OK)

    def resolve(self, path: str) -> str:
        """Return where a path leads, relative to the root; empty when it leads nowhere or out of the root."""
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            return (self.root / path).resolve(strict=True).relative_to(self.root.resolve()).as_posix()
        return ""

    def glob(self, pattern: str) -> tuple[str, ...]:
        """Return the paths that fit a pattern, relative to the root, sorted."""
        with contextlib.suppress(OSError):
            return tuple(sorted(found.relative_to(self.root).as_posix() for found in self.root.glob(pattern)))
        return ()
