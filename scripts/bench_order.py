"""Times the seeded orders: one batch of positions for data sets of growing size. One JSON line each.

python scripts/bench_order.py [--batch 1024] [--rounds 400]

The window order has extents of 150 samples (of 90 kB: 13 MB) and windows of 64 extents. A batch of consecutive
positions takes from every lane, as it does on one rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from shardkit.dataset.order import MAX_SAMPLES, GlobalOrder, Order
from shardkit.dataset.window import WindowOrder

SIZES = (2048, 2049, 10_000, 50_000, 1_281_167, 14_197_122, 1_000_000_000, MAX_SAMPLES)
WINDOW_SIZES = (50_000, 1_281_167, MAX_SAMPLES)
LANES = (1, 8, 64)


def timed(order: Order, batch: int, rounds: int) -> dict[str, float]:
    took = []
    for number in range(rounds):
        positions = (np.arange(batch) + number * batch) % order.n
        began = time.perf_counter()
        order.at(number, positions)
        took.append((time.perf_counter() - began) * 1e6)
    took.sort()
    return {"median_us": round(statistics.median(took), 1), "p95_us": round(took[len(took) * 95 // 100], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=400)
    options = parser.parse_args()
    for n in SIZES:
        row: dict[str, object] = {"order": "global", "samples": n, "batch": options.batch}
        print(json.dumps(row | timed(GlobalOrder(n, 1), options.batch, options.rounds)), flush=True)
    for n in WINDOW_SIZES:
        for lanes in LANES:
            order = WindowOrder(n=n, seed=1, lanes=lanes, extent_samples=150, window_extents=64)
            row = {"order": "window", "samples": n, "lanes": lanes, "batch": options.batch}
            print(json.dumps(row | timed(order, options.batch, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
