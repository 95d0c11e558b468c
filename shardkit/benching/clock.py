"""Wall time, the process's CPU time, and what other programs took of the processors meanwhile."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

__all__ = ["SETTLED", "Clock", "Pace", "drop_pages", "read_all", "shards_of"]

SETTLED = 8
"""Batches of an epoch after which it runs as it goes on."""


class Clock:
    """Starts when it is made."""

    def __init__(self) -> None:
        """Start."""
        self._own, self._all, self._start = _own_seconds(), _busy_seconds(), time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._start

    def stop(self, images: int) -> dict[str, float]:
        """Return images, seconds, images a second, CPU microseconds an image, and the others' share of processors."""
        took, own = self.seconds, _own_seconds() - self._own
        # The kernel counts in ticks, so that a short run may see more than there is.
        others = min(max(_busy_seconds() - self._all - own, 0.0) / (took * (os.cpu_count() or 1)), 1.0)
        return {
            "images": images, "seconds": took, "images_s": images / took, "cpu_us": own / max(images, 1) * 1e6,
            "others": others,
        }  # fmt: skip


class Pace:
    """Images a second within epochs, from their 8th batch on: without what begins and ends an epoch.

    A benchmark's dataset is small, and its epochs are short: a tenth of them can be the first batch.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self._batches, self._images, self._seconds, self._last = 0, 0, 0.0, 0.0

    def begin(self) -> None:
        """Note that an epoch begins."""
        self._batches = 0

    def note(self, images: int) -> None:
        """Note that a batch is there."""
        now = time.perf_counter()
        self._batches += 1
        if self._batches > SETTLED:
            self._images, self._seconds = self._images + images, self._seconds + now - self._last
        self._last = now

    def figures(self) -> dict[str, float]:
        """Return the rate as "within_images_s"; nothing when no epoch was long enough."""
        return {"within_images_s": self._images / self._seconds} if self._seconds else {}


def _own_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _busy_seconds() -> float:
    """Return the CPU seconds of all processes of the machine; 0 where the system does not tell."""
    try:
        user, nice, system = map(int, Path("/proc/stat").read_text("ascii").split(None, 4)[1:4])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def shards_of(dataset: str) -> list[str]:
    """Return the paths of a dataset's shards, in order."""
    return sorted(entry.path for entry in os.scandir(dataset) if entry.name.endswith(".tar"))


def drop_pages(paths: list[str]) -> None:
    """Let the kernel forget what it holds of some files; what is mapped or in a file system in memory stays."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)  # pages that are not on the disk yet would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_all(paths: list[str]) -> None:
    """Bring files into the page cache."""
    buffer = bytearray(4 << 20)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
