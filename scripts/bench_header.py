"""Print what it costs to read a JPEG's markers: median microseconds an image, with the machine and the versions.

    python scripts/bench_header.py

The images are one photograph, encoded to about 100 kB each. For scale stands beside them Pillow's `Image.open`, which
stops at the first scan.
"""

from __future__ import annotations

import io
import platform
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import PIL
from PIL import Image
from sklearn.datasets import load_sample_image

from shardkit.format.jpeg import inspect_jpeg

if TYPE_CHECKING:
    from collections.abc import Callable

_WANTED_BYTES = 100_000
_BATCHES = 200
_CALLS = 50


def _encode(photograph: Image.Image, **options: int | bool) -> bytes:
    """Return the photograph at the lowest quality that reaches the wanted size."""
    for quality in range(40, 101):
        file = io.BytesIO()
        photograph.save(file, "JPEG", quality=quality, **options)
        if file.tell() >= _WANTED_BYTES:
            break
    return file.getvalue()


def _median_us(call: Callable[[], object]) -> float:
    """Return the median over batches of calls, in microseconds a call."""
    costs = []
    for _ in range(_BATCHES):
        began = time.perf_counter_ns()
        for _ in range(_CALLS):
            call()
        costs.append((time.perf_counter_ns() - began) / _CALLS / 1000)
    return statistics.median(costs)


def _processor() -> str:
    """Return the processor's model name where the kernel tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def main() -> None:
    """Measure and print one line an image."""
    photograph = Image.fromarray(load_sample_image("china.jpg"))
    images = {
        "baseline": _encode(photograph),
        "baseline, restart interval of one row": _encode(photograph, restart_marker_rows=1),
        "progressive": _encode(photograph, progressive=True),
    }
    print(f"{_processor()}; Python {platform.python_version()}, numpy {np.__version__}, Pillow {PIL.__version__}")
    for name, data in images.items():
        region = memoryview(bytes(4096) + data + bytes(4096))
        ours = _median_us(lambda: inspect_jpeg(region, 4096, len(region) - 4096))  # noqa: B023  called before the next
        pillow = _median_us(lambda: Image.open(io.BytesIO(data)))  # noqa: B023
        scans = inspect_jpeg(data).scans
        print(f"{name:38}{len(data):8} bytes{scans:4} scans  inspect_jpeg {ours:6.1f} us  open {pillow:6.1f} us")


if __name__ == "__main__":
    main()
