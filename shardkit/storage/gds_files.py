"""The open files of a `GdsReader`, as KvikIO and cuFile know them, beside the descriptors that tell what they are."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardkit.escaping import escape
from shardkit.storage.descriptors import Descriptor, DescriptorCache
from shardkit.storage.gds_batch import BatchRefusedError
from shardkit.storage.gds_facts import COMPAT, GDS, mode_of, mount_refusal
from shardkit.storage.probe import mount_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardkit.storage.gds_library import GdsFile, GdsLibrary

__all__ = ["DESCRIPTORS_A_FILE", "GdsFiles", "OpenFile"]

DESCRIPTORS_A_FILE = 4
"""One to know it by, two of KvikIO's, one of the batches'."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class OpenFile:
    """One open file."""

    file: GdsFile
    has_direct: bool
    """It could be opened with O_DIRECT."""
    mode: str
    """How it is read: one of `shardkit.storage.gds_facts`."""
    batch_handle: int | None = None
    """For the batches; 0 when they do not serve it, None before it was tried."""
    batch_descriptor: int = -1


class GdsFiles:
    """Opens files through KvikIO when they are first read, and closes them with their descriptors.

    Our own descriptor is opened first: it has the checks, the errors and the limit of `DescriptorCache`. KvikIO opens
    the file through it, by /proc/self/fd, so that both are the same file whatever becomes of its name.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], library: GdsLibrary, *, max_open: int) -> None:
        """Open nothing yet.

        Args:
            paths: the files, addressed by their index.
            library: what opens them.
            max_open: files; >= 1.

        Raises:
            ConfigError: `max_open` is below 1.
        """
        self.cache = DescriptorCache(paths, flags=0, max_open=max_open, closing=self._forget)
        """The descriptors."""
        self._library = library
        self._open: dict[int, OpenFile] = {}
        self._modes: dict[str, str] = {}
        self._refused: dict[int, str] = {}
        self._said: set[str] = set()
        self._lock = threading.Lock()
        self._process = os.getpid()

    @property
    def refused(self) -> int:
        """Files that are read through host memory since cuFile or KvikIO failed on them."""
        return len(self._refused)

    def is_refused(self, file: int) -> bool:
        """Return whether a file is one of them."""
        return file in self._refused

    def refuse(self, file: int, why: str) -> None:
        """Read a file through host memory from now on, and say so by logging if it is the first of its mount."""
        path = self.cache.paths[file]
        mount = mount_of(path)
        with self._lock:
            self._refused[file] = why
            first = mount.point not in self._said
            self._said.add(mount.point)
        if first:
            _log.warning(
                "%s cannot be read into the GPU's memory (%s); its file system is %s; host memory serves it now",
                escape(path), why, mount.file_system,
            )  # fmt: skip

    def of(self, file: int, entry: Descriptor) -> OpenFile:
        """Return a file as KvikIO has it.

        Args:
            file: its index.
            entry: its descriptor, on loan: the result is good as long as that is.

        Raises:
            Exception: what KvikIO raised.
        """
        with self._lock:
            found = self._open.get(entry.number)
            if found is None:
                opened = self._library.open(f"/proc/self/fd/{entry.number}")
                mode = self._mode_of(self.cache.paths[file])
                found = self._open[entry.number] = OpenFile(opened, opened.is_direct_io_supported(), mode)
            return found

    def batch_handle(self, entry: Descriptor, opened: OpenFile) -> int:
        """Return the handle of a file for the batches; 0 when they do not serve it."""
        batches = self._library.batches
        with self._lock:
            if opened.batch_handle is None and batches is not None:
                opened.batch_handle = 0
                try:
                    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT
                    opened.batch_descriptor = os.open(f"/proc/self/fd/{entry.number}", flags)
                    opened.batch_handle = batches.register(opened.batch_descriptor)
                except (OSError, BatchRefusedError) as error:
                    _log.debug("a file is not for batches: %s", error)
            return opened.batch_handle or 0

    def close(self) -> None:
        """Close every file; none may be read."""
        self.cache.forget_threads()
        self.cache.close()

    def leave_to_parent(self) -> None:
        """Touch nothing of cuFile's in a child process after a fork, not even when objects end."""
        self._lock = threading.Lock()
        for opened in self._open.values():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(opened.file))  # its destructor would call cuFile
            if opened.batch_descriptor >= 0:
                os.close(opened.batch_descriptor)
        self._open = {}

    def _mode_of(self, path: str) -> str:
        """Return how the files of a folder are read."""
        folder, facts = os.path.dirname(path), self._library.facts
        if folder not in self._modes:
            mode = mode_of(facts)
            if facts is not None and mode == GDS:
                module = facts.nvidia_fs != (0, 0)
                refusal = mount_refusal(
                    mount_of(path), p2pdma_only=not module, status=facts.status if module else None
                )  # fmt: skip
                mode = mode if refusal is None else COMPAT
            self._modes[folder] = mode
        return self._modes[folder]

    def _forget(self, descriptor: int) -> None:
        """Close what belongs to a descriptor, which is closed next."""
        with self._lock:
            opened = self._open.pop(descriptor, None)
        if opened is None or self._process != os.getpid():
            return
        opened.file.close()
        batches = self._library.batches
        if opened.batch_handle and batches is not None:
            batches.forget(opened.batch_handle)
        if opened.batch_descriptor >= 0:
            os.close(opened.batch_descriptor)
