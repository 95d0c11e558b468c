"""Plan a shuffle over a synthetic dataset of N samples, as `shardkit convert` does before it reads the first image.

    python scripts/bench_convert.py FOLDER [-n 20000000] [--where CONDITION]

FOLDER gets the dataset, once, as `bench_open.py` makes it: an index of 130 bytes a sample and sparse shards; and, while
the plan is made, the files of its numbers. Printed are seconds, and by how much the process's own memory grew at its
peak beyond what it had before: without the pages of the index and of those files, which the kernel takes back.
"""

from __future__ import annotations

import argparse
import os
import threading
from pathlib import Path

from bench_open import make_dataset, resident
from turns import Clock, describe_machine

from shardkit.converting.gather import gather
from shardkit.converting.inputs import checked_inputs
from shardkit.converting.run import make_options
from shardkit.converting.selection import select
from shardkit.converting.supply import plan_part
from shardkit.format.dataset_record import MANIFEST

ROWS = 10_000


class Watch:
    """The most anonymous memory that this process has while it runs."""

    def __init__(self) -> None:
        self.before = self.peak = resident("RssAnon")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self.peak = max(self.peak, resident("RssAnon"))

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        return self.peak - self.before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-n", type=int, default=20_000_000, help="samples, a multiple of 10,000")
    parser.add_argument("--where")
    options = parser.parse_args()
    folder = options.folder / str(options.n)
    if not (folder / MANIFEST).exists():
        make_dataset(folder, options.n // ROWS, ROWS)
    print(describe_machine(("shardkit", "numpy", "pyarrow")))
    chosen = make_options(options.folder / "out", {"shuffle": True, "seed": 7, "where": options.where})
    watch, clock = Watch(), Clock()
    inputs = checked_inputs([str(folder)], str(options.folder / "out"))
    samples = gather(inputs, chosen, os.fsencode(options.folder / "inputs.arrow"))
    plan = plan_part(samples, select(samples, chosen), None, chosen)
    seconds, grown = clock.seconds(), watch.stop()
    print(f"{len(plan.order):,} of {len(samples):,} samples into {plan.shards:,} shards: {seconds:.1f} s, ",
          f"{grown / 1e6:.0f} MB, {grown / len(samples):.1f} bytes a sample", sep="")  # fmt: skip


if __name__ == "__main__":
    main()
