"""What a job of the pool costs by itself: an empty one, from the call to the return.

python benches/pool.py [THREADS ...]

Without a pause between jobs the workers are still watching for the next one (spinning); after a pause longer
than tuning::kSpinUs they sleep, and the job pays for waking them. A decode step pauses for the glue between
two native calls, 5 to 50 us.
"""

from __future__ import annotations

import sys
from statistics import median, quantiles

from common import report
from isthmus import native
from isthmus.native import _native

PAUSES_US = [0, 5, 20, 50, 90, 200, 1000]
JOBS = 300
ROUNDS = 9


def main() -> None:
    counts = [int(word) for word in sys.argv[1:]] or [1, native.this_machine().default_threads]
    for threads in counts:
        native.set_threads(threads)
        rounds: dict[int, list[int]] = {pause: [] for pause in PAUSES_US}
        for _ in range(ROUNDS):  # alternating, since a shared machine drifts
            for pause, times in rounds.items():
                times += _native.pool_round_trips(JOBS, pause * 1000)
        for pause, times in rounds.items():
            cuts = quantiles(times, n=10)
            us = {"p10_us": cuts[0], "median_us": median(times), "p90_us": cuts[-1]}
            report(
                bench="pool",
                threads=threads,
                pause_us=pause,
                **{key: round(value / 1000, 2) for key, value in us.items()},
            )


if __name__ == "__main__":
    main()
