"""Make a tree of realistic photographs, DST/CLASS/CLASS_NUMBER.jpg, without a download.

The two photographs that scikit-learn ships are cut, stretched to the shapes that image collections have, tinted by
class and encoded anew. The same arguments make the same bytes, whatever -j is.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sklearn.datasets import load_sample_images

from shardkit.testing.awkward import awkward_files
from shardkit.testing.photos import photo_file, write

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def main() -> None:
    options = parse(sys.argv[1:])
    count, size = make_tree(options.dst, options.n, options.classes, options.seed, options.j, odd=options.odd)
    print(f"{count} files, {size / 1e6:.1f} MB, mean {size / max(1, count) / 1e3:.1f} kB, in {options.dst}")


def parse(arguments: list[str]) -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dst", type=Path, metavar="DST", help="folder to fill; made when missing")
    parser.add_argument("-n", type=int, default=400, help="photographs (default: %(default)s)")
    parser.add_argument("--classes", type=int, default=10, help="folders (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other pictures (default: %(default)s)")
    parser.add_argument("-j", type=int, default=cores, help="processes (default: the cores, %(default)s)")
    parser.add_argument("--odd", action="store_true", help="add one of each awkward file that real folders contain")
    options = parser.parse_args(arguments)
    if options.n < 0 or options.classes < 1 or options.j < 1:
        parser.error("-n must be 0 or more, --classes and -j must be 1 or more")
    return options


def make_tree(root: Path, count: int, classes: int, seed: int, jobs: int, *, odd: bool = False) -> tuple[int, int]:
    """Fill `root` and return how many files and bytes it got."""
    root.mkdir(parents=True, exist_ok=True)
    one = partial(write_photo, root, classes, seed)
    with multiprocessing.Pool(jobs) as pool:
        sizes = pool.map(one, range(count), chunksize=16)
    if odd:
        sizes += [write(root, file) for file in awkward_files(load_sample_images().images, seed=seed)]
    return len(sizes), sum(sizes)


_photographs: list[NDArray[np.uint8]] = []  # loaded once a process


def write_photo(root: Path, classes: int, seed: int, number: int) -> int:
    if not _photographs:
        _photographs.extend(load_sample_images().images)
    return write(root, photo_file(_photographs, number, classes=classes, seed=seed))


if __name__ == "__main__":
    main()
