#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Copies within host memory, as engines on GPUs and NPUs make them where the device does not reach
the memory itself: with the checksum, by one thread and by several, beside a memcpy of one thread.

    python benchmarks/copies.py
    python benchmarks/copies.py --mib 8 --threads 1 2 4

In turns, so that what else runs on the host concerns all of them alike. What a GPU does by itself
``tools/gpu_check.py`` measures.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from functools import partial

import numpy as np

from vllm_ascend_pd.backends.block_copy import Region, make_block_copier
from vllm_ascend_pd.backends.host_pass import HostPass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, nargs="+", default=[8, 64, 256], help="size of a copy")
    parser.add_argument("--page-bytes", type=int, default=65536)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    copier = make_block_copier()
    passes = {num: HostPass(copier, num) for num in options.threads}
    for mib in options.mib:
        num_bytes = mib << 20
        source = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
        target = np.zeros_like(source)
        regions = [Region(each.ctypes.data, num_bytes) for each in (source, target)]
        ways = {
            "memcpy": partial(ctypes.memmove, target.ctypes.data, source.ctypes.data, num_bytes),
            "checksum alone": partial(copier.checksum, regions[0], 0, num_bytes),
        }
        rows = (num_bytes // options.page_bytes, options.page_bytes)
        for num, each in passes.items():
            copy = partial(each.copy, (regions[0], 0), (regions[1], 0), *rows, 1)
            ways[f"copy and checksum, {num} thread{'s' * (num > 1)}"] = copy
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(options.rounds + 2):
            for name, work in ways.items():
                started = time.perf_counter()
                work()
                if number >= 2:  # the first rounds touch memory
                    times[name].append(time.perf_counter() - started)
        print(f"{mib} MiB, medians of {options.rounds} rounds, and the best ones")
        for name, values in times.items():
            ratio = statistics.median(
                theirs / ours for theirs, ours in zip(times["memcpy"], values, strict=True)
            )
            speed = num_bytes / statistics.median(values) / 1e9
            best = min(times["memcpy"]) / min(values)
            print(
                f"  {name:30} {speed:6.2f} GB/s  {ratio:5.2f} of memcpy"
                f"   {num_bytes / min(values) / 1e9:6.2f} GB/s  {best:5.2f}"
            )
    for each in passes.values():
        each.close()


if __name__ == "__main__":
    main()
