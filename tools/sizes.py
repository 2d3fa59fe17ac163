"""Time a server's calls: batches of many sizes in random order, against each size by itself.

    python tools/sizes.py [--sizes 64] [--columns 256] [--seconds 5]

Prints medians over rounds, and the quartiles: the mean time of a call when sizes come in random
order; when the same calls come sorted, so that each is like the one before; and when each of them
goes through Python's checks, as calls do that are not known. One thread, float32 rows quantized on
the way, 8-bit weights. The orders take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

import lowbit

_CALLS = 2048  # in a round


def rounds(
    sizes: int, columns: int, seconds: float
) -> tuple[tuple[str, ...], Sequence[Sequence[float]]]:
    """The names of the orders, and for each round the seconds of a call in each order."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((columns, columns)).astype(np.float32)
    packed = lowbit.pack(lowbit.quantize(weight, "int8", axis=1))
    batches = [rng.standard_normal((m, columns)).astype(np.float32) for m in range(1, sizes + 1)]
    known = lowbit.linear_dynamic
    checked = known.__self__.__wrapped__  # type: ignore[attr-defined]

    def timed(call: Callable[..., object], order: Sequence[int]) -> float:
        rows = [batches[i] for i in order]
        begin = perf_counter()
        for x in rows:
            call(x, packed, threads=1)
        return (perf_counter() - begin) / len(rows)

    order = rng.integers(0, sizes, _CALLS)
    timed(known, order.tolist() * 4)  # until every size is known
    results = []
    end = perf_counter() + seconds
    while perf_counter() < end:
        order = rng.integers(0, sizes, _CALLS)
        ways = [(known, order), (known, np.sort(order)), (checked, order)]
        times = [0.0] * len(ways)
        for place in rng.permutation(len(ways)):
            call, numbers = ways[place]
            times[place] = timed(call, numbers.tolist())
        results.append(times)
    return ("random order", "sorted", "checked in Python"), results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, default=64, help="batches of 1 to so many rows")
    parser.add_argument("--columns", type=int, default=256, help="of the square weight")
    parser.add_argument("--seconds", type=float, default=5.0)
    given = parser.parse_args()
    names, results = rounds(given.sizes, given.columns, given.seconds)
    table = np.array(results)
    ratios = table / table[:, 1:2]
    for name, times, ratio in zip(names, table.T, ratios.T, strict=True):
        low, middle, high = np.percentile(ratio, (25, 50, 75))
        print(f"{name:18} {np.median(times) * 1e6:8.2f} µs, {middle:.2f} × sorted "
              f"({low:.2f} to {high:.2f})")  # fmt: skip


if __name__ == "__main__":
    main()
