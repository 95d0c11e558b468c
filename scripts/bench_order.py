"""Times the seeded order: one batch of positions for data sets of growing size. One JSON line each.

python scripts/bench_order.py [--batch 1024] [--rounds 400]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from shardkit.dataset.order import MAX_SAMPLES, permute

SIZES = (2048, 2049, 10_000, 50_000, 1_281_167, 14_197_122, 1_000_000_000, MAX_SAMPLES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=400)
    options = parser.parse_args()
    for n in SIZES:
        took = []
        for number in range(options.rounds):
            positions = (np.arange(options.batch) + number * options.batch) % n
            began = time.perf_counter()
            permute(positions, n, seed=1, epoch=number)
            took.append((time.perf_counter() - began) * 1e6)
        ranked = sorted(took)
        row = {"samples": n, "batch": options.batch, "median_us": round(statistics.median(ranked), 1)}
        print(json.dumps(row | {"p95_us": round(ranked[len(ranked) * 95 // 100], 1)}), flush=True)


if __name__ == "__main__":
    main()
