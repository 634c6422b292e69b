"""What a job of the pool costs: the time it takes beyond that of its longest item.

python benches/pool.py [THREADS ...]

A job has one item of 50 us for every thread, so a perfect pool adds 0 us and one whose workers come too late
adds up to 50 us for each of them. Between two jobs the caller works alone for a while, as a decode step does
between two native calls (5 to 50 us): workers watch for the next job for tuning::kSpinUs, then sleep and have
to be woken.
"""

from __future__ import annotations

import sys
from statistics import median, quantiles

from common import report
from isthmus import native
from isthmus.native import _native

PAUSES_US = [0, 5, 20, 50, 90, 200, 1000]
ITEM_US = 50
JOBS = 100
ROUNDS = 9


def main() -> None:
    counts = [int(word) for word in sys.argv[1:]] or [1, native.this_machine().default_threads]
    for threads in counts:
        native.set_threads(threads)
        rounds: dict[int, list[int]] = {pause: [] for pause in PAUSES_US}
        for _ in range(ROUNDS):  # alternating, since a shared machine drifts
            for pause, times in rounds.items():
                times += _native.pool_round_trips(JOBS, ITEM_US * 1000, pause * 1000)
        for pause, times in rounds.items():
            cuts = quantiles(times, n=10)
            us = {"p10": cuts[0], "median": median(times), "p90": cuts[-1]}
            report(
                bench="pool",
                threads=threads,
                pause_us=pause,
                **{f"{key}_added_us": round(value / 1000 - ITEM_US, 2) for key, value in us.items()},
            )


if __name__ == "__main__":
    main()
